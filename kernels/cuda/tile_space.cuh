/*
 * The tiles of a product as the host counts them, for every layout of groups.
 *
 * The host never sees what the groups hold, and sizes the grid by a bound: G groups that share a length L need at most
 * (L + min(G, L) * (block - 1)) / block tiles along it, and masked ones G * ceil(L / block). Tiles are numbered along
 * the axis that is grouped, the major one, and across it.
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

/* Groups of which the device alone knows how many elements each has. */
__host__ __device__ constexpr bool has_bounds(Grouping grouping) {
    return grouping == Grouping::kSizes || grouping == Grouping::kOffsets;
}

struct GroupedAxis {
    Grouping grouping;
    Offsets data; /* also sizes and indices */
    int64_t groups, length;
    int32_t block; /* the most elements of a tile; set for a tile shape */
};

/* What tiles there would be if all groups had the same rows: those that there are on average, or that the caller expects.
 * Set for a tile shape. */
struct EvenGroups {
    int32_t rows;
    uint32_t tiles, of_group; /* major ones, of all groups and of one */
    uint64_t inverse_of_group;
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
    EvenGroups even; /* of groups of rows */
    /* Of few groups of rows: the lowest tiles that may be chosen (few_groups.cuh), 0: they have the block set; and what a tile
     * takes besides its rows, in rows. Set for a plan. */
    int32_t least_block;
    uint32_t block_overhead;
    bool rests_in_pairs; /* a tile may have rests of two groups; set for a tile shape */
};

/* Tiles in bands of kBandTiles major tiles, along the major axis of a band first: blocks that run together share a few
 * rows of A and a few rows of B, which L2 then holds. */
constexpr uint32_t kBandTiles = 8;

/* Of tiles that have as much as each other, but for multiples of 16. */
template <typename T>
__host__ __device__ constexpr T even_size(T elements, T tiles) {
    return tiles > 0 ? ceil_div(ceil_div(elements, tiles), T{16}) * 16 : 0;
}

inline Offsets make_offsets(const fg_tensor &tensor, int64_t groups) {
    return {tensor.data, tensor.dtype == FG_INT64, tensor.shape[0] == groups + 1};
}

inline TileSpace make_tile_space(const fg_gemm_params &params) {
    const fg_gemm_shape shape = fg_gemm_shape_of(&params);
    TileSpace space = {};
    space.major_is_columns = params.layout == FG_GEMM_N_GROUPED;
    space.major.length = space.major_is_columns ? shape.n : shape.m;
    space.major.groups = shape.groups;
    const int64_t rows = fg_gemm_all_rows(&params).m;
    space.even.rows = static_cast<int32_t>(rows > shape.groups ? ceil_div(rows, shape.groups) : 1);
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

/* Tiles are counted in 32 bits, since to divide in 64 takes longer than a step of many products, and so are eight times
 * the tiles across (kBandTiles). What Hopper kernels take fits without a limit: groups and elements across are int32. */
constexpr int64_t kMostTiles = (int64_t{1} << 29) - 1;

/* Returns how many tiles there are at most. `blocks` share the rows of one. */
inline int64_t set_tiles(TileSpace &space, int block_m, int block_n, int blocks = 1) {
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
    space.rests_in_pairs = blocks == 2 && has_bounds(space.major.grouping) && !space.major_is_columns;
    if (space.major.grouping == Grouping::kNone) return major_tiles * space.minor_tiles;
    const int64_t whole = space.rests_in_pairs ? (space.even.rows + block / 2 - 1) / block : 0; /* without rests */
    const int64_t of_group = whole > 0 ? whole : ceil_div<int64_t>(space.even.rows, block), of_all = of_group * groups;
    const bool fits = of_all < major_tiles && space.major.grouping != Grouping::kIndices;
    space.even.tiles = static_cast<uint32_t>(fits ? of_all : major_tiles);
    space.even.of_group = static_cast<uint32_t>(of_group);
    space.even.inverse_of_group = inverse_of(space.even.of_group);
    return major_tiles * space.minor_tiles;
}

}  // namespace flexgemm
