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
/* Weight gradient of a depthwise convolution: split_k slices of rows, float32 results in the workspace, always. */
fg_plan fg_plan_depthwise_wgrad(int64_t rows, int64_t channels, int64_t v, int32_t num_sms);
fg_plan fg_plan_gemm(int64_t m, int64_t n, int64_t k, int64_t groups, fg_dtype dtype, int32_t num_sms);
/* Of the Hopper kernel: persistent blocks, TMA and wgmma. block_m 256 is a pair of blocks of 128 rows that share B. */
fg_plan fg_plan_gemm_sm90(int64_t m, int64_t n, int64_t k, int64_t groups, fg_dtype dtype, int32_t num_sms);

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

/* Which kernel positions lead a voxel to an output site of a convolution: along each axis at most `taps` of them,
 * `step` apart. (plan_sites.c) */
typedef struct {
    int32_t taps[3], step[3];
    int64_t per_voxel; /* the product of taps */
} fg_sites_plan;

fg_sites_plan fg_plan_conv_sites(const int32_t kernel[3], const int32_t stride[3], const int32_t dilation[3],
                                 bool transposed);

#ifdef __cplusplus
}
#endif
#endif
