/*
 * What both GEMM families do with finished sums: D = act(alpha * scale_a * scale_b * sum + bias), converted and stored.
 */
#pragma once

#include "activation.cuh"
#include "common.cuh"

namespace flexgemm {

/* scale[group * group_step + index * step + block]; data NULL: 1. The index is a row, or where B is scaled by blocks
 * one of 128 rows; the block is one of K. */
struct Scale {
    const float *data;
    int64_t group_step, step;
};

struct Epilogue {
    Scale scale_a, scale_b; /* of A by the group of the tile, of B by its weight */
    float alpha;
    bool one_factor;   /* of all sums */
    bool block_scaled; /* the scales are those of blocks and go into the sum where it is promoted */
    bool swiglu, accumulate;
    fg_activation activation;
    const float *scale_out; /* NULL: 1 */
    const void *bias;       /* NULL: 0 */
    int64_t bias_step;      /* from one weight to the next */
    fg_dtype bias_dtype, out_dtype;
    void *out;
    int64_t out_stride, out_group_stride;
    bool out_aligned; /* every fourth element of every row may be the start of a vector store */
};

/* Each column has a scale of its own. */
__host__ __device__ inline bool has_column_scales(const Epilogue &to) {
    return to.scale_b.step != 0 && !to.block_scaled;
}

__device__ __forceinline__ float scale_at(const Scale &scale, int64_t group, int64_t index, int64_t block = 0) {
    return scale.data ? scale.data[group * scale.group_step + index * scale.step + block] : 1.0f;
}

__device__ __forceinline__ float load_as_float(const void *data, int64_t index, fg_dtype dtype) {
    if (dtype == FG_FLOAT16) return to_float(static_cast<const __half *>(data)[index]);
    if (dtype == FG_BFLOAT16) return to_float(static_cast<const __nv_bfloat16 *>(data)[index]);
    return static_cast<const float *>(data)[index];
}

/* The first `count` of four values; as one vector when all four go and the address allows it. */
template <typename T>
__device__ __forceinline__ void store_four(void *out, int64_t index, const float (&value)[4], int count, bool aligned) {
    struct alignas(4 * sizeof(T)) Vector {
        T element[4];
    } vector;
    for (int i = 0; i < 4; ++i) vector.element[i] = from_float<T>(value[i]);
    T *first = static_cast<T *>(out) + index;
    if (aligned && count == 4)
        *reinterpret_cast<Vector *>(first) = vector;
    else
        for (int i = 0; i < 4; ++i)
            if (i < count) first[i] = vector.element[i];
}

/* Calls body with a value of the output's type. */
template <typename Body>
__device__ __forceinline__ void with_out_type(fg_dtype dtype, Body body) {
    if (dtype == FG_FLOAT16)
        body(__half{});
    else if (dtype == FG_BFLOAT16)
        body(__nv_bfloat16{});
    else if (dtype == FG_FLOAT8_E4M3FN)
        body(__nv_fp8_e4m3{});
    else if (dtype == FG_FLOAT8_E5M2)
        body(__nv_fp8_e5m2{});
    else
        body(float{});
}

/* The end of the epilogue for the first `count` of four adjacent columns, scaled and biased: activation and store. */
__device__ __forceinline__ void activate_and_store(const Epilogue &to, float (&value)[4], int64_t group, int64_t row,
                                                   int64_t column, int count) {
    activate(value, to.activation);
    if (to.swiglu) {
        value[0] = silu(value[0]) * value[1];
        value[1] = silu(value[2]) * value[3];
        column /= 2;
        count /= 2;
    }
    const int64_t index = group * to.out_group_stride + row * to.out_stride + column;
    if (to.scale_out) {
        const float scale_out = *to.scale_out;
        for (float &x : value) x = __fdiv_rn(x, scale_out);
    }
    if (to.accumulate)
        for (int i = 0; i < 4; ++i)
            if (i < count) value[i] += static_cast<const float *>(to.out)[index + i];
    with_out_type(to.out_dtype, [&](auto type) {
        store_four<decltype(type)>(to.out, index, value, count, to.out_aligned && column % 4 == 0);
    });
}

/* ---- host ---- */

/* Each column has a scale or a bias of its own. */
inline bool has_column_factors(const Epilogue &to) { return to.bias != nullptr || has_column_scales(to); }

inline bool is_multiple(const void *pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

/* Elements, and bytes, from one index of an axis to the next; an axis of one element may carry any stride. */
inline int64_t step_of(const fg_tensor &tensor, int axis) { return tensor.shape[axis] == 1 ? 0 : tensor.strides[axis]; }
inline int64_t pitch(const fg_tensor &tensor, int axis) {
    return step_of(tensor, axis) * static_cast<int64_t>(fg_dtype_size(tensor.dtype));
}

/* Scales are contiguous, and their axes tell whether there is one set for each group. */
inline Scale make_scale(const fg_tensor &scale, fg_scale_kind kind) {
    const float *data = static_cast<const float *>(scale.data);
    switch (kind) {
        case FG_SCALE_TENSOR:
            return {data, scale.ndim, 0};
        case FG_SCALE_ROW:
            return {data, scale.ndim > 1 ? scale.shape[1] : 0, 1};
        case FG_SCALE_BLOCK:
            return {data, scale.ndim > 2 ? scale.shape[1] * scale.shape[2] : 0, scale.shape[scale.ndim - 1]};
        default:
            return {};
    }
}

inline Epilogue make_epilogue(const fg_gemm_params &params) {
    const fg_tensor &out = params.out, &bias = params.bias;
    Epilogue to = {};
    to.scale_a = make_scale(params.scale_a, params.kind_a);
    to.scale_b = make_scale(params.scale_b, params.kind_b);
    to.alpha = params.alpha;
    const auto is_one = [](const Scale &scale) { return scale.group_step == 0 && scale.step == 0; };
    to.one_factor = is_one(to.scale_a) && is_one(to.scale_b);
    to.block_scaled = params.kind_a == FG_SCALE_BLOCK;
    to.swiglu = params.swiglu;
    to.accumulate = params.accumulate;
    to.activation = params.activation;
    to.scale_out = params.scale_out.present ? static_cast<const float *>(params.scale_out.data) : nullptr;
    to.bias = bias.present ? bias.data : nullptr;
    to.bias_step = bias.present && bias.ndim > 1 ? bias.shape[1] : 0;
    to.bias_dtype = bias.dtype;
    to.out = out.data;
    to.out_dtype = out.dtype;
    to.out_stride = step_of(out, out.ndim - 2);
    to.out_group_stride = out.ndim > 2 ? step_of(out, 0) : 0;
    to.out_aligned =
        is_multiple(out.data, 4 * fg_dtype_size(out.dtype)) && to.out_stride % 4 == 0 && to.out_group_stride % 4 == 0;
    return to;
}

}  // namespace flexgemm
