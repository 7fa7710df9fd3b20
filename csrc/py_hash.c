/*
 * The hash table: insert and lookup of integers or of voxels, in arrays of the caller's.
 */
#include "coords.h"
#include "operation.h"

/* keys: (N) of the table's dtype, or voxels (N, 4) of a shape whose numbers fit it. */
static int expect_keys(const fg_view *keys, const fg_view *table_keys, PyObject *shape, int64_t extents[4]) {
    const bool given = shape && shape != Py_None;
    if (keys->tensor.ndim != 2) {
        if (given) {
            PyErr_SetString(PyExc_ValueError, "shape: expected None, since keys are integers and not voxels");
            return -1;
        }
        return fg_expect_vector(keys, FG_BIT(table_keys->tensor.dtype), FG_ANY, NULL);
    }
    if (!given) {
        PyErr_SetString(PyExc_ValueError, "shape: expected (B, W, H, D), since keys are voxels, got None");
        return -1;
    }
    if (fg_expect_coords(keys, FG_ANY, NULL) < 0 || fg_arg_shape(shape, extents) < 0) return -1;
    return fg_check_keys_fit(table_keys, extents);
}

/* ---- insert ---- */

static const fg_parameter hash_insert_parameters[] = {
    FG_INPUT(keys),   FG_INPUT_OR_NONE(values), FG_OUTPUT(table_keys), FG_OUTPUT(table_values), FG_OUTPUT(state),
    FG_SCALAR(shape), FG_SCALAR(clear),         FG_SCALAR(replace),    FG_WORKSPACE_AND_STREAM,
};

static int hash_insert_fill(fg_call *call, void *params) {
    enum { KEYS, VALUES, TABLE_KEYS, TABLE_VALUES, STATE, SHAPE, CLEAR, REPLACE };
    fg_hash_insert_params *p = params;
    const fg_view *views = call->views;
    if (fg_expect_table(&views[TABLE_KEYS], &views[TABLE_VALUES], FG_OFFSETS, &views[STATE]) < 0 ||
        expect_keys(&views[KEYS], &views[TABLE_KEYS], call->values[SHAPE], p->shape) < 0 ||
        fg_arg_bool(call->values[CLEAR], "clear", &p->clear) < 0 ||
        fg_arg_bool(call->values[REPLACE], "replace", &p->replace) < 0) {
        return -1;
    }
    if (views[VALUES].tensor.present && fg_expect_vector(&views[VALUES], FG_BIT(views[TABLE_VALUES].tensor.dtype),
                                                         views[KEYS].tensor.shape[0], "to match keys") < 0) {
        return -1;
    }
    p->keys = views[KEYS].tensor;
    p->values = views[VALUES].tensor;
    p->table_keys = views[TABLE_KEYS].tensor;
    p->table_values = views[TABLE_VALUES].tensor;
    p->state = views[STATE].tensor;
    return 0;
}

/* ---- lookup ---- */

static const fg_parameter hash_lookup_parameters[] = {
    FG_INPUT(keys), FG_INPUT(table_keys), FG_INPUT(table_values),  FG_INPUT(state),
    FG_OUTPUT(out), FG_SCALAR(shape),     FG_WORKSPACE_AND_STREAM,
};

static int hash_lookup_fill(fg_call *call, void *params) {
    enum { KEYS, TABLE_KEYS, TABLE_VALUES, STATE, OUT, SHAPE };
    fg_hash_lookup_params *p = params;
    const fg_view *views = call->views;
    if (fg_expect_table(&views[TABLE_KEYS], &views[TABLE_VALUES], FG_OFFSETS, &views[STATE]) < 0 ||
        expect_keys(&views[KEYS], &views[TABLE_KEYS], call->values[SHAPE], p->shape) < 0 ||
        fg_expect_vector(&views[OUT], FG_BIT(views[TABLE_VALUES].tensor.dtype), views[KEYS].tensor.shape[0],
                         "to match keys") < 0) {
        return -1;
    }
    p->keys = views[KEYS].tensor;
    p->table_keys = views[TABLE_KEYS].tensor;
    p->table_values = views[TABLE_VALUES].tensor;
    p->state = views[STATE].tensor;
    p->out = views[OUT].tensor;
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
