/*
 * The second half of a product whose reduction was split: adds the float32 partial sums of all slices, slice 0 first,
 * and converts. Always the same order, hence always the same bits.
 */
#pragma once

#include "common.cuh"

namespace flexgemm {

/* partials: (splits, rows, columns) contiguous; out: rows of `stride` elements. */
template <typename T>
__global__ void __launch_bounds__(256)
    reduce_partials_kernel(const float *partials, int splits, int64_t rows, int64_t columns, T *out, int64_t stride) {
    const int64_t count = rows * columns;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < count;
         i += static_cast<int64_t>(gridDim.x) * 256) {
        float sum = 0.0f;
#pragma unroll 4
        for (int s = 0; s < splits; ++s) sum += partials[s * count + i];
        const int64_t row = i / columns, column = i % columns;
        out[row * stride + column] = from_float<T>(sum);
    }
}

template <typename T>
cudaError_t reduce_partials(const float *partials, int splits, int64_t rows, int64_t columns, T *out, int64_t stride,
                            cudaStream_t stream) {
    const int64_t blocks = ceil_div<int64_t>(rows * columns, 256);
    constexpr int64_t kMaxBlocks = 1 << 16;
    reduce_partials_kernel<T><<<static_cast<unsigned int>(blocks < kMaxBlocks ? blocks : kMaxBlocks), 256, 0, stream>>>(
        partials, splits, rows, columns, out, stride);
    return cudaGetLastError();
}

}  // namespace flexgemm
