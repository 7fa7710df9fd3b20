/*
 * Depthwise convolution: forward, input gradient and weight gradient.
 *
 * Bound by memory, so that plain arithmetic serves: no tensor core has work where no channel meets another. Forward and
 * input gradient gather rows (map_entries.cuh), with the weight laid out as (V, Co) float32 first, which L1 then serves.
 * The weight gradient takes kOffsets offsets over a slice of rows at a time, so that a row of grad_out is read once for
 * all of them; the slices' sums are added in order. It serves groups of few channels too, of which an output channel has
 * as many weights at each offset.
 *
 * Workspace: weight (V, Co) float32; of the weight gradient (slices, V, Co) float32
 */
#include "../plan.h"
#include "backend.cuh"
#include "common.cuh"
#include "conv_epilogue.cuh"
#include "conv_wgrad.cuh"
#include "map_entries.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = kEntryThreads;
constexpr int kOffsets = 4;             /* of a block of the weight gradient */
constexpr int kColumns = 32, kRows = 8; /* its threads: channels x rows taken in turn */

struct DepthwiseArgs {
    const void *in;
    const float *weight; /* (volume, co) */
    SumEpilogue epilogue;
    MapEntries entries;
    void *out;
    int64_t in_stride, out_stride, channels, co;
    int64_t fan_in, fan_out; /* source channels of an output channel, output channels of a source channel: one is 1 */
};

/* (Co, V) -> (V, Co) */
template <typename T>
__global__ void __launch_bounds__(kThreads) lay_out_kernel(const T *weight, int64_t co, int64_t volume, float *to) {
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (thread < co * volume) to[thread] = to_float(weight[thread % co * volume + thread / co]);
}

/* kCount channels of an output row; more than one only where channels correspond one to one. */
template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads) depthwise_kernel(const DepthwiseArgs p) {
    const EntryPlace<kCount> place(p.entries, p.channels);
    const int64_t row = place.row(), channel = place.channel;
    const int64_t first = channel / p.fan_out * p.fan_in; /* source channel */
    const T *in = static_cast<const T *>(p.in) + first;
    const float *weight = p.weight + (p.fan_in > 1 ? first : channel);
    const T *bias = static_cast<const T *>(p.epilogue.bias), *residual = static_cast<const T *>(p.epilogue.residual);
    float sum[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] = bias ? to_float(bias[channel + i]) : 0.0f;
    for_each_entry(p.entries, place, in, p.in_stride, [&](int v, int32_t source, const Vector<T, kCount> &value) {
        if constexpr (kCount > 1) {
            const Vector<float, kCount> w = Vector<float, kCount>::load(weight + v * p.co);
#pragma unroll
            for (int c = 0; c < kCount; ++c) sum[c] += w.element[c] * to_float(value.element[c]);
        } else {
            const T *from = in + source * p.in_stride;
            for (int64_t j = 0; j < p.fan_in; ++j) sum[0] += weight[v * p.co + j] * to_float(from[j]);
        }
    });
    if (!place.is_there()) return;
    Vector<T, kCount> out;
    if (residual) out = Vector<T, kCount>::load(residual + row * p.epilogue.residual_stride + channel);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (residual) sum[i] += to_float(out.element[i]);
        out.element[i] = from_float<T>(activated(sum[i], p.epilogue.activation));
    }
    out.store(static_cast<T *>(p.out) + row * p.out_stride + channel);
}

template <typename T>
fg_status launch_gather(DepthwiseArgs p, const void *weight, float *laid_out, cudaStream_t stream, fg_error *error) {
    unsigned int blocks = 0;
    fg_status status = grid_for(p.co * p.entries.volume, kThreads, "weight", &blocks, error);
    if (status != FG_OK) return status;
    lay_out_kernel<T>
        <<<blocks, kThreads, 0, stream>>>(static_cast<const T *>(weight), p.co, p.entries.volume, laid_out);
    FG_CUDA(cudaGetLastError());
    p.weight = laid_out;
    const bool vectors =
        p.fan_in == 1 && p.fan_out == 1 && in_vectors<T>(p.in, p.in_stride, p.channels) &&
        in_vectors<T>(p.out, p.out_stride, p.channels) &&
        (!p.epilogue.residual || in_vectors<T>(p.epilogue.residual, p.epilogue.residual_stride, p.channels));
    const int64_t pieces = vectors ? p.channels / kChannels<T> : p.channels;
    status = grid_for(p.entries.rows * pieces, kThreads, "out", &blocks, error);
    if (status != FG_OK) return status;
    const auto kernel = vectors ? depthwise_kernel<T, kChannels<T>> : depthwise_kernel<T, 1>;
    kernel<<<blocks, kThreads, entry_bytes(pieces), stream>>>(p);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

fg_status gather(const fg_tensor &in, const fg_tensor &weight, const fg_tensor &map, const fg_tensor &out,
                 const SumEpilogue &epilogue, const fg_tensor &workspace, bool mirrored, const fg_queue *queue,
                 fg_error *error) {
    if (out.shape[0] == 0 || out.shape[1] == 0) return FG_OK;
    const fg_status status = check_entries(map, out, error);
    if (status != FG_OK) return status;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    DepthwiseArgs p = {};
    p.in = in.data;
    p.epilogue = epilogue;
    p.entries = {static_cast<const int32_t *>(map.data), out.shape[0], row_limit(in), static_cast<int>(map.shape[0]),
                 mirrored};
    p.out = out.data;
    p.in_stride = in.strides[0];
    p.out_stride = out.strides[0];
    p.channels = out.shape[1];
    p.co = weight.shape[0];
    p.fan_in = in.shape[1] > p.channels ? in.shape[1] / p.channels : 1;
    p.fan_out = in.shape[1] < p.channels ? p.channels / in.shape[1] : 1;
    float *laid_out = static_cast<float *>(workspace.data);
    const cudaStream_t stream = stream_of(queue);
    switch (in.dtype) {
        case FG_FLOAT16:
            return launch_gather<__half>(p, weight.data, laid_out, stream, error);
        case FG_BFLOAT16:
            return launch_gather<__nv_bfloat16>(p, weight.data, laid_out, stream, error);
        default:
            return launch_gather<float>(p, weight.data, laid_out, stream, error);
    }
}

size_t weight_bytes(const fg_tensor &weight, const fg_tensor &out) {
    const bool empty = out.shape[0] == 0 || out.shape[1] == 0;
    return empty ? 0 : static_cast<size_t>(weight.shape[0] * weight.shape[1]) * sizeof(float);
}

/* ---- weight gradient ---- */

struct DepthwiseWgradArgs {
    const void *grad_out, *feats;
    const int32_t *map;
    float *partials; /* (slices, volume, own, co) */
    int64_t grad_stride, feats_stride, rows, co, multiplier;
    uint32_t in_rows;
    int volume, slices;
    int own; /* input channels of a group; its output channels are `multiplier` */
};

/* blockIdx.x: strip of channels; y: kOffsets offsets; z: slice of rows. A group has at most kOwn input channels. */
template <typename T, int kOwn>
__global__ void __launch_bounds__(kColumns *kRows) depthwise_wgrad_kernel(const DepthwiseWgradArgs p) {
    __shared__ float sums[kRows][kColumns];
    const int x = threadIdx.x % kColumns, y = threadIdx.x / kColumns, v0 = static_cast<int>(blockIdx.y) * kOffsets;
    const int64_t channel = static_cast<int64_t>(blockIdx.x) * kColumns + x;
    const int64_t begin = p.rows * blockIdx.z / p.slices, end = p.rows * (blockIdx.z + 1) / p.slices;
    const bool exists = channel < p.co;
    const T *grad_out = static_cast<const T *>(p.grad_out) + (exists ? channel : 0);
    const T *feats = static_cast<const T *>(p.feats) + (exists ? channel / p.multiplier * p.own : 0);
    float sum[kOffsets][kOwn] = {};
    for (int64_t m = begin + y; m < end; m += kRows) {
        const float grad = to_float(grad_out[m * p.grad_stride]);
#pragma unroll
        for (int i = 0; i < kOffsets; ++i) {
            const int32_t source = v0 + i < p.volume ? p.map[(v0 + i) * p.rows + m] : -1;
            if (static_cast<uint32_t>(source) >= p.in_rows) continue;
            const T *from = feats + source * p.feats_stride;
#pragma unroll
            for (int j = 0; j < kOwn; ++j)
                if (kOwn == 1 || j < p.own) sum[i][j] += grad * to_float(from[j]);
        }
    }
#pragma unroll
    for (int i = 0; i < kOffsets; ++i) {
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
            __syncthreads();
            sums[y][x] = sum[i][j];
            __syncthreads();
            if (y > 0 || !exists || v0 + i >= p.volume || j >= p.own) continue;
            float total = sums[0][x];
            for (int other = 1; other < kRows; ++other) total += sums[other][x];
            const int64_t v = static_cast<int64_t>(blockIdx.z) * p.volume + v0 + i;
            p.partials[(v * p.own + j) * p.co + channel] = total;
        }
    }
}

/* grad_weight (Co, weights of a channel) = the slices' sums, the other way round, in order. */
template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_slices_kernel(const float *partials, int64_t co, int64_t weights, int slices, T *grad_weight) {
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (thread >= co * weights) return;
    float sum = 0.0f;
    for (int slice = 0; slice < slices; ++slice) sum += partials[slice * co * weights + thread];
    grad_weight[thread % co * weights + thread / co] = from_float<T>(sum);
}

template <typename T>
fg_status launch_wgrad(const DepthwiseWgradArgs &p, void *grad_weight, cudaStream_t stream, fg_error *error) {
    const int64_t strips = ceil_div<int64_t>(p.co, kColumns);
    if (strips > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "grad_weight: %lld channels need more blocks than one launch can have",
                       static_cast<long long>(p.co));
    const dim3 grid(static_cast<unsigned int>(strips), static_cast<unsigned int>(ceil_div(p.volume, kOffsets)),
                    static_cast<unsigned int>(p.slices));
    const auto kernel = p.own == 1 ? depthwise_wgrad_kernel<T, 1> : depthwise_wgrad_kernel<T, FG_MAX_NARROW_GROUP>;
    kernel<<<grid, kColumns * kRows, 0, stream>>>(p);
    FG_CUDA(cudaGetLastError());
    unsigned int blocks = 0;
    const int64_t weights = static_cast<int64_t>(p.volume) * p.own;
    const fg_status status = grid_for(p.co * weights, kThreads, "grad_weight", &blocks, error);
    if (status != FG_OK) return status;
    add_slices_kernel<T>
        <<<blocks, kThreads, 0, stream>>>(p.partials, p.co, weights, p.slices, static_cast<T *>(grad_weight));
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

fg_status launch_wgrad_of(const DepthwiseWgradArgs &p, fg_dtype dtype, void *grad_weight, cudaStream_t stream,
                          fg_error *error) {
    if (dtype == FG_FLOAT16) return launch_wgrad<__half>(p, grad_weight, stream, error);
    if (dtype == FG_BFLOAT16) return launch_wgrad<__nv_bfloat16>(p, grad_weight, stream, error);
    return launch_wgrad<float>(p, grad_weight, stream, error);
}

fg_status plan_wgrad(const fg_depthwise_wgrad_params *p, const fg_queue *queue, fg_plan *plan, fg_error *error) {
    int num_sms, compute_capability;
    const fg_status status = device_properties(queue->device_index, &num_sms, &compute_capability, error);
    if (status == FG_OK)
        *plan = fg_plan_depthwise_wgrad(p->grad_out.shape[0], p->grad_out.shape[1], p->map.shape[0], num_sms);
    return status;
}

}  // namespace

fg_status depthwise_forward_workspace(const fg_depthwise_forward_params *p, const fg_queue *, size_t *bytes,
                                      fg_error *) {
    *bytes = weight_bytes(p->weight, p->out);
    return FG_OK;
}

fg_status depthwise_forward(const fg_depthwise_forward_params *p, const fg_queue *queue, fg_error *error) {
    const SumEpilogue epilogue = {p->bias.present ? p->bias.data : nullptr,
                                  p->residual.present ? p->residual.data : nullptr, p->residual.strides[0],
                                  p->activation};
    return gather(p->feats, p->weight, p->map, p->out, epilogue, p->workspace, false, queue, error);
}

fg_status depthwise_dgrad_workspace(const fg_depthwise_dgrad_params *p, const fg_queue *, size_t *bytes, fg_error *) {
    *bytes = weight_bytes(p->weight, p->grad_feats);
    return FG_OK;
}

fg_status depthwise_dgrad(const fg_depthwise_dgrad_params *p, const fg_queue *queue, fg_error *error) {
    return gather(p->grad_out, p->weight, p->map, p->grad_feats, {}, p->workspace, p->mirrored, queue, error);
}

fg_status depthwise_wgrad_workspace(const fg_depthwise_wgrad_params *p, const fg_queue *queue, size_t *bytes,
                                    fg_error *error) {
    fg_plan plan;
    const fg_status status = plan_wgrad(p, queue, &plan, error);
    if (status == FG_OK) *bytes = static_cast<size_t>(plan.workspace_bytes);
    return status;
}

fg_status depthwise_wgrad(const fg_depthwise_wgrad_params *p, const fg_queue *queue, fg_error *error) {
    const int64_t co = p->grad_out.shape[1];
    if (co == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    fg_plan plan;
    const fg_status status = plan_wgrad(p, queue, &plan, error);
    if (status != FG_OK) return status;
    DepthwiseWgradArgs args = {};
    args.grad_out = p->grad_out.data;
    args.feats = p->feats.data;
    args.map = static_cast<const int32_t *>(p->map.data);
    args.partials = static_cast<float *>(p->workspace.data);
    args.grad_stride = p->grad_out.strides[0];
    args.feats_stride = p->feats.strides[0];
    args.rows = p->grad_out.shape[0];
    args.co = co;
    args.multiplier = co / p->feats.shape[1];
    args.own = 1;
    args.in_rows = row_limit(p->feats);
    args.volume = static_cast<int>(p->map.shape[0]);
    args.slices = plan.split_k;
    return launch_wgrad_of(args, p->feats.dtype, p->grad_weight.data, stream_of(queue), error);
}

fg_status narrow_wgrad(const WgradParams &p, const fg_plan &plan, float *partials, fg_dtype dtype, cudaStream_t stream,
                       fg_error *error) {
    DepthwiseWgradArgs args = {};
    args.grad_out = p.grad_out;
    args.feats = p.feats;
    args.map = p.map;
    args.partials = partials;
    args.grad_stride = p.grad_stride;
    args.feats_stride = p.feats_stride;
    args.rows = p.rows;
    args.co = static_cast<int64_t>(p.co) * p.channel_groups;
    args.multiplier = p.co;
    args.own = p.ci;
    args.in_rows = p.in_rows;
    args.volume = p.volume;
    args.slices = plan.split_k;
    return launch_wgrad_of(args, dtype, p.grad_weight, stream, error);
}

}  // namespace flexgemm
