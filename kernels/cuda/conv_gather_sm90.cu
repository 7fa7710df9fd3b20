/*
 * Forward and input gradient of sparse convolution on Hopper, 16-bit types: the sum of conv_gather.cu,
 *
 *     out[m, :] = bias + sum_v W_v . in[map[v, m], :]
 *
 * with the multiplications by wgmma. Three warpgroups of a CTA share one pipeline of shared memory stages, each one
 * step of 64 channels at one offset v:
 *
 *   producer     gathers rows of `in` by 16-byte cp.async, zeros for missing neighbours; one of its threads has the
 *                copy engine bring W_v through a 3-D tensor map, which zero-fills a partial last step of channels;
 *   2 consumers  multiply, half of the tile's rows each, accumulators in registers, and write the tile.
 *
 * A step travels with a word that says which blocks of 64 rows have neighbours at v. Offsets without any are never
 * loaded, and a consumer passes over the steps that do not concern its block. Rows may be taken in an order that
 * brings rows with the same neighbours together, which leaves less to pass over.
 *
 * CTAs are persistent: while the consumers write one tile, the producer already loads the next.
 */
#include <cstring>
#include <type_traits>

#include "conv_gather.cuh"
#include "ptx.cuh"
#include "split_k.cuh"
#include "tensor_map.cuh"

namespace flexgemm {
namespace {

constexpr int kWarpgroup = 128; /* threads */

/* Both operands lie in 128-byte rows, whose 16-byte chunk c is stored as chunk c ^ (row % 8), from an address that is a
 * multiple of 1024 on. The copy engine writes the weights that way, the producer the rows that it gathers. A row of A is
 * one row of `in`; a row of B is one output channel's weights (K-major), or, transposed, 64 output channels of one
 * reduction channel, and a wider tile is such blocks of 64 one after another. */
constexpr int kSwizzleRowBytes = 128;
constexpr int kSwizzleAtomBytes = 8 * kSwizzleRowBytes; /* after which the pattern repeats */

constexpr int kBlockK = kSwizzleRowBytes / 2; /* 16-bit elements of the reduction in one step */
constexpr int kWgmmaM = 64, kWgmmaK = 16;
constexpr int kConsumers = 2; /* warpgroups, each with one block of 64 rows */
constexpr int kBlockM = kConsumers * kWgmmaM;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kConsumerWarps = kConsumers * kWarpgroup / 32;
constexpr int kWindow = 27;                  /* offsets whose map entries are copied at a time: all of 3x3x3 */
constexpr uint32_t kEndOfTile = 0x80000000u; /* a step without operands, after the last */
constexpr int kProducerBarrier = 1;          /* named barrier among the producer's threads */
constexpr int kChunk = 16, kChunksPerRow = kSwizzleRowBytes / kChunk;

/* Columns of a tile, depth of the pipeline, CTAs per multiprocessor and how these divide its registers. */
template <int kBlockN_, int kStages_, int kCtasPerSm_>
struct Tile {
    static constexpr int kBlockN = kBlockN_, kStages = kStages_, kCtasPerSm = kCtasPerSm_;
    static constexpr int kBytesA = kBlockM * kSwizzleRowBytes, kBytesB = kBlockN * kSwizzleRowBytes;
    static constexpr int kStageBytes = kBytesA + kBytesB;
    static constexpr int kProducerRegisters = kCtasPerSm == 1 ? 56 : 48;
    static constexpr int kConsumerRegisters = kCtasPerSm == 1 ? 224 : 96;
    static_assert(kBlockN % kBlockK == 0, "whole blocks of 64 channels");
    static_assert((kProducerRegisters + kConsumers * kConsumerRegisters) * kWarpgroup * kCtasPerSm <= 65536,
                  "the register file of a multiprocessor");
};

/* Dynamic shared memory of a CTA. Stages first: they start at a multiple of 1024. */
template <class Tile>
struct Shared {
    char stages[Tile::kStages][Tile::kStageBytes]; /* A, then B */
    int32_t map[2][kWindow][kBlockM];              /* the producer's: map entries of this window and the next */
    uint32_t found[kBlockM / 32];                  /* the producer's: offsets at which a warp's rows have any */
    uint32_t step[Tile::kStages];                  /* bit b: block b has neighbours; or kEndOfTile */
    alignas(8) uint64_t full[Tile::kStages];
    uint64_t empty[Tile::kStages];
    uint64_t map_full[2];
};

/* A place in the pipeline. */
template <class Tile>
struct Place {
    int stage = 0, parity = 0;
    __device__ void advance() {
        if (++stage == Tile::kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

/* One CTA's task: a tile, and a share of its offsets: v = slice, slice + slices, ... Column tiles of the same rows run
 * side by side, so that they share the gathered rows in L2. */
template <class Tile>
struct Task {
    int64_t m0;
    int n0, slice;
    __device__ Task(const GatherParams &p, int slices, int index) {
        n0 = index % p.column_tiles * Tile::kBlockN;
        slice = index / p.column_tiles % slices;
        m0 = static_cast<int64_t>(index / p.column_tiles / slices) * kBlockM;
    }
};

/* ---- producer ---- */

template <class Tile, bool kKMajor>
struct Producer {
    static constexpr int kRowsPerPass = kWarpgroup / kChunksPerRow;
    static constexpr int kRowsPerThread = kBlockM / kRowsPerPass;

    const GatherParams &p;
    const CUtensorMap &weight_map;
    const int slices;
    const uint32_t in_row_bytes;
    Shared<Tile> &shared;
    Place<Tile> place;

    /* Up to kWindow offsets of a task, `slices` apart. */
    struct Window {
        int task, first;
    };

    __device__ Window window_after(Window window) const {
        window.first += kWindow * slices;
        if (window.first < p.volume) return window;
        const int task = window.task + static_cast<int>(gridDim.x);
        return {task, Task<Tile>(p, slices, task).slice};
    }

    __device__ int count_of(Window window) const { return min(kWindow, ceil_div(p.volume - window.first, slices)); }

    /* Starts the copies of a window's map entries into shared memory, one row per thread. */
    __device__ void request(Window window, int buffer) {
        const int64_t row = p.row_of(Task<Tile>(p, slices, window.task).m0 + threadIdx.x);
        const int32_t *source = p.map_at(window.first) + row;
        const int64_t stride = (p.mirrored ? -slices : slices) * p.rows;
        const int count = count_of(window);
        for (int i = 0; i < count; ++i, source += stride) {
            int32_t *entry = &shared.map[buffer][i][threadIdx.x];
            if (row >= 0)
                ptx::cp_async_4(entry, source);
            else
                *entry = -1;
        }
        ptx::mbarrier_arrive_after_cp_async(&shared.map_full[buffer]);
    }

    /* For each block of 64 rows, the offsets of the window at which it has neighbours. */
    __device__ void find(uint32_t (&found)[kConsumers], int buffer, int count) {
        uint32_t bits = 0;
#pragma unroll 4
        for (int i = 0; i < count; ++i)
            bits |= static_cast<uint32_t>(static_cast<uint32_t>(shared.map[buffer][i][threadIdx.x]) < p.in_rows) << i;
        bits = __reduce_or_sync(~0u, bits);
        if (threadIdx.x % 32 == 0) shared.found[threadIdx.x / 32] = bits;
        ptx::named_barrier(kProducerBarrier, kWarpgroup);
#pragma unroll
        for (int b = 0; b < kConsumers; ++b) found[b] = shared.found[2 * b] | shared.found[2 * b + 1];
    }

    /* All of this thread's row pieces at channel k, and the weights by one thread for all. */
    __device__ void load(const uint32_t (&rows)[kRowsPerThread], uint32_t step, int v, int k, int n0) {
        char *a = shared.stages[place.stage], *b = a + Tile::kBytesA;
        uint64_t *full = &shared.full[place.stage];
        ptx::mbarrier_wait_parity(&shared.empty[place.stage], place.parity ^ 1);
        if (threadIdx.x == 0) {
            shared.step[place.stage] = step;
            ptx::mbarrier_arrive_expect_tx(full, Tile::kBytesB);
            if constexpr (kKMajor) {
                ptx::tma_load_3d(b, &weight_map, full, 2 * k, v, n0);
            } else {
#pragma unroll
                for (int n = 0; n < Tile::kBlockN; n += kBlockK)
                    ptx::tma_load_3d(b + n * kSwizzleRowBytes, &weight_map, full, 2 * (n0 + n), v, k);
            }
        }
        const int chunk = threadIdx.x % kChunksPerRow, first = threadIdx.x / kChunksPerRow;
        const int column = k + chunk * (kChunk / 2);
        const char *in = static_cast<const char *>(p.in) + 2 * static_cast<int64_t>(column);
        const uint32_t in_rows = column < p.depth ? p.in_rows : 0; /* past the last channel no row has anything */
        a += first * kSwizzleRowBytes + (chunk ^ first % 8) * kChunk;
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
            const bool present = rows[i] < in_rows;
            const char *row = in + static_cast<uint64_t>(present ? rows[i] : 0) * in_row_bytes;
            ptx::cp_async_16_or_zeros(a + i * kRowsPerPass * kSwizzleRowBytes, row, !present);
        }
        ptx::mbarrier_arrive_after_cp_async(full);
        place.advance();
    }

    __device__ void end_tile() {
        ptx::mbarrier_wait_parity(&shared.empty[place.stage], place.parity ^ 1);
        uint64_t *full = &shared.full[place.stage];
        if (threadIdx.x == 0) {
            shared.step[place.stage] = kEndOfTile;
            ptx::mbarrier_arrive(full);
        }
        ptx::mbarrier_arrive(full);
        place.advance();
    }

    __device__ void run(int tasks) {
        static_assert(kRowsPerPass % 8 == 0 && kWindow <= 32, "a thread's rows share one swizzle; a bit per offset");
        if (threadIdx.x == 0) ptx::prefetch_tensor_map(&weight_map);
        Window window = {static_cast<int>(blockIdx.x), Task<Tile>(p, slices, blockIdx.x).slice};
        int buffer = 0, parity = 0;
        request(window, buffer);
        while (window.task < tasks) {
            const Window next = window_after(window);
            const int n0 = Task<Tile>(p, slices, window.task).n0;
            uint32_t found[kConsumers];
            ptx::mbarrier_wait_parity(&shared.map_full[buffer], parity);
            find(found, buffer, count_of(window));
            /* All threads have come past the window before, whose place is taken by the one after. */
            if (next.task < tasks) request(next, buffer ^ 1);
            for (uint32_t left = found[0] | found[1]; left != 0; left &= left - 1) {
                const int i = __ffs(static_cast<int>(left)) - 1;
                const uint32_t step = (found[0] >> i & 1) | (found[1] >> i & 1) << 1;
                uint32_t rows[kRowsPerThread];
#pragma unroll
                for (int j = 0; j < kRowsPerThread; ++j)
                    rows[j] = shared.map[buffer][i][threadIdx.x / kChunksPerRow + j * kRowsPerPass];
                for (int k = 0; k < p.depth; k += kBlockK) load(rows, step, window.first + i * slices, k, n0);
            }
            if (next.task != window.task) end_tile();
            window = next;
            buffer ^= 1;
            if (buffer == 0) parity ^= 1;
        }
        ptx::cp_async_commit();  /* only groups can be waited for */
        ptx::cp_async_wait<0>(); /* no thread leaves with copies under way */
    }
};

/* ---- consumers ---- */

template <typename T>
__device__ __forceinline__ uint32_t pack(float x, float y) {
    const T pair[2] = {from_float<T>(x), from_float<T>(y)};
    uint32_t word;
    memcpy(&word, pair, sizeof word);
    return word;
}

/* Transposes the 4 x 4 words of four neighbouring lanes: lane i ends up with word i of lanes 0..3. */
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int lane) {
    const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t other = __shfl_xor_sync(~0u, odd ? w[i] : w[i + 1], 1);
        (odd ? w[i] : w[i + 1]) = other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t other = __shfl_xor_sync(~0u, upper ? w[i] : w[i + 2], 2);
        (upper ? w[i] : w[i + 2]) = other;
    }
}

/* D += A.B of 64 rows, B as the pass has it. */
template <typename T, bool kKMajor, int kRegisters>
__device__ __forceinline__ void wgmma(float (&d)[kRegisters], uint64_t a, uint64_t b) {
    if constexpr (std::is_same<T, __half>::value && kKMajor)
        ptx::wgmma_f16(d, a, b, 1);
    else if constexpr (std::is_same<T, __half>::value)
        ptx::wgmma_f16_kn(d, a, b, 1);
    else if constexpr (kKMajor)
        ptx::wgmma_bf16(d, a, b, 1);
    else
        ptx::wgmma_bf16_kn(d, a, b, 1);
}

template <typename T, class Tile, bool kKMajor>
struct Consumer {
    static constexpr int kRegisters = Tile::kBlockN / 2; /* accumulators of a thread */
    static constexpr int kNone = -1;

    const GatherParams &p;
    Shared<Tile> &shared;
    Place<Tile> place;

    __device__ static int consumer() { return static_cast<int>(threadIdx.x) / kWarpgroup - 1; }

    /* Each warp for itself: the last of them frees the stage. */
    __device__ void release(int stage) {
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.empty[stage]);
    }

    __device__ void multiply(float (&d)[kRegisters]) {
        const char *a = shared.stages[place.stage], *b = a + Tile::kBytesA;
        constexpr int kAdvanceA = kWgmmaK * 2 / 16, kAdvanceB = kKMajor ? kAdvanceA : kWgmmaK * kSwizzleRowBytes / 16;
        const uint64_t descriptor_a = ptx::wgmma_descriptor(a + consumer() * kWgmmaM * kSwizzleRowBytes);
        const uint64_t descriptor_b =
            kKMajor ? ptx::wgmma_descriptor(b) : ptx::wgmma_descriptor(b, kBlockK * kSwizzleRowBytes);
        ptx::fence_proxy_async(); /* the rows of A came through the ordinary path, wgmma reads through another */
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockK / kWgmmaK; ++k)
            wgmma<T, kKMajor>(d, descriptor_a + k * kAdvanceA, descriptor_b + k * kAdvanceB);
        ptx::wgmma_commit();
    }

    /* Multiplies until the end of the tile. One step stays in flight behind the one being issued; its stage is
     * released when the next is issued, or at a step that is passed over, which the producer may wait for. */
    __device__ void accumulate(float (&d)[kRegisters]) {
        int in_flight = kNone;
        uint32_t step;
        do {
            ptx::mbarrier_wait_parity(&shared.full[place.stage], place.parity);
            step = shared.step[place.stage];
            /* A vote, so that the compiler sees one branch for the whole warp: it would serialise wgmma otherwise. */
            const bool active = __any_sync(~0u, step >> consumer() & 1);
            if (active) {
                multiply(d);
                ptx::wgmma_wait<1>();
            } else {
                ptx::wgmma_wait<0>();
                release(place.stage);
            }
            if (in_flight != kNone) release(in_flight);
            in_flight = active ? place.stage : kNone;
            place.advance();
        } while (step != kEndOfTile);
        ptx::wgmma_wait<0>(); /* nothing is in flight after a step without operands; the compiler cannot know */
        ptx::wgmma_hold(d);
    }

    /* The two rows of `out` whose accumulators this thread holds, eight places apart. */
    __device__ int64_t row_of(const Task<Tile> &task, int half) const {
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        return p.row_of(task.m0 + consumer() * kWgmmaM + warp * 16 + half * 8 + lane / 4);
    }

    __device__ void store_partials(const float (&d)[kRegisters], const Task<Tile> &task, const int64_t (&rows)[2]) {
        const int lane = threadIdx.x % 32;
        float *partials = p.partials + task.slice * p.rows * p.columns;
#pragma unroll
        for (int j = 0; j < Tile::kBlockN / 8; ++j) {
            const int n = task.n0 + 8 * j + lane % 4 * 2;
            if (n >= p.columns) continue; /* columns are a multiple of 8 */
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (rows[half] < 0) continue;
                *reinterpret_cast<float2 *>(partials + rows[half] * p.columns + n) =
                    make_float2(d[4 * j + 2 * half], d[4 * j + 2 * half + 1]);
            }
        }
    }

    /* Four groups of 8 columns at a time: the lanes of a quad exchange pairs of columns, so that each has 16 bytes. */
    __device__ void store(const float (&d)[kRegisters], const Task<Tile> &task, const int64_t (&rows)[2]) {
        const int lane = threadIdx.x % 32;
        const T *bias = static_cast<const T *>(p.bias);
        const bool aligned = reinterpret_cast<uintptr_t>(p.out) % kChunk == 0 && p.out_stride % 8 == 0;
#pragma unroll
        for (int j = 0; j < Tile::kBlockN / 8; j += 4) {
            uint32_t word[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int n = task.n0 + 8 * (j + i) + lane % 4 * 2;
                const bool biased = bias && n < p.columns;
                const float bias_x = biased ? to_float(bias[n]) : 0.0f, bias_y = biased ? to_float(bias[n + 1]) : 0.0f;
                const float *pair = &d[4 * (j + i)];
                word[0][i] = pack<T>(pair[0] + bias_x, pair[1] + bias_y);
                word[1][i] = pack<T>(pair[2] + bias_x, pair[3] + bias_y);
            }
            const int n = task.n0 + 8 * (j + lane % 4);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                transpose_quad(word[half], lane);
                if (rows[half] < 0 || n >= p.columns) continue;
                T *target = static_cast<T *>(p.out) + rows[half] * p.out_stride + n;
                if (aligned) {
                    *reinterpret_cast<uint4 *>(target) =
                        make_uint4(word[half][0], word[half][1], word[half][2], word[half][3]);
                } else {
                    uint16_t *bits = reinterpret_cast<uint16_t *>(target);
#pragma unroll
                    for (int e = 0; e < 8; ++e) bits[e] = static_cast<uint16_t>(word[half][e / 2] >> (e % 2 * 16));
                }
            }
        }
    }

    __device__ void run(int tasks, int slices) {
        for (int index = blockIdx.x; index < tasks; index += gridDim.x) {
            const Task<Tile> task(p, slices, index);
            float d[kRegisters];
#pragma unroll
            for (float &sum : d) sum = 0.0f;
            accumulate(d);
            const int64_t rows[2] = {row_of(task, 0), row_of(task, 1)};
            if (p.partials)
                store_partials(d, task, rows);
            else
                store(d, task, rows);
        }
    }
};

/* ---- kernel and launch ---- */

template <typename T, class Tile, bool kKMajor>
__global__ void __launch_bounds__(kThreads, Tile::kCtasPerSm)
    conv_gather_sm90_kernel(const GatherParams p, const __grid_constant__ CUtensorMap weight_map, int tasks,
                            int slices) {
    extern __shared__ __align__(kSwizzleAtomBytes) char dynamic[];
    Shared<Tile> &shared = *reinterpret_cast<Shared<Tile> *>(dynamic);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < Tile::kStages; ++stage) {
            /* Every producing thread for its rows, and one more arrival that announces the weights. */
            ptx::mbarrier_init(&shared.full[stage], kWarpgroup + 1);
            ptx::mbarrier_init(&shared.empty[stage], kConsumerWarps);
        }
        for (uint64_t &barrier : shared.map_full) ptx::mbarrier_init(&barrier, kWarpgroup);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < kWarpgroup) {
        ptx::setmaxnreg_dec<Tile::kProducerRegisters>();
        Producer<Tile, kKMajor>{p, weight_map, slices, static_cast<uint32_t>(2 * p.in_stride), shared, {}}.run(tasks);
    } else {
        ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
        Consumer<T, Tile, kKMajor>{p, shared, {}}.run(tasks, slices);
    }
}

template <typename T, class Tile, bool kKMajor>
fg_status launch(GatherParams p, const fg_plan &plan, int num_sms, cudaStream_t stream, fg_error *error) {
    p.column_tiles = ceil_div(p.columns, Tile::kBlockN);
    const int64_t tasks = ceil_div<int64_t>(p.rows, kBlockM) * p.column_tiles * plan.split_k;
    const int64_t resident = static_cast<int64_t>(num_sms) * Tile::kCtasPerSm;
    if (tasks > INT32_MAX - resident) /* a CTA's next task is one grid on */
        return fg_fail(error, FG_ERROR_VALUE, "out: (%lld, %d) needs %lld tiles, more than one launch can have",
                       static_cast<long long>(p.rows), p.columns, static_cast<long long>(tasks));
    CUtensorMap weight_map; /* coordinates: byte of a row, offset, row */
    const int64_t rows = kKMajor ? p.columns : p.depth;
    const int64_t row_bytes = static_cast<int64_t>(sizeof(T)) * (kKMajor ? p.depth : p.columns);
    const TensorRows weight = {p.weight, row_bytes, p.volume, rows, row_bytes, p.volume * row_bytes};
    const fg_status status = encode_tensor_map(&weight_map, weight, 1, kKMajor ? Tile::kBlockN : kBlockK, error);
    if (status != FG_OK) return status;

    const auto kernel = conv_gather_sm90_kernel<T, Tile, kKMajor>;
    constexpr int kSharedBytes = sizeof(Shared<Tile>);
    FG_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    const auto grid = static_cast<unsigned int>(tasks < resident ? tasks : resident);
    kernel<<<grid, kThreads, kSharedBytes, stream>>>(p, weight_map, static_cast<int>(tasks), plan.split_k);
    FG_CUDA(cudaGetLastError());
    if (p.partials)
        FG_CUDA(reduce_partials<T>(p.partials, plan.split_k, p.rows, p.columns, static_cast<const T *>(p.bias),
                                   static_cast<T *>(p.out), p.out_stride, stream));
    return FG_OK;
}

/* The tiles of fg_plan_conv. */
template <typename T, bool kKMajor>
fg_status launch_tile(const GatherParams &p, const fg_plan &plan, int num_sms, cudaStream_t stream, fg_error *error) {
    if (plan.block_n == 256) return launch<T, Tile<256, 4, 1>, kKMajor>(p, plan, num_sms, stream, error);
    if (plan.block_n == 128) return launch<T, Tile<128, 5, 1>, kKMajor>(p, plan, num_sms, stream, error);
    return launch<T, Tile<64, 3, 2>, kKMajor>(p, plan, num_sms, stream, error);
}

}  // namespace

fg_status launch_gather_sm90(GatherParams p, const fg_plan &plan, fg_dtype dtype, bool weight_is_k_major, int num_sms,
                             cudaStream_t stream, fg_error *error) {
    if (dtype == FG_FLOAT16)
        return weight_is_k_major ? launch_tile<__half, true>(p, plan, num_sms, stream, error)
                                 : launch_tile<__half, false>(p, plan, num_sms, stream, error);
    return weight_is_k_major ? launch_tile<__nv_bfloat16, true>(p, plan, num_sms, stream, error)
                             : launch_tile<__nv_bfloat16, false>(p, plan, num_sms, stream, error);
}

}  // namespace flexgemm
