/*
 * What the operations on voxels ask of coordinates and of the grid that they lie in.
 */
#include "coords.h"

static int parse_shape(PyObject *value, const char *name, int64_t shape[4]) {
    return fg_arg_ints(value, name, 1, INT64_MAX, 4, shape);
}

static int check_cells(const char *name, const int64_t shape[4]) {
    int64_t cells = 1;
    for (int i = 0; i < 4; i++) {
        if (!__builtin_mul_overflow(cells, shape[i], &cells)) continue;
        PyErr_Format(PyExc_ValueError, "%s: expected B*W*H*D below 2^63, got (%lld, %lld, %lld, %lld)", name,
                     (long long)shape[0], (long long)shape[1], (long long)shape[2], (long long)shape[3]);
        return -1;
    }
    return 0;
}

int fg_arg_shape(PyObject *value, int64_t shape[4]) { return parse_shape(value, "shape", shape); }

int fg_check_cells(const int64_t shape[4]) { return check_cells("shape", shape); }

int fg_arg_grid(PyObject *value, const char *name, int64_t shape[4]) {
    return parse_shape(value, name, shape) < 0 ? -1 : check_cells(name, shape);
}

int fg_expect_coords(const fg_view *view, int64_t rows, const char *why) {
    const fg_dim shape[] = {{"N", rows}, {NULL, 4}};
    if (fg_expect_dtype(view, FG_BIT(FG_INT32)) < 0 || fg_expect_shape(view, 2, shape, why) < 0) return -1;
    return fg_expect_contiguous(view);
}

int fg_expect_vector(const fg_view *view, unsigned allowed, int64_t rows, const char *why) {
    const fg_dim shape[] = {{"N", rows}};
    if (fg_expect_dtype(view, allowed) < 0 || fg_expect_shape(view, 1, shape, why) < 0) return -1;
    return fg_expect_contiguous(view);
}
