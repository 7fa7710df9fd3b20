/*
 * Voxels in a line: codes along a curve, back from codes, and the order of sorted keys.
 */
#include "coords.h"
#include "operation.h"

enum { MAX_CODE_BITS = 64 };

/* mode= and shape=, and the bits of a code. */
static int parse_sequence(const fg_state *state, PyObject *mode, PyObject *shape, fg_sequence *sequence,
                          int64_t extents[4], int32_t *bits) {
    int choice = FG_Z_ORDER;
    if (fg_arg_choice(mode, "mode", state->sequences, FG_SEQUENCE_COUNT, &choice) < 0 ||
        fg_arg_shape(shape, extents) < 0) {
        return -1;
    }
    *sequence = (fg_sequence)choice;
    *bits = fg_sequence_bits(*sequence, extents);
    if (*sequence == FG_BXYZ) return fg_check_cells(extents);
    if (*bits <= MAX_CODE_BITS) return 0;
    PyErr_Format(PyExc_ValueError,
                 "shape: expected codes of at most %d bits, got (%lld, %lld, %lld, %lld), which needs %d",
                 MAX_CODE_BITS, (long long)extents[0], (long long)extents[1], (long long)extents[2],
                 (long long)extents[3], *bits);
    return -1;
}

/* ---- codes ---- */

static const fg_parameter encode_seq_parameters[] = {
    FG_INPUT(coords), FG_OUTPUT(code), FG_REQUIRED_SCALAR(shape), FG_SCALAR(mode), FG_WORKSPACE_AND_STREAM,
};

static int encode_seq_fill(fg_call *call, void *params) {
    enum { COORDS, CODE, SHAPE, MODE };
    fg_encode_seq_params *p = params;
    const fg_view *coords = &call->views[COORDS], *code = &call->views[CODE];
    int32_t bits = 0;
    if (parse_sequence(call->state, call->values[MODE], call->values[SHAPE], &p->mode, p->shape, &bits) < 0 ||
        fg_expect_coords(coords, FG_ANY, NULL) < 0 ||
        fg_expect_vector(code, bits <= 32 ? FG_OFFSETS : FG_BIT(FG_INT64), coords->tensor.shape[0], "to match coords") <
            0) {
        return -1;
    }
    p->coords = coords->tensor;
    p->code = code->tensor;
    return 0;
}

static const fg_parameter decode_seq_parameters[] = {
    FG_INPUT(code), FG_OUTPUT(coords), FG_REQUIRED_SCALAR(shape), FG_SCALAR(mode), FG_WORKSPACE_AND_STREAM,
};

static int decode_seq_fill(fg_call *call, void *params) {
    enum { CODE, COORDS, SHAPE, MODE };
    fg_decode_seq_params *p = params;
    const fg_view *code = &call->views[CODE], *coords = &call->views[COORDS];
    int32_t bits = 0;
    if (parse_sequence(call->state, call->values[MODE], call->values[SHAPE], &p->mode, p->shape, &bits) < 0 ||
        fg_expect_vector(code, bits <= 32 ? FG_OFFSETS : FG_BIT(FG_INT64), FG_ANY, NULL) < 0 ||
        fg_expect_coords(coords, FG_ANY, NULL) < 0) {
        return -1;
    }
    if (coords->tensor.shape[0] > code->tensor.shape[0]) {
        PyErr_Format(PyExc_ValueError, "coords: expected at most %lld rows, as many as there are codes, got %lld",
                     (long long)code->tensor.shape[0], (long long)coords->tensor.shape[0]);
        return -1;
    }
    p->coords = coords->tensor;
    p->code = code->tensor;
    return 0;
}

static PyObject *sequence_bits(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    static const fg_parameter parameters[] = {FG_REQUIRED_SCALAR(shape), FG_SCALAR(mode)};
    enum { SHAPE, MODE, COUNT };
    const fg_state *state = PyModule_GetState(module);
    PyObject *values[COUNT];
    fg_sequence mode;
    int64_t shape[4];
    int32_t bits = 0;
    if (fg_parse_args(state, "sequence_bits", parameters, COUNT, args, nargs, kwnames, values) < 0 ||
        parse_sequence(state, values[MODE], values[SHAPE], &mode, shape, &bits) < 0) {
        return NULL;
    }
    return PyLong_FromLong(bits);
}

/* ---- order ---- */

static const fg_parameter sort_keys_parameters[] = {
    FG_INPUT(keys), FG_OUTPUT(order), FG_OUTPUT_OR_NONE(sorted), FG_REQUIRED_SCALAR(bits), FG_WORKSPACE_AND_STREAM,
};

static int sort_keys_fill(fg_call *call, void *params) {
    enum { KEYS, ORDER, SORTED, BITS };
    fg_sort_keys_params *p = params;
    const fg_view *keys = &call->views[KEYS], *order = &call->views[ORDER], *sorted = &call->views[SORTED];
    if (fg_expect_vector(keys, FG_OFFSETS, FG_ANY, NULL) < 0) return -1;
    const int64_t count = keys->tensor.shape[0];
    const int32_t width = 8 * (int32_t)fg_dtype_size(keys->tensor.dtype);
    if (fg_arg_int32(call->values[BITS], "bits", 1, width, &p->bits) < 0 ||
        fg_expect_vector(order, FG_BIT(FG_INT32), count, "to match keys") < 0) {
        return -1;
    }
    if (sorted->tensor.present && fg_expect_vector(sorted, FG_BIT(keys->tensor.dtype), count, "to match keys") < 0) {
        return -1;
    }
    p->keys = keys->tensor;
    p->order = order->tensor;
    p->sorted = sorted->tensor;
    return 0;
}

/* ---- methods ---- */

FG_DEFINE_OPERATION(encode_seq)
FG_DEFINE_OPERATION(decode_seq)
FG_DEFINE_OPERATION(sort_keys)

PyMethodDef fg_serialize_methods[] = {
    FG_OPERATION_METHODS(encode_seq, "coords, code, *, shape, mode='z_order', workspace=None, stream=None",
                         "code[n] = number of the voxel coords[n] along a curve."),
    FG_OPERATION_METHODS(decode_seq, "code, coords, *, shape, mode='z_order', workspace=None, stream=None",
                         "coords[n] = the voxel whose number along a curve is code[n]."),
    FG_OPERATION_METHODS(sort_keys, "keys, order, sorted, *, bits, workspace=None, stream=None",
                         "order = the permutation that sorts the low bits of keys, unsigned and stably."),
    {"sequence_bits", FG_FASTCALL(sequence_bits),
     PyDoc_STR("sequence_bits($module, /, *, shape, mode='z_order')\n--\n\nBits of a code; ValueError above 64.")},
    {NULL, NULL, 0, NULL},
};
