/*
 * Weight gradient of sparse convolution on Hopper, 16-bit types, by segments of rows that lie near each other
 * (segment.h): the sum of conv_wgrad.cu,
 *
 *     grad_weight[co, v, ci] = sum_m grad_out[m, co] * feats[map[v, m], ci],
 *
 * for which the input rows of a segment are brought into shared memory once for a group of offsets, and not for each
 * pair of row and offset. A CTA has one task: a group of offsets, a block of input and one of output channels, and a
 * slice of the segments. Its sums stay in registers from the first segment to the last; what passes by are tiles of 64
 * rows of grad_out.
 *
 *     gatherers    two warps, input rows of the next segment by 16-byte cp.async, as far as there is room
 *     bringers     two warps, tiles of grad_out and their places by 16-byte cp.async
 *     3 consumers  warpgroups, which divide the offsets; those at which a tile has no neighbours are skipped
 *
 * A product is 64 input channels x 64 rows x the output channels: wgmma takes feats from registers, where ldmatrix puts
 * 8 rows at a time, transposed, from wherever they lie, and grad_out from shared memory. Where input channels are few,
 * a product is of several offsets: each warp has 16 channels of one of them.
 *
 * A segment that reads more rows than fit has its tiles brought one at a time, at each offset a row for each of theirs.
 *
 * Zeros stand for missing neighbours, so that a row of grad_out that is not finite makes NaN at all offsets of its
 * tile. A task that has NaN is done again, one offset at a time, without the rows that have no neighbour there.
 *
 * Slices meet as float32 partial sums in the workspace and are added in a fixed order: the same bits every time.
 */
#include <algorithm>
#include <type_traits>

#include "conv_wgrad_sums_sm90.cuh"
#include "ptx.cuh"
#include "ring.cuh"
#include "segment_pool_sm90.cuh"

namespace flexgemm {
namespace {

using namespace wgrad;

constexpr int kConsumers = 3;
constexpr int kThreads = (1 + kConsumers) * ptx::kWarpgroup;
constexpr int kBringers = 2, kGatherers = 2; /* warps of the first warpgroup */
constexpr int kTileRows = FG_SEGMENT_TILE, kTilePlacesBytes = kTileRows * 2, kTileWords = kTileRows / 2;
constexpr int kRowBytes = 128, kBlockBytes = kTileRows * kRowBytes; /* 64 output channels of a tile */
static_assert(kBringers * 32 == kTileRows, "a row for each lane");

/* Output channels of a task, input channels of each offset. */
template <int kBlockN_, int kDepth_>
struct SegmentTile {
    static constexpr int kBlockN = kBlockN_, kDepth = kDepth_;
    static constexpr int kPacked = 64 / kDepth; /* offsets of a product */
    static constexpr int kSums = kBlockN / 2;   /* of a thread in each product */
    /* Of a consumer: what registers hold, no more than there can be offsets. */
    static constexpr int kProducts =
        std::min(kBlockN == 128 ? 2 : 96 / kSums, ceil_div<int>(FG_SEGMENT_VOLUME, kConsumers *kPacked));
    static constexpr int kOffsets = kConsumers * kProducts * kPacked;          /* of a group, at most */
    using Pool = SegmentPool<2 * kDepth, true, kGatherers, 1472>;              /* as there is room */
    static constexpr int kStages = kBlockN == 128 ? 2 : kBlockN == 64 ? 4 : 3; /* as there is room */
    static constexpr int kGradBytes = ceil_div(kBlockN, 64) * kBlockBytes;
    static constexpr int kConsumerRegisters = kBlockN == 128 ? 160 : 152;
    static constexpr int kProducerRegisters = kBlockN == 128 ? 32 : 56;
    static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                      (1 + kConsumers) * ptx::registers_at_launch(kThreads),
                  "warpgroups divide the registers of the launch");
    static_assert((1 + kOffsets * kTileRows) * Pool::kInputBytes <= Pool::kBytes,
                  "a tile that is brought by itself fits");
};

/* The work of a CTA, in shared memory: it is needed rarely, and registers are few. Tasks of a slice run side by side
 * and read the same segments. */
template <class Tile>
struct Task {
    int slice, segments, ci0, co0;
    int offset[Tile::kOffsets]; /* of the group; the volume or more for none */
    uint32_t offsets;           /* a bit for each */

    __host__ __device__ static int groups_of(const WgradParams &p) { return ceil_div(p.volume, Tile::kOffsets); }

    /* One warp. Offsets are dealt out to groups along the diagonals of the kernel: with 27 offsets each of three groups
     * has corners, edges and faces, and about as many neighbours. */
    __device__ void init(const WgradParams &p, int index, int lane) {
        const int groups = groups_of(p), ci_blocks = ceil_div(p.ci, Tile::kDepth);
        const int co_blocks = ceil_div(p.co, Tile::kBlockN), group = index % groups;
        uint32_t bits = 0;
        for (int i = lane; i < Tile::kOffsets; i += 32) {
            const int v = i * groups + (group + (groups - 1) * (i + i / groups)) % groups;
            offset[i] = v;
            if (v < p.volume) bits |= 1u << v;
        }
        bits = __reduce_or_sync(~0u, bits);
        if (lane != 0) return;
        offsets = bits;
        co0 = index / groups % co_blocks * Tile::kBlockN;
        ci0 = index / groups / co_blocks % ci_blocks * Tile::kDepth;
        slice = index / groups / co_blocks / ci_blocks;
        segments = static_cast<int>(ceil_div<int64_t>(p.rows, fg_segment_rows(p.segment_tiles)));
    }

    __device__ bool has(int i, uint32_t offsets) const { return offset[i] < 32 && offsets >> offset[i] & 1; }
};

template <class Tile>
struct Shared {
    alignas(1024) char grad_out[Tile::kStages][Tile::kGradBytes];
    typename Tile::Pool pool;
    char places[Tile::kStages][Tile::kOffsets * kTilePlacesBytes];
    Task<Tile> task;
    alignas(8) uint64_t full[Tile::kStages];
    uint64_t empty[Tile::kStages];
    uint64_t first_ended; /* the first pass, of all threads */
    int spoiled;          /* some sum of it is NaN */
};

/* A segment's record. */
struct Record {
    const WgradParams &p;
    const int32_t *const words;

    __device__ Record(const WgradParams &p, int segment)
        : p(p), words(p.segments + segment * fg_segment_words(p.segment_tiles, p.volume)) {}

    /* The places in use, or none: the segment is brought tile by tile. */
    __device__ int places() const { return max(0, min(words[0], fg_segment_places(p.segment_tiles))); }
    __device__ const int32_t *masks() const { return words + 1; }
    __device__ int32_t row(int tile, int in_tile) const { return words[FG_SEGMENT_HEAD + tile * kTileRows + in_tile]; }
};

/* What the map says of a row, whatever it is. */
__device__ __forceinline__ uint32_t input_of(const WgradParams &p, int v, int32_t row) {
    const bool exists = v < p.volume && static_cast<uint32_t>(row) < static_cast<uint64_t>(p.rows);
    return exists ? static_cast<uint32_t>(p.map[v * p.rows + row]) : ~0u;
}

/* Calls pass(bits of the offsets to work on, whether it is the first): of all, and where that made NaN, one by one. */
template <class Tile, class Pass>
__device__ __forceinline__ void every_pass(Shared<Tile> &shared, const Pass &pass) {
    uint32_t offsets = shared.task.offsets, later = 0;
    for (bool first = true; offsets; first = false) {
        pass(offsets, first);
        if (first) {
            ptx::mbarrier_arrive(&shared.first_ended);
            ptx::mbarrier_wait_parity(&shared.first_ended, 0);
            later = __any_sync(~0u, shared.spoiled) ? shared.task.offsets : 0;
        }
        offsets = later & -later;
        later &= later - 1;
    }
}

/* ---- tiles ---- */

/* A warp, which brings half of the rows of each tile. */
template <typename T, class Tile>
struct Bringer {
    const WgradParams &p;
    Shared<Tile> &shared;
    const int warp, lane;
    RingPosition<Tile::kStages> place;

    /* Rows of the map, one of each lane; any that is not one is zeros. */
    __device__ void copy_grad_out(uint32_t rows) const {
        const int lane = ptx::opaque(this->lane);                        /* registers are few */
        constexpr int kChunks = Tile::kBlockN / 8, kRows = 32 / kChunks; /* of a row; rows that a warp copies at once */
        static_assert(8 % kRows == 0, "they are swizzled alike, but for a bit or two");
        const int chunk = lane % kChunks, first = lane / kChunks, co = shared.task.co0 + chunk * 8;
        const auto grad_out = reinterpret_cast<uint64_t>(static_cast<const T *>(p.grad_out) + co);
        const auto row_bytes = static_cast<uint32_t>(sizeof(T) * p.grad_stride);
        const auto all_rows = static_cast<uint32_t>(co < p.co ? min(p.rows, int64_t{INT32_MAX}) : 0);
        char *const block = shared.grad_out[place.slot] + chunk / 8 * kBlockBytes + (warp * 32 + first) * kRowBytes;
#pragma unroll kRows / 2
        for (int eight = 0; eight < 32; eight += 8) {
#pragma unroll
            for (int i = 0; i < 8; i += kRows) {
                const uint32_t row = __shfl_sync(~0u, rows, eight + i + first);
                ptx::cp_async_16_or_zeros(block + (eight + i) * kRowBytes + (chunk % 8 ^ first ^ i) * 16,
                                          reinterpret_cast<const void *>(grad_out + uint64_t{row} * row_bytes),
                                          row >= all_rows);
            }
        }
    }

    /* Of the group's offsets in turn. Of those that are not worked on all neighbours are missing. */
    __device__ void copy_places(const Record &record, int tile, uint32_t offsets) const {
        const int lane = ptx::opaque(this->lane), chunk = lane % 8;
        const int32_t *const places = record.words + fg_segment_places_at(p.segment_tiles) + chunk * 4;
#pragma unroll 1
        for (int i = warp * 4 + lane / 8; i < Tile::kOffsets; i += kBringers * 4) {
            const bool has = shared.task.has(i, offsets);
            const int v = has ? shared.task.offset[i] : 0;
            ptx::cp_async_16_or_zeros(shared.places[place.slot] + i * kTilePlacesBytes + chunk * 16,
                                      places + (v * p.segment_tiles + tile) * kTileWords, !has);
        }
    }
    /* As Gatherer has them where a tile is brought by itself. */
    __device__ void make_places(uint32_t offsets) const {
        auto *const words = reinterpret_cast<uint32_t *>(shared.places[place.slot]);
#pragma unroll 1
        for (int i = warp; i < Tile::kOffsets; i += kBringers) {
            const auto row = static_cast<uint32_t>(1 + i * kTileRows + lane / 8 * 16 + lane % 8);
            words[i * kTileWords + lane] = shared.task.has(i, offsets) ? row | (row + 8) << 16 : 0;
        }
        __syncwarp();
    }

    __device__ void pass(uint32_t offsets) {
        const bool one = (offsets & (offsets - 1)) == 0;
        const int v = __ffs(static_cast<int>(offsets)) - 1;
        for (int segment = shared.task.slice; segment < shared.task.segments; segment += p.phases) {
            const bool whole = Record(p, segment).places() > 0;
            const uint32_t mask = lane < p.segment_tiles ? static_cast<uint32_t>(Record(p, segment).masks()[lane]) : 0;
            const auto row_of = [&](uint32_t tiles) {
                const int tile = tiles ? __ffs(static_cast<int>(tiles)) - 1 : 0;
                return static_cast<uint32_t>(Record(p, ptx::opaque(segment)).row(tile, warp * 32 + lane));
            };
            uint32_t tiles = __ballot_sync(~0u, (mask & offsets) != 0), next = row_of(tiles);
            while (tiles) {
                const int tile = __ffs(static_cast<int>(tiles)) - 1;
                uint32_t row = next;
                tiles &= tiles - 1;
                next = row_of(tiles);
                if (one && input_of(p, v, static_cast<int32_t>(row)) >= p.in_rows) row = ~0u;
                ptx::mbarrier_wait_parity(&shared.empty[place.slot], place.parity ^ 1);
                copy_grad_out(row);
                if (whole)
                    copy_places(Record(p, ptx::opaque(segment)), tile, offsets);
                else
                    make_places(offsets);
                if (lane == 0) ptx::mbarrier_arrive(&shared.full[place.slot]);
                ptx::mbarrier_arrive_after_cp_async(&shared.full[place.slot]);
                place.advance();
            }
        }
    }

    __device__ void run() {
        every_pass(shared, [this](uint32_t offsets, bool) { pass(offsets); });
        ptx::cp_async_commit(); /* only groups can be waited for */
        ptx::cp_async_wait<0>();
    }
};

/* ---- input rows ---- */

template <typename T, class Tile>
struct Gatherer {
    const WgradParams &p;
    Shared<Tile> &shared;
    PoolGatherer<typename Tile::Pool> gatherer;

    __device__ void pass() {
        const Task<Tile> &task = shared.task;
        const PoolSource feats(static_cast<const T *>(p.feats), p.feats_stride, p.in_rows,
                               task.ci0 + gatherer.channel(), p.ci);
        for (int segment = task.slice; segment < task.segments; segment += p.phases) {
            const Record record(p, segment);
            const int count = record.places();
            if (count > 0) {
                const int32_t *const inputs = record.words + fg_segment_inputs_at(p.segment_tiles);
                gatherer.bring(feats, record.masks(), true, count,
                               [inputs](int place) { return static_cast<uint32_t>(inputs[place]); });
                continue;
            }
            for (int tile = 0; tile < p.segment_tiles; ++tile)
                gatherer.bring(feats, record.masks(), false, 1 + Tile::kOffsets * kTileRows, [&](int place) {
                    const int i = (place - 1) / kTileRows, in_tile = (place - 1) % kTileRows;
                    return place == 0 ? ~0u : input_of(p, task.offset[i], record.row(tile, in_tile));
                });
        }
    }

    __device__ void run() {
        every_pass(shared, [this](uint32_t, bool) { pass(); });
        gatherer.finish();
    }
};

/* ---- products ---- */

template <typename T, int kSums>
__device__ __forceinline__ void wgmma(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b) {
    if constexpr (std::is_same<T, __half>::value)
        ptx::wgmma_f16_kn_from_registers(d, a, b, 1);
    else
        ptx::wgmma_bf16_kn_from_registers(d, a, b, 1);
}

template <typename T, class Tile>
struct Consumer {
    static constexpr int kSteps = kTileRows / 16; /* wgmma of a product */
    using Sums = float[Tile::kProducts][Tile::kSums];

    const WgradParams &p;
    Shared<Tile> &shared;
    const int consumer, warp, lane; /* warp of the warpgroup */
    RingPosition<Tile::kStages> place;
    RingPosition<2> resident;

    /* Which of the group's offsets this warp has in a product, and its first channel. */
    __device__ int offset_of(int product) const {
        return (consumer + product * kConsumers) * Tile::kPacked + warp / (4 / Tile::kPacked);
    }
    __device__ int first_channel() const { return warp % (4 / Tile::kPacked) * 16; }

    /* All offsets of a product, of those to work on. */
    __device__ uint32_t bits_of(int product, uint32_t offsets) const {
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < Tile::kPacked; ++i) {
            const int v = shared.task.offset[(consumer + product * kConsumers) * Tile::kPacked + i];
            if (v < p.volume) bits |= 1u << v;
        }
        return bits & offsets;
    }

    /* Adds to d a product with the tile of the stage. A lane gives ldmatrix the place of one row of 16, and 8 channels
     * of the 16 of its warp. */
    __device__ __forceinline__ void multiply(float (&d)[Tile::kSums], int product, uint32_t begin,
                                             uint64_t grad_out) const {
        constexpr int kAtOnce = Tile::kBlockN == 128 ? 1 : kSteps; /* as registers allow */
        const auto *const places =
            reinterpret_cast<const uint16_t *>(shared.places[place.slot] + offset_of(product) * kTilePlacesBytes) +
            lane % 8 * 2 + lane / 16;
        const uint32_t chunk = first_channel() * 2 + lane / 8 % 2 * 16;
        const char *rows[kSteps];
#pragma unroll
        for (int k = 0; k < kSteps; ++k) rows[k] = shared.pool.inputs + (Tile::Pool::at(begin, places[k * 16]) ^ chunk);
#pragma unroll
        for (int first = 0; first < kSteps; first += kAtOnce) {
            uint32_t a[kAtOnce][4];
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) ptx::ldmatrix_x4_trans(a[k], rows[first + k]);
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k)
                wgmma<T>(d, a[k], ptx::wgmma_advance(grad_out, (first + k) * 16 * kRowBytes));
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>(); /* the other warpgroups keep the tensor cores busy */
#pragma unroll
            for (auto &operand : a) ptx::wgmma_hold(operand);
            ptx::wgmma_hold(d);
        }
    }

    __device__ __forceinline__ void accumulate(Sums &d, uint32_t offsets) {
        const uint64_t descriptor = ptx::wgmma_descriptor(shared.grad_out[0], kBlockBytes);
        uint32_t bits[Tile::kProducts];
#pragma unroll
        for (int i = 0; i < Tile::kProducts; ++i) bits[i] = bits_of(i, offsets);
        for (int segment = shared.task.slice; segment < shared.task.segments; segment += p.phases) {
            bool whole = false; /* what is resident is */
            for (int tile = 0; tile < p.segment_tiles; ++tile) {
                const auto &here = shared.pool.residents[resident.slot];
                /* Votes, so that the compiler sees branches of whole warps: it would serialise wgmma otherwise. */
                if (!whole) {
                    ptx::mbarrier_wait_parity(&shared.pool.arrived[resident.slot], resident.parity);
                    whole = __any_sync(~0u, here.whole);
                }
                const uint32_t mask = here.masks[tile], begin = here.begin;
                if (__any_sync(~0u, (mask & offsets) != 0)) {
                    ptx::mbarrier_wait_parity(&shared.full[place.slot], place.parity);
                    ptx::fence_proxy_async(); /* rows came through the ordinary path, wgmma reads through another */
                    const uint64_t grad_out = ptx::wgmma_advance(descriptor, place.slot * Tile::kGradBytes);
#pragma unroll
                    for (int i = 0; i < Tile::kProducts; ++i)
                        if (__any_sync(~0u, (mask & bits[i]) != 0)) multiply(d[i], i, begin, grad_out);
                    ptx::mbarrier_arrive(&shared.empty[place.slot]); /* all that read it hand it back */
                    place.advance();
                }
                if (tile == p.segment_tiles - 1 || !whole) {
                    ptx::mbarrier_arrive(&shared.pool.left[resident.slot]);
                    resident.advance();
                }
            }
        }
    }

    /* Into the workspace, those of `offsets`; eight threads side by side have eight input channels. */
    __device__ void store(const Sums &d, uint32_t offsets) const {
        const int64_t pitch = static_cast<int64_t>(p.volume) * p.ci;
        float *const sums = p.partials + shared.task.slice * partial_pitch(p);
        const int co0 = shared.task.co0 + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < Tile::kProducts; ++i) {
            if (!shared.task.has(offset_of(i), offsets)) continue;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int ci = shared.task.ci0 + first_channel() + half * 8 + lane / 4;
                if (ci >= p.ci) continue;
                float *const column = sums + static_cast<int64_t>(shared.task.offset[offset_of(i)]) * p.ci + ci;
#pragma unroll
                for (int j = 0; j < Tile::kSums / 4; ++j) {
                    const int co = co0 + 8 * j;
                    if (co >= p.co) break; /* channels are a multiple of 8 */
                    column[co * pitch] = d[i][4 * j + 2 * half];
                    column[(co + 1) * pitch] = d[i][4 * j + 2 * half + 1];
                }
            }
        }
    }

    __device__ void pass(uint32_t offsets, bool first) {
        Sums d = {};
        accumulate(d, offsets);
        bool found = false;
#pragma unroll
        for (int i = 0; i < Tile::kProducts; ++i)
#pragma unroll
            for (const float sum : d[i]) found |= isnan(sum);
        if (first && found) shared.spoiled = 1; /* threads that are late still read it during the second */
        store(d, offsets);
    }

    __device__ void run() {
        every_pass(shared, [this](uint32_t offsets, bool first) { pass(offsets, first); });
    }
};

/* ---- kernel and launch ---- */

/* The first `bias_tasks` CTAs sum the bias gradient. */
template <typename T, class Tile>
__global__ void __launch_bounds__(kThreads, 1)
    conv_wgrad_segment_sm90_kernel(const __grid_constant__ WgradParams p, int bias_tasks) {
    extern __shared__ __align__(1024) char dynamic[];
    if (!p.concurrent) ptx::wait_for_earlier_kernels();
    if (static_cast<int>(blockIdx.x) < bias_tasks) {
        sum_bias<T, 16 / sizeof(T), kThreads>(p, static_cast<int>(blockIdx.x), dynamic);
        ptx::wait_for_earlier_kernels();
        return;
    }
    auto &shared = *reinterpret_cast<Shared<Tile> *>(dynamic);
    if (threadIdx.x == 0) {
        /* Every copying thread for its pieces, and one more arrival that announces what came without copies. */
        for (uint64_t &barrier : shared.full) ptx::mbarrier_init(&barrier, kBringers * (32 + 1));
        for (uint64_t &barrier : shared.empty) ptx::mbarrier_init(&barrier, kConsumers * ptx::kWarpgroup);
        ptx::mbarrier_init(&shared.first_ended, kThreads);
        shared.pool.init(kConsumers * ptx::kWarpgroup);
        ptx::fence_mbarrier_init();
        shared.spoiled = 0;
    }
    if (threadIdx.x < 32) shared.task.init(p, static_cast<int>(blockIdx.x) - bias_tasks, static_cast<int>(threadIdx.x));
    __syncthreads();
    /* Held, or each product would read threadIdx again. */
    const int warp = ptx::opaque(static_cast<int>(threadIdx.x / 32)),
              lane = ptx::opaque(static_cast<int>(threadIdx.x % 32));
    if (warp < ptx::kWarpgroup / 32) {
        ptx::setmaxnreg_dec<Tile::kProducerRegisters>();
        if (warp < kBringers)
            Bringer<T, Tile>{p, shared, warp, lane, {}}.run();
        else
            Gatherer<T, Tile>{p, shared, {shared.pool, warp - kBringers, lane}}.run();
    } else {
        ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
        Consumer<T, Tile>{p, shared, warp / 4 - 1, warp % 4, lane, {}, {}}.run();
    }
    ptx::wait_for_earlier_kernels(); /* what follows takes this kernel's end for theirs as well */
}

template <typename T, class Tile>
fg_status launch(const WgradParams &p, const fg_plan &plan, cudaStream_t stream, fg_error *error) {
    constexpr auto kernel = conv_wgrad_segment_sm90_kernel<T, Tile>;
    constexpr int kSharedBytes = sizeof(Shared<Tile>);
    static_assert(kSharedBytes <= 227 * 1024, "what a block may have");
    const int64_t blocks = static_cast<int64_t>(ceil_div(p.ci, Tile::kDepth)) * ceil_div(p.co, Tile::kBlockN);
    const int64_t tasks = blocks * Task<Tile>::groups_of(p) * plan.split_k;
    const int64_t bias_tasks = bias_tasks_of<T>(p, plan.split_k);
    if (tasks + bias_tasks > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "grad_weight: (%d, %d, %d) needs more tiles than one launch can have",
                       p.co, p.volume, p.ci);
    fg_status status = allow_shared<kernel>(kSharedBytes, error);
    if (status != FG_OK) return status;
    status = launch_early(kernel, static_cast<unsigned int>(tasks + bias_tasks), kThreads, kSharedBytes, 90, stream,
                          error, p, static_cast<int>(bias_tasks));
    return status != FG_OK ? status : reduce_gradients<T>(p, plan.split_k, stream, error);
}

/* The tiles of fg_plan_conv_wgrad. */
template <typename T, int kBlockN>
fg_status launch_depth(const WgradParams &p, const fg_plan &plan, cudaStream_t stream, fg_error *error) {
    if (plan.block_n == 16) return launch<T, SegmentTile<kBlockN, 16>>(p, plan, stream, error);
    if (plan.block_n == 32) return launch<T, SegmentTile<kBlockN, 32>>(p, plan, stream, error);
    return launch<T, SegmentTile<kBlockN, 64>>(p, plan, stream, error);
}

template <typename T>
fg_status launch_tile(const WgradParams &p, const fg_plan &plan, cudaStream_t stream, fg_error *error) {
    if (plan.block_m == 32) return launch_depth<T, 32>(p, plan, stream, error);
    if (plan.block_m == 64) return launch_depth<T, 64>(p, plan, stream, error);
    return launch<T, SegmentTile<128, 64>>(p, plan, stream, error);
}

}  // namespace

fg_status launch_wgrad_segments_sm90(const WgradParams &p, const fg_plan &plan, fg_dtype dtype, cudaStream_t stream,
                                     fg_error *error) {
    return dtype == FG_FLOAT16 ? launch_tile<__half>(p, plan, stream, error)
                               : launch_tile<__nv_bfloat16>(p, plan, stream, error);
}

}  // namespace flexgemm
