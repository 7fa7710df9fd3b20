/* Chooses the instruction set: the best the processor has, or the one that FLEXGEMM_CPU_ISA names. */
#include "simd.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static const fg_simd *chosen;
static char requested[32];

static bool supported(const fg_simd *simd) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); /* and with AVX2 always F16C */
    if (simd == &fg_simd_avx2) return avx2;
    if (simd == &fg_simd_avx512)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return simd == &fg_simd_scalar;
}

static void choose(void) {
    static const fg_simd *const best_first[] = {
#if defined(__x86_64__)
        &fg_simd_avx512,
        &fg_simd_avx2,
#endif
        &fg_simd_scalar,
    };
    const char *name = getenv("FLEXGEMM_CPU_ISA");
    if (name != NULL) strncpy(requested, name, sizeof requested - 1);
    for (size_t i = 0; i < sizeof best_first / sizeof *best_first; i++) {
        if (requested[0] != '\0' && strcmp(requested, best_first[i]->name) != 0) continue;
        if (!supported(best_first[i])) continue;
        chosen = best_first[i];
        return;
    }
}

const fg_simd *fg_simd_get(fg_error *error) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, choose);
    if (chosen == NULL)
        fg_fail(error, FG_ERROR_VALUE,
                "FLEXGEMM_CPU_ISA: expected avx512, avx2 or scalar, and one that this processor has, got '%s'",
                requested);
    return chosen;
}

void fg_widen(const fg_simd *simd, fg_dtype dtype, const void *from, int64_t stride, int64_t n, float *to) {
    enum { AT_ONCE = 256 };
    if (stride == 1) {
        simd->to_float[dtype](to, from, n);
        return;
    }
    const int64_t size = (int64_t)fg_dtype_size(dtype), step = stride * size;
    _Alignas(float) char adjacent[AT_ONCE * sizeof(float)];
    for (int64_t begin = 0; begin < n; begin += AT_ONCE) {
        const char *source = (const char *)from + begin * step;
        const int64_t count = n - begin < AT_ONCE ? n - begin : AT_ONCE;
        switch (size) { /* known, so that the copy of an element is an instruction */
            case 1:
                for (int64_t i = 0; i < count; i++) adjacent[i] = source[i * step];
                break;
            case 2:
                for (int64_t i = 0; i < count; i++) memcpy(adjacent + 2 * i, source + i * step, 2);
                break;
            default:
                for (int64_t i = 0; i < count; i++) memcpy(adjacent + 4 * i, source + i * step, 4);
        }
        simd->to_float[dtype](to + begin, adjacent, count);
    }
}
