/*
 * Tile shapes of the GEMM families. One step of the pipeline is 128 bytes of K for every dtype: a full shared-memory
 * line, and for fp8 exactly the 128 elements between two promotions of the accumulator.
 */
#include "plan_decode.h"

#include <math.h>
#include <string.h>

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

bool fg_gemm_is_empty(const fg_gemm_shape *shape) { return shape->m == 0 || shape->n == 0 || shape->groups == 0; }

fg_gemm_shape fg_gemm_all_rows(const fg_gemm_params *params) {
    fg_gemm_shape shape = fg_gemm_shape_of(params);
    switch (params->layout) {
        case FG_GEMM_M_GROUPED_MASKED:
            if (params->expected_m > 0 && params->expected_m < shape.m) shape.m = params->expected_m;
            shape.m *= shape.groups;
            break;
        case FG_GEMM_BATCHED:
            shape.m *= shape.groups;
            break;
        case FG_GEMM_K_GROUPED:
            shape.m *= shape.groups;
            shape.k = ceil_div(shape.k, shape.groups > 0 ? shape.groups : 1);
            break;
        case FG_GEMM_N_GROUPED:
            shape.groups = 1;
            break;
        default:
            break;
    }
    return shape;
}

bool fg_gemm_is_linear(const fg_gemm_params *params) {
    return !params->swiglu && params->activation == FG_ACTIVATION_NONE && !params->scale_out.present &&
           fg_dtype_size(params->out.dtype) > 1;
}

bool fg_gemm_scales_rows(const fg_gemm_params *params) {
    return fg_gemm_is_linear(params) && !params->bias.present && params->kind_b != FG_SCALE_ROW;
}

/* Groups of columns begin anywhere. */
bool fg_gemm_stores_chunks(const fg_gemm_params *params) {
    const fg_tensor *out = &params->out;
    const int64_t of_chunk = 16 / (int64_t)fg_dtype_size(out->dtype);
    bool whole = (uintptr_t)out->data % 16 == 0 && out->shape[out->ndim - 1] % of_chunk == 0;
    for (int32_t axis = 0; axis < out->ndim - 1; axis++)
        whole = whole && (out->shape[axis] == 1 || out->strides[axis] % of_chunk == 0);
    return whole && !params->accumulate && params->layout != FG_GEMM_N_GROUPED;
}

fg_dtype fg_usual_output(fg_dtype operands) { return operands == FG_FLOAT16 ? FG_FLOAT16 : FG_BFLOAT16; }

bool fg_gemm_is_usual(const fg_gemm_params *params) {
    return fg_gemm_is_linear(params) && fg_gemm_stores_chunks(params) &&
           params->out.dtype == fg_usual_output(params->a.dtype);
}

/* Whether rows, or columns where the matrix lies in columns, begin in the middle of sectors. */
static bool is_askew(const fg_tensor *matrix) {
    const int64_t step = matrix->strides[matrix->ndim - (fg_lies_in_columns(matrix) ? 1 : 2)];
    return step * (int64_t)fg_dtype_size(matrix->dtype) % FG_SECTOR_BYTES != 0;
}

int32_t fg_gemm_tiles(const fg_gemm_params *params) {
    const bool blocks = params->kind_a == FG_SCALE_BLOCK; /* whose sums are promoted at each, whatever was asked for */
    const bool each_step = !fg_is_float8(params->a.dtype) || (params->promote_every == FG_SCALE_BLOCK_SIZE && !blocks);
    /* Of 16 bits, groups along K are faster by the same tiles; those of fp8 are not. */
    const bool halves_along_k = params->layout == FG_GEMM_K_GROUPED && !fg_is_float8(params->a.dtype);
    const int32_t added = params->accumulate ? FG_TILES_ADDED : 0;
    const int32_t of_one_group = FG_TILES_DENSE | added | (fg_gemm_is_usual(params) ? FG_TILES_USUAL : 0) |
                                 (each_step && fg_gemm_scales_rows(params) ? FG_TILES_ROWS : 0);
    return (params->layout == FG_GEMM_M_GROUPED_CONTIGUOUS ? FG_TILES_PACKED : 0) | (blocks ? FG_TILES_BLOCKS : 0) |
           (params->promote_every > FG_SCALE_BLOCK_SIZE && fg_is_float8(params->a.dtype) && !blocks ? FG_TILES_NARROW
                                                                                                    : 0) |
           (params->layout == FG_GEMM_N_GROUPED ||
                    (params->promote_every == 0 && fg_is_float8(params->a.dtype) && !blocks)
                ? FG_TILES_FEW_OR_MANY
                : 0) |
           (params->layout == FG_GEMM_K_GROUPED ? FG_TILES_TALL | FG_TILES_EQUAL | added : 0) |
           (is_askew(&params->a) || is_askew(&params->b) || halves_along_k ? FG_TILES_ASKEW : 0) |
           (params->layout == FG_GEMM_BATCHED ? FG_TILES_EQUAL | added : 0) |
           (params->layout == FG_GEMM_M_GROUPED_MASKED ? FG_TILES_MASKED : 0) |
           (params->b_row_major ? FG_TILES_ROW_MAJOR : 0) | (fg_lies_in_columns(&params->a) ? FG_TILES_COLUMNS : 0) |
           (params->layout == FG_GEMM_DENSE ? of_one_group : 0);
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

/* Groups of rows: of `rows` each, or of about as many: what the caller expects of a group, or the mean of any. */
typedef struct {
    int64_t rows, groups, n, steps;
    bool known, dense, added, askew;
    bool bounded; /* how many rows a group has is not known before */
    bool chosen;  /* and they are so few that the device chooses how tall tiles of some rows are */
    const gemm_durations *durations;
} gemm_question;

/* Where groups have any number of rows, large tiles that a pair shares have one block's rows of two groups, too. */
static bool pairs_rests(const gemm_question *q, const gemm_tile *tile) {
    const bool large = tile->row == 0;
    return q->bounded && large && tile->blocks == 2;
}

/* Tiles of a group along its rows, or where rests are paired the blocks that have its rows; and how likely their number is
 * odd. */
typedef struct {
    double count, odd;
} gemm_rows;

/* Waves of tiles, and what a group has of them, where each group has up to such a part more or less than the rows expected,
 * any number as likely. */
static double waves_of(const gemm_question *q, double spread, const gemm_tile *tile, int64_t num_sms, gemm_rows *own) {
    enum { SUMS = 32 };
    const int32_t halves = pairs_rests(q, tile) ? 2 : 1;
    const int64_t minor = ceil_div(q->n, tile->block_n), at_once = num_sms / tile->blocks * halves;
    const double block_m = tile->block_m / halves, rows = (double)q->rows;
    const double least = (1 - spread) * rows, most = (1 + spread) * rows;
    const int64_t fewest = (int64_t)ceil(least / block_m), others = (int64_t)ceil(most / block_m) - fewest;
    if (others == 0) {
        *own = (gemm_rows){.count = (double)fewest, .odd = (double)(fewest % 2)};
        return (double)ceil_div(q->groups * fewest * minor, at_once);
    }
    const bool few = others < SUMS;
    double chance[SUMS]; /* of so many more of a group than the fewest */
    *own = few ? (gemm_rows){0} : (gemm_rows){.count = rows / block_m + 0.5, .odd = 0.5};
    const int64_t numbers = few ? others + 1 : 0; /* that are weighed each */
    for (int64_t i = 0; i < numbers; i++) {
        const double count = (double)(fewest + i);
        chance[i] = (fmin(most, count * block_m) - fmax(least, (count - 1) * block_m)) / (most - least);
        own->count += count * chance[i];
        own->odd += (double)((fewest + i) % 2) * chance[i];
    }
    if (!few || others * q->groups >= SUMS) { /* on average, and any part of the last wave */
        const double last = 0.5;
        return (double)(q->groups * minor) * own->count / (double)at_once + last;
    }
    double all[SUMS] = {1}; /* of groups together */
    for (int64_t group = 1; group <= q->groups; group++)
        for (int64_t sum = group * others; sum >= 0; sum--) {
            double likely = 0;
            for (int64_t i = 0; i <= others && i <= sum; i++) likely += chance[i] * all[sum - i];
            all[sum] = likely;
        }
    double waves = 0;
    for (int64_t sum = 0; sum <= q->groups * others; sum++)
        waves += all[sum] * (double)ceil_div((q->groups * fewest + sum) * minor, at_once);
    return waves;
}

/* A step of K of a tile that has so many rows; `whole`: most tiles do. */
static double step_of(const gemm_question *q, const gemm_tile *tile, bool whole, double rows) {
    const double own = (whole ? tile->step : tile->step_of_part) + tile->row * rows;
    const double bytes = FG_STEP_BYTES * (tile->block_m + tile->block_n) / tile->blocks; /* pairs read half of B each */
    return q->askew ? fmax(own, bytes / FG_ASKEW_BYTES) : own;
}

/* Whether sums that are added to the output find it in shared memory, where it takes the place of a stage; not beside
 * scales of blocks. */
static bool has_room_for_output(int32_t block_n, bool blocks) { return block_n == 128 && !blocks; }

static bool adds_beside_stages(const gemm_question *q, const gemm_tile *tile) {
    return q->added && has_room_for_output(tile->block_n, q->durations == &scaled);
}

/* What all blocks take to add a tile to the output, for each element as long as memory takes to read so many bytes: to read
 * and write it, or to have L2 add it. */
static double time_to_add(const gemm_question *q, const gemm_tile *tile, int32_t at_once) {
    const double bytes = adds_beside_stages(q, tile) ? 9.6 : 14.0;
    return q->added ? bytes * tile->block_m * tile->block_n * at_once / q->durations->bytes : 0;
}

/* What a tile of some rows takes besides those, in rows. */
static int32_t overhead_rows(const gemm_tile *tile, int64_t steps) {
    return steps > 0 ? (int32_t)fmin((tile->step + tile->end / (double)steps) / tile->row, INT16_MAX) : 0;
}

/* The same as cost_of_spread where the device chooses how tall tiles are: by its rule, for a few draws of sizes, of as many
 * groups as stand for all. A draw is of a sequence that spreads evenly. */
static double cost_of_chosen(const gemm_question *q, double spread, const gemm_tile *tile, int32_t num_sms) {
    enum { DRAWS = 4, SAMPLE = 8 };
    /* Tiles that share weights are neighbours, so that B comes faster and little of it again. */
    const double GOLDEN = 0.6180339887498949, READ_AGAIN = 0.15, FASTER = 1.08;
    const int32_t groups = q->groups < SAMPLE ? (int32_t)q->groups : SAMPLE, draws = spread > 0 ? DRAWS : 1;
    const double overhead = overhead_rows(tile, q->steps), each = (double)q->groups / groups;
    const double minor = (double)ceil_div(q->n, tile->block_n), at_once = num_sms / tile->blocks;
    double busy = 0, tiles_of_group = 0;
    for (int32_t draw = 0; draw < draws; draw++) {
        double sizes[SAMPLE], all = 0;
        for (int32_t group = 0; group < groups; group++) {
            const double place = (group + 1) * GOLDEN + (double)draw / DRAWS;
            sizes[group] = (double)q->rows * (1 + spread * (2 * (place - floor(place)) - 1));
            all += sizes[group] * each;
        }
        double least = INFINITY, tiles_of_least = 0;
        for (int32_t rows = tile->block_m; rows >= FG_SOME_LEAST; rows -= FG_SOME_UNIT) {
            double tiles = 0;
            for (int32_t group = 0; group < groups; group++) tiles += ceil(sizes[group] / rows) * each;
            const double cost = ceil(tiles * minor / at_once) * (overhead + all / tiles);
            if (cost >= least) continue;
            least = cost;
            tiles_of_least = tiles;
        }
        busy += least / draws;
        tiles_of_group += tiles_of_least / (double)(draws * q->groups);
    }
    busy *= tile->row * (double)q->steps;
    const double reads = 1 + READ_AGAIN * (tiles_of_group - 1),
                 bytes = FG_STEP_BYTES * (double)q->groups * (double)q->n;
    return fmax(busy, (double)q->steps * bytes * reads / (FASTER * q->durations->bytes));
}

/* Waves of tiles, times the duration of one; or what memory takes to read B. */
static double cost_of_spread(const gemm_question *q, double spread, const gemm_tile *tile, int32_t num_sms) {
    const int32_t at_once = num_sms / tile->blocks;
    if (at_once == 0) return INFINITY;
    if (q->chosen && tile->row > 0 && q->rows > 0) return cost_of_chosen(q, spread, tile, num_sms);
    const bool whole = q->known || q->groups == 1; /* most tiles */
    gemm_rows of_group;
    const double waves = waves_of(q, spread, tile, num_sms, &of_group);
    double tiles = of_group.count; /* that read B */
    /* A group that is cut evenly has rows in multiples of 16. */
    const double rows = tiles > 0 ? fmin((double)q->rows / tiles + 8, tile->block_m) : 0;
    const double end = q->added ? tile->end_of_added : whole ? tile->end : tile->end_of_part;
    double step = step_of(q, tile, whole, rows);
    if (pairs_rests(q, tile)) { /* each block of what is left over reads all of B */
        step *= 1 + (q->durations->apart - 1) * of_group.odd / fmax(tiles, 1);
        tiles = (tiles + of_group.odd) / 2;
    }
    const double own = (double)q->steps * step + end;
    const double busy = tile->begin + waves * fmax(own, time_to_add(q, tile, at_once));
    if (q->groups == 1) return busy;
    const double reads = 1 + q->durations->read_again * (tiles - 1),
                 step_bytes = FG_STEP_BYTES * (double)q->groups * (double)q->n;
    return fmax(busy, (double)q->steps * step_bytes * reads / q->durations->bytes);
}

/* Groups have between a third less and a third more rows than expected, but some programs fill all of them alike. A single
 * group is what it is expected to be but for little. */
static double cost_of(const gemm_question *q, const gemm_tile *tile, int32_t num_sms) {
    const double ALIKE = 0.1;
    if (q->known) return cost_of_spread(q, 0, tile, num_sms);
    if (q->groups == 1) return cost_of_spread(q, 0.125, tile, num_sms);
    return ALIKE * cost_of_spread(q, 0, tile, num_sms) + (1 - ALIKE) * cost_of_spread(q, 0.3, tile, num_sms);
}

int64_t fg_gemm_shared_tiles(int64_t tiles, int64_t pairs, int64_t steps) {
    const int64_t left_over = pairs > 0 ? tiles % pairs : 0;
    return 2 * left_over <= pairs && steps > 0 && steps % 2 == 0 ? left_over : 0;
}

/* By which the last wave is shorter where pairs share the K of its tiles, of whose B each block then reads all. */
static double saved_by_sharing(const gemm_question *q, const gemm_tile *tile, int32_t num_sms) {
    const int64_t tiles = ceil_div(q->rows, tile->block_m) * ceil_div(q->n, tile->block_n);
    if (!q->dense || tile->blocks != 2 || tile->block_n > 256 || adds_beside_stages(q, tile) ||
        fg_gemm_shared_tiles(tiles, num_sms / 2, q->steps) == 0)
        return 0;
    const double step = step_of(q, tile, true, 0);
    return fmax((double)q->steps * step * (1 - q->durations->own_b / 2) - q->durations->pair_share, 0);
}

/* Whether `tile`, of whose cost sharing has saved so much, costs less than the best so far, which it then is. */
static bool take_cheaper(fg_plan *plan, const gemm_question *q, const gemm_tile *tile, double saved, int32_t num_sms) {
    const double cost = cost_of(q, tile, num_sms) - saved;
    if (cost >= plan->cost) return false;
    plan->cost = cost;
    plan->split_k = saved > 0 ? 2 : 1;
    plan->block_m = tile->block_m;
    plan->block_n = tile->block_n;
    plan->num_stages = tile->num_stages;
    return true;
}

/* Of the kernel for groups of some rows, which are cut evenly into tiles of at most so many rows; blocks 0: it has none
 * of so many. */
static gemm_tile tile_of_some(const gemm_question *q, int32_t most, bool grouped) {
    const gemm_durations *const durations = q->durations;
    const gemm_tile *const tallest = q->chosen ? &durations->tallest_chosen : &durations->tallest[grouped];
    if (most == tallest->block_m) return *tallest;
    gemm_tile tile = q->chosen ? durations->chosen : durations->some[grouped];
    if (most > tile.block_m) tile.blocks = 0;
    tile.block_m = most;
    tile.num_stages = most <= 96 ? 7 : most <= 160 && durations != &scaled ? 6 : 5;
    return tile;
}

/* Whether there is a kernel whose tallest tiles these are: where the device chooses, only such are weighed. */
static bool is_tallest_of_kernel(int32_t rows) {
    return rows == FG_SOME_LEAST || rows == FG_SOME_SCALED || rows == FG_SOME_PROMOTED || rows == FG_SOME_HALVES;
}

/* Persistent blocks walk over the tiles in waves of num_sms, so what counts is the number of waves times the duration
 * of a tile. Wide tiles load less per multiplication and have less epilogue per column; narrow ones fill the last wave
 * and waste less of a last column tile. Pairs of blocks that share B load less still, but waste one of the two at the
 * odd end of each group, unless a pair may have rows of two groups. Groups of some rows leave much of such tiles empty;
 * those of few rows do so always, and with a kernel that fits them take as long as reading their weights. Where all
 * rows are a few hundred, these kernels have more tiles, or share K, and so keep more multiprocessors busy. */
static fg_plan choose_sm90(int64_t m, int64_t n, int64_t k, int64_t groups, fg_dtype dtype, int32_t num_sms,
                           int32_t tiles) {
    enum {
        FEW_ROWS = 64,
        FEW_ROWS_OF_GROUPS = 32,
        ONE_TILE = 128,
        SOME_ROWS = 512,
        FEW_COLUMNS_ROWS = 2048, /* that few columns leave with fewer large tiles than there are multiprocessors */
        BOX_COLUMNS = 64,        /* of a row-major B, which is one block's */
        /* In the unit of durations: what pairs that share K exchange (pair_share) behind the last products, and what
         * begin and end of a tile take that no other is before or behind. Of all kinds. */
        LAST_EXCHANGE = 11,
        ONLY_BEGIN_AND_END = 24
    };
    const int32_t fitting = FG_TILES_MASKED | FG_TILES_EQUAL | FG_TILES_BLOCKS | FG_TILES_DENSE | FG_TILES_ADDED |
                            FG_TILES_ROWS | FG_TILES_ASKEW | FG_TILES_ROW_MAJOR | FG_TILES_COLUMNS | FG_TILES_USUAL;
    fg_plan plan = {.family = FG_FAMILY_SM90, .split_k = 1};
    plan.block_k = (int32_t)(128 / fg_dtype_size(dtype));
    const gemm_durations *const durations = tiles & FG_TILES_BLOCKS ? &scaled
                                            : fg_is_float8(dtype)   ? &promoted
                                                                    : &halves;
    const bool grouped = groups > 1;
    const int64_t rows = ceil_div(m, grouped ? groups : 1); /* of one group, on average */
    const bool columns = tiles & FG_TILES_COLUMNS;
    const bool fits = m > 0 && num_sms > 1 && !(tiles & ~fitting);
    const bool few = grouped ? rows <= FEW_ROWS_OF_GROUPS && !fits : rows <= FEW_ROWS;
    if (few && !(tiles & FG_TILES_TALL) && !columns)
        return fg_plan_decode(m, n, k, grouped ? groups : 1, durations, plan, num_sms);

    const bool apart = grouped && !(tiles & FG_TILES_PACKED);
    const bool known = !(tiles & FG_TILES_MASKED) && (!apart || tiles & FG_TILES_EQUAL);
    const gemm_question question = {
        .rows = apart ? rows : m,
        .groups = apart ? groups : 1,
        .n = n,
        .steps = ceil_div(k, plan.block_k),
        .known = known,
        .dense = tiles & FG_TILES_DENSE,
        .added = tiles & FG_TILES_ADDED && m > SOME_ROWS,
        .askew = tiles & FG_TILES_ASKEW,
        .bounded = apart && !(tiles & FG_TILES_EQUAL),
        .chosen = fits && grouped && !known && groups <= FG_FEW_GROUPS,
        .durations = durations,
    };
    plan.cost = INFINITY;
    for (size_t i = 0; i < sizeof durations->large / sizeof *durations->large; i++) {
        const gemm_tile *const tile = &durations->large[i];
        if (tile->blocks == 0 || (tiles & FG_TILES_NARROW && (tile->block_m > 128 || tile->block_n > 128))) continue;
        const bool of_scaled_rows = tile->block_n == 96 || tile->block_n == 224 || tile->block_n == 272;
        if (of_scaled_rows && !(tiles & FG_TILES_ROWS)) continue;
        if ((tile->block_n == 96 || tile->block_n == 272) && tiles & FG_TILES_ADDED) continue;
        if (tiles & FG_TILES_ROW_MAJOR && tile->block_n % (BOX_COLUMNS * tile->blocks) != 0) continue;
        if (grouped && fits && !columns && rows <= FEW_ROWS) continue;
        const double saved = saved_by_sharing(&question, tile, num_sms);
        take_cheaper(&plan, &question, tile, saved, num_sms);
    }
    const int64_t most = !fits ? ONE_TILE : tiles & FG_TILES_ADDED ? SOME_ROWS : FEW_COLUMNS_ROWS;
    const bool some = fits && !columns && (grouped || (rows > ONE_TILE && rows <= most));
    for (int32_t most_rows = FG_SOME_LEAST; most_rows <= FG_SOME_HALVES && some; most_rows += FG_SOME_UNIT) {
        const gemm_tile tile = tile_of_some(&question, most_rows, grouped);
        if (tile.blocks == 0 || (question.chosen && !is_tallest_of_kernel(most_rows))) continue;
        if (!take_cheaper(&plan, &question, &tile, 0, num_sms)) continue;
        plan.some_rows = 1;
        plan.least_rows = question.chosen ? FG_SOME_LEAST : 0;
        plan.overhead_rows = question.chosen ? overhead_rows(&tile, question.steps) : 0;
    }
    if (grouped || rows > most || tiles & (FG_TILES_TALL | FG_TILES_NARROW)) return plan;
    if (rows <= ONE_TILE) {
        const double to_read = (double)(question.steps * n) * FG_STEP_BYTES / durations->one_row_bytes;
        plan.cost = fmax(plan.cost * durations->one_row_step, to_read) + ONLY_BEGIN_AND_END;
    } else {
        plan.cost += durations->last_end + (plan.split_k > 1 ? LAST_EXCHANGE : 0);
    }
    if (columns) return plan;
    const fg_plan none = {.family = FG_FAMILY_SM90, .block_k = plan.block_k, .split_k = 1};
    const fg_plan decode = fg_plan_decode(m, n, k, 1, durations, none, num_sms);
    const fg_plan best = decode.cost < plan.cost ? decode : plan;
    return tiles & FG_TILES_USUAL ? fg_plan_fitting(m, n, k, durations, tiles & FG_TILES_ASKEW, best, num_sms) : best;
}

/* Weights are read once where rows are one row of tiles, though some groups have a third more rows than others, or where so
 * few groups run at once that the rows of tiles of each do. If they are no more than some times what L2 holds, they give
 * way first there, and what it holds already need not be written back for them; more of them come faster by lines. */
static fg_weights weights_of(const fg_plan *plan, int64_t m, int64_t n, int64_t k, int64_t groups, fg_dtype dtype,
                             int32_t tiles) {
    enum { FEW = 4, SOME = 64, FEW_MEGABYTES = 320 };
    if (plan->few_rows) return tiles & FG_TILES_DENSE && m <= plan->block_m ? FG_WEIGHTS_GIVE_WAY : FG_WEIGHTS_STAY;
    if (!plan->some_rows) return FG_WEIGHTS_STAY;
    const bool one_row = 4 * m <= 3 * groups * plan->block_m;
    const double megabytes = (double)groups * (double)n * (double)k * (double)fg_dtype_size(dtype) / (1 << 20);
    if (megabytes <= FEW_MEGABYTES && (groups <= FEW || (groups <= SOME && one_row))) return FG_WEIGHTS_GIVE_WAY;
    return one_row ? FG_WEIGHTS_BY_LINES : FG_WEIGHTS_STAY;
}

/* A program asks for the same few products again and again, and to choose takes up to a microsecond of each call: a thread
 * remembers what it chose last. */
fg_plan fg_plan_gemm_sm90(int64_t m, int64_t n, int64_t k, int64_t groups, fg_dtype dtype, int32_t num_sms,
                          int32_t tiles) {
    enum { QUESTIONS = 256 };
    typedef struct {
        int64_t m, n, k, groups;
        int32_t dtype, num_sms, tiles, asked;
    } question;
    static _Thread_local struct {
        question of;
        fg_plan plan;
    } chosen[QUESTIONS];
    const question q = {m, n, k, groups, (int32_t)dtype, num_sms, tiles, 1};
    uint64_t hash = 0, parts[sizeof q / sizeof hash];
    memcpy(parts, &q, sizeof q);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) hash = (hash ^ parts[i]) * UINT64_C(0x9e3779b97f4a7c15);
    const size_t at = hash >> 56;
    if (memcmp(&chosen[at].of, &q, sizeof q) != 0) {
        fg_plan plan = choose_sm90(m, n, k, groups, dtype, num_sms, tiles);
        plan.weights = weights_of(&plan, m, n, k, groups, dtype, tiles);
        plan.adds_in_shared = tiles & FG_TILES_ADDED && !plan.few_rows && !plan.some_rows && plan.split_k == 1 &&
                              has_room_for_output(plan.block_n, tiles & FG_TILES_BLOCKS);
        plan.num_stages -= plan.adds_in_shared;
        chosen[at].plan = plan;
        chosen[at].of = q;
    }
    return chosen[at].plan;
}

double fg_gemm_cost_sm90(const fg_gemm_params *params, int32_t num_sms) {
    const fg_gemm_shape all = fg_gemm_all_rows(params);
    return fg_plan_gemm_sm90(all.m, all.n, all.k, all.groups, params->a.dtype, num_sms, fg_gemm_tiles(params)).cost;
}

double fg_transposition_cost_sm90(size_t bytes) {
    const double LAUNCH = 13;
    return bytes == 0 ? 0 : LAUNCH + 2 * (double)bytes / halves.bytes; /* read and written */
}
