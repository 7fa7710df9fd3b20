/*
 * Tiles of gemm_sm90.cuh: which the blocks have, worked out where there is one group, and looked for where there are more
 * (scheduler.cuh).
 */
#pragma once

#include "gemm_rings_sm90.cuh"

namespace flexgemm {

/* ---- tiles of one group ---- */

/* What clusters have to do: a tile each, or half of the rows of one that is shared. */
__device__ __forceinline__ uint32_t works_of_one_group(const GemmSm90Args &args) {
    return 2 * args.space.major_tiles * args.space.minor_tiles - args.unshared_tiles;
}

/* Those that have some of a tile's rows. */
template <typename Tile>
__device__ __forceinline__ int8_t warpgroups_of(int rows) {
    return static_cast<int8_t>(rows > Tile::kWarpgroupRows ? 2 : rows > 0 ? 1 : 0);
}

/* Who needs one of these works it out for itself: to look for groups takes code that memory has to send first, and so
 * longer than many of these products. */
template <typename Tile>
__device__ __forceinline__ Sm90Work work_of_one_group(const GemmSm90Args &args, uint32_t number) {
    const TileSpace &space = args.space;
    const uint32_t rank = blockIdx.x % Tile::kCluster;
    const bool shared = Tile::kSharesTiles && number >= args.unshared_tiles;
    const uint32_t half = number - args.unshared_tiles;
    uint32_t major, minor;
    rasterise(space, shared ? args.unshared_tiles + half / 2 : number, space.major_tiles, &major, &minor);
    const int row =
        static_cast<int>(major) * Tile::kClusterM + static_cast<int>(shared ? half % 2 : rank) * kSm90BlockM;
    const int column = static_cast<int>(minor) * Tile::kBlockN;
    const int rows = min(static_cast<int>(space.major.length) - row, kSm90BlockM);
    const int columns = min(static_cast<int>(space.minor_length) - column, Tile::kBlockN);
    int k_begin = 0, k_bytes = static_cast<int>(space.k_bytes);
    if (shared) {
        const int first_half = ceil_div(k_bytes, kSm90StepBytes) / 2 * kSm90StepBytes;
        k_begin = rank == 0 ? 0 : first_half;
        k_bytes = rank == 0 ? first_half : k_bytes - first_half;
    }
    const bool stored = Tile::kBoxedTiles && args.boxed_tiles && k_bytes > 0 && !shared;
    const int8_t boxed = stored ? warpgroups_of<Tile>(rows) : int8_t{0};
    return {row, rows, column, columns, 0, 0, k_begin, k_bytes, shared, boxed, false, shared};
}

/* Blocks add to the output at different times. */
template <typename Tile>
__device__ __forceinline__ bool is_staggered(const GemmSm90Args &args) {
    return !Tile::kUsual && args.staggered;
}

/* Tiles are looked for, and not worked out. */
template <typename Tile>
__device__ __forceinline__ bool looks_for_tiles(const GemmSm90Args &args) {
    return !has_one_group<Tile>(args) || is_staggered<Tile>(args);
}

/* ---- groups ---- */

/* Where sums of float32 are added to the output, which takes the memory as long as a good part of a tile, blocks that
 * begin together would all do so at the same time, and none while others multiply. So three of four clusters part their
 * first tile along K and keep the rest for the end, which leaves them a quarter, a half or three quarters of a tile
 * ahead. Takes the rest from `work`; that of an empty group: nothing to part. */
__device__ __forceinline__ Sm90Work part_along_k(Sm90Work &work, int cluster) {
    const int steps = steps_of(work) * (cluster % 4) / 4;
    if (steps == 0) return no_more_work();
    Sm90Work rest = work;
    work.k_bytes = steps * kSm90StepBytes - head_of(work);
    rest.k_begin += work.k_bytes;
    rest.k_bytes -= work.k_bytes;
    rest.again = true;
    rest.boxed = 0; /* what has been added of it has to be waited for */
    return rest;
}

/* What a block or a pair has of a tile that has been looked for. */
template <typename Tile>
__device__ __forceinline__ Sm90Work work_of(const GemmSm90Args &args, const OutputTile<int32_t> &tile) {
    const int32_t rows = tile.row_end - tile.row, columns = tile.column_end - tile.column;
    Sm90Work work = {tile.row,     min(rows, kSm90BlockM),
                     tile.column,  min(columns, Tile::kBlockN),
                     tile.group,   tile.weight,
                     tile.k_begin, tile.k_end - tile.k_begin,
                     tile.apart,   int8_t{0}};
    if (Tile::kBoxedTiles && args.boxed_tiles && tile.k_end > tile.k_begin &&
        (!args.space.major_is_columns || (columns >= Tile::kBlockN && tile.column % 8 == 0)))
        work.boxed = warpgroups_of<Tile>(work.rows);
    return work;
}

/* ---- scheduler warp ---- */

/* The tiles of groups, and all that are parted: of every cluster its own, from number `first` on. */
template <typename Tile>
__device__ __forceinline__ auto walk_from(const GemmSm90Args &args, uint32_t first) {
    return TileWalk<int32_t, Tile::kClusterM, Tile::kBlockN, Tile::kCluster>(
        args.space, first, gridDim.x / Tile::kCluster, blockIdx.x % Tile::kCluster);
}

/* Where a cluster's tiles begin. */
template <typename Tile>
__device__ __forceinline__ uint32_t first_of_cluster() {
    return blockIdx.x / Tile::kCluster;
}

/* Of a number from which tiles are looked for: there are none. */
constexpr uint32_t kNoTile = ~uint32_t{0};

/* Hands over the first tile, which the others wait for, or that there is none. Returns where the next one is looked for.
 * `rest`: a place for that of a tile which is parted along K. */
template <typename Tile>
__device__ __forceinline__ uint32_t hand_over_first(Sm90Shared<Tile> &shared, Sm90Work &rest,
                                                    const GemmSm90Args &args) {
    RingPosition<Tile::kTileSlots> at;
    OutputTile<int32_t> tile;
    auto walk = walk_from<Tile>(args, first_of_cluster<Tile>());
    const bool found = walk.next(tile);
    Sm90Work work = found ? work_of<Tile>(args, tile) : no_more_work();
    if (is_staggered<Tile>(args)) {
        const Sm90Work parted =
            found ? part_along_k(work, static_cast<int>(blockIdx.x) / Tile::kCluster) : no_more_work();
        if (threadIdx.x % 32 == 0) rest = parted;
        __syncwarp();
    }
    hand_over(shared, at, work, true, Tile::kCluster > 1);
    return found ? walk.upcoming() : kNoTile;
}

/* The others, from number `first` on; all of one group. */
template <typename Tile>
__device__ __forceinline__ void schedule(Sm90Shared<Tile> &shared, const Sm90Work &rest, const GemmSm90Args &args,
                                         bool looks, uint32_t first) {
    RingPosition<Tile::kTileSlots> at;
    if (first == kNoTile) return;
    if (!looks) {
        const uint32_t works = works_of_one_group(args), step = gridDim.x / Tile::kCluster;
        for (uint32_t number = first; number < works; number += step)
            hand_over(shared, at, work_of_one_group<Tile>(args, number));
        hand_over(shared, at, no_more_work());
        return;
    }
    at.advance();
    OutputTile<int32_t> tile;
    auto walk = walk_from<Tile>(args, first);
    while (walk.next(tile)) hand_over(shared, at, work_of<Tile>(args, tile));
    if (is_staggered<Tile>(args) && rest.group >= 0) hand_over(shared, at, rest);
    hand_over(shared, at, no_more_work());
}

}  // namespace flexgemm
