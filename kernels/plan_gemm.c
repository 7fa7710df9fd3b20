/*
 * Tile shapes of the portable GEMM. One step of the pipeline is 128 bytes of K for every dtype: a full shared-memory
 * line, and for fp8 exactly the 128 elements between two promotions of the accumulator.
 */
#include "plan.h"

static int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

fg_plan fg_plan_gemm(int64_t m, int64_t n, int64_t k, int64_t groups, fg_dtype dtype, int32_t num_sms) {
    (void)k;                                                   /* every tile walks all of K */
    const int64_t rows = ceil_div(m, groups > 1 ? groups : 1); /* of one group, on average */
    const int64_t large_tiles = ceil_div(rows, 128) * (groups > 1 ? groups : 1) * ceil_div(n, 128);

    fg_plan plan = {.block_m = 128, .block_n = 128, .num_stages = 3, .split_k = 1, .workspace_bytes = 0};
    if (rows <= 16) {
        /* Decode: the weights are read once and nothing else counts, so narrow tiles and a deep pipeline. */
        plan.block_m = 16;
        plan.block_n = 64;
        plan.num_stages = 6;
    } else if (rows <= 64 || large_tiles < num_sms) {
        plan.block_m = 64;
        plan.block_n = 64;
        plan.num_stages = 4;
    }
    plan.block_k = (int32_t)(128 / fg_dtype_size(dtype));
    return plan;
}
