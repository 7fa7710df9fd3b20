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

/* Blocks of a launch with one thread for each of `count` > 0 elements of an argument. */
inline fg_status grid_for(int64_t count, int threads, const char *argument, unsigned int *blocks, fg_error *error) {
    const int64_t needed = ceil_div<int64_t>(count, threads);
    *blocks = static_cast<unsigned int>(needed);
    if (needed <= INT32_MAX) return FG_OK;
    return fg_fail(error, FG_ERROR_VALUE, "%s: expected at most %lld elements for one launch, got %lld", argument,
                   static_cast<long long>(INT32_MAX) * threads, static_cast<long long>(count));
}

}  // namespace flexgemm
