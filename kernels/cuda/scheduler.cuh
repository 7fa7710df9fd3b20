/*
 * From a tile number to an output tile, for every layout of groups.
 *
 * Who works on a tile looks for its group, a warp scanning 32 groups at a time, and stops when the groups have fewer
 * tiles than the host counted (tile_space.cuh). Offsets are clamped into 0..L and those of rows and columns replaced
 * by their running maximum, which makes groups disjoint and keeps the host's bound true for any content: a decreasing
 * offset is an empty group. Groups along K write apart whatever they read.
 *
 * Where each row has an index, tiles whose rows are padding throughout are not counted, so that each block has as many of
 * the others. A chunk is then of 32 tiles of rows as the host counts them, as if each were a group.
 *
 * A pair of blocks has two blocks of rows of one group. Where groups have any number of rows, the last of an odd number
 * of blocks would leave one of the pair without any: such rests of two groups make a pair, behind the later one's tiles.
 */
#pragma once

#include <type_traits>

#include "common.cuh"
#include "ptx.cuh"
#include "tile_space.cuh"

namespace flexgemm {

/* Rows [row, row_end) and columns [column, column_end) of a group, of which a tile takes the first block_m and block_n;
 * `weight` is the matrix of B; bytes [k_begin, k_end) of K. */
template <typename Index>
struct OutputTile {
    Index row, row_end, column, column_end, group, weight, k_begin, k_end;
    bool apart; /* the blocks of a pair have rows of different groups */
};

/* ---- groups ---- */

/* Elements begin .. end - 1 of `group`, of which a block takes the first of a tile, or of its own rows of one, which may be
 * none. It exists if a block of a pair has some. */
template <typename Index>
struct MajorTile {
    Index begin, end, group;
    bool exists, apart;
};

__device__ __forceinline__ int64_t integer_at(const Offsets &data, int64_t i) {
    return data.wide ? static_cast<const int64_t *>(data.data)[i] : static_cast<const int32_t *>(data.data)[i];
}

__device__ __forceinline__ int64_t clamp_into(int64_t value, int64_t length) {
    return value < 0 ? 0 : value > length ? length : value;
}

/* Bound i of groups + 1. */
__device__ __forceinline__ int64_t group_bound(const Offsets &offsets, int64_t i, int64_t length) {
    if (!offsets.has_begin && i == 0) return 0;
    return clamp_into(integer_at(offsets, offsets.has_begin ? i : i - 1), length);
}

/* How a group is cut. Blocks, of which the last one has what is left; or even: into no more tiles than that, so that
 * none costs a tile's reading for a few elements; or in pairs: into tiles of which both blocks have some, and what one of
 * them has of the rest. */
template <int kBlockM, int kBlockN, int kBlocks, bool kEven>
struct Cut {
    uint32_t tiles, size;
    bool rest;
    template <typename Index>
    __device__ __forceinline__ Cut(const TileSpace &space, Index elements) : rest(false) {
        constexpr int kRows = kBlockM / kBlocks;
        const bool of_columns = space.major_is_columns;
        const auto length = static_cast<std::make_unsigned_t<Index>>(elements);
        if constexpr (kEven) { /* of groups that TMA reads, whose rows fit into 31 bits */
            tiles = ceil_div(static_cast<uint32_t>(length), static_cast<uint32_t>(space.major.block));
            size = min(even_size(static_cast<uint32_t>(length), tiles), static_cast<uint32_t>(space.major.block));
        } else { /* by constants, which divide in no time */
            size = of_columns ? kBlockN : kBlockM;
            tiles = static_cast<uint32_t>((length + size - 1) / (of_columns ? kBlockN : kBlockM));
            if constexpr (kBlocks == 2) rest = space.rests_in_pairs && (length + kRows - 1) / kRows % 2 != 0;
            tiles -= rest;
        }
    }
};

/* Groups before `group` end at `reached` and have `counted` tiles. */
template <typename Index>
struct GroupCursor {
    Index group, reached;
    uint32_t counted;
};

/* 32 groups from `group` on, one to each lane of a warp, which have tiles `counted` to `counted_with` - 1. They stay in
 * registers from one tile to the next. */
template <typename Index>
struct GroupChunk {
    Index group, reached; /* where they end */
    uint32_t counted, counted_with;
    uint32_t rests;       /* groups of which pairs leave a rest: a bit for each */
    Index begin, end;     /* of the lane's group */
    uint32_t first, size; /* its first tile, and elements of one */

    /* Begin and end of each lane's group. */
    __device__ __forceinline__ void read(const GroupedAxis &axis, const GroupCursor<Index> &from) {
        const int lane = threadIdx.x % 32;
        const Index own = from.group + lane;
        begin = 0, end = 0;
        if (axis.grouping == Grouping::kOffsets) {
            if (own < axis.groups) end = static_cast<Index>(group_bound(axis.data, own + 1, axis.length));
            for (int distance = 1; distance < 32; distance *= 2) {
                const Index other = __shfl_up_sync(0xffffffffu, end, distance);
                if (lane >= distance && other > end) end = other;
            }
            begin = __shfl_up_sync(0xffffffffu, end, 1);
            if (lane == 0 || begin < from.reached) begin = from.reached;
            if (end < from.reached) end = from.reached;
        } else if (own < axis.groups) {
            end = static_cast<Index>(clamp_into(integer_at(axis.data, own), axis.length));
        }
    }

    template <bool kPairs, typename CutOf>
    __device__ __forceinline__ void load(const GroupedAxis &axis, const GroupCursor<Index> &from, const CutOf &cut_of) {
        const int lane = threadIdx.x % 32;
        read(axis, from);
        const auto cut = cut_of(end - begin);
        rests = kPairs ? __ballot_sync(0xffffffffu, cut.rest) : 0;
        const uint32_t tiles = cut.tiles + (cut.rest && has_tile_of_rests(lane));
        uint32_t inclusive = tiles;
        for (int distance = 1; distance < 32; distance *= 2) {
            const uint32_t other = __shfl_up_sync(0xffffffffu, inclusive, distance);
            if (lane >= distance) inclusive += other;
        }
        group = from.group;
        reached = __shfl_sync(0xffffffffu, end, 31);
        counted = from.counted;
        counted_with = from.counted + __shfl_sync(0xffffffffu, inclusive, 31);
        first = from.counted + inclusive - tiles;
        size = cut.size;
    }

    /* The same of tiles of rows that are there or not. */
    __device__ __forceinline__ void load(const GroupCursor<Index> &from, bool is_there) {
        const unsigned there = __ballot_sync(0xffffffffu, is_there);
        group = from.group;
        counted = from.counted;
        counted_with = counted + __popc(there);
        first = counted + __popc(there & ((1u << threadIdx.x % 32) - 1));
    }

    __device__ __forceinline__ bool has(uint32_t tile) const { return counted <= tile && tile < counted_with; }

    __device__ __forceinline__ GroupCursor<Index> next() const { return {group + 32, reached, counted_with}; }

    /* The lane whose tile it is, of those that it has: the last one that begins with it or before. */
    __device__ __forceinline__ int lane_of(uint32_t number) const {
        return 31 - __clz(static_cast<int>(__ballot_sync(0xffffffffu, first <= number)));
    }

    /* A tile that it has. kEven: no element of it is the next group's. */
    template <bool kEven>
    __device__ __forceinline__ MajorTile<Index> tile(uint32_t number) const {
        using Unsigned = std::make_unsigned_t<Index>; /* since other lanes compute, too */
        const int owner = lane_of(number);
        const Unsigned from = static_cast<Unsigned>(begin) + Unsigned{number - first} * size;
        const Index own = __shfl_sync(0xffffffffu, static_cast<Index>(from), owner);
        Index own_end = __shfl_sync(0xffffffffu, end, owner);
        if constexpr (kEven) own_end = min(own + static_cast<Index>(__shfl_sync(0xffffffffu, size, owner)), own_end);
        return {own, own_end, group + owner, own < own_end};
    }

    /* What block `rank` of a pair has: half of a tile of one group, or of one of rests its own; of a last one alone block 1
     * has nothing. */
    template <int kBlockM>
    __device__ __forceinline__ MajorTile<Index> tile_of_pair(uint32_t number, uint32_t rank) const {
        const MajorTile<Index> own = tile<false>(number);
        const Index half = static_cast<Index>(rank) * (kBlockM / 2);
        const int later = static_cast<int>(own.group - group);
        const uint32_t before = rests_before(later);
        const bool of_rests = own.end - own.begin <= kBlockM / 2, of_two = of_rests && __popc(before) % 2 != 0;
        const int owner = of_two && rank == 0 ? 31 - __clz(static_cast<int>(before)) : later;
        const Index rest_end = __shfl_sync(0xffffffffu, end, owner);
        const Index rest = __shfl_sync(0xffffffffu, end - (end - begin) % kBlockM, owner);
        if (!of_rests) return {own.begin + half, own.end, own.group, own.exists};
        return {of_two || rank == 0 ? rest : rest_end, rest_end, group + owner, true, of_two};
    }

private:
    __device__ __forceinline__ uint32_t rests_before(int lane) const { return rests & ((1u << lane) - 1); }

    /* The later one of two, or the last one if no other is left for it. */
    __device__ __forceinline__ bool has_tile_of_rests(int lane) const {
        const int before = __popc(rests_before(lane));
        return before % 2 != 0 || before + 1 == __popc(rests);
    }
};

/* ---- tiles ---- */

/* number / divisor, rounded down, by the divisor's inverse: exact, since both have 32 bits. A division takes some thirty
 * instructions, which is what the first copy of a short product would wait for. */
__device__ __forceinline__ uint32_t divide(uint32_t number, uint64_t inverse) {
    return inverse == 0 ? number : static_cast<uint32_t>(__umul64hi(number, inverse));
}

__device__ __forceinline__ uint32_t first_of_band(const TileSpace &space, uint32_t tile) {
    return divide(tile, space.inverse_of_band) * kBandTiles;
}

/* Where a tile is among `major_tiles` rows of them, as many as the host counted or fewer. */
__device__ __forceinline__ void rasterise(const TileSpace &space, uint32_t tile, uint32_t major_tiles, uint32_t *major,
                                          uint32_t *minor) {
    const uint32_t first = first_of_band(space, tile), within = tile - first * space.minor_tiles;
    const uint32_t height = major_tiles - first < kBandTiles ? major_tiles - first : kBandTiles;
    if (height == kBandTiles)
        *minor = within / kBandTiles;
    else if (major_tiles == space.major_tiles)
        *minor = divide(within, space.inverse_of_last);
    else
        *minor = within / height;
    *major = first + within - *minor * height;
}

/* Whose weights a tile needs. */
struct GuessedTile {
    int32_t group, minor;
};

/* What tile `number` would be if all groups had the same rows. */
__device__ __forceinline__ GuessedTile guess_tile(const TileSpace &space, uint32_t number) {
    const EvenGroups &even = space.even;
    uint32_t major, minor;
    rasterise(space, min(number, even.tiles * space.minor_tiles - 1), even.tiles, &major, &minor);
    return {static_cast<int32_t>(divide(major, even.inverse_of_group)), static_cast<int32_t>(minor)};
}

/* The matrix of B of a tile's group; false: there is none, and the tile has no rows. */
template <typename Index>
__device__ __forceinline__ bool set_weight(const TileSpace &space, OutputTile<Index> &out) {
    out.weight = out.group;
    if (space.weight_indices.data == nullptr) return true;
    const int64_t weight = integer_at(space.weight_indices, out.group);
    const bool exists = weight >= 0 && weight < space.weights;
    out.weight = static_cast<Index>(exists ? weight : 0);
    if (!exists) out.row_end = out.row;
    return exists;
}

/* Walks over every `step`-th tile from `tile` on: a warp, or all warps of a block alike. Where two blocks share a tile
 * (kBlocks), block `rank` of them gets its own rows of it, which may be none. kEven: groups are cut evenly, or all rows.
 * Index counts elements and groups. */
template <typename Index, int kBlockM, int kBlockN, int kBlocks = 1, bool kEven = false>
class TileWalk {
public:
    using Tile = OutputTile<Index>;

    __device__ __forceinline__ TileWalk(const TileSpace &space, uint32_t tile, uint32_t step, uint32_t rank = 0)
        : space_(space),
          tile_(tile),
          step_(step),
          rank_(rank),
          tiles_(space.major_tiles * space.minor_tiles),
          major_tiles_(space.major_tiles) {
        if (space.major.grouping == Grouping::kOffsets)
            chunk_.reached = static_cast<Index>(group_bound(space.major.data, 0, space.major.length));
        chunk_.group = -32;
        if (has_indices()) ask_for_indices();
    }

    /* The next tile of which some block has elements; false: there are no more. Whether all tiles of a band are there is known
     * before any is looked for: by the host's bound alone tiles that are none would lie between the others of the last
     * band, and some blocks would have one more than others. */
    __device__ __forceinline__ bool next(Tile &out) {
        while (tile_ < tiles_) {
            const uint32_t band = first_of_band(space_, tile_);
            const bool counts = counted_ != band && is_bound();
            uint32_t major = min(band + kBandTiles, major_tiles_) - 1, minor = 0;
            if (!counts) rasterise(space_, tile_, major_tiles_, &major, &minor);
            if (is_bound()) look_for(major, band);
            if (counts) {
                counted_ = band;
                tiles_ = major_tiles_ * space_.minor_tiles;
                continue;
            }
            tile_ += step_;
            const MajorTile<Index> own = find(major);
            if (own.exists && set(out, own, static_cast<Index>(minor))) return true;
        }
        return false;
    }

    /* From which tile the next one is looked for. */
    __device__ __forceinline__ uint32_t upcoming() const { return tile_; }

private:
    using Cut = flexgemm::Cut<kBlockM, kBlockN, kBlocks, kEven>;

    /* From the begin of a tile to the rows of this block. */
    __device__ __forceinline__ Index own_rows() const { return static_cast<Index>(rank_) * (kBlockM / kBlocks); }

    __device__ __forceinline__ bool has_indices() const { return space_.major.grouping == Grouping::kIndices; }

    /* The host does not know how many tiles there are. */
    __device__ __forceinline__ bool is_bound() const { return has_bounds(space_.major.grouping) || has_indices(); }

    /* Of groups that are counted: makes the chunk the one that has tile `major`, or, if there is none, counts how many there
     * are. Goes back no further than to where tile `band` is. */
    __device__ __forceinline__ void look_for(uint32_t major, uint32_t band) {
        while (!chunk_.has(major)) {
            const GroupCursor<Index> from = major < chunk_.counted ? band_begin_ : chunk_.next();
            if (from.group >= (has_indices() ? int64_t{space_.major_tiles} : space_.major.groups)) {
                major_tiles_ = from.counted;
                return;
            }
            if (has_indices())
                chunk_.load(from, has_rows(from.group + threadIdx.x % 32));
            else
                chunk_.template load<kBlocks == 2>(space_.major, from,
                                                   [&](Index elements) { return Cut(space_, elements); });
            if (from.counted <= band) band_begin_ = from;
        }
    }

    __device__ __forceinline__ MajorTile<Index> find(uint32_t major) const {
        const GroupedAxis &axis = space_.major;
        if (kBlocks == 2 && space_.rests_in_pairs) return chunk_.template tile_of_pair<kBlockM>(major, rank_);
        if (has_indices()) return find_index(chunk_.group + chunk_.lane_of(major));
        if (is_bound()) return chunk_.template tile<kEven>(major);
        const Cut cut(space_, static_cast<Index>(axis.length));
        const uint32_t group = axis.grouping == Grouping::kNone ? 0 : major / cut.tiles,
                       own = major - group * cut.tiles;
        const auto begin = static_cast<Index>(own) * static_cast<Index>(cut.size),
                   length = static_cast<Index>(axis.length);
        return {space_.major_is_columns ? begin : begin + own_rows(),
                kEven ? min(begin + static_cast<Index>(cut.size), length) : length, static_cast<Index>(group),
                begin < length};
    }

    /* The index of element i; -1: it is no group's. Without a branch, so that memory is asked for many at once. */
    __device__ __forceinline__ int32_t index_at(int64_t i) const {
        const GroupedAxis &axis = space_.major;
        const int64_t index = integer_at(axis.data, i < axis.length ? i : axis.length - 1);
        return i >= axis.length || index < 0 || index >= axis.groups ? -1 : static_cast<int32_t>(index);
    }

    /* Whether a block of rows of a tile has a group: its first row has. */
    __device__ __forceinline__ bool has_rows(int64_t major) const {
        bool has = false;
        for (int i = 0; i < kBlocks; ++i) has |= index_at((major * kBlocks + i) * (kBlockM / kBlocks)) >= 0;
        return has;
    }

    /* L2, for those of the tile that is the first one if no rows before it are padding, while these are counted. */
    __device__ __forceinline__ void ask_for_indices() const {
        constexpr int kOfLine = 128 / static_cast<int>(sizeof(int32_t));
        uint32_t major, minor;
        rasterise(space_, min(tile_, tiles_ - 1), major_tiles_, &major, &minor);
        const int row = threadIdx.x % 32 * kOfLine;
        const int64_t i = int64_t{major} * kBlockM + row;
        if (row < kBlockM && i < space_.major.length)
            ptx::prefetch_l2(static_cast<const int32_t *>(space_.major.data.data) + i);
    }

    /* The elements from the begin of a tile on that have the index of its first one. Any block of rows may be another
     * group's. */
    __device__ __forceinline__ MajorTile<Index> find_index(int64_t major) const {
        constexpr int kBlock = kBlockM / kBlocks, kReads = (kBlock + 31) / 32;
        const int64_t begin = (major * kBlocks + rank_) * kBlock;
        int32_t index[kReads], other = -1;
#pragma unroll
        for (int i = 0; i < kReads; ++i) index[i] = index_at(begin + i * 32 + threadIdx.x % 32);
        if constexpr (kBlocks == 2) other = index_at((major * kBlocks + 1 - rank_) * kBlock);

        const int32_t group = __shfl_sync(0xffffffffu, index[0], 0);
        int count = 0;
#pragma unroll
        for (int i = 0; i < kReads; ++i) {
            const unsigned others = __ballot_sync(0xffffffffu, index[i] != group);
            if (count == i * 32) count += others == 0 ? 32 : __ffs(static_cast<int>(others)) - 1;
        }
        const auto from = static_cast<Index>(begin);
        return {from, group < 0 ? from : from + count, group < 0 ? other : group, group >= 0 || other >= 0,
                group >= 0 && other >= 0 && group != other};
    }

    __device__ __forceinline__ bool set(Tile &out, const MajorTile<Index> &own, Index minor) {
        const auto minor_length = static_cast<Index>(space_.minor_length);
        if (space_.major_is_columns)
            out = {minor * kBlockM + own_rows(), minor_length, own.begin, own.end};
        else
            out = {own.begin, own.end, minor * kBlockN, minor_length};
        out.group = own.group;
        out.apart = own.apart;
        out.k_begin = 0;
        out.k_end = static_cast<Index>(space_.k_bytes);
        if (space_.k_offsets.data) {
            const auto bound = [&](Index i) {
                return static_cast<Index>(group_bound(space_.k_offsets, i, space_.k) * space_.element_bytes);
            };
            out.k_begin = bound(own.group);
            out.k_end = max(bound(own.group + 1), out.k_begin);
        }
        return set_weight(space_, out) || own.apart; /* the other block may have one that exists, with as many steps */
    }

    const TileSpace &space_;
    uint32_t tile_, step_, rank_;
    uint32_t tiles_, major_tiles_;       /* bounds, until the end of the groups has been seen */
    uint32_t counted_ = ~uint32_t{0};    /* the band whose tiles have been counted */
    GroupChunk<Index> chunk_ = {};       /* at first what is before all groups */
    GroupCursor<Index> band_begin_ = {}; /* the chunk that has the first tile of the band */
};

}  // namespace flexgemm
