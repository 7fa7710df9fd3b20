/*
 * Weight gradient of sparse convolution on Hopper, 16-bit types and TF32: the sum of conv_wgrad.cu,
 *
 *     grad_weight[co, v, ci] = sum_m grad_out[m, co] * feats[map[v, m], ci],
 *
 * with the multiplications by wgmma. As one product, D = G^T . F over rows m: G is grad_out, and F has volume * ci
 * columns, of which column (v, c) in row m is feats[map[v, m], c], or zero where there is no neighbour. A tile takes
 * any stretch of these columns: part of an offset's channels when they are many, several offsets when they are few, so
 * that rows of grad_out are fetched once for all of them.
 *
 * A CTA owns one tile and one slice of the rows. Its three warpgroups share a pipeline of stages of 64 rows each (TF32:
 * of 32):
 *
 *   producer     packs the rows of the slice that have a neighbour at any of the tile's offsets into a queue, in rising
 *                order, and gathers both operands by the queue with cp.async;
 *   2 consumers  multiply, accumulators in registers.
 *
 * The reduction runs across the rows that are gathered. wgmma transposes 16-bit operands, which therefore lie in shared
 * memory as they come, MN-major, by copies of 16 bytes. It does not transpose TF32: the producer does, by copies of 4.
 *
 * Why a queue and not rows sorted by their neighbours: with one offset in a tile it wastes nothing, whatever the order,
 * and rows keep the order of the scene, in which neighbouring rows share their neighbours: what one step gathers is
 * mostly what the last one did, and L2 holds it. With several offsets, rows are there for any of them, and a piece that
 * is missing costs its place in the product but no bytes from L2, which are what limits such tiles.
 *
 * The bias gradient, sums of the columns of grad_out, is the work of further CTAs of the same launch: beside the others
 * they cost little, and small scenes are spared the launches.
 *
 * Slices meet as float32 partial sums in the workspace and are added in a fixed order: the same bits every time.
 * A row of grad_out that is not finite spoils its tile at all offsets of the tile, not only where it has neighbours.
 */
#include <type_traits>

#include "column_sum.cuh"
#include "conv_wgrad.cuh"
#include "ptx.cuh"
#include "quad.cuh"
#include "ring.cuh"

namespace flexgemm {
namespace {

constexpr int kWarpgroup = 128; /* threads */
constexpr int kConsumers = 2;   /* warpgroups */
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kConsumerWarps = kConsumers * kWarpgroup / 32;

constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                  (1 + kConsumers) * ptx::registers_at_launch(kThreads),
              "warpgroups divide the registers of the launch");

/* A stage is a row of blocks of 64 channels, those of grad_out, then those of feats. A block is 64 rows of 128 bytes,
 * which are 64 channels of one gathered row (16-bit) or 32 gathered rows of one channel (TF32); 16-byte chunk c of row r
 * is stored as chunk c ^ (r % 8), from an address that is a multiple of 1024 on. */
constexpr int kBlockChannels = 64, kRowBytes = 128, kBlockBytes = 64 * kRowBytes;
constexpr int kSwizzleAtomBytes = 8 * kRowBytes;
constexpr int kChunk = 16, kOctet = 8; /* bytes that are swizzled together; channels that lie at one offset */
constexpr int kWgmmaM = 64;
template <typename T>
constexpr int kBlockK = kRowBytes / static_cast<int>(sizeof(T)); /* rows of a step */

constexpr int kMaxOffsets = FG_WGRAD_MAX_OFFSETS;
constexpr int kWindow = kWarpgroup;    /* rows that the producer looks at together */
constexpr int kCapacity = 2 * kWindow; /* of the queue: a window, and less than a step */
constexpr int kProducerBarrier = 1;    /* named barrier among the producer's threads */

/* Output channels and columns of a tile. The consumers divide its output channels, or its columns. */
template <int kBlockM_, int kBlockN_, int kConsumersN_>
struct Tile {
    static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kConsumersN = kConsumersN_, kStages = 3;
    static constexpr int kConsumersM = kConsumers / kConsumersN;
    static constexpr int kConsumerM = kBlockM / kConsumersM / kWgmmaM; /* wgmma tiles of a consumer */
    static constexpr int kConsumerN = kBlockN / kConsumersN;           /* columns of a consumer */
    static constexpr int kBlocksA = kBlockM / kBlockChannels, kBlocksB = kBlockN / kBlockChannels;
    static constexpr int kStageBytes = (kBlocksA + kBlocksB) * kBlockBytes;
    static_assert(kConsumerN % kBlockChannels == 0, "a consumer starts at a block");
};

/* What eight columns are gathered from: one of the tile's offsets, -1 past the last column, and a channel. */
struct Column {
    int offset, channel;
};

/* Dynamic shared memory of a CTA. Stages first: they start at a multiple of 1024. */
template <class Tile>
struct Shared {
    char stages[Tile::kStages][Tile::kStageBytes];
    int32_t window[kMaxOffsets][kWindow];   /* the producer's: map entries of the next window, on their way */
    int32_t in_row[kMaxOffsets][kCapacity]; /* the producer's queue: rows of feats at each offset */
    int32_t out_row[kCapacity];             /* and of grad_out, relative to the slice */
    Column column[Tile::kBlockN / kOctet];
    uint32_t found[kWindow / 32]; /* the producer's: which of a warp's rows go into the queue */
    bool end[Tile::kStages];      /* a step without operands, after the last */
    alignas(8) uint64_t full[Tile::kStages];
    uint64_t empty[Tile::kStages];
};

/* Elements of the outputs, one after the other in the partial sums of a slice. */
__host__ __device__ inline int64_t weights_of(const WgradParams &p) {
    return p.grad_weight ? static_cast<int64_t>(p.co) * p.volume * p.ci : 0;
}
__host__ __device__ inline int64_t partial_pitch(const WgradParams &p) {
    return weights_of(p) + (p.grad_bias ? p.co : 0);
}

/* One CTA's share of the weight gradient. Tiles of the same rows run side by side, so that they share them in L2, and
 * the middle columns come first: they are those of the middle offset, at which the most rows have a neighbour. */
template <class Tile>
struct Task {
    int co0;                   /* output channels co0 .. co0 + kBlockM */
    int column0, column_end;   /* columns column0 .. column_end, at most kBlockN */
    int first_offset, offsets; /* that these columns touch */
    int slice, rows;
    int64_t row0;

    __device__ Task(const WgradParams &p, int tile_columns, int index) {
        const int columns = p.volume * p.ci;
        const int co_tiles = ceil_div(p.co, Tile::kBlockM), column_tiles = ceil_div(columns, tile_columns);
        co0 = index % co_tiles * Tile::kBlockM;
        const int turn = index / co_tiles % column_tiles;
        slice = index / co_tiles / column_tiles;
        column0 = (column_tiles / 2 + (turn % 2 ? -(turn + 1) / 2 : turn / 2)) * tile_columns;
        column_end = min(column0 + tile_columns, columns);
        first_offset = column0 / p.ci;
        offsets = (column_end - 1) / p.ci - first_offset + 1;
        row0 = slice * p.rows_per_slice;
        rows = static_cast<int>(min(p.rows_per_slice, p.rows - row0));
    }
};

/* ---- producer ---- */

/* Eight threads take a row of the queue together. Each copies pieces of it: an octet of every block (16-bit), or one
 * channel of every octet (TF32: a warp's 4 rows x 8 channels come in whole sectors and go to all 32 banks). */
template <typename T, class Tile>
struct Producer {
    static constexpr bool kTransposes = sizeof(T) == 4;
    static constexpr int kThreadsPerRow = 8, kRowsPerPass = kWarpgroup / kThreadsPerRow;
    static constexpr int kRowsPerThread = kBlockK<T> / kRowsPerPass;
    static constexpr int kUnroll = kTransposes ? 1 : 8;                       /* blocks */
    static constexpr int kPieces = kTransposes ? kBlockChannels / kOctet : 1; /* of a row, in a block */
    static_assert(kWindow + kBlockK<T> <= kCapacity && kCapacity % kBlockK<T> == 0,
                  "a step lies in the queue without a break");

    const WgradParams &p;
    const Task<Tile> &task;
    Shared<Tile> &shared;
    RingPosition<Tile::kStages> place; /* in the pipeline */
    int scanned = 0, produced = 0;     /* rows of the slice, and those of them in the queue so far */

    /* Starts the copies of the next window's map entries, one row per thread, which alone reads them. */
    __device__ void request() {
        const int row = scanned + static_cast<int>(threadIdx.x);
        const int32_t *source = p.map + task.first_offset * p.rows + task.row0 + row;
        for (int i = 0; i < task.offsets; ++i, source += p.rows) {
            int32_t *entry = &shared.window[i][threadIdx.x];
            if (row < task.rows)
                ptx::cp_async_4(entry, source);
            else
                *entry = -1;
        }
        ptx::cp_async_commit();
    }

    /* Appends to the queue until `wanted` rows have been put there in total, or the slice ends. All but the last
     * `wanted` - kBlockK of them have been used. */
    __device__ void fill(int wanted) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        while (produced < wanted && scanned < task.rows) {
            ptx::cp_async_wait<0>();
            bool present = false;
            for (int i = 0; i < task.offsets; ++i)
                present |= static_cast<uint32_t>(shared.window[i][threadIdx.x]) < p.in_rows;
            const uint32_t mask = __ballot_sync(~0u, present);
            if (lane == 0) shared.found[warp] = mask;
            /* Also, all have read the places written below for an earlier step. */
            ptx::named_barrier(kProducerBarrier, kWarpgroup);
            int slot = produced + __popc(mask & ((1u << lane) - 1));
#pragma unroll
            for (int w = 0; w < kWindow / 32; ++w) {
                const int count = __popc(shared.found[w]);
                slot += w < warp ? count : 0;
                produced += count;
            }
            slot %= kCapacity;
            if (present) {
                shared.out_row[slot] = scanned + static_cast<int>(threadIdx.x);
                for (int i = 0; i < task.offsets; ++i) shared.in_row[i][slot] = shared.window[i][threadIdx.x];
            }
            scanned += kWindow;
            ptx::named_barrier(kProducerBarrier, kWarpgroup);
            request();
        }
    }

    /* Which of a row's eight threads this is, and the first of its rows. */
    __device__ static int lane() { return static_cast<int>(threadIdx.x) % kThreadsPerRow; }
    __device__ static int first_row() { return static_cast<int>(threadIdx.x) / kThreadsPerRow; }

    /* The octet of a block that a piece belongs to, and the place of this thread's piece of its i-th row. */
    __device__ static int octet_of(int piece) { return kTransposes ? piece : lane(); }
    __device__ static int place_of(int piece, int i) {
        const int row = first_row() + i * kRowsPerPass;
        if constexpr (kTransposes)
            return (piece * kOctet + lane()) * kRowBytes + (row / 4 ^ lane()) * kChunk + row % 4 * 4;
        else
            return row * kRowBytes + (lane() ^ row % 8) * kChunk;
    }

    /* The same piece of each of this thread's rows, zeros for rows that are not there. */
    template <bool kCached>
    __device__ __forceinline__ static void load_piece(char *block, int piece, const T *source, uint32_t pitch,
                                                      const uint32_t (&rows)[kRowsPerThread], uint32_t limit) {
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
            const bool present = rows[i] < limit;
            const T *row = source + static_cast<uint64_t>(present ? rows[i] : 0) * pitch;
            char *target = block + place_of(piece, i);
            if constexpr (kTransposes)
                ptx::cp_async_4_or_zero(target, row + lane(), !present);
            else if constexpr (kCached)
                ptx::cp_async_16_or_zeros_cached(target, row, !present);
            else
                ptx::cp_async_16_or_zeros(target, row, !present);
        }
    }

    /* The step of queue places first .. first + count. */
    __device__ void load(int first, int count) {
        ptx::mbarrier_wait_parity(&shared.empty[place.slot], place.parity ^ 1);
        char *block = shared.stages[place.slot];
        const int slot = first % kCapacity + first_row();
        const auto inside = [&](int i) { return first_row() + i * kRowsPerPass < count; };
        uint32_t rows[kRowsPerThread];
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i)
            rows[i] = inside(i) ? static_cast<uint32_t>(shared.out_row[slot + i * kRowsPerPass]) : UINT32_MAX;
        const T *grad_out = static_cast<const T *>(p.grad_out) + task.row0 * p.grad_stride;
#pragma unroll(kUnroll)
        for (int b = 0; b < Tile::kBlocksA; ++b, block += kBlockBytes) {
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
                const int co = task.co0 + b * kBlockChannels + octet_of(piece) * kOctet;
                load_piece<false>(block, piece, grad_out + co, static_cast<uint32_t>(p.grad_stride), rows,
                                  co < p.co ? static_cast<uint32_t>(task.rows) : 0);
            }
        }
#pragma unroll(kUnroll)
        for (int b = 0; b < Tile::kBlocksB; ++b, block += kBlockBytes) {
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
                const Column column = shared.column[b * kBlockChannels / kOctet + octet_of(piece)];
#pragma unroll
                for (int i = 0; i < kRowsPerThread; ++i)
                    rows[i] = inside(i) && column.offset >= 0
                                  ? static_cast<uint32_t>(shared.in_row[column.offset][slot + i * kRowsPerPass])
                                  : UINT32_MAX;
                /* A tile of few output channels holds several offsets, of which neighbouring ones want mostly the same
                 * rows: L1 has them. The widest would only push its operands through L1. */
                load_piece<(Tile::kBlockM < 256)>(block, piece, static_cast<const T *>(p.feats) + column.channel,
                                                  static_cast<uint32_t>(p.feats_stride), rows, p.in_rows);
            }
        }
        ptx::mbarrier_arrive_after_cp_async(&shared.full[place.slot]);
        announce(false);
    }

    /* One thread says what the stage is. */
    __device__ void announce(bool end) {
        if (threadIdx.x == 0) {
            shared.end[place.slot] = end;
            ptx::mbarrier_arrive(&shared.full[place.slot]);
        }
        place.advance();
    }

    __device__ void run() {
        for (int i = threadIdx.x; i < Tile::kBlockN / kOctet; i += kWarpgroup) {
            const int column = task.column0 + i * kOctet;
            const bool inside = column < task.column_end;
            shared.column[i] = {inside ? column / p.ci - task.first_offset : -1, column % p.ci};
        }
        request();
        for (int first = 0;; first += kBlockK<T>) {
            fill(first + kBlockK<T>); /* at least one round, behind whose barriers the columns lie */
            if (produced <= first) break;
            load(first, min(produced - first, kBlockK<T>));
        }
        ptx::mbarrier_wait_parity(&shared.empty[place.slot], place.parity ^ 1);
        ptx::mbarrier_arrive(&shared.full[place.slot]);
        announce(true);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>(); /* no thread leaves with copies under way */
    }
};

/* ---- consumers ---- */

/* D += A.B of 64 output channels and 32 bytes of rows, operands as the producer left them. */
template <typename T, int kRegisters>
__device__ __forceinline__ void wgmma(float (&d)[kRegisters], uint64_t a, uint64_t b) {
    if constexpr (std::is_same<T, __half>::value)
        ptx::wgmma_f16_km_kn(d, a, b, 1);
    else if constexpr (std::is_same<T, __nv_bfloat16>::value)
        ptx::wgmma_bf16_km_kn(d, a, b, 1);
    else
        ptx::wgmma_tf32(d, a, b, 1);
}

template <typename T, class Tile>
struct Consumer {
    static constexpr int kRegisters = Tile::kConsumerN / 2; /* accumulators of a thread, for each wgmma tile */
    static constexpr int kNone = -1;

    const WgradParams &p;
    const Task<Tile> &task;
    Shared<Tile> &shared;
    RingPosition<Tile::kStages> place; /* in the pipeline */

    __device__ static int consumer() { return static_cast<int>(threadIdx.x) / kWarpgroup - 1; }
    __device__ static int first_channel() { return consumer() % Tile::kConsumersM * Tile::kConsumerM * kWgmmaM; }
    __device__ static int first_column() { return consumer() / Tile::kConsumersM * Tile::kConsumerN; }

    /* Each warp for itself: the last of them frees the stage. */
    __device__ void release(int stage) {
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.empty[stage]);
    }

    __device__ void multiply(float (&d)[Tile::kConsumerM][kRegisters]) {
        const char *a = shared.stages[place.slot], *b = a + Tile::kBlocksA * kBlockBytes;
        constexpr int kSteps = kRowBytes / 32; /* of wgmma: along the rows of a block, or from row to row */
        constexpr int kAdvance = (sizeof(T) == 4 ? 32 : kBlockBytes / kSteps) / 16, kNextTile = kBlockBytes / 16;
        const uint64_t descriptor_a = ptx::wgmma_descriptor(a + first_channel() * kRowBytes, kBlockBytes);
        const uint64_t descriptor_b = ptx::wgmma_descriptor(b + first_column() * kRowBytes, kBlockBytes);
        ptx::fence_proxy_async(); /* the rows came through the ordinary path, wgmma reads through another */
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
            for (int i = 0; i < Tile::kConsumerM; ++i)
                wgmma<T>(d[i], descriptor_a + i * kNextTile + k * kAdvance, descriptor_b + k * kAdvance);
        }
        ptx::wgmma_commit();
    }

    /* Multiplies until the end of the slice. One step stays in flight behind the one being issued; its stage is
     * released when the next is issued. */
    __device__ void accumulate(float (&d)[Tile::kConsumerM][kRegisters]) {
        int in_flight = kNone;
        while (true) {
            ptx::mbarrier_wait_parity(&shared.full[place.slot], place.parity);
            /* A vote, so that the compiler sees one branch for the whole warp: it would serialise wgmma otherwise. */
            if (__any_sync(~0u, shared.end[place.slot])) break;
            multiply(d);
            ptx::wgmma_wait<1>();
            if (in_flight != kNone) release(in_flight);
            in_flight = place.slot;
            place.advance();
        }
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < Tile::kConsumerM; ++i) ptx::wgmma_hold(d[i]);
    }

    /* The output channel and the first column of what this thread holds of a tile of 64 channels. */
    __device__ int channel_of(int tile, int half) const {
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        return task.co0 + first_channel() + tile * kWgmmaM + warp * 16 + half * 8 + lane / 4;
    }

    __device__ void store_sums(const float (&d)[Tile::kConsumerM][kRegisters], float *sums) {
        const int64_t pitch = static_cast<int64_t>(p.volume) * p.ci;
        const bool aligned = reinterpret_cast<uintptr_t>(sums) % sizeof(float2) == 0;
#pragma unroll
        for (int i = 0; i < Tile::kConsumerM; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int co = channel_of(i, half);
                if (co >= p.co) continue;
#pragma unroll
                for (int j = 0; j < Tile::kConsumerN / 8; ++j) {
                    const int column = task.column0 + first_column() + 8 * j + threadIdx.x % 4 * 2;
                    if (column >= task.column_end) continue; /* columns are a multiple of 8 */
                    const float2 pair = make_float2(d[i][4 * j + 2 * half], d[i][4 * j + 2 * half + 1]);
                    float *target = sums + co * pitch + column;
                    if (aligned) {
                        *reinterpret_cast<float2 *>(target) = pair;
                    } else {
                        target[0] = pair.x;
                        target[1] = pair.y;
                    }
                }
            }
        }
    }

    /* 16-bit elements, 8 columns a thread. */
    __device__ void store(const float (&d)[Tile::kConsumerM][kRegisters], T *out) {
        const int64_t pitch = static_cast<int64_t>(p.volume) * p.ci;
        const bool aligned = are_chunks(out, pitch);
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < Tile::kConsumerM; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int co = channel_of(i, half);
#pragma unroll
                for (int j = 0; j < Tile::kConsumerN / 8; j += 4) {
                    uint32_t word[4];
#pragma unroll
                    for (int k = 0; k < 4; ++k)
                        word[k] = pack<T>(d[i][4 * (j + k) + 2 * half], d[i][4 * (j + k) + 2 * half + 1]);
                    transpose_quad(word, lane);
                    const int column = task.column0 + first_column() + 8 * (j + lane % 4);
                    if (co < p.co && column < task.column_end) store_chunk(out + co * pitch + column, word, aligned);
                }
            }
        }
    }

    __device__ void run() {
        float d[Tile::kConsumerM][kRegisters];
#pragma unroll
        for (int i = 0; i < Tile::kConsumerM; ++i)
#pragma unroll
            for (float &sum : d[i]) sum = 0.0f;
        accumulate(d);
        if (p.partials)
            store_sums(d, p.partials + task.slice * partial_pitch(p));
        else if constexpr (std::is_same<T, float>::value)
            store_sums(d, static_cast<float *>(p.grad_weight));
        else
            store(d, static_cast<T *>(p.grad_weight));
    }
};

/* ---- bias gradient ---- */

/* Output channels of a CTA: a line of 16-bit elements, a line of float32. */
template <typename T>
constexpr int kBiasChannels = kRowBytes / static_cast<int>(sizeof(T));

template <typename T, int kVector>
__device__ void sum_bias(const WgradParams &p, int index, char *dynamic) {
    using Sum = ColumnSum<T, kVector, kThreads>;
    static_assert(Sum::kColumns == kBiasChannels<T>, "as the launch counts CTAs");
    const int groups = ceil_div(p.co, Sum::kColumns), slice = index / groups;
    const int64_t begin = slice * p.rows_per_slice, end = min(begin + p.rows_per_slice, p.rows);
    const int co0 = index % groups * Sum::kColumns, co = co0 + static_cast<int>(threadIdx.x);
    const float sum = Sum::run(static_cast<const T *>(p.summed), p.summed_stride, begin, end, co0, p.co,
                               *reinterpret_cast<typename Sum::Sums *>(dynamic));
    if (threadIdx.x >= Sum::kColumns || co >= p.co) return;
    if (p.partials)
        p.partials[slice * partial_pitch(p) + weights_of(p) + co] = sum;
    else
        static_cast<T *>(p.grad_bias)[co] = from_float<T>(sum);
}

/* Adds the slices, the first one first. */
template <typename T>
__global__ void __launch_bounds__(256) reduce_gradients_kernel(const WgradParams p, int slices) {
    const int64_t weights = weights_of(p), pitch = partial_pitch(p);
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < pitch;
         i += static_cast<int64_t>(gridDim.x) * 256) {
        float sum = 0.0f;
#pragma unroll 8
        for (int s = 0; s < slices; ++s) sum += p.partials[s * pitch + i];
        T *out = i < weights ? static_cast<T *>(p.grad_weight) + i : static_cast<T *>(p.grad_bias) + (i - weights);
        *out = from_float<T>(sum);
    }
}

/* ---- kernel and launch ---- */

/* The first `bias_tasks` CTAs sum the bias gradient. */
template <typename T, class Tile>
__global__ void __launch_bounds__(kThreads, 1)
    conv_wgrad_sm90_kernel(const WgradParams p, int tile_columns, int bias_tasks) {
    extern __shared__ __align__(kSwizzleAtomBytes) char dynamic[];
    if (static_cast<int>(blockIdx.x) < bias_tasks) {
        if (sizeof(T) == 2 || p.grad_aligned)
            sum_bias<T, kChunk / sizeof(T)>(p, static_cast<int>(blockIdx.x), dynamic);
        else if constexpr (sizeof(T) == 4)
            sum_bias<T, 1>(p, static_cast<int>(blockIdx.x), dynamic);
        return;
    }
    Shared<Tile> &shared = *reinterpret_cast<Shared<Tile> *>(dynamic);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < Tile::kStages; ++stage) {
            /* Every producing thread for its copies, and one more arrival that says what the stage is. */
            ptx::mbarrier_init(&shared.full[stage], kWarpgroup + 1);
            ptx::mbarrier_init(&shared.empty[stage], kConsumerWarps);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    const Task<Tile> task(p, tile_columns, static_cast<int>(blockIdx.x) - bias_tasks);
    if (threadIdx.x < kWarpgroup) {
        ptx::setmaxnreg_dec<kProducerRegisters>();
        Producer<T, Tile>{p, task, shared, {}}.run();
    } else {
        ptx::setmaxnreg_inc<kConsumerRegisters>();
        Consumer<T, Tile>{p, task, shared, {}}.run();
    }
}

template <typename T, class Tile>
fg_status launch(const WgradParams &p, const fg_plan &plan, cudaStream_t stream, fg_error *error) {
    const int64_t tiles = static_cast<int64_t>(ceil_div(p.co, Tile::kBlockM)) * ceil_div(p.volume * p.ci, plan.block_n);
    const int64_t weight_tasks = p.grad_weight ? tiles * plan.split_k : 0;
    const int64_t bias_tasks = p.grad_bias ? static_cast<int64_t>(ceil_div(p.co, kBiasChannels<T>)) * plan.split_k : 0;
    if (weight_tasks + bias_tasks > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "grad_weight: (%d, %d, %d) needs more tiles than one launch can have",
                       p.co, p.volume, p.ci);
    const auto kernel = conv_wgrad_sm90_kernel<T, Tile>;
    constexpr int kSharedBytes = sizeof(Shared<Tile>);
    FG_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    kernel<<<static_cast<unsigned int>(weight_tasks + bias_tasks), kThreads, kSharedBytes, stream>>>(
        p, plan.block_n, static_cast<int>(bias_tasks));
    FG_CUDA(cudaGetLastError());
    if (p.partials) {
        const int64_t blocks = ceil_div<int64_t>(partial_pitch(p), 256);
        constexpr int64_t kMaxBlocks = 1 << 16;
        reduce_gradients_kernel<T>
            <<<static_cast<unsigned int>(blocks < kMaxBlocks ? blocks : kMaxBlocks), 256, 0, stream>>>(p, plan.split_k);
        FG_CUDA(cudaGetLastError());
    }
    return FG_OK;
}

/* The tiles of fg_plan_conv_wgrad. */
template <typename T>
fg_status launch_tile(const WgradParams &p, const fg_plan &plan, cudaStream_t stream, fg_error *error) {
    if (plan.block_m == 256) return launch<T, Tile<256, 192, 1>>(p, plan, stream, error);
    if (plan.block_m == 128) return launch<T, Tile<128, 256, 1>>(p, plan, stream, error);
    return launch<T, Tile<64, 384, 2>>(p, plan, stream, error);
}

}  // namespace

fg_status launch_wgrad_sm90(const WgradParams &p, const fg_plan &plan, fg_dtype dtype, cudaStream_t stream,
                            fg_error *error) {
    if (dtype == FG_FLOAT16) return launch_tile<__half>(p, plan, stream, error);
    if (dtype == FG_BFLOAT16) return launch_tile<__nv_bfloat16>(p, plan, stream, error);
    return launch_tile<float>(p, plan, stream, error);
}

}  // namespace flexgemm
