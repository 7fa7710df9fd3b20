/*
 * Grouped convolution with few channels in a group, forward and input gradient, by plain arithmetic: a tile of tensor
 * cores would be empty but for a small part. A thread owns an output channel of a row, so that a warp reads one row's
 * map entries, its group's channels and consecutive weights, which L1 serves; float32 sums in the order of offsets.
 *
 * Workspace: weight (volume, depth, all columns) float32
 */
#include "backend.cuh"
#include "conv_gather.cuh"
#include "common.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256;
constexpr int kBatch = 4; /* map entries of one thread in flight */

__device__ __forceinline__ int64_t all_columns(const GatherParams &p) {
    return static_cast<int64_t>(p.columns) * p.channel_groups;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) lay_out_kernel(const GatherParams p, bool is_k_major, float *to) {
    const int64_t total = all_columns(p), thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (thread >= total * p.volume * p.depth) return;
    const int64_t column = thread % total, k = thread / total % p.depth, v = thread / total / p.depth;
    const int64_t group = column / p.columns, n = column % p.columns;
    const int64_t from =
        is_k_major ? (column * p.volume + v) * p.depth + k : ((group * p.depth + k) * p.volume + v) * p.columns + n;
    to[thread] = to_float(static_cast<const T *>(p.weight)[from]);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) narrow_kernel(const GatherParams p, const float *weight) {
    const int64_t total = all_columns(p), thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t row = thread / total, column = thread % total;
    if (row >= p.rows) return;
    const T *in = static_cast<const T *>(p.in) + column / p.columns * p.depth;
    float sum = 0.0f;
    for (int v = 0; v < p.volume; v += kBatch) {
        uint32_t source[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            source[i] = v + i < p.volume ? static_cast<uint32_t>(p.map_at(v + i)[row]) : ~0u;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (source[i] >= p.in_rows) continue;
            const T *from = in + source[i] * p.in_stride;
            const float *w = weight + static_cast<int64_t>(v + i) * p.depth * total + column;
            for (int k = 0; k < p.depth; ++k) sum = fmaf(w[k * total], to_float(from[k]), sum);
        }
    }
    const T *bias = static_cast<const T *>(p.epilogue.bias), *residual = static_cast<const T *>(p.epilogue.residual);
    if (bias) sum += to_float(bias[column]);
    if (residual) sum += to_float(residual[row * p.epilogue.residual_stride + column]);
    static_cast<T *>(p.out)[row * p.out_stride + column] = from_float<T>(activated(sum, p.epilogue.activation));
}

template <typename T>
fg_status launch(const GatherParams &p, bool is_k_major, float *laid_out, cudaStream_t stream, fg_error *error) {
    const int64_t total = static_cast<int64_t>(p.columns) * p.channel_groups;
    unsigned int blocks = 0;
    fg_status status = grid_for(total * p.volume * p.depth, kThreads, "weight", &blocks, error);
    if (status != FG_OK) return status;
    lay_out_kernel<T><<<blocks, kThreads, 0, stream>>>(p, is_k_major, laid_out);
    FG_CUDA(cudaGetLastError());
    status = grid_for(p.rows * total, kThreads, "out", &blocks, error);
    if (status != FG_OK) return status;
    narrow_kernel<T><<<blocks, kThreads, 0, stream>>>(p, laid_out);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

}  // namespace

fg_status conv_narrow(const GatherParams &p, fg_dtype dtype, bool weight_is_k_major, float *laid_out,
                      cudaStream_t stream, fg_error *error) {
    if (dtype == FG_FLOAT16) return launch<__half>(p, weight_is_k_major, laid_out, stream, error);
    if (dtype == FG_BFLOAT16) return launch<__nv_bfloat16>(p, weight_is_k_major, laid_out, stream, error);
    return launch<float>(p, weight_is_k_major, laid_out, stream, error);
}

}  // namespace flexgemm
