/*
 * Which voxel a point lies in, for both backends.
 */
#ifndef FLEXGEMM_PLACE_H
#define FLEXGEMM_PLACE_H

#include <math.h>

#include "sequence.h"

/* A point's place in units of voxels and the voxel around it; false where that lies outside the curve's shape, as a NaN
 * does. `batch` is a float, as the points are. */
FG_BOTH bool fg_find_voxel(const fg_curve *curve, float batch, const float point[3], const float voxel_size[3],
                           const float origin[3], float place[3], int32_t coord[4]) {
    coord[0] = batch >= 0.0f && batch < 2147483648.0f ? (int32_t)batch : -1;
    for (int axis = 0; axis < 3; axis++) {
        place[axis] = point[axis] / voxel_size[axis] - origin[axis];
        const float below = floorf(place[axis]);
        coord[axis + 1] = below >= 0.0f && below < 2147483648.0f ? (int32_t)below : -1;
    }
    return fg_coord_inside(coord, curve->shape);
}

#endif
