/*
 * The arithmetic of one K step (32 bytes) for every kind of operand.
 *
 * ldmatrix moves 32-bit words whatever they hold: lane (group g = lane / 4, t = lane % 4) receives word t of row g of
 * an 8-row, 16-byte matrix. A fragment of 16 rows of A is four such matrices, of 8 rows of B two:
 *
 *     bytes of the K step    0..15   16..31                bytes    0..15   16..31
 *     rows 0..7  of A         a[0]     a[2]                rows 0..7 of B  b[0]     b[1]
 *     rows 8..15 of A         a[1]     a[3]
 *
 * That is the register order of mma.m16n8k8 on 4-byte, m16n8k16 on 2-byte and m16n8k32 on 1-byte operands alike: in
 * each, a lane's word t of a matrix holds the consecutive K of bytes 4t .. 4t + 3. One loader serves all types, and
 * here only the multiplication differs.
 */
#pragma once

#include "common.cuh"
#include "ptx.cuh"

namespace flexgemm {

/* How fp8 bytes become fp16 at run time; unused by the other kinds. */
struct Fp8Format {
    uint32_t shift; /* of the 7 bits below the sign into the fp16 position */
    uint32_t
        nan_carry; /* bits by which "all ones plus one" shows a NaN in each byte; 0 when the format needs no help */
};

/* accumulator[i][j] += a[i] . b[j] */
template <void (*kMma)(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t), int kRows, int kColumns>
__device__ __forceinline__ void multiply_all(float (&accumulator)[kRows][kColumns][4], const uint32_t (&a)[kRows][4],
                                             const uint32_t (&b)[kColumns][2]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kColumns; ++j) kMma(accumulator[i][j], a[i], b[j][0], b[j][1]);
}

/* Each kind: bytes of an element; whether tensor-core sums are promoted to float32 registers after every 128 bytes of
 * K, because the tensor core's own accumulation is too coarse for the promised accuracy; the multiplication. */

struct HalfMath {
    static constexpr int kElementBytes = 2;
    static constexpr bool kPromote = false;
    template <int kRows, int kColumns>
    __device__ static void multiply(float (&accumulator)[kRows][kColumns][4], uint32_t (&a)[kRows][4],
                                    uint32_t (&b)[kColumns][2], Fp8Format, Fp8Format) {
        multiply_all<ptx::mma_f16>(accumulator, a, b);
    }
};

struct Bfloat16Math {
    static constexpr int kElementBytes = 2;
    static constexpr bool kPromote = false;
    template <int kRows, int kColumns>
    __device__ static void multiply(float (&accumulator)[kRows][kColumns][4], uint32_t (&a)[kRows][4],
                                    uint32_t (&b)[kColumns][2], Fp8Format, Fp8Format) {
        multiply_all<ptx::mma_bf16>(accumulator, a, b);
    }
};

/* float32 rounded to tf32. */
struct Tf32Math {
    static constexpr int kElementBytes = 4;
    static constexpr bool kPromote = false;
    template <int kRows, int kColumns>
    __device__ static void multiply(float (&accumulator)[kRows][kColumns][4], uint32_t (&a)[kRows][4],
                                    uint32_t (&b)[kColumns][2], Fp8Format, Fp8Format) {
        for (auto &fragment : a)
            for (uint32_t &word : fragment) word = ptx::to_tf32(__uint_as_float(word));
        for (auto &fragment : b)
            for (uint32_t &word : fragment) word = ptx::to_tf32(__uint_as_float(word));
        multiply_all<ptx::mma_tf32>(accumulator, a, b);
    }
};

/* float32 as the sum of two tf32 numbers, high + low: three products, the negligible low x low left out. */
struct Float32Math {
    static constexpr int kElementBytes = 4;
    static constexpr bool kPromote = true;
    template <int kRows, int kColumns>
    __device__ static void multiply(float (&accumulator)[kRows][kColumns][4], uint32_t (&a)[kRows][4],
                                    uint32_t (&b)[kColumns][2], Fp8Format, Fp8Format) {
        uint32_t a_low[kRows][4], b_low[kColumns][2];
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) split(a[i][r], a_low[i][r]);
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r) split(b[j][r], b_low[j][r]);
        multiply_all<ptx::mma_tf32>(accumulator, a_low, b);
        multiply_all<ptx::mma_tf32>(accumulator, a, b_low);
        multiply_all<ptx::mma_tf32>(accumulator, a, b);
    }

private:
    __device__ __forceinline__ static void split(uint32_t &word, uint32_t &low) {
        const float x = __uint_as_float(word);
        word = ptx::to_tf32(x);
        low = ptx::to_tf32(x - __uint_as_float(word));
    }
};

/* fp8 tensor cores, sm_89 and later. */
template <bool kAIsE5m2, bool kBIsE5m2>
struct Fp8Math {
    static constexpr int kElementBytes = 1;
    static constexpr bool kPromote = true;
    template <int kRows, int kColumns>
    __device__ static void multiply(float (&accumulator)[kRows][kColumns][4], uint32_t (&a)[kRows][4],
                                    uint32_t (&b)[kColumns][2], Fp8Format, Fp8Format) {
        multiply_all<ptx::mma_fp8<kAIsE5m2, kBIsE5m2>>(accumulator, a, b);
    }
};

/* fp8 through fp16 tensor cores, for sm_80: each word of four fp8 becomes two words of two fp16, one for each of two
 * fp16 products. Which K meets which product does not matter as long as A and B agree.
 *
 * e5m2 is the upper byte of an fp16. e4m3 s.eeee.mmm becomes s.0eeee.mmm0000000, subnormals included: 2^-8 of its
 * value, which the epilogue makes good (fp8_half_scale). Its only NaN, all ones below the sign, would come out as
 * 1.875: adding one to those seven bits carries into the eighth exactly then, and that carry becomes the top exponent
 * bit, so that the fp16 is a NaN. */
struct Fp8HalfMath {
    static constexpr int kElementBytes = 1;
    static constexpr bool kPromote = true;
    template <int kRows, int kColumns>
    __device__ static void multiply(float (&accumulator)[kRows][kColumns][4], uint32_t (&a)[kRows][4],
                                    uint32_t (&b)[kColumns][2], Fp8Format format_a, Fp8Format format_b) {
        uint32_t a_odd[kRows][4], b_odd[kColumns][2];
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) to_half(a[i][r], a_odd[i][r], format_a);
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r) to_half(b[j][r], b_odd[j][r], format_b);
        multiply_all<ptx::mma_f16>(accumulator, a, b);
        multiply_all<ptx::mma_f16>(accumulator, a_odd, b_odd);
    }

private:
    /* Bytes 0 and 2 stay in `word`, bytes 1 and 3 go to `odd`. */
    __device__ __forceinline__ static void to_half(uint32_t &word, uint32_t &odd, Fp8Format format) {
        const uint32_t bits = word & 0x7f7f7f7fu, sign = word & 0x80808080u;
        const uint32_t magnitude = bits | ((bits + 0x01010101u) & format.nan_carry);
        odd = (((magnitude >> 8) & 0x00ff00ffu) << format.shift) | (sign & 0x80008000u);
        word = ((magnitude & 0x00ff00ffu) << format.shift) | ((sign << 8) & 0x80008000u);
    }
};

inline Fp8Format fp8_half_format(fg_dtype dtype) {
    return dtype == FG_FLOAT8_E4M3FN ? Fp8Format{7, 0x80808080u} : Fp8Format{8, 0};
}
inline float fp8_half_scale(fg_dtype dtype) { return dtype == FG_FLOAT8_E4M3FN ? 256.0f : 1.0f; }

}  // namespace flexgemm
