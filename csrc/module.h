/*
 * State of one flexgemm._C module object. Nothing the extension keeps lives outside it.
 */
#ifndef FG_MODULE_H
#define FG_MODULE_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include "../kernels/flexgemm.h"
#include "dlpack_abi.h"

/* Every keyword of every function. Interned once per module, so that the parser compares pointers. */
/* clang-format off */
#define FG_KEYWORDS(X)                                                                                                 \
    X(a) X(accumulate) X(activation) X(algorithm) X(alpha) X(argmax) X(array) X(b) X(b_row_major) X(batch) X(bias)     \
    X(bits) X(block_rows) X(channel_groups) X(check) X(ci) X(clear) X(co) X(code) X(code_shape) X(compute_capability)  \
    X(concurrent) X(coords) X(copy) X(count) X(counts) X(device) X(dilation) X(dl_device) X(dtype) X(dtype_a)          \
    X(dtype_b) X(dtype_feats) X(dtype_out) X(dtype_weight) X(expected_m) X(feats) X(first) X(grad_bias) X(grad_feats)  \
    X(grad_grid) X(grad_out) X(grad_weight) X(gradient) X(grid) X(groups) X(in_rows) X(index) X(indices) X(inverse)    \
    X(k) X(kernel_size) X(keys) X(layout) X(m) X(m_indices) X(map) X(mark) X(masked_m) X(max_version) X(mirrored)      \
    X(mode) X(n) X(num_sms) X(offsets) X(options) X(order) X(order_groups) X(origin) X(out) X(out_dtype) X(out_shape)  \
    X(padding) X(phases) X(places) X(points) X(precision) X(promote_every) X(q) X(queries) X(query_shape) X(ranks)     \
    X(replace) X(residual) X(rows) X(samples) X(saturate) X(scale) X(scale_a) X(scale_b) X(scale_feats)                \
    X(scale_given) X(scale_out) X(scale_weight) X(segment_tiles) X(segments) X(shape) X(sorted) X(src) X(starts)       \
    X(state) X(stream) X(stride) X(swiglu) X(table_keys) X(table_values) X(tiles) X(transposed) X(v) X(values)         \
    X(voxel_size) X(weight) X(weight_indices) X(weights) X(workspace) X(x)
/* clang-format on */

#define FG_KEYWORD_ENUMERATOR(name) FG_KEYWORD_##name,
typedef enum { FG_KEYWORDS(FG_KEYWORD_ENUMERATOR) FG_KEYWORD_COUNT } fg_keyword;
#undef FG_KEYWORD_ENUMERATOR

/* How an array's memory is reached, in order of preference. */
typedef enum {
    FG_SOURCE_DEVICE_ARRAY, /* our own */
    FG_SOURCE_EXCHANGE,     /* DLPack C exchange API (torch) */
    FG_SOURCE_NUMPY,
    FG_SOURCE_CUPY,   /* __dlpack__, and a current stream to ask for */
    FG_SOURCE_DLPACK, /* __dlpack__ */
} fg_source;

/* What was learnt about a type of arrays, so that it is asked once and not per call. */
typedef struct {
    PyTypeObject *type; /* strong: the address cannot be reused while it is in the table */
    fg_source source;
    const DLPackExchangeAPI *api; /* with FG_SOURCE_EXCHANGE */
    bool torch;                   /* torch.Tensor or torch.nn.Parameter itself */
} fg_type_entry;

enum { FG_TYPE_CACHE_SIZE = 8, FG_NAMED_DTYPE_CACHE_SIZE = 3 };

typedef struct fg_deferred fg_deferred; /* deferred.c */

/* What torch has beyond the exchange API; empty until a tensor came. (torch.c) */
typedef struct {
    PyTypeObject *tensor, *parameter;
    PyObject *is_grad_enabled, *empty, *forward_ad;
    PyObject *current_level, *is_neg, *requires_grad; /* names */
    PyObject *dtypes[FG_DTYPE_COUNT];
    PyObject *options[FG_DTYPE_COUNT]; /* {"dtype": torch.float16, "device": torch.device("cuda:0")}: of one device */
    fg_device_type device_type;        /* which is this */
    int32_t device_index;
} fg_torch;

typedef struct {
    PyObject *keywords[FG_KEYWORD_COUNT];
    PyObject *dtypes[FG_DTYPE_COUNT];
    PyObject *precisions[2]; /* in the order of fg_precision */
    PyObject *algorithms[FG_ALGORITHM_COUNT];
    PyObject *devices[2];     /* "cpu", "cuda" */
    PyObject *activations[3]; /* in the order of fg_activation, from FG_ACTIVATION_RELU on */
    PyObject *pool_modes[FG_POOL_MODE_COUNT];
    PyObject *sequences[FG_SEQUENCE_COUNT];
    PyObject *layouts[FG_GEMM_LAYOUT_COUNT];
    int32_t num_sms; /* that products may use at most; 0: all */
    PyTypeObject *device_array_type;
    fg_type_entry types[FG_TYPE_CACHE_SIZE];
    unsigned next_type; /* the entry that the next new type takes */
    struct {
        PyTypeObject *scalar; /* ml_dtypes.bfloat16, ... */
        fg_dtype dtype;
    } named_dtypes[FG_NAMED_DTYPE_CACHE_SIZE];
    PyObject *cupy_current_stream; /* cupy.cuda.get_current_stream, once a CuPy array came */
    fg_torch torch;
    fg_deferred *deferred;
} fg_state;

/* The backend of a kind of device, NULL when it was not built. */
static inline const fg_backend *fg_backend_of(fg_device_type type) {
#ifdef FLEXGEMM_WITH_CUDA
    return type == FG_CUDA ? fg_cuda_backend() : fg_cpu_backend();
#else
    return type == FG_CUDA ? NULL : fg_cpu_backend();
#endif
}

/* Method tables of the families; module.c adds them all. */
extern PyMethodDef fg_conv_methods[], fg_depthwise_methods[], fg_gemm_methods[], fg_plan_methods[], fg_pool_methods[],
    fg_serialize_methods[], fg_voxel_methods[], fg_hash_methods[], fg_sample_methods[], fg_group_methods[],
    fg_voxelize_methods[], fg_stream_methods[];

#endif
