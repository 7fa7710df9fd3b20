/*
 * What the extension asks of torch beyond the exchange API. A tensor that the exchange API allocates has memory with a
 * foreign deleter, to which record_stream and the like do nothing: outputs come from torch itself.
 */
#include "torch.h"

#include "check.h"

/* ---- what torch is ---- */

static int find(fg_torch *torch, PyObject *module) {
    PyObject *nn = PyObject_GetAttrString(module, "nn");
    torch->parameter = nn ? (PyTypeObject *)PyObject_GetAttrString(nn, "Parameter") : NULL;
    Py_XDECREF(nn);
    if (!torch->parameter) return -1;
    torch->is_grad_enabled = PyObject_GetAttrString(module, "is_grad_enabled");
    torch->empty = PyObject_GetAttrString(module, "empty");
    PyObject *autograd = PyObject_GetAttrString(module, "autograd");
    torch->forward_ad = autograd ? PyObject_GetAttrString(autograd, "forward_ad") : NULL;
    Py_XDECREF(autograd);
    if (!torch->forward_ad) return -1;
    torch->current_level = PyUnicode_InternFromString("_current_level");
    torch->is_neg = PyUnicode_InternFromString("is_neg");
    torch->requires_grad = PyUnicode_InternFromString("requires_grad");
    if (!torch->is_grad_enabled || !torch->empty || !torch->current_level || !torch->is_neg || !torch->requires_grad) {
        return -1;
    }
    for (int i = 0; i < FG_DTYPE_COUNT; i++) {
        torch->dtypes[i] = PyObject_GetAttrString(module, fg_dtype_name((fg_dtype)i));
        if (!torch->dtypes[i]) return -1;
    }
    /* Last, because it says that all is there. */
    torch->tensor = (PyTypeObject *)PyObject_GetAttrString(module, "Tensor");
    return torch->tensor ? 0 : -1;
}

int fg_torch_is_tensor_type(fg_torch *torch, PyTypeObject *type) {
    if (!torch->tensor) {
        PyObject *name = PyUnicode_FromString("torch");
        PyObject *module = name ? PyImport_GetModule(name) : NULL;
        Py_XDECREF(name);
        if (!module) return PyErr_Occurred() ? -1 : 0;
        const int status = find(torch, module);
        Py_DECREF(module);
        if (status < 0) {
            fg_torch_clear(torch);
            return -1;
        }
    }
    return type == torch->tensor || type == torch->parameter;
}

int fg_torch_traverse(fg_torch *torch, visitproc visit, void *arg) {
    Py_VISIT(torch->tensor);
    Py_VISIT(torch->parameter);
    Py_VISIT(torch->is_grad_enabled);
    Py_VISIT(torch->empty);
    Py_VISIT(torch->forward_ad);
    for (int i = 0; i < FG_DTYPE_COUNT; i++) Py_VISIT(torch->options[i]);
    return 0;
}

void fg_torch_clear(fg_torch *torch) {
    Py_CLEAR(torch->tensor);
    Py_CLEAR(torch->parameter);
    Py_CLEAR(torch->is_grad_enabled);
    Py_CLEAR(torch->empty);
    Py_CLEAR(torch->forward_ad);
    Py_CLEAR(torch->current_level);
    Py_CLEAR(torch->is_neg);
    Py_CLEAR(torch->requires_grad);
    for (int i = 0; i < FG_DTYPE_COUNT; i++) {
        Py_CLEAR(torch->dtypes[i]);
        Py_CLEAR(torch->options[i]);
    }
}

int fg_torch_is_forward_mode(const fg_torch *torch) {
    PyObject *level = PyObject_GetAttr(torch->forward_ad, torch->current_level);
    const long open = level ? PyLong_AsLong(level) : -1;
    Py_XDECREF(level);
    return PyErr_Occurred() ? -1 : open >= 0;
}

/* ---- tensors ---- */

/* Whether an answer is True; lets go of it. -1 with an exception. */
static int is_true(PyObject *answer) {
    const int result = answer ? answer == Py_True : -1;
    Py_XDECREF(answer);
    return result;
}

int fg_torch_is_plain(const fg_torch *torch, const fg_view *view) {
    const unsigned dtype = FG_BIT(view->tensor.dtype);
    int answer = 0;
    if (dtype & (FG_FLOATS | FG_FLOAT8S)) {
        answer = is_true(PyObject_GetAttr(view->object, torch->requires_grad));
        if (answer == 1) answer = is_true(PyObject_CallNoArgs(torch->is_grad_enabled));
    }
    /* What is negated lazily views the imaginary part of complex numbers, of float32 or float16 each. */
    if (answer == 0 && (dtype & (FG_BIT(FG_FLOAT32) | FG_BIT(FG_FLOAT16)))) {
        answer = is_true(PyObject_CallMethodObjArgs(view->object, torch->is_neg, NULL));
    }
    return answer < 0 ? -1 : !answer;
}

fg_dtype fg_torch_dtype(const fg_torch *torch, const PyObject *dtype) {
    int i = 0;
    while (i < FG_DTYPE_COUNT && torch->dtypes[i] != dtype) i++;
    return (fg_dtype)i;
}

static bool has_options_of(const fg_torch *torch, const fg_view *like) {
    return torch->device_type == like->tensor.device_type && torch->device_index == like->tensor.device_index;
}

/* Keyword arguments of torch.empty, kept as long as calls stay on one device. New reference. */
static PyObject *options_of(fg_torch *torch, const fg_view *like, fg_dtype dtype) {
    if (has_options_of(torch, like) && torch->options[dtype]) return Py_NewRef(torch->options[dtype]);
    /* May run Python, and another thread's call on another device meanwhile: what is kept is asked for anew. */
    PyObject *device = PyObject_GetAttrString(like->object, "device");
    PyObject *options = device ? Py_BuildValue("{s:O,s:N}", "dtype", torch->dtypes[dtype], "device", device) : NULL;
    if (!options) return NULL;
    if (!has_options_of(torch, like)) {
        for (int i = 0; i < FG_DTYPE_COUNT; i++) Py_CLEAR(torch->options[i]);
        torch->device_type = like->tensor.device_type;
        torch->device_index = like->tensor.device_index;
    }
    Py_XDECREF(torch->options[dtype]);
    torch->options[dtype] = Py_NewRef(options);
    return options;
}

PyObject *fg_torch_empty(fg_torch *torch, const fg_view *like, const int64_t *shape, int ndim, fg_dtype dtype) {
    PyObject *options = options_of(torch, like, dtype);
    PyObject *sizes = PyTuple_New(ndim), *result = NULL; /* an argument each: torch takes longer over a tuple of them */
    bool complete = options && sizes;
    for (int i = 0; i < ndim && complete; i++) {
        PyObject *size = PyLong_FromLongLong(shape[i]);
        complete = size && PyTuple_SetItem(sizes, i, size) == 0;
    }
    if (complete) result = PyObject_Call(torch->empty, sizes, options);
    Py_XDECREF(sizes);
    Py_XDECREF(options);
    return result;
}
