/*
 * The end of a tile of the Hopper convolution kernels. A thread's sums d are those of two rows of `out`, less than 0
 * where there is none: of every 8 columns from n0 on the two at 2 * (lane % 4), of rows[0] in d[4 j] and d[4 j + 1], of
 * rows[1] in the next two. Columns are a multiple of 8.
 */
#pragma once

#include "conv_gather.cuh"
#include "ptx.cuh"
#include "quad.cuh"

namespace flexgemm {

/* Sums in pairs of columns, to rows of `pitch` elements. */
template <typename T, int kRegisters>
__device__ __forceinline__ void store_pairs(const float (&d)[kRegisters], const GatherParams &p, int n0,
                                            const int64_t (&rows)[2], T *out, int64_t pitch) {
    struct alignas(2 * sizeof(T)) Pair {
        T x, y;
    };
    const int lane = ptx::opaque(static_cast<int>(threadIdx.x % 32)); /* else comparisons are kept */
    const bool aligned = reinterpret_cast<uintptr_t>(out) % sizeof(Pair) == 0 && pitch % 2 == 0;
#pragma unroll
    for (int j = 0; j < kRegisters / 4; ++j) {
        const int n = n0 + 8 * j + lane % 4 * 2;
        if (n >= p.columns) continue; /* columns are a multiple of 8 */
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (rows[half] < 0) continue;
            const Pair pair = {from_float<T>(d[4 * j + 2 * half]), from_float<T>(d[4 * j + 2 * half + 1])};
            T *target = out + rows[half] * pitch + n;
            if (aligned) {
                *reinterpret_cast<Pair *>(target) = pair;
            } else {
                target[0] = pair.x;
                target[1] = pair.y;
            }
        }
    }
}

/* Of a thread's two rows in memory what its lane reads or writes. */
template <typename T>
struct LaneRows {
    T *at[2];       /* from column `first` on */
    int columns[2]; /* that there are from there on: none of a row less than 0 */

    __device__ __forceinline__ LaneRows(T *data, int64_t pitch, const int64_t (&rows)[2], int first, int all_columns) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            at[half] = data + rows[half] * pitch + first;
            columns[half] = rows[half] < 0 ? 0 : all_columns - first;
        }
    }
};

/* To rows of float32 that start at multiples of 16 bytes: of two groups of 8 columns neighbouring lanes exchange pairs,
 * so that each writes 16 bytes. */
template <int kRegisters>
__device__ __forceinline__ void store_fours(const float (&d)[kRegisters], const GatherParams &p, int n0,
                                            const int64_t (&rows)[2], float *out, int64_t pitch) {
    const int lane = threadIdx.x % 32;
    const bool odd = lane & 1;
    const LaneRows<float> to(out, pitch, rows, n0 + 8 * odd + lane % 4 / 2 * 4, p.columns);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < kRegisters; i += 8) {
            const float *x = &d[i + 2 * half], *y = x + 4; /* of the two groups */
            const float s = __shfl_xor_sync(~0u, odd ? x[0] : y[0], 1), t = __shfl_xor_sync(~0u, odd ? x[1] : y[1], 1);
            const float4 sums = odd ? make_float4(s, t, y[0], y[1]) : make_float4(x[0], x[1], s, t);
            if (2 * i < to.columns[half]) *reinterpret_cast<float4 *>(to.at[half] + 2 * i) = sums;
        }
    }
}

/* To the partial sums of a slice, which lie in the workspace. */
template <int kRegisters>
__device__ __forceinline__ void store_partials(const float (&d)[kRegisters], const GatherParams &p, int slice, int n0,
                                               const int64_t (&rows)[2]) {
    store_fours(d, p, n0, rows, p.partials + slice * p.rows * p.columns, p.columns);
}

/* The bias of a tile's columns as a warpgroup keeps it in shared memory from tile to tile: zero past the last column.
 * Who shares it starts with no column. */
template <int kColumns>
struct KeptBias {
    alignas(8) float of[kColumns];
    int first_column; /* -1: none yet */
};

/* Reads the bias from memory by the warpgroup together, unless it is there. `barrier`: a named one of theirs. */
template <typename T, int kColumns>
__device__ __forceinline__ const float *bring_bias(KeptBias<kColumns> &kept, const GatherParams &p, int n0,
                                                   int barrier) {
    const T *bias = static_cast<const T *>(p.epilogue.bias);
    if (!bias) return nullptr;
    if (__any_sync(~0u, kept.first_column == n0)) return kept.of; /* the same for all */
    ptx::named_barrier(barrier, ptx::kWarpgroup); /* all have read that of the tile before, and its column */
    if (threadIdx.x % ptx::kWarpgroup == 0) kept.first_column = n0;
    for (int i = static_cast<int>(threadIdx.x) % ptx::kWarpgroup; i < kColumns; i += ptx::kWarpgroup)
        kept.of[i] = n0 + i < p.columns ? to_float(bias[n0 + i]) : 0.0f;
    ptx::named_barrier(barrier, ptx::kWarpgroup);
    return kept.of;
}

/* d += bias, of the tile's columns and zero past the last, in shared memory. */
template <int kRegisters>
__device__ __forceinline__ void add_bias(float (&d)[kRegisters], const float *bias) {
    const float2 *const pairs = reinterpret_cast<const float2 *>(bias) + threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < kRegisters / 4; ++j) {
        const float2 pair = pairs[4 * j];
        d[4 * j] += pair.x, d[4 * j + 1] += pair.y;
        d[4 * j + 2] += pair.x, d[4 * j + 3] += pair.y;
    }
}

/* d += residual of 16-bit rows: each lane of a quad reads 16 bytes and they exchange pairs of columns. Nothing branches
 * between reads and exchanges, which take long: those of one group of columns would wait for those of the last. */
template <bool kAligned, typename T, int kRegisters>
__device__ __forceinline__ void add_chunks(float (&d)[kRegisters], const GatherParams &p, int n0,
                                           const int64_t (&rows)[2]) {
    const int lane = threadIdx.x % 32;
    const LaneRows<const T> from(static_cast<const T *>(p.epilogue.residual), p.epilogue.residual_stride, rows,
                                 n0 + 8 * (lane % 4), p.columns);
#pragma unroll
    for (int j = 0; j < kRegisters / 4; j += 4) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t word[4] = {};
            if (8 * j < from.columns[half]) load_chunk(word, from.at[half] + 8 * j, kAligned);
            transpose_quad(word, lane);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 addend = unpack<T>(word[i]);
                d[4 * (j + i) + 2 * half] += addend.x;
                d[4 * (j + i) + 2 * half + 1] += addend.y;
            }
        }
    }
}

/* d += residual. */
template <typename T, int kRegisters>
__device__ __forceinline__ void add_residual(float (&d)[kRegisters], const GatherParams &p, int n0,
                                             const int64_t (&rows)[2]) {
    const T *residual = static_cast<const T *>(p.epilogue.residual);
    const int64_t pitch = p.epilogue.residual_stride;
    if constexpr (sizeof(T) == 2) {
        if (are_chunks(residual, pitch))
            add_chunks<true, T>(d, p, n0, rows);
        else
            add_chunks<false, T>(d, p, n0, rows);
    } else {
#pragma unroll
        for (int j = 0; j < kRegisters / 4; ++j) {
            const int n = n0 + 8 * j + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (rows[half] < 0 || n >= p.columns) continue; /* columns are a multiple of 8 */
                d[4 * j + 2 * half] += residual[rows[half] * pitch + n];
                d[4 * j + 2 * half + 1] += residual[rows[half] * pitch + n + 1];
            }
        }
    }
}

/* d += bias + residual, `bias` of the tile's columns in shared memory or NULL. The sums are held between what may be
 * added, or both outcomes would be kept, beside all sums. */
template <typename T, int kRegisters>
__device__ __forceinline__ void add_rows(float (&d)[kRegisters], const float *bias, const GatherParams &p, int n0,
                                         const int64_t (&rows)[2]) {
    if (bias) add_bias(d, bias);
    ptx::wgmma_hold(d);
    if (p.epilogue.residual) add_residual<T>(d, p, n0, rows);
    ptx::wgmma_hold(d);
}

/* 16-bit rows take the way of the residual back; nothing branches between exchanges and stores here either. */
template <bool kAligned, typename T, int kRegisters>
__device__ __forceinline__ void store_chunks(const float (&d)[kRegisters], const GatherParams &p, int n0,
                                             const int64_t (&rows)[2]) {
    const int lane = threadIdx.x % 32;
    const LaneRows<T> to(static_cast<T *>(p.out), p.out_stride, rows, n0 + 8 * (lane % 4), p.columns);
#pragma unroll
    for (int j = 0; j < kRegisters / 4; j += 4) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t word[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) word[i] = pack<T>(d[4 * (j + i) + 2 * half], d[4 * (j + i) + 2 * half + 1]);
            transpose_quad(word, lane);
            if (8 * j < to.columns[half]) store_chunk(to.at[half] + 8 * j, word, kAligned);
        }
    }
}

/* out = d. */
template <typename T, int kRegisters>
__device__ __forceinline__ void store_rows(const float (&d)[kRegisters], const GatherParams &p, int n0,
                                           const int64_t (&rows)[2]) {
    T *const out = static_cast<T *>(p.out);
    if constexpr (sizeof(T) == 1) {
        store_pairs(d, p, n0, rows, out, p.out_stride);
    } else if constexpr (sizeof(T) == 4) {
        if (reinterpret_cast<uintptr_t>(out) % 16 == 0 && p.out_stride % 4 == 0)
            store_fours(d, p, n0, rows, out, p.out_stride);
        else
            store_pairs(d, p, n0, rows, out, p.out_stride);
    } else {
        if (are_chunks(out, p.out_stride))
            store_chunks<true, T>(d, p, n0, rows);
        else
            store_chunks<false, T>(d, p, n0, rows);
    }
}

}  // namespace flexgemm
