/*
 * Tiles of few groups of rows, as they fill the multiprocessors best.
 *
 * How many rows each group has is known on the device alone, and so is how tall tiles should be: of a hundred rows more
 * than expected a group has one tile more, and a wave that holds a few tiles lasts as long as a full one. So whoever works
 * on the tiles chooses their height from the sizes, all alike. Tall tiles come first, and every other wave runs the other
 * way round, so that who begins with the tallest ones has the shortest ones last; where waves are few, those who have one
 * tile more than others have the short ones. Tiles of a group that share weights are neighbours.
 *
 * There is a lane of a warp for each group. Of more groups waves are many: TileWalk (scheduler.cuh) has those.
 */
#pragma once

#include "scheduler.cuh"

namespace flexgemm {

/* The tiles of block `block` of so many, one after the other, for a warp; kTallest, kBlockN: what a tile has at most. */
template <int kTallest, int kBlockN>
class FewGroupsWalk {
public:
    using Tile = OutputTile<int32_t>;

    __device__ __forceinline__ FewGroupsWalk(const TileSpace &space, uint32_t block, uint32_t blocks)
        : space_(space), block_(block), blocks_(blocks) {
        const bool shared = space.major.grouping == Grouping::kOffsets;
        GroupChunk<int32_t> groups;
        groups.read(space.major,
                    {0, shared ? static_cast<int32_t>(group_bound(space.major.data, 0, space.major.length)) : 0, 0});
        begin_ = groups.begin;
        rows_ = static_cast<uint32_t>(groups.end - groups.begin);
        const uint32_t most = choose_height();
        tiles_ = ceil_div(rows_, most);
        height_ = min(even_size(rows_, tiles_), most);

        /* Taller ones are before, and of the same height those of earlier groups. */
        const uint32_t own = tiles_ * space.minor_tiles, key = height_ * 32 + 31 - threadIdx.x % 32;
        for (int group = 0; group < groups_of(space); ++group) {
            const uint32_t other = __shfl_sync(kAll, own, group);
            if (__shfl_sync(kAll, key, group) > key) first_ += other;
        }
        end_ = __reduce_add_sync(kAll, own);

        const uint32_t waves = end_ / blocks, with_more = end_ - waves * blocks, others = blocks - with_more;
        if (waves >= kFewWaves) return;
        if (block < others) {
            blocks_ = others;
            end_ = others * waves;
        } else {
            begin_tile_ = others * waves;
            block_ = block - others;
            blocks_ = with_more;
        }
    }

    /* The next tile; false: there are no more. */
    __device__ __forceinline__ bool next(Tile &out) {
        for (;; ++wave_) {
            const uint32_t place = wave_ % 2 == 0 ? block_ : blocks_ - 1 - block_;
            const uint32_t number = begin_tile_ + wave_ * blocks_ + place;
            if (number >= end_) return false; /* so are those of all waves behind */
            if (!set(out, number)) continue;
            ++wave_;
            return true;
        }
    }

private:
    static constexpr uint32_t kAll = 0xffffffffu, kUnit = FG_SOME_UNIT, kFewWaves = 8;

    __device__ __forceinline__ static int groups_of(const TileSpace &space) {
        return static_cast<int>(space.major.groups);
    }

    /* Whole waves of tiles that have as many rows as the mean and what a tile takes besides: each lane weighs a height. */
    __device__ __forceinline__ uint32_t choose_height() const {
        constexpr uint32_t kMostCost = (1u << 27) - 1;
        const uint32_t lane = threadIdx.x % 32, least = static_cast<uint32_t>(space_.least_block);
        if (__reduce_max_sync(kAll, rows_) <= least) return least;
        const uint32_t height = kTallest - min(lane * kUnit, kTallest - least);
        uint32_t tiles = 0;
        for (int group = 0; group < groups_of(space_); ++group)
            tiles += ceil_div(__shfl_sync(kAll, rows_, group), height);
        const uint32_t waves = ceil_div(tiles * space_.minor_tiles, blocks_);
        const uint32_t cost = waves * (space_.block_overhead + ceil_div(__reduce_add_sync(kAll, rows_), tiles));
        const uint32_t best = __reduce_min_sync(kAll, min(cost, kMostCost) * 32 + lane) % 32;
        return __shfl_sync(kAll, height, static_cast<int>(best));
    }

    /* false: there are no weights for it. */
    __device__ __forceinline__ bool set(Tile &out, uint32_t number) const {
        const bool has = first_ <= number && number < first_ + tiles_ * space_.minor_tiles;
        const int group = __ffs(static_cast<int>(__ballot_sync(kAll, has))) - 1;
        const uint32_t within = number - __shfl_sync(kAll, first_, group), tiles = __shfl_sync(kAll, tiles_, group);
        const uint32_t minor = within / tiles, height = __shfl_sync(kAll, height_, group);
        const int32_t begin = __shfl_sync(kAll, begin_, group),
                      end = begin + static_cast<int32_t>(__shfl_sync(kAll, rows_, group)),
                      row = begin + static_cast<int32_t>((within - minor * tiles) * height);
        out = {row,
               min(row + static_cast<int32_t>(height), end),
               static_cast<int32_t>(minor) * kBlockN,
               static_cast<int32_t>(space_.minor_length),
               group,
               group,
               0,
               static_cast<int32_t>(space_.k_bytes),
               false};
        return set_weight(space_, out);
    }

    const TileSpace &space_;
    uint32_t block_, blocks_; /* among those that share tiles begin_tile_ to end_ - 1 */
    uint32_t begin_tile_ = 0, end_, wave_ = 0;
    int32_t begin_;                              /* of the lane's group */
    uint32_t rows_, tiles_, height_, first_ = 0; /* and which is its first tile */
};

}  // namespace flexgemm
