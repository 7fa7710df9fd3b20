/*
 * Groups of index entries that name the same row, and reductions over them.
 */
#include "coords.h"
#include "operation.h"

/* ---- groups ---- */

static const fg_parameter group_rows_parameters[] = {
    FG_INPUT(indices),
    FG_OUTPUT(order),
    FG_OUTPUT(starts),
    FG_WORKSPACE_AND_STREAM,
};

static int group_rows_fill(fg_call *call, void *params) {
    enum { INDICES, ORDER, STARTS };
    fg_group_rows_params *p = params;
    const fg_view *indices = &call->views[INDICES], *order = &call->views[ORDER], *starts = &call->views[STARTS];
    if (fg_expect_matrix(indices, FG_INT32, (fg_dim){"Q", FG_ANY}, (fg_dim){"K", FG_ANY}, NULL) < 0) return -1;
    const int64_t entries = indices->tensor.shape[0] * indices->tensor.shape[1];
    if (entries > INT32_MAX) return fg_wrong_shape(indices, "at most 2^31 - 1 entries");
    if (fg_expect_vector(order, FG_BIT(FG_INT32), entries, "to match indices") < 0 ||
        fg_expect_vector(starts, FG_BIT(FG_INT32), FG_ANY, NULL) < 0) {
        return -1;
    }
    if (starts->tensor.shape[0] < 1 || starts->tensor.shape[0] > INT32_MAX)
        return fg_wrong_shape(starts, "1 to 2^31 - 1 entries");
    p->indices = indices->tensor;
    p->order = order->tensor;
    p->starts = starts->tensor;
    return 0;
}

/* ---- reduction ---- */

static const fg_parameter group_reduce_parameters[] = {
    FG_INPUT(src),  FG_INPUT(order),           FG_INPUT(starts), FG_INPUT_OR_NONE(weights),
    FG_OUTPUT(out), FG_OUTPUT_OR_NONE(argmax), FG_SCALAR(mode),  FG_WORKSPACE_AND_STREAM,
};

static int group_reduce_fill(fg_call *call, void *params) {
    enum { SRC, ORDER, STARTS, WEIGHTS, OUT, ARGMAX, MODE };
    fg_group_reduce_params *p = params;
    const fg_view *views = call->views, *src = &views[SRC], *out = &views[OUT];
    int mode = FG_POOL_SUM;
    const fg_dim src_shape[] = {{"R", FG_ANY}, {"C", FG_ANY}};
    if (fg_arg_choice(call->values[MODE], "mode", call->state->pool_modes, FG_POOL_MODE_COUNT, &mode) < 0 ||
        fg_expect_dtype(src, FG_FLOATS) < 0 || fg_expect_shape(src, 2, src_shape, NULL) < 0 ||
        fg_expect_rows(src) < 0 || fg_expect_vector(&views[ORDER], FG_BIT(FG_INT32), FG_ANY, NULL) < 0) {
        return -1;
    }
    const int64_t rows = src->tensor.shape[0], entries = views[ORDER].tensor.shape[0];
    if (entries > INT32_MAX || (entries > 0 && (rows == 0 || entries % rows != 0)))
        return fg_wrong_shape(&views[ORDER], "up to 2^31 - 1 entries, as many for each row of src");
    const fg_dim out_shape[] = {{"M", FG_ANY}, {NULL, src->tensor.shape[1]}};
    if (fg_expect_dtype_of(out, src) < 0 || fg_expect_shape(out, 2, out_shape, "to match src") < 0 ||
        fg_expect_rows(out) < 0 || fg_expect_vector(&views[STARTS], FG_BIT(FG_INT32), FG_ANY, NULL) < 0) {
        return -1;
    }
    if (views[STARTS].tensor.shape[0] <= out->tensor.shape[0])
        return fg_wrong_shape(&views[STARTS], "more entries than out has rows");
    if (views[WEIGHTS].tensor.present &&
        fg_expect_vector(&views[WEIGHTS], FG_BIT(FG_FLOAT32), entries, "to match order") < 0) {
        return -1;
    }
    const fg_dim out_rows = {NULL, out->tensor.shape[0]}, channels = {NULL, out->tensor.shape[1]};
    if (views[ARGMAX].tensor.present &&
        fg_expect_matrix(&views[ARGMAX], FG_INT32, out_rows, channels, "to match out") < 0) {
        return -1;
    }
    if (views[ARGMAX].tensor.present && mode != FG_POOL_MAX) {
        PyErr_SetString(PyExc_ValueError, "argmax: expected None with a mode other than 'max'");
        return -1;
    }
    p->src = src->tensor;
    p->order = views[ORDER].tensor;
    p->starts = views[STARTS].tensor;
    p->weights = views[WEIGHTS].tensor;
    p->mode = (fg_pool_mode)mode;
    p->out = out->tensor;
    p->argmax = views[ARGMAX].tensor;
    return 0;
}

/* ---- methods ---- */

FG_DEFINE_OPERATION(group_rows)
FG_DEFINE_OPERATION(group_reduce)

PyMethodDef fg_group_methods[] = {
    FG_OPERATION_METHODS(group_rows, "indices, order, starts, *, workspace=None, stream=None",
                         "The positions of the entries of indices, grouped by the row that they name."),
    FG_OPERATION_METHODS(group_reduce,
                         "src, order, starts, weights, out, argmax, *, mode='sum', workspace=None, stream=None",
                         "Sum, mean or maximum of weighted rows over such groups."),
    {NULL, NULL, 0, NULL},
};
