/*
 * Plans of the CUDA backend: problem shape -> tile configuration and workspace. Host C with no CUDA call in it, so
 * that the heuristics are unit-tested on a machine without a GPU. Nothing is timed: what takes microseconds to plan,
 * products on Hopper, is remembered for its shape.
 */
#ifndef FLEXGEMM_PLAN_H
#define FLEXGEMM_PLAN_H

#include "flexgemm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { FG_FAMILY_PORTABLE = 0, FG_FAMILY_SM90, FG_FAMILY_CPU } fg_family;

/* How L2 gets the weights of the Hopper kernels for few and for some rows. */
typedef enum {
    FG_WEIGHTS_STAY = 0,
    FG_WEIGHTS_GIVE_WAY, /* they are read once, and are the first that make room for others */
    FG_WEIGHTS_BY_LINES, /* they are read once, and so many that they come faster 128 bytes at a time */
} fg_weights;

typedef struct {
    fg_family family;                  /* whose tiles these are */
    int32_t block_m, block_n, block_k; /* output rows, output channels, reduction elements of one tile step */
    int32_t num_stages;                /* of the kernel that has these tiles: depth of its pipeline */
    int32_t groups;                    /* of offsets, each with its own row order; 0: rows as they come */
    int32_t split_k;                   /* reduction slices whose fp32 partials meet in the workspace; 1 = none */
    int32_t segment_tiles;             /* of the Hopper convolution by segments, else 0: tiles of a segment */
    int32_t few_rows;  /* of the Hopper kernel for products of few rows: blocks that read rows for each other; else 0 */
    int32_t some_rows; /* 1: the Hopper kernel for groups of some rows, of which a tile has block_m at most; else 0 */
    int32_t least_rows;     /* there: how low the device may choose tiles; 0: they have block_m rows at most, no less */
    int32_t overhead_rows;  /* and what a tile takes besides its rows, in rows */
    fg_weights weights;     /* of either */
    int32_t adds_in_shared; /* 1: the one for many rows adds sums to the output in shared memory, beside the stages */
    double cost; /* of products on Hopper, in the unit of plan_durations.h: to compare plans of one product */
    int64_t workspace_bytes;
} fg_plan;

/* rows = output rows, ci / co = reduction and output channels as the pass sees them, of one group of channels, v =
 * kernel volume; compute_capability = 90 for 9.0, where the float32 of a weight gradient means TF32: there is no other
 * float32 kernel for it. */
typedef struct {
    int64_t rows, ci, co, v;
    fg_dtype dtype;
    fg_precision precision;
    int32_t num_sms, compute_capability;
    fg_algorithm algorithm;
    fg_order_sets orders; /* that the caller has */
    int64_t channel_groups;
    int32_t segment_tiles; /* of the segments that the caller has; 0: none */
    bool gradient;         /* of the input: 16-bit weights are read transposed */
} fg_conv_question;

/* The Hopper kernel for few channels, 16-bit, rows as they come: a tile is 64 rows, which is how a plan names it, of
 * all columns. So many channels may be reduced, and result. */
enum { FG_OWN_ROWS = 64, FG_OWN_ROWS_DEPTH = 64, FG_OWN_ROWS_COLUMNS = 64 };

/* The Hopper kernel for segments of rows (segment.h), 16-bit: a step is 64 channels of one offset, 32 of two or 16 of
 * four. */
enum { FG_SEGMENT_STEP = 64 };

/* Groups of channels: from how many on one is worth a launch of the Hopper kernels, and up to how many input channels
 * plain arithmetic is ahead of tensor cores. */
enum { FG_MIN_HOPPER_GROUP = 64, FG_MAX_NARROW_GROUP = 8 };

/* Forward pass and input gradient. split_k is a multiple of `groups`: each group may be split further. "explicit_gemm"
 * makes block_m rows of its matrix at a time. block_k 1 is plain arithmetic, for groups of few channels. All groups of
 * channels are one launch of the portable kernel, whose workspace is of all of them; else the plan is that of a launch
 * for each. */
fg_plan fg_plan_conv(const fg_conv_question *question);
/* Weight gradient: a tile is block_m output channels x block_n input channels of one offset; on Hopper block_n of the
 * v * ci columns, which touch FG_WGRAD_MAX_OFFSETS offsets at most, or, by segments, of block_n input channels of some
 * offsets. The reduction runs over rows. */
enum { FG_WGRAD_MAX_OFFSETS = 14 };
fg_plan fg_plan_conv_wgrad(const fg_conv_question *question);
/* Bias gradient: split_k slices of rows; the block sizes are not used. */
fg_plan fg_plan_column_sum(int64_t rows, int64_t columns, int32_t num_sms);
/* Weight gradient of a depthwise convolution: split_k slices of rows, float32 results in the workspace, always. */
fg_plan fg_plan_depthwise_wgrad(int64_t rows, int64_t channels, int64_t v, int32_t num_sms);

/* The sizes of a product whatever its layout: m x n x k is the most that one of its groups can have. */
typedef struct {
    int64_t m, n, k, groups;
} fg_gemm_shape;

fg_gemm_shape fg_gemm_shape_of(const fg_gemm_params *params);
/* Whether there is nothing to write. Without a depth there is: sums of 0. */
bool fg_gemm_is_empty(const fg_gemm_shape *shape);
/* As the plans below ask, and as they are printed: m of all groups together, which are one where the groups share their
 * rows; k of one, on average. */
fg_gemm_shape fg_gemm_all_rows(const fg_gemm_params *params);

fg_plan fg_plan_gemm(int64_t m, int64_t n, int64_t k, int64_t groups, fg_dtype dtype, int32_t num_sms);

enum { FG_SECTOR_BYTES = 32 }; /* that memory is read by */

/* Of the Hopper kernel for few rows: the most blocks that share the K of a tile, of up to so many rows; and of so many
 * two. Their sums take the room of stages. */
enum { FG_MOST_SHARING = 8, FG_ROWS_OF_SHARED = 128, FG_ROWS_OF_HALVED = 160 };

/* Its tiles that fit the rows of a usual output: the lowest, and how far they are apart; and the tallest of each kind that
 * there are registers for, by 64 columns and by 128. */
enum {
    FG_FITTING_LEAST = 80,
    FG_FITTING_UNIT = 16,
    FG_FITTING_FP8 = 192,
    FG_FITTING_FP8_WIDE = 160,
    FG_FITTING_SCALED = 128,
    FG_FITTING_SCALED_WIDE = 64, /* none */
    FG_FITTING_HALVES = 224,
    FG_FITTING_HALVES_WIDE = 192,
};

/* Of the Hopper kernel for groups of some rows: heights of its tiles, and how many groups there may be where the device
 * chooses one, since a warp has a group to each lane. */
enum { FG_SOME_LEAST = 96, FG_SOME_UNIT = 16, FG_SOME_SCALED = 160, FG_SOME_PROMOTED = 192, FG_SOME_HALVES = 256 };
enum { FG_FEW_GROUPS = 32 };

/* What a product asks of the tiles of the Hopper kernel; bits. */
enum {
    FG_TILES_PACKED = 1, /* groups of rows that start at multiples of 128: no tile has rows of two, none is left over */
    FG_TILES_NARROW = 2, /* at most 128 x 128: sums promoted every other step or less */
    FG_TILES_TALL = 4,   /* of at least 128 rows: groups along K */
    FG_TILES_MASKED = 8, /* m is expected, not known */
    FG_TILES_EQUAL = 16, /* groups of as many rows: those along K, batches */
    FG_TILES_BLOCKS = 32,      /* that kernels for scales of blocks have */
    FG_TILES_FEW_OR_MANY = 64, /* of few rows or of many: groups of columns, sums of fp8 that are not promoted */
    FG_TILES_DENSE = 128,      /* one group: the blocks of a pair may share the K of tiles */
    FG_TILES_ADDED = 256,      /* added to the output, which has rows of its own for each group */
    FG_TILES_ROWS = 512,       /* of one group: rows are scaled, no more, sums promoted at each step if at all */
    FG_TILES_ASKEW = 1024,     /* rows of an operand, or groups along K, begin within sectors */
    FG_TILES_ROW_MAJOR = 2048, /* B is read row-major, in boxes of 64 columns */
    FG_TILES_COLUMNS = 4096,   /* A is read from columns beside it: of at least 128 rows */
    FG_TILES_USUAL = 8192,     /* of one group: the output is a usual one (fg_gemm_is_usual) */
    FG_TILES_ALL = 16383,
};

/* Whether of the output nothing is asked but sums times and plus factors, in 16 bits or float32; and whether those are
 * factors of rows. */
bool fg_gemm_is_linear(const fg_gemm_params *params);
bool fg_gemm_scales_rows(const fg_gemm_params *params);

/* Whether nothing is added to the output, whose rows are whole chunks of 16 bytes; and the 16 bits that products of such
 * operands usually become: whether they do, and are no more than scaled and biased. */
bool fg_gemm_stores_chunks(const fg_gemm_params *params);
fg_dtype fg_usual_output(fg_dtype operands);
bool fg_gemm_is_usual(const fg_gemm_params *params);

int32_t fg_gemm_tiles(const fg_gemm_params *params);

/* Of the Hopper kernels: persistent blocks, TMA and wgmma. block_m 256 is a pair of blocks of 128 rows that share B. In
 * the kernel for few rows split_k blocks of a cluster share the depth of a tile; in that for many the two of a pair share
 * that of tiles that full waves leave over. */
fg_plan fg_plan_gemm_sm90(int64_t m, int64_t n, int64_t k, int64_t groups, fg_dtype dtype, int32_t num_sms,
                          int32_t tiles);

/* What a product of operands as they lie costs, and what to transpose one of 16 bits that takes so many bytes then does, in
 * the unit of fg_plan.cost: to compare ways of one product. */
double fg_gemm_cost_sm90(const fg_gemm_params *params, int32_t num_sms);
double fg_transposition_cost_sm90(size_t bytes);

/* How many of `tiles` of pairs of blocks full waves leave over, where halves of them, half of K to each block, are no
 * more than there are pairs; else 0. */
int64_t fg_gemm_shared_tiles(int64_t tiles, int64_t pairs, int64_t steps);

/* How many of its clusters of this many blocks surely run at once: a cluster lies within one of the parts that Hopper's
 * multiprocessors come in (GPCs), of which some have 18, some 16 and some fewer. */
int32_t fg_clusters_at_once(int32_t num_sms, int32_t cluster);

/* ---- what was chosen (print_config.c) ---- */

const char *fg_family_name(fg_family family); /* "portable", "sm90", "cpu" */

/* With FLEXGEMM_PRINT_CONFIGS=1 in the environment: a line on stderr, once for each. The shape is printf-style. */
void fg_print_plan(const fg_plan *plan, const char *operation, fg_dtype dtype, const char *shape_format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 4, 5)))
#endif
    ;

/* ---- row orders (plan_order.c) ---- */

/* Bits of the longest key; of 7 x 7 x 7 there are 1 + 7 + 49 orders, whose keys have so many offsets. */
enum { FG_KEY_BITS = 18, FG_MAX_ORDERS = 57, FG_MAX_KEY_OFFSETS = FG_KEY_BITS + 7 * FG_KEY_BITS + 49 * 7 };

/* The sets that a map of this many rows should have, coarsest first; none where an order costs more than it gains. */
fg_order_sets fg_plan_order_sets(int64_t rows, const int32_t kernel[3], const int32_t phases[3]);

/* How to build sets of orders, by both backends. Each segment of rows is sorted by itself; the key of a row is the
 * Gray-code rank of the codes of all offsets at which it has neighbours, put together by OR. */
typedef struct {
    int32_t orders;  /* sum of the groups of all sets */
    int32_t segment; /* rows, a power of two */
    struct {
        uint16_t begin, end; /* of its offsets and their codes */
        uint16_t bits;
    } keys[FG_MAX_ORDERS];
    uint16_t offsets[FG_MAX_KEY_OFFSETS];
    uint32_t codes[FG_MAX_KEY_OFFSETS];
} fg_order_plan;

/* Rows of a segment, before it grows so that there are not too many. */
int32_t fg_order_segment(int64_t rows);

fg_order_plan fg_plan_row_orders(int64_t rows, const int32_t kernel[3], fg_order_sets sets);

/* All offsets of a kernel in the order in which a mask has their bits, the highest first. The centre, which says nothing
 * where it is always there, is last. Returns their number. */
int32_t fg_offsets_by_rank(const int32_t kernel[3], uint16_t offsets[FG_MAX_VOLUME]);

/* The share of a volume's offsets at which a row has neighbours, and of a group's offsets that a tile of block_m rows
 * works through when `rows` are sorted together in the group's order: models, fitted to scenes of docs/performance.md.
 * phases: how many there are. */
double fg_pair_share(int64_t volume, int64_t phases);
double fg_union_share(int64_t rows, int64_t volume, int64_t groups, int64_t phases, int32_t block_m);

/* Which kernel positions lead a voxel to an output site of a convolution: along each axis at most `taps` of them,
 * `step` apart. (plan_sites.c) */
typedef struct {
    int32_t taps[3], step[3];
    int64_t per_voxel; /* the product of taps */
} fg_sites_plan;

fg_sites_plan fg_plan_conv_sites(const int32_t kernel[3], const int32_t stride[3], const int32_t dilation[3],
                                 bool transposed);

/* Of the map back to the voxels of such a convolution (fg_order_sets): one for each position where those that lead a
 * voxel somewhere can begin. */
void fg_plan_phases(const int32_t kernel[3], const int32_t stride[3], const int32_t dilation[3], int32_t phases[3]);

int64_t fg_greatest_common_divisor(int64_t a, int64_t b); /* of a > 0 */

/* ---- tables of voxels (plan_table.c) ---- */

/* Rows of voxels by cells of 2 x 2 x 2 (cuda/cell_table.cuh): a slot for each cell that has a voxel, found by a hash of
 * the cell's number, or one for each cell of the grid, found by the number itself. */
typedef enum { FG_TABLE_HASH = 0, FG_TABLE_DIRECT } fg_table_kind;

enum { FG_CELL_VOXELS = 8, FG_BUCKET_SLOTS = 4 };

fg_table_kind fg_plan_voxel_table(int64_t rows, const int64_t shape[4]);

int64_t fg_grid_cells(const int64_t shape[4]); /* of a grid of fewer than 2^63 voxels */

/* Of a hash table, a multiple of FG_BUCKET_SLOTS; below 2^32 for every count of rows that int32 can number. */
int64_t fg_hash_slots(int64_t rows);

const char *fg_table_name(fg_table_kind kind); /* "hash", "direct" */

/* As fg_print_plan. */
void fg_print_table(fg_table_kind kind, const char *operation, int64_t rows, const int64_t shape[4], size_t bytes);

/* ---- segments of a map (plan_segment.c) ---- */

/* Tiles of a segment: 4 or 2, or 0 where rows are too few for segments to pay. */
int32_t fg_plan_segment_tiles(int64_t rows, int32_t num_sms);

/* By which offsets the rows of a segment are sorted, the highest bit of the rank first. A key is one word: whether
 * there is no such row, the rank, the row's number in the segment. */
enum { FG_SEGMENT_ROW_BITS = 8, FG_SEGMENT_RANK_BITS = 23 };
typedef struct {
    int32_t bits;
    uint8_t offsets[FG_SEGMENT_RANK_BITS];
} fg_segment_rank;

fg_segment_rank fg_plan_segment_rank(const int32_t kernel[3]); /* of a volume of up to FG_SEGMENT_VOLUME */

#ifdef __cplusplus
}
#endif
#endif
