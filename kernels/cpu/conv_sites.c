/*
 * Output sites of a sparse convolution: every site that a voxel reaches, once, in the order of its code.
 *
 * Each voxel lists the codes of the sites that it reaches, or a code above all others where a kernel position leads
 * nowhere; a radix sort brings equal codes together and those to the end, and one pass keeps the first of each.
 */
#include "../plan.h"
#include "../sequence.h"
#include "coords.h"
#include "radix_sort.h"

typedef struct {
    const fg_conv_sites_params *params;
    fg_sites_plan plan;
    fg_curve curve;
    int32_t bits; /* of a code; `nowhere` has one more */
} problem;

static problem make_problem(const fg_conv_sites_params *params) {
    return (problem){
        .params = params,
        .plan = fg_plan_conv_sites(params->kernel, params->stride, params->dilation, params->transposed),
        .curve = fg_make_curve(params->mode, params->code_shape),
        .bits = fg_sequence_bits(params->mode, params->code_shape),
    };
}

/* Along one axis, the sites that the voxel at c reaches: sites[0 .. taps), -1 where a position leads nowhere. */
static void reach(const problem *p, int axis, int64_t c, int32_t *sites) {
    const int64_t stride = p->params->stride[axis], dilation = p->params->dilation[axis];
    const int64_t padding = p->params->padding[axis], extent = p->params->out_shape[axis + 1];
    const int32_t kernel = p->params->kernel[axis], step = p->plan.step[axis];
    int64_t k = 0; /* the first position that leads to a site */
    if (!p->params->transposed)
        while (k < step && k < kernel && (c + padding - k * dilation) % stride != 0) k++;
    for (int tap = 0; tap < p->plan.taps[axis]; tap++, k += step) {
        const int64_t from = p->params->transposed ? c * stride + k * dilation - padding : c + padding - k * dilation;
        const int64_t site = p->params->transposed ? from : from / stride;
        const bool whole = p->params->transposed || from % stride == 0;
        const bool inside = k < kernel && whole && from >= 0 && site < extent && site <= INT32_MAX;
        sites[tap] = inside ? (int32_t)site : -1;
    }
}

/* The codes of all sites that the voxel reaches. */
static void reach_all(const problem *p, const int32_t *coord, fg_sort_entry *entries) {
    const uint64_t nowhere = UINT64_C(1) << p->bits;
    int32_t sites[3][7];
    for (int axis = 0; axis < 3; axis++) reach(p, axis, coord[axis + 1], sites[axis]);
    for (int i = 0; i < p->plan.taps[0]; i++)
        for (int j = 0; j < p->plan.taps[1]; j++)
            for (int k = 0; k < p->plan.taps[2]; k++) {
                const int32_t site[4] = {coord[0], sites[0][i], sites[1][j], sites[2][k]};
                const bool exists = site[1] >= 0 && site[2] >= 0 && site[3] >= 0;
                entries++->key = exists ? fg_encode(&p->curve, site) : nowhere;
            }
}

fg_status fg_cpu_conv_sites_workspace(const fg_conv_sites_params *params, const fg_queue *queue, size_t *bytes,
                                      fg_error *error) {
    (void)queue, (void)error;
    *bytes = fg_workspace_bytes(fg_sort_workspace(params->code.shape[0]));
    return FG_OK;
}

fg_status fg_cpu_conv_sites(const fg_conv_sites_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const problem p = make_problem(params);
    const int64_t n = params->coords.shape[0], count = params->code.shape[0];
    int threads = 0;
    fg_status status = fg_workspace_threads(&params->workspace, fg_sort_workspace(count), n, &threads, error);
    if (status == FG_OK) status = fg_check_coords(&params->coords, "coords", params->shape, threads, error);
    if (status != FG_OK) return status;

    int64_t kept = 0;
    if (count > 0) {
        const int32_t *coords = params->coords.data;
        fg_sort_entry *entries = fg_sort_entries(&params->workspace);
#pragma omp parallel for num_threads(threads)
        for (int64_t row = 0; row < n; row++) reach_all(&p, coords + 4 * row, entries + row * p.plan.per_voxel);

        const fg_sort_entry *sorted = fg_radix_sort(&params->workspace, count, p.bits + 1, threads);
        uint64_t *code = params->code.data;
        for (int64_t i = 0; i < count && sorted[i].key >> p.bits == 0; i++)
            if (kept == 0 || sorted[i].key != code[kept - 1]) code[kept++] = sorted[i].key;
    }
    *(int64_t *)params->count.data = kept;
    return FG_OK;
}
