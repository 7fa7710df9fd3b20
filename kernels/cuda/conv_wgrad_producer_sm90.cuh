/*
 * The producing half of conv_wgrad_sm90.cu: what a CTA works on, how it lies in shared memory, and the warpgroup that
 * brings it there.
 *
 * The producer packs the rows of its slice that have a neighbour at any of the tile's offsets into a queue, in rising
 * order, and gathers both operands by the queue with cp.async.
 *
 * Why a queue and not rows sorted by their neighbours: with one offset in a tile it wastes nothing, whatever the order,
 * and rows keep the order of the scene, in which neighbouring rows share their neighbours: what one step gathers is
 * mostly what the last one did, and L2 holds it. With several offsets, rows are there for any of them, and a piece that
 * is missing costs its place in the product but no bytes from L2, which are what limits such tiles.
 */
#pragma once

#include "conv_wgrad.cuh"
#include "ptx.cuh"
#include "ring.cuh"

namespace flexgemm {
namespace wgrad {

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
constexpr int kWindow = kWarpgroup;                   /* rows that the producer looks at together */
constexpr int kCapacity = 2 * kWindow;                /* of the queue: a window, and less than a step */
constexpr int kProducerBarrier = 1, kTaskBarrier = 2; /* named barriers: the producer's threads, all threads */

/* Output channels and columns of a tile. The consumers divide its output channels, or its columns. */
template <int kBlockM_, int kBlockN_, int kConsumersN_>
struct Tile {
    static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kConsumersN = kConsumersN_, kStages = 3;
    static constexpr int kConsumersM = kConsumers / kConsumersN;
    static constexpr int kConsumerM = kBlockM / kConsumersM / kWgmmaM; /* wgmma tiles of a consumer */
    static constexpr int kConsumerN = kBlockN / kConsumersN;           /* columns of a consumer */
    static constexpr int kBlocksA = kBlockM / kBlockChannels, kBlocksB = kBlockN / kBlockChannels;
    static constexpr int kStageBytes = (kBlocksA + kBlocksB) * kBlockBytes;
    /* A tile of few output channels holds several offsets, of which neighbouring ones want mostly the same rows: L1 has
     * them. The widest would only push its operands through L1. */
    static constexpr bool kThroughL1 = kBlockM < 256;
    static_assert(kConsumerN % kBlockChannels == 0, "a consumer starts at a block");
};

/* What eight columns are gathered from: a channel, less than 0 where there is none, at one of the task's offsets. */
struct Column {
    int offset, channel;
};

/* One CTA's share of the weight gradient. Tiles of the same rows run side by side, so that they share them in L2, and
 * the middle columns come first: they are those of the middle offset, at which the most rows have a neighbour. */
template <class Tile>
struct Task {
    int co0;                   /* output channels co0 .. co0 + kBlockM */
    int column0;               /* columns of the tile: column0 .. column0 + kBlockN */
    int begin, end;            /* those of them that are computed */
    int first_offset, offsets; /* that these touch */
    int slice, rows;
    int64_t row0;

    Task() = default;
    __device__ Task(const WgradParams &p, int tile_columns, int index) {
        const int columns = p.volume * p.ci;
        const int co_tiles = ceil_div(p.co, Tile::kBlockM), column_tiles = ceil_div(columns, tile_columns);
        co0 = index % co_tiles * Tile::kBlockM;
        const int turn = index / co_tiles % column_tiles;
        slice = index / co_tiles / column_tiles;
        column0 = (column_tiles / 2 + (turn % 2 ? -(turn + 1) / 2 : turn / 2)) * tile_columns;
        begin = column0;
        end = min(column0 + tile_columns, columns);
        first_offset = begin / p.ci;
        offsets = (end - 1) / p.ci - first_offset + 1;
        row0 = slice * p.rows_per_slice;
        rows = static_cast<int>(min(p.rows_per_slice, p.rows - row0));
    }

    /* Its offset number `part` alone. */
    __device__ Task at_offset(const WgradParams &p, int part) const {
        Task task = *this;
        task.first_offset += part;
        task.offsets = 1;
        task.begin = max(begin, task.first_offset * p.ci);
        task.end = min(end, (task.first_offset + 1) * p.ci);
        return task;
    }
};

/* Dynamic shared memory of a CTA. Stages first: they start at a multiple of 1024. */
template <class Tile>
struct Shared {
    char stages[Tile::kStages][Tile::kStageBytes];
    int32_t window[kMaxOffsets][kWindow];   /* the producer's: map entries of the next window, on their way */
    int32_t in_row[kMaxOffsets][kCapacity]; /* the producer's queue: rows of feats at each offset, */
    int32_t out_row[kCapacity];             /* and of grad_out, relative to the slice, or less than 0 */
    Column column[Tile::kBlockN / kOctet];
    Task<Tile> task;
    uint32_t found[kWindow / 32]; /* the producer's: which of a warp's rows go into the queue */
    bool end[Tile::kStages];      /* a step without operands, after the last */
    bool spoiled;                 /* the consumers': some sum is NaN */
    alignas(8) uint64_t full[Tile::kStages];
    uint64_t empty[Tile::kStages];
};

/* ---- producer ---- */

/* Eight threads take a row of the queue together, each of them a piece of every block: an octet (16-bit), or one channel
 * of each octet (TF32: a warp's 4 rows x 8 channels come in whole sectors and go to all 32 banks). */
template <typename T, class Tile>
struct Producer {
    static constexpr bool kTransposes = sizeof(T) == 4;
    static constexpr int kThreadsPerRow = 8, kRowsPerPass = kWarpgroup / kThreadsPerRow;
    static constexpr int kRowsPerThread = kBlockK<T> / kRowsPerPass;
    static constexpr int kPieces = kTransposes ? kBlockChannels / kOctet : 1; /* of a thread, in a row of a block */
    static constexpr int kPiecesA = Tile::kBlocksA * kPieces, kPiecesB = Tile::kBlocksB * kPieces;
    static constexpr int kBatch = kPiecesB % 4 == 0 ? 4 : 3; /* pieces of B whose places are looked up together */
    static_assert(kPiecesB % kBatch == 0, "whole batches");
    static_assert(kWindow + kBlockK<T> <= kCapacity && kCapacity % kBlockK<T> == 0,
                  "a step lies in the queue without a break");

    const WgradParams &p;
    Shared<Tile> &shared;
    Task<Tile> task;
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

    /* Appends to the queue until `wanted` rows have been put there in total, or the slice ends; then what is missing of
     * the last step gets places without a row. All but the last `wanted` - kBlockK of the rows have been used. */
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
        const int missing = wanted - produced, slot = (produced + static_cast<int>(threadIdx.x)) % kCapacity;
        if (missing <= 0 || missing >= kBlockK<T>) return;
        if (static_cast<int>(threadIdx.x) < missing) {
            shared.out_row[slot] = -1;
            for (int i = 0; i < task.offsets; ++i) shared.in_row[i][slot] = -1;
        }
        ptx::named_barrier(kProducerBarrier, kWarpgroup);
    }

    /* Which of a row's eight threads this is, and the first of its rows. */
    __device__ static int lane() { return static_cast<int>(threadIdx.x) % kThreadsPerRow; }
    __device__ static int first_row() { return static_cast<int>(threadIdx.x) / kThreadsPerRow; }

    /* The octet of an operand that a piece belongs to, and where in the operand's blocks this thread's piece of its i-th
     * row goes. */
    __device__ static int octet_of(int piece) { return kTransposes ? piece : piece * kThreadsPerRow + lane(); }
    __device__ static int place_of(int piece, int i) {
        const int row = first_row() + i * kRowsPerPass;
        if constexpr (kTransposes)
            return (piece * kOctet + lane()) * kRowBytes + (row / 4 ^ lane()) * kChunk + row % 4 * 4;
        else
            return piece * kBlockBytes + row * kRowBytes + (lane() ^ row % 8) * kChunk;
    }

    /* The same piece of each of this thread's rows, zeros for rows that are not there: then the source is not read, and
     * may lie anywhere. */
    template <bool kCached>
    __device__ __forceinline__ static void copy(char *blocks, int piece, const T *source, uint32_t row_bytes,
                                                const uint32_t (&rows)[kRowsPerThread], uint32_t limit) {
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
            const char *row = reinterpret_cast<const char *>(source) + static_cast<uint64_t>(rows[i]) * row_bytes;
            const bool zeros = rows[i] >= limit;
            char *target = blocks + place_of(piece, i);
            if constexpr (kTransposes)
                ptx::cp_async_4_or_zero(target, row + lane() * sizeof(T), zeros);
            else if constexpr (kCached)
                ptx::cp_async_16_or_zeros_cached(target, row, zeros);
            else
                ptx::cp_async_16_or_zeros(target, row, zeros);
        }
    }

    /* The step that begins at queue place `first`. */
    __device__ void load(int first) {
        char *const a = shared.stages[place.slot], *const b = a + Tile::kBlocksA * kBlockBytes;
        const int slot = first % kCapacity + first_row();
        uint32_t out_rows[kRowsPerThread];
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i)
            out_rows[i] = static_cast<uint32_t>(shared.out_row[slot + i * kRowsPerPass]);
        ptx::mbarrier_wait_parity(&shared.empty[place.slot], place.parity ^ 1);
        const T *grad_out = static_cast<const T *>(p.grad_out) + task.row0 * p.grad_stride;
        const auto grad_bytes = static_cast<uint32_t>(p.grad_stride * sizeof(T));
#pragma unroll 4
        for (int piece = 0; piece < kPiecesA; ++piece) {
            const int co = task.co0 + octet_of(piece) * kOctet;
            copy<false>(a, piece, grad_out + co, grad_bytes, out_rows,
                        co < p.co ? static_cast<uint32_t>(task.rows) : 0);
        }
        const T *feats = static_cast<const T *>(p.feats);
        const auto feats_bytes = static_cast<uint32_t>(p.feats_stride * sizeof(T));
#pragma unroll 1
        for (int piece = 0; piece < kPiecesB; piece += kBatch) {
            /* Nothing is read behind a copy that could be read before it: a thread waits twice a batch. */
            Column column[kBatch];
            uint32_t in_rows[kBatch][kRowsPerThread];
#pragma unroll
            for (int j = 0; j < kBatch; ++j) column[j] = shared.column[octet_of(piece + j)];
#pragma unroll
            for (int j = 0; j < kBatch; ++j)
#pragma unroll
                for (int i = 0; i < kRowsPerThread; ++i)
                    in_rows[j][i] = static_cast<uint32_t>(shared.in_row[column[j].offset][slot + i * kRowsPerPass]);
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                copy<Tile::kThroughL1>(b, piece + j, feats + column[j].channel, feats_bytes, in_rows[j],
                                       column[j].channel >= 0 ? p.in_rows : 0);
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

    /* Between two tasks is a barrier among the producer's threads. */
    __device__ void run() {
        task = shared.task;
        scanned = produced = 0;
        for (int i = threadIdx.x; i < Tile::kBlockN / kOctet; i += kWarpgroup) {
            const int column = task.column0 + i * kOctet;
            shared.column[i] = {0, -kOctet};
            if (task.begin <= column && column < task.end)
                shared.column[i] = {column / p.ci - task.first_offset, column % p.ci};
        }
        request();
        for (int first = 0;; first += kBlockK<T>) {
            fill(first + kBlockK<T>); /* at least one round, behind whose barriers the columns lie */
            if (produced <= first) break;
            load(first);
        }
        ptx::mbarrier_wait_parity(&shared.empty[place.slot], place.parity ^ 1);
        ptx::mbarrier_arrive(&shared.full[place.slot]);
        announce(true);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>(); /* no thread leaves with copies under way */
        ptx::named_barrier(kProducerBarrier, kWarpgroup);
    }
};

}  // namespace wgrad
}  // namespace flexgemm
