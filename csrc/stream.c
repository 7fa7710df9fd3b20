/*
 * CUDA streams as numbers. 0 and 1 are the legacy default stream, 2 is the per-thread default stream, anything above
 * is a cudaStream_t. The CUDA runtime takes NULL for the first and the handle 2 for the second, so only 1 needs
 * translating; towards a producer 0 is ambiguous and never sent.
 */
#include "stream.h"

#include "args.h"
#include "error.h"

/* The number inside a (version, number) pair of the CUDA stream protocol. New reference. */
static PyObject *call_protocol(PyObject *object) {
    PyObject *method = PyObject_GetAttrString(object, "__cuda_stream__");
    if (!method) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return NULL;
        PyErr_Clear();
        return PyErr_Format(PyExc_TypeError, "stream: expected an int or an object with __cuda_stream__, got %R",
                            (PyObject *)Py_TYPE(object));
    }
    PyObject *pair = PyObject_CallObject(method, NULL);
    Py_DECREF(method);
    PyObject *version = pair ? PySequence_GetItem(pair, 0) : NULL;
    PyObject *number = version ? PySequence_GetItem(pair, 1) : NULL;
    int64_t major = 0;
    if (number && fg_arg_int64(version, "stream: version of __cuda_stream__", 0, 0, &major) < 0) Py_CLEAR(number);
    Py_XDECREF(version);
    Py_XDECREF(pair);
    return number;
}

int fg_stream_from_object(PyObject *object, fg_stream *stream) {
    stream->queue.stream = NULL;
    stream->owner = NULL;
    if (!object || object == Py_None) return 0;
    const bool is_number = PyIndex_Check(object);
    PyObject *number = is_number ? Py_NewRef(object) : call_protocol(object);
    if (!number) return -1;
    int64_t handle = 0;
    const int status = fg_arg_int64(number, "stream", 0, INT64_MAX, &handle);
    Py_DECREF(number);
    if (status < 0) return -1;
    stream->queue.stream = handle == 1 ? NULL : (void *)(uintptr_t)handle;
    stream->owner = is_number ? NULL : object;
    return 0;
}

/* cupy.cuda.get_current_stream(device). The module is imported already: an array of it is at hand. */
static PyObject *cupy_current_stream(fg_state *state, int32_t device) {
    if (!state->cupy_current_stream) {
        PyObject *module = PyImport_ImportModule("cupy.cuda");
        if (!module) return NULL;
        PyObject *function = PyObject_GetAttrString(module, "get_current_stream");
        Py_DECREF(module);
        if (!function) return NULL;
        state->cupy_current_stream = function;
    }
    return PyObject_CallFunction(state->cupy_current_stream, "i", (int)device);
}

int fg_stream_of_view(fg_state *state, const fg_view *view, void **stream, PyObject **owner) {
    *stream = NULL;
    *owner = NULL;
    if (view->source == FG_SOURCE_EXCHANGE && view->api->current_work_stream) {
        if (view->api->current_work_stream(kDLCUDA, view->tensor.device_index, stream) == 0) return 1;
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "the exchange API does not tell its stream");
        fg_note_argument(view->name);
        return -1;
    }
    if (view->source == FG_SOURCE_CUPY) {
        *owner = cupy_current_stream(state, view->tensor.device_index);
        PyObject *number = *owner ? PyObject_GetAttrString(*owner, "ptr") : NULL;
        fg_stream current;
        const int status = number ? fg_stream_from_object(number, &current) : -1;
        Py_XDECREF(number);
        if (status < 0) {
            Py_CLEAR(*owner);
            return -1;
        }
        *stream = current.queue.stream;
        return 1;
    }
    return 0;
}

PyObject *fg_stream_to_producer(void *stream) { return PyLong_FromUnsignedLongLong(stream ? (uintptr_t)stream : 1); }
