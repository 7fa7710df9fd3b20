/*
 * Row orders as the steps of a chain: keys, which whoever has the masks of the rows writes, then a sort. (row_order.cu)
 */
#pragma once

#include "../plan.h"
#include "common.cuh"
#include "row_sort_sm90.cuh"

namespace flexgemm {

/* Where keys go. */
struct OrderKeys {
    fg_order_plan plan;
    int64_t count;  /* rows */
    uint32_t *keys; /* (orders, count) */
    int32_t *rows;  /* (orders, count): numbers of the rows, where the sort wants them, else NULL */

    /* The key of row n: the Gray-code rank of the bits present(v) at the order's offsets. Where one sort sorts all
     * orders, the numbers of the order and of the row's segment stand above. */
    template <class Present>
    __device__ __forceinline__ void store(int order, int64_t n, const Present &present) const {
        const auto &offsets = plan.keys[order];
        uint32_t key = 0;
#pragma unroll
        for (int i = 0; i < FG_MAX_KEY_BITS; ++i)
            if (i < offsets.bits) key = key << 1 | present(offsets.offsets[i]);
        /* The rank of a Gray code: each bit is the parity of itself and all above. */
#pragma unroll
        for (int shift = 1; shift < 32; shift *= 2) key ^= key >> shift;
        if (rows) {
            const uint32_t segments = static_cast<uint32_t>((count + plan.segment - 1) / plan.segment);
            const uint32_t segment = order * segments + static_cast<uint32_t>(n / plan.segment);
            key |= segment << plan.rank_bits;
            rows[order * count + n] = static_cast<int32_t>(n);
        }
        keys[order * count + n] = key;
    }
};

struct RowOrders {
    OrderKeys keys;
    size_t bytes; /* of the workspace */

    /* The device is current. */
    fg_status prepare(int64_t count, const int32_t (&kernel)[3], fg_order_sets sets, void *workspace,
                      const fg_queue *queue, fg_error *error);
    /* When the keys are there. */
    fg_status sort(int32_t *order, cudaStream_t stream, fg_error *error);

private:
    int num_sms_;
    bool clusters_;
    RowSort sort_;
    uint32_t *sorted_keys_;
    void *temporary_;
    size_t temporary_bytes_;
    char *workspace_;

    int64_t entries() const { return keys.plan.orders * keys.count; }
    template <typename T>
    T *take(size_t size);
    cudaError_t sort_pairs(int32_t *order, cudaStream_t stream);
};

/* Keys by the entries of a map, (V, count). */
fg_status write_order_keys(const fg_tensor &map, const OrderKeys &keys, cudaStream_t stream, fg_error *error);

}  // namespace flexgemm
