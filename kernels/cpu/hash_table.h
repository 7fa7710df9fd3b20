/*
 * Reading the hash table of hash_table.c. A slot is empty while its key is all ones; the key of all ones itself has the
 * last slot.
 */
#ifndef FLEXGEMM_CPU_HASH_TABLE_H
#define FLEXGEMM_CPU_HASH_TABLE_H

#include "backend.h"

#define FG_ALL_ONES UINT64_MAX

enum { FG_SHORT_WAY = 64 };               /* slots that a key may lie from its first one without a note of it */
enum { FG_TABLE_FULL, FG_TABLE_LONGEST }; /* of the state */

/* ---- keys and slots: 32 or 64 bits, as their tensor says ---- */

static inline bool fg_is_narrow(const fg_tensor *tensor) { return tensor->dtype == FG_INT32; }

static inline uint64_t fg_all_ones(const fg_tensor *tensor) { return fg_is_narrow(tensor) ? UINT32_MAX : FG_ALL_ONES; }

static inline uint64_t fg_load_word(const fg_tensor *tensor, int64_t i) {
    const int64_t at = i * tensor->strides[0];
    return fg_is_narrow(tensor) ? __atomic_load_n((const uint32_t *)tensor->data + at, __ATOMIC_RELAXED)
                                : __atomic_load_n((const uint64_t *)tensor->data + at, __ATOMIC_RELAXED);
}

static inline void fg_store_word(const fg_tensor *tensor, int64_t i, uint64_t word) {
    const int64_t at = i * tensor->strides[0];
    if (fg_is_narrow(tensor)) {
        __atomic_store_n((uint32_t *)tensor->data + at, (uint32_t)word, __ATOMIC_RELAXED);
    } else {
        __atomic_store_n((uint64_t *)tensor->data + at, word, __ATOMIC_RELAXED);
    }
}

/* The finaliser of MurmurHash3, scaled to the number of slots. */
static inline int64_t fg_first_slot(uint64_t key, int64_t capacity) {
    key = (key ^ key >> 33) * UINT64_C(0xff51afd7ed558ccd);
    key = (key ^ key >> 33) * UINT64_C(0xc4ceb9fe1a85ec53);
    key ^= key >> 33;
    return (int64_t)((unsigned __int128)key * (uint64_t)capacity >> 64);
}

typedef struct {
    const fg_tensor *keys;
    int64_t capacity; /* slots but the last */
    int64_t *state;
} fg_hash_table;

/* The slot that holds a key, or -1. */
static inline int64_t fg_find_slot(const fg_hash_table *table, uint64_t key) {
    const uint64_t empty = fg_all_ones(table->keys);
    if (key == empty) return fg_load_word(table->keys, table->capacity) == empty ? -1 : table->capacity;
    int64_t slot = fg_first_slot(key, table->capacity);
    const int64_t longest = fg_min(fg_max(table->state[FG_TABLE_LONGEST], FG_SHORT_WAY), table->capacity - 1);
    for (int64_t steps = 0; steps <= longest; steps++, slot = slot + 1 < table->capacity ? slot + 1 : 0) {
        const uint64_t found = fg_load_word(table->keys, slot);
        if (found == key) return slot;
        if (found == empty) return -1;
    }
    return -1;
}

#endif
