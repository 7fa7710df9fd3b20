/*
 * Depthwise convolution: forward, input gradient and weight gradient. Bound by memory: rows are gathered, multiplied
 * channel by channel in float32 and added in the order of offsets.
 *
 * The weight is laid out once as (V, Co) float32. A thread works on an output row; of the weight gradient, on an
 * offset, whose sums over all rows are float64.
 */
#include <string.h>

#include "../floats.h"
#include "activation.h"
#include "backend.h"
#include "pairs.h"
#include "simd.h"

typedef struct {
    const fg_tensor *source, *weight, *map, *out, *workspace;
    const fg_tensor *bias, *residual; /* NULL or absent for none */
    fg_activation activation;
    int64_t fan_in, fan_out; /* source channels of an output channel, output channels of a source channel: one is 1 */
    bool mirrored;           /* offset v reads map row V - 1 - v */
} depthwise;

/* Shared: the weight. Private: sums of a row, a source row, a row of the residual. */
static fg_workspace_layout plan_workspace(int64_t volume, int64_t co, int64_t in, int64_t out) {
    return (fg_workspace_layout){fg_workspace_part(volume * co, sizeof(float)),
                                 fg_workspace_part(in, sizeof(float)) + 2 * fg_workspace_part(out, sizeof(float))};
}

/* (Co, V) -> (V, Co) */
static void lay_out_weight(const fg_simd *simd, const fg_tensor *weight, float *to) {
    const int64_t co = weight->shape[0], volume = weight->shape[1];
    float row[512]; /* more than an offset's volume */
    for (int64_t o = 0; o < co; o++) {
        simd->to_float[weight->dtype](row, fg_row(weight, o), volume);
        for (int64_t v = 0; v < volume; v++) to[v * co + o] = row[v];
    }
}

/* sums[c] += sum over the channels of c: weight * x. */
static void add_offset(const depthwise *d, const float *weight, const float *x, float *sums) {
    const int64_t channels = d->out->shape[1];
    if (d->fan_in == 1 && d->fan_out == 1) {
        for (int64_t c = 0; c < channels; c++) sums[c] += weight[c] * x[c];
    } else if (d->fan_in == 1) {
        for (int64_t c = 0; c < channels; c++) sums[c] += weight[c] * x[c / d->fan_out];
    } else {
        for (int64_t c = 0; c < channels; c++)
            for (int64_t j = c * d->fan_in; j < (c + 1) * d->fan_in; j++) sums[c] += weight[j] * x[j];
    }
}

/* Output row m; false when the map is invalid. */
static bool gather_row(const fg_simd *simd, const depthwise *d, const float *weight, float *scratch, int64_t m) {
    const int64_t volume = d->map->shape[0], rows = d->map->shape[1], channels = d->out->shape[1];
    const int64_t in = d->source->shape[1], co = d->weight->shape[0];
    const int32_t *map = d->map->data;
    float *sums = scratch, *x = scratch + fg_workspace_part(channels, sizeof(float)) / sizeof(float);
    if (d->bias != NULL && d->bias->present)
        simd->to_float[d->bias->dtype](sums, d->bias->data, channels);
    else
        memset(sums, 0, (size_t)channels * sizeof(float));
    for (int64_t v = 0; v < volume; v++) {
        const int32_t row = map[(d->mirrored ? volume - 1 - v : v) * rows + m];
        if (row < -1 || row >= d->source->shape[0]) return false;
        if (row < 0) continue;
        simd->to_float[d->source->dtype](x, fg_row(d->source, row), in);
        add_offset(d, weight + v * co, x, sums);
    }
    if (d->residual != NULL && d->residual->present) {
        float *addend = x + fg_workspace_part(in, sizeof(float)) / sizeof(float);
        simd->to_float[d->residual->dtype](addend, fg_row(d->residual, m), channels);
        for (int64_t c = 0; c < channels; c++) sums[c] += addend[c];
    }
    fg_activate(sums, channels, d->activation);
    simd->from_float[d->out->dtype](fg_row(d->out, m), sums, channels);
    return true;
}

static fg_status run_gather(const depthwise *d, fg_error *error) {
    const fg_simd *simd = fg_simd_get(error);
    if (simd == NULL) return error->code;
    const int64_t rows = d->out->shape[0], channels = d->out->shape[1];
    if (rows == 0 || channels == 0) return FG_OK;
    const fg_workspace_layout layout =
        plan_workspace(d->map->shape[0], d->weight->shape[0], d->source->shape[1], channels);
    int threads = 0;
    const fg_status status = fg_workspace_threads(d->workspace, layout, rows, &threads, error);
    if (status != FG_OK) return status;
    float *weight = d->workspace->data;
    lay_out_weight(simd, d->weight, weight);
    bool valid = true;
#pragma omp parallel num_threads(threads) reduction(&& : valid)
    {
        FG_DEFAULT_FLOATS;
        float *scratch = fg_workspace_private(d->workspace, layout);
#pragma omp for schedule(dynamic, 64)
        for (int64_t m = 0; m < rows; m++) valid = gather_row(simd, d, weight, scratch, m) && valid;
    }
    return valid ? FG_OK : fg_report_map(d->map, d->source->shape[0], error);
}

fg_status fg_cpu_depthwise_forward_workspace(const fg_depthwise_forward_params *params, const fg_queue *queue,
                                             size_t *bytes, fg_error *error) {
    (void)queue, (void)error;
    *bytes = fg_workspace_bytes(
        plan_workspace(params->map.shape[0], params->weight.shape[0], params->feats.shape[1], params->out.shape[1]));
    return FG_OK;
}

fg_status fg_cpu_depthwise_forward(const fg_depthwise_forward_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const int64_t in = params->feats.shape[1];
    const depthwise d = {
        .source = &params->feats,
        .weight = &params->weight,
        .bias = &params->bias,
        .residual = &params->residual,
        .activation = params->activation,
        .map = &params->map,
        .out = &params->out,
        .workspace = &params->workspace,
        .fan_in = 1,
        .fan_out = in > 0 ? params->out.shape[1] / in : 1,
    };
    return run_gather(&d, error);
}

fg_status fg_cpu_depthwise_dgrad_workspace(const fg_depthwise_dgrad_params *params, const fg_queue *queue,
                                           size_t *bytes, fg_error *error) {
    (void)queue, (void)error;
    *bytes = fg_workspace_bytes(plan_workspace(params->map.shape[0], params->weight.shape[0], params->grad_out.shape[1],
                                               params->grad_feats.shape[1]));
    return FG_OK;
}

fg_status fg_cpu_depthwise_dgrad(const fg_depthwise_dgrad_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const int64_t in = params->grad_feats.shape[1];
    const depthwise d = {
        .source = &params->grad_out,
        .weight = &params->weight,
        .map = &params->map,
        .out = &params->grad_feats,
        .workspace = &params->workspace,
        .fan_in = in > 0 ? params->grad_out.shape[1] / in : 1,
        .fan_out = 1,
        .mirrored = params->mirrored,
    };
    return run_gather(&d, error);
}

/* ---- weight gradient ---- */

/* Private: sums of an offset, a row of each operand. */
static fg_workspace_layout plan_wgrad_workspace(const fg_depthwise_wgrad_params *p) {
    const int64_t co = p->grad_out.shape[1];
    return (fg_workspace_layout){0, fg_workspace_part(co, sizeof(double)) + fg_workspace_part(co, sizeof(float)) +
                                        fg_workspace_part(p->feats.shape[1], sizeof(float))};
}

static bool offset_gradient(const fg_simd *simd, const fg_depthwise_wgrad_params *p, char *scratch, int64_t v) {
    const int64_t rows = p->grad_out.shape[0], co = p->grad_out.shape[1], ci = p->feats.shape[1];
    const int64_t multiplier = ci > 0 ? co / ci : 1, volume = p->map.shape[0];
    const int32_t *map = (const int32_t *)p->map.data + v * rows;
    double *sums = (double *)scratch;
    float *grad = (float *)(scratch + fg_workspace_part(co, sizeof(double)));
    float *x = grad + fg_workspace_part(co, sizeof(float)) / sizeof(float);
    memset(sums, 0, (size_t)co * sizeof(double));
    for (int64_t m = 0; m < rows; m++) {
        const int32_t row = map[m];
        if (row < -1 || row >= p->feats.shape[0]) return false;
        if (row < 0) continue;
        simd->to_float[p->grad_out.dtype](grad, fg_row(&p->grad_out, m), co);
        simd->to_float[p->feats.dtype](x, fg_row(&p->feats, row), ci);
        for (int64_t o = 0; o < co; o++) sums[o] += (double)(grad[o] * x[o / multiplier]);
    }
    const size_t item = fg_dtype_size(p->grad_weight.dtype);
    for (int64_t o = 0; o < co; o++) {
        const float sum = (float)sums[o];
        simd->from_float[p->grad_weight.dtype]((char *)p->grad_weight.data + (size_t)(o * volume + v) * item, &sum, 1);
    }
    return true;
}

fg_status fg_cpu_depthwise_wgrad_workspace(const fg_depthwise_wgrad_params *params, const fg_queue *queue,
                                           size_t *bytes, fg_error *error) {
    (void)queue, (void)error;
    *bytes = fg_workspace_bytes(plan_wgrad_workspace(params));
    return FG_OK;
}

fg_status fg_cpu_depthwise_wgrad(const fg_depthwise_wgrad_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const fg_simd *simd = fg_simd_get(error);
    if (simd == NULL) return error->code;
    const int64_t volume = params->map.shape[0];
    if (params->grad_out.shape[1] == 0) return FG_OK;
    const fg_workspace_layout layout = plan_wgrad_workspace(params);
    int threads = 0;
    const fg_status status = fg_workspace_threads(&params->workspace, layout, volume, &threads, error);
    if (status != FG_OK) return status;
    bool valid = true;
#pragma omp parallel num_threads(threads) reduction(&& : valid)
    {
        FG_DEFAULT_FLOATS;
        char *scratch = fg_workspace_private(&params->workspace, layout);
#pragma omp for schedule(dynamic)
        for (int64_t v = 0; v < volume; v++) valid = offset_gradient(simd, params, scratch, v) && valid;
    }
    return valid ? FG_OK : fg_report_map(&params->map, params->feats.shape[0], error);
}
