/*
 * The CUDA backend's plans as Python functions, for tests and for `python -m flexgemm`. They run without a GPU.
 */
#include "../kernels/plan.h"
#include "../kernels/segment.h"

#include "args.h"
#include "coords.h"
#include "operation.h"

/* What every plan is asked: four sizes, a dtype and the number of multiprocessors; parameters are in this order, what
 * only one of them takes comes after. */
typedef struct {
    int64_t sizes[4];
    fg_dtype dtype;
    int32_t num_sms;
    PyObject *others[8];
} fg_question;

static int parse_question(fg_question *question, const char *name, const fg_parameter *parameters, int count,
                          PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    enum { SIZES = 4, DTYPE = SIZES, NUM_SMS, OTHERS, COUNT = OTHERS + FG_LENGTH(question->others) };
    static const int64_t MOST = INT64_C(1) << 50; /* products of a size and what is in a plan do not overflow */
    const fg_state *state = PyModule_GetState(module);
    PyObject *values[COUNT] = {NULL};
    *question = (fg_question){.num_sms = 0};
    if (fg_parse_args(state, name, parameters, count, args, nargs, kwnames, values) < 0) return -1;
    for (int i = 0; i < SIZES; i++) {
        const char *size = fg_keyword_name(parameters[i].keyword);
        if (fg_arg_int64(values[i], size, 0, MOST, &question->sizes[i]) < 0) return -1;
    }
    for (int i = OTHERS; i < count; i++) question->others[i - OTHERS] = values[i];
    if (fg_arg_dtype(state, values[DTYPE], "dtype", &question->dtype) < 0) return -1;
    return fg_arg_int32(values[NUM_SMS], "num_sms", 1, INT32_MAX, &question->num_sms);
}

static PyObject *answer(fg_plan plan) {
    return Py_BuildValue("{s:s,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:L}", "family",
                         plan.family == FG_FAMILY_SM90 ? "sm90" : "portable", "block_m", plan.block_m, "block_n",
                         plan.block_n, "block_k", plan.block_k, "num_stages", plan.num_stages, "groups", plan.groups,
                         "split_k", plan.split_k, "segment_tiles", plan.segment_tiles, "few_rows", plan.few_rows,
                         "some_rows", plan.some_rows, "least_rows", plan.least_rows, "overhead_rows",
                         plan.overhead_rows, "weights", (int)plan.weights, "adds_in_shared", plan.adds_in_shared,
                         "workspace_bytes", (long long)plan.workspace_bytes);
}

#define CONV_SHAPE_PARAMETERS                                                                                          \
    FG_REQUIRED_SCALAR(rows), FG_REQUIRED_SCALAR(ci), FG_REQUIRED_SCALAR(co), FG_REQUIRED_SCALAR(v),                   \
        FG_REQUIRED_SCALAR(dtype), FG_REQUIRED_SCALAR(num_sms)

static const fg_parameter conv_parameters[] = {
    CONV_SHAPE_PARAMETERS,
    {FG_KEYWORD_compute_capability, FG_KEYWORD_ONLY},
    {FG_KEYWORD_precision, FG_KEYWORD_ONLY},
    {FG_KEYWORD_algorithm, FG_KEYWORD_ONLY},
    {FG_KEYWORD_groups, FG_KEYWORD_ONLY},
    {FG_KEYWORD_phases, FG_KEYWORD_ONLY},
    {FG_KEYWORD_channel_groups, FG_KEYWORD_ONLY},
    {FG_KEYWORD_segment_tiles, FG_KEYWORD_ONLY},
    {FG_KEYWORD_gradient, FG_KEYWORD_ONLY},
};
static const fg_parameter wgrad_parameters[] = {
    CONV_SHAPE_PARAMETERS,
    {FG_KEYWORD_compute_capability, FG_KEYWORD_ONLY},
    {FG_KEYWORD_algorithm, FG_KEYWORD_ONLY},
    {FG_KEYWORD_segment_tiles, FG_KEYWORD_ONLY},
};
static const fg_parameter gemm_parameters[] = {
    FG_REQUIRED_SCALAR(m),
    FG_REQUIRED_SCALAR(n),
    FG_REQUIRED_SCALAR(k),
    FG_REQUIRED_SCALAR(groups),
    FG_REQUIRED_SCALAR(dtype),
    FG_REQUIRED_SCALAR(num_sms),
    {FG_KEYWORD_tiles, FG_KEYWORD_ONLY},
};
enum { PORTABLE_GEMM_PARAMETERS = FG_LENGTH(gemm_parameters) - 1 };

/* Of a convolution: the kernel has a voxel, and groups of them are even. */
static int expect_volume(int64_t v, const fg_order_sets *sets) {
    if (v < 1) {
        PyErr_Format(PyExc_ValueError, "v: expected at least 1, got %lld", (long long)v);
        return -1;
    }
    for (int32_t i = 0; i < sets->sets; i++) {
        if (v % sets->groups[i] == 0) continue;
        PyErr_Format(PyExc_ValueError, "groups: expected divisors of v, which is %lld, got %d", (long long)v,
                     sets->groups[i]);
        return -1;
    }
    return 0;
}

static int parse_capability(const fg_question *q, int32_t *compute_capability) {
    return fg_arg_int32(q->others[0], "compute_capability", 80, INT32_MAX, compute_capability);
}

static fg_conv_question conv_question_of(const fg_question *q) {
    return (fg_conv_question){
        .rows = q->sizes[0],
        .ci = q->sizes[1],
        .co = q->sizes[2],
        .v = q->sizes[3],
        .dtype = q->dtype,
        .num_sms = q->num_sms,
        .compute_capability = 80,
        .channel_groups = 1,
    };
}

static PyObject *plan_conv(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    enum { PRECISION = 1, ALGORITHM, GROUPS, PHASES, CHANNEL_GROUPS, SEGMENT_TILES, GRADIENT };
    const fg_state *state = PyModule_GetState(module);
    fg_question q;
    if (parse_question(&q, "plan_conv", conv_parameters, FG_LENGTH(conv_parameters), module, args, nargs, kwnames) < 0)
        return NULL;
    fg_conv_question question = conv_question_of(&q);
    if (parse_capability(&q, &question.compute_capability) < 0 ||
        fg_arg_precision(state, q.others[PRECISION], &question.precision) < 0 ||
        fg_arg_algorithm(state, q.others[ALGORITHM], &question.algorithm) < 0 ||
        fg_arg_orders(q.others[GROUPS], q.others[PHASES], &question.orders) < 0 ||
        fg_arg_int64(q.others[CHANNEL_GROUPS], "channel_groups", 1, INT32_MAX, &question.channel_groups) < 0 ||
        fg_arg_segment_tiles(q.others[SEGMENT_TILES], "segment_tiles", 0, &question.segment_tiles) < 0 ||
        fg_arg_bool(q.others[GRADIENT], "gradient", &question.gradient) < 0 ||
        expect_volume(question.v, &question.orders) < 0) {
        return NULL;
    }
    return answer(fg_plan_conv(&question));
}

static PyObject *plan_conv_wgrad(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    enum { ALGORITHM = 1, SEGMENT_TILES };
    fg_question q;
    if (parse_question(&q, "plan_conv_wgrad", wgrad_parameters, FG_LENGTH(wgrad_parameters), module, args, nargs,
                       kwnames) < 0)
        return NULL;
    fg_conv_question question = conv_question_of(&q);
    if (parse_capability(&q, &question.compute_capability) < 0 ||
        fg_arg_algorithm(PyModule_GetState(module), q.others[ALGORITHM], &question.algorithm) < 0 ||
        fg_arg_segment_tiles(q.others[SEGMENT_TILES], "segment_tiles", 0, &question.segment_tiles) < 0 ||
        expect_volume(question.v, &question.orders) < 0) {
        return NULL;
    }
    return answer(fg_plan_conv_wgrad(&question));
}

static PyObject *plan_gemm(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    fg_question q;
    if (parse_question(&q, "plan_gemm", gemm_parameters, PORTABLE_GEMM_PARAMETERS, module, args, nargs, kwnames) < 0)
        return NULL;
    return answer(fg_plan_gemm(q.sizes[0], q.sizes[1], q.sizes[2], q.sizes[3], q.dtype, q.num_sms));
}

/* The set of row orders that a map should have: a tuple of numbers of groups. */
static PyObject *groups_of(const fg_order_sets *sets) {
    PyObject *groups = PyTuple_New(sets->sets);
    for (int32_t i = 0; groups && i < sets->sets; i++) {
        PyObject *number = PyLong_FromLong(sets->groups[i]);
        if (!number || PyTuple_SetItem(groups, i, number) < 0) Py_CLEAR(groups);
    }
    return groups;
}

/* One dict of offsets and their codes for each order. */
static PyObject *keys_of(const fg_order_plan *plan) {
    PyObject *keys = PyList_New(plan->orders);
    for (int32_t i = 0; keys && i < plan->orders; i++) {
        PyObject *codes = PyDict_New();
        for (int32_t j = plan->keys[i].begin; codes && j < plan->keys[i].end; j++) {
            PyObject *offset = PyLong_FromLong(plan->offsets[j]), *code = PyLong_FromUnsignedLong(plan->codes[j]);
            if (!offset || !code || PyDict_SetItem(codes, offset, code) < 0) Py_CLEAR(codes);
            Py_XDECREF(offset);
            Py_XDECREF(code);
        }
        if (!codes || PyList_SetItem(keys, i, codes) < 0) Py_CLEAR(keys);
    }
    return keys;
}

typedef struct {
    int64_t rows;
    int32_t kernel[3];
    PyObject *groups, *phases;
} fg_order_question;

static int parse_order_question(fg_order_question *question, const char *name, int count, PyObject *module,
                                PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const fg_parameter parameters[] = {FG_REQUIRED_SCALAR(rows),
                                              FG_REQUIRED_SCALAR(kernel_size),
                                              {FG_KEYWORD_phases, FG_KEYWORD_ONLY},
                                              FG_REQUIRED_SCALAR(groups)};
    enum { ROWS, KERNEL_SIZE, PHASES, GROUPS, COUNT };
    PyObject *values[COUNT] = {NULL};
    if (fg_parse_args(PyModule_GetState(module), name, parameters, count, args, nargs, kwnames, values) < 0 ||
        fg_arg_int64(values[ROWS], "rows", 0, INT64_MAX, &question->rows) < 0 ||
        fg_arg_axes(values[KERNEL_SIZE], "kernel_size", FG_MAX_KERNEL, question->kernel) < 0) {
        return -1;
    }
    question->groups = values[GROUPS];
    question->phases = values[PHASES];
    return 0;
}

static PyObject *plan_row_orders(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    fg_order_question q;
    fg_order_sets sets = {0};
    if (parse_order_question(&q, "plan_row_orders", 4, module, args, nargs, kwnames) < 0 ||
        fg_arg_sets_of(q.groups, q.phases, q.kernel, &sets) < 0) {
        return NULL;
    }
    const fg_order_plan plan = fg_plan_row_orders(q.rows, q.kernel, sets);
    return Py_BuildValue("{s:N,s:i}", "keys", keys_of(&plan), "segment", plan.segment);
}

static PyObject *plan_order_sets(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    fg_order_question q;
    int32_t phases[3] = {1, 1, 1};
    if (parse_order_question(&q, "plan_order_sets", 3, module, args, nargs, kwnames) < 0 ||
        fg_arg_axes(q.phases, "phases", FG_MAX_KERNEL, phases) < 0) {
        return NULL;
    }
    const fg_order_sets sets = fg_plan_order_sets(q.rows, q.kernel, phases);
    return groups_of(&sets);
}

static PyObject *plan_segment_tiles(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const fg_parameter parameters[] = {FG_REQUIRED_SCALAR(rows), FG_REQUIRED_SCALAR(num_sms)};
    enum { ROWS, NUM_SMS, COUNT };
    PyObject *values[COUNT];
    int64_t rows = 0;
    int32_t num_sms = 0;
    if (fg_parse_args(PyModule_GetState(module), "plan_segment_tiles", parameters, COUNT, args, nargs, kwnames,
                      values) < 0 ||
        fg_arg_int64(values[ROWS], "rows", 0, INT64_MAX, &rows) < 0 ||
        fg_arg_int32(values[NUM_SMS], "num_sms", 1, INT32_MAX, &num_sms) < 0) {
        return NULL;
    }
    return PyLong_FromLong(fg_plan_segment_tiles(rows, num_sms));
}

static PyObject *segment_words(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const fg_parameter parameters[] = {FG_REQUIRED_SCALAR(tiles), FG_REQUIRED_SCALAR(v)};
    enum { TILES, V, COUNT };
    PyObject *values[COUNT];
    int32_t tiles = 0, v = 0;
    if (fg_parse_args(PyModule_GetState(module), "segment_words", parameters, COUNT, args, nargs, kwnames, values) <
            0 ||
        fg_arg_segment_tiles(values[TILES], "tiles", 2, &tiles) < 0 ||
        fg_arg_int32(values[V], "v", 1, FG_SEGMENT_VOLUME, &v) < 0) {
        return NULL;
    }
    return PyLong_FromLongLong(fg_segment_words(tiles, v));
}

static PyObject *plan_voxel_table(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const fg_parameter parameters[] = {FG_REQUIRED_SCALAR(rows), FG_REQUIRED_SCALAR(shape)};
    enum { ROWS, SHAPE, COUNT };
    PyObject *values[COUNT];
    int64_t rows = 0, shape[4];
    if (fg_parse_args(PyModule_GetState(module), "plan_voxel_table", parameters, COUNT, args, nargs, kwnames, values) <
            0 ||
        fg_arg_int64(values[ROWS], "rows", 0, INT32_MAX, &rows) < 0 || fg_arg_grid(values[SHAPE], "shape", shape) < 0) {
        return NULL;
    }
    return PyUnicode_FromString(fg_table_name(fg_plan_voxel_table(rows, shape)));
}

/* Of a convolution with a stride. */
typedef struct {
    int32_t kernel[3], stride[3], dilation[3];
    bool transposed;
} fg_sites_question;

static int parse_sites_question(fg_sites_question *question, const char *name, int count, PyObject *module,
                                PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const fg_parameter parameters[] = {FG_REQUIRED_SCALAR(kernel_size),
                                              FG_REQUIRED_SCALAR(stride),
                                              FG_REQUIRED_SCALAR(dilation),
                                              {FG_KEYWORD_transposed, FG_KEYWORD_ONLY}};
    enum { KERNEL_SIZE, STRIDE, DILATION, TRANSPOSED, COUNT };
    PyObject *values[COUNT] = {NULL};
    question->transposed = false;
    if (fg_parse_args(PyModule_GetState(module), name, parameters, count, args, nargs, kwnames, values) < 0 ||
        fg_arg_axes(values[KERNEL_SIZE], "kernel_size", FG_MAX_KERNEL, question->kernel) < 0 ||
        fg_arg_axes(values[STRIDE], "stride", INT32_MAX, question->stride) < 0 ||
        fg_arg_axes(values[DILATION], "dilation", INT32_MAX, question->dilation) < 0) {
        return -1;
    }
    return fg_arg_bool(values[TRANSPOSED], "transposed", &question->transposed);
}

static PyObject *plan_conv_sites(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    fg_sites_question q;
    if (parse_sites_question(&q, "plan_conv_sites", 4, module, args, nargs, kwnames) < 0) return NULL;
    return PyLong_FromLongLong(fg_plan_conv_sites(q.kernel, q.stride, q.dilation, q.transposed).per_voxel);
}

static PyObject *plan_phases(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    fg_sites_question q;
    int32_t phases[3];
    if (parse_sites_question(&q, "plan_phases", 3, module, args, nargs, kwnames) < 0) return NULL;
    fg_plan_phases(q.kernel, q.stride, q.dilation, phases);
    return Py_BuildValue("(iii)", phases[0], phases[1], phases[2]);
}

static PyObject *plan_gemm_sm90(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    fg_question q;
    int32_t tiles = 0;
    if (parse_question(&q, "plan_gemm_sm90", gemm_parameters, FG_LENGTH(gemm_parameters), module, args, nargs,
                       kwnames) < 0 ||
        fg_arg_int32(q.others[0], "tiles", 0, FG_TILES_ALL, &tiles) < 0) {
        return NULL;
    }
    return answer(fg_plan_gemm_sm90(q.sizes[0], q.sizes[1], q.sizes[2], q.sizes[3], q.dtype, q.num_sms, tiles));
}

PyMethodDef fg_plan_methods[] = {
    {"plan_conv", FG_FASTCALL(plan_conv),
     PyDoc_STR("plan_conv($module, /, *, rows, ci, co, v, dtype, num_sms, compute_capability=80, precision='ieee', "
               "algorithm='auto', groups=None, phases=(1, 1, 1), channel_groups=1, segment_tiles=0, "
               "gradient=False)\n--\n\nTiles of the "
               "forward pass, or of the input gradient.")},
    {"plan_conv_wgrad", FG_FASTCALL(plan_conv_wgrad),
     PyDoc_STR("plan_conv_wgrad($module, /, *, rows, ci, co, v, dtype, num_sms, compute_capability=80, "
               "algorithm='auto', segment_tiles=0)\n--\n\nTiles of the weight gradient.")},
    {"plan_order_sets", FG_FASTCALL(plan_order_sets),
     PyDoc_STR("plan_order_sets($module, /, *, rows, kernel_size, phases=(1, 1, 1))\n--\n\n"
               "The numbers of groups of the row orders that a neighbour map should have; () where none pays.")},
    {"plan_row_orders", FG_FASTCALL(plan_row_orders),
     PyDoc_STR("plan_row_orders($module, /, *, rows, kernel_size, groups, phases=(1, 1, 1))\n--\n\n"
               "For each order the codes of the offsets that rows are sorted by; the rows of a segment.")},
    {"plan_segment_tiles", FG_FASTCALL(plan_segment_tiles),
     PyDoc_STR("plan_segment_tiles($module, /, *, rows, num_sms)\n--\n\n"
               "Tiles of 64 rows that a segment of a neighbour map should have; 0 where none pays.")},
    {"segment_words", FG_FASTCALL(segment_words),
     PyDoc_STR("segment_words($module, /, *, tiles, v)\n--\n\nint32 words of the record of a segment.")},
    {"plan_voxel_table", FG_FASTCALL(plan_voxel_table),
     PyDoc_STR("plan_voxel_table($module, /, *, rows, shape)\n--\n\n"
               "How a GPU keeps the voxels that a neighbour map looks up: 'hash' or 'direct'.")},
    {"plan_conv_sites", FG_FASTCALL(plan_conv_sites),
     PyDoc_STR("plan_conv_sites($module, /, *, kernel_size, stride, dilation, transposed=False)\n--\n\n"
               "How many output sites one voxel of a sparse convolution can reach.")},
    {"plan_phases", FG_FASTCALL(plan_phases),
     PyDoc_STR("plan_phases($module, /, *, kernel_size, stride, dilation)\n--\n\n"
               "The phases, along each axis, of the map back from a sparse convolution's output sites.")},
    {"plan_gemm", FG_FASTCALL(plan_gemm),
     PyDoc_STR("plan_gemm($module, /, *, m, n, k, groups, dtype, num_sms)\n--\n\nTiles of a product.")},
    {"plan_gemm_sm90", FG_FASTCALL(plan_gemm_sm90),
     PyDoc_STR("plan_gemm_sm90($module, /, *, m, n, k, groups, dtype, num_sms, tiles=0)\n--\n\nThe same on Hopper. "
               "tiles: what the product asks of them, bits FG_TILES_... of kernels/plan.h.")},
    {NULL, NULL, 0, NULL},
};
