/*
 * Sums that are added to an output in float32, where tiles are short: the output's tile is copied to shared memory while
 * the sums are multiplied, added to there, and copied back.
 *
 * The copy engine can add to memory itself (gemm_store_sm90.cuh), but L2 adds some 1.3 TB/s of float32, where this reads
 * and writes 2 TB/s each. A warp of the producers has the copies for each warpgroup of consumers; they go on while the
 * next tile is multiplied. A warpgroup's 64 rows are boxes of 32 columns, swizzled as slabs are.
 */
#pragma once

#include "gemm_slabs_sm90.cuh"

namespace flexgemm {

template <typename Tile>
struct AddedOutput {
    static constexpr int kBoxColumns = kSm90SlabBytes / static_cast<int>(sizeof(float));
    static constexpr int kBoxes = Tile::kBlockN / kBoxColumns, kBoxBytes = Tile::kWarpgroupRows * kSm90SlabBytes;
    TileTurns<Tile> turns[Tile::kWarpgroups]; /* of the thread that copies, and of the warpgroup's */

    __device__ __forceinline__ void init() {
        for (TileTurns<Tile> &own : turns) own.init(1, ptx::kWarpgroup);
    }

    /* By the consumers. */
    __device__ __forceinline__ void leave(int slot) {
        turns[static_cast<int>(threadIdx.x) / ptx::kWarpgroup - 1].leave(slot);
    }

    __device__ __forceinline__ static uint8_t *rows_of(uint8_t *slabs, int warpgroup) {
        return slabs + warpgroup * (kBoxes * kBoxBytes);
    }
};

/* A thread's sums times the factors of their rows, to what is there. Of each 8 columns it has two in two rows. */
template <typename Tile, int kCount>
__device__ __forceinline__ void add_to_rows(const float (&sum)[kCount], const RowFactors &factors,
                                            AddedOutput<Tile> &output, int slot, int thread, uint8_t *slabs) {
    constexpr int kBlocks = AddedOutput<Tile>::kBoxColumns / 8; /* of 8 columns, in a box */
    static_assert(2 * kCount == Tile::kBlockN, "all columns of the tile");
    const int warpgroup = thread / ptx::kWarpgroup, lane = thread % 32;
    const int row = thread / 32 % 4 * 16 + lane / 4;
    uint8_t *box = AddedOutput<Tile>::rows_of(slabs, warpgroup);
    output.turns[warpgroup].await_ready(slot);
#pragma unroll
    for (int first = 0; first < kCount / 4; first += kBlocks, box += AddedOutput<Tile>::kBoxBytes) {
        float2 *at[2 * kBlocks], values[2 * kBlocks]; /* all of a box: each read waits for the memory's answer */
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
            at[i] = reinterpret_cast<float2 *>(box + place_in_turn(row + i % 2 * 8, i / 2, lane));
            values[i] = *at[i];
        }
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
            const int block = first + i / 2;
            const float2 sums =
                sums_in_turn(sums_of_block(sum, block, i % 2), sums_of_block(sum, block ^ 1, i % 2), lane);
            const float factor = factors.of[i % 2];
            *at[i] = {fmaf(sums.x, factor, values[i].x), fmaf(sums.y, factor, values[i].y)};
        }
    }
    ptx::fence_proxy_async();
}

/* By a warp of the producers: the output's rows of a warpgroup, to shared memory and back. */
template <typename Tile>
__device__ __forceinline__ void copy_output(Sm90Shared<Tile> &shared, AddedOutput<Tile> &output, uint8_t *slabs,
                                            const GemmSm90Args &args, int warpgroup) {
    using Output = AddedOutput<Tile>;
    const bool leads = ptx::elect();
    const uint64_t once = ptx::l2_evict_first();
    uint8_t *const rows = Output::rows_of(slabs, warpgroup);
    TileTurns<Tile> &turns = output.turns[warpgroup];
    RingPosition<Tile::kTileSlots> slot;
    for (;;) {
        const Sm90Work work = next_work(shared, slot);
        if (work.group < 0) break;
        const bool added = leads && work.boxed > warpgroup;
        const int row = work.first_row + warpgroup * Tile::kWarpgroupRows, group = args.out_grouped ? work.group : 0;
        const auto each_box = [&](const auto &copy) {
            for (int i = 0; i < Output::kBoxes; ++i)
                copy(rows + i * Output::kBoxBytes, work.first_column + i * Output::kBoxColumns);
        };
        if (added) {
            ptx::tma_wait_read<0>();
            ptx::mbarrier_arrive_expect_tx(&turns.ready, Output::kBoxes * Output::kBoxBytes);
            each_box([&](uint8_t *box, int column) {
                ptx::tma_load_3d(box, &args.map_out, &turns.ready, column, row, group, once);
            });
        } else if (leads) {
            ptx::mbarrier_arrive(&turns.ready);
        }
        __syncwarp();
        turns.await_done(slot.slot);
        if (added) {
            each_box([&](uint8_t *box, int column) { ptx::tma_store_3d(&args.map_out, box, column, row, group); });
            ptx::tma_commit();
        }
        __syncwarp();
        release_work(shared, slot);
    }
    if (leads) ptx::tma_wait_read<0>(); /* shared memory goes with the block */
}

}  // namespace flexgemm
