/*
 * Neighbour map of a sparse convolution: map[v, m] = row of the voxel that query m reads at offset v, or -1.
 *
 * Voxels are taken in cells of 2 x 2 x 2, which are numbered as voxels are. One kernel puts all rows into a table of
 * cells in the caller's workspace, by their numbers or by a hash of them (plan_table.c), one looks up every (query,
 * offset) pair: where offsets are adjacent voxels, cell by cell. Every pair is looked up: the map of an odd submanifold
 * kernel is its own mirror image only while no voxel occurs twice, which nobody has checked.
 *
 * Row orders are built behind the map, by keys that the look at adjacent offsets leaves on its way.
 *
 * Nothing here waits for the device except check = true, which reads back what is wrong before it raises.
 */
#include "backend.cuh"
#include "cell_table.cuh"
#include "common.cuh"
#include "coords.cuh"
#include "ptx.cuh"
#include "row_order.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256;
constexpr unsigned long long kNothing = ~0ull;

/* First offenders, as unsigned numbers that atomicMin can lower. */
struct Report {
    unsigned long long outside;   /* row */
    unsigned long long duplicate; /* later row in the high half, the row it repeats in the low half */
};

template <class Table>
__global__ void __launch_bounds__(kThreads)
    find_duplicates_kernel(Coords rows, CellGrid grid, Table table, Report *report) {
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (n >= rows.count) return;
    const int4 c = rows[n];
    if (!grid.contain(c)) return;
    /* All rows are in the table. */
    const int64_t first = find_rows(table, grid.cell<typename Table::Cell>(c))[voxel_in_cell(c.y, c.z, c.w)];
    if (first != n) atomicMin(&report->duplicate, static_cast<unsigned long long>(n << 32 | first));
}

/* ---- any offsets ---- */

/* Where the kernel's elements look along one axis, in the three ways that a map may ask for. What lies outside every
 * grid is past the end of the largest, as an unsigned number. */

/* Stride 1: at c + shift[k]. A shift that leaves the grid from wherever it starts is INT32_MIN, which does so in 32
 * bits too. */
struct ShiftAxis {
    int32_t size;
    int32_t shift[FG_MAX_KERNEL];

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

/* One thread walks the kDepth offsets along z of one query at one (kx, ky), and probes where a cell of the table
 * begins. CTAs of the same queries follow each other, so that what they read of coordinates and table is in L2 while it
 * is needed, however large the scene. */
template <class Table, class Axis, int kDepth>
__global__ void __launch_bounds__(kThreads) lookup_kernel(Coords queries, VoxelBounds query_grid, CellGrid grid,
                                                          Table table, Axis ax, Axis ay, Axis az, int32_t *map) {
    using Cell = typename Table::Cell;
    const unsigned int columns = ax.size * ay.size, k = blockIdx.x % columns;
    const int64_t m = static_cast<int64_t>(blockIdx.x / columns) * kThreads + threadIdx.x;
    if (m >= queries.count) return;
    const int4 c = queries[m];
    const uint32_t x = ax.from(c.y, k / ay.size), y = ay.from(c.z, k % ay.size);
    const bool inside = query_grid.contain(c) && x < grid.width && y < grid.height;
    const Cell column = grid.column<Cell>(c.x, x / 2, y / 2);
    /* Loads first, stores after: a store waits for its value, and every load behind it would wait as well. */
    int32_t found[kDepth];
    const int32_t *entries = nullptr;
    uint32_t cell = ~0u; /* of the column, none yet */
#pragma unroll
    for (int kz = 0; kz < kDepth; ++kz) {
        const uint32_t z = az.from(c.w, kz);
        const bool exists = inside && z < grid.depth;
        if (exists && z / 2 != cell) {
            cell = z / 2;
            entries = find_rows(table, column + cell);
        }
        found[kz] = exists && entries ? entries[voxel_in_cell(x, y, z)] : -1;
    }
    int32_t *entry = map + static_cast<int64_t>(k) * kDepth * queries.count + m;
#pragma unroll
    for (int kz = 0; kz < kDepth; ++kz) entry[kz * queries.count] = found[kz];
}

template <class Table, class Axis>
constexpr decltype(&lookup_kernel<Table, Axis, 1>) kLookupKernels[FG_MAX_KERNEL] = {
    lookup_kernel<Table, Axis, 1>, lookup_kernel<Table, Axis, 2>, lookup_kernel<Table, Axis, 3>,
    lookup_kernel<Table, Axis, 4>, lookup_kernel<Table, Axis, 5>, lookup_kernel<Table, Axis, 6>,
    lookup_kernel<Table, Axis, 7>,
};

template <class Axis, class Table>
fg_status look_up(const fg_neighbor_map_params *p, const CellGrid &grid, const Table &table, cudaStream_t stream,
                  fg_error *error) {
    const Axis ax(p, 0), ay(p, 1), az(p, 2);
    const int64_t blocks = ceil_div<int64_t>(p->queries.shape[0], kThreads) * ax.size * ay.size;
    if (blocks == 0) return FG_OK;
    if (blocks > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "queries: %lld rows need more blocks than one launch can have",
                       static_cast<long long>(p->queries.shape[0]));
    kLookupKernels<Table, Axis>[az.size - 1]<<<static_cast<unsigned int>(blocks), kThreads, 0, stream>>>(
        Coords(p->queries), VoxelBounds(p->query_shape), grid, table, ax, ay, az, static_cast<int32_t *>(p->map.data));
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

/* ---- adjacent offsets ---- */

constexpr int kMaxCells = 36;

/* Along each axis the kernel looks at `size` voxels from c + low on, and so at cells() cells at most. */
struct Neighborhood {
    int32_t size[3], low[3];
    bool flipped;           /* the first element of the kernel looks at the last voxel */
    uchar4 cell[kMaxCells]; /* the place of a cell among them: x, y, z */
    /* x and y of the voxels that a column of offsets looks at, from low on. */
    uchar2 column[FG_MAX_KERNEL * FG_MAX_KERNEL];

    explicit Neighborhood(const fg_neighbor_map_params *p) : flipped(p->transposed) {
        for (int axis = 0; axis < 3; ++axis) {
            const int64_t padding = p->padding[axis];
            size[axis] = p->kernel[axis];
            low[axis] = static_cast<int32_t>(flipped ? padding - (size[axis] - 1) : -padding);
        }
        for (int i = 0; i < cells() && i < kMaxCells; ++i) {
            const int yz = cells(1) * cells(2);
            cell[i] = make_uchar4(i / yz, i % yz / cells(2), i % cells(2), 0);
        }
        for (int i = 0; i < size[0] * size[1]; ++i) {
            const int x = i / size[1], y = i % size[1];
            column[i] = flipped ? make_uchar2(size[0] - 1 - x, size[1] - 1 - y) : make_uchar2(x, y);
        }
    }

    __host__ __device__ int cells(int axis) const { return size[axis] / 2 + 1; }
    int cells() const { return cells(0) * cells(1) * cells(2); }
    int volume() const { return size[0] * size[1] * size[2]; }
    size_t shared_bytes() const { return sizeof(int32_t) * (kCellVoxels * 32 * cells() + volume()); }
};

constexpr int kNearThreads = 128, kNearWarps = kNearThreads / 32;
constexpr int kCellsAhead = 2; /* of a thread: read before the first is asked about */
constexpr int64_t kNearExtent = 1 << 30;

/* Whether near_kernel() can: int32 holds all coordinates that it looks at, and shared memory the cells. */
bool is_near(const fg_neighbor_map_params *p) {
    for (int axis = 0; axis < 3; ++axis) {
        if (p->stride[axis] != 1 || p->dilation[axis] != 1 || p->padding[axis] > kNearExtent / 2 ||
            p->padding[axis] < -kNearExtent / 2 || p->shape[axis + 1] > kNearExtent ||
            p->query_shape[axis + 1] > kNearExtent)
            return false;
    }
    return Neighborhood(p).cells() <= kMaxCells;
}

/* A block takes 32 queries, one a lane. Its warps fetch the cells around them, then write the map, a column of kDepth
 * offsets at a time, then the keys of the orders. */
template <class Table, int kDepth>
__global__ void __launch_bounds__(kNearThreads)
    near_kernel(Coords queries, VoxelBounds query_grid, CellGrid grid, Table table,
                const __grid_constant__ Neighborhood near, int32_t *map, const __grid_constant__ OrderKeys keys) {
    using Cell = typename Table::Cell;
    extern __shared__ int32_t cell_rows[]; /* (cell, voxel of the cell, lane) */
    ptx::let_next_kernel_begin();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t m = static_cast<int64_t>(blockIdx.x) * 32 + lane;
    const int4 c = m < queries.count ? queries[m] : make_int4(-1, -1, -1, -1);
    const bool inside = query_grid.contain(c);
    ptx::wait_for_earlier_kernels(); /* the table's; coordinates were there before those */
    const int32_t x = c.y + near.low[0], y = c.z + near.low[1], z = c.w + near.low[2];
    const int cells_y = near.cells(1), cells_z = near.cells(2), cells = near.cells(0) * cells_y * cells_z;
    /* (offset): the lanes that have a neighbour there */
    uint32_t *const present = reinterpret_cast<uint32_t *>(cell_rows) + cells * kCellVoxels * 32;

    for (int first = warp; first < cells; first += kCellsAhead * kNearWarps) {
        typename Table::Probe probe[kCellsAhead];
        int4 rows[kCellsAhead][2];
#pragma unroll
        for (int i = 0; i < kCellsAhead; ++i) {
            const int at = first + i * kNearWarps;
            const uchar4 place = near.cell[at < cells ? at : 0];
            const uint32_t cell_x = (x >> 1) + place.x, cell_y = (y >> 1) + place.y, cell_z = (z >> 1) + place.z;
            const bool exists =
                inside && at < cells && cell_x < grid.cells_x && cell_y < grid.cells_y && cell_z < grid.cells_z;
            probe[i] = table.probe(exists ? grid.column<Cell>(c.x, cell_x, cell_y) + cell_z : Table::kEmpty);
        }
#pragma unroll
        for (int i = 0; i < kCellsAhead; ++i) {
            const uint32_t slot = table.find(probe[i]);
            const int4 *const entries = reinterpret_cast<const int4 *>(table.at(slot));
            rows[i][0] = slot != Table::kNone ? entries[0] : make_int4(-1, -1, -1, -1);
            rows[i][1] = slot != Table::kNone ? entries[1] : make_int4(-1, -1, -1, -1);
        }
#pragma unroll
        for (int i = 0; i < kCellsAhead; ++i) {
            const int at = first + i * kNearWarps;
            if (at >= cells) break;
            int32_t *const entry = cell_rows + at * kCellVoxels * 32 + lane;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                entry[(4 * half + 0) * 32] = rows[i][half].x;
                entry[(4 * half + 1) * 32] = rows[i][half].y;
                entry[(4 * half + 2) * 32] = rows[i][half].z;
                entry[(4 * half + 3) * 32] = rows[i][half].w;
            }
        }
    }
    __syncthreads();

    int along_z[kDepth]; /* where in a column of cells this query's voxels are */
#pragma unroll
    for (int kz = 0; kz < kDepth; ++kz) {
        const int from_z = (z & 1) + (near.flipped ? kDepth - 1 - kz : kz);
        along_z[kz] = (from_z / 2 * kCellVoxels + from_z % 2) * 32 + lane;
    }
    for (int column = warp; column < near.size[0] * near.size[1]; column += kNearWarps) {
        const int from_x = (x & 1) + near.column[column].x, from_y = (y & 1) + near.column[column].y;
        const int cells_before = (from_x / 2 * cells_y + from_y / 2) * cells_z;
        const int base = (cells_before * kCellVoxels + voxel_in_cell(from_x, from_y, 0)) * 32;
        int32_t *entry = map + static_cast<int64_t>(column) * kDepth * queries.count + m;
#pragma unroll
        for (int kz = 0; kz < kDepth; ++kz, entry += queries.count) {
            const int32_t row = cell_rows[base + along_z[kz]];
            if (m < queries.count) *entry = row;
            const uint32_t with = __ballot_sync(~0u, row >= 0);
            if (lane == 0) present[column * kDepth + kz] = with;
        }
    }
    if (keys.plan.orders == 0) return;
    __syncthreads();

    if (m >= queries.count) return;
    for (int order = warp; order < keys.plan.orders; order += kNearWarps)
        keys.store(order, m, [&](int offset) { return present[offset] >> lane & 1; });
}

template <class Table>
constexpr decltype(&near_kernel<Table, 1>) kNearKernels[FG_MAX_KERNEL] = {
    near_kernel<Table, 1>, near_kernel<Table, 2>, near_kernel<Table, 3>, near_kernel<Table, 4>,
    near_kernel<Table, 5>, near_kernel<Table, 6>, near_kernel<Table, 7>,
};

template <class Table>
fg_status look_near(const fg_neighbor_map_params *p, const CellGrid &grid, const Table &table, const OrderKeys &keys,
                    int compute_capability, cudaStream_t stream, fg_error *error) {
    const Neighborhood near(p);
    unsigned int blocks = 0;
    const fg_status status = grid_for(p->queries.shape[0], 32, "queries", &blocks, error);
    if (status != FG_OK || blocks == 0) return status;
    const auto kernel = kNearKernels<Table>[near.size[2] - 1];
    return launch_early(kernel, blocks, kNearThreads, near.shared_bytes(), compute_capability, stream, error,
                        Coords(p->queries), VoxelBounds(p->query_shape), grid, table, near,
                        static_cast<int32_t *>(p->map.data), keys);
}

/* ---- launch ---- */

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

fg_table_kind table_kind(const fg_neighbor_map_params *p) { return fg_plan_voxel_table(p->coords.shape[0], p->shape); }

size_t table_bytes(const fg_neighbor_map_params *p) {
    const int64_t count = p->coords.shape[0];
    return table_kind(p) == FG_TABLE_DIRECT ? DirectTable::bytes_for(p->shape) : cell_hash_bytes(count, p->shape);
}

/* Of report and table; row orders have theirs behind. */
size_t workspace_bytes(const fg_neighbor_map_params *p) {
    return p->coords.shape[0] == 0 ? 0 : ceil_div<size_t>(kReportBytes + table_bytes(p), 256) * 256;
}

bool has_orders(const fg_neighbor_map_params *p) {
    return p->order.present && p->order.shape[0] * p->order.shape[1] > 0;
}

fg_status prepare_orders(const fg_neighbor_map_params *p, const fg_queue *queue, RowOrders *orders, fg_error *error) {
    *orders = {};
    if (!has_orders(p)) return FG_OK;
    char *const workspace = static_cast<char *>(p->workspace.data) + workspace_bytes(p);
    return orders->prepare(p->map.shape[1], p->kernel, p->sets, workspace, queue, error);
}

template <class Table>
fg_status build(const fg_neighbor_map_params *p, const Table &table, const OrderKeys &keys, int compute_capability,
                cudaStream_t stream, fg_error *error) {
    Report *report = static_cast<Report *>(p->workspace.data);
    FG_CUDA(cudaMemsetAsync(report, 0xFF, workspace_bytes(p), stream));

    const Coords rows(p->coords);
    const CellGrid grid(p->shape);
    FG_CUDA(insert_rows(rows, grid, table, p->check ? &report->outside : nullptr, stream));
    if (p->check) {
        const unsigned int blocks = static_cast<unsigned int>(ceil_div<int64_t>(rows.count, kThreads));
        find_duplicates_kernel<Table><<<blocks, kThreads, 0, stream>>>(rows, grid, table, report);
        FG_CUDA(cudaGetLastError());
        const fg_status status = check_report(p, report, stream, error);
        if (status != FG_OK) return status;
    }
    if (is_near(p)) return look_near(p, grid, table, keys, compute_capability, stream, error);
    const bool unit_stride = p->stride[0] == 1 && p->stride[1] == 1 && p->stride[2] == 1;
    if (unit_stride) return look_up<ShiftAxis>(p, grid, table, stream, error);
    if (p->transposed) return look_up<QuotientAxis>(p, grid, table, stream, error);
    return look_up<StrideAxis>(p, grid, table, stream, error);
}

/* With the table that is planned. */
fg_status build(const fg_neighbor_map_params *p, const OrderKeys &keys, int compute_capability, cudaStream_t stream,
                fg_error *error) {
    const int64_t count = p->coords.shape[0];
    const fg_table_kind kind = table_kind(p);
    fg_print_table(kind, "neighbor_map", count, p->shape, table_bytes(p));
    void *const memory = static_cast<char *>(p->workspace.data) + kReportBytes;
    const auto with = [&](const auto &table) { return build(p, table, keys, compute_capability, stream, error); };
    return kind == FG_TABLE_DIRECT ? with(DirectTable(memory)) : with_cell_hash(memory, count, p->shape, with);
}

}  // namespace

fg_status neighbor_map_workspace(const fg_neighbor_map_params *p, const fg_queue *queue, size_t *bytes,
                                 fg_error *error) {
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    RowOrders orders;
    const fg_status status = prepare_orders(p, queue, &orders, error);
    *bytes = workspace_bytes(p) + orders.bytes;
    return status;
}

fg_status neighbor_map(const fg_neighbor_map_params *p, const fg_queue *queue, fg_error *error) {
    const int64_t count = p->coords.shape[0], entries = p->map.shape[0] * p->map.shape[1];
    if (count > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "coords: expected at most %lld rows, which int32 can number, got %lld",
                       static_cast<long long>(INT32_MAX), static_cast<long long>(count));
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const cudaStream_t stream = stream_of(queue);
    RowOrders orders;
    int num_sms = 0, compute_capability = 0;
    fg_status status = device_properties(queue->device_index, &num_sms, &compute_capability, error);
    if (status == FG_OK) status = prepare_orders(p, queue, &orders, error);
    if (status != FG_OK) return status;
    if (count == 0) {
        if (entries > 0) FG_CUDA(cudaMemsetAsync(p->map.data, 0xFF, entries * sizeof(int32_t), stream));
    } else {
        status = build(p, orders.keys, compute_capability, stream, error);
    }
    if (status != FG_OK || !has_orders(p)) return status;
    if (count == 0 || !is_near(p)) status = write_order_keys(p->map, orders.keys, stream, error);
    if (status == FG_OK) status = orders.run(static_cast<int32_t *>(p->order.data), stream, error);
    return status;
}

}  // namespace flexgemm
