/*
 * From sums to values of the output in gemm_sm90.cuh: scales, bias, SwiGLU, and the scale of an fp8 output.
 */
#pragma once

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

/* Where all of the output has one. */
__device__ __forceinline__ RowFactors factor_of_all(const Epilogue &to) {
    const float factor = to.alpha * scale_at(to.scale_a, 0, 0) * scale_at(to.scale_b, 0, 0);
    return {factor, factor};
}

/* Alpha and the scales of a thread's two rows of a tile, times that of B where all columns have one. Rows that are not
 * there have the scale of the last one. */
__device__ __forceinline__ RowFactors row_factors_of(const Epilogue &to, const Sm90Work &work, int row) {
    if (to.block_scaled) return {to.alpha, to.alpha};
    if (to.one_factor) return factor_of_all(to);
    float scale_a[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
        scale_a[half] = scale_at(to.scale_a, work.group, work.first_row + min(row + 8 * half, work.rows - 1));
    const float scale_b = to.scale_b.step == 0 ? scale_at(to.scale_b, work.weight, 0) : 1.0f;
    return {to.alpha * scale_a[0] * scale_b, to.alpha * scale_a[1] * scale_b};
}

/* ---- columns ---- */

/* What a column is multiplied by, and what is added. */
struct alignas(8) ColumnFactor {
    float scale, bias;
};

/* Those of a tile, by a warp. Columns that are not there have those of the last one. */
template <int kColumns>
__device__ __forceinline__ void keep_column_factors(ColumnFactor *kept, const Epilogue &to, int weight,
                                                    int64_t first_column, int columns) {
    const bool scales = has_column_scales(to);
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < kColumns; i += 32) {
        const int64_t column = first_column + min(i, columns - 1);
        kept[i] = {scales ? scale_at(to.scale_b, weight, column) : 1.0f,
                   to.bias ? load_as_float(to.bias, weight * to.bias_step + column, to.bias_dtype) : 0.0f};
    }
}

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

/* Column factors of the tile that is being finished, which a warp of the producers keeps in shared memory. Where there is
 * no room each warp of the consumers keeps them in its slabs. A tile's turn is that of its slot, since there is an even
 * number of those: registers are few. */
template <typename Tile, bool kKept = Tile::kKeepsColumns>
struct KeptColumns {
    alignas(16) ColumnFactor of[Tile::kBlockN];
    uint64_t full, empty; /* by all lanes of the warp, and of the consumers */

    __device__ __forceinline__ void init() {
        ptx::mbarrier_init(&full, 32);
        ptx::mbarrier_init(&empty, 32 * kSm90ConsumerWarps<Tile>);
    }

    /* By the consumers, to read them. */
    __device__ __forceinline__ void await(int slot) {
        static_assert(Tile::kTileSlots % 2 == 0, "slots tell the turns of tiles");
        ptx::mbarrier_wait_parity(&full, slot % 2);
    }

    /* Behind each tile, read or not. */
    __device__ __forceinline__ void leave(const GemmSm90Args &args, int slot) {
        if (!args.column_factors) return;
        await(slot);
        ptx::mbarrier_arrive(&empty);
    }
};

template <typename Tile>
struct KeptColumns<Tile, false> {
    __device__ __forceinline__ void init() {}
    __device__ __forceinline__ void leave(const GemmSm90Args &, int) {}
};

/* By that warp. */
template <typename Tile>
__device__ __forceinline__ void produce_columns(Sm90Shared<Tile> &shared, KeptColumns<Tile> &kept,
                                                const GemmSm90Args &args) {
    RingPosition<Tile::kTileSlots> slot;
    for (RingPosition<1> at;; at.advance()) {
        const Sm90Work work = next_work(shared, slot);
        if (work.group < 0) return;
        release_work(shared, slot);
        ptx::mbarrier_wait_parity(&kept.empty, at.parity ^ 1);
        keep_column_factors<Tile::kBlockN>(kept.of, args.epilogue, work.weight, work.first_column, work.columns);
        ptx::mbarrier_arrive(&kept.full);
    }
}

/* A consumer's view of them, and of their tile. */
template <typename Tile>
struct TileColumns {
    KeptColumns<Tile> &kept;
    const GemmSm90Args &args;
    const Sm90Work &work;
    int slot;

    __device__ __forceinline__ bool any() const { return args.column_factors; }

    /* To the sums of a part of a tile. */
    template <int kCount>
    __device__ __forceinline__ void apply(float (&sum)[kCount], int part, const RowFactors &factors, uint8_t *slabs,
                                          int lane) const {
        if constexpr (Tile::kKeepsColumns) {
            kept.await(slot);
            apply_column_factors(sum, kept.of + part * Tile::kPartColumns, factors, lane);
        } else {
            auto *const own = reinterpret_cast<ColumnFactor *>(slabs);
            if (ptx::elect()) ptx::tma_wait_read<0>();
            __syncwarp();
            keep_column_factors<2 * kCount>(own, args.epilogue, work.weight,
                                            work.first_column + part * Tile::kPartColumns,
                                            work.columns - part * Tile::kPartColumns);
            __syncwarp();
            apply_column_factors(sum, own, factors, lane);
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
    const float inverse = __frcp_rn(scale);
    apply_in_turns<kSm90AtOnce>(value, [&](float x) {
        const float quotient = x * inverse, rest = fmaf(-quotient, scale, x);
        return isfinite(rest) ? fmaf(rest, inverse, quotient) : quotient;
    });
}

/* The values of half as many columns, which SwiGLU makes: of each 4 a lane has one, in two rows. */
template <int kCount>
struct GatedSums {
    float of[kCount];
};

/* silu(gate) * what it gates, of the two columns that are beside each other. */
template <int kCount>
__device__ __forceinline__ GatedSums<kCount / 2> gate(const float (&sum)[kCount]) {
    GatedSums<kCount / 2> gated;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) gated.of[i] = silu(sum[2 * i]) * sum[2 * i + 1];
    return gated;
}

}  // namespace flexgemm
