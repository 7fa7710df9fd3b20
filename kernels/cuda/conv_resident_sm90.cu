/*
 * Forward and input gradient of sparse convolution on Hopper for few channels: all the weights of a column tile fit a
 * multiprocessor's shared memory, stay there while its CTA lives, and only rows are gathered.
 *
 * Rows go straight to registers, where wgmma may have its first operand: each warpgroup has a tile of 64 rows to itself
 * and shares nothing but the weights with others, so that there is no pipeline of shared memory, and no barrier, after
 * the weights have come. Rows are taken as they come: those beside each other find what they share in L1.
 *
 * A step is one offset, or two or four where channels are few, in one or two units of 64 bytes. Of a unit, lane i of a
 * quad loads the i-th 16 bytes of a row: four words, of which wgmma takes the first ones of the four lanes for the words
 * 0 to 3 of its K, then the second ones. The sum does not care about the order, if the weights lie in the same one: word
 * c of piece q where word q of piece c would be.
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
constexpr int kRows = 64; /* of a warpgroup's tile */
constexpr int kPieceBytes = 16, kPieces = 4, kUnitBytes = kPieces * kPieceBytes;
constexpr int kRowBytes = 128, kAtomBytes = 8 * kRowBytes; /* of swizzled shared memory */

template <typename T>
constexpr int kPiece = kPieceBytes / static_cast<int>(sizeof(T)); /* elements */

/* Columns of a tile, units of a step, and the steps whose rows are on their way at once, as registers allow. */
template <int kBlockN_, int kUnits_, int kSlots_>
struct ResidentTile {
    static constexpr int kBlockN = kBlockN_, kUnits = kUnits_, kSlots = kSlots_;
    static_assert(kSlots * kUnits % 2 == 0, "two units are a row of weights");
};

/* The steps of a problem: `packed` offsets each. */
template <typename T>
struct Steps {
    int packed, count;
    __host__ __device__ explicit Steps(const GatherParams &p)
        : packed(kPieces * kPiece<T> % p.depth == 0 ? kPieces * kPiece<T> / p.depth : 1),
          count(ceil_div(p.volume, packed)) {}
    /* The offset within a step and the first channel of piece q of a unit. */
    __device__ int offset_of(int q) const { return q * packed / kPieces; }
    __device__ int channel_of(int unit, int q) const {
        return (unit * kPieces + q % (kPieces / packed)) * kPiece<T>;
    }
};

/* ---- weights ---- */

/* Columns n0 .. n0 + kBlockN - 1, a row of shared memory each and 128 bytes of K; then the next 128 bytes. A quad brings
 * a unit of a column. */
template <typename T, class Tile>
__device__ __forceinline__ void bring_k_major(char *weights, const GatherParams &p, int n0) {
    const Steps<T> steps(p);
    const int lane = threadIdx.x % 32, q = lane % kPieces;
    const int count = ceil_div(steps.count * Tile::kUnits, 2) * 2 * Tile::kBlockN; /* a multiple of a warp's eight */
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x) / kPieces; i < count; i += kThreads / kPieces) {
        const int half = i % 2, n = i / 2 % Tile::kBlockN, block = i / 2 / Tile::kBlockN, unit = 2 * block + half;
        const int v = unit / Tile::kUnits * steps.packed + steps.offset_of(q);
        const int k = steps.channel_of(unit % Tile::kUnits, q);
        uint32_t word[4] = {};
        if (n0 + n < p.columns && v < p.volume && k < p.depth)
            load_chunk(word,
                       static_cast<const T *>(p.weight) + (static_cast<int64_t>(n0 + n) * p.volume + v) * p.depth + k,
                       true);
        transpose_quad(word, lane);
        char *row = weights + (block * Tile::kBlockN + n) * kRowBytes;
        store_chunk(row + ((half * kPieces + q) ^ n % 8) * kPieceBytes, word, true);
    }
}

/* A row of shared memory for each element of K: 64 columns, of which the last may stay empty. 16-bit types. */
template <typename T, class Tile>
__device__ __forceinline__ void bring_mn_major(char *weights, const GatherParams &p, int n0) {
    constexpr int kUnit = kUnitBytes / sizeof(T), kChunks = kRowBytes / kPieceBytes;
    const Steps<T> steps(p);
    const int count = steps.count * Tile::kUnits * kUnit * kChunks;
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
        const int row = i / kChunks, chunk = i % kChunks, n = n0 + chunk * kPiece<T>, unit = row / kUnit;
        const int word_of_piece = row % kUnit / 8, q = row % 8 / 2; /* two elements a word */
        const int v = unit / Tile::kUnits * steps.packed + steps.offset_of(q);
        const int k = steps.channel_of(unit % Tile::kUnits, q) + 2 * word_of_piece + row % 2;
        uint32_t word[4] = {};
        if (n < p.columns && v < p.volume && k < p.depth)
            load_chunk(word,
                       static_cast<const T *>(p.weight) + (static_cast<int64_t>(k) * p.volume + v) * p.columns + n,
                       true);
        store_chunk(weights + row * kRowBytes + (chunk ^ row % 8) * kPieceBytes, word, true);
    }
}

/* ---- rows ---- */

/* This thread's pieces of two rows of a tile, a slot for each step that is under way. Map entries are looked up kSlots
 * steps before the rows are fetched. What is not there leaves registers as they are: a choice of zeros would wait for the
 * load. */
template <typename T, class Tile>
struct Gatherer {
    static constexpr int kSlots = Tile::kSlots, kUnits = Tile::kUnits;

    const GatherParams &p;
    const Steps<T> steps;
    uint64_t in; /* this thread's piece of row 0 */
    const uint32_t row_bytes;
    bool second; /* whether channels reach this thread's piece of a second unit */
    int end[2];  /* of `step`: 0 of a row that is not there */
    int step;    /* the next one to fetch */
    const int32_t *entries;
    uint32_t places[kSlots][2] = {}; /* in `in`: not less than in_rows where there is no neighbour */
    bool present[kSlots][2];
    uint4 words[kSlots][2][kUnits] = {};

    __device__ explicit Gatherer(const GatherParams &p_)
        : p(p_), steps(p), row_bytes(static_cast<uint32_t>(sizeof(T) * p.in_stride)) {
        in = reinterpret_cast<uint64_t>(static_cast<const T *>(p.in) + steps.channel_of(0, piece()));
        second = steps.channel_of(1, piece()) < p.depth;
    }

    __device__ int piece() const { return static_cast<int>(threadIdx.x) % kPieces; }

    /* The rows first_row and first_row + 8. */
    __device__ void begin(int64_t first_row) {
        const int v = steps.offset_of(piece());
        const bool any = steps.channel_of(0, piece()) < p.depth;
        step = 0;
        entries = p.map + static_cast<int64_t>(p.mirrored ? p.volume - 1 - v : v) * p.rows + first_row;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            end[half] = any && first_row + 8 * half < p.rows ? ceil_div(p.volume - v, steps.packed) : 0;
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) look_up(slot, slot);
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) advance(slot);
    }

    __device__ void look_up(int slot, int ahead) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (step + ahead < end[half]) places[slot][half] = static_cast<uint32_t>(entries[8 * half]);
        entries += (p.mirrored ? -steps.packed : steps.packed) * p.rows;
    }

    __device__ void advance(int slot) {
        ptx::hold(in);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            present[slot][half] = places[slot][half] < p.in_rows && step < end[half];
            if (!present[slot][half]) continue;
            const uint4 *row =
                reinterpret_cast<const uint4 *>(in + static_cast<uint64_t>(places[slot][half]) * row_bytes);
            words[slot][half][0] = row[0];
            if (kUnits > 1 && second) words[slot][half][kUnits - 1] = row[kPieces];
        }
        look_up(slot, kSlots);
        ++step;
    }
};

/* ---- products ---- */

/* D += A.B of 64 rows and 32 bytes of K, A in registers. */
template <typename T, bool kKMajor, int kRegisters>
__device__ __forceinline__ void wgmma(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b) {
    if constexpr (std::is_same<T, float>::value)
        ptx::wgmma_tf32_from_registers(d, a, b, 1);
    else if constexpr (std::is_same<T, __half>::value && kKMajor)
        ptx::wgmma_f16_from_registers(d, a, b, 1);
    else if constexpr (std::is_same<T, __half>::value)
        ptx::wgmma_f16_kn_from_registers(d, a, b, 1);
    else if constexpr (kKMajor)
        ptx::wgmma_bf16_from_registers(d, a, b, 1);
    else
        ptx::wgmma_bf16_kn_from_registers(d, a, b, 1);
}

/* Bytes of weights before a unit and a half of it. */
template <typename T, class Tile, bool kKMajor>
__device__ constexpr int weights_before(int unit, int half) {
    constexpr int kHalf = kUnitBytes / 2;
    if (kKMajor) return unit / 2 * Tile::kBlockN * kRowBytes + unit % 2 * kUnitBytes + half * kHalf;
    return (2 * unit + half) * (kHalf / static_cast<int>(sizeof(T))) * kRowBytes;
}

template <typename T, class Tile, bool kKMajor>
__device__ __forceinline__ void multiply(float (&d)[Tile::kBlockN / 2], uint32_t (&a)[2 * Tile::kUnits][4],
                                         const Gatherer<T, Tile> &gatherer, uint64_t descriptor, int slot) {
#pragma unroll
    for (int unit = 0; unit < Tile::kUnits; ++unit) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const bool there = gatherer.present[slot][row] && (unit == 0 || gatherer.second);
            const uint4 &word = gatherer.words[slot][row][unit];
            a[2 * unit][row] = there ? word.x : 0;
            a[2 * unit][row + 2] = there ? word.y : 0;
            a[2 * unit + 1][row] = there ? word.z : 0;
            a[2 * unit + 1][row + 2] = there ? word.w : 0;
        }
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2 * Tile::kUnits; ++i) {
        const int before = weights_before<T, Tile, kKMajor>(slot * Tile::kUnits + i / 2, i % 2);
        wgmma<T, kKMajor>(d, a[i], ptx::wgmma_advance(descriptor, before));
    }
    ptx::wgmma_commit();
}

template <typename T, class Tile, bool kKMajor>
__global__ void __launch_bounds__(kThreads, 1) conv_resident_sm90_kernel(const GatherParams p) {
    extern __shared__ __align__(kAtomBytes) char weights[];
    __shared__ float bias[Tile::kBlockN];
    const int n0 = static_cast<int>(blockIdx.x) % p.column_tiles * Tile::kBlockN;
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int cta = static_cast<int>(blockIdx.x) / p.column_tiles, ctas = static_cast<int>(gridDim.x) / p.column_tiles;
    const int64_t stride = static_cast<int64_t>(ctas) * kWarpgroups * kRows;
    int64_t first_row = static_cast<int64_t>(cta * kWarpgroups + warpgroup) * kRows; /* of the tile */
    const int own_row = warp * 16 + lane / 4;
    Gatherer<T, Tile> gatherer(p);
    gatherer.begin(first_row + own_row);
    if constexpr (kKMajor)
        bring_k_major<T, Tile>(weights, p, n0);
    else
        bring_mn_major<T, Tile>(weights, p, n0);
    const bool biased = p.epilogue.bias != nullptr;
    if (biased)
        for (int i = static_cast<int>(threadIdx.x); i < Tile::kBlockN; i += kThreads)
            bias[i] = n0 + i < p.columns ? to_float(static_cast<const T *>(p.epilogue.bias)[n0 + i]) : 0.0f;
    ptx::fence_proxy_async();
    __syncthreads();

    for (; first_row < p.rows; first_row += stride) {
        uint64_t descriptor = kKMajor ? ptx::wgmma_descriptor(weights) : ptx::wgmma_descriptor(weights, kRowBytes);
        ptx::wgmma_hold(descriptor);
        float d[Tile::kBlockN / 2];
#pragma unroll
        for (float &sum : d) sum = 0.0f;
        int first = 0;
        do {
#pragma unroll
            for (int slot = 0; slot < Tile::kSlots; ++slot) {
                if (first + slot >= gatherer.steps.count) continue;
                uint32_t a[2 * Tile::kUnits][4];
                multiply<T, Tile, kKMajor>(d, a, gatherer, descriptor, slot);
                gatherer.advance(slot);
                ptx::wgmma_wait<0>(); /* other warpgroups keep the tensor cores busy */
#pragma unroll
                for (auto &operand : a) ptx::wgmma_hold(operand);
            }
            descriptor = ptx::wgmma_advance(
                descriptor, weights_before<T, Tile, kKMajor>(Tile::kSlots * Tile::kUnits, 0));
            first += Tile::kSlots;
        } while (first < gatherer.steps.count);
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(d);
        const int64_t row = first_row + own_row;
        if (first_row + stride < p.rows) gatherer.begin(row + stride);
        const int64_t rows[2] = {row < p.rows ? row : -1, row + 8 < p.rows ? row + 8 : -1};
        if constexpr (kKMajor) { /* the forward pass */
            add_rows<T>(d, biased ? bias : nullptr, p, n0, rows);
            activate(d, p.epilogue.activation);
        }
        store_rows<T>(d, p, n0, rows);
    }
}

template <typename T, class Tile, bool kKMajor>
fg_status launch(GatherParams p, int num_sms, cudaStream_t stream, fg_error *error) {
    constexpr int kMostShared = 226 * 1024; /* beside the bias */
    p.column_tiles = ceil_div(p.columns, Tile::kBlockN);
    const int units = Steps<T>(p).count * Tile::kUnits;
    const int shared = kKMajor ? ceil_div(units, 2) * Tile::kBlockN * kRowBytes
                               : units * (kUnitBytes / static_cast<int>(sizeof(T))) * kRowBytes;
    const int64_t wanted = ceil_div<int64_t>(p.rows, kRows * kWarpgroups), most = std::max(num_sms / p.column_tiles, 1);
    const auto grid = static_cast<unsigned int>(std::min(wanted, most) * p.column_tiles);
    const fg_status status = allow_shared<conv_resident_sm90_kernel<T, Tile, kKMajor>>(kMostShared, error);
    if (status != FG_OK) return status;
    conv_resident_sm90_kernel<T, Tile, kKMajor><<<grid, kThreads, shared, stream>>>(p);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

template <typename T, bool kKMajor>
fg_status launch_tile(const GatherParams &p, int block_n, int num_sms, cudaStream_t stream, fg_error *error) {
    const bool one_unit = p.depth <= kPieces * kPiece<T>;
    if (block_n == 32 && one_unit) return launch<T, ResidentTile<32, 1, 6>, kKMajor>(p, num_sms, stream, error);
    if (block_n == 32) return launch<T, ResidentTile<32, 2, 3>, kKMajor>(p, num_sms, stream, error);
    if (one_unit) return launch<T, ResidentTile<64, 1, 4>, kKMajor>(p, num_sms, stream, error);
    return launch<T, ResidentTile<64, 2, 3>, kKMajor>(p, num_sms, stream, error);
}

}  // namespace

fg_status launch_resident_sm90(const GatherParams &p, const fg_plan &plan, fg_dtype dtype, bool weight_is_k_major,
                               int num_sms, cudaStream_t stream, fg_error *error) {
    if (dtype == FG_FLOAT16)
        return weight_is_k_major ? launch_tile<__half, true>(p, plan.block_n, num_sms, stream, error)
                                 : launch_tile<__half, false>(p, plan.block_n, num_sms, stream, error);
    return weight_is_k_major ? launch_tile<__nv_bfloat16, true>(p, plan.block_n, num_sms, stream, error)
                             : launch_tile<__nv_bfloat16, false>(p, plan.block_n, num_sms, stream, error);
}

}  // namespace flexgemm
