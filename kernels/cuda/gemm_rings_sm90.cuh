/*
 * What the roles of a block share in the Hopper kernels of products: arguments, and rings of stages and of tiles.
 *
 * The rings hand over by mbarriers ("full" to the reader, "empty" back). A stage is 128 bytes of K of 128 rows of the
 * one operand, 64 to each of two warpgroups of consumers, and of kBlockN rows of the other.
 */
#pragma once

#include <cuda.h>

#include "common.cuh"
#include "gemm_epilogue.cuh"
#include "ptx.cuh"
#include "ring.cuh"
#include "scheduler.cuh"

namespace flexgemm {

/* What the first copies need lies together: it takes a while until constants that are far apart have come. */
struct GemmSm90Args {
    /* Of gemm_tokens_sm90.cuh: blocks or pairs of a cluster that share the K of a tile; steps of each, and how many
     * have one more. */
    int32_t split, part_steps, longer_parts;
    int32_t box_tokens;  /* rows of A to a copy */
    int32_t tile_tokens; /* of one group: rows of A to a tile */
    bool alike;          /* plain sums of few rows are multiplied by one factor, no more */
    bool read_once;      /* weights are, and give way first in L2 */
    /* Of gemm_sm90.cuh, of one group: tiles before those whose K the blocks of a pair share. */
    uint32_t unshared_tiles;
    bool column_factors; /* columns have scales of their own, or a bias */
    TileSpace space;
    Epilogue epilogue;
    bool a_grouped, b_grouped;
    CUtensorMap map_out;       /* boxes of 16 rows and 128 bytes of out, where out_in_boxes */
    CUtensorMap map_out_row;   /* of one row, where rows_end_anywhere */
    bool out_in_boxes;         /* the copy engine can store it */
    bool boxed_tiles;          /* and that is sums times and plus factors, in 16 bits or float32 */
    bool rows_end_anywhere;    /* behind those of a group are another one's, or what is not to be written */
    bool out_grouped;          /* it has a matrix for each group */
    bool out_aligned;          /* its rows start at multiples of 16 bytes */
    bool staggered;            /* blocks add to the output at different times (gemm_sm90.cuh) */
    bool added;                /* what Sm90AddedUse calls so; boxes of map_out are a warpgroup's */
    bool usual;                /* what Sm90UsualUse calls so */
    bool usual_end;            /* and not just sums in 16 bits */
    bool plain;                /* of out nothing but scaled sums in 16 bits, or float32 of many rows; biased of few */
    int32_t steps_per_promote; /* 1, 2 or 4 steps of K */
};

constexpr int kSm90BlockM = 128, kSm90WarpgroupRows = 64, kSm90StepBytes = 128, kSm90SlabBytes = 128;

/* An operand that is not K-major has lines of 64 rows (columns of the matrix) to a box: 64 of them, a step of K. */
constexpr int kSm90LineRows = kSm90StepBytes / 2, kSm90LinesBytes = kSm90LineRows * kSm90StepBytes;

/* ---- what a kernel is made for ---- */

/* What sums become in the end, scaled and biased: an activation of each, or what SwiGLU makes of two. */
enum class Sm90End {
    kNone = FG_ACTIVATION_NONE,
    kRelu = FG_ACTIVATION_RELU,
    kSilu = FG_ACTIVATION_SILU,
    kGelu = FG_ACTIVATION_GELU,
    kSwiglu,
};

/* The fewer cases its code has, the sooner memory has sent what a short product needs of it. */
struct Sm90AnyUse {
    static constexpr bool kRowsOnly = false, kUsual = false, kOneGroup = false;
    static constexpr bool kToFp8 = false, kAdded = false; /* as those below */
    static constexpr Sm90End kEnd = Sm90End::kNone;
};

/* Outputs that are no more than scaled rows. */
struct Sm90RowsUse : Sm90AnyUse {
    static constexpr bool kRowsOnly = true;
};

/* Whole tiles of such, added to an output in float32 (gemm_added_sm90.cuh). */
struct Sm90AddedUse : Sm90RowsUse {
    static constexpr bool kAdded = true;
};

/* Usual ones: of the type T, 16 bits or fp8, whole rows of 16 bytes; sums are scaled, biased or with scales of columns
 * where not kRows, and become what kAtEnd says; of groups of rows or, kDense, of one group; sums are promoted at each
 * step, if at all. */
template <typename T, bool kRows, bool kDense, Sm90End kAtEnd = Sm90End::kNone>
struct Sm90UsualUse {
    static constexpr bool kRowsOnly = kRows, kUsual = true, kOneGroup = kDense;
    static constexpr bool kToFp8 = sizeof(T) == 1, kAdded = false;
    static constexpr Sm90End kEnd = kAtEnd;
    using Stored = T;
};

/* ---- rings ---- */

/* One tile as the scheduler hands it over. rows <= 0: a block with nothing to do but its share of the copies;
 * group < 0: there are no more. */
struct Sm90Work {
    int32_t first_row, rows, first_column, columns;
    int32_t group, weight; /* matrices of A and out, and of B */
    int32_t k_begin, k_bytes;
    bool apart; /* from the other block of the pair: B is not shared */
    /* Warpgroups whose rows the copy engine stores: what columns are not lies outside the output, something is
     * multiplied. */
    int8_t boxed;
    bool again;  /* it is the rest of a tile whose first part of K has been added to the output */
    bool shared; /* the other block of the pair has the rest of its K; there is no tile after it */
};

template <typename Tile>
struct Sm90Shared {
    uint64_t full[Tile::kStages], empty[Tile::kStages];
    uint64_t scales_read[Tile::kStages]; /* those of blocks, by every lane of the consumers */
    uint64_t work_full[Tile::kTileSlots], work_empty[Tile::kTileSlots];
    Sm90Work work[Tile::kTileSlots];
};

template <typename Tile>
constexpr int kSm90ConsumerWarps = 4 * Tile::kWarpgroups;

/* Barriers of the rings; the block, or its cluster, has yet to meet. Threads that copy scales arrive one by one, and so
 * do `more_readers` of tiles. */
template <typename Tile>
__device__ __forceinline__ void init_rings(Sm90Shared<Tile> &shared, int more_readers = 0) {
    constexpr int kWarps = kSm90ConsumerWarps<Tile>;
    for (int i = 0; i < Tile::kStages; ++i) {
        ptx::mbarrier_init(&shared.full[i], 1 + Tile::kScaleThreads);
        ptx::mbarrier_init(&shared.empty[i], kWarps * Tile::kCluster);
        if constexpr (Tile::kScaleThreads > 0) ptx::mbarrier_init(&shared.scales_read[i], 32 * kWarps);
    }
    for (int i = 0; i < Tile::kTileSlots; ++i) {
        ptx::mbarrier_init(&shared.work_full[i], 1);
        /* Every lane that reads it. */
        ptx::mbarrier_init(&shared.work_empty[i], 32 * (kWarps + 1) + Tile::kScaleThreads + more_readers);
    }
    ptx::fence_mbarrier_init();
}

/* By a warp, once for it: arrives at a barrier of each of the first kBlocks blocks of a cluster. */
template <int kBlocks>
__device__ __forceinline__ void arrive_at_blocks(uint64_t *barrier) {
    if constexpr (kBlocks == 1) {
        if (ptx::elect()) ptx::mbarrier_arrive(barrier);
    } else {
        const uint32_t block = threadIdx.x % 32;
        if (block < kBlocks) ptx::mbarrier_arrive_remote(barrier, block);
    }
}

/* Named barriers by which those of a single block meet when its mbarriers are there; 1 to 4 are of multiplications. A
 * scheduler that looks for tiles meets the warp that makes them at a barrier of their own: where one warp came to the
 * barrier of all threads from elsewhere in the code, synccheck would take that for divergence. */
constexpr int kBlockMeets = 5, kSchedulerMeets = 6, kSchedulerMeeting = 2 * 32;

/* Of all threads of a cluster, or of those of a block that say so: its mbarriers are there. */
__device__ __forceinline__ void meet(bool in_cluster, int id, int threads) {
    if (in_cluster) {
        ptx::cluster_arrive();
        ptx::cluster_wait();
    } else {
        ptx::named_barrier(id, threads);
    }
}

/* How a block begins. One thread of the producer makes the barriers by `init`, and copies by `copy_own` what it knows
 * already. A short product lasts little longer than its first copies take: they begin here, in the first lines of code,
 * and not where the producer's loop is, which memory has yet to send. Warp 1, the scheduler, has `prepare` meanwhile; not
 * as an `else`, which ptxas would put in front. If it `looks` for tiles it may look for the first one there, where there
 * are registers for that, and meets others by hand_over. When all barriers of the block, or of its cluster, are there,
 * `copy_shared` copies to other blocks too. */
template <typename Init, typename CopyOwn, typename Prepare, typename CopyShared>
__device__ __forceinline__ void begin_block(const CUtensorMap &map_a, const CUtensorMap &map_b, bool in_cluster,
                                            int threads, bool looks, const Init &init, const CopyOwn &copy_own,
                                            const Prepare &prepare, const CopyShared &copy_shared) {
    const int warp = threadIdx.x / 32;
    if (warp == 1 && looks) {
        ptx::wait_for_earlier_kernels();
        return prepare();
    }
    if (warp == 0) {
        const bool leads = ptx::elect();
        if (leads) {
            ptx::prefetch_tensor_map(&map_a);
            ptx::prefetch_tensor_map(&map_b);
            init();
        }
        if (looks && !in_cluster) {
            __syncwarp();
            ptx::named_barrier_arrive(kSchedulerMeets, kSchedulerMeeting);
        }
        ptx::wait_for_earlier_kernels();
        if (leads) copy_own();
    }
    if (warp == 1) prepare();
    __syncwarp();
    meet(in_cluster, kBlockMeets, looks ? threads - 32 : threads);
    ptx::wait_for_earlier_kernels();
    if (warp == 0 && ptx::elect()) copy_shared();
    __syncwarp();
}

/* By the scheduler, which meets the others with the first tile that it has looked for. To meet a cluster invalidates L1,
 * and with it what registers could not hold: the tile is written before. */
template <typename Tile>
__device__ __forceinline__ void hand_over(Sm90Shared<Tile> &shared, RingPosition<Tile::kTileSlots> &at,
                                          const Sm90Work &work, bool meets = false, bool in_cluster = false) {
    if (!meets) ptx::mbarrier_wait_parity(&shared.work_empty[at.slot], at.parity ^ 1);
    __syncwarp(); /* a lane that looked later could find the slot filled and emptied again, and wait for ever */
    if (threadIdx.x % 32 == 0) shared.work[at.slot] = work;
    if (meets) meet(in_cluster, kSchedulerMeets, kSchedulerMeeting);
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.work_full[at.slot]);
    __syncwarp();
    at.advance();
}

__device__ __forceinline__ Sm90Work no_more_work() { return {0, 0, 0, 0, -1, 0, 0, 0, false, false}; }

/* Copies begin at multiples of 16 bytes, and are as fast as they can be from multiples of a sector of memory on; groups
 * along K begin anywhere: bytes of the first step that are before the group. */
__device__ __forceinline__ int head_of(const Sm90Work &work) {
    return static_cast<int>(static_cast<uint32_t>(work.k_begin) % FG_SECTOR_BYTES);
}

/* Unsigned, as all of this: who asks has no time to divide by the rules for negative numbers. */
__device__ __forceinline__ int steps_of(const Sm90Work &work) {
    const auto bytes = static_cast<uint32_t>(head_of(work) + work.k_bytes);
    return static_cast<int>((bytes + kSm90StepBytes - 1) / kSm90StepBytes);
}

/* The next tile, for the 32 threads of a warp; it stays where it is until release_work. */
template <typename Tile>
__device__ __forceinline__ const Sm90Work &next_work(Sm90Shared<Tile> &shared,
                                                     const RingPosition<Tile::kTileSlots> &at) {
    ptx::mbarrier_wait_parity(&shared.work_full[at.slot], at.parity);
    return shared.work[at.slot];
}

template <typename Tile>
__device__ __forceinline__ void release_work(Sm90Shared<Tile> &shared, RingPosition<Tile::kTileSlots> &at) {
    ptx::mbarrier_arrive(&shared.work_empty[at.slot]);
    at.advance();
}

/* What a warp of the producers has ready for the end of each tile. Consumers say behind each that they are done with it,
 * used or not: who did not wait for one could take it for the one after the next. Turns are told by the tiles' slots, since
 * there is an even number of those: registers are few. */
template <typename Tile>
struct TileTurns {
    static_assert(Tile::kTileSlots % 2 == 0, "slots tell the turns of tiles");
    uint64_t ready, done;

    __device__ __forceinline__ void init(int makers, int readers) {
        ptx::mbarrier_init(&ready, makers);
        ptx::mbarrier_init(&done, readers);
    }
    __device__ __forceinline__ void await_ready(int slot) { ptx::mbarrier_wait_parity(&ready, slot % 2); }
    __device__ __forceinline__ void await_done(int slot) { ptx::mbarrier_wait_parity(&done, slot % 2); }

    /* Readers of the tile before the one in `slot`. */
    __device__ __forceinline__ void await_done_before(int slot) { ptx::mbarrier_wait_parity(&done, slot % 2 ^ 1); }

    __device__ __forceinline__ void leave(int slot) {
        await_ready(slot);
        ptx::mbarrier_arrive(&done);
    }
};

template <typename Tile>
__device__ __forceinline__ bool has_one_group(const GemmSm90Args &args) {
    return Tile::kUsual ? Tile::kOneGroup : args.space.major.grouping == Grouping::kNone;
}

/* ---- boxes ---- */

/* Where the copy engine finds a box of rows from `row` on, and of K from byte `k` on: x in bytes, y in lines. Elements of
 * what is not K-major have 2 bytes. */
struct BoxPlace {
    int x, y;
};

template <bool kKMajor>
__device__ __forceinline__ BoxPlace place_of_box(int k, int row) {
    return kKMajor ? BoxPlace{k, row} : BoxPlace{row * 2, k / 2};
}

/* Rows of B (weights) in a box, of those that a block copies. */
template <typename Tile>
constexpr int kSm90WeightBox = Tile::kWeightLines ? kSm90LineRows : Tile::kWeightRows;

/* ---- what a block will want first ---- */

/* Where there are groups of rows, by one thread: asks L2 for the first steps of the block's weights of what tile `number`
 * will be if groups have about as many rows each. It takes the scheduler as long to find out which it is as memory needs
 * for those. More steps are as many copies for which those that are wanted wait. */
template <typename Tile>
__device__ __forceinline__ void ask_for_weights(const GemmSm90Args &args, const CUtensorMap &map, uint32_t number) {
    constexpr int kSteps = 2;
    if (has_one_group<Tile>(args) || args.space.major_is_columns || args.space.k_offsets.data != nullptr) return;
    if (args.space.least_block > 0) return; /* which is first nothing but the sizes says */
    const GuessedTile tile = guess_tile(args.space, number);
    const int group = args.b_grouped ? tile.group : 0;
    const int share = tile.minor * Tile::kCluster + static_cast<int>(blockIdx.x % Tile::kCluster);
    for (int step = 0; step < kSteps; ++step)
        for (int row = 0; row < Tile::kWeightRows; row += kSm90WeightBox<Tile>) {
            const BoxPlace at =
                place_of_box<!Tile::kWeightLines>(step * kSm90StepBytes, share * Tile::kWeightRows + row);
            ptx::tma_prefetch_3d(&map, at.x, at.y, group);
        }
}

/* Asks L2 for the scales of `count` rows or columns of one group, at most 1,024, by a warp. */
__device__ __forceinline__ void ask_for_scales(const Scale &scale, int64_t first, int count) {
    constexpr int kAtOnce = 128 / sizeof(float);
    if (scale.data == nullptr) return;
    const int64_t scales = scale.step == 0 ? 1 : count * scale.step;
    const int own = static_cast<int>(threadIdx.x) % 32 * kAtOnce;
    if (own < scales) ptx::prefetch_l2(scale.data + first * scale.step + own);
}

}  // namespace flexgemm
