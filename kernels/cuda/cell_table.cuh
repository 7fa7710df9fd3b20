/*
 * The rows of coordinates in a table of cells (cell_hash.cuh): what maps and samples look voxels up in.
 */
#pragma once

#include "coords.cuh"
#include "cell_hash.cuh"
#include "ptx.cuh"
#include "voxel_number.cuh"

namespace flexgemm {

constexpr int kInsertThreads = 256;

/* Cells of a grid. With extents below 2^31 a cell's number is unique even outside of the last cells. */
struct CellGrid : VoxelBounds {
    uint32_t cells_x, cells_y, cells_z;

    explicit CellGrid(const int64_t (&shape)[4])
        : VoxelBounds(shape), cells_x(cells_of(width)), cells_y(cells_of(height)), cells_z(cells_of(depth)) {}

    static uint32_t cells_of(uint32_t extent) { return extent / 2 + extent % 2; }

    /* The first cell of a column along z; the voxel at z lies in the cell z / 2 further. */
    template <class Cell>
    __device__ Cell column(uint32_t b, uint32_t cell_x, uint32_t cell_y) const {
        return ((static_cast<Cell>(b) * cells_x + cell_x) * cells_y + cell_y) * cells_z;
    }

    template <class Cell>
    __device__ Cell cell(int4 c) const {
        return column<Cell>(c.x, c.y / 2, c.z / 2) + c.w / 2;
    }
};

/* Which of its cell's voxels one is. */
__device__ __forceinline__ uint32_t voxel_in_cell(uint32_t x, uint32_t y, uint32_t z) {
    return (x % 2 * 2 + y % 2) * 2 + z % 2;
}

/* Whether cells can be numbered, and an empty slot told from them, in 32 bits. */
inline bool cells_fit_32_bits(const int64_t (&shape)[4]) { return fg_grid_cells(shape) < 4'000'000'000; }

/* Bytes of a hash table of so many rows. */
inline size_t cell_hash_bytes(int64_t count, const int64_t (&shape)[4]) {
    return cells_fit_32_bits(shape) ? CellHash<uint32_t>::bytes_for(count)
                                    : CellHash<unsigned long long>::bytes_for(count);
}

/* Calls function(table) with a hash table in so much memory. */
template <class Function>
fg_status with_cell_hash(void *memory, int64_t count, const int64_t (&shape)[4], const Function &function) {
    return cells_fit_32_bits(shape) ? function(CellHash<uint32_t>(memory, count))
                                    : function(CellHash<unsigned long long>(memory, count));
}

/* A slot for every cell of the grid, in their order: nothing to claim and nothing to look for. The interface is that of
 * CellHash. Which of the two a map has is planned (plan_table.c); samples have a hash table. */
struct DirectTable : CellRows {
    using Cell = uint32_t;
    using Probe = uint32_t; /* the slot */
    static constexpr Cell kEmpty = kNone;

    /* In bytes_for(shape) bytes of memory. */
    explicit DirectTable(void *memory) : CellRows{static_cast<int32_t *>(memory)} {}

    static size_t bytes_for(const int64_t (&shape)[4]) {
        return static_cast<size_t>(fg_grid_cells(shape)) * kCellVoxels * sizeof(int32_t);
    }

    __device__ uint32_t claim(Cell cell) const { return cell; }
    __device__ Probe probe(Cell cell) const { return cell; }
    __device__ uint32_t find(Probe probe) const { return probe; }
};

/* The lowest rows of a cell's voxels, each -1 where there is none; NULL when the table knows that it has no voxel. */
template <class Table>
__device__ __forceinline__ const int32_t *find_rows(const Table &table, typename Table::Cell cell) {
    const uint32_t slot = table.find(table.probe(cell));
    return slot != Table::kNone ? table.at(slot) : nullptr;
}

template <class Table>
__global__ void __launch_bounds__(kInsertThreads)
    insert_kernel(Coords rows, CellGrid grid, Table table, unsigned long long *outside) {
    using Cell = typename Table::Cell;
    ptx::let_next_kernel_begin();
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kInsertThreads + threadIdx.x;
    const int4 c = n < rows.count ? rows[n] : make_int4(-1, -1, -1, -1);
    const bool inside = grid.contain(c);
    if (n < rows.count && !inside && outside) atomicMin(outside, static_cast<unsigned long long>(n));

    const uint32_t slot = table.claim(inside ? grid.cell<Cell>(c) : Table::kEmpty);
    if (inside) table.insert(slot, voxel_in_cell(c.y, c.z, c.w), static_cast<int32_t>(n));
}

/* Into a table that is empty. Of rows outside of the grid the first is noted, where that is asked for. */
template <class Table>
cudaError_t insert_rows(const Coords &rows, const CellGrid &grid, const Table &table, unsigned long long *outside,
                        cudaStream_t stream) {
    const unsigned int blocks = static_cast<unsigned int>(ceil_div<int64_t>(rows.count, kInsertThreads));
    if (blocks > 0) insert_kernel<Table><<<blocks, kInsertThreads, 0, stream>>>(rows, grid, table, outside);
    return cudaGetLastError();
}

}  // namespace flexgemm
