/*
 * Pooling of all voxels of a sample.
 *
 * Rows are brought together by sample first: CUB sorts their numbers by sample, stably, and each sample's begin is found
 * by bisection. Then a block takes one slice of one sample's rows and a strip of its channels, and a second launch of the
 * same kernel takes the slices' results as its rows. Every addition has its fixed place.
 *
 * Workspace of the sort: samples as they were sorted (N) | row numbers (N) | what CUB needs
 * Workspace of the pooling: slices' values (B, slices, C) float32 | slices' rows (B, slices, C) int32, of max
 */
#include "../plan.h"
#include "backend.cuh"
#include "common.cuh"
#include "coords.cuh"
#include "sort_pairs.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 32, kRows = 8; /* threads of a pooling block: channels x rows taken in turn */
constexpr size_t kAlignment = 256;

size_t align(size_t bytes) { return ceil_div(bytes, kAlignment) * kAlignment; }

/* ---- rows by sample ---- */

/* Rows of no sample are sorted as sample number `samples`, behind all others. */
__global__ void __launch_bounds__(kThreads)
    samples_kernel(Coords coords, int32_t samples, int32_t *batch, uint32_t *keys) {
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (n >= coords.count) return;
    const int32_t sample = coords.data[4 * n];
    const bool exists = sample >= 0 && sample < samples;
    batch[n] = exists ? sample : -1;
    keys[n] = static_cast<uint32_t>(exists ? sample : samples);
}

/* bounds[b] = the rows of samples below b. */
__global__ void __launch_bounds__(kThreads)
    bounds_kernel(const uint32_t *sorted, int64_t count, int32_t samples, int32_t *bounds) {
    const int64_t b = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (b > samples) return;
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (sorted[middle] < static_cast<uint32_t>(b))
            low = middle + 1;
        else
            high = middle;
    }
    bounds[b] = static_cast<int32_t>(low);
}

int bits_of(int64_t largest) {
    int bits = 0;
    for (; largest > 0; largest /= 2) ++bits;
    return bits;
}

struct SortWorkspace {
    uint32_t *keys, *sorted;
    int32_t *rows;
    void *sort;
    size_t bytes;

    SortWorkspace(void *base, int64_t count, size_t sort_bytes) {
        const size_t array = align(static_cast<size_t>(count) * sizeof(uint32_t));
        char *at = static_cast<char *>(base);
        keys = reinterpret_cast<uint32_t *>(at);
        sorted = reinterpret_cast<uint32_t *>(at + array);
        rows = reinterpret_cast<int32_t *>(at + 2 * array);
        sort = at + 3 * array;
        bytes = 3 * array + sort_bytes;
    }
};

fg_status sort_bytes(const fg_batch_rows_params *p, const fg_queue *queue, size_t *bytes, fg_error *error) {
    const int64_t count = p->coords.shape[0], samples = p->bounds.shape[0] - 1;
    if (count > INT32_MAX || samples >= INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "coords: expected rows and samples that int32 can number, got %lld, %lld",
                       static_cast<long long>(count), static_cast<long long>(samples));
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    FG_CUDA(sort_pairs(nullptr, bytes, static_cast<const uint32_t *>(nullptr), nullptr, nullptr, nullptr, count,
                       bits_of(samples), stream_of(queue)));
    return FG_OK;
}

/* ---- pooling ---- */

/* NaN is above every number; of equals the lowest row stays. */
__device__ __forceinline__ bool takes(float x, int32_t row, float best, int32_t best_row) {
    if (row < 0 || best_row < 0) return best_row < 0;
    const bool nan = x != x, best_nan = best != best;
    if (nan || best_nan) return nan && (!best_nan || row < best_row);
    return x > best || (x == best && row < best_row);
}

struct Strip {
    int64_t stride, columns; /* of the values */
    int32_t samples, slices;
};

/* Rows of a slice in the first launch (values In = T): order[begin ..), begin from the bounds. In the second the rows are
 * the slices of a sample: values (B, slices, C), with the rows that they chose. */
template <typename In, typename Out, fg_pool_mode kMode, bool kLast>
__global__ void __launch_bounds__(kColumns *kRows)
    pool_slice_kernel(const In *values, const int32_t *value_rows, const int32_t *order, const int32_t *bounds,
                      int64_t in_rows, Strip strip, Out *out, int64_t out_stride, int32_t *chosen, int32_t *count) {
    __shared__ float partial[kRows][kColumns];
    __shared__ int32_t partial_row[kRows][kColumns];
    const int x = threadIdx.x % kColumns, y = threadIdx.x / kColumns;
    const int32_t sample = static_cast<int32_t>(blockIdx.y), slice = static_cast<int32_t>(blockIdx.z);
    const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + x;
    /* Bounds are device memory: clamped, and a falling pair is an empty sample. */
    const int64_t first = max(int64_t{0}, min(static_cast<int64_t>(bounds[sample]), in_rows));
    const int64_t last = max(first, min(static_cast<int64_t>(bounds[sample + 1]), in_rows));
    const int64_t total = last - first;
    const bool from_slices = value_rows != nullptr || order == nullptr;
    const int64_t length = from_slices ? strip.slices : total;
    const int64_t begin = kLast ? 0 : length * slice / strip.slices;
    const int64_t end = kLast ? length : length * (slice + 1) / strip.slices;

    float result = 0.0f;
    int32_t row = -1;
    if (column < strip.columns) {
        for (int64_t at = begin + y; at < end; at += kRows) {
            int64_t from = from_slices ? sample * static_cast<int64_t>(strip.slices) + at : order[first + at];
            if (!from_slices && (from < 0 || from >= in_rows)) continue;
            const float value = to_float(values[from * strip.stride + column]);
            if constexpr (kMode == FG_POOL_MAX) {
                const int32_t value_row =
                    from_slices ? value_rows[from * strip.stride + column] : static_cast<int32_t>(from);
                if (takes(value, value_row, result, row)) {
                    result = value;
                    row = value_row;
                }
            } else {
                result += value;
            }
        }
    }
    partial[y][x] = result;
    partial_row[y][x] = row;
    __syncthreads();
    if (y > 0 || column >= strip.columns) return;
#pragma unroll
    for (int i = 1; i < kRows; ++i) {
        if constexpr (kMode == FG_POOL_MAX) {
            if (takes(partial[i][x], partial_row[i][x], result, row)) {
                result = partial[i][x];
                row = partial_row[i][x];
            }
        } else {
            result += partial[i][x];
        }
    }
    const int64_t to = kLast ? sample : sample * static_cast<int64_t>(strip.slices) + slice;
    if constexpr (kLast && kMode == FG_POOL_MEAN)
        if (total > 0) result = __fdiv_rn(result, static_cast<float>(total));
    out[to * out_stride + column] = from_float<Out>(result);
    if (kMode == FG_POOL_MAX && chosen) chosen[to * strip.columns + column] = row;
    if (kLast && count && column == 0) count[sample] = static_cast<int32_t>(total);
}

struct PoolWorkspace {
    int slices;
    float *values;
    int32_t *rows;
    size_t bytes;

    PoolWorkspace(const fg_global_pool_params *p, int num_sms) {
        const int64_t samples = p->out.shape[0], columns = p->out.shape[1];
        slices = fg_plan_global_pool(p->feats.shape[0], samples, columns, num_sms).split_k;
        const size_t array = slices > 1 ? align(static_cast<size_t>(samples * slices * columns) * sizeof(float)) : 0;
        values = static_cast<float *>(p->workspace.data);
        rows = reinterpret_cast<int32_t *>(static_cast<char *>(p->workspace.data) + array);
        bytes = p->mode == FG_POOL_MAX ? 2 * array : array;
    }
};

}  // namespace
}  // namespace flexgemm
