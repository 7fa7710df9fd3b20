/*
 * Segments of a neighbour map: the records of segment.h, with places in the order in which the sorted rows name them.
 *
 * The CPU's convolution gathers pairs and gains nothing from segments: this is what the CUDA backend is compared with.
 */
#include "../segment.h"

#include <stdlib.h>

#include "../plan.h"
#include "backend.h"

enum {
    MAX_ROWS = FG_SEGMENT_TILE * FG_SEGMENT_TILES,
    TABLE_BITS = 12,
    TABLE = 1 << TABLE_BITS, /* slots: more than twice the places of the largest segment */
    NO_ROW_BIT = FG_SEGMENT_ROW_BITS + FG_SEGMENT_RANK_BITS,
};
_Static_assert(MAX_ROWS == 1 << FG_SEGMENT_ROW_BITS, "the key of a row has room for its number");
_Static_assert(TABLE > 2 * FG_SEGMENT_PLACES, "a search of the table ends");

/* The places of input rows: open addressing. */
typedef struct {
    int32_t count; /* places, of which 0 is that of missing rows */
    int32_t limit;
    int32_t rows[TABLE]; /* -1: an empty slot */
    uint16_t places[TABLE];
} place_table;

/* The place of a row, a new one if there is none; without room for it the count passes the limit. */
static uint16_t place_of(place_table *table, int32_t row) {
    uint32_t slot = (uint32_t)row * 0x9e3779b1u >> (32 - TABLE_BITS);
    while (table->rows[slot] != -1 && table->rows[slot] != row) slot = (slot + 1) % TABLE;
    if (table->rows[slot] == -1) {
        if (table->count++ >= table->limit) return 0;
        table->rows[slot] = row;
        table->places[slot] = (uint16_t)(table->count - 1);
    }
    return table->places[slot];
}

static int compare_keys(const void *a, const void *b) {
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

typedef struct {
    const int32_t *map, *order;
    int64_t columns, in_rows;
    int32_t tiles, volume;
    fg_segment_rank rank;
} segment_maker;

static int32_t input_row(const segment_maker *maker, int32_t v, int32_t column) {
    const int32_t row = column < 0 ? -1 : maker->map[v * maker->columns + column];
    return row >= 0 && row < maker->in_rows ? row : -1;
}

/* Writes the record's rows, sorted, and the masks of its tiles. */
static void sort_rows(const segment_maker *maker, int64_t segment, int32_t *head, int32_t *rows) {
    const int32_t count = fg_segment_rows(maker->tiles);
    int32_t columns[MAX_ROWS];
    uint32_t masks[MAX_ROWS], keys[MAX_ROWS];
    for (int32_t i = 0; i < count; i++) {
        const int64_t at = segment * count + i;
        const int32_t column = at < maker->columns ? maker->order[at] : -1;
        columns[i] = column >= 0 && column < maker->columns ? column : -1;
        masks[i] = 0;
        for (int32_t v = 0; v < maker->volume; v++) masks[i] |= (uint32_t)(input_row(maker, v, columns[i]) >= 0) << v;
        uint32_t rank = 0;
        for (int32_t bit = 0; bit < maker->rank.bits; bit++)
            rank = rank << 1 | (masks[i] >> maker->rank.offsets[bit] & 1);
        for (int shift = 1; shift < 32; shift *= 2) rank ^= rank >> shift; /* the rank of a Gray code */
        keys[i] = (uint32_t)(columns[i] < 0) << NO_ROW_BIT | rank << FG_SEGMENT_ROW_BITS | (uint32_t)i;
    }
    qsort(keys, (size_t)count, sizeof keys[0], compare_keys);
    for (int32_t i = 0; i < FG_SEGMENT_HEAD; i++) head[i] = 0;
    for (int32_t i = 0; i < count; i++) {
        const uint32_t from = keys[i] % MAX_ROWS;
        rows[i] = columns[from];
        head[1 + i / FG_SEGMENT_TILE] |= (int32_t)masks[from];
    }
}

static void make_segment(const segment_maker *maker, int64_t segment, int32_t *record) {
    const int32_t tiles = maker->tiles;
    int32_t *const rows = record + FG_SEGMENT_HEAD;
    int32_t *const inputs = record + fg_segment_inputs_at(tiles), *const places = record + fg_segment_places_at(tiles);
    sort_rows(maker, segment, record, rows);

    place_table table = {.count = 1, .limit = fg_segment_places(tiles)};
    for (int32_t slot = 0; slot < TABLE; slot++) table.rows[slot] = -1;
    for (int32_t i = 0; i < table.limit; i++) inputs[i] = -1;
    for (int32_t v = 0; v < maker->volume; v++) {
        for (int32_t i = 0; i < fg_segment_rows(tiles); i++) {
            const int32_t row = input_row(maker, v, rows[i]);
            const uint16_t place = row < 0 ? 0 : place_of(&table, row);
            if (place > 0) inputs[place] = row;
            /* Rows i and i + 8 of a stretch of 16 share a word. */
            int32_t *const word = places + v * fg_segment_rows(tiles) / 2 + i / 16 * 8 + i % 8;
            *word = i % 16 < 8 ? place : (int32_t)((uint32_t)*word | (uint32_t)place << 16);
        }
    }
    record[0] = table.count <= table.limit ? table.count : 0;
}

fg_status fg_cpu_segment_map(const fg_segment_map_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const int64_t columns = params->map.shape[1], segments = params->segments.shape[0];
    if (columns > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "map: expected at most %d columns for an int32 order, got %lld",
                       INT32_MAX, (long long)columns);
    const segment_maker maker = {
        .map = params->map.data,
        .order = params->order.data,
        .columns = columns,
        .in_rows = params->in_rows,
        .tiles = params->tiles,
        .volume = (int32_t)params->map.shape[0],
        .rank = fg_plan_segment_rank(params->kernel),
    };
#pragma omp parallel for schedule(dynamic)
    for (int64_t segment = 0; segment < segments; segment++)
        make_segment(&maker, segment, (int32_t *)fg_row(&params->segments, segment));
    return FG_OK;
}
