/* The floating-point settings of threads that compute. */
#ifndef FLEXGEMM_FLOATS_H
#define FLEXGEMM_FLOATS_H

#include <fenv.h>

static inline fenv_t fg_default_floats(void) {
    fenv_t kept;
    fegetenv(&kept);
    fesetenv(FE_DFL_ENV);
    return kept;
}

static inline void fg_restore_floats(const fenv_t *kept) { fesetenv(kept); }

/* At the head of a block: until it ends its thread rounds to nearest and keeps denormals, and then has its settings
 * back. Each parallel region that computes with floats needs one: all libraries of a process share the threads of OpenMP, which keep the settings
 * of the thread that started them, whichever that was. */
#define FG_DEFAULT_FLOATS __attribute__((cleanup(fg_restore_floats))) const fenv_t fg_kept_floats = fg_default_floats()

#endif
