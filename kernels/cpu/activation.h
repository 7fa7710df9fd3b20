/* Activations that epilogues apply to finished float32 sums. The GPU's are in kernels/cuda/activation.cuh. */
#ifndef FLEXGEMM_CPU_ACTIVATION_H
#define FLEXGEMM_CPU_ACTIVATION_H

#include "../flexgemm.h"

/* x[i] = activation(x[i]) for i < n. NaN stays NaN. */
void fg_activate(float *x, int64_t n, fg_activation activation);

#endif
