/*
 * Slabs of gemm_store_sm90.cuh: 16 rows of 128 bytes in shared memory, by way of which a warp's values go to the output.
 */
#pragma once

#include <type_traits>

#include "gemm_values_sm90.cuh"

namespace flexgemm {

/* Where a slab of 16 rows of 128 bytes has a byte of a row: 16-byte chunk c of row r is at c ^ (r % 8). */
__device__ __forceinline__ uint32_t place_in_slab(int row, int byte) {
    return row * kSm90SlabBytes + (byte / 16 ^ row % 8) * 16 + byte % 16;
}

/* Two adjacent sums of a row. */
template <typename T>
__device__ __forceinline__ void store_pair(uint8_t *slab, int row, int byte, float first, float second) {
    uint8_t *const to = slab + place_in_slab(row, byte);
    if constexpr (sizeof(T) == 1) { /* both in one instruction */
        constexpr auto kKind = std::is_same_v<T, __nv_fp8_e4m3> ? __NV_E4M3 : __NV_E5M2;
        *reinterpret_cast<__nv_fp8x2_storage_t *>(to) =
            __nv_cvt_float2_to_fp8x2({first, second}, __NV_SATFINITE, kKind);
    } else {
        struct alignas(2 * sizeof(T)) Pair {
            T element[2];
        };
        *reinterpret_cast<Pair *>(to) = {from_float<T>(first), from_float<T>(second)};
    }
}

/* Of a block of 8 columns of float32 a lane has two sums in each of two rows. Rows beside each other have the same banks
 * there, so that the lanes of every other one take two blocks the other way round. */
__device__ __forceinline__ bool takes_turned(int lane) { return lane / 4 % 2; }

/* Where a lane's sums of what it takes as block `block` lie. */
__device__ __forceinline__ uint32_t place_in_turn(int row, int block, int lane) {
    return place_in_slab(row, (block ^ takes_turned(lane)) * 32 + lane % 4 * 8);
}

/* Where the sums of a block lie of a lane's first row, or (half 1) of its second. */
template <int kCount>
__device__ __forceinline__ const float *sums_of_block(const float (&sum)[kCount], int block, int half) {
    return &sum[4 * block + 2 * half];
}

/* And which of two blocks' the lane takes. */
__device__ __forceinline__ float2 sums_in_turn(const float *own, const float *other, int lane) {
    const bool turned = takes_turned(lane);
    return {turned ? other[0] : own[0], turned ? other[1] : own[1]};
}

/* How a tile's columns come in slabs: those of the last one end where the tile does, and begin in the one before where
 * they have to. */
template <typename T, int kColumns>
struct SlabColumns {
    static constexpr int kOfSlab = kSm90SlabBytes / static_cast<int>(sizeof(T)), kSlabs = ceil_div(kColumns, kOfSlab);
    static constexpr bool kFill = kColumns >= kOfSlab;                     /* a slab at least */
    static constexpr int kTwice = kFill ? kSlabs * kOfSlab - kColumns : 0; /* columns that the last two slabs have */
    __device__ static constexpr int begin_of(int slab) { return slab * kOfSlab - (slab == kSlabs - 1 ? kTwice : 0); }
};

/* What a slab has of a tile: columns from `column` on; sums times factors. Of float32 the first `blank`, in multiples of 16
 * or of what is gated of 4, are zeros. What is gated begins at `byte` of the slab's rows. */
struct SlabPart {
    int column;
    RowFactors factors = {{1.0f, 1.0f}};
    int blank = 0, byte = 0;
};

/* 16 rows of it, ended and converted. Of each 8 columns a lane holds four sums, of two rows. */
template <typename T, Sm90End kEnd, int kCount>
__device__ __forceinline__ void fill_slab(const float (&sum)[kCount], uint8_t *slab, int lane, const SlabPart &part) {
    constexpr int kBlocks = kSm90SlabBytes / static_cast<int>(sizeof(T)) / 8;
    const int first = part.column / 8;
    if constexpr (sizeof(T) == 1) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float *sums = &sum[4 * (first + block) + 2 * half];
                const float factor = part.factors.of[half];
                store_pair<T>(slab, lane / 4 + 8 * half, block * 8 + lane % 4 * 2, sums[0] * factor, sums[1] * factor);
            }
    } else if constexpr (sizeof(T) == 2) {
        struct alignas(4) Pair {
            T element[2];
        };
#pragma unroll
        for (int block = 0; block < kBlocks; block += 2) {
            uint32_t words[4]; /* rows 0 to 7 and 8 to 15 of a block, and of the next */
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float *sums = &sum[4 * (first + block + i / 2) + 2 * (i % 2)];
                const float factor = part.factors.of[i % 2];
                const Pair pair = {from_float<T>(ended<kEnd>(sums[0] * factor)),
                                   from_float<T>(ended<kEnd>(sums[1] * factor))};
                memcpy(&words[i], &pair, sizeof pair);
            }
            ptx::stmatrix_x4(slab + lane % 16 * kSm90SlabBytes + ((block + lane / 16) ^ lane % 8) * 16, words);
        }
    } else {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                /* By address: of a choice by value ptxas makes a branch, and in some kernels has products wait for it. */
                constexpr float kZeros[2] = {};
                const bool blank = block / 2 * 16 < part.blank;
                const float *own = blank ? kZeros : sums_of_block(sum, first + block, half),
                            *other = blank ? kZeros : sums_of_block(sum, first + (block ^ 1), half);
                const float2 sums = sums_in_turn(own, other, lane);
                const float factor = blank ? 0.0f : part.factors.of[half]; /* which may be infinite */
                *reinterpret_cast<float2 *>(slab + place_in_turn(lane / 4 + 8 * half, block, lane)) = {sums.x * factor,
                                                                                                       sums.y * factor};
            }
    }
}

/* Of each 4 columns a lane has one, in two rows. */
template <typename T, Sm90End kEnd, typename Gated>
__device__ __forceinline__ void fill_slab(const Gated &gated, uint8_t *slab, int lane, const SlabPart &part) {
    constexpr int kSlabColumns = kSm90SlabBytes / static_cast<int>(sizeof(T));
    constexpr int kBlocks = (kSlabColumns < Gated::kColumns ? kSlabColumns : Gated::kColumns) / 4;
    const int first = part.column / 4;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = lane / 4 + 8 * half, byte = (block * 4 + lane % 4) * static_cast<int>(sizeof(T));
            *reinterpret_cast<T *>(slab + place_in_slab(row, part.byte + byte)) =
                from_float<T>(block * 4 < part.blank ? 0.0f : gated.value(2 * (first + block) + half, part.factors));
        }
}

/* Columns that a warp's values are, whose type is an array of sums or what SwiGLU makes of one. */
template <typename Values>
constexpr int kColumnsOf = Values::kColumns;
template <int kCount>
constexpr int kColumnsOf<float[kCount]> = 2 * kCount;

}  // namespace flexgemm
