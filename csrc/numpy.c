/*
 * The only file that speaks NumPy's C API. bfloat16 and float8 arrays carry dtypes that ml_dtypes registered with
 * NumPy; they are known by the name of their scalar type, so that nothing is imported until a result needs one.
 */
#include "numpy.h"

#ifndef NPY_NO_DEPRECATED_API
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#endif
#ifndef NPY_TARGET_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#endif
#include <numpy/arrayobject.h>

int fg_numpy_init(void) { return PyArray_ImportNumPyAPI(); }

bool fg_numpy_is_array_type(PyTypeObject *type) { return PyType_IsSubtype(type, &PyArray_Type) != 0; }

/* ---- dtypes ---- */

/* The dtype behind one of ml_dtypes' scalar types, FG_DTYPE_COUNT if it is none of ours; -1 with an exception. */
static int find_named_dtype(fg_state *state, PyTypeObject *scalar) {
    static const fg_dtype known[FG_NAMED_DTYPE_CACHE_SIZE] = {FG_BFLOAT16, FG_FLOAT8_E4M3FN, FG_FLOAT8_E5M2};
    for (int i = 0; i < FG_NAMED_DTYPE_CACHE_SIZE; i++) {
        if (state->named_dtypes[i].scalar == scalar) return (int)state->named_dtypes[i].dtype;
    }
    PyObject *name = PyType_GetName(scalar);
    if (!name) return -1;
    int found = FG_DTYPE_COUNT;
    for (int i = 0; i < FG_NAMED_DTYPE_CACHE_SIZE && found == FG_DTYPE_COUNT; i++) {
        if (PyUnicode_Compare(name, state->dtypes[known[i]]) != 0) continue;
        found = (int)known[i];
        PyTypeObject *previous = state->named_dtypes[i].scalar;
        state->named_dtypes[i].scalar = (PyTypeObject *)Py_NewRef((PyObject *)scalar);
        state->named_dtypes[i].dtype = known[i];
        Py_XDECREF((PyObject *)previous);
    }
    Py_DECREF(name);
    return found;
}

/* A dtype in DLPack's terms. What DLPack has no code for is an error here, since only NumPy can name it. */
static int export_dtype(fg_state *state, const fg_view *view, PyArray_Descr *descr, DLDataType *dtype) {
    const npy_intp bits = PyDataType_ELSIZE(descr) * 8;
    *dtype = (DLDataType){.bits = (uint8_t)bits, .lanes = 1};
    bool known = PyArray_ISNBO(descr->byteorder) && bits <= UINT8_MAX;
    if (PyTypeNum_ISUSERDEF(descr->type_num)) {
        const int named = find_named_dtype(state, descr->typeobj);
        if (named < 0) return -1;
        known = known && named != FG_DTYPE_COUNT;
        if (known) *dtype = fg_dl_dtype((fg_dtype)named);
    } else if (descr->kind == 'f') {
        dtype->code = kDLFloat;
    } else if (descr->kind == 'i') {
        dtype->code = kDLInt;
    } else if (descr->kind == 'u') {
        dtype->code = kDLUInt;
    } else if (descr->kind == 'b') {
        dtype->code = kDLBool;
    } else if (descr->kind == 'c') {
        dtype->code = kDLComplex;
    } else {
        known = false;
    }
    if (known) return 0;
    PyErr_Format(PyExc_TypeError, "%s: expected a dtype that flexgemm has, in native byte order, got %S", view->name,
                 (PyObject *)descr);
    return -1;
}

/* ---- views ---- */

int fg_numpy_open(fg_state *state, fg_view *view) {
    PyArrayObject *array = (PyArrayObject *)view->object;
    DLTensor exported = {.device = {kDLCPU, 0}};
    if (export_dtype(state, view, PyArray_DESCR(array), &exported.dtype) < 0) return -1;
    if (!PyArray_ISALIGNED(array)) {
        if (view->output) {
            PyErr_Format(PyExc_ValueError, "%s: expected memory aligned to its elements, as an output needs",
                         view->name);
            return -1;
        }
        /* Of no subclass, which may run code of its own when it is made. */
        view->aligned_copy =
            PyArray_FromArray(array, NULL, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | NPY_ARRAY_ENSUREARRAY);
        if (!view->aligned_copy) return -1;
        view->copied = true;
        array = (PyArrayObject *)view->aligned_copy;
    }
    view->read_only = !PyArray_ISWRITEABLE(array);

    int64_t shape[FG_MAX_NDIM], strides[FG_MAX_NDIM];
    exported.ndim = PyArray_NDIM(array);
    exported.data = PyArray_DATA(array);
    exported.shape = shape;
    exported.strides = strides;
    for (int i = 0; i < exported.ndim && i < FG_MAX_NDIM; i++) {
        shape[i] = PyArray_DIM(array, i);
        strides[i] = PyArray_STRIDE(array, i) / PyArray_ITEMSIZE(array);
    }
    return fg_view_set(view, &exported);
}

bool fg_numpy_is_unmoved(const fg_view *view) {
    PyArrayObject *array = (PyArrayObject *)(view->aligned_copy ? view->aligned_copy : view->object);
    if (view->low == view->high) return true; /* no elements */
    bool same = PyArray_DATA(array) == view->tensor.data && PyArray_NDIM(array) == view->tensor.ndim;
    for (int i = 0; same && i < view->tensor.ndim; i++) same = PyArray_DIM(array, i) == view->tensor.shape[i];
    return same;
}

PyObject *fg_numpy_bool(PyObject *value) {
    if (!PyArray_IsScalar(value, Bool)) return NULL;
    return PyObject_IsTrue(value) == 1 ? Py_True : Py_False;
}

/* ---- arrays of our own ---- */

PyObject *fg_numpy_contiguous(PyObject *array) {
    return PyArray_FromArray((PyArrayObject *)array, NULL, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED);
}

/* NumPy's own dtype, or ml_dtypes'. */
static PyArray_Descr *import_dtype(const fg_state *state, fg_dtype dtype) {
    PyObject *source = NULL;
    const bool builtin = dtype != FG_BFLOAT16 && dtype != FG_FLOAT8_E4M3FN && dtype != FG_FLOAT8_E5M2;
    if (builtin) {
        source = Py_NewRef(state->dtypes[dtype]);
    } else {
        PyObject *ml_dtypes = PyImport_ImportModule("ml_dtypes");
        if (ml_dtypes) source = PyObject_GetAttr(ml_dtypes, state->dtypes[dtype]);
        Py_XDECREF(ml_dtypes);
    }
    PyArray_Descr *descr = NULL;
    if (source && PyArray_DescrConverter(source, &descr) != NPY_SUCCEED) descr = NULL;
    Py_XDECREF(source);
    return descr;
}

PyObject *fg_numpy_empty(const fg_state *state, const int64_t *shape, int ndim, fg_dtype dtype, void **data) {
    npy_intp sizes[FG_MAX_NDIM];
    for (int i = 0; i < ndim; i++) sizes[i] = (npy_intp)shape[i];
    PyArray_Descr *descr = import_dtype(state, dtype);
    if (!descr) return NULL;
    PyObject *array = PyArray_Empty(ndim, sizes, descr, 0); /* steals descr */
    if (array) *data = PyArray_DATA((PyArrayObject *)array);
    return array;
}
