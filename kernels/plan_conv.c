/*
 * Plans of the convolution passes: which tile, and into how many slices the reduction is split.
 *
 * A tile step is 128 bytes deep. Large tiles move the fewest bytes per product; small ones and splits exist to give
 * every multiprocessor work when rows or channels are few. A split by groups of offsets, each with its own row order,
 * also saves most of the products with neighbours that do not exist.
 */
#include <math.h>

#include "plan.h"
#include "segment.h"

enum {
    STEP_BYTES = 128,
    CTAS_PER_SM = 2,         /* resident, of the 128-row tiles */
    SMALL_CTAS_PER_SM = 3,   /* resident, of the 64 x 64 tile */
    MIN_STEPS_PER_SLICE = 8, /* shorter slices cost more in partial sums than they gain */
    MAX_GATHER_SLICES = 32,
    MAX_PHASE_SPLITS = 9,       /* of rows by phases: more gain nothing on an H200 */
    MAX_SLICES = 65535,         /* of any pass: a grid's extent */
    MIN_ROWS_PER_SLICE = 512,   /* weight gradient */
    MIN_ROWS_PER_WAVE = 4096,   /* of a slice, weight gradient on Hopper, where there is more than one wave */
    MAX_ROWS_PER_SLICE = 65536, /* bounds the chain of additions that tensor cores truncate */
    WGRAD_WAVES = 4,            /* offsets differ in neighbours: more CTAs than fit at once even that out */
    MIN_ROWS_PER_SUM = 256,     /* column sums */
    MAX_PARTIALS = 1 << 28,     /* 1 GiB of float32 */
    MAX_MATRIX_BYTES = 1 << 28, /* of gathered rows at a time, "explicit_gemm": 256 MiB */
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

/* ---- forward pass and input gradient ---- */

/* A tile, and the speed of a card full of it: TFLOP/s on 132 multiprocessors with 16-bit inputs and rows as they come,
 * every product counted. Fitted to an H200; those of float8 are predictions, between the bytes from L2, of which it
 * needs half, and the GEMM kernel's speed with promoted sums. */
typedef struct {
    int32_t block_m, block_n, num_stages, ctas_per_sm;
    double tflops;
} tile;

/* What else a convolution spends its time on, in seconds and bytes, on the same card. */
static const double MEASURED_SMS = 132;
static const double TASK_SECONDS = 3e-6;   /* a CTA's pipeline fills, and empties, once a tile */
static const double LAUNCH_SECONDS = 3e-6; /* of the kernel that adds partial sums */
static const double L2_BYTES = 5.5e12;     /* a second, from L2 to the multiprocessors */
static const double DRAM_BYTES = 4.2e12;   /* a second, read and written */
static const double L2_HOLDS = 32e6;       /* bytes of features beside the weights that pass through */
static const double ENTRY_BYTES = 8;       /* of L2 for a map entry read through an order; 4 when not */

/* What is more complicated has to be this much cheaper: the figures are not exact. */
static const double WORTHWHILE = 0.97;

/* What a channel of a gathered row takes. The Hopper kernel has both parts of true float32 side by side. */
static int64_t channel_bytes(const fg_conv_question *q, fg_family family) {
    const bool split = q->dtype == FG_FLOAT32 && q->precision == FG_PRECISION_IEEE && family == FG_FAMILY_SM90;
    return (split ? 2 : 1) * (int64_t)fg_dtype_size(q->dtype);
}

/* Of a map with phases: the offsets that the longest tile works through. They are those of the largest phase (of a cube;
 * else of an average one) and of phases behind it that the tile has rows of, too: fitted to an H200. */
static double longest_tile(const fg_conv_question *q, int32_t block_m) {
    const int64_t phases = fg_phase_count(&q->orders), k = llround(cbrt((double)q->v));
    int64_t largest = 1;
    for (int axis = 0; axis < 3; axis++) largest *= ceil_div(k, at_least(q->orders.phases[axis], 1));
    if (k * k * k != q->v) largest = ceil_div(q->v, phases);
    const double behind = sqrt((double)block_m * (double)phases / (double)q->rows);
    return fmin((double)q->v, (double)largest + behind * (double)q->v / (double)phases);
}

/* Seconds of one choice. `groups` is 0 for rows as they come: then a tile works through nearly all offsets, neighbours
 * in space share what they gather, and all of this is part of the tile's speed. An order saves the offsets that no row
 * of a tile needs, and pays for it with rows and map entries from all over a segment. */
static double seconds(const fg_conv_question *q, fg_family family, const tile *t, int64_t groups, int64_t splits) {
    const double size = (double)channel_bytes(q, family), scale = q->num_sms / MEASURED_SMS;
    const int64_t columns = ceil_div(q->co, t->block_n), slices = at_least(groups, 1) * splits;
    const int64_t depth = STEP_BYTES / (int64_t)size, slots = (int64_t)q->num_sms * t->ctas_per_sm;
    /* float32: half as many products a step; the three products of "ieee" take three times as long. float8 is
     * multiplied as float16, or by tiles with figures of their own. */
    const double slowdown = size < 4 ? 1 : q->precision == FG_PRECISION_IEEE ? 6 : 2;
    const double task_flops =
        2.0 * t->block_m * t->block_n * ((double)q->v / (double)slices) * (double)(ceil_div(q->ci, depth) * depth);
    const double task_seconds = task_flops * slowdown * (double)slots / (t->tflops * 1e12 * scale);
    const double tasks = (double)tiles(q->rows, q->co, t->block_m, t->block_n) * (double)slices;
    const double waves = tasks / (double)slots;

    double span = ceil(waves), other = ceil(waves) * TASK_SECONDS;
    const int64_t phases = fg_phase_count(&q->orders);
    const double pairs = fg_pair_share(q->v, phases);
    if (groups > 0) {
        const int64_t segment = fg_order_segment(q->rows), together = at_least(at_most(q->rows, segment), 1);
        /* A segment is one part of the scene, and has fewer kinds of rows: as if there were more of each. It has rows
         * of all phases. */
        const double alike = phases > 1 ? 1 : pow((double)q->rows / (double)together, 0.3);
        const int64_t sorted = (int64_t)((double)together * alike);
        const double share = fg_union_share(sorted, q->v, groups, phases, t->block_m);
        const double gathered = pairs * (double)q->v * (double)q->rows * (double)(q->ci * columns) * size;
        const bool fits = (double)together * (double)q->ci * size <= L2_HOLDS;
        if (phases == 1) {
            span = fmin(span, share * waves + 0.5); /* tiles differ: the last CTA is half a full one late */
        } else {
            const double offsets = ceil(longest_tile(q, t->block_m) / (double)slices);
            const double longest = fmin(1, offsets * (double)slices / (double)q->v);
            span = fmin(span, fmax(longest, share * waves + 0.5 * longest));
        }
        other += (1 - share) * gathered / (L2_BYTES * scale);
        other += (double)q->rows * (double)(q->v * columns) * ENTRY_BYTES / (L2_BYTES * scale);
        if (!fits) other += gathered * (1 / DRAM_BYTES - 1 / L2_BYTES) / scale;
    }
    if (slices > 1) {
        /* A surface misses about half of all offsets one by one, few slices of many: those rows have no partial sum.
         * Nor has a row of a slice without offsets of its phase. */
        const double present =
            phases > 1 ? fmin(1, pairs * (double)q->v / (double)slices) : 1 - 0.5 * (double)slices / (double)q->v;
        const double bytes = 2.0 * sizeof(float) * (double)q->rows * (double)q->co * (double)slices;
        other += LAUNCH_SECONDS + present * bytes / (DRAM_BYTES * scale);
    }
    return span * task_seconds + other;
}

static bool is_masked(fg_algorithm algorithm) {
    return algorithm == FG_ALGORITHM_MASKED_IMPLICIT_GEMM || algorithm == FG_ALGORITHM_MASKED_IMPLICIT_GEMM_SPLITK;
}

/* Changes *plan where this choice is worth it against *best, the seconds of *plan. */
static void try_slices(const fg_conv_question *q, const tile *t, int64_t groups, int64_t splits, fg_plan *plan,
                       double *best) {
    const bool split = q->algorithm != FG_ALGORITHM_IMPLICIT_GEMM && q->algorithm != FG_ALGORITHM_MASKED_IMPLICIT_GEMM;
    const int64_t slices = at_least(groups, 1) * splits;
    if (slices > 1 && (!split || slices * q->rows * q->co * q->channel_groups > MAX_PARTIALS)) return;
    const double cost = seconds(q, plan->family, t, groups, splits);
    if (cost > WORTHWHILE * *best) return;
    *best = cost;
    set_tile(plan, t->block_m, t->block_n, t->num_stages);
    plan->groups = (int32_t)groups;
    set_split(plan, slices, q->rows * q->co);
}

/* Tries the orders that the caller has and none, each with as many more splits as fill the card. Of phases tiles are
 * short, so that more of them can pay; and since the offsets of a slice are `splits` apart, a number that has a divisor
 * in common with the phases leaves the offsets of a phase to a part of the slices. */
static void choose_slices(const fg_conv_question *q, const tile *t, int64_t max_splits, fg_plan *plan, double *best) {
    const bool masked = is_masked(q->algorithm);
    const bool plain = q->algorithm == FG_ALGORITHM_IMPLICIT_GEMM || q->algorithm == FG_ALGORITHM_IMPLICIT_GEMM_SPLITK;
    const int64_t phases = fg_phase_count(&q->orders);
    const int64_t tile_count = at_least(tiles(q->rows, q->co, t->block_m, t->block_n), 1);
    const int64_t slots = (int64_t)q->num_sms * t->ctas_per_sm;
    for (int32_t i = -1; i < q->orders.sets; i++) {
        const int64_t groups = i < 0 ? 0 : q->orders.groups[i], orders = at_least(groups, 1);
        if (i < 0 ? masked && q->orders.sets > 0 : plain) continue;
        if (groups > 0 && phases > 1) {
            const int64_t most =
                at_most(at_most(max_splits, MAX_PHASE_SPLITS), (int64_t)ceil(longest_tile(q, t->block_m)));
            for (int64_t splits = 1; splits <= at_least(most, 1); splits++)
                if (fg_greatest_common_divisor(splits, phases) == 1) try_slices(q, t, groups, splits, plan, best);
            continue;
        }
        const int64_t filling = at_most(slots / (tile_count * orders), max_splits / orders);
        /* No more than it takes for the longest slices, which have one offset more than others. */
        const int64_t offsets = q->v / orders, longest = ceil_div(offsets, at_least(filling, 1));
        try_slices(q, t, groups, 1, plan, best);
        try_slices(q, t, groups, ceil_div(offsets, longest), plan, best);
    }
}

/* Hopper, few channels: four warpgroups of a multiprocessor have a tile each and go through the offsets in step. A step
 * is 64 channels of one offset, or all of as many offsets as fill it. */
static void choose_own_rows(const fg_conv_question *q, fg_plan *plan, double *best) {
    enum { DEPTH = 64, STAGES = 3, WARPGROUPS = 4 };
    static const double STEP_SECONDS = 7.5e-7; /* of all four, measured on an H200 */
    /* The narrow tiles of the other kernel, there, beside their model: rows as they come, in order, by phases. */
    static const double AS_THEY_COME = 1.25, IN_ORDER = 0.86, BY_PHASES = 1;
    const bool plain = q->algorithm == FG_ALGORITHM_AUTO || q->algorithm == FG_ALGORITHM_IMPLICIT_GEMM ||
                       q->algorithm == FG_ALGORITHM_IMPLICIT_GEMM_SPLITK;
    if (!plain || fg_dtype_size(q->dtype) != 2 || q->ci > FG_OWN_ROWS_DEPTH || q->co > FG_OWN_ROWS_COLUMNS) return;
    const int64_t packed = q->ci <= DEPTH / 2 && DEPTH % q->ci == 0 ? DEPTH / q->ci : 1;
    const int64_t steps = ceil_div(q->v, packed);
    const int64_t waves = ceil_div(q->rows, (int64_t)FG_OWN_ROWS * WARPGROUPS * q->num_sms);
    const double cost = TASK_SECONDS + (double)(waves * steps) * STEP_SECONDS;
    const double in_order = fg_phase_count(&q->orders) > 1 ? BY_PHASES : IN_ORDER;
    if (cost > *best * (plan->groups > 0 ? in_order : AS_THEY_COME)) return;
    *best = cost;
    set_tile(plan, FG_OWN_ROWS, q->co <= 32 ? 32 : 64, STAGES);
    plan->block_k = DEPTH;
    plan->groups = 0;
    set_split(plan, 1, q->rows * q->co);
}

/* Hopper, by segments: what passes by are weights, and their time or that of the products is a segment's. Where rows
 * are few, so are those of a segment, and their tiles work through more offsets. */
static void choose_segments(const fg_conv_question *q, fg_plan *plan, double *best) {
    /* Fitted to an H200, of a tile at one offset: whatever it has, with 16, 32 or 64 channels, and for 64 columns of 64
     * channels; the least that all tiles take together, which is one of them; of a segment's begin and end. */
    static const double STEP_SECONDS[] = {3.7e-8, 5.3e-8, 6.6e-8}, PRODUCTS_SECONDS = 6.7e-8;
    static const double LATENCY_SECONDS[] = {1.8e-7, 2.8e-7, 5.3e-7}, SEGMENT_SECONDS = 0.8e-6;
    static const double LAY_OUT_BYTES = 1e12; /* a second, read and written */
    const int32_t tiles = q->segment_tiles;
    const bool masked = is_masked(q->algorithm), only = masked && q->orders.sets == 0; /* the only order there is */
    if (tiles == 0 || !(masked || q->algorithm == FG_ALGORITHM_AUTO) || fg_dtype_size(q->dtype) != 2) return;
    const int32_t depth = q->ci <= 16 ? 16 : q->ci <= 32 ? 32 : FG_SEGMENT_STEP;
    const int32_t block_n = q->co <= 32 ? 32 : q->co <= 64 || depth < FG_SEGMENT_STEP ? 64 : 128;
    const int64_t steps = ceil_div(q->v, FG_SEGMENT_STEP / depth), blocks = ceil_div(q->ci, depth);
    const int64_t column_tiles = ceil_div(q->co, block_n), segment = (int64_t)fg_segment_rows(tiles);
    const int64_t waves = ceil_div(ceil_div(q->rows, segment) * column_tiles, q->num_sms);
    const double share = tiles == 4 ? 0.73 : 0.78; /* of the offsets, of a tile */
    const double part = (double)(block_n * depth) / (64 * 64);
    const int32_t kind = depth / 32; /* 16, 32, 64: 0, 1, 2 */
    const double offset = fmax((double)tiles * (STEP_SECONDS[kind] + PRODUCTS_SECONDS * part), LATENCY_SECONDS[kind]);
    const double products = (double)q->v * share * offset;
    /* Weights, places, input rows of 16-bit channels. */
    const double bytes = (double)(steps * block_n * STEP_BYTES + 2 * q->v * segment) + 2.8 * (double)(segment * depth);
    const double moves = bytes / (L2_BYTES / MEASURED_SMS);
    const int64_t laid_out = column_tiles * blocks * steps * block_n * STEP_BYTES;
    const double cost = TASK_SECONDS + LAUNCH_SECONDS + 2 * (double)laid_out / LAY_OUT_BYTES +
                        (double)waves * (SEGMENT_SECONDS + (double)blocks * fmax(products, moves));
    if (cost > WORTHWHILE * *best && !only) return;
    *best = cost;
    set_tile(plan, FG_SEGMENT_TILE, block_n, block_n == 128 ? 5 : 8);
    plan->block_k = depth;
    plan->segment_tiles = tiles;
    plan->groups = 0;
    plan->split_k = 1;
    plan->workspace_bytes = laid_out;
}

/* Hopper. Bytes from L2 per product are what a tile must save, so the widest is best, and 16-bit rows have a taller
 * one, for scenes that fill the card with it twice, or are one tile of it; narrower ones are for channels that would
 * leave much of a wider one empty. */
static fg_plan plan_conv_sm90(const fg_conv_question *q) {
    static const struct {
        tile tile, float8;
        int32_t cost; /* of a column, relative: sphere256 with 256 channels on an H200 */
    } candidates[] = {
        {{128, 256, 4, 1, 800}, {128, 256, 4, 1, 1150}, 10},
        {{128, 128, 5, 1, 610}, {128, 128, 5, 1, 1000}, 13},
        {{128, 64, 3, 2, 400}, {128, 64, 3, 2, 700}, 17},
        {{128, 32, 4, 2, 250}, {0}, 25}, /* 16-bit only, of weights as they lie */
    };
    const int count = fg_dtype_size(q->dtype) == 2 && !q->gradient ? 4 : 3;
    static const tile tallest = {192, 256, 3, 1, 880};
    int best = 0;
    for (int i = 1; i < count; i++) {
        const int64_t block_n = candidates[i].tile.block_n, best_n = candidates[best].tile.block_n;
        if (ceil_div(q->co, block_n) * block_n * candidates[i].cost <
            ceil_div(q->co, best_n) * best_n * candidates[best].cost)
            best = i;
    }
    const tile *t = fg_is_float8(q->dtype) ? &candidates[best].float8 : &candidates[best].tile;
    const int64_t block_k = STEP_BYTES / channel_bytes(q, FG_FAMILY_SM90);
    fg_plan plan = {.family = FG_FAMILY_SM90, .block_k = (int32_t)block_k, .split_k = 1};
    set_tile(&plan, t->block_m, t->block_n, t->num_stages);
    const int64_t max_splits = at_most(MAX_GATHER_SLICES, q->v);
    double cost = INFINITY;
    const bool fills = tiles(q->rows, q->co, tallest.block_m, tallest.block_n) >= 2 * (int64_t)q->num_sms;
    if (best == 0 && fg_dtype_size(q->dtype) == 2 && (fills || q->rows <= tallest.block_m)) t = &tallest;
    choose_slices(q, t, max_splits, &plan, &cost);
    choose_own_rows(q, &plan, &cost);
    choose_segments(q, &plan, &cost);
    return plan;
}

/* Groups of channels are side by side in one launch: each plans for its share of the multiprocessors. */
static fg_plan plan_conv_portable(const fg_conv_question *whole) {
    static const tile large = {128, 128, 3, CTAS_PER_SM, 260}, tall = {128, 64, 3, CTAS_PER_SM, 220},
                      small = {64, 64, 4, SMALL_CTAS_PER_SM, 160};
    fg_conv_question share = *whole;
    share.num_sms = (int32_t)at_least(whole->num_sms / whole->channel_groups, 1);
    const fg_conv_question *q = &share;
    fg_plan plan = {.block_k = (int32_t)(STEP_BYTES / fg_dtype_size(q->dtype)), .split_k = 1};
    const int64_t columns_64 = ceil_div(q->co, 64) * 64, columns_128 = ceil_div(q->co, 128) * 128;
    /* A 64-wide tile pays where a 128-wide one would compute a fifth or more in vain (64 or 192 channels). */
    const bool narrow = 5 * columns_64 <= 4 * columns_128;
    const tile *t = &small;
    if (!narrow && tiles(q->rows, q->co, 128, 128) >= q->num_sms) t = &large;
    if (narrow && tiles(q->rows, q->co, 128, 64) >= CTAS_PER_SM * q->num_sms) t = &tall;
    set_tile(&plan, t->block_m, t->block_n, t->num_stages);
    const int64_t steps = q->v * ceil_div(q->ci, plan.block_k);
    const int64_t splits = t == &small ? at_most(q->v, steps / MIN_STEPS_PER_SLICE) : 1;
    double cost = INFINITY;
    choose_slices(q, t, at_most(MAX_GATHER_SLICES, splits), &plan, &cost);
    plan.workspace_bytes *= q->channel_groups;
    return plan;
}

/* Whole tiles of 128 rows of the matrix at a time, with their float32 sums. The product plans its own tiles. */
static fg_plan plan_conv_explicit(const fg_conv_question *q) {
    const int64_t row_bytes = q->v * q->ci * (int64_t)fg_dtype_size(q->dtype) + q->co * (int64_t)sizeof(float);
    const int64_t most = at_least(MAX_MATRIX_BYTES / at_least(row_bytes, 1) / 128, 1) * 128;
    fg_plan plan = {.split_k = 1};
    set_tile(&plan, (int32_t)at_least(at_most(q->rows, most), 1), (int32_t)q->co, 1);
    plan.workspace_bytes = plan.block_m * row_bytes;
    return plan;
}

/* Tensor cores work through 64 columns and a step of 64 channels (32 of float32) for each group, whatever it has; plain
 * arithmetic through ci products a column, each with a load of the weight: at 16 channels they are even. */
static fg_plan plan_conv_narrow(const fg_conv_question *q) {
    fg_plan plan = {.split_k = 1};
    set_tile(&plan, 1, 1, 1);
    plan.block_k = 1;
    plan.workspace_bytes = q->v * q->ci * q->co * q->channel_groups * (int64_t)sizeof(float);
    return plan;
}

fg_plan fg_plan_conv(const fg_conv_question *q) {
    if (q->algorithm == FG_ALGORITHM_EXPLICIT_GEMM) return plan_conv_explicit(q);
    if (q->algorithm == FG_ALGORITHM_AUTO && q->channel_groups > 1 && q->ci <= FG_MAX_NARROW_GROUP &&
        !fg_is_float8(q->dtype))
        return plan_conv_narrow(q);
    const bool wide = q->channel_groups == 1 || at_most(q->ci, q->co) >= FG_MIN_HOPPER_GROUP;
    const int64_t whole = fg_is_float8(q->dtype) ? 16 : 8; /* channels that rows of whole 16-byte pieces come by */
    const bool wgmma = q->compute_capability == 90 && wide && q->ci > 0 && q->ci % whole == 0 && q->co % 8 == 0;
    return wgmma ? plan_conv_sm90(q) : plan_conv_portable(q);
}

/* ---- weight and bias gradient ---- */

/* Hopper, by segments: tiles of 64 rows of grad_out pass by, and the products with them or the bytes take the time of a
 * task. Slices are as even as segments allow, so that there are as many as fill the card, or several times as many. */
static void choose_wgrad_segments(const fg_conv_question *q, fg_plan *plan) {
    enum { CONSUMERS = 3, PRODUCT_CHANNELS = 64, WIDEST = 128 };
    /* Of tiles of one offset (plan_conv_wgrad_sm90), fitted to an H200: what is not products, and bytes from L2 of its
     * tiles. */
    static const double OTHER_SECONDS = 1.8e-5, TILE_BYTES = 7.4e12;
    /* Of a product at one offset with 64 rows, to which 64 output channels add, likewise, and bytes to one
     * multiprocessor; of the ends of a task. */
    static const double PRODUCT_SECONDS = 5e-8, CHANNELS_SECONDS = 1.45e-7, SM_BYTES = 4.2e10, END_SECONDS = 6e-6;
    const int32_t tiles_each = q->segment_tiles;
    const bool only = is_masked(q->algorithm);
    if (tiles_each == 0 || !(only || q->algorithm == FG_ALGORITHM_AUTO) || fg_dtype_size(q->dtype) != 2 || q->co == 0)
        return;
    const int32_t depth = q->ci <= 16 ? 16 : q->ci <= 32 ? 32 : PRODUCT_CHANNELS;
    const int32_t block_m = q->co <= 32 ? 32 : q->co <= 64 || depth < PRODUCT_CHANNELS ? 64 : WIDEST;
    /* Sums in registers, see the kernel. */
    const int64_t products = block_m == WIDEST ? 2 : 192 / block_m, packed = PRODUCT_CHANNELS / depth;
    const int64_t groups = ceil_div(q->v, at_most(CONSUMERS * products * packed, FG_SEGMENT_VOLUME));
    const int64_t tasks = groups * tiles(q->ci, q->co, depth, block_m);
    const int64_t segment = fg_segment_rows(tiles_each), segments = ceil_div(q->rows, segment);
    const int64_t at_once = at_least(q->num_sms / tasks, 1), waves = ceil_div(q->rows, at_once * MAX_ROWS_PER_SLICE);
    const int64_t slices = at_least(at_most(at_once * waves, at_most(segments, MAX_SLICES)), 1);

    const double share = tiles_each == 4 ? 0.73 : 0.78; /* of the offsets, of a tile */
    const double of_group = (double)ceil_div(q->v, groups * packed) * fmin(share * (double)packed, 1);
    const double tile_seconds = of_group * (PRODUCT_SECONDS + CHANNELS_SECONDS * block_m / 64);
    const double bytes = (double)segment * (double)(3 * depth + 2 * block_m);
    const double each = fmax(tiles_each * tile_seconds, bytes / SM_BYTES) + bytes / SM_BYTES / 8;
    const double turns = (double)ceil_div(segments, slices) * (double)ceil_div(tasks * slices, q->num_sms);
    const double sums = (double)(slices * q->co * q->v * q->ci) * 2 * sizeof(float) / DRAM_BYTES;
    const double cost = TASK_SECONDS + LAUNCH_SECONDS + END_SECONDS + sums + turns * each;

    const double block = (double)plan->block_m * plan->block_n / (plan->block_m + plan->block_n);
    const double pairs = fg_pair_share(q->v, 1) * (double)q->v * (double)q->rows;
    const double of_tiles = pairs * (double)(ceil_div(q->co, plan->block_m) * plan->block_m * q->ci) * 2 / block;
    const double rival = OTHER_SECONDS + of_tiles / (TILE_BYTES / 2 * q->num_sms / MEASURED_SMS);
    if (cost > WORTHWHILE * rival && !only) return;
    set_tile(plan, block_m, depth, block_m == WIDEST ? 2 : block_m == 64 ? 4 : 3);
    plan->block_k = FG_SEGMENT_TILE;
    plan->segment_tiles = tiles_each;
    plan->split_k = (int32_t)slices;
    plan->workspace_bytes = slices * q->co * q->v * q->ci * (int64_t)sizeof(float);
}

/* Hopper. The tile as in the forward pass: fewest bytes from L2, without leaving much of a wide one empty. Slices:
 * about WGRAD_WAVES CTAs a multiprocessor where there are rows enough, one where that leaves slices short. The longest
 * of many slices has twice the mean. */
static fg_plan plan_conv_wgrad_sm90(const fg_conv_question *q) {
    const int64_t rows = q->rows, ci = q->ci, co = q->co, v = q->v;
    typedef struct {
        int32_t block_m, block_n, num_stages, offsets; /* that it may touch */
        int32_t cost; /* of an output channel, relative: bytes per product, (block_m + block_n) / (block_m * block_n) */
    } candidate;
    static const candidate tiles_16[] = {{256, 192, 3, 6, 10},
                                         {128, 256, 4, 8, 13},
                                         {64, 384, 3, FG_WGRAD_MAX_OFFSETS, 20},
                                         {0}},
                           tiles_32[] = {{128, 384, 3, 8, 10}, {64, 384, 3, FG_WGRAD_MAX_OFFSETS, 17}, {0}};
    const candidate *best = fg_dtype_size(q->dtype) == 4 ? tiles_32 : tiles_16;
    for (const candidate *c = best; c->block_m > 0; c++) {
        const int64_t width = ceil_div(co, c->block_m) * c->block_m;
        const int64_t best_width = ceil_div(co, best->block_m) * best->block_m;
        if (width * c->cost < best_width * best->cost) best = c;
    }
    fg_plan plan = {.family = FG_FAMILY_SM90, .block_k = (int32_t)(STEP_BYTES / fg_dtype_size(q->dtype)), .split_k = 1};
    set_tile(&plan, best->block_m, (int32_t)at_most(best->block_n, best->offsets * ci), best->num_stages);
    /* CTAs of a slice. Those of the bias gradient, which end early, run before those of the last tiles. */
    const int64_t count = at_least(tiles(co, v * ci, plan.block_m, plan.block_n), 1);
    const int64_t one_wave = at_most(q->num_sms / count, rows / MIN_ROWS_PER_SLICE);
    const int64_t waves = at_most(WGRAD_WAVES * q->num_sms / count, rows / MIN_ROWS_PER_WAVE);
    set_split(&plan, at_least(at_least(one_wave, waves), ceil_div(2 * rows, MAX_ROWS_PER_SLICE)), co * v * ci);
    choose_wgrad_segments(q, &plan);
    return plan;
}

fg_plan fg_plan_conv_wgrad(const fg_conv_question *q) {
    const int64_t rows = q->rows, ci = q->ci, co = q->co, v = q->v;
    if (q->compute_capability == 90 && ci > 0 && ci % 8 == 0 && co % 8 == 0) return plan_conv_wgrad_sm90(q);
    fg_plan plan = {.block_k = (int32_t)(STEP_BYTES / fg_dtype_size(q->dtype)), .split_k = 1};
    if (ci > 64 && co > 64)
        set_tile(&plan, 128, 128, 3);
    else
        set_tile(&plan, 64, 64, 4);
    const int64_t count = at_least(v * tiles(co, ci, plan.block_m, plan.block_n), 1);
    const int64_t wanted = WGRAD_WAVES * CTAS_PER_SM * q->num_sms / count;
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
