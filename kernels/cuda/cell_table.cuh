/*
 * The rows of coordinates in a table of cells (hash.cuh): what maps and samples look voxels up in.
 */
#pragma once

#include "coords.cuh"
#include "hash.cuh"
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
inline bool cells_fit_32_bits(const int64_t (&shape)[4]) {
    const CellGrid grid(shape);
    return static_cast<double>(grid.batch) * grid.cells_x * grid.cells_y * grid.cells_z < 4e9;
}

/* Lanes with the same cell as the lane before them leave the claim to the first of them. */
template <class Cell>
__global__ void __launch_bounds__(kInsertThreads)
    insert_kernel(Coords rows, CellGrid grid, HashTable<Cell> table, unsigned long long *outside) {
    ptx::let_next_kernel_begin();
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kInsertThreads + threadIdx.x;
    const int lane = threadIdx.x % 32;
    const int4 c = n < rows.count ? rows[n] : make_int4(-1, -1, -1, -1);
    const bool inside = grid.contain(c);
    if (n < rows.count && !inside && outside) atomicMin(outside, static_cast<unsigned long long>(n));

    const Cell cell = inside ? grid.cell<Cell>(c) : table.kEmpty;
    const Cell cell_before = __shfl_up_sync(~0u, cell, 1);
    const bool first = lane == 0 || cell != cell_before;
    const uint32_t slot = first && inside ? table.claim(cell) : 0;
    const unsigned int firsts = __ballot_sync(~0u, first);
    const int claimer = 31 - __clz(firsts & (~0u >> (31 - lane)));
    const uint32_t claimed = __shfl_sync(~0u, slot, claimer);
    if (inside) table.insert(claimed, voxel_in_cell(c.y, c.z, c.w), static_cast<int32_t>(n));
}

/* Into a table that is empty. Of rows outside of the grid the first is noted, where that is asked for. */
template <class Cell>
cudaError_t insert_rows(const Coords &rows, const CellGrid &grid, const HashTable<Cell> &table,
                        unsigned long long *outside, cudaStream_t stream) {
    const unsigned int blocks = static_cast<unsigned int>(ceil_div<int64_t>(rows.count, kInsertThreads));
    if (blocks > 0) insert_kernel<Cell><<<blocks, kInsertThreads, 0, stream>>>(rows, grid, table, outside);
    return cudaGetLastError();
}

}  // namespace flexgemm
