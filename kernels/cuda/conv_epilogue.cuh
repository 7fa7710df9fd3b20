/* What becomes of the finished float32 sums of a convolution's forward pass: out = activation(sum + bias + residual). */
#pragma once

#include "activation.cuh"
#include "common.cuh"

namespace flexgemm {

/* The residual may be `out` itself: an element is read by the thread that writes it, and before. */
struct SumEpilogue {
    const void *bias;        /* (columns) or NULL; dtype of out */
    const void *residual;    /* (rows, columns), residual_stride apart, or NULL; dtype of out */
    int64_t residual_stride; /* elements */
    fg_activation activation;
};

}  // namespace flexgemm
