/*
 * DeviceArray: CUDA memory that flexgemm owns, for NumPy data on the GPU and for outputs of libraries whose arrays are
 * immutable. A contiguous array either owns its memory or is a view of one that does.
 *
 * Allocation and release are stream-ordered, so an array remembers the last stream that used it. A new stream first
 * waits for the last one and then takes its place: whatever the history, freeing the memory on the last stream comes
 * after all work that used it. The object that keeps that stream alive is held along with it.
 */
#include "device_array.h"

#include <stdlib.h>

#include "args.h"
#include "error.h"
#include "numpy.h"

typedef struct fg_device_array {
    PyObject_HEAD void *data; /* NULL when there are no elements */
    int64_t shape[FG_MAX_NDIM];
    int64_t nbytes;
    int32_t ndim;
    fg_dtype dtype;
    struct fg_device_array *base; /* the owner of the memory; NULL: this array is */
    fg_queue last;                /* of an owner: the stream that used it last ... */
    PyObject *last_owner;         /* ... and what keeps that stream alive, or NULL */
    uint64_t uses;                /* of an owner: counts joins, also by the stream that it is on */
} fg_device_array;

static fg_device_array *owner_of(fg_device_array *self) { return self->base ? self->base : self; }

static PyObject *method_not_available(void) {
    PyErr_SetString(PyExc_NotImplementedError, "DeviceArray: this build of flexgemm has no CUDA backend");
    return NULL;
}

/* ---- life ---- */

/* An array object without memory. */
static fg_device_array *new_object(PyTypeObject *type, const int64_t *shape, int ndim, fg_dtype dtype) {
    int64_t nbytes = (int64_t)fg_dtype_size(dtype);
    bool fits = true, empty = false;
    for (int i = 0; i < ndim; i++) empty = empty || shape[i] == 0;
    for (int i = 0; i < ndim && !empty; i++) fits = fits && !__builtin_mul_overflow(nbytes, shape[i], &nbytes);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "shape: expected at most 2^63 - 1 bytes");
        return NULL;
    }
    fg_device_array *self = (fg_device_array *)PyType_GenericAlloc(type, 0); /* zeroed */
    if (!self) return NULL;
    for (int i = 0; i < ndim; i++) self->shape[i] = shape[i];
    self->nbytes = empty ? 0 : nbytes;
    self->ndim = ndim;
    self->dtype = dtype;
    return self;
}

/* An array with memory of its own. */
static fg_device_array *new_owner(PyTypeObject *type, const int64_t *shape, int ndim, fg_dtype dtype,
                                  const fg_stream *stream) {
    const fg_backend *backend = fg_backend_of(FG_CUDA);
    if (!backend || !backend->allocate) return (fg_device_array *)method_not_available();
    fg_device_array *self = new_object(type, shape, ndim, dtype);
    if (!self) return NULL;
    self->last = stream->queue;
    self->last_owner = Py_XNewRef(stream->owner);
    if (self->nbytes == 0) return self;
    fg_error error;
    PyThreadState *thread = PyEval_SaveThread();
    fg_status status = backend->allocate((size_t)self->nbytes, &self->last, &self->data, &error);
    PyEval_RestoreThread(thread);
    if (status != FG_OK) {
        self->data = NULL;
        Py_DECREF(self);
        return (fg_device_array *)fg_raise(&error);
    }
    return self;
}

static int traverse(PyObject *object, visitproc visit, void *arg) {
    fg_device_array *self = (fg_device_array *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->base);
    Py_VISIT(self->last_owner);
    return 0;
}

/* The memory goes first: its stream must still be alive. */
static void free_memory(fg_device_array *self) {
    if (self->base || !self->data) return;
    fg_error error;
    PyThreadState *thread = PyEval_SaveThread();
    fg_status status = fg_backend_of(FG_CUDA)->release(self->data, &self->last, &error);
    PyEval_RestoreThread(thread);
    self->data = NULL;
    if (status != FG_OK) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        fg_raise(&error);
        PyErr_WriteUnraisable(NULL);
        PyErr_Restore(type, value, traceback);
    }
}

/* No tp_clear: a cycle through a stream object is broken there, and an array without memory would be of no use. */
static void dealloc(PyObject *object) {
    fg_device_array *self = (fg_device_array *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    free_memory(self);
    Py_CLEAR(self->base);
    Py_CLEAR(self->last_owner);
    PyObject_GC_Del(object);
    Py_DECREF((PyObject *)type);
}

/* ---- streams ---- */

int fg_device_array_join(PyObject *array, const fg_stream *stream) {
    fg_device_array *owner = owner_of((fg_device_array *)array);
    while (owner->data && owner->last.stream != stream->queue.stream) {
        const fg_queue last = owner->last;
        const uint64_t uses = owner->uses;
        PyObject *last_owner = Py_XNewRef(owner->last_owner);
        fg_error error;
        PyThreadState *thread = PyEval_SaveThread();
        fg_status status = fg_backend_of(FG_CUDA)->wait_for(&stream->queue, &last, &error);
        PyEval_RestoreThread(thread);
        Py_XDECREF(last_owner);
        if (status != FG_OK) {
            fg_raise(&error);
            return -1;
        }
        if (owner->uses != uses) continue; /* another thread used it meanwhile: wait for that too */
        owner->last = stream->queue;
        PyObject *previous = owner->last_owner;
        owner->last_owner = Py_XNewRef(stream->owner);
        Py_XDECREF(previous);
    }
    owner->uses++;
    return 0;
}

/* ---- construction and copies ---- */

/* device= and stream= as every method takes them. */
static int parse_stream(PyObject *device, PyObject *object, fg_stream *stream) {
    *stream = (fg_stream){.owner = NULL};
    if (fg_arg_int32(device, "device", 0, INT32_MAX, &stream->queue.device_index) < 0) return -1;
    return fg_stream_from_object(object, stream);
}

static PyObject *device_array_empty(PyObject *type, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const fg_parameter parameters[] = {
        {FG_KEYWORD_shape, FG_REQUIRED},
        {FG_KEYWORD_dtype, FG_REQUIRED},
        {FG_KEYWORD_device, FG_KEYWORD_ONLY},
        {FG_KEYWORD_stream, FG_KEYWORD_ONLY},
    };
    enum { SHAPE, DTYPE, DEVICE, STREAM, COUNT };
    const fg_state *state = PyType_GetModuleState((PyTypeObject *)type);
    PyObject *values[COUNT];
    int64_t shape[FG_MAX_NDIM];
    int ndim;
    fg_dtype dtype = FG_FLOAT32;
    fg_stream stream;
    if (fg_parse_args(state, "empty", parameters, COUNT, args, nargs, kwnames, values) < 0 ||
        fg_arg_int64s(values[SHAPE], "shape", 0, INT64_MAX, FG_MAX_NDIM, shape, &ndim) < 0 ||
        fg_arg_dtype(state, values[DTYPE], "dtype", &dtype) < 0 ||
        parse_stream(values[DEVICE], values[STREAM], &stream) < 0) {
        return NULL;
    }
    return (PyObject *)new_owner((PyTypeObject *)type, shape, ndim, dtype, &stream);
}

static PyObject *device_array_from_numpy(PyObject *type, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const fg_parameter parameters[] = {
        {FG_KEYWORD_array, FG_REQUIRED},
        {FG_KEYWORD_device, FG_KEYWORD_ONLY},
        {FG_KEYWORD_stream, FG_KEYWORD_ONLY},
    };
    enum { ARRAY, DEVICE, STREAM, COUNT };
    fg_state *state = PyType_GetModuleState((PyTypeObject *)type);
    PyObject *values[COUNT];
    fg_stream stream;
    if (fg_parse_args(state, "from_numpy", parameters, COUNT, args, nargs, kwnames, values) < 0 ||
        parse_stream(values[DEVICE], values[STREAM], &stream) < 0) {
        return NULL;
    }
    if (!fg_numpy_is_array_type(Py_TYPE(values[ARRAY]))) {
        return PyErr_Format(PyExc_TypeError, "array: expected a NumPy array, got %R",
                            (PyObject *)Py_TYPE(values[ARRAY]));
    }
    PyObject *source = fg_numpy_contiguous(values[ARRAY]);
    fg_device_array *self = NULL;
    fg_view view = {.name = "array", .object = source};
    if (!source || fg_numpy_open(state, &view) < 0) goto done;
    if (view.tensor.dtype == FG_DTYPE_COUNT) {
        char name[64];
        fg_view_dtype_name(&view, name, sizeof name);
        PyErr_Format(PyExc_TypeError, "array: expected a dtype that flexgemm computes with, got %s", name);
        goto done;
    }
    self = new_owner((PyTypeObject *)type, view.tensor.shape, view.tensor.ndim, view.tensor.dtype, &stream);
    if (self && self->nbytes > 0) {
        const fg_backend *backend = fg_backend_of(FG_CUDA);
        fg_error error;
        PyThreadState *thread = PyEval_SaveThread();
        fg_status status =
            backend->copy_to_device(self->data, view.tensor.data, (size_t)self->nbytes, &stream.queue, &error);
        PyEval_RestoreThread(thread);
        if (status != FG_OK) {
            Py_CLEAR(self);
            fg_raise(&error);
        }
    }
done:
    fg_view_close(&view);
    Py_XDECREF(source);
    return (PyObject *)self;
}

static PyObject *device_array_numpy(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const fg_parameter parameters[] = {{FG_KEYWORD_stream, FG_KEYWORD_ONLY}};
    fg_device_array *self = (fg_device_array *)object;
    const fg_state *state = PyType_GetModuleState(Py_TYPE(object));
    PyObject *value;
    fg_stream stream = {.queue = owner_of(self)->last};
    if (fg_parse_args(state, "numpy", parameters, 1, args, nargs, kwnames, &value) < 0) return NULL;
    const bool given = value && value != Py_None;
    if (given && (fg_stream_from_object(value, &stream) < 0 || fg_device_array_join(object, &stream) < 0)) return NULL;
    PyObject *stream_owner = Py_XNewRef(owner_of(self)->last_owner); /* another thread may replace it meanwhile */

    void *data;
    PyObject *result = fg_numpy_empty(state, self->shape, self->ndim, self->dtype, &data);
    if (result && self->nbytes > 0) {
        const fg_backend *backend = fg_backend_of(FG_CUDA);
        fg_error error;
        PyThreadState *thread = PyEval_SaveThread();
        fg_status status = backend->copy_to_host(data, self->data, (size_t)self->nbytes, &stream.queue, &error);
        if (status == FG_OK) status = backend->synchronize(&stream.queue, &error);
        PyEval_RestoreThread(thread);
        if (status != FG_OK) {
            Py_CLEAR(result);
            fg_raise(&error);
        }
    }
    Py_XDECREF(stream_owner);
    return result;
}

static PyObject *device_array_reshape(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const fg_parameter parameters[] = {{FG_KEYWORD_shape, FG_REQUIRED}};
    fg_device_array *self = (fg_device_array *)object;
    const fg_state *state = PyType_GetModuleState(Py_TYPE(object));
    PyObject *value;
    int64_t shape[FG_MAX_NDIM];
    int ndim;
    if (fg_parse_args(state, "reshape", parameters, 1, args, nargs, kwnames, &value) < 0 ||
        fg_arg_int64s(value, "shape", 0, INT64_MAX, FG_MAX_NDIM, shape, &ndim) < 0) {
        return NULL;
    }
    fg_device_array *view = new_object(Py_TYPE(object), shape, ndim, self->dtype);
    if (!view) return NULL;
    if (view->nbytes != self->nbytes) {
        fg_text from = {.length = 0}, to = {.length = 0};
        fg_text_add_tuple(&from, self->shape, self->ndim);
        fg_text_add_tuple(&to, shape, ndim);
        Py_DECREF(view);
        return PyErr_Format(PyExc_ValueError, "shape: expected as many elements as %s has, got %s", from.data, to.data);
    }
    view->data = self->data;
    view->base = (fg_device_array *)Py_NewRef((PyObject *)owner_of(self));
    return (PyObject *)view;
}

/* ---- DLPack export ---- */

/* The struct that a capsule points to, with the shape it refers to behind it. */
typedef struct {
    union {
        DLManagedTensorVersioned versioned;
        DLManagedTensor legacy;
    } managed;
    int64_t shape[FG_MAX_NDIM], strides[FG_MAX_NDIM];
} fg_export;

/* Any thread may call a deleter, with or without the GIL, and at exit even after the interpreter. */
static void delete_export(void *pointer, PyObject *array) {
    free(pointer);
    if (!Py_IsInitialized()) return;
    const PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF(array);
    PyGILState_Release(gil);
}

static void delete_versioned(DLManagedTensorVersioned *self) { delete_export(self, self->manager_ctx); }
static void delete_legacy(DLManagedTensor *self) { delete_export(self, self->manager_ctx); }

/* A capsule that nobody consumed still has its first name. */
static void destroy_capsule(PyObject *capsule) {
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        delete_versioned(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
    } else if (PyCapsule_IsValid(capsule, "dltensor")) {
        delete_legacy(PyCapsule_GetPointer(capsule, "dltensor"));
    }
}

void fg_device_array_describe(PyObject *array, DLTensor *described) {
    fg_device_array *self = (fg_device_array *)array;
    *described = (DLTensor){
        .data = self->data,
        .device = {kDLCUDA, owner_of(self)->last.device_index},
        .ndim = self->ndim,
        .dtype = fg_dl_dtype(self->dtype),
        .shape = self->shape,
    };
}

static PyObject *new_capsule(PyObject *array, bool versioned) {
    fg_export *export = calloc(1, sizeof *export);
    if (!export) return PyErr_NoMemory();
    DLTensor tensor;
    fg_device_array_describe(array, &tensor);
    int64_t stride = 1;
    for (int i = tensor.ndim - 1; i >= 0; i--) {
        export->shape[i] = tensor.shape[i];
        export->strides[i] = stride;
        stride *= tensor.shape[i] ? tensor.shape[i] : 1;
    }
    tensor.shape = export->shape;
    tensor.strides = export->strides;
    if (versioned) {
        export->managed.versioned = (DLManagedTensorVersioned){
            .version = {DL_MAJOR, DL_MINOR}, .manager_ctx = array, .deleter = delete_versioned, .dl_tensor = tensor};
    } else {
        export->managed.legacy = (DLManagedTensor){.dl_tensor = tensor, .manager_ctx = array, .deleter = delete_legacy};
    }
    PyObject *capsule = PyCapsule_New(export, versioned ? "dltensor_versioned" : "dltensor", destroy_capsule);
    if (capsule) {
        Py_INCREF(array); /* the capsule's */
    } else {
        free(export);
    }
    return capsule;
}

static PyObject *device_array_dlpack(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const fg_parameter parameters[] = {
        {FG_KEYWORD_stream, FG_KEYWORD_ONLY},
        {FG_KEYWORD_max_version, FG_KEYWORD_ONLY},
        {FG_KEYWORD_dl_device, FG_KEYWORD_ONLY},
        {FG_KEYWORD_copy, FG_KEYWORD_ONLY},
    };
    enum { STREAM, MAX_VERSION, DL_DEVICE, COPY, COUNT };
    const fg_state *state = PyType_GetModuleState(Py_TYPE(object));
    const fg_queue last = owner_of((fg_device_array *)object)->last;
    PyObject *values[COUNT];
    int64_t version[2] = {0, 0}, device[2] = {kDLCUDA, last.device_index};
    int count;
    if (fg_parse_args(state, "__dlpack__", parameters, COUNT, args, nargs, kwnames, values) < 0) return NULL;
    for (int i = 0; i < COUNT; i++) {
        if (values[i] == Py_None) values[i] = NULL;
    }
    if (values[MAX_VERSION] &&
        fg_arg_int64s(values[MAX_VERSION], "max_version", 0, INT64_MAX, 2, version, &count) < 0) {
        return NULL;
    }
    if (values[DL_DEVICE] && fg_arg_int64s(values[DL_DEVICE], "dl_device", 0, INT64_MAX, 2, device, &count) < 0) {
        return NULL;
    }
    bool copy = false;
    if (fg_arg_bool(values[COPY], "copy", &copy) < 0) return NULL;
    if (copy || device[0] != kDLCUDA || device[1] != last.device_index) {
        PyErr_Format(PyExc_BufferError, "DeviceArray exports its own memory on cuda:%d only: no copy, no other device",
                     (int)last.device_index);
        return NULL;
    }

    /* -1: the consumer synchronises by itself. Otherwise its stream waits, and the memory is freed behind it. */
    int64_t number = 0;
    if (values[STREAM] && PyLong_Check(values[STREAM]) &&
        fg_arg_int64(values[STREAM], "stream", -1, INT64_MAX, &number) < 0) {
        return NULL;
    }
    fg_stream stream = {.queue = last};
    if (number >= 0 &&
        (fg_stream_from_object(values[STREAM], &stream) < 0 || fg_device_array_join(object, &stream) < 0)) {
        return NULL;
    }
    return new_capsule(object, version[0] >= 1);
}

static PyObject *device_array_dlpack_device(PyObject *object, PyObject *Py_UNUSED(none)) {
    return Py_BuildValue("(ii)", (int)kDLCUDA, (int)owner_of((fg_device_array *)object)->last.device_index);
}

/* ---- attributes ---- */

static PyObject *get_shape(PyObject *object, void *Py_UNUSED(closure)) {
    const fg_device_array *self = (fg_device_array *)object;
    PyObject *shape = PyTuple_New(self->ndim);
    for (int i = 0; shape && i < self->ndim; i++) {
        PyObject *size = PyLong_FromLongLong(self->shape[i]);
        if (!size || PyTuple_SetItem(shape, i, size) < 0) Py_CLEAR(shape);
    }
    return shape;
}

static PyObject *get_dtype(PyObject *object, void *Py_UNUSED(closure)) {
    return PyUnicode_FromString(fg_dtype_name(((fg_device_array *)object)->dtype));
}

static PyObject *get_device(PyObject *object, void *Py_UNUSED(closure)) {
    return PyLong_FromLong(owner_of((fg_device_array *)object)->last.device_index);
}

static PyObject *get_nbytes(PyObject *object, void *Py_UNUSED(closure)) {
    return PyLong_FromLongLong(((fg_device_array *)object)->nbytes);
}

static PyMethodDef methods[] = {
    {"empty", FG_FASTCALL(device_array_empty) | METH_CLASS,
     PyDoc_STR("empty($type, /, shape, dtype, *, device=0, stream=None)\n--\n\nUninitialised memory.")},
    {"from_numpy", FG_FASTCALL(device_array_from_numpy) | METH_CLASS,
     PyDoc_STR("from_numpy($type, /, array, *, device=0, stream=None)\n--\n\n"
               "Copies a NumPy array to the device; returns when the copy is done.")},
    {"numpy", FG_FASTCALL(device_array_numpy),
     PyDoc_STR("numpy($self, /, *, stream=None)\n--\n\n"
               "Copies to the host after the work that used the array; synchronises the stream.")},
    {"reshape", FG_FASTCALL(device_array_reshape),
     PyDoc_STR("reshape($self, /, shape)\n--\n\nA view of the same memory.")},
    {"__dlpack__", FG_FASTCALL(device_array_dlpack),
     PyDoc_STR("__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
               "A DLPack capsule of the same memory; the consumer's stream waits for the work that wrote it.")},
    {"__dlpack_device__", device_array_dlpack_device, METH_NOARGS,
     PyDoc_STR("__dlpack_device__($self, /)\n--\n\n(2, device)")},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef attributes[] = {
    {"shape", get_shape, NULL, PyDoc_STR("tuple of ints"), NULL},
    {"dtype", get_dtype, NULL, PyDoc_STR("name of the dtype"), NULL},
    {"device", get_device, NULL, PyDoc_STR("CUDA device index"), NULL},
    {"nbytes", get_nbytes, NULL, PyDoc_STR("bytes of the elements"), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, PyDoc_STR("A contiguous array in CUDA memory owned by flexgemm. Exports DLPack.")},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, traverse},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {0, NULL},
};

/* Final and without a constructor, so that Py_TYPE(self) is always this module's type. */
PyType_Spec fg_device_array_spec = {
    .name = "flexgemm._C.DeviceArray",
    .basicsize = (int)sizeof(fg_device_array),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};
