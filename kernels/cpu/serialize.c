/*
 * Codes of voxels along a curve, and back.
 */
#include "../sequence.h"
#include "coords.h"

static uint64_t load_code(const fg_tensor *code, int64_t n) {
    return code->dtype == FG_INT32 ? ((const uint32_t *)code->data)[n] : ((const uint64_t *)code->data)[n];
}

fg_status fg_cpu_encode_seq(const fg_encode_seq_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const fg_curve curve = fg_make_curve(params->mode, params->shape);
    const int32_t *coords = params->coords.data;
    const int64_t n = params->coords.shape[0];
    int64_t outside = n; /* the lowest row outside the shape */
#pragma omp parallel for reduction(min : outside)
    for (int64_t row = 0; row < n; row++) {
        const int32_t *coord = coords + 4 * row;
        const bool inside = fg_coord_inside(coord, curve.shape);
        const uint64_t code = inside ? fg_encode(&curve, coord) : UINT64_MAX;
        if (params->code.dtype == FG_INT32) {
            ((uint32_t *)params->code.data)[row] = (uint32_t)code;
        } else {
            ((uint64_t *)params->code.data)[row] = code;
        }
        if (!inside) outside = fg_min(outside, row);
    }
    return outside < n ? fg_report_outside("coords", coords, outside, params->shape, error) : FG_OK;
}

fg_status fg_cpu_decode_seq(const fg_decode_seq_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const fg_curve curve = fg_make_curve(params->mode, params->shape);
    int32_t *coords = params->coords.data;
    const int64_t n = params->coords.shape[0];
    int64_t outside = n;
#pragma omp parallel for reduction(min : outside)
    for (int64_t row = 0; row < n; row++)
        if (!fg_decode(&curve, load_code(&params->code, row), coords + 4 * row)) outside = fg_min(outside, row);
    if (outside == n) return FG_OK;
    return fg_fail(
        error, FG_ERROR_VALUE, "code: entry %lld is %llu, no voxel of shape (%lld, %lld, %lld, %lld) has that code",
        (long long)outside, (unsigned long long)load_code(&params->code, outside), (long long)params->shape[0],
        (long long)params->shape[1], (long long)params->shape[2], (long long)params->shape[3]);
}
