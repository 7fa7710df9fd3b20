/*
 * Forward and input gradient of sparse convolution on Hopper, 16-bit types, by segments of rows that lie near each
 * other (segment.h): the input rows that a segment reads are brought into shared memory once, and not for each pair of
 * row and offset. There each thread reads what it holds of wgmma's first operand, where the segment's record says. What
 * passes by are the weights and the places, a step of 64 channels of one offset or of as many offsets as fill it.
 *
 *     gatherers    three warps, rows of the next segment by 16-byte cp.async, as far as there is room
 *     bringer      one thread, weights and places by TMA
 *     4 consumers  warpgroups with a tile of 64 rows each; steps at which a tile has no neighbours are skipped
 *
 * A thread reads 8 channels of a row at once, wherever the row lies. They are not those that wgmma's layout gives the
 * thread, but the order of the reduction is free as long as both operands have the same: the weights are laid out for
 * it beforehand, in the workspace, which makes both passes the same as well.
 */
#include <algorithm>
#include <type_traits>

#include "activation.cuh"
#include "conv_rows_sm90.cuh"
#include "ptx.cuh"
#include "ring.cuh"
#include "segment_tile_sm90.cuh"
#include "tensor_map.cuh"

namespace flexgemm {
namespace {

constexpr int kConsumers = FG_SEGMENT_TILES, kConsumerWarps = 4 * kConsumers;
constexpr int kThreads = (1 + kConsumers) * ptx::kWarpgroup;
constexpr int kTilePlacesBytes = FG_SEGMENT_TILE * 2;
constexpr int kBiasBarrier = 1; /* named barriers, one for each consumer */
constexpr int kProducerRegisters = 32, kConsumerRegisters = 112;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                  (1 + kConsumers) * ptx::registers_at_launch(kThreads, 1),
              "warpgroups divide the registers of the launch");

template <class Tile>
struct SegmentShared {
    struct alignas(1024) Stage {
        char weights[Tile::kWeightBytes];
        char places[Tile::kPacked * FG_SEGMENT_TILES * kTilePlacesBytes];
    };
    Stage stages[Tile::kStages];
    typename Tile::Pool pool;
    KeptBias<Tile::kBlockN> bias[kConsumers];
    uint64_t full[Tile::kStages], empty[Tile::kStages];
};

/* Segments and columns, one after another; those of a CTA are a grid apart. */
template <class Tile>
struct Work {
    const GatherParams &p;
    const int tasks;
    int task = blockIdx.x;

    __device__ bool exists() const { return task < tasks; }
    __device__ void advance() { task += gridDim.x; }
    __device__ int column_tile() const { return task % p.column_tiles; }
    __device__ int segment() const { return task / p.column_tiles; }
    __device__ const int32_t *record() const {
        return p.segments + segment() * fg_segment_words(p.segment_tiles, p.volume);
    }
};

/* The steps at which a mask has offsets. */
template <class Tile>
__device__ __forceinline__ bool has_step(uint32_t mask, int step) {
    return mask >> (step * Tile::kPacked) & ((uint64_t{1} << Tile::kPacked) - 1);
}

/* ---- weights and places: one thread ---- */

template <class Tile>
__device__ void bring_steps(SegmentShared<Tile> &shared, const CUtensorMap &weight_map, const CUtensorMap &place_map,
                            const GatherParams &p, int tasks) {
    const int steps = Tile::steps(p), blocks = Tile::depth_blocks(p), rows = Tile::kPacked * p.segment_tiles;
    RingPosition<Tile::kStages> place;
    for (Work<Tile> work{p, tasks}; work.exists(); work.advance()) {
        const int32_t *const head = work.record();
        uint32_t mask = 0;
#pragma unroll
        for (int t = 0; t < FG_SEGMENT_TILES; ++t) mask |= static_cast<uint32_t>(head[1 + t]);
        mask &= ~0u >> (32 - p.volume); /* as consumers do, or they would wait for each other on forged records */
        for (int block = 0; block < blocks; ++block) {
            for (int step = 0; step < steps; ++step) {
                if (!has_step<Tile>(mask, step)) continue;
                auto &stage = shared.stages[place.slot];
                uint64_t *const full = &shared.full[place.slot];
                ptx::mbarrier_wait_parity(&shared.empty[place.slot], place.parity ^ 1);
                ptx::mbarrier_arrive_expect_tx(full, Tile::kWeightBytes + rows * kTilePlacesBytes);
                ptx::tma_load_3d(stage.weights, &weight_map, full, 0, 0,
                                 (work.column_tile() * blocks + block) * steps + step);
                ptx::tma_load_3d(stage.places, &place_map, full, 0, step * rows, work.segment());
                place.advance();
            }
        }
    }
}

/* ---- rows ---- */

/* Of a segment that reads more rows than there are places nothing is brought: consumers read them from memory. */
template <typename T, class Tile>
__device__ void bring_rows(PoolGatherer<typename Tile::Pool> gatherer, const GatherParams &p, int tasks) {
    for (Work<Tile> work{p, tasks}; work.exists(); work.advance()) {
        const int32_t *const record = work.record(), *const inputs = record + fg_segment_inputs_at(p.segment_tiles);
        const int count = max(0, min(__ldcg(record), fg_segment_places(p.segment_tiles)));
        for (int k = 0; k < p.depth; k += Tile::kDepth) {
            const PoolSource source(static_cast<const T *>(p.in), p.in_stride, p.in_rows, k + gatherer.channel(),
                                    p.depth);
            gatherer.bring(source, record + 1, count > 0, count,
                           [inputs](int place) { return static_cast<uint32_t>(__ldcg(inputs + place)); });
        }
    }
    gatherer.finish();
}

/* ---- products ---- */

template <typename T, int kRegisters>
__device__ __forceinline__ void wgmma(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b) {
    if constexpr (std::is_same<T, __half>::value)
        ptx::wgmma_f16_from_registers(d, a, b, 1);
    else
        ptx::wgmma_bf16_from_registers(d, a, b, 1);
}

template <typename T, class Tile>
struct Consumer {
    SegmentShared<Tile> &shared;
    const GatherParams &p;
    const int warpgroup, warp, lane; /* warp of the warpgroup */
    const int tasks;
    static constexpr int kProducts = kStepDepth / 16; /* wgmma of a step */
    using Operands = uint32_t[kProducts][4];
    using Place = RingPosition<Tile::kStages>;

    /* The warpgroup's tile of a segment: each takes its turn at those with many neighbours. */
    __device__ int tile_of(int segment) const { return (warpgroup + segment) % kConsumers; }

    /* The row of the map and of `out` that is the upper or lower one of this thread's, -1 for none. */
    __device__ int32_t row_of(const int32_t *record, int tile, int half) const {
        const int in_segment = tile * FG_SEGMENT_TILE + warp * 16 + half * 8 + lane / 4;
        const int32_t row = tile < p.segment_tiles ? record[FG_SEGMENT_HEAD + in_segment] : -1;
        return row < p.rows ? row : -1;
    }

    /* What this thread holds of a row, 8 channels from 8 * (lane % 4) on and 8 that are 32 further; or 4 of 16. */
    struct Piece {
        uint32_t word[Tile::kDepth / 8];
    };
    /* Those of a tile's two rows, of each offset of a step. */
    struct Pieces {
        Piece upper[Tile::kPacked], lower[Tile::kPacked];
    };

    /* Where in a row this thread begins. Rows of 128 bytes all begin in the same bank: of each two rows one thread
     * begins with the second half. */
    __device__ bool begins_behind() const { return Tile::kDepth == 64 && lane & 4; }
    __device__ uint32_t first_byte() const {
        return static_cast<uint32_t>(lane % 4 * (Tile::kDepth == 16 ? 8 : 16) + (begins_behind() ? 64 : 0));
    }

    /* A row's piece by its first byte, 16 bytes each time or 8. */
    __device__ Piece piece_at(uint32_t byte) const {
        const char *const inputs = shared.pool.inputs;
        if constexpr (Tile::kDepth == 64) {
            const uint4 first = *reinterpret_cast<const uint4 *>(inputs + byte);
            const uint4 second = *reinterpret_cast<const uint4 *>(inputs + (byte ^ 64));
            return Piece{{first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w}};
        } else if constexpr (Tile::kDepth == 32) {
            const uint4 all = *reinterpret_cast<const uint4 *>(inputs + byte);
            return Piece{{all.x, all.y, all.z, all.w}};
        } else {
            const uint2 all = *reinterpret_cast<const uint2 *>(inputs + byte);
            return Piece{{all.x, all.y}};
        }
    }

    /* Where a stage has this thread's places, 128 bytes for each offset and tile, swizzled by TMA. */
    __device__ uint32_t first_place(int tile) const {
        const int word = warp * 8 + lane / 4;
        return static_cast<uint32_t>(tile * kTilePlacesBytes + (word / 4 ^ tile) * 16 + word % 4 * 4);
    }

    /* The tile's rows at a step; `begin` is this thread's first byte of the resident. */
    __device__ __forceinline__ Pieces fetch(const char *places, uint32_t first_place, uint32_t begin) const {
        Pieces pieces;
#pragma unroll
        for (int i = 0; i < Tile::kPacked; ++i) {
            const uint32_t tiles = i * p.segment_tiles; /* a power of two times i: its bits are not those of a tile */
            const auto both =
                *reinterpret_cast<const uint32_t *>(places + (first_place ^ tiles % 8 * 16) + tiles * kTilePlacesBytes);
            const uint2 bytes = Tile::Pool::at_both(begin, both);
            pieces.upper[i] = piece_at(bytes.x), pieces.lower[i] = piece_at(bytes.y);
        }
        return pieces;
    }

    /* The same of a segment that reads more rows than fit: from memory. */
    __device__ Piece piece_from_memory(int32_t row, int v, int k) const {
        Piece piece = {};
        const bool exists = row >= 0 && v < p.volume;
        const uint32_t input = exists ? static_cast<uint32_t>(p.map[v * p.rows + row]) : ~0u;
        if (input >= p.in_rows) return piece;
        const int channel = k + lane % 4 * (Tile::kDepth == 16 ? 4 : 8);
        const T *const in = static_cast<const T *>(p.in) + input * p.in_stride + channel;
        constexpr int kWords = Tile::kDepth == 16 ? 2 : 4; /* adjacent */
#pragma unroll
        for (int i = 0; i < Tile::kDepth / 8; i += kWords) {
            const int at = 8 * (begins_behind() ? 4 - i : i);
            if (channel + at >= p.depth) continue;
            const auto *words = reinterpret_cast<const uint2 *>(in + at);
#pragma unroll
            for (int j = 0; j < kWords; j += 2) {
                const uint2 two = words[j / 2];
                piece.word[i + j] = two.x, piece.word[i + j + 1] = two.y;
            }
        }
        return piece;
    }

    __device__ Pieces fetch_from_memory(const int32_t (&rows)[2], int first_offset, int k) const {
        Pieces pieces;
#pragma unroll
        for (int i = 0; i < Tile::kPacked; ++i) {
            pieces.upper[i] = piece_from_memory(rows[0], first_offset + i, k);
            pieces.lower[i] = piece_from_memory(rows[1], first_offset + i, k);
        }
        return pieces;
    }

    __device__ __forceinline__ void arrange(Operands &a, const Pieces &pieces) const {
        const auto word = [this](const Piece &piece, int i) {
            return Tile::kDepth == 64 && begins_behind() ? piece.word[i ^ 4] : piece.word[i];
        };
#pragma unroll
        for (int i = 0; i < kProducts; ++i) {
            constexpr int kOfOffset = kProducts / Tile::kPacked; /* products */
            const Piece &upper = pieces.upper[i / kOfOffset], &lower = pieces.lower[i / kOfOffset];
            const int first = i % kOfOffset * 2;
            a[i][0] = word(upper, first), a[i][1] = word(lower, first);
            a[i][2] = word(upper, first + 1), a[i][3] = word(lower, first + 1);
        }
    }

    /* The offsets of a mask by steps: a bit for each step that has any, that of its first offset. */
    static __device__ uint32_t steps_of(uint32_t mask) {
        if (Tile::kPacked == 1) return mask;
        if (Tile::kPacked == 2) return (mask | mask >> 1) & 0x55555555u;
        mask |= mask >> 1;
        return (mask | mask >> 2) & 0x11111111u;
    }

    using Sums = float[Tile::kBlockN / 2];

    __device__ __forceinline__ void begin_products(Sums &d, const Operands &a, uint64_t descriptor, int slot) const {
        const uint64_t weights = ptx::wgmma_advance(descriptor, slot * static_cast<int>(sizeof shared.stages[0]));
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kProducts; ++i) wgmma<T>(d, a[i], ptx::wgmma_advance(weights, i * 32));
        ptx::wgmma_commit();
    }

    static __device__ __forceinline__ void end_products(Sums &d, Operands &a) {
        ptx::wgmma_wait<0>();
#pragma unroll
        for (auto &operand : a) ptx::wgmma_hold(operand);
        ptx::wgmma_hold(d);
    }

    __device__ __forceinline__ void wait_for_stage(const Place &place) const {
        ptx::mbarrier_wait_parity(&shared.full[place.slot], place.parity);
    }
    __device__ __forceinline__ void leave_stage(Place &place) const {
        __syncwarp(); /* all have seen it full, also where there was nothing to do */
        if (lane == 0) ptx::mbarrier_arrive(&shared.empty[place.slot]);
        place.advance();
    }

    /* Leaves stages, a bit of `left` for each, up to the next one at which the tile has neighbours. */
    __device__ __forceinline__ bool find_step(Place &place, uint32_t &left, uint32_t mine) const {
        while (left && !(mine & left & -left)) {
            wait_for_stage(place);
            leave_stage(place);
            left &= left - 1;
        }
        return left != 0;
    }

    /* Adds up what is resident. While a step is multiplied the rows of the next one are fetched, unless the tile has no
     * neighbours there. */
    __device__ __forceinline__ void add(Sums &d, Place &place, uint64_t descriptor, int tile, uint32_t begin,
                                        uint32_t left, uint32_t mine) const {
        const uint32_t places = first_place(tile);
        const auto fetch_stage = [&](const Place &stage) {
            wait_for_stage(stage);
            return fetch(shared.stages[stage.slot].places, places, begin);
        };
        begin += first_byte();
        while (find_step(place, left, mine)) {
            Pieces pieces = fetch_stage(place);
            bool near;
            do {
                Operands a;
                arrange(a, pieces);
                begin_products(d, a, descriptor, place.slot);
                left &= left - 1;
                near = mine & left & -left;
                if (near) {
                    Place next = place;
                    next.advance();
                    pieces = fetch_stage(next);
                }
                end_products(d, a);
                leave_stage(place);
            } while (near);
        }
    }

    /* Adds up a segment that reads more rows than fit: they come from memory. */
    __device__ __forceinline__ void add_from_memory(Sums &d, Place &place, uint64_t descriptor, int tile,
                                                    const int32_t *record, uint32_t left, uint32_t mine, int k) const {
        const int32_t rows[2] = {row_of(record, tile, 0), row_of(record, tile, 1)};
        while (find_step(place, left, mine)) {
            wait_for_stage(place);
            Operands a;
            arrange(a, fetch_from_memory(rows, __ffs(static_cast<int>(left)) - 1, k));
            begin_products(d, a, descriptor, place.slot);
            end_products(d, a);
            leave_stage(place);
            left &= left - 1;
        }
    }

    __device__ void run() const {
        uint64_t descriptor = ptx::wgmma_descriptor(shared.stages[0].weights);
        ptx::wgmma_hold(descriptor);
        const uint32_t offsets = ~0u >> (32 - p.volume);
        Place place;
        RingPosition<2> resident;
        for (Work<Tile> work{p, tasks}; work.exists(); work.advance()) {
            const int tile = tile_of(work.segment());
            Sums d = {};
            for (int k = 0; k < p.depth; k += Tile::kDepth) {
                ptx::mbarrier_wait_parity(&shared.pool.arrived[resident.slot], resident.parity);
                const auto &here = shared.pool.residents[resident.slot];
                uint32_t all = 0;
#pragma unroll
                for (const uint32_t mask : here.masks) all |= mask;
                /* Reduced, so that the compiler sees branches of whole warps: it would serialise wgmma otherwise. */
                const uint32_t left = __reduce_or_sync(~0u, steps_of(all & offsets));
                const uint32_t mine = __reduce_or_sync(~0u, steps_of(here.masks[tile] & offsets));
                if (__any_sync(~0u, here.whole))
                    add(d, place, descriptor, tile, here.begin, left, mine);
                else
                    add_from_memory(d, place, descriptor, tile, work.record(), left, mine, k);
                ptx::mbarrier_arrive(&shared.pool.left[resident.slot]);
                resident.advance();
            }
            const int n0 = work.column_tile() * Tile::kBlockN;
            const int64_t rows[2] = {row_of(work.record(), tile, 0), row_of(work.record(), tile, 1)};
            add_rows<T>(d, bring_bias<T>(shared.bias[warpgroup], p, n0, kBiasBarrier + warpgroup), p, n0, rows);
            activate(d, p.epilogue.activation);
            store_rows<T>(d, p, n0, rows);
        }
    }
};

template <typename T, class Tile>
__global__ void __launch_bounds__(kThreads, 1)
    conv_segment_sm90_kernel(const GatherParams p, const __grid_constant__ CUtensorMap weight_map,
                             const __grid_constant__ CUtensorMap place_map, int tasks) {
    extern __shared__ __align__(1024) char dynamic[];
    ptx::let_next_kernel_begin(); /* the kernel in front did so when all in front of it had ended */
    auto &shared = *reinterpret_cast<SegmentShared<Tile> *>(dynamic);
    if (threadIdx.x == 0) {
        for (uint64_t &barrier : shared.full) ptx::mbarrier_init(&barrier, 1);
        for (uint64_t &barrier : shared.empty) ptx::mbarrier_init(&barrier, kConsumerWarps);
        for (auto &bias : shared.bias) bias.first_column = -1;
        shared.pool.init(kConsumers * ptx::kWarpgroup);
        ptx::fence_mbarrier_init();
        ptx::prefetch_tensor_map(&weight_map);
        ptx::prefetch_tensor_map(&place_map);
    }
    __syncthreads();
    /* Shuffled, or each step would read threadIdx again. */
    const auto kept = [](uint32_t value) { return static_cast<int>(__shfl_sync(~0u, value, threadIdx.x % 32)); };
    const int warp = kept(threadIdx.x / 32), lane = kept(threadIdx.x % 32);
    if (warp < ptx::kWarpgroup / 32) {
        ptx::setmaxnreg_dec<kProducerRegisters>();
        /* The kernel in front, which lays out the weights, lets this one begin when all in front of it have ended:
         * who gathers need not wait for it, but reads from L2, where their results are. */
        if (warp > 0) bring_rows<T, Tile>({shared.pool, warp - 1, lane}, p, tasks);
        ptx::wait_for_earlier_kernels();
        if (ptx::elect() && warp == 0) bring_steps(shared, weight_map, place_map, p, tasks);
    } else {
        ptx::wait_for_earlier_kernels();
        ptx::setmaxnreg_inc<kConsumerRegisters>();
        Consumer<T, Tile>{shared, p, warp / 4 - 1, warp % 4, lane, tasks}.run();
    }
}

/* ---- launch ---- */

template <typename T, class Tile>
fg_status launch(GatherParams p, bool weight_is_k_major, void *laid_out, int num_sms, cudaStream_t stream,
                 fg_error *error) {
    constexpr int kCapability = 90;
    p.column_tiles = ceil_div(p.columns, Tile::kBlockN);
    const int64_t stages = static_cast<int64_t>(p.column_tiles) * Tile::depth_blocks(p) * Tile::steps(p);
    const int64_t chunks = stages * Tile::kBlockN * 8;
    fg_status status =
        launch_early(lay_out_weights_kernel<Tile>, static_cast<unsigned int>(ceil_div<int64_t>(chunks, 256)), 256, 0,
                     kCapability, stream, error, p, weight_is_k_major, chunks, static_cast<uint4 *>(laid_out));
    if (status != FG_OK) return status;

    CUtensorMap weight_map, place_map; /* coordinates: 0, row, stage; 0, row of 64 places, segment */
    const TensorRows weights = {laid_out, kRowBytes, Tile::kBlockN, stages, kRowBytes, Tile::kWeightBytes};
    const int64_t segments = ceil_div<int64_t>(p.rows, fg_segment_rows(p.segment_tiles));
    const int64_t tasks = segments * p.column_tiles; /* below 2^31: rows are */
    const TensorRows places = {p.segments + fg_segment_places_at(p.segment_tiles),
                               kTilePlacesBytes,
                               int64_t{p.volume} * p.segment_tiles,
                               segments,
                               kTilePlacesBytes,
                               fg_segment_words(p.segment_tiles, p.volume) * static_cast<int64_t>(sizeof(int32_t))};
    status = encode_tensor_map(&weight_map, weights, Tile::kBlockN, 1, error);
    if (status == FG_OK) status = encode_tensor_map(&place_map, places, Tile::kPacked * p.segment_tiles, 1, error);
    if (status != FG_OK) return status;

    constexpr int kSharedBytes = sizeof(SegmentShared<Tile>);
    static_assert(kSharedBytes <= 227 * 1024, "what a block may have");
    status = allow_shared<conv_segment_sm90_kernel<T, Tile>>(kSharedBytes, error);
    if (status != FG_OK) return status;
    const auto grid = static_cast<unsigned int>(std::min<int64_t>(tasks, num_sms));
    return launch_early(conv_segment_sm90_kernel<T, Tile>, grid, kThreads, kSharedBytes, kCapability, stream, error, p,
                        weight_map, place_map, static_cast<int>(tasks));
}

template <typename T>
fg_status launch_tile(const GatherParams &p, const fg_plan &plan, bool weight_is_k_major, void *laid_out, int num_sms,
                      cudaStream_t stream, fg_error *error) {
    const auto go = [&](auto tile) {
        return launch<T, decltype(tile)>(p, weight_is_k_major, laid_out, num_sms, stream, error);
    };
    if (plan.block_n == 32) {
        if (plan.block_k == 16) return go(SegmentTile<32, 16>{});
        if (plan.block_k == 32) return go(SegmentTile<32, 32>{});
        return go(SegmentTile<32, 64>{});
    }
    if (plan.block_k == 16) return go(SegmentTile<64, 16>{});
    if (plan.block_k == 32) return go(SegmentTile<64, 32>{});
    if (plan.block_n == 64) return go(SegmentTile<64, 64>{});
    return go(SegmentTile<128, 64>{});
}

}  // namespace

fg_status launch_segments_sm90(const GatherParams &p, const fg_plan &plan, fg_dtype dtype, bool weight_is_k_major,
                               void *laid_out, int num_sms, cudaStream_t stream, fg_error *error) {
    return dtype == FG_FLOAT16
               ? launch_tile<__half>(p, plan, weight_is_k_major, laid_out, num_sms, stream, error)
               : launch_tile<__nv_bfloat16>(p, plan, weight_is_k_major, laid_out, num_sms, stream, error);
}

}  // namespace flexgemm
