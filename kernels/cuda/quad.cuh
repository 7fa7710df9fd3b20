/*
 * From accumulators to rows of 16-bit elements and back. A quad, four neighbouring lanes, holds a row of a wgmma tile:
 * of every 8 columns two in each lane. In memory a lane reads or writes 8 columns, 16 bytes, at once: four groups of 8
 * columns at a time, the lanes of a quad exchange pairs.
 */
#pragma once

#include <cstring>

#include "common.cuh"

namespace flexgemm {

template <typename T>
__device__ __forceinline__ uint32_t pack(float x, float y) {
    const T pair[2] = {from_float<T>(x), from_float<T>(y)};
    uint32_t word;
    memcpy(&word, pair, sizeof word);
    return word;
}

template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t word) {
    T pair[2];
    memcpy(pair, &word, sizeof word);
    return make_float2(to_float(pair[0]), to_float(pair[1]));
}

/* Transposes the 4 x 4 words of four neighbouring lanes: lane i ends up with word i of lanes 0..3. */
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int lane) {
    const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t other = __shfl_xor_sync(~0u, odd ? w[i] : w[i + 1], 1);
        (odd ? w[i] : w[i + 1]) = other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t other = __shfl_xor_sync(~0u, upper ? w[i] : w[i + 2], 2);
        (upper ? w[i] : w[i + 2]) = other;
    }
}

/* Eight 16-bit elements of a row, as four words. */
__device__ __forceinline__ bool are_chunks(const void *data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
}

__device__ __forceinline__ void load_chunk(uint32_t (&word)[4], const void *source, bool aligned) {
    if (aligned) {
        const uint4 chunk = *static_cast<const uint4 *>(source);
        word[0] = chunk.x, word[1] = chunk.y, word[2] = chunk.z, word[3] = chunk.w;
    } else {
        const uint16_t *bits = static_cast<const uint16_t *>(source);
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = bits[2 * i] | static_cast<uint32_t>(bits[2 * i + 1]) << 16;
    }
}

__device__ __forceinline__ void store_chunk(void *target, const uint32_t (&word)[4], bool aligned) {
    if (aligned) {
        *static_cast<uint4 *>(target) = make_uint4(word[0], word[1], word[2], word[3]);
    } else {
        uint16_t *bits = static_cast<uint16_t *>(target);
#pragma unroll
        for (int e = 0; e < 8; ++e) bits[e] = static_cast<uint16_t>(word[e / 2] >> (e % 2 * 16));
    }
}

}  // namespace flexgemm
