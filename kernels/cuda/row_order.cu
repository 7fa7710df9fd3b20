/*
 * Row orders of a neighbour map: order[i, s] = the column of the map that tile slot s works on in order i, sorted so
 * that the rows of one tile have neighbours at the same offsets of a group and the convolution skips the others.
 *
 * The key of a row is the Gray-code rank of what its offsets stand for in the plan (plan_order.c): from one rank to the
 * next a single offset comes or goes, but where one phase ends and the next begins. (row_sort.cu sorts by it.)
 *
 * An ordered map has the entries of the map in the first order as well: each is gathered once more, out of a sector of
 * 32 bytes of its own, so that every convolution that comes reads them in a row.
 *
 * Workspace, n = orders * N: keys (n) | keys and rows between passes (2 n) | counts
 */
#include "row_order.cuh"

#include "backend.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256;

/* blockIdx.y: the order. */
__global__ void __launch_bounds__(kThreads) keys_kernel(const int32_t *map, const __grid_constant__ OrderKeys keys) {
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (n >= keys.count) return;
    keys.store(blockIdx.y, n, [&](int offset) { return map[offset * keys.count + n] >= 0; });
}

/* A thread for each slot. The arrays share nothing: a thread's gathers need not wait for its stores. */
__global__ void __launch_bounds__(kThreads)
    ordered_map_kernel(const int32_t *__restrict__ map, const int32_t *__restrict__ order, int64_t volume,
                       int64_t orders, int64_t count, int32_t *__restrict__ out) {
    const int64_t slot = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (slot >= count) return;
    const int64_t row = order[slot];
    const bool is_row = 0 <= row && row < count;
    for (int64_t i = 0; i < orders; ++i) out[i * count + slot] = order[i * count + slot];
    out += orders * count + slot;
    map += is_row ? row : 0;
#pragma unroll 9
    for (int64_t v = 0; v < volume; ++v) out[v * count] = is_row ? map[v * count] : -1;
}

}  // namespace

fg_status RowOrders::prepare(int64_t count, const int32_t (&kernel)[3], fg_order_sets sets, void *workspace,
                             const fg_queue *queue, fg_error *error) {
    *this = {};
    keys.plan = fg_plan_row_orders(count, kernel, sets);
    keys.count = count;
    const int64_t entries = keys.plan.orders * count;
    if (entries > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "order: expected at most %lld entries, which int32 can number, got %lld",
                       static_cast<long long>(INT32_MAX), static_cast<long long>(entries));
    int num_sms = 0;
    const fg_status status = device_properties(queue->device_index, &num_sms, &compute_capability, error);
    if (status != FG_OK) return status;

    sort.count = count;
    sort.segment = keys.plan.segment;
    sort.orders = keys.plan.orders;
    for (int i = 0; i < keys.plan.orders; ++i) sort.bits[i] = static_cast<uint8_t>(keys.plan.keys[i].bits);
    char *const base = static_cast<char *>(workspace);
    const auto take = [&](size_t part) {
        char *const begin = base + bytes;
        bytes += ceil_div<size_t>(part, 256) * 256;
        return begin;
    };
    const size_t n = static_cast<size_t>(entries);
    sort.keys = keys.keys = reinterpret_cast<uint32_t *>(take(n * sizeof(uint32_t)));
    for (uint2 *&items : sort.items) items = reinterpret_cast<uint2 *>(take(n * sizeof(uint2)));
    sort.counts = reinterpret_cast<uint32_t *>(take(row_sort_counts(sort) * sizeof(uint32_t)));
    return FG_OK;
}

fg_status RowOrders::run(int32_t *order, cudaStream_t stream, fg_error *error) {
    sort.order = order;
    return row_sort(sort, compute_capability, stream, error);
}

fg_status write_order_keys(const fg_tensor &map, const OrderKeys &keys, cudaStream_t stream, fg_error *error) {
    const dim3 grid(static_cast<unsigned int>(ceil_div<int64_t>(keys.count, kThreads)),
                    static_cast<unsigned int>(keys.plan.orders));
    keys_kernel<<<grid, kThreads, 0, stream>>>(static_cast<const int32_t *>(map.data), keys);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

fg_status row_order_workspace(const fg_row_order_params *p, const fg_queue *queue, size_t *bytes, fg_error *error) {
    *bytes = 0;
    if (p->order.shape[0] * p->order.shape[1] == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    RowOrders orders;
    const fg_status status = orders.prepare(p->map.shape[1], p->kernel, p->sets, nullptr, queue, error);
    if (status == FG_OK) *bytes = orders.bytes;
    return status;
}

fg_status row_order(const fg_row_order_params *p, const fg_queue *queue, fg_error *error) {
    if (p->order.shape[0] * p->order.shape[1] == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const cudaStream_t stream = stream_of(queue);
    RowOrders orders;
    fg_status status = orders.prepare(p->map.shape[1], p->kernel, p->sets, p->workspace.data, queue, error);
    if (status == FG_OK) status = write_order_keys(p->map, orders.keys, stream, error);
    if (status == FG_OK) status = orders.run(static_cast<int32_t *>(p->order.data), stream, error);
    return status;
}

fg_status ordered_map(const fg_ordered_map_params *p, const fg_queue *queue, fg_error *error) {
    const int64_t count = p->map.shape[1];
    if (count == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const auto blocks = static_cast<unsigned int>(ceil_div<int64_t>(count, kThreads));
    ordered_map_kernel<<<blocks, kThreads, 0, stream_of(queue)>>>(
        static_cast<const int32_t *>(p->map.data), static_cast<const int32_t *>(p->order.data), p->map.shape[0],
        p->order.shape[0], count, static_cast<int32_t *>(p->out.data));
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

}  // namespace flexgemm
