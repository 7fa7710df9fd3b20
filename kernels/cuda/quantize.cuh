/*
 * What the casts to fp8 share: x comes in as vectors of 16 bytes, widened, joined in pairs by SwiGLU if asked for;
 * scales are made of maxima, and q goes out divided by them.
 */
#pragma once

#include <cstring>
#include <type_traits>

#include "activation.cuh"
#include "vector.cuh"

namespace flexgemm {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 4; /* that reside together: half of an SM's threads, each with several loads under way */
constexpr uint32_t kInfinityBits = 0x7f800000u;

struct QuantizeArgs {
    const void *x;
    uint8_t *q;
    int64_t groups;                            /* of a batch */
    int64_t rows, columns, x_stride, q_stride; /* elements; columns of q */
    int64_t x_group_stride, q_group_stride;
    int64_t row_blocks, column_blocks;
    bool aligned; /* 16-byte loads of x and as wide stores of q may start at every row's begin */
    bool e5m2, scale_given, saturate;
    float *scale;
    uint32_t *amax_bits; /* of the tensor, or of each row of an x that lies in columns */
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
    if (aligned && count == kCount) {
#pragma unroll
        for (int part = 0; part < kCount; part += kPart) {
            const auto vector = Vector<T, kPart>::load(x + part);
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
 * size and quotients that fp8 tells from zero or from its largest number; beyond, infinities and NaN are the
 * product's. */
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

/* Bits of the largest |x|, when the cast saturates of those that are finite. fmaxf() passes over NaN; an infinity is
 * rare enough to look twice. */
template <int kCount>
__device__ __forceinline__ uint32_t amax_bits(const float (&value)[kCount], bool saturate) {
    float amax = 0;
    for (float x : value) amax = fmaxf(amax, fabsf(x));
    if (__float_as_uint(amax) < kInfinityBits || !saturate) return __float_as_uint(amax);
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

inline fg_status check_grid(int64_t blocks, fg_error *error) {
    if (blocks <= INT32_MAX) return FG_OK;
    return fg_fail(error, FG_ERROR_VALUE, "x: expected fewer than 2^31 blocks of rows, got %lld",
                   static_cast<long long>(blocks));
}

/* Calls `call` with a pointer that tells the dtype of x, and a constant that tells whether pairs of it are joined. */
template <class Call>
fg_status dispatch_input(const fg_quantize_params *params, fg_error *error, const Call &call) {
    const auto swiglu_or_not = [&](auto *element) {
        return params->swiglu ? call(element, std::true_type()) : call(element, std::false_type());
    };
    switch (params->x.dtype) {
        case FG_FLOAT32:
            return swiglu_or_not(static_cast<float *>(nullptr));
        case FG_FLOAT16:
            return swiglu_or_not(static_cast<__half *>(nullptr));
        case FG_BFLOAT16:
            return swiglu_or_not(static_cast<__nv_bfloat16 *>(nullptr));
        default:
            return fg_fail(error, FG_ERROR_TYPE, "x: expected float32, float16 or bfloat16, got %s",
                           fg_dtype_name(params->x.dtype));
    }
}

/* A scale for each block of 128 columns of one row, or of 128. (quantize_blocks.cu) */
fg_status quantize_blocks(const fg_quantize_params *params, const QuantizeArgs &args, cudaStream_t stream,
                          fg_error *error);

/* A scale for each row, of an x whose columns are adjacent elements. (quantize_columns.cu) */
fg_status quantize_columns(const fg_quantize_params *params, const QuantizeArgs &args, cudaStream_t stream,
                           fg_error *error);

}  // namespace flexgemm
