/*
 * The device side of the hash table: open addressing with linear probing. A slot is empty while its key is all ones;
 * the key of all ones itself has the last slot. (hash_table.cu)
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
    int64_t stride;   /* of keys, in elements */
    int64_t capacity; /* slots but the last, which is that of the key kEmpty */
    KeyTableState *state;

    KeyTable(const fg_tensor &table_keys, const fg_tensor &table_state)
        : keys(static_cast<Key *>(table_keys.data)),
          stride(table_keys.strides[0]),
          capacity(table_keys.shape[0] - 1),
          state(static_cast<KeyTableState *>(table_state.data)) {}

    __device__ Key *at(int64_t slot) const { return keys + slot * stride; }

    /* The finaliser of MurmurHash3. */
    static __device__ Word hash(Key key) {
        Word hash = key;
        hash = (hash ^ hash >> 33) * 0xff51afd7ed558ccdull;
        hash = (hash ^ hash >> 33) * 0xc4ceb9fe1a85ec53ull;
        return hash ^ hash >> 33;
    }

    /* The hash scaled to the number of slots: greater hashes begin at later slots. */
    __device__ int64_t first_slot(Key key) const { return static_cast<int64_t>(__umul64hi(hash(key), capacity)); }

    __device__ int64_t next(int64_t slot) const { return slot + 1 < capacity ? slot + 1 : 0; }

    /* How far from its first slot a key of earlier calls may lie. */
    __device__ Word farthest() const {
        const Word longest = *const_cast<volatile Word *>(&state->longest);
        return longest > kShortWay ? longest : kShortWay;
    }

    /* The slot of a key, taken for it if need be; -1 when there is none left. */
    __device__ int64_t claim(Key key) const {
        if (key == kEmpty) {
            atomicExch(at(capacity), Key{0});
            return capacity;
        }
        int64_t slot = first_slot(key);
        for (int64_t steps = 0; steps < capacity; ++steps, slot = next(slot)) {
            Key seen = *at(slot);
            if (seen == kEmpty) {
                seen = atomicCAS(at(slot), kEmpty, key);
                if (seen == kEmpty) seen = key;
            }
            if (seen == key) {
                const Word way = static_cast<Word>(steps);
                if (way > kShortWay && way > state->longest) atomicMax(&state->longest, way);
                return slot;
            }
            if (steps % kShortWay == kShortWay - 1 && *const_cast<volatile Word *>(&state->full) &&
                static_cast<Word>(steps) >= farthest())
                return -1;
        }
        atomicExch(&state->full, 1ull);
        return -1;
    }

    /* The slot that holds the key, or -1. */
    __device__ int64_t find(Key key) const {
        if (key == kEmpty) return *at(capacity) == kEmpty ? -1 : capacity;
        int64_t slot = first_slot(key);
        Key seen = *at(slot);
        if (seen == key) return slot;
        if (seen == kEmpty) return -1;
        const Word last = farthest();
        for (int64_t steps = 1; steps < capacity && static_cast<Word>(steps) <= last; ++steps) {
            slot = next(slot);
            seen = *at(slot);
            if (seen == key) return slot;
            if (seen == kEmpty) return -1;
        }
        return -1;
    }
};

}  // namespace flexgemm
