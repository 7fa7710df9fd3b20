/*
 * Plans of the CUDA backend: problem shape -> tile configuration and workspace. Host C with no CUDA call in it, so
 * that the heuristics are unit-tested on a machine without a GPU. Planning is a few comparisons: no autotuning, no
 * cache.
 */
#ifndef FLEXGEMM_PLAN_H
#define FLEXGEMM_PLAN_H

#include "flexgemm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { FG_FAMILY_PORTABLE = 0, FG_FAMILY_SM90 } fg_family;

typedef struct {
    fg_family family;                  /* whose tiles these are */
    int32_t block_m, block_n, block_k; /* output rows, output channels, reduction elements of one tile step */
    int32_t num_stages;                /* depth of the cp.async pipeline */
    int32_t split_k;                   /* reduction slices whose fp32 partials meet in the workspace; 1 = none */
    int64_t workspace_bytes;
} fg_plan;

/* rows = output rows, ci / co = reduction and output channels as the pass sees them, v = kernel volume;
 * compute_capability = 90 for 9.0. */
fg_plan fg_plan_conv(int64_t rows, int64_t ci, int64_t co, int64_t v, fg_dtype dtype, int32_t num_sms,
                     int32_t compute_capability);
fg_plan fg_plan_conv_wgrad(int64_t rows, int64_t ci, int64_t co, int64_t v, fg_dtype dtype, int32_t num_sms);
/* Bias gradient: split_k slices of rows; the block sizes are not used. */
fg_plan fg_plan_column_sum(int64_t rows, int64_t columns, int32_t num_sms);

/* The sizes of a product whatever its layout: m x n x k is the most that one of its groups can have. */
typedef struct {
    int64_t m, n, k, groups;
} fg_gemm_shape;

fg_gemm_shape fg_gemm_shape_of(const fg_gemm_params *params);
/* As the plans below ask: m of all groups together, which are one where the groups share their rows. */
fg_gemm_shape fg_gemm_all_rows(const fg_gemm_params *params);

fg_plan fg_plan_gemm(int64_t m, int64_t n, int64_t k, int64_t groups, fg_dtype dtype, int32_t num_sms);

/* What a product asks of the tiles of the Hopper kernel; bits. */
enum {
    FG_TILES_UNPAIRED = 1, /* groups of rows that start at any multiple of 128 */
    FG_TILES_NARROW = 2,   /* at most 128 x 128: scales of blocks, and sums promoted every other step or less */
    FG_TILES_TALL = 4,     /* of at least 128 rows: groups along K */
    FG_TILES_ALL = 7,
};

int32_t fg_gemm_tiles(const fg_gemm_params *params);

/* Of the Hopper kernels: persistent blocks, TMA and wgmma. block_m 256 is a pair of blocks of 128 rows that share B;
 * below 128 it is the kernel for few rows, where split_k blocks of a cluster share the depth of a tile. */
fg_plan fg_plan_gemm_sm90(int64_t m, int64_t n, int64_t k, int64_t groups, fg_dtype dtype, int32_t num_sms,
                          int32_t tiles);

enum { FG_MAX_KEY_BITS = 24 };

/* Row order of a neighbour map: each segment of rows sorted by the Gray-code rank of a key with one bit per offset, the
 * first one highest. Both backends follow it. (plan_order.c) */
typedef struct {
    bool pays;       /* a convolution of this many rows gains more than the order costs */
    int32_t segment; /* rows, a power of two; at most 256 segments */
    int32_t key_bits;
    uint16_t offsets[FG_MAX_KEY_BITS];
} fg_order_plan;

fg_order_plan fg_plan_row_order(int64_t rows, const int32_t kernel[3]);

#ifdef __cplusplus
}
#endif
#endif
