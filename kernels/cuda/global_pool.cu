/*
 * Pooling of all voxels of a sample.
 *
 * Rows are brought together by sample first: CUB sorts their numbers by sample, stably, and each sample's begin is found
 * by bisection. Then a block takes one slice of one sample's rows and a strip of its channels, and a second kernel goes
 * through the slices of each sample in order. Every addition has its fixed place.
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

struct GlobalPoolArgs {
    const void *feats;
    const int32_t *order, *bounds;
    void *out;
    int32_t *chosen, *count; /* or NULL */
    float *slice_values;     /* (samples, slices, channels) */
    int32_t *slice_rows;
    int64_t in_stride, out_stride, rows, channels;
    int32_t samples, slices, strips; /* strips of kColumns channels */

    /* Bounds are device memory: clamped, and a falling pair is an empty sample. */
    __device__ int64_t begin_of(int32_t sample) const {
        return max(int64_t{0}, min(static_cast<int64_t>(bounds[sample]), rows));
    }
    __device__ int64_t rows_of(int32_t sample) const {
        return max(int64_t{0}, begin_of(sample + 1) - begin_of(sample));
    }
};

/* What has been seen so far of one channel. Of a maximum: NaN is above every number, of equals the lowest row stays. */
template <fg_pool_mode kMode>
struct Pooled {
    float value = 0.0f;
    int32_t row = -1;

    __device__ void add(float x, int32_t from) {
        if constexpr (kMode != FG_POOL_MAX) {
            value += x;
            return;
        }
        if (from < 0) return;
        const bool nan = x != x, value_nan = value != value;
        const bool equal = (nan && value_nan) || x == value;
        const bool larger = (nan && !value_nan) || x > value;
        if (row < 0 || larger || (equal && from < row)) {
            value = x;
            row = from;
        }
    }

    template <typename T>
    __device__ void finish(const GlobalPoolArgs &p, int32_t sample, int64_t channel) const {
        const int64_t rows = p.rows_of(sample);
        const float result = kMode == FG_POOL_MEAN && rows > 0 ? __fdiv_rn(value, static_cast<float>(rows)) : value;
        static_cast<T *>(p.out)[sample * p.out_stride + channel] = from_float<T>(result);
        if (p.chosen) p.chosen[sample * p.channels + channel] = row;
        if (p.count && channel == 0) p.count[sample] = static_cast<int32_t>(rows);
    }
};

/* blockIdx.x: sample and strip; blockIdx.y: slice. */
template <typename T, fg_pool_mode kMode>
__global__ void __launch_bounds__(kColumns *kRows) slice_kernel(const GlobalPoolArgs p) {
    __shared__ Pooled<kMode> partial[kRows][kColumns];
    const int x = threadIdx.x % kColumns, y = threadIdx.x / kColumns;
    const int32_t sample = static_cast<int32_t>(blockIdx.x / p.strips);
    const int64_t channel = static_cast<int64_t>(blockIdx.x % p.strips) * kColumns + x;
    const int64_t length = p.rows_of(sample), first = p.begin_of(sample);
    const int64_t end = length * (blockIdx.y + 1) / p.slices;
    Pooled<kMode> pooled;
    if (channel < p.channels) {
#pragma unroll 4
        for (int64_t at = length * blockIdx.y / p.slices + y; at < end; at += kRows) {
            const int32_t row = p.order[first + at];
            if (row < 0 || row >= p.rows) continue;
            pooled.add(to_float(static_cast<const T *>(p.feats)[row * p.in_stride + channel]), row);
        }
    }
    partial[y][x] = pooled;
    __syncthreads();
    if (y > 0 || channel >= p.channels) return;
    for (int i = 1; i < kRows; ++i) pooled.add(partial[i][x].value, partial[i][x].row);
    if (p.slices == 1) return pooled.template finish<T>(p, sample, channel);
    const int64_t to = (sample * static_cast<int64_t>(p.slices) + blockIdx.y) * p.channels + channel;
    p.slice_values[to] = pooled.value;
    if constexpr (kMode == FG_POOL_MAX) p.slice_rows[to] = pooled.row;
}

template <typename T, fg_pool_mode kMode>
__global__ void __launch_bounds__(kThreads) combine_kernel(const GlobalPoolArgs p) {
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (thread >= p.samples * p.channels) return;
    const int32_t sample = static_cast<int32_t>(thread / p.channels);
    const int64_t channel = thread % p.channels;
    Pooled<kMode> pooled;
    for (int32_t slice = 0; slice < p.slices; ++slice) {
        const int64_t from = (sample * static_cast<int64_t>(p.slices) + slice) * p.channels + channel;
        pooled.add(p.slice_values[from], kMode == FG_POOL_MAX ? p.slice_rows[from] : 0);
    }
    pooled.template finish<T>(p, sample, channel);
}

/* ---- launches ---- */

template <typename T, fg_pool_mode kMode>
fg_status launch(const GlobalPoolArgs &p, cudaStream_t stream, fg_error *error) {
    const int64_t blocks = static_cast<int64_t>(p.samples) * p.strips;
    if (blocks > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "out: (%d, %lld) needs more blocks than one launch can have", p.samples,
                       static_cast<long long>(p.channels));
    const dim3 grid(static_cast<unsigned int>(blocks), static_cast<unsigned int>(p.slices));
    slice_kernel<T, kMode><<<grid, kColumns * kRows, 0, stream>>>(p);
    FG_CUDA(cudaGetLastError());
    if (p.slices == 1) return FG_OK;
    unsigned int combining = 0;
    const fg_status status = grid_for(p.samples * p.channels, kThreads, "out", &combining, error);
    if (status != FG_OK) return status;
    combine_kernel<T, kMode><<<combining, kThreads, 0, stream>>>(p);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

template <typename T>
fg_status launch_mode(const GlobalPoolArgs &p, fg_pool_mode mode, cudaStream_t stream, fg_error *error) {
    if (mode == FG_POOL_MAX) return launch<T, FG_POOL_MAX>(p, stream, error);
    if (mode == FG_POOL_MEAN) return launch<T, FG_POOL_MEAN>(p, stream, error);
    return launch<T, FG_POOL_SUM>(p, stream, error);
}

fg_status plan_slices(const fg_global_pool_params *p, const fg_queue *queue, fg_plan *plan, fg_error *error) {
    int num_sms, compute_capability;
    const fg_status status = device_properties(queue->device_index, &num_sms, &compute_capability, error);
    if (status == FG_OK) *plan = fg_plan_global_pool(p->feats.shape[0], p->out.shape[0], p->out.shape[1], num_sms);
    return status;
}

}  // namespace

fg_status batch_rows_workspace(const fg_batch_rows_params *p, const fg_queue *queue, size_t *bytes, fg_error *error) {
    *bytes = 0;
    if (p->coords.shape[0] == 0) return FG_OK;
    size_t sort = 0;
    const fg_status status = sort_bytes(p, queue, &sort, error);
    if (status == FG_OK) *bytes = SortWorkspace(nullptr, p->coords.shape[0], sort).bytes;
    return status;
}

fg_status batch_rows(const fg_batch_rows_params *p, const fg_queue *queue, fg_error *error) {
    const int64_t count = p->coords.shape[0];
    size_t sort = 0;
    const fg_status status = count > 0 ? sort_bytes(p, queue, &sort, error) : FG_OK;
    if (status != FG_OK) return status;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const cudaStream_t stream = stream_of(queue);
    const int32_t samples = static_cast<int32_t>(p->bounds.shape[0] - 1);
    const SortWorkspace workspace(p->workspace.data, count, sort);
    if (count > 0) {
        samples_kernel<<<static_cast<unsigned int>(ceil_div<int64_t>(count, kThreads)), kThreads, 0, stream>>>(
            Coords(p->coords), samples, static_cast<int32_t *>(p->batch.data), workspace.keys);
        FG_CUDA(cudaGetLastError());
        FG_CUDA(number_rows(workspace.rows, count, stream));
        FG_CUDA(sort_pairs(workspace.sort, &sort, workspace.keys, workspace.sorted, workspace.rows,
                           static_cast<int32_t *>(p->order.data), count, bits_of(samples), stream));
    }
    bounds_kernel<<<static_cast<unsigned int>(samples / kThreads + 1), kThreads, 0, stream>>>(
        workspace.sorted, count, samples, static_cast<int32_t *>(p->bounds.data));
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

fg_status global_pool_workspace(const fg_global_pool_params *p, const fg_queue *queue, size_t *bytes, fg_error *error) {
    fg_plan plan;
    const fg_status status = plan_slices(p, queue, &plan, error);
    if (status != FG_OK) return status;
    *bytes = static_cast<size_t>(plan.workspace_bytes) * (p->mode == FG_POOL_MAX ? 2 : 1);
    return FG_OK;
}

fg_status global_pool(const fg_global_pool_params *p, const fg_queue *queue, fg_error *error) {
    if (p->out.shape[1] == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    fg_plan plan;
    const fg_status status = plan_slices(p, queue, &plan, error);
    if (status != FG_OK) return status;
    const int64_t channels = p->out.shape[1];
    if (p->out.shape[0] >= INT32_MAX || ceil_div<int64_t>(channels, kColumns) > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "out: (%lld, %lld) is more than int32 can number",
                       static_cast<long long>(p->out.shape[0]), static_cast<long long>(channels));
    GlobalPoolArgs args = {};
    args.feats = p->feats.data;
    args.order = static_cast<const int32_t *>(p->order.data);
    args.bounds = static_cast<const int32_t *>(p->bounds.data);
    args.out = p->out.data;
    args.chosen = p->chosen.present ? static_cast<int32_t *>(p->chosen.data) : nullptr;
    args.count = p->count.present ? static_cast<int32_t *>(p->count.data) : nullptr;
    args.slice_values = static_cast<float *>(p->workspace.data);
    args.slice_rows = static_cast<int32_t *>(p->workspace.data) + plan.workspace_bytes / sizeof(float);
    args.in_stride = p->feats.strides[0];
    args.out_stride = p->out.strides[0];
    args.rows = p->feats.shape[0];
    args.channels = channels;
    args.samples = static_cast<int32_t>(p->out.shape[0]);
    args.slices = plan.split_k;
    args.strips = static_cast<int32_t>(ceil_div<int64_t>(channels, kColumns));
    const cudaStream_t stream = stream_of(queue);
    switch (p->feats.dtype) {
        case FG_FLOAT16:
            return launch_mode<__half>(args, p->mode, stream, error);
        case FG_BFLOAT16:
            return launch_mode<__nv_bfloat16>(args, p->mode, stream, error);
        default:
            return launch_mode<float>(args, p->mode, stream, error);
    }
}

}  // namespace flexgemm
