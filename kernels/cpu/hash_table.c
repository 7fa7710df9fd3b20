/*
 * A hash table in arrays of the caller's. Threads insert side by side: which slot a key gets depends on their order,
 * which row's value it ends up with (the lowest) does not.
 *
 * Insertion has three steps: note which slots keep their values; give every key a slot, and every other slot the lowest
 * row that asked for it; let those rows write their values.
 *
 *     workspace = { int64 slots[N], uint32 owners[S] }
 */
#include "hash_table.h"

#include <string.h>

#include "../sequence.h"
#include "coords.h"

/* ---- taking slots ---- */

/* Puts the key into an empty slot and returns what is there then. */
static uint64_t claim_slot(const fg_tensor *keys, int64_t slot, uint64_t key) {
    const int64_t at = slot * keys->strides[0];
    if (fg_is_narrow(keys)) {
        uint32_t found = UINT32_MAX;
        const bool taken = __atomic_compare_exchange_n((uint32_t *)keys->data + at, &found, (uint32_t)key, false,
                                                       __ATOMIC_RELAXED, __ATOMIC_RELAXED);
        return taken ? key : found;
    }
    uint64_t found = FG_ALL_ONES;
    const bool taken = __atomic_compare_exchange_n((uint64_t *)keys->data + at, &found, key, false, __ATOMIC_RELAXED,
                                                   __ATOMIC_RELAXED);
    return taken ? key : found;
}

static int64_t in_state(const fg_hash_table *table, int what) {
    return __atomic_load_n(&table->state[what], __ATOMIC_RELAXED);
}

/* Before the key can be seen there: who finds the table full, and so has seen it, looks that far. */
static void note(const fg_hash_table *table, int64_t way) {
    if (way <= FG_SHORT_WAY) return;
    int64_t longest = in_state(table, FG_TABLE_LONGEST);
    while (way > longest && !__atomic_compare_exchange_n(&table->state[FG_TABLE_LONGEST], &longest, way, true,
                                                         __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    __atomic_thread_fence(__ATOMIC_RELEASE);
}

/* Whether the table is full, and no key lies so far. */
static bool ends_before(const fg_hash_table *table, int64_t way) {
    if (!in_state(table, FG_TABLE_FULL)) return false;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return way > in_state(table, FG_TABLE_LONGEST);
}

/* The slot of a key, taken for it if need be; -1 when there is none left. */
static int64_t claim(const fg_hash_table *table, uint64_t key) {
    const uint64_t empty = fg_all_ones(table->keys);
    if (key == empty) {
        fg_store_word(table->keys, table->capacity, 0);
        return table->capacity;
    }
    int64_t slot = fg_first_slot(key, table->capacity);
    for (int64_t steps = 0; steps < table->capacity; steps++, slot = slot + 1 < table->capacity ? slot + 1 : 0) {
        if (steps > FG_SHORT_WAY && steps % FG_SHORT_WAY == 0 && ends_before(table, steps)) return -1;
        uint64_t found = fg_load_word(table->keys, slot);
        if (found == empty) {
            note(table, steps);
            found = claim_slot(table->keys, slot, key);
        }
        if (found == key) return slot;
    }
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
    __atomic_store_n(&table->state[FG_TABLE_FULL], 1, __ATOMIC_RELAXED);
    return -1;
}

/* ---- what is looked for ---- */

typedef struct {
    const fg_tensor *keys;
    fg_curve curve; /* of voxels */
} key_source;

static key_source keys_of(const fg_tensor *keys, const int64_t shape[4]) {
    key_source source = {.keys = keys};
    if (keys->ndim == 2) source.curve = fg_make_curve(FG_BXYZ, shape);
    return source;
}

/* Returns false for a voxel outside the shape. */
static bool key_of(const key_source *source, int64_t n, uint64_t *key) {
    if (source->keys->ndim == 1) {
        *key = fg_load_word(source->keys, n);
        return true;
    }
    const int32_t *coord = (const int32_t *)source->keys->data + 4 * n;
    if (!fg_coord_inside(coord, source->curve.shape)) return false;
    *key = fg_encode(&source->curve, coord);
    return true;
}

/* ---- insert ---- */

static fg_workspace_layout plan_workspace(const fg_hash_insert_params *params) {
    const int64_t n = params->keys.shape[0], slots = n > 0 ? params->table_keys.shape[0] : 0;
    return (fg_workspace_layout){fg_workspace_part(n, sizeof(int64_t)) + fg_workspace_part(slots, sizeof(uint32_t)), 0};
}

fg_status fg_cpu_hash_insert_workspace(const fg_hash_insert_params *params, const fg_queue *queue, size_t *bytes,
                                       fg_error *error) {
    (void)queue, (void)error;
    *bytes = fg_workspace_bytes(plan_workspace(params));
    return FG_OK;
}

static void lower(uint32_t *owner, uint32_t row) {
    uint32_t lowest = __atomic_load_n(owner, __ATOMIC_RELAXED);
    while (row < lowest && !__atomic_compare_exchange_n(owner, &lowest, row, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

fg_status fg_cpu_hash_insert(const fg_hash_insert_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const int64_t n = params->keys.shape[0], slots = params->table_keys.shape[0];
    const fg_hash_table table = {&params->table_keys, slots - 1, params->state.data};
    const key_source source = keys_of(&params->keys, params->shape);
    if (n >= INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "keys: expected fewer than %d, got %lld", INT32_MAX, (long long)n);
    int threads = 0;
    const fg_status status = fg_workspace_threads(&params->workspace, plan_workspace(params), slots, &threads, error);
    if (status != FG_OK) return status;

    int64_t outside = n;
    if (source.keys->ndim == 2) {
#pragma omp parallel for num_threads(threads) reduction(min : outside)
        for (int64_t row = 0; row < n; row++)
            if (!fg_coord_inside((const int32_t *)params->keys.data + 4 * row, source.curve.shape))
                outside = fg_min(outside, row);
    }
    if (outside < n) return fg_report_outside("keys", params->keys.data, outside, params->shape, error);

    if (params->clear) {
        const int64_t size = (int64_t)fg_dtype_size(params->table_keys.dtype);
        const int64_t pitch =
            params->table_keys.strides[0] * size; /* beyond the key: its value, and what lies between */
        table.state[FG_TABLE_FULL] = table.state[FG_TABLE_LONGEST] = 0;
#pragma omp parallel for num_threads(threads)
        for (int64_t slot = 0; slot < slots; slot++) {
            memset((char *)params->table_keys.data + slot * pitch, 0xFF, (size_t)pitch);
            if (pitch == size) fg_store_word(&params->table_values, slot, FG_ALL_ONES);
        }
    }
    if (n == 0) return FG_OK;

    /* Rows are counted from 1 here: no row goes before 0, the owner of a slot that keeps its value. */
    int64_t *slot_of = params->workspace.data;
    uint32_t *owners = (uint32_t *)((char *)params->workspace.data + fg_workspace_part(n, sizeof(int64_t)));
    const uint64_t empty = fg_all_ones(&params->table_keys);
    bool all_fit = true; /* of this call: the table may have been full before */
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (int64_t slot = 0; slot < slots; slot++)
            owners[slot] = params->replace || fg_load_word(&params->table_keys, slot) == empty ? UINT32_MAX : 0;
#pragma omp for reduction(&& : all_fit)
        for (int64_t row = 0; row < n; row++) {
            uint64_t key = 0;
            key_of(&source, row, &key);
            slot_of[row] = claim(&table, key);
            all_fit = all_fit && slot_of[row] >= 0;
            if (slot_of[row] >= 0) lower(&owners[slot_of[row]], (uint32_t)row + 1);
        }
#pragma omp for
        for (int64_t row = 0; row < n; row++) {
            const int64_t slot = slot_of[row];
            if (slot < 0 || owners[slot] != (uint32_t)row + 1) continue;
            fg_store_word(&params->table_values, slot,
                          params->values.present ? fg_load_word(&params->values, row) : (uint64_t)row);
        }
    }
    if (all_fit) return FG_OK;
    return fg_fail(error, FG_ERROR_VALUE, "table_keys: all %lld slots are taken, and not all keys fit",
                   (long long)table.capacity);
}

/* ---- lookup ---- */

fg_status fg_cpu_hash_lookup(const fg_hash_lookup_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue, (void)error;
    const fg_hash_table table = {&params->table_keys, params->table_keys.shape[0] - 1, params->state.data};
    const key_source source = keys_of(&params->keys, params->shape);
    const int64_t n = params->keys.shape[0];
#pragma omp parallel for
    for (int64_t row = 0; row < n; row++) {
        uint64_t key = 0;
        const int64_t slot = key_of(&source, row, &key) ? fg_find_slot(&table, key) : -1;
        fg_store_word(&params->out, row, slot < 0 ? FG_ALL_ONES : fg_load_word(&params->table_values, slot));
    }
    return FG_OK;
}
