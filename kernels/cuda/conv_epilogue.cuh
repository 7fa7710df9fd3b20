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

    /* The same for rows that begin at one of their columns. */
    template <typename T>
    __device__ SumEpilogue from_column(int64_t column) const {
        return {bias ? static_cast<const T *>(bias) + column : nullptr,
                residual ? static_cast<const T *>(residual) + column : nullptr, residual_stride, activation};
    }
};

}  // namespace flexgemm
