/*
 * Sums of the columns of a matrix in float32, the bias gradient: slices of rows first, then the slices' sums by the
 * same kernel. Every addition has its fixed place, so the same input gives the same bits.
 */
#pragma once

#include "vector.cuh"

namespace flexgemm {

/* A CTA's part: some threads side by side, each with kVector columns that it reads at once, the rest on rows taken in
 * turn. Eight times 16 bytes are a whole line; where rows do not allow that, single elements of 32 columns. */
template <typename In, int kVector, int kThreads>
struct ColumnSum {
    static constexpr int kAcross = kVector > 1 ? 8 : 32, kDown = kThreads / kAcross, kColumns = kAcross * kVector;
    using Sums = float[kDown][kColumns]; /* in shared memory */
    static_assert(kColumns <= kThreads, "a thread for each sum");

    /* Rows begin .. end of the columns from column0 on, of which there are `columns` in all, a multiple of kVector.
     * Returns the sum of column column0 + threadIdx.x. */
    __device__ static float run(const In *in, int64_t stride, int64_t begin, int64_t end, int64_t column0,
                                int64_t columns, Sums &sums) {
        const int x = threadIdx.x % kAcross, y = threadIdx.x / kAcross;
        const int64_t column = column0 + x * kVector;
        float sum[kVector] = {};
        if (column < columns) {
#pragma unroll 8
            for (int64_t m = begin + y; m < end; m += kDown) {
                const auto vector = Vector<In, kVector>::load(in + m * stride + column);
#pragma unroll
                for (int i = 0; i < kVector; ++i) sum[i] += to_float(vector.element[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < kVector; ++i) sums[y][x * kVector + i] = sum[i];
        __syncthreads();
        float total = 0.0f;
        if (threadIdx.x < kColumns) {
#pragma unroll
            for (int i = 0; i < kDown; ++i) total += sums[i][threadIdx.x];
        }
        return total;
    }
};

constexpr int kColumnSumThreads = 256;

/* out[slice, c] = sum of in[m, c] over the rows of slice blockIdx.y. */
template <typename In, typename Out, int kVector>
__global__ void __launch_bounds__(kColumnSumThreads)
    column_sum_kernel(const In *in, int64_t stride, int64_t rows, int64_t rows_per_slice, int64_t columns, Out *out) {
    using Sum = ColumnSum<In, kVector, kColumnSumThreads>;
    __shared__ typename Sum::Sums sums;
    const int64_t begin = blockIdx.y * rows_per_slice, column0 = static_cast<int64_t>(blockIdx.x) * Sum::kColumns;
    const float sum = Sum::run(in, stride, begin, min(begin + rows_per_slice, rows), column0, columns, sums);
    const int64_t column = column0 + threadIdx.x;
    if (threadIdx.x < Sum::kColumns && column < columns) out[blockIdx.y * columns + column] = from_float<Out>(sum);
}

template <int kVector, typename In, typename Out>
cudaError_t launch_column_sum(const In *in, int64_t stride, int64_t rows, int64_t columns, int slices, Out *out,
                              cudaStream_t stream) {
    constexpr int kColumns = ColumnSum<In, kVector, kColumnSumThreads>::kColumns;
    const dim3 grid(static_cast<unsigned int>(ceil_div<int64_t>(columns, kColumns)), static_cast<unsigned int>(slices));
    column_sum_kernel<In, Out, kVector>
        <<<grid, kColumnSumThreads, 0, stream>>>(in, stride, rows, ceil_div<int64_t>(rows, slices), columns, out);
    return cudaGetLastError();
}

template <typename In, typename Out>
cudaError_t column_sum_slices(const In *in, int64_t stride, int64_t rows, int64_t columns, int slices, Out *out,
                              cudaStream_t stream) {
    if (in_vectors<In>(in, stride, columns))
        return launch_column_sum<kChannels<In>>(in, stride, rows, columns, slices, out, stream);
    return launch_column_sum<1>(in, stride, rows, columns, slices, out, stream);
}

/* partials: (slices, columns), where there is more than one slice. */
template <typename T>
cudaError_t column_sum(const T *in, int64_t stride, int64_t rows, int64_t columns, int slices, float *partials, T *out,
                       cudaStream_t stream) {
    if (slices == 1) return column_sum_slices(in, stride, rows, columns, 1, out, stream);
    const cudaError_t status = column_sum_slices(in, stride, rows, columns, slices, partials, stream);
    if (status != cudaSuccess) return status;
    return column_sum_slices(partials, columns, slices, columns, 1, out, stream);
}

}  // namespace flexgemm
