/*
 * Forward and input gradient of sparse convolution on Hopper, 16-bit types, for few channels: a tile is 64 rows and all
 * columns, and each warp gathers the 16 rows that are its own.
 *
 * With few channels, what limits the pipeline of conv_gather_sm90.cuh is what one warpgroup can gather for the others
 * and how often weights come again. Here the four warpgroups of a CTA have a tile each and go through the offsets in
 * step, so that one piece of the weights, brought by TMA, serves 256 rows. A warp's ring of rows is shared with nobody,
 * needs no barrier, and runs on from tile to tile, so that a tile ends while the rows of the next are on their way.
 * From there rows go to registers, where wgmma may have its first operand. Rows are taken as they come: those beside
 * each other find what they share in L1.
 *
 * A step is 64 channels of one offset, or all of as many offsets as fill it: two of 32 channels, four of 16, eight of
 * 8.
 */
#include <algorithm>
#include <type_traits>

#include "activation.cuh"
#include "conv_gather.cuh"
#include "conv_rows_sm90.cuh"
#include "ptx.cuh"
#include "ring.cuh"
#include "tensor_map.cuh"

namespace flexgemm {
namespace {

constexpr int kWarpgroups = 4, kWarps = 4 * kWarpgroups, kThreads = 32 * kWarps;
constexpr int kTileRows = FG_OWN_ROWS, kWarpRows = 16, kBlockRows = kWarpgroups * kTileRows;
constexpr int kStepDepth = 64;             /* of the reduction: 128 bytes of a row */
constexpr int kChunk = 8, kStepChunks = 8; /* elements of 16 bytes */
constexpr int kRowBytes = 128, kAtomBytes = 8 * kRowBytes;
constexpr int kProducts = kStepDepth / 16; /* wgmma of a step */

/* Depth of the rings: of a warp's rows; of weights, which are brought kSlack steps after their place was used last, so
 * that nobody waits for the slowest warp. */
constexpr int kStages = 3, kWeightStages = 4, kSlack = 2;

/* Columns of a tile, offsets of a step. */
template <int kBlockN_, int kPacked_>
struct OwnRowsTile {
    static constexpr int kBlockN = kBlockN_, kPacked = kPacked_;
    static constexpr int kChunks = kStepChunks / kPacked; /* of an offset */
    __host__ __device__ static int steps(const GatherParams &p) { return ceil_div(p.volume, kPacked); }
};

/* One warp's ring. A step comes with its rows, and the map entries of the step that is kStages - 1 later: rows r, r +
 * 4, r + 8 and r + 12, which one lane gathers, lie side by side. */
template <class Tile>
struct WarpRing {
    alignas(kRowBytes) char rows[kStages][kWarpRows][kRowBytes];
    alignas(16) int32_t entries[kStages][Tile::kPacked][kWarpRows];
};

template <class Tile, bool kKMajor>
struct OwnRowsShared {
    /* A row of 128 bytes for each column; MN-major, for each element of the reduction. */
    static constexpr int kWeightRows = kKMajor ? Tile::kBlockN : kStepDepth;
    alignas(kAtomBytes) char weights[kWeightStages][kWeightRows * kRowBytes];
    WarpRing<Tile> rings[kWarps];
    alignas(8) float bias[Tile::kBlockN];
    uint64_t full[kWeightStages], empty[kWeightStages]; /* of the weights */
};

/* ---- weights: one warp ---- */

template <class Tile, bool kKMajor>
__device__ __forceinline__ void load_weights(char *target, const CUtensorMap &map, uint64_t *full,
                                             const GatherParams &p, int v) {
    constexpr int kPacked = Tile::kPacked, kRows = kStepDepth / kPacked;
    if constexpr (kKMajor) {
        ptx::tma_load_3d(target, &map, full, kPacked > 1 ? 2 * v * p.depth : 0, kPacked > 1 ? 0 : v, 0);
    } else {
        for (int i = 0; i < kPacked; ++i) ptx::tma_load_3d(target + i * kRows * kRowBytes, &map, full, 0, v + i, 0);
    }
}

/* All steps' weights, as often as this CTA has blocks of rows. */
template <class Tile, bool kKMajor>
struct WeightLoader {
    OwnRowsShared<Tile, kKMajor> &shared;
    const CUtensorMap &map;
    const GatherParams &p;
    const int steps;
    int64_t left; /* of all blocks' steps */
    RingPosition<kWeightStages> place;
    int step = 0;

    __device__ WeightLoader(OwnRowsShared<Tile, kKMajor> &shared_, const CUtensorMap &map_, const GatherParams &p_,
                            int64_t blocks)
        : shared(shared_), map(map_), p(p_), steps(Tile::steps(p_)), left(blocks * steps) {
        for (int i = 0; i < kWeightStages - kSlack; ++i) next();
    }

    __device__ void next() {
        if (left == 0) return;
        --left;
        if (ptx::elect()) {
            uint64_t *full = &shared.full[place.slot];
            ptx::mbarrier_wait_parity(&shared.empty[place.slot], place.parity ^ 1);
            ptx::mbarrier_arrive_expect_tx(full, sizeof shared.weights[0]);
            load_weights<Tile, kKMajor>(shared.weights[place.slot], map, full, p, step * Tile::kPacked);
        }
        place.advance();
        if (++step == steps) step = 0;
    }
};

/* ---- rows ---- */

/* What one warp gathers: step after step of tile after tile, `stride` rows apart. */
template <typename T, class Tile>
struct WarpGatherer {
    const GatherParams &p;
    const int64_t stride;
    const int steps;
    WarpRing<Tile> &ring;
    const int lane;
    const uint32_t row_bytes;

    /* Of the next step to look up: the row of the tile and the offset whose entry this lane copies, two offsets on with
     * each further one it has, how many offsets the row has, the entry. */
    int64_t looked_up_row;
    int looked_up_v, looked_up_end;
    const int32_t *entry;
    const int64_t volume_stride; /* from offset to offset */

    /* Where row 0 has the chunk that is this lane's of each row, and how many rows have it. */
    uint64_t in;
    uint32_t in_rows;

    __device__ WarpGatherer(const GatherParams &p_, WarpRing<Tile> &ring_, int64_t first_row, int64_t stride_)
        : p(p_),
          stride(stride_),
          steps(Tile::steps(p_)),
          ring(ring_),
          lane(ptx::opaque(static_cast<int>(threadIdx.x % 32))), /* each step would read threadIdx again */
          row_bytes(static_cast<uint32_t>(sizeof(T) * p_.in_stride)),
          looked_up_row(first_row + lane % kWarpRows),
          volume_stride(p_.mirrored ? -p_.rows : p_.rows) {
        const int channel = lane % Tile::kChunks * kChunk;
        in = reinterpret_cast<uint64_t>(static_cast<const T *>(p.in) + channel);
        in_rows = channel < p.depth ? p.in_rows : 0;
        begin_looking_up();
        for (int i = 0; i < kStages - 1; ++i) look_up(i);
        ptx::cp_async_commit();
    }

    /* Fills the ring, when the first entries have come. */
    __device__ void begin() {
        ptx::cp_async_wait<0>();
        __syncwarp();
        for (int i = 0; i < kStages - 1; ++i) {
            issue(i, (i + kStages - 1) % kStages);
            __syncwarp();
        }
    }

    /* ... of a tile. */
    __device__ void begin_looking_up() {
        looked_up_v = lane / kWarpRows;
        looked_up_end = looked_up_row < p.rows ? p.volume : 0;
        entry = p.map_at(looked_up_v) + looked_up_row;
    }

    /* Starts the copies of a step's map entries; of rows and offsets that are not there they say so. */
    __device__ void look_up(int slot) {
        if (Tile::kPacked > 1 || lane < kWarpRows) {
            const int row = lane % kWarpRows;
            int32_t *target = &ring.entries[slot][lane / kWarpRows][row % 4 * 4 + row / 4];
#pragma unroll
            for (int i = 0; 2 * i < Tile::kPacked || i == 0; ++i) {
                if (looked_up_v + 2 * i < looked_up_end)
                    ptx::cp_async_4(target + 2 * i * kWarpRows, entry + 2 * i * volume_stride);
                else
                    target[2 * i * kWarpRows] = -1;
            }
        }
        entry += Tile::kPacked * volume_stride;
        looked_up_v += Tile::kPacked;
        if (looked_up_v >= steps * Tile::kPacked) {
            looked_up_row += stride;
            begin_looking_up();
        }
    }

    /* Starts the copies of a step's rows: of a fourth of them each lane copies a chunk; zeros for missing
     * neighbours. */
    __device__ void gather(int slot) {
        ptx::hold(in);
        const int chunk = lane % kStepChunks, first = lane / kStepChunks;
        const int4 places = reinterpret_cast<const int4 *>(ring.entries[slot][chunk / Tile::kChunks])[first];
        const int32_t place[] = {places.x, places.y, places.z, places.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            /* Where zeros are asked for, the row is not read and may lie anywhere. */
            const auto at = static_cast<uint32_t>(place[i]);
            const auto row = reinterpret_cast<const void *>(in + static_cast<uint64_t>(at) * row_bytes);
            ptx::cp_async_16_or_zeros_cached(chunk_of(slot, first + 4 * i, chunk), row, at >= in_rows);
        }
    }

    /* The next step, as one group of copies; and the entries of a later one. */
    __device__ void issue(int slot, int slot_of_entries) {
        gather(slot);
        look_up(slot_of_entries);
        ptx::cp_async_commit();
    }

    /* Eight rows' chunks of the same number lie in different banks. */
    __device__ char *chunk_of(int slot, int row, int chunk) const {
        return &ring.rows[slot][row][(chunk ^ row % 8) * 16];
    }

    /* The first operands of a step's products. */
    __device__ void fetch(uint32_t (&a)[kProducts][4], int slot) const {
#pragma unroll
        for (int i = 0; i < kProducts; ++i) ptx::ldmatrix_x4(a[i], chunk_of(slot, lane % 16, 2 * i + lane / 16));
    }
};

/* ---- products ---- */

/* D += A.B of 64 rows and 16 channels, A in registers. */
template <typename T, bool kKMajor, int kRegisters>
__device__ __forceinline__ void wgmma(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b) {
    if constexpr (std::is_same<T, __half>::value && kKMajor)
        ptx::wgmma_f16_from_registers(d, a, b, 1);
    else if constexpr (std::is_same<T, __half>::value)
        ptx::wgmma_f16_kn_from_registers(d, a, b, 1);
    else if constexpr (kKMajor)
        ptx::wgmma_bf16_from_registers(d, a, b, 1);
    else
        ptx::wgmma_bf16_kn_from_registers(d, a, b, 1);
}

template <typename T, class Tile, bool kKMajor>
__global__ void __launch_bounds__(kThreads, 1)
    conv_own_rows_sm90_kernel(const GatherParams p, const __grid_constant__ CUtensorMap weight_map) {
    extern __shared__ __align__(kAtomBytes) char dynamic[];
    ptx::let_next_kernel_begin(); /* all in front of this one has ended */
    auto &shared = *reinterpret_cast<OwnRowsShared<Tile, kKMajor> *>(dynamic);
    constexpr int kNext = kKMajor ? 32 : 16 * kRowBytes; /* bytes of weights a product */
    const int warp = ptx::opaque(static_cast<int>(threadIdx.x / 32)), own_row = warp * kWarpRows;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * kBlockRows;
    int64_t row = static_cast<int64_t>(blockIdx.x) * kBlockRows;
    WarpGatherer<T, Tile> gatherer(p, shared.rings[warp], row + own_row, stride);
    const bool loads = warp == 0;
    if (ptx::elect() && loads) {
        for (uint64_t &barrier : shared.full) ptx::mbarrier_init(&barrier, 1);
        for (uint64_t &barrier : shared.empty) ptx::mbarrier_init(&barrier, kWarps);
        ptx::fence_mbarrier_init();
        ptx::prefetch_tensor_map(&weight_map);
    }
    WeightLoader<Tile, kKMajor> loader(shared, weight_map, p, loads ? ceil_div(p.rows - row, stride) : 0);
    if (p.epilogue.bias)
        for (int i = static_cast<int>(threadIdx.x); i < Tile::kBlockN; i += kThreads)
            shared.bias[i] = i < p.columns ? to_float(static_cast<const T *>(p.epilogue.bias)[i]) : 0.0f;
    gatherer.begin();
    __syncthreads();

    const int lane = gatherer.lane;
    uint64_t descriptor = ptx::wgmma_descriptor(shared.weights[0]);
    ptx::wgmma_hold(descriptor);
    RingPosition<kWeightStages> weights;
    int slot = 0, before = kStages - 1, before_that = kStages - 2;
    for (; row < p.rows; row += stride) {
        float d[Tile::kBlockN / 2];
#pragma unroll
        for (float &sum : d) sum = 0.0f;
        int step = 0;
        do {
            if (loads) loader.next();
            ptx::cp_async_wait<kStages - 2>();
            __syncwarp();
            uint32_t a[kProducts][4];
            gatherer.fetch(a, slot);
            ptx::mbarrier_wait_parity(&shared.full[weights.slot], weights.parity);
            const uint64_t b =
                ptx::wgmma_advance(descriptor, weights.slot * static_cast<int>(sizeof shared.weights[0]));
            ptx::wgmma_fence();
#pragma unroll
            for (int i = 0; i < kProducts; ++i) wgmma<T, kKMajor>(d, a[i], ptx::wgmma_advance(b, i * kNext));
            ptx::wgmma_commit();
            gatherer.issue(before, before_that);
            ptx::wgmma_wait<0>(); /* other warpgroups keep the tensor cores busy */
#pragma unroll
            for (auto &operand : a) ptx::wgmma_hold(operand);
            if (lane == 0) ptx::mbarrier_arrive(&shared.empty[weights.slot]);
            weights.advance();
            before_that = before;
            before = slot;
            if (++slot == kStages) slot = 0;
        } while (++step < gatherer.steps);
        ptx::wgmma_hold(d);
        const int64_t first = row + own_row + lane / 4;
        const int64_t rows[2] = {first < p.rows ? first : -1, first + 8 < p.rows ? first + 8 : -1};
        if constexpr (kKMajor) { /* the forward pass */
            add_rows<T>(d, p.epilogue.bias ? shared.bias : nullptr, p, 0, rows);
            activate(d, p.epilogue.activation);
        }
        store_rows<T>(d, p, 0, rows);
    }
    ptx::cp_async_wait<0>(); /* no thread leaves with copies under way */
}

/* ---- launch ---- */

template <typename T, class Tile, bool kKMajor>
fg_status launch(const GatherParams &p, int num_sms, cudaStream_t stream, fg_error *error) {
    CUtensorMap weight_map; /* coordinates: byte of a row, offset, row */
    const int64_t rows = kKMajor ? p.columns : p.depth;
    const int64_t row_bytes = static_cast<int64_t>(sizeof(T)) * (kKMajor ? p.depth : p.columns);
    const TensorRows weight = kKMajor && Tile::kPacked > 1
                                  ? TensorRows{p.weight, p.volume * row_bytes, 1, rows, row_bytes, p.volume * row_bytes}
                                  : TensorRows{p.weight, row_bytes, p.volume, rows, row_bytes, p.volume * row_bytes};
    fg_status status =
        encode_tensor_map(&weight_map, weight, 1, kKMajor ? Tile::kBlockN : kStepDepth / Tile::kPacked, error);
    if (status != FG_OK) return status;

    constexpr int kSharedBytes = sizeof(OwnRowsShared<Tile, kKMajor>);
    constexpr int kSharedPercent = 72; /* of 228 KB: L1 has 92 of 256 */
    static_assert(kSharedBytes + 1024 <= 164 * 1024, "as asked for");
    constexpr auto kKernel = conv_own_rows_sm90_kernel<T, Tile, kKMajor>;
    status = allow_shared<conv_own_rows_sm90_kernel<T, Tile, kKMajor>>(kSharedBytes, error, kSharedPercent);
    if (status != FG_OK) return status;
    const auto grid = static_cast<unsigned int>(std::min<int64_t>(ceil_div<int64_t>(p.rows, kBlockRows), num_sms));
    kKernel<<<grid, kThreads, kSharedBytes, stream>>>(p, weight_map);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

template <typename T, bool kKMajor, int kBlockN>
fg_status launch_packed(const GatherParams &p, int num_sms, cudaStream_t stream, fg_error *error) {
    if (p.depth == 8) return launch<T, OwnRowsTile<kBlockN, 8>, kKMajor>(p, num_sms, stream, error);
    if (p.depth == 16) return launch<T, OwnRowsTile<kBlockN, 4>, kKMajor>(p, num_sms, stream, error);
    if (p.depth == 32) return launch<T, OwnRowsTile<kBlockN, 2>, kKMajor>(p, num_sms, stream, error);
    return launch<T, OwnRowsTile<kBlockN, 1>, kKMajor>(p, num_sms, stream, error);
}

template <typename T, bool kKMajor>
fg_status launch_tile(const GatherParams &p, const fg_plan &plan, int num_sms, cudaStream_t stream, fg_error *error) {
    return plan.block_n == 32 ? launch_packed<T, kKMajor, 32>(p, num_sms, stream, error)
                              : launch_packed<T, kKMajor, 64>(p, num_sms, stream, error);
}

}  // namespace

fg_status launch_own_rows_sm90(const GatherParams &p, const fg_plan &plan, fg_dtype dtype, bool weight_is_k_major,
                               int num_sms, cudaStream_t stream, fg_error *error) {
    if (dtype == FG_FLOAT16)
        return weight_is_k_major ? launch_tile<__half, true>(p, plan, num_sms, stream, error)
                                 : launch_tile<__half, false>(p, plan, num_sms, stream, error);
    return weight_is_k_major ? launch_tile<__nv_bfloat16, true>(p, plan, num_sms, stream, error)
                             : launch_tile<__nv_bfloat16, false>(p, plan, num_sms, stream, error);
}

}  // namespace flexgemm
