/*
 * What every operation asks of its arrays: dtype, shape, strides, device, writable and disjoint outputs.
 */
#include "check.h"

#include "error.h"

/* ---- dtype ---- */

static int wrong_dtype(const fg_view *view, const char *expected) {
    char got[64];
    fg_view_dtype_name(view, got, sizeof got);
    PyErr_Format(PyExc_TypeError, "%s: expected dtype %s, got %s", view->name, expected, got);
    return -1;
}

int fg_expect_dtype(const fg_view *view, unsigned allowed) {
    const fg_dtype dtype = view->tensor.dtype;
    if (dtype != FG_DTYPE_COUNT && (allowed & FG_BIT(dtype))) return 0;
    fg_text expected = {.length = 0};
    for (int i = 0; i < FG_DTYPE_COUNT; i++) {
        if (!(allowed & FG_BIT(i))) continue;
        allowed &= ~FG_BIT(i);
        fg_text_add(&expected, "%s%s", expected.length == 0 ? "" : allowed ? ", " : " or ", fg_dtype_name((fg_dtype)i));
    }
    return wrong_dtype(view, expected.data);
}

int fg_expect_dtype_of(const fg_view *view, const fg_view *other) {
    if (view->tensor.dtype == other->tensor.dtype) return 0;
    fg_text expected = {.length = 0};
    fg_text_add(&expected, "%s to match %s", fg_dtype_name(other->tensor.dtype), other->name);
    return wrong_dtype(view, expected.data);
}

/* ---- shape and strides ---- */

int fg_wrong_shape(const fg_view *view, const char *expected) {
    fg_text got = {.length = 0};
    fg_text_add_tuple(&got, view->tensor.shape, view->tensor.ndim);
    PyErr_Format(PyExc_ValueError, "%s: expected %s, got %s", view->name, expected, got.data);
    return -1;
}

int fg_expect_shape(const fg_view *view, int ndim, const fg_dim *dims, const char *why) {
    const fg_tensor *tensor = &view->tensor;
    bool same = tensor->ndim == ndim;
    for (int i = 0; i < ndim && same; i++) same = dims[i].size == FG_ANY || dims[i].size == tensor->shape[i];
    if (same) return 0;
    fg_text expected = {.length = 0};
    fg_text_add(&expected, "(");
    for (int i = 0; i < ndim; i++) {
        if (i > 0) fg_text_add(&expected, ", ");
        if (dims[i].size == FG_ANY) {
            fg_text_add(&expected, "%s", dims[i].symbol);
        } else {
            fg_text_add(&expected, "%lld", (long long)dims[i].size);
        }
    }
    fg_text_add(&expected, ndim == 1 ? ",)" : ")");
    if (why) fg_text_add(&expected, " %s", why);
    return fg_wrong_shape(view, expected.data);
}

static int wrong_strides(const fg_view *view, const char *expected) {
    fg_text got = {.length = 0}, shape = {.length = 0};
    fg_text_add_tuple(&got, view->tensor.strides, view->tensor.ndim);
    fg_text_add_tuple(&shape, view->tensor.shape, view->tensor.ndim);
    PyErr_Format(PyExc_ValueError, "%s: expected %s, got strides %s of shape %s", view->name, expected, got.data,
                 shape.data);
    return -1;
}

/* Whether no two elements share memory: the shorter the stride of a dimension, the further inside it lies. */
static bool is_apart(const fg_tensor *tensor) {
    int order[FG_MAX_NDIM];
    for (int i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] == 0) return true;
        int place = i;
        for (; place > 0 && tensor->strides[order[place - 1]] > tensor->strides[i]; place--) {
            order[place] = order[place - 1];
        }
        order[place] = i;
    }
    int64_t least = 1; /* stride that keeps the slices of a dimension apart */
    for (int i = 0; i < tensor->ndim; i++) {
        const int64_t stride = tensor->strides[order[i]], count = tensor->shape[order[i]];
        if (count == 1) continue;
        if (stride < least) return false;
        least = stride * count;
    }
    return true;
}

int fg_expect_rows(const fg_view *view) {
    if (!fg_has_rows(view)) return wrong_strides(view, "inner stride 1");
    if (!view->output || is_apart(&view->tensor)) return 0;
    bool backwards = false;
    for (int i = 0; i < view->tensor.ndim; i++) backwards = backwards || view->tensor.strides[i] < 0;
    return wrong_strides(view, backwards ? "rows that do not run backwards" : "rows that do not overlap");
}

int fg_expect_rows_or_columns(const fg_view *view) {
    return fg_has_rows_or_columns(view) ? 0 : wrong_strides(view, "stride 1 along one of the last two axes");
}

bool fg_has_rows_or_columns(const fg_view *view) {
    const int rows_axis = view->tensor.ndim - 2;
    if (fg_has_rows(view)) return true;
    return rows_axis >= 0 && (view->tensor.shape[rows_axis] == 1 || view->tensor.strides[rows_axis] == 1);
}

bool fg_has_rows(const fg_view *view) {
    return view->tensor.ndim == 0 || view->tensor.strides[view->tensor.ndim - 1] == 1;
}

bool fg_is_contiguous(const fg_view *view) {
    const fg_tensor *tensor = &view->tensor;
    int64_t stride = 1;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        if (tensor->strides[i] != stride) return false;
        stride *= tensor->shape[i] ? tensor->shape[i] : 1;
    }
    return true;
}

int fg_expect_contiguous(const fg_view *view) {
    return fg_is_contiguous(view) ? 0 : wrong_strides(view, "a contiguous array");
}

/* ---- kinds of arrays ---- */

int fg_expect_features(const fg_view *view, int64_t rows, int64_t channels, const char *why) {
    const fg_dim shape[] = {{"N", rows}, {"C", channels}};
    if (fg_expect_shape(view, 2, shape, why) < 0) return -1;
    return fg_expect_rows(view);
}

int fg_expect_matrix(const fg_view *view, fg_dtype dtype, fg_dim rows, fg_dim columns, const char *why) {
    const fg_dim shape[] = {rows, columns};
    if (fg_expect_dtype(view, FG_BIT(dtype)) < 0 || fg_expect_shape(view, 2, shape, why) < 0) return -1;
    return fg_expect_contiguous(view);
}

int fg_expect_map(const fg_view *view, int64_t volume, int64_t rows, const char *why) {
    return fg_expect_matrix(view, FG_INT32, (fg_dim){"V", volume}, (fg_dim){"N", rows}, why);
}

int fg_expect_weight(const fg_view *view, int64_t co, int64_t volume, int64_t ci, const char *why, fg_tensor *flat) {
    const fg_tensor *tensor = &view->tensor;
    if (tensor->ndim != 3 && tensor->ndim != 5) return fg_wrong_shape(view, "(Co, Kw, Kh, Kd, Ci) or (Co, V, Ci)");
    const int last = tensor->ndim - 1;
    fg_dim shape[FG_MAX_NDIM] = {{"Co", co}};
    int64_t product = 1;
    for (int i = 1; i < last; i++) {
        const int64_t most = tensor->ndim == 5 ? FG_MAX_KERNEL : FG_MAX_VOLUME;
        if (tensor->shape[i] < 1 || tensor->shape[i] > most) {
            return fg_wrong_shape(view, "a kernel of 1 to 7 along each axis, V of 1 to 343");
        }
        product *= tensor->shape[i];
        shape[i] = (fg_dim){"K", tensor->shape[i]};
    }
    if (volume != FG_ANY && product != volume) {
        shape[1] = (fg_dim){"V", volume};
        shape[2] = (fg_dim){"Ci", ci};
        return fg_expect_shape(view, 3, shape, why);
    }
    shape[last] = (fg_dim){"Ci", ci};
    if (fg_expect_shape(view, tensor->ndim, shape, why) < 0 || fg_expect_contiguous(view) < 0) return -1;
    *flat = *tensor;
    flat->ndim = 3;
    flat->shape[1] = product;
    flat->shape[2] = tensor->shape[last];
    flat->strides[0] = product * flat->shape[2];
    flat->strides[1] = flat->shape[2];
    flat->strides[2] = 1;
    return 0;
}

int fg_expect_channels(const fg_view *view, int64_t channels, const char *why) {
    const fg_dim shape[] = {{"Co", channels}};
    if (fg_expect_shape(view, 1, shape, why) < 0) return -1;
    return fg_expect_contiguous(view);
}

int fg_expect_residual(fg_view *view, const fg_view *added, const fg_view *out) {
    if (!view->tensor.present) return 0;
    if (fg_expect_dtype_of(view, added) < 0 ||
        fg_expect_features(view, out->tensor.shape[0], out->tensor.shape[1], "to match map and weight") < 0) {
        return -1;
    }
    view->in_place = view->tensor.dtype == out->tensor.dtype && fg_same_elements(view, out);
    return 0;
}

/* ---- overlap ---- */

/* Rows [low + i*pitch, low + i*pitch + length), i = 0 .. count-1, in bytes. */
typedef struct {
    int64_t low, pitch, length, count;
} fg_rows;

/* The view as rows of one pitch, or columns, those of several matrices that lie one behind the other too; false when it
 * is not such an array. */
static bool as_rows(const fg_view *view, fg_rows *rows) {
    const fg_tensor *tensor = &view->tensor;
    const int last = tensor->ndim - 1;
    if (last < 1 || tensor->dtype == FG_DTYPE_COUNT) return false;
    const int inner = tensor->strides[last] == 1 ? last : last - 1,
              row = 2 * last - 1 - inner; /* the other of the two */
    if (tensor->strides[inner] != 1) return false;
    int64_t count = tensor->shape[row], pitch = tensor->strides[row];
    for (int i = last - 2; i >= 0; i--) {
        if (count == 1 && tensor->shape[i] > 1) pitch = tensor->strides[i]; /* of matrices of one row */
        if (tensor->shape[i] > 1 && tensor->strides[i] != pitch * count) return false;
        count *= tensor->shape[i];
    }
    const int64_t itemsize = (int64_t)fg_dtype_size(tensor->dtype);
    *rows = (fg_rows){(int64_t)view->low, pitch * itemsize, tensor->shape[inner] * itemsize, count};
    return rows->pitch >= rows->length;
}

/* Whether two views share a byte. Exact for arrays of rows with the same pitch, such as neighbouring column slices of
 * one buffer; else two interleaved arrays whose address ranges meet count as overlapping. */
static bool overlap(const fg_view *a, const fg_view *b) {
    if (a->low >= b->high || b->low >= a->high) return false;
    fg_rows x, y;
    if (!as_rows(a, &x) || !as_rows(b, &y)) return true;
    if (x.count == 1 && x.length <= y.pitch) x.pitch = y.pitch; /* one row fits any pitch */
    if (y.count == 1 && y.length <= x.pitch) y.pitch = x.pitch;
    if (x.pitch != y.pitch) return true;
    /* Row j of y lies `distance + (j - i) * pitch` after row i of x. Since no row is longer than the pitch, only the
     * row differences that bring the starts within one pitch of each other can meet. */
    const int64_t distance = y.low - x.low;
    const int64_t nearest = -distance / x.pitch;
    for (int64_t step = nearest - 1; step <= nearest + 1; step++) {
        const int64_t offset = distance + step * x.pitch;
        const bool reachable = step > -x.count && step < y.count;
        if (reachable && offset < x.length && offset > -y.length) return true;
    }
    return false;
}

bool fg_same_elements(const fg_view *a, const fg_view *b) {
    bool same = a->tensor.data == b->tensor.data;
    for (int i = 0; i < a->tensor.ndim && same; i++) {
        same = a->tensor.shape[i] == 1 || a->tensor.strides[i] == b->tensor.strides[i];
    }
    return same;
}

int fg_check_outputs(const fg_view *views, int count) {
    for (int i = 0; i < count; i++) {
        const fg_view *output = &views[i];
        if (!output->tensor.present || !output->output) continue;
        if (output->read_only) {
            PyErr_Format(PyExc_ValueError, "%s: expected writable memory, got a read-only array", output->name);
            return -1;
        }
        if (output->copied) {
            PyErr_Format(PyExc_ValueError, "%s: expected the array's own memory, got a copy of it", output->name);
            return -1;
        }
        for (int j = 0; j < count; j++) {
            const fg_view *other = &views[j];
            const bool allowed = j == i || other->in_place, compared = other->output && j < i;
            if (allowed || compared || !other->tensor.present || !overlap(output, other)) continue;
            PyErr_Format(PyExc_ValueError, "%s: expected memory of its own, got memory that overlaps %s", output->name,
                         other->name);
            return -1;
        }
    }
    return 0;
}

/* ---- device ---- */

int fg_check_devices(const fg_view *views, int count) {
    const fg_view *first = NULL;
    for (int i = 0; i < count; i++) {
        const fg_view *view = &views[i];
        if (!view->object) continue;
        if (!first) first = view;
        if (view->tensor.device_type == first->tensor.device_type &&
            view->tensor.device_index == first->tensor.device_index) {
            continue;
        }
        char got[32], needed[32];
        fg_device_name(view->tensor.device_type, view->tensor.device_index, got, sizeof got);
        fg_device_name(first->tensor.device_type, first->tensor.device_index, needed, sizeof needed);
        PyErr_Format(PyExc_ValueError, "%s: expected memory on %s like %s, got memory on %s", view->name, needed,
                     first->name, got);
        return -1;
    }
    return 0;
}
