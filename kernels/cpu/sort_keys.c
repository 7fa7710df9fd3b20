/*
 * The permutation that sorts integer keys.
 */
#include "radix_sort.h"

fg_status fg_cpu_sort_keys_workspace(const fg_sort_keys_params *params, const fg_queue *queue, size_t *bytes,
                                     fg_error *error) {
    (void)queue, (void)error;
    *bytes = fg_workspace_bytes(fg_sort_workspace(params->keys.shape[0]));
    return FG_OK;
}

fg_status fg_cpu_sort_keys(const fg_sort_keys_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const int64_t n = params->keys.shape[0];
    if (n == 0) return FG_OK;
    if (n > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "keys: expected at most %d for an int32 order, got %lld", INT32_MAX,
                       (long long)n);
    int threads = 0;
    const fg_status status = fg_workspace_threads(&params->workspace, fg_sort_workspace(n), n, &threads, error);
    if (status != FG_OK) return status;

    const bool narrow = params->keys.dtype == FG_INT32;
    const uint32_t *keys32 = params->keys.data;
    const uint64_t *keys64 = params->keys.data;
    fg_sort_entry *entries = fg_sort_entries(&params->workspace);
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < n; row++) entries[row] = (fg_sort_entry){narrow ? keys32[row] : keys64[row], row};

    const fg_sort_entry *sorted = fg_radix_sort(&params->workspace, n, params->bits, threads);
    int32_t *order = params->order.data;
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < n; i++) {
        order[i] = (int32_t)sorted[i].row;
        if (!params->sorted.present) continue;
        if (narrow) {
            ((uint32_t *)params->sorted.data)[i] = (uint32_t)sorted[i].key;
        } else {
            ((uint64_t *)params->sorted.data)[i] = sorted[i].key;
        }
    }
    return FG_OK;
}
