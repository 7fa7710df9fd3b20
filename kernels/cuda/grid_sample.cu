/*
 * Voxels around points: which they are, how they weigh, and the gradient of a sample in its point.
 *
 * One thread looks up the corners of a point's cell in a hash table of voxels. For the gradient a group of lanes takes
 * the products of the output's gradient with the features of the eight corners, and its first lane the rest.
 */
#include "../cell.h"
#include "backend.cuh"
#include "coords.cuh"
#include "hash_table.cuh"
#include "lanes.cuh"
#include "voxel_number.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256;

/* ---- map ---- */

template <class Key>
struct VoxelTable {
    KeyTable<Key> table;
    const int32_t *rows;
    VoxelNumbers<Key> number;
    int64_t shape[4];

    explicit VoxelTable(const fg_sample_map_params &p)
        : table{static_cast<Key *>(p.table_keys.data), p.table_keys.shape[0] - 1,
                static_cast<KeyTableState *>(p.state.data)},
          rows(static_cast<const int32_t *>(p.table_values.data)),
          number(p.shape),
          shape{p.shape[0], p.shape[1], p.shape[2], p.shape[3]} {}

    /* The row of a voxel, or -1, of the probe for it. A voxel outside asks for that of the first. */
    __device__ typename KeyTable<Key>::Probe probe(const int32_t (&coord)[4], bool *exists) const {
        const int4 voxel = make_int4(coord[0], coord[1], coord[2], coord[3]);
        *exists = *exists && number.bounds.contain(voxel);
        return table.probe(*exists ? number(voxel) : 0);
    }
    __device__ int32_t row_at(const typename KeyTable<Key>::Probe &probe, bool exists) const {
        const int64_t slot = exists ? table.find(probe) : -1;
        return slot < 0 ? -1 : rows[slot];
    }
};

/* Two stores of 16 bytes where the address allows them. */
template <class Value>
__device__ void store_corners(Value *at, const Value (&value)[FG_CORNERS], bool aligned) {
    struct alignas(16) Half {
        Value value[4];
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (aligned) {
            const Half part = {{value[4 * half], value[4 * half + 1], value[4 * half + 2], value[4 * half + 3]}};
            reinterpret_cast<Half *>(at)[half] = part;
        } else {
#pragma unroll
            for (int k = 4 * half; k < 4 * half + 4; ++k) at[k] = value[k];
        }
    }
}

template <class Key>
__global__ void __launch_bounds__(kThreads) trilinear_kernel(fg_points points, int64_t count, VoxelTable<Key> voxels,
                                                             int32_t *indices, float *weights, bool aligned) {
    const int64_t q = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (q >= count) return;
    float point[3];
    const int32_t batch = fg_read_point(&points, q, point);
    fg_cell cell = {};
    const bool near = fg_find_cell(point, voxels.shape, &cell);
    typename KeyTable<Key>::Probe probe[FG_CORNERS];
    bool exists[FG_CORNERS];
#pragma unroll
    for (int corner = 0; corner < FG_CORNERS; ++corner) {
        int32_t coord[4];
        fg_corner_coord(&cell, corner, batch, coord);
        exists[corner] = near;
        probe[corner] = voxels.probe(coord, &exists[corner]);
    }
    int32_t row[FG_CORNERS];
    float weight[FG_CORNERS], total = 0.0f;
#pragma unroll
    for (int corner = 0; corner < FG_CORNERS; ++corner) {
        row[corner] = voxels.row_at(probe[corner], exists[corner]);
        weight[corner] = row[corner] >= 0 ? fg_corner_weight(&cell, corner) : 0.0f;
        total += weight[corner];
    }
#pragma unroll
    for (int corner = 0; corner < FG_CORNERS; ++corner) weight[corner] = total > 0.0f ? weight[corner] / total : 0.0f;
    store_corners(indices + FG_CORNERS * q, row, aligned);
    store_corners(weights + FG_CORNERS * q, weight, aligned);
}

template <class Key>
__global__ void __launch_bounds__(kThreads)
    nearest_kernel(fg_points points, int64_t count, VoxelTable<Key> voxels, int32_t *indices) {
    const int64_t q = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (q >= count) return;
    float point[3];
    const int32_t batch = fg_read_point(&points, q, point);
    int32_t coord[4] = {batch, 0, 0, 0};
    bool exists = fg_find_nearest(point, voxels.shape, coord + 1);
    const auto probe = voxels.probe(coord, &exists);
    indices[q] = voxels.row_at(probe, exists);
}

template <class Key>
fg_status map_points(const fg_sample_map_params &p, cudaStream_t stream, fg_error *error) {
    const int64_t count = p.indices.shape[0];
    unsigned int blocks = 0;
    const fg_status status = grid_for(count, kThreads, "grid", &blocks, error);
    if (status != FG_OK) return status;
    const fg_points points = fg_points_of(&p.grid);
    int32_t *indices = static_cast<int32_t *>(p.indices.data);
    const VoxelTable<Key> voxels(p);
    if (p.weights.present)
        trilinear_kernel<Key><<<blocks, kThreads, 0, stream>>>(points, count, voxels, indices,
                                                               static_cast<float *>(p.weights.data),
                                                               is_aligned(p.indices, 16) && is_aligned(p.weights, 16));
    else
        nearest_kernel<Key><<<blocks, kThreads, 0, stream>>>(points, count, voxels, indices);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

/* ---- gradient in the points ---- */

template <class T, int kVector>
__global__ void __launch_bounds__(kLaneThreads)
    sample_grad_kernel(RowsOf<const T> grad_out, RowsOf<const T> feats, fg_points points, const int32_t *indices,
                       float *grad_grid, int log_lanes) {
    const LaneGroup group(log_lanes);
    /* Every lane stays for the shuffles. */
    const bool inside = group.number < grad_out.rows;
    const int64_t q = inside ? group.number : 0;
    int32_t row[FG_CORNERS];
    float product[FG_CORNERS] = {};
    unsigned int present = 0;
#pragma unroll
    for (int corner = 0; corner < FG_CORNERS; ++corner) {
        row[corner] = inside ? indices[FG_CORNERS * q + corner] : -1;
        if (row[corner] >= 0 && row[corner] < feats.rows) present |= 1u << corner;
    }
    for (int64_t c = group.lane * kVector; c < grad_out.columns; c += group.lanes * kVector) {
        float upper[kVector];
        load_piece(upper, grad_out.row(q) + c);
#pragma unroll
        for (int corner = 0; corner < FG_CORNERS; ++corner) {
            float value[kVector] = {};
            if (present >> corner & 1) load_piece(value, feats.row(row[corner]) + c);
#pragma unroll
            for (int i = 0; i < kVector; ++i) product[corner] = fmaf(upper[i], value[i], product[corner]);
        }
    }
#pragma unroll
    for (int corner = 0; corner < FG_CORNERS; ++corner)
        for (int distance = 1; distance < group.lanes; distance *= 2)
            product[corner] += __shfl_xor_sync(~0u, product[corner], distance);
    if (!inside || group.lane > 0) return;
    const int64_t everywhere[4] = {1, 1ll << 31, 1ll << 31, 1ll << 31};
    fg_cell cell = {};
    float point[3], gradient[3];
    fg_read_point(&points, q, point);
    if (!fg_find_cell(point, everywhere, &cell)) present = 0;
    fg_cell_gradient(&cell, present, product, gradient);
    grad_grid += points.batched ? 4 * q + 1 : 3 * q;
    if (points.batched) grad_grid[-1] = 0.0f;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) grad_grid[axis] = gradient[axis];
}

}  // namespace

fg_status sample_map(const fg_sample_map_params *p, const fg_queue *queue, fg_error *error) {
    if (p->indices.shape[0] == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    return p->table_keys.dtype == FG_INT32 ? map_points<uint32_t>(*p, stream_of(queue), error)
                                           : map_points<Word>(*p, stream_of(queue), error);
}

fg_status sample_grad(const fg_sample_grad_params *p, const fg_queue *queue, fg_error *error) {
    const int64_t points = p->indices.shape[0];
    if (points == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const bool aligned = is_aligned(p->feats, 16) && is_aligned(p->grad_out, 16);
    return dispatch_rows(p->feats.dtype, aligned, [&](auto *element, auto vector) -> fg_status {
        using T = std::remove_pointer_t<decltype(element)>;
        const int log_lanes = log_lanes_for(p->feats.shape[1], vector());
        unsigned int blocks = 0;
        const fg_status status = lane_blocks(points, log_lanes, "grid", &blocks, error);
        if (status != FG_OK) return status;
        sample_grad_kernel<T, vector()><<<blocks, kLaneThreads, 0, stream_of(queue)>>>(
            RowsOf<const T>(p->grad_out), RowsOf<const T>(p->feats), fg_points_of(&p->grid),
            static_cast<const int32_t *>(p->indices.data), static_cast<float *>(p->grad_grid.data), log_lanes);
        FG_CUDA(cudaGetLastError());
        return FG_OK;
    });
}

}  // namespace flexgemm
