/* ReLU, SiLU and GELU of a row of sums. */
#include "activation.h"

#include <math.h>

void fg_activate(float *x, int64_t n, fg_activation activation) {
    switch (activation) {
        case FG_ACTIVATION_NONE:
            break;
        case FG_ACTIVATION_RELU:
            for (int64_t i = 0; i < n; i++) x[i] = x[i] < 0.0f ? 0.0f : x[i];
            break;
        case FG_ACTIVATION_SILU:
            for (int64_t i = 0; i < n; i++) x[i] /= 1.0f + expf(-x[i]);
            break;
        case FG_ACTIVATION_GELU: /* by erfc, since 1 + erf would leave few digits of the negative tail */
            for (int64_t i = 0; i < n; i++) x[i] *= 0.5f * erfcf(-0.70710678f * x[i]);
            break;
    }
}
