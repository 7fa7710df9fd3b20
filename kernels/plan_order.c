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
 * group the rows of small scenes as well as all 27, and 18 take no more passes of a radix sort. The centre, always
 * there, says nothing.
 *
 * In maps with phases (flexgemm.h) a row has neighbours at a few offsets alone, those of its phase. There a key begins
 * with the number of the phase, and the rest is a mask of that phase's offsets: rows of one phase lie side by side, and
 * one order does what groups do elsewhere (docs/performance/convolution.md).
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
    SORTED_OUT = 5, /* times as many rows as there are kinds: finer groups have nothing left to gain */
};

static int larger(int a, int b) { return a > b ? a : b; }
static int smaller(int a, int b) { return a < b ? a : b; }

/* ---- which orders ---- */

/* How many tiles' worth of rows it takes until half of a tile's needless work is gone: the number of common kinds of
 * masks, over surfaces of all sizes and kernels of 2 to 7. */
static double kinds(int64_t offsets) { return fmin(0.3 * (double)(offsets * offsets), 200); }

double fg_pair_share(int64_t volume, int64_t phases) {
    return phases > 1 ? 1 / (double)phases : fmin(0.55, 1.44 / cbrt((double)volume));
}

/* Of phases a tile works through the offsets of one, or, where that ends and the next begins, of two. */
double fg_union_share(int64_t rows, int64_t volume, int64_t groups, int64_t phases, int32_t block_m) {
    const double pairs = fg_pair_share(volume, phases), tiles = (double)rows / block_m;
    if (phases > 1) return fmin(1, pairs * (1 + (double)(phases - 1) / tiles));
    return pairs + (1 - pairs) / (1 + tiles / kinds(volume / groups));
}

int64_t fg_phase_count(const fg_order_sets *sets) {
    int64_t count = 1;
    for (int axis = 0; axis < 3; axis++) count *= larger(sets->phases[axis], 1);
    return count;
}

fg_order_sets fg_plan_order_sets(int64_t rows, const int32_t kernel[3], const int32_t phases[3]) {
    const int32_t volume = kernel[0] * kernel[1] * kernel[2];
    const int32_t groups[FG_MAX_ORDER_SETS] = {1, kernel[0], kernel[0] * kernel[1]};
    fg_order_sets sets = {.phases = {phases[0], phases[1], phases[2]}};
    if (rows < MIN_ROWS || volume == 1) return sets;
    for (int i = 0; i < (fg_phase_count(&sets) > 1 ? 1 : FG_MAX_ORDER_SETS); i++) {
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
    offsets[count++] = (uint16_t)((kernel[0] / 2 * kernel[1] + kernel[1] / 2) * kernel[2] + kernel[2] / 2);
    return count;
}

/* A bit for each offset of an order's group, as many as a key has, the first one highest. */
static void plan_masks(fg_order_plan *plan, const int32_t kernel[3], const fg_order_sets *sets) {
    const int32_t volume = kernel[0] * kernel[1] * kernel[2];
    int32_t order = 0, begin = 0;
    for (int32_t set = 0; set < sets->sets; set++) {
        for (int32_t group = 0; group < sets->groups[set]; group++, order++) {
            plan->keys[order].begin = plan->keys[order].end = (uint16_t)begin;
            begin += smaller(volume / sets->groups[set], FG_KEY_BITS);
        }
    }
    uint16_t offsets[FG_MAX_VOLUME];
    const int32_t count = fg_offsets_by_rank(kernel, offsets) - 1; /* without the centre */
    for (int32_t i = 0; i < count; i++) {
        int32_t first = 0;
        for (int32_t set = 0; set < sets->sets; first += sets->groups[set++]) {
            const int32_t which = first + offsets[i] * sets->groups[set] / volume;
            if (plan->keys[which].bits == FG_KEY_BITS) continue;
            plan->offsets[plan->keys[which].end++] = offsets[i];
            plan->keys[which].bits++;
        }
    }
    for (order = 0; order < plan->orders; order++) {
        uint32_t code = 1;
        for (int32_t i = plan->keys[order].end; i-- > plan->keys[order].begin; code <<= 1) plan->codes[i] = code;
    }
}

/* The number of a phase, from 1, since 0 is that of rows without neighbours, and a bit for each of its offsets. */
static void plan_phases(fg_order_plan *plan, const int32_t kernel[3], const fg_order_sets *sets) {
    int32_t phases[3], number_bits = 0, longest = 1, offsets_of[FG_MAX_VOLUME] = {0};
    for (int axis = 0; axis < 3; axis++) {
        phases[axis] = larger(sets->phases[axis], 1);
        longest *= (kernel[axis] + phases[axis] - 1) / phases[axis];
    }
    while (fg_phase_count(sets) >> number_bits > 0) number_bits++;
    const int32_t mask_bits = smaller(longest, FG_KEY_BITS - number_bits);

    const int32_t count = fg_offsets_by_rank(kernel, plan->offsets);
    plan->keys[0].end = (uint16_t)count;
    plan->keys[0].bits = (uint16_t)(number_bits + mask_bits);
    for (int32_t i = 0; i < count; i++) {
        const int32_t z = plan->offsets[i] % kernel[2], y = plan->offsets[i] / kernel[2] % kernel[1],
                      x = plan->offsets[i] / kernel[2] / kernel[1];
        const int32_t phase = (x % phases[0] * phases[1] + y % phases[1]) * phases[2] + z % phases[2];
        const int32_t bit = mask_bits - 1 - offsets_of[phase]++;
        plan->codes[i] = (uint32_t)(phase + 1) << mask_bits | (bit >= 0 ? 1u << bit : 0);
    }
}

fg_order_plan fg_plan_row_orders(int64_t rows, const int32_t kernel[3], fg_order_sets sets) {
    fg_order_plan plan = {.segment = fg_order_segment(rows), .orders = (int32_t)fg_order_count(&sets)};
    if (rows > INT32_MAX) rows = INT32_MAX; /* which no backend takes */

    while (plan.segment < rows && plan.orders * ((rows + plan.segment - 1) / plan.segment) > MOST_SEGMENTS)
        plan.segment *= 2;

    if (fg_phase_count(&sets) > 1 && plan.orders == 1)
        plan_phases(&plan, kernel, &sets);
    else
        plan_masks(&plan, kernel, &sets);
    return plan;
}
