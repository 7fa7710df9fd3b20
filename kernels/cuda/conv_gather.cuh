/* The forward pass and the input gradient as one problem, which conv_gather.cu hands to the kernel that the plan names:
 * its own, or that of conv_gather_sm90.cu. */
#pragma once

#include "../plan.h"
#include "common.cuh"
#include "split_k.cuh"

namespace flexgemm {

struct GatherParams {
    const void *in;       /* rows of `depth` elements, in_stride apart */
    const void *weight;   /* (columns, volume, depth) K-major or (depth, volume, columns) MN-major, contiguous */
    const int32_t *map;   /* (volume, rows) */
    const int32_t *order; /* (rows): slot -> row; or NULL: every slot is its row */
    void *out;            /* (rows, columns), out_stride apart */
    SumEpilogue epilogue; /* of the forward pass */
    float *partials;      /* (split_k, rows, columns) when the offsets are split, else NULL */
    int64_t in_stride, out_stride, rows;
    uint32_t in_rows;
    int volume, depth, columns, column_tiles;
    bool mirrored, in_aligned, weight_aligned;

    /* What a slot works on: a column of `map` and a row of `out`, or less than 0. */
    __device__ int64_t row_of(int64_t slot) const {
        if (slot >= rows) return -1;
        const int64_t row = order ? order[slot] : slot;
        return row < rows ? row : -1;
    }

    /* Rows of `map` that belong to weight offset v. Entries are judged where they are used: unsigned < in_rows. */
    __device__ const int32_t *map_at(int v) const {
        return map + static_cast<int64_t>(mirrored ? volume - 1 - v : v) * rows;
    }
};

/* 16-bit types, in_aligned and weight_aligned, 0 <= in_stride <= INT32_MAX, half of kMaxChannels at most. weight_is_k_major: the forward pass. (conv_gather_sm90.cu) */
fg_status launch_gather_sm90(GatherParams p, const fg_plan &plan, fg_dtype dtype, bool weight_is_k_major, int num_sms,
                             cudaStream_t stream, fg_error *error);

}  // namespace flexgemm
