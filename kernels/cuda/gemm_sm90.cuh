/*
 * GEMM of Hopper: D = act(alpha * scale_a * scale_b * A . B^T + bias) for fp8, fp16 and bf16 operands, in every layout.
 *
 * One persistent block per multiprocessor walks over tiles of 128 x kBlockN. Its warpgroups have roles:
 *
 *     warpgroup 0    warp 0: producer, one thread that starts TMA copies of A and B into a ring of stages
 *                    warp 1: scheduler, turns tile numbers into tiles for all the others, a few ahead
 *                    warps 2 and 3: copy scales of blocks, where there are some, or an output that is added to; or warp 2
 *                                   copies factors of columns and rows
 *     warpgroup 1    rows  0 .. 63  of the tile: wgmma on the stages, epilogue
 *     warpgroup 2    rows 64 .. 127
 *
 * A stage is 128 bytes of K: 128 rows of A and kBlockN rows of B in the 128-byte swizzle that wgmma reads; of 16-bit
 * operands that are M-major or N-major, boxes of 64 rows in 64 lines of K. The producer runs ahead into the next tile
 * during an epilogue, and where tiles are boxed so do the tensor cores. The rings are in gemm_rings_sm90.cuh, the
 * scheduler in gemm_schedule_sm90.cuh, the multiplication in gemm_mainloop_sm90.cuh, ends of tiles in
 * gemm_store_sm90.cuh.
 *
 * Blocks may work in pairs (clusters of 2) on adjacent row tiles: each copies its own rows of A and half of the columns
 * of B, which the copy engine delivers to both; where their rows are of two groups, each copies a B of its own. Tiles
 * that full waves of one group leave over, if they would keep no more than half of the pairs busy, are halved: both
 * blocks of a pair have the same rows then and half of K each (gemm_pair_sums_sm90.cuh).
 *
 * Groups of rows or columns: a box starts where the group does and may reach into the next group; those sums are not
 * stored. A warpgroup whose 64 rows all lie past the end neither loads nor multiplies. Groups along K: the first and
 * the last box may reach into the neighbours too, and what does is cleared in both operands before it is multiplied.
 */
#pragma once

#include "gemm_mainloop_sm90.cuh"
#include "gemm_pair_sums_sm90.cuh"
#include "gemm_scales_sm90.cuh"
#include "gemm_schedule_sm90.cuh"
#include "gemm_store_sm90.cuh"

namespace flexgemm {

template <typename Math, int kN, int kBlocks, typename Use>
struct Sm90Tile : Use {
    static constexpr bool kScaled = Math::kScaled, kMMajor = Math::kMMajor, kNMajor = Math::kNMajor;
    static constexpr int kBlockN = kN;
    static constexpr int kCluster = kBlocks;         /* blocks with adjacent rows that share B */
    static constexpr int kWeightRows = kN / kBlocks; /* of B, that a block copies */
    static constexpr bool kWeightLines = kNMajor;
    static constexpr int kClusterM = kBlocks * kSm90BlockM;
    /* Sums come in parts of columns, each as many as a partial sum beside the sums has registers for. The first has as
     * many as the last, or what wgmma rounds that up to: it takes as long for 136 columns as for 144. */
    static constexpr int kParts = kN > 192 ? 2 : 1, kPartColumns = ceil_div(kN / kParts, 16) * 16;
    static constexpr int kPartialSums = kN > 128 ? 1 : 2; /* of two steps, where there are so many registers */
    /* Warpgroups take turns at products, but not at parts of them: in two parts they fall out of step by themselves, and
     * to wait for each other costs more than it saves. */
    static constexpr bool kTakesTurns = kPartialSums == 1 && kParts == 1;
    /* The blocks of a pair share the K of tiles left over; beside sums of 272 columns there is no register for that. */
    static constexpr bool kSharesTiles = kBlocks > 1 && kN <= 256 && !Use::kAdded;
    /* Beside scales, or an output that is added to, a sixth has no room. */
    static constexpr int kStages = kN > 192 ? 4 : kN > 128 || kScaled || Use::kAdded ? 5 : 6;
    static constexpr int kWarpgroups = 2, kWarpgroupRows = kSm90WarpgroupRows; /* of consumers */
    static constexpr int kThreads = (1 + kWarpgroups) * ptx::kWarpgroup;
    static constexpr int kBytesA = kWarpgroupRows * kSm90StepBytes; /* of one warpgroup */
    static constexpr int kBytesB = kN * kSm90StepBytes;
    static constexpr int kStageBytes = kWarpgroups * kBytesA + kBytesB;
    /* Of each warp's epilogue: beside five stages of 192 columns, or four of 272, there is no room for two. Of what is
     * added to float32 all columns. */
    static constexpr int kSlabBytes = 16 * kSm90SlabBytes;
    static constexpr int kSlabs = Use::kAdded ? kN * 4 / kSm90SlabBytes : kN == 192 || kN > 256 ? 1 : 2;
    static constexpr int kSlabsBytes = 4 * kWarpgroups * kSlabs * kSlabBytes;
    static constexpr int kSmallBytes = 3072; /* barriers, tiles, scales of blocks or factors of columns and rows */
    static constexpr int kSharedBytes = kStages * kStageBytes + kSlabsBytes + kSmallBytes;
    static constexpr int kTileSlots = 4;
    static constexpr int kScaledRows = kSm90BlockM, kScaledBlocks = kParts;
    static constexpr int kScaleThreads = kScaled ? kSm90ScaleThreads : 0;
    static constexpr int kCopyWarps = Use::kAdded ? kWarpgroups : 0;     /* of an output */
    static constexpr bool kKeepsFactors = !Use::kRowsOnly && !kScaled;   /* beside scales of blocks there is no room */
    static constexpr bool kBoxedTiles = Use::kRowsOnly || kKeepsFactors; /* they end while the next is multiplied */
    static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
    static_assert(kWarpgroups * kWarpgroupRows == kSm90BlockM, "a warpgroup multiplies 64 rows");
    static_assert(kPartColumns * kSm90StepBytes % 1024 == 0, "a part of B starts at a swizzle atom");
    static_assert(kNMajor ? kN / kBlocks % kSm90LineRows == 0 : kN / kBlocks <= 256, "a box has as many rows");
    static_assert(!kScaled || kN == kParts * kSm90ScaleBlock, "a part has one scale of B");
    static_assert(kSharedBytes <= 227 * 1024, "shared memory of one block");
    static_assert(kProducerRegisters + kWarpgroups * kConsumerRegisters <=
                      (1 + kWarpgroups) * ptx::registers_at_launch(kThreads),
                  "warpgroups divide the registers of the launch");
};

/* ---- first copies ---- */

/* The rows of A of a step, those of one or of both warpgroups. */
template <typename Tile>
__device__ __forceinline__ void copy_rows(uint8_t *a, const CUtensorMap &map_a, uint64_t *full, int k, int row,
                                          int group, int boxes) {
#pragma unroll
    for (int box = 0; box < Tile::kWarpgroups; ++box) {
        const BoxPlace at = place_of_box<!Tile::kMMajor>(k, row + box * Tile::kWarpgroupRows);
        if (boxes > box) ptx::tma_load_3d(a + box * Tile::kBytesA, &map_a, full, at.x, at.y, group);
    }
}

/* All rows of B of a step, in the boxes that blocks of a cluster otherwise read for each other. */
template <typename Tile>
__device__ __forceinline__ void copy_columns(uint8_t *b, const CUtensorMap &map_b, uint64_t *full, int k, int column,
                                             int group) {
#pragma unroll
    for (int first = 0; first < Tile::kBlockN; first += kSm90WeightBox<Tile>) {
        const BoxPlace at = place_of_box<!Tile::kNMajor>(k, column + first);
        ptx::tma_load_3d(b + first * kSm90StepBytes, &map_b, full, at.x, at.y, group);
    }
}

/* A block's share of them, for all blocks of the cluster. */
template <typename Tile>
__device__ __forceinline__ void copy_share_of_columns(uint8_t *b, const CUtensorMap &map_b, uint64_t *full, int k,
                                                      int column, int group, int rank) {
    constexpr uint16_t kAll = (1 << Tile::kCluster) - 1;
#pragma unroll
    for (int i = 0; i < Tile::kWeightRows; i += kSm90WeightBox<Tile>) {
        const int first = rank * Tile::kWeightRows + i;
        const BoxPlace at = place_of_box<!Tile::kNMajor>(k, column + first);
        ptx::tma_load_3d_multicast(b + first * kSm90StepBytes, &map_b, full, at.x, at.y, group, kAll);
    }
}

/* The block's first tile, where it is known before the scheduler looks, and how many steps of it the ring has room for:
 * none, where it is not. */
template <typename Tile>
struct FirstSteps {
    Sm90Work work;
    int steps;

    __device__ __forceinline__ FirstSteps(const GemmSm90Args &args, bool looks) : steps(0) {
        if (looks) return;
        work = work_of_one_group<Tile>(args, blockIdx.x / Tile::kCluster);
        steps = min(steps_of(work), Tile::kStages);
    }

    /* Asks L2 for its scales, by a warp: they are wanted when there is nothing else to do. What earlier kernels have yet
     * to write, they write there. */
    __device__ __forceinline__ void ask_for_scales_of(const Epilogue &to) const {
        if (to.block_scaled) return;
        ask_for_scales(to.scale_a, work.first_row, work.rows);
        ask_for_scales(to.scale_b, work.first_column, work.columns);
    }

    /* By one thread: what the block copies for itself, when it has barriers. */
    __device__ __forceinline__ void copy_own(Sm90Shared<Tile> &shared, uint8_t *stages, const CUtensorMap &map_a,
                                             const CUtensorMap &map_b) const {
        const int boxes = work.rows > 0 ? ceil_div(work.rows, Tile::kWarpgroupRows) : 0;
        for (int step = 0; step < steps; ++step) {
            uint8_t *a = stages + step * Tile::kStageBytes;
            uint64_t *full = &shared.full[step];
            const int k = work.k_begin + step * kSm90StepBytes;
            ptx::mbarrier_arrive_expect_tx(full, boxes * Tile::kBytesA + Tile::kBytesB);
            copy_rows<Tile>(a, map_a, full, k, work.first_row, 0, boxes);
            if (Tile::kCluster == 1 || work.apart)
                copy_columns<Tile>(a + Tile::kWarpgroups * Tile::kBytesA, map_b, full, k, work.first_column, 0);
        }
    }

    /* Its share of B for both blocks of a pair, when both have. */
    __device__ __forceinline__ void copy_share(Sm90Shared<Tile> &shared, uint8_t *stages,
                                               const CUtensorMap &map_b) const {
        if (Tile::kCluster == 1 || steps == 0 || work.apart) return;
        uint8_t *const b = stages + Tile::kWarpgroups * Tile::kBytesA;
        for (int step = 0; step < steps; ++step)
            copy_share_of_columns<Tile>(b + step * Tile::kStageBytes, map_b, &shared.full[step], step * kSm90StepBytes,
                                        work.first_column, 0, static_cast<int>(blockIdx.x % Tile::kCluster));
    }
};

/* ---- producer warp ---- */

/* `early`: steps of the first tile that have been copied. */
template <typename Tile>
__device__ __forceinline__ void produce(Sm90Shared<Tile> &shared, uint8_t *stages, const CUtensorMap &map_a,
                                        const CUtensorMap &map_b, const GemmSm90Args &args, int early) {
    /* One thread's time from one stage to the next is what narrow tiles wait for: it finds addresses in registers. */
    const bool leads = ptx::elect();
    const int rank = Tile::kCluster > 1 ? static_cast<int>(ptx::cluster_block_rank()) : 0;
    uint8_t *const first_stage = ptx::opaque(stages);
    uint64_t *const first_full = ptx::opaque(shared.full), *const first_empty = ptx::opaque(shared.empty);
    RingPosition<Tile::kTileSlots> slot;
    RingPosition<Tile::kStages> at = position_after<Tile::kStages>(early);
    for (;; early = 0) {
        const Sm90Work work = next_work(shared, slot);
        if (work.group < 0) return;
        release_work(shared, slot);
        const int boxes_a = work.rows > 0 ? ceil_div(work.rows, Tile::kWarpgroupRows) : 0;
        const int group_a = args.a_grouped ? work.group : 0, group_b = args.b_grouped ? work.weight : 0;
        const int bytes = boxes_a * Tile::kBytesA + Tile::kBytesB, steps = steps_of(work);
        int k = work.k_begin - head_of(work) + early * kSm90StepBytes;
        for (int step = early; step < steps && leads; ++step, at.advance(), k += kSm90StepBytes) {
            uint8_t *a = first_stage + at.slot * Tile::kStageBytes, *b = a + Tile::kWarpgroups * Tile::kBytesA;
            uint64_t *full = first_full + at.slot;
            ptx::mbarrier_wait_parity(first_empty + at.slot, at.parity ^ 1);
            ptx::mbarrier_arrive_expect_tx(full, bytes);
            copy_rows<Tile>(a, map_a, full, k, work.first_row, group_a, boxes_a);
            if (Tile::kCluster == 1 || work.apart)
                copy_columns<Tile>(b, map_b, full, k, work.first_column, group_b);
            else
                copy_share_of_columns<Tile>(b, map_b, full, k, work.first_column, group_b, rank);
        }
        __syncwarp();
    }
}

/* Of scales of blocks. Rows and columns that there are no more of keep what a stage held: their sums are not stored. */
template <typename Tile>
__device__ __forceinline__ void produce_scales(Sm90Shared<Tile> &shared, StageScales<Tile> &scales,
                                               const GemmSm90Args &args) {
    RingPosition<Tile::kTileSlots> slot;
    RingPosition<Tile::kStages> at;
    for (;;) {
        const Sm90Work work = next_work(shared, slot);
        if (work.group < 0) break;
        release_work(shared, slot);
        const TileScaleRows rows =
            scale_rows_of(args, work, work.first_row, work.rows, work.first_column, work.columns);
        copy_scales(shared, scales, rows, steps_of(work), place_of_row, at);
    }
    await_copies();
}

/* ---- consumer warpgroups ---- */

/* A tile, and those behind it as long as they are boxed. While the last part of one is finished the next one begins: with
 * promoted sums in the registers of partial ones, with others in those of the parts that are finished. Of the last tile,
 * now in `slot`, some parts are finished: returns how many. */
template <typename Math, typename Tile, int kLast, int kFirst>
__device__ __forceinline__ int multiply_tiles(TileSums<kLast, kFirst> &sum, Sm90Shared<Tile> &shared,
                                              const StageScales<Tile> &stage_scales, const StageDescriptors &stage,
                                              const GemmSm90Args &args, Kept<Tile> &kept, int thread, uint8_t *slabs,
                                              RingPosition<Tile::kTileSlots> &slot, RingPosition<Tile::kStages> &at) {
    constexpr int kLastPart = TileSums<kLast, kFirst>::kParts - 1;
    using Promoted = PartialProducts<Math, Tile::kTakesTurns, Tile, kLast, kFirst, Tile::kPartialSums>;
    std::conditional_t<Math::kPromote, Promoted, PlainProducts<Math, Tile, kLast, kFirst>> products = {{shared, stage}};
    products.await(depth_of<Tile>(shared.work[slot.slot], args), 0, at);
    products.start_tile(sum);
    products.finish_start(sum);
    /* The loop is come to from here and from its end. With products under way from both, ptxas waits for them in it. */
    if constexpr (!Math::kPromote) ptx::wgmma_wait<0>();
    auto scales = [&] {
        if constexpr (Math::kScaled)
            return RowScales<Tile>{shared, stage_scales,
                                   place_of_row((threadIdx.x - ptx::kWarpgroup) / 32 * 16 + threadIdx.x % 32 / 4)};
        else
            return NoScales{};
    }();
    RowFactors of_rows = {{1.0f, 1.0f}};
    if (Tile::kRowsOnly && args.epilogue.one_factor)
        of_rows = over_scale_out<Tile>(factor_of_all(args.epilogue), args.epilogue);
    for (;;) {
        const Sm90Work &work = shared.work[slot.slot];
        const TileFactors<Tile> factors = {kept, args, work, slot.slot};
        BoxedTile<Tile> finish(factors, thread, slabs, of_rows);
        multiply_steps(sum, products, shared, depth_of<Tile>(work, args), scales, at, finish);
        if (!finish.boxed()) return 0;
        RingPosition<Tile::kTileSlots> following = slot;
        following.advance();
        const Sm90Work &next = next_work(shared, following);
        if (next.boxed <= thread / ptx::kWarpgroup) return kLastPart;
        products.await(depth_of<Tile>(next, args), 0, at);
        products.start_tile(sum);
        finish.fill(sum.last, kLastPart);
        products.finish_start(sum);
        finish.send(sum.last, kLastPart);
        kept.leave(slot.slot);
        release_work(shared, slot);
    }
}

template <typename Math, typename Tile>
__device__ __forceinline__ void consume(Sm90Shared<Tile> &shared, PairSums<Tile> &pair, const StageScales<Tile> &scales,
                                        Kept<Tile> &kept, uint8_t *stages, const GemmSm90Args &args) {
    /* Not worked out again in each step, nor read where a tile ends, which takes a while. */
    const int thread = ptx::opaque(static_cast<int>(threadIdx.x) - ptx::kWarpgroup);
    const int warpgroup = ptx::opaque(static_cast<int>(threadIdx.x) / ptx::kWarpgroup - 1);
    RingPosition<Tile::kTileSlots> slot;
    RingPosition<Tile::kStages> at;
    uint8_t *const stage_b = stages + Tile::kWarpgroups * Tile::kBytesA;
    const StageDescriptors stage = {
        stages, ptx::wgmma_descriptor(stages + warpgroup * Tile::kBytesA),
        Tile::kNMajor ? ptx::wgmma_descriptor(stage_b, kSm90LinesBytes) : ptx::wgmma_descriptor(stage_b), warpgroup};
    uint8_t *slabs = stages + Tile::kStages * Tile::kStageBytes;
    /* Other ends of 16-bit products are faster in one part. */
    constexpr bool kInParts = Tile::kParts > 1 && (Math::kPromote || Tile::kRowsOnly || Tile::kEnd != Sm90End::kNone);
    constexpr int kFirst = kInParts ? Tile::kPartColumns : 0, kParts = kInParts ? 2 : 1;
    const bool each_step =
        Math::kPromote && (Tile::kUsual || Math::kScaled || kParts > 1 || args.steps_per_promote == 1);
    const bool turns = each_step && Tile::kTakesTurns;
    if (turns) begin_turns<Tile>(warpgroup);
    for (;; kept.leave(slot.slot), release_work(shared, slot)) {
        const Sm90Work &first = next_work(shared, slot);
        if (first.group < 0) break;
        const Depth depth = depth_of<Tile>(first, args);
        if (first.rows <= warpgroup * Tile::kWarpgroupRows) {
            skip_tile(shared, stage, depth, at, turns ? kParts : 0);
            if (first.shared) pair.leave_stages();
            continue;
        }
        TileSums<Tile::kBlockN - kFirst, kFirst> sum;
        int finished = 0;
        if (!Tile::kUsual && depth.steps == 0) {
            sum.each([](auto &own, int) { clear(own); });
        } else if constexpr (!Math::kPromote && kParts == 1) {
            multiply_plain<Math>(sum.last, shared, stage, depth, at);
        } else if (!Math::kPromote || each_step) {
            finished = multiply_tiles<Math>(sum, shared, scales, stage, args, kept, thread, slabs, slot, at);
        } else if constexpr (kParts == 1 && !Math::kScaled && !Tile::kUsual) {
            multiply_seldom_promoted<Math>(sum.last, shared, stage, depth, args.steps_per_promote, at);
        }
        const Sm90Work &work = shared.work[slot.slot];
        const TileFactors<Tile> factors = {kept, args, work, slot.slot};
        const int64_t first_row = work.first_row + int64_t{warpgroup} * Tile::kWarpgroupRows;
        const int count = work.rows - warpgroup * Tile::kWarpgroupRows;
        if (work.shared && !pair.add_up(sum, stages, warpgroup)) continue;
        if (!Tile::kUsual && work.again) { /* what the copy engine adds of the first part of K comes first */
            __syncwarp();
            if (ptx::elect()) ptx::tma_wait();
        }
        sum.each([](auto &own, int) { ptx::wgmma_hold(own); });
        const auto finish = [&](auto &own, int part) {
            if (part >= finished) finish_part(own, factors, part, first_row, count, thread, slabs);
        };
        if constexpr (Tile::kRowsOnly) {
            sum.each(finish);
        } else if constexpr (kParts == 1) {
            finish(sum.last, 0);
        } else { /* ends that are long are there once: the last part comes to the registers of the first */
#pragma unroll 1
            for (int part = 0; part < 2; ++part) {
                finish(sum.first, part);
                memcpy(sum.first, sum.last, sizeof sum.first);
            }
        }
    }
    if (turns) end_turns<Tile>(warpgroup);
    __syncwarp();
    if (ptx::elect()) ptx::tma_wait_read<0>(); /* shared memory goes with the block */
}

/* ---- kernel ---- */

template <typename Math, typename Tile>
__device__ __forceinline__ void gemm_sm90_body(const CUtensorMap &map_a, const CUtensorMap &map_b,
                                               const GemmSm90Args &args) {
    extern __shared__ __align__(1024) uint8_t stages[];
    struct Small {
        Sm90Shared<Tile> rings;
        StageScales<Tile> scales;
        Kept<Tile> kept;
        PairSums<Tile> pair;
        Sm90Work rest; /* the scheduler's */
    };
    static_assert(sizeof(Small) <= Tile::kSmallBytes, "barriers, tiles and scales find room");
    auto &small = *reinterpret_cast<Small *>(stages + Tile::kStages * Tile::kStageBytes + Tile::kSlabsBytes);
    auto &shared = small.rings;
    const int warp = threadIdx.x / 32;
    const bool looks = looks_for_tiles<Tile>(args);
    const FirstSteps<Tile> first(args, looks);
    uint32_t next = first_of_cluster<Tile>(); /* to schedule */
    begin_block(
        map_a, map_b, Tile::kCluster > 1, Tile::kThreads, looks,
        [&] {
            small.pair.init();
            small.kept.init();
            init_rings(shared, 32 * (Tile::kKeepsFactors + Tile::kCopyWarps));
        },
        [&] {
            first.copy_own(shared, stages, map_a, map_b);
            ask_for_weights<Tile>(args, map_b, blockIdx.x / Tile::kCluster);
        },
        [&] {
            if (looks)
                next = hand_over_first(shared, small.rest, args);
            else if (first.steps > 0)
                first.ask_for_scales_of(args.epilogue);
        },
        [&] { first.copy_share(shared, stages, map_b); });

    if (warp < 4) {
        ptx::setmaxnreg_dec<Tile::kProducerRegisters>();
        if (warp == 0)
            produce(shared, stages, map_a, map_b, args, first.steps);
        else if (warp == 1)
            schedule(shared, small.rest, args, looks, next);
        else if constexpr (Math::kScaled)
            produce_scales(shared, small.scales, args);
        else if constexpr (Tile::kAdded)
            copy_output(shared, small.kept, stages + Tile::kStages * Tile::kStageBytes, args, warp - 2);
        else if constexpr (Tile::kKeepsFactors)
            if (warp == 2) produce_factors(shared, small.kept, args);
    } else {
        ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
        consume<Math>(shared, small.pair, small.scales, small.kept, stages, args);
    }
    if constexpr (Tile::kCluster > 1) {
        __syncwarp();
        ptx::cluster_sync(); /* other blocks write here and arrive at barriers here until they are done */
    }
}

/* Two names for one body, so that a profile tells them apart. Profilers look for fp8_gemm, of weight gradients for
 * fp8_wgrad_gemm: those are this kernel too. */
template <typename Math, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fp8_gemm_or_fp8_wgrad_gemm_sm90_kernel(const __grid_constant__ CUtensorMap map_a,
                                           const __grid_constant__ CUtensorMap map_b,
                                           const __grid_constant__ GemmSm90Args args) {
    gemm_sm90_body<Math, Tile>(map_a, map_b, args);
}

template <typename Math, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    half_gemm_sm90_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                          const __grid_constant__ GemmSm90Args args) {
    gemm_sm90_body<Math, Tile>(map_a, map_b, args);
}

}  // namespace flexgemm
