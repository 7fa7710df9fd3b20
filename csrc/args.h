/* One parser for every METH_FASTCALL | METH_KEYWORDS function, and the scalars that arguments turn into. */
#ifndef FG_ARGS_H
#define FG_ARGS_H

#include "module.h"

enum {
    FG_REQUIRED = 1,
    FG_KEYWORD_ONLY = 2,
    FG_TENSOR = 4,    /* an array: operation.c opens it before the operation's own checks */
    FG_WRITTEN = 8,   /* ... that is an output */
    FG_NULLABLE = 16, /* ... that may be None */
    FG_ROWS = 32,     /* ... whose rows may be strided; without it a direct call takes contiguous arrays */
    FG_MADE = 64,     /* ... that a direct call makes where it is not given */
    FG_ADAPTED = 128, /* where it is given a call is not direct */
    FG_MATRIX = 256,  /* ... whose rows or columns may be strided, as with FG_ROWS */
};

/* A function's parameters in order: positional ones first, then the keyword-only ones. */
typedef struct {
    fg_keyword keyword;
    unsigned flags;
} fg_parameter;

/* Function and flags of a method table row. */
#define FG_FASTCALL(function) (PyCFunction)(void (*)(void)) function, METH_FASTCALL | METH_KEYWORDS

#define FG_LENGTH(array) ((int)(sizeof(array) / sizeof((array)[0])))

/* Fills values[0..count) with borrowed references, NULL where an optional argument was not given. */
int fg_parse_args(const fg_state *state, const char *function, const fg_parameter *parameters, int count,
                  PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, PyObject **values);

/* Further keyword arguments, from a dict that nobody changes meanwhile. */
int fg_parse_options(const fg_state *state, const fg_parameter *parameters, int count, PyObject *options,
                     PyObject **values);

const char *fg_keyword_name(fg_keyword keyword);

/* Of a number that could not be read: puts the argument's name in front of a ValueError or OverflowError, which becomes
 * a ValueError. Returns -1. */
int fg_name_argument(const char *name);

/* Each leaves *out alone when value is NULL (not given); returns 0, or -1 with an exception that names the argument. */
int fg_arg_int64(PyObject *value, const char *name, int64_t least, int64_t most, int64_t *out);
int fg_arg_int32(PyObject *value, const char *name, int32_t least, int32_t most, int32_t *out);
int fg_arg_bool(PyObject *value, const char *name, bool *out);
int fg_arg_float(PyObject *value, const char *name, float *out);

/* A sequence of ints: *count of at most `room` are stored. */
int fg_arg_int64s(PyObject *value, const char *name, int64_t least, int64_t most, int room, int64_t *out, int *count);

/* Exactly `count` ints, or finite numbers. */
int fg_arg_ints(PyObject *value, const char *name, int64_t least, int64_t most, int count, int64_t *out);
int fg_arg_floats(PyObject *value, const char *name, int count, float *out);

/* A number from 1 for each axis. */
int fg_arg_axes(PyObject *value, const char *name, int32_t most, int32_t axes[3]);

/* A string that must be one of choices[0..count). */
int fg_arg_choice(PyObject *value, const char *name, PyObject *const *choices, int count, int *out);

/* The same, and None is "not given". */
int fg_arg_optional_choice(PyObject *value, const char *name, PyObject *const *choices, int count, int *out);
int fg_arg_dtype(const fg_state *state, PyObject *value, const char *name, fg_dtype *out);
int fg_arg_precision(const fg_state *state, PyObject *value, fg_precision *out);
int fg_arg_activation(const fg_state *state, PyObject *value, fg_activation *out);
int fg_arg_activation_or_swiglu(const fg_state *state, PyObject *value, fg_activation *out, bool *swiglu);
int fg_arg_algorithm(const fg_state *state, PyObject *value, fg_algorithm *out);

/* Of row orders: how many groups each set has, one to three sets, and the phases of the map. */
int fg_arg_orders(PyObject *groups, PyObject *phases, fg_order_sets *out);

/* The same for a kernel of this size, whose planes or columns are groups; by default one order. */
int fg_arg_sets_of(PyObject *groups, PyObject *phases, const int32_t kernel[3], fg_order_sets *out);

/* Tiles of a segment: 2 or 4, and 0, for none, where that is the least. */
int fg_arg_segment_tiles(PyObject *value, const char *name, int32_t least, int32_t *out);

#endif
