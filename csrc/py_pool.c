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

/* What a pooling tells besides its result: argmax only of max, count of any; each may be absent. */
static int expect_by_products(const fg_view *argmax, const fg_view *count, fg_pool_mode mode, const fg_tensor *out,
                              bool bounds_too) {
    if (argmax->tensor.present && mode != FG_POOL_MAX) {
        PyErr_SetString(PyExc_ValueError, "argmax: expected None unless mode is 'max'");
        return -1;
    }
    const fg_dim rows = {NULL, out->shape[0]}, channels = {NULL, out->shape[1]};
    if (argmax->tensor.present && fg_expect_matrix(argmax, FG_INT32, rows, channels, "to match out") < 0) return -1;
    if (!count->tensor.present) return 0;
    const int64_t counts = count->tensor.ndim == 1 ? count->tensor.shape[0] : 0;
    const int64_t expected = bounds_too && counts == out->shape[0] + 1 ? counts : out->shape[0];
    return fg_expect_vector(count, FG_BIT(FG_INT32), expected, "to match out");
}

/* ---- over a map ---- */

static const fg_parameter pool_parameters[] = {
    FG_INPUT(feats),          FG_INPUT(map),
    FG_OUTPUT(out),           FG_OUTPUT_OR_NONE(argmax),
    FG_OUTPUT_OR_NONE(count), FG_REQUIRED_SCALAR(mode),
    FG_WORKSPACE_AND_STREAM,
};

static int pool_fill(fg_call *call, void *params) {
    enum { FEATS, MAP, OUT, ARGMAX, COUNT, MODE };
    fg_pool_params *p = params;
    const fg_view *feats = &call->views[FEATS], *map = &call->views[MAP], *out = &call->views[OUT];
    const fg_view *argmax = &call->views[ARGMAX], *count = &call->views[COUNT];
    if (parse_mode(call->state, call->values[MODE], &p->mode) < 0 || fg_expect_dtype(feats, FG_FLOATS) < 0 ||
        fg_expect_features(feats, FG_ANY, FG_ANY, NULL) < 0 || fg_expect_map(map, FG_ANY, FG_ANY, NULL) < 0 ||
        fg_expect_dtype_of(out, feats) < 0 ||
        fg_expect_features(out, map->tensor.shape[1], feats->tensor.shape[1], "to match map and feats") < 0 ||
        expect_by_products(argmax, count, p->mode, &out->tensor, false) < 0) {
        return -1;
    }
    p->feats = feats->tensor;
    p->map = map->tensor;
    p->out = out->tensor;
    p->argmax = argmax->tensor;
    p->count = count->tensor;
    return 0;
}

static const fg_parameter pool_backward_parameters[] = {
    FG_INPUT(grad_out),       FG_INPUT(map),           FG_OUTPUT(grad_feats),
    FG_INPUT_OR_NONE(argmax), FG_INPUT_OR_NONE(count), FG_REQUIRED_SCALAR(mode),
    FG_WORKSPACE_AND_STREAM,
};

static int pool_backward_fill(fg_call *call, void *params) {
    enum { GRAD_OUT, MAP, GRAD_FEATS, ARGMAX, COUNT, MODE };
    fg_pool_backward_params *p = params;
    const fg_view *grad_out = &call->views[GRAD_OUT], *map = &call->views[MAP], *grad_feats = &call->views[GRAD_FEATS];
    const fg_view *argmax = &call->views[ARGMAX], *count = &call->views[COUNT];
    if (parse_mode(call->state, call->values[MODE], &p->mode) < 0 || fg_expect_dtype(grad_out, FG_FLOATS) < 0 ||
        fg_expect_features(grad_out, FG_ANY, FG_ANY, NULL) < 0 || fg_expect_map(map, FG_ANY, FG_ANY, NULL) < 0 ||
        fg_expect_dtype_of(grad_feats, grad_out) < 0 ||
        fg_expect_features(grad_feats, map->tensor.shape[1], grad_out->tensor.shape[1], "to match map and grad_out") <
            0 ||
        expect_by_products(argmax, count, p->mode, &grad_out->tensor, true) < 0) {
        return -1;
    }
    const fg_view *needed = p->mode == FG_POOL_MAX ? argmax : p->mode == FG_POOL_MEAN ? count : NULL;
    if (needed && !needed->tensor.present) {
        PyErr_Format(PyExc_ValueError, "%s: expected what pool told, got None", needed == argmax ? "argmax" : "count");
        return -1;
    }
    p->grad_out = grad_out->tensor;
    p->map = map->tensor;
    p->grad_feats = grad_feats->tensor;
    p->argmax = argmax->tensor;
    p->count = count->tensor;
    return 0;
}

/* ---- over samples ---- */

static const fg_parameter batch_indices_parameters[] = {
    FG_INPUT(coords),
    FG_OUTPUT(batch),
    FG_REQUIRED_SCALAR(samples),
    FG_WORKSPACE_AND_STREAM,
};

static int batch_indices_fill(fg_call *call, void *params) {
    enum { COORDS, BATCH, SAMPLES };
    fg_batch_indices_params *p = params;
    const fg_view *coords = &call->views[COORDS], *batch = &call->views[BATCH];
    const fg_dim one = {NULL, 1};
    if (fg_arg_int64(call->values[SAMPLES], "samples", 1, INT32_MAX, &p->samples) < 0 ||
        fg_expect_coords(coords, FG_ANY, NULL) < 0 ||
        fg_expect_matrix(batch, FG_INT32, (fg_dim){NULL, coords->tensor.shape[0]}, one, "to match coords") < 0) {
        return -1;
    }
    p->coords = coords->tensor;
    p->batch = batch->tensor;
    return 0;
}

/* ---- methods ---- */

FG_DEFINE_OPERATION(pool)
FG_DEFINE_OPERATION(pool_backward)
FG_DEFINE_OPERATION(batch_indices)

PyMethodDef fg_pool_methods[] = {
    FG_OPERATION_METHODS(pool, "feats, map, out, argmax, count, *, mode, workspace=None, stream=None",
                         "out[m] = maximum, mean or sum of feats[map[v, m]] over v."),
    FG_OPERATION_METHODS(pool_backward,
                         "grad_out, map, grad_feats, argmax, count, *, mode, workspace=None, stream=None",
                         "The gradient of pool, by the transposed map."),
    FG_OPERATION_METHODS(batch_indices, "coords, batch, *, samples, workspace=None, stream=None",
                         "batch[n, 0] = the sample of row n, -1 for none."),
    {NULL, NULL, 0, NULL},
};
