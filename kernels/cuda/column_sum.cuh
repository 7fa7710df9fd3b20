/*
 * Sums of the columns of a matrix in float32, the bias gradient: slices of rows first, then the slices' sums by the
 * same kernel. Every addition has its fixed place, so the same input gives the same bits.
 */
#pragma once

#include "common.cuh"

namespace flexgemm {

constexpr int kSumThreads = 256;

/* A CTA's threads: some side by side, each with kVector columns that it reads at once, the rest on rows taken in turn.
 * Eight times 16 bytes are a whole line; where rows do not allow that, single elements of 32 columns. */
template <typename In, int kVector>
struct SumShape {
    static constexpr int kAcross = kVector > 1 ? 8 : 32, kDown = kSumThreads / kAcross, kColumns = kAcross * kVector;
    struct alignas(kVector * sizeof(In)) Vector {
        In x[kVector];
    };
};

/* out[slice, c] = sum of in[m, c] over the rows of slice blockIdx.y. */
template <typename In, typename Out, int kVector>
__global__ void __launch_bounds__(kSumThreads)
    column_sum_kernel(const In *in, int64_t stride, int64_t rows, int64_t rows_per_slice, int64_t columns, Out *out) {
    using Shape = SumShape<In, kVector>;
    __shared__ float sums[Shape::kDown][Shape::kColumns];
    const int x = threadIdx.x % Shape::kAcross, y = threadIdx.x / Shape::kAcross;
    const int64_t column0 = static_cast<int64_t>(blockIdx.x) * Shape::kColumns, column = column0 + x * kVector;
    const int64_t begin = blockIdx.y * rows_per_slice;
    const int64_t end = begin + rows_per_slice < rows ? begin + rows_per_slice : rows;
    float sum[kVector] = {};
    if (column < columns) { /* which is a multiple of kVector */
#pragma unroll 4
        for (int64_t m = begin + y; m < end; m += Shape::kDown) {
            const auto vector = *reinterpret_cast<const typename Shape::Vector *>(in + m * stride + column);
#pragma unroll
            for (int i = 0; i < kVector; ++i) sum[i] += to_float(vector.x[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[y][x * kVector + i] = sum[i];
    __syncthreads();
    const int c = threadIdx.x;
    if (c >= Shape::kColumns || column0 + c >= columns) return;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < Shape::kDown; ++i) total += sums[i][c];
    out[blockIdx.y * columns + column0 + c] = from_float<Out>(total);
}

template <typename In, typename Out>
cudaError_t column_sum_slices(const In *in, int64_t stride, int64_t rows, int64_t columns, int slices, Out *out,
                              cudaStream_t stream) {
    constexpr int kVector = 16 / sizeof(In);
    const bool aligned = reinterpret_cast<uintptr_t>(in) % 16 == 0 && stride % kVector == 0 && columns % kVector == 0;
    const int64_t rows_per_slice = ceil_div<int64_t>(rows, slices);
    const int width = aligned ? SumShape<In, kVector>::kColumns : SumShape<In, 1>::kColumns;
    const dim3 grid(static_cast<unsigned int>(ceil_div<int64_t>(columns, width)), static_cast<unsigned int>(slices));
    if (aligned)
        column_sum_kernel<In, Out, kVector>
            <<<grid, kSumThreads, 0, stream>>>(in, stride, rows, rows_per_slice, columns, out);
    else
        column_sum_kernel<In, Out, 1><<<grid, kSumThreads, 0, stream>>>(in, stride, rows, rows_per_slice, columns, out);
    return cudaGetLastError();
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
