/*
 * The curves that number voxels, for both backends: coordinates to a code and back, a few bit operations each.
 *
 * Z order interleaves the bits of x, y and z. The Hilbert curve is J. Skilling's ("Programming the Hilbert curve", AIP
 * Conference Proceedings 707, 2004): from the highest bit down, each bit of x, y and z says how the bits below it are
 * turned, by reflecting x or by swapping x with that axis; what comes out is Gray-coded and interleaved.
 */
#ifndef FLEXGEMM_SEQUENCE_H
#define FLEXGEMM_SEQUENCE_H

#include "flexgemm.h"

#ifdef __CUDACC__
#define FG_BOTH static __host__ __device__ __forceinline__
#else
#define FG_BOTH static inline
#endif

typedef struct {
    fg_sequence mode;
    int32_t axis_bits; /* of x, y and z each, on the curves */
    int64_t shape[4];
} fg_curve;

/* (plan_sequence.c) */
#ifdef __cplusplus
extern "C"
#endif
    fg_curve fg_make_curve(fg_sequence mode, const int64_t shape[4]);

FG_BOTH bool fg_coord_inside(const int32_t coord[4], const int64_t shape[4]) {
    bool all = true;
    for (int axis = 0; axis < 4; axis++) all &= coord[axis] >= 0 && coord[axis] < shape[axis];
    return all;
}

/* ((b W + x) H + y) D + z, of coordinates inside the shape. */
FG_BOTH uint64_t fg_pack_coord(const int32_t coord[4], const int64_t shape[4]) {
    uint64_t code = (uint32_t)coord[0];
    for (int axis = 1; axis < 4; axis++) code = code * (uint64_t)shape[axis] + (uint32_t)coord[axis];
    return code;
}

/* ---- interleaving ---- */

/* Bit i of 21 to bit 3 i. */
FG_BOTH uint64_t fg_spread_bits(uint32_t axis) {
    uint64_t bits = axis & 0x1fffff;
    bits = (bits | bits << 32) & 0x001f00000000ffff;
    bits = (bits | bits << 16) & 0x001f0000ff0000ff;
    bits = (bits | bits << 8) & 0x100f00f00f00f00f;
    bits = (bits | bits << 4) & 0x10c30c30c30c30c3;
    return (bits | bits << 2) & 0x1249249249249249;
}

/* Bit 3 i to bit i; what lies between is dropped. */
FG_BOTH uint32_t fg_gather_bits(uint64_t bits) {
    bits &= 0x1249249249249249;
    bits = (bits | bits >> 2) & 0x10c30c30c30c30c3;
    bits = (bits | bits >> 4) & 0x100f00f00f00f00f;
    bits = (bits | bits >> 8) & 0x001f0000ff0000ff;
    bits = (bits | bits >> 16) & 0x001f00000000ffff;
    return (uint32_t)((bits | bits >> 32) & 0x1fffff);
}

/* ---- Hilbert ---- */

/* What one bit of `axis` does to the bits below it, `low`: reflects x where it is set, else swaps x with the axis. It
 * is its own inverse. For the axis x itself the swap does nothing. */
FG_BOTH void fg_hilbert_turn(uint32_t *x, uint32_t *axis, int bit) {
    const uint32_t low = (1u << bit) - 1, set = 0u - (*axis >> bit & 1u);
    const uint32_t swapped = (*x ^ *axis) & low & ~set;
    *x ^= swapped | (low & set);
    *axis ^= swapped;
}

FG_BOTH void fg_hilbert_encode(uint32_t axes[3], int bits) {
    for (int bit = bits - 1; bit > 0; bit--)
        for (int i = 0; i < 3; i++) fg_hilbert_turn(&axes[0], &axes[i], bit);
    axes[1] ^= axes[0];
    axes[2] ^= axes[1];
    /* Each bit is the parity of the bits of z above it. */
    uint32_t parity = axes[2] >> 1;
    for (int shift = 1; shift < 32; shift *= 2) parity ^= parity >> shift;
    for (int i = 0; i < 3; i++) axes[i] ^= parity;
}

FG_BOTH void fg_hilbert_decode(uint32_t axes[3], int bits) {
    const uint32_t shifted = axes[2] >> 1;
    axes[2] ^= axes[1];
    axes[1] ^= axes[0];
    axes[0] ^= shifted;
    for (int bit = 1; bit < bits; bit++)
        for (int i = 2; i >= 0; i--) fg_hilbert_turn(&axes[0], &axes[i], bit);
}

/* ---- codes ---- */

/* Of coordinates inside the shape. */
FG_BOTH uint64_t fg_encode(const fg_curve *curve, const int32_t coord[4]) {
    if (curve->mode == FG_BXYZ) return fg_pack_coord(coord, curve->shape);
    uint32_t axes[3] = {(uint32_t)coord[1], (uint32_t)coord[2], (uint32_t)coord[3]};
    if (curve->mode == FG_HILBERT) fg_hilbert_encode(axes, curve->axis_bits);
    const uint64_t inner = fg_spread_bits(axes[0]) << 2 | fg_spread_bits(axes[1]) << 1 | fg_spread_bits(axes[2]);
    return (uint64_t)(uint32_t)coord[0] << 3 * curve->axis_bits | inner;
}

/* Returns whether the code is that of a voxel inside the shape. */
FG_BOTH bool fg_decode(const fg_curve *curve, uint64_t code, int32_t coord[4]) {
    uint64_t batch = code;
    uint32_t axes[3];
    if (curve->mode == FG_BXYZ) {
        uint64_t index[3];
        for (int axis = 2; axis >= 0; axis--) {
            const uint64_t extent = (uint64_t)curve->shape[axis + 1];
            index[axis] = batch % extent;
            batch /= extent;
        }
        if (index[0] > INT32_MAX || index[1] > INT32_MAX || index[2] > INT32_MAX) return false;
        for (int axis = 0; axis < 3; axis++) axes[axis] = (uint32_t)index[axis];
    } else {
        for (int axis = 0; axis < 3; axis++) axes[axis] = fg_gather_bits(code >> (2 - axis));
        const uint32_t mask = (1u << curve->axis_bits) - 1;
        for (int axis = 0; axis < 3; axis++) axes[axis] &= mask;
        if (curve->mode == FG_HILBERT) fg_hilbert_decode(axes, curve->axis_bits);
        batch = code >> 3 * curve->axis_bits;
    }
    if (batch > INT32_MAX) return false;
    coord[0] = (int32_t)batch;
    for (int axis = 0; axis < 3; axis++) coord[axis + 1] = (int32_t)axes[axis];
    return fg_coord_inside(coord, curve->shape);
}

#endif
