/*
 * Sparse convolution over any map: forward, input gradient, weight and bias gradient.
 */
#include "../kernels/segment.h"

#include "error.h"
#include "operation.h"

static int parse_groups(PyObject *value, int64_t *groups) {
    *groups = 1;
    return fg_arg_int64(value, "groups", 1, INT32_MAX, groups);
}

/* A dimension (0 or 1) that is cut into groups of channels. */
static int expect_groups(const fg_view *view, int dimension, int64_t groups) {
    const int64_t channels = view->tensor.shape[dimension];
    if (channels % groups == 0 && (channels > 0 || groups == 1)) return 0;
    PyErr_Format(PyExc_ValueError, "%s: expected channels in %lld groups, got %lld channels", view->name,
                 (long long)groups, (long long)channels);
    return -1;
}

/* order: row orders of `map`, in sets of groups that divide its volume; without `groups` one set of them all. Where the
 * first set is one order, the rows of the ordered map may follow. */
static int expect_orders(const fg_view *view, const fg_view *map, PyObject *groups, PyObject *phases,
                         fg_order_sets *sets) {
    const int64_t volume = map->tensor.shape[0];
    if (!view->tensor.present) return fg_arg_axes(phases, "phases", FG_MAX_KERNEL, sets->phases);
    const fg_dim any = {"G", FG_ANY}, rows = {"N", map->tensor.shape[1]};
    if (fg_expect_matrix(view, FG_INT32, any, rows, "to match map") < 0) return -1;
    const int64_t orders = view->tensor.shape[0];
    *sets = (fg_order_sets){.sets = 1, .groups = {(int32_t)(orders <= volume ? orders : 0)}};
    if (fg_arg_orders(groups, phases, sets) < 0) return -1;
    bool divides = true;
    for (int i = 0; i < sets->sets; i++)
        divides = divides && sets->groups[i] > 0 && sets->groups[i] <= FG_MAX_GROUPS && volume % sets->groups[i] == 0;
    const int64_t more = orders - fg_order_count(sets);
    if (divides && (more == 0 || (more == volume && sets->sets > 0 && sets->groups[0] == 1))) return 0;
    return fg_wrong_shape(view,
                          "(G, N), G the sum of groups, each of which divides V, or, the first being 1, (G + V, N)");
}

/* segments: the records of `map`. */
static int expect_segments(const fg_view *view, const fg_view *map) {
    const int64_t volume = map->tensor.shape[0], rows = map->tensor.shape[1];
    if (!view->tensor.present) return 0;
    const fg_dim any = {"S", FG_ANY}, words = {"W", FG_ANY};
    if (fg_expect_matrix(view, FG_INT32, any, words, NULL) < 0) return -1;
    const int32_t tiles = fg_segment_tiles_of(view->tensor.shape[1], volume);
    if (tiles > 0) {
        const int32_t segment = fg_segment_rows(tiles);
        if (view->tensor.shape[0] == (rows + segment - 1) / segment) return 0;
    }
    return fg_wrong_shape(view, "that of segment_map for map");
}

/* ---- float8 operands of the forward pass ---- */

/* feats and weight of one dtype, or both of float8, whose kinds mix. */
static int expect_operands(const fg_view *feats, const fg_view *weight) {
    if (fg_expect_dtype(feats, FG_FLOATS | FG_FLOAT8S) < 0) return -1;
    return fg_is_float8(feats->tensor.dtype) ? fg_expect_dtype(weight, FG_FLOAT8S) : fg_expect_dtype_of(weight, feats);
}

/* One for all, shape () or (1,), or one for each of `count` rows of an operand. */
static int expect_scale(const fg_view *view, const fg_view *of, int64_t count, fg_tensor *scale) {
    if (!view->tensor.present) return 0;
    if (!fg_is_float8(of->tensor.dtype)) {
        PyErr_Format(PyExc_ValueError, "%s: expected None, since %s is %s, not float8", view->name, of->name,
                     fg_dtype_name(of->tensor.dtype));
        return -1;
    }
    if (fg_expect_dtype(view, FG_BIT(FG_FLOAT32)) < 0 || fg_expect_contiguous(view) < 0) return -1;
    *scale = view->tensor;
    if (scale->ndim == 1 && scale->shape[0] == count) return 0;
    if (scale->ndim == 1 && scale->shape[0] == 1) scale->ndim = 0;
    if (scale->ndim == 0) return 0;
    fg_text expected = {.length = 0};
    fg_text_add(&expected, "() or (%lld,) to match %s", (long long)count, of->name);
    return fg_wrong_shape(view, expected.data);
}

/* ---- forward ---- */

/* The parameters, in the order of the lists. */
/* clang-format off */
enum {
    FEATS, WEIGHT, BIAS, MAP, OUT, ORDER, SEGMENTS, RESIDUAL, SCALE_FEATS, SCALE_WEIGHT, SCALE_OUT, ORDER_GROUPS,
    PHASES, ACTIVATION, ALGORITHM, PRECISION, DTYPE_FEATS, DTYPE_WEIGHT, DTYPE_OUT, GROUPS,
    OUT_DTYPE, KERNEL_SIZE, ROWS /* of a direct call */
};
/* clang-format on */

static const fg_parameter conv_forward_parameters[] = {
    FG_INPUT(feats),
    FG_INPUT(weight),
    FG_INPUT_OR_NONE(bias),
    FG_INPUT(map),
    FG_OUTPUT(out),
    FG_OPTIONAL_INPUT(order),
    FG_OPTIONAL_INPUT(segments),
    FG_OPTIONAL_INPUT(residual),
    FG_OPTIONAL_INPUT(scale_feats),
    FG_OPTIONAL_INPUT(scale_weight),
    FG_OPTIONAL_INPUT(scale_out),
    FG_SCALAR(order_groups),
    FG_SCALAR(phases),
    FG_SCALAR(activation),
    FG_SCALAR(algorithm),
    FG_SCALAR(precision),
    FG_SCALAR(dtype_feats),
    FG_SCALAR(dtype_weight),
    FG_SCALAR(dtype_out),
    FG_SCALAR(groups),
    FG_WORKSPACE_AND_STREAM,
};

/* The same, of a call that may go directly. */
static const fg_parameter conv_forward_direct_parameters[] = {
    {FG_KEYWORD_feats, FG_REQUIRED | FG_TENSOR | FG_ROWS},
    FG_INPUT(weight),
    FG_INPUT_OR_NONE(bias),
    FG_INPUT(map),
    FG_OUTPUT_OR_NEW(out),
    FG_OPTIONAL_INPUT(order),
    FG_OPTIONAL_INPUT(segments),
    {FG_KEYWORD_residual, FG_KEYWORD_ONLY | FG_TENSOR | FG_NULLABLE | FG_ROWS},
    FG_OPTIONAL_INPUT(scale_feats),
    FG_OPTIONAL_INPUT(scale_weight),
    FG_OPTIONAL_INPUT(scale_out),
    FG_SCALAR(order_groups),
    FG_SCALAR(phases),
    FG_SCALAR(activation),
    FG_SCALAR(algorithm),
    FG_SCALAR(precision),
    FG_ADAPTED_SCALAR(dtype_feats),
    FG_ADAPTED_SCALAR(dtype_weight),
    FG_ADAPTED_SCALAR(dtype_out),
    FG_SCALAR(groups),
    FG_SCALAR(out_dtype),
    FG_REQUIRED_SCALAR(kernel_size),
    FG_REQUIRED_SCALAR(rows),
    FG_DIRECT_END,
};

/* Of a direct call: what the neighbour map says of feats and weight is left to Python where they are others, and so are
 * depthwise convolutions. */
static int expect_fit(fg_call *call, int64_t groups) {
    const fg_tensor *feats = &call->views[FEATS].tensor, *weight = &call->views[WEIGHT].tensor;
    int64_t kernel[3], rows = 0;
    int axes = 0;
    if (fg_arg_int64s(call->values[KERNEL_SIZE], "kernel_size", 1, FG_MAX_KERNEL, 3, kernel, &axes) < 0 ||
        fg_arg_int64(call->values[ROWS], "rows", 0, INT64_MAX, &rows) < 0) {
        return -1;
    }
    bool fits = axes == 3 && weight->ndim == 5 && feats->ndim == 2 && feats->shape[0] == rows;
    for (int i = 0; i < 3 && fits; i++) fits = weight->shape[1 + i] == kernel[i];
    fits = fits && feats->shape[1] / groups == weight->shape[4] && (groups == 1 || groups != feats->shape[1]);
    return fits ? 0 : fg_decline(call);
}

/* Of a direct call, once feats, weight and map are known: makes the output, or sees to its dtype. */
static int make_out(fg_call *call, const fg_conv_forward_params *p) {
    const fg_tensor *feats = &call->views[FEATS].tensor, *out = &call->views[OUT].tensor;
    const bool is_float8 = fg_is_float8(feats->dtype), scaled = call->views[SCALE_OUT].tensor.present;
    if (scaled && !is_float8) return fg_decline(call);
    const unsigned allowed = scaled ? FG_FLOAT8S : is_float8 ? FG_FLOATS : 0;
    fg_dtype dtype = out->present ? out->dtype : scaled ? FG_FLOAT8_E4M3FN : is_float8 ? FG_BFLOAT16 : feats->dtype;
    if (fg_new_dtype(call, call->values[OUT_DTYPE], allowed, &dtype) < 0) return -1;
    if (out->present) return dtype == out->dtype && fg_is_float8(dtype) == scaled ? 0 : fg_decline(call);
    const int64_t shape[] = {call->views[MAP].tensor.shape[1], p->weight.shape[0]};
    return fg_make_output(call, OUT, shape, 2, dtype);
}

static int conv_forward_fill(fg_call *call, void *params) {
    fg_conv_forward_params *p = params;
    fg_view *feats = &call->views[FEATS], *weight = &call->views[WEIGHT], *residual = &call->views[RESIDUAL];
    const fg_view *bias = &call->views[BIAS], *map = &call->views[MAP], *order = &call->views[ORDER];
    fg_view *out = &call->views[OUT];
    if (parse_groups(call->values[GROUPS], &p->groups) < 0 ||
        fg_reinterpret(call, feats, call->values[DTYPE_FEATS], "dtype_feats") < 0 ||
        fg_reinterpret(call, weight, call->values[DTYPE_WEIGHT], "dtype_weight") < 0 ||
        fg_reinterpret(call, out, call->values[DTYPE_OUT], "dtype_out") < 0 ||
        (call->direct && expect_fit(call, p->groups) < 0) || expect_operands(feats, weight) < 0 ||
        fg_expect_features(feats, FG_ANY, FG_ANY, NULL) < 0 || expect_groups(feats, 1, p->groups) < 0 ||
        fg_expect_weight(weight, FG_ANY, FG_ANY, feats->tensor.shape[1] / p->groups, "to match feats channels",
                         &p->weight) < 0 ||
        expect_groups(weight, 0, p->groups) < 0) {
        return -1;
    }
    const int64_t co = p->weight.shape[0];
    const bool is_float8 = fg_is_float8(feats->tensor.dtype);
    if (fg_expect_map(map, p->weight.shape[1], FG_ANY, "to match weight") < 0 ||
        (call->direct && make_out(call, p) < 0) ||
        (is_float8 ? fg_expect_dtype(out, FG_FLOATS | FG_FLOAT8S) : fg_expect_dtype_of(out, feats)) < 0 ||
        fg_expect_features(out, map->tensor.shape[1], co, "to match map and weight") < 0 ||
        expect_scale(&call->views[SCALE_FEATS], feats, feats->tensor.shape[0], &p->scale_feats) < 0 ||
        expect_scale(&call->views[SCALE_WEIGHT], weight, co, &p->scale_weight) < 0 ||
        expect_scale(&call->views[SCALE_OUT], out, 1, &p->scale_out) < 0) {
        return -1;
    }
    /* Whose dtype bias and residual have. */
    const fg_view *added = !is_float8 ? feats : !fg_is_float8(out->tensor.dtype) ? out : bias;
    if (added == bias && !bias->tensor.present) added = residual;
    if (added->tensor.present && fg_expect_dtype(added, FG_FLOATS) < 0) return -1;
    if (bias->tensor.present &&
        (fg_expect_dtype_of(bias, added) < 0 || fg_expect_channels(bias, co, "to match weight") < 0)) {
        return -1;
    }
    if (expect_orders(order, map, call->values[ORDER_GROUPS], call->values[PHASES], &p->sets) < 0 ||
        expect_segments(&call->views[SEGMENTS], map) < 0 ||
        fg_arg_algorithm(call->state, call->values[ALGORITHM], &p->algorithm) < 0) {
        return -1;
    }
    if (fg_expect_residual(residual, added, out) < 0 ||
        fg_arg_activation(call->state, call->values[ACTIVATION], &p->activation) < 0) {
        return -1;
    }
    p->feats = feats->tensor;
    p->bias = bias->tensor;
    p->map = map->tensor;
    p->order = order->tensor;
    p->segments = call->views[SEGMENTS].tensor;
    p->residual = residual->tensor;
    p->out = out->tensor;
    return fg_arg_precision(call->state, call->values[PRECISION], &p->precision);
}

/* ---- input gradient ---- */

static const fg_parameter conv_dgrad_parameters[] = {
    FG_INPUT(grad_out),      FG_INPUT(weight),         FG_INPUT(map),
    FG_OUTPUT(grad_feats),   FG_OPTIONAL_INPUT(order), FG_OPTIONAL_INPUT(segments),
    FG_SCALAR(order_groups), FG_SCALAR(phases),        FG_SCALAR(algorithm),
    FG_SCALAR(mirrored),     FG_SCALAR(precision),     FG_SCALAR(groups),
    FG_WORKSPACE_AND_STREAM,
};

static int conv_dgrad_fill(fg_call *call, void *params) {
    enum {
        GRAD_OUT,
        WEIGHT,
        MAP,
        GRAD_FEATS,
        ORDER,
        SEGMENTS,
        ORDER_GROUPS,
        PHASES,
        ALGORITHM,
        MIRRORED,
        PRECISION,
        GROUPS
    };
    fg_conv_dgrad_params *p = params;
    const fg_view *grad_out = &call->views[GRAD_OUT], *weight = &call->views[WEIGHT];
    const fg_view *map = &call->views[MAP], *grad_feats = &call->views[GRAD_FEATS], *order = &call->views[ORDER];
    if (parse_groups(call->values[GROUPS], &p->groups) < 0 ||
        fg_arg_bool(call->values[MIRRORED], "mirrored", &p->mirrored) < 0 || fg_expect_dtype(grad_out, FG_FLOATS) < 0 ||
        fg_expect_features(grad_out, FG_ANY, FG_ANY, NULL) < 0 || expect_groups(grad_out, 1, p->groups) < 0 ||
        fg_expect_dtype_of(weight, grad_out) < 0 ||
        fg_expect_weight(weight, grad_out->tensor.shape[1], FG_ANY, FG_ANY, "to match grad_out channels", &p->weight) <
            0) {
        return -1;
    }
    /* Mirrored means one coordinate set, so that the rows of both sides are the same. */
    const int64_t rows = p->mirrored ? grad_out->tensor.shape[0] : FG_ANY;
    const char *why = p->mirrored ? "to match weight and, mirrored, grad_out" : "to match weight";
    if (fg_expect_map(map, p->weight.shape[1], rows, why) < 0 || fg_expect_dtype_of(grad_feats, grad_out) < 0 ||
        fg_expect_features(grad_feats, map->tensor.shape[1], p->weight.shape[2] * p->groups,
                           "to match map and weight") < 0) {
        return -1;
    }
    if (expect_orders(order, map, call->values[ORDER_GROUPS], call->values[PHASES], &p->sets) < 0 ||
        expect_segments(&call->views[SEGMENTS], map) < 0 ||
        fg_arg_algorithm(call->state, call->values[ALGORITHM], &p->algorithm) < 0) {
        return -1;
    }
    p->grad_out = grad_out->tensor;
    p->map = map->tensor;
    p->order = order->tensor;
    p->segments = call->views[SEGMENTS].tensor;
    p->grad_feats = grad_feats->tensor;
    return fg_arg_precision(call->state, call->values[PRECISION], &p->precision);
}

/* ---- weight and bias gradient ---- */

static const fg_parameter conv_wgrad_parameters[] = {
    FG_INPUT(grad_out),
    FG_INPUT(feats),
    FG_INPUT(map),
    FG_OUTPUT_OR_NONE(grad_weight),
    FG_OUTPUT_OR_NONE(grad_bias),
    FG_OPTIONAL_INPUT(segments),
    FG_SCALAR(algorithm),
    FG_SCALAR(precision),
    FG_SCALAR(groups),
    FG_SCALAR(concurrent),
    FG_WORKSPACE_AND_STREAM,
};

static int conv_wgrad_fill(fg_call *call, void *params) {
    enum { GRAD_OUT, FEATS, MAP, GRAD_WEIGHT, GRAD_BIAS, SEGMENTS, ALGORITHM, PRECISION, GROUPS, CONCURRENT };
    fg_conv_wgrad_params *p = params;
    const fg_view *grad_out = &call->views[GRAD_OUT], *feats = &call->views[FEATS], *map = &call->views[MAP];
    const fg_view *grad_weight = &call->views[GRAD_WEIGHT], *grad_bias = &call->views[GRAD_BIAS];
    if (parse_groups(call->values[GROUPS], &p->groups) < 0 ||
        fg_arg_bool(call->values[CONCURRENT], "concurrent", &p->concurrent) < 0 ||
        fg_expect_dtype(grad_out, FG_FLOATS) < 0 || fg_expect_features(grad_out, FG_ANY, FG_ANY, NULL) < 0 ||
        expect_groups(grad_out, 1, p->groups) < 0 || fg_expect_dtype_of(feats, grad_out) < 0 ||
        fg_expect_features(feats, FG_ANY, FG_ANY, NULL) < 0 || expect_groups(feats, 1, p->groups) < 0 ||
        fg_expect_map(map, FG_ANY, grad_out->tensor.shape[0], "to match grad_out") < 0) {
        return -1;
    }
    const int64_t co = grad_out->tensor.shape[1], volume = map->tensor.shape[0];
    if (volume < 1 || volume > FG_MAX_VOLUME) return fg_wrong_shape(map, "(V, N) with V of 1 to 343");
    if (grad_weight->tensor.present && (fg_expect_dtype_of(grad_weight, feats) < 0 ||
                                        fg_expect_weight(grad_weight, co, volume, feats->tensor.shape[1] / p->groups,
                                                         "to match grad_out, map and feats", &p->grad_weight) < 0)) {
        return -1;
    }
    if (grad_bias->tensor.present && (fg_expect_dtype_of(grad_bias, feats) < 0 ||
                                      fg_expect_channels(grad_bias, co, "to match grad_out channels") < 0)) {
        return -1;
    }
    if (expect_segments(&call->views[SEGMENTS], map) < 0) return -1;
    p->grad_out = grad_out->tensor;
    p->feats = feats->tensor;
    p->map = map->tensor;
    p->segments = call->views[SEGMENTS].tensor;
    p->grad_bias = grad_bias->tensor;
    if (fg_arg_algorithm(call->state, call->values[ALGORITHM], &p->algorithm) < 0) return -1;
    return fg_arg_precision(call->state, call->values[PRECISION], &p->precision);
}

/* ---- methods ---- */

FG_DEFINE_OPERATION(conv_forward)
FG_DEFINE_DIRECT(conv_forward)
FG_DEFINE_OPERATION(conv_dgrad)
FG_DEFINE_OPERATION(conv_wgrad)

PyMethodDef fg_conv_methods[] = {
    FG_OPERATION_METHODS(
        conv_forward,
        "feats, weight, bias, map, out, *, order=None, segments=None, residual=None, scale_feats=None, "
        "scale_weight=None, "
        "scale_out=None, "
        "order_groups=None, phases=(1, 1, 1), activation=None, algorithm='auto', precision='ieee', dtype_feats=None, "
        "dtype_weight=None, "
        "dtype_out=None, groups=1, workspace=None, stream=None",
        "out[m] = activation(scale_weight * sum_v weight[:, v, :] . (scale_feats * feats)[map[v, m]] + bias + "
        "residual[m])"),
    FG_DIRECT_METHOD(
        conv_forward,
        "feats, weight, bias, map, *, out=None, order=None, segments=None, residual=None, scale_feats=None, "
        "scale_weight=None, "
        "scale_out=None, order_groups=None, phases=(1, 1, 1), activation=None, algorithm='auto', precision='ieee', "
        "dtype_feats=None, "
        "dtype_weight=None, dtype_out=None, groups=1, out_dtype=None, kernel_size, rows, "
        "options=None, workspace=None, stream=None",
        "The same of torch tensors as they are, into a new one; NotImplemented where that is not enough."),
    FG_OPERATION_METHODS(conv_dgrad,
                         "grad_out, weight, map, grad_feats, *, order=None, segments=None, order_groups=None, "
                         "phases=(1, 1, 1), algorithm='auto', "
                         "mirrored=False, precision='ieee', groups=1, workspace=None, stream=None",
                         "grad_feats[n] = sum_v weight[:, v, :]^T . grad_out[map[v, n]]; mirrored: with V - 1 - v."),
    FG_OPERATION_METHODS(
        conv_wgrad,
        "grad_out, feats, map, grad_weight, grad_bias, *, segments=None, algorithm='auto', precision='ieee', groups=1, "
        "concurrent=False, workspace=None, stream=None",
        "grad_weight[:, v, :] = sum_m grad_out[m] (x) feats[map[v, m]]; grad_bias = sum_m grad_out[m]"),
    {NULL, NULL, 0, NULL},
};
