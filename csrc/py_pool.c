/*
 * Pooling: over a neighbour map, and over all voxels of a sample.
 */
#include "coords.h"
#include "operation.h"

static int parse_mode(const fg_state *state, PyObject *value, fg_pool_mode *mode) {
    int choice = 0;
    if (fg_arg_choice(value, "mode", state->pool_modes, FG_POOL_MODE_COUNT, &choice) < 0) return -1;
    *mode = (fg_pool_mode)choice;
    return 0;
}

/* rows x channels, inner stride 1. Either size may be FG_ANY. */
static int expect_features(const fg_view *view, int64_t rows, int64_t channels, const char *why) {
    const fg_dim shape[] = {{"N", rows}, {"C", channels}};
    if (fg_expect_shape(view, 2, shape, why) < 0) return -1;
    return fg_expect_rows(view);
}

/* (V, columns) or (rows, channels) int32, contiguous. */
static int expect_matrix(const fg_view *view, const char *symbol, int64_t rows, int64_t columns, const char *why) {
    const fg_dim shape[] = {{symbol, rows}, {"N", columns}};
    if (fg_expect_dtype(view, FG_BIT(FG_INT32)) < 0 || fg_expect_shape(view, 2, shape, why) < 0) return -1;
    return fg_expect_contiguous(view);
}

/* What a pooling tells besides its result: chosen only of max, count of any; each may be absent. */
static int expect_by_products(const fg_view *chosen, const fg_view *count, fg_pool_mode mode, const fg_tensor *out) {
    if (chosen->tensor.present && mode != FG_POOL_MAX) {
        PyErr_SetString(PyExc_ValueError, "chosen: expected None unless mode is 'max'");
        return -1;
    }
    if (chosen->tensor.present && expect_matrix(chosen, "M", out->shape[0], out->shape[1], "to match out") < 0)
        return -1;
    if (count->tensor.present && fg_expect_vector(count, FG_BIT(FG_INT32), out->shape[0], "to match out") < 0)
        return -1;
    return 0;
}

/* ---- over a map ---- */

static const fg_parameter pool_parameters[] = {
    FG_INPUT(feats),          FG_INPUT(map),
    FG_OUTPUT(out),           FG_OUTPUT_OR_NONE(chosen),
    FG_OUTPUT_OR_NONE(count), FG_REQUIRED_SCALAR(mode),
    FG_WORKSPACE_AND_STREAM,
};

static int pool_fill(fg_call *call, void *params) {
    enum { FEATS, MAP, OUT, CHOSEN, COUNT, MODE };
    fg_pool_params *p = params;
    const fg_view *feats = &call->views[FEATS], *map = &call->views[MAP], *out = &call->views[OUT];
    const fg_view *chosen = &call->views[CHOSEN], *count = &call->views[COUNT];
    if (parse_mode(call->state, call->values[MODE], &p->mode) < 0 || fg_expect_dtype(feats, FG_FLOATS) < 0 ||
        expect_features(feats, FG_ANY, FG_ANY, NULL) < 0 || expect_matrix(map, "V", FG_ANY, FG_ANY, NULL) < 0 ||
        fg_expect_dtype_of(out, feats) < 0 ||
        expect_features(out, map->tensor.shape[1], feats->tensor.shape[1], "to match map and feats") < 0 ||
        expect_by_products(chosen, count, p->mode, &out->tensor) < 0) {
        return -1;
    }
    p->feats = feats->tensor;
    p->map = map->tensor;
    p->out = out->tensor;
    p->chosen = chosen->tensor;
    p->count = count->tensor;
    return 0;
}

static const fg_parameter pool_backward_parameters[] = {
    FG_INPUT(grad_out),       FG_INPUT(map),           FG_OUTPUT(grad_feats),
    FG_INPUT_OR_NONE(chosen), FG_INPUT_OR_NONE(count), FG_REQUIRED_SCALAR(mode),
    FG_WORKSPACE_AND_STREAM,
};

static int pool_backward_fill(fg_call *call, void *params) {
    enum { GRAD_OUT, MAP, GRAD_FEATS, CHOSEN, COUNT, MODE };
    fg_pool_backward_params *p = params;
    const fg_view *grad_out = &call->views[GRAD_OUT], *map = &call->views[MAP], *grad_feats = &call->views[GRAD_FEATS];
    const fg_view *chosen = &call->views[CHOSEN], *count = &call->views[COUNT];
    if (parse_mode(call->state, call->values[MODE], &p->mode) < 0 || fg_expect_dtype(grad_out, FG_FLOATS) < 0 ||
        expect_features(grad_out, FG_ANY, FG_ANY, NULL) < 0 || expect_matrix(map, "V", FG_ANY, FG_ANY, NULL) < 0 ||
        fg_expect_dtype_of(grad_feats, grad_out) < 0 ||
        expect_features(grad_feats, map->tensor.shape[1], grad_out->tensor.shape[1], "to match map and grad_out") < 0 ||
        expect_by_products(chosen, count, p->mode, &grad_out->tensor) < 0) {
        return -1;
    }
    const fg_view *needed = p->mode == FG_POOL_MAX ? chosen : p->mode == FG_POOL_MEAN ? count : NULL;
    if (needed && !needed->tensor.present) {
        PyErr_Format(PyExc_ValueError, "%s: expected what pool told, got None", needed == chosen ? "chosen" : "count");
        return -1;
    }
    p->grad_out = grad_out->tensor;
    p->map = map->tensor;
    p->grad_feats = grad_feats->tensor;
    p->chosen = chosen->tensor;
    p->count = count->tensor;
    return 0;
}

/* ---- over samples ---- */

static const fg_parameter batch_rows_parameters[] = {
    FG_INPUT(coords), FG_OUTPUT(batch), FG_OUTPUT(order), FG_OUTPUT(bounds), FG_WORKSPACE_AND_STREAM,
};

static int expect_bounds(const fg_view *bounds, int64_t samples, const char *why) {
    if (fg_expect_vector(bounds, FG_BIT(FG_INT32), samples, why) < 0) return -1;
    return bounds->tensor.shape[0] > 1 ? 0 : fg_wrong_shape(bounds, "(B + 1,) with B of at least 1");
}

static int batch_rows_fill(fg_call *call, void *params) {
    enum { COORDS, BATCH, ORDER, BOUNDS };
    fg_batch_rows_params *p = params;
    const fg_view *coords = &call->views[COORDS], *batch = &call->views[BATCH], *order = &call->views[ORDER];
    const fg_view *bounds = &call->views[BOUNDS];
    if (fg_expect_coords(coords, FG_ANY, NULL) < 0 ||
        fg_expect_vector(batch, FG_BIT(FG_INT32), coords->tensor.shape[0], "to match coords") < 0 ||
        fg_expect_vector(order, FG_BIT(FG_INT32), coords->tensor.shape[0], "to match coords") < 0 ||
        expect_bounds(bounds, FG_ANY, NULL) < 0) {
        return -1;
    }
    p->coords = coords->tensor;
    p->batch = batch->tensor;
    p->order = order->tensor;
    p->bounds = bounds->tensor;
    return 0;
}

static const fg_parameter global_pool_parameters[] = {
    FG_INPUT(feats),           FG_INPUT(order),          FG_INPUT(bounds),         FG_OUTPUT(out),
    FG_OUTPUT_OR_NONE(chosen), FG_OUTPUT_OR_NONE(count), FG_REQUIRED_SCALAR(mode), FG_WORKSPACE_AND_STREAM,
};

static int global_pool_fill(fg_call *call, void *params) {
    enum { FEATS, ORDER, BOUNDS, OUT, CHOSEN, COUNT, MODE };
    fg_global_pool_params *p = params;
    const fg_view *feats = &call->views[FEATS], *order = &call->views[ORDER], *bounds = &call->views[BOUNDS];
    const fg_view *out = &call->views[OUT], *chosen = &call->views[CHOSEN], *count = &call->views[COUNT];
    if (parse_mode(call->state, call->values[MODE], &p->mode) < 0 || fg_expect_dtype(feats, FG_FLOATS) < 0 ||
        expect_features(feats, FG_ANY, FG_ANY, NULL) < 0 ||
        fg_expect_vector(order, FG_BIT(FG_INT32), feats->tensor.shape[0], "to match feats") < 0 ||
        expect_bounds(bounds, FG_ANY, NULL) < 0 || fg_expect_dtype_of(out, feats) < 0 ||
        expect_features(out, bounds->tensor.shape[0] - 1, feats->tensor.shape[1], "to match bounds and feats") < 0 ||
        expect_by_products(chosen, count, p->mode, &out->tensor) < 0) {
        return -1;
    }
    p->feats = feats->tensor;
    p->order = order->tensor;
    p->bounds = bounds->tensor;
    p->out = out->tensor;
    p->chosen = chosen->tensor;
    p->count = count->tensor;
    return 0;
}

/* ---- methods ---- */

FG_DEFINE_OPERATION(pool)
FG_DEFINE_OPERATION(pool_backward)
FG_DEFINE_OPERATION(batch_rows)
FG_DEFINE_OPERATION(global_pool)

PyMethodDef fg_pool_methods[] = {
    FG_OPERATION_METHODS(pool, "feats, map, out, chosen, count, *, mode, workspace=None, stream=None",
                         "out[m] = maximum, mean or sum of feats[map[v, m]] over v."),
    FG_OPERATION_METHODS(pool_backward,
                         "grad_out, map, grad_feats, chosen, count, *, mode, workspace=None, stream=None",
                         "The gradient of pool or global_pool, by the transposed map."),
    FG_OPERATION_METHODS(batch_rows, "coords, batch, order, bounds, *, workspace=None, stream=None",
                         "order[bounds[b]:bounds[b + 1]] = the rows of sample b; batch[n] = the sample of row n."),
    FG_OPERATION_METHODS(global_pool, "feats, order, bounds, out, chosen, count, *, mode, workspace=None, stream=None",
                         "out[b] = maximum, mean or sum of feats[order[bounds[b]:bounds[b + 1]]]."),
    {NULL, NULL, 0, NULL},
};
