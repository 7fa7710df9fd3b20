/*
 * Tiles in shared memory, tensor-core fragments out of them, and the products of the convolution kernels.
 *
 * A CTA computes a block_m x block_n tile of D = A . B in steps of 128 bytes along the reduction axis (64 16-bit or 32
 * 32-bit elements). One step of an operand is a tile in shared memory; "mn" is its output axis (m of A, n of B).
 *
 *   K-major:  row = one mn, 128 bytes of k. A row is what one gathered voxel, or one output channel's weights, gives.
 *   MN-major: row = one k, block * sizeof(T) bytes of mn. What the same arrays give when the reduction runs across
 *   rows.
 *
 * 16-byte chunks are permuted within groups of eight, so that neither the copies in nor the reads out have bank
 * conflicts: chunk c of row r is stored as chunk c ^ swizzle(r). (128 bytes are all 32 banks; eight rows read at one
 * chunk, or four rows read at two chunks, must differ in every bank.)
 *
 * A fragment covers 16 mn x 32 bytes of k, as four registers per lane; group = lane / 4, thread_in_group = lane % 4:
 *
 *                    k low half   k high half         each 8 x 16-byte quarter: lane holds the 32-bit word
 *       mn 0..7         r[0]          r[2]            thread_in_group of the quarter's row `group`
 *       mn 8..15        r[1]          r[3]            (two 16-bit elements of k, or one 32-bit one)
 *
 * That is the A operand of mma m16n8k16 (16-bit) and m16n8k8 (tf32) as it stands, and two B operands: columns 0..7 are
 * (r[0], r[2]), columns 8..15 are (r[1], r[3]).
 */
#pragma once

#include <cstdint>
#include <type_traits>

#include "common.cuh"
#include "conv_epilogue.cuh"
#include "gemm_math.cuh"
#include "ptx.cuh"

namespace flexgemm {

constexpr int kChunkBytes = 16;
constexpr int kStepBytes = 128;           /* reduction bytes of one pipeline stage */
constexpr int kFragmentBytes = 32;        /* reduction bytes of one mma */
constexpr int64_t kMaxChannels = 1 << 30; /* so that channel indices of a tile fit int */

enum class Major { kK, kMN };

/* Geometry of one operand's stage. Bits: an unsigned integer as wide as an element. */
template <typename Bits, int kExtent, Major kMajor>
struct OperandTile {
    static constexpr int kPerChunk = kChunkBytes / sizeof(Bits);
    static constexpr int kDepth = kStepBytes / sizeof(Bits);
    static constexpr int kRows = kMajor == Major::kK ? kExtent : kDepth;
    static constexpr int kRowBytes = kMajor == Major::kK ? kStepBytes : kExtent * static_cast<int>(sizeof(Bits));
    static constexpr int kChunksPerRow = kRowBytes / kChunkBytes;
    static constexpr int kBytes = kRows * kRowBytes;
    static_assert(kChunksPerRow % 8 == 0, "the swizzle permutes groups of eight chunks");

    __host__ __device__ static constexpr int swizzle(int row) {
        /* 32-bit MN-major tiles are read as 4 rows x 8 words, the others as 8 rows x 1 chunk. */
        return kMajor == Major::kMN && sizeof(Bits) == 4 ? (row & 3) * 2 : row & 7;
    }

    /* Byte offset of a chunk. */
    __host__ __device__ static constexpr int offset(int row, int chunk) {
        return row * kRowBytes + (chunk ^ swizzle(row)) * kChunkBytes;
    }

    /* ldmatrix: lane i supplies row i % 8 of quarter i / 8; quarters in the order of the registers. */
    __host__ __device__ static constexpr int quarter_row_offset(int lane, int mn, int k_step) {
        if (kMajor == Major::kK) return offset(mn + lane % 16, 2 * k_step + lane / 16);
        return offset(16 * k_step + lane / 16 * 8 + lane % 8, mn / kPerChunk + lane / 8 % 2);
    }

    /* Register i of a lane as one 32-bit element, for MN-major tiles that ldmatrix cannot transpose. */
    __host__ __device__ static constexpr int element_offset(int lane, int i, int mn, int k_step) {
        const int row = 8 * k_step + lane % 4 + i / 2 * 4, column = mn + lane / 4 + i % 2 * 8;
        return offset(row, column / kPerChunk) + column % kPerChunk * static_cast<int>(sizeof(Bits));
    }

    __device__ __forceinline__ static void load_fragment(uint32_t (&r)[4], const char *tile, int lane, int mn,
                                                         int k_step) {
        if constexpr (kMajor == Major::kK) {
            ptx::ldmatrix_x4(r, tile + quarter_row_offset(lane, mn, k_step));
        } else if constexpr (sizeof(Bits) == 2) {
            ptx::ldmatrix_x4_trans(r, tile + quarter_row_offset(lane, mn, k_step));
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                r[i] = *reinterpret_cast<const uint32_t *>(tile + element_offset(lane, i, mn, k_step));
        }
    }
};

/* 16-byte copies need a 16-byte aligned base and rows that start and end on 16 bytes. */
inline bool chunks_aligned(const void *data, int64_t stride, int64_t columns, fg_dtype dtype) {
    const int64_t per_chunk = kChunkBytes / static_cast<int64_t>(fg_dtype_size(dtype));
    return reinterpret_cast<uintptr_t>(data) % kChunkBytes == 0 && stride % per_chunk == 0 && columns % per_chunk == 0;
}

/* Copies one chunk of a row of `columns` elements into shared memory; what lies beyond the row, or belongs to an
 * absent row, becomes zero and is not read. Asynchronous when the operand allows it (chunks_aligned), else element by
 * element. */
template <typename Bits>
__device__ __forceinline__ void load_chunk(char *shared, const Bits *row, int column, int columns, bool present,
                                           bool aligned) {
    if (aligned) {
        ptx::cp_async_16(shared, row + column, present && column < columns);
        return;
    }
    constexpr int kPerChunk = kChunkBytes / sizeof(Bits);
    constexpr int kPerWord = sizeof(uint32_t) / sizeof(Bits);
    uint32_t word[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) word[w] = 0;
#pragma unroll
    for (int e = 0; e < kPerChunk; ++e) {
        if (present && column + e < columns)
            word[e / kPerWord] |= static_cast<uint32_t>(row[column + e]) << (e % kPerWord * 8 * sizeof(Bits));
    }
    *reinterpret_cast<uint4 *>(shared) = make_uint4(word[0], word[1], word[2], word[3]);
}

/* What a product's operands are rounded to. */
enum class MathMode { kFloat16, kBFloat16, kTf32, kIeee, kFloat8 };

/* Math<mode>: the element type, the operand a fragment becomes, and the product of two of them. `half` picks columns
 * 0..7 or 8..15 of B. */
template <MathMode kMode>
struct Math;

template <>
struct Math<MathMode::kFloat16> {
    using Element = __half;
    using Bits = uint16_t;
    struct Operand {
        uint32_t r[4];
    };
    __device__ static Operand prepare(const uint32_t (&r)[4]) { return {{r[0], r[1], r[2], r[3]}}; }
    __device__ static void multiply(float (&d)[4], const Operand &a, const Operand &b, int half) {
        ptx::mma_f16(d, a.r, b.r[half], b.r[half + 2]);
    }
};

template <>
struct Math<MathMode::kBFloat16> {
    using Element = __nv_bfloat16;
    using Bits = uint16_t;
    struct Operand {
        uint32_t r[4];
    };
    __device__ static Operand prepare(const uint32_t (&r)[4]) { return {{r[0], r[1], r[2], r[3]}}; }
    __device__ static void multiply(float (&d)[4], const Operand &a, const Operand &b, int half) {
        ptx::mma_bf16(d, a.r, b.r[half], b.r[half + 2]);
    }
};

template <>
struct Math<MathMode::kTf32> {
    using Element = float;
    using Bits = uint32_t;
    struct Operand {
        uint32_t r[4];
    };
    __device__ static Operand prepare(const uint32_t (&r)[4]) {
        Operand o;
#pragma unroll
        for (int i = 0; i < 4; ++i) o.r[i] = ptx::to_tf32(__uint_as_float(r[i]));
        return o;
    }
    __device__ static void multiply(float (&d)[4], const Operand &a, const Operand &b, int half) {
        ptx::mma_tf32(d, a.r, b.r[half], b.r[half + 2]);
    }
};

/* True float32 out of tf32 products: x = big + small, each 11 significant bits, leaves 2^-22 of x; the product of two
 * smalls is of that size and left out. Tensor cores cut off, not round, what they add to the accumulator, so that a
 * long chain drifts towards zero by an amount that grows with its length (1e-4 and more over the thousands of steps
 * of a 3x3x3 kernel at 1024 channels). Each 8-deep product is therefore started from zero, smallest terms first, and
 * added to the accumulator by an ordinary, correctly rounded, addition. */
template <>
struct Math<MathMode::kIeee> {
    using Element = float;
    using Bits = uint32_t;
    struct Operand {
        uint32_t big[4], small[4];
    };
    __device__ static Operand prepare(const uint32_t (&r)[4]) {
        Operand o;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float x = __uint_as_float(r[i]);
            o.big[i] = ptx::to_tf32(x) & 0xffffe000u; /* the bits a tensor core reads */
            o.small[i] = ptx::to_tf32(x - __uint_as_float(o.big[i]));
        }
        return o;
    }
    __device__ static void multiply(float (&d)[4], const Operand &a, const Operand &b, int half) {
        float partial[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        ptx::mma_tf32(partial, a.small, b.big[half], b.big[half + 2]);
        ptx::mma_tf32(partial, a.big, b.small[half], b.small[half + 2]);
        ptx::mma_tf32(partial, a.big, b.big[half], b.big[half + 2]);
#pragma unroll
        for (int i = 0; i < 4; ++i) d[i] += partial[i];
    }
};

/* float8 of either kind, made float16 as in gemm_math.cuh: Accumulator::multiply_float8. */
template <>
struct Math<MathMode::kFloat8> {
    using Bits = uint8_t;
};

/* A CTA's tile and how its warps divide it. */
template <int kBlockM_, int kBlockN_, int kWarpsM_, int kWarpsN_, int kStages_>
struct TileShape {
    static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kWarpsM = kWarpsM_, kStages = kStages_;
    static constexpr int kWarps = kWarpsM_ * kWarpsN_, kThreads = 32 * kWarps;
    /* At least eight warps of a multiprocessor; said to the compiler, which would else spill to reach more. */
    static constexpr int kCtasPerSm = 256 / kThreads;
    static constexpr int kWarpM = kBlockM / kWarpsM_, kWarpN = kBlockN / kWarpsN_;
    static constexpr int kFragmentsM = kWarpM / 16, kFragmentsN = kWarpN / 16;
    static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0, "a warp works on whole 16-wide fragments");
};

/* 128 x 128 by warps of 64 x 64, the least shared memory traffic per product that registers allow: 128 accumulators a
 * thread. True float32 holds each operand twice, float8 each sum, and they need smaller warp tiles. Three stages of 32
 * KB leave room for two CTAs on sm_80 and sm_90, for one on sm_86 and sm_89. */
template <MathMode kMode>
using LargeTile = TileShape<128, 128, 2, kMode == MathMode::kIeee || kMode == MathMode::kFloat8 ? 4 : 2, 3>;

/* Two neighbours of a row, moved at once where every even column allows it. */
template <typename T>
struct alignas(2 * sizeof(T)) Pair {
    T x, y;
};

template <typename T>
__device__ __forceinline__ bool are_pairs(const T *data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % sizeof(Pair<T>) == 0 && stride % 2 == 0;
}

/* The accumulators of one warp: fragments of 16 x 16 outputs, each two mma results side by side. */
template <MathMode kMode, class Shape>
struct Accumulator {
    using M = Math<kMode>;
    float d[Shape::kFragmentsM][Shape::kFragmentsN][2][4];

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < Shape::kFragmentsM; ++i)
#pragma unroll
            for (int j = 0; j < Shape::kFragmentsN; ++j)
#pragma unroll
                for (int e = 0; e < 8; ++e) d[i][j][e / 4][e % 4] = 0.0f;
    }

    __device__ static int first_row() { return static_cast<int>(threadIdx.x) / 32 % Shape::kWarpsM * Shape::kWarpM; }
    __device__ static int first_column() { return static_cast<int>(threadIdx.x) / 32 / Shape::kWarpsM * Shape::kWarpN; }

    /* One stage: 128 bytes of the reduction. */
    template <class TileA, class TileB>
    __device__ __forceinline__ void multiply(const char *a, const char *b) {
        const int lane = threadIdx.x % 32, row = first_row(), column = first_column();
        /* Unrolled, true float32 would keep the next step's split operands in registers too, and spill. */
        constexpr int kUnroll = kMode == MathMode::kIeee ? 1 : kStepBytes / kFragmentBytes;
#pragma unroll(kUnroll)
        for (int k_step = 0; k_step < kStepBytes / kFragmentBytes; ++k_step) {
            typename M::Operand fa[Shape::kFragmentsM];
            uint32_t r[4];
#pragma unroll
            for (int i = 0; i < Shape::kFragmentsM; ++i) {
                TileA::load_fragment(r, a, lane, row + 16 * i, k_step);
                fa[i] = M::prepare(r);
            }
#pragma unroll
            for (int j = 0; j < Shape::kFragmentsN; ++j) {
                TileB::load_fragment(r, b, lane, column + 16 * j, k_step);
                const typename M::Operand fb = M::prepare(r);
#pragma unroll
                for (int i = 0; i < Shape::kFragmentsM; ++i) {
                    M::multiply(d[i][j][0], fa[i], fb, 0);
                    M::multiply(d[i][j][1], fa[i], fb, 1);
                }
            }
        }
    }

    static constexpr int kRows = 2 * Shape::kFragmentsM; /* whose sums a thread has: row(0), row(1), ... of the tile */
    __device__ static int row(int i) { return first_row() + 8 * i + static_cast<int>(threadIdx.x) % 32 / 4; }

    /* One stage of float8. Its sums start from zero; times the scales of their rows they are added to the float32 ones:
     * tensor cores cut off more of a long sum than float8 products can spare. */
    template <class TileA, class TileB>
    __device__ __forceinline__ void multiply_float8(const char *a, const char *b, Fp8Format format_a,
                                                    Fp8Format format_b, const float (&scale)[kRows]) {
        const int lane = threadIdx.x % 32;
        float partial[Shape::kFragmentsM][2 * Shape::kFragmentsN][4] = {};
#pragma unroll
        for (int k_step = 0; k_step < kStepBytes / kFragmentBytes; ++k_step) {
            uint32_t fa[Shape::kFragmentsM][4], fb[2 * Shape::kFragmentsN][2], r[4];
#pragma unroll
            for (int i = 0; i < Shape::kFragmentsM; ++i)
                TileA::load_fragment(fa[i], a, lane, first_row() + 16 * i, k_step);
#pragma unroll
            for (int j = 0; j < Shape::kFragmentsN; ++j) {
                TileB::load_fragment(r, b, lane, first_column() + 16 * j, k_step);
                fb[2 * j][0] = r[0], fb[2 * j][1] = r[2];
                fb[2 * j + 1][0] = r[1], fb[2 * j + 1][1] = r[3];
            }
            Fp8HalfMath::multiply(partial, fa, fb, format_a, format_b);
        }
#pragma unroll
        for (int i = 0; i < Shape::kFragmentsM; ++i)
#pragma unroll
            for (int j = 0; j < 2 * Shape::kFragmentsN; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float &sum = d[i][j / 2][j % 2][e];
                    sum = fmaf(partial[i][j][e], scale[2 * i + e / 2], sum);
                }
    }

    /* sum = visit(sum, slot of the tile, column) for those that are not finite. */
    template <typename Visit>
    __device__ __forceinline__ void replace_not_finite(int n0, const Visit &visit) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < 2 * Shape::kFragmentsN; ++j)
#pragma unroll
            for (int i = 0; i < 2 * Shape::kFragmentsM; ++i)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float &sum = d[i / 2][j / 2][j % 2][i % 2 * 2 + e];
                    if (!isfinite(sum)) sum = visit(row(i), n0 + first_column() + 8 * j + lane % 4 * 2 + e);
                }
    }

    /* d = activation(scale * d + bias + residual): row_of(slot of the tile) is a row of the residual, negative where
     * there is none. An mma result: lane holds columns 2 * thread_in_group and the next of rows group (d[0], d[1]) and
     * group + 8 (d[2], d[3]). */
    template <typename T, typename RowOf>
    __device__ void finish(const RowOf &row_of, int n0, int columns, const SumEpilogue &epilogue) {
        const T *bias = static_cast<const T *>(epilogue.bias), *residual = static_cast<const T *>(epilogue.residual);
        const bool aligned = are_pairs(residual, epilogue.residual_stride);
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < 2 * Shape::kFragmentsN; ++j) {
            const int n = n0 + first_column() + 8 * j + lane % 4 * 2;
            const float bias_x = bias && n < columns ? to_float(bias[n]) : 0.0f;
            const float bias_y = bias && n + 1 < columns ? to_float(bias[n + 1]) : 0.0f;
            [[maybe_unused]] float scale_x = 1.0f, scale_y = 1.0f;
            if constexpr (kMode == MathMode::kFloat8) {
                if (n < columns) scale_x = epilogue.scale_of(n);
                if (n + 1 < columns) scale_y = epilogue.scale_of(n + 1);
            }
#pragma unroll
            for (int i = 0; i < 2 * Shape::kFragmentsM; ++i) {
                float *pair = &d[i / 2][j / 2][j % 2][i % 2 * 2];
                if constexpr (kMode == MathMode::kFloat8) pair[0] *= scale_x, pair[1] *= scale_y;
                pair[0] += bias_x;
                pair[1] += bias_y;
                const int64_t m = residual ? row_of(row(i)) : -1;
                if (m < 0) continue;
                const T *source = residual + m * epilogue.residual_stride + n;
                if (aligned && n + 1 < columns) {
                    const Pair<T> addend = *reinterpret_cast<const Pair<T> *>(source);
                    pair[0] += to_float(addend.x);
                    pair[1] += to_float(addend.y);
                } else {
                    if (n < columns) pair[0] += to_float(source[0]);
                    if (n + 1 < columns) pair[1] += to_float(source[1]);
                }
            }
        }
        activate(reinterpret_cast<float (&)[sizeof d / sizeof(float)]>(d), epilogue.activation);
    }

    __device__ void divide(float divisor) {
#pragma unroll
        for (float &sum : reinterpret_cast<float (&)[sizeof d / sizeof(float)]>(d)) sum = __fdiv_rn(sum, divisor);
    }

    /* Writes the part of the tile at (m0, n0) that lies inside rows x columns. */
    template <typename Out>
    __device__ void store(Out *out, int64_t stride, int64_t m0, int64_t rows, int n0, int columns) const {
        store([=](int slot) { return m0 + slot < rows ? m0 + slot : -1; }, out, stride, n0, columns);
    }

    /* The same for any rows, as in finish(). */
    template <typename RowOf, typename Out>
    __device__ void store(const RowOf &row_of, Out *out, int64_t stride, int n0, int columns) const {
        const bool aligned = are_pairs(out, stride);
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < 2 * Shape::kFragmentsN; ++j) {
            const int n = n0 + first_column() + 8 * j + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 2 * Shape::kFragmentsM; ++i) {
                const int64_t m = row_of(row(i));
                if (m < 0) continue;
                const float *pair = &d[i / 2][j / 2][j % 2][i % 2 * 2];
                const Out x = from_float<Out>(pair[0]), y = from_float<Out>(pair[1]);
                Out *target = out + m * stride + n;
                if (aligned && n + 1 < columns) {
                    *reinterpret_cast<Pair<Out> *>(target) = Pair<Out>{x, y};
                } else {
                    if (n < columns) target[0] = x;
                    if (n + 1 < columns) target[1] = y;
                }
            }
        }
    }
};

}  // namespace flexgemm
