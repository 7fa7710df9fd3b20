/*
 * Open-addressing hash table from a voxel to the lowest row that holds it. (That of any keys is hash_table.cu's.)
 *
 * A slot is a cell of 2 x 2 x 2 voxels: `keys` says which cell, `rows` (32 bytes a slot, one sector of memory) has a
 * row for each of its voxels. Voxels lie on surfaces, which a cell holds more of than any other shape of eight voxels
 * does, and the neighbours of a voxel in 3x3x3 lie in eight cells.
 *
 * Four slots are a bucket, whose keys are read at once. Four cells in a row along z have the same one, each a slot of
 * its own that it would rather have; where that is taken it has another, and where all are, the next bucket's. There
 * are one and a half slots a row: even where every voxel has a cell of its own, a second bucket is seldom looked at.
 * All bytes 0xFF is the empty table: no cell has that number, and the empty row is -1, or, unsigned, the largest
 * number, which atomicMin then lowers.
 *
 * Cell: uint32_t where the grid has few enough of them, as almost every one does, else unsigned long long. 64-bit
 * instructions are several.
 */
#pragma once

#include <cstdint>

#include "../plan.h"

namespace flexgemm {

constexpr int kCellVoxels = FG_CELL_VOXELS;

/* What any table of cells has: a slot is the rows of one cell's voxels, each -1 where there is none. */
struct CellRows {
    static constexpr uint32_t kNone = ~0u; /* no slot */

    int32_t *rows; /* (slots, kCellVoxels) */

    __device__ int32_t *at(uint32_t slot) const { return rows + uint64_t{slot} * kCellVoxels; }

    /* Of the rows that a voxel is given the lowest one stays, in whatever order they come. */
    __device__ void insert(uint32_t slot, uint32_t voxel, int32_t row) const {
        atomicMin(reinterpret_cast<unsigned int *>(at(slot) + voxel), static_cast<unsigned int>(row));
    }
};

template <class Number>
struct CellHash : CellRows {
    using Cell = Number;
    static constexpr Cell kEmpty = ~Cell{0}; /* of a slot; of a question: nothing to look for */
    static constexpr int kBucketSlots = FG_BUCKET_SLOTS;
    static constexpr int kBytesPerSlot = sizeof(Cell) + kCellVoxels * sizeof(int32_t);

    struct alignas(16) Bucket {
        Cell cell[kBucketSlots];
    };

    /* A lookup under way: several can be read before the first is asked about. */
    struct Probe {
        Cell cell;
        uint32_t bucket; /* its home */
        Bucket seen;
    };

    Bucket *keys; /* (capacity / kBucketSlots) */
    uint32_t capacity;

    /* In bytes_for(count) bytes of memory. */
    CellHash(void *memory, int64_t count)
        : CellRows{static_cast<int32_t *>(memory)},
          keys(reinterpret_cast<Bucket *>(rows + fg_hash_slots(count) * kCellVoxels)),
          capacity(static_cast<uint32_t>(fg_hash_slots(count))) {}

    static size_t bytes_for(int64_t count) { return static_cast<size_t>(fg_hash_slots(count)) * kBytesPerSlot; }

    __device__ uint32_t buckets() const { return capacity / kBucketSlots; }

    /* Two rounds of multiplication (by constants of MurmurHash3), scaled to the buckets. No two of 2^32 consecutive
     * rows of cells share a hash before it is scaled. */
    __device__ uint32_t home(Cell cell) const {
        const Cell row = cell / kBucketSlots;
        uint32_t hash = static_cast<uint32_t>(row) * 0x85ebca6bu;
        if constexpr (sizeof(Cell) == 8) hash += static_cast<uint32_t>(row >> 32) * 0xcc9e2d51u;
        hash = (hash ^ hash >> 15) * 0xc2b2ae35u;
        return __umulhi(hash ^ hash >> 16, buckets());
    }

    __device__ uint32_t next(uint32_t bucket) const { return bucket + 1 < buckets() ? bucket + 1 : 0; }

    /* The slots of the cells of a warp's lanes, claimed for them if need be. Lanes with the same cell as the lane
     * before them leave that to the first of them. */
    __device__ uint32_t claim(Cell cell) const {
        const int lane = threadIdx.x % 32;
        const Cell cell_before = __shfl_up_sync(~0u, cell, 1);
        const bool first = lane == 0 || cell != cell_before;
        const uint32_t slot = first && cell != kEmpty ? claim_one(cell) : kNone;
        const unsigned int firsts = __ballot_sync(~0u, first);
        const int claimer = 31 - __clz(firsts & (~0u >> (31 - lane)));
        return __shfl_sync(~0u, slot, claimer);
    }

    /* Which slot a cell gets is a race, but all who ask for it try slots in the same order, and one that another cell
     * has stays taken: they agree. There are more slots than rows, so that a free one is met, here and in find(). */
    __device__ uint32_t claim_one(Cell cell) const {
        for (uint32_t bucket = home(cell);; bucket = next(bucket)) {
            const Bucket seen = keys[bucket];
            uint32_t free = 0;
#pragma unroll
            for (int i = 0; i < kBucketSlots; ++i) {
                if (seen.cell[i] == cell) return bucket * kBucketSlots + i;
                free |= static_cast<uint32_t>(seen.cell[i] == kEmpty) << i;
            }
            for (int i = 0; i < kBucketSlots; ++i) {
                const uint32_t slot = (static_cast<uint32_t>(cell) + i) % kBucketSlots;
                if (!(free >> slot & 1)) continue;
                const Cell taken = atomicCAS(&keys[bucket].cell[slot], kEmpty, cell);
                if (taken == kEmpty || taken == cell) return bucket * kBucketSlots + slot;
            }
        }
    }

    __device__ Probe probe(Cell cell) const {
        const uint32_t bucket = home(cell);
        return {cell, bucket, keys[bucket]};
    }

    /* The slot of a cell, or kNone when it has no voxel. */
    __device__ uint32_t find(Probe probe) const {
        if (probe.cell == kEmpty) return kNone;
        for (;;) {
            uint32_t slot = kNone;
            bool full = true;
#pragma unroll
            for (int i = 0; i < kBucketSlots; ++i) {
                if (probe.seen.cell[i] == probe.cell) slot = probe.bucket * kBucketSlots + i;
                full = full && probe.seen.cell[i] != kEmpty;
            }
            if (slot != kNone || !full) return slot;
            probe.bucket = next(probe.bucket);
            probe.seen = keys[probe.bucket];
        }
    }
};

}  // namespace flexgemm
