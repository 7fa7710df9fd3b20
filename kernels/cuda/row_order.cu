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
#include "row_order.cuh"

#include <cub/device/device_radix_sort.cuh>

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

}  // namespace

/* The next part of the workspace. */
template <typename T>
T *RowOrders::take(size_t size) {
    T *const part = reinterpret_cast<T *>(workspace_ + bytes);
    bytes += ceil_div<size_t>(size * sizeof(T), 256) * 256;
    return part;
}

/* Before there is a workspace it only tells the bytes that it needs there. CUB asks for one bit at least. */
cudaError_t RowOrders::sort_pairs(int32_t *order, cudaStream_t stream) {
    const int bits = keys.plan.key_bits > 0 ? keys.plan.key_bits : 1;
    return cub::DeviceRadixSort::SortPairs(temporary_, temporary_bytes_, keys.keys, sorted_keys_, keys.rows, order,
                                           static_cast<int>(entries()), 0, bits, stream);
}

fg_status RowOrders::prepare(int64_t count, const int32_t (&kernel)[3], fg_order_sets sets, void *workspace,
                             const fg_queue *queue, fg_error *error) {
    *this = {};
    keys.plan = fg_plan_row_orders(count, kernel, sets);
    keys.count = count;
    if (entries() > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "order: expected at most %lld entries, which int32 can number, got %lld",
                       static_cast<long long>(INT32_MAX), static_cast<long long>(entries()));
    int compute_capability = 0;
    const fg_status status = device_properties(queue->device_index, &num_sms_, &compute_capability, error);
    if (status != FG_OK) return status;

    sort_.count = count;
    sort_.segment = keys.plan.segment;
    sort_.orders = keys.plan.orders;
    for (int i = 0; i < keys.plan.orders; ++i) sort_.bits[i] = static_cast<uint8_t>(keys.plan.keys[i].bits);
    clusters_ = compute_capability == 90 && row_sort_sm90_takes(sort_);
    workspace_ = static_cast<char *>(workspace);
    const size_t n = static_cast<size_t>(entries());
    sort_.keys = keys.keys = take<uint32_t>(n);
    if (clusters_) {
        for (uint2 *&items : sort_.items) items = take<uint2>(n);
        sort_.counts = take<uint32_t>(row_sort_sm90_counts(sort_, num_sms_));
    } else {
        sorted_keys_ = take<uint32_t>(n);
        keys.rows = take<int32_t>(n);
        FG_CUDA(sort_pairs(nullptr, stream_of(queue)));
        temporary_ = take<char>(temporary_bytes_);
    }
    return FG_OK;
}

fg_status RowOrders::sort(int32_t *order, cudaStream_t stream, fg_error *error) {
    sort_.order = order;
    if (clusters_) return row_sort_sm90(sort_, num_sms_, stream, error);
    FG_CUDA(sort_pairs(order, stream));
    return FG_OK;
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
    if (status == FG_OK) status = orders.sort(static_cast<int32_t *>(p->order.data), stream, error);
    return status;
}

}  // namespace flexgemm
