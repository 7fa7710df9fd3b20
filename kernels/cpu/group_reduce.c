/*
 * Entries of an index list grouped by the row that they name, and sums and maxima over such groups. One thread reduces
 * a group, in the order of its entries; sums of many entries in parts, since each addition to a large float32 sum rounds
 * to a digit of that.
 */
#include <math.h>
#include <string.h>

#include "../floats.h"
#include "pairs.h"
#include "radix_sort.h"
#include "simd.h"

/* ---- groups ---- */

fg_status fg_cpu_group_rows_workspace(const fg_group_rows_params *params, const fg_queue *queue, size_t *bytes,
                                      fg_error *error) {
    (void)queue, (void)error;
    *bytes = fg_workspace_bytes(fg_sort_workspace(params->order.shape[0]));
    return FG_OK;
}

static int bits_of(int64_t last) {
    int bits = 0;
    for (; last > 0; last /= 2) bits++;
    return bits;
}

fg_status fg_cpu_group_rows(const fg_group_rows_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const int64_t count = params->order.shape[0], rows = params->starts.shape[0] - 1;
    const int32_t *indices = params->indices.data;
    int32_t *order = params->order.data, *starts = params->starts.data;
    if (count == 0) {
        memset(starts, 0, (size_t)(rows + 1) * sizeof(int32_t));
        return FG_OK;
    }
    int threads = 0;
    const fg_status status = fg_workspace_threads(&params->workspace, fg_sort_workspace(count), count, &threads, error);
    if (status != FG_OK) return status;
    int64_t wrong = count; /* the first entry that is no row */
    fg_sort_entry *entries = fg_sort_entries(&params->workspace);
#pragma omp parallel for num_threads(threads) reduction(min : wrong)
    for (int64_t i = 0; i < count; i++) {
        if (indices[i] < -1 || indices[i] >= rows) wrong = fg_min(wrong, i);
        entries[i] = (fg_sort_entry){indices[i] < 0 ? (uint64_t)rows : (uint64_t)indices[i], i};
    }
    if (wrong < count) return fg_report_entry("indices", &params->indices, wrong, rows, error);
    const fg_sort_entry *sorted = fg_radix_sort(&params->workspace, count, bits_of(rows), threads);
    int64_t row = 0;
    for (int64_t i = 0; i < count; i++) {
        order[i] = (int32_t)sorted[i].row;
        while (row <= (int64_t)sorted[i].key) starts[row++] = (int32_t)i;
    }
    while (row <= rows) starts[row++] = (int32_t)count;
    return FG_OK;
}

/* ---- reduction ---- */

enum { PARTS = 4, MOST_OF_A_SUM = 512 };

/* Private: the values of one output row, those of a part of its entries, a widened row, the rows that maxima are of. */
static fg_workspace_layout plan_workspace(const fg_group_reduce_params *params) {
    return (fg_workspace_layout){0, PARTS * fg_workspace_part(params->src.shape[1], sizeof(float))};
}

fg_status fg_cpu_group_reduce_workspace(const fg_group_reduce_params *params, const fg_queue *queue, size_t *bytes,
                                        fg_error *error) {
    (void)queue, (void)error;
    *bytes = fg_workspace_bytes(plan_workspace(params));
    return FG_OK;
}

static void take_maxima(float *values, int32_t *rows, const float *row, float weight, int32_t source,
                        int64_t channels) {
    for (int64_t c = 0; c < channels; c++) {
        const float value = weight * row[c];
        if (rows[c] >= 0 && !(value > values[c]) && !(isnan(value) && !isnan(values[c]))) continue;
        values[c] = value;
        rows[c] = source;
    }
}

/* Adds what a part has come to, which begins anew. */
static void add_part(float *values, float *part, int64_t channels) {
    for (int64_t c = 0; c < channels; c++) {
        values[c] += part[c];
        part[c] = 0.0f;
    }
}

/* The first position of an order that does not fit its starts or its source, or -1. */
static int64_t first_wrong_start(const int32_t *starts, int64_t groups, int64_t count) {
    for (int64_t m = 0; m <= groups; m++)
        if (starts[m] < (m > 0 ? starts[m - 1] : 0) || starts[m] > count) return m;
    return -1;
}

fg_status fg_cpu_group_reduce(const fg_group_reduce_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const fg_simd *simd = fg_simd_get(error);
    if (simd == NULL) return error->code;
    const fg_tensor *src = &params->src;
    const int64_t groups = params->out.shape[0], channels = src->shape[1], count = params->order.shape[0];
    const int32_t *order = params->order.data, *starts = params->starts.data;
    const float *weights = params->weights.data;
    const bool maximum = params->mode == FG_POOL_MAX;
    if (groups == 0) return FG_OK;
    const int64_t wrong_start = first_wrong_start(starts, groups, count);
    if (wrong_start >= 0)
        return fg_fail(error, FG_ERROR_VALUE, "starts: entry %lld is %d, expected ascending numbers up to %lld",
                       (long long)wrong_start, starts[wrong_start], (long long)count);
    const int64_t terms = count > 0 ? count / src->shape[0] : 1;
    const fg_workspace_layout layout = plan_workspace(params);
    int threads = 0;
    const fg_status status = fg_workspace_threads(&params->workspace, layout, groups, &threads, error);
    if (status != FG_OK) return status;

    int64_t wrong = count; /* the first entry of order that is no position */
#pragma omp parallel num_threads(threads) reduction(min : wrong)
    {
        FG_DEFAULT_FLOATS;
#pragma omp for schedule(dynamic, 64)
        for (int64_t m = 0; m < groups; m++) {
            const size_t stride = layout.per_thread / sizeof(float) / PARTS;
            float *values = fg_workspace_private(&params->workspace, layout);
            float *part = values + stride, *row = part + stride;
            int32_t *rows = (int32_t *)(row + stride);
            for (int64_t c = 0; c < channels; c++) {
                values[c] = part[c] = 0.0f;
                rows[c] = -1;
            }
            const int64_t begin = starts[m], end = fg_min(starts[m + 1], count); /* others may have written since */
            for (int64_t i = fg_max(begin, 0); i < end; i++) {
                const int32_t entry = order[i];
                if (entry < 0 || entry >= count) {
                    wrong = fg_min(wrong, i);
                    continue;
                }
                const float weight = params->weights.present ? weights[entry] : 1.0f;
                const int64_t source = entry / terms;
                simd->to_float[src->dtype](row, fg_row(src, source), channels);
                if (maximum) {
                    take_maxima(values, rows, row, weight, (int32_t)source, channels);
                } else {
                    for (int64_t c = 0; c < channels; c++) part[c] += weight * row[c];
                    if ((i - begin) % MOST_OF_A_SUM == MOST_OF_A_SUM - 1) add_part(values, part, channels);
                }
            }
            if (!maximum) add_part(values, part, channels);
            if (params->mode == FG_POOL_MEAN && end > begin) {
                const float size = (float)(end - begin);
                for (int64_t c = 0; c < channels; c++) values[c] /= size;
            }
            simd->from_float[src->dtype](fg_row(&params->out, m), values, channels);
            if (params->argmax.present && channels > 0)
                memcpy((int32_t *)params->argmax.data + m * channels, rows, (size_t)channels * sizeof(int32_t));
        }
    }
    if (wrong == count) return FG_OK;
    return fg_fail(error, FG_ERROR_VALUE, "order: entry %lld is %d, expected a number below %lld", (long long)wrong,
                   order[wrong], (long long)count);
}
