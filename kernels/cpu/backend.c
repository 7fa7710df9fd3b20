/* The CPU column of the fg_backend table, the description of the processor, and workspaces shared by threads. */
#include "backend.h"

#include <omp.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "simd.h"

/* ---- forked processes ---- */

/* A forked child has one thread, and libgomp would wait for ever for those that the parent had beside it. */
static void work_alone(void) { omp_set_num_threads(1); }

__attribute__((constructor)) static void expect_forks(void) { (void)pthread_atfork(NULL, NULL, work_alone); }

/* ---- workspaces ---- */

size_t fg_workspace_bytes(fg_workspace_layout layout) {
    return layout.shared + layout.per_thread * (size_t)omp_get_max_threads();
}

fg_status fg_workspace_threads(const fg_tensor *workspace, fg_workspace_layout layout, int64_t tasks, int *threads,
                               fg_error *error) {
    const size_t given = workspace->present ? (size_t)workspace->shape[0] : 0;
    const size_t needed = layout.shared + layout.per_thread;
    if (given < needed)
        return fg_fail(error, FG_ERROR_VALUE, "workspace: expected at least %zu bytes, got %zu", needed, given);
    int64_t count = fg_max(1, fg_min(omp_get_max_threads(), tasks));
    if (layout.per_thread > 0) count = fg_min(count, (int64_t)((given - layout.shared) / layout.per_thread));
    *threads = (int)count;
    return FG_OK;
}

void *fg_workspace_private(const fg_tensor *workspace, fg_workspace_layout layout) {
    return (char *)workspace->data + layout.shared + layout.per_thread * (size_t)omp_get_thread_num();
}

/* ---- the device ---- */

/* The model name as the processor or the kernel states it; empty where neither does. */
static void read_model_name(char *name, size_t size) {
    name[0] = '\0';
    FILE *file = fopen("/proc/cpuinfo", "r");
    if (file == NULL) return;
    char line[256];
    while (name[0] == '\0' && fgets(line, sizeof line, file) != NULL) {
        const char *value = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || value == NULL) continue;
        value += 1 + strspn(value + 1, " \t");
        snprintf(name, size, "%.*s", (int)strcspn(value, "\n"), value);
    }
    fclose(file);
}

static int64_t system_value(int name) {
    const long value = sysconf(name);
    return value > 0 ? value : 0;
}

static fg_status device_count(int32_t *count, fg_error *error) {
    (void)error;
    *count = 1;
    return FG_OK;
}

static fg_status device_info(int32_t device_index, fg_device_info *info, fg_error *error) {
    if (device_index != 0) return fg_fail(error, FG_ERROR_VALUE, "index: expected 0 on the cpu, got %d", device_index);
    const fg_simd *simd = fg_simd_get(error);
    if (simd == NULL) return error->code;

    char model[192];
    read_model_name(model, sizeof model);
    *info = (fg_device_info){.num_sms = omp_get_max_threads()};
    snprintf(info->name, sizeof info->name, "%s (%s)", model[0] != '\0' ? model : "cpu", simd->name);
    info->memory_bytes = system_value(_SC_PHYS_PAGES) * system_value(_SC_PAGESIZE);
#if defined(_SC_LEVEL2_CACHE_SIZE)
    info->l2_bytes = system_value(_SC_LEVEL2_CACHE_SIZE);
#endif
    return FG_OK;
}

/* ---- the table ---- */

#define FG_ENTRY(name) .name##_workspace = fg_cpu_##name##_workspace, .name = fg_cpu_##name
#define FG_ENTRY_RUN(name) .name##_workspace = NULL, .name = fg_cpu_##name

const fg_backend *fg_cpu_backend(void) {
    static const fg_backend backend = {
        .name = "cpu",
        FG_ENTRY(neighbor_map),
        FG_ENTRY(conv_sites),
        FG_ENTRY(row_order),
        FG_ENTRY_RUN(ordered_map),
        FG_ENTRY_RUN(segment_map),
        FG_ENTRY_RUN(encode_seq),
        FG_ENTRY_RUN(decode_seq),
        FG_ENTRY(sort_keys),
        FG_ENTRY(hash_insert),
        FG_ENTRY_RUN(hash_lookup),
        FG_ENTRY(sample_map),
        FG_ENTRY(sample_forward),
        FG_ENTRY(sample_grad),
        FG_ENTRY(gather_sum),
        FG_ENTRY(group_rows),
        FG_ENTRY(group_reduce),
        FG_ENTRY_RUN(voxel_codes),
        FG_ENTRY_RUN(unique_ranks),
        FG_ENTRY_RUN(unique_groups),
        FG_ENTRY(conv_forward),
        FG_ENTRY(conv_dgrad),
        FG_ENTRY(conv_wgrad),
        FG_ENTRY(depthwise_forward),
        FG_ENTRY(depthwise_dgrad),
        FG_ENTRY(depthwise_wgrad),
        FG_ENTRY_RUN(pool),
        FG_ENTRY_RUN(pool_backward),
        FG_ENTRY_RUN(batch_indices),
        FG_ENTRY(gemm),
        FG_ENTRY_RUN(quantize),
        .device_count = device_count,
        .device_info = device_info,
    };
    return &backend;
}
