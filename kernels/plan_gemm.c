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

/* Rows of an average group, of which some have an eighth less and some an eighth more, where they are expected and not
 * known. */
typedef struct {
    int64_t rows, groups, n, steps;
    bool expected;
    int32_t num_sms;
} group_question;

/* Its tiles, by pairs of blocks: columns, and up to how many rows with how many stages; the duration of a step of K, of
 * a row in it and of the end of a tile, in the unit of the shapes below. Those of 512 columns are an estimate. */
typedef struct {
    int32_t columns, most, num_stages;
    double step, row, end;
} group_tile;

/* Waves of tiles that hold at most `most` rows of a group, times the duration of one. */
static double groups_cost(const group_question *q, const group_tile *tile, int64_t rows, int32_t most) {
    const int64_t at_once = q->num_sms / 2, columns = ceil_div(q->n, tile->columns);
    double tiles, waves;
    if (q->expected) {
        tiles = (double)ceil_div(rows, most);
        waves = ceil((double)q->groups * tiles * (double)columns / (double)at_once);
    } else { /* half of the last wave is empty, and sizes vary: a group has half a tile more than its rows fill */
        tiles = 4 * rows > 3 * (int64_t)most ? (double)rows / most + 0.5 : 1;
        if (tiles < 1) tiles = 1;
        waves = (double)q->groups * tiles * (double)columns / (double)at_once + 0.5;
    }
    const double own = fmin(most, (double)rows / tiles + 8);
    return waves * (tile->step + tile->row * own + tile->end / (double)q->steps);
}

/* The kernel for groups of some rows instead of `plan`, whose waves of tiles have taken `cost`, where it is faster. */
static fg_plan plan_groups(const group_question *q, fg_plan plan, double cost) {
    static const group_tile kinds[] = {
        {256, 96, 7, 75, 1, 500}, {256, 160, 6, 75, 1, 500}, {256, 192, 5, 75, 1, 500}, {512, 128, 4, 240, 0.8, 700}};
    enum { KINDS = sizeof kinds / sizeof *kinds, FEWEST = 96, UNIT = 16 }; /* rows */
    for (size_t i = 0; i < KINDS; i++) {
        const group_tile *tile = &kinds[i];
        const bool wider = i > 0 && kinds[i - 1].columns == tile->columns;
        for (int32_t most = wider ? kinds[i - 1].most + UNIT : FEWEST; most <= tile->most; most += UNIT) {
            double own = groups_cost(q, tile, q->rows, most);
            if (q->expected)
                own = (own + groups_cost(q, tile, q->rows - q->rows / 8, most) +
                       groups_cost(q, tile, q->rows + q->rows / 8, most)) /
                      3;
            if (own >= cost) continue;
            cost = own;
            plan.some_rows = 1;
            plan.block_m = most;
            plan.block_n = tile->columns;
            plan.num_stages = tile->num_stages;
        }
    }
    return plan;
}

/* Persistent blocks walk over the tiles in waves of num_sms, so what counts is the number of waves times the duration
 * of a tile. Wide tiles load less per multiplication and have less epilogue per column; narrow ones fill the last wave
 * and waste less of a last column tile. Pairs of blocks that share B load less still, but waste one of the two at the
 * odd end of each group, unless a pair may have rows of two groups. */
fg_plan fg_plan_gemm_sm90(int64_t m, int64_t n, int64_t k, int64_t groups, fg_dtype dtype, int32_t num_sms,
                          int32_t tiles) {
    enum { MOSTLY_WEIGHTS = 128 }; /* groups of no more rows than this take as long as reading their weights */
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
    double best = INFINITY, best_waves = INFINITY;
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
            best_waves = waves;
            plan.block_m = block_m;
            plan.block_n = block_n;
            plan.num_stages = shapes[i].num_stages;
        }
    }
    if (groups <= 1 || m == 0 || num_sms < 2 || (tiles & ~FG_TILES_MASKED)) return plan;
    const int64_t steps = k > plan.block_k ? ceil_div(k, plan.block_k) : 1;
    const group_question question = {rows, groups, n, steps, tiles & FG_TILES_MASKED, num_sms};
    if (rows <= MOSTLY_WEIGHTS) return plan_groups(&question, plan, INFINITY);
    /* Each tile reads other weights, which takes longer than where tiles share them; and it has an end. */
    return plan_groups(&question, plan, 1.3 * best + 600.0 / (double)steps * best_waves);
}
