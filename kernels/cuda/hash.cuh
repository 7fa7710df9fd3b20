/*
 * Open-addressing hash table from a 64-bit voxel key to the lowest row that holds it.
 *
 * A slot is a run of eight consecutive keys, that is of eight voxels along z: `keys` (8 bytes a slot) says which run,
 * `rows` (32 bytes a slot, one sector of memory) has a row for each of its voxels. Neighbours along z cost one probe
 * and one sector between them, and a run that does not exist is known after the probe. Adjacent rows of a scene in
 * any spatial order ask for the same slots, so that a warp's loads fall together.
 *
 * There are one and a half slots a row: even where every voxel has a run of its own, linear probing ends soon. All
 * bytes 0xFF is the empty table: no key uses all 64 bits, and the empty row is -1, or, unsigned, the largest number,
 * which atomicMin then lowers.
 */
#pragma once

#include <cstdint>

namespace flexgemm {

struct HashTable {
    static constexpr int kRun = 8;
    static constexpr unsigned long long kEmptyKey = ~0ull;
    static constexpr int kBytesPerSlot = sizeof(unsigned long long) + kRun * sizeof(int32_t);

    int32_t *rows;            /* (capacity, kRun) */
    unsigned long long *keys; /* (capacity) */
    uint32_t capacity;

    /* Below 2^32 for every count that int32 can number. */
    static uint32_t capacity_for(int64_t count) { return static_cast<uint32_t>(count + count / 2 + 64); }

    /* Two rounds of multiplication by odd constants (those of MurmurHash3), scaled to the capacity. 32-bit arithmetic:
     * the lookup is bound by instructions. Up to 2^32 runs, that is 2^35 voxels, no two runs share a hash. */
    __device__ uint32_t home(uint64_t run) const {
        uint32_t hash = static_cast<uint32_t>(run) * 0x85ebca6bu + static_cast<uint32_t>(run >> 32) * 0xcc9e2d51u;
        hash = (hash ^ hash >> 15) * 0xc2b2ae35u;
        return __umulhi(hash ^ hash >> 16, capacity);
    }

    __device__ uint32_t next(uint32_t slot) const { return slot + 1 < capacity ? slot + 1 : 0; }

    /* The slot of a run, claimed for it if need be. Which slot that is is a race. */
    __device__ uint32_t claim(uint64_t run) {
        uint32_t slot = home(run);
        for (uint32_t probe = 0; probe < capacity; ++probe) {
            const unsigned long long seen = atomicCAS(&keys[slot], kEmptyKey, run);
            if (seen == kEmptyKey || seen == run) break;
            slot = next(slot);
        }
        return slot;
    }

    /* Of the rows that a key is given the lowest one stays, in whatever order they come. */
    __device__ void insert(uint32_t slot, uint64_t key, int32_t row) {
        int32_t *entry = rows + static_cast<uint64_t>(slot) * kRun + key % kRun;
        atomicMin(reinterpret_cast<unsigned int *>(entry), static_cast<unsigned int>(row));
    }

    /* The lowest rows of the run's voxels, each -1 where there is none; NULL when it has no voxel. */
    __device__ const int32_t *find(uint64_t run) const {
        uint32_t slot = home(run);
        for (uint32_t probe = 0; probe < capacity; ++probe) {
            const unsigned long long seen = keys[slot];
            if (seen == run) return rows + static_cast<uint64_t>(slot) * kRun;
            if (seen == kEmptyKey) return nullptr;
            slot = next(slot);
        }
        return nullptr;
    }
};

}  // namespace flexgemm
