/* Copies of float32 operands rounded to TF32, or split into two parts that are. (tf32.cu) */
#pragma once

#include "common.cuh"

namespace flexgemm {

/* out (rows, columns) contiguous; in: rows of `stride` elements. Columns are a multiple of 4, out of 16 bytes. */
cudaError_t tf32_rows(const float *in, int64_t stride, int64_t rows, int64_t columns, float *out, cudaStream_t stream);

/* out (columns, volume, rows) = in (rows, volume, columns), both contiguous. */
cudaError_t tf32_transposed(const float *in, int rows, int volume, int columns, float *out, cudaStream_t stream);

/* The same with rows of split_depth(of so many elements): of each 16 the high parts, then the low ones, zeros past the
 * last. high + low is x to 2^-22; where x is not finite or rounds to an infinite TF32, their sum is NaN. */
constexpr int kSplitBlock = 16;
__host__ __device__ constexpr int64_t split_depth(int64_t depth) {
    return ceil_div<int64_t>(depth, kSplitBlock) * 2 * kSplitBlock;
}

cudaError_t tf32_split_rows(const float *in, int64_t stride, int64_t rows, int64_t columns, float *out,
                            cudaStream_t stream);
cudaError_t tf32_split_transposed(const float *in, int rows, int volume, int columns, float *out, cudaStream_t stream);

}  // namespace flexgemm
