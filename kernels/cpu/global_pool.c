/*
 * Pooling of all voxels of a sample: the rows of each sample in order, then one maximum, mean or sum per sample and
 * channel, in float64 and so as good as exact.
 */
#include <math.h>
#include <string.h>

#include "backend.h"
#include "simd.h"

enum { BLOCK = 64 }; /* channels that a thread works on at a time */

/* ---- rows by sample ---- */

fg_status fg_cpu_batch_rows_workspace(const fg_batch_rows_params *params, const fg_queue *queue, size_t *bytes,
                                      fg_error *error) {
    (void)params, (void)queue, (void)error;
    *bytes = 0;
    return FG_OK;
}

/* A counting sort in place: bounds[b + 1] counts the rows of sample b, then says where they end. */
fg_status fg_cpu_batch_rows(const fg_batch_rows_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const int64_t n = params->coords.shape[0], samples = params->bounds.shape[0] - 1;
    const int32_t *coords = params->coords.data;
    int32_t *batch = params->batch.data, *order = params->order.data, *bounds = params->bounds.data;
    if (n > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "coords: expected at most %d rows for an int32 order, got %lld",
                       INT32_MAX, (long long)n);
    memset(bounds, 0, (size_t)(samples + 1) * sizeof(int32_t));
    for (int64_t row = 0; row < n; row++) {
        const int32_t sample = coords[4 * row];
        if (sample < 0 || sample >= samples)
            return fg_fail(error, FG_ERROR_VALUE, "coords: row %lld is of sample %d, expected 0 to %lld",
                           (long long)row, sample, (long long)samples - 1);
        batch[row] = sample;
        bounds[sample + 1]++;
    }
    for (int64_t sample = 0; sample < samples; sample++) bounds[sample + 1] += bounds[sample];
    for (int64_t row = n - 1; row >= 0; row--) order[--bounds[batch[row] + 1]] = (int32_t)row;
    /* Each bound but the first is now where its sample begins: one place too far. */
    for (int64_t sample = 0; sample < samples; sample++) bounds[sample] = bounds[sample + 1];
    bounds[samples] = (int32_t)n;
    return FG_OK;
}

/* ---- pooling ---- */

/* Channels [channel, channel + n) of one sample. */
static void pool_sample(const fg_simd *simd, const fg_global_pool_params *p, int64_t sample, int64_t channel,
                        int64_t n) {
    const int32_t *bounds = p->bounds.data, *order = p->order.data;
    const int64_t item = (int64_t)fg_dtype_size(p->feats.dtype);
    double sum[BLOCK] = {0};
    float best[BLOCK] = {0}, x[BLOCK];
    int32_t chosen[BLOCK];
    for (int64_t i = 0; i < n; i++) chosen[i] = -1;
    for (int32_t at = bounds[sample]; at < bounds[sample + 1]; at++) {
        simd->to_float[p->feats.dtype](x, fg_row(&p->feats, order[at]) + channel * item, n);
        for (int64_t i = 0; i < n; i++) {
            const bool takes = chosen[i] < 0 || x[i] > best[i] || (isnan(x[i]) && !isnan(best[i]));
            best[i] = takes ? x[i] : best[i];
            chosen[i] = takes ? order[at] : chosen[i];
            sum[i] += (double)x[i];
        }
    }
    const int32_t count = bounds[sample + 1] - bounds[sample];
    if (p->mode != FG_POOL_MAX)
        for (int64_t i = 0; i < n; i++)
            best[i] = (float)(p->mode == FG_POOL_SUM || count == 0 ? sum[i] : sum[i] / count);
    simd->from_float[p->out.dtype](fg_row(&p->out, sample) + channel * item, best, n);
    if (p->chosen.present)
        memcpy((int32_t *)p->chosen.data + sample * p->feats.shape[1] + channel, chosen, (size_t)n * sizeof(int32_t));
    if (p->count.present && channel == 0) ((int32_t *)p->count.data)[sample] = count;
}

fg_status fg_cpu_global_pool_workspace(const fg_global_pool_params *params, const fg_queue *queue, size_t *bytes,
                                       fg_error *error) {
    (void)params, (void)queue, (void)error;
    *bytes = 0;
    return FG_OK;
}

/* The bounds and rows that batch_rows gives. */
static fg_status check_rows(const fg_global_pool_params *p, fg_error *error) {
    const int32_t *bounds = p->bounds.data, *order = p->order.data;
    const int64_t n = p->feats.shape[0], samples = p->out.shape[0];
    for (int64_t sample = 0; sample <= samples; sample++) {
        if (bounds[sample] < (sample == 0 ? 0 : bounds[sample - 1]) || bounds[sample] > n)
            return fg_fail(error, FG_ERROR_VALUE, "bounds: expected to rise from 0 to at most %lld, entry %lld is %d",
                           (long long)n, (long long)sample, bounds[sample]);
    }
    for (int64_t at = 0; at < n; at++) {
        if (order[at] < 0 || order[at] >= n)
            return fg_fail(error, FG_ERROR_VALUE, "order: entry %lld is %d, expected a row below %lld", (long long)at,
                           order[at], (long long)n);
    }
    return FG_OK;
}

fg_status fg_cpu_global_pool(const fg_global_pool_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const fg_simd *simd = fg_simd_get(error);
    if (simd == NULL) return error->code;
    const fg_status status = check_rows(params, error);
    if (status != FG_OK) return status;
    const int64_t samples = params->out.shape[0], channels = params->out.shape[1];
    const int64_t blocks = fg_max(fg_ceil_div(channels, BLOCK), 1); /* without channels, the counts */
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t sample = 0; sample < samples; sample++)
        for (int64_t block = 0; block < blocks; block++)
            pool_sample(simd, params, sample, block * BLOCK, fg_min(BLOCK, channels - block * BLOCK));
    return FG_OK;
}
