/* What every operation asks of its arrays. Each function returns 0, or -1 with an exception that names the argument,
 * what it got and what was needed. */
#ifndef FG_CHECK_H
#define FG_CHECK_H

#include "tensor.h"

#define FG_BIT(dtype) (1u << (dtype))
enum {
    FG_FLOATS = FG_BIT(FG_FLOAT32) | FG_BIT(FG_FLOAT16) | FG_BIT(FG_BFLOAT16),
    FG_FLOAT8S = FG_BIT(FG_FLOAT8_E4M3FN) | FG_BIT(FG_FLOAT8_E5M2),
    FG_OFFSETS = FG_BIT(FG_INT32) | FG_BIT(FG_INT64),
};

/* One dimension of an expected shape: its size, or FG_ANY and the symbol that stands for it. */
typedef struct {
    const char *symbol;
    int64_t size;
} fg_dim;
enum { FG_ANY = -1 };

int fg_expect_dtype(const fg_view *view, unsigned allowed);
int fg_expect_dtype_of(const fg_view *view, const fg_view *other);

/* `why` says which arguments fix the sizes ("to match feats"), or is NULL. */
int fg_expect_shape(const fg_view *view, int ndim, const fg_dim *dims, const char *why);

/* Inner stride 1; of an output also rows that do not overlap each other. */
int fg_expect_rows(const fg_view *view);
int fg_expect_contiguous(const fg_view *view);
bool fg_has_rows(const fg_view *view); /* inner stride 1 */
bool fg_is_contiguous(const fg_view *view);

/* Of a matrix, or matrices of a batch: inner stride 1, or that of the axis before it. */
int fg_expect_rows_or_columns(const fg_view *view);
bool fg_has_rows_or_columns(const fg_view *view);

/* (N, C), inner stride 1; either size may be FG_ANY. */
int fg_expect_features(const fg_view *view, int64_t rows, int64_t channels, const char *why);

/* Two dimensions of one dtype, contiguous. */
int fg_expect_matrix(const fg_view *view, fg_dtype dtype, fg_dim rows, fg_dim columns, const char *why);

/* (V, N) int32, contiguous; either size may be FG_ANY. */
int fg_expect_map(const fg_view *view, int64_t volume, int64_t rows, const char *why);

/* A weight or its gradient, (Co, Kw, Kh, Kd, Ci) or (Co, V, Ci), contiguous: seen as (Co, V, Ci) in `flat`. ci and volume
 * may be FG_ANY. */
int fg_expect_weight(const fg_view *view, int64_t co, int64_t volume, int64_t ci, const char *why, fg_tensor *flat);

/* (Co), contiguous. */
int fg_expect_channels(const fg_view *view, int64_t channels, const char *why);

/* What is added to `out`: of its shape and the dtype of `added`, or absent. It may be `out`: each element is read before
 * it is written, by one thread. */
int fg_expect_residual(fg_view *view, const fg_view *added, const fg_view *out);

/* ValueError: "name: expected <expected>, got shape (...)". */
int fg_wrong_shape(const fg_view *view, const char *expected);

/* Whether two views of one shape and dtype are the same elements in the same places. */
bool fg_same_elements(const fg_view *a, const fg_view *b);

/* Outputs are writable, the exporter's own memory, and overlap nothing else but inputs that are marked in_place. Absent
 * views are skipped. */
int fg_check_outputs(const fg_view *views, int count);

/* All arrays on one device. */
int fg_check_devices(const fg_view *views, int count);

#endif
