/* The weight gradient as a problem, which conv_wgrad.cu hands to the kernel that the plan names. */
#pragma once

#include "../plan.h"
#include "common.cuh"

namespace flexgemm {

struct WgradParams {
    const void *grad_out; /* (rows, co), grad_stride apart */
    const void *feats;    /* (in_rows, ci), feats_stride apart */
    const int32_t *map;   /* (volume, rows) */
    void *grad_weight;    /* (co, volume, ci); on Hopper NULL where it is not wanted */
    float *partials;      /* (split_k, co, volume, ci) when the rows are split, else NULL */
    int64_t grad_stride, feats_stride, rows, rows_per_slice;
    uint32_t in_rows;
    int volume, co, ci; /* channels of a group */
    int channel_groups; /* side by side in rows, one after another in the gradient; on Hopper each is a launch: 1 */
    bool grad_aligned, feats_aligned;

    /* Hopper alone: the bias gradient, which has its partial sums behind those of its slice's weight gradient. */
    void *grad_bias;    /* (co) or NULL */
    const void *summed; /* grad_out as the caller gave it */
    int64_t summed_stride;
    int regions, phases; /* slices of the rows: so many regions one after another, each shared out to so many slices */
    int *next_task;      /* one int that hands out tasks, or NULL: there is a CTA for each */
    bool concurrent;     /* with the launch in front, for which it waits when it has done its work */
    const int32_t *segments; /* by segments: their records, and */
    int segment_tiles;       /* tiles of each */
};

/* Groups of at most FG_MAX_NARROW_GROUP input channels by plain arithmetic, of fg_plan_depthwise_wgrad for
 * `volume * ci` offsets. partials: (split_k, volume, ci, all co). (depthwise.cu) */
fg_status narrow_wgrad(const WgradParams &p, const fg_plan &plan, float *partials, fg_dtype dtype, cudaStream_t stream,
                       fg_error *error);

/* 16-bit types, grad_aligned and feats_aligned; or float32 whose operands are rounded to TF32 already. co and ci
 * multiples of 8, 0 <= strides <= INT32_MAX, co and volume * ci at most a quarter of kMaxChannels.
 * (conv_wgrad_sm90.cu) */
fg_status launch_wgrad_sm90(const WgradParams &p, const fg_plan &plan, fg_dtype dtype, int num_sms, cudaStream_t stream,
                            fg_error *error);

/* 16-bit types by segments of the map, the same restrictions; grad_weight, partials and segments are there, and no more
 * slices than segments. (conv_wgrad_segment_sm90.cu) */
fg_status launch_wgrad_segments_sm90(const WgradParams &p, const fg_plan &plan, fg_dtype dtype, cudaStream_t stream,
                                     fg_error *error);

}  // namespace flexgemm
