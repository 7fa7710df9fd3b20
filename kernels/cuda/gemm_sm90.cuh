/*
 * GEMM of Hopper: D = scale_a * scale_b * A . B^T + bias for fp8, fp16 and bf16 operands, dense and m-grouped ragged.
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
 * Ragged groups: A's box starts at the group's rows and may reach into the next group's; those sums are not stored. A
 * warpgroup whose 64 rows all lie past the end neither loads nor multiplies.
 */
#pragma once

#include <cuda.h>

#include "common.cuh"
#include "gemm_epilogue.cuh"
#include "ptx.cuh"
#include "scheduler.cuh"

namespace flexgemm {

struct GemmSm90Args {
    int64_t m, n;
    int64_t row_tiles, column_tiles;
    int32_t steps; /* of K, one stage each */
    GroupOffsets offsets;
    Epilogue epilogue;
    bool out_aligned; /* rows of out start at multiples of 16 bytes */
};

/* Each kind: whether its sums are promoted; the product of 64 rows and kColumns columns, 32 bytes of K. */
#define FG_SM90_MATH(Name, promote, wgmma)                                                                             \
    struct Name {                                                                                                      \
        static constexpr bool kPromote = promote;                                                                      \
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
    int32_t first_row, rows, first_column, group;
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

/* ---- scheduler warp ---- */

template <typename Tile>
__device__ __forceinline__ void schedule(Sm90Shared<Tile> &shared, const GemmSm90Args &args) {
    RingPosition<Tile::kTileSlots> at;
    const auto hand_over = [&](const Sm90Work &work) {
        ptx::mbarrier_wait_parity(&shared.work_empty[at.slot], at.parity ^ 1);
        __syncwarp(); /* a lane that looked later could find the slot filled and emptied again, and wait for ever */
        if (threadIdx.x % 32 == 0) {
            shared.work[at.slot] = work;
            ptx::mbarrier_arrive(&shared.work_full[at.slot]);
        }
        __syncwarp();
        at.advance();
    };

    const int64_t rank = Tile::kCluster == 1 ? 0 : ptx::cluster_block_rank();
    int64_t row_tiles = args.row_tiles; /* when ragged: a bound, until the end of the groups is seen */
    GroupCursor cursor = {0, args.offsets.data ? group_bound(args.offsets, 0, args.m) : 0, 0};
    for (int64_t tile = blockIdx.x / Tile::kCluster; tile < args.row_tiles * args.column_tiles;
         tile += gridDim.x / Tile::kCluster) {
        const int64_t band = first_row_of_band(tile, args.column_tiles);
        if (band >= row_tiles) break;
        int64_t row_tile, column_tile;
        rasterise(tile, args.row_tiles, args.column_tiles, &row_tile, &column_tile);
        if (row_tile >= row_tiles) continue;
        RowTile rows = {row_tile * Tile::kClusterM, args.m, 0};
        if (args.offsets.data)
            rows = find_row_tile<Tile::kClusterM>(args.offsets, args.m, row_tile, band, cursor, row_tiles);
        if (rows.begin >= rows.end) continue;
        const int64_t begin = rows.begin + rank * kSm90BlockM, count = rows.end - begin;
        hand_over({static_cast<int32_t>(begin), count < kSm90BlockM ? static_cast<int32_t>(count) : kSm90BlockM,
                   static_cast<int32_t>(column_tile * Tile::kBlockN), static_cast<int32_t>(rows.group)});
    }
    hand_over({0, 0, 0, -1});
}

/* The next tile, for the 32 threads of a warp. */
template <typename Tile>
__device__ __forceinline__ Sm90Work next_work(Sm90Shared<Tile> &shared, RingPosition<Tile::kTileSlots> &at) {
    ptx::mbarrier_wait_parity(&shared.work_full[at.slot], at.parity);
    const Sm90Work work = shared.work[at.slot];
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.work_empty[at.slot]);
    at.advance();
    return work;
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
        const int boxes_a = work.rows > 0 ? ceil_div(work.rows, Tile::kWarpgroupRows) : 0;
        for (int step = 0; step < args.steps; ++step, at.advance()) {
            ptx::mbarrier_wait_parity(&shared.empty[at.slot], at.parity ^ 1);
            __syncwarp(); /* as in the scheduler */
            if (threadIdx.x % 32 == 0) {
                uint8_t *a = stages + at.slot * Tile::kStageBytes, *b = a + Tile::kWarpgroups * Tile::kBytesA;
                uint64_t *full = &shared.full[at.slot];
                const int k = step * kSm90StepBytes;
                ptx::mbarrier_arrive_expect_tx(full, boxes_a * Tile::kBytesA + Tile::kBytesB);
                for (int box = 0; box < boxes_a; ++box)
                    ptx::tma_load_3d(a + box * Tile::kBytesA, &map_a, full, k,
                                     work.first_row + box * Tile::kWarpgroupRows, 0);
                if constexpr (Tile::kCluster == 1) {
                    ptx::tma_load_3d(b, &map_b, full, k, work.first_column, work.group);
                } else {
                    const int rank = static_cast<int>(ptx::cluster_block_rank());
                    constexpr int kShare = Tile::kBlockN / Tile::kCluster;
                    ptx::tma_load_3d_multicast(b + rank * kShare * kSm90StepBytes, &map_b, full, k,
                                               work.first_column + rank * kShare, work.group,
                                               (1 << Tile::kCluster) - 1);
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

template <int kCount>
__device__ __forceinline__ void promote(float (&sum)[kCount], float (&partial)[kCount]) {
    ptx::wgmma_hold(partial);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] += partial[i];
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

/* What a warpgroup multiplies: descriptors of its rows of A and of B in slot 0. */
struct StageDescriptors {
    uint64_t a, b;
};

/* kSteps stages into promoted sums. Unit of work u is part u % kParts of step u / kParts. With two partial sums, unit u
 * is multiplied while unit u - 1 is added; the compiler follows that through straight code only, so a chain of steps is
 * unrolled and drains at its end. */
template <typename Math, typename Tile, int kSteps, int kParts, int kCount>
__device__ __forceinline__ void multiply_chain(float (&sum)[kParts][kCount], Sm90Shared<Tile> &shared,
                                               const StageDescriptors &stage, RingPosition<Tile::kStages> &at) {
    constexpr int kUnits = kSteps * kParts, kPartials = Tile::kPartials;
    float partial[kPartials][kCount];
    int slots[kSteps] = {}; /* of the stages of the chain */
    const auto add = [&](int unit) {
        if (unit % kParts == kParts - 1) hand_back(shared, slots[unit / kParts]);
        promote(sum[unit % kParts], partial[unit % kPartials]);
    };
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
        if (unit % kParts == 0) {
            slots[unit / kParts] = at.slot;
            ptx::mbarrier_wait_parity(&shared.full[at.slot], at.parity);
        }
        ptx::wgmma_fence();
        multiply_part<Math>(partial[unit % kPartials], stage.a + at.slot * (Tile::kStageBytes / 16),
                            stage.b + at.slot * (Tile::kStageBytes / 16), unit % kParts, false);
        ptx::wgmma_commit();
        ptx::wgmma_wait<kPartials - 1>();
        if (unit >= kPartials - 1) add(unit - (kPartials - 1));
        if (unit % kParts == kParts - 1) at.advance();
    }
    if constexpr (kPartials == 2) {
        ptx::wgmma_wait<0>();
        add(kUnits - 1);
    }
}

/* All of K of one tile; every stage is waited for and handed back in order. */
template <typename Math, typename Tile, int kParts, int kCount>
__device__ __forceinline__ void multiply_tile(float (&sum)[kParts][kCount], Sm90Shared<Tile> &shared,
                                              const StageDescriptors &stage, int steps,
                                              RingPosition<Tile::kStages> &at) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[part][i] = 0.0f;

    if constexpr (Math::kPromote) {
        int step = 0;
        for (; step + Tile::kChain <= steps; step += Tile::kChain)
            multiply_chain<Math, Tile, Tile::kChain>(sum, shared, stage, at);
        if constexpr (Tile::kChain > 1)
            for (; step < steps; ++step) multiply_chain<Math, Tile, 1>(sum, shared, stage, at);
    } else {
        int before = 0; /* the slot of the step before */
        for (int step = 0; step < steps; ++step, before = at.slot, at.advance()) {
            ptx::mbarrier_wait_parity(&shared.full[at.slot], at.parity);
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
        hand_back(shared, before);
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) ptx::wgmma_hold(sum[part]);
}

/* Stands in for multiply_tile where a warpgroup has no rows. */
template <typename Tile>
__device__ __forceinline__ void skip_tile(Sm90Shared<Tile> &shared, int steps, RingPosition<Tile::kStages> &at) {
    for (int step = 0; step < steps; ++step, at.advance()) {
        ptx::mbarrier_wait_parity(&shared.full[at.slot], at.parity);
        __syncwarp();
        hand_back(shared, at.slot);
    }
}

/* Converts a warp's 16 rows and stores those of the first `count` rows that exist. Sums pass through a slab of shared
 * memory, 16 rows of 128 bytes with 16-byte chunk c of row r at c ^ (r % 8), so that each store writes whole lines. */
template <typename T, int kParts, int kCount>
__device__ __forceinline__ void store_sums(const float (&sum)[kParts][kCount], const GemmSm90Args &args, uint8_t *slab,
                                           int64_t first_row, int count, int64_t first_column) {
    struct alignas(2 * sizeof(T)) Pair {
        T element[2];
    };
    constexpr int kSize = sizeof(T), kSlabColumns = kSm90SlabBytes / kSize, kChunkColumns = 16 / kSize;
    constexpr int kSlabs = kParts * kCount * 2 / kSlabColumns, kBlocks = kSlabColumns / 8;
    const int lane = threadIdx.x % 32;
    T *const out = static_cast<T *>(args.epilogue.out);
#pragma unroll
    for (int part = 0; part < kSlabs; ++part) {
        __syncwarp();
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            constexpr int kPartBlocks = kCount / 4;
            const int all = part * kBlocks + block;
            const float *sums = &sum[all / kPartBlocks][all % kPartBlocks * 4];
            const int byte = (block * 8 + lane % 4 * 2) * kSize;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = lane / 4 + 8 * half;
                const Pair pair = {from_float<T>(sums[2 * half]), from_float<T>(sums[2 * half + 1])};
                *reinterpret_cast<Pair *>(slab + row * kSm90SlabBytes + (byte / 16 ^ row % 8) * 16 + byte % 16) = pair;
            }
        }
        __syncwarp();
        const int chunk = lane % 8;
        const int64_t column = first_column + part * kSlabColumns + chunk * kChunkColumns;
#pragma unroll
        for (int row = lane / 8; row < 16; row += 4) {
            const uint8_t *source = slab + row * kSm90SlabBytes + (chunk ^ row % 8) * 16;
            T *target = out + (first_row + row) * args.epilogue.out_stride + column;
            if (row >= count) continue;
            if (args.out_aligned && column + kChunkColumns <= args.n) {
                *reinterpret_cast<uint4 *>(target) = *reinterpret_cast<const uint4 *>(source);
            } else {
#pragma unroll 1
                for (int i = 0; i < kChunkColumns && column + i < args.n; ++i)
                    target[i] = reinterpret_cast<const T *>(source)[i];
            }
        }
    }
}

/* Scales, bias and store of a warpgroup's 64 rows, of which the first `count` are the group's. */
template <int kParts, int kCount>
__device__ __forceinline__ void finish_tile(float (&sum)[kParts][kCount], const GemmSm90Args &args,
                                            const Sm90Work &work, int64_t first_row, int count, uint8_t *slabs) {
    const Epilogue &to = args.epilogue;
    const int local_row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const int64_t row[2] = {first_row + local_row, first_row + local_row + 8};
    const bool row_valid[2] = {local_row < count, local_row + 8 < count};
    float scale_a[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) scale_a[half] = row_valid[half] ? scale_at(to.scale_a, 0, row[half]) : 0.0f;

    if (to.scale_b.step == 0 && to.bias == nullptr) {
        const float scale_b = scale_at(to.scale_b, work.group, 0);
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
                const int64_t column = work.first_column + part * kCount * 2 + block * 8 + threadIdx.x % 4 * 2 + i;
                if (column < args.n) {
                    const float scale_b = scale_at(to.scale_b, work.group, column);
                    const float bias =
                        to.bias ? load_as_float(to.bias, work.group * args.n + column, to.bias_dtype) : 0.0f;
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float &value = sum[part][4 * block + 2 * half + i];
                        value = fmaf(value, scale_a[half] * scale_b, bias);
                    }
                }
            }
    }

    const int warp_row = threadIdx.x % 128 / 32 * 16;
    uint8_t *slab = slabs + (threadIdx.x / 32 - 4) * 16 * kSm90SlabBytes;
    const auto store = [&](auto type) {
        store_sums<decltype(type)>(sum, args, slab, first_row + warp_row, count - warp_row, work.first_column);
    };
    if (to.out_dtype == FG_FLOAT16)
        store(__half{});
    else if (to.out_dtype == FG_BFLOAT16)
        store(__nv_bfloat16{});
    else
        store(float{});
}

template <typename Math, typename Tile>
__device__ __forceinline__ void consume(Sm90Shared<Tile> &shared, uint8_t *stages, const GemmSm90Args &args) {
    const int warpgroup = threadIdx.x / 128 - 1;
    RingPosition<Tile::kTileSlots> slot;
    RingPosition<Tile::kStages> at;
    const StageDescriptors stage = {ptx::wgmma_descriptor(stages + warpgroup * Tile::kBytesA),
                                    ptx::wgmma_descriptor(stages + Tile::kWarpgroups * Tile::kBytesA)};
    for (;;) {
        const Sm90Work work = next_work(shared, slot);
        if (work.group < 0) return;
        const int count = work.rows - warpgroup * Tile::kWarpgroupRows;
        if (count <= 0) {
            skip_tile(shared, args.steps, at);
            continue;
        }
        constexpr int kParts = Math::kPromote ? Tile::kPromotedParts : 1;
        float sum[kParts][Tile::kBlockN / kParts / 2];
        multiply_tile<Math>(sum, shared, stage, args.steps, at);
        finish_tile(sum, args, work, work.first_row + int64_t{warpgroup} * Tile::kWarpgroupRows, count,
                    stages + Tile::kStages * Tile::kStageBytes);
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

/* Two names for one body, so that a profile tells them apart. */
template <typename Math, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fp8_gemm_sm90_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
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
