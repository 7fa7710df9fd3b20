/*
 * Radix sort: in each pass every thread counts the digits of its stretch of the list, the counts become the places at
 * which each thread writes each digit, and the threads move their stretches there in order.
 */
#include "radix_sort.h"

#include <omp.h>

enum { DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS };

fg_workspace_layout fg_sort_workspace(int64_t n) {
    return (fg_workspace_layout){2 * fg_workspace_part(n, sizeof(fg_sort_entry)),
                                 n > 0 ? fg_workspace_part(DIGITS, sizeof(int64_t)) : 0};
}

fg_sort_entry *fg_sort_entries(const fg_tensor *workspace) { return workspace->data; }

/* counts[thread][digit] -> the first place for that thread's entries with that digit. */
static void place(int64_t *counts, int threads) {
    int64_t next = 0;
    for (int digit = 0; digit < DIGITS; digit++)
        for (int thread = 0; thread < threads; thread++) {
            const int64_t count = counts[thread * DIGITS + digit];
            counts[thread * DIGITS + digit] = next;
            next += count;
        }
}

const fg_sort_entry *fg_radix_sort(const fg_tensor *workspace, int64_t n, int bits, int threads) {
    const fg_workspace_layout layout = fg_sort_workspace(n);
    fg_sort_entry *from = workspace->data;
    fg_sort_entry *to = (fg_sort_entry *)((char *)workspace->data + layout.shared / 2);
    int64_t *counts = (int64_t *)((char *)workspace->data + layout.shared);
    for (int shift = 0; shift < bits; shift += DIGIT_BITS) {
        const uint64_t mask = bits - shift < DIGIT_BITS ? (UINT64_C(1) << (bits - shift)) - 1 : DIGITS - 1;
#pragma omp parallel num_threads(threads)
        {
            const int thread = omp_get_thread_num(), team = omp_get_num_threads();
            const int64_t begin = n * thread / team, end = n * (thread + 1) / team;
            int64_t *own = counts + thread * DIGITS;
            for (int digit = 0; digit < DIGITS; digit++) own[digit] = 0;
            for (int64_t i = begin; i < end; i++) own[from[i].key >> shift & mask]++;
#pragma omp barrier
#pragma omp single
            place(counts, team);
            for (int64_t i = begin; i < end; i++) to[own[from[i].key >> shift & mask]++] = from[i];
        }
        fg_sort_entry *swap = from;
        from = to;
        to = swap;
    }
    return from;
}
