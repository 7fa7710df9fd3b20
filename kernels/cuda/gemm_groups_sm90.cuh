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

#include "gemm_tokens_sm90.cuh"

namespace flexgemm {

/* The most tokens that a tile can have. A launch may allow fewer, where more tiles fill the multiprocessors better. */
template <bool kScaled, int kTokens>
struct Sm90GroupTile : Sm90TokenTile<kScaled, kTokens, 2, 2> {
    using Base = Sm90TokenTile<kScaled, kTokens, 2, 2>;
    static constexpr int kUnit = 16; /* tokens of a copy; n of wgmma is a multiple of it */
    static constexpr int kBoxBytes = kUnit * kSm90StepBytes;
    /* Sums are stored so many tokens at a time, by way of shared memory. */
    static constexpr int kHalvesAtOnce = 32, kFloatsAtOnce = 16;
    static constexpr int kKeptBytes = kHalvesAtOnce * Base::kHalfPitch;
    static constexpr int kSmallBytes = 2304; /* barriers, tiles, scales */
    static constexpr int kStages = (227 * 1024 - kKeptBytes - kSmallBytes) / (Base::kStageBytes + Base::kScaleBytes);
    static constexpr int kSharedBytes = kStages * (Base::kStageBytes + Base::kScaleBytes) + kKeptBytes + kSmallBytes;
    static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
    static_assert(kFloatsAtOnce * Base::kSumPitch * 4 <= kKeptBytes, "both kinds of sums find room");
    static_assert(kTokens % kHalvesAtOnce == 0 && kHalvesAtOnce % kFloatsAtOnce == 0, "tokens are stored by these");
    static_assert(kProducerRegisters + Base::kWarpgroups * kConsumerRegisters <=
                      (1 + Base::kWarpgroups) * ptx::registers_at_launch(Base::kThreads),
                  "warpgroups divide the registers of the launch");
};

/* What one thread needs to copy steps of tiles to stages that are free. */
template <typename Tile>
struct GroupCopies {
    const CUtensorMap &map_weights, &map_tokens;
    const GemmSm90Args &args;
    uint8_t *stages;
    uint64_t *full;
    int rank;

    /* What the block copies for itself. */
    __device__ __forceinline__ void copy_own(const Sm90Work &work, int step, int slot) const {
        const int weight_bytes = work.rows > 0 ? Tile::kWeightBytes : 0;
        const int token_bytes = ceil_div(work.columns, Tile::kUnit) * Tile::kBoxBytes;
        ptx::mbarrier_arrive_expect_tx(full + slot, weight_bytes + token_bytes);
        if (weight_bytes > 0)
            ptx::tma_load_3d(stages + slot * Tile::kStageBytes, &map_weights, full + slot, step * kSm90StepBytes,
                             work.first_row, args.b_grouped ? work.weight : 0);
    }

    /* And for both blocks of the pair: half of the tokens. */
    __device__ __forceinline__ void copy_share(const Sm90Work &work, int step, int slot) const {
        constexpr uint16_t kPair = (1 << Tile::kCluster) - 1;
        uint8_t *const tokens = stages + slot * Tile::kStageBytes + Tile::kWeightBytes;
        const int boxes = ceil_div(work.columns, Tile::kUnit), group = args.a_grouped ? work.group : 0;
#pragma unroll 1
        for (int box = rank; box < boxes; box += Tile::kCluster)
            ptx::tma_load_3d_multicast(tokens + box * Tile::kBoxBytes, &map_tokens, full + slot, step * kSm90StepBytes,
                                       work.first_column + box * Tile::kUnit, group, kPair);
    }
};

/* `early`: steps of the first tile that have been copied. */
template <typename Tile>
__device__ __forceinline__ void produce_groups(Sm90Shared<Tile> &shared, const GroupCopies<Tile> &copies, int early) {
    const bool leads = ptx::elect();
    RingPosition<Tile::kTileSlots> slot;
    RingPosition<Tile::kStages> at = {early % Tile::kStages, early == Tile::kStages};
    for (;; early = 0) {
        const Sm90Work work = next_work(shared, slot);
        if (work.group < 0) break;
        release_work(shared, slot);
        const int steps = steps_of(work);
        for (int step = early; step < steps && leads; ++step, at.advance()) {
            ptx::mbarrier_wait_parity(&shared.empty[at.slot], at.parity ^ 1);
            copies.copy_own(work, step, at.slot);
            copies.copy_share(work, step, at.slot);
        }
        __syncwarp();
    }
    /* The block stays until the other one of its pair has handed back what it read here. */
    for (int i = 0; i < Tile::kStages && leads; ++i, at.advance())
        ptx::mbarrier_wait_parity(&shared.empty[at.slot], at.parity ^ 1);
}

/* Of scales of blocks. Tokens that the group has no more of keep what a stage held: their sums are not stored. */
template <typename Tile>
__device__ __forceinline__ void produce_group_scales(TokenShared<Tile> &shared, const GemmSm90Args &args) {
    RingPosition<Tile::kTileSlots> slot;
    RingPosition<Tile::kStages> at;
    for (;;) {
        const Sm90Work work = next_work(shared.rings, slot);
        if (work.group < 0) break;
        release_work(shared.rings, slot);
        copy_token_scales(shared, args, work, at);
    }
    await_copies();
}

/* All of K of a tile of `units` times 16 tokens, into as many of the sums as those need. The others become 0, or ptxas
 * keeps sums in local memory. */
template <typename Math, typename Tile, int kUnits = 1>
__device__ __forceinline__ void multiply_units(float (&sum)[Tile::kBlockN / 2], int units, TokenShared<Tile> &shared,
                                               const StageDescriptors &stage, const Depth &depth,
                                               RingPosition<Tile::kStages> &at) {
    if constexpr (kUnits * Tile::kUnit < Tile::kBlockN)
        if (units > kUnits) return multiply_units<Math, Tile, kUnits + 1>(sum, units, shared, stage, depth, at);
    constexpr int kCount = kUnits * Tile::kUnit / 2;
    float own[1][kCount];
    auto scales = token_scales<Math, kCount>(shared);
    multiply_tile<Math>(own, shared.rings, stage, depth, scales, at);
#pragma unroll
    for (int i = 0; i < Tile::kBlockN / 2; ++i) sum[i] = i < kCount ? own[0][i % kCount] : 0.0f;
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
                                               const GemmSm90Args &args) {
    const int warpgroup = threadIdx.x / ptx::kWarpgroup - 1;
    RingPosition<Tile::kTileSlots> slot;
    RingPosition<Tile::kStages> at;
    const StageDescriptors stage = {stages, ptx::wgmma_descriptor(stages + warpgroup * Tile::kBytesA),
                                    ptx::wgmma_descriptor(stages + Tile::kWeightBytes)};
    for (;;) {
        const Sm90Work work = next_work(shared.rings, slot);
        if (work.group < 0) break;
        release_work(shared.rings, slot);
        const TileScales scales = load_scales(args, work);
        const Depth depth = {steps_of(work), 0, 0, 0};
        const bool has_rows = work.rows > warpgroup * Tile::kWarpgroupRows;
        float sum[Tile::kBlockN / 2];
        if (has_rows)
            multiply_units<Math, Tile>(sum, ceil_div(work.columns, Tile::kUnit), shared, stage, depth, at);
        else
            skip_tile(shared.rings, stage, depth, at);
        keep_scales(shared, scales, args.epilogue.alpha);
        ptx::named_barrier(1, Tile::kConsumers);
        const auto keep_and_store_halves = [&](auto element) {
            using T = decltype(element);
            store_tokens<Tile::kHalvesAtOnce, Tile>(
                sum, work, has_rows,
                [&](const auto &sums, int units, int first) { keep_halves<T>(sums, shared, kept, units, 1, 0, first); },
                [&](const Sm90Work &part, int) { copy_halves<Tile>(args, part, kept, 0); });
        };
        if (!args.plain) {
            float *rows = reinterpret_cast<float *>(kept);
            store_tokens<Tile::kFloatsAtOnce, Tile>(
                sum, work, has_rows, [&](const auto &sums, int units, int) { keep_floats<Tile>(sums, rows, units); },
                [&](const Sm90Work &part, int first) { finish_tokens(shared, args, part, rows, 0, first); });
        } else if (args.epilogue.out_dtype == FG_FLOAT16) {
            keep_and_store_halves(__half{});
        } else {
            keep_and_store_halves(__nv_bfloat16{});
        }
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
    const GroupCopies<Tile> copies = {map_weights, map_tokens, args, stages, shared.rings.full, rank};
    /* First copies in the first lines of code, as in gemm_decode_sm90.cuh. */
    Sm90Work first = {};
    if (is_one_group(args.space)) first = token_work_of_one_group<Tile>(args, rank, blockIdx.y);
    const int early = min(steps_of(first), Tile::kStages);
    if (warp == 0) {
        const bool leads = ptx::elect();
        if (leads) {
            ptx::prefetch_tensor_map(&map_weights);
            ptx::prefetch_tensor_map(&map_tokens);
            init_rings(shared.rings);
        }
        ptx::wait_for_earlier_kernels();
        for (int step = 0; step < early && leads; ++step) copies.copy_own(first, step, step);
    }
    __syncwarp();
    ptx::cluster_arrive();
    if (warp == 1) ask_for_groups(args.space, blockIdx.y);
    __syncwarp();
    ptx::cluster_wait();
    ptx::wait_for_earlier_kernels();
    if (warp == 0 && ptx::elect())
        for (int step = 0; step < early; ++step) copies.copy_share(first, step, step);
    __syncwarp();
    if (warp < 4) {
        ptx::setmaxnreg_dec<Tile::kProducerRegisters>();
        if (warp == 0)
            produce_groups(shared.rings, copies, early);
        else if (warp == 1)
            schedule_tokens(shared.rings, args, rank);
        else if constexpr (Math::kScaled)
            produce_group_scales(shared, args);
    } else {
        ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
        consume_groups<Math>(shared, stages, kept, args);
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
