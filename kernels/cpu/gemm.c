/*
 * out = (scale_a * scale_b) * A . B^T + bias, dense and m-grouped (ragged), for every dtype through float32.
 *
 * B is packed a chunk of columns at a time, as float32, by all threads together; then each thread takes tiles of
 * TILE_M rows by TILE_N columns, whose float32 sums stay in its cache while k runs. Rows of A are widened block by
 * block into scratch, which also removes the cache conflicts of rows that lie a power of two apart. A grouped product
 * is the dense one repeated for the rows of each group.
 */
#include <string.h>

#include "../plan.h"
#include "backend.h"
#include "simd.h"
#include "tile.h"

enum {
    TILE_M = 192,
    TILE_N = 256,           /* a multiple of every panel width */
    THREAD_WORK = 1 << 18,  /* multiply-adds that are worth waking a thread */
    CHUNK_BYTES = 32 << 20, /* of packed B: a good part of a last-level cache */
};

typedef struct {
    int64_t m, n, k, groups;
    int64_t chunk_n;             /* columns of B packed at a time, a multiple of TILE_N */
    size_t sums_part, rows_part; /* bytes of the private sums and widened rows, which the bias row follows */
    fg_workspace_layout layout;
} gemm_plan;

static gemm_plan plan_gemm(const fg_simd *simd, const fg_gemm_params *params) {
    const bool grouped = params->layout == FG_GEMM_M_GROUPED;
    gemm_plan plan = {
        .m = params->a.shape[0],
        .k = params->a.shape[1],
        .n = params->out.shape[1],
        .groups = grouped ? params->b.shape[0] : 1,
    };
    const int64_t column_bytes = fg_max(1, plan.k) * (int64_t)sizeof(float);
    plan.chunk_n = fg_max(1, CHUNK_BYTES / column_bytes / TILE_N) * TILE_N;
    plan.chunk_n = fg_min(plan.chunk_n, fg_ceil_div(plan.n, TILE_N) * TILE_N);
    plan.sums_part = fg_workspace_part(TILE_M * TILE_N, sizeof(float));
    plan.rows_part = fg_workspace_part(TILE_M * FG_BLOCK_K, sizeof(float));
    const int64_t padded_n = fg_packing_of(simd, plan.k, fg_min(plan.chunk_n, plan.n)).padded_n;
    plan.layout.shared = fg_workspace_part(plan.k * padded_n, sizeof(float));
    plan.layout.per_thread = plan.sums_part + plan.rows_part + fg_workspace_part(TILE_N, sizeof(float));
    return plan;
}

/* Bound g of the row ranges: group g owns rows bound(g) .. bound(g + 1). */
static int64_t group_bound(const fg_gemm_params *params, int64_t g) {
    if (params->layout == FG_GEMM_DENSE) return g == 0 ? 0 : params->a.shape[0];
    const fg_tensor *offsets = &params->offsets;
    if (offsets->shape[0] == params->b.shape[0]) { /* G ends */
        if (g == 0) return 0;
        g -= 1;
    }
    return offsets->dtype == FG_INT64 ? ((const int64_t *)offsets->data)[g] : ((const int32_t *)offsets->data)[g];
}

static fg_status check_offsets(const fg_gemm_params *params, int64_t groups, int64_t m, fg_error *error) {
    int64_t previous = 0;
    for (int64_t g = 0; g <= groups; g++) {
        const int64_t bound = group_bound(params, g);
        if (bound < previous || bound > m)
            return fg_fail(error, FG_ERROR_VALUE,
                           "offsets: expected non-decreasing row numbers in 0..%lld, got %lld after %lld", (long long)m,
                           (long long)bound, (long long)previous);
        previous = bound;
    }
    return FG_OK;
}

/* One output tile: rows [m0, m0 + rows), columns [n0, n0 + columns) of group g. `packed` is B's chunk from
 * column chunk_begin on. */
static void gemm_tile(const fg_simd *simd, const fg_gemm_params *params, const gemm_plan *plan,
                      const fg_packing *packing, const float *packed, char *scratch, int64_t g, int64_t m0,
                      int64_t rows, int64_t chunk_begin, int64_t n0, int64_t columns) {
    const fg_tensor *a = &params->a, *bias = &params->bias, *out = &params->out;
    float *sums = (float *)scratch, *widened = (float *)(scratch + plan->sums_part);
    float *bias_row = (float *)(scratch + plan->sums_part + plan->rows_part);
    const float *left[TILE_M];
    float *sum[TILE_M];

    memset(sums, 0, sizeof(float) * (size_t)(rows * TILE_N));
    for (int64_t i = 0; i < rows; i++) sum[i] = sums + i * TILE_N;
    for (int64_t block = 0; block < packing->blocks; block++) {
        const int64_t begin = block * packing->block_k, k = fg_block_rows(packing, block);
        for (int64_t i = 0; i < rows; i++) {
            const char *from = fg_row(a, m0 + i) + begin * (int64_t)fg_dtype_size(a->dtype);
            simd->to_float[a->dtype](widened + i * k, from, k);
            left[i] = widened + i * k;
        }
        fg_multiply_block(simd, packing, packed, block, n0 - chunk_begin, columns, rows, left, sum);
    }

    const bool biased = bias->present;
    if (biased)
        simd->to_float[bias->dtype](
            bias_row, (const char *)bias->data + (g * plan->n + n0) * (int64_t)fg_dtype_size(bias->dtype), columns);
    const float *scale_a = params->kind_a != FG_SCALE_NONE ? params->scale_a.data : NULL;
    const float *scale_b = params->kind_b != FG_SCALE_NONE ? params->scale_b.data : NULL;
    if (params->kind_b == FG_SCALE_TENSOR) scale_b += g;
    if (params->kind_b == FG_SCALE_ROW) scale_b += g * plan->n + n0;
    for (int64_t i = 0; i < rows; i++) {
        const float row_scale = scale_a == NULL ? 1.0f : scale_a[params->kind_a == FG_SCALE_ROW ? m0 + i : 0];
        if (params->kind_b == FG_SCALE_ROW)
            for (int64_t j = 0; j < columns; j++) sum[i][j] *= row_scale * scale_b[j];
        else if (scale_a != NULL || scale_b != NULL)
            for (int64_t j = 0; j < columns; j++) sum[i][j] *= scale_b == NULL ? row_scale : row_scale * scale_b[0];
        if (biased)
            for (int64_t j = 0; j < columns; j++) sum[i][j] += bias_row[j];
        simd->from_float[out->dtype](fg_row(out, m0 + i) + n0 * (int64_t)fg_dtype_size(out->dtype), sum[i], columns);
    }
}

/* Rows [begin, end) of group g. Called by all threads of a parallel region. */
static void gemm_group(const fg_simd *simd, const fg_gemm_params *params, const gemm_plan *plan, int64_t g,
                       int64_t begin, int64_t end) {
    const fg_tensor *b = &params->b;
    const bool grouped = params->layout == FG_GEMM_M_GROUPED;
    const int64_t row_stride = b->strides[grouped ? 1 : 0], size = (int64_t)fg_dtype_size(b->dtype);
    const char *matrix = (const char *)b->data + (grouped ? g * b->strides[0] * size : 0);
    float *packed = params->workspace.data;
    char *scratch = fg_workspace_private(&params->workspace, plan->layout);

    for (int64_t chunk = 0; chunk < plan->n; chunk += plan->chunk_n) {
        const fg_packing packing = fg_packing_of(simd, plan->k, fg_min(plan->chunk_n, plan->n - chunk));
        const fg_operand operand = {matrix + chunk * row_stride * size, b->dtype, .k_stride = 1,
                                    .n_stride = row_stride};
#pragma omp for collapse(2)
        for (int64_t block = 0; block < packing.blocks; block++)
            for (int64_t panel = 0; panel < packing.panels; panel++)
                fg_pack_panel(simd, &packing, &operand, block, panel, packed);
        const int64_t tiles_m = fg_ceil_div(end - begin, TILE_M), tiles_n = fg_ceil_div(packing.n, TILE_N);
#pragma omp for schedule(dynamic)
        for (int64_t tile = 0; tile < tiles_m * tiles_n; tile++) {
            const int64_t m0 = begin + tile % tiles_m * TILE_M, n0 = chunk + tile / tiles_m * TILE_N;
            gemm_tile(simd, params, plan, &packing, packed, scratch, g, m0, fg_min(TILE_M, end - m0), chunk, n0,
                      fg_min(TILE_N, chunk + packing.n - n0));
        }
    }
}

fg_status fg_cpu_gemm_workspace(const fg_gemm_params *params, const fg_queue *queue, size_t *bytes, fg_error *error) {
    (void)queue;
    const fg_simd *simd = fg_simd_get(error);
    if (simd == NULL) return error->code;
    const gemm_plan plan = plan_gemm(simd, params);
    *bytes = plan.m > 0 && plan.n > 0 ? fg_workspace_bytes(plan.layout) : 0;
    return FG_OK;
}

fg_status fg_cpu_gemm(const fg_gemm_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const fg_simd *simd = fg_simd_get(error);
    if (simd == NULL) return error->code;
    const gemm_plan plan = plan_gemm(simd, params);
    fg_status status = FG_OK;
    if (params->layout == FG_GEMM_M_GROUPED) status = check_offsets(params, plan.groups, plan.m, error);
    if (status != FG_OK || plan.m == 0 || plan.n == 0) return status;
    int threads = 0;
    const int64_t grains = 1 + plan.m * plan.n * plan.k / THREAD_WORK;
    status = fg_workspace_threads(&params->workspace, plan.layout, grains, &threads, error);
    if (status != FG_OK) return status;
    const fg_plan chosen = {.family = FG_FAMILY_CPU,
                            .block_m = TILE_M,
                            .block_n = TILE_N,
                            .block_k = FG_BLOCK_K,
                            .split_k = 1,
                            .workspace_bytes = (int64_t)fg_workspace_bytes(plan.layout)};
    fg_print_plan(&chosen, "gemm", params->a.dtype, "m=%lld n=%lld k=%lld groups=%lld", (long long)plan.m,
                  (long long)plan.n, (long long)plan.k, (long long)plan.groups);

#pragma omp parallel num_threads(threads)
    for (int64_t g = 0; g < plan.groups; g++) {
        const int64_t begin = group_bound(params, g), end = group_bound(params, g + 1);
        if (begin < end) gemm_group(simd, params, &plan, g, begin, end);
    }
    return FG_OK;
}
