/*
 * The second half of a convolution whose offsets were cut into slices: for each row the sum of its partial sums, slice
 * 0 first, then the epilogue. Always the same order, hence always the same bits.
 *
 * A row without neighbours at a slice's offsets has no partial sum there: tiles of such rows write none. A look at the
 * row's column of the map tells which ones exist, and saves reading about a third of them when groups are small.
 */
#include "conv_gather.cuh"
#include "ptx.cuh"
#include "vector.cuh"

namespace flexgemm {
namespace {

constexpr int kReduceThreads = 256, kReduceRows = kReduceThreads / 32; /* a warp each */
constexpr int kParts = 2;                                              /* words of a lane, 32 of them apart */
static_assert(FG_MAX_GROUPS <= 64, "a bit for each slice; of splits there are fewer");

/* The slices at which each of the CTA's rows has neighbours, 32 to a word. Eight neighbouring lanes are its rows, which
 * a line of the map has side by side. */
__device__ __forceinline__ void find_slices(const GatherParams &p, int64_t first_row,
                                            uint32_t (&slices)[kReduceRows][2]) {
    if (threadIdx.x < 2 * kReduceRows) slices[threadIdx.x / 2][threadIdx.x % 2] = 0;
    __syncthreads();
    const int slot = threadIdx.x % kReduceRows;
    if (first_row + slot < p.rows) {
        for (int v = threadIdx.x / kReduceRows; v < p.volume; v += kReduceThreads / kReduceRows) {
            const int slice = p.slice_of(v);
            if (static_cast<uint32_t>(p.map_at(v)[first_row + slot]) < p.in_rows)
                atomicOr(&slices[slot][slice / 32], 1u << slice % 32);
        }
    }
    __syncthreads();
}

/* A warp adds one row, kParts times 32 kWidth columns of it; kWidth columns are read as one word. T: of what is
 * added. */
template <typename T, typename Out, int kWidth>
__global__ void __launch_bounds__(kReduceThreads) reduce_slices_kernel(const GatherParams p) {
    using Floats = Vector<float, kWidth>;
    using Addends = Vector<T, kWidth>;
    using Outputs = Vector<Out, kWidth>;
    __shared__ uint32_t slices[kReduceRows][2];
    const SumEpilogue &epilogue = p.epilogue;
    const T *bias = static_cast<const T *>(epilogue.bias), *addends = static_cast<const T *>(epilogue.residual);
    const bool aligned = reinterpret_cast<uintptr_t>(p.out) % sizeof(Outputs) == 0 && p.out_stride % kWidth == 0;
    const bool addends_aligned =
        reinterpret_cast<uintptr_t>(addends) % sizeof(Addends) == 0 && epilogue.residual_stride % kWidth == 0;
    const int64_t slice_stride = p.rows * p.columns;
    const int64_t first_row = static_cast<int64_t>(blockIdx.x / p.column_tiles) * kReduceRows;
    const int slot = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_column = (static_cast<int>(blockIdx.x) % p.column_tiles * kParts * 32 + lane) * kWidth;
    ptx::let_next_kernel_begin();
    find_slices(p, first_row, slices);
    ptx::wait_for_earlier_kernels();
    const int64_t row = first_row + slot;
    if (row >= p.rows) return;
    const float *partials = p.partials + row * p.columns + first_column;
    float sums[kParts][kWidth] = {};
    for (int word = 0; word < 2; ++word) {
#pragma unroll 2
        for (uint32_t left = slices[slot][word]; left != 0; left &= left - 1) {
            const int slice = 32 * word + __ffs(static_cast<int>(left)) - 1;
            Floats partial[kParts] = {};
#pragma unroll
            for (int part = 0; part < kParts; ++part)
                if (first_column + part * 32 * kWidth < p.columns)
                    partial[part] = Floats::load(partials + slice * slice_stride + part * 32 * kWidth);
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
#pragma unroll
                for (int i = 0; i < kWidth; ++i) sums[part][i] += partial[part].element[i];
            }
        }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        const int n = first_column + part * 32 * kWidth;
        if (n >= p.columns) return;
        float (&sum)[kWidth] = sums[part];
        if (epilogue.scale_in || epilogue.scale_weight) {
#pragma unroll
            for (int i = 0; i < kWidth; ++i) sum[i] *= epilogue.scale_of(n + i);
        }
        if (bias) {
#pragma unroll
            for (int i = 0; i < kWidth; ++i) sum[i] += to_float(bias[n + i]);
        }
        if (addends) {
            const T *residual = addends + row * epilogue.residual_stride + n;
            Addends addend;
            if (addends_aligned) {
                addend = Addends::load(residual);
            } else {
#pragma unroll
                for (int i = 0; i < kWidth; ++i) addend.element[i] = residual[i];
            }
#pragma unroll
            for (int i = 0; i < kWidth; ++i) sum[i] += to_float(addend.element[i]);
        }
        activate(sum, epilogue.activation);
        Outputs outputs;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            if (epilogue.scale_out) sum[i] = __fdiv_rn(sum[i], *epilogue.scale_out);
            outputs.element[i] = from_float<Out>(sum[i]);
        }
        Out *out = static_cast<Out *>(p.out) + row * p.out_stride + n;
        if (aligned) {
            outputs.store(out);
        } else {
#pragma unroll
            for (int i = 0; i < kWidth; ++i) out[i] = outputs.element[i];
        }
    }
}

/* The workspace is 256-byte aligned: where columns are a multiple of four, so is each row to 16 bytes. */
template <typename T, typename Out>
fg_status launch(GatherParams p, int compute_capability, cudaStream_t stream, fg_error *error) {
    const int width = p.columns % 4 == 0 ? 4 : 1;
    p.column_tiles = ceil_div(p.columns, kParts * 32 * width);
    const int64_t blocks = ceil_div<int64_t>(p.rows, kReduceRows) * p.column_tiles;
    if (blocks > INT32_MAX) /* of 512 elements: partial sums have far fewer */
        return fg_fail(error, FG_ERROR_VALUE, "out: %lld rows need more blocks than one launch can have",
                       static_cast<long long>(p.rows));
    const auto kernel = width == 4 ? reduce_slices_kernel<T, Out, 4> : reduce_slices_kernel<T, Out, 1>;
    return launch_early(kernel, static_cast<unsigned int>(blocks), kReduceThreads, 0, compute_capability, stream, error,
                        p);
}

template <typename T>
fg_status launch_out(const GatherParams &p, int compute_capability, cudaStream_t stream, fg_error *error) {
    if (p.out_dtype == FG_FLOAT8_E4M3FN) return launch<T, __nv_fp8_e4m3>(p, compute_capability, stream, error);
    if (p.out_dtype == FG_FLOAT8_E5M2) return launch<T, __nv_fp8_e5m2>(p, compute_capability, stream, error);
    return launch<T, T>(p, compute_capability, stream, error);
}

}  // namespace

fg_status reduce_slices(const GatherParams &p, int compute_capability, cudaStream_t stream, fg_error *error) {
    if (p.added_dtype == FG_FLOAT16) return launch_out<__half>(p, compute_capability, stream, error);
    if (p.added_dtype == FG_BFLOAT16) return launch_out<__nv_bfloat16>(p, compute_capability, stream, error);
    return launch_out<float>(p, compute_capability, stream, error);
}

}  // namespace flexgemm
