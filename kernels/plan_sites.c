/*
 * Plan of a convolution's output sites: how many a voxel can reach, and of the phases that this gives a map back.
 *
 * Along one axis, position k leads the voxel at c to the site (c + padding - k * dilation) / stride where that is
 * whole. If k does, so does the next k' for which (k' - k) * dilation is a multiple of the stride, and none between. In
 * a transposed convolution every position leads to a site.
 */
#include "plan.h"

int64_t fg_greatest_common_divisor(int64_t a, int64_t b) { return b == 0 ? a : fg_greatest_common_divisor(b, a % b); }

static int32_t step_of(int32_t stride, int32_t dilation) {
    return (int32_t)(stride / fg_greatest_common_divisor(stride, dilation));
}

fg_sites_plan fg_plan_conv_sites(const int32_t kernel[3], const int32_t stride[3], const int32_t dilation[3],
                                 bool transposed) {
    fg_sites_plan plan = {.per_voxel = 1};
    for (int i = 0; i < 3; i++) {
        plan.step[i] = transposed ? 1 : step_of(stride[i], dilation[i]);
        plan.taps[i] = (kernel[i] - 1) / plan.step[i] + 1;
        plan.per_voxel *= plan.taps[i];
    }
    return plan;
}

void fg_plan_phases(const int32_t kernel[3], const int32_t stride[3], const int32_t dilation[3], int32_t phases[3]) {
    for (int i = 0; i < 3; i++) {
        const int32_t step = step_of(stride[i], dilation[i]);
        phases[i] = step < kernel[i] ? step : kernel[i];
    }
}
