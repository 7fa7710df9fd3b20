/*
 * PyObject -> fg_tensor, by the cheapest way that its type offers: our own DeviceArray, the DLPack C exchange API
 * (torch: tens of nanoseconds and no Python call), NumPy's C API, and __dlpack__ for everyone else.
 */
#include "tensor.h"

#include <stdio.h>
#include <string.h>

#include "args.h"
#include "device_array.h"
#include "error.h"
#include "numpy.h"
#include "stream.h"
#include "torch.h"

/* ---- names ---- */

static const DLDataType dl_dtypes[FG_DTYPE_COUNT] = {
    [FG_FLOAT32] = {kDLFloat, 32, 1},
    [FG_FLOAT16] = {kDLFloat, 16, 1},
    [FG_BFLOAT16] = {kDLBfloat, 16, 1},
    [FG_FLOAT8_E4M3FN] = {kDLFloat8_e4m3fn, 8, 1},
    [FG_FLOAT8_E5M2] = {kDLFloat8_e5m2, 8, 1},
    [FG_INT32] = {kDLInt, 32, 1},
    [FG_INT64] = {kDLInt, 64, 1},
    [FG_UINT8] = {kDLUInt, 8, 1},
};

DLDataType fg_dl_dtype(fg_dtype dtype) { return dl_dtypes[dtype]; }

static fg_dtype find_dtype(DLDataType exported) {
    int i = 0;
    while (i < FG_DTYPE_COUNT && (dl_dtypes[i].code != exported.code || dl_dtypes[i].bits != exported.bits)) i++;
    return exported.lanes == 1 ? (fg_dtype)i : FG_DTYPE_COUNT;
}

void fg_view_dtype_name(const fg_view *view, char *name, size_t size) {
    static const char *const kinds[] = {
        "int",
        "uint",
        "float",
        "opaque",
        "bfloat",
        "complex",
        "bool",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    };
    const DLDataType dtype = view->dtype;
    if (view->tensor.dtype != FG_DTYPE_COUNT) {
        snprintf(name, size, "%s", fg_dtype_name(view->tensor.dtype));
    } else if (dtype.lanes != 1 || dtype.code >= sizeof kinds / sizeof kinds[0]) {
        snprintf(name, size, "DLPack dtype (code %d, %d bits, %d lanes)", dtype.code, dtype.bits, dtype.lanes);
    } else if (dtype.code >= kDLBool) { /* names that hold their size */
        snprintf(name, size, "%s", kinds[dtype.code]);
    } else {
        snprintf(name, size, "%s%d", kinds[dtype.code], dtype.bits);
    }
}

void fg_device_name(fg_device_type type, int32_t index, char *name, size_t size) {
    if (type == FG_CUDA) {
        snprintf(name, size, "cuda:%d", (int)index);
    } else {
        snprintf(name, size, "cpu");
    }
}

/* ---- what an exporter says ---- */

/* Pinned host memory is the CPU's, managed memory is CUDA's. */
static int set_device(fg_view *view, DLDevice device) {
    const bool host = device.device_type == kDLCPU || device.device_type == kDLCUDAHost;
    if (!host && device.device_type != kDLCUDA && device.device_type != kDLCUDAManaged) {
        PyErr_Format(PyExc_ValueError, "%s: expected CPU or CUDA memory, got DLPack device type %d", view->name,
                     (int)device.device_type);
        return -1;
    }
    view->tensor.device_type = host ? FG_CPU : FG_CUDA;
    view->tensor.device_index = host ? 0 : device.device_id;
    return 0;
}

/* Strides as if contiguous where they carry no information: given as NULL, or of a dimension of size 1. */
static void set_strides(fg_tensor *tensor, const int64_t *strides, bool empty) {
    int64_t contiguous = 1;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        tensor->strides[i] = strides && tensor->shape[i] != 1 && !empty ? strides[i] : contiguous;
        /* Unsigned: strides of a broken exporter may overflow here; set_range refuses them right after. */
        contiguous = (int64_t)((uint64_t)tensor->strides[i] * (uint64_t)(tensor->shape[i] ? tensor->shape[i] : 1));
    }
}

/* The address range [low, high) of elements at data. Returns false when it does not fit into 63 bits. */
static bool set_range(fg_view *view, int64_t itemsize) {
    const fg_tensor *tensor = &view->tensor;
    int64_t below = 0, above = itemsize;
    for (int i = 0; i < tensor->ndim; i++) {
        int64_t reach;
        if (__builtin_mul_overflow(tensor->shape[i] - 1, tensor->strides[i], &reach)) return false;
        if (__builtin_mul_overflow(reach, itemsize, &reach)) return false;
        int64_t *end = reach < 0 ? &below : &above;
        if (__builtin_add_overflow(*end, reach, end)) return false;
    }
    view->low = (uintptr_t)tensor->data + (uintptr_t)below;
    view->high = (uintptr_t)tensor->data + (uintptr_t)above;
    return true;
}

int fg_view_set(fg_view *view, const DLTensor *exported) {
    fg_tensor *tensor = &view->tensor;
    if (set_device(view, exported->device) < 0) return -1;
    if (exported->ndim < 0 || exported->ndim > FG_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "%s: expected at most %d dimensions, got %d", view->name, (int)FG_MAX_NDIM,
                     (int)exported->ndim);
        return -1;
    }
    if (exported->ndim > 0 && !exported->shape) {
        PyErr_Format(PyExc_BufferError, "%s: the exporter gave %d dimensions and no shape", view->name,
                     (int)exported->ndim);
        return -1;
    }
    tensor->present = true;
    tensor->ndim = exported->ndim;
    tensor->dtype = find_dtype(exported->dtype);
    view->dtype = exported->dtype;

    const int64_t itemsize = (exported->dtype.bits + 7) / 8 * (int64_t)exported->dtype.lanes;
    int64_t bytes = itemsize;
    bool valid = true, empty = false;
    for (int i = 0; i < tensor->ndim; i++) {
        tensor->shape[i] = exported->shape[i];
        valid = valid && tensor->shape[i] >= 0;
        empty = empty || tensor->shape[i] == 0;
    }
    for (int i = 0; i < tensor->ndim && valid && !empty; i++) {
        valid = !__builtin_mul_overflow(bytes, tensor->shape[i], &bytes);
    }
    if (valid) set_strides(tensor, exported->strides, empty);
    tensor->data = empty || !exported->data ? NULL : (char *)exported->data + exported->byte_offset;
    view->low = view->high = 0;
    if (!valid || (!empty && !set_range(view, itemsize))) {
        fg_text shape = {.length = 0};
        fg_text_add_tuple(&shape, tensor->shape, tensor->ndim);
        PyErr_Format(PyExc_BufferError, "%s: the exporter gave an impossible shape or strides: %s", view->name,
                     shape.data);
        return -1;
    }
    if (!empty && !tensor->data) {
        PyErr_Format(PyExc_BufferError, "%s: the exporter gave a NULL pointer for elements that exist", view->name);
        return -1;
    }
    if (tensor->dtype != FG_DTYPE_COUNT && (uintptr_t)tensor->data % fg_dtype_size(tensor->dtype) != 0) {
        PyErr_Format(PyExc_ValueError, "%s: expected memory aligned to its elements, of %zu bytes each", view->name,
                     fg_dtype_size(tensor->dtype));
        return -1;
    }
    return 0;
}

/* ---- which way ---- */

/* The newest table of our major version, or NULL when the type offers none; *failed tells an exception apart. */
static const DLPackExchangeAPI *find_exchange_api(PyTypeObject *type, bool *failed) {
    PyObject *capsule = PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");
    if (!capsule) {
        *failed = !PyErr_ExceptionMatches(PyExc_AttributeError);
        if (!*failed) PyErr_Clear();
        return NULL;
    }
    const DLPackExchangeAPIHeader *header = NULL;
    if (PyCapsule_IsValid(capsule, "dlpack_exchange_api")) {
        header = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    }
    while (header && header->version.major != DL_MAJOR) header = header->prev_api;
    Py_DECREF(capsule);
    return (const DLPackExchangeAPI *)header;
}

static int is_cupy_type(PyTypeObject *type) {
    PyObject *module = PyObject_GetAttrString((PyObject *)type, "__module__");
    if (!module) return -1;
    Py_ssize_t size;
    const char *name = PyUnicode_Check(module) ? PyUnicode_AsUTF8AndSize(module, &size) : "";
    const int result = name ? strcmp(name, "cupy") == 0 || strncmp(name, "cupy.", 5) == 0 : -1;
    Py_DECREF(module);
    return result;
}

/* Looks a type up in the table, or asks it and puts it there. */
static int classify(fg_state *state, PyTypeObject *type, fg_type_entry *found) {
    for (int i = 0; i < FG_TYPE_CACHE_SIZE; i++) {
        if (state->types[i].type == type) {
            *found = state->types[i];
            return 0;
        }
    }
    bool failed = false;
    *found = (fg_type_entry){.type = type, .api = find_exchange_api(type, &failed)};
    if (failed) return -1;
    if (found->api) {
        found->source = FG_SOURCE_EXCHANGE;
        const int torch = fg_torch_is_tensor_type(&state->torch, type);
        if (torch < 0) return -1;
        found->torch = torch;
    } else if (fg_numpy_is_array_type(type)) {
        found->source = FG_SOURCE_NUMPY;
    } else {
        const int cupy = is_cupy_type(type);
        if (cupy < 0) return -1;
        found->source = cupy ? FG_SOURCE_CUPY : FG_SOURCE_DLPACK;
    }
    fg_type_entry *entry = &state->types[state->next_type++ % FG_TYPE_CACHE_SIZE];
    PyTypeObject *previous = entry->type;
    *entry = *found;
    Py_INCREF((PyObject *)type);
    Py_XDECREF((PyObject *)previous);
    return 0;
}

int fg_is_torch(fg_state *state, PyObject *object) {
    fg_type_entry type;
    return classify(state, Py_TYPE(object), &type) < 0 ? -1 : type.torch;
}

/* ---- managed tensors ---- */

void fg_managed_release(fg_managed *managed) {
    if (!managed->pointer) return;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback); /* a deleter may run Python code, which needs a clean slate */
    if (managed->versioned) {
        DLManagedTensorVersioned *tensor = managed->pointer;
        tensor->deleter(tensor);
    } else {
        DLManagedTensor *tensor = managed->pointer;
        tensor->deleter(tensor);
    }
    managed->pointer = NULL;
    PyErr_Restore(type, value, traceback);
}

static int set_versioned(fg_view *view, DLManagedTensorVersioned *managed) {
    if (managed->deleter) view->managed = (fg_managed){managed, true};
    if (managed->version.major != DL_MAJOR) {
        PyErr_Format(PyExc_BufferError, "%s: expected DLPack version %d, got %u.%u", view->name, (int)DL_MAJOR,
                     (unsigned)managed->version.major, (unsigned)managed->version.minor);
        return -1;
    }
    view->read_only = (managed->flags & DL_FLAG_READ_ONLY) != 0;
    view->copied = (managed->flags & DL_FLAG_IS_COPIED) != 0;
    return fg_view_set(view, &managed->dl_tensor);
}

/* Takes the tensor out of its capsule. The name "used_..." tells the capsule's destructor that it is ours now. */
static int set_capsule(fg_view *view, PyObject *capsule) {
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        DLManagedTensorVersioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        if (PyCapsule_SetName(capsule, "used_dltensor_versioned") < 0) return -1;
        return set_versioned(view, managed);
    }
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        DLManagedTensor *managed = PyCapsule_GetPointer(capsule, "dltensor");
        if (PyCapsule_SetName(capsule, "used_dltensor") < 0) return -1;
        if (managed->deleter) view->managed = (fg_managed){managed, false};
        return fg_view_set(view, &managed->dl_tensor);
    }
    PyErr_Format(PyExc_TypeError, "%s: expected __dlpack__ to return a fresh DLPack capsule, got %R", view->name,
                 capsule);
    return -1;
}

/* What a tensor of torch is that it does not export, of which it says so behind a stack of its functions; NULL if that
 * is not why. Asked while its exception is being raised. */
static const char *unexported(PyObject *object) {
    static const struct {
        const char *attribute, *text;
    } kinds[] = {{"is_meta", "a tensor with data, got one on the device meta"},
                 {"is_quantized", "a tensor of floats or ints, got a quantized one"}};
    const char *result = NULL;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    for (int i = 0; i < FG_LENGTH(kinds) && !result; i++) {
        PyObject *found = PyObject_GetAttrString(object, kinds[i].attribute);
        if (found == Py_True) result = kinds[i].text;
        if (!found) PyErr_Clear();
        Py_XDECREF(found);
    }
    PyErr_Restore(type, value, traceback);
    return result;
}

static int open_exchange(fg_view *view) {
    const DLPackExchangeAPI *api = view->api;
    int status;
    if (api->dltensor_from_py_object_no_sync) {
        DLTensor borrowed;
        status = api->dltensor_from_py_object_no_sync(view->object, &borrowed);
        if (status == 0) return fg_view_set(view, &borrowed);
    } else {
        DLManagedTensorVersioned *managed = NULL;
        status = api->managed_tensor_from_py_object_no_sync(view->object, &managed);
        if (status == 0) return set_versioned(view, managed);
    }
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_BufferError, "the DLPack exchange API failed without an exception");
    const char *expected = unexported(view->object);
    if (expected)
        PyErr_Format(PyExc_TypeError, "%s: expected %s", view->name, expected);
    else
        fg_note_argument(view->name);
    return -1;
}

bool fg_view_is_unmoved(const fg_view *view) {
    if (view->source == FG_SOURCE_NUMPY) return fg_numpy_is_unmoved(view);
    if (view->source != FG_SOURCE_EXCHANGE || view->managed.pointer) return true; /* owned */
    fg_view again = {.name = view->name, .object = view->object, .source = view->source, .api = view->api};
    const bool opened = open_exchange(&again) == 0;
    if (!opened) PyErr_Clear();
    fg_view_close(&again);
    return opened && again.tensor.data == view->tensor.data && again.low == view->low && again.high == view->high;
}

static void ignore_error(void *context, const char *kind, const char *message) {
    (void)context, (void)kind, (void)message;
}

bool fg_view_allocate(fg_view *view, const fg_view *like, const char *name, size_t bytes) {
    if (like->source != FG_SOURCE_EXCHANGE || !like->api->managed_tensor_allocator) return false;
    int64_t shape[] = {(int64_t)bytes}, strides[] = {1};
    const bool host = like->tensor.device_type == FG_CPU;
    DLTensor prototype = {
        .device = {host ? kDLCPU : kDLCUDA, like->tensor.device_index},
        .ndim = 1,
        .dtype = fg_dl_dtype(FG_UINT8),
        .shape = shape,
        .strides = strides,
    };
    DLManagedTensorVersioned *managed = NULL;
    *view = (fg_view){.name = name, .source = FG_SOURCE_EXCHANGE, .api = like->api, .output = true};
    const bool done = like->api->managed_tensor_allocator(&prototype, &managed, NULL, ignore_error) == 0 &&
                      set_versioned(view, managed) == 0;
    if (!done) {
        PyErr_Clear();
        fg_view_close(view);
        view->tensor.present = false;
    }
    return done;
}

/* ---- __dlpack__ ---- */

/* The device that the object says it is on; the CPU for one that does not say. */
static int open_dlpack(fg_view *view) {
    PyObject *exporter = PyObject_GetAttrString(view->object, "__dlpack__");
    if (!exporter) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            fg_note_argument(view->name);
            return -1;
        }
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "%s: expected an array (NumPy, or with __dlpack__), got %R", view->name,
                     (PyObject *)Py_TYPE(view->object));
        return -1;
    }
    Py_DECREF(exporter);

    DLDevice device = {kDLCPU, 0};
    PyObject *pair = PyObject_CallMethod(view->object, "__dlpack_device__", NULL);
    if (pair) {
        PyObject *type = PySequence_GetItem(pair, 0);
        PyObject *index = type ? PySequence_GetItem(pair, 1) : NULL;
        device.device_type = type && index ? (int32_t)PyLong_AsLong(type) : 0;
        device.device_id = type && index && !PyErr_Occurred() ? (int32_t)PyLong_AsLong(index) : 0;
        Py_XDECREF(type);
        Py_XDECREF(index);
        Py_DECREF(pair);
    } else if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
    }
    if (PyErr_Occurred()) {
        fg_note_argument(view->name);
        return -1;
    }
    return set_device(view, device);
}

/* x.__dlpack__(max_version=..., stream=...); either may be left out. */
static PyObject *call_dlpack(fg_view *view, bool with_version, void *stream) {
    PyObject *capsule = NULL;
    PyObject *exporter = PyObject_GetAttrString(view->object, "__dlpack__");
    PyObject *positional = PyTuple_New(0);
    PyObject *keywords = PyDict_New();
    PyObject *version = with_version ? Py_BuildValue("(ii)", (int)DL_MAJOR, (int)DL_MINOR) : NULL;
    PyObject *number = view->tensor.device_type == FG_CUDA ? fg_stream_to_producer(stream) : NULL;
    if (!exporter || !positional || !keywords || PyErr_Occurred()) goto done;
    if (version && PyDict_SetItemString(keywords, "max_version", version) < 0) goto done;
    if (number && PyDict_SetItemString(keywords, "stream", number) < 0) goto done;
    capsule = PyObject_Call(exporter, positional, keywords);
done:
    Py_XDECREF(exporter);
    Py_XDECREF(positional);
    Py_XDECREF(keywords);
    Py_XDECREF(version);
    Py_XDECREF(number);
    return capsule;
}

/* Whether the exception being raised is a TypeError about keywords: the producer is older than max_version. */
static bool keyword_is_unknown(void) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) return false;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *message = value ? PyObject_Str(value) : NULL;
    Py_ssize_t size;
    const char *text = message ? PyUnicode_AsUTF8AndSize(message, &size) : NULL;
    const bool result = text && (strstr(text, "max_version") || strstr(text, "keyword argument"));
    Py_XDECREF(message);
    PyErr_Restore(type, value, traceback); /* drops what PyObject_Str may have raised */
    return result;
}

int fg_view_import(fg_view *view, void *stream) {
    const fg_tensor announced = view->tensor;
    PyObject *capsule = call_dlpack(view, true, stream);
    if (!capsule && keyword_is_unknown()) {
        PyErr_Clear();
        capsule = call_dlpack(view, false, stream);
    }
    if (!capsule) {
        fg_note_argument(view->name);
        return -1;
    }
    const int status = set_capsule(view, capsule);
    Py_DECREF(capsule);
    if (status < 0) return -1;
    if (view->tensor.device_type != announced.device_type || view->tensor.device_index != announced.device_index) {
        char said[32], got[32];
        fg_device_name(announced.device_type, announced.device_index, said, sizeof said);
        fg_device_name(view->tensor.device_type, view->tensor.device_index, got, sizeof got);
        PyErr_Format(PyExc_BufferError, "%s: __dlpack_device__ said %s, but __dlpack__ gave memory on %s", view->name,
                     said, got);
        return -1;
    }
    return 0;
}

/* ---- views ---- */

int fg_view_open(fg_state *state, fg_view *view, PyObject *object, const char *name, bool output) {
    view->name = name;
    view->object = object;
    view->output = output;
    if (Py_TYPE(object) == state->device_array_type) {
        DLTensor described;
        view->source = FG_SOURCE_DEVICE_ARRAY;
        fg_device_array_describe(object, &described);
        return fg_view_set(view, &described);
    }
    fg_type_entry type;
    if (classify(state, Py_TYPE(object), &type) < 0) return -1;
    view->source = type.source;
    view->api = type.api;
    view->torch = type.torch;
    switch (view->source) {
        case FG_SOURCE_EXCHANGE:
            return open_exchange(view);
        case FG_SOURCE_NUMPY:
            return fg_numpy_open(state, view);
        default:
            return open_dlpack(view);
    }
}

void fg_view_close(fg_view *view) {
    fg_managed_release(&view->managed);
    Py_CLEAR(view->aligned_copy);
}
