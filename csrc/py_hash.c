/*
 * The hash table: insert and lookup of integers or of voxels, in arrays of the caller's: one of keys and one of values,
 * or table_values = None and table_keys (S, 2), whose rows are slots of a key and its value. A slot of two 64-bit words
 * may hold a key or a value of 32 bits, in the low half of its word.
 */
#include "coords.h"
#include "operation.h"

/* ---- the table ---- */

static int expect_table(const fg_view *table_keys, const fg_view *table_values, const fg_view *state) {
    if (table_values->tensor.present) {
        if (fg_expect_vector(table_keys, FG_OFFSETS, FG_ANY, NULL) < 0) return -1;
        const int64_t slots = table_keys->tensor.shape[0];
        if (fg_expect_vector(table_values, FG_OFFSETS, slots, "to match table_keys") < 0) return -1;
    } else {
        const fg_dim shape[] = {{"S", FG_ANY}, {NULL, 2}};
        if (fg_expect_dtype(table_keys, FG_OFFSETS) < 0 ||
            fg_expect_shape(table_keys, 2, shape, "since table_values is None") < 0 ||
            fg_expect_contiguous(table_keys) < 0) {
            return -1;
        }
    }
    if (table_keys->tensor.shape[0] < 2) return fg_wrong_shape(table_keys, "at least two slots");
    return fg_expect_vector(state, FG_BIT(FG_INT64), 2, NULL);
}

/* What may be stored where the table has words of this dtype. */
static unsigned dtypes_of(const fg_view *table_keys, const fg_view *table_values, fg_dtype word) {
    return table_values->tensor.present || table_keys->tensor.dtype == FG_INT32 ? FG_BIT(word) : FG_OFFSETS;
}

/* One word of every slot, seen as a vector of `dtype`. */
static fg_tensor words_of(const fg_tensor *slots, int word, fg_dtype dtype) {
    fg_tensor vector = *slots;
    const int64_t parts = (int64_t)(fg_dtype_size(slots->dtype) / fg_dtype_size(dtype));
    vector.data = (char *)slots->data + (size_t)word * fg_dtype_size(slots->dtype);
    vector.dtype = dtype;
    vector.ndim = 1;
    vector.strides[0] = 2 * parts;
    return vector;
}

/* The keys and the values of a table, from one array or two. `keys`: what is inserted or looked up; `values`: what goes
 * in or comes out, perhaps nothing. */
static void find_words(const fg_view *table_keys, const fg_view *table_values, const fg_tensor *keys,
                       const fg_tensor *values, fg_tensor *key_words, fg_tensor *value_words) {
    const fg_tensor *table = &table_keys->tensor;
    *key_words = *table;
    *value_words = table_values->tensor;
    if (table_values->tensor.present) return;
    *key_words = words_of(table, 0, keys->ndim == 1 ? keys->dtype : table->dtype);
    *value_words = words_of(table, 1, values->present ? values->dtype : table->dtype);
}

static int check_keys_fit(const fg_view *table_keys, const int64_t shape[4]) {
    if (fg_check_cells(shape) < 0) return -1;
    if (table_keys->tensor.dtype == FG_INT64 || fg_sequence_bits(FG_BXYZ, shape) <= 32) return 0;
    PyErr_Format(PyExc_ValueError,
                 "shape: expected at most 2^32 voxels for keys of 32 bits, got (%lld, %lld, %lld, %lld)",
                 (long long)shape[0], (long long)shape[1], (long long)shape[2], (long long)shape[3]);
    return -1;
}

/* keys: (N) of a dtype that the table holds, or voxels (N, 4) of a shape whose numbers fit it. */
static int expect_keys(const fg_view *keys, const fg_view *table_keys, const fg_view *table_values, PyObject *shape,
                       int64_t extents[4]) {
    const bool given = shape && shape != Py_None;
    if (keys->tensor.ndim != 2) {
        if (given) {
            PyErr_SetString(PyExc_ValueError, "shape: expected None, since keys are integers and not voxels");
            return -1;
        }
        return fg_expect_vector(keys, dtypes_of(table_keys, table_values, table_keys->tensor.dtype), FG_ANY, NULL);
    }
    if (!given) {
        PyErr_SetString(PyExc_ValueError, "shape: expected (B, W, H, D), since keys are voxels, got None");
        return -1;
    }
    if (fg_expect_coords(keys, FG_ANY, NULL) < 0 || fg_arg_shape(shape, extents) < 0) return -1;
    return check_keys_fit(table_keys, extents);
}

/* (N) of a dtype that the table's values have. */
static int expect_values(const fg_view *values, const fg_view *keys, const fg_view *table_keys,
                         const fg_view *table_values) {
    const unsigned allowed = dtypes_of(
        table_keys, table_values, table_values->tensor.present ? table_values->tensor.dtype : table_keys->tensor.dtype);
    return fg_expect_vector(values, allowed, keys->tensor.shape[0], "to match keys");
}

/* ---- insert ---- */

static const fg_parameter hash_insert_parameters[] = {
    FG_INPUT(keys),          FG_INPUT_OR_NONE(values), FG_OUTPUT(table_keys), FG_OUTPUT_OR_NONE(table_values),
    FG_OUTPUT(state),        FG_SCALAR(shape),         FG_SCALAR(clear),      FG_SCALAR(replace),
    FG_WORKSPACE_AND_STREAM,
};

static int hash_insert_fill(fg_call *call, void *params) {
    enum { KEYS, VALUES, TABLE_KEYS, TABLE_VALUES, STATE, SHAPE, CLEAR, REPLACE };
    fg_hash_insert_params *p = params;
    const fg_view *views = call->views, *keys = &views[KEYS], *values = &views[VALUES];
    const fg_view *table_keys = &views[TABLE_KEYS], *table_values = &views[TABLE_VALUES];
    if (expect_table(table_keys, table_values, &views[STATE]) < 0 ||
        expect_keys(keys, table_keys, table_values, call->values[SHAPE], p->shape) < 0 ||
        fg_arg_bool(call->values[CLEAR], "clear", &p->clear) < 0 ||
        fg_arg_bool(call->values[REPLACE], "replace", &p->replace) < 0 ||
        (values->tensor.present && expect_values(values, keys, table_keys, table_values) < 0)) {
        return -1;
    }
    p->keys = keys->tensor;
    p->values = values->tensor;
    find_words(table_keys, table_values, &p->keys, &p->values, &p->table_keys, &p->table_values);
    p->state = views[STATE].tensor;
    return 0;
}

/* ---- lookup ---- */

static const fg_parameter hash_lookup_parameters[] = {
    FG_INPUT(keys), FG_INPUT(table_keys), FG_INPUT_OR_NONE(table_values), FG_INPUT(state),
    FG_OUTPUT(out), FG_SCALAR(shape),     FG_WORKSPACE_AND_STREAM,
};

static int hash_lookup_fill(fg_call *call, void *params) {
    enum { KEYS, TABLE_KEYS, TABLE_VALUES, STATE, OUT, SHAPE };
    fg_hash_lookup_params *p = params;
    const fg_view *views = call->views, *keys = &views[KEYS], *out = &views[OUT];
    const fg_view *table_keys = &views[TABLE_KEYS], *table_values = &views[TABLE_VALUES];
    if (expect_table(table_keys, table_values, &views[STATE]) < 0 ||
        expect_keys(keys, table_keys, table_values, call->values[SHAPE], p->shape) < 0 ||
        expect_values(out, keys, table_keys, table_values) < 0) {
        return -1;
    }
    p->keys = keys->tensor;
    p->out = out->tensor;
    find_words(table_keys, table_values, &p->keys, &p->out, &p->table_keys, &p->table_values);
    p->state = views[STATE].tensor;
    return 0;
}

/* ---- methods ---- */

FG_DEFINE_OPERATION(hash_insert)
FG_DEFINE_OPERATION(hash_lookup)

PyMethodDef fg_hash_methods[] = {
    FG_OPERATION_METHODS(hash_insert,
                         "keys, values, table_keys, table_values, state, *, shape=None, clear=False, replace=False, "
                         "workspace=None, stream=None",
                         "Puts keys that the table lacks into it; of equal keys the lowest row wins."),
    FG_OPERATION_METHODS(hash_lookup,
                         "keys, table_keys, table_values, state, out, *, shape=None, workspace=None, stream=None",
                         "out[n] = the value of keys[n], -1 where the table lacks it."),
    {NULL, NULL, 0, NULL},
};
