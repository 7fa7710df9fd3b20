/*
 * What the Hopper kernels of sparse convolution share: forward and input gradient, the sum of conv_gather.cu,
 *
 *     out[m, :] = activation(scale * sum_v W_v . in[map[v, m], :] + bias + residual[m, :])
 *
 * with the multiplications by wgmma. The warpgroups of a CTA share one pipeline of shared memory stages, each one
 * step of 128 bytes of channels at one offset v:
 *
 *   producer     gathers rows of `in` by 16-byte cp.async, zeros for missing neighbours; one of its threads has the
 *                copy engine bring W_v through a 3-D tensor map, which zero-fills a partial last step of channels;
 *   2 consumers  multiply, 64 of the tile's rows each, accumulators in registers, and write the tile. They are what
 *   or 3         kernels differ in: conv_gather_sm90.cu, conv_step_sums_sm90.cuh.
 *
 * A step travels with a word that says which blocks of 64 rows have neighbours at v. Offsets without any are never
 * loaded, and a consumer passes over the steps that do not concern its block. Rows may be taken in an order that
 * brings rows with the same neighbours together, which leaves less to pass over; and more so when each group of offsets
 * has an order of its own (conv_gather.cuh).
 *
 * CTAs are persistent: while the consumers write one tile, the producer already loads the next. Tiles differ in work:
 * where each CTA has several, whichever becomes free takes the next one from a counter. No sum depends on who adds it.
 */
#pragma once

#include "conv_gather.cuh"
#include "conv_rows_sm90.cuh"
#include "ptx.cuh"
#include "ring.cuh"
#include "tensor_map.cuh"

namespace flexgemm {

/* Both operands lie in 128-byte rows, whose 16-byte chunk c is stored as chunk c ^ (row % 8), from an address that is a
 * multiple of 1024 on. The copy engine writes the weights that way, the producer the rows that it gathers. A row of A
 * is one row of `in`; a row of B is one output channel's weights (K-major), or, transposed, 64 output channels of one
 * reduction channel, and a wider tile is such blocks of 64 one after another. wgmma transposes 16-bit operands only:
 * TF32 has K-major weights in both passes. */
constexpr int kSwizzleRowBytes = 128;
constexpr int kSwizzleAtomBytes = 8 * kSwizzleRowBytes; /* after which the pattern repeats */

template <typename T>
constexpr int kBlockK = kSwizzleRowBytes / static_cast<int>(sizeof(T)); /* elements of the reduction in one step */
constexpr int kWgmmaM = 64, kWgmmaBytes = 32;                           /* rows and reduction bytes of a wgmma */
constexpr uint32_t kEndOfTile = 0x80000000u; /* or more: a step without operands; the rest is the task that has ended */
constexpr uint32_t kEndOfWork = 0xffffffffu; /* the last one */
constexpr int kProducerBarrier = 1;          /* named barrier of the producer's threads; then one for each consumer */
constexpr int kChunk = 16, kChunksPerRow = kSwizzleRowBytes / kChunk;

/* Rows and columns of a tile, depth of the pipeline, CTAs per multiprocessor and how these divide its registers. */
template <int kBlockM_, int kBlockN_, int kStages_, int kCtasPerSm_>
struct GatherTile {
    static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kStages = kStages_, kCtasPerSm = kCtasPerSm_;
    static constexpr int kConsumers = kBlockM / kWgmmaM; /* warpgroups, each with one block of 64 rows */
    static constexpr int kThreads = (1 + kConsumers) * ptx::kWarpgroup;
    static constexpr int kConsumerWarps = kConsumers * ptx::kWarpgroup / 32;
    static constexpr int kBytesA = kBlockM * kSwizzleRowBytes, kBytesB = kBlockN * kSwizzleRowBytes;
    static constexpr int kStageBytes = kBytesA + kBytesB;
    static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kCtasPerSm == 1 ? 56 : 48;
    static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kCtasPerSm == 1 ? 224 : 96;
    /* Offsets whose map entries are copied at a time: all of 3x3x3, or half of them, which leaves L1 60 KB. */
    static constexpr int kWindow = kCtasPerSm == 1 ? 27 : 14;
    static_assert(kBlockN % 32 == 0 && kWindow <= 32, "whole chunks of a quad's rows; a bit for each offset");
    static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                      (1 + kConsumers) * ptx::registers_at_launch(kThreads, kCtasPerSm),
                  "warpgroups divide the registers of the launch");
};

/* One CTA's task: a tile, and a slice of the offsets. Column tiles of the same rows run side by side, so that they
 * share the gathered rows in L2, then the splits of a group, which have the same rows too; and the groups run one after
 * another, so that L2 holds the weights of few offsets at a time. Where tiles are handed out, the last rows come first:
 * the first ones of an order have few neighbours, and such tiles fill in at the end. */
template <class Tile>
struct GatherTask {
    int index, row_tile, n0, slice;
    GatherTask() = default;
    __device__ GatherTask(const GatherParams &p, int index_) : index(index_) {
        const int row_tiles = static_cast<int>(ceil_div<int64_t>(p.rows, Tile::kBlockM));
        const int split = index / p.column_tiles % p.splits, rest = index / p.column_tiles / p.splits;
        n0 = index % p.column_tiles * Tile::kBlockN;
        row_tile = p.next_task ? row_tiles - 1 - rest % row_tiles : rest % row_tiles;
        slice = rest / row_tiles * p.splits + split;
    }
    /* The slot that is row `i` of the tile, and the row of `map` and `out` that it works on, or less than 0. */
    __device__ int64_t slot_of(int i) const { return static_cast<int64_t>(row_tile) * Tile::kBlockM + i; }
    __device__ int64_t row_of(const GatherParams &p, int i) const { return p.row_of(slot_of(i), slice); }
};

/* Offsets of a task whose map entries are in shared memory together: `count` of them, `splits` apart. */
template <class Tile>
struct GatherWindow {
    GatherTask<Tile> task;
    int first, count;
};

/* Dynamic shared memory of a CTA. Stages first: they start at a multiple of 1024. */
template <class Tile>
struct GatherShared {
    char stages[Tile::kStages][Tile::kStageBytes]; /* A, then B */
    int32_t map[2][Tile::kWindow][Tile::kBlockM];  /* the producer's: map entries of this window and the next */
    uint32_t found[Tile::kBlockM / 32];            /* the producer's: offsets at which a warp's rows have any */
    GatherWindow<Tile> windows[4];                 /* the producer's: this one, the next, what some may still read */
    uint32_t step[Tile::kStages];                  /* bit b: block b has neighbours; or the end of a tile */
    float scale[Tile::kStages][Tile::kBlockM];     /* of float8 rows that have one each */
    KeptBias<Tile::kBlockN> bias[Tile::kConsumers];
    alignas(8) uint64_t full[Tile::kStages];
    uint64_t empty[Tile::kStages];
    uint64_t map_full[2];
};

/* How many offsets, one after another, a step holds side by side: more than one where a row of `in` is a half, a
 * quarter or an eighth of a step. Their weights are one piece of a row, too, or blocks of rows. */
template <typename T, class Tile>
__host__ __device__ inline int packed_offsets(const GatherParams &p) {
    if (sizeof(T) == 1 || Tile::kBlockN > 64 || p.slices() > 1) return 1; /* float8 has other scales at each offset */
    const bool divides = p.depth == kBlockK<T> / 2 || p.depth == kBlockK<T> / 4 || p.depth == kBlockK<T> / 8;
    return divides ? kBlockK<T> / p.depth : 1;
}

/* ---- producer ---- */

template <typename T, class Tile, bool kKMajor>
struct GatherProducer {
    static constexpr int kElement = sizeof(T);
    static constexpr int kRowsPerPass = ptx::kWarpgroup / kChunksPerRow;
    static constexpr int kRowsPerThread = Tile::kBlockM / kRowsPerPass;
    using Window = GatherWindow<Tile>;
    static constexpr int kBatch = kRowsPerThread > 8 ? kRowsPerThread / 2 : kRowsPerThread; /* as registers allow */

    const GatherParams &p;
    const CUtensorMap &weight_map;
    const uint32_t in_row_bytes;
    GatherShared<Tile> &shared;
    RingPosition<Tile::kStages> place; /* in the pipeline */
    /* Rows as they come share most of what they gather with the rows beside them: at the nine offsets of one kx, a tile
     * asks for a hundred and some rows four times each. 128 bytes of each are 17 KB, of two CTAs 33. */
    const bool through_l1 = Tile::kCtasPerSm > 1 && !p.order && (p.depth <= kBlockK<T>);
    const int packed = packed_offsets<T, Tile>(p); /* a power of two; a thread's pieces are of one of these offsets */
    const int own_offset = static_cast<int>(threadIdx.x) % kChunksPerRow * packed / kChunksPerRow;
    const int own_column = static_cast<int>(threadIdx.x) % kChunksPerRow * (kChunk / kElement) % (kBlockK<T> / packed);
    const int window_length = Tile::kWindow / packed * packed;

    __device__ Window window_at(const GatherTask<Tile> &task, int first) const {
        return {task, first, min(window_length, ceil_div(p.end_offset(task.slice) - first, p.splits))};
    }

    __device__ Window first_window(int index) const {
        const GatherTask<Tile> task(p, index);
        return window_at(task, p.first_offset(task.slice));
    }

    __device__ Window window_after(const Window &window, int next_task) const {
        const int first = window.first + window_length * p.splits;
        return first < p.end_offset(window.task.slice) ? window_at(window.task, first) : first_window(next_task);
    }

    /* The task that this CTA has after `index`; asked once for each, by one thread. */
    __device__ int task_after(int index) const {
        const int ctas = static_cast<int>(gridDim.x);
        return p.next_task ? ctas + atomicAdd(p.next_task, 1) : index + ctas;
    }

    /* Starts the copies of a window's map entries into shared memory, a row per thread or two. */
    __device__ void request(const Window &window, int buffer) {
        const int64_t stride = (p.mirrored ? -p.splits : p.splits) * p.rows;
        const int count = window.count;
        for (int slot = threadIdx.x; slot < Tile::kBlockM; slot += ptx::kWarpgroup) {
            const int64_t row = window.task.row_of(p, slot);
            const int32_t *source = p.entry_at(window.first, window.task.slot_of(slot), row);
            for (int i = 0; i < count; ++i, source += stride) {
                int32_t *entry = &shared.map[buffer][i][slot];
                if (row >= 0)
                    ptx::cp_async_4(entry, source);
                else
                    *entry = -1;
            }
        }
        ptx::mbarrier_arrive_after_cp_async(&shared.map_full[buffer]);
    }

    /* For each block of 64 rows, the offsets of the window at which it has neighbours. */
    __device__ void find(uint32_t (&found)[Tile::kConsumers], int buffer, int count) {
        for (int slot = threadIdx.x; slot < Tile::kBlockM; slot += ptx::kWarpgroup) { /* whole warps */
            uint32_t bits = 0;
#pragma unroll 4
            for (int i = 0; i < count; ++i)
                bits |= static_cast<uint32_t>(static_cast<uint32_t>(shared.map[buffer][i][slot]) < p.in_rows) << i;
            bits = __reduce_or_sync(~0u, bits);
            if (threadIdx.x % 32 == 0) shared.found[slot / 32] = bits;
        }
        ptx::named_barrier(kProducerBarrier, ptx::kWarpgroup);
#pragma unroll
        for (int b = 0; b < Tile::kConsumers; ++b) found[b] = shared.found[2 * b] | shared.found[2 * b + 1];
    }

    __device__ void load_weights(char *b, uint64_t *full, int v, int k, int n0) {
        if constexpr (kKMajor) {
            ptx::tma_load_3d(b, &weight_map, full, kElement * (packed > 1 ? v * p.depth : k), packed > 1 ? 0 : v, n0);
        } else {
            const int rows = packed > 1 ? p.depth : kBlockK<T>;
#pragma unroll
            for (int n = 0; n < Tile::kBlockN; n += kBlockK<T>)
                for (int i = 0; i < packed; ++i)
                    ptx::tma_load_3d(b + (n + i * rows) * kSwizzleRowBytes, &weight_map, full, kElement * (n0 + n),
                                     v + i, k);
        }
    }

    /* All of this thread's row pieces at channel k of the tile's rows of `in`, the scale of the row that is the
     * thread's own, and the weights by one thread for all. The rows are those of offset v, or of `packed` from v on, of
     * which `offsets` are there. */
    __device__ void load(const int32_t *tile_rows, uint32_t step, int v, int offsets, int k, int n0) {
        char *a = shared.stages[place.slot], *b = a + Tile::kBytesA;
        uint64_t *full = &shared.full[place.slot];
        const int chunk = threadIdx.x % kChunksPerRow, first = threadIdx.x / kChunksPerRow;
        const int column = k + own_column;
        tile_rows += own_offset * Tile::kBlockM;
        uint64_t in = reinterpret_cast<uint64_t>(p.in) + kElement * static_cast<uint64_t>(column);
        ptx::hold(in);
        /* Past the last channel or offset no row has anything. */
        const uint32_t in_rows = column < p.depth && own_offset < offsets ? p.in_rows : 0;
        uint32_t rows[kBatch];
        const auto look_up = [&](int batch) {
#pragma unroll
            for (int i = 0; i < kBatch; ++i) rows[i] = tile_rows[first + (batch + i) * kRowsPerPass];
        };
        look_up(0); /* all that can be known before the stage is free */
        ptx::mbarrier_wait_parity(&shared.empty[place.slot], place.parity ^ 1);
        if (ptx::elect() && threadIdx.x < 32) {
            shared.step[place.slot] = step;
            ptx::mbarrier_arrive_expect_tx(full, Tile::kBytesB);
            load_weights(b, full, v, k, n0);
        }
        a += first * kSwizzleRowBytes + (chunk ^ first % 8) * kChunk;
#pragma unroll
        for (int batch = 0; batch < kRowsPerThread; batch += kBatch) {
            if (batch > 0) look_up(batch);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                /* Where zeros are asked for, the row is not read and may lie anywhere. */
                const void *row = reinterpret_cast<const void *>(in + static_cast<uint64_t>(rows[i]) * in_row_bytes);
                char *target = a + (batch + i) * kRowsPerPass * kSwizzleRowBytes;
                if (through_l1)
                    ptx::cp_async_16_or_zeros_cached(target, row, rows[i] >= in_rows);
                else
                    ptx::cp_async_16_or_zeros(target, row, rows[i] >= in_rows);
            }
        }
        if (kElement == 1 && p.row_scales) {
            const uint32_t own_row = tile_rows[threadIdx.x];
            const bool present = own_row < p.in_rows;
            ptx::cp_async_4_or_zero(&shared.scale[place.slot][threadIdx.x], p.row_scales + (present ? own_row : 0),
                                    !present);
        }
        ptx::mbarrier_arrive_after_cp_async(full);
        place.advance();
    }

    __device__ void end_tile(uint32_t step) {
        ptx::mbarrier_wait_parity(&shared.empty[place.slot], place.parity ^ 1);
        uint64_t *full = &shared.full[place.slot];
        if (ptx::elect() && threadIdx.x < 32) {
            shared.step[place.slot] = step;
            ptx::mbarrier_arrive(full);
        }
        ptx::mbarrier_arrive(full);
        place.advance();
    }

    __device__ void run(int tasks) {
        static_assert(kRowsPerPass % 8 == 0, "a thread's rows share one swizzle");
        static_assert(kKMajor || Tile::kBlockN % kBlockK<T> == 0, "transposed weights are blocks of 64 channels");
        static_assert(kElement > 1 || Tile::kBlockM == ptx::kWarpgroup, "a thread brings one scale");
        if (threadIdx.x == 0) ptx::prefetch_tensor_map(&weight_map);
        /* One thread works out windows and shares them: they are needed rarely, and registers are few. */
        int next_task = 0;
        if (threadIdx.x == 0) {
            shared.windows[0] = first_window(static_cast<int>(blockIdx.x));
            next_task = task_after(shared.windows[0].task.index);
        }
        ptx::named_barrier(kProducerBarrier, ptx::kWarpgroup);
        request(shared.windows[0], 0);
        for (uint32_t turn = 0; shared.windows[turn % 4].task.index < tasks; ++turn) {
            const Window &window = shared.windows[turn % 4], &next = shared.windows[(turn + 1) % 4];
            const int buffer = turn % 2;
            if (threadIdx.x == 0) shared.windows[(turn + 1) % 4] = window_after(window, next_task);
            uint32_t found[Tile::kConsumers];
            ptx::mbarrier_wait_parity(&shared.map_full[buffer], turn / 2 % 2);
            find(found, buffer, window.count); /* a barrier is in it */
            const bool last = next.task.index != window.task.index;
            if (last && threadIdx.x == 0) next_task = task_after(next.task.index);
            /* All threads have come past the window before, whose place is taken by the one after. */
            if (next.task.index < tasks) request(next, buffer ^ 1);
            uint32_t left = 0;
#pragma unroll
            for (const uint32_t bits : found) left |= bits;
            while (left != 0) {
                const int i = (__ffs(static_cast<int>(left)) - 1) & -packed;
                const uint32_t own = (1u << packed) - 1; /* of the bits from i on */
                left &= ~(own << i);
                uint32_t step = 0;
#pragma unroll
                for (int b = 0; b < Tile::kConsumers; ++b)
                    step |= static_cast<uint32_t>((found[b] >> i & own) != 0) << b;
                for (int k = 0; k < p.depth; k += kBlockK<T>)
                    load(shared.map[buffer][i], step, window.first + i * p.splits, window.count - i, k, window.task.n0);
            }
            if (last) end_tile(kEndOfTile | window.task.index);
        }
        end_tile(kEndOfWork);
        ptx::cp_async_commit();  /* only groups can be waited for */
        ptx::cp_async_wait<0>(); /* no thread leaves with copies under way */
    }
};

/* ---- consumers ---- */

/* The place of a consumer's thread: its warpgroup, the rows of the tile that it has sums of, eight places apart. */
__device__ __forceinline__ int consumer_of_thread() { return static_cast<int>(threadIdx.x) / ptx::kWarpgroup - 1; }
__device__ __forceinline__ int row_of_thread(int half) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    return consumer_of_thread() * kWgmmaM + warp * 16 + half * 8 + lane / 4;
}

/* Each warp for itself: the last of them frees the stage. The lane is kept, or each step would read threadIdx again. */
template <class Tile>
__device__ __forceinline__ void release_stage(GatherShared<Tile> &shared, int stage, int lane) {
    if (lane == 0) ptx::mbarrier_arrive(&shared.empty[stage]);
}
__device__ __forceinline__ int kept_lane() { return ptx::opaque(static_cast<int>(threadIdx.x % 32)); }

/* The word of a step for the lane that frees the stage, which alone reads it; 0 for the others. */
template <class Tile>
__device__ __forceinline__ uint32_t step_of(const GatherShared<Tile> &shared, int stage, int lane) {
    return lane == 0 ? shared.step[stage] : 0;
}

/* Whether a step is one of this consumer's; whether it ends the tile. Votes, so that the compiler sees one branch for
 * the whole warp: it would serialise wgmma otherwise. */
__device__ __forceinline__ bool concerns(uint32_t step, int consumer) {
    return __any_sync(~0u, step < kEndOfTile && step >> consumer & 1);
}
__device__ __forceinline__ bool ends_tile(uint32_t step) { return __any_sync(~0u, step >= kEndOfTile); }

/* The life of a consumer: accumulate(d, &any) adds up a tile and returns the word of its end, any: whether there was
 * something to multiply; write(d, task, rows) is for the sums, of two rows a thread. */
template <class Tile, typename Accumulate, typename Write>
__device__ __forceinline__ void consume_tiles(const GatherParams &p, const Accumulate &accumulate, const Write &write) {
    for (;;) {
        float d[Tile::kBlockN / 2];
#pragma unroll
        for (float &sum : d) sum = 0.0f;
        bool any = false;
        const uint32_t end = accumulate(d, &any);
        if (end == kEndOfWork) return;
        if (p.partials && !any) continue; /* nobody reads the partial sums of rows without neighbours */
        const GatherTask<Tile> task(p, static_cast<int>(end - kEndOfTile));
        const int64_t rows[2] = {task.row_of(p, row_of_thread(0)), task.row_of(p, row_of_thread(1))};
        write(d, task, rows);
    }
}

/* The bias of the task's columns in shared memory, or NULL. */
template <typename T, class Tile>
__device__ __forceinline__ const float *bias_of(GatherShared<Tile> &shared, const GatherParams &p,
                                                const GatherTask<Tile> &task) {
    const int consumer = consumer_of_thread();
    return bring_bias<T>(shared.bias[consumer], p, task.n0, kProducerBarrier + 1 + consumer);
}

/* ---- kernel and launch ---- */

template <typename T, class Tile, bool kKMajor, class Consumer>
__device__ __forceinline__ void gather_block(const GatherParams &p, const CUtensorMap &weight_map, int tasks) {
    extern __shared__ __align__(kSwizzleAtomBytes) char dynamic[];
    GatherShared<Tile> &shared = *reinterpret_cast<GatherShared<Tile> *>(dynamic);
    ptx::let_next_kernel_begin(); /* all in front of this one has ended */
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < Tile::kStages; ++stage) {
            /* Every producing thread for its rows, and one more arrival that announces the weights. */
            ptx::mbarrier_init(&shared.full[stage], ptx::kWarpgroup + 1);
            ptx::mbarrier_init(&shared.empty[stage], Tile::kConsumerWarps);
        }
        for (uint64_t &barrier : shared.map_full) ptx::mbarrier_init(&barrier, ptx::kWarpgroup);
        for (auto &bias : shared.bias) bias.first_column = -1;
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < ptx::kWarpgroup) {
        ptx::setmaxnreg_dec<Tile::kProducerRegisters>();
        GatherProducer<T, Tile, kKMajor>{p, weight_map, static_cast<uint32_t>(sizeof(T) * p.in_stride), shared, {}}.run(
            tasks);
    } else {
        ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
        Consumer{p, shared, kept_lane(), {}}.run();
    }
}

template <auto kKernel, typename T, class Tile, bool kKMajor>
fg_status launch_gather(GatherParams p, int num_sms, cudaStream_t stream, fg_error *error) {
    p.column_tiles = ceil_div(p.columns, Tile::kBlockN);
    const int64_t tasks = ceil_div<int64_t>(p.rows, Tile::kBlockM) * p.column_tiles * p.slices();
    const int64_t resident = static_cast<int64_t>(num_sms) * Tile::kCtasPerSm;
    if (tasks > INT32_MAX - resident) /* a CTA's next task is one grid on */
        return fg_fail(error, FG_ERROR_VALUE, "out: (%lld, %d) needs %lld tiles, more than one launch can have",
                       static_cast<long long>(p.rows), p.columns, static_cast<long long>(tasks));
    CUtensorMap weight_map; /* coordinates: byte of a row, offset, row */
    const int64_t rows = kKMajor ? p.columns : p.depth;
    const int64_t row_bytes = static_cast<int64_t>(sizeof(T)) * (kKMajor ? p.depth : p.columns);
    const int packed = packed_offsets<T, Tile>(p);
    const TensorRows weight = kKMajor && packed > 1
                                  ? TensorRows{p.weight, p.volume * row_bytes, 1, rows, row_bytes, p.volume * row_bytes}
                                  : TensorRows{p.weight, row_bytes, p.volume, rows, row_bytes, p.volume * row_bytes};
    const int box_rows = kKMajor ? Tile::kBlockN : kBlockK<T> / packed;
    fg_status status = encode_tensor_map(&weight_map, weight, 1, box_rows, error);
    if (status != FG_OK) return status;

    constexpr int kSharedBytes = sizeof(GatherShared<Tile>);
    /* 85 % of 228 KB: the next size is 196, and two small CTAs leave L1 60. */
    constexpr int kSharedPercent = Tile::kCtasPerSm > 1 ? 85 : cudaSharedmemCarveoutDefault;
    static_assert(Tile::kCtasPerSm == 1 || Tile::kCtasPerSm * (kSharedBytes + 1024) <= 196 * 1024, "as asked for");
    status = allow_shared<kKernel>(kSharedBytes, error, kSharedPercent);
    if (status != FG_OK) return status;
    const auto grid = static_cast<unsigned int>(tasks < resident ? tasks : resident);
    if (p.next_task) FG_CUDA(cudaMemsetAsync(p.next_task, 0, sizeof *p.next_task, stream));
    kKernel<<<grid, Tile::kThreads, kSharedBytes, stream>>>(p, weight_map, static_cast<int>(tasks));
    FG_CUDA(cudaGetLastError());
    return p.partials ? reduce_slices(p, 90, stream, error) : FG_OK;
}

/* Calls launch with a value of the tile of fg_plan_conv, one of those that every kernel has. */
template <typename Launch>
fg_status with_gather_tile(const fg_plan &plan, const Launch &launch) {
    if (plan.block_n == 256) return launch(GatherTile<128, 256, 4, 1>{});
    if (plan.block_n == 128) return launch(GatherTile<128, 128, 5, 1>{});
    return launch(GatherTile<128, 64, 3, 2>{});
}

}  // namespace flexgemm
