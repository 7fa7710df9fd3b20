/* Stable least-significant-digit radix sort of keys with the number of their row, by several threads. */
#ifndef FLEXGEMM_CPU_RADIX_SORT_H
#define FLEXGEMM_CPU_RADIX_SORT_H

#include "backend.h"

typedef struct {
    uint64_t key;
    int64_t row;
} fg_sort_entry;

/* Room for two lists of n entries and one count of digits for each thread. */
fg_workspace_layout fg_sort_workspace(int64_t n);

/* The first list of a workspace of that layout, to be filled before the sort. */
fg_sort_entry *fg_sort_entries(const fg_tensor *workspace);

/* Sorts them by the low `bits` bits of their keys and returns the list that holds the result. */
const fg_sort_entry *fg_radix_sort(const fg_tensor *workspace, int64_t n, int bits, int threads);

#endif
