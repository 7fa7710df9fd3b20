/*
 * Neighbour map of a submanifold convolution: map[v, n] = row of the voxel at coords[n] + offset(v), or -1.
 *
 * A voxel is one 64-bit number, ((b * W + x) * H + y) * D + z. One kernel puts all rows into a hash table in the
 * caller's workspace, one looks up every (row, offset) pair. Every pair is looked up: the map of an odd kernel is its
 * own mirror image only while no voxel occurs twice, which nobody has checked.
 *
 * Nothing here waits for the device except check = true, which reads back what is wrong before it raises.
 */
#include "backend.cuh"
#include "common.cuh"
#include "hash.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256;
constexpr unsigned long long kNothing = ~0ull;

struct VoxelGrid {
    int64_t batch, width, height, depth;

    __device__ bool contains(int4 c) const {
        return c.x >= 0 && c.x < batch && c.y >= 0 && c.y < width && c.z >= 0 && c.z < height && c.w >= 0 &&
               c.w < depth;
    }
    /* Key of the first voxel of a column along z. */
    __device__ uint64_t column(int64_t b, int64_t x, int64_t y) const {
        return static_cast<uint64_t>(((b * width + x) * height + y) * depth);
    }
};

/* First offenders, as unsigned numbers that atomicMin can lower. */
struct Report {
    unsigned long long outside;   /* row */
    unsigned long long duplicate; /* later row in the high half, the row it repeats in the low half */
};

struct Rows {
    const int32_t *coords;
    int64_t count;
    bool aligned; /* rows may be read as int4 */

    __device__ int4 operator[](int64_t n) const {
        if (aligned) return reinterpret_cast<const int4 *>(coords)[n];
        const int32_t *c = coords + 4 * n;
        return make_int4(c[0], c[1], c[2], c[3]);
    }
};

__global__ void __launch_bounds__(kThreads) insert_kernel(Rows rows, VoxelGrid grid, HashTable table, Report *report) {
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (n >= rows.count) return;
    const int4 c = rows[n];
    if (grid.contains(c)) {
        table.insert(grid.column(c.x, c.y, c.z) + c.w, static_cast<unsigned int>(n));
    } else if (report) {
        atomicMin(&report->outside, static_cast<unsigned long long>(n));
    }
}

__global__ void __launch_bounds__(kThreads)
    find_duplicates_kernel(Rows rows, VoxelGrid grid, HashTable table, Report *report) {
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (n >= rows.count) return;
    const int4 c = rows[n];
    if (!grid.contains(c)) return;
    const int64_t first = table.find(grid.column(c.x, c.y, c.z) + c.w);
    if (first != n) atomicMin(&report->duplicate, static_cast<unsigned long long>(n << 32 | first));
}

/* Displacement along one axis of the first kernel element and from one element to the next. */
struct Axis {
    int32_t size;
    int64_t start, step;
};

/* One thread walks the Kd offsets along z of one row at one (kx, ky) = blockIdx.y. */
__global__ void __launch_bounds__(kThreads)
    lookup_kernel(Rows rows, VoxelGrid grid, HashTable table, Axis ax, Axis ay, Axis az, int32_t *map) {
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (n >= rows.count) return;
    const int kx = blockIdx.y / ay.size, ky = blockIdx.y % ay.size;
    const int4 c = rows[n];
    const int64_t x = c.y + ax.start + kx * ax.step, y = c.z + ay.start + ky * ay.step;
    const bool inside = grid.contains(c) && x >= 0 && x < grid.width && y >= 0 && y < grid.height;
    const uint64_t column = grid.column(c.x, x, y);
    int64_t z = c.w + az.start;
    int32_t *entry = map + static_cast<int64_t>(blockIdx.y) * az.size * rows.count + n;
    for (int kz = 0; kz < az.size; ++kz) {
        *entry = inside && z >= 0 && z < grid.depth ? table.find(column + z) : -1;
        entry += rows.count;
        z += az.step;
    }
}

Axis make_axis(const fg_neighbor_map_params *p, int axis) {
    const int64_t sign = p->transposed ? -1 : 1;
    const int64_t step = sign * p->dilation[axis];
    return {p->kernel[axis], -(p->kernel[axis] / 2) * step, step};
}

/* Reads the report back (the one wait) and names the first offender. */
fg_status check_report(const fg_neighbor_map_params *p, const Report *report, cudaStream_t stream, fg_error *error) {
    Report found;
    FG_CUDA(cudaMemcpyAsync(&found, report, sizeof found, cudaMemcpyDeviceToHost, stream));
    FG_CUDA(cudaStreamSynchronize(stream));
    if (found.outside != kNothing)
        return fg_fail(error, FG_ERROR_VALUE, "coords: row %lld lies outside shape (%lld, %lld, %lld, %lld)",
                       static_cast<long long>(found.outside), static_cast<long long>(p->shape[0]),
                       static_cast<long long>(p->shape[1]), static_cast<long long>(p->shape[2]),
                       static_cast<long long>(p->shape[3]));
    if (found.duplicate != kNothing)
        return fg_fail(error, FG_ERROR_VALUE, "coords: rows %lld and %lld are the same voxel",
                       static_cast<long long>(found.duplicate & 0xffffffffu),
                       static_cast<long long>(found.duplicate >> 32));
    return FG_OK;
}

constexpr size_t kReportBytes = 256; /* keeps the table 256-byte aligned */

}  // namespace

fg_status neighbor_map_workspace(const fg_neighbor_map_params *p, const fg_queue *, size_t *bytes, fg_error *) {
    const int64_t count = p->coords.shape[0];
    *bytes = count == 0 ? 0 : kReportBytes + HashTable::capacity_for(count) * HashTable::kBytesPerSlot;
    return FG_OK;
}

fg_status neighbor_map(const fg_neighbor_map_params *p, const fg_queue *queue, fg_error *error) {
    const int64_t count = p->coords.shape[0];
    if (count == 0) return FG_OK;
    if (count > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "coords: expected at most %lld rows, which int32 can number, got %lld",
                       static_cast<long long>(INT32_MAX), static_cast<long long>(count));
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const cudaStream_t stream = stream_of(queue);

    const uint64_t capacity = HashTable::capacity_for(count);
    char *workspace = static_cast<char *>(p->workspace.data);
    Report *report = reinterpret_cast<Report *>(workspace);
    HashTable table;
    table.keys = reinterpret_cast<unsigned long long *>(workspace + kReportBytes);
    table.rows = reinterpret_cast<unsigned int *>(table.keys + capacity);
    table.mask = capacity - 1;
    FG_CUDA(cudaMemsetAsync(workspace, 0xFF, kReportBytes + capacity * HashTable::kBytesPerSlot, stream));

    const int32_t *coords = static_cast<const int32_t *>(p->coords.data);
    const Rows rows = {coords, count, reinterpret_cast<uintptr_t>(coords) % sizeof(int4) == 0};
    const VoxelGrid grid = {p->shape[0], p->shape[1], p->shape[2], p->shape[3]};
    const unsigned int blocks = static_cast<unsigned int>(ceil_div<int64_t>(count, kThreads));
    insert_kernel<<<blocks, kThreads, 0, stream>>>(rows, grid, table, p->check ? report : nullptr);
    FG_CUDA(cudaGetLastError());
    if (p->check) {
        find_duplicates_kernel<<<blocks, kThreads, 0, stream>>>(rows, grid, table, report);
        FG_CUDA(cudaGetLastError());
        const fg_status status = check_report(p, report, stream, error);
        if (status != FG_OK) return status;
    }
    const Axis ax = make_axis(p, 0), ay = make_axis(p, 1), az = make_axis(p, 2);
    const dim3 pairs(blocks, static_cast<unsigned int>(ax.size * ay.size));
    lookup_kernel<<<pairs, kThreads, 0, stream>>>(rows, grid, table, ax, ay, az, static_cast<int32_t *>(p->map.data));
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

}  // namespace flexgemm
