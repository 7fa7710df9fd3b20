/*
 * Sums of the columns of a matrix in float32, the bias gradient: slices of rows first, then the slices' sums by the
 * same kernel. Every addition has its fixed place, so the same input gives the same bits.
 */
#pragma once

#include "common.cuh"

namespace flexgemm {

constexpr int kSumColumns = 32, kSumRows = 8; /* threads of a CTA: columns x rows taken in turn */

/* out[slice, c] = sum of in[m, c] over the rows of slice blockIdx.y. */
template <typename In, typename Out>
__global__ void __launch_bounds__(kSumColumns *kSumRows)
    column_sum_kernel(const In *in, int64_t stride, int64_t rows, int64_t rows_per_slice, int64_t columns, Out *out) {
    __shared__ float sums[kSumRows][kSumColumns];
    const int x = threadIdx.x % kSumColumns, y = threadIdx.x / kSumColumns;
    const int64_t column = static_cast<int64_t>(blockIdx.x) * kSumColumns + x;
    const int64_t begin = blockIdx.y * rows_per_slice;
    const int64_t end = begin + rows_per_slice < rows ? begin + rows_per_slice : rows;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (int64_t m = begin + y; m < end; m += kSumRows) sum += to_float(in[m * stride + column]);
    }
    sums[y][x] = sum;
    __syncthreads();
    if (y > 0 || column >= columns) return;
#pragma unroll
    for (int i = 1; i < kSumRows; ++i) sum += sums[i][x];
    out[blockIdx.y * columns + column] = from_float<Out>(sum);
}

/* partials: (slices, columns), where there is more than one slice. */
template <typename T>
cudaError_t column_sum(const T *in, int64_t stride, int64_t rows, int64_t columns, int slices, float *partials, T *out,
                       cudaStream_t stream) {
    const unsigned int blocks = static_cast<unsigned int>(ceil_div<int64_t>(columns, kSumColumns));
    const int threads = kSumColumns * kSumRows;
    if (slices == 1) {
        column_sum_kernel<T, T><<<blocks, threads, 0, stream>>>(in, stride, rows, rows, columns, out);
        return cudaGetLastError();
    }
    const dim3 grid(blocks, static_cast<unsigned int>(slices));
    column_sum_kernel<T, float>
        <<<grid, threads, 0, stream>>>(in, stride, rows, ceil_div<int64_t>(rows, slices), columns, partials);
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) return status;
    column_sum_kernel<float, T><<<blocks, threads, 0, stream>>>(partials, columns, slices, slices, columns, out);
    return cudaGetLastError();
}

}  // namespace flexgemm
