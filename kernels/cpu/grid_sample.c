/*
 * Voxels around points: which they are, how they weigh, and the gradient of a sample in its point.
 */
#include "../cell.h"
#include "hash_table.h"
#include "simd.h"

/* ---- map ---- */

/* The row of a voxel, or -1. */
static int32_t row_at(const fg_sample_map_params *params, const fg_hash_table *table, const fg_curve *curve,
                      const int32_t coord[4]) {
    if (!fg_curve_contains(curve, coord)) return -1;
    const int64_t slot = fg_find_slot(table, fg_encode(curve, coord));
    return slot < 0 ? -1 : ((const int32_t *)params->table_values.data)[slot];
}

static void map_trilinear(const fg_sample_map_params *params, const fg_hash_table *table, const fg_curve *curve,
                          int32_t batch, const float *point, int32_t *rows, float *weights) {
    fg_cell cell;
    const bool near = fg_find_cell(point, curve->shape, &cell);
    float total = 0.0f;
    for (int corner = 0; corner < FG_CORNERS; corner++) {
        int32_t coord[4];
        rows[corner] = -1;
        weights[corner] = 0.0f;
        if (!near) continue;
        fg_corner_coord(&cell, corner, batch, coord);
        rows[corner] = row_at(params, table, curve, coord);
        if (rows[corner] >= 0) weights[corner] = fg_corner_weight(&cell, corner);
        total += weights[corner];
    }
    if (!(total > 0.0f)) return;
    for (int corner = 0; corner < FG_CORNERS; corner++) weights[corner] /= total;
}

fg_status fg_cpu_sample_map(const fg_sample_map_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue, (void)error;
    const fg_hash_table table = {&params->table_keys, params->table_keys.shape[0] - 1, params->state.data};
    const fg_curve curve = fg_make_curve(FG_BXYZ, params->shape);
    const int64_t count = params->indices.shape[0];
    const fg_points points = fg_points_of(&params->grid);
    int32_t *indices = params->indices.data;
    float *weights = params->weights.data;
#pragma omp parallel for
    for (int64_t q = 0; q < count; q++) {
        float point[3];
        const int32_t batch = fg_read_point(&points, q, point);
        if (params->weights.present) {
            map_trilinear(params, &table, &curve, batch, point, indices + FG_CORNERS * q, weights + FG_CORNERS * q);
        } else {
            int32_t coord[4] = {batch};
            const bool near = fg_find_nearest(point, curve.shape, coord + 1);
            indices[q] = near ? row_at(params, &table, &curve, coord) : -1;
        }
    }
    return FG_OK;
}

/* ---- gradient in the points ---- */

/* Private: a widened row of grad_out, one of feats. */
static fg_workspace_layout plan_grad(const fg_sample_grad_params *params) {
    return (fg_workspace_layout){0, 2 * fg_workspace_part(params->feats.shape[1], sizeof(float))};
}

fg_status fg_cpu_sample_grad_workspace(const fg_sample_grad_params *params, const fg_queue *queue, size_t *bytes,
                                       fg_error *error) {
    (void)queue, (void)error;
    *bytes = fg_workspace_bytes(plan_grad(params));
    return FG_OK;
}

static float dot(const float *a, const float *b, int64_t n) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

fg_status fg_cpu_sample_grad(const fg_sample_grad_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const fg_simd *simd = fg_simd_get(error);
    if (simd == NULL) return error->code;
    const fg_tensor *feats = &params->feats;
    const int64_t points = params->indices.shape[0], channels = feats->shape[1];
    const fg_workspace_layout layout = plan_grad(params);
    const fg_points grid = fg_points_of(&params->grid);
    const int64_t everywhere[4] = {1, (int64_t)1 << 31, (int64_t)1 << 31, (int64_t)1 << 31};
    int threads = 0;
    const fg_status status = fg_workspace_threads(&params->workspace, layout, points, &threads, error);
    if (status != FG_OK) return status;

    const int32_t *indices = params->indices.data;
    int64_t wrong = points * FG_CORNERS; /* the first entry that is no row */
#pragma omp parallel for num_threads(threads) reduction(min : wrong)
    for (int64_t q = 0; q < points; q++) {
        const int32_t *rows = indices + FG_CORNERS * q;
        float *upper = fg_workspace_private(&params->workspace, layout);
        float *row = upper + layout.per_thread / sizeof(float) / 2;
        float product[FG_CORNERS] = {0};
        unsigned present = 0;
        simd->to_float[feats->dtype](upper, fg_row(&params->grad_out, q), channels);
        for (int corner = 0; corner < FG_CORNERS; corner++) {
            if (rows[corner] < -1 || rows[corner] >= feats->shape[0]) wrong = fg_min(wrong, q * FG_CORNERS + corner);
            if (rows[corner] < 0 || rows[corner] >= feats->shape[0]) continue;
            present |= 1u << corner;
            simd->to_float[feats->dtype](row, fg_row(feats, rows[corner]), channels);
            product[corner] = dot(upper, row, channels);
        }
        fg_cell cell = {{0}, {0}};
        float point[3], *gradient = (float *)params->grad_grid.data + (grid.batched ? 4 : 3) * q;
        fg_read_point(&grid, q, point);
        if (!fg_find_cell(point, everywhere, &cell)) present = 0;
        if (grid.batched) *gradient++ = 0.0f;
        fg_cell_gradient(&cell, present, product, gradient);
    }
    if (wrong == points * FG_CORNERS) return FG_OK;
    return fg_fail(error, FG_ERROR_VALUE, "indices: entry (%lld, %lld) is %d, expected -1 or a row below %lld",
                   (long long)(wrong / FG_CORNERS), (long long)(wrong % FG_CORNERS), indices[wrong],
                   (long long)feats->shape[0]);
}
