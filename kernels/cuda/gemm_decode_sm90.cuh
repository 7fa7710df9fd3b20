/*
 * Products of few rows on Hopper: decoding. Their time is that of reading the weights once.
 *
 * The operands of gemm_sm90.cuh change places: 128 rows of B (weights) are what wgmma multiplies 64 at a time, and 8 to
 * 64 rows of A (tokens) are its n, so that next to nothing is multiplied in vain and a stage is nearly all weights.
 * Roles of warps are those of gemm_sm90.cuh.
 *
 * Where there are fewer tiles than multiprocessors, the blocks of a cluster share a tile: each multiplies a range of K.
 * Sums go to shared memory as rows of tokens; each block then adds the sums of all, in the order of the blocks, for its
 * share of the tokens. One tile is all that such a cluster has.
 */
#pragma once

#include "gemm_mainloop_sm90.cuh"

namespace flexgemm {

template <int kTokens>
struct Sm90DecodeTile {
    static constexpr int kBlockN = kTokens;
    static constexpr int kCluster = 1; /* blocks that copy for each other */
    static constexpr int kPromotedParts = 1, kPartials = 2, kChain = 2;
    static constexpr int kStages = kTokens <= 24 ? 10 : kTokens == 32 ? 9 : 7;
    static constexpr int kWarpgroups = 2, kWarpgroupRows = 64;
    static constexpr int kThreads = 128 * (1 + kWarpgroups);
    static constexpr int kBytesA = kWarpgroupRows * kSm90StepBytes;
    static constexpr int kBytesB = kTokens * kSm90StepBytes;
    static constexpr int kStageBytes = kWarpgroups * kBytesA + kBytesB;
    static constexpr int kSumPitch = kSm90BlockM + 4; /* floats of a token: no two of a warp's stores meet in a bank */
    static constexpr int kSharedBytes = kStages * kStageBytes + kTokens * kSumPitch * 4 + 1024;
    static constexpr int kTileSlots = 4;
    static_assert(kStageBytes % 1024 == 0, "stages start at swizzle atoms");
    static_assert(kSharedBytes + 1024 <= 227 * 1024, "shared memory of one block");
};

/* ---- scheduler and producer warps ---- */

/* Rows of a work are weights, columns are tokens; K is the block's range of it. */
template <typename Tile>
__device__ __forceinline__ void schedule_decode(Sm90Shared<Tile> &shared, const GemmSm90Args &args, int rank) {
    RingPosition<Tile::kTileSlots> at;
    TileWalk<Tile::kBlockN, kSm90BlockM> walk(args.space, blockIdx.x / args.split, gridDim.x / args.split);
    OutputTile tile;
    while (walk.next(tile)) {
        const int64_t rows = tile.column_end - tile.column, columns = tile.row_end - tile.row;
        const int k_bytes = static_cast<int>(tile.k_end - tile.k_begin), steps = ceil_div(k_bytes, kSm90StepBytes);
        const int begin = steps * rank / args.split * kSm90StepBytes;
        const int end = min(steps * (rank + 1) / args.split * kSm90StepBytes, k_bytes);
        const Sm90Work work = {static_cast<int32_t>(tile.column),
                               rows < kSm90BlockM ? static_cast<int32_t>(rows) : kSm90BlockM,
                               static_cast<int32_t>(tile.row),
                               columns < Tile::kBlockN ? static_cast<int32_t>(columns) : Tile::kBlockN,
                               static_cast<int32_t>(tile.group),
                               static_cast<int32_t>(tile.weight),
                               static_cast<int32_t>(tile.k_begin) + begin,
                               end > begin ? end - begin : 0};
        hand_over(shared, at, work);
    }
    hand_over(shared, at, no_more_work());
}

template <typename Tile>
__device__ __forceinline__ void produce_decode(Sm90Shared<Tile> &shared, uint8_t *stages,
                                               const CUtensorMap &map_weights, const CUtensorMap &map_tokens,
                                               const GemmSm90Args &args) {
    RingPosition<Tile::kTileSlots> slot;
    RingPosition<Tile::kStages> at;
    for (;;) {
        const Sm90Work work = next_work(shared, slot);
        if (work.group < 0) return;
        release_work(shared, slot);
        const int boxes = ceil_div(work.rows, Tile::kWarpgroupRows), steps = steps_of(work);
        const int group = args.a_grouped ? work.group : 0, weight = args.b_grouped ? work.weight : 0;
        for (int step = 0; step < steps; ++step, at.advance()) {
            ptx::mbarrier_wait_parity(&shared.empty[at.slot], at.parity ^ 1);
            __syncwarp(); /* as in hand_over */
            if (threadIdx.x % 32 == 0) {
                uint8_t *weights = stages + at.slot * Tile::kStageBytes;
                uint64_t *full = &shared.full[at.slot];
                const int k = work.k_begin + step * kSm90StepBytes;
                ptx::mbarrier_arrive_expect_tx(full, boxes * Tile::kBytesA + Tile::kBytesB);
                for (int box = 0; box < boxes; ++box)
                    ptx::tma_load_3d(weights + box * Tile::kBytesA, &map_weights, full, k,
                                     work.first_row + box * Tile::kWarpgroupRows, weight);
                ptx::tma_load_3d(weights + Tile::kWarpgroups * Tile::kBytesA, &map_tokens, full, k, work.first_column,
                                 group);
            }
            __syncwarp();
        }
    }
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

/* A warpgroup's 64 rows of weights, as part of rows of tokens. */
template <typename Tile, int kCount>
__device__ __forceinline__ void keep_sums(const float (&sum)[kCount], float *sums) {
    const int thread = threadIdx.x - 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
        sums[token * Tile::kSumPitch + row + i / 2 % 2 * 8] = sum[i];
    }
}

/* Adds the sums of all blocks of the cluster, for this block's share of the tokens; a warp takes a token at a time. */
template <typename Tile>
__device__ __forceinline__ void finish_tokens(const GemmSm90Args &args, const Sm90Work &work, const float *sums,
                                              int rank) {
    const Epilogue &to = args.epilogue;
    const int thread = threadIdx.x - 128, local_column = thread % 32 * 4, count = min(work.rows - local_column, 4);
    if (count <= 0) return;
    const int64_t column = work.first_row + local_column;
    float scale_b[4] = {}, bias[4] = {};
    for (int i = 0; i < count; ++i) {
        scale_b[i] = to.alpha * (to.block_scaled ? 1.0f : scale_at(to.scale_b, work.weight, column + i));
        if (to.bias) bias[i] = load_as_float(to.bias, work.weight * to.bias_step + column + i, to.bias_dtype);
    }
    constexpr int kWarps = 4 * Tile::kWarpgroups;
    for (int token = rank * kWarps + thread / 32; token < work.columns; token += args.split * kWarps) {
        const float *own = sums + token * Tile::kSumPitch + local_column;
        float value[4] = {};
        for (int block = 0; block < args.split; ++block) {
            const float4 part = args.split > 1 ? ptx::load_remote(own, static_cast<uint32_t>(block))
                                               : *reinterpret_cast<const float4 *>(own);
            value[0] += part.x, value[1] += part.y, value[2] += part.z, value[3] += part.w;
        }
        const int64_t row = work.first_column + token;
        const float scale_a = to.block_scaled ? 1.0f : scale_at(to.scale_a, work.group, row);
        for (int i = 0; i < 4; ++i) value[i] = fmaf(value[i], scale_a * scale_b[i], bias[i]);
        activate_and_store(to, value, work.group, row, column, count);
    }
}

/* Returns the tile that is still to be finished where blocks share one. */
template <typename Math, typename Tile>
__device__ __forceinline__ Sm90Work consume_decode(Sm90Shared<Tile> &shared, uint8_t *stages, float *sums,
                                                   const GemmSm90Args &args) {
    const int warpgroup = threadIdx.x / 128 - 1;
    RingPosition<Tile::kTileSlots> slot;
    RingPosition<Tile::kStages> at;
    const StageDescriptors stage = {stages, ptx::wgmma_descriptor(stages + warpgroup * Tile::kBytesA),
                                    ptx::wgmma_descriptor(stages + Tile::kWarpgroups * Tile::kBytesA)};
    Sm90Work shared_tile = no_more_work();
    for (;;) {
        const Sm90Work work = next_work(shared, slot);
        if (work.group < 0) return shared_tile;
        release_work(shared, slot);
        const Depth depth = {steps_of(work), 0, 0};
        if (work.rows > warpgroup * Tile::kWarpgroupRows) {
            constexpr int kCount = Tile::kBlockN / 2;
            auto scales = [&] {
                if constexpr (Math::kScaled)
                    return token_scales_of<kCount>(args, work);
                else
                    return NoScales{};
            }();
            float sum[1][kCount];
            multiply_tile<Math>(sum, shared, stage, depth, scales, 1, at);
            keep_sums<Tile>(sum[0], sums);
        } else {
            skip_tile(shared, stage, depth, at);
        }
        if (args.split > 1) {
            shared_tile = work;
        } else {
            ptx::named_barrier(1, 128 * Tile::kWarpgroups);
            finish_tokens<Tile>(args, work, sums, 0);
            ptx::named_barrier(1, 128 * Tile::kWarpgroups); /* before the sums of the next tile */
        }
    }
}

/* ---- kernel ---- */

template <typename Math, typename Tile>
__device__ __forceinline__ void decode_body(const CUtensorMap &map_weights, const CUtensorMap &map_tokens,
                                            const GemmSm90Args &args) {
    extern __shared__ uint8_t dynamic[];
    __shared__ Sm90Shared<Tile> shared;
    uint8_t *stages = dynamic + (-ptx::shared_address(dynamic) & 1023u);
    float *sums = reinterpret_cast<float *>(stages + Tile::kStages * Tile::kStageBytes);
    const int warp = threadIdx.x / 32, rank = args.split > 1 ? static_cast<int>(ptx::cluster_block_rank()) : 0;

    if (threadIdx.x == 0) {
        init_rings(shared);
        ptx::prefetch_tensor_map(&map_weights);
        ptx::prefetch_tensor_map(&map_tokens);
    }
    __syncthreads();
    ptx::wait_for_earlier_kernels();

    Sm90Work shared_tile = no_more_work();
    if (warp == 0)
        produce_decode(shared, stages, map_weights, map_tokens, args);
    else if (warp == 1)
        schedule_decode(shared, args, rank);
    else if (warp >= 4)
        shared_tile = consume_decode<Math, Tile>(shared, stages, sums, args);
    if (args.split > 1) {
        __syncwarp();
        ptx::cluster_sync(); /* the sums of all blocks are there */
        if (shared_tile.group >= 0) finish_tokens<Tile>(args, shared_tile, sums, rank);
        __syncwarp();
        ptx::cluster_sync(); /* no block ends while others read from it */
    }
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
