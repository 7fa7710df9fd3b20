/*
 * What Python asks about streams: whether work would go into a CUDA graph, and whether it comes behind earlier work.
 */
#include "stream.h"

#include <stdlib.h>

#include "args.h"
#include "error.h"

/* A place in a stream. */
typedef struct {
    const fg_backend *backend;
    void *mark; /* NULL: it has been reached */
} fg_place;

static const char place_name[] = "flexgemm.mark";

/* The stream that work on the array goes to, stream= or else its library's current one, and the backend, NULL where
 * work is done at once. Returns 0, or -1. */
static int queue_of_work(fg_state *state, PyObject *array, PyObject *given, fg_queue *queue,
                         const fg_backend **backend) {
    fg_view view = {.object = NULL};
    fg_stream stream;
    PyObject *owner = NULL;
    int failed = fg_view_open(state, &view, array, "array", false) < 0 || fg_stream_from_object(given, &stream) < 0;
    /* Of host memory there is none: torch built for CUDA fails to say so where there is no GPU. */
    if (!failed && view.tensor.device_type == FG_CUDA && (!given || given == Py_None))
        failed = fg_stream_of_view(state, &view, &stream.queue.stream, &owner) < 0;
    if (!failed) {
        *queue = (fg_queue){view.tensor.device_index, stream.queue.stream};
        *backend = view.tensor.device_type == FG_CUDA ? fg_backend_of(FG_CUDA) : NULL;
    }
    Py_XDECREF(owner); /* only asked about */
    fg_view_close(&view);
    return failed ? -1 : 0;
}

static const fg_parameter work_parameters[] = {{FG_KEYWORD_array, FG_REQUIRED}, {FG_KEYWORD_stream, FG_KEYWORD_ONLY}};
enum { ARRAY, STREAM, WORK_COUNT };

static PyObject *is_capturing(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    fg_state *state = PyModule_GetState(module);
    PyObject *values[WORK_COUNT];
    fg_queue queue;
    const fg_backend *backend;
    if (fg_parse_args(state, "is_capturing", work_parameters, WORK_COUNT, args, nargs, kwnames, values) < 0 ||
        queue_of_work(state, values[ARRAY], values[STREAM], &queue, &backend) < 0) {
        return NULL;
    }
    fg_error error;
    bool capturing = false;
    if (backend && backend->is_capturing(&queue, &capturing, &error) != FG_OK) return fg_raise(&error);
    return PyBool_FromLong(capturing);
}

/* ---- marks ---- */

static void free_place(PyObject *capsule) {
    fg_place *place = PyCapsule_GetPointer(capsule, place_name);
    if (place->mark) place->backend->forget(place->mark);
    free(place);
}

static PyObject *mark(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    fg_state *state = PyModule_GetState(module);
    PyObject *values[WORK_COUNT];
    fg_place place = {.mark = NULL};
    fg_queue queue;
    if (fg_parse_args(state, "mark", work_parameters, WORK_COUNT, args, nargs, kwnames, values) < 0 ||
        queue_of_work(state, values[ARRAY], values[STREAM], &queue, &place.backend) < 0) {
        return NULL;
    }
    fg_place *kept = malloc(sizeof *kept);
    if (!kept) return PyErr_NoMemory();
    *kept = place;
    PyObject *capsule = PyCapsule_New(kept, place_name, free_place);
    if (!capsule) {
        free(kept);
        return NULL;
    }
    if (!place.backend) return capsule;
    fg_error error;
    /* Not in passed() and wait_for(), where two threads may share a mark. */
    PyThreadState *thread = PyEval_SaveThread();
    fg_status status = place.backend->mark(&queue, &kept->mark, &error);
    PyEval_RestoreThread(thread);
    if (status == FG_OK) return capsule;
    Py_DECREF(capsule);
    return fg_raise(&error);
}

static fg_place *place_of(PyObject *capsule) {
    if (PyCapsule_IsValid(capsule, place_name)) return PyCapsule_GetPointer(capsule, place_name);
    PyErr_Format(PyExc_TypeError, "mark: expected what mark() returns, got %R", (PyObject *)Py_TYPE(capsule));
    return NULL;
}

static PyObject *passed(PyObject *Py_UNUSED(module), PyObject *capsule) {
    fg_place *place = place_of(capsule);
    if (!place) return NULL;
    void *const mark = place->mark;
    if (!mark) Py_RETURN_TRUE;
    fg_error error;
    bool reached = false;
    place->mark = NULL; /* which is freed when it has been reached, and when that fails */
    if (place->backend->passed(mark, &reached, &error) != FG_OK) return fg_raise(&error);
    if (!reached) place->mark = mark;
    return PyBool_FromLong(reached);
}

static PyObject *wait_for(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const fg_parameter parameters[] = {
        {FG_KEYWORD_mark, FG_REQUIRED}, {FG_KEYWORD_array, FG_REQUIRED}, {FG_KEYWORD_stream, FG_KEYWORD_ONLY}};
    enum { MARK, OF_ARRAY, OF_STREAM, COUNT };
    fg_state *state = PyModule_GetState(module);
    PyObject *values[COUNT];
    fg_queue queue;
    const fg_backend *backend;
    if (fg_parse_args(state, "wait_for", parameters, COUNT, args, nargs, kwnames, values) < 0) return NULL;
    const fg_place *place = place_of(values[MARK]);
    if (!place || queue_of_work(state, values[OF_ARRAY], values[OF_STREAM], &queue, &backend) < 0) return NULL;
    if (!place->mark || !backend) Py_RETURN_TRUE;
    fg_error error;
    bool capturing = false;
    fg_status status = backend->is_capturing(&queue, &capturing, &error);
    if (status == FG_OK && !capturing) status = backend->wait_for_mark(&queue, place->mark, &error);
    if (status != FG_OK) return fg_raise(&error);
    return PyBool_FromLong(!capturing);
}

PyMethodDef fg_stream_methods[] = {
    {"is_capturing", FG_FASTCALL(is_capturing),
     PyDoc_STR("is_capturing($module, /, array, *, stream=None)\n--\n\n"
               "Whether work on the array would go into a CUDA graph that is being captured.")},
    {"mark", FG_FASTCALL(mark),
     PyDoc_STR("mark($module, /, array, *, stream=None)\n--\n\n"
               "A mark behind the work that is queued where work on the array goes.")},
    {"passed", passed, METH_O, PyDoc_STR("passed($module, mark, /)\n--\n\nWhether the work before the mark is done.")},
    {"wait_for", FG_FASTCALL(wait_for),
     PyDoc_STR("wait_for($module, /, mark, array, *, stream=None)\n--\n\n"
               "Puts further work on the array behind the mark. False, and nothing done, while it is captured.")},
    {NULL, NULL, 0, NULL},
};
