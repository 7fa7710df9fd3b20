/*
 * The sort behind row orders: every segment of every order by itself. (row_sort.cu)
 */
#pragma once

#include "../plan.h"
#include "common.cuh"

namespace flexgemm {

/* The rank of a Gray code: each bit is the parity of itself and all above. */
__device__ __forceinline__ uint32_t gray_rank(uint32_t code) {
#pragma unroll
    for (int shift = 1; shift < 32; shift *= 2) code ^= code >> shift;
    return code;
}

struct RowSort {
    const uint32_t *keys; /* (orders, count) */
    int32_t *order;       /* (orders, count): rows, each segment of each order sorted by itself */
    uint2 *items[2];      /* (orders, count) each: keys and rows between passes */
    uint32_t *counts;     /* row_sort_counts() */
    int64_t count, segment;
    int32_t orders;
    uint8_t bits[FG_MAX_ORDERS]; /* of an order's keys */

    __host__ __device__ int64_t segments() const { return ceil_div(count, segment); }
};

size_t row_sort_counts(const RowSort &sort);
fg_status row_sort(const RowSort &sort, int compute_capability, cudaStream_t stream, fg_error *error);

}  // namespace flexgemm
