/*
 * The end of a convolution's sums: what is added to them, the activation, and, where the reduction was split, the sum of
 * the float32 partial sums of all slices, slice 0 first. Always the same order, hence always the same bits.
 */
#pragma once

#include "activation.cuh"
#include "common.cuh"

namespace flexgemm {

/* out = activation(sum + bias + residual). The residual may be `out` itself: an element is read by the thread that
 * writes it, and before. */
struct SumEpilogue {
    const void *bias;        /* (columns) or NULL; dtype of out */
    const void *residual;    /* (rows, columns), residual_stride apart, or NULL; dtype of out */
    int64_t residual_stride; /* elements */
    fg_activation activation;
};

/* partials: (splits, rows, columns) contiguous; out: rows of `stride` elements. */
template <typename T>
__global__ void __launch_bounds__(256)
    reduce_partials_kernel(const float *partials, int splits, int64_t rows, int64_t columns, const SumEpilogue epilogue,
                           T *out, int64_t stride) {
    const T *bias = static_cast<const T *>(epilogue.bias), *residual = static_cast<const T *>(epilogue.residual);
    const int64_t count = rows * columns;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < count;
         i += static_cast<int64_t>(gridDim.x) * 256) {
        float sum = 0.0f;
#pragma unroll 4
        for (int s = 0; s < splits; ++s) sum += partials[s * count + i];
        const int64_t row = i / columns, column = i % columns;
        if (bias) sum += to_float(bias[column]);
        if (residual) sum += to_float(residual[row * epilogue.residual_stride + column]);
        out[row * stride + column] = from_float<T>(activated(sum, epilogue.activation));
    }
}

template <typename T>
cudaError_t reduce_partials(const float *partials, int splits, int64_t rows, int64_t columns,
                            const SumEpilogue &epilogue, T *out, int64_t stride, cudaStream_t stream) {
    const int64_t blocks = ceil_div<int64_t>(rows * columns, 256);
    constexpr int64_t kMaxBlocks = 1 << 16;
    reduce_partials_kernel<T><<<static_cast<unsigned int>(blocks < kMaxBlocks ? blocks : kMaxBlocks), 256, 0, stream>>>(
        partials, splits, rows, columns, epilogue, out, stride);
    return cudaGetLastError();
}

}  // namespace flexgemm
