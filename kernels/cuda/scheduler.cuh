/*
 * From a tile number to an output tile, for the dense and the m-grouped ragged layout.
 *
 * The grid is sized on the host, which never sees the offsets: G groups that share M rows need at most
 * (M + min(G, M) * (block_m - 1)) / block_m row tiles. Who needs a row tile scans the offsets for it, a whole block for
 * its only tile or one warp for all tiles of a persistent block, and stops when the groups have fewer. Offsets are clamped into 0..M and replaced by their running maximum, which makes groups
 * disjoint and keeps the bound true for any content: a decreasing offset is an empty group.
 */
#pragma once

#include "common.cuh"

namespace flexgemm {

struct GroupOffsets {
    const void *data; /* int32 or int64 on the device; NULL when dense */
    int64_t groups;
    bool wide;      /* int64 */
    bool has_begin; /* groups + 1 bounds rather than groups ends */
};

inline GroupOffsets make_group_offsets(const fg_gemm_params &params) {
    if (params.layout != FG_GEMM_M_GROUPED) return {};
    const int64_t groups = params.b.shape[0];
    return {params.offsets.data, groups, params.offsets.dtype == FG_INT64, params.offsets.shape[0] == groups + 1};
}

/* Rows begin .. end - 1 of `group`; a tile takes at most block_m of them from `begin`. begin == end: no tile. */
struct RowTile {
    int64_t begin, end, group;
};

inline int64_t max_row_tiles(int64_t m, int64_t groups, int block_m) {
    const int64_t nonempty = groups < m ? groups : m;
    return (m + nonempty * (block_m - 1)) / block_m;
}

/* Bound i of groups + 1. */
__device__ __forceinline__ int64_t group_bound(const GroupOffsets &offsets, int64_t i, int64_t m) {
    if (!offsets.has_begin && i == 0) return 0;
    const int64_t at = offsets.has_begin ? i : i - 1;
    const int64_t bound =
        offsets.wide ? static_cast<const int64_t *>(offsets.data)[at] : static_cast<const int32_t *>(offsets.data)[at];
    return bound < 0 ? 0 : bound > m ? m : bound;
}

/* Row tile `target` of the ragged layout, found by the whole block: kThreads groups at a time, a running maximum over
 * their ends and a running sum over their tiles. */
template <int kThreads, int kBlockM>
__device__ RowTile find_row_tile(const GroupOffsets &offsets, int64_t m, int64_t target) {
    constexpr int kWarps = kThreads / 32;
    __shared__ int64_t warp_end[kWarps];
    __shared__ int64_t warp_tiles[kWarps];
    __shared__ RowTile found;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) found = {0, 0, 0};

    int64_t reached = group_bound(offsets, 0, m); /* end of all groups so far */
    int64_t counted = 0;                          /* their tiles */
    for (int64_t base = 0; base < offsets.groups && counted <= target; base += kThreads) {
        const int64_t group = base + threadIdx.x;
        int64_t end = group < offsets.groups ? group_bound(offsets, group + 1, m) : 0;
        for (int distance = 1; distance < 32; distance *= 2) {
            const int64_t other = __shfl_up_sync(0xffffffffu, end, distance);
            if (lane >= distance && other > end) end = other;
        }
        if (lane == 31) warp_end[warp] = end;
        int64_t begin = __shfl_up_sync(0xffffffffu, end, 1);
        if (lane == 0) begin = 0;
        __syncthreads();

        int64_t before = reached; /* end of the groups of earlier warps */
        for (int w = 0; w < kWarps; ++w) {
            if (w < warp && warp_end[w] > before) before = warp_end[w];
            if (warp_end[w] > reached) reached = warp_end[w];
        }
        if (begin < before) begin = before;
        if (end < before) end = before;

        const int64_t tiles = ceil_div<int64_t>(end - begin, kBlockM);
        int64_t inclusive = tiles;
        for (int distance = 1; distance < 32; distance *= 2) {
            const int64_t other = __shfl_up_sync(0xffffffffu, inclusive, distance);
            if (lane >= distance) inclusive += other;
        }
        if (lane == 31) warp_tiles[warp] = inclusive;
        __syncthreads();

        int64_t first = counted + inclusive - tiles; /* this group's first tile */
        for (int w = 0; w < kWarps; ++w) {
            if (w < warp) first += warp_tiles[w];
            counted += warp_tiles[w];
        }
        if (first <= target && target < first + tiles) found = {begin + (target - first) * kBlockM, end, group};
    }
    __syncthreads();
    return found;
}

/* Groups before `group` end at row `reached` and have `counted` row tiles. */
struct GroupCursor {
    int64_t group, reached, counted;
};

/* The same, found by one warp, from the cursor on. The cursor moves on over groups that lie before row tile `kept`, the
 * lowest that will still be asked for; when there is no such row tile, `total` becomes the number of all. */
template <int kBlockM>
__device__ RowTile find_row_tile(const GroupOffsets &offsets, int64_t m, int64_t target, int64_t kept,
                                 GroupCursor &cursor, int64_t &total) {
    const int lane = threadIdx.x % 32;
    GroupCursor at = cursor;
    while (at.group < offsets.groups) {
        const int64_t group = at.group + lane;
        int64_t end = group < offsets.groups ? group_bound(offsets, group + 1, m) : 0;
        for (int distance = 1; distance < 32; distance *= 2) {
            const int64_t other = __shfl_up_sync(0xffffffffu, end, distance);
            if (lane >= distance && other > end) end = other;
        }
        int64_t begin = __shfl_up_sync(0xffffffffu, end, 1);
        if (lane == 0 || begin < at.reached) begin = at.reached;
        if (end < at.reached) end = at.reached;

        const int64_t tiles = ceil_div<int64_t>(end - begin, kBlockM);
        int64_t inclusive = tiles;
        for (int distance = 1; distance < 32; distance *= 2) {
            const int64_t other = __shfl_up_sync(0xffffffffu, inclusive, distance);
            if (lane >= distance) inclusive += other;
        }
        const int64_t first = at.counted + inclusive - tiles; /* this group's first tile */
        const unsigned found = __ballot_sync(0xffffffffu, first <= target && target < first + tiles);
        if (found) {
            const int owner = __ffs(static_cast<int>(found)) - 1;
            return {__shfl_sync(0xffffffffu, begin + (target - first) * kBlockM, owner),
                    __shfl_sync(0xffffffffu, end, owner), at.group + owner};
        }
        at = {at.group + 32, __shfl_sync(0xffffffffu, end, 31), __shfl_sync(0xffffffffu, first + tiles, 31)};
        if (at.counted <= kept) cursor = at;
    }
    total = at.counted;
    return {0, 0, 0};
}

/* Tiles in bands of kBandRows row tiles, down the rows of a band first: blocks that run together share a few rows of
 * A and a few rows of B, which L2 then holds. */
constexpr int64_t kBandRows = 8;

__device__ __forceinline__ int64_t first_row_of_band(int64_t tile, int64_t column_tiles) {
    return tile / (kBandRows * column_tiles) * kBandRows;
}

__device__ __forceinline__ void rasterise(int64_t tile, int64_t row_tiles, int64_t column_tiles, int64_t *row,
                                          int64_t *column) {
    const int64_t first_row = first_row_of_band(tile, column_tiles);
    const int64_t rows = row_tiles - first_row < kBandRows ? row_tiles - first_row : kBandRows;
    const int64_t within = tile - first_row * column_tiles;
    *row = first_row + within % rows;
    *column = within / rows;
}

}  // namespace flexgemm
