/*
 * Depthwise convolution over any map: each output channel reads one input channel, and each input channel may have
 * several.
 */
#include "operation.h"

static const fg_parameter depthwise_forward_parameters[] = {
    FG_INPUT(feats),       FG_INPUT(weight),        FG_INPUT_OR_NONE(bias),
    FG_INPUT(map),         FG_OUTPUT(out),          FG_OPTIONAL_INPUT(residual),
    FG_SCALAR(activation), FG_WORKSPACE_AND_STREAM,
};

/* Channels of the wider side are a multiple of those of the other. */
static int expect_multiple(const fg_view *view, int64_t channels) {
    const int64_t given = view->tensor.shape[1];
    if (channels > 0 ? given > 0 && given % channels == 0 : given == 0) return 0;
    PyErr_Format(PyExc_ValueError, "%s: expected a multiple of the %lld input channels, got %lld", view->name,
                 (long long)channels, (long long)given);
    return -1;
}

static int depthwise_forward_fill(fg_call *call, void *params) {
    enum { FEATS, WEIGHT, BIAS, MAP, OUT, RESIDUAL, ACTIVATION };
    fg_depthwise_forward_params *p = params;
    const fg_view *feats = &call->views[FEATS], *weight = &call->views[WEIGHT], *bias = &call->views[BIAS];
    const fg_view *map = &call->views[MAP], *out = &call->views[OUT];
    fg_view *residual = &call->views[RESIDUAL];
    if (fg_expect_dtype(feats, FG_FLOATS) < 0 || fg_expect_features(feats, FG_ANY, FG_ANY, NULL) < 0 ||
        fg_expect_dtype_of(weight, feats) < 0 ||
        fg_expect_weight(weight, FG_ANY, FG_ANY, 1, "of one channel each", &p->weight) < 0 ||
        fg_expect_map(map, p->weight.shape[1], FG_ANY, "to match weight") < 0 || fg_expect_dtype_of(out, feats) < 0 ||
        fg_expect_features(out, map->tensor.shape[1], p->weight.shape[0], "to match map and weight") < 0 ||
        expect_multiple(out, feats->tensor.shape[1]) < 0) {
        return -1;
    }
    if (bias->tensor.present &&
        (fg_expect_dtype_of(bias, feats) < 0 || fg_expect_channels(bias, p->weight.shape[0], "to match weight") < 0)) {
        return -1;
    }
    if (fg_expect_residual(residual, out, out) < 0) return -1;
    p->feats = feats->tensor;
    p->bias = bias->tensor;
    p->map = map->tensor;
    p->residual = residual->tensor;
    p->out = out->tensor;
    return fg_arg_activation(call->state, call->values[ACTIVATION], &p->activation);
}

static const fg_parameter depthwise_dgrad_parameters[] = {
    FG_INPUT(grad_out),    FG_INPUT(weight),    FG_INPUT(map),
    FG_OUTPUT(grad_feats), FG_SCALAR(mirrored), FG_WORKSPACE_AND_STREAM,
};

static int depthwise_dgrad_fill(fg_call *call, void *params) {
    enum { GRAD_OUT, WEIGHT, MAP, GRAD_FEATS, MIRRORED };
    fg_depthwise_dgrad_params *p = params;
    const fg_view *grad_out = &call->views[GRAD_OUT], *weight = &call->views[WEIGHT];
    const fg_view *map = &call->views[MAP], *grad_feats = &call->views[GRAD_FEATS];
    if (fg_arg_bool(call->values[MIRRORED], "mirrored", &p->mirrored) < 0 || fg_expect_dtype(grad_out, FG_FLOATS) < 0 ||
        fg_expect_features(grad_out, FG_ANY, FG_ANY, NULL) < 0 || fg_expect_dtype_of(weight, grad_out) < 0 ||
        fg_expect_weight(weight, grad_out->tensor.shape[1], FG_ANY, 1, "to match grad_out channels", &p->weight) < 0) {
        return -1;
    }
    const int64_t rows = p->mirrored ? grad_out->tensor.shape[0] : FG_ANY;
    const char *why = p->mirrored ? "to match weight and, mirrored, grad_out" : "to match weight";
    if (fg_expect_map(map, p->weight.shape[1], rows, why) < 0 || fg_expect_dtype_of(grad_feats, grad_out) < 0 ||
        fg_expect_features(grad_feats, map->tensor.shape[1], FG_ANY, "to match map") < 0 ||
        expect_multiple(grad_out, grad_feats->tensor.shape[1]) < 0) {
        return -1;
    }
    p->grad_out = grad_out->tensor;
    p->map = map->tensor;
    p->grad_feats = grad_feats->tensor;
    return 0;
}

static const fg_parameter depthwise_wgrad_parameters[] = {
    FG_INPUT(grad_out), FG_INPUT(feats), FG_INPUT(map), FG_OUTPUT(grad_weight), FG_WORKSPACE_AND_STREAM,
};

static int depthwise_wgrad_fill(fg_call *call, void *params) {
    enum { GRAD_OUT, FEATS, MAP, GRAD_WEIGHT };
    fg_depthwise_wgrad_params *p = params;
    const fg_view *grad_out = &call->views[GRAD_OUT], *feats = &call->views[FEATS], *map = &call->views[MAP];
    const fg_view *grad_weight = &call->views[GRAD_WEIGHT];
    if (fg_expect_dtype(grad_out, FG_FLOATS) < 0 || fg_expect_features(grad_out, FG_ANY, FG_ANY, NULL) < 0 ||
        fg_expect_dtype_of(feats, grad_out) < 0 || fg_expect_features(feats, FG_ANY, FG_ANY, NULL) < 0 ||
        expect_multiple(grad_out, feats->tensor.shape[1]) < 0 ||
        fg_expect_map(map, FG_ANY, grad_out->tensor.shape[0], "to match grad_out") < 0 ||
        fg_expect_dtype_of(grad_weight, feats) < 0 ||
        fg_expect_weight(grad_weight, grad_out->tensor.shape[1], map->tensor.shape[0], 1, "to match grad_out and map",
                         &p->grad_weight) < 0) {
        return -1;
    }
    p->grad_out = grad_out->tensor;
    p->feats = feats->tensor;
    p->map = map->tensor;
    return 0;
}

/* ---- methods ---- */

FG_DEFINE_OPERATION(depthwise_forward)
FG_DEFINE_OPERATION(depthwise_dgrad)
FG_DEFINE_OPERATION(depthwise_wgrad)

PyMethodDef fg_depthwise_methods[] = {
    FG_OPERATION_METHODS(
        depthwise_forward,
        "feats, weight, bias, map, out, *, residual=None, activation=None, workspace=None, stream=None",
        "out[m, o] = activation(bias[o] + sum_v weight[o, v] * feats[map[v, m], o / multiplier] + residual[m, o])"),
    FG_OPERATION_METHODS(
        depthwise_dgrad, "grad_out, weight, map, grad_feats, *, mirrored=False, workspace=None, stream=None",
        "grad_feats[n, c] = sum_v sum_o weight[o, v] * grad_out[map[v, n], o]; mirrored: with V - 1 - v."),
    FG_OPERATION_METHODS(depthwise_wgrad, "grad_out, feats, map, grad_weight, *, workspace=None, stream=None",
                         "grad_weight[o, v] = sum_m grad_out[m, o] * feats[map[v, m], o / multiplier]"),
    {NULL, NULL, 0, NULL},
};
