/* What the operations on voxels say about coordinates. */
#ifndef FLEXGEMM_CPU_COORDS_H
#define FLEXGEMM_CPU_COORDS_H

#include "backend.h"

/* FG_ERROR_VALUE naming a row of coords that lies outside shape. */
static inline fg_status fg_report_outside(const int32_t *coords, int64_t row, const int64_t shape[4], fg_error *error) {
    const int32_t *c = coords + 4 * row;
    return fg_fail(error, FG_ERROR_VALUE,
                   "coords: row %lld is (%d, %d, %d, %d), outside shape (%lld, %lld, %lld, %lld)", (long long)row, c[0],
                   c[1], c[2], c[3], (long long)shape[0], (long long)shape[1], (long long)shape[2],
                   (long long)shape[3]);
}

#endif
