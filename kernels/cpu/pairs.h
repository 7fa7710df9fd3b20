/* Reading a neighbour map, one row of it at a time, as a list of the pairs that exist; and the errors of it and of other
 * matrices of rows. */
#ifndef FLEXGEMM_CPU_PAIRS_H
#define FLEXGEMM_CPU_PAIRS_H

#include "../flexgemm.h"

/* Lists the `rows` entries of a map that are rows of a source: row[i] is a position in `map`, neighbor[i] the entry
 * there. Both lists have room for `rows`. Returns their length, or -1 when an entry is neither -1 nor a row. */
static inline int64_t fg_list_pairs(const int32_t *map, int64_t rows, int64_t source_rows, int32_t *row,
                                    int32_t *neighbor) {
    int64_t count = 0;
    bool valid = true;
    for (int64_t i = 0; i < rows; i++) { /* without branches: whether an entry exists is a coin toss */
        const int32_t entry = map[i];
        const bool is_row = entry >= 0 && entry < source_rows;
        row[count] = (int32_t)i;
        neighbor[count] = entry;
        count += is_row;
        valid &= is_row || entry == -1;
    }
    return valid ? count : -1;
}

/* FG_ERROR_VALUE naming an entry, counted row by row, of a matrix of rows of something else. */
static inline fg_status fg_report_entry(const char *name, const fg_tensor *rows, int64_t i, int64_t source_rows,
                                        fg_error *error) {
    return fg_fail(error, FG_ERROR_VALUE, "%s: entry (%lld, %lld) is %d, expected -1 or a row below %lld", name,
                   (long long)(i / rows->shape[1]), (long long)(i % rows->shape[1]), ((const int32_t *)rows->data)[i],
                   (long long)source_rows);
}

/* FG_ERROR_VALUE naming the first entry of an invalid map. */
static inline fg_status fg_report_map(const fg_tensor *map, int64_t source_rows, fg_error *error) {
    const int32_t *entry = map->data;
    const int64_t last = map->shape[0] * map->shape[1] - 1; /* where another thread has mended it since */
    int64_t i = 0;
    while (i < last && entry[i] >= -1 && entry[i] < source_rows) i++;
    return fg_report_entry("map", map, i, source_rows, error);
}

#endif
