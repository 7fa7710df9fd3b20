/*
 * Ends of tiles of gemm_sm90.cuh: a warp's 16 rows of sums become values of the output, and are stored or added to it.
 *
 * They go through slabs of shared memory, 16 rows of 128 bytes. From there the copy engine takes them; where a slab also
 * has rows or columns of another group, or the output's rows are not what the engine can write, the warp stores itself.
 */
#pragma once

#include "gemm_added_sm90.cuh"

namespace flexgemm {

/* ---- stores ---- */

/* What a lane passes on of a slab: chunk lane % 8 of four rows. */
template <typename T>
__device__ __forceinline__ T slab_chunk(const uint8_t *slab, int lane, int i) {
    return *reinterpret_cast<const T *>(slab + place_in_slab(lane / 8 + 4 * i, lane % 8 * 16));
}

/* A warp's 16 rows of values, and how many rows and columns of them there are. */
struct StoredRows {
    int64_t first_row;
    int count, group, first_column, columns;

    /* Of what SwiGLU makes of them. */
    __device__ __forceinline__ StoredRows gated() const {
        return {first_row, count, group, first_column / 2, columns / 2};
    }
};

/* The rows and columns of a slab that there are, by the warp itself. */
template <typename T, bool kAdd>
__device__ __forceinline__ void pass_slab(const uint8_t *slab, const GemmSm90Args &args, int lane,
                                          const StoredRows &rows, int begin) {
    constexpr int kChunkColumns = 16 / static_cast<int>(sizeof(T));
    struct alignas(16) Chunk {
        T element[kChunkColumns];
    };
    const Epilogue &to = args.epilogue;
    const int column = begin + lane % 8 * kChunkColumns, inside = rows.columns - column;
    const bool aligned = args.out_aligned && rows.first_column % kChunkColumns == 0;
    T *const out = static_cast<T *>(to.out) + rows.group * to.out_group_stride + rows.first_column + column;
#pragma unroll 1
    for (int j = 0; j < 4 && lane / 8 + 4 * j < rows.count && inside > 0; ++j) {
        T *target = out + (rows.first_row + lane / 8 + 4 * j) * to.out_stride;
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

/* By one thread: a box of a slab to the output. */
template <bool kAdd>
__device__ __forceinline__ void store_box(const CUtensorMap &map, const uint8_t *slab, int x, int row, int group) {
    if constexpr (kAdd)
        ptx::tma_add_3d(&map, slab, x, row, group);
    else
        ptx::tma_store_3d(&map, slab, x, row, group);
}

/* Waits until the copy engine has read all slabs but the `kPending` that it took last. */
template <int kPending>
__device__ __forceinline__ void await_slabs() {
    if (ptx::elect()) ptx::tma_wait_read<kPending>();
    __syncwarp();
}

/* Slabs that are full, of columns begin_of(0), begin_of(1) and so on, to the output, or added to what is there, by the
 * copy engine. It does so while the warp goes on; each element is added to once, or a second time when the first is done,
 * so that sums do not depend on an order. What lies outside the output it leaves out; where rows end inside of it, those
 * that there are go one by one. kAll: all rows and columns are there, or outside; to ask takes longer than most tiles
 * would gain. */
template <typename T, bool kAdd, bool kAll, typename Tile, int kCount, typename Begin>
__device__ __forceinline__ void send_slabs(const uint8_t *slab, const GemmSm90Args &args, const StoredRows &rows,
                                           const Begin &begin_of, bool any = true) {
    constexpr int kUnit = kAdd ? 1 : sizeof(T); /* coordinates along a row are of float32, or of bytes */
    const int row = static_cast<int>(rows.first_row), group = args.out_grouped ? rows.group : 0;
    ptx::fence_proxy_async();
    __syncwarp();
    if (!ptx::elect()) return;
    const bool cut = !kAll && args.rows_end_anywhere && rows.count < 16;
    /* Rows from `first` on, of every slab. */
    const auto store = [&](const CUtensorMap &map, int first) {
#pragma unroll
        for (int j = 0; j < kCount; ++j)
            store_box<kAdd>(map, slab + j * Tile::kSlabBytes + first * kSm90SlabBytes,
                            (rows.first_column + begin_of(j)) * kUnit, row + first, group);
    };
    if (any && !cut) store(args.map_out, 0);
#pragma unroll 1
    for (int first = 0; any && cut && first < rows.count; ++first) store(args.map_out_row, first);
    ptx::tma_commit(); /* of nothing, too: slabs are waited for by their number */
}

/* Converts and stores a warp's values, or adds them to what is there; by the copy engine where `boxes`. Slabs that have
 * none of the columns are not filled. kAll: as send_slabs has it. */
template <typename T, bool kAdd, bool kAll, typename Tile, typename Values>
__device__ __forceinline__ void store_slabs(const Values &values, const GemmSm90Args &args, uint8_t *slabs, int lane,
                                            const StoredRows &rows, bool boxes,
                                            const RowFactors &factors = {{1.0f, 1.0f}}) {
    using Columns = SlabColumns<T, kColumnsOf<Values>>;
    constexpr int kSlabs = Columns::kSlabs;
    constexpr int kTogether = kSlabs == Tile::kSlabs ? kSlabs : 1; /* all slabs that there are, or one by one */
    constexpr bool kInTurn = kSlabs % Tile::kSlabs == 0; /* the first slab is not the last one that was used */
#pragma unroll
    for (int i = 0; i < kSlabs; i += kTogether) {
        uint8_t *slab = slabs + i % Tile::kSlabs * Tile::kSlabBytes;
        if (boxes && (kInTurn || i > 0))
            await_slabs<Tile::kSlabs / kTogether - 1>();
        else
            await_slabs<0>();
        const bool any = kAll || Columns::begin_of(i) < rows.columns;
        if (any) {
#pragma unroll
            for (int j = 0; j < kTogether; ++j)
                fill_slab<T, Tile::kEnd>(
                    values, slab + j * Tile::kSlabBytes, lane,
                    {Columns::begin_of(i + j), factors, kAdd && i + j == kSlabs - 1 ? Columns::kTwice : 0});
        }
        if (!boxes) {
            __syncwarp();
#pragma unroll
            for (int j = 0; j < kTogether; ++j)
                pass_slab<T, kAdd>(slab + j * Tile::kSlabBytes, args, lane, rows, Columns::begin_of(i + j));
            __syncwarp(); /* all have read it */
            continue;
        }
        send_slabs<T, kAdd, kAll, Tile, kTogether>(
            slab, args, rows, [&](int j) { return Columns::begin_of(i + j); }, any);
    }
}

/* The same, by the copy engine where that can. */
template <typename T, bool kAdd, typename Tile, typename Values>
__device__ __forceinline__ void store_values(const Values &values, const GemmSm90Args &args, uint8_t *slabs, int lane,
                                             StoredRows rows) {
    constexpr int kColumns = kColumnsOf<Values>;
    const TileSpace &space = args.space;
    const bool aligned = rows.first_column * static_cast<int>(sizeof(T)) % 16 == 0; /* groups along N begin anywhere */
    /* What is not there lies outside the output, and the copy engine leaves it out, or is another group's. */
    const bool all_columns = rows.columns >= kColumns || !space.major_is_columns;
    const bool boxes = Tile::kUsual || (SlabColumns<T, kColumns>::kFill && args.out_in_boxes && aligned && all_columns);
    rows.columns = min(rows.columns, kColumns);
    store_slabs<T, kAdd, Tile::kOneGroup, Tile>(values, args, slabs, lane, rows, boxes);
}

/* ---- tiles ---- */

/* Calls store(element, add) with a value of the output's type, and whether it is added to what is there. */
template <typename Tile, typename Store>
__device__ __forceinline__ void with_output(const Epilogue &to, const Store &store) {
    if constexpr (Tile::kUsual)
        store(typename Tile::Stored{}, std::false_type{});
    else if (to.out_dtype == FG_BFLOAT16)
        store(__nv_bfloat16{}, std::false_type{});
    else if (to.out_dtype == FG_FLOAT16)
        store(__half{}, std::false_type{});
    else if (to.accumulate)
        store(float{}, std::true_type{});
    else
        store(float{}, std::false_type{});
}

/* The same of any output. */
template <typename Tile, typename Store>
__device__ __forceinline__ void with_any_output(const Epilogue &to, const Store &store) {
    if (to.out_dtype == FG_FLOAT8_E4M3FN)
        store(__nv_fp8_e4m3{}, std::false_type{});
    else if (to.out_dtype == FG_FLOAT8_E5M2)
        store(__nv_fp8_e5m2{}, std::false_type{});
    else
        with_output<Tile>(to, store);
}

/* Where a thread of the consumers is in its warp, the warp in the tile, and its slabs: worked out where it is wanted, for
 * want of registers. */
template <typename Tile>
struct Place {
    int lane, row; /* the warp's first one in the tile */
    uint8_t *slabs;
    __device__ __forceinline__ Place(int thread, uint8_t *all_slabs) {
        /* Other kernels have no register to keep it in. */
        const int kept = Tile::kRowsOnly ? thread : static_cast<int>(threadIdx.x) - ptx::kWarpgroup;
        const auto own = static_cast<uint32_t>(ptx::opaque(kept));
        lane = static_cast<int>(own % 32);
        row = static_cast<int>(own / 32 * 16);
        slabs = all_slabs + own / 32 * (Tile::kSlabs * Tile::kSlabBytes);
    }
};

/* What SwiGLU will make of sums for a usual output. */
template <typename Tile, int kCount>
__device__ __forceinline__ GatedLater<kCount> gate_later(const float (&sum)[kCount], const Epilogue &to) {
    return {sum, inverse_scale_out<Tile>(to)};
}

/* SwiGLU to fp8 makes of each of a tile's two parts half a slab; it is sent when it is full. */
template <typename Tile>
constexpr bool kFillsHalves = Tile::kToFp8 && Tile::kEnd == Sm90End::kSwiglu;

template <typename Tile, int kCount>
__device__ __forceinline__ void fill_half(const GatedLater<kCount> &gated, const Place<Tile> &at, int part,
                                          const RowFactors &factors = {{1.0f, 1.0f}}) {
    static_assert(Tile::kParts == 2 && 2 * kCount == kSm90SlabBytes, "halves of a slab");
    if (part == 0) await_slabs<0>();
    fill_slab<typename Tile::Stored, Tile::kEnd>(gated, at.slabs, at.lane, {0, factors, 0, part * kCount});
}

/* `rows`: those of the last part. */
template <typename Tile>
__device__ __forceinline__ void send_halves(const GemmSm90Args &args, const Place<Tile> &at, const StoredRows &rows) {
    send_slabs<typename Tile::Stored, false, Tile::kOneGroup, Tile, 1>(at.slabs, args, rows.gated(),
                                                                       [](int) { return -kSm90SlabBytes / 2; });
}

/* Stores a part of a warp's rows, scaled and biased, in a usual output. */
template <typename Tile, int kCount>
__device__ __forceinline__ void store_usual(const float (&sum)[kCount], const GemmSm90Args &args, int part,
                                            const Place<Tile> &at, const StoredRows &rows) {
    if constexpr (kFillsHalves<Tile>) {
        fill_half(gate_later<Tile>(sum, args.epilogue), at, part);
        if (part == 1) send_halves(args, at, rows);
    } else if constexpr (Tile::kEnd == Sm90End::kSwiglu) {
        const auto gated = gate_later<Tile>(sum, args.epilogue);
        store_values<typename Tile::Stored, false, Tile>(gated, args, at.slabs, at.lane, rows.gated());
    } else {
        store_values<typename Tile::Stored, false, Tile>(sum, args, at.slabs, at.lane, rows);
    }
}

/* What a part of a warp's rows becomes where that is more than scaled rows: factors of columns, activations, SwiGLU,
 * fp8. */
template <typename Tile, int kCount>
__device__ __forceinline__ void finish_other(float (&sum)[kCount], const TileFactors<Tile> &factors, int part,
                                             const Place<Tile> &at, const StoredRows &rows) {
    const GemmSm90Args &args = factors.args;
    const Epilogue &to = args.epilogue;
    factors.apply(sum, part, factors.of_rows(at.row + at.lane / 4), at.slabs, at.lane);
    if constexpr (Tile::kUsual) return store_usual(sum, args, part, at, rows);
    activate<kSm90AtOnce>(sum, to.activation);
    const auto store = [&](auto &values, const StoredRows &stored) {
        with_any_output<Tile>(to, [&](auto element, auto add) {
            store_values<decltype(element), add.value, Tile>(values, args, at.slabs, at.lane, stored);
        });
    };
    if (to.swiglu) {
        auto gated = gate(sum);
        if (to.scale_out) divide(gated.of, *to.scale_out);
        store(gated, rows.gated());
    } else {
        if (to.scale_out) divide(sum, *to.scale_out);
        store(sum, rows);
    }
}

/* Finishes the parts of a warpgroup's 64 rows of a boxed tile, and none of any other: factors and store. Registers are
 * few while products are under way, which is why there are no other outputs, and why rows that are only scaled are so as
 * they are converted. */
template <typename Tile>
class BoxedTile {
public:
    /* `thread` of the consumers. */
    __device__ __forceinline__ BoxedTile(const TileFactors<Tile> &factors, int thread, uint8_t *slabs,
                                         RowFactors &of_rows)
        : factors_(factors),
          thread_(thread),
          slabs_(slabs),
          of_rows_(of_rows),
          kept_boxed_(Tile::kRowsOnly && factors.work.boxed > 0) {}

    __device__ __forceinline__ bool boxed() const {
        return Tile::kRowsOnly ? kept_boxed_ : Tile::kBoxedTiles && factors_.work.boxed > 0;
    }

    /* Before the steps of K: reads the scales of rows, where nobody keeps them and there are registers. What is the same
     * for all tiles is there. */
    __device__ __forceinline__ void prepare() {
        if (!Tile::kRowsOnly || !boxed() || factors_.args.epilogue.one_factor) return;
        const Place<Tile> at(thread_, slabs_);
        of_rows_ = factors_.of_rows(at.row + at.lane / 4);
    }

    /* A part's values, to slabs, and from there to the output. Where all of them find room, in no more than 16 bits, that is
     * left to `send`: it takes a while until stores have filled the slabs, in which something else is done. */
    template <int kCount>
    __device__ __forceinline__ void fill(float (&sum)[kCount], int part) {
        if (!boxed()) return;
        const Place<Tile> at(thread_, slabs_);
        RowFactors left = of_rows_;
        if constexpr (!Tile::kRowsOnly) {
            factors_.apply(sum, part, factors_.of_rows(at.row + at.lane / 4), at.slabs, at.lane);
            left = {1.0f, 1.0f};
        }
        const Epilogue &to = factors_.args.epilogue;
        if constexpr (Tile::kAdded)
            add_to_rows(sum, left, factors_.kept, factors_.slot, thread_, slabs_);
        else if constexpr (kFillsHalves<Tile>)
            fill_half(gate_later<Tile>(sum, to), at, part, left);
        else if constexpr (Tile::kEnd == Sm90End::kSwiglu)
            fill_with<typename Tile::Stored, false>(gate_later<Tile>(sum, to), at, part, left);
        else
            with_output<Tile>(
                to, [&](auto element, auto add) { fill_with<decltype(element), add.value>(sum, at, part, left); });
    }

    template <int kCount>
    __device__ __forceinline__ void send(const float (&)[kCount], int part) {
        constexpr bool kGated = Tile::kEnd == Sm90End::kSwiglu;
        using T = std::conditional_t<Tile::kToFp8, uint8_t, uint16_t>;
        using Columns = SlabColumns<T, kGated ? kCount : 2 * kCount>;
        const bool filled = Tile::kUsual || factors_.args.epilogue.out_dtype != FG_FLOAT32;
        if (!boxed() || !filled) return;
        const Place<Tile> at(thread_, slabs_);
        if constexpr (kFillsHalves<Tile>) {
            if (part == 1) send_halves(factors_.args, at, rows_of(at, part));
        } else if constexpr (kSentLater<Columns, sizeof(T)>) {
            const auto begin_of = [](int i) { return Columns::begin_of(i); };
            with_all([&](auto all) {
                send_slabs<T, false, all.value, Tile, Columns::kSlabs>(at.slabs, factors_.args, stored_rows(at, part),
                                                                       begin_of);
            });
        }
    }

private:
    template <typename Columns, int kBytes>
    static constexpr bool kSentLater = kBytes <= 2 && Columns::kSlabs <= Tile::kSlabs;

    template <typename T, bool kAdd, typename Values>
    __device__ __forceinline__ void fill_with(const Values &values, const Place<Tile> &at, int part,
                                              const RowFactors &left) {
        using Columns = SlabColumns<T, kColumnsOf<Values>>;
        if constexpr (kSentLater<Columns, sizeof(T)>) {
            await_slabs<0>();
#pragma unroll
            for (int i = 0; i < Columns::kSlabs; ++i)
                fill_slab<T, Tile::kEnd>(values, at.slabs + i * Tile::kSlabBytes, at.lane,
                                         {Columns::begin_of(i), left});
        } else {
            with_all([&](auto all) {
                store_slabs<T, kAdd, all.value, Tile>(values, factors_.args, at.slabs, at.lane, stored_rows(at, part),
                                                      true, left);
            });
        }
    }

    /* Calls store(all) with what send_slabs calls kAll. */
    template <typename Store>
    __device__ __forceinline__ void with_all(const Store &store) const {
        if constexpr (Tile::kUsual)
            store(std::integral_constant<bool, Tile::kOneGroup>{});
        else if (factors_.args.rows_end_anywhere)
            store(std::false_type{});
        else
            store(std::true_type{});
    }

    __device__ __forceinline__ StoredRows rows_of(const Place<Tile> &at, int part) const {
        const Sm90Work &work = factors_.work;
        return {work.first_row + at.row, work.rows - at.row, work.group, work.first_column + part * Tile::kPartColumns,
                work.columns - part * Tile::kPartColumns};
    }

    __device__ __forceinline__ StoredRows stored_rows(const Place<Tile> &at, int part) const {
        const StoredRows rows = rows_of(at, part);
        return Tile::kEnd == Sm90End::kSwiglu ? rows.gated() : rows;
    }

    const TileFactors<Tile> &factors_;
    const int thread_;
    uint8_t *const slabs_;
    RowFactors &of_rows_;
    const bool kept_boxed_; /* in a register, where there is one */
};

/* Finishes a part of any tile, of which the warpgroup has `count` rows from `first_row` on: found before, since ptxas
 * else puts a wait for products between those of two tiles. */
template <typename Tile, int kCount>
__device__ __forceinline__ void finish_part(float (&sum)[kCount], const TileFactors<Tile> &factors, int part,
                                            int64_t first_row, int count, int thread, uint8_t *slabs) {
    const GemmSm90Args &args = factors.args;
    const Sm90Work &work = factors.work;
    const Place<Tile> at(thread, slabs);
    const int own_row = at.row % Tile::kWarpgroupRows;
    const StoredRows rows = {first_row + own_row, count - own_row, work.group,
                             work.first_column + part * Tile::kPartColumns, work.columns - part * Tile::kPartColumns};
    if (rows.count <= 0 || (rows.columns <= 0 && !kFillsHalves<Tile>)) return;
    if constexpr (Tile::kAdded) {
        if (work.boxed <= thread / ptx::kWarpgroup) return; /* nothing was multiplied */
        add_to_rows(sum, factors.of_rows(at.row + at.lane / 4), factors.kept, factors.slot, thread, slabs);
    } else if constexpr (Tile::kRowsOnly && Tile::kUsual) {
        scale_rows(sum, factors.of_rows(at.row + at.lane / 4));
        store_usual(sum, args, part, at, rows);
    } else if constexpr (Tile::kRowsOnly) {
        scale_rows(sum, factors.of_rows(at.row + at.lane / 4));
        with_output<Tile>(args.epilogue, [&](auto element, auto add) {
            store_values<decltype(element), add.value, Tile>(sum, args, at.slabs, at.lane, rows);
        });
    } else {
        finish_other(sum, factors, part, at, rows);
    }
}

}  // namespace flexgemm
