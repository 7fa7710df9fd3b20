/*
 * GEMM of Hopper: D = act(alpha * scale_a * scale_b * A . B^T + bias) for fp8, fp16 and bf16 operands, in every layout.
 *
 * One persistent block per multiprocessor walks over tiles of 128 x kBlockN. Its warpgroups have roles:
 *
 *     warpgroup 0    warp 0: producer, one thread that starts TMA copies of A and B into a ring of stages
 *                    warp 1: scheduler, turns tile numbers into tiles for all the others, a few ahead
 *     warpgroup 1    rows  0 .. 63  of the tile: wgmma on the stages, epilogue
 *     warpgroup 2    rows 64 .. 127
 *
 * A stage is 128 bytes of K: 128 rows of A and kBlockN rows of B in the 128-byte swizzle that wgmma reads. The rings hand
 * over by mbarriers ("full" to the reader, "empty" back). The producer runs ahead into the next tile during an epilogue.
 *
 * Hopper's fp8 tensor cores keep about 13 fraction bits of a running sum. fp8 sums are therefore promoted: each stage
 * (K = 128) is summed from zero by the tensor cores and then added to float32 registers. A tile is two parts of
 * columns; where registers allow two partial sums (kBlockN 192) one part is added while the other is multiplied. With
 * one partial sum (256) the other warpgroup's products fill that time.
 *
 * Blocks may work in pairs (clusters of 2) on adjacent row tiles: each copies its own rows of A and half of the columns
 * of B, which the copy engine delivers to both.
 *
 * Groups of rows or columns: a box starts where the group does and may reach into the next group; those sums are not
 * stored. A warpgroup whose 64 rows all lie past the end neither loads nor multiplies. Groups along K: the last box may
 * reach into the next group too, and what does is cleared in both operands before it is multiplied.
 */
#pragma once

#include <cuda.h>

#include <atomic>

#include "common.cuh"
#include "gemm_epilogue.cuh"
#include "ptx.cuh"
#include "scheduler.cuh"
#include "tensor_map.cuh"

namespace flexgemm {

struct GemmSm90Args {
    TileSpace space;
    Epilogue epilogue;
    bool a_grouped, b_grouped;
    bool out_aligned;          /* rows of out start at multiples of 16 bytes */
    bool plain;                /* of out nothing but scaled and biased sums in 16 or 32 bits */
    int32_t steps_per_promote; /* 1, 2 or 4 steps of K */
    int32_t split;             /* blocks of a cluster that share the K of a tile (gemm_decode_sm90.cuh) */
};

/* What becomes of tensor-core sums: nothing, until they are all; they are added to float32 registers; or so times the
 * scales of blocks of the operands, in 128 x 128 tiles. */
enum class Sm90Sums { kPlain, kPromoted, kScaled };

/* Each kind: its sums; the product of 64 rows and kColumns columns, 32 bytes of K. */
#define FG_SM90_MATH(Name, fp8, wgmma)                                                                                 \
    template <Sm90Sums kSums>                                                                                          \
    struct Name {                                                                                                      \
        static constexpr bool kFp8 = fp8, kPromote = kSums != Sm90Sums::kPlain, kScaled = kSums == Sm90Sums::kScaled;  \
        template <int kCount>                                                                                          \
        __device__ static void multiply(float (&sum)[kCount], uint64_t a, uint64_t b, int accumulate) {                \
            wgmma(sum, a, b, accumulate);                                                                              \
        }                                                                                                              \
    };

FG_SM90_MATH(Sm90Half, false, ptx::wgmma_f16)
FG_SM90_MATH(Sm90Bfloat16, false, ptx::wgmma_bf16)
FG_SM90_MATH(Sm90E4m3E4m3, true, ptx::wgmma_e4m3_e4m3)
FG_SM90_MATH(Sm90E4m3E5m2, true, ptx::wgmma_e4m3_e5m2)
FG_SM90_MATH(Sm90E5m2E4m3, true, ptx::wgmma_e5m2_e4m3)
FG_SM90_MATH(Sm90E5m2E5m2, true, ptx::wgmma_e5m2_e5m2)
#undef FG_SM90_MATH

constexpr int kSm90BlockM = 128, kSm90StepBytes = 128, kSm90SlabBytes = 128;

template <int kN, int kBlocks>
struct Sm90Tile {
    static constexpr int kBlockN = kN;
    static constexpr int kCluster = kBlocks; /* blocks with adjacent rows that share B */
    static constexpr int kClusterM = kBlocks * kSm90BlockM;
    /* Promoted sums come in parts of columns, each with a partial sum that lives in registers beside them. */
    static constexpr int kPromotedParts = kN > 128 ? 2 : 1;
    static constexpr int kPartials = kN == 256 ? 1 : 2;
    static constexpr int kChain = kPartials == 1 ? 1 : 4; /* steps between two drains of the tensor cores */
    static constexpr int kStages = kN == 256 ? 4 : kN == 192 ? 5 : 6;
    static constexpr int kWarpgroups = 2, kWarpgroupRows = 64; /* of consumers */
    static constexpr int kThreads = 128 * (1 + kWarpgroups);
    static constexpr int kBytesA = kWarpgroupRows * kSm90StepBytes; /* of one warpgroup */
    static constexpr int kBytesB = kN * kSm90StepBytes;
    static constexpr int kStageBytes = kWarpgroups * kBytesA + kBytesB;
    static constexpr int kSlabsBytes = 4 * kWarpgroups * 16 * kSm90SlabBytes;       /* of the epilogue */
    static constexpr int kSharedBytes = kStages * kStageBytes + kSlabsBytes + 1024; /* 1024: room to align the stages */
    static constexpr int kTileSlots = 4;
    static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
    static_assert(kWarpgroups * kWarpgroupRows == kSm90BlockM, "a warpgroup multiplies 64 rows");
    static_assert(kN / kPromotedParts * kSm90StepBytes % 1024 == 0, "a part of B starts at a swizzle atom");
    static_assert(kSharedBytes + 1024 <= 227 * 1024, "shared memory of one block");
    static_assert(128 * (kProducerRegisters + kWarpgroups * kConsumerRegisters) <= 65536, "the register file");
};

/* One tile as the scheduler hands it over. rows <= 0: a block with nothing to do but its share of the copies;
 * group < 0: there are no more. */
struct Sm90Work {
    int32_t first_row, rows, first_column, columns;
    int32_t group, weight; /* matrices of A and out, and of B */
    int32_t k_begin, k_bytes;
};

/* Stage or slot of a ring, and the parity of its current round. */
template <int kSlots>
struct RingPosition {
    int slot = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == kSlots) slot = 0, parity ^= 1;
    }
};

template <typename Tile>
struct Sm90Shared {
    uint64_t full[Tile::kStages], empty[Tile::kStages];
    uint64_t work_full[Tile::kTileSlots], work_empty[Tile::kTileSlots];
    Sm90Work work[Tile::kTileSlots];
};

/* Barriers of the rings; the block, or its cluster, has yet to meet. */
template <typename Tile>
__device__ __forceinline__ void init_rings(Sm90Shared<Tile> &shared) {
    constexpr int kConsumerWarps = 4 * Tile::kWarpgroups;
    for (int i = 0; i < Tile::kStages; ++i) {
        ptx::mbarrier_init(&shared.full[i], 1);
        ptx::mbarrier_init(&shared.empty[i], kConsumerWarps * Tile::kCluster);
    }
    for (int i = 0; i < Tile::kTileSlots; ++i) {
        ptx::mbarrier_init(&shared.work_full[i], 1);
        ptx::mbarrier_init(&shared.work_empty[i], kConsumerWarps + 1);
    }
    ptx::fence_mbarrier_init();
}

/* ---- scheduler warp ---- */

template <typename Tile>
__device__ __forceinline__ void hand_over(Sm90Shared<Tile> &shared, RingPosition<Tile::kTileSlots> &at,
                                          const Sm90Work &work) {
    ptx::mbarrier_wait_parity(&shared.work_empty[at.slot], at.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
        shared.work[at.slot] = work;
        ptx::mbarrier_arrive(&shared.work_full[at.slot]);
    }
    __syncwarp();
    at.advance();
}

__device__ __forceinline__ Sm90Work no_more_work() { return {0, 0, 0, 0, -1, 0, 0, 0}; }

template <typename Tile>
__device__ __forceinline__ void schedule(Sm90Shared<Tile> &shared, const GemmSm90Args &args) {
    RingPosition<Tile::kTileSlots> at;
    const int64_t rank = Tile::kCluster == 1 ? 0 : ptx::cluster_block_rank();
    TileWalk<Tile::kClusterM, Tile::kBlockN> walk(args.space, blockIdx.x / Tile::kCluster, gridDim.x / Tile::kCluster);
    OutputTile tile;
    while (walk.next(tile)) {
        const int64_t row = tile.row + rank * kSm90BlockM, rows = tile.row_end - row;
        const int64_t columns = tile.column_end - tile.column;
        const Sm90Work work = {
            static_cast<int32_t>(row),          rows < kSm90BlockM ? static_cast<int32_t>(rows) : kSm90BlockM,
            static_cast<int32_t>(tile.column),  columns < Tile::kBlockN ? static_cast<int32_t>(columns) : Tile::kBlockN,
            static_cast<int32_t>(tile.group),   static_cast<int32_t>(tile.weight),
            static_cast<int32_t>(tile.k_begin), static_cast<int32_t>(tile.k_end - tile.k_begin)};
        hand_over(shared, at, work);
    }
    hand_over(shared, at, no_more_work());
}

__device__ __forceinline__ int steps_of(const Sm90Work &work) { return ceil_div(work.k_bytes, kSm90StepBytes); }

/* The next tile, for the 32 threads of a warp; it stays where it is until release_work. */
template <typename Tile>
__device__ __forceinline__ const Sm90Work &next_work(Sm90Shared<Tile> &shared,
                                                     const RingPosition<Tile::kTileSlots> &at) {
    ptx::mbarrier_wait_parity(&shared.work_full[at.slot], at.parity);
    return shared.work[at.slot];
}

template <typename Tile>
__device__ __forceinline__ void release_work(Sm90Shared<Tile> &shared, RingPosition<Tile::kTileSlots> &at) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.work_empty[at.slot]);
    at.advance();
}

/* ---- producer warp ---- */

template <typename Tile>
__device__ __forceinline__ void produce(Sm90Shared<Tile> &shared, uint8_t *stages, const CUtensorMap &map_a,
                                        const CUtensorMap &map_b, const GemmSm90Args &args) {
    RingPosition<Tile::kTileSlots> slot;
    RingPosition<Tile::kStages> at;
    for (;;) {
        const Sm90Work work = next_work(shared, slot);
        if (work.group < 0) return;
        release_work(shared, slot);
        const int boxes_a = work.rows > 0 ? ceil_div(work.rows, Tile::kWarpgroupRows) : 0;
        const int group_a = args.a_grouped ? work.group : 0, group_b = args.b_grouped ? work.weight : 0;
        const int steps = steps_of(work);
        for (int step = 0; step < steps; ++step, at.advance()) {
            ptx::mbarrier_wait_parity(&shared.empty[at.slot], at.parity ^ 1);
            if (threadIdx.x % 32 == 0) {
                uint8_t *a = stages + at.slot * Tile::kStageBytes, *b = a + Tile::kWarpgroups * Tile::kBytesA;
                uint64_t *full = &shared.full[at.slot];
                const int k = work.k_begin + step * kSm90StepBytes;
                ptx::mbarrier_arrive_expect_tx(full, boxes_a * Tile::kBytesA + Tile::kBytesB);
                for (int box = 0; box < boxes_a; ++box)
                    ptx::tma_load_3d(a + box * Tile::kBytesA, &map_a, full, k,
                                     work.first_row + box * Tile::kWarpgroupRows, group_a);
                if constexpr (Tile::kCluster == 1) {
                    ptx::tma_load_3d(b, &map_b, full, k, work.first_column, group_b);
                } else {
                    const int rank = static_cast<int>(ptx::cluster_block_rank());
                    constexpr int kShare = Tile::kBlockN / Tile::kCluster;
                    ptx::tma_load_3d_multicast(b + rank * kShare * kSm90StepBytes, &map_b, full, k,
                                               work.first_column + rank * kShare, group_b, (1 << Tile::kCluster) - 1);
                }
            }
            __syncwarp();
        }
    }
}

/* ---- consumer warpgroups ---- */

/* sum += or = the product of a stage, columns `part`: 128 bytes of K as four wgmma, one commit group. */
template <typename Math, int kCount>
__device__ __forceinline__ void multiply_part(float (&sum)[kCount], uint64_t a, uint64_t b, int part, bool accumulate) {
    constexpr int kUnit = 16; /* bytes that one in a descriptor's address stands for */
#pragma unroll
    for (int k = 0; k < kSm90StepBytes / 32; ++k)
        Math::multiply(sum, a + k * (32 / kUnit), b + part * (kCount * 2 * kSm90StepBytes / kUnit) + k * (32 / kUnit),
                       accumulate || k > 0);
}

/* What a step's products are multiplied by when they are added: nothing, or the scales of blocks. `load` reads those of
 * a step, Step::of is that of the thread's i-th sum. */
struct NoScales {
    struct Step {
        __device__ __forceinline__ float of(int) const { return 1.0f; }
    };
    __device__ __forceinline__ void load(Step &, int) const {}
};

/* Of the thread's two rows of A, times that of the tile's columns. Pointers are to the scales at K = 0. */
struct RowScales {
    const float *a[2], *b;
    struct Step {
        float value[2];
        __device__ __forceinline__ float of(int i) const { return value[i / 2 % 2]; }
    };
    __device__ __forceinline__ void load(Step &scale, int step) const {
        const float of_b = b[step];
        scale.value[0] = a[0][step] * of_b;
        scale.value[1] = a[1][step] * of_b;
    }
};

/* sum += partial * scale */
template <int kCount, typename Step>
__device__ __forceinline__ void promote(float (&sum)[kCount], float (&partial)[kCount], const Step &scale) {
    ptx::wgmma_hold(partial);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] = fmaf(partial[i], scale.of(i), sum[i]);
}

/* Hands a stage back to the producers of all blocks that write to it, once per warp. */
template <typename Tile>
__device__ __forceinline__ void hand_back(Sm90Shared<Tile> &shared, int slot) {
    const uint32_t block = threadIdx.x % 32;
    if constexpr (Tile::kCluster == 1) {
        if (block == 0) ptx::mbarrier_arrive(&shared.empty[slot]);
    } else {
        if (block < Tile::kCluster) ptx::mbarrier_arrive_remote(&shared.empty[slot], block);
    }
}

/* What a warpgroup multiplies: descriptors of its rows of A and of B in slot 0, which is at `stages`. */
struct StageDescriptors {
    uint8_t *stages;
    uint64_t a, b;
};

/* How a tile goes through K. tail: bytes of the last step that belong to the group, where another group follows. */
struct Depth {
    int steps, tail;
};

__device__ __forceinline__ Depth depth_of(const Sm90Work &work, const GemmSm90Args &args) {
    return {steps_of(work), args.space.k_offsets.data ? work.k_bytes % kSm90StepBytes : 0};
}

/* Clears the bytes from `tail` on of rows of a stage that are dealt to `threads` threads. */
__device__ __forceinline__ void clear_rows(uint8_t *rows, int count, int tail, int thread, int threads) {
    for (int row = thread; row < count; row += threads)
        for (int byte = tail; byte < kSm90StepBytes; ++byte)
            rows[row * kSm90StepBytes + (byte / 16 ^ row % 8) * 16 + byte % 16] = 0;
}

/* Waits for the stage of a step. In the last one each warpgroup clears the tail of its rows of A and of a share of B. */
template <typename Tile>
__device__ __forceinline__ void await_stage(Sm90Shared<Tile> &shared, const StageDescriptors &stage, const Depth &depth,
                                            int step, const RingPosition<Tile::kStages> &at) {
    ptx::mbarrier_wait_parity(&shared.full[at.slot], at.parity);
    if (depth.tail == 0 || step + 1 < depth.steps) return;
    const int thread = threadIdx.x - 128;
    uint8_t *rows_a = stage.stages + at.slot * Tile::kStageBytes, *rows_b = rows_a + Tile::kWarpgroups * Tile::kBytesA;
    clear_rows(rows_a + thread / 128 * Tile::kBytesA, Tile::kWarpgroupRows, depth.tail, thread % 128, 128);
    clear_rows(rows_b, Tile::kBlockN, depth.tail, thread, 128 * Tile::kWarpgroups);
    ptx::fence_proxy_async();
    ptx::named_barrier(1, 128 * Tile::kWarpgroups);
}

/* Rows that the group has no more of take the scale of another: their sums are not stored. */
__device__ __forceinline__ RowScales row_scales_of(const GemmSm90Args &args, const Sm90Work &work, int64_t first_row,
                                                   int count) {
    const Scale &a = args.epilogue.scale_a, &b = args.epilogue.scale_b;
    const int local_row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    RowScales scales;
    for (int half = 0; half < 2; ++half) {
        const int row = local_row + 8 * half < count ? local_row + 8 * half : 0;
        scales.a[half] = a.data + work.group * a.group_step + (first_row + row) * a.step;
    }
    scales.b = b.data + work.weight * b.group_step + work.first_column / FG_SCALE_BLOCK_SIZE * b.step;
    return scales;
}

/* Steps first .. first + kSteps - 1 into promoted sums. Unit of work u is part u % kParts of step u / kParts. With two
 * partial sums, unit u is multiplied while unit u - 1 is added; the compiler follows that through straight code only, so
 * a chain of steps is unrolled and drains at its end. A step with a tail is a chain of its own. */
template <typename Math, typename Tile, int kSteps, int kParts, int kCount, typename Scales>
__device__ __forceinline__ void multiply_chain(float (&sum)[kParts][kCount], Sm90Shared<Tile> &shared,
                                               const StageDescriptors &stage, const Depth &depth, const Scales &scales,
                                               int first, RingPosition<Tile::kStages> &at) {
    constexpr int kUnits = kSteps * kParts, kPartials = Tile::kPartials;
    float partial[kPartials][kCount];
    typename Scales::Step scale[kPartials];
    int slots[kSteps] = {}; /* of the stages of the chain */
    const auto add = [&](int unit) {
        if (unit % kParts == kParts - 1) hand_back(shared, slots[unit / kParts]);
        promote(sum[unit % kParts], partial[unit % kPartials], scale[unit % kPartials]);
    };
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
        if (unit % kParts == 0) {
            slots[unit / kParts] = at.slot;
            if constexpr (kSteps == 1)
                await_stage(shared, stage, depth, first, at);
            else
                ptx::mbarrier_wait_parity(&shared.full[at.slot], at.parity);
        }
        ptx::wgmma_fence();
        multiply_part<Math>(partial[unit % kPartials], stage.a + at.slot * (Tile::kStageBytes / 16),
                            stage.b + at.slot * (Tile::kStageBytes / 16), unit % kParts, false);
        ptx::wgmma_commit();
        scales.load(scale[unit % kPartials], first + unit / kParts);
        ptx::wgmma_wait<kPartials - 1>();
        if (unit >= kPartials - 1) add(unit - (kPartials - 1));
        if (unit % kParts == kParts - 1) at.advance();
    }
    if constexpr (kPartials == 2) {
        ptx::wgmma_wait<0>();
        add(kUnits - 1);
    }
}

/* `steps` steps, at most a ring of stages, into one partial sum that is then added. */
template <typename Math, typename Tile, int kCount>
__device__ __forceinline__ void multiply_between_promotions(float (&sum)[kCount], Sm90Shared<Tile> &shared,
                                                            const StageDescriptors &stage, const Depth &depth,
                                                            int first, int steps, RingPosition<Tile::kStages> &at) {
    float partial[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) partial[i] = 0.0f;
    RingPosition<Tile::kStages> back = at;
    for (int step = 0; step < steps; ++step, at.advance()) {
        await_stage(shared, stage, depth, first + step, at);
        ptx::wgmma_fence();
        multiply_part<Math>(partial, stage.a + at.slot * (Tile::kStageBytes / 16),
                            stage.b + at.slot * (Tile::kStageBytes / 16), 0, true);
        ptx::wgmma_commit();
    }
    ptx::wgmma_wait<0>();
    for (int step = 0; step < steps; ++step, back.advance()) hand_back(shared, back.slot);
    promote(sum, partial, NoScales::Step{});
}

/* All of K of one tile; every stage is waited for and handed back in order. */
template <typename Math, typename Tile, int kParts, int kCount, typename Scales>
__device__ __forceinline__ void multiply_tile(float (&sum)[kParts][kCount], Sm90Shared<Tile> &shared,
                                              const StageDescriptors &stage, const Depth &depth, const Scales &scales,
                                              int steps_per_promote, RingPosition<Tile::kStages> &at) {
    const int steps = depth.steps;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[part][i] = 0.0f;

    int step = 0;
    if constexpr (Math::kPromote) {
        if constexpr (kParts == 1 && !Math::kScaled)
            for (; steps_per_promote > 1 && step < steps; step += steps_per_promote)
                multiply_between_promotions<Math>(sum[0], shared, stage, depth, step,
                                                  min(steps_per_promote, steps - step), at);
        const int chained = Tile::kChain > 1 && depth.tail > 0 ? steps - 1 : steps;
        for (; step + Tile::kChain <= chained; step += Tile::kChain)
            multiply_chain<Math, Tile, Tile::kChain>(sum, shared, stage, depth, scales, step, at);
        if constexpr (Tile::kChain > 1)
            for (; step < steps; ++step) multiply_chain<Math, Tile, 1>(sum, shared, stage, depth, scales, step, at);
    } else {
        int before = 0; /* the slot of the step before */
        for (; step < steps; ++step, before = at.slot, at.advance()) {
            await_stage(shared, stage, depth, step, at);
            ptx::wgmma_fence();
#pragma unroll
            for (int part = 0; part < kParts; ++part)
                multiply_part<Math>(sum[part], stage.a + at.slot * (Tile::kStageBytes / 16),
                                    stage.b + at.slot * (Tile::kStageBytes / 16), part, true);
            ptx::wgmma_commit();
            if (step > 0) {
                ptx::wgmma_wait<1>();
                hand_back(shared, before);
            }
        }
        ptx::wgmma_wait<0>();
        if (steps > 0) hand_back(shared, before);
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) ptx::wgmma_hold(sum[part]);
}

/* Stands in for multiply_tile where a warpgroup has no rows. */
template <typename Tile>
__device__ __forceinline__ void skip_tile(Sm90Shared<Tile> &shared, const StageDescriptors &stage, const Depth &depth,
                                          RingPosition<Tile::kStages> &at) {
    for (int step = 0; step < depth.steps; ++step, at.advance()) {
        await_stage(shared, stage, depth, step, at);
        __syncwarp();
        hand_back(shared, at.slot);
    }
}

/* Two adjacent sums of a row to a slab of 16 rows of 128 bytes, 16-byte chunk c of row r at c ^ (r % 8). */
template <typename T>
__device__ __forceinline__ void store_pair(uint8_t *slab, int row, int byte, float first, float second) {
    struct alignas(2 * sizeof(T)) Pair {
        T element[2];
    };
    *reinterpret_cast<Pair *>(slab + row * kSm90SlabBytes + (byte / 16 ^ row % 8) * 16 +
                              byte % 16) = {from_float<T>(first), from_float<T>(second)};
}

/* Sums of 8 columns at a time, as a warp's lanes hold them: block i of the tile. */
template <int kParts, int kCount>
__device__ __forceinline__ float *block_of(float (&sum)[kParts][kCount], int i) {
    constexpr int kPartBlocks = kCount / 4;
    return &sum[i / kPartBlocks][i % kPartBlocks * 4];
}

/* Converts and stores the first `count` of a warp's 16 rows. They pass through a slab, so that each store writes whole
 * lines. */
template <typename T, int kParts, int kCount>
__device__ __forceinline__ void store_sums(float (&sum)[kParts][kCount], const GemmSm90Args &args, const Sm90Work &work,
                                           uint8_t *slab, int64_t first_row, int count) {
    constexpr int kSize = sizeof(T), kSlabColumns = kSm90SlabBytes / kSize, kChunkColumns = 16 / kSize;
    constexpr int kSlabs = kParts * kCount * 2 / kSlabColumns, kBlocks = kSlabColumns / 8;
    const Epilogue &to = args.epilogue;
    const int lane = threadIdx.x % 32, chunk = lane % 8;
    T *const out =
        static_cast<T *>(to.out) + work.group * to.out_group_stride + first_row * to.out_stride + work.first_column;
    const bool aligned = args.out_aligned && work.first_column % kChunkColumns == 0;
    const int columns = work.columns;
#pragma unroll
    for (int part = 0; part < kSlabs; ++part) {
        __syncwarp();
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            const float *sums = block_of(sum, part * kBlocks + block);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                store_pair<T>(slab, lane / 4 + 8 * half, (block * 8 + lane % 4 * 2) * kSize, sums[2 * half],
                              sums[2 * half + 1]);
        }
        __syncwarp();
        const int column = part * kSlabColumns + chunk * kChunkColumns;
#pragma unroll
        for (int row = lane / 8; row < 16; row += 4) {
            const uint8_t *source = slab + row * kSm90SlabBytes + (chunk ^ row % 8) * 16;
            T *target = out + row * to.out_stride + column;
            if (row >= count) continue;
            if (aligned && column + kChunkColumns <= columns) {
                *reinterpret_cast<uint4 *>(target) = *reinterpret_cast<const uint4 *>(source);
            } else {
#pragma unroll 1
                for (int i = 0; i < kChunkColumns && column + i < columns; ++i)
                    target[i] = reinterpret_cast<const T *>(source)[i];
            }
        }
    }
}

/* The same for every other output: activations, SwiGLU, fp8, sums that are added. 32 columns at a time go through the
 * slab as float32; the others move up behind them, so that one copy of this code serves all. */
template <int kParts, int kCount>
__device__ __forceinline__ void finish_sums(float (&sum)[kParts][kCount], const GemmSm90Args &args,
                                            const Sm90Work &work, uint8_t *slab, int64_t first_row, int count) {
    constexpr int kColumns = kParts * kCount * 2, kSlabColumns = kSm90SlabBytes / 4, kBlocks = kSlabColumns / 8;
    const int lane = threadIdx.x % 32, chunk = lane % 8;
#pragma unroll 1
    for (int column = 0; column < work.columns; column += kSlabColumns) {
        __syncwarp();
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                store_pair<float>(slab, lane / 4 + 8 * half, (block * 8 + lane % 4 * 2) * 4,
                                  block_of(sum, block)[2 * half], block_of(sum, block)[2 * half + 1]);
#pragma unroll
        for (int block = kBlocks; block < kColumns / 8; ++block)
#pragma unroll
            for (int i = 0; i < 4; ++i) block_of(sum, block - kBlocks)[i] = block_of(sum, block)[i];
        __syncwarp();
        const int first = column + chunk * 4, columns = min(work.columns - first, 4);
#pragma unroll 1
        for (int row = lane / 8; row < count && columns > 0 && row < 16; row += 4) {
            const float4 sums = *reinterpret_cast<const float4 *>(slab + row * kSm90SlabBytes + (chunk ^ row % 8) * 16);
            float value[4] = {sums.x, sums.y, sums.z, sums.w};
            activate_and_store(args.epilogue, value, work.group, first_row + row, work.first_column + first, columns);
        }
    }
}

/* Scales, bias and store of a warpgroup's 64 rows, of which the first `count` are the group's. */
template <int kParts, int kCount>
__device__ __forceinline__ void finish_tile(float (&sum)[kParts][kCount], const GemmSm90Args &args,
                                            const Sm90Work &work, int64_t first_row, int count, uint8_t *slabs) {
    const Epilogue &to = args.epilogue;
    const int local_row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    float scale_a[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = local_row + 8 * half;
        scale_a[half] = to.alpha;
        if (!to.block_scaled && row < count) scale_a[half] *= scale_at(to.scale_a, work.group, first_row + row);
    }

    if ((to.scale_b.step == 0 || to.block_scaled) && to.bias == nullptr) {
        const float scale_b = to.block_scaled ? 1.0f : scale_at(to.scale_b, work.weight, 0);
#pragma unroll
        for (int part = 0; part < kParts; ++part)
#pragma unroll
            for (int i = 0; i < kCount; ++i) sum[part][i] *= scale_a[i / 2 % 2] * scale_b;
    } else {
#pragma unroll
        for (int part = 0; part < kParts; ++part)
#pragma unroll
            for (int pair = 0; pair < kCount / 2; ++pair) {
                const int block = pair / 2, i = pair % 2;
                const int local_column = part * kCount * 2 + block * 8 + threadIdx.x % 4 * 2 + i;
                if (local_column < work.columns) {
                    const int64_t column = work.first_column + local_column;
                    const float scale_b = to.block_scaled ? 1.0f : scale_at(to.scale_b, work.weight, column);
                    const float bias =
                        to.bias ? load_as_float(to.bias, work.weight * to.bias_step + column, to.bias_dtype) : 0.0f;
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float &value = sum[part][4 * block + 2 * half + i];
                        value = fmaf(value, scale_a[half] * scale_b, bias);
                    }
                }
            }
    }

    const int warp_row = threadIdx.x % 128 / 32 * 16, warp_count = count - warp_row;
    uint8_t *slab = slabs + (threadIdx.x / 32 - 4) * 16 * kSm90SlabBytes;
    if (!args.plain) {
        finish_sums(sum, args, work, slab, first_row + warp_row, warp_count);
    } else if (to.out_dtype == FG_FLOAT16) {
        store_sums<__half>(sum, args, work, slab, first_row + warp_row, warp_count);
    } else if (to.out_dtype == FG_BFLOAT16) {
        store_sums<__nv_bfloat16>(sum, args, work, slab, first_row + warp_row, warp_count);
    } else {
        store_sums<float>(sum, args, work, slab, first_row + warp_row, warp_count);
    }
}

template <typename Math, typename Tile>
__device__ __forceinline__ void consume(Sm90Shared<Tile> &shared, uint8_t *stages, const GemmSm90Args &args) {
    const int warpgroup = threadIdx.x / 128 - 1;
    RingPosition<Tile::kTileSlots> slot;
    RingPosition<Tile::kStages> at;
    const StageDescriptors stage = {stages, ptx::wgmma_descriptor(stages + warpgroup * Tile::kBytesA),
                                    ptx::wgmma_descriptor(stages + Tile::kWarpgroups * Tile::kBytesA)};
    for (;; release_work(shared, slot)) {
        const Sm90Work &work = next_work(shared, slot);
        if (work.group < 0) return;
        const Depth depth = depth_of(work, args);
        const int count = work.rows - warpgroup * Tile::kWarpgroupRows;
        if (count <= 0) {
            skip_tile(shared, stage, depth, at);
            continue;
        }
        const int64_t first_row = work.first_row + int64_t{warpgroup} * Tile::kWarpgroupRows;
        const auto scales = [&] {
            if constexpr (Math::kScaled)
                return row_scales_of(args, work, first_row, count);
            else
                return NoScales{};
        }();
        constexpr int kParts = Math::kPromote ? Tile::kPromotedParts : 1;
        float sum[kParts][Tile::kBlockN / kParts / 2];
        multiply_tile<Math>(sum, shared, stage, depth, scales, args.steps_per_promote, at);
        finish_tile(sum, args, work, work.first_row + int64_t{warpgroup} * Tile::kWarpgroupRows,
                    work.rows - warpgroup * Tile::kWarpgroupRows, stages + Tile::kStages * Tile::kStageBytes);
    }
}

/* ---- kernel ---- */

template <typename Math, typename Tile>
__device__ __forceinline__ void gemm_sm90_body(const CUtensorMap &map_a, const CUtensorMap &map_b,
                                               const GemmSm90Args &args) {
    extern __shared__ uint8_t dynamic[];
    __shared__ Sm90Shared<Tile> shared;
    uint8_t *stages = dynamic + (-ptx::shared_address(dynamic) & 1023u);
    const int warp = threadIdx.x / 32;

    if (threadIdx.x == 0) {
        init_rings(shared);
        ptx::prefetch_tensor_map(&map_a);
        ptx::prefetch_tensor_map(&map_b);
    }
    if constexpr (Tile::kCluster == 1)
        __syncthreads();
    else
        ptx::cluster_sync();

    if (warp < 4) {
        ptx::setmaxnreg_dec<Tile::kProducerRegisters>();
        if (warp == 0)
            produce(shared, stages, map_a, map_b, args);
        else if (warp == 1)
            schedule(shared, args);
    } else {
        ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
        consume<Math>(shared, stages, args);
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

/* ---- host ---- */

inline TensorRows make_rows(const fg_tensor &tensor) {
    const bool grouped = tensor.ndim == 3;
    const int rows = tensor.ndim - 2;
    return {tensor.data,         tensor.shape[rows + 1] * static_cast<int64_t>(fg_dtype_size(tensor.dtype)),
            tensor.shape[rows],  grouped ? tensor.shape[0] : 1,
            pitch(tensor, rows), grouped ? pitch(tensor, 0) : 0};
}

/* What both Hopper kernels are told. */
inline GemmSm90Args make_args(const fg_gemm_params &params) {
    GemmSm90Args args = {};
    args.space = make_tile_space(params);
    args.epilogue = make_epilogue(params);
    args.a_grouped = params.a.ndim == 3;
    args.b_grouped = params.b.ndim == 3;
    return args;
}

/* Once per device and kernel: `allowed` has a bit for each device. */
template <typename Kernel>
fg_status allow_shared(Kernel *kernel, int bytes, std::atomic<uint64_t> &allowed, const fg_queue *queue,
                       fg_error *error) {
    const uint64_t device_bit = queue->device_index < 64 ? uint64_t{1} << queue->device_index : 0;
    if (allowed.load(std::memory_order_relaxed) & device_bit) return FG_OK;
    FG_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    allowed.fetch_or(device_bit, std::memory_order_relaxed);
    return FG_OK;
}

template <typename Kernel>
fg_status launch_clusters(Kernel *kernel, int64_t blocks, int cluster_blocks, int threads, int shared_bytes,
                          const CUtensorMap &map_a, const CUtensorMap &map_b, const GemmSm90Args &args,
                          const fg_queue *queue, fg_error *error) {
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(cluster_blocks), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = {static_cast<unsigned>(blocks)};
    config.blockDim = {static_cast<unsigned>(threads)};
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream_of(queue);
    config.attrs = &cluster;
    config.numAttrs = 1;
    FG_CUDA(cudaLaunchKernelEx(&config, kernel, map_a, map_b, args));
    return FG_OK;
}

/* The product of a plan whose tiles have fewer than 128 rows. (gemm_decode_sm90.cu) */
fg_status gemm_decode_sm90(const fg_gemm_params &params, const fg_plan &plan, int num_sms, const fg_queue *queue,
                           fg_error *error);

}  // namespace flexgemm
