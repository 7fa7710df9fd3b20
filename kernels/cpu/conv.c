/*
 * Forward and input gradient of a sparse convolution: one kernel that gathers rows, over two views of the weight.
 *
 *     out[m, :] = activation(scale * sum_v source[map[v, m], :] . W_v + bias + residual[m, :])
 *
 *     forward: W_v = weight[:, v, :]^T  (Ci, Co)        dgrad: W_v = weight[:, v, :]  (Co, Ci), and the sum alone
 *
 * float8 has scales: of the output channels, `scale`, or of all; of the rows of source, which are widened with theirs.
 *
 * The weight is packed once, as float32. A thread takes a tile of TILE output rows, whose float32 sums stay in its
 * cache; for each offset it lists the rows that have a neighbour there, so that every multiply-add is a useful one,
 * and multiplies the listed rows by the packed W_v. Each output row is summed in the order of v by one thread: the
 * result does not depend on how many there are. Narrow rows are widened into scratch once per offset.
 */
#include <string.h>

#include "../channel_groups.h"
#include "../floats.h"
#include "../plan.h"
#include "activation.h"
#include "backend.h"
#include "pairs.h"
#include "simd.h"
#include "tile.h"

enum { TILE = 128 };

typedef struct {
    const char *name;
    const fg_tensor *source, *map, *out, *workspace;
    const fg_tensor *bias, *residual, *scale_source, *scale_weight, *scale_out; /* NULL or absent for none */
    fg_activation activation;
    fg_operand weight; /* W_0; W_v starts v * v_stride elements later */
    int64_t v_stride;
    bool mirrored; /* offset v reads map row V - 1 - v */
} gather_conv;

typedef struct {
    fg_packing packing; /* of one W_v */
    fg_workspace_layout layout;
} gather_plan;

/* Shared: packed weight, bias, scales of the columns. Private: sums (TILE, padded n), widened rows (TILE, block_k), a
 * row of the residual. */
static gather_plan plan_gather(const fg_simd *simd, int64_t volume, int64_t k, int64_t n) {
    const fg_packing packing = fg_packing_of(simd, k, n);
    const size_t shared = fg_workspace_part(volume * k * packing.padded_n, sizeof(float)) +
                          2 * fg_workspace_part(packing.padded_n, sizeof(float));
    const size_t per_thread = fg_workspace_part(TILE * packing.padded_n, sizeof(float)) +
                              fg_workspace_part(TILE * packing.block_k, sizeof(float)) +
                              fg_workspace_part(packing.padded_n, sizeof(float));
    return (gather_plan){packing, {shared, per_thread}};
}

static bool is_given(const fg_tensor *tensor) { return tensor != NULL && tensor->present; }

/* k elements of a row of source from k_begin on, times the row's scale. */
static void widen(const fg_simd *simd, const gather_conv *conv, int64_t row, int64_t k_begin, int64_t k, float *to) {
    const fg_tensor *source = conv->source, *scales = conv->scale_source;
    simd->to_float[source->dtype](to, fg_row(source, row) + k_begin * (int64_t)fg_dtype_size(source->dtype), k);
    if (!is_given(scales)) return;
    const float scale = ((const float *)scales->data)[scales->ndim == 0 ? 0 : row];
    for (int64_t p = 0; p < k; p++) to[p] *= scale;
}

/* Output rows [begin, begin + rows); false when the map is invalid. */
static bool gather_tile(const fg_simd *simd, const gather_conv *conv, const gather_plan *plan, const float *packed,
                        const float *bias, const float *scale, float *scratch, int64_t begin, int64_t rows) {
    const fg_packing *packing = &plan->packing;
    const fg_tensor *source = conv->source, *residual = conv->residual, *out = conv->out;
    const int64_t volume = conv->map->shape[0], map_rows = conv->map->shape[1], n = packing->padded_n;
    float *sums = scratch, *widened = scratch + fg_workspace_part(TILE * n, sizeof(float)) / sizeof(float);
    float *addend = widened + fg_workspace_part(TILE * packing->block_k, sizeof(float)) / sizeof(float);
    int32_t row[TILE], neighbor[TILE];
    const float *a[TILE];
    float *c[TILE];

    memset(sums, 0, (size_t)(rows * n) * sizeof(float));
    for (int64_t v = 0; v < volume; v++) {
        const int64_t map_row = conv->mirrored ? volume - 1 - v : v;
        const int32_t *map = (const int32_t *)conv->map->data + map_row * map_rows + begin;
        const int64_t count = fg_list_pairs(map, rows, source->shape[0], row, neighbor);
        if (count < 0) return false;
        for (int64_t i = 0; i < count; i++) c[i] = sums + row[i] * n;
        for (int64_t block = 0; block < packing->blocks; block++) {
            const int64_t k_begin = block * packing->block_k, k = fg_block_rows(packing, block);
            for (int64_t i = 0; i < count; i++) {
                const bool as_is = source->dtype == FG_FLOAT32;
                a[i] = as_is ? (const float *)fg_row(source, neighbor[i]) + k_begin : widened + i * k;
                if (!as_is) widen(simd, conv, neighbor[i], k_begin, k, widened + i * k);
            }
            fg_multiply_block(simd, packing, packed + v * packing->k * n, block, 0, n, count, a, c);
        }
    }
    for (int64_t i = 0; i < rows; i++) {
        float *sum = sums + i * n;
        for (int64_t j = 0; j < packing->n; j++) sum[j] = sum[j] * scale[j] + bias[j];
        if (is_given(residual)) {
            simd->to_float[residual->dtype](addend, fg_row(residual, begin + i), packing->n);
            for (int64_t j = 0; j < packing->n; j++) sum[j] += addend[j];
        }
        fg_activate(sum, packing->n, conv->activation);
        if (is_given(conv->scale_out)) {
            const float scale_out = *(const float *)conv->scale_out->data;
            for (int64_t j = 0; j < packing->n; j++) sum[j] /= scale_out;
        }
        simd->from_float[out->dtype](fg_row(out, begin + i), sum, packing->n);
    }
    return true;
}

static fg_status run_gather(const gather_conv *conv, fg_error *error) {
    const int64_t volume = conv->map->shape[0], rows = conv->out->shape[0];
    if (rows == 0 || conv->out->shape[1] == 0) return FG_OK;
    const fg_simd *simd = fg_simd_get(error);
    if (simd == NULL) return error->code;
    const gather_plan plan = plan_gather(simd, volume, conv->source->shape[1], conv->out->shape[1]);
    const fg_packing *packing = &plan.packing;
    const int64_t tiles = fg_ceil_div(rows, TILE);
    int threads = 0;
    const fg_status status = fg_workspace_threads(conv->workspace, plan.layout, tiles, &threads, error);
    if (status != FG_OK) return status;
    const fg_plan chosen = {.family = FG_FAMILY_CPU,
                            .block_m = TILE,
                            .block_n = (int32_t)packing->padded_n,
                            .block_k = (int32_t)packing->block_k,
                            .split_k = 1,
                            .workspace_bytes = (int64_t)fg_workspace_bytes(plan.layout)};
    fg_print_plan(&chosen, conv->name, conv->source->dtype, "rows=%lld ci=%lld co=%lld v=%lld", (long long)rows,
                  (long long)packing->k, (long long)packing->n, (long long)volume);

    float *packed = conv->workspace->data;
    float *bias = packed + fg_workspace_part(volume * packing->k * packing->padded_n, sizeof(float)) / sizeof(float);
    float *scale = bias + fg_workspace_part(packing->padded_n, sizeof(float)) / sizeof(float);
    memset(bias, 0, (size_t)packing->padded_n * sizeof(float));
    if (is_given(conv->bias)) simd->to_float[conv->bias->dtype](bias, conv->bias->data, packing->n);
    const fg_tensor *scales = conv->scale_weight;
    for (int64_t j = 0; j < packing->n; j++)
        scale[j] = is_given(scales) ? ((const float *)scales->data)[scales->ndim == 0 ? 0 : j] : 1.0f;

    bool valid = true;
#pragma omp parallel num_threads(threads) reduction(&& : valid)
    {
        FG_DEFAULT_FLOATS;
#pragma omp for collapse(3)
        for (int64_t v = 0; v < volume; v++)
            for (int64_t block = 0; block < packing->blocks; block++)
                for (int64_t panel = 0; panel < packing->panels; panel++) {
                    fg_operand weight = conv->weight;
                    weight.data = (const char *)weight.data + v * conv->v_stride * (int64_t)fg_dtype_size(weight.dtype);
                    fg_pack_panel(simd, packing, &weight, block, panel, packed + v * packing->k * packing->padded_n);
                }
        float *scratch = fg_workspace_private(conv->workspace, plan.layout);
#pragma omp for schedule(dynamic) nowait
        for (int64_t tile = 0; tile < tiles; tile++)
            valid = gather_tile(simd, conv, &plan, packed, bias, scale, scratch, tile * TILE,
                                fg_min(TILE, rows - tile * TILE)) &&
                    valid;
    }
    return valid ? FG_OK : fg_report_map(conv->map, conv->source->shape[0], error);
}

static fg_status gather_workspace(int64_t volume, int64_t rows, int64_t k, int64_t n, size_t *bytes, fg_error *error) {
    const fg_simd *simd = fg_simd_get(error);
    if (simd == NULL) return error->code;
    *bytes = rows > 0 && n > 0 ? fg_workspace_bytes(plan_gather(simd, volume, k, n).layout) : 0;
    return FG_OK;
}

fg_status fg_cpu_conv_forward_workspace(const fg_conv_forward_params *params, const fg_queue *queue, size_t *bytes,
                                        fg_error *error) {
    (void)queue;
    return gather_workspace(params->map.shape[0], params->out.shape[0], params->feats.shape[1] / params->groups,
                            params->out.shape[1] / params->groups, bytes, error);
}

static fg_status forward_group(const fg_conv_forward_params *params, fg_error *error) {
    const int64_t volume = params->weight.shape[1], ci = params->weight.shape[2];
    const gather_conv conv = {
        .name = "conv_forward",
        .source = &params->feats,
        .bias = &params->bias,
        .residual = &params->residual,
        .scale_source = &params->scale_feats,
        .scale_weight = &params->scale_weight,
        .scale_out = &params->scale_out,
        .activation = params->activation,
        .map = &params->map,
        .out = &params->out,
        .workspace = &params->workspace,
        .weight = {params->weight.data, params->weight.dtype, .k_stride = 1, .n_stride = volume * ci},
        .v_stride = ci,
        .mirrored = false,
    };
    return run_gather(&conv, error);
}

fg_status fg_cpu_conv_forward(const fg_conv_forward_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    fg_status status = FG_OK;
    for (int64_t group = 0; group < params->groups && status == FG_OK; group++) {
        const fg_conv_forward_params part = fg_conv_forward_group(params, group);
        status = forward_group(&part, error);
    }
    return status;
}

fg_status fg_cpu_conv_dgrad_workspace(const fg_conv_dgrad_params *params, const fg_queue *queue, size_t *bytes,
                                      fg_error *error) {
    (void)queue;
    return gather_workspace(params->map.shape[0], params->grad_feats.shape[0],
                            params->grad_out.shape[1] / params->groups, params->grad_feats.shape[1] / params->groups,
                            bytes, error);
}

static fg_status dgrad_group(const fg_conv_dgrad_params *params, fg_error *error) {
    const int64_t volume = params->weight.shape[1], ci = params->weight.shape[2];
    const gather_conv conv = {
        .name = "conv_dgrad",
        .source = &params->grad_out,
        .map = &params->map,
        .out = &params->grad_feats,
        .workspace = &params->workspace,
        .weight = {params->weight.data, params->weight.dtype, .k_stride = volume * ci, .n_stride = 1},
        .v_stride = ci,
        .mirrored = params->mirrored,
    };
    return run_gather(&conv, error);
}

fg_status fg_cpu_conv_dgrad(const fg_conv_dgrad_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    fg_status status = FG_OK;
    for (int64_t group = 0; group < params->groups && status == FG_OK; group++) {
        const fg_conv_dgrad_params part = fg_conv_dgrad_group(params, group);
        status = dgrad_group(&part, error);
    }
    return status;
}
