/*
 * Consumers of conv_gather_sm90.cuh that sum each step by itself: its sums start from zero and are then added to
 * float32 registers, so that what tensor cores cut off of a running sum does not grow with the number of steps.
 *
 * There is one partial sum, of up to 128 columns: a wider tile is two parts, one after the other. While a warpgroup
 * adds, the other one's products run.
 */
#pragma once

#include "conv_gather_sm90.cuh"

namespace flexgemm {

/* Math: kRowScales, whether rows of `in` may have scales; multiply(sums, rows, columns), the products of a step from
 * descriptors of A and B; write(sums, p, shared, task, rows), the end of a tile. */
template <class Math, class Tile>
struct StepSumsConsumer {
    static constexpr int kParts = Tile::kBlockN > 128 ? 2 : 1;
    static constexpr int kCount = Tile::kBlockN / kParts / 2; /* sums of a thread, of one part */

    const GatherParams &p;
    GatherShared<Tile> &shared;
    const int lane;
    RingPosition<Tile::kStages> place; /* in the pipeline */

    /* d += the products of a stage times the scales of its rows; frees the stage. */
    __device__ void multiply(float (&d)[kParts * kCount]) {
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
            Math::multiply(partial, rows, columns + part * kPart);
            ptx::wgmma_commit();
            if (Math::kRowScales && part == 0 && p.row_scales) {
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
                sum = Math::kRowScales ? fmaf(partial[i], scale[i / 2 % 2], sum) : sum + partial[i];
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

    __device__ void run() {
        using Sums = float[kParts * kCount];
        consume_tiles<Tile>(
            p, [this](Sums &d, bool *any) { return accumulate(d, any); },
            [this](Sums &d, const GatherTask<Tile> &task, const int64_t (&rows)[2]) {
                Math::write(d, p, shared, task, rows);
            });
    }
};

}  // namespace flexgemm
