/*
 * One sum of a convolution in plain float32. Split factors make NaN out of one that is infinite or rounds to an
 * infinite TF32, and so does an infinite weight beside the zeros of a missing neighbour, where IEEE arithmetic may have
 * none; the product of two that were rounded up may be infinite. Kernels of true float32 compute sums that are not
 * finite again.
 */
#pragma once

#include "conv_gather.cuh"

namespace flexgemm {

/* That of column n of row m, of the offsets of a slice. */
__device__ __forceinline__ float plain_sum(const GatherParams &p, const PlainOperands &plain, int slice, int64_t m,
                                           int n) {
    float sum = 0.0f;
    for (int v = p.first_offset(slice); v < p.end_offset(slice) && !isnan(sum); v += p.splits) {
        const auto row = static_cast<uint32_t>(p.map_at(v)[m]);
        if (row >= p.in_rows) continue;
        const float *in = plain.in + row * plain.in_stride;
        const int64_t first = plain.is_k_major ? (static_cast<int64_t>(n) * p.volume + v) * plain.depth
                                               : static_cast<int64_t>(v) * p.columns + n;
        const int64_t step = plain.is_k_major ? 1 : static_cast<int64_t>(p.volume) * p.columns;
        for (int k = 0; k < plain.depth && !isnan(sum); ++k) sum = fmaf(in[k], plain.weight[first + k * step], sum);
    }
    return sum;
}

}  // namespace flexgemm
