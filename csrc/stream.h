/* Which CUDA stream a call runs on, and the numbers that array libraries use for streams. */
#ifndef FG_STREAM_H
#define FG_STREAM_H

#include "tensor.h"

/* A queue and what keeps its stream alive (borrowed; NULL where the stream's owner must see to it). */
typedef struct {
    fg_queue queue;
    PyObject *owner;
} fg_stream;

/* An int or an object with __cuda_stream__. NULL and None leave *stream at the legacy default stream. */
int fg_stream_from_object(PyObject *object, fg_stream *stream);

/* The current stream of the library that the view's array belongs to. Returns 1 when it has one, 0 when it has no such
 * notion, -1 with an exception. *owner is a new reference or NULL. */
int fg_stream_of_view(fg_state *state, const fg_view *view, void **stream, PyObject **owner);

/* DLPack's number of a stream, for __dlpack__(stream=). New reference. */
PyObject *fg_stream_to_producer(void *stream);

#endif
