/*
 * The second half of a convolution whose offsets were cut into slices: for each row the sum of its partial sums, slice 0
 * first, then the epilogue. Always the same order, hence always the same bits.
 *
 * A row without neighbours at a slice's offsets has no partial sum there: tiles of such rows write none. A look at the
 * row's column of the map tells which ones exist, and saves reading about a third of them when groups are small.
 */
#include "conv_gather.cuh"

namespace flexgemm {
namespace {

constexpr int kReduceThreads = 256;
static_assert(FG_MAX_GROUPS <= 64, "a bit for each slice; of splits there are fewer");

/* The slices at which a row has neighbours, asked by a warp. */
__device__ __forceinline__ uint64_t slices_of_row(const GatherParams &p, int64_t row) {
    uint64_t slices = 0;
    for (int v = threadIdx.x % 32; v < p.volume; v += 32)
        if (static_cast<uint32_t>(p.map_at(v)[row]) < p.in_rows) slices |= uint64_t{1} << p.slice_of(v);
    const auto low = __reduce_or_sync(~0u, static_cast<unsigned int>(slices));
    const auto high = __reduce_or_sync(~0u, static_cast<unsigned int>(slices >> 32));
    return static_cast<uint64_t>(high) << 32 | low;
}

/* One warp a row; kWidth columns a lane, read as one word. T: of what is added. */
template <typename T, typename Out, int kWidth>
__global__ void __launch_bounds__(kReduceThreads) reduce_slices_kernel(const GatherParams p) {
    struct alignas(kWidth * sizeof(float)) Floats {
        float at[kWidth];
    };
    struct alignas(kWidth * sizeof(T)) Addends {
        T at[kWidth];
    };
    struct alignas(kWidth * sizeof(Out)) Outputs {
        Out at[kWidth];
    };
    const bool aligned = reinterpret_cast<uintptr_t>(p.out) % sizeof(Outputs) == 0 && p.out_stride % kWidth == 0;
    const int lane = threadIdx.x % 32;
    const SumEpilogue &epilogue = p.epilogue;
    const T *bias = static_cast<const T *>(epilogue.bias), *addends = static_cast<const T *>(epilogue.residual);
    const bool addends_aligned =
        reinterpret_cast<uintptr_t>(addends) % sizeof(Addends) == 0 && epilogue.residual_stride % kWidth == 0;
    const int64_t slice_stride = p.rows * p.columns;
    const int64_t warps = static_cast<int64_t>(gridDim.x) * (kReduceThreads / 32);
    for (int64_t row = (static_cast<int64_t>(blockIdx.x) * kReduceThreads + threadIdx.x) / 32; row < p.rows;
         row += warps) {
        const uint64_t slices = slices_of_row(p, row);
        const float *partials = p.partials + row * p.columns;
        const T *residual = addends ? addends + row * epilogue.residual_stride : nullptr;
        Out *out = static_cast<Out *>(p.out) + row * p.out_stride;
        for (int n = lane * kWidth; n < p.columns; n += 32 * kWidth) {
            Floats sum = {};
            for (uint64_t left = slices; left != 0; left &= left - 1) {
                const int slice = __ffsll(static_cast<long long>(left)) - 1;
                const Floats partial = *reinterpret_cast<const Floats *>(partials + slice * slice_stride + n);
#pragma unroll
                for (int i = 0; i < kWidth; ++i) sum.at[i] += partial.at[i];
            }
            Addends addend = {};
            Outputs outputs;
            if (residual && addends_aligned) {
                addend = *reinterpret_cast<const Addends *>(residual + n);
            } else if (residual) {
#pragma unroll
                for (int i = 0; i < kWidth; ++i) addend.at[i] = residual[n + i];
            }
#pragma unroll
            for (int i = 0; i < kWidth; ++i) {
                sum.at[i] *= epilogue.scale_of(n + i);
                if (bias) sum.at[i] += to_float(bias[n + i]);
                sum.at[i] += to_float(addend.at[i]);
                sum.at[i] = activated(sum.at[i], epilogue.activation);
                if (epilogue.scale_out) sum.at[i] = __fdiv_rn(sum.at[i], *epilogue.scale_out);
                outputs.at[i] = from_float<Out>(sum.at[i]);
            }
            if (aligned) {
                *reinterpret_cast<Outputs *>(out + n) = outputs;
            } else {
#pragma unroll
                for (int i = 0; i < kWidth; ++i) out[n + i] = outputs.at[i];
            }
        }
    }
}

/* The workspace is 256-byte aligned: where columns are a multiple of four, so is each row to 16 bytes. */
template <typename T, typename Out>
cudaError_t launch(const GatherParams &p, cudaStream_t stream) {
    constexpr int64_t kMaxBlocks = 1 << 16;
    const int64_t wanted = ceil_div<int64_t>(p.rows, kReduceThreads / 32);
    const auto blocks = static_cast<unsigned int>(wanted < kMaxBlocks ? wanted : kMaxBlocks);
    const auto kernel = p.columns % 4 == 0 ? reduce_slices_kernel<T, Out, 4> : reduce_slices_kernel<T, Out, 1>;
    kernel<<<blocks, kReduceThreads, 0, stream>>>(p);
    return cudaGetLastError();
}

template <typename T>
cudaError_t launch_out(const GatherParams &p, cudaStream_t stream) {
    if (p.out_dtype == FG_FLOAT8_E4M3FN) return launch<T, __nv_fp8_e4m3>(p, stream);
    if (p.out_dtype == FG_FLOAT8_E5M2) return launch<T, __nv_fp8_e5m2>(p, stream);
    return launch<T, T>(p, stream);
}

}  // namespace

cudaError_t reduce_slices(const GatherParams &p, cudaStream_t stream) {
    if (p.added_dtype == FG_FLOAT16) return launch_out<__half>(p, stream);
    if (p.added_dtype == FG_BFLOAT16) return launch_out<__nv_bfloat16>(p, stream);
    return launch_out<float>(p, stream);
}

}  // namespace flexgemm
