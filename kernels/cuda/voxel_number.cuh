/*
 * The numbers of a grid's voxels, ((b * W + x) * H + y) * D + z, in the bits that the largest of them has: what tables
 * of voxels have as keys. (sequence.h has it for any order of voxels, in 64 bits.)
 */
#pragma once

#include "common.cuh"

namespace flexgemm {

/* Coordinates are int32: one that is negative or past the end is past the end as an unsigned number. */
struct VoxelBounds {
    uint32_t batch, width, height, depth; /* at most 2^31 */

    explicit VoxelBounds(const int64_t (&shape)[4])
        : batch(clip(shape[0])), width(clip(shape[1])), height(clip(shape[2])), depth(clip(shape[3])) {}

    static uint32_t clip(int64_t extent) { return static_cast<uint32_t>(extent < 1ll << 31 ? extent : 1ll << 31); }

    __device__ bool contain(int4 c) const {
        return static_cast<uint32_t>(c.x) < batch && static_cast<uint32_t>(c.y) < width &&
               static_cast<uint32_t>(c.z) < height && static_cast<uint32_t>(c.w) < depth;
    }
};

template <class Number>
struct VoxelNumbers {
    VoxelBounds bounds;
    Number width, height, depth;

    explicit VoxelNumbers(const int64_t (&shape)[4])
        : bounds(shape),
          width(static_cast<Number>(shape[1])),
          height(static_cast<Number>(shape[2])),
          depth(static_cast<Number>(shape[3])) {}

    /* Of a voxel inside the bounds. */
    __device__ Number operator()(int4 c) const {
        const Number x = static_cast<uint32_t>(c.x) * width + static_cast<uint32_t>(c.y);
        return (x * height + static_cast<uint32_t>(c.z)) * depth + static_cast<uint32_t>(c.w);
    }
};

}  // namespace flexgemm
