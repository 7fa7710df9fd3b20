/*
 * Kinds of products of the Hopper kernels, and the sums of a tile: in registers, multiplied and promoted.
 */
#pragma once

#include "gemm_rings_sm90.cuh"

namespace flexgemm {

/* What becomes of tensor-core sums: nothing, until they are all; they are added to float32 registers; or so times the
 * scales of blocks of the operands, which are those of parts of tiles: 128 columns. */
enum class Sm90Sums { kPlain, kPromoted, kScaled };

/* Each kind: its sums; the output that it usually has; the product of 64 rows and kColumns columns, 32 bytes of K. Of 16
 * bits A may be M-major and B N-major: adjacent are elements of a column of A, (K, M) as memory has it, and (K, N). */
#define FG_SM90_MATH(Name, fp8, m_major, n_major, stored, wgmma)                                                       \
    template <Sm90Sums kSums>                                                                                          \
    struct Name {                                                                                                      \
        using Stored = stored;                                                                                         \
        static constexpr bool kFp8 = fp8, kPromote = kSums != Sm90Sums::kPlain, kScaled = kSums == Sm90Sums::kScaled;  \
        static constexpr bool kMMajor = m_major, kNMajor = n_major;                                                    \
        template <int kCount>                                                                                          \
        __device__ static void multiply(float (&sum)[kCount], uint64_t a, uint64_t b, int accumulate) {                \
            wgmma(sum, a, b, accumulate);                                                                              \
        }                                                                                                              \
    };

FG_SM90_MATH(Sm90Half, false, false, false, __half, ptx::wgmma_f16)
FG_SM90_MATH(Sm90HalfKm, false, true, false, __half, ptx::wgmma_f16_km)
FG_SM90_MATH(Sm90HalfKn, false, false, true, __half, ptx::wgmma_f16_kn)
FG_SM90_MATH(Sm90HalfKmKn, false, true, true, __half, ptx::wgmma_f16_km_kn)
FG_SM90_MATH(Sm90Bfloat16, false, false, false, __nv_bfloat16, ptx::wgmma_bf16)
FG_SM90_MATH(Sm90Bfloat16Km, false, true, false, __nv_bfloat16, ptx::wgmma_bf16_km)
FG_SM90_MATH(Sm90Bfloat16Kn, false, false, true, __nv_bfloat16, ptx::wgmma_bf16_kn)
FG_SM90_MATH(Sm90Bfloat16KmKn, false, true, true, __nv_bfloat16, ptx::wgmma_bf16_km_kn)
FG_SM90_MATH(Sm90E4m3E4m3, true, false, false, __nv_bfloat16, ptx::wgmma_e4m3_e4m3)
FG_SM90_MATH(Sm90E4m3E5m2, true, false, false, __nv_bfloat16, ptx::wgmma_e4m3_e5m2)
FG_SM90_MATH(Sm90E5m2E4m3, true, false, false, __nv_bfloat16, ptx::wgmma_e5m2_e4m3)
FG_SM90_MATH(Sm90E5m2E5m2, true, false, false, __nv_bfloat16, ptx::wgmma_e5m2_e5m2)
#undef FG_SM90_MATH

/* ---- sums of a tile ---- */

/* A thread's sums of a tile of so many columns: in two parts, if kFirst of them are a part of their own. */
template <int kLast, int kFirst = 0>
struct TileSums {
    static constexpr int kParts = 2, kColumns = kFirst + kLast;
    float first[kFirst / 2], last[kLast / 2];

    /* Calls visit(sums, part) with those of each part. */
    template <typename Visit>
    __device__ __forceinline__ void each(const Visit &visit) {
        visit(first, 0);
        visit(last, 1);
    }
};

template <int kLast>
struct TileSums<kLast, 0> {
    static constexpr int kParts = 1, kColumns = kLast;
    float last[kLast / 2];

    template <typename Visit>
    __device__ __forceinline__ void each(const Visit &visit) {
        visit(last, 0);
    }
};

template <int kCount>
__device__ __forceinline__ void clear(float (&sum)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] = 0.0f;
}

/* sum += or = the product of a stage, whose columns begin with `column`: 128 bytes of K as four wgmma, one commit
 * group. 32 bytes of K are as many of each row, or 16 lines of 64 rows or columns. */
template <typename Math, int kCount>
__device__ __forceinline__ void multiply_columns(float (&sum)[kCount], uint64_t a, uint64_t b, int column,
                                                 bool accumulate) {
    constexpr int kOfA = Math::kMMajor ? 16 * kSm90StepBytes : 32, kOfB = Math::kNMajor ? 16 * kSm90StepBytes : 32;
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSm90StepBytes / 32; ++k)
        Math::multiply(sum, ptx::wgmma_advance(a, k * kOfA), ptx::wgmma_advance(b, column * kSm90StepBytes + k * kOfB),
                       accumulate || k > 0);
    ptx::wgmma_commit();
}

/* What a step's products are multiplied by when they are added: nothing, or the scales of blocks (gemm_scales_sm90.cuh).
 * `load` reads those of the step in a slot, part(p).of(i) is that of the thread's i-th sum of part p of the columns. */
struct NoScales {
    struct Step {
        __device__ __forceinline__ const Step &part(int) const { return *this; }
    };
    __device__ __forceinline__ void load(Step &, int) {}
};

/* sum += partial * scale */
template <int kCount, typename Step>
__device__ __forceinline__ void promote(float (&sum)[kCount], float (&partial)[kCount], const Step &scale) {
    ptx::wgmma_hold(partial);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] = fmaf(partial[i], scale.of(i), sum[i]);
}

template <int kCount>
__device__ __forceinline__ void promote(float (&sum)[kCount], float (&partial)[kCount], const NoScales::Step &) {
    ptx::wgmma_hold(partial);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] += partial[i];
}

/* sum *= scale */
template <int kCount, typename Step>
__device__ __forceinline__ void scale_first(float (&sum)[kCount], const Step &scale) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] *= scale.of(i);
}

template <int kCount>
__device__ __forceinline__ void scale_first(float (&)[kCount], const NoScales::Step &) {}

}  // namespace flexgemm
