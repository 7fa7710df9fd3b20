/* Voxel coordinates: [batch, x, y, z] rows, their numbers in a grid, and the check that they lie in it. */
#ifndef FLEXGEMM_CPU_COORDS_H
#define FLEXGEMM_CPU_COORDS_H

#include "backend.h"

/* ((b * W + x) * H + y) * D + z */
static inline uint64_t fg_pack_key(const int32_t *coord, const int64_t *shape) {
    uint64_t key = (uint64_t)coord[0];
    for (int axis = 1; axis < 4; axis++) key = key * (uint64_t)shape[axis] + (uint64_t)coord[axis];
    return key;
}

static inline bool fg_coord_inside(const int32_t *coord, const int64_t *shape) {
    bool all = true;
    for (int axis = 0; axis < 4; axis++) all &= coord[axis] >= 0 && coord[axis] < shape[axis];
    return all;
}

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
