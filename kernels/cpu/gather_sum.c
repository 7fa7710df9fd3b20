/*
 * Weighted sums of gathered rows.
 */
#include "gather_sum.h"

#include <string.h>

#include "../floats.h"
#include "backend.h"
#include "pairs.h"

int64_t fg_sum_rows(const fg_simd *simd, const fg_tensor *feats, const int32_t *indices, const float *weights,
                    int64_t terms, float *sums, float *widened) {
    const int64_t channels = feats->shape[1];
    int64_t wrong = terms;
    if (channels > 0) memset(sums, 0, (size_t)channels * sizeof(float));
    for (int64_t k = 0; k < terms; k++) {
        if (indices[k] < -1 || indices[k] >= feats->shape[0]) wrong = fg_min(wrong, k);
        if (indices[k] < 0 || indices[k] >= feats->shape[0]) continue;
        const float weight = weights ? weights[k] : 1.0f;
        simd->to_float[feats->dtype](widened, fg_row(feats, indices[k]), channels);
        for (int64_t c = 0; c < channels; c++) sums[c] += weight * widened[c];
    }
    return wrong;
}

/* Private: the sums of one output row, a widened row. */
static fg_workspace_layout plan_workspace(const fg_gather_sum_params *params) {
    return (fg_workspace_layout){0, 2 * fg_workspace_part(params->feats.shape[1], sizeof(float))};
}

fg_status fg_cpu_gather_sum_workspace(const fg_gather_sum_params *params, const fg_queue *queue, size_t *bytes,
                                      fg_error *error) {
    (void)queue, (void)error;
    *bytes = fg_workspace_bytes(plan_workspace(params));
    return FG_OK;
}

fg_status fg_cpu_gather_sum(const fg_gather_sum_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const fg_simd *simd = fg_simd_get(error);
    if (simd == NULL) return error->code;
    const fg_tensor *feats = &params->feats;
    const int64_t rows = params->out.shape[0], channels = feats->shape[1], terms = params->indices.shape[1];
    const fg_workspace_layout layout = plan_workspace(params);
    int threads = 0;
    const fg_status status = fg_workspace_threads(&params->workspace, layout, rows, &threads, error);
    if (status != FG_OK) return status;

    const int32_t *indices = params->indices.data;
    const float *weights = params->weights.present ? params->weights.data : NULL;
    int64_t wrong = rows * terms; /* the first entry that is no row */
#pragma omp parallel num_threads(threads) reduction(min : wrong)
    {
        FG_DEFAULT_FLOATS;
#pragma omp for
        for (int64_t q = 0; q < rows; q++) {
            float *sums = fg_workspace_private(&params->workspace, layout);
            float *widened = sums + layout.per_thread / sizeof(float) / 2;
            const float *weights_of_row = weights ? weights + q * terms : NULL;
            const int64_t k = fg_sum_rows(simd, feats, indices + q * terms, weights_of_row, terms, sums, widened);
            if (k < terms) wrong = fg_min(wrong, q * terms + k);
            simd->from_float[feats->dtype](fg_row(&params->out, q), sums, channels);
        }
    }
    if (wrong == rows * terms) return FG_OK;
    return fg_report_entry("indices", &params->indices, wrong, feats->shape[0], error);
}
