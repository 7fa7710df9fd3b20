/*
 * What the Hopper kernels for few and for some rows share: products whose operands have changed places.
 *
 * In gemm_sm90.cuh wgmma multiplies rows of A. Here it multiplies those of B (weights), 64 to a warpgroup, and rows of A
 * (tokens) are its n, a multiple of 8: few tokens leave little of a tile empty, and a stage is mostly weights, K-major or,
 * of 16 bits, in boxes of 64 rows in 64 lines of K. At the end of a tile sums go through shared memory, where they become
 * rows of tokens, and from there to the output (gemm_token_output_sm90.cuh).
 */
#pragma once

#include "few_groups.cuh"
#include "gemm_mainloop_sm90.cuh"
#include "gemm_scales_sm90.cuh"
#include "gemm_values_sm90.cuh"

namespace flexgemm {

/* Tiles whose operands have changed places: tokens, blocks that copy for each other, and warpgroups of consumers with 64
 * rows of weights each, which finish them together or kApart: each its own, while the other one multiplies. */
template <typename Math, int kTokens, int kPair, int kOfWeights, typename Use, bool kApart = false>
struct Sm90TokenTile : Use {
    static constexpr bool kScaled = Math::kScaled, kMMajor = Math::kMMajor, kNMajor = Math::kNMajor;
    static constexpr bool kWeightLines = kMMajor;
    static constexpr int kBlockN = kTokens;
    static constexpr int kCluster = kPair;
    static constexpr int kWarpgroups = kOfWeights, kWarpgroupRows = 64;
    static constexpr int kWeightRows = kWarpgroups * kWarpgroupRows; /* of a block */
    static constexpr int kWeights = kPair * kWeightRows;             /* of a pair */
    static constexpr int kThreads = (1 + kWarpgroups) * ptx::kWarpgroup, kConsumers = kWarpgroups * ptx::kWarpgroup;
    static constexpr int kBytesA = kWarpgroupRows * kSm90StepBytes, kWeightBytes = kWarpgroups * kBytesA;
    static constexpr int kBytesB = kTokens * kSm90StepBytes;
    static constexpr int kStageBytes = kWeightBytes + kBytesB;
    /* What finishes a tile together: so many times the threads, with so many rows of weights each time. */
    static constexpr int kEnds = kApart ? kWarpgroups : 1;
    static constexpr int kEndThreads = kConsumers / kEnds, kEndRows = kWeightRows / kEnds;
    /* Of a token's sums as floats: no two of a warp's stores meet in a bank, since eights of them change places or rows of
     * them are longer. */
    static constexpr bool kSwizzledSums = kApart;
    static constexpr int kSumPitch = kEndRows + (kSwizzledSums ? 0 : 4);
    /* Of a token's output, plain or of a usual end: rows of weights to a column, and bytes; 8 chunks of 16 bytes below
     * each other meet in no bank, since they change places or rows of them are longer. */
    static constexpr int kGated = Use::kEnd == Sm90End::kSwiglu ? 2 : 1, kColumnBytes = Use::kToFp8 ? 1 : 2;
    static constexpr int kTokenBytes = kEndRows / kGated * kColumnBytes;
    static constexpr bool kSwizzled = kApart && kTokenBytes == 128;
    static constexpr int kTokenPitch = kTokenBytes + (kSwizzled ? 0 : 16);
    /* A thread stores 16 bytes at a time. */
    static constexpr int kTokenChunks = kTokenBytes / 16, kTokensAtOnce = kEndThreads / kTokenChunks;
    static constexpr int kTileSlots = 4;
    static constexpr int kScaledRows = (kTokens + 15) / 16 * 16, kScaledBlocks = 1; /* a thread reads four of 16 */
    static constexpr int kScaleThreads = kScaled ? kSm90ScaleThreads : 0;
    static constexpr int kScaleBytes = kScaled ? sizeof(StepScales<kScaledRows, kScaledBlocks>) : 0; /* of a stage */
    /* Where producers hand registers to consumers. */
    static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
    static_assert(kStageBytes % 1024 == 0, "stages start at swizzle atoms");
    static_assert(kWarpgroups == 1 || kProducerRegisters + kWarpgroups * kConsumerRegisters <=
                                          (1 + kWarpgroups) * ptx::registers_at_launch(kThreads),
                  "warpgroups divide the registers of the launch");

    /* Whether two warpgroups take turns at starting the products of so many tokens: for fewer, what a turn takes is more
     * than it gains, and so it is where they finish tiles apart. */
    __host__ __device__ static constexpr bool takes_turns(int tokens) {
        return Math::kPromote && kWarpgroups == 2 && !kApart && tokens >= 112;
    }
};

/* What sums are multiplied by and what is added, for those who finish them together. */
template <typename Tile>
struct EndFactors {
    alignas(8) float token_scale[Tile::kBlockN];
    alignas(16) float weight_scale[Tile::kEndRows];
    alignas(16) float bias[Tile::kEndRows];
};

template <typename Tile>
struct TokenShared {
    Sm90Shared<Tile> rings;
    StageScales<Tile> scales;
    uint64_t received; /* sums of all blocks that share the tile */
    EndFactors<Tile> ends[Tile::kEnds];
};

/* A thread of those who finish a tile together. */
template <typename Tile>
__device__ __forceinline__ int end_thread() {
    return static_cast<int>(threadIdx.x - ptx::kWarpgroup) % Tile::kEndThreads;
}

/* ---- tiles ---- */

/* Rows of a work are weights, columns are tokens; K is the block's part of it. `rank` is that in the cluster: blocks of
 * a pair, which share a part, are neighbours. Nothing is divided here: a product may last no longer than fifty
 * divisions. */
template <typename Tile>
__device__ __forceinline__ Sm90Work token_work(const GemmSm90Args &args, int rank, const OutputTile<int32_t> &tile) {
    const int32_t row = tile.column + rank % Tile::kCluster * Tile::kWeightRows;
    const int32_t rows = tile.column_end - row, columns = tile.row_end - tile.row;
    const int part = rank / Tile::kCluster, steps = args.part_steps + (part < args.longer_parts);
    const int begin = (part * args.part_steps + min(part, args.longer_parts)) * kSm90StepBytes;
    const int k_bytes = min(steps * kSm90StepBytes, static_cast<int>(args.space.k_bytes) - begin);
    return {row,    min(rows, Tile::kWeightRows), tile.row, min(columns, Tile::kBlockN), tile.group, tile.weight, begin,
            k_bytes};
}

/* Tile `number` of one group, whose rows are cut evenly: the first ones have one more than others. For whoever needs it. */
template <typename Tile>
__device__ __forceinline__ Sm90Work token_work_of_one_group(const GemmSm90Args &args, int rank, uint32_t number) {
    const TileSpace &space = args.space;
    uint32_t major, minor;
    rasterise(space, number, space.major_tiles, &major, &minor);
    const int row = static_cast<int>(major), tokens = args.tile_tokens;
    const int longer = static_cast<int>(space.major.length) - tokens * static_cast<int>(space.major_tiles);
    const int first_token = row * tokens + min(row, longer);
    return token_work<Tile>(args, rank,
                            {first_token, first_token + tokens + (row < longer),
                             static_cast<int>(minor) * Tile::kWeights, static_cast<int>(space.minor_length), 0, 0, 0,
                             static_cast<int>(space.k_bytes)});
}

/* Rows are cut evenly. kFewGroups: tiles may be as tall as the sizes of few groups ask for. */
template <typename Tile, bool kFewGroups = false>
__device__ __forceinline__ void schedule_tokens(Sm90Shared<Tile> &shared, const GemmSm90Args &args, int rank,
                                                bool in_cluster) {
    RingPosition<Tile::kTileSlots> at;
    if (has_one_group<Tile>(args)) {
        const uint32_t tiles = args.space.major_tiles * args.space.minor_tiles;
        for (uint32_t tile = blockIdx.y; tile < tiles; tile += gridDim.y)
            hand_over(shared, at, token_work_of_one_group<Tile>(args, rank, tile));
        hand_over(shared, at, no_more_work());
        return;
    }
    const auto hand_over_all = [&](auto walk) {
        OutputTile<int32_t> tile;
        for (bool first = true;; first = false) {
            const bool found = walk.next(tile);
            hand_over(shared, at, found ? token_work<Tile>(args, rank, tile) : no_more_work(), first, in_cluster);
            if (!found) return;
        }
    };
    if constexpr (kFewGroups)
        if (args.space.least_block > 0)
            return hand_over_all(FewGroupsWalk<Tile::kBlockN, Tile::kWeights>(args.space, blockIdx.y, gridDim.y));
    hand_over_all(TileWalk<int32_t, Tile::kBlockN, Tile::kWeights, 1, true>(args.space, blockIdx.y, gridDim.y));
}

/* The tiles that the scheduler hands over, to a warp of its producers or consumers. */
template <typename Tile>
class HandedWorks {
public:
    __device__ __forceinline__ explicit HandedWorks(Sm90Shared<Tile> &shared) : shared_(shared) {}

    __device__ __forceinline__ bool next(Sm90Work &work) {
        work = next_work(shared_, slot_);
        if (work.group < 0) return false;
        release_work(shared_, slot_);
        return true;
    }

private:
    Sm90Shared<Tile> &shared_;
    RingPosition<Tile::kTileSlots> slot_;
};

/* ---- producer warps ---- */

/* What one thread needs to copy steps of tiles to stages that are free. Only the tokens that there are: the rest of a
 * stage keeps what it held, and so do sums that nobody stores. */
template <typename Tile>
struct TokenCopies {
    const CUtensorMap &map_weights, &map_tokens;
    const GemmSm90Args &args;
    uint8_t *stages;
    uint64_t *full;
    int rank; /* in the cluster, of which a pair may be a part */
    uint64_t once;

    __device__ __forceinline__ TokenCopies(Sm90Shared<Tile> &shared, uint8_t *stages, const CUtensorMap &map_weights,
                                           const CUtensorMap &map_tokens, const GemmSm90Args &args, int rank)
        : map_weights(map_weights),
          map_tokens(map_tokens),
          args(args),
          stages(stages),
          full(shared.full),
          rank(rank),
          once(ptx::l2_evict_first()) {}

    /* What the block copies for itself. */
    __device__ __forceinline__ void copy_own(const Sm90Work &work, int step, int slot) const {
        const int weight_bytes = work.rows > 0 ? Tile::kWeightBytes : 0;
        const int k = work.k_begin + step * kSm90StepBytes;
        ptx::mbarrier_arrive_expect_tx(full + slot, weight_bytes + boxes_of(work) * args.box_tokens * kSm90StepBytes);
        if (weight_bytes > 0) copy_weights(work, k, slot);
        if constexpr (Tile::kCluster == 1) copy_tokens(work, k, slot);
    }

    /* And for both blocks of a pair: half of the tokens. */
    __device__ __forceinline__ void copy_share(const Sm90Work &work, int step, int slot) const {
        if constexpr (Tile::kCluster > 1) copy_tokens(work, work.k_begin + step * kSm90StepBytes, slot);
    }

    /* The same for the first steps of the first tile, to slots of their own. */
    __device__ __forceinline__ void copy_own_steps(const Sm90Work &first, int steps) const {
        for (int step = 0; step < steps; ++step) copy_own(first, step, step);
    }

    __device__ __forceinline__ void copy_shared_steps(const Sm90Work &first, int steps) const {
        for (int step = 0; step < steps; ++step) copy_share(first, step, step);
    }

private:
    __device__ __forceinline__ int boxes_of(const Sm90Work &work) const {
        if (!has_one_group<Tile>(args)) return ceil_div(work.columns, Tile::kBoxTokensOfGroups);
        return work.columns > args.box_tokens ? Tile::kCluster : 1; /* one for each block */
    }

    __device__ __forceinline__ void copy_weights(const Sm90Work &work, int k, int slot) const {
        const int weight = args.b_grouped ? work.weight : 0;
#pragma unroll
        for (int row = 0; row < Tile::kWeightRows; row += kSm90WeightBox<Tile>) {
            uint8_t *const to = stages + slot * Tile::kStageBytes + row * kSm90StepBytes;
            const BoxPlace at = place_of_box<!Tile::kWeightLines>(k, work.first_row + row);
            if (args.read_once)
                ptx::tma_load_3d(to, &map_weights, full + slot, at.x, at.y, weight, once);
            else
                ptx::tma_load_3d(to, &map_weights, full + slot, at.x, at.y, weight);
        }
    }

    __device__ __forceinline__ void copy_tokens(const Sm90Work &work, int k, int slot) const {
        constexpr int kAll = (1 << Tile::kCluster) - 1;
        uint8_t *const tokens = stages + slot * Tile::kStageBytes + Tile::kWeightBytes;
        const auto pair = static_cast<uint16_t>(kAll << rank / Tile::kCluster * Tile::kCluster);
        const int boxes = boxes_of(work), group = args.a_grouped ? work.group : 0;
#pragma unroll 1
        for (int box = rank % Tile::kCluster; box < boxes; box += Tile::kCluster) {
            uint8_t *to = tokens + box * args.box_tokens * kSm90StepBytes;
            const int token = work.first_column + box * args.box_tokens;
            if constexpr (Tile::kCluster == 1)
                ptx::tma_load_3d(to, &map_tokens, full + slot, k, token, group);
            else
                ptx::tma_load_3d_multicast(to, &map_tokens, full + slot, k, token, group, pair);
        }
    }
};

/* `early`: steps of the first tile that have been copied. */
template <typename Tile, typename Works>
__device__ __forceinline__ void produce_tokens(Sm90Shared<Tile> &shared, const TokenCopies<Tile> &copies, Works &works,
                                               int early) {
    const bool leads = ptx::elect();
    Sm90Work work;
    RingPosition<Tile::kStages> at = position_after<Tile::kStages>(early);
    for (; works.next(work); early = 0) {
        const int steps = steps_of(work);
        for (int step = early; step < steps && leads; ++step, at.advance()) {
            ptx::mbarrier_wait_parity(&shared.empty[at.slot], at.parity ^ 1);
            copies.copy_own(work, step, at.slot);
            copies.copy_share(work, step, at.slot);
        }
        __syncwarp();
    }
    /* The block stays until the other one of its pair has handed back what it read here. */
    if constexpr (Tile::kCluster > 1)
        for (int i = 0; i < Tile::kStages && leads; ++i, at.advance())
            ptx::mbarrier_wait_parity(&shared.empty[at.slot], at.parity ^ 1);
}

/* ---- scales ---- */

/* Those of blocks. Tokens that there are no more of keep what a stage held: their sums are not stored. */
template <typename Tile, typename Works>
__device__ __forceinline__ void produce_token_scales(TokenShared<Tile> &shared, const GemmSm90Args &args,
                                                     Works &works) {
    Sm90Work work;
    RingPosition<Tile::kStages> at;
    while (works.next(work)) {
        const TileScaleRows rows =
            scale_rows_of(args, work, work.first_column, work.columns, work.first_row, work.rows);
        copy_scales(shared.rings, shared.scales, rows, steps_of(work), place_of_token, at);
    }
    await_copies();
}

template <typename Math, int kCount, typename Tile>
__device__ __forceinline__ auto token_scales(TokenShared<Tile> &shared) {
    if constexpr (Math::kScaled)
        return TokenScales<Tile, kCount>{shared.rings, shared.scales};
    else
        return NoScales{};
}

/* What sums are multiplied by, and a bias: of a token and of a row of weights to each thread, and what values of an fp8
 * output are multiplied by. Where all are alike, and there is no bias, that is in the factor of the sums, if they become
 * that and no more. It is asked for before the tile is multiplied and, where not all are alike, kept for all threads
 * after that. */
struct TileScales {
    float token, weight, bias, out;
    float later_token; /* as many behind it as there are threads, of tiles with more tokens than those */
};

template <typename Tile>
__device__ __forceinline__ TileScales load_scales(const GemmSm90Args &args, const Sm90Work &work) {
    const Epilogue &to = args.epilogue;
    const int thread = end_thread<Tile>();
    TileScales scales = {1.0f, 1.0f, 0.0f, 1.0f, 1.0f};
    if ((args.alike || thread < work.columns) && !to.block_scaled)
        scales.token = scale_at(to.scale_a, work.group, work.first_column + thread);
    if constexpr (Tile::kBlockN > Tile::kEndThreads) {
        const int later = thread + Tile::kEndThreads;
        if (later < work.columns && !to.block_scaled)
            scales.later_token = scale_at(to.scale_a, work.group, work.first_column + later);
    }
    if (args.alike || thread < work.rows) {
        const int64_t column = work.first_row + thread;
        if (!to.block_scaled) scales.weight = scale_at(to.scale_b, work.weight, column);
        if (to.bias) scales.bias = load_as_float(to.bias, work.weight * to.bias_step + column, to.bias_dtype);
    }
    if (args.alike && Tile::kGated == 1)
        scales.weight = over_scale_out<Tile>(scales.weight, to);
    else
        scales.out = inverse_scale_out<Tile>(to);
    return scales;
}

template <typename Tile>
__device__ __forceinline__ void keep_scales(EndFactors<Tile> &to, const TileScales &scales, float alpha) {
    const int thread = end_thread<Tile>();
    if (thread < Tile::kBlockN) to.token_scale[thread] = scales.token;
    if constexpr (Tile::kBlockN > Tile::kEndThreads)
        if (thread + Tile::kEndThreads < Tile::kBlockN) to.token_scale[thread + Tile::kEndThreads] = scales.later_token;
    if (thread >= Tile::kEndRows) return;
    to.weight_scale[thread] = alpha * scales.weight;
    to.bias[thread] = scales.bias;
}

/* ---- host ---- */

/* Tokens of a tile and of a copy, once tiles are counted. Of one group the blocks of a pair, or a single one, copy a
 * tile's at once, and no more than there are: rows beyond the last one of a matrix, which become 0, take the copy engine
 * twice as long as others. Halves of a pair begin at a swizzle atom. */
template <typename Tile>
void set_tokens(GemmSm90Args &args) {
    args.box_tokens = Tile::kBoxTokensOfGroups;
    if (args.space.major.grouping != Grouping::kNone) return;
    const int64_t length = args.space.major.length, tiles = args.space.major_tiles;
    const int64_t longest = ceil_div<int64_t>(length, tiles), half = ceil_div<int64_t>(longest, 16) * 8;
    args.tile_tokens = static_cast<int32_t>(length / tiles);
    args.box_tokens = static_cast<int32_t>(Tile::kCluster == 1 ? longest : half);
}

}  // namespace flexgemm
