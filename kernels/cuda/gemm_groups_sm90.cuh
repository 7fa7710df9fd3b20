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
struct Sm90GroupTile : Sm90TokenTile<Math, kTokens, 2, 2, Use> {
    using Base = Sm90TokenTile<Math, kTokens, 2, 2, Use>;
    static constexpr int kUnit = 16; /* n of wgmma is a multiple of it */
    static constexpr int kBoxTokensOfGroups = kUnit;
    /* Sums are stored so many tokens at a time, by way of shared memory. */
    static constexpr int kHalvesAtOnce = 32, kFloatsAtOnce = 16;
    static constexpr int kKeptBytes = kHalvesAtOnce * (2 * Base::kWeightRows + 16);
    static constexpr int kSmallBytes = 1536 + 4 * kTokens; /* barriers, tiles, scales */
    static constexpr int kStages = (227 * 1024 - kKeptBytes - kSmallBytes) / (Base::kStageBytes + Base::kScaleBytes);
    static constexpr int kSharedBytes = kStages * (Base::kStageBytes + Base::kScaleBytes) + kKeptBytes + kSmallBytes;
    static_assert(kFloatsAtOnce * Base::kSumPitch * 4 <= kKeptBytes && Base::kTokenPitch <= 2 * Base::kWeightRows + 16,
                  "all kinds of sums find room");
    static_assert(kTokens % kHalvesAtOnce == 0 && kHalvesAtOnce % kFloatsAtOnce == 0, "tokens are stored by these");
};

/* All of K of a tile of `units` times 16 tokens, into as many of the sums as those need. The others become 0, or ptxas
 * keeps sums in local memory. */
template <typename Math, typename Tile, int kUnits = 1>
__device__ __forceinline__ void multiply_units(float (&sum)[Tile::kBlockN / 2], int units, TokenShared<Tile> &shared,
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

/* Stores a tile's sums, kAtOnce tokens at a time: `keep` brings those from a token on to shared memory, `store` from
 * there to the output. */
template <int kAtOnce, typename Tile, typename Keep, typename Store>
__device__ __forceinline__ void store_tokens(const float (&sum)[Tile::kBlockN / 2], const Sm90Work &work, bool has_rows,
                                             const Keep &keep, const Store &store) {
#pragma unroll
    for (int first = 0; first < Tile::kBlockN; first += kAtOnce) {
        if (first >= work.columns) break;
        Sm90Work part = work;
        part.first_column += first;
        part.columns = min(work.columns - first, kAtOnce);
        if (has_rows)
            keep(reinterpret_cast<const float (&)[kAtOnce / 2]>(sum[first / 2]), ceil_div(part.columns, 8), first);
        ptx::named_barrier(1, Tile::kConsumers);
        store(part, first);
        ptx::named_barrier(1, Tile::kConsumers); /* before what is kept next */
    }
}

template <typename Math, typename Tile>
__device__ __forceinline__ void consume_groups(TokenShared<Tile> &shared, uint8_t *stages, uint8_t *kept,
                                               const GemmSm90Args &args, HandedWorks<Tile> &works) {
    const int warpgroup = threadIdx.x / ptx::kWarpgroup - 1;
    Sm90Work work;
    RingPosition<Tile::kStages> at;
    const StageDescriptors stage = {stages, ptx::wgmma_descriptor(stages + warpgroup * Tile::kBytesA),
                                    ptx::wgmma_descriptor(stages + Tile::kWeightBytes), warpgroup};
    constexpr bool kTurns = Tile::takes_turns(Tile::kBlockN); /* of the tallest tiles */
    if constexpr (kTurns) begin_turns<Tile>(warpgroup);
    while (works.next(work)) {
        const TileScales scales = load_scales<Tile>(args, work);
        const Depth depth = {steps_of(work), 0, 0, 0};
        const bool has_rows = work.rows > warpgroup * Tile::kWarpgroupRows;
        const int units = ceil_div(work.columns, Tile::kUnit);
        float sum[Tile::kBlockN / 2];
        if (has_rows)
            multiply_units<Math, Tile>(sum, units, shared, stage, depth, at);
        else
            skip_tile(shared.rings, stage, depth, at, Tile::takes_turns(units * Tile::kUnit) ? 1 : 0);
        keep_scales(shared, scales, args.epilogue.alpha);
        ptx::named_barrier(1, Tile::kConsumers);
        if (!is_plain<Tile>(args)) {
            float *rows = reinterpret_cast<float *>(kept);
            store_tokens<Tile::kFloatsAtOnce, Tile>(
                sum, work, has_rows, [&](const auto &sums, int units, int) { keep_floats<Tile>(sums, rows, units); },
                /* There is this code for each of the parts: of more tokens at once it would be too much. */
                [&](const Sm90Work &part, int first) { finish_tokens<1>(shared, args, part, rows, 0, first); });
        } else {
            store_tokens<Tile::kHalvesAtOnce, Tile>(
                sum, work, has_rows,
                [&](const auto &sums, int units, int first) {
                    constexpr int kUnits = Tile::kHalvesAtOnce / 8;
                    const auto factors = load_factors<kUnits>(shared, 1, 0, first);
                    keep_plain<Math, Tile>(sums, factors, scales, kept, units);
                },
                [&](const Sm90Work &part, int) { TokenOutput<Tile, 1>(args, part, 0).copy(kept); });
        }
    }
    if constexpr (kTurns) end_turns<Tile>(warpgroup);
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
            schedule_tokens(shared.rings, args, rank, true);
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
