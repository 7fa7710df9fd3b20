/*
 * Products of groups of some rows on Hopper: from one row of each group to some hundreds. A few hundred rows of one
 * product are such a group, too.
 *
 * A tile of 128 rows fits such groups badly: one of 130 rows would be multiplied as 192. So the operands change places
 * (gemm_tokens_sm90.cuh): beside 128 rows of B (weights) a tile has a multiple of 16 rows of A (tokens) that it chooses
 * for itself. A group is cut into as few tiles as kTokens allows, all of about the same size. Pairs of blocks with
 * neighbouring rows of weights read half of the tokens each, for both: what arrives at a multiprocessor limits such
 * tiles.
 *
 * Roles of warps are those of gemm_sm90.cuh.
 */
#pragma once

#include "gemm_token_output_sm90.cuh"

namespace flexgemm {

/* The most tokens that a tile can have. A launch may allow fewer, where more tiles fill the multiprocessors better. */
template <typename Math, int kTokens, typename Use>
struct Sm90GroupTile : Sm90TokenTile<Math, kTokens, 2, 2, Use, true> {
    using Base = Sm90TokenTile<Math, kTokens, 2, 2, Use, true>;
    static constexpr int kUnit = 16; /* n of wgmma is a multiple of it */
    static constexpr int kBoxTokensOfGroups = kUnit;
    /* Sums are stored so many tokens at a time, by way of a warpgroup's part of shared memory, which has room for as many
     * floats, or twice as many of what becomes values. */
    static constexpr int kAtOnce = 16;
    static constexpr int kKeptOfEnd = 4096, kKeptBytes = Base::kEnds * kKeptOfEnd;
    static constexpr int kSmallBytes = 1536 + 4 * Base::kEnds * kTokens; /* barriers, tiles, scales */
    static constexpr int kStages = (227 * 1024 - kKeptBytes - kSmallBytes) / (Base::kStageBytes + Base::kScaleBytes);
    static constexpr int kSharedBytes = kStages * (Base::kStageBytes + Base::kScaleBytes) + kKeptBytes + kSmallBytes;
    static_assert(2 * kAtOnce * Base::kTokenPitch <= kKeptOfEnd && kAtOnce * Base::kSumPitch * 4 <= kKeptOfEnd,
                  "all kinds of sums find room");
    static_assert(kTokens % kAtOnce == 0, "tokens are stored by these");
};

/* A thread's sums of so many tokens. */
template <int kTokens>
using SumsOf = float[kTokens / 2];

/* All of K of a tile of `units` times 16 tokens, into as many of the sums as those need. The others become 0, or ptxas
 * keeps sums in local memory. */
template <typename Math, typename Tile, int kUnits = 1>
__device__ __forceinline__ void multiply_units(SumsOf<Tile::kBlockN> &sum, int units, TokenShared<Tile> &shared,
                                               const StageDescriptors &stage, const Depth &depth,
                                               RingPosition<Tile::kStages> &at) {
    if constexpr (kUnits * Tile::kUnit < Tile::kBlockN)
        if (units > kUnits) return multiply_units<Math, Tile, kUnits + 1>(sum, units, shared, stage, depth, at);
    constexpr int kCount = kUnits * Tile::kUnit / 2;
    TileSums<2 * kCount> own;
    auto scales = token_scales<Math, kCount>(shared);
    multiply_tile<Math>(own, shared.rings, stage, depth, scales, at);
#pragma unroll
    for (int i = 0; i < Tile::kBlockN / 2; ++i) sum[i] = i < kCount ? own.last[i % kCount] : 0.0f;
}

/* Those of some of them, from token `first` on. */
template <int kAtOnce, int kTokens>
__device__ __forceinline__ const SumsOf<kAtOnce> &sums_from(const SumsOf<kTokens> &sum, int first) {
    return reinterpret_cast<const SumsOf<kAtOnce> &>(sum[first / 2]);
}

/* Stores the sums of a warpgroup, which become 16 bits or FP8 in two halves of its shared memory by turns: behind the
 * barrier of one nobody reads the other any more, nor the factors behind the last. */
template <typename Math, typename Tile>
__device__ __forceinline__ void store_values(const SumsOf<Tile::kBlockN> &sum, const EndFactors<Tile> &factors,
                                             const GemmSm90Args &args, const Sm90Work &work, const TileScales &scales,
                                             uint8_t *kept, int barrier) {
    constexpr int kAtOnce = Tile::kAtOnce, kUnits = kAtOnce / 8;
    TokenOutput<Tile, 1> output(args, work, 0);
#pragma unroll
    for (int first = 0; first < Tile::kBlockN; first += kAtOnce) {
        if (first >= work.columns) break;
        uint8_t *const rows = kept + first / kAtOnce % 2 * (kAtOnce * Tile::kTokenPitch);
        keep_plain<Math, Tile>(sums_from<kAtOnce, Tile::kBlockN>(sum, first),
                               load_factors<kUnits>(factors, 1, 0, first), scales, rows, kUnits);
        ptx::named_barrier(barrier, Tile::kEndThreads);
        output.template copy_next<kAtOnce>(rows, args.epilogue);
    }
}

/* The same of anything else. */
template <typename Tile>
__device__ __forceinline__ void store_floats(const SumsOf<Tile::kBlockN> &sum, const EndFactors<Tile> &factors,
                                             const GemmSm90Args &args, const Sm90Work &work, float *kept, int barrier) {
    constexpr int kAtOnce = Tile::kAtOnce;
#pragma unroll
    for (int first = 0; first < Tile::kBlockN; first += kAtOnce) {
        if (first >= work.columns) break;
        Sm90Work part = work;
        part.first_column += first;
        part.columns = min(work.columns - first, kAtOnce);
        keep_floats<Tile>(sums_from<kAtOnce, Tile::kBlockN>(sum, first), kept, kAtOnce / 8);
        ptx::named_barrier(barrier, Tile::kEndThreads);
        /* There is this code for each of the parts: of more tokens at once it would be too much. */
        finish_tokens<1>(factors, args, part, kept, 0, first);
        ptx::named_barrier(barrier, Tile::kEndThreads); /* before what is kept next */
    }
}

/* Each warpgroup multiplies and finishes its own rows of weights: while it stores, the other may multiply. */
template <typename Math, typename Tile>
__device__ __forceinline__ void consume_groups(TokenShared<Tile> &shared, uint8_t *stages, uint8_t *all_kept,
                                               const GemmSm90Args &args, HandedWorks<Tile> &works) {
    const int warpgroup = threadIdx.x / ptx::kWarpgroup - 1, barrier = 1 + warpgroup;
    EndFactors<Tile> &factors = shared.ends[warpgroup];
    uint8_t *const kept = all_kept + warpgroup * Tile::kKeptOfEnd;
    Sm90Work work;
    RingPosition<Tile::kStages> at;
    const StageDescriptors stage = {stages, ptx::wgmma_descriptor(stages + warpgroup * Tile::kBytesA),
                                    ptx::wgmma_descriptor(stages + Tile::kWeightBytes)};
    while (works.next(work)) {
        const Depth depth = {steps_of(work), 0, 0, 0};
        work.first_row += warpgroup * Tile::kWarpgroupRows;
        work.rows = min(work.rows - warpgroup * Tile::kWarpgroupRows, Tile::kWarpgroupRows);
        if (work.rows <= 0) {
            skip_tile(shared.rings, stage, depth, at);
            continue;
        }
        const TileScales scales = load_scales<Tile>(args, work);
        SumsOf<Tile::kBlockN> sum;
        multiply_units<Math, Tile>(sum, ceil_div(work.columns, Tile::kUnit), shared, stage, depth, at);
        keep_scales(factors, scales, args.epilogue.alpha);
        ptx::named_barrier(barrier, Tile::kEndThreads);
        if (is_plain<Tile>(args))
            store_values<Math>(sum, factors, args, work, scales, kept, barrier);
        else
            store_floats(sum, factors, args, work, reinterpret_cast<float *>(kept), barrier);
    }
}

/* ---- kernel ---- */

template <typename Math, typename Tile>
__device__ __forceinline__ void groups_body(const CUtensorMap &map_weights, const CUtensorMap &map_tokens,
                                            const GemmSm90Args &args) {
    extern __shared__ __align__(1024) uint8_t aligned[];
    uint8_t *stages = aligned, *kept = stages + Tile::kStages * Tile::kStageBytes;
    auto &shared = *reinterpret_cast<TokenShared<Tile> *>(kept + Tile::kKeptBytes);
    static_assert(sizeof shared <= Tile::kSmallBytes + Tile::kStages * Tile::kScaleBytes, "they find room");
    const int warp = threadIdx.x / 32, rank = static_cast<int>(blockIdx.x);
    const TokenCopies<Tile> copies(shared.rings, stages, map_weights, map_tokens, args, rank);
    Sm90Work first = {};
    if (has_one_group<Tile>(args)) first = token_work_of_one_group<Tile>(args, rank, blockIdx.y);
    const int early = min(steps_of(first), Tile::kStages);
    begin_block(
        map_weights, map_tokens, true, Tile::kThreads, !has_one_group<Tile>(args), [&] { init_rings(shared.rings); },
        [&] {
            copies.copy_own_steps(first, early);
            ask_for_weights<Tile>(args, map_weights, blockIdx.y);
        },
        [] {}, [&] { copies.copy_shared_steps(first, early); });
    HandedWorks<Tile> works(shared.rings);
    if (warp < 4) {
        ptx::setmaxnreg_dec<Tile::kProducerRegisters>();
        if (warp == 0)
            produce_tokens(shared.rings, copies, works, early);
        else if (warp == 1)
            schedule_tokens<Tile, true>(shared.rings, args, rank, true);
        else if constexpr (Math::kScaled)
            produce_token_scales(shared, args, works);
    } else {
        ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
        consume_groups<Math>(shared, stages, kept, args, works);
    }
}

template <typename Math, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fp8_gemm_groups_sm90_kernel(const __grid_constant__ CUtensorMap map_weights,
                                const __grid_constant__ CUtensorMap map_tokens,
                                const __grid_constant__ GemmSm90Args args) {
    groups_body<Math, Tile>(map_weights, map_tokens, args);
}

template <typename Math, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    half_gemm_groups_sm90_kernel(const __grid_constant__ CUtensorMap map_weights,
                                 const __grid_constant__ CUtensorMap map_tokens,
                                 const __grid_constant__ GemmSm90Args args) {
    groups_body<Math, Tile>(map_weights, map_tokens, args);
}

}  // namespace flexgemm
