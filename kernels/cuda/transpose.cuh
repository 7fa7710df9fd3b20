/*
 * Row-major weights (..., K, N) brought to (..., N, K), which all kernels of products read.
 */
#pragma once

#include "common.cuh"

namespace flexgemm {

/* Bytes of the copy; its rows begin at multiples of 16 bytes. */
size_t transposed_bytes(const fg_tensor &matrix);

/* Copies `matrix`, of two or three axes, into `workspace` with the last two exchanged; `result` describes the copy. */
fg_status transpose(const fg_tensor &matrix, void *workspace, fg_tensor *result, const fg_queue *queue,
                    fg_error *error);

}  // namespace flexgemm
