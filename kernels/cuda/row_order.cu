/*
 * Row orders of a neighbour map: order[i, s] = the column of the map that tile slot s works on in order i, sorted so that
 * the rows of one tile have neighbours at the same offsets of a group and the convolution skips the others.
 *
 * The key of a row is the Gray-code rank of its mask at the offsets of the plan: from one rank to the next a single
 * offset comes or goes. On Hopper clusters sort the segments of the orders, each by itself (row_sort_sm90.cu). Elsewhere
 * one stable radix sort (CUB) does it: above the rank stand the numbers of the order and of the row's segment, so that
 * it leaves the segments and the orders one after another.
 *
 * Workspace, n = orders * N: keys (n) | on Hopper keys and rows (2 n) | counts
 *                                     | elsewhere sorted keys (n) | rows (n) | what CUB needs
 */
#include <cub/device/device_radix_sort.cuh>

#include "../plan.h"
#include "backend.cuh"
#include "common.cuh"
#include "row_sort_sm90.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256;

/* blockIdx.y: the order. */
__global__ void __launch_bounds__(kThreads)
    rank_kernel(const int32_t *map, int64_t count, const fg_order_plan plan, uint32_t *keys, int32_t *rows) {
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (n >= count) return;
    const auto &offsets = plan.keys[blockIdx.y];
    uint32_t key = 0;
#pragma unroll
    for (int i = 0; i < FG_MAX_KEY_BITS; ++i)
        if (i < offsets.bits) key = key << 1 | (map[offsets.offsets[i] * count + n] >= 0);
    /* The rank of a Gray code: each bit is the parity of itself and all above. */
#pragma unroll
    for (int shift = 1; shift < 32; shift *= 2) key ^= key >> shift;
    const uint32_t segments = static_cast<uint32_t>((count + plan.segment - 1) / plan.segment);
    const uint32_t segment = blockIdx.y * segments + static_cast<uint32_t>(n / plan.segment);
    keys[blockIdx.y * count + n] = segment << plan.rank_bits | key;
    if (rows) rows[blockIdx.y * count + n] = static_cast<int32_t>(n);
}

/* The workspace, and how the rows are sorted. */
struct Chain {
    fg_order_plan plan;
    int64_t count, entries;
    int num_sms;
    bool clusters;
    uint32_t *keys, *sorted_keys;
    int32_t *rows;
    RowSort sort;
    void *temporary;
    size_t temporary_bytes, bytes;

    fg_status prepare(const fg_row_order_params *p, const fg_queue *queue, fg_error *error);
    fg_status run(const int32_t *map, int32_t *order, cudaStream_t stream, fg_error *error);

private:
    char *next_;

    /* The next part of the workspace. */
    template <typename T>
    T *take(size_t size) {
        T *const part = reinterpret_cast<T *>(next_ + bytes);
        bytes += ceil_div<size_t>(size * sizeof(T), 256) * 256;
        return part;
    }

    /* With temporary == NULL it only tells the bytes that it needs there. CUB asks for one bit at least. */
    cudaError_t sort_pairs(int32_t *order, cudaStream_t stream) {
        return cub::DeviceRadixSort::SortPairs(temporary, temporary_bytes, keys, sorted_keys, rows, order,
                                               static_cast<int>(entries), 0, plan.key_bits > 0 ? plan.key_bits : 1,
                                               stream);
    }
};

/* The device is current. */
fg_status Chain::prepare(const fg_row_order_params *p, const fg_queue *queue, fg_error *error) {
    *this = {};
    count = p->map.shape[1];
    entries = p->order.shape[0] * count;
    if (entries > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "order: expected at most %lld entries, which int32 can number, got %lld",
                       static_cast<long long>(INT32_MAX), static_cast<long long>(entries));
    plan = fg_plan_row_orders(count, p->kernel, p->sets);
    int compute_capability = 0;
    const fg_status status = device_properties(queue->device_index, &num_sms, &compute_capability, error);
    if (status != FG_OK) return status;

    sort.count = count;
    sort.segment = plan.segment;
    sort.orders = plan.orders;
    for (int i = 0; i < plan.orders; ++i) sort.bits[i] = static_cast<uint8_t>(plan.keys[i].bits);
    clusters = compute_capability == 90 && row_sort_sm90_takes(sort);
    next_ = static_cast<char *>(p->workspace.data);
    const size_t n = static_cast<size_t>(entries);
    sort.keys = keys = take<uint32_t>(n);
    if (clusters) {
        for (uint2 *&items : sort.items) items = take<uint2>(n);
        sort.counts = take<uint32_t>(row_sort_sm90_counts(sort, num_sms));
    } else {
        sorted_keys = take<uint32_t>(n);
        rows = take<int32_t>(n);
        FG_CUDA(sort_pairs(nullptr, stream_of(queue)));
        temporary = take<char>(temporary_bytes);
    }
    return FG_OK;
}

fg_status Chain::run(const int32_t *map, int32_t *order, cudaStream_t stream, fg_error *error) {
    const dim3 grid(static_cast<unsigned int>(ceil_div<int64_t>(count, kThreads)),
                    static_cast<unsigned int>(plan.orders));
    rank_kernel<<<grid, kThreads, 0, stream>>>(map, count, plan, keys, rows);
    FG_CUDA(cudaGetLastError());
    sort.order = order;
    if (clusters) return row_sort_sm90(sort, num_sms, stream, error);
    FG_CUDA(sort_pairs(order, stream));
    return FG_OK;
}

}  // namespace

fg_status row_order_workspace(const fg_row_order_params *p, const fg_queue *queue, size_t *bytes, fg_error *error) {
    *bytes = 0;
    if (p->order.shape[0] * p->order.shape[1] == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    Chain chain;
    const fg_status status = chain.prepare(p, queue, error);
    if (status == FG_OK) *bytes = chain.bytes;
    return status;
}

fg_status row_order(const fg_row_order_params *p, const fg_queue *queue, fg_error *error) {
    if (p->order.shape[0] * p->order.shape[1] == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    Chain chain;
    const fg_status status = chain.prepare(p, queue, error);
    if (status != FG_OK) return status;
    return chain.run(static_cast<const int32_t *>(p->map.data), static_cast<int32_t *>(p->order.data), stream_of(queue),
                     error);
}

}  // namespace flexgemm
