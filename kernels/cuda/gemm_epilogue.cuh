/*
 * What both GEMM families do with a finished sum: D = scale_a * scale_b * sum + bias, converted and stored.
 */
#pragma once

#include "common.cuh"

namespace flexgemm {

/* scale[group * group_step + index * step]; data NULL: 1. */
struct Scale {
    const float *data;
    int64_t group_step, step;
};

struct Epilogue {
    Scale scale_a, scale_b;
    const void *bias; /* (groups, n) or NULL */
    fg_dtype bias_dtype, out_dtype;
    void *out;
    int64_t out_stride;
    bool out_aligned; /* every fourth element of every row may be the start of a vector store */
};

__device__ __forceinline__ float scale_at(const Scale &scale, int64_t group, int64_t index) {
    return scale.data ? scale.data[group * scale.group_step + index * scale.step] : 1.0f;
}

__device__ __forceinline__ float load_as_float(const void *data, int64_t index, fg_dtype dtype) {
    if (dtype == FG_FLOAT16) return to_float(static_cast<const __half *>(data)[index]);
    if (dtype == FG_BFLOAT16) return to_float(static_cast<const __nv_bfloat16 *>(data)[index]);
    return static_cast<const float *>(data)[index];
}

/* ---- host ---- */

inline bool is_multiple(const void *pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

/* Bytes from one index of an axis to the next; an axis of one element may carry any stride. */
inline int64_t pitch(const fg_tensor &tensor, int axis) {
    return tensor.shape[axis] == 1 ? 0 : tensor.strides[axis] * static_cast<int64_t>(fg_dtype_size(tensor.dtype));
}

inline Scale make_scale(const fg_tensor &tensor, fg_scale_kind kind, bool grouped, int64_t length) {
    if (kind == FG_SCALE_NONE) return {};
    const float *data = static_cast<const float *>(tensor.data);
    if (kind == FG_SCALE_TENSOR) return {data, grouped ? 1 : 0, 0};
    return {data, grouped ? length : 0, 1};
}

/* A row stride means nothing when there is one row. */
inline Epilogue make_epilogue(const fg_gemm_params &params) {
    const bool grouped = params.layout == FG_GEMM_M_GROUPED;
    const fg_tensor &out = params.out;
    Epilogue to = {};
    to.scale_a = make_scale(params.scale_a, params.kind_a, false, out.shape[0]);
    to.scale_b = make_scale(params.scale_b, params.kind_b, grouped, out.shape[1]);
    to.bias = params.bias.present ? params.bias.data : nullptr;
    to.bias_dtype = params.bias.dtype;
    to.out = out.data;
    to.out_dtype = out.dtype;
    to.out_stride = out.shape[0] == 1 ? 0 : out.strides[0];
    to.out_aligned = is_multiple(out.data, 4 * fg_dtype_size(out.dtype)) && to.out_stride % 4 == 0;
    return to;
}

}  // namespace flexgemm
