/* DeviceArray: CUDA memory that flexgemm owns. */
#ifndef FG_DEVICE_ARRAY_H
#define FG_DEVICE_ARRAY_H

#include "stream.h"

extern PyType_Spec fg_device_array_spec;

/* What the array is, as a borrowed DLTensor. */
void fg_device_array_describe(PyObject *array, DLTensor *described);

/* Orders a stream behind all that the memory was used for, and makes it the stream on which the memory will be freed.
 * Called before and after a launch that uses the array. */
int fg_device_array_join(PyObject *array, const fg_stream *stream);

#endif
