/*
 * Row order of a neighbour map: order[s] = the column of the map that tile slot s works on, sorted so that the rows of
 * one tile have neighbours at the same offsets and the convolution skips the others.
 *
 * The key of a row is the Gray-code rank of its mask at the offsets of the plan: from one rank to the next a single
 * offset comes or goes. Above the rank stands the number of the row's segment, so that one stable radix sort (CUB)
 * sorts every segment by itself.
 *
 * Workspace: keys (N) | sorted keys (N) | rows (N) | what CUB needs
 */
#include <cub/device/device_radix_sort.cuh>

#include "../plan.h"
#include "backend.cuh"
#include "common.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    rank_kernel(const int32_t *map, int64_t count, const fg_order_plan plan, uint32_t *keys, int32_t *rows) {
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (n >= count) return;
    uint32_t key = 0;
#pragma unroll
    for (int i = 0; i < FG_MAX_KEY_BITS; ++i)
        if (i < plan.key_bits) key = key << 1 | (map[plan.offsets[i] * count + n] >= 0);
    /* The rank of a Gray code: each bit is the parity of itself and all above. */
#pragma unroll
    for (int shift = 1; shift < 32; shift *= 2) key ^= key >> shift;
    keys[n] = static_cast<uint32_t>(n / plan.segment) << plan.key_bits | key;
    rows[n] = static_cast<int32_t>(n);
}

/* Bits of a key: the rank's, and those that number the segments. At least one, which CUB asks for. */
int bits_of(const fg_order_plan &plan, int64_t count) {
    int bits = plan.key_bits;
    for (int64_t last = (count - 1) / plan.segment; last > 0; last /= 2) ++bits;
    return bits > 0 ? bits : 1;
}

struct Workspace {
    uint32_t *keys, *sorted_keys;
    int32_t *rows;
    void *sort;
    size_t sort_bytes, bytes;

    Workspace(void *base, int64_t count, size_t sort_bytes_) : sort_bytes(sort_bytes_) {
        const size_t array = ceil_div<size_t>(static_cast<size_t>(count) * sizeof(uint32_t), 256) * 256;
        char *at = static_cast<char *>(base);
        keys = reinterpret_cast<uint32_t *>(at);
        sorted_keys = reinterpret_cast<uint32_t *>(at + array);
        rows = reinterpret_cast<int32_t *>(at + 2 * array);
        sort = at + 3 * array;
        bytes = 3 * array + sort_bytes;
    }
};

/* With temporary == NULL it only tells the bytes that it needs there. */
cudaError_t sort_rows(void *temporary, size_t *bytes, const Workspace &workspace, int32_t *order, int64_t count,
                      int bits, cudaStream_t stream) {
    return cub::DeviceRadixSort::SortPairs(temporary, *bytes, workspace.keys, workspace.sorted_keys, workspace.rows,
                                           order, static_cast<int>(count), 0, bits, stream);
}

fg_status sort_bytes(const fg_row_order_params *p, const fg_queue *queue, size_t *bytes, fg_error *error) {
    const int64_t count = p->map.shape[1];
    if (count > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "map: expected at most %lld columns, which int32 can number, got %lld",
                       static_cast<long long>(INT32_MAX), static_cast<long long>(count));
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const int bits = bits_of(fg_plan_row_order(count, p->kernel), count);
    FG_CUDA(sort_rows(nullptr, bytes, Workspace(nullptr, count, 0), nullptr, count, bits, stream_of(queue)));
    return FG_OK;
}

}  // namespace

fg_status row_order_workspace(const fg_row_order_params *p, const fg_queue *queue, size_t *bytes, fg_error *error) {
    *bytes = 0;
    if (p->map.shape[1] == 0) return FG_OK;
    size_t sort = 0;
    const fg_status status = sort_bytes(p, queue, &sort, error);
    if (status == FG_OK) *bytes = Workspace(nullptr, p->map.shape[1], sort).bytes;
    return status;
}

fg_status row_order(const fg_row_order_params *p, const fg_queue *queue, fg_error *error) {
    const int64_t count = p->map.shape[1];
    if (count == 0) return FG_OK;
    size_t sort = 0;
    const fg_status status = sort_bytes(p, queue, &sort, error);
    if (status != FG_OK) return status;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const cudaStream_t stream = stream_of(queue);

    const fg_order_plan plan = fg_plan_row_order(count, p->kernel);
    const Workspace workspace(p->workspace.data, count, sort);
    rank_kernel<<<static_cast<unsigned int>(ceil_div<int64_t>(count, kThreads)), kThreads, 0, stream>>>(
        static_cast<const int32_t *>(p->map.data), count, plan, workspace.keys, workspace.rows);
    FG_CUDA(cudaGetLastError());
    int32_t *order = static_cast<int32_t *>(p->order.data);
    FG_CUDA(sort_rows(workspace.sort, &sort, workspace, order, count, bits_of(plan, count), stream));
    return FG_OK;
}

}  // namespace flexgemm
