/*
 * Voxel structure: the neighbour map of a submanifold convolution, and the order in which to work through its rows.
 */
#include "coords.h"
#include "operation.h"

/* Exactly `count` ints. */
static int parse_ints(PyObject *value, const char *name, int64_t least, int64_t most, int count, int64_t *out) {
    int given;
    if (fg_arg_int64s(value, name, least, most, count, out, &given) < 0) return -1;
    if (given == count) return 0;
    PyErr_Format(PyExc_ValueError, "%s: expected %d ints, got %d", name, count, given);
    return -1;
}

/* ---- neighbour map ---- */

static const fg_parameter neighbor_map_parameters[] = {
    FG_INPUT(coords),
    FG_OUTPUT(map),
    FG_REQUIRED_SCALAR(shape),
    FG_REQUIRED_SCALAR(kernel_size),
    FG_REQUIRED_SCALAR(dilation),
    FG_SCALAR(transposed),
    FG_SCALAR(check),
    FG_WORKSPACE_AND_STREAM,
};

static int neighbor_map_fill(fg_call *call, void *params) {
    enum { COORDS, MAP, SHAPE, KERNEL_SIZE, DILATION, TRANSPOSED, CHECK };
    fg_neighbor_map_params *p = params;
    const fg_view *coords = &call->views[COORDS], *map = &call->views[MAP];
    int64_t kernel[3], dilation[3];
    if (fg_arg_shape(call->values[SHAPE], p->shape) < 0 || fg_check_cells(p->shape) < 0 ||
        parse_ints(call->values[KERNEL_SIZE], "kernel_size", 1, FG_MAX_KERNEL, 3, kernel) < 0 ||
        parse_ints(call->values[DILATION], "dilation", 1, INT32_MAX, 3, dilation) < 0 ||
        fg_arg_bool(call->values[TRANSPOSED], "transposed", &p->transposed) < 0 ||
        fg_arg_bool(call->values[CHECK], "check", &p->check) < 0) {
        return -1;
    }
    for (int i = 0; i < 3; i++) {
        p->kernel[i] = (int32_t)kernel[i];
        p->dilation[i] = (int32_t)dilation[i];
    }
    const int64_t volume = kernel[0] * kernel[1] * kernel[2];
    if (fg_expect_coords(coords, FG_ANY, NULL) < 0) return -1;
    const fg_dim map_shape[] = {{NULL, volume}, {NULL, coords->tensor.shape[0]}};
    if (fg_expect_dtype(map, FG_BIT(FG_INT32)) < 0 ||
        fg_expect_shape(map, 2, map_shape, "to match kernel_size and coords") < 0 || fg_expect_contiguous(map) < 0) {
        return -1;
    }
    p->coords = coords->tensor;
    p->map = map->tensor;
    return 0;
}

/* ---- row order ---- */

static const fg_parameter row_order_parameters[] = {
    FG_INPUT(map),
    FG_OUTPUT(order),
    FG_REQUIRED_SCALAR(kernel_size),
    FG_WORKSPACE_AND_STREAM,
};

static int row_order_fill(fg_call *call, void *params) {
    enum { MAP, ORDER, KERNEL_SIZE };
    fg_row_order_params *p = params;
    const fg_view *map = &call->views[MAP], *order = &call->views[ORDER];
    int64_t kernel[3];
    if (parse_ints(call->values[KERNEL_SIZE], "kernel_size", 1, FG_MAX_KERNEL, 3, kernel) < 0) return -1;
    for (int i = 0; i < 3; i++) p->kernel[i] = (int32_t)kernel[i];
    const fg_dim map_shape[] = {{"V", kernel[0] * kernel[1] * kernel[2]}, {"N", FG_ANY}};
    if (fg_expect_dtype(map, FG_BIT(FG_INT32)) < 0 || fg_expect_shape(map, 2, map_shape, "to match kernel_size") < 0 ||
        fg_expect_contiguous(map) < 0) {
        return -1;
    }
    const fg_dim order_shape[] = {{"N", map->tensor.shape[1]}};
    if (fg_expect_dtype(order, FG_BIT(FG_INT32)) < 0 || fg_expect_shape(order, 1, order_shape, "to match map") < 0 ||
        fg_expect_contiguous(order) < 0) {
        return -1;
    }
    p->map = map->tensor;
    p->order = order->tensor;
    return 0;
}

/* ---- methods ---- */

FG_DEFINE_OPERATION(neighbor_map)
FG_DEFINE_OPERATION(row_order)

PyMethodDef fg_voxel_methods[] = {
    FG_OPERATION_METHODS(neighbor_map,
                         "coords, map, *, shape, kernel_size, dilation, transposed=False, check=False, workspace=None, "
                         "stream=None",
                         "map[v, n] = row of the voxel at kernel offset v from coords[n], -1 where there is none."),
    FG_OPERATION_METHODS(row_order, "map, order, *, kernel_size, workspace=None, stream=None",
                         "Columns of map sorted so that neighbours in order have neighbours at the same offsets."),
    {NULL, NULL, 0, NULL},
};
