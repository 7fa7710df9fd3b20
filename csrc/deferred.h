/* Memory borrowed through __dlpack__ lives until the GPU work that uses it is done. */
#ifndef FG_DEFERRED_H
#define FG_DEFERRED_H

#include "tensor.h"

/* Takes over the managed tensors of the views, which work just queued on `queue` may still use, and lets them go once
 * that work is done. */
void fg_defer_release(fg_state *state, const fg_backend *backend, const fg_queue *queue, fg_view *views, int count);

/* Lets go of what is done by now. Never waits. */
void fg_collect_deferred(fg_state *state);

#endif
