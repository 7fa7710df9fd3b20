/*
 * Casts to float8 with one scale per tensor, row or block: q = saturate(x / scale), scale = amax / max_finite.
 *
 * x is widened to float32 a panel at a time, which is part of a row, or, where the columns of x are what is adjacent, a
 * square; the division is one IEEE float32 division and the cast rounds its result once (simd.h). The maximum is taken
 * over bit patterns: without its sign, a float32 orders as the integer of its bits, and infinities and NaN lie above
 * every finite value.
 */
#include <string.h>

#include "../floats.h"
#include "activation.h"
#include "backend.h"
#include "simd.h"

enum {
    ROW_PANEL = 1024,  /* columns of a row */
    SQUARE_PANEL = 64, /* rows and columns */
    PANEL = SQUARE_PANEL * SQUARE_PANEL,
    THREAD_ELEMENTS = 1 << 15,
};
_Static_assert((int)ROW_PANEL <= (int)PANEL && (int)SQUARE_PANEL <= (int)FG_SCALE_BLOCK_SIZE, "room for either");

/* How a cast is divided: into scales, and into parts, which a thread takes. */
typedef struct {
    int64_t groups, m, k;
    bool in_columns; /* x lies so */
    int64_t scale_rows, scale_columns, scales_down, scales_across;
    int64_t part_rows, parts_down; /* of at most FG_SCALE_BLOCK_SIZE rows; across there are as many as scales */
} division;

static division divide(const fg_quantize_params *params) {
    const fg_tensor *q = &params->q;
    const int last = q->ndim - 1;
    division d = {.groups = last > 1 ? q->shape[0] : 1, .m = q->shape[last - 1], .k = q->shape[last]};
    const bool blocks = params->kind == FG_SCALE_BLOCK;
    d.in_columns = fg_lies_in_columns(&params->x);
    d.scale_rows = params->kind == FG_SCALE_TENSOR ? fg_max(d.m, 1) : blocks ? params->block_rows : 1;
    d.scale_columns = blocks ? FG_SCALE_BLOCK_SIZE : fg_max(d.k, 1);
    d.scales_down = fg_ceil_div(d.m, d.scale_rows);
    d.scales_across = blocks ? fg_ceil_div(d.k, d.scale_columns) : 1;
    const int64_t alone = d.in_columns ? SQUARE_PANEL : 1; /* where no block says how many */
    d.part_rows = blocks && params->block_rows > 1 ? params->block_rows : alone;
    d.parts_down = fg_ceil_div(d.m, d.part_rows);
    return d;
}

typedef struct {
    int64_t group, row, rows, column, columns;
} region;

static region part_at(const division *d, int64_t i) {
    const int64_t above = i / d->scales_across, row = above % d->parts_down * d->part_rows;
    const int64_t column = i % d->scales_across * d->scale_columns;
    return (region){above / d->parts_down, row, fg_min(d->part_rows, d->m - row), column,
                    fg_min(d->scale_columns, d->k - column)};
}

static float *scale_at(const fg_quantize_params *params, const division *d, const region *part, int64_t row) {
    const int64_t down = part->group * d->scales_down + row / d->scale_rows;
    return (float *)params->scale.data + down * d->scales_across + part->column / d->scale_columns;
}

/* ---- panels ---- */

/* What is cast of a panel, row after row. */
static void load(const fg_simd *simd, const fg_quantize_params *params, const division *d, region panel,
                 float *values) {
    const fg_tensor *x = &params->x;
    const int last = x->ndim - 1;
    const int64_t width = params->swiglu ? 2 : 1, columns = panel.columns * width, step = x->strides[last];
    const int64_t first = panel.row * x->strides[last - 1] + panel.column * width * step;
    const int64_t size = (int64_t)fg_dtype_size(x->dtype), group = last > 1 ? panel.group * x->strides[0] : 0;
    const char *from = (const char *)x->data + (group + first) * size;
    float pairs[2 * PANEL], *to = params->swiglu ? pairs : values;
    if (d->in_columns) {
        float column[SQUARE_PANEL];
        for (int64_t k = 0; k < columns; k++) {
            simd->to_float[x->dtype](column, from + k * step * size, panel.rows);
            for (int64_t i = 0; i < panel.rows; i++) to[i * columns + k] = column[i];
        }
    } else {
        simd->to_float[x->dtype](to, from, columns);
    }
    if (!params->swiglu) return;
    const int64_t n = panel.rows * panel.columns;
    for (int64_t i = 0; i < n; i++) values[i] = pairs[2 * i];
    fg_activate(values, n, FG_ACTIVATION_SILU);
    for (int64_t i = 0; i < n; i++) values[i] *= pairs[2 * i + 1];
}

/* Panel after panel of a part: 0 is before the first; false behind the last. */
static bool next_panel(const division *d, const region *part, region *panel) {
    const int64_t rows = d->in_columns ? SQUARE_PANEL : 1, columns = d->in_columns ? SQUARE_PANEL : ROW_PANEL;
    if (panel->rows == 0) {
        *panel = (region){part->group, part->row, 0, part->column, 0};
    } else if (panel->column + panel->columns < part->column + part->columns) {
        panel->column += panel->columns;
    } else {
        panel->column = part->column;
        panel->row += panel->rows;
    }
    panel->rows = fg_min(rows, part->row + part->rows - panel->row);
    panel->columns = fg_min(columns, part->column + part->columns - panel->column);
    return panel->rows > 0 && panel->columns > 0;
}

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

static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* Of each row of a part. */
static void row_magnitudes(const fg_simd *simd, const fg_quantize_params *params, const division *d, region part,
                           uint32_t *largest) {
    float values[PANEL];
    const uint32_t infinity = 0x7f800000u, most = params->saturate ? infinity - 1 : infinity;
    for (int64_t i = 0; i < part.rows; i++) largest[i] = 0;
    for (region panel = {0}; next_panel(d, &part, &panel);) {
        load(simd, params, d, panel, values);
        for (int64_t i = 0; i < panel.rows; i++) {
            uint32_t *const of_row = &largest[panel.row - part.row + i];
            *of_row = larger(*of_row, largest_magnitude(values + i * panel.columns, panel.columns, most));
        }
    }
}

/* Of all rows. */
static uint32_t part_magnitude(const fg_simd *simd, const fg_quantize_params *params, const division *d, region part) {
    uint32_t of_rows[FG_SCALE_BLOCK_SIZE], largest = 0;
    row_magnitudes(simd, params, d, part, of_rows);
    for (int64_t i = 0; i < part.rows; i++) largest = larger(largest, of_rows[i]);
    return largest;
}

/* amax / max_finite, and 1 where that is 0. */
static float scale_of(uint32_t magnitude, fg_dtype dtype) {
    float amax;
    memcpy(&amax, &magnitude, sizeof amax);
    const float scale = amax / (dtype == FG_FLOAT8_E4M3FN ? 448.0f : 57344.0f);
    return scale > 0 ? scale : 1.0f;
}

/* The scales of a part, whose rows have one each, or one together. */
static void compute_scales(const fg_simd *simd, const fg_quantize_params *params, const division *d, region part) {
    if (d->scale_rows > 1) {
        *scale_at(params, d, &part, part.row) = scale_of(part_magnitude(simd, params, d, part), params->q.dtype);
        return;
    }
    uint32_t of_rows[FG_SCALE_BLOCK_SIZE];
    row_magnitudes(simd, params, d, part, of_rows);
    for (int64_t i = 0; i < part.rows; i++)
        *scale_at(params, d, &part, part.row + i) = scale_of(of_rows[i], params->q.dtype);
}

static void cast_part(const fg_simd *simd, const fg_quantize_params *params, const division *d, region part) {
    const fg_tensor *q = &params->q;
    float values[PANEL];
    for (region panel = {0}; next_panel(d, &part, &panel);) {
        load(simd, params, d, panel, values);
        for (int64_t i = 0; i < panel.rows; i++) {
            float *const row = values + i * panel.columns;
            const float scale = *scale_at(params, d, &part, panel.row + i);
            for (int64_t k = 0; k < panel.columns; k++) row[k] /= scale;
            const int64_t group = q->ndim == 3 ? part.group * q->strides[0] : 0;
            char *const to = (char *)q->data + group + (panel.row + i) * q->strides[q->ndim - 2] + panel.column;
            simd->from_float[q->dtype](to, row, panel.columns);
        }
    }
}

fg_status fg_cpu_quantize(const fg_quantize_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const fg_simd *simd = fg_simd_get(error);
    if (simd == NULL) return error->code;
    const division d = divide(params);
    const bool one = params->kind == FG_SCALE_TENSOR;
    const int64_t parts = one && d.k == 0 ? 0 : d.groups * d.parts_down * d.scales_across;
    int threads = 0;
    const fg_status status = fg_workspace_threads(&params->workspace, (fg_workspace_layout){0, 0},
                                                  1 + d.groups * d.m * d.k / THREAD_ELEMENTS, &threads, error);
    if (status != FG_OK) return status;

    if (!params->scale_given && one) {
        uint32_t largest = 0;
#pragma omp parallel num_threads(threads) reduction(max : largest)
        {
            FG_DEFAULT_FLOATS;
#pragma omp for
            for (int64_t i = 0; i < parts; i++)
                largest = larger(largest, part_magnitude(simd, params, &d, part_at(&d, i)));
        }
        *(float *)params->scale.data = scale_of(largest, params->q.dtype);
    }
#pragma omp parallel num_threads(threads)
    {
        FG_DEFAULT_FLOATS;
#pragma omp for
        for (int64_t i = 0; i < parts; i++) {
            const region part = part_at(&d, i);
            if (!params->scale_given && !one) compute_scales(simd, params, &d, part);
            cast_part(simd, params, &d, part);
        }
    }
    return FG_OK;
}
