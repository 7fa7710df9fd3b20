/*
 * The contract between csrc/ (Python objects) and kernels/ (arithmetic).
 *
 * csrc/ turns Python objects into fg_tensor, fills one params struct per operation and calls the backend of the
 * tensors' device through its fg_backend table. kernels/ plans, launches and computes. Neither includes the other's
 * world: no CUDA header above this line, no Python header below it.
 *
 * Division of checks: csrc/ has verified dtype, rank, shape, device, stride and overlap of every tensor before a
 * backend sees it; the comments below state what a backend may rely on. What lies inside device memory (coordinates,
 * map entries, offsets) is the backend's to guard: never an access out of bounds, never a write outside the output.
 */
#ifndef FLEXGEMM_H
#define FLEXGEMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status ---- */

typedef enum {
    FG_OK = 0,
    FG_ERROR_TYPE,        /* TypeError */
    FG_ERROR_VALUE,       /* ValueError */
    FG_ERROR_MEMORY,      /* MemoryError */
    FG_ERROR_UNSUPPORTED, /* NotImplementedError */
    FG_ERROR_DEVICE,      /* RuntimeError: a CUDA call failed */
} fg_status;

/* Filled by the callee, owned by the caller; becomes an exception once the GIL is held again. */
typedef struct {
    fg_status code;
    char message[512];
} fg_error;

/* Stores code and a printf-style message, returns code. (kernels/error.c) */
fg_status fg_fail(fg_error *error, fg_status code, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;

/* ---- tensors ---- */

typedef enum {
    FG_FLOAT32 = 0,
    FG_FLOAT16,
    FG_BFLOAT16,
    FG_FLOAT8_E4M3FN,
    FG_FLOAT8_E5M2,
    FG_INT32,
    FG_INT64,
    FG_UINT8,
    FG_DTYPE_COUNT,
} fg_dtype;

static inline bool fg_is_float8(fg_dtype dtype) { return dtype == FG_FLOAT8_E4M3FN || dtype == FG_FLOAT8_E5M2; }

static inline size_t fg_dtype_size(fg_dtype dtype) {
    static const unsigned char size[FG_DTYPE_COUNT] = {4, 2, 2, 1, 1, 4, 8, 1};
    return size[dtype];
}

/* "float32", "float8_e4m3fn", ...: the names NumPy, ml_dtypes and torch share. (kernels/error.c) */
const char *fg_dtype_name(fg_dtype dtype);

typedef enum { FG_CPU = 1, FG_CUDA = 2 } fg_device_type; /* DLPack's numbers */

enum { FG_MAX_NDIM = 5 };

typedef struct {
    void *data;                   /* first element; NULL when the tensor is absent or has no elements */
    int64_t shape[FG_MAX_NDIM];   /* elements */
    int64_t strides[FG_MAX_NDIM]; /* elements */
    int32_t ndim;
    fg_dtype dtype;
    fg_device_type device_type;
    int32_t device_index;
    bool present; /* false: an optional argument that was None */
} fg_tensor;

/* Of a matrix, or of a batch of them: whether it is its columns that are adjacent elements, and not its rows; and the same
 * elements by other axes, the last two exchanged. */
static inline bool fg_lies_in_columns(const fg_tensor *matrix) { return matrix->strides[matrix->ndim - 1] != 1; }

static inline fg_tensor fg_exchanged(const fg_tensor *matrix) {
    const int32_t row = matrix->ndim - 2, column = matrix->ndim - 1;
    fg_tensor result = *matrix;
    result.shape[row] = matrix->shape[column];
    result.shape[column] = matrix->shape[row];
    result.strides[row] = matrix->strides[column];
    result.strides[column] = matrix->strides[row];
    return result;
}

/* Where a call runs. The CPU backend ignores it. */
typedef struct {
    int32_t device_index;
    void *stream; /* cudaStream_t; NULL is the legacy default stream */
} fg_queue;

typedef enum { FG_PRECISION_IEEE = 0, FG_PRECISION_TF32 } fg_precision; /* of float32 products */

/* Of float32 sums, the last thing before they are rounded to the output's dtype. GELU is the exact one, by erf. */
typedef enum { FG_ACTIVATION_NONE = 0, FG_ACTIVATION_RELU, FG_ACTIVATION_SILU, FG_ACTIVATION_GELU } fg_activation;

/* How a convolution is computed: what a plan may choose among. The results are the same within rounding, and a backend
 * may know one way only. */
typedef enum {
    FG_ALGORITHM_AUTO = 0,                    /* whatever the plan takes to be fastest */
    FG_ALGORITHM_EXPLICIT_GEMM,               /* a matrix of gathered rows, and the GEMM kernels */
    FG_ALGORITHM_IMPLICIT_GEMM,               /* rows as they come, one pass over all offsets */
    FG_ALGORITHM_IMPLICIT_GEMM_SPLITK,        /* ... offsets split among blocks where tiles are few */
    FG_ALGORITHM_MASKED_IMPLICIT_GEMM,        /* rows in one order, one pass */
    FG_ALGORITHM_MASKED_IMPLICIT_GEMM_SPLITK, /* offsets in groups, each with an order of its own, and split */
    FG_ALGORITHM_COUNT,
} fg_algorithm;

/* "auto", "implicit_gemm", ... (kernels/error.c) */
const char *fg_algorithm_name(fg_algorithm algorithm);

/* Sets of row orders. A set of g cuts the V offsets of a map into g groups of V / g, one after another, and has an
 * order for each. Sets lie one after another: sum(groups) orders in all.
 *
 * In a map back to the voxels of a layer with a stride, a column has neighbours at every phases[axis]-th offset of an
 * axis alone, and where these begin, its phase, is a matter of its coordinates. Such a map has one order. 1, or 0:
 * a column may have neighbours at all offsets. */
enum { FG_MAX_ORDER_SETS = 3, FG_MAX_GROUPS = 49 };
typedef struct {
    int32_t sets;
    int32_t groups[FG_MAX_ORDER_SETS];
    int32_t phases[3]; /* along the kernel's axes */
} fg_order_sets;

int64_t fg_phase_count(const fg_order_sets *sets); /* the product */
int64_t fg_order_count(const fg_order_sets *sets);

/* ---- operations ----
 * Each has a workspace query on the same params (workspace ignored) and a run. The caller allocates `workspace`
 * (uint8, 256-byte aligned) of at least that many bytes. Sizes and strides are int64: N*V beyond 2^31 is legal.
 * Empty problems (N = 0) succeed and still write what they must (zero gradients).
 */

enum {
    FG_MAX_KERNEL = 7, /* voxels of a convolution kernel along one axis */
    FG_MAX_VOLUME = FG_MAX_KERNEL * FG_MAX_KERNEL * FG_MAX_KERNEL,
};

/* Neighbour map: the row of `coords` that each query site reads at each kernel offset v = (kx * Kh + ky) * Kd + kz,
 *
 *     map[v, m] = row of the voxel at queries[m] * stride + k * dilation - padding
 *     transposed:                  at (queries[m] + padding - k * dilation) / stride, where that is whole
 *
 * -1 where there is none or where it lies outside `shape`. A submanifold convolution asks from its own voxels, with
 * stride 1 and padding K/2 * dilation (integer K/2).
 * Duplicate coordinates: the lowest row wins. Rows out of range have no neighbours and are nobody's neighbour. */
typedef struct {
    fg_tensor coords;       /* (N, 4) int32 contiguous: batch, x, y, z */
    fg_tensor queries;      /* (M, 4) int32 contiguous; may be coords */
    int64_t shape[4];       /* of coords: B, W, H, D > 0 with B*W*H*D < 2^63 */
    int64_t query_shape[4]; /* of queries, the same B */
    int32_t kernel[3];      /* Kw, Kh, Kd, each 1..FG_MAX_KERNEL */
    int32_t stride[3];      /* each >= 1 */
    int64_t padding[3];     /* each >= 0; at most 2^31 - 1 unless every stride is 1 */
    int32_t dilation[3];    /* each >= 1 */
    bool transposed;
    bool check;    /* report out-of-range and duplicate rows of coords (the CPU always reports out-of-range ones) */
    fg_tensor map; /* out: (V, M) int32 contiguous */
    fg_order_sets sets;
    fg_tensor order; /* out, optional: the map's row orders in these sets, as row_order() builds them */
    fg_tensor workspace;
} fg_neighbor_map_params;

/* order: the columns of a map, permuted once for each group of offsets, so that neighbours in an order have neighbours
 * at the same offsets of the group: sorted, stably and segment by segment, by the Gray-code rank of a bit mask over the
 * offsets that fg_plan_row_orders chooses (plan.h), and first by phase. Columns without any of these come first. */
typedef struct {
    fg_tensor map;      /* (V, N) int32 contiguous, -1 = none */
    int32_t kernel[3];  /* Kw, Kh, Kd with V = Kw * Kh * Kd */
    fg_order_sets sets; /* of 1, Kw or Kw * Kh groups */
    fg_tensor order;    /* out: (sum of groups, N) int32 contiguous */
    fg_tensor workspace;
} fg_row_order_params;

/* The row orders of a map, and behind them its entries as they lie in the first one, where tiles of rows find them side
 * by side: out[G + v][s] = map[v][order[0][s]], -1 where that order names no column. */
typedef struct {
    fg_tensor map;   /* (V, N) int32 contiguous */
    fg_tensor order; /* (G, N) int32 contiguous, G >= 1 */
    fg_tensor out;   /* out: (G + V, N) int32 contiguous */
    fg_tensor workspace;
} fg_ordered_map_params;

/* The records of a map's segments (segment.h), each of the next 64 * tiles columns of `order`, sorted, stably, by the
 * Gray-code rank of their neighbours at the offsets of fg_plan_segment_rank (plan.h). An entry of the map that is no
 * row of the input is no neighbour; one of the order that is no column is a row -1, and those are a segment's last.
 * Which place an input row gets is not said; of a segment that has too few places, nor are its inputs and places. */
typedef struct {
    fg_tensor map;      /* (V, M) int32 contiguous, V at most FG_SEGMENT_VOLUME */
    fg_tensor order;    /* (M) int32 contiguous: the columns, those near each other in space side by side */
    int32_t kernel[3];  /* Kw, Kh, Kd with V = Kw * Kh * Kd */
    int32_t tiles;      /* 2 or 4 */
    int64_t in_rows;    /* of the map's input */
    fg_tensor segments; /* out: (M / (64 * tiles) rounded up, fg_segment_words(tiles, V)) int32 contiguous */
    fg_tensor workspace;
} fg_segment_map_params;

/* The orders that number voxels. BXYZ: ((b * W + x) * H + y) * D + z. The curves: x, y and z have as many bits each as
 * the largest extent needs, the batch stands above them; Z order interleaves the bits, each triple is 4x + 2y + z;
 * Hilbert does the same after Skilling's transform of (x, y, z). (sequence.h) */
typedef enum { FG_BXYZ = 0, FG_Z_ORDER, FG_HILBERT, FG_SEQUENCE_COUNT } fg_sequence;

/* Bits of a code; above 64 where they do not fit, and with BXYZ where B*W*H*D reaches 2^63. (plan_sequence.c) */
int32_t fg_sequence_bits(fg_sequence mode, const int64_t shape[4]);

/* code[n] = number of the voxel coords[n], or back. Codes are unsigned, whatever their dtype says. What lies outside
 * `shape` is reported by the CPU; a CUDA backend gives it the code -1, or the coordinates (-1, -1, -1, -1). */
typedef struct {
    fg_tensor coords; /* (N, 4) int32 contiguous: batch, x, y, z; the output of decode_seq */
    fg_tensor code;   /* (N) contiguous, int32 up to 32 bits, else int64; the output of encode_seq. decode_seq takes
                       * int64 of any, and the first N of more */
    int64_t shape[4]; /* B, W, H, D > 0 with fg_sequence_bits() of at most 64 */
    fg_sequence mode;
    fg_tensor workspace;
} fg_encode_seq_params;
typedef fg_encode_seq_params fg_decode_seq_params;

/* order = the permutation that sorts the low `bits` bits of keys as unsigned numbers, stably; sorted = keys[order]. */
typedef struct {
    fg_tensor keys;   /* (N) int32 | int64 contiguous */
    fg_tensor order;  /* out: (N) int32 contiguous */
    fg_tensor sorted; /* out: (N) contiguous, dtype of keys; or absent */
    int32_t bits;     /* 1 to those of the dtype */
    fg_tensor workspace;
} fg_sort_keys_params;

/* A hash table in arrays of the caller's: open addressing with linear probing. A slot is empty while its key is all
 * ones; the key of all ones itself lives in the last slot, which is its own. An empty slot's value is all ones as well.
 * Keys and values are two arrays, or words of one array of slots, each slot a key and its value: then both have the
 * stride of a slot, and clearing writes all of it.
 * Of equal keys the lowest row of a call wins. A key that is there already keeps its value, or with `replace` gets it.
 * state: {1 once a key found no free slot, the longest way from a key's first slot to its own where that is over 64}.
 */
typedef struct {
    fg_tensor keys;         /* (N) contiguous, dtype of table_keys; or voxels (N, 4) int32 contiguous */
    fg_tensor values;       /* (N) contiguous, dtype of table_values; or absent: the number of the row */
    fg_tensor table_keys;   /* in and out: (S) int32 | int64, S >= 2 */
    fg_tensor table_values; /* in and out: (S) int32 | int64 */
    fg_tensor state;        /* in and out: (2) int64 contiguous */
    int64_t shape[4];       /* of voxels: B, W, H, D; their key is the BXYZ number, and fits the dtype of table_keys */
    bool clear;             /* empty the table first; what it holds need not be a table yet */
    bool replace;           /* the values of keys that are there already */
    fg_tensor workspace;
} fg_hash_insert_params;

/* out[n] = the value of keys[n]; all ones where there is none, or where the voxel lies outside the shape. */
typedef struct {
    fg_tensor keys;         /* as above */
    fg_tensor table_keys;   /* (S) */
    fg_tensor table_values; /* (S) */
    fg_tensor state;        /* (2) */
    int64_t shape[4];
    fg_tensor out; /* (N) contiguous, dtype of table_values */
    fg_tensor workspace;
} fg_hash_lookup_params;

/* The voxels around the points of a grid and their weights. The centre of voxel (x, y, z) lies at + 0.5.
 * K = 8, trilinear: corner 4 kx + 2 ky + kz of the cell floor(point - 0.5); weights renormalised over the voxels that
 * are there, all 0 where none is or where those that are weigh nothing. K = 1, nearest: the point truncated towards 0.
 * -1 where there is no voxel, as everywhere around a point that is not finite. */
typedef struct {
    fg_tensor grid;    /* (B, L, 3) float32 contiguous, [b] in batch b; or (Q, 4): batch, x, y, z */
    fg_tensor coords;  /* (N, 4) int32 contiguous: b, x, y, z; of duplicates the lowest row is meant */
    int64_t shape[4];  /* B, W, H, D */
    fg_tensor indices; /* out: (Q, K) int32 contiguous, Q = B * L */
    fg_tensor weights; /* out: (Q, 8) float32 contiguous; absent with K = 1 */
    fg_tensor workspace;
} fg_sample_map_params;

/* out[q] = sum_k weights[q, k] * feats[indices[q, k]] of the map with K = 8, which is not written down. */
typedef struct {
    fg_tensor grid, coords; /* as above */
    int64_t shape[4];
    fg_tensor feats; /* (N, C) float32 | float16 | bfloat16, inner stride 1 */
    fg_tensor out;   /* (Q, C) dtype of feats, inner stride 1 */
    fg_tensor workspace;
} fg_sample_forward_params;

/* The gradient of sum_k weights[q, k] * feats[indices[q, k]] in the points, with K = 8. */
typedef struct {
    fg_tensor grad_out;  /* (Q, C) float32 | float16 | bfloat16, inner stride 1 */
    fg_tensor feats;     /* (N, C) dtype of grad_out, inner stride 1 */
    fg_tensor grid;      /* (B, L, 3) or (Q, 4) float32 contiguous */
    fg_tensor indices;   /* (Q, 8) int32 contiguous */
    fg_tensor grad_grid; /* out: as grid; 0 for the batch */
    fg_tensor workspace;
} fg_sample_grad_params;

/* out[q] = sum_k weights[q, k] * feats[indices[q, k]] in the order of k, accumulation in float32; -1 is left out. */
typedef struct {
    fg_tensor feats;   /* (N, C) float32 | float16 | bfloat16, inner stride 1 */
    fg_tensor indices; /* (Q, K) int32 contiguous */
    fg_tensor weights; /* (Q, K) float32 contiguous; absent: all 1 */
    fg_tensor out;     /* (Q, C) dtype of feats, inner stride 1 */
    fg_tensor workspace;
} fg_gather_sum_params;

/* The entries of indices grouped by the row that they name: order[starts[m] .. starts[m + 1]) are the positions of the
 * entries m, ascending; those that are no row come last. */
typedef struct {
    fg_tensor indices; /* (Q, K) int32 contiguous: rows below M, -1 = none; Q * K < 2^31 */
    fg_tensor order;   /* out: (Q * K) int32 contiguous */
    fg_tensor starts;  /* out: (M + 1) int32 contiguous */
    fg_tensor workspace;
} fg_group_rows_params;

typedef enum { FG_POOL_MAX = 0, FG_POOL_MEAN, FG_POOL_SUM, FG_POOL_MODE_COUNT } fg_pool_mode;

/* out[m] = reduction over i in [starts[m], starts[m + 1]) of weights[order[i]] * src[order[i] / K], in the order of i,
 * accumulation in float32; 0 for an empty group. Of equal maxima the first counts, and NaN is above all. */
typedef struct {
    fg_tensor src;     /* (R, C) float32 | float16 | bfloat16, inner stride 1 */
    fg_tensor order;   /* (R * K) int32 contiguous, below R * K */
    fg_tensor starts;  /* at least M + 1 int32 contiguous, ascending, at most R * K */
    fg_tensor weights; /* (R * K) float32 contiguous; absent: all 1 */
    fg_pool_mode mode;
    fg_tensor out;    /* (M, C) dtype of src, inner stride 1 */
    fg_tensor argmax; /* out: (M, C) int32 contiguous, the row of src that the maximum is of, -1 = none; or absent */
    fg_tensor workspace;
} fg_group_reduce_params;

/* The sites that a convolution's inputs reach, as their sorted, distinct codes: code[0 .. count); what follows them is
 * arbitrary. A voxel reaches (coord + padding - k * dilation) / stride where that is whole; transposed:
 * coord * stride + k * dilation - padding. Sites outside `out_shape` and voxels outside `shape` are left out; the CPU
 * reports the latter. */
typedef struct {
    fg_tensor coords;      /* (N, 4) int32 contiguous */
    int64_t shape[4];      /* of coords */
    int64_t out_shape[4];  /* of the sites, the same B */
    int64_t code_shape[4]; /* of the codes: nowhere less than out_shape, fg_sequence_bits() of at most 63 */
    fg_sequence mode;
    int32_t kernel[3];
    int32_t stride[3];
    int64_t padding[3]; /* at most 2^31 - 1 each */
    int32_t dilation[3];
    bool transposed;
    fg_tensor code;  /* out: (N * fg_plan_conv_sites().per_voxel) int64 contiguous */
    fg_tensor count; /* out: (1) int64 */
    fg_tensor workspace;
} fg_conv_sites_params;

/* The voxels that points lie in: places = (x, y, z) / voxel_size - origin in float32, code = the BXYZ number of the
 * voxel (batch, floor(places)), -1 for a point outside the shape or not finite. */
typedef struct {
    fg_tensor points; /* (N, 4) float32 contiguous: batch, x, y, z; or (N, 3), all of batch 0 */
    float voxel_size[3], origin[3];
    int64_t shape[4];
    fg_tensor code;   /* out: (N) int32 | int64 contiguous, of more bits than a code */
    fg_tensor places; /* out: (N, 4) float32 contiguous: batch and place; or absent */
    fg_tensor workspace;
} fg_voxel_codes_params;

/* The distinct numbers among sorted keys, all ones excepted: ranks[i] is how many there are up to and including place
 * i, count how many there are in all. */
typedef struct {
    fg_tensor sorted; /* (N) int32 | int64 contiguous, ascending as unsigned numbers */
    fg_tensor ranks;  /* out: (N) int32 contiguous */
    fg_tensor count;  /* out: (1) int32 */
    fg_tensor workspace;
} fg_unique_ranks_params;

/* What is known once the M distinct keys can be given memory. */
typedef struct {
    fg_tensor sorted;  /* (N) as above */
    fg_tensor order;   /* (N) int32 contiguous, from sort_keys */
    fg_tensor ranks;   /* (N) as above */
    fg_tensor keys;    /* out: (M) contiguous, dtype of sorted: the distinct keys, ascending */
    fg_tensor starts;  /* out: (M + 1) int32 contiguous: rows order[starts[m] .. starts[m + 1]) have the key m */
    fg_tensor first;   /* out: (M) int32 contiguous: the lowest of them */
    fg_tensor counts;  /* out: (M) int32 contiguous: how many they are */
    fg_tensor inverse; /* out: (N) int32 contiguous: the number of each row's key, -1 for a key of all ones */
    fg_tensor workspace;
} fg_unique_groups_params;

/* out[m] = activation(sum_v weight[:, v, :] . feats[map[v, m]] + bias + residual[m]), all of it in float32. Of float8
 * operands the sum is that of weight * scale_weight and feats * scale_feats. "explicit_gemm" of these is "auto". */
typedef struct {
    fg_tensor feats;        /* (N, Ci) float32 | float16 | bfloat16 | float8_*, inner stride 1 */
    fg_tensor weight;       /* (Co, V, Ci / groups) contiguous, dtype of feats; float8 kinds mix freely */
    fg_tensor bias;         /* (Co) contiguous, dtype of out, with a float8 out any of the wider; or absent */
    fg_tensor map;          /* (V, M) int32 contiguous, -1 = none */
    fg_tensor order;        /* (sum of groups, M) int32 contiguous, permutations: orders to take rows in, with V more
                             * rows, if the first set is one order, as of ordered_map(); or absent */
    fg_tensor residual;     /* (M, Co) inner stride 1, dtype as of bias, may be `out` element for element; or absent */
    fg_tensor scale_feats;  /* of float8: float32 () or contiguous (N), one for each row; or absent: 1 */
    fg_tensor scale_weight; /* of float8: float32 () or contiguous (Co), one for each output channel; or absent: 1 */
    fg_order_sets sets;     /* of which a plan takes one, or none; every one divides V */
    fg_tensor segments;     /* the records of `map` (segment.h); or absent */
    int64_t groups; /* of channels, a divisor of Ci and Co; each is a convolution of its own (channel_groups.h) */
    fg_activation activation;
    fg_algorithm algorithm;
    fg_precision precision;
    fg_tensor out;       /* (M, Co) inner stride 1, dtype of feats; of float8 operands any: saturate(... / scale_out) */
    fg_tensor scale_out; /* float32 (); with a float8 out, or absent: 1 */
    fg_tensor workspace;
} fg_conv_forward_params;

/* grad_feats[n] = sum_v weight[:, v, :]^T . grad_out[map[v', n]], where map is the transposed map and v' = v, or,
 * when mirrored (every kernel axis odd, one coordinate set), the forward map and v' = V - 1 - v. */
typedef struct {
    fg_tensor grad_out; /* (M, Co), inner stride 1 */
    fg_tensor weight;   /* (Co, V, Ci / groups) contiguous */
    fg_tensor map;      /* (V, N) int32 contiguous */
    fg_tensor order;    /* (sum of groups, N) int32 contiguous: those of `map`, as in the forward pass; or absent */
    fg_order_sets sets;
    fg_tensor segments; /* the records of `map` (segment.h); or absent */
    int64_t groups;     /* of channels */
    fg_algorithm algorithm;
    bool mirrored;
    fg_precision precision;
    fg_tensor grad_feats; /* out: (N, Ci) inner stride 1 */
    fg_tensor workspace;
} fg_conv_dgrad_params;

/* grad_weight[:, v, :] = sum_m grad_out[m] (x) feats[map[v, m]]; grad_bias = sum_m grad_out[m].
 * Either output may be absent. Deterministic: partial sums meet in a fixed order. */
typedef struct {
    fg_tensor grad_out;     /* (M, Co), inner stride 1 */
    fg_tensor feats;        /* (N, Ci), inner stride 1 */
    fg_tensor map;          /* (V, M) int32 contiguous: the forward map */
    fg_tensor segments;     /* the records of `map` (segment.h); or absent */
    int64_t groups;         /* of channels */
    fg_algorithm algorithm; /* a masked one takes segments wherever it can; else there is one */
    fg_precision precision;
    bool concurrent;       /* with the operation in front of it on the queue, which neither writes what this one reads
                              nor uses what it writes, workspaces included; it ends after that one */
    fg_tensor grad_weight; /* out: (Co, V, Ci / groups) contiguous, dtype of feats; or absent */
    fg_tensor grad_bias;   /* out: (Co) contiguous, dtype of feats; or absent */
    fg_tensor workspace;
} fg_conv_wgrad_params;

/* Depthwise convolution: every channel by itself, output channel o reading input channel o / multiplier.
 * out[m, o] = activation(bias[o] + sum_v weight[o, v] * feats[map[v, m], o / multiplier] + residual[m, o]); float32
 * sums in the order of v. */
typedef struct {
    fg_tensor feats;    /* (N, C) float32 | float16 | bfloat16, inner stride 1 */
    fg_tensor weight;   /* (C * multiplier, V) contiguous, dtype of feats */
    fg_tensor bias;     /* (C * multiplier) contiguous, dtype of feats; or absent */
    fg_tensor map;      /* (V, M) int32 contiguous, -1 = none */
    fg_tensor residual; /* (M, C * multiplier) inner stride 1, dtype of feats, may be `out` itself; or absent */
    fg_activation activation;
    fg_tensor out; /* (M, C * multiplier) inner stride 1, dtype of feats */
    fg_tensor workspace;
} fg_depthwise_forward_params;

/* grad_feats[n, c] = sum_v sum_o weight[o, v] * grad_out[map[v', n], o] over the o of channel c; map and v' as in
 * fg_conv_dgrad_params. */
typedef struct {
    fg_tensor grad_out; /* (M, C * multiplier), inner stride 1 */
    fg_tensor weight;   /* (C * multiplier, V) contiguous */
    fg_tensor map;      /* (V, N) int32 contiguous */
    bool mirrored;
    fg_tensor grad_feats; /* out: (N, C) inner stride 1 */
    fg_tensor workspace;
} fg_depthwise_dgrad_params;

/* grad_weight[o, v] = sum_m grad_out[m, o] * feats[map[v, m], o / multiplier]. Deterministic. */
typedef struct {
    fg_tensor grad_out;    /* (M, C * multiplier), inner stride 1 */
    fg_tensor feats;       /* (N, C), inner stride 1 */
    fg_tensor map;         /* (V, M) int32 contiguous: the forward map */
    fg_tensor grad_weight; /* out: (C * multiplier, V) contiguous */
    fg_tensor workspace;
} fg_depthwise_wgrad_params;

/* out[m] = maximum, mean or sum of feats[map[v, m]] over the offsets v with an entry, in their order; 0 without any.
 * NaN is above every number; of equal maxima the first is chosen. Sums and means are float32. Without
 * channels nothing is written. */
typedef struct {
    fg_tensor feats; /* (N, C) float32 | float16 | bfloat16, inner stride 1 */
    fg_tensor map;   /* (V, M) int32 contiguous, -1 = none */
    fg_pool_mode mode;
    fg_tensor out;    /* (M, C) inner stride 1, dtype of feats */
    fg_tensor argmax; /* out, of max: (M, C) int32 contiguous, the row that each maximum is from, or -1; or absent */
    fg_tensor count;  /* out: (M) int32 contiguous, entries; or absent */
    fg_tensor workspace;
} fg_pool_params;

/* grad_feats[n] = sum over the entries m = map[v, n] of grad_out[m], of max where argmax[m] is n, of mean divided by
 * count[m]. */
typedef struct {
    fg_tensor grad_out; /* (M, C), inner stride 1 */
    fg_tensor map;      /* (V, N) int32 contiguous: the transposed map */
    fg_pool_mode mode;
    fg_tensor argmax;     /* of max: (M, C) int32 contiguous */
    fg_tensor count;      /* of mean: (M) int32 contiguous, or (M + 1): bounds that lie so far apart */
    fg_tensor grad_feats; /* out: (N, C) inner stride 1 */
    fg_tensor workspace;
} fg_pool_backward_params;

/* batch[n, 0] = the sample of row n, -1 where it is none of 0 .. samples - 1 (the CPU reports it): what groups voxels
 * by sample (fg_group_rows), and the map of volume 1 by which the gradient of pooling whole samples is one of
 * pooling. */
typedef struct {
    fg_tensor coords; /* (N, 4) int32 contiguous */
    int64_t samples;
    fg_tensor batch; /* out: (N, 1) int32 contiguous */
    fg_tensor workspace;
} fg_batch_indices_params;

typedef enum { FG_SCALE_NONE = 0, FG_SCALE_TENSOR, FG_SCALE_ROW, FG_SCALE_BLOCK } fg_scale_kind;

enum { FG_SCALE_BLOCK_SIZE = 128 };

/* Which axis of the product belongs to groups, and what tells them apart. A backend clamps offsets and masked_m into
 * the axis, takes a decreasing pair of offsets as an empty group and skips an index that names no group; the CPU
 * rejects all of them. Offsets hold G ends (the first group begins at 0) or G + 1 bounds. */
typedef enum {
    FG_GEMM_DENSE = 0,            /* A (M, K)     B (N, K)     out (M, N) */
    FG_GEMM_BATCHED,              /* A (G, M, K)  B (G, N, K)  out (G, M, N) */
    FG_GEMM_M_GROUPED,            /* A (M, K)     B (G, N, K)  out (M, N)     offsets of rows */
    FG_GEMM_M_GROUPED_CONTIGUOUS, /* the same; m_indices (M): each row's group or -1. A group starts at a multiple of
                                     FG_GROUP_ALIGNMENT, its rows are adjacent and -1 lies behind them */
    FG_GEMM_M_GROUPED_MASKED,     /* A (G, M, K)  B (G, N, K)  out (G, M, N)  masked_m (G): rows of each group */
    FG_GEMM_N_GROUPED,            /* A (G, M, K)  B (N, K)     out (M, N)     offsets of columns */
    FG_GEMM_K_GROUPED,            /* A (M, K)     B (N, K)     out (G, M, N)  offsets along K */
    FG_GEMM_LAYOUT_COUNT,
} fg_gemm_layout;

enum { FG_GROUP_ALIGNMENT = 128 };

/* out = act(alpha * scale_a * scale_b * A . B^T + bias), accumulation in float32. With swiglu the N columns are pairs
 * of gate and up, and out has N / 2: silu(gate) * up. A float8 out is saturate(D / scale_out). With `accumulate` (out
 * float32), out += D. Rows and columns outside every group are neither read nor written; an empty group along K is a
 * product of depth 0. */
typedef struct {
    fg_gemm_layout layout;
    fg_tensor a;              /* float8_* | float16 | bfloat16 | float32; inner stride 1, or that of M is 1 */
    fg_tensor b;              /* inner stride 1; fp8 kinds mix freely, else dtype of a */
    bool b_row_major;         /* b is (..., K, N) instead */
    fg_tensor grouping;       /* offsets int32 | int64, m_indices or masked_m int32, contiguous; else absent */
    fg_tensor weight_indices; /* M_GROUPED: group g multiplies b[weight_indices[g]] (G) int32 | int64; or absent */
    int64_t expected_m;       /* M_GROUPED_MASKED: about masked_m, a hint for the plan; 0 = unknown */
    /* float32 contiguous. TENSOR: () or (G); ROW: (M), (N) or with a leading G; BLOCK, both or none, for float8 that is
     * not grouped along N or K: A (..., M, K / 128), B (..., N / 128, K / 128), rounded up. A leading G belongs to an
     * operand that has one, and to both where K is grouped; b[weight_indices[g]] has that index. */
    fg_tensor scale_a, scale_b;
    fg_scale_kind kind_a, kind_b;
    fg_tensor bias; /* (N), or (G, N) where b has G; contiguous, float32 or dtype of out; or absent */
    float alpha;
    fg_activation activation;
    bool swiglu; /* N is even; not N_GROUPED */
    bool accumulate;
    fg_precision precision;
    int32_t promote_every; /* K between two promotions of float8 sums: a multiple of 128; 0 = never */
    int32_t num_sms;       /* multiprocessors to use at most; 0 = all */
    fg_tensor scale_out;   /* float32 (); with a float8 out, or absent */
    fg_tensor out;         /* bfloat16 | float16 | float32 | float8_*, inner stride 1 */
    fg_tensor workspace;
} fg_gemm_params;

/* q = saturate(y / scale), round to nearest even, NaN kept; y / scale is one IEEE float32 division. y is x, or with
 * swiglu silu(x[2 j]) * x[2 j + 1] in float32. scale = amax / max_finite(dtype of q) over the finite values of y in the
 * tensor, row or block, 1 where amax is 0; computed here unless scale_given. One that underflows to 0 is 1 as well.
 * Without saturate amax is infinite where y is, and so is the scale. */
typedef struct {
    fg_tensor x;        /* (M, K), or but for TENSOR also (G, M, K); float32 | float16 | bfloat16; inner stride 1, or
                         * that of M is 1 */
    bool swiglu;        /* x has 2 K columns */
    fg_scale_kind kind; /* FG_SCALE_TENSOR, FG_SCALE_ROW or FG_SCALE_BLOCK */
    int32_t block_rows; /* of a block, 1 or 128; its columns are 128 */
    bool scale_given, saturate;
    fg_tensor scale; /* in or out: float32 contiguous (), (..., M) or (..., M / block_rows, K / 128) rounded up */
    fg_tensor q;     /* out: (..., M, K) float8_e4m3fn | float8_e5m2, inner stride 1 */
    fg_tensor workspace;
} fg_quantize_params;

/* ---- backends ---- */

typedef struct {
    char name[256];
    int32_t compute_capability; /* 90 for 9.0; 0 for the CPU */
    int32_t num_sms;            /* multiprocessors; threads for the CPU */
    int64_t memory_bytes, l2_bytes;
    int32_t driver_version, runtime_version; /* as CUDA encodes them: 13000; 0 for the CPU */
} fg_device_info;

#define FG_OPERATION(name)                                                                                             \
    fg_status (*name##_workspace)(const fg_##name##_params *params, const fg_queue *queue, size_t *bytes,              \
                                  fg_error *error);                                                                    \
    fg_status (*name)(const fg_##name##_params *params, const fg_queue *queue, fg_error *error)

/* One column per backend. An operation that is NULL raises NotImplementedError naming it and the device; one whose
 * workspace query is NULL needs none. */
typedef struct {
    const char *name; /* "cpu", "cuda" */

    FG_OPERATION(neighbor_map);
    FG_OPERATION(conv_sites);
    FG_OPERATION(row_order);
    FG_OPERATION(ordered_map);
    FG_OPERATION(segment_map);
    FG_OPERATION(encode_seq);
    FG_OPERATION(decode_seq);
    FG_OPERATION(sort_keys);
    FG_OPERATION(hash_insert);
    FG_OPERATION(hash_lookup);
    FG_OPERATION(sample_map);
    FG_OPERATION(sample_forward);
    FG_OPERATION(sample_grad);
    FG_OPERATION(gather_sum);
    FG_OPERATION(group_rows);
    FG_OPERATION(group_reduce);
    FG_OPERATION(voxel_codes);
    FG_OPERATION(unique_ranks);
    FG_OPERATION(unique_groups);
    FG_OPERATION(conv_forward);
    FG_OPERATION(conv_dgrad);
    FG_OPERATION(conv_wgrad);
    FG_OPERATION(depthwise_forward);
    FG_OPERATION(depthwise_dgrad);
    FG_OPERATION(depthwise_wgrad);
    FG_OPERATION(pool);
    FG_OPERATION(pool_backward);
    FG_OPERATION(batch_indices);
    FG_OPERATION(gemm);
    FG_OPERATION(quantize);

    /* Devices. device_count reports 0 without a driver, and is no error. */
    fg_status (*device_count)(int32_t *count, fg_error *error);
    fg_status (*device_info)(int32_t device_index, fg_device_info *info, fg_error *error);

    /* Memory behind _C.DeviceArray: stream-ordered. NULL entries on the CPU. */
    fg_status (*allocate)(size_t bytes, const fg_queue *queue, void **data, fg_error *error);
    fg_status (*release)(void *data, const fg_queue *queue, fg_error *error);
    /* On return of copy_to_device the source may be reused; copy_to_host is complete after a synchronize. */
    fg_status (*copy_to_device)(void *dst, const void *src, size_t bytes, const fg_queue *queue, fg_error *error);
    fg_status (*copy_to_host)(void *dst, const void *src, size_t bytes, const fg_queue *queue, fg_error *error);
    /* Makes `waiter` wait for all work queued on `queue` so far (event record + wait). */
    fg_status (*wait_for)(const fg_queue *waiter, const fg_queue *queue, fg_error *error);
    fg_status (*synchronize)(const fg_queue *queue, fg_error *error);

    /* A mark notes the work queued so far, as an event does. `passed` asks, without waiting, whether that work is done,
     * and frees the mark when it is or when it fails. NULL entries on the CPU. */
    fg_status (*mark)(const fg_queue *queue, void **mark, fg_error *error);
    fg_status (*passed)(void *mark, bool *passed, fg_error *error);
    fg_status (*wait_for_mark)(const fg_queue *waiter, void *mark, fg_error *error);
    void (*forget)(void *mark); /* frees it, passed or not */

    /* Whether what is queued goes into a CUDA graph, or must not be queued because of one. NULL on the CPU. */
    fg_status (*is_capturing)(const fg_queue *queue, bool *capturing, fg_error *error);
} fg_backend;

const fg_backend *fg_cpu_backend(void);
#ifdef FLEXGEMM_WITH_CUDA
const fg_backend *fg_cuda_backend(void);
#endif

#ifdef __cplusplus
}
#endif
#endif
