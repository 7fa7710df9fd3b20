/*
 * What plans of products (plan_gemm.c) know of the kernel for few rows (plan_decode.c).
 */
#ifndef FLEXGEMM_PLAN_DECODE_H
#define FLEXGEMM_PLAN_DECODE_H

#include "plan.h"
#include "plan_durations.h"

/* Bytes of a row in a step of K; and those that come to a block in the unit of durations where rows are askew. */
static const double FG_STEP_BYTES = 128, FG_ASKEW_BYTES = 9.2e3;

/* Tiles of few rows, or of groups of them, in the kernel that `plan` is begun for. */
fg_plan fg_plan_decode(int64_t m, int64_t n, int64_t k, int64_t groups, const gemm_durations *durations, fg_plan plan,
                       int32_t num_sms);

/* Tiles of one usual output, of as many rows as fit, if they cost less than `best`. */
fg_plan fg_plan_fitting(int64_t m, int64_t n, int64_t k, const gemm_durations *durations, bool askew, fg_plan best,
                        int32_t num_sms);

#endif
