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

__device__ __forceinline__ float activated(float x, fg_activation activation) {
    if (activation == FG_ACTIVATION_RELU) return relu(x);
    if (activation == FG_ACTIVATION_SILU) return silu(x);
    if (activation == FG_ACTIVATION_GELU) return gelu(x);
    return x;
}

/* Into how few equal groups of up to `most` so many fall. */
__host__ __device__ constexpr int equal_groups(int count, int most) {
    int groups = (count + most - 1) / most;
    while (count % groups != 0) ++groups;
    return groups;
}

/* All of a thread's sums. Registers cannot be indexed, and code for each of up to 128 sums would be long and want more
 * registers than there are: many sums go round past a loop body that serves up to kAtOnce of them. */
template <int kAtOnce, int kCount, typename Function>
__device__ __forceinline__ void apply_in_turns(float (&sum)[kCount], const Function &function) {
    constexpr int kTurns = kCount <= 16 ? 1 : equal_groups(kCount, kAtOnce), kGroup = kCount / kTurns;
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
        float group[kGroup];
#pragma unroll
        for (int i = 0; i < kGroup; ++i) group[i] = function(sum[i]);
#pragma unroll
        for (int i = 0; i < kCount - kGroup; ++i) sum[i] = sum[i + kGroup];
#pragma unroll
        for (int i = 0; i < kGroup; ++i) sum[kCount - kGroup + i] = group[i];
    }
}

/* Which activation it is, is asked once: where each sum asks, none is worked out beside another. */
template <int kAtOnce = 8, int kCount>
__device__ __forceinline__ void activate(float (&sum)[kCount], fg_activation activation) {
    if (activation == FG_ACTIVATION_RELU) {
#pragma unroll
        for (float &x : sum) x = relu(x);
    } else if (activation == FG_ACTIVATION_SILU) {
        apply_in_turns<kAtOnce>(sum, [](float x) { return silu(x); });
    } else if (activation == FG_ACTIVATION_GELU) {
        apply_in_turns<kAtOnce>(sum, [](float x) { return gelu(x); });
    }
}

}  // namespace flexgemm
