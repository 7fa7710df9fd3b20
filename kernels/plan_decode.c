/*
 * Tiles of the Hopper kernel for few rows: of one product, or of groups of them.
 */
#include "plan_decode.h"

#include <math.h>

static int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

int32_t fg_clusters_at_once(int32_t num_sms, int32_t cluster) {
    enum { GPC_SMS = 16 };
    const int32_t surely = cluster <= 2 || num_sms < GPC_SMS ? num_sms : num_sms - num_sms / 8;
    return surely / cluster;
}

/* Of products of few rows: as many blocks to a tile, up to `most`, as leave each a few steps of K and run at once. A
 * multiprocessor reads some 50 GB/s and no more, so that most of them are needed to read as fast as the memory goes. */
static int32_t decode_split(int64_t tiles, int64_t steps, int32_t pair, int32_t most, int32_t num_sms) {
    enum { STEPS_WORTH_A_BLOCK = 3 };
    int32_t chosen = 1;
    for (int32_t split = 2; split * pair <= most; ++split)
        if (tiles <= fg_clusters_at_once(num_sms, split * pair) && steps >= STEPS_WORTH_A_BLOCK * split) chosen = split;
    return chosen;
}

/* The cost is waves of tiles, times the duration of one, if there is more than one row of those of a size. */
fg_plan fg_plan_decode(int64_t m, int64_t n, int64_t k, int64_t groups, const gemm_durations *durations, fg_plan plan,
                       int32_t num_sms) {
    /* Sizes of groups differ, so that tight tiles would read the weights of many twice. */
    static const struct {
        int32_t block_m, block_n, num_stages;
        int32_t pair; /* blocks that read the rows for each other */
        bool dense, of_groups;
    } shapes[] = {{8, 128, 6, 1, true, false}, {8, 64, 8, 1, true, false},   {16, 128, 6, 1, true, true},
                  {16, 64, 8, 1, true, false}, {24, 128, 6, 1, true, false}, {24, 64, 8, 1, true, false},
                  {32, 128, 6, 1, true, true}, {32, 64, 8, 1, true, false},  {64, 128, 5, 1, true, false},
                  {64, 64, 8, 1, true, false}, {64, 128, 5, 2, false, true}, {128, 64, 7, 1, true, false}};
    enum { SHAPES = sizeof shapes / sizeof *shapes };
    /* Groups of twice the average should still be one tile. */
    const int64_t rows = groups > 1 ? 2 * ceil_div(m, groups) : m, nonempty = groups < m ? groups : m;
    const int64_t steps = m == 0 ? 0 : ceil_div(k, plan.block_k);
    plan.cost = INFINITY;
    for (size_t i = 0; i < SHAPES; i++) {
        const int32_t block_m = shapes[i].block_m, block_n = shapes[i].block_n, pair = shapes[i].pair;
        if (!(groups > 1 ? shapes[i].of_groups : shapes[i].dense) || pair > num_sms) continue;
        if (plan.few_rows && (plan.block_m >= rows && plan.block_m < block_m)) break;
        const int64_t tiles = (m + nonempty * (block_m - 1)) / block_m * ceil_div(n, block_n * pair);
        const int32_t split = decode_split(tiles, steps, pair, FG_MOST_SHARING, num_sms);
        const int64_t waves = split > 1 ? 1 : ceil_div(tiles * pair, num_sms);
        const decode_tile *const fewest = block_n == 64 ? &fewest_narrow : &fewest_wide;
        const decode_tile *const tile = block_m <= 64 ? fewest : &durations->few;
        const double step = 4 * tiles * pair * split > 3 * (int64_t)num_sms ? tile->full_step : tile->step;
        const double own = (double)waves * ((double)ceil_div(steps, split) * step + tile->end);
        const double all = own + (split > 1 ? durations->share : 0);
        if (plan.few_rows && plan.block_m == block_m && all >= plan.cost) continue;
        plan.cost = all;
        plan.block_m = block_m;
        plan.block_n = block_n;
        plan.num_stages = shapes[i].num_stages;
        plan.few_rows = pair;
        plan.split_k = split;
    }
    return plan;
}

/* Rows that fit are 16 apart. Ends of many waves count, which large tiles hide. In one row of tiles weights come from
 * memory, and a step lasts no less than they take. Those of up to 128 rows are compared with the tiles of 64 and of 128
 * rows above, between which they are. */
fg_plan fg_plan_fitting(int64_t m, int64_t n, int64_t k, const gemm_durations *durations, bool askew, fg_plan best,
                        int32_t num_sms) {
    enum { ONE_TILE = 128, MOST_WAVES = 2 };
    const double ONE_ROW = 0.85;
    static const int32_t stages[2][10] = {{10, 9, 8, 7, 7, 6, 6, 6, 5, 5}, {7, 7, 6, 5, 5, 5, 4, 4}};
    const int64_t steps = ceil_div(k, best.block_k);
    const decode_tile *const few = &durations->few;
    for (int32_t wide = 0; wide < 2; wide++) {
        const fitting_tile *const tile = &durations->fitting[wide];
        const int32_t block_n = wide ? 128 : 64;
        for (int32_t block_m = FG_FITTING_LEAST; block_m <= tile->most; block_m += FG_FITTING_UNIT) {
            const int64_t rows = ceil_div(m, block_m), tiles = rows * ceil_div(n, block_n);
            const int32_t most = wide || block_m > FG_ROWS_OF_HALVED ? 1
                                 : block_m > FG_ROWS_OF_SHARED       ? 2
                                                                     : FG_MOST_SHARING;
            const int32_t split = decode_split(tiles, steps, 1, most, num_sms);
            const int64_t waves = split > 1 ? 1 : ceil_div(tiles, num_sms);
            if (waves > MOST_WAVES) continue;
            const double bytes = FG_STEP_BYTES * (block_m + block_n);
            double step = tile->step + tile->row * block_m, end = tile->end + tile->again * (double)(waves - 1);
            if (m <= ONE_TILE) {
                if (wide || block_m >= ONE_TILE) continue;
                const double part = (block_m - 64) / 64.0;
                const bool full = 4 * tiles * split > 3 * (int64_t)num_sms;
                step = fewest_narrow.step + part * ((full ? few->full_step : few->step) - fewest_narrow.step);
                end = (double)waves * (fewest_narrow.end + part * (few->end - fewest_narrow.end));
            } else if (rows == 1) {
                step = fmax(step, ONE_ROW * few->full_step);
            }
            if (askew) step = fmax(step, bytes / FG_ASKEW_BYTES);
            const double cost =
                (double)(waves * ceil_div(steps, split)) * step + end + (split > 1 ? durations->share : 0);
            if (cost >= best.cost) continue;
            best = (fg_plan){.family = FG_FAMILY_SM90,
                             .block_m = block_m,
                             .block_n = block_n,
                             .block_k = best.block_k,
                             .num_stages = stages[wide][(block_m - FG_FITTING_LEAST) / FG_FITTING_UNIT],
                             .few_rows = 1,
                             .split_k = split,
                             .cost = cost};
        }
    }
    return best;
}
