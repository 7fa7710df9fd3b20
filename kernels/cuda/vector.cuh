/*
 * Several neighbouring elements at a time: one access where addresses allow it, else one by one.
 */
#pragma once

#include "common.cuh"

namespace flexgemm {

template <typename T>
constexpr int kChannels = 16 / sizeof(T); /* of a row, in one access of 16 bytes */

/* Whether the rows of a matrix, `stride` elements apart and `columns` long, are whole 16-byte pieces. */
template <typename T>
bool rows_are_vectors(const void *data, int64_t stride, int64_t columns) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % kChannels<T> == 0 && columns % kChannels<T> == 0;
}

/* Whether the rows of each matrix of a batch begin at multiples of 16 bytes. */
template <typename T>
bool rows_begin_aligned(const void *data, int64_t stride, int64_t batch_stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % kChannels<T> == 0 &&
           batch_stride % kChannels<T> == 0;
}

/* A run of kCount elements, which begins at a multiple of its size. */
template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Vector {
    T element[kCount];

    __device__ static Vector load(const T *from) { return *reinterpret_cast<const Vector *>(from); }
    __device__ void store(T *to) const { *reinterpret_cast<Vector *>(to) = *this; }
};

}  // namespace flexgemm
