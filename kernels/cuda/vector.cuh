/*
 * Several neighbouring elements at a time: one access where addresses allow it, else one by one.
 */
#pragma once

#include "common.cuh"

namespace flexgemm {

template <typename T>
constexpr int kChannels = 16 / sizeof(T); /* of a row, in one access of 16 bytes */

/* Whether memory is in whole 16-byte pieces: where it begins, and each of these strides and lengths in elements. */
template <typename T, typename... Lengths>
bool in_vectors(const void *data, Lengths... lengths) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && ((lengths % kChannels<T> == 0) && ...);
}

/* A run of kCount elements, which begins at a multiple of its size. */
template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Vector {
    T element[kCount];

    __device__ static Vector load(const T *from) { return *reinterpret_cast<const Vector *>(from); }
    __device__ void store(T *to) const { *reinterpret_cast<Vector *>(to) = *this; }
};

}  // namespace flexgemm
