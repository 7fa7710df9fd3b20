/*
 * Output sites of a sparse convolution: every site that a voxel reaches, once, in the order of its number
 * ((b * W + x) * H + y) * D + z.
 *
 * Each voxel writes the numbers of the sites that it reaches, or the number of cells where a kernel position leads
 * nowhere; CUB sorts them by the bits that they have and keeps the first of equal ones. How many there are is known to
 * the device: the caller, who wants an array of that size, waits for `count`.
 *
 * Workspace: numbers as they were sorted (N * per_voxel) | what CUB needs
 */
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_select.cuh>

#include "../plan.h"
#include "backend.cuh"
#include "common.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256;

struct Axis {
    int32_t kernel, stride, dilation, padding, taps, step;
    int64_t extent;     /* of the sites */
    uint32_t in_extent; /* of the voxels */

    /* The site to which tap 0, 1, ... of the voxel at c leads; -1 for none. */
    __device__ int64_t convolution(int32_t c, int tap) const {
        const int64_t from = static_cast<int64_t>(c) + padding; /* below 2^32 */
        for (int k = 0; k < step && k < kernel; ++k) {
            const int64_t first = from - static_cast<int64_t>(k) * dilation;
            if (first < 0) return -1;
            if (static_cast<uint32_t>(first) % stride != 0) continue;
            const int64_t at = first - static_cast<int64_t>(tap * step) * dilation;
            return k + tap * step < kernel && at >= 0 ? inside(static_cast<uint32_t>(at) / stride) : -1;
        }
        return -1;
    }
    __device__ int64_t transposed(int32_t c, int tap) const {
        return inside(static_cast<int64_t>(c) * stride + static_cast<int64_t>(tap) * dilation - padding);
    }
    __device__ int64_t inside(int64_t site) const {
        return site >= 0 && site < extent && site <= INT32_MAX ? site : -1;
    }
};

struct Reach {
    Axis axes[3];
    uint32_t batch;
    bool transposed;
    int64_t cells; /* the number of no site */

    Reach(const fg_conv_sites_params *p, const fg_sites_plan &plan) : transposed(p->transposed), cells(1) {
        const auto clip = [](int64_t extent) { return static_cast<uint32_t>(extent < 1ll << 31 ? extent : 1ll << 31); };
        for (int i = 0; i < 4; ++i) cells *= p->out_shape[i];
        for (int i = 0; i < 3; ++i)
            axes[i] = {p->kernel[i], p->stride[i], p->dilation[i],      static_cast<int32_t>(p->padding[i]),
                       plan.taps[i], plan.step[i], p->out_shape[i + 1], clip(p->shape[i + 1])};
        batch = clip(p->shape[0]);
    }

    __device__ bool contains(const int32_t *c) const {
        return static_cast<uint32_t>(c[0]) < batch && static_cast<uint32_t>(c[1]) < axes[0].in_extent &&
               static_cast<uint32_t>(c[2]) < axes[1].in_extent && static_cast<uint32_t>(c[3]) < axes[2].in_extent;
    }
    __device__ int64_t site(int32_t c, int axis, int tap) const {
        return transposed ? axes[axis].transposed(c, tap) : axes[axis].convolution(c, tap);
    }
};

/* One thread finds the sites of one voxel along z at one (x, y). Threads of a voxel are neighbours. */
__global__ void __launch_bounds__(kThreads)
    reach_kernel(const int32_t *coords, int64_t count, const Reach reach, int64_t *keys) {
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int lines = reach.axes[0].taps * reach.axes[1].taps, depth = reach.axes[2].taps;
    const int64_t n = thread / lines;
    const int line = static_cast<int>(thread % lines);
    if (n >= count) return;
    const int32_t *c = coords + 4 * n;
    const bool inside = reach.contains(c);
    const int64_t x = reach.site(c[1], 0, line / reach.axes[1].taps);
    const int64_t y = reach.site(c[2], 1, line % reach.axes[1].taps);
    int64_t *key = keys + thread * depth;
    for (int tap = 0; tap < depth; ++tap) {
        const int64_t z = reach.site(c[3], 2, tap);
        const bool exists = inside && x >= 0 && y >= 0 && z >= 0;
        key[tap] = exists ? ((c[0] * reach.axes[0].extent + x) * reach.axes[1].extent + y) * reach.axes[2].extent + z
                          : reach.cells;
    }
}

/* The last of the distinct numbers may be that of no site. */
__global__ void drop_nowhere_kernel(const int64_t *keys, int64_t cells, int64_t *count) {
    if (*count > 0 && keys[*count - 1] == cells) --*count;
}

__global__ void __launch_bounds__(kThreads)
    coords_kernel(const int64_t *keys, int64_t count, int64_t width, int64_t height, int64_t depth, int32_t *coords) {
    const int64_t m = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (m >= count) return;
    const int64_t column = keys[m] / depth, plane = column / height, sample = plane / width;
    int32_t *c = coords + 4 * m;
    c[0] = static_cast<int32_t>(sample);
    c[1] = static_cast<int32_t>(plane - sample * width);
    c[2] = static_cast<int32_t>(column - plane * height);
    c[3] = static_cast<int32_t>(keys[m] - column * depth);
}

int bits_of(int64_t cells) {
    int bits = 0;
    for (; cells > 0; cells /= 2) ++bits;
    return bits;
}

/* With temporary == NULL these only tell the bytes that they need there. */
cudaError_t sort(void *temporary, size_t *bytes, const int64_t *keys, int64_t *sorted, int64_t count, int bits,
                 cudaStream_t stream) {
    return cub::DeviceRadixSort::SortKeys(temporary, *bytes, keys, sorted, count, 0, bits, stream);
}
cudaError_t keep_first(void *temporary, size_t *bytes, const int64_t *sorted, int64_t *keys, int64_t *kept,
                       int64_t count, cudaStream_t stream) {
    return cub::DeviceSelect::Unique(temporary, *bytes, sorted, keys, kept, count, stream);
}

struct Workspace {
    size_t sort_bytes = 0, keep_bytes = 0, keys_bytes = 0;

    size_t total() const { return keys_bytes + (sort_bytes > keep_bytes ? sort_bytes : keep_bytes); }
};

fg_status plan_workspace(const fg_conv_sites_params *p, int bits, cudaStream_t stream, Workspace *workspace,
                         fg_error *error) {
    const int64_t count = p->keys.shape[0];
    FG_CUDA(sort(nullptr, &workspace->sort_bytes, nullptr, nullptr, count, bits, stream));
    FG_CUDA(keep_first(nullptr, &workspace->keep_bytes, nullptr, nullptr, nullptr, count, stream));
    workspace->keys_bytes = ceil_div<size_t>(static_cast<size_t>(count) * sizeof(int64_t), 256) * 256;
    return FG_OK;
}

fg_status too_many_blocks(const char *name, int64_t rows, fg_error *error) {
    return fg_fail(error, FG_ERROR_VALUE, "%s: %lld rows need more blocks than one launch can have", name,
                   static_cast<long long>(rows));
}

}  // namespace

fg_status conv_sites_workspace(const fg_conv_sites_params *p, const fg_queue *queue, size_t *bytes, fg_error *error) {
    *bytes = 0;
    if (p->keys.shape[0] == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const fg_sites_plan plan = fg_plan_conv_sites(p->kernel, p->stride, p->dilation, p->transposed);
    Workspace workspace;
    const fg_status status = plan_workspace(p, bits_of(Reach(p, plan).cells), stream_of(queue), &workspace, error);
    *bytes = workspace.total();
    return status;
}

fg_status conv_sites(const fg_conv_sites_params *p, const fg_queue *queue, fg_error *error) {
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const cudaStream_t stream = stream_of(queue);
    const int64_t rows = p->coords.shape[0], count = p->keys.shape[0];
    int64_t *keys = static_cast<int64_t *>(p->keys.data), *kept = static_cast<int64_t *>(p->count.data);
    if (count == 0) {
        FG_CUDA(cudaMemsetAsync(kept, 0, sizeof(int64_t), stream));
        return FG_OK;
    }
    const fg_sites_plan plan = fg_plan_conv_sites(p->kernel, p->stride, p->dilation, p->transposed);
    const Reach reach(p, plan);
    const int bits = bits_of(reach.cells);
    Workspace workspace;
    const fg_status status = plan_workspace(p, bits, stream, &workspace, error);
    if (status != FG_OK) return status;
    int64_t *sorted = static_cast<int64_t *>(p->workspace.data);
    void *temporary = static_cast<char *>(p->workspace.data) + workspace.keys_bytes;

    const int64_t blocks = ceil_div<int64_t>(rows * plan.taps[0] * plan.taps[1], kThreads);
    if (blocks > INT32_MAX) return too_many_blocks("coords", rows, error);
    reach_kernel<<<static_cast<unsigned int>(blocks), kThreads, 0, stream>>>(
        static_cast<const int32_t *>(p->coords.data), rows, reach, keys);
    FG_CUDA(cudaGetLastError());
    FG_CUDA(sort(temporary, &workspace.sort_bytes, keys, sorted, count, bits, stream));
    FG_CUDA(keep_first(temporary, &workspace.keep_bytes, sorted, keys, kept, count, stream));
    drop_nowhere_kernel<<<1, 1, 0, stream>>>(keys, reach.cells, kept);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

fg_status site_coords_workspace(const fg_site_coords_params *, const fg_queue *, size_t *bytes, fg_error *) {
    *bytes = 0;
    return FG_OK;
}

fg_status site_coords(const fg_site_coords_params *p, const fg_queue *queue, fg_error *error) {
    const int64_t count = p->coords.shape[0];
    if (count == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const int64_t blocks = ceil_div<int64_t>(count, kThreads);
    if (blocks > INT32_MAX) return too_many_blocks("coords", count, error);
    coords_kernel<<<static_cast<unsigned int>(blocks), kThreads, 0, stream_of(queue)>>>(
        static_cast<const int64_t *>(p->keys.data), count, p->shape[1], p->shape[2], p->shape[3],
        static_cast<int32_t *>(p->coords.data));
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

}  // namespace flexgemm
