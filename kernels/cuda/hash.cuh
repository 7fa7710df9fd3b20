/*
 * Open-addressing hash table from a voxel to the lowest row that holds it.
 *
 * A slot is a cell of 2 x 2 x 2 voxels: `keys` says which cell, `rows` (32 bytes a slot, one sector of memory) has a row
 * for each of its voxels. Voxels lie on surfaces, which a cell holds more of than any other shape of eight voxels does,
 * and the neighbours of a voxel in 3x3x3 lie in eight cells. Four cells in a row along z begin at slots next to each
 * other, so that their keys share a sector and their rows a line.
 *
 * There are one and a half slots a row: even where every voxel has a cell of its own, linear probing ends soon. All
 * bytes 0xFF is the empty table: no cell has that number, and the empty row is -1, or, unsigned, the largest number,
 * which atomicMin then lowers.
 *
 * Cell: uint32_t where the grid has few enough of them, as almost every one does, else unsigned long long. 64-bit
 * instructions are several.
 */
#pragma once

#include <cstdint>

namespace flexgemm {

constexpr int kCellVoxels = 8;

template <class Cell>
struct HashTable {
    static constexpr Cell kEmpty = ~Cell{0};
    static constexpr uint32_t kRow = 4; /* cells whose slots lie side by side */
    static constexpr int kBytesPerSlot = sizeof(Cell) + kCellVoxels * sizeof(int32_t);

    int32_t *rows; /* (capacity, kCellVoxels) */
    Cell *keys;    /* (capacity) */
    uint32_t capacity;

    /* A multiple of kRow; below 2^32 for every count that int32 can number. */
    static uint32_t capacity_for(int64_t count) { return static_cast<uint32_t>(count + count / 2 + 64) / kRow * kRow; }

    /* Two rounds of multiplication (by constants of MurmurHash3), scaled to the capacity. No two of 2^32 consecutive
     * rows of cells share a hash before it is scaled. */
    __device__ uint32_t home(Cell cell) const {
        const Cell row = cell / kRow;
        uint32_t hash = static_cast<uint32_t>(row) * 0x85ebca6bu;
        if constexpr (sizeof(Cell) == 8) hash += static_cast<uint32_t>(row >> 32) * 0xcc9e2d51u;
        hash = (hash ^ hash >> 15) * 0xc2b2ae35u;
        return __umulhi(hash ^ hash >> 16, capacity / kRow) * kRow + static_cast<uint32_t>(cell % kRow);
    }

    __device__ uint32_t next(uint32_t slot) const { return slot + 1 < capacity ? slot + 1 : 0; }

    /* The slot of a cell, claimed for it if need be. Which slot that is is a race. There are more slots than rows, so
     * that a free one is met, here and in find(). */
    __device__ uint32_t claim(Cell cell) {
        uint32_t slot = home(cell);
        for (;; slot = next(slot)) {
            const Cell seen = atomicCAS(&keys[slot], kEmpty, cell);
            if (seen == kEmpty || seen == cell) return slot;
        }
    }

    /* Of the rows that a voxel is given the lowest one stays, in whatever order they come. */
    __device__ void insert(uint32_t slot, uint32_t voxel, int32_t row) {
        int32_t *entry = rows + static_cast<uint64_t>(slot) * kCellVoxels + voxel;
        atomicMin(reinterpret_cast<unsigned int *>(entry), static_cast<unsigned int>(row));
    }

    /* The slot of a cell, or kNone when it has no voxel. `seen` is the key at `slot`, its home: several can be read
     * before the first is asked about. */
    static constexpr uint32_t kNone = ~0u;
    __device__ uint32_t find(Cell cell, uint32_t slot, Cell seen) const {
        while (seen != cell && seen != kEmpty) {
            slot = next(slot);
            seen = keys[slot];
        }
        return seen == cell ? slot : kNone;
    }

    /* The lowest rows of the cell's voxels, each -1 where there is none; NULL when it has no voxel. */
    __device__ const int32_t *find(Cell cell) const {
        const uint32_t at = home(cell), slot = find(cell, at, keys[at]);
        return slot != kNone ? rows + static_cast<uint64_t>(slot) * kCellVoxels : nullptr;
    }
};

}  // namespace flexgemm
