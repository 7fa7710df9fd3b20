/*
 * Rows of four int32 in device memory, read and written in one access each where they are aligned.
 */
#pragma once

#include "common.cuh"

namespace flexgemm {

struct Coords {
    const int32_t *data;
    int64_t count;
    bool aligned; /* rows may be read as int4 */

    explicit Coords(const fg_tensor &tensor)
        : data(static_cast<const int32_t *>(tensor.data)),
          count(tensor.shape[0]),
          aligned(reinterpret_cast<uintptr_t>(tensor.data) % sizeof(int4) == 0) {}

    __device__ int4 operator[](int64_t n) const {
        if (aligned) return reinterpret_cast<const int4 *>(data)[n];
        const int32_t *c = data + 4 * n;
        return make_int4(c[0], c[1], c[2], c[3]);
    }
};

struct WritableCoords {
    int32_t *data;
    int64_t count;
    bool aligned;

    explicit WritableCoords(const fg_tensor &tensor)
        : data(static_cast<int32_t *>(tensor.data)),
          count(tensor.shape[0]),
          aligned(reinterpret_cast<uintptr_t>(tensor.data) % sizeof(int4) == 0) {}

    __device__ void store(int64_t n, int4 c) const {
        if (aligned) {
            reinterpret_cast<int4 *>(data)[n] = c;
            return;
        }
        data[4 * n] = c.x;
        data[4 * n + 1] = c.y;
        data[4 * n + 2] = c.z;
        data[4 * n + 3] = c.w;
    }
};

}  // namespace flexgemm
