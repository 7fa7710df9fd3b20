/*
 * Weight and bias gradient of a sparse convolution.
 *
 *     grad_weight[:, v, :] = sum_m grad_out[m, :] (x) feats[map[v, m], :]        grad_bias = sum_m grad_out[m, :]
 *
 * A task is (slice of rows, offset v, panels of ci): it lists the pairs of a block of rows and adds their outer
 * products to its own (Co, panels) block of partial sums, register blocks over Co by a panel with the pairs as the
 * reduction. The panels of a task take the rows from cache one after another, as many as leave their sums there.
 * The number of slices follows from the problem's shape alone and partial sums meet in the order of the slices, so
 * that threads change no bit. Wherever there are enough offsets and channels to share out there is one slice.
 *
 *     partials: (slice, v, co, padded ci) float32
 */
#include <string.h>

#include "../channel_groups.h"
#include "../floats.h"
#include "../plan.h"
#include "backend.h"
#include "pairs.h"
#include "simd.h"

enum {
    ROW_BLOCK = 128,       /* rows listed at a time: their feats panel and grad_out rows stay in cache */
    WANTED_TASKS = 256,    /* enough to share out evenly over many threads */
    MIN_SLICE_ROWS = 2048, /* below this, a slice's sums cost more to write than to compute */
    TASK_SUMS = 16384,     /* 64 KB: they stay in L2 beside the rows of a block */
    BIAS_SLICES = 64,
};

typedef struct {
    int64_t volume, ci, co, rows;
    int64_t padded_ci, width; /* columns of ci of a task, whole panels but for the last */
    int64_t parts;            /* tasks that ci takes */
    int64_t slices, slice_rows;
    size_t weight_part; /* bytes of the partial weight sums, which the partial bias sums follow */
    size_t left_part;   /* bytes of the private grad_out rows, which the feats panel rows follow */
    fg_workspace_layout layout;
} wgrad_plan;

static wgrad_plan plan_wgrad(const fg_simd *simd, const fg_conv_wgrad_params *params) {
    wgrad_plan plan = {
        .volume = params->map.shape[0],
        .ci = params->feats.shape[1],
        .co = params->grad_out.shape[1],
        .rows = params->grad_out.shape[0],
    };
    plan.padded_ci = fg_ceil_div(plan.ci, simd->lanes) * simd->lanes;
    plan.width = fg_max(1, TASK_SUMS / simd->panel / fg_max(1, plan.co)) * simd->panel;
    plan.parts = fg_ceil_div(plan.ci, plan.width);
    const int64_t tasks = fg_max(1, plan.volume * plan.parts);
    plan.slices = fg_max(1, fg_min(fg_ceil_div(WANTED_TASKS, tasks), plan.rows / MIN_SLICE_ROWS));
    plan.slice_rows = fg_ceil_div(plan.rows, plan.slices);
    if (params->grad_weight.present)
        plan.weight_part = fg_workspace_part(plan.slices * plan.volume * plan.co * plan.padded_ci, sizeof(float));
    const size_t bias_part = params->grad_bias.present ? fg_workspace_part(BIAS_SLICES * plan.co, sizeof(double)) : 0;
    plan.left_part = fg_workspace_part(ROW_BLOCK * plan.co, sizeof(float));
    plan.layout.shared = plan.weight_part + bias_part;
    plan.layout.per_thread = plan.left_part + fg_workspace_part(ROW_BLOCK * simd->panel, sizeof(float));
    return plan;
}

/* Points rows[i] at columns [begin, begin + width) of tensor row first + index[i] as float32. Rows are used in place
 * when they are float32 and have all these columns, else copied to scratch and padded with zeros. */
static void view_rows(const fg_simd *simd, const fg_tensor *tensor, int64_t first, const int32_t *index, int64_t count,
                      int64_t begin, int64_t width, float *scratch, const float **rows) {
    const int64_t columns = fg_min(width, tensor->shape[1] - begin);
    const bool in_place = tensor->dtype == FG_FLOAT32 && columns == width;
    for (int64_t i = 0; i < count; i++) {
        const char *from = fg_row(tensor, first + index[i]) + begin * (int64_t)fg_dtype_size(tensor->dtype);
        rows[i] = in_place ? (const float *)from : scratch + i * width;
        if (in_place) continue;
        simd->to_float[tensor->dtype](scratch + i * width, from, columns);
        if (columns < width) memset(scratch + i * width + columns, 0, (size_t)(width - columns) * sizeof(float));
    }
}

/* One task; false when the map is invalid. */
static bool weight_task(const fg_simd *simd, const fg_conv_wgrad_params *params, const wgrad_plan *plan, char *scratch,
                        int64_t slice, int64_t v, int64_t part) {
    const int64_t ci_begin = part * plan->width, ci_end = fg_min(ci_begin + plan->width, plan->padded_ci);
    const int64_t feats_rows = params->feats.shape[0];
    float *sums = (float *)params->workspace.data + ((slice * plan->volume + v) * plan->co) * plan->padded_ci;
    float *left_scratch = (float *)scratch, *right_scratch = (float *)(scratch + plan->left_part);
    int32_t row[ROW_BLOCK], neighbor[ROW_BLOCK];
    const float *left[ROW_BLOCK], *right[ROW_BLOCK];

    for (int64_t i = 0; i < plan->co; i++)
        memset(sums + i * plan->padded_ci + ci_begin, 0, (size_t)(ci_end - ci_begin) * sizeof(float));
    const int64_t end = fg_min(plan->rows, (slice + 1) * plan->slice_rows);
    const int32_t *map = (const int32_t *)params->map.data + v * plan->rows;
    for (int64_t begin = slice * plan->slice_rows; begin < end; begin += ROW_BLOCK) {
        const int64_t count = fg_list_pairs(map + begin, fg_min(ROW_BLOCK, end - begin), feats_rows, row, neighbor);
        if (count < 0) return false;
        view_rows(simd, &params->grad_out, begin, row, count, 0, plan->co, left_scratch, left);
        for (int64_t ci = ci_begin; ci < ci_end; ci += simd->panel) {
            const int64_t width = fg_min(simd->panel, ci_end - ci);
            view_rows(simd, &params->feats, 0, neighbor, count, ci, width, right_scratch, right);
            simd->outer(plan->co, count, width, left, right, sums + ci, plan->padded_ci);
        }
    }
    return true;
}

/* grad_weight[co, v, :]: the sum over slices, in their order. */
static void reduce_weight(const fg_simd *simd, const fg_conv_wgrad_params *params, const wgrad_plan *plan, int64_t co,
                          int64_t v) {
    const fg_tensor *grad_weight = &params->grad_weight;
    const int64_t slice_stride = plan->volume * plan->co * plan->padded_ci;
    float *sum = (float *)params->workspace.data + (v * plan->co + co) * plan->padded_ci;
    for (int64_t slice = 1; slice < plan->slices; slice++)
        for (int64_t i = 0; i < plan->ci; i++) sum[i] += sum[slice * slice_stride + i];
    char *target =
        (char *)grad_weight->data + (co * plan->volume + v) * plan->ci * (int64_t)fg_dtype_size(grad_weight->dtype);
    simd->from_float[grad_weight->dtype](target, sum, plan->ci);
}

/* Sums in double: a column of millions of rows of one sign would lose digits in float32. */
static void bias_slice(const fg_simd *simd, const fg_conv_wgrad_params *params, const wgrad_plan *plan, float *row,
                       double *sum, int64_t slice) {
    const int64_t slice_rows = fg_ceil_div(plan->rows, BIAS_SLICES);
    memset(sum, 0, (size_t)plan->co * sizeof(double));
    for (int64_t m = slice * slice_rows; m < fg_min(plan->rows, (slice + 1) * slice_rows); m++) {
        simd->to_float[params->grad_out.dtype](row, fg_row(&params->grad_out, m), plan->co);
        for (int64_t i = 0; i < plan->co; i++) sum[i] += (double)row[i];
    }
}

static void reduce_bias(const fg_simd *simd, const fg_conv_wgrad_params *params, const wgrad_plan *plan,
                        const double *partials) {
    const fg_tensor *grad_bias = &params->grad_bias;
    for (int64_t i = 0; i < plan->co; i++) {
        double sum = 0;
        for (int64_t slice = 0; slice < BIAS_SLICES; slice++) sum += partials[slice * plan->co + i];
        const float rounded = (float)sum;
        simd->from_float[grad_bias->dtype]((char *)grad_bias->data + i * (int64_t)fg_dtype_size(grad_bias->dtype),
                                           &rounded, 1);
    }
}

fg_status fg_cpu_conv_wgrad_workspace(const fg_conv_wgrad_params *params, const fg_queue *queue, size_t *bytes,
                                      fg_error *error) {
    (void)queue;
    const fg_simd *simd = fg_simd_get(error);
    if (simd == NULL) return error->code;
    const fg_conv_wgrad_params part = fg_conv_wgrad_group(params, 0);
    *bytes = fg_workspace_bytes(plan_wgrad(simd, &part).layout);
    return FG_OK;
}

static fg_status wgrad_group(const fg_conv_wgrad_params *params, fg_error *error) {
    const fg_simd *simd = fg_simd_get(error);
    if (simd == NULL) return error->code;
    const wgrad_plan plan = plan_wgrad(simd, params);
    const int64_t tasks = params->grad_weight.present && plan.co > 0 ? plan.slices * plan.volume * plan.parts : 0;
    const int64_t bias_tasks = params->grad_bias.present ? BIAS_SLICES : 0;
    int threads = 0;
    const fg_status status =
        fg_workspace_threads(&params->workspace, plan.layout, fg_max(tasks, bias_tasks), &threads, error);
    if (status != FG_OK) return status;
    const fg_plan chosen = {.family = FG_FAMILY_CPU,
                            .block_m = (int32_t)plan.co,
                            .block_n = (int32_t)plan.width,
                            .block_k = ROW_BLOCK,
                            .split_k = (int32_t)plan.slices,
                            .workspace_bytes = (int64_t)fg_workspace_bytes(plan.layout)};
    if (tasks > 0)
        fg_print_plan(&chosen, "conv_wgrad", params->feats.dtype, "rows=%lld ci=%lld co=%lld v=%lld",
                      (long long)plan.rows, (long long)plan.ci, (long long)plan.co, (long long)plan.volume);
    double *bias_partials = (double *)((char *)params->workspace.data + plan.weight_part);

    bool valid = true;
#pragma omp parallel num_threads(threads) reduction(&& : valid)
    {
        FG_DEFAULT_FLOATS;
        char *scratch = fg_workspace_private(&params->workspace, plan.layout);
#pragma omp for schedule(dynamic) nowait
        for (int64_t i = 0; i < tasks; i++)
            valid = weight_task(simd, params, &plan, scratch, i / (plan.volume * plan.parts),
                                i / plan.parts % plan.volume, i % plan.parts) &&
                    valid;
#pragma omp for
        for (int64_t slice = 0; slice < bias_tasks; slice++)
            bias_slice(simd, params, &plan, (float *)scratch, bias_partials + slice * plan.co, slice);
        if (tasks > 0) {
#pragma omp for
            for (int64_t i = 0; i < plan.co * plan.volume; i++)
                reduce_weight(simd, params, &plan, i / plan.volume, i % plan.volume);
        }
    }
    if (!valid) return fg_report_map(&params->map, params->feats.shape[0], error);
    if (bias_tasks > 0) reduce_bias(simd, params, &plan, bias_partials);
    return FG_OK;
}

fg_status fg_cpu_conv_wgrad(const fg_conv_wgrad_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    fg_status status = FG_OK;
    for (int64_t group = 0; group < params->groups && status == FG_OK; group++) {
        const fg_conv_wgrad_params part = fg_conv_wgrad_group(params, group);
        status = wgrad_group(&part, error);
    }
    return status;
}
