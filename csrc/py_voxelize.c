/*
 * From points to voxels: the code of the voxel around each point, and the distinct ones among sorted codes.
 */
#include "coords.h"
#include "operation.h"

/* ---- codes ---- */

static const fg_parameter voxel_codes_parameters[] = {
    FG_INPUT(points),           FG_OUTPUT(code),           FG_OUTPUT_OR_NONE(places), FG_REQUIRED_SCALAR(voxel_size),
    FG_REQUIRED_SCALAR(origin), FG_REQUIRED_SCALAR(shape), FG_WORKSPACE_AND_STREAM,
};

static int voxel_codes_fill(fg_call *call, void *params) {
    enum { POINTS, CODE, PLACES, VOXEL_SIZE, ORIGIN, SHAPE };
    fg_voxel_codes_params *p = params;
    const fg_view *points = &call->views[POINTS], *code = &call->views[CODE], *places = &call->views[PLACES];
    if (fg_arg_floats(call->values[VOXEL_SIZE], "voxel_size", 3, p->voxel_size) < 0 ||
        fg_arg_floats(call->values[ORIGIN], "origin", 3, p->origin) < 0 ||
        fg_arg_shape(call->values[SHAPE], p->shape) < 0 || fg_check_cells(p->shape) < 0) {
        return -1;
    }
    for (int axis = 0; axis < 3; axis++) {
        if (p->voxel_size[axis] > 0.0f) continue;
        PyErr_Format(PyExc_ValueError, "voxel_size: expected positive numbers, got %R", call->values[VOXEL_SIZE]);
        return -1;
    }
    const int64_t columns = points->tensor.ndim == 2 ? points->tensor.shape[1] : 0;
    if (columns != 3 && columns != 4) return fg_wrong_shape(points, "(N, 3) or (N, 4)");
    const int64_t count = points->tensor.shape[0];
    const unsigned codes = fg_sequence_bits(FG_BXYZ, p->shape) < 32 ? FG_OFFSETS : FG_BIT(FG_INT64);
    if (fg_expect_dtype(points, FG_BIT(FG_FLOAT32)) < 0 || fg_expect_contiguous(points) < 0 ||
        fg_expect_vector(code, codes, count, "to match points") < 0) {
        return -1;
    }
    const fg_dim rows = {NULL, count}, four = {NULL, 4};
    if (places->tensor.present && fg_expect_matrix(places, FG_FLOAT32, rows, four, "to match points") < 0) return -1;
    p->points = points->tensor;
    p->code = code->tensor;
    p->places = places->tensor;
    return 0;
}

/* ---- distinct keys ---- */

static const fg_parameter unique_ranks_parameters[] = {
    FG_INPUT(sorted),
    FG_OUTPUT(ranks),
    FG_OUTPUT(count),
    FG_WORKSPACE_AND_STREAM,
};

static int unique_ranks_fill(fg_call *call, void *params) {
    enum { SORTED, RANKS, COUNT };
    fg_unique_ranks_params *p = params;
    const fg_view *sorted = &call->views[SORTED];
    if (fg_expect_vector(sorted, FG_OFFSETS, FG_ANY, NULL) < 0) return -1;
    if (sorted->tensor.shape[0] > INT32_MAX) return fg_wrong_shape(sorted, "at most 2^31 - 1 keys");
    if (fg_expect_vector(&call->views[RANKS], FG_BIT(FG_INT32), sorted->tensor.shape[0], "to match sorted") < 0 ||
        fg_expect_vector(&call->views[COUNT], FG_BIT(FG_INT32), 1, NULL) < 0) {
        return -1;
    }
    p->sorted = sorted->tensor;
    p->ranks = call->views[RANKS].tensor;
    p->count = call->views[COUNT].tensor;
    return 0;
}

static const fg_parameter unique_groups_parameters[] = {
    FG_INPUT(sorted), FG_INPUT(order),   FG_INPUT(ranks),    FG_OUTPUT(keys),         FG_OUTPUT(starts),
    FG_OUTPUT(first), FG_OUTPUT(counts), FG_OUTPUT(inverse), FG_WORKSPACE_AND_STREAM,
};

static int unique_groups_fill(fg_call *call, void *params) {
    enum { SORTED, ORDER, RANKS, KEYS, STARTS, FIRST, COUNTS, INVERSE };
    fg_unique_groups_params *p = params;
    const fg_view *views = call->views, *sorted = &views[SORTED], *keys = &views[KEYS];
    const unsigned int32 = FG_BIT(FG_INT32);
    if (fg_expect_vector(sorted, FG_OFFSETS, FG_ANY, NULL) < 0) return -1;
    const int64_t count = sorted->tensor.shape[0];
    if (count > INT32_MAX) return fg_wrong_shape(sorted, "at most 2^31 - 1 keys");
    if (fg_expect_vector(&views[ORDER], int32, count, "to match sorted") < 0 ||
        fg_expect_vector(&views[RANKS], int32, count, "to match sorted") < 0 ||
        fg_expect_vector(keys, FG_BIT(sorted->tensor.dtype), FG_ANY, NULL) < 0) {
        return -1;
    }
    const int64_t groups = keys->tensor.shape[0];
    if (groups > count) return fg_wrong_shape(keys, "no more keys than sorted has");
    if (fg_expect_vector(&views[STARTS], int32, groups + 1, "to match keys") < 0 ||
        fg_expect_vector(&views[FIRST], int32, groups, "to match keys") < 0 ||
        fg_expect_vector(&views[COUNTS], int32, groups, "to match keys") < 0 ||
        fg_expect_vector(&views[INVERSE], int32, count, "to match sorted") < 0) {
        return -1;
    }
    p->sorted = sorted->tensor;
    p->order = views[ORDER].tensor;
    p->ranks = views[RANKS].tensor;
    p->keys = keys->tensor;
    p->starts = views[STARTS].tensor;
    p->first = views[FIRST].tensor;
    p->counts = views[COUNTS].tensor;
    p->inverse = views[INVERSE].tensor;
    return 0;
}

/* ---- methods ---- */

FG_DEFINE_OPERATION(voxel_codes)
FG_DEFINE_OPERATION(unique_ranks)
FG_DEFINE_OPERATION(unique_groups)

PyMethodDef fg_voxelize_methods[] = {
    FG_OPERATION_METHODS(voxel_codes, "points, code, places, *, voxel_size, origin, shape, workspace=None, stream=None",
                         "The number of the voxel around each point, -1 for points outside."),
    FG_OPERATION_METHODS(unique_ranks, "sorted, ranks, count, *, workspace=None, stream=None",
                         "How many distinct numbers there are in sorted keys, and up to each of them."),
    FG_OPERATION_METHODS(unique_groups,
                         "sorted, order, ranks, keys, starts, first, counts, inverse, *, workspace=None, stream=None",
                         "The distinct keys, and the rows of each."),
    {NULL, NULL, 0, NULL},
};
