/* The vector kernels for x86-64 with AVX2, FMA and F16C: 6 x 2 accumulators of 8 floats, 12 of 16 registers. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#define SIMD_NAME "avx2"
#define SIMD_TABLE fg_simd_avx2
#define SIMD_LANES 8
#define SIMD_VECTORS 2
#define SIMD_FMA(a, b, c) ((vfloat)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define SIMD_BROADCAST(x) ((vfloat)_mm256_set1_ps(x))
/* Packing instructions work within each half of a register: the permutation brings the two results together. */
#define SIMD_PACK_16(x)                                                                                                \
    _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)(x), (__m256i)(x)), 0x08))
#define SIMD_WIDEN_8(codes) ((vuint)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)(codes))))
#define SIMD_WIDEN_16(codes) ((vuint)_mm256_cvtepu16_epi32((__m128i)(codes)))
#define SIMD_NARROW_8(x) ((vuint8)_mm_cvtsi128_si64(_mm_packus_epi16(SIMD_PACK_16(x), SIMD_PACK_16(x))))
#define SIMD_NARROW_16(x) ((vuint16)SIMD_PACK_16(x))
#define SIMD_DECODE_FLOAT16(codes) ((vfloat)_mm256_cvtph_ps((__m128i)(codes)))
#define SIMD_ENCODE_FLOAT16(x) ((vuint16)_mm256_cvtps_ph((__m256)(x), _MM_FROUND_TO_NEAREST_INT))

#include "simd_kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
