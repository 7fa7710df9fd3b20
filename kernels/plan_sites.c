/*
 * Plan of a convolution's output sites: how many a voxel can reach.
 *
 * Along one axis, position k leads the voxel at c to the site (c + padding - k * dilation) / stride where that is
 * whole. If k does, so does the next k' for which (k' - k) * dilation is a multiple of the stride, and none between. In
 * a transposed convolution every position leads to a site.
 */
#include "plan.h"

static int32_t gcd(int32_t a, int32_t b) { return b == 0 ? a : gcd(b, a % b); }

fg_sites_plan fg_plan_conv_sites(const int32_t kernel[3], const int32_t stride[3], const int32_t dilation[3],
                                 bool transposed) {
    fg_sites_plan plan = {.per_voxel = 1};
    for (int i = 0; i < 3; i++) {
        plan.step[i] = transposed ? 1 : stride[i] / gcd(stride[i], dilation[i]);
        plan.taps[i] = (kernel[i] - 1) / plan.step[i] + 1;
        plan.per_voxel *= plan.taps[i];
    }
    return plan;
}
