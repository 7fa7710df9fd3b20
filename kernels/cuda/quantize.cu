/*
 * Cast to fp8 with a scale per tensor or per row: q = saturate(x / scale), scale = amax / max_finite(q).
 *
 * Bound by memory. A thread takes 16 bytes of x at a time, a warp 512 adjacent ones; where a row's address does not
 * allow that, the same elements go one by one. Per tensor: a pass for amax (an integer maximum over the bits of |x|,
 * which orders non-negative floats and does not depend on the order of the blocks), a pass for the cast. Per row: one
 * warp, or for long rows one block, reads its row twice, the second time from cache.
 */
#include <algorithm>

#include "backend.cuh"
#include "common.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 8; /* grid-stride passes: enough to fill an SM's threads */
constexpr uint32_t kInfinityBits = 0x7f800000u;

struct QuantizeArgs {
    const void *x;
    uint8_t *q;
    int64_t rows, columns, x_stride, q_stride; /* elements */
    bool aligned; /* 16-byte loads of x and as wide stores of q may start at every row's begin */
    bool e5m2, scale_given;
    float *scale;
    uint32_t *amax_bits; /* of the tensor */
};

/* ---- elements ---- */

template <typename T>
constexpr int kVector = 16 / sizeof(T); /* elements of one load */

/* `count` elements, zeros behind. */
template <typename T>
__device__ __forceinline__ void load_vector(float (&value)[kVector<T>], const T *x, int count, bool aligned) {
    struct alignas(16) Vector {
        T element[kVector<T>];
    };
    if (aligned && count == kVector<T>) {
        const Vector vector = *reinterpret_cast<const Vector *>(x);
        for (int i = 0; i < kVector<T>; ++i) value[i] = to_float(vector.element[i]);
    } else {
        for (int i = 0; i < kVector<T>; ++i) value[i] = i < count ? to_float(x[i]) : 0.0f;
    }
}

/* cuda_fp8.h rounds to nearest even, saturates infinities with the rest and maps every NaN to 0x7f, by instruction
 * from sm_89 and in software before. */
template <int kCount>
__device__ __forceinline__ void store_vector(uint8_t *q, const float (&value)[kCount], float scale, bool e5m2,
                                             int count, bool aligned) {
    struct alignas(kCount) Vector {
        __nv_fp8x2_storage_t pair[kCount / 2];
    } vector;
    for (int i = 0; i < kCount / 2; ++i) {
        const float2 scaled = make_float2(__fdiv_rn(value[2 * i], scale), __fdiv_rn(value[2 * i + 1], scale));
        vector.pair[i] = e5m2 ? __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E5M2)
                              : __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
    }
    if (aligned && count == kCount)
        *reinterpret_cast<Vector *>(q) = vector;
    else
        for (int i = 0; i < kCount; ++i)
            if (i < count) q[i] = static_cast<uint8_t>(vector.pair[i / 2] >> (8 * (i % 2)));
}

/* Bits of |x| where finite, else 0. */
__device__ __forceinline__ uint32_t finite_magnitude(float x) {
    const uint32_t bits = __float_as_uint(x) & 0x7fffffffu;
    return bits < kInfinityBits ? bits : 0;
}

/* A scale of 0, from zeros or by underflow, would divide by zero. */
__device__ __forceinline__ float scale_from_amax(uint32_t amax_bits, bool e5m2) {
    const float scale = __fdiv_rn(__uint_as_float(amax_bits), e5m2 ? 57344.0f : 448.0f);
    return scale == 0.0f ? 1.0f : scale;
}

/* Elements of a row in front of `column`, at most one vector. */
template <typename T>
__device__ __forceinline__ int elements_at(const QuantizeArgs &args, int64_t column) {
    return args.columns - column < kVector<T> ? static_cast<int>(args.columns - column) : kVector<T>;
}

/* Maximum over the block, on every thread. */
__device__ __forceinline__ uint32_t block_max(uint32_t value) {
    __shared__ uint32_t warp_max[kThreads / 32];
    value = __reduce_max_sync(0xffffffffu, value);
    if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = value;
    __syncthreads();
    for (int warp = 0; warp < kThreads / 32; ++warp) value = max(value, warp_max[warp]);
    return value;
}

/* ---- per tensor ---- */

/* Vectors of a tensor in row order, dealt to all threads of the grid. */
template <typename T, typename Body>
__device__ __forceinline__ void for_each_vector(const QuantizeArgs &args, Body body) {
    const int64_t per_row = ceil_div<int64_t>(args.columns, kVector<T>);
    const int64_t total = args.rows * per_row, step = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total; i += step) {
        const int64_t row = args.rows == 1 ? 0 : i / per_row;
        body(row, (i - row * per_row) * kVector<T>);
    }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) tensor_amax_kernel(const __grid_constant__ QuantizeArgs args) {
    uint32_t amax = 0;
    for_each_vector<T>(args, [&](int64_t row, int64_t column) {
        float value[kVector<T>];
        load_vector(value, static_cast<const T *>(args.x) + row * args.x_stride + column, elements_at<T>(args, column),
                    args.aligned);
        for (float v : value) amax = max(amax, finite_magnitude(v));
    });
    amax = block_max(amax);
    if (threadIdx.x == 0 && amax != 0) atomicMax(args.amax_bits, amax);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) tensor_cast_kernel(const __grid_constant__ QuantizeArgs args) {
    const float scale = args.scale_given ? *args.scale : scale_from_amax(*args.amax_bits, args.e5m2);
    if (!args.scale_given && blockIdx.x == 0 && threadIdx.x == 0) *args.scale = scale;
    for_each_vector<T>(args, [&](int64_t row, int64_t column) {
        float value[kVector<T>];
        const int count = elements_at<T>(args, column);
        load_vector(value, static_cast<const T *>(args.x) + row * args.x_stride + column, count, args.aligned);
        store_vector(args.q + row * args.q_stride + column, value, scale, args.e5m2, count, args.aligned);
    });
}

/* ---- per row ---- */

constexpr int64_t kWarpRowColumns = 2048; /* longer rows take a block */

template <typename T, int kThreadsPerRow>
__global__ void __launch_bounds__(kThreads) row_kernel(const __grid_constant__ QuantizeArgs args) {
    constexpr int kRowsPerBlock = kThreads / kThreadsPerRow;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kThreadsPerRow;
    if (row >= args.rows) return; /* whole warps or the whole block */
    const T *x = static_cast<const T *>(args.x) + row * args.x_stride;
    uint8_t *q = args.q + row * args.q_stride;
    const int64_t first = threadIdx.x % kThreadsPerRow * kVector<T>;
    constexpr int kStep = kThreadsPerRow * kVector<T>;
    float value[kVector<T>];

    float scale;
    if (args.scale_given) {
        scale = args.scale[row];
    } else {
        uint32_t amax = 0;
        for (int64_t column = first; column < args.columns; column += kStep) {
            load_vector(value, x + column, elements_at<T>(args, column), args.aligned);
            for (float v : value) amax = max(amax, finite_magnitude(v));
        }
        amax = kThreadsPerRow == 32 ? __reduce_max_sync(0xffffffffu, amax) : block_max(amax);
        scale = scale_from_amax(amax, args.e5m2);
        if (first == 0) args.scale[row] = scale;
    }
    for (int64_t column = first; column < args.columns; column += kStep) {
        const int count = elements_at<T>(args, column);
        load_vector(value, x + column, count, args.aligned);
        store_vector(q + column, value, scale, args.e5m2, count, args.aligned);
    }
}

/* ---- launch ---- */

template <typename T>
void align_rows(QuantizeArgs &args) {
    const bool begin =
        reinterpret_cast<uintptr_t>(args.x) % 16 == 0 && reinterpret_cast<uintptr_t>(args.q) % kVector<T> == 0;
    args.aligned = begin && (args.rows == 1 || (args.x_stride % kVector<T> == 0 && args.q_stride % kVector<T> == 0));
}

template <typename T>
fg_status quantize_tensor(QuantizeArgs &args, cudaStream_t stream, int num_sms, fg_error *error) {
    if (args.x_stride == args.columns && args.q_stride == args.columns) {
        args.columns *= args.rows; /* one long row: no division, and only its begin needs alignment */
        args.rows = 1;
        args.x_stride = args.q_stride = 0;
    }
    align_rows<T>(args);
    const int64_t vectors = args.rows * ceil_div<int64_t>(args.columns, kVector<T>);
    const int64_t wanted = std::clamp<int64_t>(ceil_div<int64_t>(vectors, kThreads), 1, num_sms * kBlocksPerSm);
    const unsigned blocks = static_cast<unsigned>(wanted);
    if (!args.scale_given) {
        FG_CUDA(cudaMemsetAsync(args.amax_bits, 0, sizeof *args.amax_bits, stream));
        tensor_amax_kernel<T><<<blocks, kThreads, 0, stream>>>(args);
        FG_CUDA(cudaGetLastError());
    }
    tensor_cast_kernel<T><<<blocks, kThreads, 0, stream>>>(args);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

template <typename T>
fg_status quantize_rows(QuantizeArgs &args, cudaStream_t stream, fg_error *error) {
    align_rows<T>(args);
    const bool by_warp = args.columns <= kWarpRowColumns;
    const int64_t blocks = by_warp ? ceil_div<int64_t>(args.rows, kThreads / 32) : args.rows;
    if (blocks > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "x: expected fewer than 2^31 row blocks, got %lld",
                       static_cast<long long>(blocks));
    if (by_warp)
        row_kernel<T, 32><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args);
    else
        row_kernel<T, kThreads><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

template <typename T>
fg_status quantize_as(const fg_quantize_params *params, const fg_queue *queue, fg_error *error) {
    QuantizeArgs args = {};
    args.x = params->x.data;
    args.q = static_cast<uint8_t *>(params->q.data);
    args.rows = params->x.shape[0];
    args.columns = params->x.shape[1];
    args.x_stride = params->x.strides[0];
    args.q_stride = params->q.strides[0];
    args.e5m2 = params->q.dtype == FG_FLOAT8_E5M2;
    args.scale_given = params->scale_given;
    args.scale = static_cast<float *>(params->scale.data);
    args.amax_bits = static_cast<uint32_t *>(params->workspace.data);

    int num_sms = 0, compute_capability = 0;
    const fg_status status = device_properties(queue->device_index, &num_sms, &compute_capability, error);
    if (status != FG_OK) return status;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    if (params->kind == FG_SCALE_TENSOR) return quantize_tensor<T>(args, stream_of(queue), num_sms, error);
    return args.rows > 0 ? quantize_rows<T>(args, stream_of(queue), error) : FG_OK;
}

}  // namespace

fg_status quantize_workspace(const fg_quantize_params *params, const fg_queue *queue, size_t *bytes, fg_error *error) {
    (void)queue, (void)error;
    *bytes = params->kind == FG_SCALE_TENSOR && !params->scale_given ? sizeof(uint32_t) : 0;
    return FG_OK;
}

fg_status quantize(const fg_quantize_params *params, const fg_queue *queue, fg_error *error) {
    switch (params->x.dtype) {
        case FG_FLOAT32:
            return quantize_as<float>(params, queue, error);
        case FG_FLOAT16:
            return quantize_as<__half>(params, queue, error);
        case FG_BFLOAT16:
            return quantize_as<__nv_bfloat16>(params, queue, error);
        default:
            return fg_fail(error, FG_ERROR_TYPE, "x: expected float32, float16 or bfloat16, got %s",
                           fg_dtype_name(params->x.dtype));
    }
}

}  // namespace flexgemm
