/* What becomes of the finished float32 sums of a convolution's forward pass: out = activation(scale * sum + bias +
 * residual) / scale_out, where only float8 operands have a scale and only a float8 out has scale_out. */
#pragma once

#include "activation.cuh"
#include "common.cuh"

namespace flexgemm {

/* The residual may be `out` itself: an element is read by the thread that writes it, and before. */
struct SumEpilogue {
    const void *bias;        /* (columns) or NULL */
    const void *residual;    /* (rows, columns), residual_stride apart, or NULL; dtype of bias */
    int64_t residual_stride; /* elements */
    fg_activation activation;
    const float *scale_in = nullptr;     /* of all that was gathered, or NULL: 1 */
    const float *scale_weight = nullptr; /* of the whole weight, or where the step is 1 of each column; or NULL: 1 */
    int scale_weight_step = 0;
    const float *scale_out = nullptr; /* or NULL: 1 */

    __device__ __forceinline__ float scale_of(int column) const {
        const float scale = scale_in ? *scale_in : 1.0f;
        return scale_weight ? scale * scale_weight[column * scale_weight_step] : scale;
    }

    /* The same for rows that begin at one of their columns. */
    template <typename T>
    __device__ SumEpilogue from_column(int64_t column) const {
        SumEpilogue part = *this;
        if (bias) part.bias = static_cast<const T *>(bias) + column;
        if (residual) part.residual = static_cast<const T *>(residual) + column;
        if (scale_weight) part.scale_weight += column * scale_weight_step;
        return part;
    }
};

/* Calls body with a value of the type of what is added. */
template <typename Body>
__device__ __forceinline__ void with_float_type(fg_dtype dtype, const Body &body) {
    if (dtype == FG_FLOAT16)
        body(__half{});
    else if (dtype == FG_BFLOAT16)
        body(__nv_bfloat16{});
    else
        body(float{});
}

/* ... of an output of float8 operands. */
template <typename Body>
__device__ __forceinline__ void with_out_type(fg_dtype dtype, const Body &body) {
    if (dtype == FG_FLOAT8_E4M3FN)
        body(__nv_fp8_e4m3{});
    else if (dtype == FG_FLOAT8_E5M2)
        body(__nv_fp8_e5m2{});
    else
        with_float_type(dtype, body);
}

}  // namespace flexgemm
