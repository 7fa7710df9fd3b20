/*
 * Activations that epilogues apply to finished float32 sums. The CPU's are in kernels/cpu/activation.c.
 */
#pragma once

#include "../flexgemm.h"
#include "ptx.cuh"

namespace flexgemm {

/* Written so that NaN stays NaN. */
__device__ __forceinline__ float relu(float x) { return x < 0.0f ? 0.0f : x; }

/* To 5e-7 of the value, and on the negative side 6e-8 x more, by which the exponent is rounded. */
__device__ __forceinline__ float silu(float x) {
    constexpr float kLog2E = 1.44269504f;
    return x * ptx::reciprocal(1.0f + ptx::exp2(-kLog2E * x));
}

/* x times the normal distribution function. Of its tail beyond u = |x|, exp(-u^2 / 2) falls out: what is left is t times
 * a polynomial in t = 1 / (1 + 0.36 u), fitted to 8e-7 of it up to u = 13.3, beyond which the tail is 0. So the negative
 * side keeps its digits: 2e-6 of the value is lost at -5, 8e-6 at -13. */
__device__ __forceinline__ float gelu(float x) {
    constexpr float kHalfLog2E = 0.72134752f;
    const float t = ptx::reciprocal(fmaf(0.36f, fabsf(x), 1.0f));
    float tail = 0.04746448f;
    tail = fmaf(tail, t, -0.18116196f);
    tail = fmaf(tail, t, 0.18285632f);
    tail = fmaf(tail, t, 0.02523838f);
    tail = fmaf(tail, t, 0.14019866f);
    tail = fmaf(tail, t, 0.14168474f);
    tail = fmaf(tail, t, 0.14371929f);
    tail *= t * ptx::exp2(-kHalfLog2E * x * x);
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

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
