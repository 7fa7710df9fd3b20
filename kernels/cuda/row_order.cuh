/*
 * Row orders as the steps of a chain: keys, which whoever has the masks of the rows writes, then a sort. (row_order.cu)
 */
#pragma once

#include "../plan.h"
#include "common.cuh"
#include "row_sort.cuh"

namespace flexgemm {

/* Where keys go. */
struct OrderKeys {
    fg_order_plan plan;
    int64_t count;  /* rows */
    uint32_t *keys; /* (orders, count) */

    /* The key of row n, which has neighbours at the offsets where present(v). */
    template <class Present>
    __device__ __forceinline__ void store(int order, int64_t n, const Present &present) const {
        const int begin = plan.keys[order].begin, end = plan.keys[order].end;
        uint32_t code = 0;
#pragma unroll 8
        for (int i = begin; i < end; ++i) code |= present(plan.offsets[i]) ? plan.codes[i] : 0;
        keys[order * count + n] = gray_rank(code);
    }
};

struct RowOrders {
    OrderKeys keys;
    RowSort sort;
    int compute_capability;
    size_t bytes; /* of the workspace */

    fg_status prepare(int64_t count, const int32_t (&kernel)[3], fg_order_sets sets, void *workspace,
                      const fg_queue *queue, fg_error *error);
    /* When the keys are there. The device is current. */
    fg_status run(int32_t *order, cudaStream_t stream, fg_error *error);
};

/* Keys by the entries of a map, (V, count). */
fg_status write_order_keys(const fg_tensor &map, const OrderKeys &keys, cudaStream_t stream, fg_error *error);

}  // namespace flexgemm
