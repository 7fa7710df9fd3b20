/*
 * Products of few rows on Hopper: decoding. Their time is that of reading the weights once.
 *
 * The operands change places (gemm_tokens_sm90.cuh): a tile has 64 or 128 rows of B (weights) and 8 to 224 rows of A
 * (tokens). With 64 rows of weights twice as many blocks have half of the sums to exchange and store, and fill the
 * multiprocessors better; with 128 each reads less of the tokens. Roles of warps are those of gemm_sm90.cuh.
 *
 * Where there are fewer tiles than multiprocessors, the blocks of a cluster share a tile: each multiplies a range of K
 * and sends its sums to the blocks that add them, 8 tokens to a block, in the order of the blocks. One tile is all that
 * such a cluster has. What such a product takes beside reading is latency: the sums travel as they are in registers and
 * their arrival is counted by a barrier, which takes neither a memory barrier nor a meeting of the cluster.
 *
 * Many tokens are read from L2 as fast as it goes, and weights come no faster than what it has left. Pairs of blocks
 * with neighbouring rows of weights then read half of the tokens each, for both.
 *
 * Some hundred rows of A are several rows of tiles, of about the same size, where that keeps more multiprocessors busy
 * than tiles of gemm_sm90.cuh. Of usual outputs there are tiles for any number of rows, 16 apart: what does not fit
 * multiplies, and has shared memory move, what nobody stores.
 */
#pragma once

#include "../plan.h"
#include "gemm_token_output_sm90.cuh"

namespace flexgemm {

/* The most blocks that share a tile: of more tokens fewer, whose sums would leave room for too few stages. */
constexpr int most_sharing(int tokens, int of_weights) {
    if (tokens <= FG_ROWS_OF_SHARED / of_weights) return FG_MOST_SHARING;
    return of_weights == 1 && tokens <= FG_ROWS_OF_HALVED ? 2 : 1;
}

/* Units of 8 tokens that a block can have to receive of all blocks that share a tile, of which there are so many at
 * most. */
constexpr int received_units(int units, int most_split) {
    int most = 0;
    for (int split = 2; split <= most_split; ++split) {
        const int received = split * ((units + split - 1) / split);
        if (received > most) most = received;
    }
    return most;
}

template <typename Math, int kTokens, int kPair, int kOfWeights, typename Use>
struct Sm90DecodeTile : Sm90TokenTile<Math, kTokens, kPair, kOfWeights, Use> {
    using Base = Sm90TokenTile<Math, kTokens, kPair, kOfWeights, Use>;
    /* Tokens of one copy. Groups of which most have fewer tokens than a tile should not read what they do not have. */
    static constexpr int kBoxTokensOfGroups = kTokens % 16 ? 8 : kTokens <= 64 ? 16 : 32;
    static constexpr int kUnits = kTokens / 8, kUnitFloats = Base::kConsumers * 4;
    static constexpr int kMostSharing = most_sharing(kTokens, kOfWeights);
    static constexpr int kReceivedBytes = received_units(kUnits, kMostSharing) * kUnitFloats * 4;
    /* Of the sums of a tile: as they are to be stored, 16 tokens at a time, or as they are. */
    static constexpr int kKeptBytes = (kTokens + 15) / 16 * 16 * Base::kTokenPitch;
    static constexpr int kSumBytes = Use::kUsual ? kKeptBytes : kTokens * Base::kSumPitch * 4;
    static constexpr int kExchangeBytes = kReceivedBytes > kSumBytes ? kReceivedBytes : kSumBytes;
    static constexpr int kMostStages = (224 * 1024 - kExchangeBytes) / (Base::kStageBytes + Base::kScaleBytes);
    /* With more under way memory is not read faster, but less evenly, and some blocks end late. */
    static constexpr int kWanted = kTokens > 64 ? 10 : kOfWeights == 1 ? 8 : kTokens > 32 ? 5 : 6;
    static constexpr int kStages = kMostStages < kWanted ? kMostStages : kWanted;
    static constexpr int kSharedBytes = kStages * Base::kStageBytes + kExchangeBytes + 1024;
    /* Of the output, to a thread. */
    static constexpr int kChunksAtOnce = kTokens < 64 ? ceil_div(kTokens, Base::kTokensAtOnce) : 4;
    /* Two warpgroups of consumers have fewer registers at launch than sums of many tokens take. */
    static constexpr bool kDealsRegisters = kOfWeights == 2 && kTokens > 64;
    static_assert(kKeptBytes <= kExchangeBytes, "all kinds of sums find room");
    static_assert(kSumBytes <= kStages * Base::kStageBytes, "sums of a shared tile take the place of its stages");
};

/* The blocks of a pair are neighbours in a cluster that may have more of them. */
template <typename Math, int kTokens, int kPair, int kOfWeights, typename Use>
__device__ __forceinline__ void hand_back(Sm90Shared<Sm90DecodeTile<Math, kTokens, kPair, kOfWeights, Use>> &shared,
                                          int slot) {
    const uint32_t lane = threadIdx.x % 32;
    if (kPair == 1 && lane == 0) ptx::mbarrier_arrive(&shared.empty[slot]);
    if (kPair > 1 && lane < kPair)
        ptx::mbarrier_arrive_remote(&shared.empty[slot], ptx::cluster_block_rank() / kPair * kPair + lane);
}

/* ---- tiles ---- */

/* The block's tiles, to a warp of its producer or consumers. Where those of one group are, everybody works out, the
 * first one before the block has met. */
template <typename Tile>
class DecodeWorks {
public:
    __device__ __forceinline__ DecodeWorks(Sm90Shared<Tile> &shared, const GemmSm90Args &args, int rank)
        : handed_(shared), args_(args), rank_(rank), tile_(blockIdx.y), one_group_(has_one_group<Tile>(args)) {
        if (one_group_) next_ = token_work_of_one_group<Tile>(args, rank, tile_);
    }

    /* The first tile, and how many steps of it the ring has room for: none where it is not known yet. */
    __device__ __forceinline__ const Sm90Work &first() const { return next_; }
    __device__ __forceinline__ int first_steps() const { return one_group_ ? min(steps_of(next_), Tile::kStages) : 0; }

    __device__ __forceinline__ bool next(Sm90Work &work) {
        if (!one_group_) return handed_.next(work);
        if (tile_ >= args_.space.major_tiles * args_.space.minor_tiles) return false;
        if (tile_ != blockIdx.y) next_ = token_work_of_one_group<Tile>(args_, rank_, tile_);
        work = next_;
        tile_ += gridDim.y;
        return true;
    }

private:
    HandedWorks<Tile> handed_;
    const GemmSm90Args &args_;
    const int rank_;
    uint32_t tile_; /* of one group: the next one */
    const bool one_group_;
    Sm90Work next_; /* of one group; the one before, until it is asked for */
};

/* ---- consumer warpgroups ---- */

/* Sends each unit to the block that it belongs to, which has every `split`-th from unit `part` on: the sums of part p
 * of K go to the p-th place of the unit there. Its own ones a thread keeps, for itself. */
template <typename Tile, int kCount>
__device__ __forceinline__ void send_sums(const float (&sum)[kCount], TokenShared<Tile> &shared, float *exchange,
                                          const Sm90Work &work, int rank, int split) {
    const int thread = threadIdx.x - ptx::kWarpgroup, part = rank / Tile::kCluster;
    float *place = exchange + part * Tile::kUnitFloats + thread * 4;
    int owner = 0;
#pragma unroll
    for (int unit = 0; unit < Tile::kUnits; ++unit) {
        if (unit * 8 >= work.columns) break;
        const float four[4] = {sum[unit * 4], sum[unit * 4 + 1], sum[unit * 4 + 2], sum[unit * 4 + 3]};
        if (owner == part)
            *reinterpret_cast<float4 *>(place) = {four[0], four[1], four[2], four[3]};
        else
            ptx::store_remote(place, four, &shared.received,
                              static_cast<uint32_t>(owner * Tile::kCluster + rank % Tile::kCluster));
        if (++owner == split) owner = 0, place += split * Tile::kUnitFloats;
    }
}

/* How many units the block adds. */
__device__ __forceinline__ int own_units(const Sm90Work &work, int part, int split) {
    int units = 0;
#pragma unroll 1
    for (int unit = part; unit * 8 < work.columns; unit += split) ++units;
    return units;
}

/* Adds what the blocks sent, in their order: the block's own units, without gaps. */
template <typename Tile, int kCount>
__device__ __forceinline__ void add_received(float (&sum)[kCount], const float *exchange, int units, int split) {
    const float *place = exchange + (threadIdx.x - ptx::kWarpgroup) * 4;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] = 0.0f;
    if (units == 0) return;
#pragma unroll 1
    for (int block = 0; block < split; ++block, place += Tile::kUnitFloats) {
        /* All at once, and the last one again for those that there are not. */
        float4 part[kCount / 4];
#pragma unroll
        for (int unit = 0; unit < kCount / 4; ++unit)
            part[unit] = *reinterpret_cast<const float4 *>(place + min(unit, units - 1) * split * Tile::kUnitFloats);
#pragma unroll
        for (int unit = 0; unit < kCount / 4; ++unit) {
            float *to = &sum[unit * 4];
            to[0] += part[unit].x, to[1] += part[unit].y, to[2] += part[unit].z, to[3] += part[unit].w;
        }
    }
}

template <typename Math, typename Tile>
__device__ __forceinline__ void consume_decode(TokenShared<Tile> &shared, uint8_t *stages, float *exchange,
                                               const GemmSm90Args &args, DecodeWorks<Tile> &works, int rank) {
    const int warpgroup = threadIdx.x / ptx::kWarpgroup - 1;
    Sm90Work work;
    RingPosition<Tile::kStages> at;
    const StageDescriptors stage = {stages, ptx::wgmma_descriptor(stages + warpgroup * Tile::kBytesA),
                                    ptx::wgmma_descriptor(stages + Tile::kWeightBytes), warpgroup};
    constexpr bool kTurns = Tile::takes_turns(Tile::kBlockN);
    if constexpr (kTurns) begin_turns<Tile>(warpgroup);
    while (works.next(work)) {
        const TileScales tile_scales = load_scales<Tile>(args, work);
        const Depth depth = {steps_of(work), 0, 0, 0};
        const int split = args.split, part = rank / Tile::kCluster;
        int units = 0;
        if (split > 1) {
            units = own_units(work, part, split);
            const int warpgroups = work.rows > 0 ? ceil_div(work.rows, Tile::kWarpgroupRows) : 0;
            if (threadIdx.x == ptx::kWarpgroup)
                ptx::mbarrier_arrive_expect_tx(&shared.received,
                                               units * (split - 1) * warpgroups * ptx::kWarpgroup * 16);
        }
        const TokenOutput<Tile, Tile::kChunksAtOnce> output(args, work, part);
        const bool has_rows = work.rows > warpgroup * Tile::kWarpgroupRows;
        constexpr int kCount = Tile::kBlockN / 2;
        TileSums<Tile::kBlockN> sum;
        if (has_rows) {
            auto scales = token_scales<Math, kCount>(shared);
            multiply_tile<Math>(sum, shared.rings, stage, depth, scales, at);
            if (split > 1) send_sums<Tile>(sum.last, shared, exchange, work, rank, split);
        } else {
            skip_tile(shared.rings, stage, depth, at, kTurns ? 1 : 0);
        }
        if (!args.alike) keep_scales(shared.ends[0], tile_scales, args.epilogue.alpha);
        if (!args.alike || split > 1) ptx::named_barrier(1, Tile::kConsumers);
        uint8_t *rows = split > 1 ? stages : reinterpret_cast<uint8_t *>(exchange); /* the stages have been read */
        const auto keep = [&](const auto &sums, int count, const auto &factors) {
            keep_plain<Math, Tile>(sums, factors, tile_scales, rows, count);
        };
        const auto finish = [&](const auto &sums, int count) {
            constexpr int kUnits = sizeof sums / sizeof *sums / 4;
            if (args.alike)
                keep(sums, count, OneFactor{tile_scales.token * (args.epilogue.alpha * tile_scales.weight)});
            else if (is_plain<Tile>(args))
                keep(sums, count, load_factors<kUnits>(shared.ends[0], split, part));
            else
                keep_floats<Tile>(sums, reinterpret_cast<float *>(rows), count);
        };
        if (has_rows && split > 1) {
            float own[(Tile::kUnits + 1) / 2 * 4]; /* half of the units, where two blocks share */
            ptx::mbarrier_wait_cluster(&shared.received, 0);
            add_received<Tile>(own, exchange, units, split);
            finish(own, units);
        } else if (has_rows) {
            finish(sum.last, Tile::kUnits);
        }
        ptx::named_barrier(1, Tile::kConsumers);
        if (is_plain<Tile>(args))
            output.copy(rows);
        else
            finish_tokens<4>(shared.ends[0], args, work, reinterpret_cast<const float *>(rows), part);
        ptx::named_barrier(1, Tile::kConsumers); /* before the sums and scales of the next tile */
    }
    if constexpr (kTurns) end_turns<Tile>(warpgroup);
}

/* ---- kernel ---- */

template <typename Math, typename Tile>
__device__ __forceinline__ void decode_body(const CUtensorMap &map_weights, const CUtensorMap &map_tokens,
                                            const GemmSm90Args &args) {
    extern __shared__ uint8_t dynamic[];
    __shared__ TokenShared<Tile> shared;
    static_assert(Tile::kSharedBytes + sizeof shared <= 227 * 1024, "shared memory of one block");
    uint8_t *stages = dynamic + (-ptx::shared_address(dynamic) & 1023u);
    float *exchange = reinterpret_cast<float *>(stages + Tile::kStages * Tile::kStageBytes);
    const int warp = threadIdx.x / 32, rank = static_cast<int>(blockIdx.x);

    DecodeWorks<Tile> works(shared.rings, args, rank);
    const TokenCopies<Tile> copies(shared.rings, stages, map_weights, map_tokens, args, rank);
    const int early = works.first_steps();
    const bool in_cluster = Tile::kCluster > 1 || args.split > 1;
    begin_block(
        map_weights, map_tokens, in_cluster, Tile::kThreads, !has_one_group<Tile>(args),
        [&] {
            ptx::mbarrier_init(&shared.received, 1);
            init_rings(shared.rings);
        },
        [&] { copies.copy_own_steps(works.first(), early); }, [] {},
        [&] { copies.copy_shared_steps(works.first(), early); });
    if (warp < 4) {
        if constexpr (Tile::kDealsRegisters) ptx::setmaxnreg_dec<Tile::kProducerRegisters>();
        if (warp == 0) {
            produce_tokens(shared.rings, copies, works, early);
        } else if (warp == 1) {
            if (!has_one_group<Tile>(args)) schedule_tokens(shared.rings, args, rank, in_cluster);
        } else {
            if constexpr (Math::kScaled) produce_token_scales(shared, args, works);
        }
    } else {
        if constexpr (Tile::kDealsRegisters) ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
        consume_decode<Math, Tile>(shared, stages, exchange, args, works, rank);
    }
}

template <typename Math, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fp8_gemm_or_fp8_wgrad_gemm_decode_sm90_kernel(const __grid_constant__ CUtensorMap map_weights,
                                                  const __grid_constant__ CUtensorMap map_tokens,
                                                  const __grid_constant__ GemmSm90Args args) {
    decode_body<Math, Tile>(map_weights, map_tokens, args);
}

template <typename Math, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    half_gemm_decode_sm90_kernel(const __grid_constant__ CUtensorMap map_weights,
                                 const __grid_constant__ CUtensorMap map_tokens,
                                 const __grid_constant__ GemmSm90Args args) {
    decode_body<Math, Tile>(map_weights, map_tokens, args);
}

}  // namespace flexgemm
