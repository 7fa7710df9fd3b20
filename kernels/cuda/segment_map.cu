/*
 * Segments of a neighbour map: the records of segment.h, a block for each, a thread for each of its rows.
 *
 * The map is read once. Each neighbour goes into a hash table of input rows in shared memory, and the thread keeps the
 * slot; meanwhile it gathers the mask of its row. Then rows are sorted by a bitonic sort of one-word keys, the rows in
 * the table are numbered, which is what places are, and slots become places where the sorted rows want them. What
 * limits is the map: columns near each other in space lie anywhere in memory.
 */
#include "../segment.h"

#include "../plan.h"
#include "backend.cuh"
#include "common.cuh"
#include "ptx.cuh"
#include "row_sort.cuh"

namespace flexgemm {
namespace {

constexpr int kBatch = 9;            /* entries of a thread under way */
constexpr int kThreadsAtOnce = 2048; /* on a multiprocessor */
constexpr uint32_t kEmpty = ~0u;
constexpr int kNoRowBit = FG_SEGMENT_ROW_BITS + FG_SEGMENT_RANK_BITS;
static_assert(FG_SEGMENT_TILE * FG_SEGMENT_TILES == 1 << FG_SEGMENT_ROW_BITS, "a key has room for the row's number");
static_assert(kNoRowBit == 31, "a key is a word");

struct Segments {
    const int32_t *map, *order;
    int64_t columns;
    uint32_t in_rows;
    int volume;
    fg_segment_rank rank;
    int32_t *records;
};

/* The shared memory of a block; behind it (volume, rows) slots of 16 bits. */
template <int kTiles>
struct Shared {
    static constexpr int kRows = FG_SEGMENT_TILE * kTiles;
    static constexpr int kPlaces = fg_segment_places(kTiles);
    static constexpr int kSlots = 2048;
    static constexpr int kMissing = kSlots; /* the slot of missing neighbours */
    static_assert(kPlaces + kRows < kSlots, "there are empty slots: a search of the table ends");

    uint32_t table[kSlots + 1]; /* input rows; then their places */
    uint32_t in_use;            /* places, of which 0 is that of missing neighbours; more than kPlaces: too many */
    uint32_t numbered;          /* of those, when rows become places */
    uint32_t tile_masks[kTiles];
    uint32_t keys[2][kRows]; /* sent round by the sort */
    uint32_t masks[kRows];
    int32_t columns[kRows];
    uint16_t sources[kRows]; /* of a sorted row: the thread that read it */

    /* The slot of an input row. A thread that has put a row into a table of too many has no room for more. */
    __device__ __forceinline__ uint32_t insert(uint32_t row, bool &room) {
        constexpr int kSlotBits = 11;
        static_assert(kSlots == 1 << kSlotBits, "a slot for each value of the hash");
        for (uint32_t slot = row * 0x9e3779b1u >> (32 - kSlotBits);; slot = (slot + 1) % kSlots) {
            uint32_t there = *static_cast<volatile uint32_t *>(&table[slot]);
            if (there == kEmpty) {
                there = atomicCAS(&table[slot], kEmpty, row);
                if (there == kEmpty) {
                    atomicAdd(&in_use, 1u);
                    room = *static_cast<volatile uint32_t *>(&in_use) <= kPlaces;
                }
            }
            if (there == kEmpty || there == row) return slot;
        }
    }

    /* Sorts one key of each thread. Between warps keys go by the buffers in turn, so that one barrier each time will
     * do. */
    __device__ __forceinline__ uint32_t sort(uint32_t key) {
        const uint32_t thread = threadIdx.x;
        int buffer = 0;
#pragma unroll
        for (uint32_t run = 2; run <= kRows; run *= 2) {
#pragma unroll
            for (uint32_t distance = run / 2; distance > 0; distance /= 2) {
                uint32_t other;
                if (distance < 32) {
                    other = __shfl_xor_sync(~0u, key, static_cast<int>(distance));
                } else {
                    keys[buffer][thread] = key;
                    __syncthreads();
                    other = keys[buffer][thread ^ distance];
                    buffer ^= 1;
                }
                const bool ascending = (thread & run) == 0, first = (thread & distance) == 0;
                key = ascending == first ? min(key, other) : max(key, other);
            }
        }
        return key;
    }
};

template <int kTiles>
__global__ void __launch_bounds__(FG_SEGMENT_TILE *kTiles, kThreadsAtOnce / (FG_SEGMENT_TILE * kTiles))
    segment_kernel(const __grid_constant__ Segments segments) {
    using Memory = Shared<kTiles>;
    constexpr uint32_t kRows = Memory::kRows, kPlaces = Memory::kPlaces, kSlots = Memory::kSlots;
    ptx::let_next_kernel_begin();
    extern __shared__ __align__(16) char dynamic[];
    Memory &memory = *reinterpret_cast<Memory *>(dynamic);
    uint16_t *const slots = reinterpret_cast<uint16_t *>(dynamic + sizeof(Memory));
    const uint32_t thread = threadIdx.x;

    for (uint32_t slot = thread; slot < kSlots; slot += kRows) memory.table[slot] = kEmpty;
    if (thread < kTiles) memory.tile_masks[thread] = 0;
    if (thread == 0) {
        memory.table[Memory::kMissing] = 0;
        memory.in_use = memory.numbered = 1;
    }
    __syncthreads();
    ptx::wait_for_earlier_kernels();

    /* ---- the map ---- */

    const int64_t at = static_cast<int64_t>(blockIdx.x) * kRows + thread;
    int32_t column = at < segments.columns ? segments.order[at] : -1;
    if (column < 0 || column >= segments.columns) column = -1;
    const int32_t *entry = segments.map + column;
    uint32_t mask = 0;
    bool room = true;
    for (int begin = 0; begin < segments.volume; begin += kBatch) {
        uint32_t row[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            row[i] = column >= 0 && begin + i < segments.volume ? *entry : kEmpty;
            entry += segments.columns;
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int v = begin + i;
            if (v >= segments.volume) break;
            const bool present = row[i] < segments.in_rows;
            mask |= static_cast<uint32_t>(present) << v;
            slots[v * kRows + thread] =
                static_cast<uint16_t>(present && room ? memory.insert(row[i], room) : Memory::kMissing);
        }
    }

    /* ---- the rows, sorted ---- */

    uint32_t code = 0;
    for (int i = 0; i < segments.rank.bits; ++i) code = code << 1 | (mask >> segments.rank.offsets[i] & 1);
    const uint32_t rank = gray_rank(code);
    memory.masks[thread] = mask; /* others read these after the barriers of the sort */
    memory.columns[thread] = column;
    const uint32_t key =
        memory.sort(static_cast<uint32_t>(column < 0) << kNoRowBit | rank << FG_SEGMENT_ROW_BITS | thread);
    const uint32_t source = key % (1u << FG_SEGMENT_ROW_BITS);
    memory.sources[thread] = static_cast<uint16_t>(source);

    int32_t *const record = segments.records + blockIdx.x * fg_segment_words(kTiles, segments.volume);
    record[FG_SEGMENT_HEAD + thread] = memory.columns[source];
    const uint32_t warp_mask = __reduce_or_sync(~0u, memory.masks[source]);
    if (thread % 32 == 0) atomicOr(&memory.tile_masks[thread / FG_SEGMENT_TILE], warp_mask);
    __syncthreads();
    const uint32_t in_use = memory.in_use;
    const bool fits = in_use <= kPlaces;
    if (thread < FG_SEGMENT_HEAD) {
        uint32_t word = thread >= 1 && thread <= kTiles ? memory.tile_masks[thread - 1] : 0;
        if (thread == 0 && fits) word = in_use;
        record[thread] = static_cast<int32_t>(word);
    }
    if (!fits) return;

    /* ---- places ---- */

    int32_t *const inputs = record + fg_segment_inputs_at(kTiles);
    const uint32_t lane = thread % 32;
    for (uint32_t slot = thread; slot < kSlots; slot += kRows) {
        const uint32_t row = memory.table[slot];
        const uint32_t rows = __ballot_sync(~0u, row != kEmpty);
        uint32_t first = 0;
        if (lane == 0) first = atomicAdd(&memory.numbered, static_cast<uint32_t>(__popc(rows)));
        first = __shfl_sync(~0u, first, 0);
        if (row == kEmpty) continue;
        const uint32_t place = first + __popc(rows & ((1u << lane) - 1));
        inputs[place] = static_cast<int32_t>(row);
        memory.table[slot] = place;
    }
    if (thread == 0) inputs[0] = -1;
    for (uint32_t place = in_use + thread; place < kPlaces; place += kRows) inputs[place] = -1;
    __syncthreads();

    /* A word is of two rows, 8 apart in a stretch of 16; a thread writes those of every other offset. */
    constexpr uint32_t kWords = kRows / 2;
    uint32_t *const places = reinterpret_cast<uint32_t *>(record + fg_segment_places_at(kTiles));
    const uint32_t pair = thread % kWords, row = pair / 8 * 16 + pair % 8;
    const uint32_t low = memory.sources[row], high = memory.sources[row + 8];
    for (int v = static_cast<int>(thread / kWords); v < segments.volume; v += 2) {
        const uint16_t *const of_offset = slots + v * kRows;
        places[v * kWords + pair] = memory.table[of_offset[low]] | memory.table[of_offset[high]] << 16;
    }
}

template <int kTiles>
fg_status launch(const Segments &segments, int64_t count, int compute_capability, cudaStream_t stream,
                 fg_error *error) {
    constexpr int kRows = Shared<kTiles>::kRows;
    const auto bytes = [](int volume) {
        return static_cast<int>(sizeof(Shared<kTiles>)) + volume * kRows * static_cast<int>(sizeof(uint16_t));
    };
    const fg_status status = allow_shared<segment_kernel<kTiles>>(bytes(FG_SEGMENT_VOLUME), error);
    if (status != FG_OK) return status;
    return launch_early(segment_kernel<kTiles>, static_cast<unsigned int>(count), kRows,
                        static_cast<size_t>(bytes(segments.volume)), compute_capability, stream, error, segments);
}

}  // namespace

fg_status segment_map(const fg_segment_map_params *p, const fg_queue *queue, fg_error *error) {
    const int64_t columns = p->map.shape[1], count = p->segments.shape[0];
    if (count == 0) return FG_OK;
    if (columns > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "map: expected at most %d columns for an int32 order, got %lld",
                       INT32_MAX, static_cast<long long>(columns));
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    int num_sms = 0, compute_capability = 0;
    const fg_status status = device_properties(queue->device_index, &num_sms, &compute_capability, error);
    if (status != FG_OK) return status;

    Segments segments = {};
    segments.map = static_cast<const int32_t *>(p->map.data);
    segments.order = static_cast<const int32_t *>(p->order.data);
    segments.columns = columns;
    segments.in_rows = static_cast<uint32_t>(p->in_rows < INT32_MAX ? p->in_rows : INT32_MAX);
    segments.volume = static_cast<int>(p->map.shape[0]);
    segments.rank = fg_plan_segment_rank(p->kernel);
    segments.records = static_cast<int32_t *>(p->segments.data);
    const auto run = p->tiles == 2 ? launch<2> : launch<4>;
    return run(segments, count, compute_capability, stream_of(queue), error);
}

}  // namespace flexgemm
