/*
 * The sort behind row orders on Hopper. (row_sort_sm90.cu)
 */
#pragma once

#include "../plan.h"
#include "common.cuh"

namespace flexgemm {

struct RowSort {
    const uint32_t *keys; /* (orders, count) */
    int32_t *order;       /* (orders, count): rows, each segment of each order sorted by itself */
    uint2 *items[2];      /* (orders, count) each: keys and rows between passes */
    uint32_t *counts;     /* row_sort_sm90_counts() */
    int64_t count, segment;
    int32_t orders;
    uint8_t bits[FG_MAX_ORDERS]; /* of an order's keys that count, the lowest */

    int64_t segments() const { return ceil_div(count, segment); }
};

constexpr int64_t kMaxSortedSegment = 1 << 18;

bool row_sort_sm90_takes(const RowSort &sort);
size_t row_sort_sm90_counts(const RowSort &sort, int num_sms);
fg_status row_sort_sm90(const RowSort &sort, int num_sms, cudaStream_t stream, fg_error *error);

}  // namespace flexgemm
