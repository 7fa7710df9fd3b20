/* What the operations on voxels ask of coordinates and of the grid that they lie in. */
#ifndef FG_COORDS_H
#define FG_COORDS_H

#include "args.h"
#include "check.h"

/* (B, W, H, D), each at least 1. */
int fg_arg_shape(PyObject *value, int64_t shape[4]);

/* B*W*H*D below 2^63, so that voxels can be numbered. */
int fg_check_cells(const int64_t shape[4]);

/* Both, under a name of its own. */
int fg_arg_grid(PyObject *value, const char *name, int64_t shape[4]);

/* (rows, 4) int32, contiguous; rows may be FG_ANY, `why` says what fixes them. */
int fg_expect_coords(const fg_view *view, int64_t rows, const char *why);

/* (rows,) of one of the dtypes in `allowed`, contiguous. */
int fg_expect_vector(const fg_view *view, unsigned allowed, int64_t rows, const char *why);

#endif
