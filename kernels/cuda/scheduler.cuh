/*
 * From a tile number to an output tile, for every layout of groups.
 *
 * The grid is sized on the host, which never sees what the groups hold: G groups that share a length L need at most
 * (L + min(G, L) * (block - 1)) / block tiles along it, and masked ones G * ceil(L / block). Tiles are numbered along
 * the axis that is grouped, the major one, and across it. Who works on a tile looks for its group, a warp scanning 32
 * groups at a time, and stops when the groups have fewer tiles. Offsets are clamped into 0..L and replaced by their
 * running maximum, which makes groups disjoint and keeps the bound true for any content: a decreasing offset is an
 * empty group.
 */
#pragma once

#include "../plan.h"
#include "common.cuh"

namespace flexgemm {

enum class Grouping : int32_t {
    kNone,    /* one group */
    kUniform, /* each group has the whole length, its own tiles behind those of the group before */
    kSizes,   /* each has the first data[g] of the length */
    kOffsets, /* groups share the length */
    kIndices, /* they share it, and data[i] is the group of element i, the same throughout a tile, then perhaps -1 */
};

/* G ends or G + 1 bounds on the device; NULL: there are none. */
struct Offsets {
    const void *data;
    bool wide; /* int64 */
    bool has_begin;
};

struct GroupedAxis {
    Grouping grouping;
    Offsets data; /* also sizes and indices */
    int64_t groups, length;
    int32_t block; /* the most elements of a tile; set for a tile shape */
};

/* The tiles of a product, for both families. */
struct TileSpace {
    GroupedAxis major;
    bool major_is_columns;
    int64_t minor_length;
    uint32_t major_tiles, minor_tiles;         /* set for a tile shape; the major ones a bound */
    uint64_t inverse_of_band, inverse_of_last; /* of the tiles of a band, and of the major ones of the last band */
    int64_t k, k_bytes, element_bytes;
    Offsets k_offsets;      /* of groups along K */
    Offsets weight_indices; /* `has_begin` has no meaning */
    int64_t weights;
};

/* Rows [row, row_end) and columns [column, column_end) of a group, of which a tile takes the first block_m and block_n;
 * `weight` is the matrix of B; bytes [k_begin, k_end) of K. */
struct OutputTile {
    int64_t row, row_end, column, column_end, group, weight, k_begin, k_end;
    bool apart; /* the blocks of a pair have rows of different groups */
};

/* Tiles in bands of kBandTiles major tiles, along the major axis of a band first: blocks that run together share a few
 * rows of A and a few rows of B, which L2 then holds. */
constexpr uint32_t kBandTiles = 8;

/* Of tiles that have as much as each other, but for multiples of 16. */
template <typename T>
__host__ __device__ constexpr T even_size(T elements, T tiles) {
    return tiles > 0 ? ceil_div(ceil_div(elements, tiles), T{16}) * 16 : 0;
}

/* ---- host ---- */

inline Offsets make_offsets(const fg_tensor &tensor, int64_t groups) {
    return {tensor.data, tensor.dtype == FG_INT64, tensor.shape[0] == groups + 1};
}

inline TileSpace make_tile_space(const fg_gemm_params &params) {
    const fg_gemm_shape shape = fg_gemm_shape_of(&params);
    TileSpace space = {};
    space.major_is_columns = params.layout == FG_GEMM_N_GROUPED;
    space.major.length = space.major_is_columns ? shape.n : shape.m;
    space.major.groups = shape.groups;
    space.minor_length = space.major_is_columns ? shape.m : shape.n;
    space.element_bytes = static_cast<int64_t>(fg_dtype_size(params.a.dtype));
    space.k = shape.k;
    space.k_bytes = shape.k * space.element_bytes;
    const Offsets data = params.grouping.present ? make_offsets(params.grouping, shape.groups) : Offsets{};
    switch (params.layout) {
        case FG_GEMM_M_GROUPED:
        case FG_GEMM_N_GROUPED:
            space.major.grouping = Grouping::kOffsets;
            space.major.data = data;
            break;
        case FG_GEMM_M_GROUPED_MASKED:
            space.major.grouping = Grouping::kSizes;
            space.major.data = data;
            break;
        case FG_GEMM_M_GROUPED_CONTIGUOUS:
            space.major.grouping = Grouping::kIndices;
            space.major.data = data;
            break;
        case FG_GEMM_K_GROUPED:
            space.k_offsets = data;
            space.major.grouping = Grouping::kUniform;
            break;
        case FG_GEMM_BATCHED:
            space.major.grouping = Grouping::kUniform;
            break;
        default:
            space.major.grouping = Grouping::kNone;
    }
    if (params.weight_indices.present) {
        space.weight_indices = make_offsets(params.weight_indices, shape.groups);
        space.weights = params.b.shape[0];
    }
    return space;
}

/* ceil(2^64 / divisor), by which divide() divides; 0 of 1, and of none. */
inline uint64_t inverse_of(uint32_t divisor) { return divisor > 1 ? ~uint64_t{0} / divisor + 1 : 0; }

/* Tiles are counted in 32 bits, since no memory holds the output of more: to divide in 64 takes longer than a step of
 * many products. Returns how many there are at most. */
inline int64_t set_tiles(TileSpace &space, int block_m, int block_n) {
    const int64_t block = space.major_is_columns ? block_n : block_m, length = space.major.length;
    space.major.block = static_cast<int32_t>(block);
    const int64_t groups = space.major.groups, nonempty = groups < length ? groups : length;
    int64_t major_tiles;
    switch (space.major.grouping) {
        case Grouping::kOffsets:
            major_tiles = (length + nonempty * (block - 1)) / block;
            break;
        case Grouping::kUniform:
        case Grouping::kSizes:
            major_tiles = groups * ceil_div<int64_t>(length, block);
            break;
        default:
            major_tiles = ceil_div<int64_t>(length, block);
    }
    space.major_tiles = static_cast<uint32_t>(major_tiles);
    space.minor_tiles =
        static_cast<uint32_t>(ceil_div<int64_t>(space.minor_length, space.major_is_columns ? block_m : block_n));
    space.inverse_of_band = inverse_of(kBandTiles * space.minor_tiles);
    space.inverse_of_last = inverse_of(space.major_tiles % kBandTiles);
    return major_tiles * space.minor_tiles;
}

/* ---- groups ---- */

/* Elements begin .. end - 1 of `group`; a tile takes at most a block of them from `begin`. begin == end: none, which is
 * no tile unless the other block of a pair has some. */
struct MajorTile {
    int64_t begin, end, group;
    bool paired, apart;
};

/* Groups before `group` end at `reached` and have `counted` tiles. */
struct GroupCursor {
    int64_t group, reached;
    uint32_t counted;
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
 * none costs a tile's reading for a few elements. */
template <int kBlock, bool kEven>
struct Cut {
    uint32_t tiles, size;
    __device__ __forceinline__ Cut(const GroupedAxis &axis, int64_t length) {
        if constexpr (kEven) { /* of groups that TMA reads, whose rows fit into 31 bits */
            const auto elements = static_cast<uint32_t>(length);
            tiles = ceil_div(elements, static_cast<uint32_t>(axis.block));
            size = even_size(elements, tiles);
        } else {
            tiles = static_cast<uint32_t>(ceil_div<int64_t>(length, kBlock));
            size = kBlock;
        }
    }
    /* Of a group that begins at `begin`. */
    __device__ __forceinline__ int64_t begin_of(int64_t begin, uint32_t tile) const {
        return begin + int64_t{tile} * size;
    }
    __device__ __forceinline__ int64_t end_of(int64_t begin, int64_t end, uint32_t tile) const {
        const int64_t next = begin_of(begin, tile + 1);
        return kEven && next < end ? next : end;
    }
};

/* Major tile `target`, from the cursor on, by one warp. The cursor moves on over groups that lie before tile `kept`,
 * the lowest that will still be asked for; when there is no such tile, `total` becomes the number of all. */
template <int kBlock, bool kEven>
__device__ MajorTile scan_groups(const GroupedAxis &axis, uint32_t target, uint32_t kept, GroupCursor &cursor,
                                 uint32_t &total) {
    const int lane = threadIdx.x % 32;
    const bool shared_length = axis.grouping == Grouping::kOffsets;
    GroupCursor at = cursor;
    while (at.group < axis.groups) {
        const int64_t group = at.group + lane;
        int64_t begin = 0, end = 0;
        if (shared_length) {
            if (group < axis.groups) end = group_bound(axis.data, group + 1, axis.length);
            for (int distance = 1; distance < 32; distance *= 2) {
                const int64_t other = __shfl_up_sync(0xffffffffu, end, distance);
                if (lane >= distance && other > end) end = other;
            }
            begin = __shfl_up_sync(0xffffffffu, end, 1);
            if (lane == 0 || begin < at.reached) begin = at.reached;
            if (end < at.reached) end = at.reached;
        } else if (group < axis.groups) {
            end = clamp_into(integer_at(axis.data, group), axis.length);
        }

        const Cut<kBlock, kEven> cut(axis, end - begin);
        uint32_t inclusive = cut.tiles;
        for (int distance = 1; distance < 32; distance *= 2) {
            const uint32_t other = __shfl_up_sync(0xffffffffu, inclusive, distance);
            if (lane >= distance) inclusive += other;
        }
        const uint32_t first = at.counted + inclusive - cut.tiles; /* this group's first tile */
        const unsigned found = __ballot_sync(0xffffffffu, first <= target && target < first + cut.tiles);
        if (found) {
            const int owner = __ffs(static_cast<int>(found)) - 1;
            return {__shfl_sync(0xffffffffu, cut.begin_of(begin, target - first), owner),
                    __shfl_sync(0xffffffffu, cut.end_of(begin, end, target - first), owner), at.group + owner};
        }
        at = {at.group + 32, __shfl_sync(0xffffffffu, end, 31), __shfl_sync(0xffffffffu, first + cut.tiles, 31)};
        if (at.counted <= kept) cursor = at;
    }
    total = at.counted;
    return {0, 0, 0};
}

/* The elements from the begin of tile `target` on that have the index of its first one, by one warp. */
template <int kBlock>
__device__ MajorTile read_indices(const GroupedAxis &axis, int64_t target) {
    MajorTile tile = {target * kBlock, target * kBlock, -1};
    if (target * kBlock < axis.length) tile.group = integer_at(axis.data, target * kBlock);
    if (tile.group < 0 || tile.group >= axis.groups) return tile;
    for (int read = 0; read < kBlock; read += 32) {
        const int64_t i = target * kBlock + read + threadIdx.x % 32;
        const unsigned own = __ballot_sync(0xffffffffu, i < axis.length && integer_at(axis.data, i) == tile.group);
        if (own != 0xffffffffu) {
            tile.end += __ffs(static_cast<int>(~own)) - 1;
            break;
        }
        tile.end += 32;
    }
    return tile;
}

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

/* Walks over every `step`-th tile from `tile` on: a warp, or all warps of a block alike. Where kBlocks blocks share a
 * tile, block `rank` of them gets its own rows of it, which may be none. kEven: groups are cut evenly, or all rows. */
template <int kBlockM, int kBlockN, int kBlocks = 1, bool kEven = false>
class TileWalk {
public:
    __device__ __forceinline__ TileWalk(const TileSpace &space, uint32_t tile, uint32_t step, uint32_t rank = 0)
        : space_(space),
          tile_(tile),
          step_(step),
          rank_(rank),
          tiles_(space.major_tiles * space.minor_tiles),
          major_tiles_(space.major_tiles) {
        if (space.major.grouping == Grouping::kOffsets)
            cursor_.reached = group_bound(space.major.data, 0, space.major.length);
    }

    /* The next tile that has rows and columns; false: there are no more. Whether all tiles of a band are there is known
     * before any is looked for: by the host's bound alone tiles that are none would lie between the others of the last
     * band, and some blocks would have one more than others. */
    __device__ __forceinline__ bool next(OutputTile &out) {
        while (tile_ < tiles_) {
            const uint32_t band = first_of_band(space_, tile_);
            uint32_t major, minor;
            rasterise(space_, tile_, major_tiles_, &major, &minor);
            const bool counts = counted_ != band && is_bound();
            const MajorTile own = find(counts ? min(band + kBandTiles, major_tiles_) - 1 : major, band);
            if (counts) {
                counted_ = band;
                tiles_ = major_tiles_ * space_.minor_tiles;
                continue;
            }
            tile_ += step_;
            if ((own.begin < own.end || own.paired) && set(out, own, minor)) return true;
        }
        return false;
    }

private:
    /* The host does not know how many tiles there are. */
    __device__ __forceinline__ bool is_bound() const {
        return space_.major.grouping == Grouping::kSizes || space_.major.grouping == Grouping::kOffsets;
    }

    __device__ __forceinline__ MajorTile find(uint32_t major, uint32_t band) {
        return space_.major_is_columns ? find_in_blocks<kBlockN>(major, band) : find_in_blocks<kBlockM>(major, band);
    }

    template <int kBlock>
    __device__ __forceinline__ MajorTile find_in_blocks(uint32_t major, uint32_t band) {
        const GroupedAxis &axis = space_.major;
        const bool whole = axis.grouping == Grouping::kNone;
        if (whole && !kEven) return {int64_t{major} * kBlock, axis.length, 0};
        if (axis.grouping == Grouping::kIndices) return find_index<kBlock>(axis, major);
        if (whole || axis.grouping == Grouping::kUniform) {
            const Cut<kBlock, kEven> cut(axis, axis.length);
            const uint32_t own = major % cut.tiles;
            return {cut.begin_of(0, own), cut.end_of(0, axis.length, own), major / cut.tiles};
        }
        return scan_groups<kBlock, kEven>(axis, major, band, cursor_, major_tiles_);
    }

    /* Any block of rows may be another group's. */
    template <int kBlock>
    __device__ __forceinline__ MajorTile find_index(const GroupedAxis &axis, uint32_t major) {
        MajorTile own = read_indices<kBlock / kBlocks>(axis, int64_t{major} * kBlocks + rank_);
        if constexpr (kBlocks == 2) {
            const MajorTile other = read_indices<kBlock / kBlocks>(axis, int64_t{major} * kBlocks + 1 - rank_);
            own.paired = other.begin < other.end;
            own.apart = own.paired && own.begin < own.end && own.group != other.group;
            if (own.begin >= own.end) own.group = other.group;
        }
        return own;
    }

    __device__ __forceinline__ bool set(OutputTile &out, const MajorTile &own, int64_t minor) {
        constexpr int kRows = kBlockM / kBlocks;
        if (space_.major_is_columns)
            out = {minor * kBlockM + rank_ * kRows, space_.minor_length, own.begin, own.end};
        else if (space_.major.grouping == Grouping::kIndices)
            out = {own.begin, own.end, minor * kBlockN, space_.minor_length};
        else
            out = {own.begin + rank_ * kRows, own.end, minor * kBlockN, space_.minor_length};
        out.group = out.weight = own.group;
        out.apart = own.apart;
        out.k_end = space_.k_bytes;
        if (space_.k_offsets.data) {
            out.k_begin = group_bound(space_.k_offsets, own.group, space_.k) * space_.element_bytes;
            out.k_end = group_bound(space_.k_offsets, own.group + 1, space_.k) * space_.element_bytes;
            if (out.k_end < out.k_begin) out.k_end = out.k_begin;
        }
        if (space_.weight_indices.data == nullptr) return true;
        out.weight = integer_at(space_.weight_indices, own.group);
        return out.weight >= 0 && out.weight < space_.weights;
    }

    const TileSpace &space_;
    uint32_t tile_, step_, rank_;
    uint32_t tiles_, major_tiles_;    /* bounds, until the end of the groups has been seen */
    uint32_t counted_ = ~uint32_t{0}; /* the band whose tiles have been counted */
    GroupCursor cursor_ = {};
};

}  // namespace flexgemm
