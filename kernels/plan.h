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

typedef struct {
    int32_t block_m, block_n, block_k; /* output rows, output channels, reduction elements of one tile step */
    int32_t num_stages;                /* depth of the cp.async pipeline */
    int32_t split_k;                   /* reduction slices whose fp32 partials meet in the workspace; 1 = none */
    int64_t workspace_bytes;
} fg_plan;

/* rows = output rows, ci / co = reduction and output channels as the pass sees them, v = kernel volume. */
fg_plan fg_plan_conv(int64_t rows, int64_t ci, int64_t co, int64_t v, fg_dtype dtype, int32_t num_sms);
fg_plan fg_plan_conv_wgrad(int64_t rows, int64_t ci, int64_t co, int64_t v, fg_dtype dtype, int32_t num_sms);
/* Bias gradient: split_k slices of rows; the block sizes are not used. */
fg_plan fg_plan_column_sum(int64_t rows, int64_t columns, int32_t num_sms);
fg_plan fg_plan_gemm(int64_t m, int64_t n, int64_t k, int64_t groups, fg_dtype dtype, int32_t num_sms);

#ifdef __cplusplus
}
#endif
#endif
