/*
 * Products (dense and grouped by rows) and the casts to float8 that feed them.
 */
#include "operation.h"

/* ---- float8 behind uint8 ---- */

/* dtype_a, dtype_b, dtype: names what a uint8 array holds; of any other array it must be the dtype. */
static int reinterpret(fg_call *call, fg_view *view, PyObject *dtype, const char *name) {
    fg_dtype named = view->tensor.dtype;
    if (!dtype || dtype == Py_None) return 0;
    if (fg_arg_dtype(call->state, dtype, name, &named) < 0) return -1;
    const bool holds = view->tensor.dtype == FG_UINT8 && (FG_BIT(named) & FG_FLOAT8S);
    if (!holds && fg_expect_dtype(view, FG_BIT(named)) < 0) return -1;
    view->tensor.dtype = named;
    return 0;
}

/* ---- scales ---- */

/* One scale per tensor, shape () or (1,), or one per row, shape (rows,). Grouped operands (groups >= 0) have those per
 * group: (G,) or (G, rows). With a single row both kinds are the same. */
static int expect_scale(const fg_view *view, int64_t groups, int64_t rows, const char *symbol, const char *operand,
                        fg_scale_kind *kind, fg_tensor *scale) {
    const fg_tensor *tensor = &view->tensor;
    *kind = FG_SCALE_NONE;
    if (!tensor->present) return 0;
    if (fg_expect_dtype(view, FG_BIT(FG_FLOAT32)) < 0 || fg_expect_contiguous(view) < 0) return -1;
    const int batch = groups >= 0 ? 1 : 0; /* leading dimensions */
    const bool leads = !batch || (tensor->ndim >= 1 && tensor->shape[0] == groups);
    const bool one = tensor->ndim == 0 || (tensor->ndim == 1 && tensor->shape[0] == 1);
    if (tensor->ndim == batch + 1 && leads && tensor->shape[batch] == rows) {
        *kind = FG_SCALE_ROW;
    } else if (batch ? (tensor->ndim == 1 && leads) || (one && groups == 1) : one) {
        *kind = FG_SCALE_TENSOR;
    } else {
        char expected[128];
        if (batch) {
            PyOS_snprintf(expected, sizeof expected, "(%lld,) or (%lld, %lld) to match %s", (long long)groups,
                          (long long)groups, (long long)rows, operand);
        } else {
            PyOS_snprintf(expected, sizeof expected, "() or (%s,) = (%lld,) to match %s", symbol, (long long)rows,
                          operand);
        }
        return fg_wrong_shape(view, expected);
    }
    *scale = *tensor;
    if (*kind == FG_SCALE_TENSOR) { /* as the contract has it: () or (G) */
        scale->ndim = batch;
        scale->shape[0] = groups;
        scale->strides[0] = 1;
    }
    return 0;
}

/* ---- product ---- */

static const fg_parameter gemm_parameters[] = {
    FG_INPUT(a),
    FG_INPUT(b),
    FG_OUTPUT(out),
    FG_OPTIONAL_INPUT(scale_a),
    FG_OPTIONAL_INPUT(scale_b),
    FG_OPTIONAL_INPUT(bias),
    FG_OPTIONAL_INPUT(offsets),
    FG_SCALAR(dtype_a),
    FG_SCALAR(dtype_b),
    FG_SCALAR(precision),
    FG_WORKSPACE_AND_STREAM,
};

static int expect_offsets(const fg_view *view, int64_t groups) {
    if (fg_expect_dtype(view, FG_OFFSETS) < 0) return -1;
    const int64_t length = view->tensor.ndim == 1 ? view->tensor.shape[0] : -1;
    if (length != groups && length != groups + 1) {
        char expected[96];
        PyOS_snprintf(expected, sizeof expected, "(%lld,) or (%lld,) to match the groups of b", (long long)groups,
                      (long long)groups + 1);
        return fg_wrong_shape(view, expected);
    }
    return fg_expect_contiguous(view);
}

static int expect_bias(const fg_view *view, const fg_view *out, bool grouped, int64_t groups, int64_t n) {
    if (!view->tensor.present) return 0;
    const fg_dim shape[] = {{"G", groups}, {"N", n}};
    if (fg_expect_dtype(view, FG_BIT(FG_FLOAT32) | FG_BIT(out->tensor.dtype)) < 0 ||
        fg_expect_shape(view, grouped ? 2 : 1, grouped ? shape : shape + 1, "to match b") < 0) {
        return -1;
    }
    return fg_expect_contiguous(view);
}

static int gemm_fill(fg_call *call, void *params) {
    enum { A, B, OUT, SCALE_A, SCALE_B, BIAS, OFFSETS, DTYPE_A, DTYPE_B, PRECISION };
    fg_gemm_params *p = params;
    fg_view *a = &call->views[A], *b = &call->views[B];
    const fg_view *out = &call->views[OUT], *offsets = &call->views[OFFSETS];
    const bool grouped = offsets->tensor.present;
    if (reinterpret(call, a, call->values[DTYPE_A], "dtype_a") < 0 ||
        reinterpret(call, b, call->values[DTYPE_B], "dtype_b") < 0 || fg_expect_dtype(a, FG_FLOATS | FG_FLOAT8S) < 0) {
        return -1;
    }
    const bool is_float8 = (FG_BIT(a->tensor.dtype) & FG_FLOAT8S) != 0;
    if (is_float8 ? fg_expect_dtype(b, FG_FLOAT8S) < 0 : fg_expect_dtype_of(b, a) < 0) return -1;

    const fg_dim a_shape[] = {{"M", FG_ANY}, {"K", FG_ANY}};
    if (fg_expect_shape(a, 2, a_shape, NULL) < 0 || fg_expect_rows(a) < 0) return -1;
    const int64_t m = a->tensor.shape[0], k = a->tensor.shape[1];
    const fg_dim b_shape[] = {{"G", FG_ANY}, {"N", FG_ANY}, {"K", k}};
    const char *why = grouped ? "to match a, grouped by offsets" : "to match a";
    if (fg_expect_shape(b, grouped ? 3 : 2, grouped ? b_shape : b_shape + 1, why) < 0 || fg_expect_rows(b) < 0) {
        return -1;
    }
    const int64_t groups = grouped ? b->tensor.shape[0] : FG_ANY, n = b->tensor.shape[grouped ? 1 : 0];
    const fg_dim out_shape[] = {{"M", m}, {"N", n}};
    if (fg_expect_dtype(out, FG_FLOATS) < 0 || fg_expect_shape(out, 2, out_shape, "to match a and b") < 0 ||
        fg_expect_rows(out) < 0 || (grouped && expect_offsets(offsets, groups) < 0) ||
        expect_scale(&call->views[SCALE_A], FG_ANY, m, "M", "a", &p->kind_a, &p->scale_a) < 0 ||
        expect_scale(&call->views[SCALE_B], groups, n, "N", "b", &p->kind_b, &p->scale_b) < 0 ||
        expect_bias(&call->views[BIAS], out, grouped, groups, n) < 0) {
        return -1;
    }
    p->layout = grouped ? FG_GEMM_M_GROUPED : FG_GEMM_DENSE;
    p->a = a->tensor;
    p->b = b->tensor;
    p->bias = call->views[BIAS].tensor;
    p->offsets = offsets->tensor;
    p->out = out->tensor;
    return fg_arg_precision(call->state, call->values[PRECISION], &p->precision);
}

/* ---- casts ---- */

static const fg_parameter quantize_parameters[] = {
    FG_INPUT(x), FG_OUTPUT(q), FG_INPUT(scale), FG_SCALAR(scale_given), FG_SCALAR(dtype), FG_WORKSPACE_AND_STREAM,
};

static int quantize_fill(fg_call *call, void *params) {
    enum { X, Q, SCALE, SCALE_GIVEN, DTYPE };
    fg_quantize_params *p = params;
    fg_view *x = &call->views[X], *q = &call->views[Q], *scale = &call->views[SCALE];
    const fg_dim x_shape[] = {{"M", FG_ANY}, {"K", FG_ANY}};
    if (fg_arg_bool(call->values[SCALE_GIVEN], "scale_given", &p->scale_given) < 0 ||
        fg_expect_dtype(x, FG_FLOATS) < 0 || fg_expect_shape(x, 2, x_shape, NULL) < 0 || fg_expect_rows(x) < 0) {
        return -1;
    }
    scale->output = !p->scale_given;
    const fg_dim q_shape[] = {{"M", x->tensor.shape[0]}, {"K", x->tensor.shape[1]}};
    if (reinterpret(call, q, call->values[DTYPE], "dtype") < 0 || fg_expect_dtype(q, FG_FLOAT8S) < 0 ||
        fg_expect_shape(q, 2, q_shape, "to match x") < 0 || fg_expect_rows(q) < 0 ||
        expect_scale(scale, FG_ANY, x->tensor.shape[0], "M", "x", &p->kind, &p->scale) < 0) {
        return -1;
    }
    p->x = x->tensor;
    p->q = q->tensor;
    return 0;
}

/* ---- methods ---- */

FG_DEFINE_OPERATION(gemm)
FG_DEFINE_OPERATION(quantize)

PyMethodDef fg_gemm_methods[] = {
    FG_OPERATION_METHODS(gemm,
                         "a, b, out, *, scale_a=None, scale_b=None, bias=None, offsets=None, dtype_a=None, "
                         "dtype_b=None, precision='ieee', workspace=None, stream=None",
                         "out = scale_a scale_b A.B^T + bias, dense or grouped by the rows of a"),
    FG_OPERATION_METHODS(quantize, "x, q, scale, *, scale_given=False, dtype=None, workspace=None, stream=None",
                         "q = saturate(x / scale), with the scale given or computed"),
    {NULL, NULL, 0, NULL},
};
