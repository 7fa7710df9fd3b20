/*
 * Products (dense, batched and grouped) and the casts to float8 that feed them.
 */
#include "../kernels/plan.h"
#include "error.h"
#include "operation.h"

/* ---- scales ---- */

/* What the scales of an operand are counted by. */
typedef struct {
    const char *name, *symbol; /* "a", "M"; "": it has one */
    int64_t groups;            /* leading G; FG_ANY: none */
    int64_t rows;
    int64_t block_rows, block_columns; /* scales of blocks of the matrix; FG_ANY: no such scales here */
} fg_scaled;

static int wrong_scale(const fg_view *view, const fg_scaled *of) {
    fg_text text = {.length = 0};
    const long long g = (long long)of->groups, rows = (long long)of->rows;
    if (of->groups >= 0) {
        fg_text_add(&text, "(), (%lld,) or (%lld, %lld)", g, g, rows);
    } else if (*of->symbol) {
        fg_text_add(&text, "() or (%s,) = (%lld,)", of->symbol, rows);
    } else {
        fg_text_add(&text, "() or (1,)");
    }
    if (of->block_rows >= 0) {
        fg_text_add(&text, " or (");
        if (of->groups >= 0) fg_text_add(&text, "%lld, ", g);
        fg_text_add(&text, "%lld, %lld)", (long long)of->block_rows, (long long)of->block_columns);
    }
    fg_text_add(&text, " to match %s", of->name);
    return fg_wrong_shape(view, text.data);
}

/* One scale for all, shape () or (1,), one per row, shape (rows,), or one per block. Where there are groups, one for
 * each group, (G,), or a leading G. With a single row or a single group different kinds are the same. */
static int expect_scale(const fg_view *view, const fg_scaled *of, fg_scale_kind *kind, fg_tensor *scale) {
    const fg_tensor *tensor = &view->tensor;
    *kind = FG_SCALE_NONE;
    if (!tensor->present) return 0;
    if (fg_expect_dtype(view, FG_BIT(FG_FLOAT32)) < 0 || fg_expect_contiguous(view) < 0) return -1;
    const int lead = of->groups >= 0 ? 1 : 0;
    const int64_t *shape = tensor->shape + lead; /* behind G */
    const bool of_groups = !lead || (tensor->ndim >= 1 && tensor->shape[0] == of->groups);
    *scale = *tensor;
    if (tensor->ndim == lead + 1 && of_groups && shape[0] == of->rows) {
        *kind = FG_SCALE_ROW;
    } else if (lead && tensor->ndim == 1 && of_groups) {
        *kind = FG_SCALE_TENSOR;
    } else if (tensor->ndim == 0 || (tensor->ndim == 1 && tensor->shape[0] == 1 && !lead)) {
        *kind = FG_SCALE_TENSOR;
        scale->ndim = 0;
    } else if (of->block_rows >= 0 && tensor->ndim == lead + 2 && of_groups && shape[0] == of->block_rows &&
               shape[1] == of->block_columns) {
        *kind = FG_SCALE_BLOCK;
    } else {
        return wrong_scale(view, of);
    }
    return 0;
}

/* ---- product ---- */

/* The parameters, in the order of the list. */
/* clang-format off */
enum {
    A, B, OUT, SCALE_A, SCALE_B, BIAS, SCALE_OUT, OFFSETS, M_INDICES, MASKED_M, WEIGHT_INDICES, LAYOUT, B_ROW_MAJOR,
    EXPECTED_M, ALPHA, ACTIVATION, ACCUMULATE, PROMOTE_EVERY, DTYPE_A, DTYPE_B, DTYPE_OUT, PRECISION,
    OUT_DTYPE, GROUPS /* of a direct call */
};
/* clang-format on */

static const fg_parameter gemm_parameters[] = {
    FG_INPUT(a),
    FG_INPUT(b),
    FG_OUTPUT(out),
    FG_OPTIONAL_INPUT(scale_a),
    FG_OPTIONAL_INPUT(scale_b),
    FG_OPTIONAL_INPUT(bias),
    FG_OPTIONAL_INPUT(scale_out),
    FG_OPTIONAL_INPUT(offsets),
    FG_OPTIONAL_INPUT(m_indices),
    FG_OPTIONAL_INPUT(masked_m),
    FG_OPTIONAL_INPUT(weight_indices),
    FG_SCALAR(layout),
    FG_SCALAR(b_row_major),
    FG_SCALAR(expected_m),
    FG_SCALAR(alpha),
    FG_SCALAR(activation),
    FG_SCALAR(accumulate),
    FG_SCALAR(promote_every),
    FG_SCALAR(dtype_a),
    FG_SCALAR(dtype_b),
    FG_SCALAR(dtype_out),
    FG_SCALAR(precision),
    FG_WORKSPACE_AND_STREAM,
};

/* The same, of a call that may go directly. */
static const fg_parameter gemm_direct_parameters[] = {
    {FG_KEYWORD_a, FG_REQUIRED | FG_TENSOR | FG_MATRIX},
    {FG_KEYWORD_b, FG_REQUIRED | FG_TENSOR | FG_MATRIX},
    FG_OUTPUT_OR_NEW(out),
    FG_OPTIONAL_INPUT(scale_a),
    FG_OPTIONAL_INPUT(scale_b),
    FG_OPTIONAL_INPUT(bias),
    FG_OPTIONAL_INPUT(scale_out),
    FG_OPTIONAL_INPUT(offsets),
    FG_OPTIONAL_INPUT(m_indices),
    FG_OPTIONAL_INPUT(masked_m),
    FG_OPTIONAL_INPUT(weight_indices),
    FG_SCALAR(layout),
    FG_SCALAR(b_row_major),
    FG_SCALAR(expected_m),
    FG_SCALAR(alpha),
    FG_SCALAR(activation),
    FG_SCALAR(accumulate),
    FG_SCALAR(promote_every),
    FG_ADAPTED_SCALAR(dtype_a),
    FG_ADAPTED_SCALAR(dtype_b),
    FG_ADAPTED_SCALAR(dtype_out),
    FG_SCALAR(precision),
    FG_SCALAR(out_dtype),
    FG_SCALAR(groups), /* which an output tells, where one is given */
    FG_ADAPTED_SCALAR(device),
    FG_ADAPTED_SCALAR(check),
    FG_DIRECT_END,
};

/* Which matrices of a layout have a leading G, and the array that tells the groups apart. */
static const struct {
    bool a, b, out;
    int grouping; /* OFFSETS, M_INDICES or MASKED_M; 0: none */
    const char *why_b;
} layouts[FG_GEMM_LAYOUT_COUNT] = {
    [FG_GEMM_DENSE] = {false, false, false, 0, "to match a"},
    [FG_GEMM_BATCHED] = {true, true, true, 0, "to match a"},
    [FG_GEMM_M_GROUPED] = {false, true, false, OFFSETS, "to match a, grouped by offsets"},
    [FG_GEMM_M_GROUPED_CONTIGUOUS] = {false, true, false, M_INDICES, "to match a, grouped by m_indices"},
    [FG_GEMM_M_GROUPED_MASKED] = {true, true, true, MASKED_M, "to match a"},
    [FG_GEMM_N_GROUPED] = {true, false, false, OFFSETS, "to match a, grouped by offsets"},
    [FG_GEMM_K_GROUPED] = {false, false, true, OFFSETS, "to match a, grouped by offsets"},
};

static int expect_offsets(const fg_view *view, int64_t groups, const char *of) {
    if (fg_expect_dtype(view, FG_OFFSETS) < 0) return -1;
    const int64_t length = view->tensor.ndim == 1 ? view->tensor.shape[0] : -1;
    if (length != groups && length != groups + 1) {
        char expected[96];
        PyOS_snprintf(expected, sizeof expected, "(%lld,) or (%lld,) to match the groups of %s", (long long)groups,
                      (long long)groups + 1, of);
        return fg_wrong_shape(view, expected);
    }
    return fg_expect_contiguous(view);
}

/* What tells the groups apart: given where the layout has it, and nowhere else. */
static int expect_grouping(const fg_call *call, fg_gemm_params *p, const fg_gemm_shape *shape) {
    static const int all[] = {OFFSETS, M_INDICES, MASKED_M};
    for (int i = 0; i < FG_LENGTH(all); i++) {
        const bool needed = layouts[p->layout].grouping == all[i];
        if (needed == call->views[all[i]].tensor.present) continue;
        PyErr_Format(PyExc_ValueError, "%s: expected %s with layout '%U'",
                     fg_keyword_name(gemm_parameters[all[i]].keyword), needed ? "an array" : "None",
                     call->state->layouts[p->layout]);
        return -1;
    }
    if (layouts[p->layout].grouping == 0) return 0;
    const fg_view *view = &call->views[layouts[p->layout].grouping];
    p->grouping = view->tensor;
    if (p->layout == FG_GEMM_M_GROUPED_CONTIGUOUS || p->layout == FG_GEMM_M_GROUPED_MASKED) {
        const bool masked = p->layout == FG_GEMM_M_GROUPED_MASKED;
        const fg_dim length = {masked ? "G" : "M", masked ? shape->groups : shape->m};
        if (fg_expect_dtype(view, FG_BIT(FG_INT32)) < 0 || fg_expect_shape(view, 1, &length, "to match a") < 0)
            return -1;
        return fg_expect_contiguous(view);
    }
    const bool by_weight = p->weight_indices.present;
    return expect_offsets(view, shape->groups,
                          by_weight                        ? "weight_indices"
                          : p->layout == FG_GEMM_N_GROUPED ? "a"
                          : p->layout == FG_GEMM_K_GROUPED ? "out"
                                                           : "b");
}

static int expect_weight_indices(const fg_call *call, fg_gemm_params *p) {
    const fg_view *view = &call->views[WEIGHT_INDICES];
    if (!view->tensor.present) return 0;
    const fg_dim length = {"G", FG_ANY};
    if (p->layout != FG_GEMM_M_GROUPED) {
        PyErr_SetString(PyExc_ValueError, "weight_indices: expected None without layout 'm_grouped'");
        return -1;
    }
    if (fg_expect_dtype(view, FG_OFFSETS) < 0 || fg_expect_shape(view, 1, &length, NULL) < 0) return -1;
    p->weight_indices = view->tensor;
    return fg_expect_contiguous(view);
}

/* A matrix, with a leading G where `grouped`. */
static int expect_matrix(const fg_view *view, bool grouped, const fg_dim *dims, const char *why) {
    return fg_expect_shape(view, grouped ? 3 : 2, grouped ? dims : dims + 1, why) < 0 ? -1 : fg_expect_rows(view);
}

/* The same of one whose columns may be what is adjacent. */
static int expect_either_way(const fg_view *view, bool grouped, const fg_dim *dims, const char *why) {
    if (fg_expect_shape(view, grouped ? 3 : 2, grouped ? dims : dims + 1, why) < 0) return -1;
    return fg_expect_rows_or_columns(view);
}

/* Of b that lies in columns its rows are those of the matrix the other way round. A single column of those may have had
 * any stride. */
static void take_by_rows(fg_gemm_params *p) {
    if (!fg_lies_in_columns(&p->b)) return;
    p->b = fg_exchanged(&p->b);
    p->b.strides[p->b.ndim - 1] = 1;
    p->b_row_major = !p->b_row_major;
}

/* Of a direct call: makes the output, or sees to its dtype. */
static int make_out(fg_call *call, const fg_gemm_params *p, const fg_dim *dims, int ndim) {
    const fg_view *out = &call->views[OUT];
    const bool scaled = call->views[SCALE_OUT].tensor.present, given = out->tensor.present;
    const unsigned allowed = scaled ? FG_FLOAT8S : FG_FLOATS;
    int64_t groups = 0; /* along K; of another product Python refuses them */
    if (fg_arg_int64(call->values[GROUPS], "groups", 0, INT64_MAX, &groups) < 0) return -1;
    if (groups > 0 && p->layout != FG_GEMM_K_GROUPED) return fg_decline(call);
    fg_dtype dtype = given                      ? out->tensor.dtype
                     : scaled                   ? FG_FLOAT8_E4M3FN
                     : fg_is_float8(p->a.dtype) ? FG_BFLOAT16
                                                : p->a.dtype;
    if (fg_new_dtype(call, call->values[OUT_DTYPE], allowed, &dtype) < 0) return -1;
    if (given) return dtype == out->tensor.dtype && fg_is_float8(dtype) == scaled ? 0 : fg_decline(call);
    if (p->accumulate || p->layout == FG_GEMM_K_GROUPED) return fg_decline(call);
    const int64_t shape[] = {dims[0].size, dims[1].size, dims[2].size};
    return fg_make_output(call, OUT, shape + 3 - ndim, ndim, dtype);
}

/* Shapes of a, b and out, and what groups them. */
static int expect_matrices(fg_call *call, fg_gemm_params *p, fg_gemm_shape *shape) {
    const fg_view *a = &call->views[A], *b = &call->views[B], *out = &call->views[OUT];
    const bool *has_groups[] = {&layouts[p->layout].a, &layouts[p->layout].b, &layouts[p->layout].out};
    const fg_dim a_dims[] = {{"G", FG_ANY}, {"M", FG_ANY}, {"K", FG_ANY}};
    if (expect_either_way(a, *has_groups[0], a_dims, NULL) < 0) return -1;
    p->a = a->tensor;
    const int64_t k = p->a.shape[p->a.ndim - 1];
    const fg_dim g = {"G", *has_groups[0] ? p->a.shape[0] : FG_ANY};
    const fg_dim b_dims[] = {g, {"N", FG_ANY}, {"K", k}}, b_row_major[] = {g, {"K", k}, {"N", FG_ANY}};
    if (expect_either_way(b, *has_groups[1], p->b_row_major ? b_row_major : b_dims, layouts[p->layout].why_b) < 0)
        return -1;
    p->b = b->tensor;
    take_by_rows(p);
    p->out = out->tensor; /* whose shape tells the groups along K */
    if (expect_weight_indices(call, p) < 0) return -1;

    *shape = fg_gemm_shape_of(p);
    if (p->swiglu && (shape->n % 2 != 0 || p->layout == FG_GEMM_N_GROUPED)) {
        PyErr_Format(PyExc_ValueError, "b: expected an even N%s for SwiGLU, got %lld",
                     p->layout == FG_GEMM_N_GROUPED ? " that is not grouped" : "", (long long)shape->n);
        return -1;
    }
    const fg_dim out_dims[] = {
        {"G", *has_groups[0] || *has_groups[1] ? shape->groups : FG_ANY},
        {"M", shape->m},
        {"N", p->swiglu ? shape->n / 2 : shape->n},
    };
    if (call->direct && make_out(call, p, out_dims, *has_groups[2] ? 3 : 2) < 0) return -1;
    p->out = out->tensor;
    if (expect_matrix(out, *has_groups[2], out_dims, "to match a and b") < 0) return -1;
    return expect_grouping(call, p, shape);
}

static int64_t blocks_of(int64_t length) { return (length + FG_SCALE_BLOCK_SIZE - 1) / FG_SCALE_BLOCK_SIZE; }

static int expect_scales(const fg_call *call, fg_gemm_params *p, const fg_gemm_shape *shape) {
    const bool along_k = p->layout == FG_GEMM_K_GROUPED, is_float8 = (FG_BIT(p->a.dtype) & FG_FLOAT8S) != 0;
    const bool blocks = is_float8 && !along_k && p->layout != FG_GEMM_N_GROUPED;
    const int64_t groups = along_k ? shape->groups : FG_ANY, k_blocks = blocks_of(shape->k);
    const fg_scaled a = {"a",     "M", p->a.ndim == 3 ? p->a.shape[0] : groups, shape->m, blocks ? shape->m : FG_ANY,
                         k_blocks};
    const fg_scaled b = {
        "b", "N", p->b.ndim == 3 ? p->b.shape[0] : groups, shape->n, blocks ? blocks_of(shape->n) : FG_ANY, k_blocks};
    if (expect_scale(&call->views[SCALE_A], &a, &p->kind_a, &p->scale_a) < 0 ||
        expect_scale(&call->views[SCALE_B], &b, &p->kind_b, &p->scale_b) < 0) {
        return -1;
    }
    if ((p->kind_a == FG_SCALE_BLOCK) != (p->kind_b == FG_SCALE_BLOCK)) {
        PyErr_SetString(PyExc_ValueError,
                        "scale_a, scale_b: expected both per block (1 x 128 and 128 x 128) or neither");
        return -1;
    }
    const fg_view *scale_out = &call->views[SCALE_OUT];
    const fg_scaled out = {"out", "", FG_ANY, 1, FG_ANY, FG_ANY};
    fg_scale_kind kind;
    return expect_scale(scale_out, &out, &kind, &p->scale_out);
}

static int expect_bias(const fg_view *view, const fg_gemm_params *p, int64_t n) {
    if (!view->tensor.present) return 0;
    const bool grouped = p->b.ndim == 3;
    const fg_dim dims[] = {{"G", grouped ? p->b.shape[0] : FG_ANY}, {"N", n}};
    const unsigned own = FG_BIT(p->out.dtype) & FG_FLOATS;
    if (fg_expect_dtype(view, FG_BIT(FG_FLOAT32) | own) < 0 ||
        fg_expect_shape(view, grouped ? 2 : 1, grouped ? dims : dims + 1, "to match b") < 0) {
        return -1;
    }
    return fg_expect_contiguous(view);
}

static int fill_scalars(const fg_call *call, fg_gemm_params *p) {
    PyObject *const *values = call->values;
    int layout = call->views[OFFSETS].tensor.present ? FG_GEMM_M_GROUPED : FG_GEMM_DENSE;
    p->alpha = 1.0f;
    p->promote_every = 128;
    p->num_sms = call->state->num_sms;
    if (values[PROMOTE_EVERY] == Py_None) {
        p->promote_every = 0;
    } else if (fg_arg_int32(values[PROMOTE_EVERY], "promote_every", 1, INT32_MAX, &p->promote_every) < 0) {
        return -1;
    } else if (p->promote_every != 128 && p->promote_every != 256 && p->promote_every != 512) {
        PyErr_Format(PyExc_ValueError, "promote_every: expected 128, 256, 512 or None, got %d", p->promote_every);
        return -1;
    }
    if (fg_arg_optional_choice(values[LAYOUT], "layout", call->state->layouts, FG_GEMM_LAYOUT_COUNT, &layout) < 0 ||
        fg_arg_bool(values[B_ROW_MAJOR], "b_row_major", &p->b_row_major) < 0 ||
        fg_arg_int64(values[EXPECTED_M], "expected_m", 0, INT64_MAX, &p->expected_m) < 0 ||
        fg_arg_float(values[ALPHA], "alpha", &p->alpha) < 0 ||
        fg_arg_activation_or_swiglu(call->state, values[ACTIVATION], &p->activation, &p->swiglu) < 0 ||
        fg_arg_bool(values[ACCUMULATE], "accumulate", &p->accumulate) < 0) {
        return -1;
    }
    p->layout = (fg_gemm_layout)layout;
    if (p->expected_m > 0 && p->layout != FG_GEMM_M_GROUPED_MASKED) {
        PyErr_Format(PyExc_ValueError, "expected_m: expected 0 but for masked groups, got %lld",
                     (long long)p->expected_m);
        return -1;
    }
    return fg_arg_precision(call->state, values[PRECISION], &p->precision);
}

static int gemm_fill(fg_call *call, void *params) {
    fg_gemm_params *p = params;
    fg_view *a = &call->views[A], *b = &call->views[B], *out = &call->views[OUT];
    const fg_view *bias = &call->views[BIAS];
    fg_gemm_shape shape;
    if (fill_scalars(call, p) < 0 || fg_reinterpret(call, a, call->values[DTYPE_A], "dtype_a") < 0 ||
        fg_reinterpret(call, b, call->values[DTYPE_B], "dtype_b") < 0 ||
        fg_reinterpret(call, out, call->values[DTYPE_OUT], "dtype_out") < 0 ||
        fg_expect_dtype(a, FG_FLOATS | FG_FLOAT8S) < 0) {
        return -1;
    }
    if (p->accumulate && call->views[SCALE_OUT].tensor.present) {
        PyErr_SetString(PyExc_ValueError, "scale_out: expected None with accumulate=True, got an array");
        return -1;
    }
    const bool is_float8 = (FG_BIT(a->tensor.dtype) & FG_FLOAT8S) != 0;
    const unsigned out_dtypes = call->views[SCALE_OUT].tensor.present ? FG_FLOAT8S
                                : p->accumulate                       ? FG_BIT(FG_FLOAT32)
                                                                      : FG_FLOATS;
    if (is_float8 ? fg_expect_dtype(b, FG_FLOAT8S) < 0 : fg_expect_dtype_of(b, a) < 0) return -1;
    if (expect_matrices(call, p, &shape) < 0 || fg_expect_dtype(out, out_dtypes) < 0 ||
        expect_scales(call, p, &shape) < 0 || expect_bias(bias, p, shape.n) < 0) {
        return -1;
    }
    p->bias = bias->tensor;
    return 0;
}

/* ---- casts ---- */

static const fg_parameter quantize_parameters[] = {
    FG_INPUT(x),         FG_OUTPUT(q),      FG_INPUT(scale),       FG_SCALAR(scale_given),  FG_SCALAR(dtype),
    FG_SCALAR(saturate), FG_SCALAR(swiglu), FG_SCALAR(block_rows), FG_WORKSPACE_AND_STREAM,
};

static int quantize_fill(fg_call *call, void *params) {
    enum { X, Q, SCALE, SCALE_GIVEN, DTYPE, SATURATE, SWIGLU, BLOCK_ROWS };
    fg_quantize_params *p = params;
    fg_view *x = &call->views[X], *q = &call->views[Q], *scale = &call->views[SCALE];
    const fg_dim x_shape[] = {{"G", FG_ANY}, {"M", FG_ANY}, {"K", FG_ANY}};
    p->saturate = true;
    if (fg_arg_bool(call->values[SCALE_GIVEN], "scale_given", &p->scale_given) < 0 ||
        fg_arg_bool(call->values[SATURATE], "saturate", &p->saturate) < 0 ||
        fg_arg_bool(call->values[SWIGLU], "swiglu", &p->swiglu) < 0 ||
        fg_arg_int32(call->values[BLOCK_ROWS], "block_rows", 0, FG_SCALE_BLOCK_SIZE, &p->block_rows) < 0) {
        return -1;
    }
    if (p->block_rows != 0 && p->block_rows != 1 && p->block_rows != FG_SCALE_BLOCK_SIZE) {
        PyErr_Format(PyExc_ValueError, "block_rows: expected 0, 1 or 128, got %d", p->block_rows);
        return -1;
    }
    const bool batch = x->tensor.ndim == 3;
    if (fg_expect_dtype(x, FG_FLOATS) < 0 || expect_either_way(x, batch, x_shape, NULL) < 0) return -1;
    const int rows_axis = batch ? 1 : 0;
    const int64_t g = batch ? x->tensor.shape[0] : FG_ANY, m = x->tensor.shape[rows_axis];
    const int64_t k = x->tensor.shape[rows_axis + 1] / (p->swiglu ? 2 : 1);
    if (p->swiglu && x->tensor.shape[rows_axis + 1] % 2 != 0) return fg_wrong_shape(x, "an even number of columns");
    scale->output = !p->scale_given;
    const fg_dim q_shape[] = {{"G", g}, {"M", m}, {"K", k}};
    if (fg_reinterpret(call, q, call->values[DTYPE], "dtype") < 0 || fg_expect_dtype(q, FG_FLOAT8S) < 0 ||
        expect_matrix(q, batch, q_shape, "to match x") < 0) {
        return -1;
    }
    if (p->block_rows == 0 && !batch) {
        const fg_scaled scaled = {"x", "M", FG_ANY, m, FG_ANY, FG_ANY};
        if (expect_scale(scale, &scaled, &p->kind, &p->scale) < 0) return -1;
    } else {
        const bool blocks = p->block_rows > 0;
        const int64_t down = blocks ? (m + p->block_rows - 1) / p->block_rows : m;
        const fg_dim scale_shape[] = {{"G", g}, {"M", down}, {"K", blocks_of(k)}};
        if (fg_expect_dtype(scale, FG_BIT(FG_FLOAT32)) < 0 ||
            fg_expect_shape(scale, (batch ? 2 : 1) + (blocks ? 1 : 0), batch ? scale_shape : scale_shape + 1,
                            "to match x") < 0 ||
            fg_expect_contiguous(scale) < 0) {
            return -1;
        }
        p->kind = blocks ? FG_SCALE_BLOCK : FG_SCALE_ROW;
        p->scale = scale->tensor;
    }
    p->x = x->tensor;
    p->q = q->tensor;
    return 0;
}

/* ---- multiprocessors ---- */

static PyObject *set_num_sms(PyObject *module, PyObject *value) {
    fg_state *state = PyModule_GetState(module);
    if (value == Py_None) {
        state->num_sms = 0;
    } else if (fg_arg_int32(value, "num_sms", 1, INT32_MAX, &state->num_sms) < 0) {
        return NULL;
    }
    return Py_NewRef(Py_None);
}

static PyObject *get_num_sms(PyObject *module, PyObject *unused) {
    (void)unused;
    const fg_state *state = PyModule_GetState(module);
    return state->num_sms > 0 ? PyLong_FromLong(state->num_sms) : Py_NewRef(Py_None);
}

/* ---- methods ---- */

FG_DEFINE_OPERATION(gemm)
FG_DEFINE_DIRECT(gemm)
FG_DEFINE_OPERATION(quantize)

PyMethodDef fg_gemm_methods[] = {
    FG_OPERATION_METHODS(gemm,
                         "a, b, out, *, scale_a=None, scale_b=None, bias=None, scale_out=None, offsets=None, "
                         "m_indices=None, masked_m=None, weight_indices=None, layout=None, b_row_major=False, "
                         "expected_m=0, alpha=1.0, activation=None, accumulate=False, promote_every=128, "
                         "dtype_a=None, dtype_b=None, dtype_out=None, precision='ieee', workspace=None, stream=None",
                         "out = act(alpha scale_a scale_b A.B^T + bias), dense, batched or grouped"),
    FG_DIRECT_METHOD(gemm,
                     "a, b, *, out=None, scale_a=None, scale_b=None, bias=None, scale_out=None, offsets=None, "
                     "m_indices=None, masked_m=None, weight_indices=None, layout=None, b_row_major=False, "
                     "expected_m=0, alpha=1.0, activation=None, accumulate=False, promote_every=128, dtype_a=None, "
                     "dtype_b=None, dtype_out=None, precision='ieee', out_dtype=None, groups=0, device=None, "
                     "check=None, options=None, workspace=None, stream=None",
                     "The same of torch tensors as they are, into a new one; NotImplemented where that is not enough."),
    FG_OPERATION_METHODS(quantize,
                         "x, q, scale, *, scale_given=False, dtype=None, saturate=True, swiglu=False, block_rows=0, "
                         "workspace=None, stream=None",
                         "q = saturate(x / scale), with the scale given or computed"),
    {"set_num_sms", set_num_sms, METH_O,
     PyDoc_STR("set_num_sms($module, num_sms, /)\n--\n\nMultiprocessors that a product uses at most; None: all.")},
    {"get_num_sms", get_num_sms, METH_NOARGS, PyDoc_STR("get_num_sms($module, /)\n--\n\nWhat set_num_sms set.")},
    {NULL, NULL, 0, NULL},
};
