/*
 * CUB's stable radix sort of unsigned keys with an int32 each, compiled once. (sort_keys.cu)
 */
#pragma once

#include "common.cuh"

namespace flexgemm {

/* Sorts by the low `bits` >= 1 bits. With temporary == NULL it only tells the bytes that it needs there. */
cudaError_t sort_pairs(void *temporary, size_t *bytes, const uint32_t *keys, uint32_t *sorted, const int32_t *values,
                       int32_t *order, int64_t count, int bits, cudaStream_t stream);
cudaError_t sort_pairs(void *temporary, size_t *bytes, const uint64_t *keys, uint64_t *sorted, const int32_t *values,
                       int32_t *order, int64_t count, int bits, cudaStream_t stream);

/* values[i] = i */
cudaError_t number_rows(int32_t *values, int64_t count, cudaStream_t stream);

}  // namespace flexgemm
