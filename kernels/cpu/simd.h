/*
 * The vector kernels behind every CPU operation, compiled once per instruction set (simd_avx512.c, simd_avx2.c,
 * simd_scalar.c, all from the one body in simd_kernels.h) and chosen at run time.
 *
 * The environment variable FLEXGEMM_CPU_ISA=avx512|avx2|scalar, read once at the first operation, forces a lower
 * instruction set than the processor's best; "scalar" is whatever the compiler targets without flags (SSE2 on x86-64,
 * NEON on AArch64). A value that is unknown or that the processor lacks is an error of every operation that
 * computes with them.
 *
 * All arithmetic is on float32. A (k, n) operand is "packed" when its columns are cut into panels of `panel` columns,
 * each stored row by row, the last one padded with zeros to a multiple of `lanes` (see tile.h):
 *
 *     panel 0: k rows of `panel` floats | panel 1 | ... | last panel: k rows of round_up(rest, lanes) floats
 */
#ifndef FLEXGEMM_CPU_SIMD_H
#define FLEXGEMM_CPU_SIMD_H

#include "../flexgemm.h"

typedef struct {
    const char *name; /* as in FLEXGEMM_CPU_ISA */
    int64_t lanes;    /* floats of one vector */
    int64_t panel;    /* columns of one register block, a multiple of lanes */

    /* c[i][c_offset + j] += sum_p a[i][p] * b[p * width + j] for i < rows, p < k, j < width.
     * `width` is a multiple of lanes, at most panel; b is one packed panel. */
    void (*multiply)(int64_t rows, int64_t k, int64_t width, const float *const *a, const float *b, float *const *c,
                     int64_t c_offset);

    /* c[i * c_stride + j] += sum_p a[p][i] * b[p][j] for i < rows, p < k, j < width; width as above. */
    void (*outer)(int64_t rows, int64_t k, int64_t width, const float *const *a, const float *const *b, float *c,
                  int64_t c_stride);

    /* Conversions of n adjacent elements, indexed by dtype: the five floating-point ones. To a narrower type they
     * round to nearest, ties to even, and keep NaN; to float8 they saturate, infinity included. */
    void (*to_float[FG_DTYPE_COUNT])(float *dst, const void *src, int64_t n);
    void (*from_float[FG_DTYPE_COUNT])(void *dst, const float *src, int64_t n);
} fg_simd;

/* The kernels of the instruction set in use; NULL with `error` filled when FLEXGEMM_CPU_ISA cannot be honoured. */
const fg_simd *fg_simd_get(fg_error *error);

/* to_float of `n` elements that lie `stride` elements apart. */
void fg_widen(const fg_simd *simd, fg_dtype dtype, const void *from, int64_t stride, int64_t n, float *to);

extern const fg_simd fg_simd_scalar;
#if defined(__x86_64__)
extern const fg_simd fg_simd_avx2, fg_simd_avx512;
#endif

#endif
