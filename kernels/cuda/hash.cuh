/*
 * Open-addressing hash table from a 64-bit voxel key to the lowest row that holds it.
 *
 * Structure of arrays in memory the caller owns: `keys` (8 bytes a slot) answers most probes alone, `rows` (4 bytes)
 * is read on a hit only. The capacity is a power of two of at least twice the rows, so that linear probing meets an
 * empty slot within a few steps. All bytes 0xFF is the empty table: no key uses all 64 bits, and the empty row is the
 * largest unsigned number, which atomicMin then lowers.
 *
 * Four consecutive keys, that is four voxels along z, share one 32-byte sector of `keys`: the home slot is the hash of
 * key / 4, times 4, plus key % 4. A thread that looks for the neighbours along z mostly finds them in a sector that it
 * has already fetched.
 */
#pragma once

#include <cstdint>

namespace flexgemm {

struct HashTable {
    unsigned long long *keys;
    unsigned int *rows;
    uint64_t mask; /* capacity - 1 */

    static constexpr unsigned long long kEmptyKey = ~0ull;
    static constexpr int kBytesPerSlot = sizeof(unsigned long long) + sizeof(unsigned int);

    __host__ __device__ static uint64_t capacity_for(int64_t count) {
        uint64_t capacity = 64;
        while (capacity < 2 * static_cast<uint64_t>(count)) capacity *= 2;
        return capacity;
    }

    /* The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every input bit reaches every output bit. */
    __device__ static uint64_t mix(uint64_t x) {
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
        return x ^ (x >> 31);
    }

    __device__ uint64_t home(uint64_t key) const { return ((mix(key >> 2) << 2) | (key & 3)) & mask; }

    /* Which thread claims a slot is a race, but not which row stays in it: the lowest of its key. */
    __device__ void insert(uint64_t key, unsigned int row) {
        uint64_t slot = home(key);
        for (uint64_t probe = 0; probe <= mask; ++probe) {
            const unsigned long long seen = atomicCAS(&keys[slot], kEmptyKey, key);
            if (seen == kEmptyKey || seen == key) {
                atomicMin(&rows[slot], row);
                return;
            }
            slot = (slot + 1) & mask;
        }
    }

    /* The lowest row of `key`, or -1. */
    __device__ int32_t find(uint64_t key) const {
        uint64_t slot = home(key);
        for (uint64_t probe = 0; probe <= mask; ++probe) {
            const unsigned long long seen = keys[slot];
            if (seen == key) return static_cast<int32_t>(rows[slot]);
            if (seen == kEmptyKey) return -1;
            slot = (slot + 1) & mask;
        }
        return -1;
    }
};

}  // namespace flexgemm
