/*
 * Copies of float32 operands rounded to TF32, for wgmma: it ignores the bits that TF32 lacks, which would make every
 * product too small, by 7e-4 on average. mma.sync kernels round in registers instead.
 */
#include "tf32.cuh"

#include "ptx.cuh"

namespace flexgemm {
namespace {

__device__ __forceinline__ float round_to_tf32(float x) { return __uint_as_float(ptx::to_tf32(x)); }

__global__ void __launch_bounds__(256)
    tf32_rows_kernel(const float *in, int64_t stride, int64_t rows, int64_t columns, float4 *out) {
    const bool aligned = reinterpret_cast<uintptr_t>(in) % sizeof(float4) == 0 && stride % 4 == 0;
    const int64_t quads = columns / 4, count = rows * quads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < count;
         i += static_cast<int64_t>(gridDim.x) * 256) {
        const int64_t row = rows == 1 ? 0 : i / quads;
        const float *source = in + row * stride + (i - row * quads) * 4;
        const float4 x = aligned ? *reinterpret_cast<const float4 *>(source)
                                 : make_float4(source[0], source[1], source[2], source[3]);
        out[i] = make_float4(round_to_tf32(x.x), round_to_tf32(x.y), round_to_tf32(x.z), round_to_tf32(x.w));
    }
}

/* One tile of one offset, blockIdx.y. */
__global__ void __launch_bounds__(256)
    tf32_transposed_kernel(const float *in, int rows, int volume, int columns, float *out) {
    constexpr int kSide = 32, kPass = 8;
    __shared__ float tile[kSide][kSide + 1];
    const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
    const int row_tiles = ceil_div(rows, kSide), index = static_cast<int>(blockIdx.x);
    const int row0 = index % row_tiles * kSide, column0 = index / row_tiles * kSide;
    const int64_t v = blockIdx.y;
#pragma unroll
    for (int i = y; i < kSide; i += kPass) {
        if (row0 + i < rows && column0 + x < columns)
            tile[i][x] = round_to_tf32(in[((row0 + i) * static_cast<int64_t>(volume) + v) * columns + column0 + x]);
    }
    __syncthreads();
#pragma unroll
    for (int i = y; i < kSide; i += kPass) {
        if (column0 + i < columns && row0 + x < rows)
            out[((column0 + i) * static_cast<int64_t>(volume) + v) * rows + row0 + x] = tile[x][i];
    }
}

}  // namespace

cudaError_t tf32_rows(const float *in, int64_t stride, int64_t rows, int64_t columns, float *out, cudaStream_t stream) {
    if (rows == 0) return cudaSuccess;
    if (stride == columns) { /* one row, which needs no division */
        columns *= rows;
        rows = 1;
    }
    const int64_t blocks = ceil_div<int64_t>(rows * columns / 4, 256);
    constexpr int64_t kMaxBlocks = 1 << 16;
    tf32_rows_kernel<<<static_cast<unsigned int>(blocks < kMaxBlocks ? blocks : kMaxBlocks), 256, 0, stream>>>(
        in, stride, rows, columns, reinterpret_cast<float4 *>(out));
    return cudaGetLastError();
}

cudaError_t tf32_transposed(const float *in, int rows, int volume, int columns, float *out, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned int>(ceil_div(rows, 32)) * static_cast<unsigned int>(ceil_div(columns, 32)),
                    static_cast<unsigned int>(volume));
    tf32_transposed_kernel<<<grid, 256, 0, stream>>>(in, rows, volume, columns, out);
    return cudaGetLastError();
}

}  // namespace flexgemm
