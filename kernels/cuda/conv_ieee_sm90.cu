/*
 * Forward and input gradient of sparse convolution on Hopper in true float32: the pipeline of conv_gather_sm90.cuh,
 * whose consumers sum each step by itself (conv_step_sums_sm90.cuh).
 *
 * As in the portable kernel (mma_tile.cuh), x = high + low, each TF32, leaves 2^-22 of x, and a product is high * low +
 * low * high + high * high. The operands are copies (tf32.cuh) with both parts of 16 channels side by side, 128 bytes,
 * so that a step brings each part once for the three products. Smallest terms come first: what tensor cores cut off is
 * in proportion to the sum so far.
 *
 * Sums that are not finite are computed again from the operands as they were given (conv_plain_sum.cuh).
 */
#include "activation.cuh"
#include "conv_plain_sum.cuh"
#include "conv_step_sums_sm90.cuh"
#include "tf32.cuh"

namespace flexgemm {
namespace {

static_assert(2 * kSplitBlock == kBlockK<float>, "a step is both parts of a block");

template <int kSums>
__device__ __forceinline__ void replace_not_finite(float (&d)[kSums], const GatherParams &p, int slice, int n0,
                                                   const int64_t (&rows)[2]) {
    constexpr int kBits = 32;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int first = 0; first < kSums; first += kBits) {
        uint32_t left = 0;
#pragma unroll
        for (int i = 0; i < kBits; ++i) left |= static_cast<uint32_t>(!isfinite(d[first + i])) << i;
        while (left != 0) {
            const int found = __ffs(static_cast<int>(left)) - 1, i = first + found;
            left &= left - 1;
            const int n = n0 + i / 4 * 8 + lane % 4 * 2 + i % 2;
            const int64_t row = i / 2 % 2 == 0 ? rows[0] : rows[1];
            if (row < 0 || n >= p.columns) continue;
            const float sum = plain_sum(p, p.plain, slice, row, n);
#pragma unroll
            for (int j = 0; j < kBits; ++j) d[first + j] = j == found ? sum : d[first + j];
        }
    }
}

struct Math {
    static constexpr bool kRowScales = false;

    template <int kCount>
    __device__ static void multiply(float (&sums)[kCount], uint64_t rows, uint64_t columns) {
        constexpr int kSteps = kSwizzleRowBytes / kWgmmaBytes / 2, kAdvance = kWgmmaBytes / 16; /* of a part */
        constexpr int kLow = kSteps * kAdvance;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            ptx::wgmma_tf32(sums, rows + kLow + k * kAdvance, columns + k * kAdvance, k > 0);
            ptx::wgmma_tf32(sums, rows + k * kAdvance, columns + kLow + k * kAdvance, 1);
        }
#pragma unroll
        for (int k = 0; k < kSteps; ++k) ptx::wgmma_tf32(sums, rows + k * kAdvance, columns + k * kAdvance, 1);
    }

    template <class Tile, int kSums>
    __device__ static void write(float (&d)[kSums], const GatherParams &p, GatherShared<Tile> &shared,
                                 const GatherTask<Tile> &task, const int64_t (&rows)[2]) {
        replace_not_finite(d, p, task.slice, task.n0, rows);
        if (p.partials) {
            store_partials(d, p, task.slice, task.n0, rows);
            return;
        }
        add_rows<float>(d, bias_of<float>(shared, p, task), p, task.n0, rows);
        activate(d, p.epilogue.activation);
        store_rows<float>(d, p, task.n0, rows);
    }
};

/* ---- kernel and launch ---- */

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    conv_ieee_sm90_kernel(const GatherParams p, const __grid_constant__ CUtensorMap weight_map, int tasks) {
    gather_block<float, Tile, true, StepSumsConsumer<Math, Tile>>(p, weight_map, tasks);
}

}  // namespace

fg_status launch_ieee_sm90(const GatherParams &p, const fg_plan &plan, int num_sms, cudaStream_t stream,
                           fg_error *error) {
    return with_gather_tile(plan, [&](auto tile) {
        using Tile = decltype(tile);
        return launch_gather<conv_ieee_sm90_kernel<Tile>, float, Tile, true>(p, num_sms, stream, error);
    });
}

}  // namespace flexgemm
