/*
 * Neighbour map of a sparse convolution: map[v, m] = row of the voxel that query m reads at offset v, or -1.
 *
 * Columns of voxels are cut into runs along z, and runs are numbered: ((b * W + x) * H + y) * ceil(D / 8) + z / 8. One
 * kernel puts all rows into a hash table of runs in the caller's workspace, one looks up every (query, offset) pair.
 * Every pair is looked up: the map of an odd submanifold kernel is its own mirror image only while no voxel occurs
 * twice, which nobody has checked.
 *
 * Nothing here waits for the device except check = true, which reads back what is wrong before it raises.
 */
#include "backend.cuh"
#include "common.cuh"
#include "coords.cuh"
#include "hash.cuh"
#include "voxel_number.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxKernel = 7; /* voxels along one axis */
constexpr unsigned long long kNothing = ~0ull;

/* With extents below 2^31 a voxel's number is unique all the same. */
struct VoxelGrid : VoxelBounds {
    using VoxelBounds::VoxelBounds;

    __host__ __device__ uint32_t runs_of_column() const { return (depth + kRunVoxels - 1) / kRunVoxels; }

    /* The first run of a column along z; the voxel at z lies in the run z / kRunVoxels further. */
    template <class Run>
    __device__ Run column(uint32_t b, uint32_t x, uint32_t y) const {
        return ((static_cast<Run>(b) * width + x) * height + y) * runs_of_column();
    }
};

/* Whether runs can be numbered, and an empty slot told from them, in 32 bits. */
bool runs_fit_32_bits(const int64_t (&shape)[4]) {
    const VoxelGrid grid(shape);
    return static_cast<double>(grid.batch) * grid.width * grid.height * grid.runs_of_column() < 4e9;
}

/* First offenders, as unsigned numbers that atomicMin can lower. */
struct Report {
    unsigned long long outside;   /* row */
    unsigned long long duplicate; /* later row in the high half, the row it repeats in the low half */
};

/* Lanes with the same run as the lane before them leave the claim to the first of them. */
template <class Run>
__global__ void __launch_bounds__(kThreads)
    insert_kernel(Coords rows, VoxelGrid grid, HashTable<Run> table, Report *report) {
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int lane = threadIdx.x % 32;
    const int4 c = n < rows.count ? rows[n] : make_int4(-1, -1, -1, -1);
    const bool inside = grid.contain(c);
    if (n < rows.count && !inside && report) atomicMin(&report->outside, static_cast<unsigned long long>(n));

    const Run run = inside ? grid.column<Run>(c.x, c.y, c.z) + c.w / kRunVoxels : table.kEmpty;
    const Run run_before = __shfl_up_sync(~0u, run, 1);
    const bool first = lane == 0 || run != run_before;
    const uint32_t slot = first && inside ? table.claim(run) : 0;
    const unsigned int firsts = __ballot_sync(~0u, first);
    const int claimer = 31 - __clz(firsts & (~0u >> (31 - lane)));
    const uint32_t claimed = __shfl_sync(~0u, slot, claimer);
    if (inside) table.insert(claimed, c.w % kRunVoxels, static_cast<int32_t>(n));
}

template <class Run>
__global__ void __launch_bounds__(kThreads)
    find_duplicates_kernel(Coords rows, VoxelGrid grid, HashTable<Run> table, Report *report) {
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (n >= rows.count) return;
    const int4 c = rows[n];
    if (!grid.contain(c)) return;
    /* All rows are in the table. */
    const int64_t first = table.find(grid.column<Run>(c.x, c.y, c.z) + c.w / kRunVoxels)[c.w % kRunVoxels];
    if (first != n) atomicMin(&report->duplicate, static_cast<unsigned long long>(n << 32 | first));
}

/* Where the kernel's elements look along one axis, in the three ways that a map may ask for. What lies outside every
 * grid is past the end of the largest, as an unsigned number. */

/* Stride 1: at c + shift[k]. A shift that leaves the grid from wherever it starts is INT32_MIN, which does so in 32
 * bits too. */
struct ShiftAxis {
    int32_t size;
    int32_t shift[kMaxKernel];

    ShiftAxis(const fg_neighbor_map_params *p, int axis) : size(p->kernel[axis]), shift() {
        for (int k = 0; k < size; ++k) {
            const int64_t there = static_cast<int64_t>(k) * p->dilation[axis] - p->padding[axis];
            shift[k] = there < -INT32_MAX || there > INT32_MAX ? INT32_MIN
                                                               : static_cast<int32_t>(p->transposed ? -there : there);
        }
    }
    __device__ uint32_t from(int32_t coordinate, int k) const {
        return static_cast<uint32_t>(coordinate) + static_cast<uint32_t>(shift[k]);
    }
};

/* At c * stride + k * dilation - padding. */
struct StrideAxis {
    int32_t size, stride, dilation, padding;

    StrideAxis(const fg_neighbor_map_params *p, int axis)
        : size(p->kernel[axis]),
          stride(p->stride[axis]),
          dilation(p->dilation[axis]),
          padding(static_cast<int32_t>(p->padding[axis])) {}

    __device__ uint32_t from(int32_t coordinate, int k) const {
        const int64_t there = static_cast<int64_t>(coordinate) * stride + static_cast<int64_t>(k) * dilation - padding;
        return there >= 0 && there <= INT32_MAX ? static_cast<uint32_t>(there) : ~0u;
    }
};

/* At (c + padding - k * dilation) / stride, where that is whole. */
struct QuotientAxis : StrideAxis {
    using StrideAxis::StrideAxis;

    __device__ uint32_t from(int32_t coordinate, int k) const {
        const int64_t there = static_cast<int64_t>(coordinate) + padding - static_cast<int64_t>(k) * dilation;
        const uint32_t dividend = static_cast<uint32_t>(there); /* c and padding are below 2^31 */
        return there >= 0 && dividend % stride == 0 ? dividend / stride : ~0u;
    }
};

/* One thread walks the kDepth offsets along z of one query at one (kx, ky), and probes where a run of the table begins.
 * CTAs of the same queries follow each other, so that what they read of coordinates and table is in L2 while it is
 * needed, however large the scene. */
template <class Run, class Axis, int kDepth>
__global__ void __launch_bounds__(kThreads)
    lookup_kernel(Coords queries, VoxelGrid query_grid, VoxelGrid grid, HashTable<Run> table, Axis ax, Axis ay, Axis az,
                  int32_t *map) {
    const unsigned int columns = ax.size * ay.size, k = blockIdx.x % columns;
    const int64_t m = static_cast<int64_t>(blockIdx.x / columns) * kThreads + threadIdx.x;
    if (m >= queries.count) return;
    const int4 c = queries[m];
    const uint32_t x = ax.from(c.y, k / ay.size), y = ay.from(c.z, k % ay.size);
    const bool inside = query_grid.contain(c) && x < grid.width && y < grid.height;
    const Run column = grid.column<Run>(c.x, x, y);
    /* Loads first, stores after: a store waits for its value, and every load behind it would wait as well. */
    int32_t found[kDepth];
    const int32_t *entries = nullptr;
    uint32_t run = ~0u; /* of the column, none yet */
#pragma unroll
    for (int kz = 0; kz < kDepth; ++kz) {
        const uint32_t z = az.from(c.w, kz);
        const bool exists = inside && z < grid.depth;
        if (exists && z / kRunVoxels != run) {
            run = z / kRunVoxels;
            entries = table.find(column + run);
        }
        found[kz] = exists && entries ? entries[z % kRunVoxels] : -1;
    }
    int32_t *entry = map + static_cast<int64_t>(k) * kDepth * queries.count + m;
#pragma unroll
    for (int kz = 0; kz < kDepth; ++kz) entry[kz * queries.count] = found[kz];
}

template <class Run, class Axis>
constexpr decltype(&lookup_kernel<Run, Axis, 1>) kLookupKernels[kMaxKernel] = {
    lookup_kernel<Run, Axis, 1>, lookup_kernel<Run, Axis, 2>, lookup_kernel<Run, Axis, 3>, lookup_kernel<Run, Axis, 4>,
    lookup_kernel<Run, Axis, 5>, lookup_kernel<Run, Axis, 6>, lookup_kernel<Run, Axis, 7>,
};

template <class Axis, class Run>
fg_status look_up(const fg_neighbor_map_params *p, const VoxelGrid &grid, const HashTable<Run> &table,
                  cudaStream_t stream, fg_error *error) {
    const Axis ax(p, 0), ay(p, 1), az(p, 2);
    const int64_t blocks = ceil_div<int64_t>(p->queries.shape[0], kThreads) * ax.size * ay.size;
    if (blocks == 0) return FG_OK;
    if (blocks > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "queries: %lld rows need more blocks than one launch can have",
                       static_cast<long long>(p->queries.shape[0]));
    kLookupKernels<Run, Axis>[az.size - 1]<<<static_cast<unsigned int>(blocks), kThreads, 0, stream>>>(
        Coords(p->queries), VoxelGrid(p->query_shape), grid, table, ax, ay, az, static_cast<int32_t *>(p->map.data));
    FG_CUDA(cudaGetLastError());
    return FG_OK;
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

template <class Run>
size_t workspace_bytes(int64_t count) {
    using Table = HashTable<Run>;
    return count == 0 ? 0 : kReportBytes + uint64_t{Table::capacity_for(count)} * Table::kBytesPerSlot;
}

template <class Run>
fg_status build(const fg_neighbor_map_params *p, cudaStream_t stream, fg_error *error) {
    const int64_t count = p->coords.shape[0];
    char *workspace = static_cast<char *>(p->workspace.data);
    Report *report = reinterpret_cast<Report *>(workspace);
    HashTable<Run> table;
    table.capacity = table.capacity_for(count);
    table.rows = reinterpret_cast<int32_t *>(workspace + kReportBytes);
    table.keys = reinterpret_cast<Run *>(table.rows + uint64_t{table.capacity} * kRunVoxels);
    FG_CUDA(cudaMemsetAsync(workspace, 0xFF, workspace_bytes<Run>(count), stream));

    const Coords rows(p->coords);
    const VoxelGrid grid(p->shape);
    const unsigned int blocks = static_cast<unsigned int>(ceil_div<int64_t>(count, kThreads));
    insert_kernel<Run><<<blocks, kThreads, 0, stream>>>(rows, grid, table, p->check ? report : nullptr);
    FG_CUDA(cudaGetLastError());
    if (p->check) {
        find_duplicates_kernel<Run><<<blocks, kThreads, 0, stream>>>(rows, grid, table, report);
        FG_CUDA(cudaGetLastError());
        const fg_status status = check_report(p, report, stream, error);
        if (status != FG_OK) return status;
    }
    const bool unit_stride = p->stride[0] == 1 && p->stride[1] == 1 && p->stride[2] == 1;
    if (unit_stride) return look_up<ShiftAxis>(p, grid, table, stream, error);
    if (p->transposed) return look_up<QuotientAxis>(p, grid, table, stream, error);
    return look_up<StrideAxis>(p, grid, table, stream, error);
}

}  // namespace

fg_status neighbor_map_workspace(const fg_neighbor_map_params *p, const fg_queue *, size_t *bytes, fg_error *) {
    const int64_t count = p->coords.shape[0];
    *bytes = runs_fit_32_bits(p->shape) ? workspace_bytes<uint32_t>(count) : workspace_bytes<unsigned long long>(count);
    return FG_OK;
}

fg_status neighbor_map(const fg_neighbor_map_params *p, const fg_queue *queue, fg_error *error) {
    const int64_t count = p->coords.shape[0], entries = p->map.shape[0] * p->map.shape[1];
    if (count > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "coords: expected at most %lld rows, which int32 can number, got %lld",
                       static_cast<long long>(INT32_MAX), static_cast<long long>(count));
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const cudaStream_t stream = stream_of(queue);
    if (count == 0) {
        if (entries > 0) FG_CUDA(cudaMemsetAsync(p->map.data, 0xFF, entries * sizeof(int32_t), stream));
        return FG_OK;
    }
    return runs_fit_32_bits(p->shape) ? build<uint32_t>(p, stream, error) : build<unsigned long long>(p, stream, error);
}

}  // namespace flexgemm
