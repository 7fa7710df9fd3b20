/*
 * Casts to float8 with one scale per tensor or per row: q = saturate(x / scale), scale = amax / max_finite.
 *
 * x is widened to float32 a block at a time; the division is one IEEE float32 division and the cast rounds its result
 * once (simd.h). The maximum is taken over bit patterns: without its sign, a float32 orders as the integer of its
 * bits, and infinities and NaN lie above every finite value.
 */
#include <string.h>

#include "backend.h"
#include "simd.h"

enum { BLOCK = 1024, THREAD_ELEMENTS = 1 << 15 };

static uint32_t largest_magnitude(const float *x, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffffu;
        if (bits >= 0x7f800000u) bits = 0;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

static uint32_t row_magnitude(const fg_simd *simd, const fg_tensor *x, int64_t row) {
    float block[BLOCK];
    uint32_t largest = 0;
    for (int64_t k = 0; k < x->shape[1]; k += BLOCK) {
        const int64_t n = fg_min(BLOCK, x->shape[1] - k);
        simd->to_float[x->dtype](block, fg_row(x, row) + k * (int64_t)fg_dtype_size(x->dtype), n);
        const uint32_t magnitude = largest_magnitude(block, n);
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

/* amax / max_finite, and 1 where that is 0. */
static float scale_of(uint32_t magnitude, fg_dtype dtype) {
    float amax;
    memcpy(&amax, &magnitude, sizeof amax);
    const float scale = amax / (dtype == FG_FLOAT8_E4M3FN ? 448.0f : 57344.0f);
    return scale > 0 ? scale : 1.0f;
}

static void quantize_row(const fg_simd *simd, const fg_tensor *x, const fg_tensor *q, int64_t row, float scale) {
    float block[BLOCK];
    for (int64_t k = 0; k < x->shape[1]; k += BLOCK) {
        const int64_t n = fg_min(BLOCK, x->shape[1] - k);
        simd->to_float[x->dtype](block, fg_row(x, row) + k * (int64_t)fg_dtype_size(x->dtype), n);
        for (int64_t i = 0; i < n; i++) block[i] /= scale;
        simd->from_float[q->dtype](fg_row(q, row) + k, block, n);
    }
}

fg_status fg_cpu_quantize_workspace(const fg_quantize_params *params, const fg_queue *queue, size_t *bytes,
                                    fg_error *error) {
    (void)params, (void)queue, (void)error;
    *bytes = 0;
    return FG_OK;
}

fg_status fg_cpu_quantize(const fg_quantize_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const fg_simd *simd = fg_simd_get(error);
    if (simd == NULL) return error->code;
    const fg_tensor *x = &params->x, *q = &params->q;
    const int64_t rows = x->shape[0];
    const bool per_row = params->kind == FG_SCALE_ROW;
    float *scale = params->scale.data;
    int threads = 0;
    const int64_t grains = 1 + rows * x->shape[1] / THREAD_ELEMENTS;
    const fg_status status =
        fg_workspace_threads(&params->workspace, (fg_workspace_layout){0, 0}, grains, &threads, error);
    if (status != FG_OK) return status;

    if (!params->scale_given && !per_row) {
        uint32_t largest = 0;
#pragma omp parallel for num_threads(threads) reduction(max : largest)
        for (int64_t row = 0; row < rows; row++) {
            const uint32_t magnitude = row_magnitude(simd, x, row);
            largest = magnitude > largest ? magnitude : largest;
        }
        scale[0] = scale_of(largest, q->dtype);
    }
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        if (!params->scale_given && per_row) scale[row] = scale_of(row_magnitude(simd, x, row), q->dtype);
        quantize_row(simd, x, q, row, scale[per_row ? row : 0]);
    }
    return FG_OK;
}
