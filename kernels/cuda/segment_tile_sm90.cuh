/*
 * Tiles of the convolution by segments (conv_segment_sm90.cu), and weights laid out for them.
 */
#pragma once

#include "conv_gather.cuh"
#include "ptx.cuh"
#include "segment_pool_sm90.cuh"

namespace flexgemm {

constexpr int kGatherWarps = 3;                 /* of the first warpgroup; its first warp brings weights and places */
constexpr int kStepDepth = 64, kRowBytes = 128; /* of a row of weights */

/* Columns of a tile, channels of an offset. */
template <int kBlockN_, int kDepth_>
struct SegmentTile {
    static constexpr int kBlockN = kBlockN_, kDepth = kDepth_, kPacked = kStepDepth / kDepth; /* offsets of a step */
    static constexpr int kInputBytes = 2 * kDepth;
    using Pool = SegmentPool<kInputBytes, false, kGatherWarps, FG_SEGMENT_PLACES>;
    static constexpr int kWeightBytes = kBlockN * kRowBytes;
    static constexpr int kStages = kBlockN == 128 ? 5 : 8; /* as there is room */
    __host__ __device__ static int steps(const GatherParams &p) { return ceil_div(p.volume, kPacked); }
    __host__ __device__ static int depth_blocks(const GatherParams &p) { return ceil_div(p.depth, kDepth); }
};

/* The channel of an offset that wgmma takes at place `place` of its kDepth: what Consumer::arrange makes of pieces. Of
 * two places side by side, the first even, the channels are as well. */
template <class Tile>
__device__ __forceinline__ int channel_at(int place) {
    const int product = place / 16, quad = place % 8 / 2, pair = place % 16 / 8;
    if (Tile::kDepth == 16) return 4 * quad + 2 * pair + place % 2;
    return product / 2 * 32 + 8 * quad + product % 2 * 4 + 2 * pair + place % 2;
}

/* (column tile, block of channels, step, column of the tile, 64): what a stage takes is one piece. A thread lays out 8
 * numbers, beside others of its own channels or columns, as they lie in memory. Mirrored, the first offset's weights
 * meet the map's last entries. */
template <class Tile>
__global__ void __launch_bounds__(256)
    lay_out_weights_kernel(const GatherParams p, bool k_major, int64_t chunks, uint4 *out) {
    ptx::wait_for_earlier_kernels();
    ptx::let_next_kernel_begin();
    constexpr int kChunks = kStepDepth / 8;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
    if (index >= chunks) return;
    const auto stage = static_cast<int>(index / (kChunks * Tile::kBlockN)); /* of all */
    const int within = static_cast<int>(index % (kChunks * Tile::kBlockN));
    const int chunk = k_major ? within % kChunks : within / Tile::kBlockN;
    const int row = k_major ? within / kChunks : within % Tile::kBlockN;
    const int steps = Tile::steps(p), step = stage % steps, block = stage / steps % Tile::depth_blocks(p);
    const int n = stage / steps / Tile::depth_blocks(p) * Tile::kBlockN + row;
    const int entry = step * Tile::kPacked + chunk * 8 / Tile::kDepth, v = p.mirrored ? p.volume - 1 - entry : entry;
    const auto *const weight = static_cast<const uint16_t *>(p.weight);
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int k = block * Tile::kDepth + channel_at<Tile>((chunk * 8 + 2 * i) % Tile::kDepth);
        pairs[i] = 0;
        if (n >= p.columns || entry >= p.volume || k >= p.depth) continue;
        if (k_major) {
            const int64_t at = (static_cast<int64_t>(n) * p.volume + v) * p.depth + k;
            pairs[i] = *reinterpret_cast<const uint32_t *>(weight + at);
        } else {
            const int64_t at = (static_cast<int64_t>(k) * p.volume + v) * p.columns + n;
            pairs[i] = weight[at] | static_cast<uint32_t>(weight[at + static_cast<int64_t>(p.volume) * p.columns])
                                        << 16;
        }
    }
    out[(static_cast<int64_t>(stage) * Tile::kBlockN + row) * kChunks + chunk] =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

}  // namespace flexgemm
