/*
 * Plan of a row order: whether sorting the rows of a neighbour map pays, and by which offsets to sort.
 *
 * Rows are sorted by the Gray-code rank of a bit mask that says at which offsets they have neighbours, so that the
 * rows of one tile miss the same neighbours. The highest bits are the corners of the innermost 3x3x3 cube, then its
 * edges and faces, then the cubes around it: a corner tells most about the others, and what lies far out says little
 * about what lies near. 16 such bits group the rows of small scenes better than all 27 in their order of v, 24 those of
 * large ones as well (docs/performance.md). The centre, always there, says nothing. A radix sort takes 8 bits a pass.
 *
 * Large scenes are sorted in segments. Rows come in some spatial order; sorted over the whole scene, the rows of a tile
 * lie anywhere in it and what they gather has left L2 before the next tile asks for it. 2^17 rows of 64 to 128 16-bit
 * channels are 16 to 32 MB. There are at most 2^8 segments, so that a key and the number of its segment fit 32 bits.
 */
#include <stdlib.h>

#include "plan.h"

enum {
    MIN_ROWS = 2048,       /* below, an order saves less than it costs */
    MANY_ROWS = 1 << 15,   /* from here a third pass over the rows earns its time back */
    ONE_SEGMENT = 1 << 18, /* up to here the rows are one */
    SEGMENT = 1 << 17,
    MAX_SEGMENTS = 1 << 8,
};

static int larger(int a, int b) { return a > b ? a : b; }

fg_order_plan fg_plan_row_order(int64_t rows, const int32_t kernel[3]) {
    const int32_t volume = kernel[0] * kernel[1] * kernel[2];
    const int32_t wanted = rows < MANY_ROWS ? FG_MAX_KEY_BITS - 8 : FG_MAX_KEY_BITS;
    const int rings = larger(larger(kernel[0], kernel[1]), kernel[2]) / 2;
    fg_order_plan plan = {
        .pays = rows >= MIN_ROWS && volume > 1,
        .segment = rows <= ONE_SEGMENT ? ONE_SEGMENT : SEGMENT,
    };
    while (plan.segment < (rows + MAX_SEGMENTS - 1) / MAX_SEGMENTS) plan.segment *= 2;
    for (int ring = 1; ring <= rings; ring++) {
        for (int distance = 3 * ring; distance >= ring; distance--) {
            for (int32_t v = 0; v < volume && plan.key_bits < wanted; v++) {
                const int z = abs(v % kernel[2] - kernel[2] / 2);
                const int y = abs(v / kernel[2] % kernel[1] - kernel[1] / 2);
                const int x = abs(v / kernel[2] / kernel[1] - kernel[0] / 2);
                if (larger(larger(x, y), z) == ring && x + y + z == distance)
                    plan.offsets[plan.key_bits++] = (uint16_t)v;
            }
        }
    }
    return plan;
}
