/*
 * Pooling over a neighbour map, and its gradient by the transposed map: both gather rows (map_entries.cuh) and write each
 * output once, so that nothing needs atomics and sums are in the order of offsets. Bound by memory.
 */
#include "backend.cuh"
#include "common.cuh"
#include "coords.cuh"
#include "map_entries.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = kEntryThreads;

/* Of a multiprocessor, as registers allow: they hide the latency of rows. */
template <typename T>
constexpr int kBlocks = sizeof(T) == 2 ? 4 : 5;

/* NaN is above every number; of equals the first stays. Two comparisons: the first is true of NaN on either side. */
__device__ __forceinline__ bool takes(float x, float best) { return !(x <= best) && best == best; }

/* The same of two numbers at a time. */
template <typename Pair>
__device__ __forceinline__ void take_larger(Pair *best, const Pair &x) {
    const uint32_t taken = __hgtu2_mask(x, *best) & __heq2_mask(*best, *best);
    uint32_t &old = *reinterpret_cast<uint32_t *>(best);
    old = (reinterpret_cast<const uint32_t &>(x) & taken) | (old & ~taken);
}

struct PoolArgs {
    const void *in; /* feats, or grad_out */
    MapEntries entries;
    void *out;       /* out, or grad_feats */
    int32_t *argmax; /* written forward, read backward; or NULL */
    int32_t *count;
    bool counts_are_bounds;
    int64_t in_stride, out_stride, channels;

    __device__ int32_t rows_of_mean(int32_t source) const {
        return counts_are_bounds ? count[source + 1] - count[source] : count[source];
    }
};

/* Calls visit(row of `in`, its channels) for every entry of the thread's column of the map, in the order of offsets. */
template <typename T, int kCount, class Visit>
__device__ __forceinline__ void for_each_source(const PoolArgs &p, const EntryPlace<kCount> &place, Visit visit) {
    for_each_entry(p.entries, place, static_cast<const T *>(p.in) + place.channel, p.in_stride,
                   [&](int, int32_t source, const Vector<T, kCount> &value) { visit(source, value); });
}

/* kChosen: maxima tell which row they are from, which takes a select and a register for each channel more. */
template <typename T, int kCount, fg_pool_mode kMode, bool kChosen>
__global__ void __launch_bounds__(kThreads, kBlocks<T>) pool_kernel(const PoolArgs p) {
    const EntryPlace<kCount> place(p.entries, p.channels);
    float result[kCount];
    int32_t argmax[kCount], count = 0;
    for_each_source<T>(p, place, [&](int32_t source, const Vector<T, kCount> &value) {
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
    if (!place.is_there()) return;
    Vector<T, kCount> out;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (count == 0) result[i] = 0.0f;
        if constexpr (kMode == FG_POOL_MEAN)
            if (count > 0) result[i] = __fdiv_rn(result[i], static_cast<float>(count));
        out.element[i] = from_float<T>(result[i]);
    }
    out.store(static_cast<T *>(p.out) + place.row() * p.out_stride + place.channel);
    if constexpr (kChosen) {
        Vector<int32_t, kCount> rows;
#pragma unroll
        for (int i = 0; i < kCount; ++i) rows.element[i] = count > 0 ? argmax[i] : -1;
        rows.store(p.argmax + place.row() * p.channels + place.channel);
    }
    if (p.count && place.channel == 0) p.count[place.row()] = count;
}

/* Maxima of 16-bit types alone, two channels at a time as they are. */
template <typename T, typename Pair>
__global__ void __launch_bounds__(kThreads) max_pairs_kernel(const PoolArgs p) {
    constexpr int kCount = kChannels<T>, kPairs = kCount / 2;
    const EntryPlace<kCount> place(p.entries, p.channels);
    Vector<T, kCount> best;
    int count = 0;
    for_each_source<T>(p, place, [&](int32_t, const Vector<T, kCount> &value) {
        auto *const pairs = reinterpret_cast<Pair *>(best.element);
        const auto *const others = reinterpret_cast<const Pair *>(value.element);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            if (count == 0)
                pairs[i] = others[i];
            else
                take_larger(&pairs[i], others[i]);
        }
        ++count;
    });
    if (!place.is_there()) return;
    if (count == 0)
        for (T &element : best.element) element = from_float<T>(0.0f);
    best.store(static_cast<T *>(p.out) + place.row() * p.out_stride + place.channel);
    if (p.count && place.channel == 0) p.count[place.row()] = count;
}

template <typename T, int kCount, fg_pool_mode kMode>
__global__ void __launch_bounds__(kThreads, kBlocks<T>) pool_backward_kernel(const PoolArgs p) {
    const EntryPlace<kCount> place(p.entries, p.channels);
    float sum[kCount] = {};
    for_each_source<T>(p, place, [&](int32_t source, const Vector<T, kCount> &value) {
        Vector<int32_t, kCount> argmax;
        float share = 1.0f; /* one division a row: a quotient for each channel would be most of the arithmetic */
        if constexpr (kMode == FG_POOL_MEAN) share = __fdiv_rn(1.0f, static_cast<float>(p.rows_of_mean(source)));
        if constexpr (kMode == FG_POOL_MAX)
            argmax = Vector<int32_t, kCount>::load(p.argmax + source * p.channels + place.channel);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float x = to_float(value.element[i]);
            if constexpr (kMode == FG_POOL_MAX)
                sum[i] += argmax.element[i] == place.row() ? x : 0.0f;
            else
                sum[i] += x * share;
        }
    });
    if (!place.is_there()) return;
    Vector<T, kCount> out;
#pragma unroll
    for (int i = 0; i < kCount; ++i) out.element[i] = from_float<T>(sum[i]);
    out.store(static_cast<T *>(p.out) + place.row() * p.out_stride + place.channel);
}

__global__ void __launch_bounds__(kThreads) batch_kernel(Coords coords, int64_t samples, int32_t *batch) {
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (n >= coords.count) return;
    const int32_t sample = coords.data[4 * n];
    batch[n] = sample >= 0 && sample < samples ? sample : -1;
}

/* ---- launches ---- */

template <typename T, int kCount, fg_pool_mode kMode>
constexpr auto kPlainKernel = pool_kernel<T, kCount, kMode, false>;
template <>
constexpr auto kPlainKernel<__half, kChannels<__half>, FG_POOL_MAX> = max_pairs_kernel<__half, __half2>;
template <>
constexpr auto kPlainKernel<__nv_bfloat16, kChannels<__nv_bfloat16>, FG_POOL_MAX> =
    max_pairs_kernel<__nv_bfloat16, __nv_bfloat162>;

template <typename T, int kCount, fg_pool_mode kMode>
fg_status launch(const PoolArgs &p, bool backward, cudaStream_t stream, fg_error *error) {
    const int64_t pieces = p.channels / kCount;
    unsigned int blocks = 0;
    const fg_status status = grid_for(p.entries.rows * pieces, kThreads, "map", &blocks, error);
    if (status != FG_OK) return status;
    auto kernel = backward ? pool_backward_kernel<T, kCount, kMode> : kPlainKernel<T, kCount, kMode>;
    if constexpr (kMode == FG_POOL_MAX)
        if (!backward && p.argmax) kernel = pool_kernel<T, kCount, kMode, true>;
    kernel<<<blocks, kThreads, entry_bytes(pieces), stream>>>(p);
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
    const bool vectors = in_vectors<T>(p.in, p.in_stride, p.channels) &&
                         in_vectors<T>(p.out, p.out_stride, p.channels) &&
                         reinterpret_cast<uintptr_t>(p.argmax) % (kChannels<T> * sizeof(int32_t)) == 0;
    return vectors ? launch_mode<T, kChannels<T>>(p, mode, backward, stream, error)
                   : launch_mode<T, 1>(p, mode, backward, stream, error);
}

fg_status run(const fg_tensor &in, const fg_tensor &map, const fg_tensor &out, const fg_tensor &argmax,
              const fg_tensor &count, fg_pool_mode mode, bool backward, const fg_queue *queue, fg_error *error) {
    const fg_status status = check_entries(map, out, error);
    if (status != FG_OK) return status;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const cudaStream_t stream = stream_of(queue);
    PoolArgs p = {};
    p.in = in.data;
    p.entries = {static_cast<const int32_t *>(map.data), out.shape[0], row_limit(in), static_cast<int>(map.shape[0]),
                 false};
    p.out = out.data;
    p.argmax = argmax.present ? static_cast<int32_t *>(argmax.data) : nullptr;
    p.count = count.present ? static_cast<int32_t *>(count.data) : nullptr;
    p.counts_are_bounds = count.present && backward && count.shape[0] > in.shape[0];
    p.in_stride = in.strides[0];
    p.out_stride = out.strides[0];
    p.channels = out.shape[1];
    if (p.entries.rows == 0 || p.channels == 0) return FG_OK;
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
