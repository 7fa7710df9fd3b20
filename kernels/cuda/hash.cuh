/*
 * Open-addressing hash table from a voxel to the lowest row that holds it.
 *
 * A slot is a run of eight voxels along z: `keys` says which run, `rows` (32 bytes a slot, one sector of memory) has a
 * row for each of its voxels. Neighbours along z cost one probe and one sector between them, and a run that does not
 * exist is known after the probe. Adjacent rows of a scene in any spatial order ask for the same slots, so that a
 * warp's loads fall together.
 *
 * There are one and a half slots a row: even where every voxel has a run of its own, linear probing ends soon. All
 * bytes 0xFF is the empty table: no run has that number, and the empty row is -1, or, unsigned, the largest number,
 * which atomicMin then lowers.
 *
 * Run: uint32_t where the grid has few enough runs, as almost every one does, else unsigned long long. The lookup is
 * bound by instructions, and 64-bit ones are several.
 */
#pragma once

#include <cstdint>

namespace flexgemm {

constexpr int kRunVoxels = 8;

template <class Run>
struct HashTable {
    static constexpr Run kEmpty = ~Run{0};
    static constexpr int kBytesPerSlot = sizeof(Run) + kRunVoxels * sizeof(int32_t);

    int32_t *rows; /* (capacity, kRunVoxels) */
    Run *keys;     /* (capacity) */
    uint32_t capacity;

    /* Below 2^32 for every count that int32 can number. */
    static uint32_t capacity_for(int64_t count) { return static_cast<uint32_t>(count + count / 2 + 64); }

    /* Two rounds of multiplication (by constants of MurmurHash3), scaled to the capacity. No two of 2^32 consecutive
     * runs share a hash before it is scaled. */
    __device__ uint32_t home(Run run) const {
        uint32_t hash = static_cast<uint32_t>(run) * 0x85ebca6bu;
        if constexpr (sizeof(Run) == 8) hash += static_cast<uint32_t>(run >> 32) * 0xcc9e2d51u;
        hash = (hash ^ hash >> 15) * 0xc2b2ae35u;
        return __umulhi(hash ^ hash >> 16, capacity);
    }

    __device__ uint32_t next(uint32_t slot) const { return slot + 1 < capacity ? slot + 1 : 0; }

    /* The slot of a run, claimed for it if need be. Which slot that is is a race. There are more slots than rows, so
     * that a free one is met, here and in find(). */
    __device__ uint32_t claim(Run run) {
        uint32_t slot = home(run);
        for (;; slot = next(slot)) {
            const Run seen = atomicCAS(&keys[slot], kEmpty, run);
            if (seen == kEmpty || seen == run) return slot;
        }
    }

    /* Of the rows that a voxel is given the lowest one stays, in whatever order they come. */
    __device__ void insert(uint32_t slot, uint32_t voxel, int32_t row) {
        int32_t *entry = rows + static_cast<uint64_t>(slot) * kRunVoxels + voxel;
        atomicMin(reinterpret_cast<unsigned int *>(entry), static_cast<unsigned int>(row));
    }

    /* The lowest rows of the run's voxels, each -1 where there is none; NULL when it has no voxel. */
    __device__ const int32_t *find(Run run) const {
        uint32_t slot = home(run);
        Run seen = keys[slot];
        while (seen != run && seen != kEmpty) {
            slot = next(slot);
            seen = keys[slot];
        }
        return seen == run ? rows + static_cast<uint64_t>(slot) * kRunVoxels : nullptr;
    }
};

}  // namespace flexgemm
