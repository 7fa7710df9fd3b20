/*
 * Ends of tiles of gemm_sm90.cuh: a warp's 16 rows of sums are scaled, converted and stored, or added to the output.
 *
 * They go through slabs of shared memory, 16 rows of 128 bytes. Whole ones of 16 bits or float32 the copy engine takes
 * from there; what lacks rows or columns, or wants more than scales and a bias, the warp stores itself.
 */
#pragma once

#include <type_traits>

#include "gemm_mainloop_sm90.cuh"

namespace flexgemm {

/* ---- slabs ---- */

/* Two adjacent sums of a row to a slab of 16 rows of 128 bytes, 16-byte chunk c of row r at c ^ (r % 8). */
template <typename T>
__device__ __forceinline__ void store_pair(uint8_t *slab, int row, int byte, float first, float second) {
    struct alignas(2 * sizeof(T)) Pair {
        T element[2];
    };
    *reinterpret_cast<Pair *>(slab + row * kSm90SlabBytes + (byte / 16 ^ row % 8) * 16 +
                              byte % 16) = {from_float<T>(first), from_float<T>(second)};
}

/* What the sums of a thread's two rows are multiplied by. */
struct RowFactors {
    float of[2];
};

/* How a tile's columns come in slabs: those of the last one end where the tile does, and begin in the one before where
 * they have to. */
template <typename T, int kColumns>
struct SlabColumns {
    static constexpr int kOfSlab = kSm90SlabBytes / static_cast<int>(sizeof(T)), kSlabs = ceil_div(kColumns, kOfSlab);
    static constexpr int kTwice = kSlabs * kOfSlab - kColumns; /* columns that the last two slabs have */
    __device__ static constexpr int begin_of(int slab) { return slab * kOfSlab - (slab == kSlabs - 1 ? kTwice : 0); }
};

/* What a slab has of a tile: columns from `column` on, and what they are multiplied by. Of float32 the first `blank`,
 * in multiples of 16, are zeros. */
struct SlabPart {
    int column;
    RowFactors factors = {{1.0f, 1.0f}};
    int blank = 0;
};

/* 16 rows of it, converted. Of each 8 columns a lane holds four sums, of two rows. */
template <typename T, int kCount>
__device__ __forceinline__ void fill_slab(const float (&sum)[kCount], uint8_t *slab, int lane, const SlabPart &part) {
    constexpr int kBlocks = kSm90SlabBytes / static_cast<int>(sizeof(T)) / 8;
    const int first = part.column / 8;
    if constexpr (sizeof(T) == 2) {
        struct alignas(4) Pair {
            T element[2];
        };
#pragma unroll
        for (int block = 0; block < kBlocks; block += 2) {
            uint32_t words[4]; /* rows 0 to 7 and 8 to 15 of a block, and of the next */
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float *sums = &sum[4 * (first + block + i / 2) + 2 * (i % 2)];
                const float factor = part.factors.of[i % 2];
                const Pair pair = {from_float<T>(sums[0] * factor), from_float<T>(sums[1] * factor)};
                memcpy(&words[i], &pair, sizeof pair);
            }
            ptx::stmatrix_x4(slab + lane % 16 * kSm90SlabBytes + ((block + lane / 16) ^ lane % 8) * 16, words);
        }
    } else {
        /* Two rows beside each other have the same banks in a block: one of them takes the blocks in turns. */
        const bool odd = lane / 4 % 2;
#pragma unroll
        for (int block = 0; block < kBlocks; block += 2)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                constexpr float kZeros[2] = {0.0f, 0.0f};
                const float *own = &sum[4 * (first + block) + 2 * half];
                const bool blank = block * 8 < part.blank;
                const float *sums = blank ? kZeros : own, *next = blank ? kZeros : own + 4;
                const int row = lane / 4 + 8 * half, byte = lane % 4 * 8;
                const float factor = part.factors.of[half];
                store_pair<T>(slab, row, (block + odd) * 32 + byte, factor * (odd ? next[0] : sums[0]),
                              factor * (odd ? next[1] : sums[1]));
                store_pair<T>(slab, row, (block + !odd) * 32 + byte, factor * (odd ? sums[0] : next[0]),
                              factor * (odd ? sums[1] : next[1]));
            }
    }
}

/* ---- scaled sums as they are ---- */

/* Converts and stores a warp's 16 rows, or adds them to what is there. The copy engine does it while the warp goes on;
 * each element is added to once, or a second time when the first is done, so that sums do not depend on an order. */
template <typename T, bool kAdd, typename Tile, int kCount>
__device__ __forceinline__ void store_boxes(const float (&sum)[kCount], const GemmSm90Args &args, int group,
                                            uint8_t *slabs, int lane, int64_t first_row, int first_column,
                                            const RowFactors &factors = {{1.0f, 1.0f}}) {
    using Columns = SlabColumns<T, 2 * kCount>;
    constexpr int kSlabs = Columns::kSlabs;
    constexpr int kUnit = kAdd ? 1 : sizeof(T); /* coordinates along a row are of float32, or of bytes */
    constexpr int kTogether = kSlabs == Tile::kSlabs ? kSlabs : 1; /* all slabs that there are, or one by one */
    static_assert(kSlabs % Tile::kSlabs == 0, "slabs are used in turn");
    const int row = static_cast<int>(first_row);
#pragma unroll
    for (int i = 0; i < kSlabs; i += kTogether) {
        uint8_t *slab = slabs + i % Tile::kSlabs * Tile::kSlabBytes;
        if (ptx::elect()) ptx::tma_wait_read<Tile::kSlabs / kTogether - 1>();
        __syncwarp();
#pragma unroll
        for (int j = 0; j < kTogether; ++j)
            fill_slab<T>(sum, slab + j * Tile::kSlabBytes, lane,
                         {Columns::begin_of(i + j), factors, kAdd && i + j == kSlabs - 1 ? Columns::kTwice : 0});
        ptx::fence_proxy_async();
        __syncwarp();
        if (ptx::elect()) {
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
                const int x = (first_column + Columns::begin_of(i + j)) * kUnit;
                if constexpr (kAdd)
                    ptx::tma_add_3d(&args.map_out, slab + j * Tile::kSlabBytes, x, row, group);
                else
                    ptx::tma_store_3d(&args.map_out, slab + j * Tile::kSlabBytes, x, row, group);
            }
            ptx::tma_commit();
        }
    }
}

/* What a lane passes on of a slab: chunk lane % 8 of four rows. */
template <typename T>
__device__ __forceinline__ T slab_chunk(const uint8_t *slab, int lane, int i) {
    const int row = lane / 8 + 4 * i;
    return *reinterpret_cast<const T *>(slab + row * kSm90SlabBytes + (lane % 8 ^ row % 8) * 16);
}

/* The first `count` of a warp's 16 rows, and the columns that there are: by the warp itself. */
template <typename T, bool kAdd, typename Tile, int kCount>
__device__ __forceinline__ void store_some(const float (&sum)[kCount], const GemmSm90Args &args, int group,
                                           uint8_t *slabs, int lane, int64_t first_row, int count, int first_column,
                                           int columns) {
    using Columns = SlabColumns<T, 2 * kCount>;
    constexpr int kChunkColumns = 16 / static_cast<int>(sizeof(T));
    struct alignas(16) Chunk {
        T element[kChunkColumns];
    };
    const Epilogue &to = args.epilogue;
    const int column = lane % 8 * kChunkColumns;
    const bool aligned = args.out_aligned && first_column % kChunkColumns == 0;
    T *const out = static_cast<T *>(to.out) + group * to.out_group_stride + first_column + column;
    if (ptx::elect()) ptx::tma_wait_read<0>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Columns::kSlabs; ++i) {
        uint8_t *slab = slabs + i % Tile::kSlabs * Tile::kSlabBytes;
        const int begin = Columns::begin_of(i);
        if (Tile::kSlabs == 1) __syncwarp(); /* all have read it */
        fill_slab<T>(sum, slab, lane, {begin});
        __syncwarp();
        const int inside = begin + column < i * Columns::kOfSlab ? 0 : columns - begin - column;
#pragma unroll 1
        for (int j = 0; j < 4 && lane / 8 + 4 * j < count && inside > 0; ++j) {
            T *target = out + (first_row + lane / 8 + 4 * j) * to.out_stride + begin;
            const Chunk chunk = slab_chunk<Chunk>(slab, lane, j);
            if (!kAdd && aligned && inside >= kChunkColumns) {
                *reinterpret_cast<Chunk *>(target) = chunk;
                continue;
            }
#pragma unroll
            for (int k = 0; k < kChunkColumns; ++k)
                if (k < inside) {
                    if constexpr (kAdd)
                        target[k] += chunk.element[k];
                    else
                        target[k] = chunk.element[k];
                }
        }
    }
}

template <typename T, bool kAdd, typename Tile, int kCount>
__device__ __forceinline__ void store_sums(const float (&sum)[kCount], const GemmSm90Args &args, int group,
                                           uint8_t *slabs, int lane, int64_t first_row, int count, int first_column,
                                           int columns) {
    const bool aligned = first_column * static_cast<int>(sizeof(T)) % 16 == 0; /* groups along N begin anywhere */
    if (args.out_in_boxes && aligned && columns >= 2 * kCount && count >= 16)
        store_boxes<T, kAdd, Tile>(sum, args, args.out_grouped ? group : 0, slabs, lane, first_row, first_column);
    else
        store_some<T, kAdd, Tile>(sum, args, group, slabs, lane, first_row, count, first_column, columns);
}

/* ---- any other output ---- */

/* Activations, SwiGLU, fp8, and what else a warp's rows may want. 32 columns at a time go through a slab as float32; the
 * others move up behind them, so that one copy of this code serves all. */
template <int kCount>
__device__ __forceinline__ void finish_sums(float (&sum)[kCount], const GemmSm90Args &args, int group, uint8_t *slab,
                                            int lane, int64_t first_row, int count, int first_column, int columns) {
    constexpr int kSlabColumns = kSm90SlabBytes / 4, kBlocks = kSlabColumns / 8;
    const int chunk = lane % 8;
#pragma unroll 1
    for (int column = 0; column < columns && column < 2 * kCount; column += kSlabColumns) {
        __syncwarp();
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                store_pair<float>(slab, lane / 4 + 8 * half, (block * 8 + lane % 4 * 2) * 4, sum[4 * block + 2 * half],
                                  sum[4 * block + 2 * half + 1]);
#pragma unroll
        for (int i = 4 * kBlocks; i < kCount; ++i) sum[i - 4 * kBlocks] = sum[i];
        __syncwarp();
        const int first = column + chunk * 4, inside = min(columns - first, 4);
#pragma unroll 1
        for (int row = lane / 8; row < count && inside > 0 && row < 16; row += 4) {
            const float4 sums = *reinterpret_cast<const float4 *>(slab + row * kSm90SlabBytes + (chunk ^ row % 8) * 16);
            float value[4] = {sums.x, sums.y, sums.z, sums.w};
            activate_and_store(args.epilogue, value, group, first_row + row, first_column + first, inside);
        }
    }
}

/* ---- tiles ---- */

/* Calls store(element, add) with a value of the output's type, and whether sums are added to what is there. */
template <typename Store>
__device__ __forceinline__ void with_output(const Epilogue &to, const Store &store) {
    if (to.out_dtype == FG_FLOAT16)
        store(__half{}, std::false_type{});
    else if (to.out_dtype == FG_BFLOAT16)
        store(__nv_bfloat16{}, std::false_type{});
    else if (to.accumulate)
        store(float{}, std::true_type{});
    else
        store(float{}, std::false_type{});
}

/* Alpha and the scales of a thread's two rows, times that of B where all columns have one. Rows that are not there have
 * the scale of the last one. */
__device__ __forceinline__ RowFactors row_factors_of(const Epilogue &to, const Sm90Work &work, int64_t first_row,
                                                     int local_row, int count) {
    if (to.block_scaled) return {to.alpha, to.alpha};
    if (to.one_factor) {
        const float factor = to.alpha * scale_at(to.scale_a, 0, 0) * scale_at(to.scale_b, 0, 0);
        return {factor, factor};
    }
    float scale_a[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
        scale_a[half] = scale_at(to.scale_a, work.group, first_row + min(local_row + 8 * half, count - 1));
    const float scale_b = to.scale_b.step == 0 ? scale_at(to.scale_b, work.weight, 0) : 1.0f;
    return {to.alpha * scale_a[0] * scale_b, to.alpha * scale_a[1] * scale_b};
}

/* Where a thread is in its warpgroup, and its warp's slabs. */
template <typename Tile>
struct Place {
    int lane, warp_row;
    uint8_t *slabs;
    __device__ __forceinline__ explicit Place(uint8_t *all_slabs) {
        const int thread = ptx::opaque(static_cast<int>(threadIdx.x)) - ptx::kWarpgroup;
        lane = thread % 32;
        warp_row = thread % ptx::kWarpgroup / 32 * 16;
        slabs = all_slabs + thread / 32 * Tile::kSlabs * Tile::kSlabBytes;
    }
};

/* Finishes the parts of a warpgroup's 64 rows of a whole tile, and none of any other: scales and store. Registers are
 * few while products are under way, which is why there are no other outputs, and why sums are scaled as they are
 * converted. */
template <typename Tile>
struct WholeTile {
    const GemmSm90Args &args;
    const Sm90Work &work;
    int warpgroup;
    uint8_t *slabs;
    RowFactors factors;

    /* Reads the scales, while something is multiplied. */
    __device__ __forceinline__ void prepare() {
        if (!work.whole) return;
        const Place<Tile> at(slabs);
        factors = row_factors_of(args.epilogue, work, work.first_row + warpgroup * Tile::kWarpgroupRows,
                                 at.warp_row + at.lane / 4, Tile::kWarpgroupRows);
    }

    template <int kCount>
    __device__ __forceinline__ void operator()(const float (&sum)[kCount], int part) {
        if (!work.whole) return;
        const Place<Tile> at(slabs);
        const int group = args.out_grouped ? work.group : 0, column = work.first_column + part * 2 * kCount;
        const int row = work.first_row + warpgroup * Tile::kWarpgroupRows + at.warp_row;
        with_output(args.epilogue, [&](auto element, auto add) {
            store_boxes<decltype(element), add.value, Tile>(sum, args, group, at.slabs, at.lane, row, column, factors);
        });
    }
};

/* The same for any tile, of which the group has the first `count` of the 64 rows: scales, bias and store. */
template <typename Tile, int kCount>
__device__ __forceinline__ void finish_part(float (&sum)[kCount], const GemmSm90Args &args, const Sm90Work &work,
                                            int part, int64_t first_row, int count, uint8_t *slabs) {
    const int first_column = work.first_column + part * 2 * kCount, columns = work.columns - part * 2 * kCount;
    if (columns <= 0) return;
    const Epilogue &to = args.epilogue;
    const Place<Tile> at(slabs);
    const RowFactors factors = row_factors_of(to, work, first_row, at.warp_row + at.lane / 4, count);
    const bool scales_of_columns = to.scale_b.step != 0 && !to.block_scaled;
    if (!scales_of_columns && to.bias == nullptr) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[i] *= factors.of[i / 2 % 2];
    } else {
#pragma unroll
        for (int pair = 0; pair < kCount / 2; ++pair) {
            const int block = pair / 2, i = pair % 2;
            const int local_column = block * 8 + at.lane % 4 * 2 + i;
            if (local_column < columns) {
                const int64_t column = first_column + local_column;
                const float scale_b = scales_of_columns ? scale_at(to.scale_b, work.weight, column) : 1.0f;
                const float bias =
                    to.bias ? load_as_float(to.bias, work.weight * to.bias_step + column, to.bias_dtype) : 0.0f;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float &value = sum[4 * block + 2 * half + i];
                    value = fmaf(value, factors.of[half] * scale_b, bias);
                }
            }
        }
    }

    count -= at.warp_row;
    if (count <= 0) return;
    first_row += at.warp_row;
    const int group = work.group, lane = at.lane;
    if (!args.plain) return finish_sums(sum, args, group, at.slabs, lane, first_row, count, first_column, columns);
    with_output(to, [&](auto element, auto add) {
        store_sums<decltype(element), add.value, Tile>(sum, args, group, at.slabs, lane, first_row, count, first_column,
                                                       columns);
    });
}

}  // namespace flexgemm
