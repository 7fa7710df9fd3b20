/*
 * FLEXGEMM_PRINT_CONFIGS=1: one line on stderr for each operation, shape and plan, the first time that it runs.
 *
 *     flexgemm: conv_forward float16 rows=15192 ci=1024 co=1024 v=27: family=sm90 tile=128x256x64 stages=4 groups=3
 *         split=3 workspace=186679296                                                        (all of it on one line)
 *     flexgemm: neighbor_map rows=15192 shape=(1, 64, 64, 64): table=direct bytes=1048576
 *
 * The environment is read once. Lines that were printed are remembered by their hashes, in a table of fixed size: when
 * it is full, new shapes are printed no more.
 */
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan.h"

enum { TABLE_SIZE = 1 << 14, LINE_BYTES = 512 };

const char *fg_family_name(fg_family family) {
    static const char *const names[] = {"portable", "sm90", "cpu"};
    return names[family];
}

const char *fg_table_name(fg_table_kind kind) { return kind == FG_TABLE_DIRECT ? "direct" : "hash"; }

static bool is_asked_for(void) {
    enum { UNKNOWN, NO, YES };
    static _Atomic int answer = UNKNOWN;
    int known = atomic_load_explicit(&answer, memory_order_relaxed);
    if (known == UNKNOWN) {
        const char *value = getenv("FLEXGEMM_PRINT_CONFIGS");
        known = value != NULL && strcmp(value, "") != 0 && strcmp(value, "0") != 0 ? YES : NO;
        atomic_store_explicit(&answer, known, memory_order_relaxed); /* threads that meet here store the same */
    }
    return known == YES;
}

/* Whether the line is new; threads that bring the same one at once hear it once. */
static bool remember(const char *line) {
    static _Atomic uint64_t table[TABLE_SIZE]; /* 0: free */
    uint64_t hash = 0xcbf29ce484222325u;       /* FNV-1a */
    for (; *line != '\0'; line++) hash = (hash ^ (unsigned char)*line) * 0x100000001b3u;
    if (hash == 0) hash = 1;
    for (uint64_t i = 0; i < TABLE_SIZE; i++) {
        uint64_t found = 0;
        if (atomic_compare_exchange_strong(&table[(hash + i) % TABLE_SIZE], &found, hash)) return true;
        if (found == hash) return false;
    }
    return false;
}

void fg_print_plan(const fg_plan *plan, const char *operation, fg_dtype dtype, const char *shape_format, ...) {
    if (!is_asked_for()) return;
    char shape[LINE_BYTES / 2], line[LINE_BYTES];
    va_list sizes;
    va_start(sizes, shape_format);
    vsnprintf(shape, sizeof shape, shape_format, sizes);
    va_end(sizes);
    snprintf(line, sizeof line,
             "flexgemm: %s %s %s: family=%s tile=%dx%dx%d stages=%d groups=%d split=%d workspace=%lld\n", operation,
             fg_dtype_name(dtype), shape, fg_family_name(plan->family), plan->block_m, plan->block_n, plan->block_k,
             plan->num_stages, plan->groups, plan->split_k, (long long)plan->workspace_bytes);
    if (remember(line)) fputs(line, stderr);
}

void fg_print_table(fg_table_kind kind, const char *operation, int64_t rows, const int64_t shape[4], size_t bytes) {
    if (!is_asked_for()) return;
    char line[LINE_BYTES];
    snprintf(line, sizeof line, "flexgemm: %s rows=%lld shape=(%lld, %lld, %lld, %lld): table=%s bytes=%zu\n",
             operation, (long long)rows, (long long)shape[0], (long long)shape[1], (long long)shape[2],
             (long long)shape[3], fg_table_name(kind), bytes);
    if (remember(line)) fputs(line, stderr);
}
