/* The check that rows of voxel coordinates, [batch, x, y, z], lie in a grid. */
#ifndef FLEXGEMM_CPU_COORDS_H
#define FLEXGEMM_CPU_COORDS_H

#include "../sequence.h"
#include "backend.h"

/* FG_ERROR_VALUE naming a row of coordinates that lies outside `shape`. */
static inline fg_status fg_report_outside(const char *name, const int32_t *coords, int64_t row, const int64_t shape[4],
                                          fg_error *error) {
    const int32_t *c = coords + 4 * row;
    return fg_fail(error, FG_ERROR_VALUE, "%s: row %lld is (%d, %d, %d, %d), outside shape (%lld, %lld, %lld, %lld)",
                   name, (long long)row, c[0], c[1], c[2], c[3], (long long)shape[0], (long long)shape[1],
                   (long long)shape[2], (long long)shape[3]);
}

/* FG_ERROR_VALUE naming the lowest row of (n, 4) coordinates that lies outside `shape`. */
static inline fg_status fg_check_coords(const fg_tensor *coords, const char *name, const int64_t *shape, int threads,
                                        fg_error *error) {
    const int32_t *rows = coords->data;
    const int64_t n = coords->shape[0];
    int64_t lowest = n;
#pragma omp parallel for num_threads(threads) reduction(min : lowest)
    for (int64_t row = 0; row < n; row++)
        if (!fg_coord_inside(rows + 4 * row, shape)) lowest = fg_min(lowest, row);
    return lowest < n ? fg_report_outside(name, rows, lowest, shape, error) : FG_OK;
}

#endif
