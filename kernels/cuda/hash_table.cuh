/*
 * The device side of the hash table: open addressing with linear probing. A slot is empty while its key is all ones; the
 * key of all ones itself has the last slot. (hash_table.cu)
 */
#pragma once

#include "common.cuh"

namespace flexgemm {

using Word = unsigned long long;

constexpr Word kShortWay = 64; /* slots that a key may lie from its first one without a note of it */

struct KeyTableState {
    Word full, longest;
};

template <class Key>
struct KeyTable {
    static constexpr Key kEmpty = ~Key{0};

    Key *keys;
    int64_t capacity; /* slots but the last, which is that of the key kEmpty */
    KeyTableState *state;

    /* The finaliser of MurmurHash3, scaled to the number of slots. */
    __device__ int64_t first_slot(Key key) const {
        Word hash = key;
        hash = (hash ^ hash >> 33) * 0xff51afd7ed558ccdull;
        hash = (hash ^ hash >> 33) * 0xc4ceb9fe1a85ec53ull;
        return static_cast<int64_t>(__umul64hi(hash ^ hash >> 33, capacity));
    }

    __device__ int64_t next(int64_t slot) const { return slot + 1 < capacity ? slot + 1 : 0; }

    /* The slot of a key, taken for it if need be; -1 when there is none left. */
    __device__ int64_t claim(Key key) const {
        if (key == kEmpty) {
            atomicExch(&keys[capacity], Key{0});
            return capacity;
        }
        int64_t slot = first_slot(key);
        for (int64_t steps = 0; steps < capacity; ++steps, slot = next(slot)) {
            Key seen = keys[slot];
            if (seen == kEmpty) {
                seen = atomicCAS(&keys[slot], kEmpty, key);
                if (seen == kEmpty) seen = key;
            }
            if (seen == key) {
                const Word way = static_cast<Word>(steps);
                if (way > kShortWay && way > state->longest) atomicMax(&state->longest, way);
                return slot;
            }
            if (steps % kShortWay == kShortWay - 1 && *const_cast<volatile Word *>(&state->full)) return -1;
        }
        atomicExch(&state->full, 1ull);
        return -1;
    }

    /* Where the search for a key begins and what lies there: several can be read before the first is asked about. */
    struct Probe {
        Key key, seen;
        int64_t slot;
    };
    __device__ Probe probe(Key key) const {
        const int64_t slot = key == kEmpty ? capacity : first_slot(key);
        return {key, keys[slot], slot};
    }

    /* The slot that holds the key, or -1. */
    __device__ int64_t find(Probe at) const {
        if (at.key == kEmpty) return at.seen == kEmpty ? -1 : capacity;
        if (at.seen == at.key) return at.slot;
        if (at.seen == kEmpty) return -1;
        const Word longest = state->longest > kShortWay ? state->longest : kShortWay;
        for (int64_t steps = 1; steps < capacity && static_cast<Word>(steps) <= longest; ++steps) {
            at.slot = next(at.slot);
            at.seen = keys[at.slot];
            if (at.seen == at.key) return at.slot;
            if (at.seen == kEmpty) return -1;
        }
        return -1;
    }

    __device__ int64_t find(Key key) const { return find(probe(key)); }
};

}  // namespace flexgemm
