/*
 * Output sites of a sparse convolution: every site that a voxel reaches, once, in the order of its code.
 *
 * Each voxel lists the codes of the sites that it reaches, or a code above all others where a kernel position leads
 * nowhere; CUB sorts them by the bits that they have and keeps the first of equal ones. How many there are is known to
 * the device: the caller, who wants an array of that size, waits for `count`.
 *
 * Workspace: codes as they were sorted (N * per_voxel) | what CUB needs
 */
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_select.cuh>
#include <cub/version.cuh>

#include "../plan.h"
#include "../sequence.h"
#include "backend.cuh"
#include "common.cuh"
#include "coords.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256;

struct Axis {
    int32_t kernel, stride, dilation, padding, taps, step;
    int64_t extent; /* of the sites */

    /* The site to which tap 0, 1, ... of the voxel at c leads; -1 for none. */
    __device__ int32_t convolution(int32_t c, int tap) const {
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
    __device__ int32_t transposed(int32_t c, int tap) const {
        return inside(static_cast<int64_t>(c) * stride + static_cast<int64_t>(tap) * dilation - padding);
    }
    __device__ int32_t inside(int64_t site) const {
        return site >= 0 && site < extent && site <= INT32_MAX ? static_cast<int32_t>(site) : -1;
    }
};

struct Reach {
    Axis axes[3];
    fg_curve grid, codes; /* of the voxels; of the sites */
    bool transposed;
    int bits; /* of a code; `nowhere` has one more */

    explicit Reach(const fg_conv_sites_params *p)
        : grid(fg_make_curve(FG_BXYZ, p->shape)),
          codes(fg_make_curve(p->mode, p->code_shape)),
          transposed(p->transposed),
          bits(fg_sequence_bits(p->mode, p->code_shape)) {
        const fg_sites_plan plan = fg_plan_conv_sites(p->kernel, p->stride, p->dilation, p->transposed);
        for (int i = 0; i < 3; ++i)
            axes[i] = {p->kernel[i], p->stride[i], p->dilation[i],     static_cast<int32_t>(p->padding[i]),
                       plan.taps[i], plan.step[i], p->out_shape[i + 1]};
    }

    __device__ int32_t site(int32_t c, int axis, int tap) const {
        return transposed ? axes[axis].transposed(c, tap) : axes[axis].convolution(c, tap);
    }
    uint64_t nowhere() const { return uint64_t{1} << bits; }
};

/* One thread finds the sites of one voxel along z at one (x, y). Threads of a voxel are neighbours. */
__global__ void __launch_bounds__(kThreads)
    reach_kernel(Coords coords, const Reach reach, uint64_t nowhere, uint64_t *code) {
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int lines = reach.axes[0].taps * reach.axes[1].taps, depth = reach.axes[2].taps;
    const int64_t n = thread / lines;
    const int line = static_cast<int>(thread % lines);
    if (n >= coords.count) return;
    const int4 row = coords[n];
    const int32_t voxel[4] = {row.x, row.y, row.z, row.w};
    const bool inside = fg_coord_inside(voxel, reach.grid.shape);
    int32_t site[4] = {row.x, reach.site(row.y, 0, line / reach.axes[1].taps),
                       reach.site(row.z, 1, line % reach.axes[1].taps), 0};
    for (int tap = 0; tap < depth; ++tap) {
        site[3] = reach.site(row.w, 2, tap);
        const bool exists = inside && site[1] >= 0 && site[2] >= 0 && site[3] >= 0;
        code[thread * depth + tap] = exists ? fg_encode(&reach.codes, site) : nowhere;
    }
}

/* The last of the distinct codes may be that of no site. */
__global__ void drop_nowhere_kernel(const uint64_t *code, uint64_t nowhere, int64_t *count) {
    if (*count > 0 && code[*count - 1] == nowhere) --*count;
}

/* With temporary == NULL these only tell the bytes that they need there. */
cudaError_t sort(void *temporary, size_t *bytes, const uint64_t *code, uint64_t *sorted, int64_t count, int bits,
                 cudaStream_t stream) {
    return cub::DeviceRadixSort::SortKeys(temporary, *bytes, code, sorted, count, 0, bits, stream);
}
cudaError_t keep_first(void *temporary, size_t *bytes, const uint64_t *sorted, uint64_t *code, int64_t *kept,
                       int64_t count, cudaStream_t stream) {
    return cub::DeviceSelect::Unique(temporary, *bytes, sorted, code, kept, count, stream);
}

struct Workspace {
    size_t code_bytes = 0, sort_bytes = 0, keep_bytes = 0;

    size_t total() const { return code_bytes + (sort_bytes > keep_bytes ? sort_bytes : keep_bytes); }
};

fg_status plan_workspace(int64_t count, int bits, cudaStream_t stream, Workspace *workspace, fg_error *error) {
    if (CUB_VERSION < 200802 && count > INT32_MAX) /* counts in 32 bits there, before CUDA 12.9 */
        return fg_fail(error, FG_ERROR_VALUE,
                       "coords: expected to reach at most %d sites in a build by CUDA before 12.9, "
                       "each counted as often as it is reached, got %lld",
                       INT32_MAX, static_cast<long long>(count));
    workspace->code_bytes = ceil_div<size_t>(static_cast<size_t>(count) * sizeof(uint64_t), 256) * 256;
    FG_CUDA(sort(nullptr, &workspace->sort_bytes, nullptr, nullptr, count, bits, stream));
    FG_CUDA(keep_first(nullptr, &workspace->keep_bytes, nullptr, nullptr, nullptr, count, stream));
    return FG_OK;
}

}  // namespace

fg_status conv_sites_workspace(const fg_conv_sites_params *p, const fg_queue *queue, size_t *bytes, fg_error *error) {
    *bytes = 0;
    if (p->code.shape[0] == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    Workspace workspace;
    const fg_status status = plan_workspace(p->code.shape[0], Reach(p).bits + 1, stream_of(queue), &workspace, error);
    *bytes = workspace.total();
    return status;
}

fg_status conv_sites(const fg_conv_sites_params *p, const fg_queue *queue, fg_error *error) {
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const cudaStream_t stream = stream_of(queue);
    const int64_t count = p->code.shape[0];
    uint64_t *code = static_cast<uint64_t *>(p->code.data);
    int64_t *kept = static_cast<int64_t *>(p->count.data);
    if (count == 0) {
        FG_CUDA(cudaMemsetAsync(kept, 0, sizeof(int64_t), stream));
        return FG_OK;
    }
    const Reach reach(p);
    const int bits = reach.bits + 1;
    Workspace workspace;
    fg_status status = plan_workspace(count, bits, stream, &workspace, error);
    if (status != FG_OK) return status;
    uint64_t *sorted = static_cast<uint64_t *>(p->workspace.data);
    void *temporary = static_cast<char *>(p->workspace.data) + workspace.code_bytes;

    unsigned int blocks = 0;
    status = grid_for(count / reach.axes[2].taps, kThreads, "coords", &blocks, error);
    if (status != FG_OK) return status;
    reach_kernel<<<blocks, kThreads, 0, stream>>>(Coords(p->coords), reach, reach.nowhere(), code);
    FG_CUDA(cudaGetLastError());
    FG_CUDA(sort(temporary, &workspace.sort_bytes, code, sorted, count, bits, stream));
    FG_CUDA(keep_first(temporary, &workspace.keep_bytes, sorted, code, kept, count, stream));
    drop_nowhere_kernel<<<1, 1, 0, stream>>>(code, reach.nowhere(), kept);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

}  // namespace flexgemm
