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

/* All of a thread's sums. Registers cannot be indexed, and code for each of up to 128 sums would be long and want more
 * registers than there are: many sums go round past a loop body that serves a few of them. */
template <int kCount, typename Function>
__device__ __forceinline__ void apply_in_turns(float (&sum)[kCount], const Function &function) {
    constexpr int kGroup = kCount <= 16 ? kCount : kCount % 8 == 0 ? 8 : 4, kTurns = kCount / kGroup;
    static_assert(kCount % kTurns == 0, "whole groups");
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
template <int kCount>
__device__ __forceinline__ void activate(float (&sum)[kCount], fg_activation activation) {
    if (activation == FG_ACTIVATION_RELU) {
#pragma unroll
        for (float &x : sum) x = relu(x);
    } else if (activation == FG_ACTIVATION_SILU) {
        apply_in_turns(sum, [](float x) { return silu(x); });
    } else if (activation == FG_ACTIVATION_GELU) {
        apply_in_turns(sum, [](float x) { return gelu(x); });
    }
}

}  // namespace flexgemm
