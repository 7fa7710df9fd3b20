/*
 * Sorts the segments of row orders by their keys on Hopper: one launch, a cluster of blocks for each segment of each
 * order.
 *
 * A stable radix sort in as many passes as the order's own keys need, most often one. In a pass a warp numbers the rows
 * of its stretch among those with the same digit, the blocks of the cluster tell each other how many rows of each digit
 * they have, and every row goes to its place. Nothing but the cluster's barrier stands between the passes: counts and
 * rows lie in L2.
 */
#include "row_sort_sm90.cuh"

#include <algorithm>

#include "ptx.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kMaxItems = 16;        /* rows of a thread */
constexpr unsigned kMaxCluster = 16; /* more than 8 needs leave */
constexpr int kMaxDigitBits = 9;
constexpr uint32_t kDigits = 1u << kMaxDigitBits;
static_assert(int64_t{kThreads} * kMaxItems * kMaxCluster == kMaxSortedSegment);

__device__ __forceinline__ uint32_t lanes_below() { return (1u << threadIdx.x % 32) - 1; }

/* The lanes of the warp with the same digit; a lane without a row is alone with its like. */
__device__ __forceinline__ uint32_t lanes_alike(uint32_t digit, int bits, bool valid) {
    const uint32_t all = __ballot_sync(~0u, valid);
    uint32_t alike = valid ? all : ~all;
    for (int bit = 0; bit < bits; ++bit) {
        const bool set = digit >> bit & 1;
        const uint32_t with = __ballot_sync(~0u, set);
        alike &= set ? with : ~with;
    }
    return alike;
}

/* blockIdx: block of the cluster, segment, order. */
template <int kItems>
__global__ void __launch_bounds__(kThreads, 1) sort_segments_kernel(const __grid_constant__ RowSort args) {
    __shared__ uint16_t warp_counts[kWarps][kDigits]; /* of rows with a digit; then of those in the warps before */
    __shared__ uint32_t begins[kDigits];              /* where this block's rows with a digit go */
    __shared__ uint32_t sums[kDigits / 32];

    const uint32_t thread = threadIdx.x, warp = thread / 32, lane = thread % 32, block = blockIdx.x;
    const int64_t first = static_cast<int64_t>(blockIdx.y) * args.segment;
    const int64_t base = blockIdx.z * args.count + first;
    const uint32_t rows = static_cast<uint32_t>(min(static_cast<int64_t>(args.segment), args.count - first));
    const int items = static_cast<int>(ceil_div<uint32_t>(rows, gridDim.x * kThreads));
    const uint32_t begin = (block * kWarps + warp) * 32 * items + lane;
    uint32_t *const counts =
        args.counts + (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x * kDigits;
    const int bits = args.bits[blockIdx.z], passes = max(1, ceil_div(bits, kMaxDigitBits));

    for (int pass = 0, shift = 0; pass < passes; ++pass) {
        const uint2 *const in = args.items[pass % 2] + base;
        uint2 *const out = args.items[(pass + 1) % 2] + base;
        const int digit_bits = ceil_div(bits - shift, passes - pass);
        const uint32_t digits = 1u << digit_bits;
        const auto digit_of = [&](uint32_t key) { return key >> shift & (digits - 1); };

        for (uint32_t i = thread; i < kWarps * kDigits / 2; i += kThreads)
            reinterpret_cast<uint32_t *>(warp_counts)[i] = 0;
        if (pass == 0) ptx::wait_for_earlier_kernels();
        uint32_t key[kItems], rank[kItems];
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            const uint32_t n = begin + i * 32;
            key[i] = i >= items || n >= rows ? 0 : pass == 0 ? args.keys[base + n] : __ldcg(&in[n].x);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            if (i >= items) break;
            const bool valid = begin + i * 32 < rows;
            const uint32_t alike = lanes_alike(digit_of(key[i]), digit_bits, valid);
            uint16_t *const count = &warp_counts[warp][digit_of(key[i])];
            const uint32_t before = *count;
            __syncwarp();
            if (valid && (alike & lanes_below()) == 0) *count = static_cast<uint16_t>(before + __popc(alike));
            __syncwarp();
            rank[i] = before + __popc(alike & lanes_below());
        }
        __syncthreads();

        if (thread < digits) {
            uint32_t running = 0;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) {
                const uint32_t count = warp_counts[w][thread];
                warp_counts[w][thread] = static_cast<uint16_t>(running);
                running += count;
            }
            counts[block * kDigits + thread] = running;
        }
        ptx::cluster_sync();
        uint32_t total = 0, before = 0; /* rows with this thread's digit: in all blocks, in those before this one */
        if (thread < digits) {
            for (uint32_t other = 0; other < gridDim.x; ++other) {
                const uint32_t count = __ldcg(&counts[other * kDigits + thread]);
                total += count;
                before += other < block ? count : 0;
            }
        }
        uint32_t sum = total; /* of all digits up to this thread's */
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const uint32_t other = __shfl_up_sync(~0u, sum, distance);
            sum += lane >= distance ? other : 0;
        }
        if (thread < kDigits && lane == 31) sums[warp] = sum;
        __syncthreads();
        if (thread < digits) {
            for (uint32_t w = 0; w < warp; ++w) sum += sums[w];
            begins[thread] = sum - total + before;
        }
        __syncthreads();

#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            const uint32_t n = begin + i * 32;
            if (i >= items || n >= rows) break;
            const uint32_t row = pass == 0 ? static_cast<uint32_t>(first) + n : __ldcg(&in[n].y);
            const uint32_t digit = digit_of(key[i]), to = begins[digit] + warp_counts[warp][digit] + rank[i];
            if (pass == passes - 1)
                args.order[base + to] = static_cast<int32_t>(row);
            else
                out[to] = make_uint2(key[i], row);
        }
        shift += digit_bits;
        if (pass < passes - 1) ptx::cluster_sync();
    }
}

/* Enough blocks that a thread's rows fit its registers, and as many as there are multiprocessors for all segments of all
 * orders, while each thread has a row. */
unsigned cluster_of(const RowSort &sort, int num_sms) {
    const int64_t rows = std::min<int64_t>(sort.segment, sort.count), sorted = sort.segments() * sort.orders;
    unsigned blocks = 1;
    while (rows > int64_t{kThreads} * kMaxItems * blocks ||
           (blocks < kMaxCluster && rows > int64_t{kThreads} * blocks && sorted * blocks * 2 <= num_sms))
        blocks *= 2;
    return blocks;
}

template <int kItems>
fg_status launch(const RowSort &sort, unsigned cluster, cudaStream_t stream, fg_error *error) {
    const auto kernel = sort_segments_kernel<kItems>;
    FG_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {cluster, 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = {cluster, static_cast<unsigned>(sort.segments()), static_cast<unsigned>(sort.orders)};
    config.blockDim = {kThreads};
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    FG_CUDA(cudaLaunchKernelEx(&config, kernel, sort));
    return FG_OK;
}

}  // namespace

bool row_sort_sm90_takes(const RowSort &sort) {
    return std::min<int64_t>(sort.segment, sort.count) <= kMaxSortedSegment;
}

size_t row_sort_sm90_counts(const RowSort &sort, int num_sms) {
    return static_cast<size_t>(sort.segments() * sort.orders) * cluster_of(sort, num_sms) * kDigits;
}

fg_status row_sort_sm90(const RowSort &sort, int num_sms, cudaStream_t stream, fg_error *error) {
    const unsigned cluster = cluster_of(sort, num_sms);
    const int64_t rows = std::min<int64_t>(sort.segment, sort.count);
    return rows <= int64_t{kThreads} * 4 * cluster ? launch<4>(sort, cluster, stream, error)
                                                   : launch<kMaxItems>(sort, cluster, stream, error);
}

}  // namespace flexgemm
