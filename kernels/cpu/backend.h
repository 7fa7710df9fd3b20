/* Entry points behind the CPU column of the fg_backend table (backend.c fills it), and how they share a workspace. */
#ifndef FLEXGEMM_CPU_BACKEND_H
#define FLEXGEMM_CPU_BACKEND_H

#include "../flexgemm.h"

/* FG_DECLARE_RUN: an operation that needs no workspace. */
#define FG_DECLARE_RUN(name)                                                                                           \
    fg_status fg_cpu_##name(const fg_##name##_params *params, const fg_queue *queue, fg_error *error)
#define FG_DECLARE(name)                                                                                               \
    fg_status fg_cpu_##name##_workspace(const fg_##name##_params *params, const fg_queue *queue, size_t *bytes,        \
                                        fg_error *error);                                                              \
    FG_DECLARE_RUN(name)

FG_DECLARE(neighbor_map);      /* neighbor_map.c */
FG_DECLARE(conv_sites);        /* conv_sites.c */
FG_DECLARE(row_order);         /* row_order.c */
FG_DECLARE_RUN(ordered_map);   /* row_order.c */
FG_DECLARE_RUN(segment_map);   /* segment_map.c */
FG_DECLARE_RUN(encode_seq);    /* serialize.c */
FG_DECLARE_RUN(decode_seq);    /* serialize.c */
FG_DECLARE(sort_keys);         /* sort_keys.c */
FG_DECLARE(hash_insert);       /* hash_table.c */
FG_DECLARE_RUN(hash_lookup);   /* hash_table.c */
FG_DECLARE(sample_map);        /* grid_sample.c */
FG_DECLARE(sample_forward);    /* grid_sample.c */
FG_DECLARE(sample_grad);       /* grid_sample.c */
FG_DECLARE(gather_sum);        /* gather_sum.c */
FG_DECLARE(group_rows);        /* group_reduce.c */
FG_DECLARE(group_reduce);      /* group_reduce.c */
FG_DECLARE_RUN(voxel_codes);   /* voxelize.c */
FG_DECLARE_RUN(unique_ranks);  /* voxelize.c */
FG_DECLARE_RUN(unique_groups); /* voxelize.c */
FG_DECLARE(conv_forward);      /* conv.c */
FG_DECLARE(conv_dgrad);        /* conv.c */
FG_DECLARE(conv_wgrad);        /* conv_wgrad.c */
FG_DECLARE(depthwise_forward); /* depthwise.c */
FG_DECLARE(depthwise_dgrad);   /* depthwise.c */
FG_DECLARE(depthwise_wgrad);   /* depthwise.c */
FG_DECLARE_RUN(pool);          /* pool.c */
FG_DECLARE_RUN(pool_backward); /* pool.c */
FG_DECLARE_RUN(batch_indices); /* pool.c */
FG_DECLARE(gemm);              /* gemm.c */
FG_DECLARE_RUN(quantize);      /* quantize.c */

#undef FG_DECLARE
#undef FG_DECLARE_RUN

/* A workspace is one shared part followed by one private part per thread. The query asks for omp_get_max_threads()
 * private parts; the run uses as many threads as it was given parts, so that a different thread count at either call
 * changes the speed and nothing else. */
typedef struct {
    size_t shared, per_thread; /* bytes, multiples of 64 */
} fg_workspace_layout;

/* Bytes of n elements of the given size, rounded up to a cache line so that what follows is aligned. */
static inline size_t fg_workspace_part(int64_t n, size_t size) { return ((size_t)n * size + 63) / 64 * 64; }

size_t fg_workspace_bytes(fg_workspace_layout layout);

/* The number of threads to run with, at most `tasks`; FG_ERROR_VALUE when the workspace is too small for one. */
fg_status fg_workspace_threads(const fg_tensor *workspace, fg_workspace_layout layout, int64_t tasks, int *threads,
                               fg_error *error);

/* The private part of the calling thread. */
void *fg_workspace_private(const fg_tensor *workspace, fg_workspace_layout layout);

static inline int64_t fg_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t fg_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t fg_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* First element of row i of a matrix with adjacent columns. */
static inline char *fg_row(const fg_tensor *tensor, int64_t i) {
    return (char *)tensor->data + i * tensor->strides[0] * (int64_t)fg_dtype_size(tensor->dtype);
}

#endif
