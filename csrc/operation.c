/*
 * The path of every operation from Python objects to the backend and back.
 *
 * Arrays are opened first, because they tell the device; the device tells the backend and the stream; and only with
 * the stream known can __dlpack__ be asked for memory. Then the operation checks shapes and dtypes and fills its
 * params, outputs are checked against everything else, and the backend runs without the GIL.
 */
#include "operation.h"

#include "../kernels/floats.h"
#include "deferred.h"
#include "device_array.h"
#include "error.h"
#include "numpy.h"
#include "torch.h"

enum { WORKSPACE_ALIGNMENT = 256 };

/* ---- before ---- */

/* The bool, int or float that an object stands for; NULL without an exception: it stands for none. */
static PyObject *number_of(PyObject *value) {
    PyObject *number = fg_numpy_bool(value);
    if (number) return Py_NewRef(number);
    number = PyIndex_Check(value) ? PyNumber_Index(value) : NULL;
    if (number || (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError))) return number;
    PyErr_Clear();
    number = PyNumber_Check(value) ? PyNumber_Float(value) : NULL;
    if (!number && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError)) PyErr_Clear();
    return number;
}

/* A tuple of the numbers that are in a sequence, and of what else is; NULL without an exception: it is none, or longer
 * than any that is asked for. */
static PyObject *numbers_of(PyObject *value) {
    enum { MOST = 16 };
    const Py_ssize_t length = PySequence_Check(value) ? PySequence_Size(value) : 0;
    if (length < 0 && PyErr_ExceptionMatches(PyExc_TypeError)) PyErr_Clear(); /* an array of no dimension */
    if (length <= 0 || length > MOST) return NULL;
    PyObject *numbers = PyTuple_New(length);
    for (Py_ssize_t i = 0; numbers && i < length; i++) {
        PyObject *item = PySequence_GetItem(value, i), *number = item ? number_of(item) : NULL;
        if (item && !number && !PyErr_Occurred()) number = Py_NewRef(item);
        Py_XDECREF(item);
        if (!number || PyTuple_SetItem(numbers, i, number) < 0) Py_CLEAR(numbers);
    }
    return numbers;
}

static bool is_number(PyObject *value) {
    return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value);
}

/* Whether reading a scalar runs no code but ours, as what is neither a number nor a sequence of them is not read. */
static bool is_settled(PyObject *value) {
    if (is_number(value) || PyUnicode_Check(value)) return true;
    if (!PyIndex_Check(value) && !PyNumber_Check(value) && !PySequence_Check(value)) return true;
    if (!PyTuple_CheckExact(value)) return false;
    const Py_ssize_t length = PyTuple_Size(value);
    Py_ssize_t i = 0;
    while (i < length && is_number(PyTuple_GetItem(value, i))) i++;
    return i == length;
}

/* Reads numbers and the stream before there are views: __index__ or __float__ of a caller's class may do anything, as
 * resize an array whose memory a view would then still point to. */
static int read_scalars(fg_call *call, const fg_operation *operation) {
    for (int i = 0; i < operation->count - 2; i++) {
        PyObject *value = call->values[i];
        if (!value || (operation->parameters[i].flags & FG_TENSOR) || is_settled(value)) continue;
        PyObject *number = number_of(value);
        if (!number && !PyErr_Occurred()) number = numbers_of(value);
        if (!number && PyErr_Occurred()) return fg_name_argument(fg_keyword_name(operation->parameters[i].keyword));
        if (number) call->values[i] = call->numbers[call->number_count++] = number;
        call->unsettled = call->unsettled || !is_settled(call->values[i]);
    }
    return fg_stream_from_object(call->values[operation->count - 1], &call->stream);
}

static int open_views(fg_call *call, const fg_operation *operation, bool with_workspace) {
    for (int i = 0; i < operation->count; i++) {
        const unsigned flags = operation->parameters[i].flags;
        PyObject *value = call->values[i];
        if (!(flags & FG_TENSOR) || !value) continue;
        if (i == operation->count - 2 && (!with_workspace || PyCallable_Check(value))) continue;
        if (value == Py_None && (flags & FG_NULLABLE)) continue;
        const char *name = fg_keyword_name(operation->parameters[i].keyword);
        if (fg_view_open(call->state, &call->views[i], value, name, (flags & FG_WRITTEN) != 0) < 0) return -1;
    }
    return fg_check_devices(call->views, operation->count);
}

static int find_backend(fg_call *call, const fg_operation *operation) {
    const fg_view *view = call->views; /* the first parameter of every operation is an array that must be given */
    call->backend = fg_backend_of(view->tensor.device_type);
    if (call->backend && operation->available(call->backend)) return 0;
    char device[32];
    fg_device_name(view->tensor.device_type, view->tensor.device_index, device, sizeof device);
    if (call->backend) {
        PyErr_Format(PyExc_NotImplementedError, "%s: not available on %s, where %s is", operation->name, device,
                     view->name);
    } else {
        PyErr_Format(PyExc_NotImplementedError, "%s: %s is on %s, and this build of flexgemm has no CUDA backend",
                     operation->name, view->name, device);
    }
    return -1;
}

/* stream=, else the current stream of the first library that has one, else the legacy default stream. */
static int find_stream(fg_call *call, const fg_operation *operation) {
    PyObject *given = call->values[operation->count - 1];
    call->stream.queue.device_index = call->views->tensor.device_index;
    if (call->views->tensor.device_type != FG_CUDA || (given && given != Py_None)) return 0;
    for (int i = 0; i < operation->count; i++) {
        const fg_view *view = &call->views[i];
        if (!view->object) continue;
        void *stream;
        const int found = fg_stream_of_view(call->state, view, &stream, &call->stream_reference);
        if (found < 0) return -1;
        if (found == 0) continue;
        call->stream.queue.stream = stream;
        call->stream.owner = call->stream_reference;
        call->stream_view = view;
        break;
    }
    return 0;
}

static bool is_pending(const fg_view *view) {
    return view->object && (view->source == FG_SOURCE_DLPACK || view->source == FG_SOURCE_CUPY);
}

/* Behind code of the caller's that may have done anything. */
static int expect_unmoved(const fg_call *call, int count) {
    for (int i = 0; i < count; i++) {
        const fg_view *view = &call->views[i];
        if (!view->object || fg_view_is_unmoved(view)) continue;
        PyErr_Format(PyExc_ValueError, "%s: its memory was exchanged while other arguments were read", view->name);
        return -1;
    }
    return 0;
}

/* What is pending runs the caller's code as it is opened and imported. */
static int import_views(fg_call *call, int count) {
    bool imported = false;
    for (int i = 0; i < count; i++) {
        fg_view *view = &call->views[i];
        if (!is_pending(view)) continue;
        if (fg_view_import(view, call->stream.queue.stream) < 0) return -1;
        imported = true;
    }
    return imported ? expect_unmoved(call, count) : 0;
}

static int prepare(fg_call *call, const fg_operation *operation, void *params) {
    if (find_backend(call, operation) < 0) return -1;
    if (find_stream(call, operation) < 0) return -1;
    if (import_views(call, operation->count) < 0) return -1;
    if (operation->fill(call, params) < 0) return -1;
    if (call->unsettled && expect_unmoved(call, operation->count) < 0) return -1;
    return fg_check_outputs(call->views, operation->count);
}

int fg_reinterpret(const fg_call *call, fg_view *view, PyObject *dtype, const char *name) {
    fg_dtype named = view->tensor.dtype;
    if (!dtype || dtype == Py_None) return 0;
    if (fg_arg_dtype(call->state, dtype, name, &named) < 0) return -1;
    const bool holds = view->tensor.dtype == FG_UINT8 && fg_is_float8(named);
    if (!holds && fg_expect_dtype(view, FG_BIT(named)) < 0) return -1;
    view->tensor.dtype = named;
    return 0;
}

/* ---- directly ---- */

/* Opens arrays that can be used as they are. 0: there are others, or what is wrong with them is for Python to say. */
static int open_directly(fg_call *call, const fg_operation *operation) {
    for (int i = 0; i < operation->count; i++) {
        const unsigned flags = operation->parameters[i].flags;
        PyObject *value = call->values[i];
        if (!value || (value == Py_None && (flags & (FG_NULLABLE | FG_ADAPTED)))) continue;
        if (flags & FG_ADAPTED) return 0;
        if (!(flags & FG_TENSOR)) continue;
        const int torch = fg_is_torch(call->state, value);
        if (torch <= 0) return torch;
        if (flags & FG_MADE) call->out = Py_NewRef(value);
    }
    const int forward_mode = fg_torch_is_forward_mode(&call->state->torch);
    if (forward_mode != 0) return forward_mode < 0 ? -1 : 0;
    if (open_views(call, operation, true) < 0) {
        PyErr_Clear();
        return 0;
    }
    for (int i = 0; i < operation->count; i++) {
        const fg_view *view = &call->views[i];
        const unsigned flags = operation->parameters[i].flags;
        if (!view->object || (view->output && !(flags & FG_MADE))) continue;
        const bool usable = view->output || (flags & FG_MATRIX ? fg_has_rows_or_columns(view)
                                             : flags & FG_ROWS ? fg_has_rows(view)
                                                               : fg_is_contiguous(view));
        const int plain = usable ? fg_torch_is_plain(&call->state->torch, view) : 0;
        if (plain <= 0) return plain;
    }
    return 1;
}

int fg_decline(fg_call *call) {
    call->declined = true;
    return -1;
}

int fg_new_dtype(fg_call *call, PyObject *value, unsigned allowed, fg_dtype *dtype) {
    if (!value || value == Py_None) return 0;
    fg_dtype named = fg_torch_dtype(&call->state->torch, value);
    for (int i = 0; i < FG_DTYPE_COUNT && named == FG_DTYPE_COUNT; i++) {
        if (call->state->dtypes[i] == value) named = (fg_dtype)i;
    }
    if (named == FG_DTYPE_COUNT || !(allowed & FG_BIT(named))) return fg_decline(call);
    *dtype = named;
    return 0;
}

int fg_make_output(fg_call *call, int index, const int64_t *shape, int ndim, fg_dtype dtype) {
    call->out = fg_torch_empty(&call->state->torch, call->views, shape, ndim, dtype);
    if (!call->out || fg_view_open(call->state, &call->views[index], call->out, "out", true) < 0) return -1;
    return fg_check_devices(call->views, index + 1);
}

/* ---- the call ---- */

/* Host arithmetic: not worth letting go of the GIL. */
static int query(fg_call *call, const fg_operation *operation, const void *params, size_t *bytes) {
    fg_error error;
    const fg_status status = operation->query(call->backend, params, &call->stream.queue, bytes, &error);
    if (status != FG_OK) fg_raise(&error);
    return status == FG_OK ? 0 : -1;
}

/* With room to align whatever address the caller's allocator gives. */
static PyObject *bytes_to_allocate(size_t bytes) {
    return PyLong_FromSize_t(bytes > 0 ? bytes + WORKSPACE_ALIGNMENT - 1 : 0);
}

/* The aligned part of the caller's workspace. */
static int set_workspace(const fg_view *view, fg_tensor *workspace) {
    *workspace = (fg_tensor){.present = false};
    if (!view->tensor.present) return 0;
    if (fg_expect_dtype(view, FG_BIT(FG_UINT8)) < 0 || fg_expect_contiguous(view) < 0) return -1;
    const uintptr_t aligned = (view->low + WORKSPACE_ALIGNMENT - 1) / WORKSPACE_ALIGNMENT * WORKSPACE_ALIGNMENT;
    const int64_t bytes = aligned < view->high ? (int64_t)(view->high - aligned) : 0;
    *workspace = (fg_tensor){
        .data = bytes > 0 ? (void *)aligned : NULL,
        .shape = {bytes},
        .strides = {1},
        .ndim = 1,
        .dtype = FG_UINT8,
        .device_type = view->tensor.device_type,
        .device_index = view->tensor.device_index,
        .present = true,
    };
    return 0;
}

/* DeviceArrays follow the work that uses them: before it, so that it sees their data; after it, in case another thread
 * moved them to another stream meanwhile. */
static int join_device_arrays(fg_call *call, int count) {
    for (int i = 0; i < count; i++) {
        const fg_view *view = &call->views[i];
        if (!view->object || view->source != FG_SOURCE_DEVICE_ARRAY) continue;
        if (fg_device_array_join(view->object, &call->stream) < 0) return -1;
    }
    return 0;
}

/* Borrowed memory may have to outlive this call. CuPy frees memory in the order of its current stream: when that is
 * where the work was queued, nothing has to wait. */
static void defer_borrowed(fg_call *call, int count) {
    const bool on_cupy_stream = call->stream_view && call->stream_view->source == FG_SOURCE_CUPY;
    bool borrowed = false;
    for (int i = 0; i < count; i++) {
        const fg_view *view = &call->views[i];
        const bool ordered = view->source == FG_SOURCE_EXCHANGE || (view->source == FG_SOURCE_CUPY && on_cupy_stream);
        borrowed = borrowed || (view->managed.pointer && !ordered);
    }
    if (borrowed) fg_defer_release(call->state, call->backend, &call->stream.queue, call->views, count);
}

/* Takes the workspace from the arrays' own library when the caller has given none: its allocator, in the order of the
 * stream that the work runs on. Where it cannot, from the caller's function, or the caller is told what to allocate. */
static int allocate_workspace(fg_call *call, const fg_operation *operation, size_t bytes) {
    fg_view *view = &call->views[operation->count - 2];
    PyObject *function = call->values[operation->count - 2];
    const fg_view *like = call->views->tensor.device_type == FG_CPU ? call->views : call->stream_view;
    const size_t room = bytes + WORKSPACE_ALIGNMENT - 1;
    if (like && fg_view_allocate(view, like, "workspace", room)) return 0;
    if (!function || function == Py_None) return 0;
    call->workspace = PyObject_CallFunction(function, "nO", (Py_ssize_t)room, call->views->object);
    if (!call->workspace) return -1;
    *view = (fg_view){.object = NULL};
    if (fg_view_open(call->state, view, call->workspace, "workspace", true) < 0 ||
        fg_check_devices(call->views, operation->count) < 0 ||
        (is_pending(view) && fg_view_import(view, call->stream.queue.stream) < 0) ||
        expect_unmoved(call, operation->count) < 0) {
        return -1;
    }
    return fg_check_outputs(call->views, operation->count);
}

static fg_status run_on_host(const fg_call *call, const fg_operation *operation, const void *params, fg_error *error) {
    FG_DEFAULT_FLOATS;
    return operation->run(call->backend, params, &call->stream.queue, error);
}

/* Runs the operation, unless a workspace is missing that nobody could allocate: *missing are its bytes then. */
static int run(fg_call *call, const fg_operation *operation, const void *params, fg_tensor *workspace,
               size_t *missing) {
    fg_view *view = &call->views[operation->count - 2];
    size_t bytes = 0;
    if (query(call, operation, params, &bytes) < 0) return -1;
    if (bytes > 0 && !view->tensor.present && allocate_workspace(call, operation, bytes) < 0) return -1;
    if (set_workspace(view, workspace) < 0) return -1;
    *missing = bytes > 0 && !workspace->present ? bytes : 0;
    if (*missing > 0) return 0;
    if (bytes > 0 && bytes > (size_t)workspace->shape[0]) {
        PyErr_Format(PyExc_ValueError,
                     "workspace: expected at least %zu bytes from an address that is a multiple "
                     "of %d (%s_workspace() returns enough for any address), got %lld",
                     bytes, (int)WORKSPACE_ALIGNMENT, operation->name, (long long)workspace->shape[0]);
        return -1;
    }
    if (join_device_arrays(call, operation->count) < 0) return -1;
    fg_error error;
    PyThreadState *thread = PyEval_SaveThread();
    const bool cuda = call->views->tensor.device_type == FG_CUDA;
    const fg_status status = cuda ? operation->run(call->backend, params, &call->stream.queue, &error)
                                  : run_on_host(call, operation, params, &error);
    PyEval_RestoreThread(thread);
    if (cuda) {
        defer_borrowed(call, operation->count);
        if (join_device_arrays(call, operation->count) < 0) return -1;
    }
    if (status != FG_OK) fg_raise(&error);
    return status == FG_OK ? 0 : -1;
}

static void begin(fg_call *call, const fg_operation *operation, PyObject *module) {
    call->state = PyModule_GetState(module);
    call->stream_reference = NULL;
    call->stream_view = NULL;
    call->workspace = NULL;
    call->direct = call->declined = call->unsettled = false;
    call->out = NULL;
    call->number_count = 0;
    for (int i = 0; i < operation->count; i++) call->views[i] = (fg_view){.object = NULL};
    if (call->state->deferred) fg_collect_deferred(call->state);
}

static void end(fg_call *call, const fg_operation *operation) {
    for (int i = 0; i < operation->count; i++) {
        if (call->views[i].name) fg_view_close(&call->views[i]); /* it has been opened */
    }
    for (int i = 0; i < call->number_count; i++) Py_DECREF(call->numbers[i]);
    Py_XDECREF(call->out);
    Py_XDECREF(call->workspace);
    Py_XDECREF(call->stream_reference);
}

PyObject *fg_call_operation(const fg_operation *operation, PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames, void *params, fg_tensor *workspace) {
    fg_call call;
    PyObject *result = NULL;
    size_t bytes = 0; /* missing; 0: it has run */
    begin(&call, operation, module);
    if (fg_parse_args(call.state, operation->name, operation->parameters, operation->count, args, nargs, kwnames,
                      call.values) == 0 &&
        read_scalars(&call, operation) == 0 && open_views(&call, operation, workspace != NULL) == 0 &&
        prepare(&call, operation, params) == 0 &&
        (workspace ? run(&call, operation, params, workspace, &bytes) : query(&call, operation, params, &bytes)) == 0) {
        result = bytes_to_allocate(bytes);
    }
    end(&call, operation);
    return result;
}

PyObject *fg_call_directly(const fg_operation *operation, PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames, void *params, fg_tensor *workspace) {
    fg_call call;
    PyObject *result = NULL;
    size_t missing = 0;
    begin(&call, operation, module);
    call.direct = true;
    if (fg_parse_args(call.state, operation->name, operation->parameters, operation->count, args, nargs, kwnames,
                      call.values) < 0) {
        goto done;
    }
    PyObject *options = call.values[operation->count - 3];
    if (options && options != Py_None &&
        fg_parse_options(call.state, operation->parameters, operation->count, options, call.values) < 0) {
        goto done;
    }
    if (read_scalars(&call, operation) < 0) goto done;
    const int opened = open_directly(&call, operation);
    if (opened < 0) goto done;
    call.declined = opened == 0;
    const bool ran = !call.declined && prepare(&call, operation, params) == 0 &&
                     run(&call, operation, params, workspace, &missing) == 0;
    if (call.declined || missing > 0) {
        result = Py_NewRef(Py_NotImplemented);
    } else if (ran) {
        result = Py_NewRef(call.out);
    }
done:
    end(&call, operation);
    return result;
}
