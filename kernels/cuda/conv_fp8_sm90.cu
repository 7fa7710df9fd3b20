/*
 * Forward pass of sparse convolution on Hopper with float8 operands of either kind: the pipeline of
 * conv_gather_sm90.cuh, whose consumers sum each step by itself (conv_step_sums_sm90.cuh).
 *
 * Tensor cores keep about 13 fraction bits of a running sum of float8 products. A step is 128 channels at one offset;
 * its sums start from zero and are then added to float32 registers. That is also where a row's scale belongs: each row
 * of a tile gathers another row of `in` at each offset, so that the scales travel with the steps, one for each row of
 * A, and multiply the sums as they are added. What scales the columns, or all of `in`, waits for the end.
 *
 * The bytes of a step take longer to come from L2 than its products.
 */
#include "activation.cuh"
#include "conv_step_sums_sm90.cuh"

namespace flexgemm {
namespace {

using Byte = uint8_t; /* an element of either kind */

/* D = A.B^T or D += A.B^T of 64 rows, 32 bytes of K. */
template <bool kAIsE5m2, bool kBIsE5m2, int kCount>
__device__ __forceinline__ void wgmma(float (&d)[kCount], uint64_t a, uint64_t b, bool accumulate) {
    if constexpr (kAIsE5m2 && kBIsE5m2)
        ptx::wgmma_e5m2_e5m2(d, a, b, accumulate);
    else if constexpr (kAIsE5m2)
        ptx::wgmma_e5m2_e4m3(d, a, b, accumulate);
    else if constexpr (kBIsE5m2)
        ptx::wgmma_e4m3_e5m2(d, a, b, accumulate);
    else
        ptx::wgmma_e4m3_e4m3(d, a, b, accumulate);
}

template <int kSums>
__device__ __forceinline__ void scale_columns(float (&d)[kSums], const GatherParams &p, int n0) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
        const int n = n0 + 8 * j + lane % 4 * 2;
        if (n >= p.columns) continue; /* columns are a multiple of 8 */
        const float x = p.epilogue.scale_of(n), y = p.epilogue.scale_of(n + 1);
        d[4 * j] *= x, d[4 * j + 1] *= y;
        d[4 * j + 2] *= x, d[4 * j + 3] *= y;
    }
}

template <int kSums>
__device__ __forceinline__ void divide(float (&d)[kSums], float divisor) {
#pragma unroll
    for (float &sum : d) sum = __fdiv_rn(sum, divisor);
}

template <bool kAIsE5m2, bool kBIsE5m2>
struct Math {
    static constexpr bool kRowScales = true;

    template <int kCount>
    __device__ static void multiply(float (&sums)[kCount], uint64_t rows, uint64_t columns) {
        constexpr int kSteps = kSwizzleRowBytes / kWgmmaBytes, kAdvance = kWgmmaBytes / 16;
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
            wgmma<kAIsE5m2, kBIsE5m2>(sums, rows + k * kAdvance, columns + k * kAdvance, k > 0);
    }

    template <class Tile, int kSums>
    __device__ static void write(float (&d)[kSums], const GatherParams &p, GatherShared<Tile> &shared,
                                 const GatherTask<Tile> &task, const int64_t (&rows)[2]) {
        if (p.partials) {
            store_partials(d, p, task.slice, task.n0, rows);
            return;
        }
        scale_columns(d, p, task.n0);
        with_float_type(p.added_dtype, [&](auto type) {
            using T = decltype(type);
            add_rows<T>(d, bias_of<T>(shared, p, task), p, task.n0, rows);
        });
        activate(d, p.epilogue.activation);
        if (p.epilogue.scale_out) divide(d, *p.epilogue.scale_out);
        with_out_type(p.out_dtype, [&](auto type) { store_rows<decltype(type)>(d, p, task.n0, rows); });
    }
};

/* ---- kernel and launch ---- */

template <bool kAIsE5m2, bool kBIsE5m2, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    conv_fp8_sm90_kernel(const GatherParams p, const __grid_constant__ CUtensorMap weight_map, int tasks) {
    gather_block<Byte, Tile, true, StepSumsConsumer<Math<kAIsE5m2, kBIsE5m2>, Tile>>(p, weight_map, tasks);
}

template <bool kAIsE5m2, bool kBIsE5m2>
fg_status launch(const GatherParams &p, const fg_plan &plan, int num_sms, cudaStream_t stream, fg_error *error) {
    return with_gather_tile(plan, [&](auto tile) {
        using Tile = decltype(tile);
        return launch_gather<conv_fp8_sm90_kernel<kAIsE5m2, kBIsE5m2, Tile>, Byte, Tile, true>(p, num_sms, stream,
                                                                                               error);
    });
}

}  // namespace

fg_status launch_fp8_sm90(const GatherParams &p, const fg_plan &plan, fg_dtype in, fg_dtype weight, int num_sms,
                          cudaStream_t stream, fg_error *error) {
    if (in == FG_FLOAT8_E5M2)
        return weight == FG_FLOAT8_E5M2 ? launch<true, true>(p, plan, num_sms, stream, error)
                                        : launch<true, false>(p, plan, num_sms, stream, error);
    return weight == FG_FLOAT8_E5M2 ? launch<false, true>(p, plan, num_sms, stream, error)
                                    : launch<false, false>(p, plan, num_sms, stream, error);
}

}  // namespace flexgemm
