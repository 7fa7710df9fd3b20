/*
 * PyObject -> fg_tensor. A view is opened (who is it, what does it describe), imported if its memory comes through
 * __dlpack__ (which needs the stream to be known), checked, used, and closed.
 */
#ifndef FG_TENSOR_H
#define FG_TENSOR_H

#include "module.h"

/* A DLPack managed tensor that we own until we call its deleter. One without a deleter is nobody's to own. */
typedef struct {
    void *pointer; /* DLManagedTensorVersioned * or DLManagedTensor *; NULL: none */
    bool versioned;
} fg_managed;

typedef struct {
    const char *name; /* of the argument */
    PyObject *object; /* borrowed from the caller of the function, who keeps it alive */
    fg_source source;
    const DLPackExchangeAPI *api; /* with FG_SOURCE_EXCHANGE */
    bool torch;                   /* a torch.Tensor, of no subclass */
    fg_tensor tensor;             /* dtype is FG_DTYPE_COUNT when flexgemm has no such dtype */
    DLDataType dtype;             /* as exported */
    uintptr_t low, high;          /* address range; equal when there are no elements */
    bool output;                  /* will be written */
    bool in_place;                /* an input whose elements are those of an output */
    bool read_only, copied;       /* the memory may not be written; it is not the object's own */
    fg_managed managed;
    PyObject *aligned_copy; /* owned */
} fg_view;

/* Fills a zeroed view. A FG_SOURCE_CUPY or FG_SOURCE_DLPACK object only tells its device here. */
int fg_view_open(fg_state *state, fg_view *view, PyObject *object, const char *name, bool output);

/* Whether an object is a torch.Tensor that is reached by the exchange API; -1 with an exception. */
int fg_is_torch(fg_state *state, PyObject *object);

/* Asks such an object for its memory, ready for use on `stream` (ignored for the CPU). */
int fg_view_import(fg_view *view, void *stream);

/* Whether an open view is on its object's memory still, which other code of the caller's may have exchanged. */
bool fg_view_is_unmoved(const fg_view *view);

/* Opens a view on `bytes` new bytes from the allocator of another view's library, where that view's memory is and in
 * the order of its library's current stream. Returns whether it could. */
bool fg_view_allocate(fg_view *view, const fg_view *like, const char *name, size_t bytes);

/* Lets go of what the view still owns. */
void fg_view_close(fg_view *view);

/* Checks what an exporter says and stores it in the view, strides normalised: NULL and the strides of dimensions of
 * size 1 become those of a contiguous array. */
int fg_view_set(fg_view *view, const DLTensor *exported);

void fg_managed_release(fg_managed *managed);

DLDataType fg_dl_dtype(fg_dtype dtype);
void fg_view_dtype_name(const fg_view *view, char *name, size_t size);            /* "float64" */
void fg_device_name(fg_device_type type, int32_t index, char *name, size_t size); /* "cpu", "cuda:0" */

#endif
