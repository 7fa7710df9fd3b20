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

    /* What other threads have made of it by now. */
    static __device__ Word now(const Word &word) { return *const_cast<const volatile Word *>(&word); }

    /* Before the key can be seen there: who finds the table full, and so has seen it, looks that far. */
    __device__ void note(Word way) const {
        if (way <= kShortWay || way <= now(state->longest)) return;
        atomicMax(&state->longest, way);
        __threadfence();
    }

    /* Whether the table is full, and no key lies so far. */
    __device__ bool ends_before(Word way) const {
        if (!now(state->full)) return false;
        __threadfence();
        return way > now(state->longest);
    }

    /* The slot of a key, taken for it if need be; -1 when there is none left. */
    __device__ int64_t claim(Key key) const {
        if (key == kEmpty) {
            atomicExch(at(capacity), Key{0});
            return capacity;
        }
        int64_t slot = first_slot(key);
        for (int64_t steps = 0; steps < capacity; ++steps, slot = next(slot)) {
            const Word way = static_cast<Word>(steps);
            if (way > kShortWay && way % kShortWay == 0 && ends_before(way)) return -1;
            Key seen = *at(slot);
            if (seen == kEmpty) {
                note(way);
                seen = atomicCAS(at(slot), kEmpty, key);
                if (seen == kEmpty) seen = key;
            }
            if (seen == key) return slot;
        }
        __threadfence();
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
        for (int64_t steps = 1; steps < capacity; ++steps) {
            const Word way = static_cast<Word>(steps);
            if (way > kShortWay && way > state->longest) return -1;
            slot = next(slot);
            seen = *at(slot);
            if (seen == key) return slot;
            if (seen == kEmpty) return -1;
        }
        return -1;
    }
};

}  // namespace flexgemm
