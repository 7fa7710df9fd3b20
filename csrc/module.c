/*
 * flexgemm._C: multi-phase initialisation, state per module object, and what the build and the machine offer.
 */
#include "module.h"

#include <string.h>

#include "args.h"
#include "deferred.h"
#include "device_array.h"
#include "error.h"
#include "numpy.h"
#include "torch.h"

/* ---- the build ---- */

/* The architectures as a list: "sm_80,sm_90" -> ["sm_80", "sm_90"]. */
static PyObject *cuda_archs(void) {
#ifdef FLEXGEMM_CUDA_ARCHS
    PyObject *text = PyUnicode_FromString(FLEXGEMM_CUDA_ARCHS);
    PyObject *comma = PyUnicode_FromString(",");
    PyObject *list = text && comma ? PyUnicode_Split(text, comma, -1) : NULL;
    Py_XDECREF(text);
    Py_XDECREF(comma);
    return list;
#else
    return PyList_New(0);
#endif
}

static PyObject *build_info(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
#ifdef FLEXGEMM_CUDA_VERSION
    const char *cuda = FLEXGEMM_CUDA_VERSION;
#else
    const char *cuda = NULL; /* becomes None */
#endif
    return Py_BuildValue("{s:s,s:s,s:z,s:N,s:s,s:s}", "version", FLEXGEMM_VERSION, "source_sha256",
                         FLEXGEMM_SOURCE_SHA256, "cuda", cuda, "cuda_archs", cuda_archs(), "compiler",
#ifdef __clang__
                         __VERSION__,
#else
                         "GCC " __VERSION__,
#endif
                         "abi", "abi3 (CPython 3.11 and later)");
}

/* ---- the devices ---- */

static PyObject *device_count(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    const fg_backend *backend = fg_backend_of(FG_CUDA);
    int32_t count = 0;
    fg_error error;
    fg_status status = FG_OK;
    PyThreadState *thread = PyEval_SaveThread();
    if (backend) status = backend->device_count(&count, &error);
    PyEval_RestoreThread(thread);
    return status == FG_OK ? PyLong_FromLong(count) : fg_raise(&error);
}

static PyObject *device_info(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const fg_parameter parameters[] = {{FG_KEYWORD_device, 0}, {FG_KEYWORD_index, 0}};
    enum { DEVICE, INDEX, COUNT };
    const fg_state *state = PyModule_GetState(module);
    PyObject *values[COUNT];
    int device = 0;
    int32_t index = 0;
    if (fg_parse_args(state, "device_info", parameters, COUNT, args, nargs, kwnames, values) < 0 ||
        fg_arg_optional_choice(values[DEVICE], "device", state->devices, 2, &device) < 0 ||
        fg_arg_int32(values[INDEX], "index", 0, INT32_MAX, &index) < 0) {
        return NULL;
    }
    const fg_backend *backend = fg_backend_of(device == 0 ? FG_CPU : FG_CUDA);
    if (!backend) {
        PyErr_SetString(PyExc_NotImplementedError, "device_info: this build of flexgemm has no CUDA backend");
        return NULL;
    }
    fg_device_info info;
    fg_error error;
    memset(&info, 0, sizeof info);
    PyThreadState *thread = PyEval_SaveThread();
    const fg_status status = backend->device_info(index, &info, &error);
    PyEval_RestoreThread(thread);
    if (status != FG_OK) return fg_raise(&error);
    return Py_BuildValue("{s:s,s:i,s:i,s:L,s:L,s:i,s:i}", "name", info.name, "compute_capability",
                         info.compute_capability, "num_sms", info.num_sms, "memory_bytes", (long long)info.memory_bytes,
                         "l2_bytes", (long long)info.l2_bytes, "driver_version", info.driver_version, "runtime_version",
                         info.runtime_version);
}

static PyMethodDef info_methods[] = {
    {"build_info", build_info, METH_NOARGS, PyDoc_STR("build_info($module, /)\n--\n\nHow the extension was built.")},
    {"device_count", device_count, METH_NOARGS,
     PyDoc_STR("device_count($module, /)\n--\n\nCUDA devices; 0 without a driver or in a CPU-only build.")},
    {"device_info", FG_FASTCALL(device_info),
     PyDoc_STR("device_info($module, /, device='cpu', index=0)\n--\n\nWhat a device is.")},
    {NULL, NULL, 0, NULL},
};

/* ---- the module ---- */

static int intern(PyObject **strings, const char *const *texts, int count) {
    for (int i = 0; i < count; i++) {
        strings[i] = PyUnicode_InternFromString(texts[i]);
        if (!strings[i]) return -1;
    }
    return 0;
}

/* A tuple of names, for Python to check against. */
static int add_names(PyObject *module, const char *attribute, PyObject *const *names, int count) {
    PyObject *tuple = PyTuple_New(count);
    if (!tuple) return -1;
    for (int i = 0; i < count; i++) PyTuple_SetItem(tuple, i, Py_NewRef(names[i]));
    int status = PyModule_AddObjectRef(module, attribute, tuple);
    Py_DECREF(tuple);
    return status;
}

static int exec_module(PyObject *module) {
    static const char *const precisions[] = {"ieee", "tf32"};
    static const char *const devices[] = {"cpu", "cuda"};
    static const char *const activations[] = {"relu", "silu", "gelu"};
    static const char *const layouts[FG_GEMM_LAYOUT_COUNT] = {
        [FG_GEMM_DENSE] = "dense",
        [FG_GEMM_BATCHED] = "batched",
        [FG_GEMM_M_GROUPED] = "m_grouped",
        [FG_GEMM_M_GROUPED_CONTIGUOUS] = "m_grouped_contiguous",
        [FG_GEMM_M_GROUPED_MASKED] = "m_grouped_masked",
        [FG_GEMM_N_GROUPED] = "n_grouped",
        [FG_GEMM_K_GROUPED] = "k_grouped",
    };
    static const char *const pool_modes[] = {"max", "mean", "sum"};
    static const char *const sequences[] = {"bxyz", "z_order", "hilbert"};
    PyMethodDef *const families[] = {info_methods,     fg_voxel_methods,  fg_conv_methods,      fg_depthwise_methods,
                                     fg_gemm_methods,  fg_plan_methods,   fg_serialize_methods, fg_pool_methods,
                                     fg_hash_methods,  fg_sample_methods, fg_group_methods,     fg_voxelize_methods,
                                     fg_stream_methods};
    fg_state *state = PyModule_GetState(module);
    const char *names[FG_KEYWORD_COUNT], *dtypes[FG_DTYPE_COUNT], *algorithms[FG_ALGORITHM_COUNT];
    for (int i = 0; i < FG_KEYWORD_COUNT; i++) names[i] = fg_keyword_name((fg_keyword)i);
    for (int i = 0; i < FG_DTYPE_COUNT; i++) dtypes[i] = fg_dtype_name((fg_dtype)i);
    for (int i = 0; i < FG_ALGORITHM_COUNT; i++) algorithms[i] = fg_algorithm_name((fg_algorithm)i);

    if (fg_numpy_init() < 0 || intern(state->keywords, names, FG_KEYWORD_COUNT) < 0 ||
        intern(state->dtypes, dtypes, FG_DTYPE_COUNT) < 0 ||
        intern(state->precisions, precisions, FG_LENGTH(precisions)) < 0 ||
        intern(state->algorithms, algorithms, FG_ALGORITHM_COUNT) < 0 ||
        intern(state->devices, devices, FG_LENGTH(devices)) < 0 ||
        intern(state->activations, activations, FG_LENGTH(activations)) < 0 ||
        intern(state->layouts, layouts, FG_GEMM_LAYOUT_COUNT) < 0 ||
        intern(state->sequences, sequences, FG_SEQUENCE_COUNT) < 0 ||
        intern(state->pool_modes, pool_modes, FG_POOL_MODE_COUNT) < 0) {
        return -1;
    }
    if (add_names(module, "ALGORITHMS", state->algorithms, FG_ALGORITHM_COUNT) < 0 ||
        add_names(module, "PRECISIONS", state->precisions, FG_LENGTH(state->precisions)) < 0 ||
        add_names(module, "POOL_MODES", state->pool_modes, FG_POOL_MODE_COUNT) < 0 ||
        PyModule_AddIntConstant(module, "MAX_KERNEL", FG_MAX_KERNEL) < 0) {
        return -1;
    }
    state->device_array_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &fg_device_array_spec, NULL);
    if (!state->device_array_type || PyModule_AddType(module, state->device_array_type) < 0) return -1;
    for (int i = 0; i < FG_LENGTH(families); i++) {
        if (PyModule_AddFunctions(module, families[i]) < 0) return -1;
    }
    return 0;
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
    fg_state *state = PyModule_GetState(module);
    Py_VISIT(state->device_array_type);
    for (int i = 0; i < FG_TYPE_CACHE_SIZE; i++) Py_VISIT(state->types[i].type);
    for (int i = 0; i < FG_NAMED_DTYPE_CACHE_SIZE; i++) Py_VISIT(state->named_dtypes[i].scalar);
    Py_VISIT(state->cupy_current_stream);
    return fg_torch_traverse(&state->torch, visit, arg);
}

static int clear(PyObject *module) {
    fg_state *state = PyModule_GetState(module);
    fg_collect_deferred(state); /* what the GPU still uses is left to the end of the process */
    for (int i = 0; i < FG_KEYWORD_COUNT; i++) Py_CLEAR(state->keywords[i]);
    for (int i = 0; i < FG_DTYPE_COUNT; i++) Py_CLEAR(state->dtypes[i]);
    for (int i = 0; i < FG_LENGTH(state->precisions); i++) Py_CLEAR(state->precisions[i]);
    for (int i = 0; i < FG_ALGORITHM_COUNT; i++) Py_CLEAR(state->algorithms[i]);
    for (int i = 0; i < FG_LENGTH(state->devices); i++) Py_CLEAR(state->devices[i]);
    for (int i = 0; i < FG_LENGTH(state->activations); i++) Py_CLEAR(state->activations[i]);
    for (int i = 0; i < FG_GEMM_LAYOUT_COUNT; i++) Py_CLEAR(state->layouts[i]);
    for (int i = 0; i < FG_SEQUENCE_COUNT; i++) Py_CLEAR(state->sequences[i]);
    for (int i = 0; i < FG_POOL_MODE_COUNT; i++) Py_CLEAR(state->pool_modes[i]);
    for (int i = 0; i < FG_TYPE_CACHE_SIZE; i++) Py_CLEAR(state->types[i].type);
    for (int i = 0; i < FG_NAMED_DTYPE_CACHE_SIZE; i++) Py_CLEAR(state->named_dtypes[i].scalar);
    Py_CLEAR(state->device_array_type);
    Py_CLEAR(state->cupy_current_stream);
    fg_torch_clear(&state->torch);
    return 0;
}

static void free_module(void *module) { clear(module); }

static PyModuleDef_Slot slots[] = {{Py_mod_exec, exec_module}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "flexgemm._C",
    .m_doc = PyDoc_STR("The extension behind flexgemm: arrays in, work queued on the device that holds them."),
    .m_size = sizeof(fg_state),
    .m_slots = slots,
    .m_traverse = traverse,
    .m_clear = clear,
    .m_free = free_module,
};

PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&definition); }
