/*
 * Voxels around points: which they are, how they weigh, the samples that they give, and the gradient of a sample in its
 * point.
 *
 *     workspace of maps and samples = { a hash table of the voxels, what filling it needs }
 */
#include <omp.h>

#include "../cell.h"
#include "../floats.h"
#include "coords.h"
#include "gather_sum.h"
#include "hash_table.h"
#include "pairs.h"

/* ---- voxels ---- */

/* The table that the voxels are looked up in, in the shared part of a workspace. */
typedef struct {
    fg_hash_insert_params insert;
    fg_hash_table table;
    fg_curve curve;
    size_t bytes; /* what it takes of the workspace */
} voxel_table;

static fg_tensor vector_in(char *memory, size_t *offset, int64_t size, fg_dtype dtype) {
    fg_tensor vector = {.ndim = 1, .dtype = dtype, .shape = {size}, .strides = {1}, .present = true};
    if (memory != NULL) vector.data = memory + *offset;
    *offset += fg_workspace_part(size, fg_dtype_size(dtype));
    return vector;
}

/* `workspace` is not looked at before it is filled. */
static void plan_voxels(voxel_table *voxels, const fg_tensor *coords, const int64_t shape[4],
                        const fg_tensor *workspace) {
    const int64_t slots = 2 * coords->shape[0] + 2;
    size_t insert_bytes = 0;
    char *const memory = workspace->data;
    fg_hash_insert_params *const insert = &voxels->insert;
    *insert =
        (fg_hash_insert_params){.keys = *coords, .shape = {shape[0], shape[1], shape[2], shape[3]}, .clear = true};
    voxels->bytes = 0;
    insert->table_keys = vector_in(memory, &voxels->bytes, slots, FG_INT64);
    insert->table_values = vector_in(memory, &voxels->bytes, slots, FG_INT32);
    insert->state = vector_in(memory, &voxels->bytes, 2, FG_INT64);
    fg_cpu_hash_insert_workspace(insert, NULL, &insert_bytes, NULL);
    insert->workspace = vector_in(memory, &voxels->bytes, (int64_t)insert_bytes, FG_UINT8);
    voxels->table = (fg_hash_table){&insert->table_keys, slots - 1, insert->state.data};
    voxels->curve = fg_make_curve(FG_BXYZ, shape);
}

static fg_status fill_voxels(const voxel_table *voxels, fg_error *error) {
    const fg_hash_insert_params *insert = &voxels->insert;
    if (insert->keys.shape[0] >= INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "coords: expected fewer than %d, got %lld", INT32_MAX,
                       (long long)insert->keys.shape[0]);
    const fg_status status = fg_check_coords(&insert->keys, "coords", insert->shape, omp_get_max_threads(), error);
    return status == FG_OK ? fg_cpu_hash_insert(insert, NULL, error) : status;
}

/* The row of a voxel, or -1. */
static int32_t row_at(const voxel_table *voxels, const int32_t coord[4]) {
    if (!fg_coord_inside(coord, voxels->curve.shape)) return -1;
    const int64_t slot = fg_find_slot(&voxels->table, fg_encode(&voxels->curve, coord));
    return slot < 0 ? -1 : ((const int32_t *)voxels->insert.table_values.data)[slot];
}

/* Rows and weights of the eight corners around a point. */
static void find_corners(const voxel_table *voxels, const fg_points *points, int64_t q, int32_t *rows, float *weights) {
    fg_cell cell;
    float point[3], total = 0.0f;
    const int32_t batch = fg_read_point(points, q, point);
    const bool near = fg_find_cell(point, voxels->curve.shape, &cell);
    for (int corner = 0; corner < FG_CORNERS; corner++) {
        int32_t coord[4];
        rows[corner] = -1;
        weights[corner] = 0.0f;
        if (!near) continue;
        fg_corner_coord(&cell, corner, batch, coord);
        rows[corner] = row_at(voxels, coord);
        if (rows[corner] >= 0) weights[corner] = fg_corner_weight(&cell, corner);
        total += weights[corner];
    }
    if (!(total > 0.0f)) return;
    for (int corner = 0; corner < FG_CORNERS; corner++) weights[corner] /= total;
}

/* ---- map ---- */

fg_status fg_cpu_sample_map_workspace(const fg_sample_map_params *params, const fg_queue *queue, size_t *bytes,
                                      fg_error *error) {
    (void)queue, (void)error;
    voxel_table voxels;
    plan_voxels(&voxels, &params->coords, params->shape, &params->workspace);
    *bytes = fg_workspace_bytes((fg_workspace_layout){voxels.bytes, 0});
    return FG_OK;
}

fg_status fg_cpu_sample_map(const fg_sample_map_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const int64_t count = params->indices.shape[0];
    voxel_table voxels;
    plan_voxels(&voxels, &params->coords, params->shape, &params->workspace);
    int threads = 0;
    fg_status status =
        fg_workspace_threads(&params->workspace, (fg_workspace_layout){voxels.bytes, 0}, count, &threads, error);
    if (status == FG_OK) status = fill_voxels(&voxels, error);
    if (status != FG_OK) return status;

    const fg_points points = fg_points_of(&params->grid);
    int32_t *indices = params->indices.data;
    float *weights = params->weights.data;
#pragma omp parallel num_threads(threads)
    {
        FG_DEFAULT_FLOATS;
#pragma omp for
        for (int64_t q = 0; q < count; q++) {
            if (params->weights.present) {
                find_corners(&voxels, &points, q, indices + FG_CORNERS * q, weights + FG_CORNERS * q);
            } else {
                float point[3];
                int32_t coord[4] = {fg_read_point(&points, q, point)};
                const bool near = fg_find_nearest(point, voxels.curve.shape, coord + 1);
                indices[q] = near ? row_at(&voxels, coord) : -1;
            }
        }
    }
    return FG_OK;
}

/* ---- samples without a map ---- */

/* Private: the sums of one sample, a widened row. */
static fg_workspace_layout plan_forward(const fg_sample_forward_params *params, const voxel_table *voxels) {
    return (fg_workspace_layout){voxels->bytes, 2 * fg_workspace_part(params->feats.shape[1], sizeof(float))};
}

fg_status fg_cpu_sample_forward_workspace(const fg_sample_forward_params *params, const fg_queue *queue, size_t *bytes,
                                          fg_error *error) {
    (void)queue, (void)error;
    voxel_table voxels;
    plan_voxels(&voxels, &params->coords, params->shape, &params->workspace);
    *bytes = fg_workspace_bytes(plan_forward(params, &voxels));
    return FG_OK;
}

fg_status fg_cpu_sample_forward(const fg_sample_forward_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const fg_simd *simd = fg_simd_get(error);
    if (simd == NULL) return error->code;
    const fg_tensor *feats = &params->feats;
    const int64_t count = params->out.shape[0], channels = feats->shape[1];
    voxel_table voxels;
    plan_voxels(&voxels, &params->coords, params->shape, &params->workspace);
    const fg_workspace_layout layout = plan_forward(params, &voxels);
    int threads = 0;
    fg_status status = fg_workspace_threads(&params->workspace, layout, count, &threads, error);
    if (status == FG_OK) status = fill_voxels(&voxels, error);
    if (status != FG_OK) return status;

    const fg_points points = fg_points_of(&params->grid);
#pragma omp parallel num_threads(threads)
    {
        FG_DEFAULT_FLOATS;
#pragma omp for
        for (int64_t q = 0; q < count; q++) {
            float *sums = fg_workspace_private(&params->workspace, layout);
            float *widened = sums + layout.per_thread / sizeof(float) / 2;
            int32_t rows[FG_CORNERS];
            float weights[FG_CORNERS];
            find_corners(&voxels, &points, q, rows, weights);
            fg_sum_rows(simd, feats, rows, weights, FG_CORNERS, sums, widened);
            simd->from_float[feats->dtype](fg_row(&params->out, q), sums, channels);
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
#pragma omp parallel num_threads(threads) reduction(min : wrong)
    {
        FG_DEFAULT_FLOATS;
#pragma omp for
        for (int64_t q = 0; q < points; q++) {
            const int32_t *rows = indices + FG_CORNERS * q;
            float *upper = fg_workspace_private(&params->workspace, layout);
            float *row = upper + layout.per_thread / sizeof(float) / 2;
            float product[FG_CORNERS] = {0};
            unsigned present = 0;
            simd->to_float[feats->dtype](upper, fg_row(&params->grad_out, q), channels);
            for (int corner = 0; corner < FG_CORNERS; corner++) {
                if (rows[corner] < -1 || rows[corner] >= feats->shape[0])
                    wrong = fg_min(wrong, q * FG_CORNERS + corner);
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
    }
    if (wrong == points * FG_CORNERS) return FG_OK;
    return fg_report_entry("indices", &params->indices, wrong, feats->shape[0], error);
}
