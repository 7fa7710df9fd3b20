/*
 * Voxels around points: which they are, how they weigh, the samples that they give, and the gradient of a sample in its
 * point.
 *
 * Voxels are looked up in a table of cells of 2 x 2 x 2 (cell_hash.cuh), made in the workspace: the eight around a point
 * lie in one to eight cells. A thread looks up those of a point, lanes share the channels of the rows. For the gradient
 * a group of lanes takes the products of the output's gradient with the features of the eight corners, and its first
 * lane the rest.
 */
#include <cstring>

#include "../cell.h"
#include "backend.cuh"
#include "cell_table.cuh"
#include "coords.cuh"
#include "lanes.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256;

/* ---- voxels ---- */

template <class Cell>
struct Voxels {
    using Number = Cell;

    CellHash<Cell> table;
    CellGrid grid;
    int64_t shape[4];

    Voxels(const CellHash<Cell> &table, const int64_t (&shape)[4])
        : table(table), grid(shape), shape{shape[0], shape[1], shape[2], shape[3]} {}

    /* The row of a voxel, or -1. */
    __device__ int32_t row(int4 c) const {
        const int32_t *rows = grid.contain(c) ? find_rows(table, grid.cell<Cell>(c)) : nullptr;
        return rows ? rows[voxel_in_cell(c.y, c.z, c.w)] : -1;
    }
};

/* Calls launch(voxels) once all rows of coordinates are in the table. */
template <class Params, class Launch>
fg_status with_voxels(const Params &p, cudaStream_t stream, fg_error *error, const Launch &launch) {
    const Coords coords(p.coords);
    if (coords.count > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "coords: expected at most %lld rows, which int32 can number, got %lld",
                       static_cast<long long>(INT32_MAX), static_cast<long long>(coords.count));
    return with_cell_hash(p.workspace.data, coords.count, p.shape, [&](const auto &table) -> fg_status {
        const Voxels voxels(table, p.shape);
        FG_CUDA(cudaMemsetAsync(p.workspace.data, 0xFF, cell_hash_bytes(coords.count, p.shape), stream));
        FG_CUDA(insert_rows(coords, voxels.grid, table, nullptr, stream));
        launch(voxels);
        FG_CUDA(cudaGetLastError());
        return FG_OK;
    });
}

/* ---- map and samples ---- */

struct Corner {
    int32_t row; /* -1 where there is no voxel */
    float weight;
};

/* The eight voxels around a point: all of their cells are on the way before the first is asked about. */
template <class Cell>
__device__ void find_corners(const fg_points &points, int64_t q, const Voxels<Cell> &voxels,
                             Corner (&corner)[FG_CORNERS]) {
    const CellGrid &grid = voxels.grid;
    float point[3];
    const uint32_t batch = fg_read_point(&points, q, point);
    fg_cell place = {};
    const bool near = fg_find_cell(point, voxels.shape, &place) && batch < grid.batch;
    const uint32_t extent[3] = {grid.width, grid.height, grid.depth};
    uint32_t at[3][2]; /* along each axis; what is negative is past the end */
    bool inside[3][2];
#pragma unroll
    for (int axis = 0; axis < 3; ++axis)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            at[axis][k] = static_cast<uint32_t>(place.base[axis]) + k;
            inside[axis][k] = near && at[axis][k] < extent[axis];
        }

    using Table = CellHash<Cell>;
    typename Table::Probe probe[FG_CORNERS];
#pragma unroll
    for (int k = 0; k < FG_CORNERS; ++k) {
        const uint32_t x = at[0][k / 4], y = at[1][k / 2 % 2], z = at[2][k % 2];
        const bool exists = inside[0][k / 4] && inside[1][k / 2 % 2] && inside[2][k % 2];
        const Cell there = grid.column<Cell>(batch, x / 2, y / 2) + z / 2;
        probe[k] = voxels.table.probe(exists ? there : Table::kEmpty);
    }
#pragma unroll
    for (int k = 0; k < FG_CORNERS; ++k) {
        const uint32_t voxel = voxel_in_cell(at[0][k / 4], at[1][k / 2 % 2], at[2][k % 2]);
        const uint32_t slot = voxels.table.find(probe[k]);
        corner[k].row = slot != Table::kNone ? voxels.table.at(slot)[voxel] : -1;
    }

    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < FG_CORNERS; ++k) {
        corner[k].weight = corner[k].row >= 0 ? fg_corner_weight(&place, k) : 0.0f;
        total += corner[k].weight;
    }
    /* Eight divisions by one number: a product with the reciprocal, and a correction by the remainder, is rounded as a
     * division is. */
    const float reciprocal = total > 0.0f ? __frcp_rn(total) : 0.0f;
#pragma unroll
    for (int k = 0; k < FG_CORNERS; ++k) {
        const float product = corner[k].weight * reciprocal;
        corner[k].weight = fmaf(fmaf(product, total, -corner[k].weight), -reciprocal, product);
    }
}

/* Two stores of 16 bytes where the address allows them. */
template <class Value>
__device__ void store_corners(Value *at, const Value (&value)[FG_CORNERS], bool aligned) {
    using Half = Vector<Value, 4>;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (aligned) {
            const Half part = {{value[4 * half], value[4 * half + 1], value[4 * half + 2], value[4 * half + 3]}};
            part.store(at + 4 * half);
        } else {
#pragma unroll
            for (int k = 4 * half; k < 4 * half + 4; ++k) at[k] = value[k];
        }
    }
}

template <class Cell>
__global__ void __launch_bounds__(kThreads) trilinear_kernel(fg_points points, int64_t count, Voxels<Cell> voxels,
                                                             int32_t *indices, float *weights, bool aligned) {
    const int64_t q = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (q >= count) return;
    Corner corner[FG_CORNERS];
    find_corners(points, q, voxels, corner);
    int32_t row[FG_CORNERS];
    float weight[FG_CORNERS];
#pragma unroll
    for (int k = 0; k < FG_CORNERS; ++k) {
        row[k] = corner[k].row;
        weight[k] = corner[k].weight;
    }
    store_corners(indices + FG_CORNERS * q, row, aligned);
    store_corners(weights + FG_CORNERS * q, weight, aligned);
}

template <class Cell>
__global__ void __launch_bounds__(kThreads)
    nearest_kernel(fg_points points, int64_t count, Voxels<Cell> voxels, int32_t *indices) {
    const int64_t q = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (q >= count) return;
    float point[3];
    const int32_t batch = fg_read_point(&points, q, point);
    int32_t voxel[3];
    const bool near = fg_find_nearest(point, voxels.shape, voxel);
    indices[q] = near ? voxels.row(make_int4(batch, voxel[0], voxel[1], voxel[2])) : -1;
}

constexpr int kSampleThreads = 128, kSampleWarps = kSampleThreads / 32;
constexpr int kLanes = 8; /* that share a point's channels */

/* A warp takes 32 points: each lane finds the voxels around one, then groups of lanes add up the rows of all of them,
 * those of a point on the way together. Voxels that are not there take no additions: L2 limits, and instructions
 * next. */
template <class Cell, class T, int kVector>
__global__ void __launch_bounds__(kSampleThreads)
    sample_kernel(fg_points points, Voxels<Cell> voxels, RowsOf<const T> feats, RowsOf<T> out) {
    /* In registers elements of 16 bits would each take one. */
    using Words = std::conditional_t<kVector == 1, T, uint4>;
    __shared__ Corner all_terms[kSampleWarps][FG_CORNERS][32]; /* of each lane's point, those that are there first */
    __shared__ int all_counts[kSampleWarps][32];
    auto &terms = all_terms[threadIdx.x / 32];
    auto &counts = all_counts[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kSampleThreads + (threadIdx.x - lane);
    int count = 0;
    if (first + lane < out.rows) {
        Corner corner[FG_CORNERS];
        find_corners(points, first + lane, voxels, corner);
#pragma unroll
        for (int k = 0; k < FG_CORNERS; ++k)
            if (corner[k].row >= 0) terms[count++][lane] = corner[k];
    }
    counts[lane] = count;
    __syncwarp();

    const int64_t pitch = feats.stride * static_cast<int64_t>(sizeof(T));
    for (int at = lane / kLanes; at < 32 && first + at < out.rows; at += 32 / kLanes) {
        const int here = counts[at];
        for (int64_t c = lane % kLanes * kVector; c < out.columns; c += kLanes * kVector) {
            const char *const column = reinterpret_cast<const char *>(feats.data + c);
            Words words[FG_CORNERS];
            float weight[FG_CORNERS], sum[kVector] = {};
#pragma unroll
            for (int k = 0; k < FG_CORNERS; ++k) {
                const Corner term = terms[k][at];
                const int64_t row = static_cast<uint32_t>(term.row);
                weight[k] = term.weight;
                if (k < here) words[k] = *reinterpret_cast<const Words *>(column + row * pitch);
            }
#pragma unroll
            for (int k = 0; k < FG_CORNERS; ++k) {
                if (k >= here) break;
                Vector<T, kVector> piece;
                memcpy(&piece, &words[k], sizeof piece);
#pragma unroll
                for (int i = 0; i < kVector; ++i) sum[i] = fmaf(weight[k], to_float(piece.element[i]), sum[i]);
            }
            store_piece(out.row(first + at) + c, sum);
        }
    }
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

fg_status sample_map_workspace(const fg_sample_map_params *p, const fg_queue *, size_t *bytes, fg_error *) {
    *bytes = p->indices.shape[0] == 0 ? 0 : cell_hash_bytes(p->coords.shape[0], p->shape);
    return FG_OK;
}

fg_status sample_map(const fg_sample_map_params *p, const fg_queue *queue, fg_error *error) {
    const int64_t count = p->indices.shape[0];
    if (count == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    unsigned int blocks = 0;
    const fg_status status = grid_for(count, kThreads, "grid", &blocks, error);
    if (status != FG_OK) return status;
    const cudaStream_t stream = stream_of(queue);
    const fg_points points = fg_points_of(&p->grid);
    int32_t *const indices = static_cast<int32_t *>(p->indices.data);
    const bool aligned = is_aligned(p->indices, 16) && is_aligned(p->weights, 16);
    return with_voxels(*p, stream, error, [&](const auto &voxels) {
        using Cell = typename std::decay_t<decltype(voxels)>::Number;
        if (p->weights.present)
            trilinear_kernel<Cell><<<blocks, kThreads, 0, stream>>>(points, count, voxels, indices,
                                                                    static_cast<float *>(p->weights.data), aligned);
        else
            nearest_kernel<Cell><<<blocks, kThreads, 0, stream>>>(points, count, voxels, indices);
    });
}

fg_status sample_forward_workspace(const fg_sample_forward_params *p, const fg_queue *, size_t *bytes, fg_error *) {
    *bytes = p->out.shape[0] == 0 || p->out.shape[1] == 0 ? 0 : cell_hash_bytes(p->coords.shape[0], p->shape);
    return FG_OK;
}

fg_status sample_forward(const fg_sample_forward_params *p, const fg_queue *queue, fg_error *error) {
    if (p->out.shape[0] == 0 || p->out.shape[1] == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    unsigned int blocks = 0;
    const fg_status status = grid_for(p->out.shape[0], kSampleThreads, "grid", &blocks, error);
    if (status != FG_OK) return status;
    const cudaStream_t stream = stream_of(queue);
    const bool aligned = is_aligned(p->feats, 16) && is_aligned(p->out, 16);
    return dispatch_rows(p->feats.dtype, aligned, [&](auto *element, auto vector) -> fg_status {
        using T = std::remove_pointer_t<decltype(element)>;
        return with_voxels(*p, stream, error, [&](const auto &voxels) {
            using Cell = typename std::decay_t<decltype(voxels)>::Number;
            sample_kernel<Cell, T, vector()><<<blocks, kSampleThreads, 0, stream>>>(
                fg_points_of(&p->grid), voxels, RowsOf<const T>(p->feats), RowsOf<T>(p->out));
        });
    });
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
