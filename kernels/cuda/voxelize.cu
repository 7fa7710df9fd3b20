/*
 * From points to voxels: the code of the voxel around each point, and the distinct ones among sorted codes. CUB's scan
 * numbers them; how many there are is known to the device, and the caller waits for that one number.
 */
#include <cub/device/device_scan.cuh>

#include "../place.h"
#include "backend.cuh"
#include "common.cuh"
#include "voxel_number.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256;

__device__ int64_t thread_number() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

/* ---- codes ---- */

template <class Code>
struct Raster {
    float voxel_size[3], origin[3];
    fg_curve curve;
    VoxelNumbers<Code> number;

    explicit Raster(const fg_voxel_codes_params &p) : curve(fg_make_curve(FG_BXYZ, p.shape)), number(p.shape) {
        for (int axis = 0; axis < 3; ++axis) {
            voxel_size[axis] = p.voxel_size[axis];
            origin[axis] = p.origin[axis];
        }
    }
};

template <class Code>
__global__ void __launch_bounds__(kThreads)
    code_kernel(const float *points, int64_t count, bool batched, Raster<Code> raster, Code *code, float *places) {
    const int64_t n = thread_number();
    if (n >= count) return;
    const float *row = points + n * (batched ? 4 : 3);
    const float batch = batched ? row[0] : 0.0f;
    const float point[3] = {row[batched], row[batched + 1], row[batched + 2]};
    float place[3];
    int32_t coord[4];
    const bool inside = fg_find_voxel(&raster.curve, batch, point, raster.voxel_size, raster.origin, place, coord);
    code[n] = inside ? raster.number(make_int4(coord[0], coord[1], coord[2], coord[3])) : ~Code{0};
    if (places == nullptr) return;
    places[4 * n] = batch;
    for (int axis = 0; axis < 3; ++axis) places[4 * n + axis + 1] = place[axis];
}

/* ---- distinct keys ---- */

template <class Key>
__global__ void __launch_bounds__(kThreads) flag_kernel(const Key *sorted, int64_t count, int32_t *flags) {
    const int64_t i = thread_number();
    if (i >= count) return;
    const Key key = sorted[i];
    flags[i] = key != ~Key{0} && (i == 0 || key != sorted[i - 1]) ? 1 : 0;
}

/* With temporary == NULL it only tells the bytes that it needs there. */
cudaError_t scan(void *temporary, size_t *bytes, int32_t *flags, int64_t count, cudaStream_t stream) {
    return cub::DeviceScan::InclusiveSum(temporary, *bytes, flags, flags, static_cast<int>(count), stream);
}

/* Ranks and order are not trusted: what does not fit is left out. */
template <class Key>
__global__ void __launch_bounds__(kThreads)
    group_kernel(const Key *sorted, const int32_t *order, const int32_t *ranks, int64_t count, int64_t groups,
                 Key *keys, int32_t *starts, int32_t *first, int32_t *inverse) {
    const int64_t i = thread_number();
    if (i >= count) return;
    const Key key = sorted[i];
    const bool some = key != ~Key{0};
    const int32_t rank = ranks[i] - 1, row = order[i];
    if (row >= 0 && row < count) inverse[row] = some ? rank : -1;
    if (!some || rank < 0 || rank >= groups) return;
    if (i == 0 || ranks[i - 1] <= rank) {
        keys[rank] = key;
        starts[rank] = static_cast<int32_t>(i);
        first[rank] = row;
    }
    if (i + 1 == count || sorted[i + 1] == ~Key{0}) starts[groups] = static_cast<int32_t>(i + 1);
}

__global__ void __launch_bounds__(kThreads) count_kernel(const int32_t *starts, int64_t groups, int32_t *counts) {
    const int64_t group = thread_number();
    if (group < groups) counts[group] = starts[group + 1] - starts[group];
}

unsigned int blocks_for(int64_t count) { return static_cast<unsigned int>(ceil_div<int64_t>(count, kThreads)); }

template <class Key>
fg_status write_groups(const fg_unique_groups_params &p, cudaStream_t stream, fg_error *error) {
    const int64_t count = p.sorted.shape[0], groups = p.keys.shape[0];
    int32_t *starts = static_cast<int32_t *>(p.starts.data);
    group_kernel<Key><<<blocks_for(count), kThreads, 0, stream>>>(
        static_cast<const Key *>(p.sorted.data), static_cast<const int32_t *>(p.order.data),
        static_cast<const int32_t *>(p.ranks.data), count, groups, static_cast<Key *>(p.keys.data), starts,
        static_cast<int32_t *>(p.first.data), static_cast<int32_t *>(p.inverse.data));
    FG_CUDA(cudaGetLastError());
    if (groups == 0) return FG_OK;
    count_kernel<<<blocks_for(groups), kThreads, 0, stream>>>(starts, groups, static_cast<int32_t *>(p.counts.data));
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

}  // namespace

fg_status voxel_codes(const fg_voxel_codes_params *p, const fg_queue *queue, fg_error *error) {
    const int64_t count = p->points.shape[0];
    if (count == 0) return FG_OK;
    unsigned int blocks = 0;
    const fg_status status = grid_for(count, kThreads, "points", &blocks, error);
    if (status != FG_OK) return status;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const float *points = static_cast<const float *>(p->points.data);
    float *places = static_cast<float *>(p->places.data);
    const bool batched = p->points.shape[1] == 4;
    if (p->code.dtype == FG_INT32)
        code_kernel<uint32_t><<<blocks, kThreads, 0, stream_of(queue)>>>(points, count, batched, Raster<uint32_t>(*p),
                                                                         static_cast<uint32_t *>(p->code.data), places);
    else
        code_kernel<uint64_t><<<blocks, kThreads, 0, stream_of(queue)>>>(points, count, batched, Raster<uint64_t>(*p),
                                                                         static_cast<uint64_t *>(p->code.data), places);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

fg_status unique_ranks_workspace(const fg_unique_ranks_params *p, const fg_queue *queue, size_t *bytes,
                                 fg_error *error) {
    *bytes = 0;
    if (p->sorted.shape[0] == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    FG_CUDA(scan(nullptr, bytes, static_cast<int32_t *>(p->ranks.data), p->sorted.shape[0], stream_of(queue)));
    return FG_OK;
}

fg_status unique_ranks(const fg_unique_ranks_params *p, const fg_queue *queue, fg_error *error) {
    const int64_t count = p->sorted.shape[0];
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const cudaStream_t stream = stream_of(queue);
    if (count == 0) {
        FG_CUDA(cudaMemsetAsync(p->count.data, 0, sizeof(int32_t), stream));
        return FG_OK;
    }
    int32_t *ranks = static_cast<int32_t *>(p->ranks.data);
    if (p->sorted.dtype == FG_INT32)
        flag_kernel<uint32_t>
            <<<blocks_for(count), kThreads, 0, stream>>>(static_cast<const uint32_t *>(p->sorted.data), count, ranks);
    else
        flag_kernel<uint64_t>
            <<<blocks_for(count), kThreads, 0, stream>>>(static_cast<const uint64_t *>(p->sorted.data), count, ranks);
    FG_CUDA(cudaGetLastError());
    size_t bytes = 0;
    FG_CUDA(scan(nullptr, &bytes, ranks, count, stream));
    FG_CUDA(scan(p->workspace.data, &bytes, ranks, count, stream));
    FG_CUDA(cudaMemcpyAsync(p->count.data, ranks + count - 1, sizeof(int32_t), cudaMemcpyDeviceToDevice, stream));
    return FG_OK;
}

fg_status unique_groups(const fg_unique_groups_params *p, const fg_queue *queue, fg_error *error) {
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    FG_CUDA(cudaMemsetAsync(p->starts.data, 0, static_cast<size_t>(p->starts.shape[0]) * sizeof(int32_t),
                            stream_of(queue)));
    if (p->sorted.shape[0] == 0) return FG_OK;
    return p->sorted.dtype == FG_INT32 ? write_groups<uint32_t>(*p, stream_of(queue), error)
                                       : write_groups<uint64_t>(*p, stream_of(queue), error);
}

}  // namespace flexgemm
