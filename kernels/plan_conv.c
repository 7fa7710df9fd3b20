/*
 * Plans of the convolution passes: which tile, and into how many slices the reduction is split.
 *
 * A tile step is 128 bytes deep. Large tiles move the fewest bytes per product; small ones and splits exist to give
 * every multiprocessor work when rows or channels are few.
 */
#include "plan.h"

enum {
    STEP_BYTES = 128,
    CTAS_PER_SM = 2,         /* resident, of the 128-row tiles */
    SMALL_CTAS_PER_SM = 3,   /* resident, of the 64 x 64 tile */
    MIN_STEPS_PER_SLICE = 8, /* shorter slices cost more in partial sums than they gain */
    MAX_GATHER_SLICES = 16,
    MAX_SLICES = 65535,         /* of any pass: a grid's extent */
    MIN_ROWS_PER_SLICE = 512,   /* weight gradient */
    MAX_ROWS_PER_SLICE = 65536, /* bounds the chain of additions that tensor cores truncate */
    WGRAD_WAVES = 4,            /* offsets differ in neighbours: more CTAs than fit at once even that out */
    MIN_ROWS_PER_SUM = 256,     /* column sums */
    SM90_MIN_OFFSETS = 2,       /* of a slice, Hopper */
};

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t tiles(int64_t m, int64_t n, int32_t block_m, int32_t block_n) {
    return ceil_div(m, block_m) * ceil_div(n, block_n);
}

static void set_tile(fg_plan *plan, int32_t block_m, int32_t block_n, int32_t num_stages) {
    plan->block_m = block_m;
    plan->block_n = block_n;
    plan->num_stages = num_stages;
}

/* float32 partial sums of every slice, when there is more than one. */
static void set_split(fg_plan *plan, int64_t slices, int64_t outputs) {
    plan->split_k = (int32_t)at_most(at_least(slices, 1), MAX_SLICES);
    plan->workspace_bytes = plan->split_k > 1 ? plan->split_k * outputs * (int64_t)sizeof(float) : 0;
}

/* Hopper. Bytes from L2 per product are what a tile must save, so the widest is best; narrower ones are for channels that
 * would leave much of a wider one empty. */
static fg_plan plan_conv_sm90(int64_t rows, int64_t co, int64_t v, int32_t num_sms) {
    static const struct {
        int32_t block_n, num_stages, ctas_per_sm;
        int32_t cost; /* of a column, relative: sphere256 with 256 channels on an H200 */
    } candidates[] = {{256, 4, 1, 10}, {128, 5, 1, 13}, {64, 3, 2, 17}};
    int best = 0;
    for (int i = 1; i < 3; i++) {
        const int64_t width = ceil_div(co, candidates[i].block_n) * candidates[i].block_n;
        const int64_t best_width = ceil_div(co, candidates[best].block_n) * candidates[best].block_n;
        if (width * candidates[i].cost < best_width * candidates[best].cost) best = i;
    }
    fg_plan plan = {.family = FG_FAMILY_SM90, .block_k = 64, .split_k = 1};
    set_tile(&plan, 128, candidates[best].block_n, candidates[best].num_stages);
    const int64_t count = at_least(tiles(rows, co, plan.block_m, plan.block_n), 1);
    const int64_t wanted = candidates[best].ctas_per_sm * num_sms / count;
    set_split(&plan, at_most(at_most(wanted, MAX_GATHER_SLICES), v / SM90_MIN_OFFSETS), rows * co);
    return plan;
}

fg_plan fg_plan_conv(int64_t rows, int64_t ci, int64_t co, int64_t v, fg_dtype dtype, int32_t num_sms,
                     int32_t compute_capability) {
    if (compute_capability == 90 && fg_dtype_size(dtype) == 2 && ci > 0 && ci % 8 == 0 && co % 8 == 0)
        return plan_conv_sm90(rows, co, v, num_sms);
    fg_plan plan = {.block_k = (int32_t)(STEP_BYTES / fg_dtype_size(dtype)), .split_k = 1};
    const int64_t columns_64 = ceil_div(co, 64) * 64, columns_128 = ceil_div(co, 128) * 128;
    /* A 64-wide tile pays where a 128-wide one would compute a fifth or more in vain (64 or 192 channels). */
    const bool narrow = 5 * columns_64 <= 4 * columns_128;
    if (!narrow && tiles(rows, co, 128, 128) >= num_sms) {
        set_tile(&plan, 128, 128, 3);
    } else if (narrow && tiles(rows, co, 128, 64) >= CTAS_PER_SM * num_sms) {
        set_tile(&plan, 128, 64, 3);
    } else {
        set_tile(&plan, 64, 64, 4);
        const int64_t count = at_least(tiles(rows, co, 64, 64), 1);
        const int64_t steps = v * ceil_div(ci, plan.block_k);
        const int64_t wanted = SMALL_CTAS_PER_SM * num_sms / count;
        set_split(&plan, at_most(at_most(wanted, MAX_GATHER_SLICES), at_most(v, steps / MIN_STEPS_PER_SLICE)),
                  rows * co);
    }
    return plan;
}

fg_plan fg_plan_conv_wgrad(int64_t rows, int64_t ci, int64_t co, int64_t v, fg_dtype dtype, int32_t num_sms) {
    fg_plan plan = {.block_k = (int32_t)(STEP_BYTES / fg_dtype_size(dtype)), .split_k = 1};
    if (ci > 64 && co > 64)
        set_tile(&plan, 128, 128, 3);
    else
        set_tile(&plan, 64, 64, 4);
    const int64_t count = at_least(v * tiles(co, ci, plan.block_m, plan.block_n), 1);
    const int64_t wanted = WGRAD_WAVES * CTAS_PER_SM * num_sms / count;
    set_split(&plan, at_least(at_most(wanted, rows / MIN_ROWS_PER_SLICE), ceil_div(rows, MAX_ROWS_PER_SLICE)),
              co * v * ci);
    return plan;
}

fg_plan fg_plan_column_sum(int64_t rows, int64_t columns, int32_t num_sms) {
    fg_plan plan = {.split_k = 1};
    set_split(&plan, at_most(4 * (int64_t)num_sms, ceil_div(rows, MIN_ROWS_PER_SUM)), columns);
    return plan;
}

fg_plan fg_plan_depthwise_wgrad(int64_t rows, int64_t channels, int64_t v, int32_t num_sms) {
    fg_plan plan = {.split_k = 1};
    const int64_t count = at_least(ceil_div(channels, 32) * ceil_div(v, 4), 1);
    const int64_t wanted = at_most(WGRAD_WAVES * CTAS_PER_SM * num_sms / count, rows / MIN_ROWS_PER_SLICE);
    plan.split_k = (int32_t)at_most(at_least(at_least(wanted, ceil_div(rows, MAX_ROWS_PER_SLICE)), 1), MAX_SLICES);
    plan.workspace_bytes = plan.split_k * v * channels * (int64_t)sizeof(float);
    return plan;
}
