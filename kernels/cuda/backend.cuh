/* Entry points behind the CUDA column of the fg_backend table (device.cu fills it). */
#pragma once

#include "../flexgemm.h"

namespace flexgemm {

/* FG_DECLARE_RUN: an operation that needs no workspace. */
#define FG_DECLARE_RUN(name) fg_status name(const fg_##name##_params *params, const fg_queue *queue, fg_error *error)
#define FG_DECLARE(name)                                                                                               \
    fg_status name##_workspace(const fg_##name##_params *params, const fg_queue *queue, size_t *bytes,                 \
                               fg_error *error);                                                                       \
    FG_DECLARE_RUN(name)

FG_DECLARE(neighbor_map);      /* neighbor_map.cu */
FG_DECLARE(conv_sites);        /* conv_sites.cu */
FG_DECLARE(row_order);         /* row_order.cu */
FG_DECLARE_RUN(ordered_map);   /* row_order.cu */
FG_DECLARE_RUN(segment_map);   /* segment_map.cu */
FG_DECLARE_RUN(encode_seq);    /* serialize.cu */
FG_DECLARE_RUN(decode_seq);    /* serialize.cu */
FG_DECLARE(sort_keys);         /* sort_keys.cu */
FG_DECLARE(hash_insert);       /* hash_table.cu */
FG_DECLARE_RUN(hash_lookup);   /* hash_table.cu */
FG_DECLARE(sample_map);        /* grid_sample.cu */
FG_DECLARE(sample_forward);    /* grid_sample.cu */
FG_DECLARE_RUN(sample_grad);   /* grid_sample.cu */
FG_DECLARE_RUN(gather_sum);    /* gather_sum.cu */
FG_DECLARE(group_rows);        /* group_reduce.cu */
FG_DECLARE(group_reduce);      /* group_reduce.cu */
FG_DECLARE_RUN(voxel_codes);   /* voxelize.cu */
FG_DECLARE(unique_ranks);      /* voxelize.cu */
FG_DECLARE_RUN(unique_groups); /* voxelize.cu */
FG_DECLARE(conv_forward);      /* conv.cu */
FG_DECLARE(conv_dgrad);        /* conv.cu */
FG_DECLARE(conv_wgrad);        /* conv_wgrad.cu */
FG_DECLARE(depthwise_forward); /* depthwise.cu */
FG_DECLARE(depthwise_dgrad);   /* depthwise.cu */
FG_DECLARE(depthwise_wgrad);   /* depthwise.cu */
FG_DECLARE_RUN(pool);          /* pool.cu */
FG_DECLARE_RUN(pool_backward); /* pool.cu */
FG_DECLARE_RUN(batch_indices); /* pool.cu */
FG_DECLARE(gemm);              /* gemm.cu */
FG_DECLARE(quantize);          /* quantize.cu */

#undef FG_DECLARE
#undef FG_DECLARE_RUN

/* What gemm() chooses from: on compute capability 9.0, if it can (gemm_sm90.cu), or anywhere (gemm_portable.cu). The
 * device is current, and operands are K-major: those of Hopper can take some others as they lie, a row-major B and beside
 * it an A that lies in columns. */
bool gemm_sm90_takes(const fg_gemm_params &params);
bool gemm_sm90_takes_row_major(const fg_gemm_params &params);
fg_status gemm_sm90(const fg_gemm_params &params, int num_sms, const fg_queue *queue, fg_error *error);
fg_status gemm_portable(const fg_gemm_params &params, int num_sms, int compute_capability, const fg_queue *queue,
                        fg_error *error);

}  // namespace flexgemm
