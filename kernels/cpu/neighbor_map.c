/*
 * Neighbour map of a sparse convolution, through an open-addressing hash table in the workspace.
 *
 *     key  = ((b * W + x) * H + y) * D + z, 64 bits, unique within `shape`
 *     slot = { uint64 keys[capacity], int32 rows[capacity] }, capacity a power of two >= 2 N, linear probing
 *
 * The hash keeps the low bits of a key, so that neighbours along z share a cache line. Threads insert concurrently:
 * which slot a key gets depends on their order, which row it ends up with (the lowest) does not.
 */
#include <string.h>

#include "coords.h"

enum { SLOT_RUN = 8, ROW_BLOCK = 1024 };

static const uint64_t EMPTY = UINT64_MAX; /* above every key: B*W*H*D < 2^63 */

typedef struct {
    uint64_t *keys;
    int32_t *rows;
    uint64_t mask; /* capacity - 1 */
} hash_table;

static int64_t table_capacity(int64_t n) {
    int64_t capacity = 64;
    while (capacity < 2 * n) capacity *= 2;
    return capacity;
}

static fg_workspace_layout plan_workspace(int64_t n) {
    const int64_t capacity = n > 0 ? table_capacity(n) : 0;
    const size_t shared = fg_workspace_part(capacity, sizeof(uint64_t)) + fg_workspace_part(capacity, sizeof(int32_t));
    return (fg_workspace_layout){shared, 0};
}

/* Runs of SLOT_RUN keys stay together; the runs are scattered by a multiplicative hash (2^64 / golden ratio), to whose low
 * bits the high ones of a key count as well: samples of a large grid differ in nothing else. */
static uint64_t first_slot(const hash_table *table, uint64_t key) {
    uint64_t run = key / SLOT_RUN;
    run = (run ^ run >> 32) * UINT64_C(0x9E3779B97F4A7C15);
    run ^= run >> 32;
    return (run * SLOT_RUN + key % SLOT_RUN) & table->mask;
}

static void insert(const hash_table *table, uint64_t key, int32_t row) {
    for (uint64_t slot = first_slot(table, key);; slot = (slot + 1) & table->mask) {
        uint64_t found = __atomic_load_n(&table->keys[slot], __ATOMIC_RELAXED);
        if (found == EMPTY &&
            __atomic_compare_exchange_n(&table->keys[slot], &found, key, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            found = key;
        if (found != key) continue;
        int32_t lowest = __atomic_load_n(&table->rows[slot], __ATOMIC_RELAXED);
        while (row < lowest && !__atomic_compare_exchange_n(&table->rows[slot], &lowest, row, true, __ATOMIC_RELAXED,
                                                            __ATOMIC_RELAXED));
        return;
    }
}

static int32_t lookup(const hash_table *table, uint64_t key) {
    for (uint64_t slot = first_slot(table, key);; slot = (slot + 1) & table->mask) {
        const uint64_t found = table->keys[slot];
        if (found == key) return table->rows[slot];
        if (found == EMPTY) return -1;
    }
}

/* The lowest row that repeats an earlier one, or n. */
static int64_t first_duplicate(const hash_table *table, const int32_t *coords, const int64_t *shape, int64_t n,
                               int threads) {
    int64_t lowest = n;
#pragma omp parallel for num_threads(threads) reduction(min : lowest)
    for (int64_t row = 0; row < n; row++)
        if (lookup(table, fg_pack_coord(coords + 4 * row, shape)) != row) lowest = fg_min(lowest, row);
    return lowest;
}

/* Where along one axis the query at c looks at position k; -1 where it does not look. */
static int64_t look(const fg_neighbor_map_params *params, int axis, int64_t c, int k) {
    const int64_t stride = params->stride[axis], shift = (int64_t)k * params->dilation[axis] - params->padding[axis];
    if (!params->transposed) return c * stride + shift;
    return c >= shift && (c - shift) % stride == 0 ? (c - shift) / stride : -1;
}

/* Rows [begin, end) of every map[v], end - begin <= ROW_BLOCK: position by position along each axis, so that what all
 * positions of the other axes share is found once. */
static void map_block(const fg_neighbor_map_params *params, const hash_table *table, int64_t begin, int64_t end) {
    const int32_t *queries = params->queries.data, *kernel = params->kernel;
    const int64_t *shape = params->shape, rows = params->queries.shape[0];
    uint64_t line[ROW_BLOCK], plane[ROW_BLOCK]; /* the key so far, of (b, x) and (b, x, y); EMPTY outside the grid */

    int32_t *map = params->map.data;
    for (int kx = 0; kx < kernel[0]; kx++) {
        for (int64_t row = begin; row < end; row++) {
            const int64_t x = look(params, 0, queries[4 * row + 1], kx);
            const bool inside = x >= 0 && x < shape[1];
            plane[row - begin] = inside ? (uint64_t)queries[4 * row] * (uint64_t)shape[1] + (uint64_t)x : EMPTY;
        }
        for (int ky = 0; ky < kernel[1]; ky++) {
            for (int64_t row = begin; row < end; row++) {
                const int64_t y = look(params, 1, queries[4 * row + 2], ky);
                const bool inside = y >= 0 && y < shape[2] && plane[row - begin] != EMPTY;
                line[row - begin] = inside ? plane[row - begin] * (uint64_t)shape[2] + (uint64_t)y : EMPTY;
            }
            for (int kz = 0; kz < kernel[2]; kz++, map += rows)
                for (int64_t row = begin; row < end; row++) {
                    const int64_t z = look(params, 2, queries[4 * row + 3], kz);
                    const bool inside = z >= 0 && z < shape[3] && line[row - begin] != EMPTY;
                    map[row] = inside ? lookup(table, line[row - begin] * (uint64_t)shape[3] + (uint64_t)z) : -1;
                }
        }
    }
}

static fg_row_order_params order_of(const fg_neighbor_map_params *params) {
    return (fg_row_order_params){
        .map = params->map,
        .kernel = {params->kernel[0], params->kernel[1], params->kernel[2]},
        .sets = params->sets,
        .order = params->order,
        .workspace = params->workspace,
    };
}

fg_status fg_cpu_neighbor_map_workspace(const fg_neighbor_map_params *params, const fg_queue *queue, size_t *bytes,
                                        fg_error *error) {
    size_t for_order = 0;
    *bytes = fg_workspace_bytes(plan_workspace(params->coords.shape[0]));
    if (!params->order.present) return FG_OK;
    const fg_row_order_params order = order_of(params);
    const fg_status status = fg_cpu_row_order_workspace(&order, queue, &for_order, error);
    if (for_order > *bytes) *bytes = for_order;
    return status;
}

static fg_status build_map(const fg_neighbor_map_params *params, fg_error *error) {
    const int64_t n = params->coords.shape[0], rows = params->queries.shape[0];
    const int64_t *shape = params->shape;
    const int32_t *coords = params->coords.data;
    if (n > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "coords: expected at most %d rows for an int32 map, got %lld", INT32_MAX,
                       (long long)n);

    int threads = 0;
    const int64_t capacity = table_capacity(n), blocks = fg_ceil_div(rows, ROW_BLOCK);
    fg_status status =
        fg_workspace_threads(&params->workspace, plan_workspace(n), fg_max(blocks, n / ROW_BLOCK), &threads, error);
    if (status == FG_OK) status = fg_check_coords(&params->coords, "coords", shape, threads, error);
    if (status == FG_OK) status = fg_check_coords(&params->queries, "queries", params->query_shape, threads, error);
    if (status != FG_OK) return status;
    if (n == 0) {
        if (rows > 0) memset(params->map.data, 0xFF, (size_t)(params->map.shape[0] * rows) * sizeof(int32_t));
        return FG_OK;
    }

    hash_table table = {.keys = params->workspace.data, .mask = (uint64_t)capacity - 1};
    table.rows = (int32_t *)((char *)params->workspace.data + fg_workspace_part(capacity, sizeof(uint64_t)));

#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (int64_t slot = 0; slot < capacity; slot++) {
            table.keys[slot] = EMPTY;
            table.rows[slot] = INT32_MAX;
        }
#pragma omp for
        for (int64_t row = 0; row < n; row++) insert(&table, fg_pack_coord(coords + 4 * row, shape), (int32_t)row);
    }

    if (params->check) {
        const int64_t duplicate = first_duplicate(&table, coords, shape, n, threads);
        if (duplicate < n) {
            const int32_t *c = coords + 4 * duplicate;
            return fg_fail(error, FG_ERROR_VALUE, "coords: row %lld is (%d, %d, %d, %d), the same as row %d",
                           (long long)duplicate, c[0], c[1], c[2], c[3], lookup(&table, fg_pack_coord(c, shape)));
        }
    }

#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t block = 0; block < blocks; block++)
        map_block(params, &table, block * ROW_BLOCK, fg_min(rows, (block + 1) * ROW_BLOCK));
    return FG_OK;
}

fg_status fg_cpu_neighbor_map(const fg_neighbor_map_params *params, const fg_queue *queue, fg_error *error) {
    const fg_status status = build_map(params, error);
    if (status != FG_OK || !params->order.present) return status;
    const fg_row_order_params order = order_of(params);
    return fg_cpu_row_order(&order, queue, error);
}
