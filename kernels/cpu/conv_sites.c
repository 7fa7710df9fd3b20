/*
 * Output sites of a sparse convolution: every site that a voxel reaches, once, in the order of its number.
 *
 * Each voxel writes the numbers of the sites it reaches to a place of its own, or the number of cells where a kernel
 * position leads nowhere; a radix sort brings equal numbers together and those to the end, and one pass keeps the first
 * of each.
 */
#include <string.h>

#include "../plan.h"
#include "coords.h"

enum { DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS };

/* ---- numbers of sites ---- */

static int64_t cell_count(const int64_t *shape) { return shape[0] * shape[1] * shape[2] * shape[3]; }

/* Along one axis, the sites that the voxel at c reaches: sites[0 .. taps), -1 where a position leads nowhere. */
static void reach(const fg_conv_sites_params *params, const fg_sites_plan *plan, int axis, int64_t c, int64_t *sites) {
    const int64_t stride = params->stride[axis], dilation = params->dilation[axis];
    const int64_t extent = fg_min(params->out_shape[axis + 1], INT64_C(1) << 31); /* of int32 coordinates */
    int k = 0;
    if (!params->transposed)
        while (k < plan->step[axis] && k < params->kernel[axis] && (c + params->padding[axis] - k * dilation) % stride)
            k++;
    for (int tap = 0; tap < plan->taps[axis]; tap++, k += plan->step[axis]) {
        const int64_t at = params->transposed ? c * stride + k * dilation - params->padding[axis]
                                              : c + params->padding[axis] - k * dilation;
        const bool whole = params->transposed || at % stride == 0;
        const int64_t site = params->transposed ? at : at / stride;
        sites[tap] = k < params->kernel[axis] && whole && at >= 0 && site < extent ? site : -1;
    }
}

/* The numbers of all sites that the voxel reaches. */
static void reach_all(const fg_conv_sites_params *params, const fg_sites_plan *plan, const int32_t *coord,
                      uint64_t *keys) {
    const int64_t *shape = params->out_shape;
    const uint64_t nowhere = (uint64_t)cell_count(shape);
    int64_t sites[3][7];
    for (int axis = 0; axis < 3; axis++) reach(params, plan, axis, coord[axis + 1], sites[axis]);
    for (int i = 0; i < plan->taps[0]; i++)
        for (int j = 0; j < plan->taps[1]; j++)
            for (int k = 0; k < plan->taps[2]; k++) {
                const int64_t x = sites[0][i], y = sites[1][j], z = sites[2][k];
                const int64_t key = ((coord[0] * shape[1] + x) * shape[2] + y) * shape[3] + z;
                *keys++ = x < 0 || y < 0 || z < 0 ? nowhere : (uint64_t)key;
            }
}

/* ---- sorted, each once ---- */

/* One pass: `to` is `from`, stably sorted by one digit. */
static void sort_by_digit(const uint64_t *from, uint64_t *to, int64_t n, int shift) {
    int64_t start[DIGITS + 1] = {0};
    for (int64_t i = 0; i < n; i++) start[(from[i] >> shift) % DIGITS + 1]++;
    for (int digit = 0; digit < DIGITS; digit++) start[digit + 1] += start[digit];
    for (int64_t i = 0; i < n; i++) to[start[(from[i] >> shift) % DIGITS]++] = from[i];
}

/* Copies the first of equal numbers below `nowhere` and returns how many there are; the two arrays may be one. */
static int64_t keep_first(const uint64_t *sorted, uint64_t *keys, int64_t n, uint64_t nowhere) {
    int64_t kept = 0;
    for (int64_t i = 0; i < n && sorted[i] < nowhere; i++)
        if (kept == 0 || sorted[i] != keys[kept - 1]) keys[kept++] = sorted[i];
    return kept;
}

static fg_workspace_layout plan_workspace(const fg_conv_sites_params *params) {
    return (fg_workspace_layout){fg_workspace_part(params->keys.shape[0], sizeof(uint64_t)), 0};
}

fg_status fg_cpu_conv_sites_workspace(const fg_conv_sites_params *params, const fg_queue *queue, size_t *bytes,
                                      fg_error *error) {
    (void)queue, (void)error;
    *bytes = fg_workspace_bytes(plan_workspace(params));
    return FG_OK;
}

fg_status fg_cpu_conv_sites(const fg_conv_sites_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const fg_sites_plan plan = fg_plan_conv_sites(params->kernel, params->stride, params->dilation, params->transposed);
    const int64_t n = params->coords.shape[0], count = params->keys.shape[0];
    int threads = 0;
    fg_status status = fg_workspace_threads(&params->workspace, plan_workspace(params), n, &threads, error);
    if (status == FG_OK) status = fg_check_coords(&params->coords, "coords", params->shape, threads, error);
    if (status != FG_OK) return status;

    const int32_t *coords = params->coords.data;
    uint64_t *keys = params->keys.data;
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < n; row++) reach_all(params, &plan, coords + 4 * row, keys + row * plan.per_voxel);

    const uint64_t nowhere = (uint64_t)cell_count(params->out_shape);
    uint64_t *from = keys, *to = params->workspace.data;
    for (int shift = 0; shift < 64 && nowhere >> shift > 0; shift += DIGIT_BITS) {
        sort_by_digit(from, to, count, shift);
        uint64_t *swap = from;
        from = to;
        to = swap;
    }
    *(int64_t *)params->count.data = keep_first(from, keys, count, nowhere);
    return FG_OK;
}

/* ---- back to coordinates ---- */

fg_status fg_cpu_site_coords_workspace(const fg_site_coords_params *params, const fg_queue *queue, size_t *bytes,
                                       fg_error *error) {
    (void)params, (void)queue, (void)error;
    *bytes = 0;
    return FG_OK;
}

fg_status fg_cpu_site_coords(const fg_site_coords_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue, (void)error;
    const int64_t *keys = params->keys.data, *shape = params->shape;
    const int64_t count = params->coords.shape[0];
    int32_t *coords = params->coords.data;
#pragma omp parallel for
    for (int64_t m = 0; m < count; m++) {
        int64_t rest = keys[m];
        for (int axis = 3; axis > 0; axis--) {
            coords[4 * m + axis] = (int32_t)(rest % shape[axis]);
            rest /= shape[axis];
        }
        coords[4 * m] = (int32_t)rest;
    }
    return FG_OK;
}
