/*
 * Row order of a neighbour map: order[s] = the column of the map that tile slot s works on, sorted so that the rows of
 * one tile have neighbours at the same offsets and the convolution skips the others.
 *
 * The key of a row is the Gray-code rank of its mask at the offsets of the plan: from one rank to the next a single
 * offset comes or goes. A stable radix sort of (key, row) follows, 8 bits a pass. It is made for few rows, where
 * launches and latency are all that counts:
 *
 *     rank     a CTA makes the keys of its block of rows, and counts the lowest digit in it
 *     scatter  a CTA adds up the counts of the blocks before its own, and moves its rows to where they belong
 *     count    a CTA counts the next digit in its block; then scatter again, and so on
 *
 * A scene is sorted segment by segment, as the plan says. Counts are exchanged within a segment only, so that the work
 * per row does not grow with the scene.
 *
 * Workspace: counts (blocks, 256) | keys (N) | keys (N) | rows (N) | rows (N)
 */
#include "../plan.h"
#include "backend.cuh"
#include "common.cuh"

namespace flexgemm {
namespace {

constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;
constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kSumsPerDigit = kThreads / kDigits;
constexpr unsigned int kAllLanes = ~0u;

__device__ unsigned int digit_of(uint32_t key, int shift) { return key >> shift & (kDigits - 1); }

/* The lanes of `active` that have this lane's digit. All lanes call it. */
__device__ unsigned int lanes_alike(unsigned int digit, unsigned int active) {
    unsigned int alike = active;
#pragma unroll
    for (int bit = 0; bit < kDigitBits; ++bit) {
        const bool set = digit >> bit & 1;
        const unsigned int lanes = __ballot_sync(kAllLanes, set);
        alike &= set ? lanes : ~lanes;
    }
    return alike;
}

__device__ unsigned int lanes_below() { return (1u << threadIdx.x % 32) - 1; }

/* Rows of this thread: a warp has kPerThread groups of 32 in a row. */
template <int kPerThread>
__device__ int64_t row_of_thread(int i) {
    const int group = threadIdx.x / 32 * kPerThread + i;
    return static_cast<int64_t>(blockIdx.x) * kThreads * kPerThread + group * 32 + threadIdx.x % 32;
}

/* counts[block, digit] of the keys key_of(row) of the block's rows. All threads call it. */
template <int kPerThread, class KeyOf>
__device__ void count_digits(const KeyOf &key_of, int64_t rows, int shift, int32_t *counts) {
    __shared__ int32_t count[kDigits];
    if (threadIdx.x < kDigits) count[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        const int64_t n = row_of_thread<kPerThread>(i);
        const bool present = n < rows;
        const unsigned int digit = digit_of(present ? key_of(n) : 0, shift);
        const unsigned int alike = lanes_alike(digit, __ballot_sync(kAllLanes, present));
        if (present && (alike & lanes_below()) == 0) atomicAdd(&count[digit], __popc(alike));
    }
    __syncthreads();
    if (threadIdx.x < kDigits) counts[static_cast<int64_t>(blockIdx.x) * kDigits + threadIdx.x] = count[threadIdx.x];
}

template <int kPerThread>
__global__ void __launch_bounds__(kThreads)
    rank_kernel(const int32_t *map, int64_t count, const fg_order_plan plan, uint32_t *keys, int32_t *counts) {
    const auto make_key = [&](int64_t n) {
        uint32_t key = 0;
#pragma unroll
        for (int i = 0; i < FG_MAX_KEY_BITS; ++i)
            if (i < plan.key_bits) key = key << 1 | (map[plan.offsets[i] * count + n] >= 0);
        /* The rank of a Gray code: each bit is the parity of itself and all above. */
#pragma unroll
        for (int shift = 1; shift < 32; shift *= 2) key ^= key >> shift;
        return keys[n] = key;
    };
    count_digits<kPerThread>(make_key, count, 0, counts);
}

template <int kPerThread>
__global__ void __launch_bounds__(kThreads)
    count_kernel(const uint32_t *keys, int64_t count, int shift, int32_t *counts) {
    count_digits<kPerThread>([=](int64_t n) { return keys[n]; }, count, shift, counts);
}

/* Exclusive prefix sum over the kDigits values of the first kDigits threads. All threads call it. */
__device__ int32_t prefix_sum(int32_t value) {
    __shared__ int32_t sums[kDigits / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int32_t sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int32_t below = __shfl_up_sync(kAllLanes, sum, step);
        if (lane >= step) sum += below;
    }
    if (warp < kDigits / 32 && lane == 31) sums[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp && w < kDigits / 32; ++w) sum += sums[w];
    return sum - value;
}

/* rows: NULL in the first pass, in which every row is where its number says. next_keys: NULL in the last one. */
template <int kPerThread>
__global__ void __launch_bounds__(kThreads)
    scatter_kernel(const uint32_t *keys, const int32_t *rows, int64_t count, int shift, unsigned int segment_blocks,
                   const int32_t *counts, uint32_t *next_keys, int32_t *next_rows) {
    __shared__ int32_t place[kWarps][kDigits]; /* rows of a warp with a digit; later, where the first of them goes */
    __shared__ int32_t before[kSumsPerDigit][kDigits], total[kSumsPerDigit][kDigits];
    const int warp = threadIdx.x / 32;
    uint32_t key[kPerThread];
    int32_t row[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        const int64_t n = row_of_thread<kPerThread>(i);
        key[i] = n < count ? keys[n] : 0;
        row[i] = rows && n < count ? rows[n] : static_cast<int32_t>(n);
    }

    /* Rows of each digit in the segment, and in its blocks before this one: kSumsPerDigit threads share the blocks. */
    const unsigned int first_block = blockIdx.x / segment_blocks * segment_blocks;
    const unsigned int end_block = min(first_block + segment_blocks, gridDim.x);
    const unsigned int own = threadIdx.x % kDigits, part = threadIdx.x / kDigits;
    int32_t sum_before = 0, sum = 0;
#pragma unroll 8
    for (unsigned int block = first_block + part; block < end_block; block += kSumsPerDigit) {
        const int32_t rows_there = counts[static_cast<int64_t>(block) * kDigits + own];
        sum += rows_there;
        sum_before += block < blockIdx.x ? rows_there : 0;
    }
    before[part][own] = sum_before;
    total[part][own] = sum;

    /* Rank of each row among those of its warp with its digit. */
    for (int i = threadIdx.x % 32; i < kDigits; i += 32) place[warp][i] = 0;
    __syncwarp();
    int rank[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        const bool present = row_of_thread<kPerThread>(i) < count;
        const unsigned int digit = digit_of(key[i], shift);
        const unsigned int alike = lanes_alike(digit, __ballot_sync(kAllLanes, present));
        const int rank_here = __popc(alike & lanes_below());
        rank[i] = place[warp][digit] + rank_here;
        __syncwarp();
        if (present && rank_here == 0) place[warp][digit] += __popc(alike);
        __syncwarp();
    }
    __syncthreads();

    int32_t in_segment = 0, start = 0;
    if (threadIdx.x < kDigits) {
        for (int i = 0; i < kSumsPerDigit; ++i) {
            in_segment += total[i][threadIdx.x];
            start += before[i][threadIdx.x];
        }
    }
    start += prefix_sum(in_segment);
    if (threadIdx.x < kDigits) {
#pragma unroll 8
        for (int w = 0; w < kWarps; ++w) {
            const int32_t rows_of_warp = place[w][threadIdx.x];
            place[w][threadIdx.x] = start;
            start += rows_of_warp;
        }
    }
    __syncthreads();
    const int64_t segment_start = static_cast<int64_t>(first_block) * kThreads * kPerThread;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        if (row_of_thread<kPerThread>(i) >= count) continue;
        const int64_t target = segment_start + place[warp][digit_of(key[i], shift)] + rank[i];
        next_rows[target] = row[i];
        if (next_keys) next_keys[target] = key[i];
    }
}

/* What CTAs exchange grows with their number, what one does alone with its rows. */
int rows_per_thread(int64_t count) { return count <= 1 << 16 ? 1 : count <= 1 << 18 ? 2 : 4; }

struct Layout {
    unsigned int blocks;
    size_t counts, array; /* bytes of the counts and of one array of N */

    explicit Layout(int64_t count) {
        const int64_t block_rows = kThreads * rows_per_thread(count);
        blocks = static_cast<unsigned int>(ceil_div<int64_t>(count, block_rows));
        counts = sizeof(int32_t) * kDigits * blocks;
        array = sizeof(int32_t) * block_rows * blocks;
    }
    size_t bytes() const { return counts + 4 * array; }
};

template <int kPerThread>
fg_status run(const fg_row_order_params *p, cudaStream_t stream, fg_error *error) {
    const int64_t count = p->map.shape[1];
    const fg_order_plan plan = fg_plan_row_order(count, p->kernel);
    const Layout layout(count);
    char *workspace = static_cast<char *>(p->workspace.data);
    int32_t *counts = reinterpret_cast<int32_t *>(workspace);
    uint32_t *keys[2];
    int32_t *rows[2];
    for (int i = 0; i < 2; ++i) {
        keys[i] = reinterpret_cast<uint32_t *>(workspace + layout.counts + i * layout.array);
        rows[i] = reinterpret_cast<int32_t *>(workspace + layout.counts + (2 + i) * layout.array);
    }
    rank_kernel<kPerThread><<<layout.blocks, kThreads, 0, stream>>>(static_cast<const int32_t *>(p->map.data), count,
                                                                    plan, keys[0], counts);
    FG_CUDA(cudaGetLastError());
    for (int shift = 0, from = 0; shift == 0 || shift < plan.key_bits; shift += kDigitBits, from ^= 1) {
        if (shift > 0) {
            count_kernel<kPerThread><<<layout.blocks, kThreads, 0, stream>>>(keys[from], count, shift, counts);
            FG_CUDA(cudaGetLastError());
        }
        const bool last = shift + kDigitBits >= plan.key_bits;
        scatter_kernel<kPerThread><<<layout.blocks, kThreads, 0, stream>>>(
            keys[from], shift > 0 ? rows[from] : nullptr, count, shift, plan.segment / (kThreads * kPerThread), counts,
            last ? nullptr : keys[from ^ 1], last ? static_cast<int32_t *>(p->order.data) : rows[from ^ 1]);
        FG_CUDA(cudaGetLastError());
    }
    return FG_OK;
}

}  // namespace

fg_status row_order_workspace(const fg_row_order_params *p, const fg_queue *, size_t *bytes, fg_error *) {
    *bytes = Layout(p->map.shape[1]).bytes();
    return FG_OK;
}

fg_status row_order(const fg_row_order_params *p, const fg_queue *queue, fg_error *error) {
    const int64_t count = p->map.shape[1];
    if (count == 0) return FG_OK;
    if (count > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "map: expected at most %lld columns, which int32 can number, got %lld",
                       static_cast<long long>(INT32_MAX), static_cast<long long>(count));
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const cudaStream_t stream = stream_of(queue);
    switch (rows_per_thread(count)) {
        case 1:
            return run<1>(p, stream, error);
        case 2:
            return run<2>(p, stream, error);
        default:
            return run<4>(p, stream, error);
    }
}

}  // namespace flexgemm
