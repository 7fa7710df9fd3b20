/*
 * Tile shapes of the GEMM families. One step of the pipeline is 128 bytes of K for every dtype: a full shared-memory
 * line, and for fp8 exactly the 128 elements between two promotions of the accumulator.
 */
#include "plan.h"

#include <math.h>

static int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

fg_gemm_shape fg_gemm_shape_of(const fg_gemm_params *params) {
    const fg_tensor *a = &params->a, *b = &params->b, *out = &params->out;
    fg_gemm_shape shape = {
        .m = a->shape[a->ndim - 2],
        .n = b->shape[b->ndim - (params->b_row_major ? 1 : 2)],
        .k = a->shape[a->ndim - 1],
        .groups = 1,
    };
    if (params->weight_indices.present) {
        shape.groups = params->weight_indices.shape[0];
    } else if (a->ndim == 3) {
        shape.groups = a->shape[0];
    } else if (b->ndim == 3) {
        shape.groups = b->shape[0];
    } else if (out->ndim == 3) {
        shape.groups = out->shape[0];
    }
    return shape;
}

fg_gemm_shape fg_gemm_all_rows(const fg_gemm_params *params) {
    fg_gemm_shape shape = fg_gemm_shape_of(params);
    switch (params->layout) {
        case FG_GEMM_M_GROUPED_MASKED:
            if (params->expected_m > 0 && params->expected_m < shape.m) shape.m = params->expected_m;
            shape.m *= shape.groups;
            break;
        case FG_GEMM_BATCHED:
        case FG_GEMM_K_GROUPED:
            shape.m *= shape.groups;
            break;
        case FG_GEMM_N_GROUPED:
            shape.groups = 1;
            break;
        default:
            break;
    }
    return shape;
}

int32_t fg_gemm_tiles(const fg_gemm_params *params) {
    const bool narrow = params->kind_a == FG_SCALE_BLOCK || params->promote_every > FG_SCALE_BLOCK_SIZE;
    return (params->layout == FG_GEMM_M_GROUPED_CONTIGUOUS ? FG_TILES_PACKED : 0) | (narrow ? FG_TILES_NARROW : 0) |
           (params->layout == FG_GEMM_K_GROUPED ? FG_TILES_TALL : 0) |
           (params->layout == FG_GEMM_M_GROUPED_MASKED ? FG_TILES_MASKED : 0);
}

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

int32_t fg_clusters_at_once(int32_t num_sms, int32_t cluster) {
    enum { GPC_SMS = 16 };
    const int32_t surely = cluster <= 2 || num_sms < GPC_SMS ? num_sms : num_sms - num_sms / 8;
    return surely / cluster;
}

/* Of products of few rows: as many blocks to a tile as leave each a few steps of K and run at once. A multiprocessor
 * reads some 50 GB/s and no more, so that most of them are needed to read as fast as the memory goes. */
static int32_t decode_split(int64_t tiles, int64_t steps, int32_t pair, int32_t num_sms) {
    enum { STEPS_WORTH_A_BLOCK = 3, MAX_CLUSTER = 8 };
    int32_t chosen = 1;
    for (int32_t split = 2; split * pair <= MAX_CLUSTER; ++split)
        if (tiles <= fg_clusters_at_once(num_sms, split * pair) && steps >= STEPS_WORTH_A_BLOCK * split) chosen = split;
    return chosen;
}

static fg_plan plan_decode(int64_t m, int64_t n, int64_t k, int64_t groups, fg_plan plan, int32_t num_sms) {
    /* Sizes of groups differ, so that tight tiles would read the weights of many twice. */
    static const struct {
        int32_t block_m, block_n, num_stages, pair; /* pair: blocks that read the rows for each other */
        bool dense, of_groups;
        int32_t step, end; /* where two take the same rows: duration of 128 bytes of K, and of all else, on an H200 */
    } shapes[] = {{8, 128, 10, 1, true, false, 0, 0},    {16, 128, 10, 1, true, true, 0, 0},
                  {24, 128, 10, 1, true, false, 0, 0},   {32, 128, 9, 1, true, true, 0, 0},
                  {64, 128, 7, 1, true, false, 0, 0},    {64, 128, 7, 2, false, true, 0, 0},
                  {128, 64, 7, 1, true, false, 35, 707}, {128, 128, 4, 2, true, false, 55, 930}};
    enum { SHAPES = sizeof shapes / sizeof *shapes };
    /* Groups of twice the average should still be one tile. */
    const int64_t rows = groups > 1 ? 2 * ceil_div(m, groups) : m, nonempty = groups < m ? groups : m;
    const int64_t steps = m == 0 ? 0 : ceil_div(k, plan.block_k);
    int64_t best = INT64_MAX;
    for (size_t i = 0; i < SHAPES; i++) {
        const int32_t block_m = shapes[i].block_m, block_n = shapes[i].block_n, pair = shapes[i].pair;
        if (!(groups > 1 ? shapes[i].of_groups : shapes[i].dense) || pair > num_sms) continue;
        if (plan.few_rows && (plan.block_m >= rows && plan.block_m < block_m)) break;
        const int64_t tiles = (m + nonempty * (block_m - 1)) / block_m * ceil_div(n, block_n * pair);
        const int32_t split = decode_split(tiles, steps, pair, num_sms);
        const int64_t waves = split > 1 ? 1 : ceil_div(tiles * pair, num_sms);
        const int64_t cost = waves * (ceil_div(steps, split) * shapes[i].step + shapes[i].end);
        if (plan.few_rows && plan.block_m == block_m && cost >= best) continue;
        best = cost;
        plan.block_m = block_m;
        plan.block_n = block_n;
        plan.num_stages = shapes[i].num_stages;
        plan.few_rows = pair;
        plan.split_k = split;
    }
    return plan;
}

/* Waves of tiles of block_m x block_n that m rows take, `at_once` at a time. */
static double whole_waves(int64_t m, int64_t n, int32_t block_m, int32_t block_n, int64_t at_once) {
    return (double)ceil_div(ceil_div(m, block_m) * ceil_div(n, block_n), at_once);
}

/* Persistent blocks walk over the tiles in waves of num_sms, so what counts is the number of waves times the duration
 * of a tile. Wide tiles load less per multiplication and have less epilogue per column; narrow ones fill the last wave
 * and waste less of a last column tile. Pairs of blocks that share B load less still, but waste one of the two at the
 * odd end of each group, unless a pair may have rows of two groups. */
fg_plan fg_plan_gemm_sm90(int64_t m, int64_t n, int64_t k, int64_t groups, fg_dtype dtype, int32_t num_sms,
                          int32_t tiles) {
    static const struct {
        int32_t block_m, block_n, num_stages, duration; /* of a tile, relative; measured on an H200 */
    } shapes[] = {{256, 256, 4, 256}, {128, 256, 4, 262}, {128, 192, 4, 203}, {128, 128, 6, 155}};
    fg_plan plan = {.family = FG_FAMILY_SM90, .split_k = 1};
    plan.block_k = (int32_t)(128 / fg_dtype_size(dtype));
    const int64_t rows = ceil_div(m, groups > 1 ? groups : 1); /* of one group, on average */
    /* Above 64 rows tensor cores have as much to do as the memory, and where tiles are many the others keep them
     * busier. */
    const bool some = groups <= 1 && rows > 64 && rows <= 128 && ceil_div(n, 256) <= num_sms / 2;
    const bool few = groups > 1 ? rows <= 32 : rows <= 64 || (some && !(tiles & FG_TILES_NARROW));
    if (few && !(tiles & FG_TILES_TALL)) return plan_decode(m, n, k, groups > 1 ? groups : 1, plan, num_sms);
    double best = INFINITY;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const bool wide = shapes[i].block_m > 128 || shapes[i].block_n > 128;
        if (wide && (tiles & FG_TILES_NARROW)) continue;
        const int64_t at_once = num_sms / (shapes[i].block_m / 128);
        if (at_once == 0) continue;
        /* The sizes of groups vary: on average half a tile of each is empty, and half of the last wave. */
        const bool vary = groups > 1 && !(tiles & FG_TILES_PACKED);
        const int32_t block_m = shapes[i].block_m, block_n = shapes[i].block_n;
        double waves;
        if (vary) {
            const double row_tiles = (double)groups * ((double)rows / block_m + 0.5);
            waves = row_tiles * (double)ceil_div(n, block_n) / (double)at_once + 0.5;
        } else {
            waves = whole_waves(m, n, block_m, block_n, at_once);
            /* Somewhat fewer or more rows than expected should not cost a whole wave. */
            if (tiles & FG_TILES_MASKED)
                waves = (waves + whole_waves(m - m / 8, n, block_m, block_n, at_once) +
                         whole_waves(m + m / 8, n, block_m, block_n, at_once)) /
                        3;
        }
        const double cost = waves * shapes[i].duration;
        if (cost < best || plan.block_m == 0) {
            best = cost;
            plan.block_m = block_m;
            plan.block_n = block_n;
            plan.num_stages = shapes[i].num_stages;
        }
    }
    return plan;
}
