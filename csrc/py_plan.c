/*
 * The CUDA backend's plans as Python functions, for tests and for `python -m flexgemm`. They run without a GPU.
 */
#include "../kernels/plan.h"

#include "args.h"

/* What every plan is asked: four sizes, a dtype, the number of multiprocessors and, where kernels differ by it, the
 * compute capability or what is asked of the tiles; parameters are in this order. */
typedef struct {
    int64_t sizes[4];
    fg_dtype dtype;
    int32_t num_sms, compute_capability, tiles;
} fg_question;

static int parse_question(fg_question *question, const char *name, const fg_parameter *parameters, int count,
                          PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    enum { SIZES = 4, DTYPE = SIZES, NUM_SMS, LAST, COUNT };
    const fg_state *state = PyModule_GetState(module);
    PyObject *values[COUNT] = {NULL};
    *question = (fg_question){.compute_capability = 80};
    if (fg_parse_args(state, name, parameters, count, args, nargs, kwnames, values) < 0) return -1;
    for (int i = 0; i < SIZES; i++) {
        const char *size = fg_keyword_name(parameters[i].keyword);
        if (fg_arg_int64(values[i], size, 0, INT64_MAX, &question->sizes[i]) < 0) return -1;
    }
    if (fg_arg_dtype(state, values[DTYPE], "dtype", &question->dtype) < 0 ||
        fg_arg_int32(values[NUM_SMS], "num_sms", 1, INT32_MAX, &question->num_sms) < 0) {
        return -1;
    }
    if (count == COUNT && parameters[LAST].keyword == FG_KEYWORD_tiles)
        return fg_arg_int32(values[LAST], "tiles", 0, FG_TILES_ALL, &question->tiles);
    return fg_arg_int32(values[LAST], "compute_capability", 80, INT32_MAX, &question->compute_capability);
}

static PyObject *answer(fg_plan plan) {
    return Py_BuildValue("{s:s,s:i,s:i,s:i,s:i,s:i,s:L}", "family", plan.family == FG_FAMILY_SM90 ? "sm90" : "portable",
                         "block_m", plan.block_m, "block_n", plan.block_n, "block_k", plan.block_k, "num_stages",
                         plan.num_stages, "split_k", plan.split_k, "workspace_bytes", (long long)plan.workspace_bytes);
}

#define FG_SIZE(name) {FG_KEYWORD_##name, FG_KEYWORD_ONLY | FG_REQUIRED}

static const fg_parameter conv_parameters[] = {
    FG_SIZE(rows),
    FG_SIZE(ci),
    FG_SIZE(co),
    FG_SIZE(v),
    FG_SIZE(dtype),
    FG_SIZE(num_sms),
    {FG_KEYWORD_compute_capability, FG_KEYWORD_ONLY},
};
enum { PORTABLE_PARAMETERS = FG_LENGTH(conv_parameters) - 1 }; /* of plans that know one family of kernels */
static const fg_parameter gemm_parameters[] = {
    FG_SIZE(m),
    FG_SIZE(n),
    FG_SIZE(k),
    FG_SIZE(groups),
    FG_SIZE(dtype),
    FG_SIZE(num_sms),
    {FG_KEYWORD_tiles, FG_KEYWORD_ONLY},
};
enum { PORTABLE_GEMM_PARAMETERS = FG_LENGTH(gemm_parameters) - 1 };

static PyObject *plan_conv(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    fg_question q;
    if (parse_question(&q, "plan_conv", conv_parameters, FG_LENGTH(conv_parameters), module, args, nargs, kwnames) < 0)
        return NULL;
    return answer(
        fg_plan_conv(q.sizes[0], q.sizes[1], q.sizes[2], q.sizes[3], q.dtype, q.num_sms, q.compute_capability));
}

static PyObject *plan_conv_wgrad(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    fg_question q;
    if (parse_question(&q, "plan_conv_wgrad", conv_parameters, PORTABLE_PARAMETERS, module, args, nargs, kwnames) < 0)
        return NULL;
    return answer(fg_plan_conv_wgrad(q.sizes[0], q.sizes[1], q.sizes[2], q.sizes[3], q.dtype, q.num_sms));
}

static PyObject *plan_gemm(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    fg_question q;
    if (parse_question(&q, "plan_gemm", gemm_parameters, PORTABLE_GEMM_PARAMETERS, module, args, nargs, kwnames) < 0)
        return NULL;
    return answer(fg_plan_gemm(q.sizes[0], q.sizes[1], q.sizes[2], q.sizes[3], q.dtype, q.num_sms));
}

static int fill_order_plan(const char *name, PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames, fg_order_plan *plan) {
    static const fg_parameter parameters[] = {FG_SIZE(rows), FG_SIZE(kernel_size)};
    enum { ROWS, KERNEL_SIZE, COUNT };
    PyObject *values[COUNT];
    int64_t rows = 0, sizes[3];
    int given;
    if (fg_parse_args(PyModule_GetState(module), name, parameters, COUNT, args, nargs, kwnames, values) < 0 ||
        fg_arg_int64(values[ROWS], "rows", 0, INT64_MAX, &rows) < 0 ||
        fg_arg_int64s(values[KERNEL_SIZE], "kernel_size", 1, 7, 3, sizes, &given) < 0) {
        return -1;
    }
    if (given != 3) {
        PyErr_Format(PyExc_ValueError, "kernel_size: expected 3 ints, got %d", given);
        return -1;
    }
    const int32_t kernel[3] = {(int32_t)sizes[0], (int32_t)sizes[1], (int32_t)sizes[2]};
    *plan = fg_plan_row_order(rows, kernel);
    return 0;
}

/* {"offsets": list, "segment": int} */
static PyObject *plan_row_order(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    fg_order_plan plan;
    if (fill_order_plan("plan_row_order", module, args, nargs, kwnames, &plan) < 0) return NULL;
    PyObject *offsets = PyList_New(plan.key_bits);
    for (int32_t i = 0; offsets && i < plan.key_bits; i++) {
        PyObject *offset = PyLong_FromLong(plan.offsets[i]);
        if (!offset || PyList_SetItem(offsets, i, offset) < 0) Py_CLEAR(offsets);
    }
    return offsets ? Py_BuildValue("{s:N,s:i}", "offsets", offsets, "segment", plan.segment) : NULL;
}

static PyObject *row_order_pays(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    fg_order_plan plan;
    if (fill_order_plan("row_order_pays", module, args, nargs, kwnames, &plan) < 0) return NULL;
    return PyBool_FromLong(plan.pays);
}

static PyObject *plan_gemm_sm90(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    fg_question q;
    if (parse_question(&q, "plan_gemm_sm90", gemm_parameters, FG_LENGTH(gemm_parameters), module, args, nargs,
                       kwnames) < 0)
        return NULL;
    return answer(fg_plan_gemm_sm90(q.sizes[0], q.sizes[1], q.sizes[2], q.sizes[3], q.dtype, q.num_sms, q.tiles));
}

PyMethodDef fg_plan_methods[] = {
    {"plan_conv", FG_FASTCALL(plan_conv),
     PyDoc_STR("plan_conv($module, /, *, rows, ci, co, v, dtype, num_sms, compute_capability=80)\n--\n\n"
               "Tiles of the forward pass and of the input gradient.")},
    {"plan_conv_wgrad", FG_FASTCALL(plan_conv_wgrad),
     PyDoc_STR("plan_conv_wgrad($module, /, *, rows, ci, co, v, dtype, num_sms)\n--\n\nTiles of the weight gradient.")},
    {"plan_row_order", FG_FASTCALL(plan_row_order),
     PyDoc_STR("plan_row_order($module, /, *, rows, kernel_size)\n--\n\n"
               "The offsets to sort the rows of a neighbour map by, first highest, and the rows of a segment.")},
    {"row_order_pays", FG_FASTCALL(row_order_pays),
     PyDoc_STR("row_order_pays($module, /, *, rows, kernel_size)\n--\n\n"
               "Whether convolutions over a neighbour map gain more from an order of its rows than it costs.")},
    {"plan_gemm", FG_FASTCALL(plan_gemm),
     PyDoc_STR("plan_gemm($module, /, *, m, n, k, groups, dtype, num_sms)\n--\n\nTiles of a product.")},
    {"plan_gemm_sm90", FG_FASTCALL(plan_gemm_sm90),
     PyDoc_STR(
         "plan_gemm_sm90($module, /, *, m, n, k, groups, dtype, num_sms, tiles=0)\n--\n\nThe same on Hopper. tiles: "
         "1 no pairs of blocks, 2 at most 128 x 128, 4 of at least 128 rows.")},
    {NULL, NULL, 0, NULL},
};
