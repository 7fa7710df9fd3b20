/*
 * What the weight gradient kernels of Hopper share: how the partial sums of slices lie, the bias gradient, which
 * further CTAs of their launch sum up, and the kernel that adds the slices.
 */
#pragma once

#include "column_sum.cuh"
#include "conv_wgrad.cuh"
#include "ptx.cuh"

namespace flexgemm {
namespace wgrad {

/* Elements of the outputs, one after the other in the partial sums of a slice. */
__host__ __device__ inline int64_t weights_of(const WgradParams &p) {
    return p.grad_weight ? static_cast<int64_t>(p.co) * p.volume * p.ci : 0;
}
__host__ __device__ inline int64_t partial_pitch(const WgradParams &p) {
    return weights_of(p) + (p.grad_bias ? p.co : 0);
}

/* ---- bias gradient ---- */

/* Output channels of a CTA: a line of 16-bit elements, a line of float32. */
template <typename T>
constexpr int kBiasChannels = 128 / static_cast<int>(sizeof(T));

template <typename T>
int64_t bias_tasks_of(const WgradParams &p, int slices) {
    return p.grad_bias ? static_cast<int64_t>(ceil_div(p.co, kBiasChannels<T>)) * slices : 0;
}

template <typename T, int kVector, int kThreads>
__device__ void sum_bias(const WgradParams &p, int index, char *dynamic) {
    using Sum = ColumnSum<T, kVector, kThreads>;
    static_assert(Sum::kColumns == kBiasChannels<T>, "as the launch counts CTAs");
    const int groups = ceil_div(p.co, Sum::kColumns), slice = index / groups;
    const int64_t begin = slice * p.rows_per_slice, end = min(begin + p.rows_per_slice, p.rows);
    const int co0 = index % groups * Sum::kColumns, co = co0 + static_cast<int>(threadIdx.x);
    const float sum = Sum::run(static_cast<const T *>(p.summed), p.summed_stride, begin, end, co0, p.co,
                               *reinterpret_cast<typename Sum::Sums *>(dynamic));
    if (threadIdx.x >= Sum::kColumns || co >= p.co) return;
    if (p.partials)
        p.partials[slice * partial_pitch(p) + weights_of(p) + co] = sum;
    else
        static_cast<T *>(p.grad_bias)[co] = from_float<T>(sum);
}

/* ---- slices ---- */

/* Adds the slices, the first one first; kVector sums a thread, which divides both outputs. */
template <typename T, int kVector>
__global__ void __launch_bounds__(256) reduce_gradients_kernel(const WgradParams p, int slices) {
    ptx::wait_for_earlier_kernels();
    const int64_t weights = weights_of(p), pitch = partial_pitch(p);
    const int64_t stride = static_cast<int64_t>(gridDim.x) * 256 * kVector;
    for (int64_t i = (static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x) * kVector; i < pitch; i += stride) {
        Vector<float, kVector> sum = {};
#pragma unroll 8
        for (int s = 0; s < slices; ++s) {
            const auto part = Vector<float, kVector>::load(p.partials + s * pitch + i);
#pragma unroll
            for (int e = 0; e < kVector; ++e) sum.element[e] += part.element[e];
        }
        T *out = i < weights ? static_cast<T *>(p.grad_weight) + i : static_cast<T *>(p.grad_bias) + (i - weights);
        Vector<T, kVector> rounded;
#pragma unroll
        for (int e = 0; e < kVector; ++e) rounded.element[e] = from_float<T>(sum.element[e]);
        rounded.store(out);
    }
}

template <typename T, int kVector>
fg_status launch_reduction(const WgradParams &p, int slices, cudaStream_t stream, fg_error *error) {
    const int64_t blocks = ceil_div<int64_t>(partial_pitch(p), 256 * kVector);
    constexpr int64_t kMaxBlocks = 1 << 16;
    return launch_early(reduce_gradients_kernel<T, kVector>,
                        static_cast<unsigned int>(blocks < kMaxBlocks ? blocks : kMaxBlocks), 256, 0, 90, stream, error,
                        p, slices);
}

template <typename T>
fg_status reduce_gradients(const WgradParams &p, int slices, cudaStream_t stream, fg_error *error) {
    constexpr int kVector = 4;             /* co and ci are multiples of 8 */
    constexpr int64_t kManySums = 1 << 20; /* fewer need a thread each, to have loads enough in flight */
    const auto aligned = [](const void *data, size_t size) {
        return reinterpret_cast<uintptr_t>(data) % (kVector * size) == 0;
    };
    if (partial_pitch(p) >= kManySums && aligned(p.partials, sizeof(float)) && aligned(p.grad_weight, sizeof(T)) &&
        aligned(p.grad_bias, sizeof(T)))
        return launch_reduction<T, kVector>(p, slices, stream, error);
    return launch_reduction<T, 1>(p, slices, stream, error);
}

}  // namespace wgrad
}  // namespace flexgemm
