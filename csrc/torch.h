/* What the extension asks of torch beyond the exchange API: whether autograd records an operation, and new tensors. */
#ifndef FG_TORCH_H
#define FG_TORCH_H

#include "tensor.h"

/* Whether a type is torch.Tensor or torch.nn.Parameter; -1 with an exception. A subclass may be more than its
 * memory. */
int fg_torch_is_tensor_type(fg_torch *torch, PyTypeObject *type);

/* Whether the memory of a tensor of inner stride 1 is all that an operation has to see: autograd does not record it,
 * and its elements are not negated when they are read. -1 with an exception. */
int fg_torch_is_plain(const fg_torch *torch, const fg_view *view);

/* Whether tensors may carry tangents, torch.autograd.forward_ad's; -1 with an exception. */
int fg_torch_is_forward_mode(const fg_torch *torch);

/* The dtype that a torch.dtype is, FG_DTYPE_COUNT where there is none. */
fg_dtype fg_torch_dtype(const fg_torch *torch, const PyObject *dtype);

/* An uninitialised tensor of at least one axis where the view's is. New reference. */
PyObject *fg_torch_empty(fg_torch *torch, const fg_view *like, const int64_t *shape, int ndim, fg_dtype dtype);

int fg_torch_traverse(fg_torch *torch, visitproc visit, void *arg);
void fg_torch_clear(fg_torch *torch);

#endif
