/* One row of weighted sums of gathered rows. */
#ifndef FLEXGEMM_CPU_GATHER_SUM_H
#define FLEXGEMM_CPU_GATHER_SUM_H

#include "simd.h"

/* sums = the sum over the terms k of weights[k] * feats[indices[k]], in their order; weights NULL: 1 each. -1 stands
 * for no row. Returns the first term whose index is neither that nor a row, and is passed over; else `terms`.
 * widened: a row of feats as float32. */
int64_t fg_sum_rows(const fg_simd *simd, const fg_tensor *feats, const int32_t *indices, const float *weights,
                    int64_t terms, float *sums, float *widened);

#endif
