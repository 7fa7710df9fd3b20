/*
 * Plan of a sequence of voxels: how many bits its codes have, and what the curves of sequence.h need to know.
 */
#include "sequence.h"

/* Bits of the numbers 0 .. count - 1. */
static int32_t bits_below(int64_t count) {
    int32_t bits = 0;
    for (uint64_t last = (uint64_t)count - 1; last > 0; last >>= 1) bits++;
    return bits;
}

static int32_t axis_bits(const int64_t shape[4]) {
    int64_t largest = shape[1];
    for (int axis = 2; axis < 4; axis++) largest = shape[axis] > largest ? shape[axis] : largest;
    return bits_below(largest);
}

int32_t fg_sequence_bits(fg_sequence mode, const int64_t shape[4]) {
    if (mode != FG_BXYZ) return 3 * axis_bits(shape) + bits_below(shape[0]);
    int64_t cells = 1;
    for (int axis = 0; axis < 4; axis++)
        if (__builtin_mul_overflow(cells, shape[axis], &cells)) return 65;
    return bits_below(cells);
}

fg_curve fg_make_curve(fg_sequence mode, const int64_t shape[4]) {
    fg_curve curve = {.mode = mode, .axis_bits = mode == FG_BXYZ ? 0 : axis_bits(shape)};
    for (int axis = 0; axis < 4; axis++) curve.shape[axis] = shape[axis];
    return curve;
}
