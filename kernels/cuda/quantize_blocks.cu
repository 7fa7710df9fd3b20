/*
 * Cast to fp8 with a scale per block of 128 columns, of one row or of 128.
 *
 * A warp holds its rows in registers between the maximum and the cast: one read of x. A row's block belongs to 16 lanes
 * or 32, by the width of x; the warps of a thread block share the scales of a square of 128 rows.
 */
#include "quantize.cuh"

#include <algorithm>

namespace flexgemm {
namespace {

/* Elements of q that a lane takes: 16 bytes of 16-bit x, so that 16 lanes share a block and a warp takes two. */
template <typename T, bool kSwiglu>
constexpr int kLaneColumns = kOutputs<T, kSwiglu> > 4 ? kOutputs<T, kSwiglu> : 4;

template <typename T, bool kSwiglu>
constexpr int kWarpColumns = 32 * kLaneColumns<T, kSwiglu>;

/* kSquare: the rows of a thread block share their scales; more threads hold its rows in registers. */
template <bool kSquare>
constexpr int kBlockThreads = kSquare ? 512 : kThreads;

/* Rows of a warp. */
template <bool kSquare>
constexpr int kWarpRows = kSquare ? FG_SCALE_BLOCK_SIZE / (kBlockThreads<true> / 32) : 8;

/* Maximum over the lanes that share a block of columns. */
template <int kLanes>
__device__ __forceinline__ uint32_t lanes_max(uint32_t value) {
    if constexpr (kLanes == 32) {
        return __reduce_max_sync(0xffffffffu, value);
    } else {
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, step));
        return value;
    }
}

/* Of the maxima of kRows rows over kLanes lanes each lane gets that of row lane % kRows: at every step lanes exchange
 * half of the rows that they still have. */
template <int kLanes, int kRows>
__device__ __forceinline__ uint32_t row_max(uint32_t (&amax)[kRows]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = kRows / 2; half > 0; half /= 2) {
        const bool upper = lane & half;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const uint32_t mine = upper ? amax[i + half] : amax[i], other = upper ? amax[i] : amax[i + half];
            amax[i] = max(mine, __shfl_xor_sync(0xffffffffu, other, half));
        }
    }
    uint32_t result = amax[0];
#pragma unroll
    for (int step = kRows; step < kLanes; step *= 2) result = max(result, __shfl_xor_sync(0xffffffffu, result, step));
    return result;
}

template <typename T, bool kSwiglu, bool kSquare>
__global__ void __launch_bounds__(kBlockThreads<kSquare>, kBlocksPerSm *kThreads / kBlockThreads<kSquare>)
    block_kernel(const __grid_constant__ QuantizeArgs args) {
    constexpr int kRows = kWarpRows<kSquare>, kCount = kLaneColumns<T, kSwiglu>, kWarps = kBlockThreads<kSquare> / 32;
    constexpr int kLanes = FG_SCALE_BLOCK_SIZE / kCount; /* that share a block of columns */
    const uint32_t spans = static_cast<uint32_t>(ceil_div<int64_t>(args.columns, kWarpColumns<T, kSwiglu>));
    const uint32_t rest = blockIdx.x / spans, row_blocks = static_cast<uint32_t>(args.row_blocks);
    const int64_t group = rest / row_blocks, row_block = rest % row_blocks;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t first_row = (row_block * kWarps + warp) * kRows;
    const int64_t column = static_cast<int64_t>(blockIdx.x % spans) * kWarpColumns<T, kSwiglu> + lane * kCount;
    const int64_t column_block = column / FG_SCALE_BLOCK_SIZE;
    const int count = args.columns > column ? elements_at<kCount>(args.columns, column) : 0;
    Kept<T, kSwiglu, kCount> kept[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const bool valid = first_row + i < args.rows && count > 0;
        const T *x = input_at<kSwiglu, T>(args, valid ? first_row + i : 0, valid ? column : 0);
        kept[i].load(x + group * args.x_group_stride, valid ? count : 0, args.aligned);
    }

    const int64_t scale_rows = kSquare ? args.row_blocks : args.rows;
    float *const scales = args.scale + group * scale_rows * args.column_blocks + column_block;
    /* Of the block's rows, or of the row lane % kRows. */
    float value[kCount], scale = 1.0f;
    if constexpr (!kSquare) {
        const int64_t row = first_row + lane % kRows;
        float *const at = scales + row * args.column_blocks;
        const bool exists = row < args.rows && column_block < args.column_blocks;
        if (args.scale_given) {
            if (exists) scale = *at;
        } else {
            uint32_t amax[kRows];
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                kept[i].widen(value);
                amax[i] = amax_bits(value, args.saturate);
            }
            scale = scale_from_amax(row_max<kLanes>(amax), args.e5m2);
            if (exists && lane % kLanes < kRows) *at = scale;
        }
    } else {
        if (!args.scale_given) {
            __shared__ uint32_t warp_max[kWarps][32 / kLanes];
            uint32_t amax = 0;
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                kept[i].widen(value);
                amax = max(amax, amax_bits(value, args.saturate));
            }
            amax = lanes_max<kLanes>(amax);
            if (lane % kLanes == 0) warp_max[warp][lane / kLanes] = amax;
            __syncthreads();
            for (int other = 0; other < kWarps; ++other) amax = max(amax, warp_max[other][lane / kLanes]);
            scale = scale_from_amax(amax, args.e5m2);
            if (warp == 0 && lane % kLanes == 0 && count > 0) scales[row_block * args.column_blocks] = scale;
        } else if (count > 0) {
            scale = scales[row_block * args.column_blocks];
        }
    }
    const float reciprocal = __frcp_rn(scale);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const int64_t row = first_row + i;
        if (row >= args.rows) break; /* the whole warp */
        Divisor divisor(scale, reciprocal);
        if constexpr (!kSquare)
            divisor =
                Divisor(__shfl_sync(0xffffffffu, scale, i, kLanes), __shfl_sync(0xffffffffu, reciprocal, i, kLanes));
        kept[i].widen(value);
        if (count > 0)
            store_vector(args.q + group * args.q_group_stride + row * args.q_stride + column, value, divisor, args.e5m2,
                         count, args.aligned);
    }
}

/* ---- launch ---- */

template <typename T, bool kSwiglu, bool kSquare>
fg_status launch(QuantizeArgs args, cudaStream_t stream, fg_error *error) {
    constexpr int kOut = kLaneColumns<T, kSwiglu>, kInputs = kOut * (kSwiglu ? 2 : 1);
    args.aligned = rows_aligned<T>(args, std::min(kInputs, kVector<T>), kOut);
    args.row_blocks = ceil_div<int64_t>(args.rows, kWarpRows<kSquare> * (kBlockThreads<kSquare> / 32));
    args.column_blocks = ceil_div<int64_t>(args.columns, FG_SCALE_BLOCK_SIZE);
    const int64_t blocks = args.groups * args.row_blocks * ceil_div<int64_t>(args.columns, kWarpColumns<T, kSwiglu>);
    const fg_status status = check_grid(blocks, error);
    if (status != FG_OK || blocks == 0) return status;
    block_kernel<T, kSwiglu, kSquare><<<static_cast<unsigned>(blocks), kBlockThreads<kSquare>, 0, stream>>>(args);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

}  // namespace

fg_status quantize_blocks(const fg_quantize_params *params, const QuantizeArgs &args, cudaStream_t stream,
                          fg_error *error) {
    return dispatch_input(params, error, [&](auto *element, auto swiglu) -> fg_status {
        using T = std::remove_pointer_t<decltype(element)>;
        return params->block_rows == 1 ? launch<T, swiglu(), false>(args, stream, error)
                                       : launch<T, swiglu(), true>(args, stream, error);
    });
}

}  // namespace flexgemm
