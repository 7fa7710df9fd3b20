/*
 * Forward and input gradient of sparse convolution on Hopper, 16-bit types, for few channels: all weights fit a
 * multiprocessor's shared memory, stay there while its CTA lives, and only rows are gathered.
 *
 * A warpgroup multiplies tiles of 64 rows, and each of its warps gathers the 16 that are its own, into a ring that it
 * shares with nobody: no barrier, and no warp that does nothing but gather. The ring runs on from tile to tile, so that a
 * tile ends while the rows of the next are on their way. From there rows go to registers, where wgmma may have its first
 * operand; the weights are the second one.
 *
 * A step of the ring is one offset, or two of up to 16 channels. Rows are taken
 * as they come: those beside each other find what they share in L1.
 */
#include <algorithm>
#include <type_traits>

#include "activation.cuh"
#include "conv_gather.cuh"
#include "conv_rows_sm90.cuh"
#include "ptx.cuh"

namespace flexgemm {
namespace {

constexpr int kWarpgroups = 4, kThreads = 128 * kWarpgroups;
constexpr int kTileRows = FG_RESIDENT_ROWS, kWarpRows = 16;
constexpr int kChunk = 8;                                         /* elements of 16 bytes */
constexpr int kStepChunks = 4, kStepDepth = kStepChunks * kChunk; /* of the reduction */
constexpr int kRowBytes = 128, kAtomBytes = 8 * kRowBytes;        /* of swizzled weights */

/* Columns of a tile, offsets of a step, depth of the rings. */
template <int kBlockN_, int kPacked_, int kStages_>
struct ResidentTile {
    static constexpr int kBlockN = kBlockN_, kPacked = kPacked_, kStages = kStages_;
    static constexpr int kChunks = kStepChunks / kPacked; /* of an offset */
    __host__ __device__ static int steps(const GatherParams &p) { return ceil_div(p.volume, kPacked); }
};

/* One warp's ring. A step comes with its rows, and the map entries of the step that is kStages - 1 later. */
template <class Tile>
struct WarpRing {
    char rows[Tile::kStages][kWarpRows][kStepDepth * 2];
    int32_t entries[Tile::kStages][Tile::kPacked][kWarpRows];
};

/* Dynamic shared memory of a CTA; the weights begin at the next multiple of 1024. */
template <class Tile>
struct ResidentShared {
    WarpRing<Tile> rings[kThreads / 32];
    float bias[Tile::kBlockN];
};

template <class Tile>
constexpr int kBytesBefore =
    (static_cast<int>(sizeof(ResidentShared<Tile>)) + kAtomBytes - 1) / kAtomBytes * kAtomBytes;

/* ---- weights ---- */

/* A row of 128 bytes for each column and two steps; two further steps follow behind all columns. */
template <typename T, class Tile>
__device__ __forceinline__ void bring_k_major(char *weights, const GatherParams &p) {
    const int chunks = ceil_div(Tile::steps(p), 2) * Tile::kBlockN * 2 * kStepChunks;
    for (int i = static_cast<int>(threadIdx.x); i < chunks; i += kThreads) {
        const int chunk = i % 8, row = i / 8, n = row % Tile::kBlockN, c = chunk % kStepChunks;
        const int v = (row / Tile::kBlockN * 2 + chunk / kStepChunks) * Tile::kPacked + c / Tile::kChunks;
        const int k = c % Tile::kChunks * kChunk;
        const bool present = n < p.columns && v < p.volume && k < p.depth;
        const int64_t at = present ? (static_cast<int64_t>(n) * p.volume + v) * p.depth + k : 0;
        ptx::cp_async_16_or_zeros(weights + row * kRowBytes + (chunk ^ row % 8) * 16,
                                  static_cast<const T *>(p.weight) + at, !present);
    }
}

/* A row of 128 bytes, 64 columns, for each element of the reduction. */
template <typename T, class Tile>
__device__ __forceinline__ void bring_mn_major(char *weights, const GatherParams &p) {
    const int chunks = Tile::steps(p) * kStepDepth * 8;
    for (int i = static_cast<int>(threadIdx.x); i < chunks; i += kThreads) {
        const int chunk = i % 8, row = i / 8, n = chunk * kChunk, c = row % kStepDepth / kChunk;
        const int v = row / kStepDepth * Tile::kPacked + c / Tile::kChunks;
        const int k = c % Tile::kChunks * kChunk + row % kChunk;
        const bool present = n < p.columns && v < p.volume && k < p.depth;
        const int64_t at = present ? (static_cast<int64_t>(k) * p.volume + v) * p.columns + n : 0;
        ptx::cp_async_16_or_zeros(weights + row * kRowBytes + (chunk ^ row % 8) * 16,
                                  static_cast<const T *>(p.weight) + at, !present);
    }
}

/* ---- rows ---- */

/* What one warp gathers: step after step of tile after tile, `stride` rows apart. */
template <typename T, class Tile>
struct WarpGatherer {
    const GatherParams &p;
    const int64_t stride;
    WarpRing<Tile> &ring;
    const int lane, steps;
    const uint32_t row_bytes;
    uint64_t in; /* of row 0, the chunk that is this lane's of each row */

    /* Of the next step to look up: the entry that this lane copies, of a row and an offset. */
    int64_t looked_up_row;
    int looked_up_step = 0, looked_up_end;
    const int32_t *entry;
    const int64_t entries; /* from step to step */

    /* Of the next step to gather: two rows, of which the lane copies a chunk each. */
    int64_t gathered_row;
    int gathered_step = 0, gathered_end[2];

    __device__ WarpGatherer(const GatherParams &p_, WarpRing<Tile> &ring_, int64_t first_row, int64_t stride_)
        : p(p_),
          stride(stride_),
          ring(ring_),
          lane(ptx::opaque(static_cast<int>(threadIdx.x % 32))), /* each step would read threadIdx again */
          steps(Tile::steps(p_)),
          row_bytes(static_cast<uint32_t>(sizeof(T) * p_.in_stride)),
          in(reinterpret_cast<uint64_t>(static_cast<const T *>(p_.in) + channel())),
          entries((p_.mirrored ? -Tile::kPacked : Tile::kPacked) * p_.rows) {
        begin_looking_up(first_row + lane % kWarpRows);
        begin_gathering(first_row + lane / kStepChunks);
        for (int i = 0; i < Tile::kStages - 1; ++i) look_up(i);
        ptx::cp_async_commit();
    }

    /* Fills the ring, when the first entries have come: one group of copies has been started since. */
    __device__ void begin() {
        ptx::cp_async_wait<1>();
        __syncwarp();
        for (int i = 0; i < Tile::kStages - 1; ++i) {
            issue(i, (i + Tile::kStages - 1) % Tile::kStages);
            __syncwarp();
        }
    }

    /* Of the chunk: its number in a step, its offset among those of the step, its first channel. */
    __device__ int chunk() const { return lane % kStepChunks; }
    __device__ int offset() const { return chunk() / Tile::kChunks; }
    __device__ int channel() const { return chunk() % Tile::kChunks * kChunk; }

    /* The steps of a tile that have an offset of this number; none of a row that is not there. */
    __device__ int steps_of(int offset, int64_t row) const {
        return row < p.rows ? ceil_div(p.volume - offset, Tile::kPacked) : 0;
    }

    __device__ void begin_looking_up(int64_t row) {
        const int offset = lane / kWarpRows;
        looked_up_row = row;
        looked_up_end = offset < Tile::kPacked ? steps_of(offset, row) : 0;
        entry = p.map + (p.mirrored ? p.volume - 1 - offset : offset) * p.rows + row;
    }

    __device__ void begin_gathering(int64_t row) {
        gathered_row = row;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            gathered_end[half] = channel() < p.depth ? steps_of(offset(), row + 8 * half) : 0;
    }

    /* Starts the copies of a step's map entries. */
    __device__ void look_up(int slot) {
        if (looked_up_step < looked_up_end) ptx::cp_async_4(&ring.entries[slot][0][0] + lane, entry);
        entry += entries;
        if (++looked_up_step == steps) {
            looked_up_step = 0;
            begin_looking_up(looked_up_row + stride);
        }
    }

    /* Starts the copies of a step's rows; zeros for missing neighbours. */
    __device__ void gather(int slot) {
        ptx::hold(in);
        const int32_t *places = &ring.entries[slot][offset()][lane / kStepChunks];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto place = static_cast<uint32_t>(places[8 * half]);
            const bool present = place < p.in_rows && gathered_step < gathered_end[half];
            /* Where zeros are asked for, the row is not read and may lie anywhere. */
            const auto row = reinterpret_cast<const void *>(in + static_cast<uint64_t>(place) * row_bytes);
            ptx::cp_async_16_or_zeros_cached(chunk_of(slot, lane / kStepChunks + 8 * half, chunk()), row, !present);
        }
        if (++gathered_step == steps) {
            gathered_step = 0;
            begin_gathering(gathered_row + stride);
        }
    }

    /* The next step, as one group of copies; and the entries of a later one. */
    __device__ void issue(int slot, int slot_of_entries) {
        gather(slot);
        look_up(slot_of_entries);
        ptx::cp_async_commit();
    }

    /* Eight rows' chunks of the same number lie in different banks. */
    __device__ char *chunk_of(int slot, int row, int c) const { return &ring.rows[slot][row][(c ^ row / 2 % 4) * 16]; }

    /* Both operands of a step in `slot`, of 16 channels each. */
    __device__ void fetch(uint32_t (&a)[2][4], int slot) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) ptx::ldmatrix_x4(a[i], chunk_of(slot, lane % 16, 2 * i + lane / 16));
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

/* Bytes of weights before a step, and 16 channels of it. */
template <class Tile, bool kKMajor>
__device__ __forceinline__ int weights_before(int step, int half) {
    if (kKMajor) return step / 2 * Tile::kBlockN * kRowBytes + step % 2 * kRowBytes / 2 + half * 32;
    return (2 * step + half) * 16 * kRowBytes;
}

template <typename T, class Tile, bool kKMajor>
__global__ void __launch_bounds__(kThreads, 1) conv_resident_sm90_kernel(const GatherParams p) {
    extern __shared__ __align__(kAtomBytes) char dynamic[];
    auto &shared = *reinterpret_cast<ResidentShared<Tile> *>(dynamic);
    char *const weights = dynamic + kBytesBefore<Tile>;
    const int warp = ptx::opaque(static_cast<int>(threadIdx.x / 32)), lane = threadIdx.x % 32;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarpgroups * kTileRows;
    int64_t tile_row = (static_cast<int64_t>(blockIdx.x) * kWarpgroups + warp / 4) * kTileRows;
    const int warp_row = warp % 4 * kWarpRows;

    WarpGatherer<T, Tile> gatherer(p, shared.rings[warp], tile_row + warp_row, stride);
    if constexpr (kKMajor)
        bring_k_major<T, Tile>(weights, p);
    else
        bring_mn_major<T, Tile>(weights, p);
    ptx::cp_async_commit();
    const bool biased = p.epilogue.bias != nullptr;
    if (biased)
        for (int i = static_cast<int>(threadIdx.x); i < Tile::kBlockN; i += kThreads)
            shared.bias[i] = i < p.columns ? to_float(static_cast<const T *>(p.epilogue.bias)[i]) : 0.0f;
    gatherer.begin();
    ptx::cp_async_wait<Tile::kStages - 1>(); /* the weights */
    ptx::fence_proxy_async();
    __syncthreads();

    uint64_t descriptor = kKMajor ? ptx::wgmma_descriptor(weights) : ptx::wgmma_descriptor(weights, kRowBytes);
    ptx::wgmma_hold(descriptor);
    int slot = 0, before = Tile::kStages - 1, before_that = Tile::kStages - 2;
    for (; tile_row < p.rows; tile_row += stride) {
        float d[Tile::kBlockN / 2];
#pragma unroll
        for (float &sum : d) sum = 0.0f;
        int step = 0;
        do {
            ptx::cp_async_wait<Tile::kStages - 2>();
            __syncwarp();
            uint32_t a[2][4];
            gatherer.fetch(a, slot);
            ptx::wgmma_fence();
#pragma unroll
            for (int half = 0; half < 2; ++half)
                wgmma<T, kKMajor>(d, a[half],
                                  ptx::wgmma_advance(descriptor, weights_before<Tile, kKMajor>(step, half)));
            ptx::wgmma_commit();
            gatherer.issue(before, before_that);
            ptx::wgmma_wait<0>(); /* other warpgroups keep the tensor cores busy */
            ptx::wgmma_hold(a[0]);
            ptx::wgmma_hold(a[1]);
            before_that = before;
            before = slot;
            if (++slot == Tile::kStages) slot = 0;
        } while (++step < gatherer.steps);
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(d);
        const int64_t row = tile_row + warp_row + lane / 4;
        const int64_t rows[2] = {row < p.rows ? row : -1, row + 8 < p.rows ? row + 8 : -1};
        if constexpr (kKMajor) { /* the forward pass */
            add_rows<T>(d, biased ? shared.bias : nullptr, p, 0, rows);
            activate(d, p.epilogue.activation);
        }
        store_rows<T>(d, p, 0, rows);
    }
    ptx::cp_async_wait<0>(); /* no thread leaves with copies under way */
}

template <typename T, class Tile, bool kKMajor>
fg_status launch(const GatherParams &p, int num_sms, cudaStream_t stream, fg_error *error) {
    constexpr int kMostShared = 227 * 1024;
    static_assert(kBytesBefore<Tile> + FG_RESIDENT_BYTES <= kMostShared, "the plan's weights fit");
    const int steps = Tile::steps(p);
    const int weights = kKMajor ? ceil_div(steps, 2) * Tile::kBlockN * kRowBytes : steps * kStepDepth * kRowBytes;
    const auto grid =
        static_cast<unsigned int>(std::min<int64_t>(ceil_div<int64_t>(p.rows, kTileRows * kWarpgroups), num_sms));
    const fg_status status = allow_shared<conv_resident_sm90_kernel<T, Tile, kKMajor>>(kMostShared, error);
    if (status != FG_OK) return status;
    conv_resident_sm90_kernel<T, Tile, kKMajor><<<grid, kThreads, kBytesBefore<Tile> + weights, stream>>>(p);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

template <typename T, bool kKMajor>
fg_status launch_tile(const GatherParams &p, const fg_plan &plan, int num_sms, cudaStream_t stream, fg_error *error) {
    const bool pairs = p.depth <= kStepDepth / 2;
    if (plan.block_n == 32 && pairs) return launch<T, ResidentTile<32, 2, 5>, kKMajor>(p, num_sms, stream, error);
    if (plan.block_n == 32) return launch<T, ResidentTile<32, 1, 5>, kKMajor>(p, num_sms, stream, error);
    if (pairs) return launch<T, ResidentTile<64, 2, 5>, kKMajor>(p, num_sms, stream, error);
    return launch<T, ResidentTile<64, 1, 5>, kKMajor>(p, num_sms, stream, error);
}

}  // namespace

fg_status launch_resident_sm90(const GatherParams &p, const fg_plan &plan, fg_dtype dtype, bool weight_is_k_major,
                               int num_sms, cudaStream_t stream, fg_error *error) {
    if (dtype == FG_FLOAT16)
        return weight_is_k_major ? launch_tile<__half, true>(p, plan, num_sms, stream, error)
                                 : launch_tile<__half, false>(p, plan, num_sms, stream, error);
    return weight_is_k_major ? launch_tile<__nv_bfloat16, true>(p, plan, num_sms, stream, error)
                             : launch_tile<__nv_bfloat16, false>(p, plan, num_sms, stream, error);
}

}  // namespace flexgemm
