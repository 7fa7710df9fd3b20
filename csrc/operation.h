/*
 * One path for every operation: parse, open the arrays, check, find backend and stream, call, let go. An operation is
 * its parameter list and one function that checks its arrays and fills its params struct; FG_DEFINE_OPERATION makes
 * the two Python functions out of them, the run and its *_workspace twin.
 */
#ifndef FG_OPERATION_H
#define FG_OPERATION_H

#include "args.h"
#include "check.h"
#include "stream.h"

enum { FG_MAX_PARAMETERS = 29 };

/* One call in the making. Arrays and values have the index of their parameter. */
typedef struct {
    fg_state *state;
    PyObject *values[FG_MAX_PARAMETERS];
    fg_view views[FG_MAX_PARAMETERS];
    const fg_backend *backend;
    fg_stream stream;
    PyObject *stream_reference;           /* what stream.owner borrows from, when nobody else holds it */
    const fg_view *stream_view;           /* the view whose library's current stream it is; NULL: another stream */
    PyObject *workspace;                  /* owned: what a workspace= that is a function returned */
    bool direct;                          /* by fg_call_directly */
    bool declined;                        /* ... which `fill` finds that it cannot go on with */
    PyObject *out;                        /* owned: ... and returns */
    PyObject *numbers[FG_MAX_PARAMETERS]; /* owned: what stands in `values` for other kinds of numbers */
    int number_count;
    bool unsettled; /* `fill` reads a scalar that runs code of the caller's */
} fg_call;

typedef struct {
    const char *name;
    const fg_parameter *parameters; /* the last two are workspace and stream, of a direct call behind its options */
    int count;
    /* Checks the opened arrays and fills the params struct (zeroed, workspace excepted). */
    int (*fill)(fg_call *call, void *params);
    bool (*available)(const fg_backend *backend);
    fg_status (*query)(const fg_backend *backend, const void *params, const fg_queue *queue, size_t *bytes,
                       fg_error *error);
    fg_status (*run)(const fg_backend *backend, const void *params, const fg_queue *queue, fg_error *error);
} fg_operation;

/* Runs the operation, with `workspace` pointing into params; or, where that is NULL, returns the bytes it needs. */
PyObject *fg_call_operation(const fg_operation *operation, PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames, void *params, fg_tensor *workspace);

/* The way of torch tensors that need nothing from Python's adapters: runs the operation and returns `out`, which is
 * made where it is not given. NotImplemented where it takes more: other libraries' arrays, copies, a gradient, an
 * argument marked FG_ADAPTED. Nothing has been done then. `options` is a dict of further arguments: passing one on
 * costs less than taking it apart. */
PyObject *fg_call_directly(const fg_operation *operation, PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames, void *params, fg_tensor *workspace);

/* For `fill` on that way: makes parameter `index`, the output, where the first array is. */
int fg_make_output(fg_call *call, int index, const int64_t *shape, int ndim, fg_dtype dtype);

/* For `fill` on that way: the dtype that a name or a torch.dtype means, if one is given. Declines what it does not
 * know. */
int fg_new_dtype(fg_call *call, PyObject *value, unsigned allowed, fg_dtype *dtype);

/* For `fill` on that way: leaves the call to Python. Returns -1. */
int fg_decline(fg_call *call);

/* For `fill`: dtype_a, dtype_feats, ...: names what a uint8 array holds; of any other array it must be the dtype. */
int fg_reinterpret(const fg_call *call, fg_view *view, PyObject *dtype, const char *name);

/* The kinds of parameters that operations have. */
#define FG_INPUT(name) {FG_KEYWORD_##name, FG_REQUIRED | FG_TENSOR}
#define FG_INPUT_OR_NONE(name) {FG_KEYWORD_##name, FG_REQUIRED | FG_TENSOR | FG_NULLABLE}
#define FG_OUTPUT(name) {FG_KEYWORD_##name, FG_REQUIRED | FG_TENSOR | FG_WRITTEN}
#define FG_OUTPUT_OR_NONE(name) {FG_KEYWORD_##name, FG_REQUIRED | FG_TENSOR | FG_WRITTEN | FG_NULLABLE}
#define FG_OPTIONAL_INPUT(name) {FG_KEYWORD_##name, FG_KEYWORD_ONLY | FG_TENSOR | FG_NULLABLE}
#define FG_OPTIONAL_OUTPUT(name) {FG_KEYWORD_##name, FG_KEYWORD_ONLY | FG_TENSOR | FG_WRITTEN | FG_NULLABLE}
#define FG_SCALAR(name) {FG_KEYWORD_##name, FG_KEYWORD_ONLY}
#define FG_REQUIRED_SCALAR(name) {FG_KEYWORD_##name, FG_KEYWORD_ONLY | FG_REQUIRED}
/* ... and those of a call that may go directly. */
#define FG_OUTPUT_OR_NEW(name) {FG_KEYWORD_##name, FG_KEYWORD_ONLY | FG_TENSOR | FG_WRITTEN | FG_NULLABLE | FG_MADE}
#define FG_ADAPTED_SCALAR(name) {FG_KEYWORD_##name, FG_KEYWORD_ONLY | FG_ADAPTED}
#define FG_DIRECT_END                                                                                                  \
    FG_SCALAR(options), {FG_KEYWORD_workspace, FG_KEYWORD_ONLY | FG_TENSOR | FG_WRITTEN | FG_NULLABLE | FG_ADAPTED},   \
        FG_ADAPTED_SCALAR(stream)
#define FG_WORKSPACE_AND_STREAM                                                                                        \
    {FG_KEYWORD_workspace, FG_KEYWORD_ONLY | FG_TENSOR | FG_WRITTEN | FG_NULLABLE}, FG_SCALAR(stream)

/* Defines py_NAME and py_NAME_workspace from NAME_parameters and NAME_fill. */
#define FG_DEFINE_OPERATION(op)                                                                                        \
    static bool op##_available(const fg_backend *backend) { return backend->op; }                                      \
    static fg_status op##_query(const fg_backend *backend, const void *params, const fg_queue *queue, size_t *bytes,   \
                                fg_error *error) {                                                                     \
        *bytes = 0;                                                                                                    \
        return backend->op##_workspace ? backend->op##_workspace(params, queue, bytes, error) : FG_OK;                 \
    }                                                                                                                  \
    static fg_status op##_run(const fg_backend *backend, const void *params, const fg_queue *queue, fg_error *error) { \
        return backend->op(params, queue, error);                                                                      \
    }                                                                                                                  \
    _Static_assert(FG_LENGTH(op##_parameters) <= FG_MAX_PARAMETERS, "parameters of " #op);                             \
    static const fg_operation op##_operation = {                                                                       \
        #op, op##_parameters, FG_LENGTH(op##_parameters), op##_fill, op##_available, op##_query, op##_run};            \
    static PyObject *py_##op(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {           \
        fg_##op##_params params = {0};                                                                                 \
        return fg_call_operation(&op##_operation, module, args, nargs, kwnames, &params, &params.workspace);           \
    }                                                                                                                  \
    static PyObject *py_##op##_workspace(PyObject *module, PyObject *const *args, Py_ssize_t nargs,                    \
                                         PyObject *kwnames) {                                                          \
        fg_##op##_params params = {0};                                                                                 \
        return fg_call_operation(&op##_operation, module, args, nargs, kwnames, &params, NULL);                        \
    }

/* Defines py_NAME_direct of an operation from NAME_direct_parameters. */
#define FG_DEFINE_DIRECT(op)                                                                                           \
    _Static_assert(FG_LENGTH(op##_direct_parameters) <= FG_MAX_PARAMETERS, "parameters of " #op "_direct");            \
    static const fg_operation op##_direct_operation = {                                                                \
        #op,     op##_direct_parameters, FG_LENGTH(op##_direct_parameters), op##_fill, op##_available, op##_query,     \
        op##_run};                                                                                                     \
    static PyObject *py_##op##_direct(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {  \
        fg_##op##_params params = {0};                                                                                 \
        return fg_call_directly(&op##_direct_operation, module, args, nargs, kwnames, &params, &params.workspace);     \
    }

#define FG_DIRECT_METHOD(op, signature, doc)                                                                           \
    {#op "_direct", FG_FASTCALL(py_##op##_direct), PyDoc_STR(#op "_direct($module, /, " signature ")\n--\n\n" doc)}

/* The two rows of a method table. `signature` is the text between the parentheses. */
#define FG_OPERATION_METHODS(op, signature, doc)                                                                       \
    {#op, FG_FASTCALL(py_##op), PyDoc_STR(#op "($module, /, " signature ")\n--\n\n" doc)}, {                           \
        #op "_workspace", FG_FASTCALL(py_##op##_workspace),                                                            \
            PyDoc_STR(#op "_workspace($module, /, " signature ")\n--\n\nBytes of workspace that " #op " needs.")       \
    }

#endif
