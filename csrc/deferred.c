/*
 * Memory borrowed through __dlpack__ lives until the GPU work that uses it is done. A library that frees memory in the
 * order of a stream we do not run on (JAX has streams of its own) may hand it to someone else as soon as the deleter
 * is called, while our kernel is still in the queue. So the tensors of such a call wait here behind a mark on the
 * queue, and every later call lets go of those whose mark has passed.
 *
 * While a graph is captured nothing is in the queue, and to ask for a mark of the capture would end it: the memory of a
 * graph is its owner's to keep.
 */
#include "deferred.h"

#include <stdlib.h>

struct fg_deferred {
    fg_deferred *next;
    const fg_backend *backend;
    void *mark;
    int count;
    fg_managed managed[];
};

static void release_all(fg_deferred *entry) {
    for (int i = 0; i < entry->count; i++) fg_managed_release(&entry->managed[i]);
    free(entry);
}

static bool is_captured(const fg_backend *backend, const fg_queue *queue) {
    fg_error error;
    bool capturing = false;
    return backend->is_capturing && backend->is_capturing(queue, &capturing, &error) == FG_OK && capturing;
}

void fg_defer_release(fg_state *state, const fg_backend *backend, const fg_queue *queue, fg_view *views, int count) {
    if (is_captured(backend, queue)) return;
    fg_deferred *entry = malloc(sizeof *entry + (size_t)count * sizeof entry->managed[0]);
    fg_error error;
    void *mark = NULL;
    fg_status status = FG_ERROR_UNSUPPORTED;
    PyThreadState *thread = PyEval_SaveThread();
    if (entry && backend->mark) status = backend->mark(queue, &mark, &error);
    if (status != FG_OK && backend->synchronize) backend->synchronize(queue, &error);
    PyEval_RestoreThread(thread);
    if (status != FG_OK) { /* no mark, so the queue was waited for: the caller may close its views at once */
        free(entry);
        return;
    }
    *entry = (fg_deferred){.next = state->deferred, .backend = backend, .mark = mark};
    for (int i = 0; i < count; i++) {
        if (!views[i].managed.pointer) continue;
        entry->managed[entry->count++] = views[i].managed;
        views[i].managed.pointer = NULL;
    }
    state->deferred = entry;
}

void fg_collect_deferred(fg_state *state) {
    fg_deferred *list = state->deferred; /* ours alone from here on, so that deleters may call back into the module */
    state->deferred = NULL;
    while (list) {
        fg_deferred *entry = list;
        list = entry->next;
        fg_error error;
        bool passed = true;
        PyThreadState *thread = PyEval_SaveThread();
        fg_status status = entry->backend->passed(entry->mark, &passed, &error);
        PyEval_RestoreThread(thread);
        if (status != FG_OK || passed) { /* a queue that failed does no more work */
            release_all(entry);
        } else {
            entry->next = state->deferred;
            state->deferred = entry;
        }
    }
}
