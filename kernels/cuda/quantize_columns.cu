/*
 * Cast to fp8 with a scale per row, of an x whose columns lie in memory as rows do elsewhere: weights the other way
 * round, as a gradient needs them.
 *
 * Two passes over x, both by vectors of 16 bytes down a column: one for the largest magnitude of each row, by integer
 * maxima in the workspace, and one for the cast, which turns tiles in shared memory (turned_tile.cuh). The second begins
 * at the end, where the first has left x in L2. Bound by memory: x is read twice.
 */
#include "quantize.cuh"
#include "turned_tile.cuh"

namespace flexgemm {
namespace {

constexpr int kPartColumns = 512; /* of x, that a block takes for a vector of rows to each thread */

struct ColumnsArgs : QuantizeArgs {
    int64_t column_stride; /* of x, whose rows are 1 apart; x_stride is not used */
    bool q_aligned;        /* 16-byte stores may start at every row of q; `aligned` is of x */
    uint32_t strips, parts;
};

/* What a block takes. */
template <typename T>
struct Part {
    static constexpr int kRows = TurnedTile<kVector<T>>::kLines;
    int64_t group, first_row, first_column, end_column;

    __device__ __forceinline__ Part(const ColumnsArgs &args, uint32_t index) {
        const uint32_t above = index / args.strips;
        group = above / args.parts;
        first_row = static_cast<int64_t>(index % args.strips) * kRows;
        first_column = static_cast<int64_t>(above % args.parts) * kPartColumns;
        end_column = min(first_column + kPartColumns, args.columns);
    }

    /* The rows that this thread reads of one column. */
    __device__ __forceinline__ Words load(const ColumnsArgs &args, int64_t column) const {
        using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
        const int64_t row = first_row + threadIdx.x % kLineVectors * kVector<T>;
        const Bits *from = static_cast<const Bits *>(args.x) + group * args.x_group_stride;
        return load_words(from + column * args.column_stride + row, args.aligned,
                          column < end_column ? args.rows - row : 0);
    }
};

/* Element i of these. */
template <typename T>
__device__ __forceinline__ float element_of(const Words &words, int i) {
    constexpr int kPerWord = 4 / sizeof(T);
    T element[kPerWord];
    memcpy(element, &words.word[i / kPerWord], 4);
    return to_float(element[i % kPerWord]);
}

/* Magnitudes of a thread's columns: the largest in each row of its vectors, NaN passed over, and infinities if only
 * finite numbers count. */
template <bool kFinite, typename T>
__device__ __forceinline__ void largest(const ColumnsArgs &args, const Part<T> &part, float (&amax)[kVector<T>]) {
    constexpr int kAhead = 4;
    for (float &value : amax) value = 0;
    for (int64_t column = part.first_column + threadIdx.x / kLineVectors; column < part.end_column;
         column += kAhead * kTurningLines) {
        Words vector[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) vector[j] = part.load(args, column + j * kTurningLines);
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            for (int i = 0; i < kVector<T>; ++i) {
                const float value = fabsf(element_of<T>(vector[j], i));
                if (!kFinite || __float_as_uint(value) < kInfinityBits) amax[i] = fmaxf(amax[i], value);
            }
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(kTurningThreads, kBlocksPerSm)
    column_amax_kernel(const __grid_constant__ ColumnsArgs args) {
    constexpr int kCount = kVector<T>, kRows = Part<T>::kRows, kWarps = kTurningThreads / 32;
    __shared__ uint32_t warp_max[kWarps][kRows];
    const Part<T> part(args, blockIdx.x);
    const int place = threadIdx.x % kLineVectors;
    /* An infinity is rare enough to look twice. */
    float amax[kCount];
    largest<false>(args, part, amax);
    bool finite = true;
    for (float value : amax) finite = finite && __float_as_uint(value) < kInfinityBits;
    if (args.saturate && !finite) largest<true>(args, part, amax);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        uint32_t bits = __float_as_uint(amax[i]);
        for (int step = kLineVectors; step < 32; step *= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, step));
        if (threadIdx.x % 32 < kLineVectors) warp_max[threadIdx.x / 32][place * kCount + i] = bits;
    }
    __syncthreads();
    if (threadIdx.x >= kRows || part.first_row + threadIdx.x >= args.rows) return;
    uint32_t bits = 0;
    for (int warp = 0; warp < kWarps; ++warp) bits = max(bits, warp_max[warp][threadIdx.x]);
    if (bits != 0) atomicMax(&args.amax_bits[part.group * args.rows + part.first_row + threadIdx.x], bits);
}

template <typename T>
__global__ void __launch_bounds__(kTurningThreads, kBlocksPerSm)
    column_cast_kernel(const __grid_constant__ ColumnsArgs args) {
    constexpr int kCount = kVector<T>, kRows = Part<T>::kRows;
    __shared__ TurnedTile<kCount> tile;
    __shared__ float2 scales[kRows]; /* and their reciprocals */
    const Part<T> part(args, gridDim.x - 1 - blockIdx.x);
    const int place = threadIdx.x % kLineVectors, line = threadIdx.x / kLineVectors;
    if (threadIdx.x < kRows) {
        const int64_t row = part.first_row + threadIdx.x, index = part.group * args.rows + row;
        float scale = 1.0f;
        if (row < args.rows)
            scale = args.scale_given ? args.scale[index] : scale_from_amax(args.amax_bits[index], args.e5m2);
        if (row < args.rows && !args.scale_given && part.first_column == 0) args.scale[index] = scale;
        scales[threadIdx.x] = make_float2(scale, __frcp_rn(scale));
    }
    __syncthreads();
    float2 scale[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) scale[i] = scales[place * kCount + i];
    uint8_t *const q = args.q + part.group * args.q_group_stride;
    Words vector[4];
    const auto load = [&](int64_t first) {
#pragma unroll
        for (int j = 0; j < 4; ++j) vector[j] = part.load(args, first + line * 4 + j);
    };
    load(part.first_column);
    for (int64_t first = part.first_column; first < part.end_column; first += kLineBytes) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            float value[4];
            for (int j = 0; j < 4; ++j) value[j] = element_of<T>(vector[j], i);
            auto *const word = reinterpret_cast<uint8_t *>(tile.word(place * kCount + i, line));
            store_vector(word, value, Divisor(scale[i].x, scale[i].y), args.e5m2, 4, true);
        }
        if (first + kLineBytes < part.end_column) load(first + kLineBytes); /* while these go out */
        __syncthreads();
        tile.store(q + part.first_row * args.q_stride + first, args.q_stride, args.rows - part.first_row,
                   part.end_column - first, args.q_aligned);
        __syncthreads();
    }
}

template <typename T>
fg_status launch(ColumnsArgs args, cudaStream_t stream, fg_error *error) {
    args.aligned = in_vectors<T>(args.x, args.column_stride, args.x_group_stride);
    args.q_aligned = in_vectors<uint8_t>(args.q, args.q_stride, args.q_group_stride);
    const int64_t strips = ceil_div<int64_t>(args.rows, Part<T>::kRows);
    const int64_t parts = ceil_div<int64_t>(args.columns, kPartColumns), blocks = args.groups * strips * parts;
    const fg_status status = check_grid(blocks, error);
    if (status != FG_OK || blocks == 0) return status;
    args.strips = static_cast<uint32_t>(strips);
    args.parts = static_cast<uint32_t>(parts);
    if (!args.scale_given) {
        FG_CUDA(cudaMemsetAsync(args.amax_bits, 0, sizeof(uint32_t) * args.groups * args.rows, stream));
        column_amax_kernel<T><<<static_cast<unsigned>(blocks), kTurningThreads, 0, stream>>>(args);
        FG_CUDA(cudaGetLastError());
    }
    column_cast_kernel<T><<<static_cast<unsigned>(blocks), kTurningThreads, 0, stream>>>(args);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

}  // namespace

fg_status quantize_columns(const fg_quantize_params *params, const QuantizeArgs &args, cudaStream_t stream,
                           fg_error *error) {
    ColumnsArgs columns = {};
    static_cast<QuantizeArgs &>(columns) = args;
    columns.column_stride = params->x.strides[params->x.ndim - 1];
    return dispatch_input(params, error, [&](auto *element, auto) -> fg_status {
        return launch<std::remove_pointer_t<decltype(element)>>(columns, stream, error);
    });
}

}  // namespace flexgemm
