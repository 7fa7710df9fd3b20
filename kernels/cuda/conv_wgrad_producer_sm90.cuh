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

constexpr int kConsumers = 2; /* warpgroups, */
constexpr int kProducers = 2; /* and as many: the copies that one can issue would not keep them busy */
constexpr int kProducerThreads = kProducers * ptx::kWarpgroup;
constexpr int kThreads = kProducerThreads + kConsumers * ptx::kWarpgroup;
constexpr int kConsumerWarps = kConsumers * ptx::kWarpgroup / 32;

/* A stage is a row of blocks of 64 channels, those of grad_out, then those of feats. A block is 64 rows of 128 bytes,
 * which are 64 channels of one gathered row (16-bit) or 32 gathered rows of one channel (TF32); 16-byte chunk c of row
 * r is stored as chunk c ^ (r % 8), from an address that is a multiple of 1024 on. feats in TF32 lie as they come, a
 * row of the tile's columns behind the other: consumers read them to registers, and wgmma takes them from there. */
constexpr int kBlockChannels = 64, kRowBytes = 128, kBlockBytes = 64 * kRowBytes;
constexpr int kSwizzleAtomBytes = 8 * kRowBytes;
constexpr int kChunk = 16, kOctet = 8; /* bytes that are swizzled together; channels that lie at one offset */
constexpr int kWgmmaM = 64;
template <typename T>
constexpr int kBlockK = kRowBytes / static_cast<int>(sizeof(T)); /* rows of a step */

constexpr int kWindow = kProducerThreads; /* rows that the producer looks at together */
constexpr int kProducerBarrier = 1;       /* named barrier of the producer's threads */

/* Output channels and columns of a tile. The consumers divide its output channels, or its columns. A wgmma's 64 rows
 * are output channels (16-bit) or columns (TF32). */
template <typename T, int kBlockM_, int kBlockN_, int kConsumersN_>
struct Tile {
    static constexpr bool kTf32 = sizeof(T) == 4;
    static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kConsumersN = kConsumersN_;
    /* Whose reads are waited for: of wgmma a warp's at a time, in TF32 every thread's own. */
    static constexpr int kReaders = kConsumerWarps * (kTf32 ? 32 : 1);
    static constexpr int kStages = !kTf32 && kBlockM == 128 ? 4 : 3; /* as many as there is room for */
    static constexpr int kConsumersM = kConsumers / kConsumersN;
    static constexpr int kConsumerM = kBlockM / kConsumersM; /* output channels of a consumer */
    static constexpr int kConsumerN = kBlockN / kConsumersN; /* columns of a consumer */
    static constexpr int kProducts =
        (kTf32 ? kConsumerN : kConsumerM) / kWgmmaM;                    /* wgmma of a consumer, side by side */
    static constexpr int kSums = (kTf32 ? kConsumerM : kConsumerN) / 2; /* accumulators of a thread in each */
    static constexpr int kBlocksA = kBlockM / kBlockChannels, kBlocksB = kBlockN / kBlockChannels;
    /* TF32: eight banks from row to row, which the 4 rows x 8 columns that a warp reads share out among them. */
    static constexpr int kFeatsPitch = kBlockN * static_cast<int>(sizeof(T)) + 32;
    static constexpr int kStageBytes =
        kBlocksA * kBlockBytes + (kTf32 ? kBlockK<T> * kFeatsPitch : kBlocksB * kBlockBytes);
    static constexpr int kMaxOffsets =
        kBlockM == 64 ? FG_WGRAD_MAX_OFFSETS : kBlockN / (kTf32 ? 48 : 32); /* as the plan allows for */
    /* Accumulators of a thread decide what consumers need. */
    static constexpr int kConsumerRegisters = kProducts * kSums > 128 ? 224 : 168;
    static constexpr int kProducerRegisters =
        (kProducers + kConsumers) * ptx::registers_at_launch(kThreads) / kProducers -
        kConsumers * kConsumerRegisters / kProducers;
    static_assert(kMaxOffsets <= FG_WGRAD_MAX_OFFSETS, "none may touch more");
    static_assert(kConsumerN % kBlockChannels == 0, "a consumer starts at a block");
    static_assert(kStageBytes % kSwizzleAtomBytes == 0, "so does a stage");
};

/* What a piece of a row of the tile's columns is gathered from: a channel of the rows that begin at place `queue` of
 * in_row. */
struct Column {
    int queue, channel;
};

/* First row of a region. Three and more become shorter towards the last: how long a CTA takes depends on its offsets,
 * and the short ones at the end fill up what the long ones left uneven, for no more partial sums than equal ones
 * need. */
__device__ inline int64_t region_begin(const WgradParams &p, int region) {
    const int64_t left = p.regions - region;
    return p.rows - p.rows * left / p.regions * (p.regions < 3 ? p.regions : left) / p.regions;
}

constexpr int kWhole = -1;

/* What comes of a task. */
struct TaskOutput {
    int co0;        /* output channels co0 .. co0 + kBlockM */
    int column0;    /* columns of the tile: column0 .. column0 + kBlockN */
    int begin, end; /* those of them that are computed */
    int offsets;    /* that these touch; none: there are no more tasks */
    int slice;
};

/* A tile and a slice, one CTA's work at a time. A slice is every phases-th window of a region. The CTAs of a region run
 * side by side and go through it together. Their middle columns come first: they are those of the middle offset, at
 * which the most rows have a neighbour. */
template <class Tile>
struct Task : TaskOutput {
    int first_offset, phase;
    int64_t row0; /* the region's first, and how many it has */
    int rows;

    Task() = default;
    /* A task, or its offset number `part` alone. */
    __device__ Task(const WgradParams &p, int tile_columns, int index, int part) {
        const int columns = p.volume * p.ci;
        const int co_tiles = ceil_div(p.co, Tile::kBlockM), column_tiles = ceil_div(columns, tile_columns);
        co0 = index % co_tiles * Tile::kBlockM;
        phase = index / co_tiles % p.phases;
        const int tile = index / co_tiles / p.phases, turn = tile % column_tiles, region = tile / column_tiles;
        slice = region * p.phases + phase;
        column0 = (column_tiles / 2 + (turn % 2 ? -(turn + 1) / 2 : turn / 2)) * tile_columns;
        begin = column0;
        end = min(column0 + tile_columns, columns);
        first_offset = begin / p.ci;
        offsets = (end - 1) / p.ci - first_offset + 1;
        if (part != kWhole) {
            first_offset += part;
            offsets = 1;
            begin = max(begin, first_offset * p.ci);
            end = min(end, (first_offset + 1) * p.ci);
        }
        row0 = region_begin(p, region);
        rows = static_cast<int>(region_begin(p, region + 1) - row0);
    }
};

/* Dynamic shared memory of a CTA. Stages first: they start at a multiple of 1024. */
template <class Tile>
struct Shared {
    static constexpr int kCapacity = kWindow + kBlockK<__half>; /* of the queue: a window, and less than a step */

    char stages[Tile::kStages][Tile::kStageBytes];
    /* The producer's queue: rows of feats at each offset, less than 0 throughout for columns that are at none, and of
     * grad_out, relative to the region, or less than 0. */
    int32_t in_row[Tile::kMaxOffsets + 1][kCapacity];
    int32_t out_row[kCapacity];
    Column column[Tile::kTf32 ? Tile::kFeatsPitch / kChunk : 1]; /* of a row's pieces */
    TaskOutput ended[Tile::kStages];                             /* the task that has come to its end */
    int32_t found[kWindow / 32];  /* the producer's: how many of a warp's rows go into the queue */
    int task, part, parts;        /* the producer's, and which of how many offsets of a task that is repeated */
    bool end[Tile::kStages];      /* a step without operands, after the last of a task */
    bool spoiled[kConsumerWarps]; /* some sum is NaN */
    alignas(8) uint64_t full[Tile::kStages];
    uint64_t empty[Tile::kStages];
    uint64_t judged; /* sums of a task of several offsets have been looked at */
};

/* ---- producer ---- */

/* Eight threads take a row of the queue together, 16 bytes each of 128. Of grad_out in TF32, which they transpose, each
 * takes one channel of eight: a warp's 4 rows x 8 channels come in whole sectors and go to all 32 banks. */
template <typename T, class Tile>
struct Producer {
    static constexpr int kThreadsPerRow = 8, kRowsPerPass = kProducerThreads / kThreadsPerRow;
    static constexpr int kRowsPerThread = kBlockK<T> / kRowsPerPass;
    static constexpr int kPieceChannels = kChunk / static_cast<int>(sizeof(T));
    static constexpr int kOctets = kBlockChannels / kOctet; /* of a block */
    static constexpr int kCapacity = Shared<Tile>::kCapacity;
    static_assert(kBlockK<T> % kRowsPerPass == 0, "threads cover whole rows and copy alike");
    static_assert(kCapacity % kBlockK<T> == 0, "a step lies in the queue without a break");
    static_assert(kOctets == kThreadsPerRow, "a piece of every block, and a channel of every octet");

    const WgradParams &p;
    Shared<Tile> &shared;
    Task<Tile> task;
    RingPosition<Tile::kStages> place; /* in the pipeline */
    int scanned = 0;                   /* first row of the next window, in the region */
    int head = 0, queued = 0;          /* the queue: first place, rows */
    uint32_t judged_parity = 0;
    int32_t window[Tile::kMaxOffsets]; /* map entries of the next window, one row per thread, on their way */
    Column columns[Tile::kBlocksB];    /* of this thread's pieces, 16-bit */

    /* Which of a row's eight threads this is, and the first of its rows. */
    __device__ static int lane() { return static_cast<int>(threadIdx.x) % kThreadsPerRow; }
    __device__ static int first_row() { return static_cast<int>(threadIdx.x) / kThreadsPerRow; }

    __device__ static int wrapped(int slot) { return slot < kCapacity ? slot : slot - kCapacity; }

    __device__ void request() {
        const int row = scanned + static_cast<int>(threadIdx.x);
        const int32_t *entry = p.map + task.first_offset * p.rows + task.row0 + row;
#pragma unroll
        for (int i = 0; i < Tile::kMaxOffsets; ++i, entry += p.rows) {
            if (i == task.offsets) break;
            window[i] = row < task.rows ? *entry : -1;
        }
    }

    /* Appends to the queue until it holds a step, or the slice ends; then what is missing of the last step gets places
     * without a row. */
    __device__ void fill() {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        while (queued < kBlockK<T> && scanned < task.rows) {
            bool present = false;
#pragma unroll
            for (int i = 0; i < Tile::kMaxOffsets; ++i) {
                if (i == task.offsets) break;
                present |= static_cast<uint32_t>(window[i]) < p.in_rows;
            }
            const uint32_t mask = __ballot_sync(~0u, present);
            if (lane == 0) shared.found[warp] = __popc(mask);
            /* Also, all have read the places written below for an earlier step. */
            ptx::named_barrier(kProducerBarrier, kProducerThreads);
            const int found = lane < kWindow / 32 ? shared.found[lane] : 0;
            const int before = __reduce_add_sync(~0u, lane < warp ? found : 0);
            if (present) {
                const int slot = wrapped(wrapped(head + queued) + before + __popc(mask & ((1u << lane) - 1)));
                shared.out_row[slot] = scanned + static_cast<int>(threadIdx.x);
#pragma unroll
                for (int i = 0; i < Tile::kMaxOffsets; ++i) {
                    if (i == task.offsets) break;
                    shared.in_row[i][slot] = window[i];
                }
            }
            queued += __reduce_add_sync(~0u, found);
            scanned += kWindow * p.phases;
            request();
            ptx::named_barrier(kProducerBarrier, kProducerThreads);
        }
        if (queued == 0 || queued >= kBlockK<T>) return;
        const int slot = wrapped(wrapped(head + queued) + static_cast<int>(threadIdx.x));
        if (static_cast<int>(threadIdx.x) < kBlockK<T> - queued) {
            shared.out_row[slot] = -1;
            for (int i = 0; i < task.offsets; ++i) shared.in_row[i][slot] = -1;
        }
        queued = kBlockK<T>;
        ptx::named_barrier(kProducerBarrier, kProducerThreads);
    }

    /* A row that is not there is zeros: the source is not read, and may lie anywhere. */
    __device__ static const char *row_of(const void *data, uint32_t row, int64_t stride) {
        return static_cast<const char *>(data) + static_cast<uint64_t>(row) * static_cast<uint32_t>(stride * sizeof(T));
    }

    /* 16-bit: both operands as they come. */
    __device__ void copy(char *stage, int slot, const uint32_t (&out_rows)[kRowsPerThread]) {
        char *const target = stage + first_row() * kRowBytes + (lane() ^ first_row() % 8) * kChunk;
        const int co = task.co0 + lane() * kOctet, left = p.co - co;
        const T *grad_out = static_cast<const T *>(p.grad_out) + task.row0 * p.grad_stride + co;
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
            const char *source = row_of(grad_out, out_rows[i], p.grad_stride);
            const bool missing = out_rows[i] >= static_cast<uint32_t>(task.rows);
#pragma unroll
            for (int block = 0; block < Tile::kBlocksA; ++block)
                ptx::cp_async_16_or_zeros(target + block * kBlockBytes + i * kRowsPerPass * kRowBytes,
                                          source + block * kRowBytes, missing || block * kBlockChannels >= left);
        }
        /* Nothing is read behind a copy that could be read before it: a thread waits once. */
        uint32_t in_rows[Tile::kBlocksB][kRowsPerThread];
#pragma unroll
        for (int block = 0; block < Tile::kBlocksB; ++block)
#pragma unroll
            for (int i = 0; i < kRowsPerThread; ++i)
                in_rows[block][i] =
                    static_cast<uint32_t>(shared.in_row[0][columns[block].queue + slot + i * kRowsPerPass]);
#pragma unroll
        for (int block = 0; block < Tile::kBlocksB; ++block) {
            const T *feats = static_cast<const T *>(p.feats) + columns[block].channel;
#pragma unroll
            for (int i = 0; i < kRowsPerThread; ++i) {
                char *const piece = target + (Tile::kBlocksA + block) * kBlockBytes + i * kRowsPerPass * kRowBytes;
                const char *source = row_of(feats, in_rows[block][i], p.feats_stride);
                ptx::cp_async_16_or_zeros(piece, source, in_rows[block][i] >= p.in_rows);
            }
        }
    }

    /* TF32: channels lane() of octets begin .. end, the first of them from `source`, each to its own row of a block. */
    __device__ static void transpose(char *target, int begin, int end, const char *source, bool missing) {
#pragma unroll 8
        for (int octet = begin; octet < end; ++octet, source += kOctet * sizeof(T))
            ptx::cp_async_4_or_zero(target + octet * kOctet * kRowBytes, source, missing);
    }

    __device__ void transpose_and_copy(char *stage, int slot, uint32_t out_row) {
        char *target = stage + lane() * kRowBytes + (first_row() / 4 ^ lane()) * kChunk + first_row() % 4 * sizeof(T);
        const T *grad_out = static_cast<const T *>(p.grad_out) + task.row0 * p.grad_stride + task.co0 + lane();
        const int octets = min((p.co - task.co0) / kOctet, Tile::kBlocksA * kOctets);
        transpose(target, 0, octets, row_of(grad_out, out_row, p.grad_stride),
                  out_row >= static_cast<uint32_t>(task.rows));
        transpose(target, octets, Tile::kBlocksA * kOctets, nullptr, true);

        target = stage + Tile::kBlocksA * kBlockBytes + first_row() * Tile::kFeatsPitch + lane() * kChunk;
        constexpr int kBatch = 4, kPieces = Tile::kBlockN / kPieceChannels / kThreadsPerRow;
        static_assert(kPieces % kBatch == 0, "whole batches");
#pragma unroll
        for (int piece = 0; piece < kPieces; piece += kBatch) {
            Column column[kBatch];
            uint32_t in_row[kBatch];
#pragma unroll
            for (int j = 0; j < kBatch; ++j) column[j] = shared.column[(piece + j) * kThreadsPerRow + lane()];
#pragma unroll
            for (int j = 0; j < kBatch; ++j)
                in_row[j] = static_cast<uint32_t>(shared.in_row[0][column[j].queue + slot]);
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const T *feats = static_cast<const T *>(p.feats) + column[j].channel;
                ptx::cp_async_16_or_zeros(target + (piece + j) * kRowBytes, row_of(feats, in_row[j], p.feats_stride),
                                          in_row[j] >= p.in_rows);
            }
        }
    }

    /* The step at the head of the queue. */
    __device__ void load() {
        const int slot = head + first_row();
        uint32_t out_rows[kRowsPerThread];
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i)
            out_rows[i] = static_cast<uint32_t>(shared.out_row[slot + i * kRowsPerPass]);
        ptx::mbarrier_wait_parity(&shared.empty[place.slot], place.parity ^ 1);
        if constexpr (Tile::kTf32)
            transpose_and_copy(shared.stages[place.slot], slot, out_rows[0]);
        else
            copy(shared.stages[place.slot], slot, out_rows);
        head = wrapped(head + kBlockK<T>);
        queued -= kBlockK<T>;
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

    __device__ Column column_at(int in_tile) const {
        const int column = task.column0 + in_tile;
        if (column < task.begin || column >= task.end) return {Tile::kMaxOffsets * kCapacity, 0};
        return {(column / p.ci - task.first_offset) * kCapacity, column % p.ci};
    }

    /* Every thread waits for the stage, so that none is more than a round behind. */
    __device__ void announce_end() {
        ptx::mbarrier_wait_parity(&shared.empty[place.slot], place.parity ^ 1);
        ptx::mbarrier_arrive(&shared.full[place.slot]);
        if (threadIdx.x == 0) shared.ended[place.slot] = task;
        announce(true);
    }

    __device__ void work_on(const Task<Tile> &given) {
        task = given;
        scanned = task.phase * kWindow;
        head = queued = 0;
        request();
        if constexpr (Tile::kTf32) {
            for (int i = threadIdx.x; i < Tile::kBlockN / kPieceChannels; i += kProducerThreads)
                shared.column[i] = column_at(i * kPieceChannels);
        } else {
#pragma unroll
            for (int block = 0; block < Tile::kBlocksB; ++block)
                columns[block] = column_at((block * kOctets + lane()) * kOctet);
        }
        while (true) {
            fill();
            if (queued == 0) break;
            load();
        }
        announce_end();
    }

    /* Whether the consumers found NaN in the sums of the last task. */
    __device__ bool is_spoiled() {
        ptx::mbarrier_wait_parity(&shared.judged, judged_parity);
        judged_parity ^= 1;
        bool spoiled = false;
        for (const bool of_warp : shared.spoiled) spoiled |= of_warp;
        return spoiled;
    }

    /* Task after task while there are any. One that has become NaN is repeated, one offset at a time. */
    __device__ void run(int ctas, int tasks, int tile_columns) {
        for (int i = threadIdx.x; i < kCapacity; i += kProducerThreads) shared.in_row[Tile::kMaxOffsets][i] = -1;
        while (shared.task < tasks) {
            work_on(Task<Tile>(p, tile_columns, shared.task, shared.part));
            const bool repeated = task.offsets > 1 && is_spoiled();
            ptx::named_barrier(kProducerBarrier, kProducerThreads);
            if (threadIdx.x == 0) {
                if (repeated) {
                    shared.part = 0, shared.parts = task.offsets;
                } else if (++shared.part >= shared.parts) {
                    shared.task = p.next_task ? ctas + atomicAdd(p.next_task, 1) : tasks;
                    shared.part = kWhole, shared.parts = 0;
                }
            }
            ptx::named_barrier(kProducerBarrier, kProducerThreads);
        }
        task.offsets = 0;
        announce_end();
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>(); /* no thread leaves with copies under way */
    }
};

}  // namespace wgrad
}  // namespace flexgemm
