/*
 * Plan of a map's table of voxels: cells by a hash of their number, or by the number itself.
 *
 *             bytes to clear         to put in a cell               to find one
 *     hash    54 a row (36 a slot,   read a bucket of keys, claim   a sector of keys, behind it, where the cell has a
 *             1.5 slots a row)       a slot by atomicCAS            voxel, one of rows
 *     direct  32 a cell of the grid  nothing                        a sector of rows
 *
 * Both lower the row of each voxel by atomicMin. Where it is not larger, a direct table is less of everything: from one
 * voxel in 13 on, if extents are even. Where it is larger it still saves two trips to L2, one behind the other, as rows
 * are put in and one as they are looked up, and what it costs is memory and the time to clear that. Up to a megabyte
 * takes no longer to clear than its launch does.
 *
 * Of the scenes in docs/performance.md (a grid of 1 x res^3, 4 res^3 bytes direct), in bytes:
 *
 *                                   hash      direct    taken
 *     sphere8                       12.6 K    2 K       direct
 *     sphere32                      205 K     128 K     direct
 *     sphere64                      803 K     1 M       direct, as small
 *     sphere128                     3.3 M     8 M       hash
 *     sphere1024                    212 M     4 G       hash
 *     1024 patches of 32^3, a fifth 346 M     128 M     direct
 *     of the voxels
 */
#include "plan.h"

enum { CELL_BYTES = FG_CELL_VOXELS * 4, KEY_BYTES = 4, SMALL_BYTES = 1 << 20 };

int64_t fg_grid_cells(const int64_t shape[4]) {
    int64_t cells = shape[0];
    for (int axis = 1; axis < 4; axis++) cells *= shape[axis] / 2 + shape[axis] % 2;
    return cells;
}

/* One and a half a row, and some where rows are few. */
int64_t fg_hash_slots(int64_t rows) { return (rows + rows / 2 + 64) / FG_BUCKET_SLOTS * FG_BUCKET_SLOTS; }

fg_table_kind fg_plan_voxel_table(int64_t rows, const int64_t shape[4]) {
    const int64_t cells = fg_grid_cells(shape), slots = fg_hash_slots(rows);
    if (cells >= UINT32_MAX) return FG_TABLE_HASH; /* numbers of 32 bits, one of which is none */
    const int64_t bytes = cells * CELL_BYTES;
    return bytes <= SMALL_BYTES || bytes <= slots * (CELL_BYTES + KEY_BYTES) ? FG_TABLE_DIRECT : FG_TABLE_HASH;
}
