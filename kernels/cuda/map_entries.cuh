/*
 * Output rows as sums or the like of the input rows that a map names, several threads to a row: each owns 16 bytes of it
 * (one channel where rows are not whole 16-byte pieces) and walks the offsets.
 *
 * What the map says of a block's rows is brought into shared memory first, of 32 offsets at a time: most have no entry,
 * and are passed over. Then each thread fetches the rows of a batch of entries before the first is used.
 */
#pragma once

#include "common.cuh"
#include "vector.cuh"

namespace flexgemm {

constexpr int kEntryThreads = 256, kEntryWarps = kEntryThreads / 32;
constexpr int kEntryOffsets = 32; /* of a row, brought at a time: the lanes of a warp, the bits of a word */
constexpr int kEntriesAhead = 4;  /* of a thread, read before one is kept */
constexpr int kEntryBatch = 4;    /* rows of `in` on their way to a thread: as many as leave room for others */

/* Entries, and a bit for each that is a row. Those of one offset lie in different banks. */
struct RowEntries {
    int32_t of[kEntryOffsets];
    uint32_t present;
};

/* A map (volume, rows), whose entries are rows of `in` when they are less than in_rows as unsigned numbers. Mirrored,
 * offset v has the last entry but v. */
struct MapEntries {
    const int32_t *map;
    int64_t rows;
    uint32_t in_rows;
    int volume;
    bool mirrored;
};

/* The part of `out` that a block makes, and this thread's. The threads of a block lie within kEntryThreads of its first
 * piece: one long division is the block's, the rest short. */
template <int kCount>
struct EntryPlace {
    int64_t first_row, channel;
    int rows, own_row; /* of the block, from first_row on; the thread's, which may lie behind them */

    __device__ EntryPlace(const MapEntries &entries, int64_t channels) {
        const int64_t pieces = channels / kCount, first = static_cast<int64_t>(blockIdx.x) * kEntryThreads;
        first_row = first / pieces;
        const auto piece = static_cast<uint32_t>(first - first_row * pieces), of_row = static_cast<uint32_t>(pieces);
        const int64_t touched = (piece + kEntryThreads - 1) / of_row + 1, left = entries.rows - first_row;
        rows = static_cast<int>(touched < left ? touched : left);
        own_row = static_cast<int>((piece + threadIdx.x) / of_row);
        channel = static_cast<int64_t>((piece + threadIdx.x) % of_row) * kCount;
    }
    __device__ int64_t row() const { return first_row + own_row; }
    __device__ bool is_there() const { return own_row < rows; }
};

/* Whether `out` (rows, channels) can be made by a map: numbers of offsets and of pieces are of 32 bits. */
inline fg_status check_entries(const fg_tensor &map, const fg_tensor &out, fg_error *error) {
    if (map.shape[0] > INT32_MAX - kEntryOffsets)
        return fg_fail(error, FG_ERROR_VALUE, "map: expected at most %d rows, got %lld", INT32_MAX - kEntryOffsets,
                       static_cast<long long>(map.shape[0]));
    if (out.shape[1] > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "out: expected at most %d channels, got %lld", INT32_MAX,
                       static_cast<long long>(out.shape[1]));
    return FG_OK;
}

/* Dynamic shared memory of a block: for as many rows as it can touch. */
inline size_t entry_bytes(int64_t pieces) {
    const int64_t rows = pieces == 1 ? kEntryThreads : (kEntryThreads - 1) / pieces + 2;
    return static_cast<size_t>(rows) * sizeof(RowEntries);
}

/* Those of the offsets from `first` on. A lane reads what its offset has; where there is a row for nearly each thread,
 * what its row has: then lanes read what lies side by side. */
template <int kCount>
__device__ __forceinline__ void bring_entries(const MapEntries &entries, const EntryPlace<kCount> &place, int first,
                                              RowEntries *kept) {
    const auto at = [&](int v, int row) {
        const int64_t from = entries.mirrored ? entries.volume - 1 - v : v;
        return v < entries.volume && row < place.rows ? entries.map[from * entries.rows + place.first_row + row] : -1;
    };
    const auto is_row = [&](int32_t source) { return static_cast<uint32_t>(source) < entries.in_rows; };
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    if (place.rows > kEntryThreads / 2) {
        const int row = static_cast<int>(threadIdx.x);
        if (row >= place.rows) return;
        uint32_t present = 0;
#pragma unroll kEntriesAhead
        for (int i = 0; i < kEntryOffsets; ++i) {
            const int32_t source = at(first + i, row);
            kept[row].of[i] = source;
            present |= static_cast<uint32_t>(is_row(source)) << i;
        }
        kept[row].present = present;
        return;
    }
    for (int begin = warp; begin < place.rows; begin += kEntryWarps * kEntriesAhead) {
        int32_t source[kEntriesAhead];
#pragma unroll
        for (int i = 0; i < kEntriesAhead; ++i) source[i] = at(first + lane, begin + i * kEntryWarps);
#pragma unroll
        for (int i = 0; i < kEntriesAhead; ++i) {
            const int row = begin + i * kEntryWarps;
            const uint32_t present = __ballot_sync(~0u, is_row(source[i]));
            if (row >= place.rows) break;
            kept[row].of[lane] = source[i];
            if (lane == 0) kept[row].present = present;
        }
    }
}

/* Calls visit(offset, row of `in`, its channels) for every entry of the thread's row, in the order of offsets. in: the
 * thread's channels of row 0. By all threads of the block. */
template <typename T, int kCount, class Visit>
__device__ __forceinline__ void for_each_entry(const MapEntries &entries, const EntryPlace<kCount> &place, const T *in,
                                               int64_t in_stride, Visit visit) {
    extern __shared__ RowEntries kept[];
    for (int first = 0; first < entries.volume; first += kEntryOffsets) {
        if (first > 0) __syncthreads();
        bring_entries(entries, place, first, kept);
        __syncthreads();
        if (!place.is_there()) continue;
        const RowEntries &own = kept[place.own_row];
        for (uint32_t left = own.present; left != 0;) {
            int v[kEntryBatch];
            int32_t source[kEntryBatch]; /* -1 where there are no more */
            Vector<T, kCount> value[kEntryBatch];
#pragma unroll
            for (int i = 0; i < kEntryBatch; ++i, left &= left - 1) {
                v[i] = __ffs(static_cast<int>(left)) - 1;
                source[i] = left != 0 ? own.of[v[i]] : -1;
            }
#pragma unroll
            for (int i = 0; i < kEntryBatch; ++i)
                if (source[i] >= 0) value[i] = Vector<T, kCount>::load(in + source[i] * in_stride);
#pragma unroll
            for (int i = 0; i < kEntryBatch; ++i)
                if (source[i] >= 0) visit(first + v[i], source[i], value[i]);
        }
    }
}

}  // namespace flexgemm
