/*
 * Tensor maps: descriptors with which the copy engine (TMA) finds tiles of a matrix.
 */
#pragma once

#include <cuda.h>

#include "common.cuh"

namespace flexgemm {

/* Groups of rows, of what is adjacent in memory: K, unless said otherwise. A plain matrix is one group. */
struct TensorRows {
    const void *data;                /* a multiple of 16 */
    int64_t row_bytes, rows, groups; /* of a row, rows of a group, groups */
    int64_t row_pitch, group_pitch;  /* multiples of 16; ignored where there is one row or one group */
};

/* A map of boxes of 128 bytes x box_rows rows x box_groups groups, swizzled by 128 bytes: 16-byte chunk c of row r
 * of a box lies at r * 128 + (c ^ (r % 8)) * 16. Coordinates are (byte, row, group). What lies outside is read as
 * zeros and not written. */
fg_status encode_tensor_map(CUtensorMap *map, const TensorRows &rows, int box_rows, int box_groups, fg_error *error);

/* The same of what is read once: L2 fetches lines of 128 bytes, and not two of them for each. */
fg_status encode_lines_map(CUtensorMap *map, const TensorRows &rows, int box_rows, int box_groups, fg_error *error);

/* The same as the first of float32, for copies that add: coordinates are (element, row, group). */
fg_status encode_sums_map(CUtensorMap *map, const TensorRows &rows, int box_rows, int box_groups, fg_error *error);

}  // namespace flexgemm
