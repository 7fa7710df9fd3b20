/* Copies of float32 operands rounded to TF32. (tf32.cu) */
#pragma once

#include "common.cuh"

namespace flexgemm {

/* out (rows, columns) contiguous; in: rows of `stride` elements. Columns are a multiple of 4, out of 16 bytes. */
cudaError_t tf32_rows(const float *in, int64_t stride, int64_t rows, int64_t columns, float *out, cudaStream_t stream);

/* out (columns, volume, rows) = in (rows, volume, columns), both contiguous. */
cudaError_t tf32_transposed(const float *in, int rows, int volume, int columns, float *out, cudaStream_t stream);

}  // namespace flexgemm
