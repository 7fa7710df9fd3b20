/*
 * Finished sums of gemm_tokens_sm90.cuh on their way to the output: a tile's become rows of tokens in shared memory, plain
 * ones and usual ends as they are to be stored, any others as they are, and from there whole rows are stored.
 */
#pragma once

#include "gemm_tokens_sm90.cuh"
#include "gemm_values_sm90.cuh"

namespace flexgemm {

/* ---- finished sums: plain ones and usual ends, whole chunks of 16 bytes ---- */

/* What becomes of a thread's sums of units of 8 tokens, of each of two tokens and two rows of weights. */
template <int kUnits>
struct UnitFactors {
    float scale[2], bias[2];
    float2 of_token[kUnits];

    __device__ __forceinline__ float2 apply(float first, float second, int unit, int row) const {
        return {fmaf(first, of_token[unit].x * scale[row], bias[row]),
                fmaf(second, of_token[unit].y * scale[row], bias[row])};
    }
};

/* The same where all are alike. */
struct OneFactor {
    float factor;

    __device__ __forceinline__ float2 apply(float first, float second, int, int) const {
        return {first * factor, second * factor};
    }
};

/* Of units of which the block has every `split`-th from `part` on, counted from the tile's token `first_token`. All of
 * them at once: behind a store of others they would be waited for each time. */
template <int kUnits, typename Tile>
__device__ __forceinline__ UnitFactors<kUnits> load_factors(const EndFactors<Tile> &from, int split, int part,
                                                            int first_token = 0) {
    const int thread = end_thread<Tile>(), lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    UnitFactors<kUnits> factors = {{from.weight_scale[row], from.weight_scale[row + 8]},
                                   {from.bias[row], from.bias[row + 8]}};
#pragma unroll
    for (int own = 0; own < kUnits; ++own) { /* units that there are not have some tokens' */
        const int first = min(first_token + (own * split + part) * 8, Tile::kBlockN - 8);
        factors.of_token[own] = *reinterpret_cast<const float2 *>(&from.token_scale[first + lane % 4 * 2]);
    }
    return factors;
}

/* Where a chunk of 16 bytes of a token's row is kept. */
template <typename Tile>
__device__ __forceinline__ int place_of_chunk(int token, int chunk) {
    return token * Tile::kTokenPitch + (Tile::kSwizzled ? chunk ^ token % 8 : chunk) * 16;
}

/* Units scaled, biased, ended and converted, to rows of tokens: of 16 bits, whose matrices are transposed on the way. */
template <typename T, typename Tile, int kCount, typename Factors>
__device__ __forceinline__ void keep_halves(const float (&sum)[kCount], const Factors &factors, uint8_t *rows,
                                            int units) {
    struct alignas(4) Pair {
        T element[2];
    };
    const int thread = end_thread<Tile>(), lane = thread % 32, warp_row = thread / 32 * 16;
    const int token = lane / 16 * 8 + lane % 8, chunk = warp_row / 8 + lane / 8 % 2;
    uint8_t *to = rows + place_of_chunk<Tile>(token, chunk);
#pragma unroll
    for (int unit = 0; unit < kCount / 4; unit += 2, to += 16 * Tile::kTokenPitch) {
        if (unit >= units) break;
        uint32_t words[4] = {}; /* weights 0 to 7 and 8 to 15 of a unit, and of the next */
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int own = unit + i / 2;
            if (own * 4 >= kCount) break;
            const float *sums = &sum[own * 4 + i % 2 * 2];
            const float2 values = factors.apply(sums[0], sums[1], own, i % 2);
            const Pair pair = {from_float<T>(ended<Tile::kEnd>(values.x)), from_float<T>(ended<Tile::kEnd>(values.y))};
            memcpy(&words[i], &pair, sizeof pair);
        }
        ptx::stmatrix_x4_trans(to, words);
    }
}

/* The same of SwiGLU, or to fp8, a value at a time. A gate and what it gates are sums of two lanes, each of two tokens:
 * they exchange what makes either the one that has both of a token. */
template <typename T, typename Tile, int kCount, typename Factors>
__device__ __forceinline__ void keep_values(const float (&sum)[kCount], const Factors &factors, uint8_t *rows,
                                            int units, float scale) {
    const int thread = end_thread<Tile>(), lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    const bool gated = lane / 4 % 2 != 0;
    const int token = lane % 4 * 2 + (Tile::kGated == 2 && gated);
    static_assert(!Tile::kSwizzled, "chunks are where their bytes are");
    uint8_t *to = rows + token * Tile::kTokenPitch + row / Tile::kGated * Tile::kColumnBytes;
    const auto keep = [&](int byte, float value) { *reinterpret_cast<T *>(to + byte) = from_float<T>(value); };
#pragma unroll
    for (int unit = 0; unit < kCount / 4; ++unit, to += 8 * Tile::kTokenPitch) {
        if (unit >= units) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int byte = half * 8 / Tile::kGated * Tile::kColumnBytes;
            const float *sums = &sum[unit * 4 + half * 2];
            const float2 own = factors.apply(sums[0], sums[1], unit, half);
            if constexpr (Tile::kGated == 2) {
                const float other = __shfl_xor_sync(0xffffffffu, gated ? own.x : own.y, 4);
                keep(byte, silu(gated ? other : own.x) * (gated ? own.y : other) * scale);
            } else {
                keep(byte, own.x * scale);
                keep(byte + Tile::kTokenPitch, own.y * scale);
            }
        }
    }
}

/* The type of such an output: the usual one, or the other of 16 bits (make_token_args). */
template <typename Math, typename Tile, bool kUsual = Tile::kUsual>
struct PlainOutput {
    using Type = std::conditional_t<std::is_same_v<typename Math::Stored, __half>, __nv_bfloat16, __half>;
};

template <typename Math, typename Tile>
struct PlainOutput<Math, Tile, true> {
    using Type = typename Tile::Stored;
};

template <typename Math, typename Tile, int kCount, typename Factors>
__device__ __forceinline__ void keep_plain(const float (&sum)[kCount], const Factors &factors, const TileScales &scales,
                                           uint8_t *rows, int units) {
    using T = typename PlainOutput<Math, Tile>::Type;
    if constexpr (Tile::kGated == 2 || Tile::kToFp8)
        keep_values<T, Tile>(sum, factors, rows, units, scales.out);
    else
        keep_halves<T, Tile>(sum, factors, rows, units);
}

/* Sums become these, no more. */
template <typename Tile>
__device__ __forceinline__ bool is_plain(const GemmSm90Args &args) {
    return Tile::kUsual || args.plain;
}

/* Copies them to the output, of which the block has every `split`-th unit from `part` on. A thread reads kTogether chunks
 * at once, and asks one by one whether they are there: to count them would take a division. */
template <typename Tile, int kTogether>
class TokenOutput {
public:
    /* Addresses take a while, which is best spent before the tile is multiplied. */
    __device__ __forceinline__ TokenOutput(const GemmSm90Args &args, const Sm90Work &work, int part) {
        const Epilogue &to = args.epilogue;
        const int thread = end_thread<Tile>(), chunk = thread % kChunks, row = thread / kChunks;
        token_ = (row / 8 * args.split + part) * 8 + row % 8;
        step_ = kTokensAtOnce * args.split;
        end_ = chunk * 16 < work.rows / Tile::kGated * Tile::kColumnBytes ? work.columns : 0;
        from_ = place_of_chunk<Tile>(row, chunk);
        pitch_ = step_ * to.out_stride * Tile::kColumnBytes;
        const int64_t first = work.group * to.out_group_stride + (work.first_column + token_) * to.out_stride;
        out_ =
            static_cast<uint8_t *>(to.out) + (first + work.first_row / Tile::kGated) * Tile::kColumnBytes + chunk * 16;
    }

    __device__ __forceinline__ void copy(const uint8_t *rows) const {
        const uint8_t *from = rows + from_;
        uint8_t *out = out_;
#pragma unroll 1
        for (int token = token_; token < end_; token += kTogether * step_) {
            uint4 chunks[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i)
                if (token + i * step_ < end_)
                    chunks[i] = *reinterpret_cast<const uint4 *>(from + i * kTokensAtOnce * Tile::kTokenPitch);
#pragma unroll
            for (int i = 0; i < kTogether; ++i, out += pitch_)
                if (token + i * step_ < end_) *reinterpret_cast<uint4 *>(out) = chunks[i];
            from += kTogether * kTokensAtOnce * Tile::kTokenPitch;
        }
    }

    /* The next tokens, no more than threads copy at once. */
    template <int kCount>
    __device__ __forceinline__ void copy_next(const uint8_t *rows, const Epilogue &to) {
        static_assert(kCount <= kTokensAtOnce, "a chunk to a thread");
        if (token_ < min(end_, kCount))
            *reinterpret_cast<uint4 *>(out_) = *reinterpret_cast<const uint4 *>(rows + from_);
        end_ -= kCount;
        out_ += kCount * to.out_stride * Tile::kColumnBytes;
    }

private:
    static constexpr int kChunks = Tile::kTokenChunks, kTokensAtOnce = Tile::kTokensAtOnce;
    static_assert(kTokensAtOnce % 8 == 0, "whole units");
    int token_, step_, end_, from_; /* of the thread: its first token, and where that is among the rows */
    int64_t pitch_;                 /* in bytes */
    uint8_t *out_;
};

/* ---- finished sums: anything else ---- */

/* Where a token's sum of a row of weights is kept. */
template <typename Tile>
__device__ __forceinline__ int place_of_sum(int token, int row) {
    return token * Tile::kSumPitch + (Tile::kSwizzledSums ? row ^ token / 2 % 4 * 8 : row);
}

/* Units as they are, to rows of tokens. */
template <typename Tile, int kCount>
__device__ __forceinline__ void keep_floats(const float (&sum)[kCount], float *rows, int units) {
    const int thread = end_thread<Tile>(), lane = thread % 32;
    const int row = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int unit = 0; unit < kCount / 4; ++unit) {
        if (unit >= units) break;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            rows[place_of_sum<Tile>(unit * 8 + lane % 4 * 2 + i % 2, row + i / 2 * 8)] = sum[unit * 4 + i];
    }
}

/* Scales, biases, activates and stores the block's tokens, of which the first is the tile's token `first_token`; a warp
 * takes a token at a time, and a thread four columns of kTogether tokens at once, so that none waits for another. */
template <int kTogether, typename Tile>
__device__ __forceinline__ void finish_tokens(const EndFactors<Tile> &factors, const GemmSm90Args &args,
                                              const Sm90Work &work, const float *rows, int part, int first_token = 0) {
    constexpr int kFours = Tile::kEndRows / 4, kTokensAtOnce = Tile::kEndThreads / kFours;
    const Epilogue &to = args.epilogue;
    const int thread = end_thread<Tile>(), local_column = thread % kFours * 4;
    const int count = min(work.rows - local_column, 4), gated = to.swiglu ? 2 : 1; /* rows to a column */
    if (count <= 0) return;
    const float4 scale = *reinterpret_cast<const float4 *>(&factors.weight_scale[local_column]);
    const float4 bias = *reinterpret_cast<const float4 *>(&factors.bias[local_column]);
    const float scale_out = to.scale_out ? *to.scale_out : 1.0f;
    const int64_t column = (work.first_row + local_column) / gated;
    const bool aligned = to.out_aligned && column % 4 == 0;
#pragma unroll 1
    for (int first = thread / kFours;; first += kTogether * kTokensAtOnce) {
        int token[kTogether];
        int64_t index[kTogether];
        float value[4 * kTogether] = {};
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            const int i = first + j * kTokensAtOnce;
            token[j] = (i / 8 * args.split + part) * 8 + i % 8;
            index[j] = work.group * to.out_group_stride + (work.first_column + token[j]) * to.out_stride + column;
            if (token[j] >= work.columns) continue;
            const float4 sum = *reinterpret_cast<const float4 *>(rows + place_of_sum<Tile>(i, local_column));
            const float scale_a = factors.token_scale[first_token + token[j]];
            value[4 * j] = fmaf(sum.x, scale_a * scale.x, bias.x);
            value[4 * j + 1] = fmaf(sum.y, scale_a * scale.y, bias.y);
            value[4 * j + 2] = fmaf(sum.z, scale_a * scale.z, bias.z);
            value[4 * j + 3] = fmaf(sum.w, scale_a * scale.w, bias.w);
        }
        if (token[0] >= work.columns) return;
        activate<4 * kTogether>(value, to.activation);
        if (to.swiglu)
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
                value[4 * j] = silu(value[4 * j]) * value[4 * j + 1];
                value[4 * j + 1] = silu(value[4 * j + 2]) * value[4 * j + 3];
            }
        if (to.scale_out) divide(value, scale_out);
        if (to.accumulate)
#pragma unroll
            for (int i = 0; i < 4 * kTogether; ++i)
                if (token[i / 4] < work.columns && i % 4 < count / gated)
                    value[i] += static_cast<const float *>(to.out)[index[i / 4] + i % 4];
        with_out_type(to.out_dtype, [&](auto type) {
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
                const float four[4] = {value[4 * j], value[4 * j + 1], value[4 * j + 2], value[4 * j + 3]};
                if (token[j] < work.columns) store_four<decltype(type)>(to.out, index[j], four, count / gated, aligned);
            }
        });
    }
}

}  // namespace flexgemm
