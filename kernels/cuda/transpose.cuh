/*
 * Matrices the other way round: row-major weights (..., K, N) brought to (..., N, K), which all kernels of products
 * read, and some alone.
 */
#pragma once

#include "common.cuh"

namespace flexgemm {

/* `matrix`, of two or three axes, with the last two exchanged: a place for it in `workspace`, with rows that begin at
 * multiples of 16 bytes, and the bytes that it takes. */
fg_tensor transposed(const fg_tensor &matrix, void *workspace);
size_t transposed_bytes(const fg_tensor &matrix);

/* `to` = `from` with the last two axes exchanged, by at most so many blocks. */
fg_status transpose(const fg_tensor &from, const fg_tensor &to, int max_blocks, const fg_queue *queue, fg_error *error);

}  // namespace flexgemm
