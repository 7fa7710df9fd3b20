/*
 * The CUDA backend's plans as Python functions, for tests and for `python -m flexgemm`. They run without a GPU.
 */
#include "../kernels/plan.h"

#include "args.h"

typedef fg_plan (*fg_plan_function)(int64_t, int64_t, int64_t, int64_t, fg_dtype, int32_t);

/* All plans take four sizes, a dtype and the number of multiprocessors, in this order. */
static PyObject *call_plan(fg_plan_function function, const char *name, const fg_parameter *parameters,
                           PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    enum { SIZES = 4, DTYPE = SIZES, NUM_SMS, COUNT };
    const fg_state *state = PyModule_GetState(module);
    PyObject *values[COUNT];
    int64_t sizes[SIZES] = {0};
    fg_dtype dtype = FG_FLOAT32;
    int32_t num_sms = 1;
    if (fg_parse_args(state, name, parameters, COUNT, args, nargs, kwnames, values) < 0) return NULL;
    for (int i = 0; i < SIZES; i++) {
        if (fg_arg_int64(values[i], fg_keyword_name(parameters[i].keyword), 0, INT64_MAX, &sizes[i]) < 0) return NULL;
    }
    if (fg_arg_dtype(state, values[DTYPE], "dtype", &dtype) < 0 ||
        fg_arg_int32(values[NUM_SMS], "num_sms", 1, INT32_MAX, &num_sms) < 0) {
        return NULL;
    }
    const fg_plan plan = function(sizes[0], sizes[1], sizes[2], sizes[3], dtype, num_sms);
    return Py_BuildValue("{s:i,s:i,s:i,s:i,s:i,s:L}", "block_m", plan.block_m, "block_n", plan.block_n, "block_k",
                         plan.block_k, "num_stages", plan.num_stages, "split_k", plan.split_k, "workspace_bytes",
                         (long long)plan.workspace_bytes);
}

#define FG_SIZE(name) {FG_KEYWORD_##name, FG_KEYWORD_ONLY | FG_REQUIRED}

static const fg_parameter conv_parameters[] = {
    FG_SIZE(rows), FG_SIZE(ci), FG_SIZE(co), FG_SIZE(v), FG_SIZE(dtype), FG_SIZE(num_sms),
};
static const fg_parameter gemm_parameters[] = {
    FG_SIZE(m), FG_SIZE(n), FG_SIZE(k), FG_SIZE(groups), FG_SIZE(dtype), FG_SIZE(num_sms),
};

static PyObject *plan_conv(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    return call_plan(fg_plan_conv, "plan_conv", conv_parameters, module, args, nargs, kwnames);
}

static PyObject *plan_conv_wgrad(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    return call_plan(fg_plan_conv_wgrad, "plan_conv_wgrad", conv_parameters, module, args, nargs, kwnames);
}

static PyObject *plan_gemm(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    return call_plan(fg_plan_gemm, "plan_gemm", gemm_parameters, module, args, nargs, kwnames);
}

PyMethodDef fg_plan_methods[] = {
    {"plan_conv", FG_FASTCALL(plan_conv),
     PyDoc_STR("plan_conv($module, /, *, rows, ci, co, v, dtype, num_sms)\n--\n\n"
               "Tiles of the forward pass and of the input gradient.")},
    {"plan_conv_wgrad", FG_FASTCALL(plan_conv_wgrad),
     PyDoc_STR("plan_conv_wgrad($module, /, *, rows, ci, co, v, dtype, num_sms)\n--\n\nTiles of the weight gradient.")},
    {"plan_gemm", FG_FASTCALL(plan_gemm),
     PyDoc_STR("plan_gemm($module, /, *, m, n, k, groups, dtype, num_sms)\n--\n\nTiles of a product.")},
    {NULL, NULL, 0, NULL},
};
