/*
 * out = act(alpha * scale_a * scale_b * A . B^T + bias) for every layout of groups and every dtype through float32.
 *
 * A grouped product is the dense one repeated for the part of A, B and out that each group owns. B is packed a chunk of
 * columns at a time, as float32, by all threads together; then each thread takes tiles of TILE_M rows by TILE_N
 * columns, whose float32 sums stay in its cache while k runs. Rows of A are widened block by block into scratch, which
 * also removes the cache conflicts of rows that lie a power of two apart.
 */
#include <string.h>

#include "../floats.h"
#include "../plan.h"
#include "activation.h"
#include "backend.h"
#include "simd.h"
#include "tile.h"

enum {
    TILE_M = 192,
    TILE_N = 256,           /* a multiple of every panel width and of FG_SCALE_BLOCK_SIZE */
    THREAD_WORK = 1 << 18,  /* multiply-adds that are worth waking a thread */
    CHUNK_BYTES = 32 << 20, /* of packed B: a good part of a last-level cache */
};
_Static_assert((int)FG_BLOCK_K == (int)FG_SCALE_BLOCK_SIZE, "one scale per block of k");

typedef struct {
    fg_gemm_shape shape;
    int64_t chunk_n;             /* columns of B packed at a time, a multiple of TILE_N */
    size_t sums_part, rows_part; /* bytes of the private sums (twice where a block's are scaled) and widened rows,
                                    which the bias row follows */
    fg_workspace_layout layout;
} gemm_plan;

static gemm_plan plan_gemm(const fg_simd *simd, const fg_gemm_params *params) {
    gemm_plan plan = {.shape = fg_gemm_shape_of(params)};
    const int64_t n = plan.shape.n, k = plan.shape.k;
    plan.chunk_n = fg_max(1, CHUNK_BYTES / (int64_t)sizeof(float) / fg_max(1, k) / TILE_N) * TILE_N;
    plan.chunk_n = fg_min(plan.chunk_n, fg_ceil_div(n, TILE_N) * TILE_N);
    plan.sums_part = fg_workspace_part(TILE_M * TILE_N, sizeof(float));
    plan.rows_part = fg_workspace_part(TILE_M * FG_BLOCK_K, sizeof(float));
    const int64_t padded_n = fg_packing_of(simd, k, fg_min(plan.chunk_n, n)).padded_n;
    const size_t sums = (params->kind_a == FG_SCALE_BLOCK ? 2 : 1) * plan.sums_part;
    plan.layout.shared = fg_workspace_part(k * padded_n, sizeof(float));
    plan.layout.per_thread = sums + plan.rows_part + fg_workspace_part(TILE_N, sizeof(float));
    return plan;
}

/* ---- groups ---- */

/* What one group multiplies: its rows of A and out, its columns (rows of B), its part of K. */
typedef struct {
    int64_t group, weight; /* indices of A, out and their scales; of B, its scale and bias */
    int64_t m_begin, m_end, n_begin, n_end, k_begin, k_end;
} product;

static int64_t integer_at(const fg_tensor *tensor, int64_t i) {
    return tensor->dtype == FG_INT64 ? ((const int64_t *)tensor->data)[i] : ((const int32_t *)tensor->data)[i];
}

/* Bound g of the groups + 1 that offsets tell. */
static int64_t group_bound(const fg_tensor *offsets, int64_t groups, int64_t g) {
    if (offsets->shape[0] == groups + 1) return integer_at(offsets, g);
    return g == 0 ? 0 : integer_at(offsets, g - 1);
}

/* The next product from `*cursor` on, which starts at 0 and is a row of m_indices, else a group; false: no more. */
static bool next_product(const fg_gemm_params *params, const fg_gemm_shape *shape, int64_t *cursor, product *next) {
    const fg_tensor *grouping = &params->grouping;
    *next = (product){0, 0, 0, shape->m, 0, shape->n, 0, shape->k};
    if (params->layout == FG_GEMM_M_GROUPED_CONTIGUOUS) {
        const int32_t *m_indices = grouping->data;
        while (*cursor < shape->m && m_indices[*cursor] < 0) ++*cursor;
        if (*cursor == shape->m) return false;
        next->m_begin = (*cursor)++;
        next->weight = m_indices[next->m_begin];
        while (*cursor < shape->m && m_indices[*cursor] == next->weight) ++*cursor;
        next->m_end = *cursor;
        return true;
    }
    if (*cursor == shape->groups) return false;
    const int64_t g = next->group = next->weight = (*cursor)++;
    if (params->weight_indices.present) next->weight = integer_at(&params->weight_indices, g);
    if (params->layout == FG_GEMM_M_GROUPED) {
        next->m_begin = group_bound(grouping, shape->groups, g);
        next->m_end = group_bound(grouping, shape->groups, g + 1);
    } else if (params->layout == FG_GEMM_M_GROUPED_MASKED) {
        next->m_end = integer_at(grouping, g);
    } else if (params->layout == FG_GEMM_N_GROUPED) {
        next->n_begin = group_bound(grouping, shape->groups, g);
        next->n_end = group_bound(grouping, shape->groups, g + 1);
    } else if (params->layout == FG_GEMM_K_GROUPED) {
        next->k_begin = group_bound(grouping, shape->groups, g);
        next->k_end = group_bound(grouping, shape->groups, g + 1);
    }
    return true;
}

static void clamp(int64_t *begin, int64_t *end, int64_t length) {
    *begin = fg_min(fg_max(*begin, 0), length);
    *end = fg_min(fg_max(*end, *begin), length);
}

/* The product as far as there are operands: since its indices were checked another thread may have written them. */
static product within(const fg_gemm_params *params, const fg_gemm_shape *shape, product p) {
    clamp(&p.m_begin, &p.m_end, shape->m);
    clamp(&p.n_begin, &p.n_end, shape->n);
    clamp(&p.k_begin, &p.k_end, shape->k);
    if (params->b.ndim == 3 && (p.weight < 0 || p.weight >= params->b.shape[0])) p.m_end = p.m_begin;
    return p;
}

static fg_status check_offsets(const fg_tensor *offsets, int64_t groups, int64_t length, fg_error *error) {
    int64_t previous = 0;
    for (int64_t g = 0; g <= groups; g++) {
        const int64_t bound = group_bound(offsets, groups, g);
        if (bound < previous || bound > length)
            return fg_fail(error, FG_ERROR_VALUE,
                           "offsets: expected non-decreasing numbers in 0..%lld, got %lld after %lld",
                           (long long)length, (long long)bound, (long long)previous);
        previous = bound;
    }
    return FG_OK;
}

static fg_status check_range(const fg_tensor *tensor, const char *name, int64_t least, int64_t most, fg_error *error) {
    for (int64_t i = 0; i < tensor->shape[0]; i++) {
        const int64_t value = integer_at(tensor, i);
        if (value < least || value > most)
            return fg_fail(error, FG_ERROR_VALUE, "%s: expected %lld to %lld, got %lld at %lld", name, (long long)least,
                           (long long)most, (long long)value, (long long)i);
    }
    return FG_OK;
}

static fg_status check_m_indices(const fg_tensor *m_indices, int64_t groups, fg_error *error) {
    fg_status status = check_range(m_indices, "m_indices", -1, groups - 1, error);
    const int32_t *group = m_indices->data;
    for (int64_t i = 0; i < m_indices->shape[0] && status == FG_OK; i++) {
        if (i % FG_GROUP_ALIGNMENT != 0 && group[i] != group[i - 1] && group[i] >= 0)
            status = fg_fail(error, FG_ERROR_VALUE,
                             "m_indices: expected groups that start at multiples of %d, got group %d at %lld",
                             FG_GROUP_ALIGNMENT, (int)group[i], (long long)i);
    }
    return status;
}

static fg_status check_groups(const fg_gemm_params *params, const fg_gemm_shape *shape, fg_error *error) {
    const fg_tensor *grouping = &params->grouping, *weights = &params->weight_indices;
    if (weights->present) {
        const fg_status status = check_range(weights, "weight_indices", 0, params->b.shape[0] - 1, error);
        if (status != FG_OK) return status;
    }
    switch (params->layout) {
        case FG_GEMM_M_GROUPED:
            return check_offsets(grouping, shape->groups, shape->m, error);
        case FG_GEMM_N_GROUPED:
            return check_offsets(grouping, shape->groups, shape->n, error);
        case FG_GEMM_K_GROUPED:
            return check_offsets(grouping, shape->groups, shape->k, error);
        case FG_GEMM_M_GROUPED_CONTIGUOUS:
            return check_m_indices(grouping, shape->groups, error);
        case FG_GEMM_M_GROUPED_MASKED:
            return check_range(grouping, "masked_m", 0, shape->m, error);
        default:
            return FG_OK;
    }
}

/* ---- one tile ---- */

/* Element (group, row, column); tensors without groups have the same matrix for all. */
static char *element(const fg_tensor *tensor, int64_t group, int64_t row, int64_t column) {
    const int axis = tensor->ndim - 2;
    const int64_t first = axis > 0 ? group * tensor->strides[0] : 0;
    const int64_t index = first + row * tensor->strides[axis] + column * tensor->strides[axis + 1];
    return (char *)tensor->data + index * (int64_t)fg_dtype_size(tensor->dtype);
}

/* The scale at (group, row, block) of an operand. */
static float scale_at(const fg_tensor *scale, fg_scale_kind kind, int64_t group, int64_t row, int64_t block) {
    const float *data = scale->data;
    switch (kind) {
        case FG_SCALE_TENSOR:
            return data[scale->ndim > 0 ? group : 0];
        case FG_SCALE_ROW:
            return data[(scale->ndim > 1 ? group * scale->shape[1] : 0) + row];
        case FG_SCALE_BLOCK:
            return *(const float *)element(scale, group, row, block);
        default:
            return 1.0f;
    }
}

/* sum[i] += partial[i] times the scales of block k of A's row m0 + i and of B's columns from n0 on. */
static void add_scaled(const fg_gemm_params *params, const product *p, int64_t block, int64_t m0, int64_t rows,
                       int64_t n0, int64_t columns, float *const *partial, float *const *sum) {
    for (int64_t i = 0; i < rows; i++) {
        const float scale_a = scale_at(&params->scale_a, FG_SCALE_BLOCK, p->group, m0 + i, block);
        for (int64_t begin = 0; begin < columns; begin += FG_SCALE_BLOCK_SIZE) {
            const int64_t n_block = (n0 + begin) / FG_SCALE_BLOCK_SIZE,
                          end = fg_min(begin + FG_SCALE_BLOCK_SIZE, columns);
            const float scale = scale_a * scale_at(&params->scale_b, FG_SCALE_BLOCK, p->weight, n_block, block);
            for (int64_t j = begin; j < end; j++) sum[i][j] += partial[i][j] * scale;
        }
    }
}

/* Scales, bias, activation and store of one row of sums. */
static void finish_row(const fg_simd *simd, const fg_gemm_params *params, const product *p, const float *bias,
                       int64_t row, int64_t n0, int64_t columns, float *sum) {
    const fg_tensor *out = &params->out;
    float factor = 1.0f;
    if (params->kind_a != FG_SCALE_BLOCK) factor = scale_at(&params->scale_a, params->kind_a, p->group, row, 0);
    const bool multiplied = p->k_begin < p->k_end;      /* else sums stay 0, whatever their scales */
    if (multiplied && params->kind_b == FG_SCALE_ROW) { /* in this order, as a GPU does */
        for (int64_t j = 0; j < columns; j++)
            sum[j] *= factor * (params->alpha * scale_at(&params->scale_b, FG_SCALE_ROW, p->weight, n0 + j, 0));
    } else if (multiplied) {
        float scale = params->alpha;
        if (params->kind_b == FG_SCALE_TENSOR) scale *= scale_at(&params->scale_b, FG_SCALE_TENSOR, p->weight, 0, 0);
        factor *= scale;
        for (int64_t j = 0; j < columns; j++) sum[j] *= factor;
    }
    if (bias != NULL)
        for (int64_t j = 0; j < columns; j++) sum[j] += bias[j];
    fg_activate(sum, columns, params->activation);
    if (params->swiglu) {
        columns /= 2;
        n0 /= 2;
        for (int64_t j = 0; j < columns; j++) {
            float gate = sum[2 * j];
            fg_activate(&gate, 1, FG_ACTIVATION_SILU);
            sum[j] = gate * sum[2 * j + 1];
        }
    }
    if (params->scale_out.present) {
        const float scale_out = *(const float *)params->scale_out.data;
        for (int64_t j = 0; j < columns; j++) sum[j] /= scale_out;
    }
    char *target = element(out, p->group, row, n0);
    if (params->accumulate)
        for (int64_t j = 0; j < columns; j++) sum[j] += ((const float *)target)[j];
    simd->from_float[out->dtype](target, sum, columns);
}

/* One output tile: rows [m0, m0 + rows), columns [n0, n0 + columns). `packed` is B's chunk from column chunk_begin
 * on. */
static void gemm_tile(const fg_simd *simd, const fg_gemm_params *params, const gemm_plan *plan, const product *p,
                      const fg_packing *packing, const float *packed, char *scratch, int64_t m0, int64_t rows,
                      int64_t chunk_begin, int64_t n0, int64_t columns) {
    const fg_tensor *a = &params->a, *bias = &params->bias;
    const bool block_scaled = params->kind_a == FG_SCALE_BLOCK;
    float *sums = (float *)scratch;
    scratch += plan->sums_part;
    float *partials = block_scaled ? (float *)scratch : sums;
    if (block_scaled) scratch += plan->sums_part;
    float *widened = (float *)scratch, *bias_row = (float *)(scratch + plan->rows_part);
    const float *left[TILE_M];
    float *sum[TILE_M], *partial[TILE_M];

    memset(sums, 0, sizeof(float) * (size_t)(rows * TILE_N));
    for (int64_t i = 0; i < rows; i++) sum[i] = sums + i * TILE_N, partial[i] = partials + i * TILE_N;
    for (int64_t block = 0; block < packing->blocks; block++) {
        const int64_t begin = block * packing->block_k, k = fg_block_rows(packing, block);
        for (int64_t i = 0; i < rows; i++) {
            const char *row = element(a, p->group, m0 + i, p->k_begin + begin);
            fg_widen(simd, a->dtype, row, a->strides[a->ndim - 1], k, widened + i * k);
            left[i] = widened + i * k;
        }
        if (block_scaled) memset(partials, 0, sizeof(float) * (size_t)(rows * TILE_N));
        fg_multiply_block(simd, packing, packed, block, n0 - chunk_begin, columns, rows, left, partial);
        if (block_scaled) add_scaled(params, p, block, m0, rows, n0, columns, partial, sum);
    }

    if (bias->present) {
        const int64_t first = (bias->ndim > 1 ? p->weight * plan->shape.n : 0) + n0;
        simd->to_float[bias->dtype](bias_row, (const char *)bias->data + first * (int64_t)fg_dtype_size(bias->dtype),
                                    columns);
    }
    for (int64_t i = 0; i < rows; i++)
        finish_row(simd, params, p, bias->present ? bias_row : NULL, m0 + i, n0, columns, sum[i]);
}

/* Called by all threads of a parallel region. */
static void multiply(const fg_simd *simd, const fg_gemm_params *params, const gemm_plan *plan, const product *p) {
    if (p->m_begin == p->m_end) return; /* before weights are packed for no rows */
    const fg_tensor *b = &params->b;
    const int64_t row_stride = b->strides[b->ndim - 2];
    const fg_operand whole = {
        .dtype = b->dtype,
        .k_stride = params->b_row_major ? row_stride : 1,
        .n_stride = params->b_row_major ? 1 : row_stride,
    };
    float *packed = params->workspace.data;
    char *scratch = fg_workspace_private(&params->workspace, plan->layout);

    for (int64_t chunk = p->n_begin; chunk < p->n_end; chunk += plan->chunk_n) {
        fg_packing packing = fg_packing_of(simd, p->k_end - p->k_begin, fg_min(plan->chunk_n, p->n_end - chunk));
        if (params->kind_a == FG_SCALE_BLOCK) packing.block_k = FG_SCALE_BLOCK_SIZE;
        fg_operand operand = whole;
        operand.data =
            params->b_row_major ? element(b, p->weight, p->k_begin, chunk) : element(b, p->weight, chunk, p->k_begin);
#pragma omp for collapse(2)
        for (int64_t block = 0; block < packing.blocks; block++)
            for (int64_t panel = 0; panel < packing.panels; panel++)
                fg_pack_panel(simd, &packing, &operand, block, panel, packed);
        const int64_t tiles_m = fg_ceil_div(p->m_end - p->m_begin, TILE_M), tiles_n = fg_ceil_div(packing.n, TILE_N);
#pragma omp for schedule(dynamic)
        for (int64_t tile = 0; tile < tiles_m * tiles_n; tile++) {
            const int64_t m0 = p->m_begin + tile % tiles_m * TILE_M, n0 = chunk + tile / tiles_m * TILE_N;
            gemm_tile(simd, params, plan, p, &packing, packed, scratch, m0, fg_min(TILE_M, p->m_end - m0), chunk, n0,
                      fg_min(TILE_N, chunk + packing.n - n0));
        }
    }
}

fg_status fg_cpu_gemm_workspace(const fg_gemm_params *params, const fg_queue *queue, size_t *bytes, fg_error *error) {
    (void)queue;
    const fg_simd *simd = fg_simd_get(error);
    if (simd == NULL) return error->code;
    const fg_gemm_shape shape = fg_gemm_shape_of(params);
    *bytes = fg_gemm_is_empty(&shape) ? 0 : fg_workspace_bytes(plan_gemm(simd, params).layout);
    return FG_OK;
}

fg_status fg_cpu_gemm(const fg_gemm_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const fg_simd *simd = fg_simd_get(error);
    if (simd == NULL) return error->code;
    const fg_gemm_shape shape = fg_gemm_shape_of(params);
    fg_status status = check_groups(params, &shape, error);
    if (status != FG_OK || fg_gemm_is_empty(&shape)) return status;
    const gemm_plan plan = plan_gemm(simd, params); /* of arrays that have elements: k fits memory */
    int threads = 0;
    const int64_t products = params->out.ndim == 3 ? shape.groups : 1;
    const int64_t grains = 1 + products * shape.m * shape.n * shape.k / THREAD_WORK;
    status = fg_workspace_threads(&params->workspace, plan.layout, grains, &threads, error);
    if (status != FG_OK) return status;
    const fg_plan chosen = {.family = FG_FAMILY_CPU,
                            .block_m = TILE_M,
                            .block_n = TILE_N,
                            .block_k = FG_BLOCK_K,
                            .split_k = 1,
                            .workspace_bytes = (int64_t)fg_workspace_bytes(plan.layout)};
    fg_print_plan(&chosen, "gemm", params->a.dtype, "m=%lld n=%lld k=%lld groups=%lld", (long long)shape.m,
                  (long long)shape.n, (long long)shape.k, (long long)shape.groups);

    int64_t cursor = 0;
#pragma omp parallel num_threads(threads)
    {
        FG_DEFAULT_FLOATS;
        product p;
        for (bool more = true; more;) {
            /* One reads it for all, which must not see different ones. */
#pragma omp single copyprivate(p, more)
            {
                more = next_product(params, &shape, &cursor, &p);
                p = within(params, &shape, p);
            }
            if (more) multiply(simd, params, &plan, &p);
        }
    }
    return FG_OK;
}
