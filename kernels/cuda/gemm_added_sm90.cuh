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
    /* Of each warpgroup: its rows are there, by the warp that copies; and it is done with them, by its threads. */
    uint64_t full[Tile::kWarpgroups], done[Tile::kWarpgroups];

    __device__ __forceinline__ void init() {
        for (int i = 0; i < Tile::kWarpgroups; ++i) {
            ptx::mbarrier_init(&full[i], 1);
            ptx::mbarrier_init(&done[i], ptx::kWarpgroup);
        }
    }

    /* By the consumers: slots tell the turns of tiles. */
    __device__ __forceinline__ void await(int warpgroup, int slot) {
        static_assert(Tile::kTileSlots % 2 == 0, "slots tell the turns of tiles");
        ptx::mbarrier_wait_parity(&full[warpgroup], slot % 2);
    }

    /* Behind each tile, added or not: who did not wait for one could take it for the one after the next. */
    __device__ __forceinline__ void leave(int slot) {
        const int warpgroup = static_cast<int>(threadIdx.x) / ptx::kWarpgroup - 1;
        await(warpgroup, slot);
        ptx::mbarrier_arrive(&done[warpgroup]);
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
    const bool odd = lane / 4 % 2; /* two rows beside each other have the same banks: one takes the blocks in turns */
    uint8_t *box = AddedOutput<Tile>::rows_of(slabs, warpgroup);
    output.await(warpgroup, slot);
#pragma unroll
    for (int first = 0; first < kCount / 4; first += kBlocks, box += AddedOutput<Tile>::kBoxBytes) {
        float2 *at[2 * kBlocks], values[2 * kBlocks]; /* all of a box: each read waits for the memory's answer */
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
            const int block = odd ? i / 2 ^ 1 : i / 2;
            at[i] = reinterpret_cast<float2 *>(box + place_in_slab(row + i % 2 * 8, block * 32 + lane % 4 * 8));
            values[i] = *at[i];
        }
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
            const float *even = &sum[4 * (first + i / 2) + i % 2 * 2],
                        *other = &sum[4 * (first + (i / 2 ^ 1)) + i % 2 * 2];
            const float factor = factors.of[i % 2];
            *at[i] = {fmaf(odd ? other[0] : even[0], factor, values[i].x),
                      fmaf(odd ? other[1] : even[1], factor, values[i].y)};
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
    uint64_t *const full = &output.full[warpgroup];
    RingPosition<Tile::kTileSlots> slot;
    for (;;) {
        const Sm90Work work = next_work(shared, slot);
        if (work.group < 0) break;
        const bool added = leads && work.boxed > warpgroup;
        const int row = work.first_row + warpgroup * Tile::kWarpgroupRows, group = args.out_grouped ? work.group : 0;
        if (added) {
            ptx::tma_wait_read<0>();
            ptx::mbarrier_arrive_expect_tx(full, Output::kBoxes * Output::kBoxBytes);
            for (int i = 0; i < Output::kBoxes; ++i)
                ptx::tma_load_3d(rows + i * Output::kBoxBytes, &args.map_out, full,
                                 work.first_column + i * Output::kBoxColumns, row, group, once);
        } else if (leads) {
            ptx::mbarrier_arrive(full);
        }
        __syncwarp();
        ptx::mbarrier_wait_parity(&output.done[warpgroup], slot.slot % 2);
        if (added) {
            for (int i = 0; i < Output::kBoxes; ++i)
                ptx::tma_store_3d(&args.map_out, rows + i * Output::kBoxBytes,
                                  work.first_column + i * Output::kBoxColumns, row, group);
            ptx::tma_commit();
        }
        __syncwarp();
        release_work(shared, slot);
    }
    if (leads) ptx::tma_wait_read<0>(); /* shared memory goes with the block */
}

}  // namespace flexgemm
