/*
 * One group of a grouped convolution as a convolution of its own, for both backends: the same arrays, seen at the
 * group's channels. And some of its output channels as a weight gradient of its own.
 */
#ifndef FLEXGEMM_CHANNEL_GROUPS_H
#define FLEXGEMM_CHANNEL_GROUPS_H

#include "flexgemm.h"

/* Part number `group` of `groups` along a dimension, which they divide. */
static inline fg_tensor fg_part_of(fg_tensor tensor, int dimension, int64_t groups, int64_t group) {
    tensor.shape[dimension] /= groups;
    const int64_t first = group * tensor.shape[dimension] * tensor.strides[dimension];
    if (tensor.data) tensor.data = (char *)tensor.data + first * (int64_t)fg_dtype_size(tensor.dtype);
    return tensor;
}

static inline fg_conv_forward_params fg_conv_forward_group(const fg_conv_forward_params *params, int64_t group) {
    fg_conv_forward_params p = *params;
    p.feats = fg_part_of(p.feats, 1, params->groups, group);
    p.weight = fg_part_of(p.weight, 0, params->groups, group);
    p.bias = fg_part_of(p.bias, 0, params->groups, group);
    if (p.scale_weight.ndim == 1) p.scale_weight = fg_part_of(p.scale_weight, 0, params->groups, group);
    p.residual = fg_part_of(p.residual, 1, params->groups, group);
    p.out = fg_part_of(p.out, 1, params->groups, group);
    p.groups = 1;
    return p;
}

static inline fg_conv_dgrad_params fg_conv_dgrad_group(const fg_conv_dgrad_params *params, int64_t group) {
    fg_conv_dgrad_params p = *params;
    p.grad_out = fg_part_of(p.grad_out, 1, params->groups, group);
    p.weight = fg_part_of(p.weight, 0, params->groups, group);
    p.grad_feats = fg_part_of(p.grad_feats, 1, params->groups, group);
    p.groups = 1;
    return p;
}

static inline fg_conv_wgrad_params fg_conv_wgrad_group(const fg_conv_wgrad_params *params, int64_t group) {
    fg_conv_wgrad_params p = *params;
    p.grad_out = fg_part_of(p.grad_out, 1, params->groups, group);
    p.feats = fg_part_of(p.feats, 1, params->groups, group);
    p.grad_weight = fg_part_of(p.grad_weight, 0, params->groups, group);
    p.grad_bias = fg_part_of(p.grad_bias, 0, params->groups, group);
    p.groups = 1;
    return p;
}

static inline fg_conv_wgrad_params fg_conv_wgrad_part(const fg_conv_wgrad_params *params, int64_t parts, int64_t part) {
    fg_conv_wgrad_params p = *params;
    p.grad_out = fg_part_of(p.grad_out, 1, parts, part);
    p.grad_weight = fg_part_of(p.grad_weight, 0, parts, part);
    p.grad_bias = fg_part_of(p.grad_bias, 0, parts, part);
    return p;
}

#endif
