/*
 * The permutation that sorts integer keys: CUB's radix sort of the keys with the number of their row.
 *
 * Workspace: rows (N) | sorted keys (N), where the caller wants none | what CUB needs
 */
#include "sort_pairs.cuh"

#include <cub/device/device_radix_sort.cuh>

#include "backend.cuh"
#include "common.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256;
constexpr size_t kAlignment = 256;

__global__ void __launch_bounds__(kThreads) number_rows_kernel(int32_t *values, int64_t count) {
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (n < count) values[n] = static_cast<int32_t>(n);
}

struct Workspace {
    void *rows, *sorted, *sort;
    size_t bytes;

    Workspace(const fg_sort_keys_params &p, size_t sort_bytes) {
        const size_t count = static_cast<size_t>(p.keys.shape[0]), key = fg_dtype_size(p.keys.dtype);
        const size_t row_bytes = ceil_div(count * sizeof(int32_t), kAlignment) * kAlignment;
        const size_t key_bytes = p.sorted.present ? 0 : ceil_div(count * key, kAlignment) * kAlignment;
        char *at = static_cast<char *>(p.workspace.data);
        rows = at;
        sorted = p.sorted.present ? p.sorted.data : at + row_bytes;
        sort = at + row_bytes + key_bytes;
        bytes = row_bytes + key_bytes + sort_bytes;
    }
};

template <class Key>
cudaError_t sort(const fg_sort_keys_params &p, void *temporary, size_t *bytes, const Workspace &workspace,
                 cudaStream_t stream) {
    return sort_pairs(temporary, bytes, static_cast<const Key *>(p.keys.data), static_cast<Key *>(workspace.sorted),
                      static_cast<const int32_t *>(workspace.rows), static_cast<int32_t *>(p.order.data),
                      p.keys.shape[0], p.bits, stream);
}

cudaError_t sort_either(const fg_sort_keys_params &p, void *temporary, size_t *bytes, const Workspace &workspace,
                        cudaStream_t stream) {
    return p.keys.dtype == FG_INT32 ? sort<uint32_t>(p, temporary, bytes, workspace, stream)
                                    : sort<uint64_t>(p, temporary, bytes, workspace, stream);
}

fg_status sort_bytes(const fg_sort_keys_params &p, const fg_queue *queue, size_t *bytes, fg_error *error) {
    if (p.keys.shape[0] > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "keys: expected at most %lld for an int32 order, got %lld",
                       static_cast<long long>(INT32_MAX), static_cast<long long>(p.keys.shape[0]));
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    FG_CUDA(sort_either(p, nullptr, bytes, Workspace(p, 0), stream_of(queue)));
    return FG_OK;
}

}  // namespace

cudaError_t sort_pairs(void *temporary, size_t *bytes, const uint32_t *keys, uint32_t *sorted, const int32_t *values,
                       int32_t *order, int64_t count, int bits, cudaStream_t stream) {
    return cub::DeviceRadixSort::SortPairs(temporary, *bytes, keys, sorted, values, order, static_cast<int>(count), 0,
                                           bits, stream);
}

cudaError_t sort_pairs(void *temporary, size_t *bytes, const uint64_t *keys, uint64_t *sorted, const int32_t *values,
                       int32_t *order, int64_t count, int bits, cudaStream_t stream) {
    return cub::DeviceRadixSort::SortPairs(temporary, *bytes, keys, sorted, values, order, static_cast<int>(count), 0,
                                           bits, stream);
}

cudaError_t number_rows(int32_t *values, int64_t count, cudaStream_t stream) {
    number_rows_kernel<<<static_cast<unsigned int>(ceil_div<int64_t>(count, kThreads)), kThreads, 0, stream>>>(values,
                                                                                                               count);
    return cudaGetLastError();
}

fg_status sort_keys_workspace(const fg_sort_keys_params *p, const fg_queue *queue, size_t *bytes, fg_error *error) {
    *bytes = 0;
    if (p->keys.shape[0] == 0) return FG_OK;
    size_t needed = 0;
    const fg_status status = sort_bytes(*p, queue, &needed, error);
    if (status == FG_OK) *bytes = Workspace(*p, needed).bytes;
    return status;
}

fg_status sort_keys(const fg_sort_keys_params *p, const fg_queue *queue, fg_error *error) {
    if (p->keys.shape[0] == 0) return FG_OK;
    size_t needed = 0;
    const fg_status status = sort_bytes(*p, queue, &needed, error);
    if (status != FG_OK) return status;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const Workspace workspace(*p, needed);
    FG_CUDA(number_rows(static_cast<int32_t *>(workspace.rows), p->keys.shape[0], stream_of(queue)));
    FG_CUDA(sort_either(*p, workspace.sort, &needed, workspace, stream_of(queue)));
    return FG_OK;
}

}  // namespace flexgemm
