/*
 * Row orders of a neighbour map: the same as the CUDA backend's, by a stable radix sort of Gray-code ranks.
 *
 * The CPU's convolution gathers pairs and gains nothing from orders or from entries that lie in one: this is what the
 * CUDA backend is compared with.
 */
#include <string.h>

#include "../plan.h"
#include "backend.h"

enum { DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS };

typedef struct {
    uint32_t key;
    int32_t row;
} entry;

static fg_workspace_layout plan_workspace(int64_t n) {
    return (fg_workspace_layout){2 * fg_workspace_part(n, sizeof(entry)), 0};
}

fg_status fg_cpu_row_order_workspace(const fg_row_order_params *params, const fg_queue *queue, size_t *bytes,
                                     fg_error *error) {
    (void)queue, (void)error;
    *bytes = fg_workspace_bytes(plan_workspace(params->map.shape[1]));
    return FG_OK;
}

/* One pass: `to` is `from`, stably sorted by one digit of the keys. */
static void sort_by_digit(const entry *from, entry *to, int64_t n, int shift) {
    int64_t start[DIGITS + 1] = {0};
    for (int64_t i = 0; i < n; i++) start[(from[i].key >> shift) % DIGITS + 1]++;
    for (int digit = 0; digit < DIGITS; digit++) start[digit + 1] += start[digit];
    for (int64_t i = 0; i < n; i++) to[start[(from[i].key >> shift) % DIGITS]++] = from[i];
}

static void build_order(const int32_t *map, int64_t n, const fg_order_plan *plan, int32_t which, entry *scratch[2],
                        int32_t *order) {
    entry *entries = scratch[0], *sorted = scratch[1];
    for (int64_t row = 0; row < n; row++) {
        uint32_t key = 0;
        for (int i = plan->keys[which].begin; i < plan->keys[which].end; i++)
            key |= map[plan->offsets[i] * n + row] >= 0 ? plan->codes[i] : 0;
        for (int shift = 1; shift < 32; shift *= 2) key ^= key >> shift; /* the rank of a Gray code */
        entries[row] = (entry){key, (int32_t)row};
    }
    for (int shift = 0; shift < plan->keys[which].bits; shift += DIGIT_BITS) {
        for (int64_t start = 0; start < n; start += plan->segment)
            sort_by_digit(entries + start, sorted + start, fg_min(n - start, plan->segment), shift);
        entry *swap = entries;
        entries = sorted;
        sorted = swap;
    }
    for (int64_t i = 0; i < n; i++) order[i] = entries[i].row;
}

fg_status fg_cpu_row_order(const fg_row_order_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue;
    const int64_t n = params->map.shape[1];
    if (n == 0) return FG_OK;
    if (n > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "map: expected at most %d columns for an int32 order, got %lld",
                       INT32_MAX, (long long)n);
    int threads = 0;
    const fg_workspace_layout layout = plan_workspace(n);
    const fg_status status = fg_workspace_threads(&params->workspace, layout, 1, &threads, error);
    if (status != FG_OK) return status;

    const fg_order_plan plan = fg_plan_row_orders(n, params->kernel, params->sets);
    entry *scratch[2] = {params->workspace.data, (entry *)((char *)params->workspace.data + layout.shared / 2)};
    for (int32_t i = 0; i < plan.orders; i++)
        build_order(params->map.data, n, &plan, i, scratch, (int32_t *)params->order.data + i * n);
    return FG_OK;
}

fg_status fg_cpu_ordered_map(const fg_ordered_map_params *params, const fg_queue *queue, fg_error *error) {
    (void)queue, (void)error;
    const int64_t volume = params->map.shape[0], n = params->map.shape[1], orders = params->order.shape[0];
    if (n == 0) return FG_OK;
    const int32_t *map = params->map.data, *order = params->order.data;
    int32_t *out = params->out.data;
    memcpy(out, order, (size_t)(orders * n) * sizeof *out);
    out += orders * n;
    for (int64_t v = 0; v < volume; v++, map += n, out += n) {
        for (int64_t slot = 0; slot < n; slot++)
            out[slot] = 0 <= order[slot] && order[slot] < n ? map[order[slot]] : -1;
    }
    return FG_OK;
}
