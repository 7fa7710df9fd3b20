/*
 * Plan of row orders: which ones pay, and by which offsets to sort.
 *
 * Rows are sorted by the Gray-code rank of a bit mask that says at which offsets they have neighbours, so that the
 * rows of one tile miss the same neighbours. A mask of all 27 offsets of 3x3x3 has so many kinds that only large scenes
 * fill tiles with rows of one kind. The offsets are therefore cut into groups as well, planes of constant kx or columns
 * of constant (kx, ky), each with an order of its own: 9 offsets have few kinds, 3 have eight. The price is a partial
 * sum of each row and group, which fg_plan_conv weighs; a map has the sets that it may choose from.
 *
 * The highest bits of a mask are the corners of the innermost 3x3x3 cube, then its edges and faces, then the cubes
 * around it: a corner tells most about the others, and what lies far out says little about what lies near. 12 such bits
 * group the rows of small submanifold maps as well as all 27, and 18 take no more passes of a radix sort. 20 are corners
 * and edges, which tell the rows of a map of stride 2 apart; for those of large maps a third pass pays
 * (docs/performance/convolution.md). The centre, always there, says nothing.
 *
 * Large scenes are sorted in segments. Rows come in some spatial order; sorted over the whole scene, the rows of a tile
 * lie anywhere in it and what they gather has left L2 before the next tile asks for it. 2^16 rows of 128 16-bit
 * channels are 16 MB. With four million rows, shorter segments leave enough rows of each kind and gather nearer still.
 */
#include <math.h>
#include <stdlib.h>

#include "plan.h"

enum {
    MIN_ROWS = 512,              /* four tiles: below, all kinds of rows share them */
    MOST_SEGMENTS = 1 << 12,     /* of all orders together */
    ONE_SEGMENT_ROWS = 1 << 18,  /* up to here the rows are one segment */
    LONG_SEGMENT_ROWS = 1 << 21, /* up to here segments are long */
    LONG_SEGMENT = 1 << 16,
    SHORT_SEGMENT = 1 << 14,
    FEW_ENTRIES = 1 << 20, /* of a map: below, keys have fewer bits */
    FEW_KEY_BITS = 18,
    SORTED_OUT = 5, /* times as many rows as there are kinds: finer groups have nothing left to gain */
};

static int larger(int a, int b) { return a > b ? a : b; }

/* ---- which orders ---- */

/* How many tiles' worth of rows it takes until half of a tile's needless work is gone: the number of common kinds of
 * masks, over surfaces of all sizes and kernels of 2 to 7. */
static double kinds(int64_t offsets) { return fmin(0.3 * (double)(offsets * offsets), 200); }

double fg_pair_share(int64_t volume) { return fmin(0.55, 1.44 / cbrt((double)volume)); }

double fg_union_share(int64_t rows, int64_t volume, int64_t groups, int32_t block_m) {
    const double pairs = fg_pair_share(volume);
    return pairs + (1 - pairs) / (1 + (double)rows / (block_m * kinds(volume / groups)));
}

fg_order_sets fg_plan_order_sets(int64_t rows, const int32_t kernel[3]) {
    const int32_t volume = kernel[0] * kernel[1] * kernel[2];
    const int32_t groups[FG_MAX_ORDER_SETS] = {1, kernel[0], kernel[0] * kernel[1]};
    fg_order_sets sets = {0};
    if (rows < MIN_ROWS || volume == 1) return sets;
    for (int i = 0; i < FG_MAX_ORDER_SETS; i++) {
        if (i > 0 && groups[i] == sets.groups[sets.sets - 1]) continue;
        const double coarser = i > 0 ? kinds(volume / sets.groups[sets.sets - 1]) : INFINITY;
        if ((double)rows > SORTED_OUT * 128 * coarser) break;
        sets.groups[sets.sets++] = groups[i];
    }
    return sets;
}

int64_t fg_order_count(const fg_order_sets *sets) {
    int64_t orders = 0;
    for (int32_t i = 0; i < sets->sets; i++) orders += sets->groups[i];
    return orders;
}

/* ---- how to sort ---- */

int32_t fg_order_segment(int64_t rows) {
    return rows <= ONE_SEGMENT_ROWS ? ONE_SEGMENT_ROWS : rows <= LONG_SEGMENT_ROWS ? LONG_SEGMENT : SHORT_SEGMENT;
}

static void add_offset(fg_order_plan *plan, int32_t order, int32_t v, int32_t most) {
    if (plan->keys[order].bits == most) return;
    plan->keys[order].offsets[plan->keys[order].bits++] = (uint16_t)v;
}

int32_t fg_offsets_by_rank(const int32_t kernel[3], uint16_t offsets[FG_MAX_VOLUME]) {
    const int32_t volume = kernel[0] * kernel[1] * kernel[2];
    const int rings = larger(larger(kernel[0], kernel[1]), kernel[2]) / 2;
    int32_t count = 0;
    for (int ring = 1; ring <= rings; ring++) {
        for (int distance = 3 * ring; distance >= ring; distance--) {
            for (int32_t v = 0; v < volume; v++) {
                const int z = abs(v % kernel[2] - kernel[2] / 2);
                const int y = abs(v / kernel[2] % kernel[1] - kernel[1] / 2);
                const int x = abs(v / kernel[2] / kernel[1] - kernel[0] / 2);
                if (larger(larger(x, y), z) == ring && x + y + z == distance) offsets[count++] = (uint16_t)v;
            }
        }
    }
    return count;
}

fg_order_plan fg_plan_row_orders(int64_t rows, const int32_t kernel[3], fg_order_sets sets) {
    const int32_t volume = kernel[0] * kernel[1] * kernel[2];
    fg_order_plan plan = {.segment = fg_order_segment(rows), .orders = (int32_t)fg_order_count(&sets)};
    if (rows > INT32_MAX) rows = INT32_MAX; /* which no backend takes */

    while (plan.segment < rows && plan.orders * ((rows + plan.segment - 1) / plan.segment) > MOST_SEGMENTS)
        plan.segment *= 2;

    uint16_t offsets[FG_MAX_VOLUME];
    const int32_t count = fg_offsets_by_rank(kernel, offsets);
    const int32_t bits = rows * volume < FEW_ENTRIES ? FEW_KEY_BITS : FG_KEY_BITS;
    for (int32_t i = 0; i < count; i++) {
        int32_t order = 0;
        for (int32_t set = 0; set < sets.sets; order += sets.groups[set++])
            add_offset(&plan, order + offsets[i] * sets.groups[set] / volume, offsets[i], bits);
    }
    return plan;
}
