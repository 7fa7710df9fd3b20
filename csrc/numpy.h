/* The only file that speaks NumPy's C API. */
#ifndef FG_NUMPY_H
#define FG_NUMPY_H

#include "tensor.h"

int fg_numpy_init(void);
bool fg_numpy_is_array_type(PyTypeObject *type);

/* Opens a view of a NumPy array. A misaligned input is copied; a misaligned output is an error. */
int fg_numpy_open(fg_state *state, fg_view *view);

/* Whether its memory is still where it was: code of a caller's that runs meanwhile may resize it. */
bool fg_numpy_is_unmoved(const fg_view *view);

/* Py_True or Py_False (borrowed) of a NumPy scalar that is one; NULL: it is none. */
PyObject *fg_numpy_bool(PyObject *value);

/* New references. */
PyObject *fg_numpy_contiguous(PyObject *array); /* itself, or a C-contiguous copy */
PyObject *fg_numpy_empty(const fg_state *state, const int64_t *shape, int ndim, fg_dtype dtype, void **data);

#endif
