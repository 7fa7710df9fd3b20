/*
 * Forward pass of sparse convolution on Hopper with float8 operands of either kind: the pipeline of
 * conv_gather_sm90.cuh, whose consumers sum each step by itself.
 *
 * Tensor cores keep about 13 fraction bits of a running sum of float8 products. A step is 128 channels at one offset;
 * its sums start from zero and are then added to float32 registers. That is also where a row's scale belongs: each row
 * of a tile gathers another row of `in` at each offset, so that the scales travel with the steps, one for each row of
 * A, and multiply the sums as they are added. What scales the columns, or all of `in`, waits for the end.
 *
 * There is one partial sum, of up to 128 columns: a wider tile is two parts, one after the other. While a warpgroup
 * adds, the other one's products run; and the bytes of a step take longer to come from L2 than its products.
 */
#include "activation.cuh"
#include "conv_gather_sm90.cuh"
#include "conv_rows_sm90.cuh"

namespace flexgemm {
namespace {

using Byte = uint8_t; /* an element of either kind */

/* D = A.B^T or D += A.B^T of 64 rows, 32 bytes of K. */
template <bool kAIsE5m2, bool kBIsE5m2, int kCount>
__device__ __forceinline__ void wgmma(float (&d)[kCount], uint64_t a, uint64_t b, bool accumulate) {
    if constexpr (kAIsE5m2 && kBIsE5m2)
        ptx::wgmma_e5m2_e5m2(d, a, b, accumulate);
    else if constexpr (kAIsE5m2)
        ptx::wgmma_e5m2_e4m3(d, a, b, accumulate);
    else if constexpr (kBIsE5m2)
        ptx::wgmma_e4m3_e5m2(d, a, b, accumulate);
    else
        ptx::wgmma_e4m3_e4m3(d, a, b, accumulate);
}

template <bool kAIsE5m2, bool kBIsE5m2, class Tile>
struct Consumer {
    static constexpr int kParts = Tile::kBlockN > 128 ? 2 : 1;
    static constexpr int kCount = Tile::kBlockN / kParts / 2; /* sums of a thread, of one part */

    const GatherParams &p;
    GatherShared<Tile> &shared;
    const int lane;
    RingPosition<Tile::kStages> place; /* in the pipeline */

    /* d += the products of a stage times the scales of its rows; frees the stage. */
    __device__ void multiply(float (&d)[kParts * kCount]) {
        constexpr int kSteps = kSwizzleRowBytes / kWgmmaBytes, kAdvance = kWgmmaBytes / 16;
        constexpr int kPart = Tile::kBlockN / kParts * kSwizzleRowBytes / 16;
        const char *a = shared.stages[place.slot], *b = a + Tile::kBytesA;
        const uint64_t rows = ptx::wgmma_descriptor(a + consumer_of_thread() * kWgmmaM * kSwizzleRowBytes);
        const uint64_t columns = ptx::wgmma_descriptor(b);
        float scale[2] = {1.0f, 1.0f};
        ptx::fence_proxy_async(); /* the rows of A came through the ordinary path, wgmma reads through another */
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            float partial[kCount];
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < kSteps; ++k)
                wgmma<kAIsE5m2, kBIsE5m2>(partial, rows + k * kAdvance, columns + part * kPart + k * kAdvance, k > 0);
            ptx::wgmma_commit();
            if (part == 0 && p.row_scales) {
#pragma unroll
                for (int half = 0; half < 2; ++half) scale[half] = shared.scale[place.slot][row_of_thread(half)];
            }
            ptx::wgmma_wait<0>();
            ptx::wgmma_hold(partial);
            if (part == kParts - 1) {
                __syncwarp(); /* all lanes have read their scales */
                release_stage(shared, place.slot, lane);
            }
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                float &sum = d[part * kCount + i];
                sum = fmaf(partial[i], scale[i / 2 % 2], sum);
            }
        }
    }

    /* Multiplies until the end of the tile, whose word is returned; *any: there was something to multiply. */
    __device__ uint32_t accumulate(float (&d)[kParts * kCount], bool *any) {
        uint32_t step;
        do {
            ptx::mbarrier_wait_parity(&shared.full[place.slot], place.parity);
            step = step_of(shared, place.slot, lane);
            const bool active = concerns(step, consumer_of_thread());
            if (active)
                multiply(d);
            else
                release_stage(shared, place.slot, lane);
            *any |= active;
            place.advance();
        } while (!ends_tile(step));
        return __shfl_sync(~0u, step, 0);
    }

    __device__ void scale_columns(float (&d)[kParts * kCount], int n0) {
#pragma unroll
        for (int j = 0; j < Tile::kBlockN / 8; ++j) {
            const int n = n0 + 8 * j + lane % 4 * 2;
            if (n >= p.columns) continue; /* columns are a multiple of 8 */
            const float x = p.epilogue.scale_of(n), y = p.epilogue.scale_of(n + 1);
            d[4 * j] *= x, d[4 * j + 1] *= y;
            d[4 * j + 2] *= x, d[4 * j + 3] *= y;
        }
    }

    __device__ static void divide(float (&d)[kParts * kCount], float divisor) {
#pragma unroll
        for (float &sum : d) sum = __fdiv_rn(sum, divisor);
    }

    __device__ void run() {
        for (;;) {
            float d[kParts * kCount];
#pragma unroll
            for (float &sum : d) sum = 0.0f;
            bool any = false;
            const uint32_t end = accumulate(d, &any);
            if (end == kEndOfWork) return;
            if (p.partials && !any) continue; /* nobody reads the partial sums of rows without neighbours */
            const GatherTask<Tile> task(p, static_cast<int>(end - kEndOfTile));
            const int64_t rows[2] = {task.row_of(p, row_of_thread(0)), task.row_of(p, row_of_thread(1))};
            if (p.partials) {
                store_partials(d, p, task.slice, task.n0, rows);
                continue;
            }
            scale_columns(d, task.n0);
            with_float_type(p.added_dtype, [&](auto type) {
                using T = decltype(type);
                add_rows<T>(d, bring_bias<T>(shared, p, task.n0), p, task.n0, rows);
            });
            activate(d, p.epilogue.activation);
            if (p.epilogue.scale_out) divide(d, *p.epilogue.scale_out);
            with_out_type(p.out_dtype, [&](auto type) { store_rows<decltype(type)>(d, p, task.n0, rows); });
        }
    }
};

/* ---- kernel and launch ---- */

template <bool kAIsE5m2, bool kBIsE5m2, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    conv_fp8_sm90_kernel(const GatherParams p, const __grid_constant__ CUtensorMap weight_map, int tasks) {
    gather_block<Byte, Tile, true, Consumer<kAIsE5m2, kBIsE5m2, Tile>>(p, weight_map, tasks);
}

template <bool kAIsE5m2, bool kBIsE5m2>
fg_status launch(const GatherParams &p, const fg_plan &plan, int num_sms, cudaStream_t stream, fg_error *error) {
    return with_gather_tile(plan, [&](auto tile) {
        using Tile = decltype(tile);
        return launch_gather<conv_fp8_sm90_kernel<kAIsE5m2, kBIsE5m2, Tile>, Byte, Tile, true>(p, num_sms, stream,
                                                                                               error);
    });
}

}  // namespace

fg_status launch_fp8_sm90(const GatherParams &p, const fg_plan &plan, fg_dtype in, fg_dtype weight, int num_sms,
                          cudaStream_t stream, fg_error *error) {
    if (in == FG_FLOAT8_E5M2)
        return weight == FG_FLOAT8_E5M2 ? launch<true, true>(p, plan, num_sms, stream, error)
                                        : launch<true, false>(p, plan, num_sms, stream, error);
    return weight == FG_FLOAT8_E5M2 ? launch<false, true>(p, plan, num_sms, stream, error)
                                    : launch<false, false>(p, plan, num_sms, stream, error);
}

}  // namespace flexgemm
