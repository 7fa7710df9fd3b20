/* The forward pass and the input gradient as one problem, which conv.cu hands to the kernel that the plan names. */
#pragma once

#include "../plan.h"
#include "common.cuh"
#include "conv_epilogue.cuh"
#include "gemm_math.cuh"

namespace flexgemm {

/* Float32 operands as they are given: rows of `depth`, and a weight (columns, volume, depth) or (depth, volume,
 * columns). */
struct PlainOperands {
    const float *in, *weight;
    int64_t in_stride;
    int depth;
    bool is_k_major;
};

struct GatherParams {
    const void *in;       /* rows of `depth` elements, in_stride apart */
    const void *weight;   /* (columns, volume, depth) K-major or (depth, volume, columns) MN-major, contiguous */
    int channel_groups;   /* of which `depth` and `columns` are one; they are side by side in rows, one after another in
                           * `weight`. Of the portable kernel: elsewhere each is a launch, and this is 1 */
    const int32_t *map;   /* (volume, rows) */
    const int32_t *order; /* (groups, rows): slot -> row, for each group of rows of `map`; or NULL: a slot is its row */
    const int32_t *ordered_map; /* (volume, rows): `map` in `order`, where that is one order for all offsets; or NULL */
    const int32_t *segments;    /* records (segment.h) of `map`, or NULL; each of 64 * segment_tiles rows */
    int segment_tiles;
    void *out;            /* (rows, columns), out_stride apart */
    PlainOperands plain;  /* of true float32 on Hopper: what `in` and `weight` are copies of */
    SumEpilogue epilogue; /* of the forward pass */
    float *partials;      /* (slices(), rows, columns) when the offsets are split, else NULL */
    int *next_task;       /* of the Hopper kernels: one int that hands out tiles, or NULL: each CTA knows its tiles */
    fg_dtype out_dtype, added_dtype; /* of out; of bias and residual, the same but where out is float8 */
    const float *row_scales; /* of float8: one for each row of `in`; or NULL: they have one together, in the epilogue */
    Fp8Format in_format, weight_format; /* of float8, portable */
    float product_scale;                /* what these formats owe to a product */
    int64_t in_stride, out_stride, rows;
    uint32_t in_rows;
    int volume, depth, columns, column_tiles;
    int groups,
        splits; /* the offsets are cut into groups, one after another, and each of these into interleaved splits */
    bool mirrored, in_aligned, weight_aligned;

    /* A slice is one split of one group: offsets first_offset, first_offset + splits, ... below end_offset. */
    __host__ __device__ int slices() const { return groups * splits; }
    __device__ int first_offset(int slice) const { return slice / splits * (volume / groups) + slice % splits; }
    __device__ int end_offset(int slice) const { return (slice / splits + 1) * (volume / groups); }
    __device__ int slice_of(int v) const {
        const int length = volume / groups;
        return v / length * splits + v % length % splits;
    }

    /* What a slot of a slice works on: a column of `map` and a row of `out`, or less than 0. Mirrored, the first group
     * of offsets reads the last rows of `map` and takes their order. */
    __device__ int64_t row_of(int64_t slot, int slice) const {
        if (slot >= rows) return -1;
        if (!order) return slot;
        const int group = slice / splits;
        const int64_t row = order[(mirrored ? groups - 1 - group : group) * rows + slot];
        return row < rows ? row : -1;
    }

    /* Rows of `map` that belong to weight offset v. Entries are judged where they are used: unsigned < in_rows. */
    __device__ int64_t map_row(int v) const { return mirrored ? volume - 1 - v : v; }
    __device__ const int32_t *map_at(int v) const { return map + map_row(v) * rows; }

    /* What `map` says of a row; of a whole tile it lies side by side where there is an ordered map. */
    __device__ const int32_t *entry_at(int v, int64_t slot, int64_t row) const {
        return ordered_map ? ordered_map + map_row(v) * rows + slot : map_at(v) + row;
    }
};

/* Adds the partial sums of all slices and finishes them. From compute capability 9.0 on it may begin while the kernel
 * that makes them ends; before that one has begun, all in front of it must have ended. (conv_reduce.cu) */
fg_status reduce_slices(const GatherParams &p, int compute_capability, cudaStream_t stream, fg_error *error);

/* By an explicit matrix and gemm(); in_aligned is used, `partials` is not. (conv_explicit.cu) */
fg_status conv_explicit_workspace(const GatherParams &p, const fg_plan &plan, const fg_queue *queue, fg_dtype dtype,
                                  fg_precision precision, bool weight_is_k_major, size_t *bytes, fg_error *error);
fg_status conv_explicit(const GatherParams &p, const fg_plan &plan, const fg_queue *queue, fg_dtype dtype,
                        fg_precision precision, bool weight_is_k_major, const fg_tensor &workspace, fg_error *error);

/* Groups of few channels; `laid_out` holds the weight in float32. (conv_narrow.cu) */
fg_status conv_narrow(const GatherParams &p, fg_dtype dtype, bool weight_is_k_major, float *laid_out,
                      cudaStream_t stream, fg_error *error);

/* Any types and strides, all groups of channels at once. (conv_gather.cu) */
fg_status launch_gather_portable(const GatherParams &p, const fg_plan &plan, fg_dtype dtype, fg_precision precision,
                                 bool weight_is_k_major, cudaStream_t stream, fg_error *error);

/* 16-bit types, in_aligned and weight_aligned; or float32 whose operands are rounded to TF32 already, the weight
 * K-major. 0 <= in_stride <= INT32_MAX, a quarter of kMaxChannels at most. weight_is_k_major: the forward pass.
 * (conv_gather_sm90.cu) */
fg_status launch_gather_sm90(const GatherParams &p, const fg_plan &plan, fg_dtype dtype, bool weight_is_k_major,
                             int num_sms, cudaStream_t stream, fg_error *error);

/* The same of 16-bit types, without order and slices, where weights stay in shared memory: plan.block_m is
 * FG_OWN_ROWS. (conv_own_rows_sm90.cu) */
fg_status launch_own_rows_sm90(const GatherParams &p, const fg_plan &plan, fg_dtype dtype, bool weight_is_k_major,
                               int num_sms, cudaStream_t stream, fg_error *error);

/* The same by segments; `laid_out` has room for the weights, plan.workspace_bytes. plan.segment_tiles is not 0.
 * (conv_segment_sm90.cu) */
fg_status launch_segments_sm90(const GatherParams &p, const fg_plan &plan, fg_dtype dtype, bool weight_is_k_major,
                               void *laid_out, int num_sms, cudaStream_t stream, fg_error *error);

/* The same of true float32: `in` and `weight` are split copies (tf32.cuh), K-major, of p.plain. (conv_ieee_sm90.cu) */
fg_status launch_ieee_sm90(const GatherParams &p, const fg_plan &plan, int num_sms, cudaStream_t stream,
                           fg_error *error);

/* The same of float8, the forward pass. (conv_fp8_sm90.cu) */
fg_status launch_fp8_sm90(const GatherParams &p, const fg_plan &plan, fg_dtype in, fg_dtype weight, int num_sms,
                          cudaStream_t stream, fg_error *error);

}  // namespace flexgemm
