/*
 * Where a point lies among the centres of voxels, for both backends.
 */
#ifndef FLEXGEMM_CELL_H
#define FLEXGEMM_CELL_H

#include <math.h>

#include "sequence.h"

enum { FG_CORNERS = 8 }; /* of a cell; corner 4 kx + 2 ky + kz */

/* The points of a grid: (B, L, 3), or rows of batch, x, y, z. */
typedef struct {
    const float *data;
    int64_t per_sample; /* L */
    bool batched;       /* rows tell their batch */
} fg_points;

FG_BOTH fg_points fg_points_of(const fg_tensor *grid) {
    const fg_points points = {(const float *)grid->data, grid->shape[1], grid->ndim == 2};
    return points;
}

/* Returns the batch of point q, -1 where that is no number. */
FG_BOTH int32_t fg_read_point(const fg_points *points, int64_t q, float point[3]) {
    const float *at = points->data + (points->batched ? 4 * q + 1 : 3 * q);
    for (int axis = 0; axis < 3; axis++) point[axis] = at[axis];
    if (!points->batched) return (int32_t)(q / points->per_sample);
    return at[-1] >= 0.0f && at[-1] < 2147483648.0f ? (int32_t)at[-1] : -1;
}

/* The cell of eight voxels whose centres enclose a point. */
typedef struct {
    int32_t base[3];
    float fraction[3];
} fg_cell;

/* Returns false where no corner can lie in the grid; a NaN compares false with everything. Extents compare as ints:
 * float32 rounds those above 2^24. */
FG_BOTH bool fg_find_cell(const float point[3], const int64_t shape[4], fg_cell *cell) {
    for (int axis = 0; axis < 3; axis++) {
        const float place = point[axis] - 0.5f;
        if (!(place >= -1.0f && place < 2147483648.0f)) return false;
        const float below = floorf(place);
        cell->base[axis] = (int32_t)below;
        if (cell->base[axis] >= shape[axis + 1]) return false;
        cell->fraction[axis] = place - below;
    }
    return true;
}

FG_BOTH bool fg_find_nearest(const float point[3], const int64_t shape[4], int32_t voxel[3]) {
    for (int axis = 0; axis < 3; axis++) {
        const float place = point[axis];
        if (!(place > -1.0f && place < 2147483648.0f)) return false;
        voxel[axis] = (int32_t)place;
        if (voxel[axis] >= shape[axis + 1]) return false;
    }
    return true;
}

/* The part of a corner's weight that an axis gives, and the sign with which it grows along it. */
FG_BOTH float fg_axis_weight(const fg_cell *cell, int corner, int axis) {
    const float fraction = cell->fraction[axis];
    return corner >> (2 - axis) & 1 ? fraction : 1.0f - fraction;
}

FG_BOTH float fg_axis_sign(int corner, int axis) { return corner >> (2 - axis) & 1 ? 1.0f : -1.0f; }

FG_BOTH float fg_corner_weight(const fg_cell *cell, int corner) {
    return fg_axis_weight(cell, corner, 0) * fg_axis_weight(cell, corner, 1) * fg_axis_weight(cell, corner, 2);
}

FG_BOTH void fg_corner_coord(const fg_cell *cell, int corner, int32_t batch, int32_t coord[4]) {
    coord[0] = batch;
    /* Unsigned: a base of INT32_MAX goes past the end of every grid. */
    for (int axis = 0; axis < 3; axis++)
        coord[axis + 1] = (int32_t)((uint32_t)cell->base[axis] + (uint32_t)(corner >> (2 - axis) & 1));
}

/* The gradient of a cell's weighted mean in the point, from the products of the output's gradient with each corner's
 * features: mean = sum r_k f_k / sum r_k over the corners in `present`, r_k the product of three axis weights, so that
 * d mean / d x = sum (d r_k / d x) (f_k - mean) / sum r_k. */
FG_BOTH void fg_cell_gradient(const fg_cell *cell, unsigned present, const float product[FG_CORNERS],
                              float gradient[3]) {
    float total = 0.0f, mean = 0.0f;
    for (int corner = 0; corner < FG_CORNERS; corner++) {
        if (!(present >> corner & 1)) continue;
        const float weight = fg_corner_weight(cell, corner);
        total += weight;
        mean += weight * product[corner];
    }
    for (int axis = 0; axis < 3; axis++) gradient[axis] = 0.0f;
    if (!(total > 0.0f)) return;
    mean /= total;
    for (int corner = 0; corner < FG_CORNERS; corner++) {
        if (!(present >> corner & 1)) continue;
        const float above = (product[corner] - mean) / total;
        for (int axis = 0; axis < 3; axis++) {
            const float others =
                fg_axis_weight(cell, corner, (axis + 1) % 3) * fg_axis_weight(cell, corner, (axis + 2) % 3);
            gradient[axis] += fg_axis_sign(corner, axis) * others * above;
        }
    }
}

#endif
