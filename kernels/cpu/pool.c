/*
 * Pooling over a neighbour map: the maximum, mean or sum of the rows that an output row reads, and its gradient, which
 * reads the map the other way round.
 *
 * One thread works on an output row, a block of channels at a time in float32, offset by offset in rising order.
 */
#include <math.h>
#include <string.h>

#include "../floats.h"
#include "backend.h"
#include "pairs.h"
#include "simd.h"

enum { BLOCK = 512 };

static void widen(const fg_simd *simd, const fg_tensor *tensor, int64_t row, int64_t channel, int64_t n, float *x) {
    const char *from = fg_row(tensor, row) + channel * (int64_t)fg_dtype_size(tensor->dtype);
    simd->to_float[tensor->dtype](x, from, n);
}

static void narrow(const fg_simd *simd, const fg_tensor *tensor, int64_t row, int64_t channel, int64_t n,
                   const float *x) {
    char *to = fg_row(tensor, row) + channel * (int64_t)fg_dtype_size(tensor->dtype);
    simd->from_float[tensor->dtype](to, x, n);
}

static void take_larger(const float *x, int32_t row, int64_t n, float *best, int32_t *argmax) {
    for (int64_t i = 0; i < n; i++) {
        const bool takes = x[i] > best[i] || (isnan(x[i]) && !isnan(best[i]));
        best[i] = takes ? x[i] : best[i];
        argmax[i] = takes ? row : argmax[i];
    }
}

/* Rows of a map that are neither -1 nor a row of `rows` make it invalid. */
static bool valid_entries(const int32_t *map, int64_t volume, int64_t columns, int64_t column, int64_t rows) {
    bool valid = true;
    for (int64_t v = 0; v < volume; v++) valid &= map[v * columns + column] >= -1 && map[v * columns + column] < rows;
    return valid;
}

static void pool_row(const fg_simd *simd, const fg_pool_params *p, int64_t m) {
    const int64_t volume = p->map.shape[0], columns = p->map.shape[1], channels = p->feats.shape[1];
    const int32_t *map = (const int32_t *)p->map.data + m;
    int32_t count = 0;
    for (int64_t v = 0; v < volume; v++) count += map[v * columns] >= 0;
    for (int64_t channel = 0; channel < channels; channel += BLOCK) {
        const int64_t n = fg_min(BLOCK, channels - channel);
        float result[BLOCK], x[BLOCK];
        int32_t argmax[BLOCK];
        bool first = true;
        for (int64_t v = 0; v < volume; v++) {
            const int32_t row = map[v * columns];
            if (row < 0 || row >= p->feats.shape[0]) continue; /* another thread may have written it since */
            widen(simd, &p->feats, row, channel, n, first ? result : x);
            if (first)
                for (int64_t i = 0; i < n; i++) argmax[i] = row;
            else if (p->mode == FG_POOL_MAX)
                take_larger(x, row, n, result, argmax);
            else
                for (int64_t i = 0; i < n; i++) result[i] += x[i];
            first = false;
        }
        if (first) {
            for (int64_t i = 0; i < n; i++) result[i] = 0, argmax[i] = -1;
        } else if (p->mode == FG_POOL_MEAN) {
            for (int64_t i = 0; i < n; i++) result[i] /= (float)count;
        }
        narrow(simd, &p->out, m, channel, n, result);
        if (p->argmax.present)
            memcpy((int32_t *)p->argmax.data + m * channels + channel, argmax, (size_t)n * sizeof(int32_t));
    }
    if (p->count.present) ((int32_t *)p->count.data)[m] = count;
}

static int64_t rows_of_mean(const fg_pool_backward_params *p, int64_t m) {
    const int32_t *count = p->count.data;
    return p->count.shape[0] > p->grad_out.shape[0] ? (int64_t)count[m + 1] - count[m] : count[m];
}

static void pool_gradient_row(const fg_simd *simd, const fg_pool_backward_params *p, int64_t row) {
    const int64_t volume = p->map.shape[0], columns = p->map.shape[1], channels = p->grad_out.shape[1];
    const int32_t *map = (const int32_t *)p->map.data + row;
    for (int64_t channel = 0; channel < channels; channel += BLOCK) {
        const int64_t n = fg_min(BLOCK, channels - channel);
        float sum[BLOCK] = {0}, grad[BLOCK];
        for (int64_t v = 0; v < volume; v++) {
            const int32_t m = map[v * columns];
            if (m < 0 || m >= p->grad_out.shape[0]) continue; /* another thread may have written it since */
            widen(simd, &p->grad_out, m, channel, n, grad);
            if (p->mode == FG_POOL_MAX) {
                const int32_t *argmax = (const int32_t *)p->argmax.data + m * channels + channel;
                for (int64_t i = 0; i < n; i++) sum[i] += argmax[i] == row ? grad[i] : 0;
            } else if (p->mode == FG_POOL_MEAN) {
                for (int64_t i = 0; i < n; i++) sum[i] += grad[i] / (float)rows_of_mean(p, m);
            } else {
                for (int64_t i = 0; i < n; i++) sum[i] += grad[i];
            }
        }
        narrow(simd, &p->grad_feats, row, channel, n, sum);
    }
}

fg_status fg_cpu_pool(const fg_pool_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const fg_simd *simd = fg_simd_get(error);
    if (simd == NULL) return error->code;
    const int64_t rows = params->out.shape[0], sources = params->feats.shape[0];
    bool valid = true;
#pragma omp parallel reduction(&& : valid)
    {
        FG_DEFAULT_FLOATS;
#pragma omp for schedule(dynamic, 64)
        for (int64_t m = 0; m < rows; m++) {
            const bool right = valid_entries(params->map.data, params->map.shape[0], rows, m, sources);
            if (right) pool_row(simd, params, m);
            valid = valid && right;
        }
    }
    return valid ? FG_OK : fg_report_map(&params->map, sources, error);
}

fg_status fg_cpu_pool_backward(const fg_pool_backward_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const fg_simd *simd = fg_simd_get(error);
    if (simd == NULL) return error->code;
    const int64_t rows = params->grad_feats.shape[0], sources = params->grad_out.shape[0];
    bool valid = true;
#pragma omp parallel reduction(&& : valid)
    {
        FG_DEFAULT_FLOATS;
#pragma omp for schedule(dynamic, 64)
        for (int64_t row = 0; row < rows; row++) {
            const bool right = valid_entries(params->map.data, params->map.shape[0], rows, row, sources);
            if (right) pool_gradient_row(simd, params, row);
            valid = valid && right;
        }
    }
    return valid ? FG_OK : fg_report_map(&params->map, sources, error);
}

/* ---- samples ---- */

fg_status fg_cpu_batch_indices(const fg_batch_indices_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const int32_t *coords = params->coords.data;
    int32_t *batch = params->batch.data;
    for (int64_t row = 0; row < params->coords.shape[0]; row++) {
        const int32_t sample = coords[4 * row];
        if (sample < 0 || sample >= params->samples)
            return fg_fail(error, FG_ERROR_VALUE, "coords: row %lld is of sample %d, expected 0 to %lld",
                           (long long)row, sample, (long long)params->samples - 1);
        batch[row] = sample;
    }
    return FG_OK;
}
