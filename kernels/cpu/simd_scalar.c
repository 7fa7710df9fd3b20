/*
 * The vector kernels for the compiler's own target, without any instruction set asked for: SSE2 on x86-64, NEON on
 * AArch64, scalar code elsewhere. The compiler lowers the vectors of 4 floats to whatever there is.
 */
#if defined(__aarch64__)
#include <arm_neon.h>
#define SIMD_VECTORS 4 /* 24 of 32 registers */
#define SIMD_FMA(a, b, c) ((vfloat)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#else
#define SIMD_VECTORS 2 /* 12 of 16 registers */
#define SIMD_FMA(a, b, c) ((a) * (b) + (c))
#endif

#define SIMD_NAME "scalar"
#define SIMD_TABLE fg_simd_scalar
#define SIMD_LANES 4
#define SIMD_BROADCAST(x) ((vfloat){(x), (x), (x), (x)})
#define SIMD_WIDEN_8(codes) __builtin_convertvector(codes, vuint)
#define SIMD_WIDEN_16(codes) __builtin_convertvector(codes, vuint)
#define SIMD_NARROW_8(x) __builtin_convertvector(x, vuint8)
#define SIMD_NARROW_16(x) __builtin_convertvector(x, vuint16)

#include "simd_kernels.h"
