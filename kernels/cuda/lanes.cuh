/*
 * Rows of features worked on by groups of lanes: each lane takes kVector adjacent channels at a time, 16 bytes where
 * the rows are aligned, and a group as many lanes as a row has such pieces, at most a warp.
 */
#pragma once

#include "common.cuh"
#include "vector.cuh"

namespace flexgemm {

constexpr int kLaneThreads = 256;

/* A matrix whose rows are read or written in pieces. */
template <class T>
struct RowsOf {
    T *data;
    int64_t rows, columns, stride;

    explicit RowsOf(const fg_tensor &tensor)
        : data(static_cast<T *>(tensor.data)),
          rows(tensor.shape[0]),
          columns(tensor.shape[1]),
          stride(tensor.strides[0]) {}

    __device__ T *row(int64_t n) const { return data + n * stride; }
};

/* What a lane reads or writes at once. */
template <int kVector, class T>
__device__ __forceinline__ void load_piece(float (&value)[kVector], const T *at) {
    const auto piece = Vector<T, kVector>::load(at);
#pragma unroll
    for (int i = 0; i < kVector; ++i) value[i] = to_float(piece.element[i]);
}

template <int kVector, class T>
__device__ __forceinline__ void store_piece(T *at, const float (&value)[kVector]) {
    Vector<T, kVector> piece;
#pragma unroll
    for (int i = 0; i < kVector; ++i) piece.element[i] = from_float<T>(value[i]);
    piece.store(at);
}

/* A group's share of a launch: group number, and the lane's place in it. */
struct LaneGroup {
    int64_t number;
    int lane, lanes;

    __device__ explicit LaneGroup(int log_lanes)
        : number((static_cast<int64_t>(blockIdx.x) * kLaneThreads + threadIdx.x) >> log_lanes),
          lane(static_cast<int>(threadIdx.x) & ((1 << log_lanes) - 1)),
          lanes(1 << log_lanes) {}
};

inline bool is_aligned(const fg_tensor &tensor, size_t bytes) {
    const size_t size = fg_dtype_size(tensor.dtype);
    return reinterpret_cast<uintptr_t>(tensor.data) % bytes == 0 &&
           static_cast<size_t>(tensor.strides[0]) * size % bytes == 0 &&
           static_cast<size_t>(tensor.shape[1]) * size % bytes == 0;
}

inline int log_lanes_for(int64_t columns, int vector) {
    int log_lanes = 0;
    while (log_lanes < 5 && (int64_t{vector} << log_lanes) < columns) ++log_lanes;
    return log_lanes;
}

/* Blocks for one group of lanes for each of `count` > 0 rows. */
inline fg_status lane_blocks(int64_t count, int log_lanes, const char *argument, unsigned int *blocks,
                             fg_error *error) {
    const int64_t groups = kLaneThreads >> log_lanes, needed = ceil_div<int64_t>(count, groups);
    *blocks = static_cast<unsigned int>(needed);
    if (needed <= INT32_MAX) return FG_OK;
    return fg_fail(error, FG_ERROR_VALUE, "%s: expected at most %lld rows for one launch, got %lld", argument,
                   static_cast<long long>(INT32_MAX) * groups, static_cast<long long>(count));
}

/* Calls `call` with a pointer that tells the dtype and an integer constant that tells the width of a piece. */
template <class Call>
fg_status dispatch_rows(fg_dtype dtype, bool aligned, const Call &call) {
    using One = std::integral_constant<int, 1>;
    using Four = std::integral_constant<int, 4>;
    using Eight = std::integral_constant<int, 8>;
    if (dtype == FG_FLOAT32)
        return aligned ? call(static_cast<float *>(nullptr), Four()) : call(static_cast<float *>(nullptr), One());
    if (dtype == FG_FLOAT16)
        return aligned ? call(static_cast<__half *>(nullptr), Eight()) : call(static_cast<__half *>(nullptr), One());
    return aligned ? call(static_cast<__nv_bfloat16 *>(nullptr), Eight())
                   : call(static_cast<__nv_bfloat16 *>(nullptr), One());
}

}  // namespace flexgemm
