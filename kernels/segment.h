/*
 * Segments of a neighbour map: runs of rows that lie near each other in space, worked through by one multiprocessor.
 *
 * A segment's rows read each input row many times. Their record says which input rows they read at all, each of which
 * gets a place, and for each pair of row and offset the place instead of the row: what lies there can be brought into
 * shared memory once and read where the record says. Within a segment rows are sorted by the Gray-code rank of their
 * mask of neighbours, like a row order, so that the rows of a tile miss the same neighbours.
 *
 * A record is one row of an int32 matrix, a segment of 64 * tiles rows:
 *
 *     head     16 words: places in use (at least 1; 0: more than there are, and nothing is said of them); then of each
 *              tile, up to 4, the mask of offsets at which any of its rows has a neighbour; the rest 0
 *     rows     of the map, tile by tile, in the order in which they are worked through; -1 behind the last
 *     inputs   of each place the input row; place 0 is that of missing neighbours, its row -1
 *     places   (volume, tiles, 4, 8) words: of the rows 16 w + g and 16 w + g + 8 of a tile, in the low and in the high
 *              half; what a thread of a warpgroup holds of its tile
 */
#ifndef FG_SEGMENT_H
#define FG_SEGMENT_H

#include <stdint.h>

#ifdef __CUDACC__
#define FG_SEGMENT_SIZE static constexpr __host__ __device__ __forceinline__
#elif defined(__cplusplus)
#define FG_SEGMENT_SIZE static constexpr inline
#else
#define FG_SEGMENT_SIZE static inline
#endif

enum {
    FG_SEGMENT_TILE = 64,     /* rows */
    FG_SEGMENT_TILES = 4,     /* at most; 2 or 4 */
    FG_SEGMENT_VOLUME = 32,   /* offsets at most: the bits of a mask */
    FG_SEGMENT_HEAD = 16,     /* words */
    FG_SEGMENT_PLACES = 1104, /* at most; 128 bytes of each input fit into a multiprocessor's shared memory */
};

FG_SEGMENT_SIZE int32_t fg_segment_rows(int32_t tiles) { return FG_SEGMENT_TILE * tiles; }
/* Of 4 tiles 4.3 for each row, of 2 tiles 7.2. A surface of voxels takes 1.6 and 1.8, a solid 2.6 and more. */
FG_SEGMENT_SIZE int32_t fg_segment_places(int32_t tiles) { return FG_SEGMENT_PLACES - 92 * (FG_SEGMENT_TILES - tiles); }
FG_SEGMENT_SIZE int32_t fg_segment_inputs_at(int32_t tiles) { return FG_SEGMENT_HEAD + fg_segment_rows(tiles); }
FG_SEGMENT_SIZE int32_t fg_segment_places_at(int32_t tiles) {
    return fg_segment_inputs_at(tiles) + fg_segment_places(tiles);
}
FG_SEGMENT_SIZE int64_t fg_segment_words(int32_t tiles, int64_t volume) {
    return fg_segment_places_at(tiles) + volume * tiles * (FG_SEGMENT_TILE / 2);
}

/* How many tiles the segments have whose records are as many words long; 0 for no such segments. */
FG_SEGMENT_SIZE int32_t fg_segment_tiles_of(int64_t words, int64_t volume) {
    for (int32_t tiles = 2; tiles <= FG_SEGMENT_TILES; tiles *= 2) {
        if (volume <= FG_SEGMENT_VOLUME && fg_segment_words(tiles, volume) == words) return tiles;
    }
    return 0;
}

#endif
