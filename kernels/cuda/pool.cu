/*
 * Pooling over a neighbour map, and its gradient by the transposed map: both gather rows and write each output once,
 * so that nothing needs atomics and sums are in the order of offsets.
 *
 * Bound by memory. A thread owns 16 bytes of one output row (one channel where rows are not whole 16-byte pieces) and
 * walks the offsets; the threads of a row are neighbours and read its map entries together. It first notes which of
 * 32 offsets have an entry, most have none, then fetches the rows of a batch before the first is used.
 */
#include "backend.cuh"
#include "common.cuh"
#include "coords.cuh"
#include "vector.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256;
constexpr int kBatch = 4;    /* rows in flight of one thread */
constexpr int kOffsets = 32; /* whose entries it looks at before */

/* NaN is above every number; of equals the first stays. Two comparisons: the first is true of NaN on either side. */
__device__ __forceinline__ bool takes(float x, float best) { return !(x <= best) && best == best; }

struct PoolArgs {
    const void *in; /* feats, or grad_out */
    const int32_t *map;
    void *out;       /* out, or grad_feats */
    int32_t *argmax; /* written forward, read backward; or NULL */
    int32_t *count;
    bool counts_are_bounds;
    int64_t in_stride, out_stride, rows; /* rows of out: columns of map */
    uint32_t in_rows;
    int volume;
    int64_t channels;

    __device__ int32_t rows_of_mean(int32_t source) const {
        return counts_are_bounds ? count[source + 1] - count[source] : count[source];
    }
};

/* Calls visit(row of `in`, its channels) for every entry of a map column, in the order of offsets. */
template <typename T, int kCount, class Visit>
__device__ __forceinline__ void for_each_source(const PoolArgs &p, int64_t row, int64_t channel, Visit visit) {
    const T *in = static_cast<const T *>(p.in) + channel;
    const int32_t *map = p.map + row;
    for (int first = 0; first < p.volume; first += kOffsets, map += kOffsets * p.rows) {
        uint32_t present = 0; /* offsets from `first` on */
        const int offsets = p.volume - first < kOffsets ? p.volume - first : kOffsets;
#pragma unroll 9
        for (int v = 0; v < offsets; ++v)
            present |= static_cast<uint32_t>(static_cast<uint32_t>(map[v * p.rows]) < p.in_rows) << v;
        while (present != 0) {
            int32_t source[kBatch]; /* -1 where there are no more */
            Vector<T, kCount> value[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i, present &= present - 1)
                source[i] = present != 0 ? map[(__ffs(static_cast<int>(present)) - 1) * p.rows] : -1;
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
                if (source[i] >= 0) value[i] = Vector<T, kCount>::load(in + source[i] * p.in_stride);
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
                if (source[i] >= 0) visit(source[i], value[i]);
        }
    }
}

/* The row and first channel of this thread; false beyond the end. */
template <int kCount>
__device__ __forceinline__ bool own_place(const PoolArgs &p, int64_t *row, int64_t *channel) {
    /* The threads of a block lie within kThreads of its first piece: one long division is the block's, the rest
     * short. */
    const int64_t pieces = p.channels / kCount, first = static_cast<int64_t>(blockIdx.x) * kThreads;
    const int64_t first_row = first / pieces;
    const uint32_t piece = static_cast<uint32_t>(first - first_row * pieces) + threadIdx.x;
    *row = first_row + piece / static_cast<uint32_t>(pieces);
    *channel = piece % static_cast<uint32_t>(pieces) * kCount;
    return *row < p.rows;
}

/* kChosen: maxima tell which row they are from, which takes a select and a register for each channel more. */
template <typename T, int kCount, fg_pool_mode kMode, bool kChosen>
__global__ void __launch_bounds__(kThreads) pool_kernel(const PoolArgs p) {
    int64_t row, channel;
    if (!own_place<kCount>(p, &row, &channel)) return;
    float result[kCount];
    int32_t argmax[kCount], count = 0;
    for_each_source<T, kCount>(p, row, channel, [&](int32_t source, const Vector<T, kCount> &value) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float x = to_float(value.element[i]);
            if constexpr (kMode == FG_POOL_MAX) {
                const bool larger = count == 0 || takes(x, result[i]);
                result[i] = larger ? x : result[i];
                if constexpr (kChosen) argmax[i] = larger ? source : argmax[i];
            } else {
                result[i] = count == 0 ? x : result[i] + x;
            }
        }
        ++count;
    });
    Vector<T, kCount> out;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (count == 0) result[i] = 0.0f;
        if constexpr (kMode == FG_POOL_MEAN)
            if (count > 0) result[i] = __fdiv_rn(result[i], static_cast<float>(count));
        out.element[i] = from_float<T>(result[i]);
    }
    out.store(static_cast<T *>(p.out) + row * p.out_stride + channel);
    if constexpr (kChosen) {
        Vector<int32_t, kCount> rows;
#pragma unroll
        for (int i = 0; i < kCount; ++i) rows.element[i] = count > 0 ? argmax[i] : -1;
        rows.store(p.argmax + row * p.channels + channel);
    }
    if (p.count && channel == 0) p.count[row] = count;
}

template <typename T, int kCount, fg_pool_mode kMode>
__global__ void __launch_bounds__(kThreads) pool_backward_kernel(const PoolArgs p) {
    int64_t row, channel;
    if (!own_place<kCount>(p, &row, &channel)) return;
    float sum[kCount] = {};
    for_each_source<T, kCount>(p, row, channel, [&](int32_t source, const Vector<T, kCount> &value) {
        Vector<int32_t, kCount> argmax;
        float share = 1.0f; /* one division a row: a quotient for each channel would be most of the arithmetic */
        if constexpr (kMode == FG_POOL_MEAN) share = __fdiv_rn(1.0f, static_cast<float>(p.rows_of_mean(source)));
        if constexpr (kMode == FG_POOL_MAX)
            argmax = Vector<int32_t, kCount>::load(p.argmax + source * p.channels + channel);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float x = to_float(value.element[i]);
            if constexpr (kMode == FG_POOL_MAX)
                sum[i] += argmax.element[i] == row ? x : 0.0f;
            else
                sum[i] += x * share;
        }
    });
    Vector<T, kCount> out;
#pragma unroll
    for (int i = 0; i < kCount; ++i) out.element[i] = from_float<T>(sum[i]);
    out.store(static_cast<T *>(p.out) + row * p.out_stride + channel);
}

__global__ void __launch_bounds__(kThreads) batch_kernel(Coords coords, int64_t samples, int32_t *batch) {
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (n >= coords.count) return;
    const int32_t sample = coords.data[4 * n];
    batch[n] = sample >= 0 && sample < samples ? sample : -1;
}

/* ---- launches ---- */

template <typename T, int kCount, fg_pool_mode kMode>
fg_status launch(const PoolArgs &p, bool backward, cudaStream_t stream, fg_error *error) {
    unsigned int blocks = 0;
    const fg_status status = grid_for(p.rows * (p.channels / kCount), kThreads, "map", &blocks, error);
    if (status != FG_OK) return status;
    auto kernel = backward ? pool_backward_kernel<T, kCount, kMode> : pool_kernel<T, kCount, kMode, false>;
    if constexpr (kMode == FG_POOL_MAX)
        if (!backward && p.argmax) kernel = pool_kernel<T, kCount, kMode, true>;
    kernel<<<blocks, kThreads, 0, stream>>>(p);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

template <typename T, int kCount>
fg_status launch_mode(const PoolArgs &p, fg_pool_mode mode, bool backward, cudaStream_t stream, fg_error *error) {
    if (mode == FG_POOL_MAX) return launch<T, kCount, FG_POOL_MAX>(p, backward, stream, error);
    if (mode == FG_POOL_MEAN) return launch<T, kCount, FG_POOL_MEAN>(p, backward, stream, error);
    return launch<T, kCount, FG_POOL_SUM>(p, backward, stream, error);
}

template <typename T>
fg_status launch_width(const PoolArgs &p, fg_pool_mode mode, bool backward, cudaStream_t stream, fg_error *error) {
    const bool vectors = rows_are_vectors<T>(p.in, p.in_stride, p.channels) &&
                         rows_are_vectors<T>(p.out, p.out_stride, p.channels) &&
                         reinterpret_cast<uintptr_t>(p.argmax) % (kChannels<T> * sizeof(int32_t)) == 0;
    return vectors ? launch_mode<T, kChannels<T>>(p, mode, backward, stream, error)
                   : launch_mode<T, 1>(p, mode, backward, stream, error);
}

fg_status run(const fg_tensor &in, const fg_tensor &map, const fg_tensor &out, const fg_tensor &argmax,
              const fg_tensor &count, fg_pool_mode mode, bool backward, const fg_queue *queue, fg_error *error) {
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const cudaStream_t stream = stream_of(queue);
    PoolArgs p = {};
    p.in = in.data;
    p.map = static_cast<const int32_t *>(map.data);
    p.out = out.data;
    p.argmax = argmax.present ? static_cast<int32_t *>(argmax.data) : nullptr;
    p.count = count.present ? static_cast<int32_t *>(count.data) : nullptr;
    p.counts_are_bounds = count.present && backward && count.shape[0] > in.shape[0];
    p.in_stride = in.strides[0];
    p.out_stride = out.strides[0];
    p.rows = out.shape[0];
    p.in_rows = row_limit(in);
    p.volume = static_cast<int>(map.shape[0]);
    p.channels = out.shape[1];
    if (map.shape[0] > INT32_MAX - kOffsets)
        return fg_fail(error, FG_ERROR_VALUE, "map: expected at most %d rows, got %lld", INT32_MAX - kOffsets,
                       static_cast<long long>(map.shape[0]));
    if (p.channels > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "out: expected at most %d channels, got %lld", INT32_MAX,
                       static_cast<long long>(p.channels));
    if (p.rows == 0 || p.channels == 0) return FG_OK;
    switch (in.dtype) {
        case FG_FLOAT16:
            return launch_width<__half>(p, mode, backward, stream, error);
        case FG_BFLOAT16:
            return launch_width<__nv_bfloat16>(p, mode, backward, stream, error);
        default:
            return launch_width<float>(p, mode, backward, stream, error);
    }
}

}  // namespace

fg_status pool(const fg_pool_params *p, const fg_queue *queue, fg_error *error) {
    return run(p->feats, p->map, p->out, p->argmax, p->count, p->mode, false, queue, error);
}

fg_status pool_backward(const fg_pool_backward_params *p, const fg_queue *queue, fg_error *error) {
    return run(p->grad_out, p->map, p->grad_feats, p->argmax, p->count, p->mode, true, queue, error);
}

fg_status batch_indices(const fg_batch_indices_params *p, const fg_queue *queue, fg_error *error) {
    const int64_t count = p->coords.shape[0];
    if (count == 0) return FG_OK;
    unsigned int blocks = 0;
    const fg_status status = grid_for(count, kThreads, "coords", &blocks, error);
    if (status != FG_OK) return status;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    batch_kernel<<<blocks, kThreads, 0, stream_of(queue)>>>(Coords(p->coords), p->samples,
                                                            static_cast<int32_t *>(p->batch.data));
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

}  // namespace flexgemm
