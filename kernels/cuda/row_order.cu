/*
 * Row orders of a neighbour map: order[i, s] = the column of the map that tile slot s works on in order i, sorted so that
 * the rows of one tile have neighbours at the same offsets of a group and the convolution skips the others.
 *
 * The key of a row is the Gray-code rank of its mask at the offsets of the plan: from one rank to the next a single
 * offset comes or goes. Above the rank stand the numbers of the order and of the row's segment, so that one stable radix
 * sort (CUB) sorts every segment of every order by itself, and leaves the orders one after another.
 *
 * Workspace, n = orders * N: keys (n) | sorted keys (n) | rows (n) | what CUB needs
 */
#include <cub/device/device_radix_sort.cuh>

#include "../plan.h"
#include "backend.cuh"
#include "common.cuh"

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
    rows[blockIdx.y * count + n] = static_cast<int32_t>(n);
}

struct Workspace {
    uint32_t *keys, *sorted_keys;
    int32_t *rows;
    void *sort;
    size_t sort_bytes, bytes;

    Workspace(void *base, int64_t entries, size_t sort_bytes_) : sort_bytes(sort_bytes_) {
        const size_t array = ceil_div<size_t>(static_cast<size_t>(entries) * sizeof(uint32_t), 256) * 256;
        char *at = static_cast<char *>(base);
        keys = reinterpret_cast<uint32_t *>(at);
        sorted_keys = reinterpret_cast<uint32_t *>(at + array);
        rows = reinterpret_cast<int32_t *>(at + 2 * array);
        sort = at + 3 * array;
        bytes = 3 * array + sort_bytes;
    }
};

/* With temporary == NULL it only tells the bytes that it needs there. CUB asks for one bit at least. */
cudaError_t sort_rows(void *temporary, size_t *bytes, const Workspace &workspace, int32_t *order, int64_t entries,
                      int bits, cudaStream_t stream) {
    return cub::DeviceRadixSort::SortPairs(temporary, *bytes, workspace.keys, workspace.sorted_keys, workspace.rows,
                                           order, static_cast<int>(entries), 0, bits > 0 ? bits : 1, stream);
}

fg_status sort_bytes(const fg_row_order_params *p, const fg_order_plan &plan, const fg_queue *queue, size_t *bytes,
                     fg_error *error) {
    const int64_t entries = p->order.shape[0] * p->order.shape[1];
    if (entries > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "order: expected at most %lld entries, which int32 can number, got %lld",
                       static_cast<long long>(INT32_MAX), static_cast<long long>(entries));
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    FG_CUDA(
        sort_rows(nullptr, bytes, Workspace(nullptr, entries, 0), nullptr, entries, plan.key_bits, stream_of(queue)));
    return FG_OK;
}

}  // namespace

fg_status row_order_workspace(const fg_row_order_params *p, const fg_queue *queue, size_t *bytes, fg_error *error) {
    *bytes = 0;
    const int64_t entries = p->order.shape[0] * p->order.shape[1];
    if (entries == 0) return FG_OK;
    size_t sort = 0;
    const fg_order_plan plan = fg_plan_row_orders(p->map.shape[1], p->kernel, p->sets);
    const fg_status status = sort_bytes(p, plan, queue, &sort, error);
    if (status == FG_OK) *bytes = Workspace(nullptr, entries, sort).bytes;
    return status;
}

fg_status row_order(const fg_row_order_params *p, const fg_queue *queue, fg_error *error) {
    const int64_t count = p->map.shape[1], entries = p->order.shape[0] * count;
    if (entries == 0) return FG_OK;
    size_t sort = 0;
    const fg_order_plan plan = fg_plan_row_orders(count, p->kernel, p->sets);
    const fg_status status = sort_bytes(p, plan, queue, &sort, error);
    if (status != FG_OK) return status;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const cudaStream_t stream = stream_of(queue);

    const Workspace workspace(p->workspace.data, entries, sort);
    const dim3 grid(static_cast<unsigned int>(ceil_div<int64_t>(count, kThreads)),
                    static_cast<unsigned int>(plan.orders));
    rank_kernel<<<grid, kThreads, 0, stream>>>(static_cast<const int32_t *>(p->map.data), count, plan, workspace.keys,
                                               workspace.rows);
    FG_CUDA(cudaGetLastError());
    int32_t *order = static_cast<int32_t *>(p->order.data);
    FG_CUDA(sort_rows(workspace.sort, &sort, workspace, order, entries, plan.key_bits, stream));
    return FG_OK;
}

}  // namespace flexgemm
