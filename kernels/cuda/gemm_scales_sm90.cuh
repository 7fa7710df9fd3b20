/*
 * Scales of blocks in the Hopper kernels of products: one of each row of A and 128 of K, one of 128 rows of B and 128 of
 * K. A step's products are multiplied by both when they are added to the sums.
 *
 * They come to a stage as its operands do: two warps beside the producer copy them, 4 bytes at a time since they lie
 * along K, and the stage is full when they are there too. Loads from memory by those who add take a tenth of the time of
 * large products, and more where each thread has many tokens.
 */
#pragma once

#include "gemm_mainloop_sm90.cuh"

namespace flexgemm {

/* ---- shared memory ---- */

/* Of a step: those of kRows rows of A, in the order in which a thread reads them, and of kBlocks blocks of rows of B. */
template <int kRows, int kBlocks>
struct StepScales {
    alignas(16) float a[kRows];
    float b[kBlocks];
};

/* Of all stages; nothing where operands have no such scales. */
template <typename Tile, bool kPresent = Tile::kScaleThreads != 0>
struct StageScales {
    StepScales<Tile::kScaledRows, Tile::kScaledBlocks> of[Tile::kStages];
};

template <typename Tile>
struct StageScales<Tile, false> {};

/* ---- copies ---- */

constexpr int kSm90ScaleThreads = 64, kSm90ScaleBlock = FG_SCALE_BLOCK_SIZE;

/* Of a tile's first step: those of its rows of A, and of its blocks of rows of B. */
struct TileScaleRows {
    const float *a, *b;
    int64_t a_step, b_step; /* from one row, or block, to the next */
    int a_count, b_count;
};

/* Of `a_rows` rows of A from first_a on and `b_rows` rows of B; where there are none, none are read. */
__device__ __forceinline__ TileScaleRows scale_rows_of(const GemmSm90Args &args, const Sm90Work &work, int first_a,
                                                       int a_rows, int first_b, int b_rows) {
    const Scale &a = args.epilogue.scale_a, &b = args.epilogue.scale_b;
    const int block = work.k_begin / kSm90StepBytes;
    return {a.data + work.group * a.group_step + first_a * a.step + block,
            b.data + work.weight * b.group_step + first_b / kSm90ScaleBlock * b.step + block,
            a.step,
            b.step,
            a_rows,
            ceil_div(b_rows, kSm90ScaleBlock)};
}

/* Those of all steps of a tile, by all kSm90ScaleThreads; that of row r goes to place(r). */
template <typename Tile, typename Place>
__device__ __forceinline__ void copy_scales(Sm90Shared<Tile> &shared, StageScales<Tile> &scales,
                                            const TileScaleRows &from, int steps, const Place &place,
                                            RingPosition<Tile::kStages> &at) {
    const int thread = threadIdx.x % kSm90ScaleThreads;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, at.advance()) {
        ptx::mbarrier_wait_parity(&shared.scales_read[at.slot], at.parity ^ 1);
        auto &to = scales.of[at.slot];
#pragma unroll
        for (int first = 0; first < Tile::kScaledRows; first += kSm90ScaleThreads) {
            const int row = first + thread;
            if (row < from.a_count) ptx::cp_async_4(&to.a[place(row)], from.a + row * from.a_step + step);
        }
        if (thread < from.b_count) ptx::cp_async_4(&to.b[thread], from.b + thread * from.b_step + step);
        ptx::mbarrier_arrive_after_cp_async(&shared.full[at.slot]);
    }
}

/* No thread leaves with copies under way. */
__device__ __forceinline__ void await_copies() {
    ptx::cp_async_commit(); /* only groups can be waited for */
    ptx::cp_async_wait<0>();
}

/* ---- rows of A are rows of the tile ---- */

/* A thread's two rows, r and r + 8, lie beside each other. */
__device__ __forceinline__ int place_of_row(int row) { return row / 16 * 16 + row % 8 * 2 + row / 8 % 2; }

/* Of the thread's two rows of A, times that of the columns of each part. */
template <typename Tile>
struct RowScales {
    Sm90Shared<Tile> &shared;
    const StageScales<Tile> &scales;
    int place; /* of the first row */
    struct OfPart {
        float value[2];
        __device__ __forceinline__ float of(int i) const { return value[i / 2 % 2]; }
    };
    struct Step {
        OfPart parts[Tile::kScaledBlocks];
        __device__ __forceinline__ const OfPart &part(int p) const { return parts[p]; }
    };
    __device__ __forceinline__ void load(Step &scale, int slot) {
        const auto &from = scales.of[slot];
        const float2 of_a = *reinterpret_cast<const float2 *>(&from.a[place]);
#pragma unroll
        for (int part = 0; part < Tile::kScaledBlocks; ++part) {
            const float of_b = from.b[part];
            scale.parts[part] = {{of_a.x * of_b, of_a.y * of_b}};
        }
        leave_scales(shared, slot);
    }
};

/* ---- rows of A are columns of the tile ---- */

/* A thread's four tokens of 16, q, q + 1, q + 8 and q + 9, lie beside each other. */
__device__ __forceinline__ int place_of_token(int token) {
    return token / 16 * 16 + token % 8 / 2 * 4 + token / 8 % 2 * 2 + token % 2;
}

/* Of the thread's tokens, times that of the block's rows of weights. */
template <typename Tile, int kCount>
struct TokenScales {
    Sm90Shared<Tile> &shared;
    const StageScales<Tile> &scales;
    struct Step {
        float value[(kCount + 7) / 8 * 4];
        __device__ __forceinline__ const Step &part(int) const { return *this; }
        __device__ __forceinline__ float of(int i) const { return value[i / 4 * 2 + i % 2]; }
    };
    __device__ __forceinline__ void load(Step &scale, int slot) {
        const auto &from = scales.of[slot];
        const float of_weights = from.b[0];
#pragma unroll
        for (int i = 0; i < (kCount + 7) / 8; ++i) {
            const float4 four = *reinterpret_cast<const float4 *>(&from.a[i * 16 + threadIdx.x % 4 * 4]);
            float *to = &scale.value[i * 4];
            to[0] = four.x * of_weights, to[1] = four.y * of_weights;
            to[2] = four.z * of_weights, to[3] = four.w * of_weights;
        }
        leave_scales(shared, slot);
    }
};

}  // namespace flexgemm
