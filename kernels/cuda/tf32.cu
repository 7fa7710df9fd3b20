/*
 * Copies of float32 operands rounded to TF32, for wgmma: it ignores the bits that TF32 lacks, which would make every
 * product too small, by 7e-4 on average. mma.sync kernels round in registers instead. True float32 takes two parts of
 * each number, a block of high ones and a block of low ones side by side.
 */
#include "tf32.cuh"

#include "ptx.cuh"

namespace flexgemm {
namespace {

/* The bits that a tensor core reads. */
__device__ __forceinline__ float round_to_tf32(float x) { return __uint_as_float(ptx::to_tf32(x) & 0xffffe000u); }
__device__ __forceinline__ float4 round_to_tf32(float4 x) {
    return make_float4(round_to_tf32(x.x), round_to_tf32(x.y), round_to_tf32(x.z), round_to_tf32(x.w));
}
__device__ __forceinline__ float low_part(float x) { return round_to_tf32(x - round_to_tf32(x)); }
__device__ __forceinline__ float4 low_part(float4 x) {
    return make_float4(low_part(x.x), low_part(x.y), low_part(x.z), low_part(x.w));
}

/* Where element i of a row goes, in a split one its high part; in elements or in quads. */
template <bool kSplit>
__device__ __forceinline__ int64_t place_of(int64_t i, int block) {
    return kSplit ? i + i / block * block : i;
}

template <bool kSplit>
__global__ void __launch_bounds__(256)
    tf32_rows_kernel(const float *in, int64_t stride, int64_t rows, int64_t columns, float4 *out) {
    constexpr int kBlock = kSplitBlock / 4;
    const bool aligned = reinterpret_cast<uintptr_t>(in) % sizeof(float4) == 0 && stride % 4 == 0;
    const int64_t quads = kSplit ? ceil_div<int64_t>(columns, kSplitBlock) * kBlock : columns / 4, count = rows * quads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < count;
         i += static_cast<int64_t>(gridDim.x) * 256) {
        const int64_t row = rows == 1 ? 0 : i / quads, column = (i - row * quads) * 4;
        const float *source = in + row * stride + column;
        const float4 x = kSplit && column >= columns ? make_float4(0.0f, 0.0f, 0.0f, 0.0f)
                         : aligned                   ? *reinterpret_cast<const float4 *>(source)
                                                     : make_float4(source[0], source[1], source[2], source[3]);
        const int64_t place = place_of<kSplit>(i, kBlock);
        out[place] = round_to_tf32(x);
        if (kSplit) out[place + kBlock] = low_part(x);
    }
}

/* One tile of one offset, blockIdx.y. */
template <bool kSplit>
__global__ void __launch_bounds__(256)
    tf32_transposed_kernel(const float *in, int rows, int volume, int columns, float *out) {
    constexpr int kSide = 32, kPass = 8;
    static_assert(kSide % kSplitBlock == 0, "blocks end where tiles do, or before");
    __shared__ float tile[kSide][kSide + 1];
    const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
    const int row_tiles = ceil_div(rows, kSide), index = static_cast<int>(blockIdx.x);
    const int row0 = index % row_tiles * kSide, column0 = index / row_tiles * kSide;
    const int64_t v = blockIdx.y;
#pragma unroll
    for (int i = y; i < kSide; i += kPass) {
        const bool present = row0 + i < rows && column0 + x < columns;
        tile[i][x] = present ? in[((row0 + i) * static_cast<int64_t>(volume) + v) * columns + column0 + x] : 0.0f;
    }
    __syncthreads();
    const int64_t depth = kSplit ? split_depth(rows) : rows, place = place_of<kSplit>(row0 + x, kSplitBlock);
#pragma unroll
    for (int i = y; i < kSide; i += kPass) {
        if (column0 + i >= columns || place >= depth) continue;
        float *const target = out + ((column0 + i) * static_cast<int64_t>(volume) + v) * depth + place;
        target[0] = round_to_tf32(tile[x][i]);
        if (kSplit) target[kSplitBlock] = low_part(tile[x][i]);
    }
}

template <bool kSplit>
cudaError_t launch_rows(const float *in, int64_t stride, int64_t rows, int64_t columns, float *out,
                        cudaStream_t stream) {
    if (rows == 0) return cudaSuccess;
    if (stride == columns && (!kSplit || columns % kSplitBlock == 0)) { /* one row, which needs no division */
        columns *= rows;
        stride = columns;
        rows = 1;
    }
    const int64_t blocks = ceil_div<int64_t>(rows * ceil_div<int64_t>(columns, 4), 256);
    constexpr int64_t kMaxBlocks = 1 << 16;
    tf32_rows_kernel<kSplit><<<static_cast<unsigned int>(blocks < kMaxBlocks ? blocks : kMaxBlocks), 256, 0, stream>>>(
        in, stride, rows, columns, reinterpret_cast<float4 *>(out));
    return cudaGetLastError();
}

template <bool kSplit>
cudaError_t launch_transposed(const float *in, int rows, int volume, int columns, float *out, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned int>(ceil_div(rows, 32)) * static_cast<unsigned int>(ceil_div(columns, 32)),
                    static_cast<unsigned int>(volume));
    tf32_transposed_kernel<kSplit><<<grid, 256, 0, stream>>>(in, rows, volume, columns, out);
    return cudaGetLastError();
}

}  // namespace

cudaError_t tf32_rows(const float *in, int64_t stride, int64_t rows, int64_t columns, float *out, cudaStream_t stream) {
    return launch_rows<false>(in, stride, rows, columns, out, stream);
}

cudaError_t tf32_transposed(const float *in, int rows, int volume, int columns, float *out, cudaStream_t stream) {
    return launch_transposed<false>(in, rows, volume, columns, out, stream);
}

cudaError_t tf32_split_rows(const float *in, int64_t stride, int64_t rows, int64_t columns, float *out,
                            cudaStream_t stream) {
    return launch_rows<true>(in, stride, rows, columns, out, stream);
}

cudaError_t tf32_split_transposed(const float *in, int rows, int volume, int columns, float *out, cudaStream_t stream) {
    return launch_transposed<true>(in, rows, volume, columns, out, stream);
}

}  // namespace flexgemm
