/*
 * Cast to fp8 with a scale per tensor, row or block: q = saturate(x / scale), scale = amax / max_finite(q).
 *
 * Bound by memory. A thread takes 16 bytes of x at a time, a warp 512 adjacent ones; where a row's address does not
 * allow that, the same elements go one by one. Per tensor: a pass for amax (an integer maximum over the bits of |x|,
 * which orders non-negative floats and does not depend on the order of the blocks), a pass for the cast, which begins
 * at the end, where the first has left x in L2. Per row: one warp, or for long rows one block, holds the row in
 * registers between the two passes, and reads what does not fit a second time. Per block of 128 columns: a warp holds
 * its rows in registers.
 *
 * With SwiGLU two elements of x, gate and up, make one that is cast.
 */
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "activation.cuh"
#include "backend.cuh"
#include "common.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 4; /* that reside together: half of an SM's threads, each with several loads under way */
constexpr uint32_t kInfinityBits = 0x7f800000u;

struct QuantizeArgs {
    const void *x;
    uint8_t *q;
    int64_t rows, columns, x_stride, q_stride; /* elements; columns of q */
    int64_t x_group_stride, q_group_stride;    /* of blocks */
    int64_t row_blocks, column_blocks;
    bool aligned; /* 16-byte loads of x and as wide stores of q may start at every row's begin */
    bool e5m2, scale_given;
    float *scale;
    uint32_t *amax_bits; /* of the tensor */
};

/* ---- elements ---- */

template <typename T>
constexpr int kVector = 16 / sizeof(T); /* elements of one load */

/* Elements of q that one load of x gives. */
template <typename T, bool kSwiglu>
constexpr int kOutputs = kVector<T> / (kSwiglu ? 2 : 1);

/* The first kCount of x[0 .. count), widened, zeros behind; 16 bytes at a time where that is allowed. */
template <typename T, int kCount>
__device__ __forceinline__ void load_elements(float (&value)[kCount], const T *x, int count, bool aligned) {
    constexpr int kPart = kCount < kVector<T> ? kCount : kVector<T>;
    struct alignas(kPart * sizeof(T)) Vector {
        T element[kPart];
    };
    if (aligned && count == kCount) {
#pragma unroll
        for (int part = 0; part < kCount; part += kPart) {
            const Vector vector = *reinterpret_cast<const Vector *>(x + part);
            for (int i = 0; i < kPart; ++i) value[part + i] = to_float(vector.element[i]);
        }
    } else {
        for (int i = 0; i < kCount; ++i) value[i] = i < count ? to_float(x[i]) : 0.0f;
    }
}

/* The first `count` numbers that are cast, of those that x leads to. */
template <bool kSwiglu, typename T, int kCount>
__device__ __forceinline__ void load_vector(float (&value)[kCount], const T *x, int count, bool aligned) {
    if constexpr (kSwiglu) {
        float pair[2 * kCount];
        load_elements(pair, x, 2 * count, aligned);
        for (int i = 0; i < kCount; ++i) value[i] = silu(pair[2 * i]) * pair[2 * i + 1];
    } else {
        load_elements(value, x, count, aligned);
    }
}

/* Division by one scale of many numbers, rounded as a division is: a product with the reciprocal and one correction by
 * the remainder, which is exact as long as nothing of it leaves the range of float32. That is so for scales of a middle
 * size and quotients that fp8 tells from zero or from its largest number; beyond, infinities and NaN are the product's. */
struct Divisor {
    float scale, reciprocal;
    bool middle;

    __device__ explicit Divisor(float by) { *this = Divisor(by, __frcp_rn(by)); }

    __device__ Divisor(float by, float rounded_reciprocal) {
        scale = by;
        reciprocal = rounded_reciprocal;
        middle = by > 0x1p-80f && by < 0x1p80f;
    }

    template <int kCount>
    __device__ __forceinline__ void divide(float (&quotient)[kCount], const float (&x)[kCount]) const {
        if (middle) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                const float product = x[i] * reciprocal;
                const float excess = fmaf(product, scale, -x[i]); /* +0 for both zeros, so that their signs stay */
                const float corrected = fmaf(excess, -reciprocal, product);
                quotient[i] = fabsf(product) < 0x1p20f ? corrected : product;
            }
        } else {
#pragma unroll
            for (int i = 0; i < kCount; ++i) quotient[i] = plain_quotient(x[i], scale);
        }
    }

    static __device__ __noinline__ float plain_quotient(float x, float by) { return __fdiv_rn(x, by); }
};

/* cuda_fp8.h rounds to nearest even, saturates infinities with the rest and maps every NaN to 0x7f, by instruction
 * from sm_89 and in software before. */
template <int kCount>
__device__ __forceinline__ void store_vector(uint8_t *q, const float (&value)[kCount], const Divisor &scale, bool e5m2,
                                             int count, bool aligned) {
    struct alignas(kCount) Vector {
        __nv_fp8x2_storage_t pair[kCount / 2];
    } vector;
    float scaled[kCount];
    scale.divide(scaled, value);
    const auto cast = [&](__nv_fp8_interpretation_t kind) {
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i)
            vector.pair[i] =
                __nv_cvt_float2_to_fp8x2(make_float2(scaled[2 * i], scaled[2 * i + 1]), __NV_SATFINITE, kind);
    };
    if (e5m2)
        cast(__NV_E5M2);
    else
        cast(__NV_E4M3);
    if (aligned && count == kCount)
        *reinterpret_cast<Vector *>(q) = vector;
    else
        for (int i = 0; i < kCount; ++i)
            if (i < count) q[i] = static_cast<uint8_t>(vector.pair[i / 2] >> (8 * (i % 2)));
}

/* Bits of the largest |x| of those that are finite. fmaxf() passes over NaN; an infinity is rare enough to look twice. */
template <int kCount>
__device__ __forceinline__ uint32_t finite_amax(const float (&value)[kCount]) {
    float amax = 0;
    for (float x : value) amax = fmaxf(amax, fabsf(x));
    if (__float_as_uint(amax) < kInfinityBits) return __float_as_uint(amax);
    amax = 0;
    for (float x : value)
        if (__float_as_uint(fabsf(x)) < kInfinityBits) amax = fmaxf(amax, fabsf(x));
    return __float_as_uint(amax);
}

/* A scale of 0, from zeros or by underflow, would divide by zero. */
__device__ __forceinline__ float scale_from_amax(uint32_t amax_bits, bool e5m2) {
    const float scale = __fdiv_rn(__uint_as_float(amax_bits), e5m2 ? 57344.0f : 448.0f);
    return scale == 0.0f ? 1.0f : scale;
}

/* Elements of a row in front of `column`, at most kCount. */
template <int kCount>
__device__ __forceinline__ int elements_at(int64_t columns, int64_t column) {
    return columns - column < kCount ? static_cast<int>(columns - column) : kCount;
}

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

template <bool kSwiglu, typename T>
__device__ __forceinline__ const T *input_at(const QuantizeArgs &args, int64_t row, int64_t column) {
    return static_cast<const T *>(args.x) + row * args.x_stride + column * (kSwiglu ? 2 : 1);
}

/* What a thread keeps of one load between the two passes: the elements as they came, or what SwiGLU made of them. They
 * are kept as words: 16-bit elements would each take a register. */
template <typename T, bool kSwiglu, int kCount>
struct Kept {
    using Element = std::conditional_t<kSwiglu, float, T>;
    struct alignas(16) Words {
        uint32_t word[kCount * sizeof(Element) / 4];
    } words;

    __device__ __forceinline__ void load(const T *x, int count, bool aligned) {
        if constexpr (!kSwiglu) {
            if (aligned && count == kCount) {
                words = *reinterpret_cast<const Words *>(x);
                return;
            }
        }
        Element element[kCount];
        if constexpr (kSwiglu)
            load_vector<true>(element, x, count, aligned);
        else
            for (int i = 0; i < kCount; ++i) element[i] = i < count ? x[i] : from_float<T>(0.0f);
        memcpy(&words, element, sizeof element);
    }

    __device__ __forceinline__ void widen(float (&value)[kCount]) const {
        Element element[kCount];
        memcpy(element, &words, sizeof element);
        for (int i = 0; i < kCount; ++i) value[i] = to_float(element[i]);
    }
};

/* ---- per tensor ---- */

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
    for_each_vector<T, kSwiglu, false>(
        args, [&](int64_t, int64_t, const float (&value)[kCount], int) { amax = max(amax, finite_amax(value)); });
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
    constexpr int kKeptVectors = kThreadsPerRow == 32 ? 4 : 8; /* of a thread; those behind are read twice */
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kThreadsPerRow;
    if (row >= args.rows) return; /* whole warps or the whole block */
    uint8_t *q = args.q + row * args.q_stride;
    const int64_t first = threadIdx.x % kThreadsPerRow * kCount;
    constexpr int kStep = kThreadsPerRow * kCount;
    float value[kCount];

    Kept<T, kSwiglu, kCount> kept[kKeptVectors];
#pragma unroll
    for (int i = 0; i < kKeptVectors; ++i) {
        const int64_t column = first + i * kStep;
        const int count = column < args.columns ? elements_at<kCount>(args.columns, column) : 0;
        kept[i].load(input_at<kSwiglu, T>(args, row, count > 0 ? column : 0), count, args.aligned);
    }

    float scale;
    if (args.scale_given) {
        scale = args.scale[row];
    } else {
        uint32_t amax = 0;
#pragma unroll
        for (int i = 0; i < kKeptVectors; ++i) {
            kept[i].widen(value);
            amax = max(amax, finite_amax(value));
        }
        for (int64_t column = first + kKeptVectors * kStep; column < args.columns; column += kStep) {
            load_vector<kSwiglu>(value, input_at<kSwiglu, T>(args, row, column),
                                 elements_at<kCount>(args.columns, column), args.aligned);
            amax = max(amax, finite_amax(value));
        }
        amax = kThreadsPerRow == 32 ? __reduce_max_sync(0xffffffffu, amax) : block_max<kLongRowThreads>(amax);
        scale = scale_from_amax(amax, args.e5m2);
        if (first == 0) args.scale[row] = scale;
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
        load_vector<kSwiglu>(value, input_at<kSwiglu, T>(args, row, column), count, args.aligned);
        store_vector(q + column, value, divisor, args.e5m2, count, args.aligned);
    }
}

/* ---- per block of 128 columns ---- */

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

/* Of the maxima of kRows rows over kLanes lanes each lane gets that of row lane % kRows: at every step lanes exchange half
 * of the rows that they still have. */
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
                amax[i] = finite_amax(value);
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
                amax = max(amax, finite_amax(value));
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

/* Whether loads of `inputs` elements of x and stores of `outputs` of q may start at every row's begin. */
template <typename T>
bool rows_aligned(const QuantizeArgs &args, int inputs, int outputs) {
    const auto strides_fit = [](int64_t stride, int64_t group_stride, int count) {
        return stride % count == 0 && group_stride % count == 0;
    };
    return reinterpret_cast<uintptr_t>(args.x) % (inputs * sizeof(T)) == 0 &&
           reinterpret_cast<uintptr_t>(args.q) % static_cast<unsigned>(outputs) == 0 &&
           strides_fit(args.x_stride, args.x_group_stride, inputs) &&
           strides_fit(args.q_stride, args.q_group_stride, outputs);
}

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

fg_status check_grid(int64_t blocks, fg_error *error) {
    if (blocks <= INT32_MAX) return FG_OK;
    return fg_fail(error, FG_ERROR_VALUE, "x: expected fewer than 2^31 blocks of rows, got %lld",
                   static_cast<long long>(blocks));
}

template <typename T, bool kSwiglu>
fg_status quantize_rows(QuantizeArgs &args, cudaStream_t stream, fg_error *error) {
    args.aligned = rows_aligned<T>(args, kVector<T>, kOutputs<T, kSwiglu>);
    const bool by_warp = args.columns <= kWarpRowColumns;
    const int64_t blocks = by_warp ? ceil_div<int64_t>(args.rows, kThreads / 32) : args.rows;
    const fg_status status = check_grid(blocks, error);
    if (status != FG_OK || blocks == 0) return status;
    if (by_warp)
        row_kernel<T, kSwiglu, 32><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args);
    else
        row_kernel<T, kSwiglu, kLongRowThreads><<<static_cast<unsigned>(blocks), kLongRowThreads, 0, stream>>>(args);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

template <typename T, bool kSwiglu, bool kSquare>
fg_status quantize_blocks(QuantizeArgs &args, int64_t groups, cudaStream_t stream, fg_error *error) {
    constexpr int kOut = kLaneColumns<T, kSwiglu>, kInputs = kOut * (kSwiglu ? 2 : 1);
    args.aligned = rows_aligned<T>(args, std::min(kInputs, kVector<T>), kOut);
    args.row_blocks = ceil_div<int64_t>(args.rows, kWarpRows<kSquare> * (kBlockThreads<kSquare> / 32));
    args.column_blocks = ceil_div<int64_t>(args.columns, FG_SCALE_BLOCK_SIZE);
    const int64_t blocks = groups * args.row_blocks * ceil_div<int64_t>(args.columns, kWarpColumns<T, kSwiglu>);
    const fg_status status = check_grid(blocks, error);
    if (status != FG_OK || blocks == 0) return status;
    block_kernel<T, kSwiglu, kSquare><<<static_cast<unsigned>(blocks), kBlockThreads<kSquare>, 0, stream>>>(args);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

template <typename T, bool kSwiglu>
fg_status quantize_as(const fg_quantize_params *params, const fg_queue *queue, fg_error *error) {
    const fg_tensor &x = params->x, &q = params->q;
    const int rows_axis = q.ndim - 2;
    const auto step = [](const fg_tensor &tensor, int axis) {
        return tensor.shape[axis] == 1 ? 0 : tensor.strides[axis];
    };
    QuantizeArgs args = {};
    args.x = x.data;
    args.q = static_cast<uint8_t *>(q.data);
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
    args.scale = static_cast<float *>(params->scale.data);
    args.amax_bits = static_cast<uint32_t *>(params->workspace.data);

    int num_sms = 0, compute_capability = 0;
    const fg_status status = device_properties(queue->device_index, &num_sms, &compute_capability, error);
    if (status != FG_OK) return status;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const cudaStream_t stream = stream_of(queue);
    if (params->kind == FG_SCALE_TENSOR) return quantize_tensor<T, kSwiglu>(args, stream, num_sms, error);
    if (params->kind == FG_SCALE_ROW) return quantize_rows<T, kSwiglu>(args, stream, error);
    const int64_t groups = q.ndim == 3 ? q.shape[0] : 1;
    return params->block_rows == 1 ? quantize_blocks<T, kSwiglu, false>(args, groups, stream, error)
                                   : quantize_blocks<T, kSwiglu, true>(args, groups, stream, error);
}

template <typename T>
fg_status quantize_from(const fg_quantize_params *params, const fg_queue *queue, fg_error *error) {
    return params->swiglu ? quantize_as<T, true>(params, queue, error) : quantize_as<T, false>(params, queue, error);
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
            return quantize_from<float>(params, queue, error);
        case FG_FLOAT16:
            return quantize_from<__half>(params, queue, error);
        case FG_BFLOAT16:
            return quantize_from<__nv_bfloat16>(params, queue, error);
        default:
            return fg_fail(error, FG_ERROR_TYPE, "x: expected float32, float16 or bfloat16, got %s",
                           fg_dtype_name(params->x.dtype));
    }
}

}  // namespace flexgemm
