/*
 * Activations that epilogues apply to finished float32 sums. The CPU's are in kernels/cpu/activation.c.
 */
#pragma once

#include "../flexgemm.h"

namespace flexgemm {

/* Written so that NaN stays NaN. */
__device__ __forceinline__ float relu(float x) { return x < 0.0f ? 0.0f : x; }

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + expf(-x)); }

/* x times the normal distribution function. By erfc, since 1 + erf would leave few digits of the negative tail. */
__device__ __forceinline__ float gelu(float x) { return 0.5f * x * erfcf(-0.70710678f * x); }

/* All of a thread's sums, with one branch for all. */
template <int kCount>
__device__ __forceinline__ void activate(float (&sum)[kCount], fg_activation activation) {
    if (activation == FG_ACTIVATION_RELU) {
#pragma unroll
        for (float &x : sum) x = relu(x);
    } else if (activation == FG_ACTIVATION_SILU) {
#pragma unroll
        for (float &x : sum) x = silu(x);
    } else if (activation == FG_ACTIVATION_GELU) {
#pragma unroll
        for (float &x : sum) x = gelu(x);
    }
}

}  // namespace flexgemm
