/*
 * Casts to float8 with one scale per tensor, row or block: q = saturate(x / scale), scale = amax / max_finite.
 *
 * x is widened to float32 a block at a time; the division is one IEEE float32 division and the cast rounds its result
 * once (simd.h). The maximum is taken over bit patterns: without its sign, a float32 orders as the integer of its
 * bits, and infinities and NaN lie above every finite value.
 */
#include <string.h>

#include "../floats.h"
#include "activation.h"
#include "backend.h"
#include "simd.h"

enum { BLOCK = 1024, THREAD_ELEMENTS = 1 << 15 };

/* Of those up to `most`: the largest finite number, or infinity. */
static uint32_t largest_magnitude(const float *x, int64_t n, uint32_t most) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffffu;
        if (bits > most) bits = 0;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* Columns [column, column + n) of a row of what is cast, n at most BLOCK. */
static void load(const fg_simd *simd, const fg_quantize_params *params, int64_t group, int64_t row, int64_t column,
                 int64_t n, float *values) {
    const fg_tensor *x = &params->x;
    const int64_t stride = x->strides[x->ndim - 1], first = column * (params->swiglu ? 2 : 1) * stride;
    const int64_t index = (x->ndim == 3 ? group * x->strides[0] : 0) + row * x->strides[x->ndim - 2] + first;
    const char *from = (const char *)x->data + index * (int64_t)fg_dtype_size(x->dtype);
    if (!params->swiglu) {
        fg_widen(simd, x->dtype, from, stride, n, values);
        return;
    }
    float pairs[2 * BLOCK];
    fg_widen(simd, x->dtype, from, stride, 2 * n, pairs);
    for (int64_t i = 0; i < n; i++) values[i] = pairs[2 * i];
    fg_activate(values, n, FG_ACTIVATION_SILU);
    for (int64_t i = 0; i < n; i++) values[i] *= pairs[2 * i + 1];
}

/* Part of a matrix that has one scale, or all of it. */
typedef struct {
    int64_t group, row, rows, column, columns;
} region;

static uint32_t region_magnitude(const fg_simd *simd, const fg_quantize_params *params, region part) {
    float block[BLOCK];
    const uint32_t infinity = 0x7f800000u, most = params->saturate ? infinity - 1 : infinity;
    uint32_t largest = 0;
    for (int64_t row = part.row; row < part.row + part.rows; row++)
        for (int64_t k = 0; k < part.columns; k += BLOCK) {
            const int64_t n = fg_min(BLOCK, part.columns - k);
            load(simd, params, part.group, row, part.column + k, n, block);
            const uint32_t magnitude = largest_magnitude(block, n, most);
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

static void cast_region(const fg_simd *simd, const fg_quantize_params *params, region part, float scale) {
    const fg_tensor *q = &params->q;
    float block[BLOCK];
    for (int64_t row = part.row; row < part.row + part.rows; row++)
        for (int64_t k = 0; k < part.columns; k += BLOCK) {
            const int64_t n = fg_min(BLOCK, part.columns - k), column = part.column + k;
            load(simd, params, part.group, row, column, n, block);
            for (int64_t i = 0; i < n; i++) block[i] /= scale;
            const int64_t group = q->ndim == 3 ? part.group * q->strides[0] : 0;
            simd->from_float[q->dtype]((char *)q->data + group + row * q->strides[q->ndim - 2] + column, block, n);
        }
}

/* Region i of those that have a scale each: rows, or blocks in the order of their scales. */
static region region_at(const fg_quantize_params *params, int64_t i) {
    const fg_tensor *q = &params->q, *scale = &params->scale;
    const int64_t rows = q->shape[q->ndim - 2], columns = q->shape[q->ndim - 1];
    if (params->kind != FG_SCALE_BLOCK) return (region){i / rows, i % rows, 1, 0, columns};
    const int64_t across = scale->shape[scale->ndim - 1], down = scale->shape[scale->ndim - 2];
    const int64_t row = i / across % down * params->block_rows, column = i % across * FG_SCALE_BLOCK_SIZE;
    return (region){i / across / down, row, fg_min(params->block_rows, rows - row), column,
                    fg_min(FG_SCALE_BLOCK_SIZE, columns - column)};
}

fg_status fg_cpu_quantize(const fg_quantize_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const fg_simd *simd = fg_simd_get(error);
    if (simd == NULL) return error->code;
    const fg_tensor *q = &params->q;
    const bool one = params->kind == FG_SCALE_TENSOR;
    float *scale = params->scale.data;
    int64_t elements = 1, regions = 1;
    for (int i = 0; i < q->ndim; i++) elements *= q->shape[i];
    if (one) {
        regions = elements > 0 ? q->shape[0] : 0; /* its rows */
    } else {
        for (int i = 0; i < params->scale.ndim; i++) regions *= params->scale.shape[i];
    }
    int threads = 0;
    const fg_status status = fg_workspace_threads(&params->workspace, (fg_workspace_layout){0, 0},
                                                  1 + elements / THREAD_ELEMENTS, &threads, error);
    if (status != FG_OK) return status;

    if (!params->scale_given && one) {
        uint32_t largest = 0;
#pragma omp parallel num_threads(threads) reduction(max : largest)
        {
            FG_DEFAULT_FLOATS;
#pragma omp for
            for (int64_t i = 0; i < regions; i++) {
                const uint32_t magnitude = region_magnitude(simd, params, region_at(params, i));
                largest = magnitude > largest ? magnitude : largest;
            }
        }
        scale[0] = scale_of(largest, q->dtype);
    }
#pragma omp parallel num_threads(threads)
    {
        FG_DEFAULT_FLOATS;
#pragma omp for
        for (int64_t i = 0; i < regions; i++) {
            const region part = region_at(params, i);
            if (!params->scale_given && !one) scale[i] = scale_of(region_magnitude(simd, params, part), q->dtype);
            cast_region(simd, params, part, scale[one ? 0 : i]);
        }
    }
    return FG_OK;
}
