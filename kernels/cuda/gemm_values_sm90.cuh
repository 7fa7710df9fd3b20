/*
 * From sums to values of the output in gemm_sm90.cuh: scales, bias, SwiGLU, and the scale of an fp8 output.
 */
#pragma once

#include <cfloat>
#include <type_traits>

#include "gemm_mainloop_sm90.cuh"

namespace flexgemm {

/* ---- rows ---- */

/* What the sums of a thread's two rows are multiplied by. */
struct RowFactors {
    float of[2];
};

template <int kCount>
__device__ __forceinline__ void scale_rows(float (&sum)[kCount], const RowFactors &factors) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] *= factors.of[i / 2 % 2];
}

/* A quotient that may be multiplied by 0: what has become too large for that is the largest number, by which all but 0
 * saturates as well. */
__device__ __forceinline__ float over_scale(float value, float scale) {
    const float quotient = __fdiv_rn(value, scale);
    return isinf(quotient) && isfinite(value) && scale != 0.0f ? copysignf(FLT_MAX, quotient) : quotient;
}

/* Of a usual output in fp8 that is sums and no more what its scale divides is not each value, but what the sums are
 * multiplied by: where nothing is added. */
template <typename Tile>
__device__ __forceinline__ float over_scale_out(float factor, const Epilogue &to) {
    if (!Tile::kToFp8 || Tile::kEnd != Sm90End::kNone || to.scale_out == nullptr) return factor;
    return over_scale(factor, *to.scale_out);
}

template <typename Tile>
__device__ __forceinline__ RowFactors over_scale_out(const RowFactors &factors, const Epilogue &to) {
    return {over_scale_out<Tile>(factors.of[0], to), over_scale_out<Tile>(factors.of[1], to)};
}

/* Of any other, what each value is multiplied by. */
template <typename Tile>
__device__ __forceinline__ float inverse_scale_out(const Epilogue &to) {
    return Tile::kToFp8 && to.scale_out ? over_scale(1.0f, *to.scale_out) : 1.0f;
}

/* Where all of the output has one. */
__device__ __forceinline__ RowFactors factor_of_all(const Epilogue &to) {
    const float factor = scale_at(to.scale_a, 0, 0) * (to.alpha * scale_at(to.scale_b, 0, 0));
    return {factor, factor};
}

/* The scales of a thread's two rows of a tile, times alpha and that of B where all columns have one, in the order of all
 * kernels: scale_a * (alpha * scale_b). Rows that are not there have the scale of the last one. Sums of a group without
 * a depth stay 0, whatever its scales. */
__device__ __forceinline__ RowFactors row_factors_of(const Epilogue &to, const Sm90Work &work, int row) {
    if (work.k_bytes == 0) return {0.0f, 0.0f};
    if (to.block_scaled) return {to.alpha, to.alpha};
    if (to.one_factor) return factor_of_all(to);
    float scale_a[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
        scale_a[half] = scale_at(to.scale_a, work.group, work.first_row + min(row + 8 * half, work.rows - 1));
    const float scale_b = to.alpha * scale_at(to.scale_b, work.weight, 0);
    return {scale_a[0] * scale_b, scale_a[1] * scale_b};
}

/* ---- columns ---- */

/* What a column is multiplied by, and what is added. */
struct alignas(8) ColumnFactor {
    float scale, bias;
};

/* sum * the factors of its row and column + the bias. */
template <int kCount>
__device__ __forceinline__ void apply_column_factors(float (&sum)[kCount], const ColumnFactor *kept,
                                                     const RowFactors &factors, int lane) {
#pragma unroll
    for (int block = 0; block < kCount / 4; ++block) {
        const float4 two = *reinterpret_cast<const float4 *>(&kept[block * 8 + lane % 4 * 2]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float *const own = &sum[4 * block + 2 * half];
            own[0] = fmaf(own[0], factors.of[half] * two.x, two.y);
            own[1] = fmaf(own[1], factors.of[half] * two.z, two.w);
        }
    }
}

/* ---- both, kept ---- */

/* Factors of columns and rows of the tile that is being finished, which a warp of the producers keeps in shared memory:
 * whoever reads them at the end of a tile itself waits for memory. Where there is no room each warp of the consumers
 * does, and keeps those of columns in its slabs. */
template <typename Tile, bool kKept = Tile::kKeepsFactors>
struct KeptFactors {
    alignas(16) ColumnFactor of_column[Tile::kBlockN];
    float of_row[kSm90BlockM];
    TileTurns<Tile> turns; /* of all lanes of the warp, and of the consumers */

    __device__ __forceinline__ void init() { turns.init(32, 32 * kSm90ConsumerWarps<Tile>); }
    __device__ __forceinline__ void leave(int slot) { turns.leave(slot); }
};

template <typename Tile>
struct KeptFactors<Tile, false> {
    __device__ __forceinline__ void init() {}
    __device__ __forceinline__ void leave(int) {}
};

/* What warps of the producers keep for the ends of tiles. */
template <typename Tile>
struct AddedOutput;
template <typename Tile>
using Kept = std::conditional_t<Tile::kAdded, AddedOutput<Tile>, KeptFactors<Tile>>;

/* Values 0, step, 2 step and so on, of which lane i of a warp has the i-th of each 32; those that there are no more of are
 * the last one. */
template <typename T, int kCount>
__device__ __forceinline__ void read_by_lanes(float (&own)[kCount], const T *values, int64_t step, int count) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        own[i] = to_float(values[min(static_cast<int>(threadIdx.x % 32) + i * 32, count - 1) * step]);
}

template <int kCount>
__device__ __forceinline__ void read_by_lanes(float (&own)[kCount], const Scale &scale, int group, int64_t first,
                                              int count) {
    if (scale.data)
        return read_by_lanes(own, scale.data + group * scale.group_step + first * scale.step, scale.step, count);
#pragma unroll
    for (float &one : own) one = 1.0f;
}

/* Of the columns of a tile from `first` on. */
template <int kCount>
__device__ __forceinline__ void read_bias_by_lanes(float (&own)[kCount], const Epilogue &to, const Sm90Work &work,
                                                   int first) {
    const auto read = [&](auto element) {
        const auto *bias = static_cast<const decltype(element) *>(to.bias) + work.weight * to.bias_step;
        read_by_lanes(own, bias + work.first_column + first, 1, work.columns - first);
    };
    if (to.bias_dtype == FG_BFLOAT16)
        read(__nv_bfloat16{});
    else if (to.bias_dtype == FG_FLOAT16)
        read(__half{});
    else
        read(float{});
}

/* By that warp. Those of the next tile are in its registers when the place of the ones before is free. What kind they are
 * is asked once for all of them: short products wait for its code. */
template <typename Tile>
__device__ __forceinline__ void produce_factors(Sm90Shared<Tile> &shared, KeptFactors<Tile> &kept,
                                                const GemmSm90Args &args) {
    constexpr int kOwnRows = kSm90BlockM / 32, kOwnColumns = ceil_div(Tile::kBlockN, 32);
    const Epilogue &to = args.epilogue;
    const int lane = threadIdx.x % 32;
    const bool of_columns = has_column_scales(to);
    const float of_column = of_columns ? to.alpha : 1.0f; /* as row_factors_of: alpha is with the scales of B */
    RingPosition<Tile::kTileSlots> slot;
    for (;;) {
        const Sm90Work work = next_work(shared, slot);
        if (work.group < 0) return;
        const int turn = slot.slot;
        const bool multiplied = work.k_bytes > 0; /* else sums stay 0, whatever their scales */
        release_work(shared, slot);
        float row[kOwnRows], scale[kOwnColumns], bias[kOwnColumns] = {};
        if (work.rows > 0) read_by_lanes(row, to.scale_a, work.group, work.first_row, work.rows);
        const float of_all = of_columns ? 1.0f : to.alpha * scale_at(to.scale_b, work.weight, 0);
        if (args.column_factors)
            read_by_lanes(scale, of_columns ? to.scale_b : Scale{}, work.weight, work.first_column, work.columns);
        if (to.bias) read_bias_by_lanes(bias, to, work, 0);
        kept.turns.await_done_before(turn);
#pragma unroll
        for (int i = 0; i < kOwnRows; ++i)
            if (work.rows > 0) kept.of_row[lane + i * 32] = multiplied ? row[i] * of_all : 0.0f;
#pragma unroll
        for (int i = 0; i < kOwnColumns; ++i)
            if (args.column_factors && lane + i * 32 < Tile::kBlockN)
                kept.of_column[lane + i * 32] = {multiplied ? scale[i] * of_column : 0.0f, bias[i]};
        ptx::mbarrier_arrive(&kept.turns.ready);
    }
}

/* A consumer's view of them, and of their tile. */
template <typename Tile>
struct TileFactors {
    Kept<Tile> &kept;
    const GemmSm90Args &args;
    const Sm90Work &work;
    int slot;

    /* Of a thread's two rows of the tile. */
    __device__ __forceinline__ RowFactors of_rows(int row) const {
        if constexpr (Tile::kKeepsFactors) {
            kept.turns.await_ready(slot);
            return {kept.of_row[row], kept.of_row[row + 8]};
        } else {
            return over_scale_out<Tile>(row_factors_of(args.epilogue, work, row), args.epilogue);
        }
    }

    /* Multiplies the sums of a part of a tile by them, and adds biases. */
    template <int kCount>
    __device__ __forceinline__ void apply(float (&sum)[kCount], int part, const RowFactors &of_rows, uint8_t *slabs,
                                          int lane) const {
        if (!args.column_factors) {
            scale_rows(sum, of_rows);
        } else if constexpr (Tile::kKeepsFactors) {
            apply_column_factors(sum, kept.of_column + part * Tile::kPartColumns, of_rows, lane);
        } else { /* scales of blocks are in the sums: what a column has of its own is a bias */
            static_assert(kCount % 16 == 0, "each lane has as many of them");
            auto *const own = reinterpret_cast<ColumnFactor *>(slabs);
            float bias[kCount / 16];
            read_bias_by_lanes(bias, args.epilogue, work, part * Tile::kPartColumns);
            if (ptx::elect()) ptx::tma_wait_read<0>();
            __syncwarp();
#pragma unroll
            for (int i = 0; i < kCount / 16; ++i) own[lane + i * 32] = {1.0f, bias[i]};
            __syncwarp();
            apply_column_factors(sum, own, of_rows, lane);
            __syncwarp();
        }
    }
};

/* ---- other values ---- */

constexpr int kSm90AtOnce = 32; /* sums of a thread that there are registers for when nothing is multiplied */

/* value / scale, rounded as a division is, but without its branches: the product with the inverse, and what that lacks.
 * Where that is not finite, neither is the quotient or it is 0, and the product is it. */
template <int kCount>
__device__ __forceinline__ void divide(float (&value)[kCount], float scale) {
    const float inverse = over_scale(1.0f, scale);
    apply_in_turns<kSm90AtOnce>(value, [&](float x) {
        const float quotient = x * inverse, rest = fmaf(-quotient, scale, x);
        return isfinite(rest) ? fmaf(rest, inverse, quotient) : quotient;
    });
}

/* SwiGLU is not what becomes of one sum. */
template <Sm90End kEnd>
__device__ __forceinline__ float ended(float x) {
    return kEnd == Sm90End::kSwiglu ? x : activated(x, static_cast<fg_activation>(kEnd));
}

/* The values of half as many columns, which SwiGLU makes: silu(gate) * what it gates, of two columns that are beside each
 * other. Of each 4 a lane has one, in two rows. */
template <int kCount>
struct GatedSums {
    static constexpr int kColumns = 2 * kCount;
    float of[kCount];
    __device__ __forceinline__ float value(int i, const RowFactors &) const { return of[i]; } /* which have theirs */
};

template <int kCount>
__device__ __forceinline__ GatedSums<kCount / 2> gate(const float (&sum)[kCount]) {
    GatedSums<kCount / 2> gated;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) gated.of[i] = silu(sum[2 * i]) * sum[2 * i + 1];
    return gated;
}

/* The same of sums times factors, times `scale`, each when it is stored: for all of them at once there is no register
 * while products are under way. */
template <int kCount>
struct GatedLater {
    static constexpr int kColumns = kCount;
    const float (&sum)[kCount];
    float scale;
    __device__ __forceinline__ float value(int i, const RowFactors &factors) const {
        const float factor = factors.of[i % 2];
        return silu(sum[2 * i] * factor) * (sum[2 * i + 1] * factor) * scale;
    }
};

}  // namespace flexgemm
