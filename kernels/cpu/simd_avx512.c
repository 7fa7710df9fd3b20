/* The vector kernels for x86-64 with AVX-512 (F, BW, DQ, VL): 6 x 4 accumulators of 16 floats, 24 of 32 registers. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))),                   \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif

#define SIMD_NAME "avx512"
#define SIMD_TABLE fg_simd_avx512
#define SIMD_LANES 16
#define SIMD_VECTORS 4
#define SIMD_FMA(a, b, c) ((vfloat)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define SIMD_BROADCAST(x) ((vfloat)_mm512_set1_ps(x))
#define SIMD_WIDEN_8(codes) ((vuint)_mm512_cvtepu8_epi32((__m128i)(codes)))
#define SIMD_WIDEN_16(codes) ((vuint)_mm512_cvtepu16_epi32((__m256i)(codes)))
#define SIMD_NARROW_8(x) ((vuint8)_mm512_cvtepi32_epi8((__m512i)(x)))
#define SIMD_NARROW_16(x) ((vuint16)_mm512_cvtepi32_epi16((__m512i)(x)))
#define SIMD_DECODE_FLOAT16(codes) ((vfloat)_mm512_cvtph_ps((__m256i)(codes)))
#define SIMD_ENCODE_FLOAT16(x) ((vuint16)_mm512_cvtps_ph((__m512)(x), _MM_FROUND_TO_NEAREST_INT))

#include "simd_kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
