/*
 * One parser for every METH_FASTCALL | METH_KEYWORDS function. A call site passes its keyword names interned, and so
 * are ours: a match is nearly always one pointer comparison. Only an unmatched name is compared by value.
 */
#include "args.h"

#include <float.h>
#include <math.h>

#include "../kernels/segment.h"
#include "error.h"

#define FG_KEYWORD_TEXT(name) #name,
static const char *const keyword_names[FG_KEYWORD_COUNT] = {FG_KEYWORDS(FG_KEYWORD_TEXT)};
#undef FG_KEYWORD_TEXT

const char *fg_keyword_name(fg_keyword keyword) { return keyword_names[keyword]; }

/* ---- names ---- */

static int wrong_type(PyObject *value, const char *name, const char *expected) {
    PyObject *type = PyType_GetName(Py_TYPE(value));
    if (type) PyErr_Format(PyExc_TypeError, "%s: expected %s, got %U", name, expected, type);
    Py_XDECREF(type);
    return -1;
}

int fg_name_argument(const char *name) {
    PyObject *type, *error, *traceback;
    if (!PyErr_ExceptionMatches(PyExc_ValueError) && !PyErr_ExceptionMatches(PyExc_OverflowError)) return -1;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    PyErr_Format(PyExc_ValueError, "%s: %S", name, error);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return -1;
}

/* Index of `name` among the parameters, or -1 without an exception. Most callers name them in their order: looked for
 * from `likely` on. */
static int find_parameter(const fg_state *state, const fg_parameter *parameters, int count, int likely,
                          PyObject *name) {
    for (int i = likely; i < count; i++) {
        if (state->keywords[parameters[i].keyword] == name) return i;
    }
    for (int i = 0; i < likely; i++) {
        if (state->keywords[parameters[i].keyword] == name) return i;
    }
    for (int i = 0; i < count; i++) {
        if (PyUnicode_CompareWithASCIIString(name, keyword_names[parameters[i].keyword]) == 0) return i;
    }
    return -1;
}

/* Gives the parameter of a name its value, and *index its index, behind which the next is looked for. Options have no
 * function: they are the rest of another one's keywords, to which what is given besides them is unknown. */
static int assign(const fg_state *state, const char *function, const fg_parameter *parameters, int count,
                  PyObject *name, PyObject *value, PyObject **values, int *index) {
    *index = find_parameter(state, parameters, count, *index + 1, name);
    if (!function && (*index < 0 || values[*index])) {
        PyErr_Format(PyExc_TypeError, "unexpected keyword argument '%U'", name);
        return -1;
    }
    if (*index < 0) {
        PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'", function, name);
        return -1;
    }
    if (values[*index]) {
        PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument '%U'", function, name);
        return -1;
    }
    values[*index] = value;
    return 0;
}

int fg_parse_options(const fg_state *state, const fg_parameter *parameters, int count, PyObject *options,
                     PyObject **values) {
    PyObject *name, *value;
    Py_ssize_t position = 0;
    int index = -1;
    if (!PyDict_Check(options)) return wrong_type(options, "options", "a dict");
    while (PyDict_Next(options, &position, &name, &value)) {
        if (!PyUnicode_Check(name)) return wrong_type(name, "options", "names");
        if (assign(state, NULL, parameters, count, name, value, values, &index) < 0) return -1;
    }
    return 0;
}

int fg_parse_args(const fg_state *state, const char *function, const fg_parameter *parameters, int count,
                  PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, PyObject **values) {
    int positional = 0;
    while (positional < count && !(parameters[positional].flags & FG_KEYWORD_ONLY)) positional++;
    if (nargs > positional) {
        PyErr_Format(PyExc_TypeError, "%s() takes %d positional argument%s but %zd were given", function, positional,
                     positional == 1 ? "" : "s", nargs);
        return -1;
    }
    for (int i = 0; i < count; i++) values[i] = i < nargs ? args[i] : NULL;

    int index = (int)nargs - 1;
    const Py_ssize_t keywords = kwnames ? PyTuple_Size(kwnames) : 0;
    for (Py_ssize_t i = 0; i < keywords; i++) {
        PyObject *name = PyTuple_GetItem(kwnames, i);
        if (assign(state, function, parameters, count, name, args[nargs + i], values, &index) < 0) return -1;
    }

    for (int i = 0; i < count; i++) {
        if (!values[i] && (parameters[i].flags & FG_REQUIRED)) {
            PyErr_Format(PyExc_TypeError, "%s() missing required argument '%s'", function,
                         keyword_names[parameters[i].keyword]);
            return -1;
        }
    }
    return 0;
}

/* ---- scalars ---- */

/* What was to become a number is none, or its own code raised: an error of another type keeps that. */
static int not_converted(PyObject *value, const char *name, const char *expected) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) return fg_name_argument(name);
    PyErr_Clear();
    return wrong_type(value, name, expected);
}

int fg_arg_int64(PyObject *value, const char *name, int64_t least, int64_t most, int64_t *out) {
    if (!value) return 0;
    PyObject *integer = PyIndex_Check(value) ? PyNumber_Index(value) : NULL;
    if (!integer) return not_converted(value, name, "an int");
    int overflow;
    const long long number = PyLong_AsLongLongAndOverflow(integer, &overflow);
    const bool inside = !overflow && least <= number && number <= most;
    if (inside) *out = number;
    PyObject *text = inside ? NULL : PyObject_Str(integer);
    if (!text && !inside) { /* Python prints no more than some thousand digits */
        PyErr_Clear();
        text = PyUnicode_FromString("an int of very many digits");
    }
    if (text && most == INT64_MAX && overflow <= 0) {
        PyErr_Format(PyExc_ValueError, "%s: expected at least %lld, got %U", name, (long long)least, text);
    } else if (text) {
        PyErr_Format(PyExc_ValueError, "%s: expected %lld to %lld, got %U", name, (long long)least, (long long)most,
                     text);
    }
    Py_XDECREF(text);
    Py_DECREF(integer);
    return inside ? 0 : -1;
}

int fg_arg_int32(PyObject *value, const char *name, int32_t least, int32_t most, int32_t *out) {
    int64_t wide = *out;
    if (fg_arg_int64(value, name, least, most, &wide) < 0) return -1;
    *out = (int32_t)wide;
    return 0;
}

int fg_arg_bool(PyObject *value, const char *name, bool *out) {
    if (!value) return 0;
    if (value != Py_True && value != Py_False) return wrong_type(value, name, "a bool");
    *out = value == Py_True;
    return 0;
}

int fg_arg_float(PyObject *value, const char *name, float *out) {
    if (!value) return 0;
    PyObject *number = PyNumber_Check(value) ? PyNumber_Float(value) : NULL;
    if (!number) return not_converted(value, name, "a float");
    const double wide = PyFloat_AsDouble(number);
    const bool fits = !isfinite(wide) || fabs(wide) <= FLT_MAX;
    if (fits) *out = (float)wide;
    if (!fits) PyErr_Format(PyExc_ValueError, "%s: expected a number that float32 holds, got %S", name, number);
    Py_DECREF(number);
    return fits ? 0 : -1;
}

/* Its length; -1 with an exception. */
static Py_ssize_t expect_sequence(PyObject *value, const char *name, const char *expected) {
    const bool listed = PySequence_Check(value) && !PyUnicode_Check(value);
    const Py_ssize_t length = listed ? PySequence_Size(value) : -1;
    if (length >= 0 || (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError))) return length;
    PyErr_Clear();
    return wrong_type(value, name, expected);
}

int fg_arg_int64s(PyObject *value, const char *name, int64_t least, int64_t most, int room, int64_t *out, int *count) {
    const Py_ssize_t length = expect_sequence(value, name, "a sequence of ints");
    if (length < 0) return -1;
    if (length > room) {
        PyErr_Format(PyExc_ValueError, "%s: expected at most %d ints, got %zd", name, room, length);
        return -1;
    }
    for (int i = 0; i < (int)length; i++) {
        PyObject *item = PySequence_GetItem(value, i);
        const int status = item ? fg_arg_int64(item, name, least, most, &out[i]) : -1;
        Py_XDECREF(item);
        if (status < 0) return -1;
    }
    *count = (int)length;
    return 0;
}

int fg_arg_ints(PyObject *value, const char *name, int64_t least, int64_t most, int count, int64_t *out) {
    int given;
    if (fg_arg_int64s(value, name, least, most, count, out, &given) < 0) return -1;
    if (given == count) return 0;
    PyErr_Format(PyExc_ValueError, "%s: expected %d ints, got %d", name, count, given);
    return -1;
}

int fg_arg_axes(PyObject *value, const char *name, int32_t most, int32_t axes[3]) {
    int64_t numbers[3];
    if (!value) return 0;
    if (fg_arg_ints(value, name, 1, most, 3, numbers) < 0) return -1;
    for (int i = 0; i < 3; i++) axes[i] = (int32_t)numbers[i];
    return 0;
}

int fg_arg_floats(PyObject *value, const char *name, int count, float *out) {
    const Py_ssize_t length = expect_sequence(value, name, "a sequence of floats");
    if (length < 0) return -1;
    if (length != count) {
        PyErr_Format(PyExc_ValueError, "%s: expected %d floats, got %zd", name, count, length);
        return -1;
    }
    for (int i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(value, i);
        const double number = item ? PyFloat_AsDouble(item) : -1.0;
        Py_XDECREF(item);
        if (PyErr_Occurred()) {
            if (item && PyErr_ExceptionMatches(PyExc_TypeError)) return wrong_type(value, name, "a sequence of floats");
            return fg_name_argument(name);
        }
        out[i] = (float)number;
        if (isfinite(out[i])) continue;
        PyErr_Format(PyExc_ValueError, "%s: expected finite float32 numbers, got %R", name, value);
        return -1;
    }
    return 0;
}

int fg_arg_optional_choice(PyObject *value, const char *name, PyObject *const *choices, int count, int *out) {
    return value == Py_None ? 0 : fg_arg_choice(value, name, choices, count, out);
}

int fg_arg_choice(PyObject *value, const char *name, PyObject *const *choices, int count, int *out) {
    if (!value) return 0;
    if (!PyUnicode_Check(value)) return wrong_type(value, name, "a str");
    for (int i = 0; i < count; i++) {
        if (choices[i] == value || PyUnicode_Compare(choices[i], value) == 0) {
            *out = i;
            return 0;
        }
    }
    fg_text expected = {.length = 0};
    for (int i = 0; i < count; i++) {
        Py_ssize_t size;
        const char *text = PyUnicode_AsUTF8AndSize(choices[i], &size);
        if (!text) return -1;
        fg_text_add(&expected, "%s'%s'", i == 0 ? "" : i == count - 1 ? " or " : ", ", text);
    }
    PyErr_Format(PyExc_ValueError, "%s: expected %s, got %R", name, expected.data, value);
    return -1;
}

int fg_arg_dtype(const fg_state *state, PyObject *value, const char *name, fg_dtype *out) {
    int index = (int)*out;
    if (fg_arg_choice(value, name, state->dtypes, FG_DTYPE_COUNT, &index) < 0) return -1;
    *out = (fg_dtype)index;
    return 0;
}

int fg_arg_precision(const fg_state *state, PyObject *value, fg_precision *out) {
    int index = (int)*out;
    if (fg_arg_optional_choice(value, "precision", state->precisions, 2, &index) < 0) return -1;
    *out = (fg_precision)index;
    return 0;
}

int fg_arg_activation(const fg_state *state, PyObject *value, fg_activation *out) {
    int index = (int)*out - 1;
    if (fg_arg_optional_choice(value, "activation", state->activations, FG_LENGTH(state->activations), &index) < 0)
        return -1;
    *out = (fg_activation)(index + 1);
    return 0;
}

int fg_arg_activation_or_swiglu(const fg_state *state, PyObject *value, fg_activation *out, bool *swiglu) {
    PyObject *choices[FG_LENGTH(state->activations) + 1];
    int index = (int)*out - 1;
    for (int i = 0; i < FG_LENGTH(state->activations); i++) choices[i] = state->activations[i];
    choices[FG_LENGTH(state->activations)] = state->keywords[FG_KEYWORD_swiglu];
    if (fg_arg_optional_choice(value, "activation", choices, FG_LENGTH(choices), &index) < 0) return -1;
    *swiglu = index == FG_LENGTH(state->activations);
    if (!*swiglu) *out = (fg_activation)(index + 1);
    return 0;
}

int fg_arg_algorithm(const fg_state *state, PyObject *value, fg_algorithm *out) {
    int index = (int)*out;
    if (fg_arg_optional_choice(value, "algorithm", state->algorithms, FG_ALGORITHM_COUNT, &index) < 0) return -1;
    *out = (fg_algorithm)index;
    return 0;
}

int fg_arg_orders(PyObject *groups, PyObject *phases, fg_order_sets *out) {
    int64_t numbers[FG_MAX_ORDER_SETS];
    int count;
    if (fg_arg_axes(phases, "phases", FG_MAX_KERNEL, out->phases) < 0) return -1;
    if (groups && groups != Py_None) {
        if (fg_arg_int64s(groups, "groups", 1, INT32_MAX, FG_MAX_ORDER_SETS, numbers, &count) < 0) return -1;
        out->sets = count;
        for (int i = 0; i < count; i++) out->groups[i] = (int32_t)numbers[i];
    }
    if (fg_phase_count(out) == 1 || fg_order_count(out) <= 1) return 0;
    PyErr_Format(PyExc_ValueError, "phases: expected (1, 1, 1) of more orders than one, got (%d, %d, %d)",
                 (int)out->phases[0], (int)out->phases[1], (int)out->phases[2]);
    return -1;
}

int fg_arg_sets_of(PyObject *groups, PyObject *phases, const int32_t kernel[3], fg_order_sets *out) {
    *out = (fg_order_sets){.sets = 1, .groups = {1}};
    if (fg_arg_orders(groups, phases, out) < 0) return -1;
    const int32_t planes = kernel[0], columns = kernel[0] * kernel[1];
    for (int i = 0; i < out->sets; i++) {
        const int32_t count = out->groups[i];
        bool fits = count == 1 || count == planes || count == columns;
        for (int j = 0; j < i; j++) fits = fits && out->groups[j] != count;
        if (fits) continue;
        PyErr_Format(PyExc_ValueError, "groups: expected 1, Kw = %d and Kw*Kh = %d, each once, got %R", (int)planes,
                     (int)columns, groups);
        return -1;
    }
    return 0;
}

int fg_arg_segment_tiles(PyObject *value, const char *name, int32_t least, int32_t *out) {
    if (fg_arg_int32(value, name, least, FG_SEGMENT_TILES, out) < 0) return -1;
    if (*out % 2 == 0) return 0;
    PyErr_Format(PyExc_ValueError, "%s: expected 2 or 4, got %d", name, (int)*out);
    return -1;
}
