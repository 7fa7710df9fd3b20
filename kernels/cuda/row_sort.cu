/*
 * Sorts the segments of row orders by their keys: a stable radix sort in as many passes as an order's own keys need.
 *
 * Of few rows a block sorts a whole order, in one launch. Of more a pass is two launches. The first counts the digits of
 * every tile of rows. In the second a block adds up the counts of its segment's tiles, which says where its rows with
 * each digit go; a warp numbers the rows of its stretch among those with the same digit, and every row goes to its place.
 * All of it lies in L2; what limits is the latency of launches that wait for each other, so that they begin while the
 * one in front ends.
 */
#include "row_sort.cuh"

#include <algorithm>

#include "ptx.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kItems = 4; /* rows of a thread */
constexpr int kTile = kThreads * kItems;
constexpr int kCountsAhead = 16; /* loads of a thread under way */
constexpr int kFewItems = 8;     /* rows of a thread where a block has a whole order; with more it lasts longer */
constexpr int kFewRows = kThreads * kFewItems;
constexpr int kMaxDigitBits = 9;
constexpr int kDigits = 1 << kMaxDigitBits;
static_assert(kThreads == kDigits, "a thread for each digit");

/* The part of a key that a pass sorts by. */
struct Digit {
    int shift, bits;

    __host__ __device__ static int passes(int key_bits) { return key_bits > 0 ? ceil_div(key_bits, kMaxDigitBits) : 1; }

    __device__ Digit(int key_bits, int pass) : bits(ceil_div(key_bits, passes(key_bits))) { shift = pass * bits; }
    __device__ uint32_t values() const { return 1u << bits; }
    __device__ uint32_t of(uint32_t key) const { return key >> shift & (values() - 1); }
};

/* The i-th of the rows of this thread, whose warp has a stretch of 32 * items. */
__device__ __forceinline__ uint32_t place_in_tile(int i, int items) {
    return (threadIdx.x / 32 * items + i) * 32 + threadIdx.x % 32;
}

/* One pass over the tile blockIdx.x of the segment blockIdx.y of the order blockIdx.z. */
struct Pass {
    int64_t base; /* the segment's first row in keys, items and order */
    uint32_t first_row, rows, tiles;
    Digit digit;
    bool exists, first, last;
    uint32_t *counts; /* (tiles, kDigits) of the segment */

    __device__ Pass(const RowSort &sort, int pass) : digit(sort.bits[blockIdx.z], pass) {
        const int64_t start = static_cast<int64_t>(blockIdx.y) * sort.segment;
        base = blockIdx.z * sort.count + start;
        first_row = static_cast<uint32_t>(start);
        rows = static_cast<uint32_t>(min(sort.segment, sort.count - start));
        tiles = gridDim.x;
        counts = sort.counts + (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * tiles * kDigits;
        const int passes = Digit::passes(sort.bits[blockIdx.z]);
        exists = pass < passes;
        first = pass == 0;
        last = pass == passes - 1;
    }

    __device__ uint32_t place(int i) const { return blockIdx.x * kTile + place_in_tile(i, kItems); }
    __device__ uint2 item(const RowSort &sort, const uint2 *in, uint32_t n) const {
        return first ? make_uint2(sort.keys[base + n], first_row + n) : in[base + n];
    }
};

__global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ RowSort sort, int number) {
    ptx::let_next_kernel_begin();
    __shared__ uint32_t counts[kDigits];
    const Pass pass(sort, number);
    counts[threadIdx.x] = 0;
    __syncthreads();
    ptx::wait_for_earlier_kernels();
    if (!pass.exists) return;
    const uint2 *const in = sort.items[number % 2];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
        const uint32_t n = pass.place(i);
        if (n < pass.rows) atomicAdd(&counts[pass.digit.of(pass.item(sort, in, n).x)], 1u);
    }
    __syncthreads();
    if (threadIdx.x < pass.digit.values()) pass.counts[blockIdx.x * kDigits + threadIdx.x] = counts[threadIdx.x];
}

/* The lanes of the warp with the same digit; a lane without a row is not among them. */
__device__ __forceinline__ uint32_t lanes_alike(uint32_t digit, int bits, bool valid) {
    uint32_t alike = __ballot_sync(~0u, valid);
    for (int bit = 0; bit < bits; bit += 3) {
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            const bool set = digit >> (bit + i) & 1;
            const uint32_t with = __ballot_sync(~0u, set);
            alike &= set ? with : ~with;
        }
    }
    return alike;
}

/* The number of this lane's row among those of its warp with the same digit, of which `counts` says how many there have
 * been. */
__device__ __forceinline__ uint32_t rank_in_warp(uint32_t digit, int bits, bool valid, uint16_t *counts) {
    const uint32_t alike = lanes_alike(digit, bits, valid), before = alike & ((1u << threadIdx.x % 32) - 1);
    const uint32_t counted = counts[digit];
    __syncwarp();
    if (valid && before == 0) counts[digit] = static_cast<uint16_t>(counted + __popc(alike));
    __syncwarp();
    return counted + __popc(before);
}

/* What each warp has of the digit of this thread becomes where its first such row goes: `begin` and what the warps before
 * it have. */
__device__ __forceinline__ void counts_to_places(uint16_t (*counts)[kDigits], uint32_t begin) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        const uint32_t count = counts[w][threadIdx.x];
        counts[w][threadIdx.x] = static_cast<uint16_t>(begin);
        begin += count;
    }
}

/* Sum of a value over the threads before this one. */
__device__ __forceinline__ uint32_t sum_before(uint32_t value) {
    __shared__ uint32_t warp_sums[kWarps];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t sum = value;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const uint32_t other = __shfl_up_sync(~0u, sum, distance);
        sum += lane >= static_cast<uint32_t>(distance) ? other : 0;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += static_cast<uint32_t>(w) < warp ? warp_sums[w] : 0;
    return sum - value;
}

__global__ void __launch_bounds__(kThreads) place_kernel(const __grid_constant__ RowSort sort, int number) {
    ptx::let_next_kernel_begin();
    __shared__ uint16_t warp_counts[kWarps][kDigits]; /* rows with a digit; then those of the warps before */
    __shared__ uint32_t totals[kDigits];              /* rows with a digit in all tiles of the segment */
    __shared__ uint32_t begins[kDigits];              /* where those of this tile go */
    const Pass pass(sort, number);
    const uint32_t thread = threadIdx.x, warp = thread / 32;
    for (int i = thread; i < kWarps * kDigits / 2; i += kThreads) reinterpret_cast<uint32_t *>(warp_counts)[i] = 0;
    totals[thread] = begins[thread] = 0;
    __syncthreads();
    ptx::wait_for_earlier_kernels();
    if (!pass.exists) return;

    const uint2 *const in = sort.items[number % 2];
    uint2 *const out = sort.items[(number + 1) % 2];
    uint2 item[kItems];
    uint32_t rank[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
        const uint32_t n = pass.place(i);
        item[i] = n < pass.rows ? pass.item(sort, in, n) : make_uint2(0, 0);
    }
    /* All threads add up counts, several a digit where digits are few. */
    const uint32_t of_digit = thread & (pass.digit.values() - 1), step = kThreads >> pass.digit.bits;
    uint32_t total = 0, before = 0;
    for (uint32_t first = thread >> pass.digit.bits; first < pass.tiles; first += kCountsAhead * step) {
        uint32_t count[kCountsAhead];
#pragma unroll
        for (int i = 0; i < kCountsAhead; ++i) {
            const uint32_t tile = first + i * step;
            count[i] = tile < pass.tiles ? pass.counts[tile * kDigits + of_digit] : 0;
        }
#pragma unroll
        for (int i = 0; i < kCountsAhead; ++i) {
            total += count[i];
            before += first + i * step < blockIdx.x ? count[i] : 0;
        }
    }
    atomicAdd(&totals[of_digit], total);
    atomicAdd(&begins[of_digit], before);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
        const bool valid = pass.place(i) < pass.rows;
        rank[i] = rank_in_warp(pass.digit.of(item[i].x), pass.digit.bits, valid, warp_counts[warp]);
    }
    __syncthreads();
    begins[thread] += sum_before(totals[thread]);
    counts_to_places(warp_counts, 0);
    __syncthreads();

#pragma unroll
    for (int i = 0; i < kItems; ++i) {
        if (pass.place(i) >= pass.rows) break;
        const uint32_t digit = pass.digit.of(item[i].x);
        const int64_t to = pass.base + begins[digit] + warp_counts[warp][digit] + rank[i];
        if (pass.last)
            sort.order[to] = static_cast<int32_t>(item[i].y);
        else
            out[to] = item[i];
    }
}

/* All passes of the order blockIdx.x, which is one segment. Between passes its rows are in shared memory, and their keys
 * are looked up again. */
__global__ void __launch_bounds__(kThreads) sort_kernel(const __grid_constant__ RowSort sort) {
    ptx::let_next_kernel_begin();
    __shared__ uint16_t rows[kFewRows];
    __shared__ uint16_t begins[kWarps][kDigits]; /* rows of a warp with a digit; then where they go */
    const uint32_t count = static_cast<uint32_t>(sort.count), thread = threadIdx.x, warp = thread / 32;
    const uint32_t *const keys = sort.keys + blockIdx.x * sort.count;
    int32_t *const order = sort.order + blockIdx.x * sort.count;
    const int bits = sort.bits[blockIdx.x], passes = Digit::passes(bits);
    ptx::wait_for_earlier_kernels();

    for (int pass = 0; pass < passes; ++pass) {
        const Digit digit(bits, pass);
        for (int i = thread; i < kWarps * kDigits / 2; i += kThreads) reinterpret_cast<uint32_t *>(begins)[i] = 0;
        uint32_t row[kFewItems], of_row[kFewItems], rank[kFewItems];
#pragma unroll
        for (int i = 0; i < kFewItems; ++i) {
            const uint32_t n = place_in_tile(i, kFewItems);
            row[i] = pass == 0 || n >= count ? n : rows[n];
            of_row[i] = n < count ? digit.of(keys[row[i]]) : 0;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kFewItems; ++i)
            rank[i] = rank_in_warp(of_row[i], digit.bits, place_in_tile(i, kFewItems) < count, begins[warp]);
        __syncthreads();
        uint32_t total = 0;
        for (int w = 0; w < kWarps; ++w) total += begins[w][thread];
        counts_to_places(begins, sum_before(total));
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kFewItems; ++i) {
            if (place_in_tile(i, kFewItems) >= count) break;
            const uint32_t to = begins[warp][of_row[i]] + rank[i];
            if (pass == passes - 1)
                order[to] = static_cast<int32_t>(row[i]);
            else
                rows[to] = static_cast<uint16_t>(row[i]);
        }
        __syncthreads();
    }
}

int64_t tiles_of(const RowSort &sort) { return ceil_div<int64_t>(std::min(sort.segment, sort.count), kTile); }

}  // namespace

size_t row_sort_counts(const RowSort &sort) {
    return static_cast<size_t>(tiles_of(sort) * sort.segments() * sort.orders) * kDigits;
}

fg_status row_sort(const RowSort &sort, int compute_capability, cudaStream_t stream, fg_error *error) {
    if (sort.segments() == 1 && sort.count <= kFewRows) {
        const auto blocks = static_cast<unsigned>(sort.orders);
        return launch_early(sort_kernel, blocks, kThreads, 0, compute_capability, stream, error, sort);
    }
    const dim3 grid(static_cast<unsigned>(tiles_of(sort)), static_cast<unsigned>(sort.segments()),
                    static_cast<unsigned>(sort.orders));
    const auto launch = [&](auto kernel, int pass) {
        return launch_early(kernel, grid, kThreads, 0, compute_capability, stream, error, sort, pass);
    };
    const int bits = *std::max_element(sort.bits, sort.bits + sort.orders);
    const int passes = Digit::passes(bits);
    fg_status status = FG_OK;
    for (int pass = 0; pass < passes && status == FG_OK; ++pass) {
        status = launch(count_kernel, pass);
        if (status == FG_OK) status = launch(place_kernel, pass);
    }
    return status;
}

}  // namespace flexgemm
