/*
 * Cast to fp8 with a scale per tensor, row or block: q = saturate(x / scale), scale = amax / max_finite(q).
 *
 * Bound by memory. A thread takes 16 bytes of x at a time, a warp 512 adjacent ones; where a row's address does not
 * allow that, the same elements go one by one. Per tensor: a pass for amax (an integer maximum over the bits of |x|,
 * which orders non-negative floats and does not depend on the order of the blocks), a pass for the cast, which begins
 * at the end, where the first has left x in L2. Per row: one warp, or for long rows one block, holds the row in
 * registers between the two passes, and reads what does not fit a second time. Per block: quantize_blocks.cu.
 *
 * An x that lies the other way round, its columns adjacent, has kernels of its own for a scale per row
 * (quantize_columns.cu); for anything else it is transposed first.
 *
 * With SwiGLU two elements of x, gate and up, make one that is cast.
 */
#include "quantize.cuh"

#include <algorithm>

#include "backend.cuh"
#include "transpose.cuh"

namespace flexgemm {
namespace {

/* ---- per tensor ---- */

/* Maximum over a block of kCount threads, on every one. */
template <int kCount>
__device__ __forceinline__ uint32_t block_max(uint32_t value) {
    __shared__ uint32_t warp_max[kCount / 32];
    value = __reduce_max_sync(0xffffffffu, value);
    if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = value;
    __syncthreads();
    for (int warp = 0; warp < kCount / 32; ++warp) value = max(value, warp_max[warp]);
    return value;
}

/* Vectors of kCount elements of a tensor in row order, dealt to all threads of the grid, kAhead of them loaded before
 * the first is worked on. kBackward: from the last to the first. */
template <typename T, bool kSwiglu, bool kBackward, typename Body>
__device__ __forceinline__ void for_each_vector(const QuantizeArgs &args, Body body) {
    constexpr int kCount = kOutputs<T, kSwiglu>, kAhead = 4;
    const int64_t per_row = ceil_div<int64_t>(args.columns, kCount);
    const int64_t total = args.rows * per_row, step = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total; i += kAhead * step) {
        Kept<T, kSwiglu, kCount> kept[kAhead];
        int64_t row[kAhead], column[kAhead];
        int count[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int64_t at = kBackward ? total - 1 - (i + j * step) : i + j * step;
            const bool valid = i + j * step < total;
            row[j] = !valid || args.rows == 1 ? 0 : at / per_row;
            column[j] = valid ? (at - row[j] * per_row) * kCount : 0;
            count[j] = valid ? elements_at<kCount>(args.columns, column[j]) : 0;
            kept[j].load(input_at<kSwiglu, T>(args, row[j], column[j]), count[j], args.aligned);
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            float value[kCount];
            kept[j].widen(value);
            body(row[j], column[j], value, count[j]);
        }
    }
}

template <typename T, bool kSwiglu>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    tensor_amax_kernel(const __grid_constant__ QuantizeArgs args) {
    constexpr int kCount = kOutputs<T, kSwiglu>;
    uint32_t amax = 0;
    for_each_vector<T, kSwiglu, false>(args, [&](int64_t, int64_t, const float (&value)[kCount], int) {
        amax = max(amax, amax_bits(value, args.saturate));
    });
    amax = block_max<kThreads>(amax);
    if (threadIdx.x == 0 && amax != 0) atomicMax(args.amax_bits, amax);
}

template <typename T, bool kSwiglu>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    tensor_cast_kernel(const __grid_constant__ QuantizeArgs args) {
    constexpr int kCount = kOutputs<T, kSwiglu>;
    const float scale = args.scale_given ? *args.scale : scale_from_amax(*args.amax_bits, args.e5m2);
    if (!args.scale_given && blockIdx.x == 0 && threadIdx.x == 0) *args.scale = scale;
    const Divisor divisor(scale);
    for_each_vector<T, kSwiglu, true>(args, [&](int64_t row, int64_t column, const float (&value)[kCount], int count) {
        store_vector(args.q + row * args.q_stride + column, value, divisor, args.e5m2, count, args.aligned);
    });
}

/* ---- per row ---- */

constexpr int64_t kWarpRowColumns = 1024; /* longer rows take a block */
constexpr int kLongRowThreads = 128;

/* A short row has a warp, a long one a block. */
template <int kThreadsPerRow>
constexpr int kRowThreads = kThreadsPerRow == 32 ? kThreads : kThreadsPerRow;

template <typename T, bool kSwiglu, int kThreadsPerRow>
__global__ void __launch_bounds__(kRowThreads<kThreadsPerRow>, kBlocksPerSm *kThreads / kRowThreads<kThreadsPerRow>)
    row_kernel(const __grid_constant__ QuantizeArgs args) {
    constexpr int kRowsPerBlock = kRowThreads<kThreadsPerRow> / kThreadsPerRow, kCount = kOutputs<T, kSwiglu>;
    constexpr int kInputs = kSwiglu ? 2 : 1;
    constexpr int kKeptVectors = kThreadsPerRow == 32 ? 4 : 8; /* of a thread; those behind are read twice */
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kThreadsPerRow;
    if (index >= args.groups * args.rows) return; /* whole warps or the whole block */
    const int64_t group = args.groups == 1 ? 0 : index / args.rows, row = index - group * args.rows;
    const T *x = input_at<kSwiglu, T>(args, row, 0) + group * args.x_group_stride;
    uint8_t *q = args.q + group * args.q_group_stride + row * args.q_stride;
    const int64_t first = threadIdx.x % kThreadsPerRow * kCount;
    constexpr int kStep = kThreadsPerRow * kCount;
    float value[kCount];

    Kept<T, kSwiglu, kCount> kept[kKeptVectors];
#pragma unroll
    for (int i = 0; i < kKeptVectors; ++i) {
        const int64_t column = first + i * kStep;
        const int count = column < args.columns ? elements_at<kCount>(args.columns, column) : 0;
        kept[i].load(x + (count > 0 ? column : 0) * kInputs, count, args.aligned);
    }

    float scale;
    if (args.scale_given) {
        scale = args.scale[index];
    } else {
        uint32_t amax = 0;
#pragma unroll
        for (int i = 0; i < kKeptVectors; ++i) {
            kept[i].widen(value);
            amax = max(amax, amax_bits(value, args.saturate));
        }
        for (int64_t column = first + kKeptVectors * kStep; column < args.columns; column += kStep) {
            load_vector<kSwiglu>(value, x + column * kInputs, elements_at<kCount>(args.columns, column), args.aligned);
            amax = max(amax, amax_bits(value, args.saturate));
        }
        amax = kThreadsPerRow == 32 ? __reduce_max_sync(0xffffffffu, amax) : block_max<kLongRowThreads>(amax);
        scale = scale_from_amax(amax, args.e5m2);
        if (first == 0) args.scale[index] = scale;
    }
    const Divisor divisor(scale);
#pragma unroll
    for (int i = 0; i < kKeptVectors; ++i) {
        const int64_t column = first + i * kStep;
        if (column >= args.columns) break;
        kept[i].widen(value);
        store_vector(q + column, value, divisor, args.e5m2, elements_at<kCount>(args.columns, column), args.aligned);
    }
    for (int64_t column = first + kKeptVectors * kStep; column < args.columns; column += kStep) {
        const int count = elements_at<kCount>(args.columns, column);
        load_vector<kSwiglu>(value, x + column * kInputs, count, args.aligned);
        store_vector(q + column, value, divisor, args.e5m2, count, args.aligned);
    }
}

/* ---- launch ---- */

template <typename T, bool kSwiglu>
fg_status quantize_tensor(QuantizeArgs &args, cudaStream_t stream, int num_sms, fg_error *error) {
    if (args.x_stride == args.columns * (kSwiglu ? 2 : 1) && args.q_stride == args.columns) {
        args.columns *= args.rows; /* one long row: no division, and only its begin needs alignment */
        args.rows = 1;
        args.x_stride = args.q_stride = 0;
    }
    args.aligned = rows_aligned<T>(args, kVector<T>, kOutputs<T, kSwiglu>);
    const int64_t vectors = args.rows * ceil_div<int64_t>(args.columns, kOutputs<T, kSwiglu>);
    const int64_t wanted = std::clamp<int64_t>(ceil_div<int64_t>(vectors, kThreads), 1, num_sms * kBlocksPerSm);
    const unsigned blocks = static_cast<unsigned>(wanted);
    if (!args.scale_given) {
        FG_CUDA(cudaMemsetAsync(args.amax_bits, 0, sizeof *args.amax_bits, stream));
        tensor_amax_kernel<T, kSwiglu><<<blocks, kThreads, 0, stream>>>(args);
        FG_CUDA(cudaGetLastError());
    }
    tensor_cast_kernel<T, kSwiglu><<<blocks, kThreads, 0, stream>>>(args);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

template <typename T, bool kSwiglu>
fg_status quantize_rows(QuantizeArgs &args, cudaStream_t stream, fg_error *error) {
    args.aligned = rows_aligned<T>(args, kVector<T>, kOutputs<T, kSwiglu>);
    const bool by_warp = args.columns <= kWarpRowColumns;
    const int64_t rows = args.groups * args.rows, blocks = by_warp ? ceil_div<int64_t>(rows, kThreads / 32) : rows;
    const fg_status status = check_grid(blocks, error);
    if (status != FG_OK || blocks == 0) return status;
    if (by_warp)
        row_kernel<T, kSwiglu, 32><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args);
    else
        row_kernel<T, kSwiglu, kLongRowThreads><<<static_cast<unsigned>(blocks), kLongRowThreads, 0, stream>>>(args);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

bool casts_columns(const fg_quantize_params *params) {
    return fg_lies_in_columns(&params->x) && params->kind == FG_SCALE_ROW && !params->swiglu;
}

bool transposes(const fg_quantize_params *params) { return fg_lies_in_columns(&params->x) && !casts_columns(params); }

QuantizeArgs make_args(const fg_quantize_params *params) {
    const fg_tensor &x = params->x, &q = params->q;
    const int rows_axis = q.ndim - 2;
    const auto step = [](const fg_tensor &tensor, int axis) {
        return tensor.shape[axis] == 1 ? 0 : tensor.strides[axis];
    };
    QuantizeArgs args = {};
    args.x = x.data;
    args.q = static_cast<uint8_t *>(q.data);
    args.groups = q.ndim == 3 ? q.shape[0] : 1;
    args.rows = q.shape[rows_axis];
    args.columns = q.shape[rows_axis + 1];
    args.x_stride = step(x, rows_axis);
    args.q_stride = step(q, rows_axis);
    if (q.ndim == 3) {
        args.x_group_stride = step(x, 0);
        args.q_group_stride = step(q, 0);
    }
    args.e5m2 = q.dtype == FG_FLOAT8_E5M2;
    args.scale_given = params->scale_given;
    args.saturate = params->saturate;
    args.scale = static_cast<float *>(params->scale.data);
    return args;
}

}  // namespace

fg_status quantize_workspace(const fg_quantize_params *params, const fg_queue *queue, size_t *bytes, fg_error *error) {
    (void)queue, (void)error;
    *bytes = transposes(params) ? transposed_bytes(fg_exchanged(&params->x)) : 0;
    if (params->scale_given) return FG_OK;
    if (params->kind == FG_SCALE_TENSOR) *bytes += sizeof(uint32_t);
    if (!casts_columns(params)) return FG_OK;
    const fg_tensor &q = params->q;
    const int64_t rows = q.shape[q.ndim - 2] * (q.ndim == 3 ? q.shape[0] : 1);
    *bytes += sizeof(uint32_t) * static_cast<size_t>(rows);
    return FG_OK;
}

fg_status quantize(const fg_quantize_params *params, const fg_queue *queue, fg_error *error) {
    int num_sms = 0, compute_capability = 0;
    fg_status status = device_properties(queue->device_index, &num_sms, &compute_capability, error);
    if (status != FG_OK) return status;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const cudaStream_t stream = stream_of(queue);
    fg_quantize_params given = *params;
    char *amax = static_cast<char *>(params->workspace.data);
    if (transposes(params)) {
        const fg_tensor x = fg_exchanged(&params->x);
        given.x = transposed(x, amax);
        status = transpose(x, given.x, INT32_MAX, queue, error);
        if (status != FG_OK) return status;
        amax += transposed_bytes(x);
    }
    QuantizeArgs args = make_args(&given);
    args.amax_bits = reinterpret_cast<uint32_t *>(amax);
    if (casts_columns(params)) return quantize_columns(&given, args, stream, error);
    if (params->kind == FG_SCALE_BLOCK) return quantize_blocks(&given, args, stream, error);
    return dispatch_input(params, error, [&](auto *element, auto swiglu) -> fg_status {
        using T = std::remove_pointer_t<decltype(element)>;
        if (params->kind == FG_SCALE_ROW) return quantize_rows<T, swiglu()>(args, stream, error);
        return quantize_tensor<T, swiglu()>(args, stream, num_sms, error);
    });
}

}  // namespace flexgemm
