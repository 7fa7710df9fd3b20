/*
 * Products of few rows on Hopper: decoding. Their time is that of reading the weights once.
 *
 * The operands of gemm_sm90.cuh change places: 128 rows of B (weights) are what wgmma multiplies 64 at a time, and 8 to
 * 128 rows of A (tokens) are its n, so that little is multiplied in vain and a stage is mostly weights.
 * Roles of warps are those of gemm_sm90.cuh.
 *
 * Where there are fewer tiles than multiprocessors, the blocks of a cluster share a tile: each multiplies a range of K
 * and sends its sums to the blocks that add them, 8 tokens to a block, in the order of the blocks. One tile is all that
 * such a cluster has. What such a product takes beside reading is latency: the sums travel as they are in registers and
 * their arrival is counted by a barrier, which takes neither a memory barrier nor a meeting of the cluster.
 *
 * Many tokens are read from L2 as fast as it goes, and weights come no faster than what it has left. Pairs of blocks
 * with neighbouring rows of weights then read half of the tokens each, for both.
 */
#pragma once

#include "gemm_mainloop_sm90.cuh"

namespace flexgemm {

constexpr int kMaxDecodeSplit = 8;

/* Units of 8 tokens that a block can have to receive of all blocks that share a tile. */
constexpr int received_units(int units) {
    int most = 0;
    for (int split = 1; split <= kMaxDecodeSplit; ++split) {
        const int received = split * ((units + split - 1) / split);
        if (received > most) most = received;
    }
    return most;
}

template <int kTokens, int kPair>
struct Sm90DecodeTile {
    static constexpr int kBlockN = kTokens;
    static constexpr int kCluster = kPair; /* blocks that copy for each other */
    static constexpr int kWeights = kPair * kSm90BlockM;
    static constexpr int kStages = kTokens <= 24 ? 10 : kTokens == 32 ? 9 : kTokens == 64 ? 7 : 4;
    static constexpr int kWarpgroups = 2, kWarpgroupRows = 64;
    static constexpr int kThreads = 128 * (1 + kWarpgroups), kConsumers = 128 * kWarpgroups;
    static constexpr int kBytesA = kWarpgroupRows * kSm90StepBytes;
    static constexpr int kBytesB = kTokens * kSm90StepBytes;
    static constexpr int kStageBytes = kWarpgroups * kBytesA + kBytesB;
    /* Tokens of one copy. Groups of which most have fewer tokens than a tile should not read what they do not have. */
    static constexpr int kBoxTokens = kTokens / kPair;
    static constexpr int kBoxTokensOfGroups = kTokens % 16 ? 8 : kTokens <= 64 ? 16 : 32;
    static constexpr int kSumPitch = kSm90BlockM + 4; /* floats of a token: no two of a warp's stores meet in a bank */
    static constexpr int kUnits = kTokens / 8, kUnitFloats = kConsumers * 4;
    static constexpr int kReceivedBytes = received_units(kUnits) * kUnitFloats * 4;
    static constexpr int kSumBytes = kTokens * kSumPitch * 4;
    static constexpr int kExchangeBytes = kReceivedBytes > kSumBytes ? kReceivedBytes : kSumBytes;
    static constexpr int kSharedBytes = kStages * kStageBytes + kExchangeBytes + 1024;
    static constexpr int kTileSlots = 4;
    static_assert(kStageBytes % 1024 == 0, "stages start at swizzle atoms");
    static_assert(kSumBytes <= kStages * kStageBytes, "sums of a shared tile take the place of its stages");
};

/* The blocks of a pair are neighbours in a cluster that may have more of them. */
template <int kTokens, int kPair>
__device__ __forceinline__ void hand_back(Sm90Shared<Sm90DecodeTile<kTokens, kPair>> &shared, int slot) {
    const uint32_t lane = threadIdx.x % 32;
    if (kPair == 1 && lane == 0) ptx::mbarrier_arrive(&shared.empty[slot]);
    if (kPair > 1 && lane < kPair)
        ptx::mbarrier_arrive_remote(&shared.empty[slot], ptx::cluster_block_rank() / kPair * kPair + lane);
}

template <typename Tile>
struct DecodeShared {
    Sm90Shared<Tile> rings;
    uint64_t received; /* sums of all blocks that share the tile */
    float token_scale[Tile::kBlockN];
    alignas(16) float weight_scale[kSm90BlockM];
    alignas(16) float bias[kSm90BlockM];
    static_assert(Tile::kSharedBytes + 2048 <= 227 * 1024, "shared memory of one block");
};

/* ---- tiles ---- */

/* Rows of a work are weights, columns are tokens; K is the block's part of it. `rank` is that in the cluster: blocks of
 * a pair, which share a part, are neighbours. Nothing is divided here: a product may last no longer than fifty
 * divisions. */
template <typename Tile>
__device__ __forceinline__ Sm90Work decode_work(const GemmSm90Args &args, int rank, const OutputTile &tile) {
    const int64_t row = tile.column + rank % Tile::kCluster * kSm90BlockM;
    const int64_t rows = tile.column_end - row, columns = tile.row_end - tile.row;
    const int part = rank / Tile::kCluster, steps = args.part_steps + (part < args.longer_parts);
    const int begin = (part * args.part_steps + min(part, args.longer_parts)) * kSm90StepBytes;
    const int k_bytes = min(steps * kSm90StepBytes, static_cast<int>(args.space.k_bytes) - begin);
    return {static_cast<int32_t>(row),
            rows < kSm90BlockM ? static_cast<int32_t>(rows) : kSm90BlockM,
            static_cast<int32_t>(tile.row),
            columns < Tile::kBlockN ? static_cast<int32_t>(columns) : Tile::kBlockN,
            static_cast<int32_t>(tile.group),
            static_cast<int32_t>(tile.weight),
            begin,
            k_bytes};
}

/* The tokens of one group that are one tile: who needs a tile knows where it is. Else a warp looks for them: that takes
 * longer than many of these products. */
__device__ __forceinline__ bool is_one_row_of_tiles(const TileSpace &space) {
    return space.major.grouping == Grouping::kNone && space.major_tiles == 1;
}

template <typename Tile>
__device__ __forceinline__ void schedule_decode(Sm90Shared<Tile> &shared, const GemmSm90Args &args, int rank) {
    if (is_one_row_of_tiles(args.space)) return;
    RingPosition<Tile::kTileSlots> at;
    TileWalk<Tile::kBlockN, Tile::kWeights> walk(args.space, static_cast<int>(blockIdx.y), static_cast<int>(gridDim.y));
    OutputTile tile;
    while (walk.next(tile)) hand_over(shared, at, decode_work<Tile>(args, rank, tile));
    hand_over(shared, at, no_more_work());
}

/* The block's tiles, to a warp of its producer or consumers. Where the first of one row of tiles is, is known before
 * the block has met: between that and the first copy there should be little to do. */
template <typename Tile>
class DecodeWorks {
public:
    __device__ __forceinline__ DecodeWorks(Sm90Shared<Tile> &shared, const GemmSm90Args &args, int rank)
        : shared_(shared), stride_(static_cast<int>(gridDim.y) * Tile::kWeights) {
        const TileSpace &space = args.space;
        one_row_ = is_one_row_of_tiles(space);
        if (!one_row_) return;
        const int column = static_cast<int>(blockIdx.y) * Tile::kWeights;
        next_ =
            decode_work<Tile>(args, rank, {0, space.major.length, column, space.minor_length, 0, 0, 0, space.k_bytes});
        length_ = static_cast<int>(space.minor_length);
        left_ = length_ - column;
    }

    /* Asks L2 for the weights of the first steps, a line to a thread. It takes a microsecond until there are barriers
     * for copies to arrive at, and much of another until the first copy has found its way to memory. L2 is told early
     * without harm: what earlier kernels have yet to write, they write there. */
    __device__ __forceinline__ void ask_for_weights(const GemmSm90Args &args) const {
        const int row = threadIdx.x % kSm90BlockM, k = threadIdx.x / kSm90BlockM * kSm90StepBytes;
        if (one_row_ && row < next_.rows && k < next_.k_bytes)
            ptx::prefetch_l2(args.weights + (next_.first_row + row) * args.weight_pitch + next_.k_begin + k);
    }

    __device__ __forceinline__ bool next(Sm90Work &work) {
        if (one_row_) {
            if (left_ <= 0) return false;
            work = next_;
            left_ -= stride_;
            next_.first_row += stride_;
            next_.rows = min(length_ - next_.first_row, kSm90BlockM);
            return true;
        }
        work = next_work(shared_, slot_);
        if (work.group < 0) return false;
        release_work(shared_, slot_);
        return true;
    }

private:
    Sm90Shared<Tile> &shared_;
    const int stride_; /* rows of weights from one tile to the next */
    bool one_row_;
    int length_, left_; /* rows of weights, and those from the next tile of the pair on */
    Sm90Work next_;
    RingPosition<Tile::kTileSlots> slot_;
};

/* ---- producer warp ---- */

/* Only the tokens that there are: the rest of a stage keeps what it held, and so do sums that nobody stores. */
template <typename Tile>
__device__ __forceinline__ void produce_decode(Sm90Shared<Tile> &shared, uint8_t *stages,
                                               const CUtensorMap &map_weights, const CUtensorMap &map_tokens,
                                               const GemmSm90Args &args, DecodeWorks<Tile> &works, int rank) {
    const bool grouped = args.space.major.grouping != Grouping::kNone;
    const int box_tokens = grouped ? Tile::kBoxTokensOfGroups : Tile::kBoxTokens;
    const int box_bytes = box_tokens * kSm90StepBytes;
    const auto pair = static_cast<uint16_t>(((1 << Tile::kCluster) - 1) << rank / Tile::kCluster * Tile::kCluster);
    const bool read_once = is_one_row_of_tiles(args.space); /* those of a group may be for another tile too */
    const uint64_t once = ptx::l2_evict_first();
    Sm90Work work;
    RingPosition<Tile::kStages> at;
    while (works.next(work)) {
        const int steps = steps_of(work);
        const int token_boxes =
            grouped ? ceil_div(work.columns, Tile::kBoxTokensOfGroups) : ceil_div(work.columns, Tile::kBoxTokens);
        const int weight_bytes = work.rows > 0 ? Tile::kWarpgroups * Tile::kBytesA : 0;
        const int group = args.a_grouped ? work.group : 0, weight = args.b_grouped ? work.weight : 0;
        for (int step = 0; step < steps; ++step, at.advance()) {
            ptx::mbarrier_wait_parity(&shared.empty[at.slot], at.parity ^ 1);
            __syncwarp(); /* as in hand_over */
            if (threadIdx.x % 32 == 0) {
                uint8_t *weights = stages + at.slot * Tile::kStageBytes;
                uint8_t *tokens = weights + Tile::kWarpgroups * Tile::kBytesA;
                uint64_t *full = &shared.full[at.slot];
                const int k = work.k_begin + step * kSm90StepBytes;
                ptx::mbarrier_arrive_expect_tx(full, weight_bytes + token_boxes * box_bytes);
                if (weight_bytes > 0 && read_once)
                    ptx::tma_load_3d(weights, &map_weights, full, k, work.first_row, weight, once);
                else if (weight_bytes > 0)
                    ptx::tma_load_3d(weights, &map_weights, full, k, work.first_row, weight);
#pragma unroll 1
                for (int box = rank % Tile::kCluster; box < token_boxes; box += Tile::kCluster) {
                    uint8_t *to = tokens + box * box_bytes;
                    const int token = work.first_column + box * box_tokens;
                    if constexpr (Tile::kCluster == 1)
                        ptx::tma_load_3d(to, &map_tokens, full, k, token, group);
                    else
                        ptx::tma_load_3d_multicast(to, &map_tokens, full, k, token, group, pair);
                }
            }
            __syncwarp();
        }
    }
    /* The block stays until the other one of its pair has handed back what it read here. */
    if constexpr (Tile::kCluster > 1)
        for (int i = 0; i < Tile::kStages; ++i, at.advance())
            ptx::mbarrier_wait_parity(&shared.empty[at.slot], at.parity ^ 1);
}

/* ---- consumer warpgroups ---- */

/* Scales of blocks where rows are weights, of one block, and columns tokens: sum i is token i / 4 * 8 + i % 2 of those
 * from the thread's first one on. Tokens that the group has no more of take the scale of its first. */
template <int kCount>
struct TokenScales {
    const float *tokens, *weights; /* of the next step */
    int64_t token_step;
    int first, count;
    struct Step {
        float value[kCount / 2];
        __device__ __forceinline__ float of(int i) const { return value[i / 4 * 2 + i % 2]; }
    };
    __device__ __forceinline__ void load(Step &scale) {
        const float of_weights = *weights++;
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
            const int token = first + i / 2 * 8 + i % 2;
            scale.value[i] = tokens[(token < count ? token : 0) * token_step] * of_weights;
        }
        ++tokens;
    }
};

template <int kCount>
__device__ __forceinline__ TokenScales<kCount> token_scales_of(const GemmSm90Args &args, const Sm90Work &work) {
    const Scale &a = args.epilogue.scale_a, &b = args.epilogue.scale_b;
    const int64_t block = work.k_begin / kSm90StepBytes;
    return {a.data + work.group * a.group_step + work.first_column * a.step + block,
            b.data + work.weight * b.group_step + work.first_row / FG_SCALE_BLOCK_SIZE * b.step + block, a.step,
            static_cast<int>(threadIdx.x % 4 * 2), work.columns};
}

/* What finish_tokens multiplies by and adds: of a token and of a row of weights to each thread. It is asked for before the
 * tile is multiplied and kept for all threads after that. */
struct TileScales {
    float token, weight, bias;
};

__device__ __forceinline__ TileScales load_scales(const GemmSm90Args &args, const Sm90Work &work) {
    const Epilogue &to = args.epilogue;
    const int thread = threadIdx.x - 128;
    TileScales scales = {1.0f, 1.0f, 0.0f};
    if (thread < work.columns && !to.block_scaled)
        scales.token = scale_at(to.scale_a, work.group, work.first_column + thread);
    if (thread < work.rows) {
        const int64_t column = work.first_row + thread;
        if (!to.block_scaled) scales.weight = scale_at(to.scale_b, work.weight, column);
        if (to.bias) scales.bias = load_as_float(to.bias, work.weight * to.bias_step + column, to.bias_dtype);
    }
    return scales;
}

template <typename Tile>
__device__ __forceinline__ void keep_scales(DecodeShared<Tile> &shared, const TileScales &scales, float alpha) {
    const int thread = threadIdx.x - 128;
    if (thread < Tile::kBlockN) shared.token_scale[thread] = scales.token;
    if (thread >= kSm90BlockM) return;
    shared.weight_scale[thread] = alpha * scales.weight;
    shared.bias[thread] = scales.bias;
}

/* Sums of 8 tokens, of which token `first` is the first, as part of rows of tokens. */
template <typename Tile>
__device__ __forceinline__ void keep_unit(const float (&sum)[4], int first, float *sums) {
    const int thread = threadIdx.x - 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[(first + lane % 4 * 2 + i % 2) * Tile::kSumPitch + row + i / 2 * 8] = sum[i];
}

/* Sends each unit to the block that it belongs to, which has every `split`-th from unit `part` on: the sums of part p of
 * K go to the p-th place of the unit there. Its own ones a thread keeps, for itself. */
template <typename Tile, int kCount>
__device__ __forceinline__ void send_sums(const float (&sum)[kCount], DecodeShared<Tile> &shared, float *exchange,
                                          const Sm90Work &work, int rank, int split) {
    const int thread = threadIdx.x - 128, part = rank / Tile::kCluster;
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

/* Adds what the blocks sent, in their order, into rows of tokens: the block's own, without gaps. */
template <typename Tile>
__device__ __forceinline__ void add_received(const float *exchange, float *sums, int units, int split) {
    constexpr int kMost = (Tile::kUnits + 1) / 2; /* units: half of them, where two blocks share */
    const float *place = exchange + (threadIdx.x - 128) * 4;
    float sum[kMost][4] = {};
#pragma unroll 1
    for (int block = 0; block < split; ++block, place += Tile::kUnitFloats) {
#pragma unroll
        for (int unit = 0; unit < kMost; ++unit) {
            if (unit >= units) break;
            const float4 part = *reinterpret_cast<const float4 *>(place + unit * split * Tile::kUnitFloats);
            sum[unit][0] += part.x, sum[unit][1] += part.y, sum[unit][2] += part.z, sum[unit][3] += part.w;
        }
    }
#pragma unroll
    for (int unit = 0; unit < kMost; ++unit)
        if (unit < units) keep_unit<Tile>(sum[unit], unit * 8, sums);
}

/* Four finished sums in 16 bits: what nearly all products want, and little code to fetch. */
__device__ __forceinline__ void store_halves(uint16_t *out, const float (&value)[4], fg_dtype dtype) {
    if (dtype == FG_FLOAT16)
        store_four<__half>(out, 0, value, 4, true);
    else
        store_four<__nv_bfloat16>(out, 0, value, 4, true);
}

/* Scales, biases and stores the block's tokens; a warp takes a token at a time. */
template <typename Tile>
__device__ __forceinline__ void finish_tokens(const DecodeShared<Tile> &shared, const GemmSm90Args &args,
                                              const Sm90Work &work, const float *sums, int part) {
    const Epilogue &to = args.epilogue;
    const int thread = threadIdx.x - 128, local_column = thread % 32 * 4, count = min(work.rows - local_column, 4);
    if (count <= 0) return;
    const float4 scale = *reinterpret_cast<const float4 *>(&shared.weight_scale[local_column]);
    const float4 bias = *reinterpret_cast<const float4 *>(&shared.bias[local_column]);
    const int64_t column = work.first_row + local_column;
    constexpr int kWarps = Tile::kConsumers / 32;
    const auto finished = [&](int i, int token, float (&value)[4]) {
        const float4 sum = *reinterpret_cast<const float4 *>(sums + i * Tile::kSumPitch + local_column);
        const float scale_a = shared.token_scale[token];
        value[0] = fmaf(sum.x, scale_a * scale.x, bias.x);
        value[1] = fmaf(sum.y, scale_a * scale.y, bias.y);
        value[2] = fmaf(sum.z, scale_a * scale.z, bias.z);
        value[3] = fmaf(sum.w, scale_a * scale.w, bias.w);
    };
    float value[4];
    if (args.plain && count == 4 && column % 4 == 0) {
        uint16_t *out = static_cast<uint16_t *>(to.out) + work.group * to.out_group_stride +
                        work.first_column * to.out_stride + column;
#pragma unroll 4
        for (int i = thread / 32;; i += kWarps) {
            const int token = (i / 8 * args.split + part) * 8 + i % 8;
            if (token >= work.columns) return;
            finished(i, token, value);
            store_halves(out + token * to.out_stride, value, to.out_dtype);
        }
    }
#pragma unroll 1
    for (int i = thread / 32;; i += kWarps) {
        const int token = (i / 8 * args.split + part) * 8 + i % 8;
        if (token >= work.columns) return;
        finished(i, token, value);
        activate_and_store(to, value, work.group, work.first_column + token, column, count);
    }
}

template <typename Math, typename Tile>
__device__ __forceinline__ void consume_decode(DecodeShared<Tile> &shared, uint8_t *stages, float *exchange,
                                               const GemmSm90Args &args, DecodeWorks<Tile> &works, int rank) {
    const int warpgroup = threadIdx.x / 128 - 1;
    Sm90Work work;
    RingPosition<Tile::kStages> at;
    const StageDescriptors stage = {stages, ptx::wgmma_descriptor(stages + warpgroup * Tile::kBytesA),
                                    ptx::wgmma_descriptor(stages + Tile::kWarpgroups * Tile::kBytesA)};
    while (works.next(work)) {
        const TileScales tile_scales = load_scales(args, work);
        const Depth depth = {steps_of(work), 0, 0, 0};
        const int split = args.split, part = rank / Tile::kCluster;
        int units = 0;
        if (split > 1) {
            units = own_units(work, part, split);
            const int warpgroups = work.rows > 0 ? ceil_div(work.rows, Tile::kWarpgroupRows) : 0;
            if (threadIdx.x == 128)
                ptx::mbarrier_arrive_expect_tx(&shared.received, units * (split - 1) * warpgroups * 128 * 16);
        }
        const bool has_rows = work.rows > warpgroup * Tile::kWarpgroupRows;
        if (has_rows) {
            constexpr int kCount = Tile::kBlockN / 2;
            auto scales = [&] {
                if constexpr (Math::kScaled)
                    return token_scales_of<kCount>(args, work);
                else
                    return NoScales{};
            }();
            float sum[1][kCount];
            multiply_tile<Math>(sum, shared.rings, stage, depth, scales, at);
            if (split > 1) {
                send_sums<Tile>(sum[0], shared, exchange, work, rank, split);
            } else {
#pragma unroll
                for (int unit = 0; unit < Tile::kUnits; ++unit)
                    keep_unit<Tile>(
                        {sum[0][unit * 4], sum[0][unit * 4 + 1], sum[0][unit * 4 + 2], sum[0][unit * 4 + 3]}, unit * 8,
                        exchange);
            }
        } else {
            skip_tile(shared.rings, stage, depth, at);
        }
        keep_scales(shared, tile_scales, args.epilogue.alpha);
        ptx::named_barrier(1, Tile::kConsumers);
        float *sums = exchange;
        if (split > 1) { /* the stages have been read: rows of tokens take their place */
            sums = reinterpret_cast<float *>(stages);
            if (has_rows) {
                ptx::mbarrier_wait_cluster(&shared.received, 0);
                add_received<Tile>(exchange, sums, units, split);
            }
            ptx::named_barrier(1, Tile::kConsumers);
        }
        finish_tokens(shared, args, work, sums, part);
        ptx::named_barrier(1, Tile::kConsumers); /* before the sums and scales of the next tile */
    }
}

/* ---- kernel ---- */

template <typename Math, typename Tile>
__device__ __forceinline__ void decode_body(const CUtensorMap &map_weights, const CUtensorMap &map_tokens,
                                            const GemmSm90Args &args) {
    extern __shared__ uint8_t dynamic[];
    __shared__ DecodeShared<Tile> shared;
    uint8_t *stages = dynamic + (-ptx::shared_address(dynamic) & 1023u);
    float *exchange = reinterpret_cast<float *>(stages + Tile::kStages * Tile::kStageBytes);
    const bool alone = Tile::kCluster == 1 && args.split == 1;
    const int warp = threadIdx.x / 32, rank = static_cast<int>(blockIdx.x);

    if (threadIdx.x == 0) {
        ptx::prefetch_tensor_map(&map_weights);
        ptx::prefetch_tensor_map(&map_tokens);
    }
    DecodeWorks<Tile> works(shared.rings, args, rank);
    works.ask_for_weights(args);
    if (threadIdx.x == 32) {
        ptx::mbarrier_init(&shared.received, 1);
        init_rings(shared.rings);
    }
    __syncthreads();
    if (!alone) ptx::cluster_arrive();
    ptx::wait_for_earlier_kernels();

    if (warp == 1) schedule_decode(shared.rings, args, rank);
    if (Tile::kCluster == 1 && warp == 0)
        produce_decode(shared.rings, stages, map_weights, map_tokens, args, works, rank);
    if (!alone) {
        __syncwarp();
        ptx::cluster_wait(); /* all blocks have their barriers */
    }
    if (Tile::kCluster > 1 && warp == 0)
        produce_decode(shared.rings, stages, map_weights, map_tokens, args, works, rank);
    else if (warp >= 4)
        consume_decode<Math, Tile>(shared, stages, exchange, args, works, rank);
}

template <typename Math, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fp8_gemm_decode_sm90_kernel(const __grid_constant__ CUtensorMap map_weights,
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
