/*
 * GEMM of the portable family (sm_80 and later): D = scale_a * scale_b * A . B^T + bias, dense and m-grouped ragged.
 *
 * One block computes a block_m x block_n tile. K advances in steps of 128 bytes for every dtype; a step of A and of B
 * is block_m and block_n rows of 128 bytes in shared memory, `stages` of them in flight through cp.async:
 *
 *     byte of row r, 16-byte chunk c  ->  r * 128 + ((c ^ (r % 8)) * 16)
 *
 * With that swizzle eight rows of one chunk column (an ldmatrix) and eight chunks of one row (a copy) both touch all
 * 32 banks once. Each warp multiplies its own part of the tile; the sums go back through shared memory so that the
 * epilogue reads scales and bias and writes the output along rows, in a loop small enough to hold every dtype.
 */
#include <atomic>
#include <climits>
#include <type_traits>

#include "../plan.h"
#include "backend.cuh"
#include "common.cuh"
#include "gemm_epilogue.cuh"
#include "gemm_math.cuh"
#include "scheduler.cuh"

namespace flexgemm {
namespace {

constexpr int kStepBytes = 128; /* of K */
constexpr int kChunkBytes = 16;
constexpr int kChunks = kStepBytes / kChunkBytes;

/* One operand: rows of K, addressed in bytes. */
struct Operand {
    const uint8_t *data;
    int64_t row_pitch, group_pitch; /* bytes */
    bool aligned;                   /* every row starts at a multiple of 16 bytes */
    Fp8Format format;
};

struct GemmArgs {
    Operand a, b;
    int64_t m, n, k_bytes;
    int64_t row_tiles, column_tiles;
    GroupOffsets offsets;
    Epilogue epilogue;
    float product_scale; /* what the operands' formats owe to the product */
};

template <int kM, int kN, int kWarpRows, int kWarpColumns, int kNumStages>
struct Tile {
    static constexpr int kBlockM = kM, kBlockN = kN, kStages = kNumStages;
    static constexpr int kWarpsN = kWarpColumns;
    static constexpr int kThreads = 32 * kWarpRows * kWarpColumns;
    static constexpr int kWarpM = kM / kWarpRows, kWarpN = kN / kWarpColumns; /* of one warp */
    static constexpr int kStageBytes = (kM + kN) * kStepBytes;
    static constexpr int kSumPitch = kN + 8; /* floats: 8 words past a multiple of 32 banks spread four rows */
    static constexpr int kSharedBytes = kStages * kStageBytes;
    static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0, "a warp loads fragments of 16 rows of A and of B");
    static_assert(kM * kChunks % kThreads == 0 && kN * kChunks % kThreads == 0, "every thread copies as many chunks");
    static_assert(kM * kSumPitch * 4 <= kSharedBytes, "the epilogue reuses the stages");
    static_assert(kSharedBytes <= 98 * 1024, "sm_86 and sm_89 offer 99 KB to a block");
};

__device__ __forceinline__ int swizzled(int row, int chunk) {
    return row * kStepBytes + ((chunk ^ (row % 8)) * kChunkBytes);
}

/* The first `bytes` of 16 at `source`, element by element, zeros behind. */
template <typename Unit>
__device__ __forceinline__ uint4 load_chunk(const uint8_t *source, int bytes) {
    union {
        uint4 chunk;
        Unit unit[kChunkBytes / sizeof(Unit)];
    } value;
#pragma unroll
    for (int i = 0; i < static_cast<int>(kChunkBytes / sizeof(Unit)); ++i)
        value.unit[i] =
            i * static_cast<int>(sizeof(Unit)) < bytes ? reinterpret_cast<const Unit *>(source)[i] : Unit{0};
    return value.chunk;
}

/* Copies one K step (from byte k) of kRows rows into a stage. Rows past `rows` and bytes past the end of K are zeros
 * in shared memory and never read. */
template <int kRows, int kThreads, int kElementBytes>
__device__ __forceinline__ void load_step(uint8_t *stage, const Operand &operand, const uint8_t *first_row, int rows,
                                          int64_t k, int64_t k_bytes) {
    using Unit =
        std::conditional_t<kElementBytes == 4, uint32_t, std::conditional_t<kElementBytes == 2, uint16_t, uint8_t>>;
    const int in_step = k_bytes - k < kStepBytes ? static_cast<int>(k_bytes - k) : kStepBytes;
    const int chunk = threadIdx.x % kChunks;
    const int bytes = min(max(in_step - chunk * kChunkBytes, 0), kChunkBytes);
    const uint8_t *source = first_row + k + chunk * kChunkBytes;
    if (operand.aligned) {
#pragma unroll
        for (int row = threadIdx.x / kChunks; row < kRows; row += kThreads / kChunks) {
            const int copied = row < rows ? bytes : 0;
            ptx::cp_async_16_partial(stage + swizzled(row, chunk),
                                     copied > 0 ? source + row * operand.row_pitch : operand.data, copied);
        }
    } else {
#pragma unroll 1
        for (int row = threadIdx.x / kChunks; row < kRows; row += kThreads / kChunks)
            *reinterpret_cast<uint4 *>(stage + swizzled(row, chunk)) =
                load_chunk<Unit>(source + row * operand.row_pitch, row < rows ? bytes : 0);
    }
}

/* sum += A step . (B step)^T for the warp's part of the tile. */
template <typename Math, typename Shape, int kRows, int kColumns>
__device__ __forceinline__ void multiply_step(float (&sum)[kRows][kColumns][4], const uint8_t *stage_a,
                                              const uint8_t *stage_b, const GemmArgs &args) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    /* Lane i names row i % 8 of matrix i / 8, the matrices in the order of gemm_math.cuh; b holds two fragments. */
    const int row_a = warp / Shape::kWarpsN * Shape::kWarpM + lane % 16;
    const int row_b = warp % Shape::kWarpsN * Shape::kWarpN + lane / 16 * 8 + lane % 8;
    const int half_a = lane / 16, half_b = lane / 8 % 2;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk += 2) {
        uint32_t a[kRows][4], b[kColumns][2];
#pragma unroll
        for (int i = 0; i < kRows; ++i) ptx::ldmatrix_x4(a[i], stage_a + swizzled(row_a + i * 16, chunk + half_a));
#pragma unroll
        for (int j = 0; j < kColumns; j += 2) {
            uint32_t pair[4];
            ptx::ldmatrix_x4(pair, stage_b + swizzled(row_b + j * 8, chunk + half_b));
            b[j][0] = pair[0], b[j][1] = pair[1];
            b[j + 1][0] = pair[2], b[j + 1][1] = pair[3];
        }
        Math::multiply(sum, a, b, args.a.format, args.b.format);
    }
}

/* The first `count` of four values; as one vector when all four go and the address allows it. */
template <typename T>
__device__ __forceinline__ void store_four(void *out, int64_t index, const float (&value)[4], int count, bool aligned) {
    struct alignas(4 * sizeof(T)) Vector {
        T element[4];
    } vector;
    for (int i = 0; i < 4; ++i) vector.element[i] = from_float<T>(value[i]);
    T *first = static_cast<T *>(out) + index;
    if (aligned && count == 4)
        *reinterpret_cast<Vector *>(first) = vector;
    else
        for (int i = 0; i < 4; ++i)
            if (i < count) first[i] = vector.element[i];
}

/* One output in plain float32. A factor that is infinite, or rounds to an infinite tf32, leaves NaN as its low part,
 * and with it a NaN sum where IEEE arithmetic may have none: sums that are NaN are computed again. */
__device__ float dot_float32(const uint8_t *row_a, const uint8_t *row_b, int64_t k) {
    const float *a = reinterpret_cast<const float *>(row_a), *b = reinterpret_cast<const float *>(row_b);
    float sum = 0.0f;
    for (int64_t i = 0; i < k; ++i) sum = fmaf(a[i], b[i], sum);
    return sum;
}

/* Scales, bias and store of the tile whose sums lie in shared memory. A thread keeps its four columns. */
template <typename Math, typename Shape>
__device__ __forceinline__ void store_tile(const GemmArgs &args, const float *sums, const RowTile &tile, int rows,
                                           int64_t first_column, const uint8_t *rows_a, const uint8_t *rows_b) {
    const Epilogue &to = args.epilogue;
    constexpr int kVectors = Shape::kBlockN / 4;
    static_assert(Shape::kThreads % kVectors == 0, "a thread keeps its columns from row to row");
    const int local_column = threadIdx.x % kVectors * 4;
    const int64_t column = first_column + local_column;
    const int count = args.n - column < 4 ? static_cast<int>(args.n - column) : 4;
    if (count <= 0) return;

    float scale_b[4] = {}, bias[4] = {};
    for (int i = 0; i < 4; ++i)
        if (i < count) {
            scale_b[i] = scale_at(to.scale_b, tile.group, column + i);
            if (to.bias) bias[i] = load_as_float(to.bias, tile.group * args.n + column + i, to.bias_dtype);
        }

#pragma unroll 1
    for (int row = threadIdx.x / kVectors; row < rows; row += Shape::kThreads / kVectors) {
        const float scale_a = scale_at(to.scale_a, 0, tile.begin + row);
        const float4 sum = *reinterpret_cast<const float4 *>(sums + row * Shape::kSumPitch + local_column);
        float value[4] = {sum.x, sum.y, sum.z, sum.w};
        for (int i = 0; i < 4; ++i) {
            if constexpr (std::is_same_v<Math, Float32Math>)
                if (isnan(value[i]) && i < count)
                    value[i] = dot_float32(rows_a + row * args.a.row_pitch,
                                           rows_b + (local_column + i) * args.b.row_pitch, args.k_bytes / 4);
            value[i] = fmaf(value[i] * args.product_scale, scale_a * scale_b[i], bias[i]);
        }
        const int64_t index = (tile.begin + row) * to.out_stride + column;
        if (to.out_dtype == FG_FLOAT16)
            store_four<__half>(to.out, index, value, count, to.out_aligned);
        else if (to.out_dtype == FG_BFLOAT16)
            store_four<__nv_bfloat16>(to.out, index, value, count, to.out_aligned);
        else
            store_four<float>(to.out, index, value, count, to.out_aligned);
    }
}

template <typename Math, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads) gemm_kernel(const __grid_constant__ GemmArgs args) {
    extern __shared__ __align__(128) uint8_t shared[];

    int64_t row_tile, column_tile;
    rasterise(blockIdx.x, args.row_tiles, args.column_tiles, &row_tile, &column_tile);
    const RowTile tile = args.offsets.data
                             ? find_row_tile<Shape::kThreads, Shape::kBlockM>(args.offsets, args.m, row_tile)
                             : RowTile{row_tile * Shape::kBlockM, args.m, 0};
    if (tile.begin >= tile.end) return;
    const int64_t first_column = column_tile * Shape::kBlockN;
    const int rows = tile.end - tile.begin < Shape::kBlockM ? static_cast<int>(tile.end - tile.begin) : Shape::kBlockM;
    const int columns =
        args.n - first_column < Shape::kBlockN ? static_cast<int>(args.n - first_column) : Shape::kBlockN;
    const uint8_t *rows_a = args.a.data + tile.begin * args.a.row_pitch;
    const uint8_t *rows_b = args.b.data + tile.group * args.b.group_pitch + first_column * args.b.row_pitch;

    constexpr int kRows = Shape::kWarpM / 16, kColumns = Shape::kWarpN / 8;
    float sum[kRows][kColumns][4] = {};

    /* Step s is loaded while step s - (stages - 1) is multiplied; the first stages - 1 turns only load. */
    const int steps = static_cast<int>(ceil_div<int64_t>(args.k_bytes, kStepBytes));
    for (int loading = 0; loading < steps + Shape::kStages - 1; ++loading) {
        const int multiplying = loading - (Shape::kStages - 1);
        if (multiplying >= 0) {
            ptx::cp_async_wait<Shape::kStages - 2>();
            __syncthreads(); /* step `multiplying` is there for all, and all are done with the one before it */
        }
        if (loading < steps) {
            uint8_t *stage_a = shared + loading % Shape::kStages * Shape::kStageBytes;
            uint8_t *stage_b = stage_a + Shape::kBlockM * kStepBytes;
            const int64_t k = static_cast<int64_t>(loading) * kStepBytes;
            load_step<Shape::kBlockM, Shape::kThreads, Math::kElementBytes>(stage_a, args.a, rows_a, rows, k,
                                                                            args.k_bytes);
            load_step<Shape::kBlockN, Shape::kThreads, Math::kElementBytes>(stage_b, args.b, rows_b, columns, k,
                                                                            args.k_bytes);
        }
        ptx::cp_async_commit(); /* empty at the end, so that the count of groups in flight stays the same */
        if (multiplying < 0) continue;

        const uint8_t *stage_a = shared + multiplying % Shape::kStages * Shape::kStageBytes;
        const uint8_t *stage_b = stage_a + Shape::kBlockM * kStepBytes;
        if constexpr (Math::kPromote) {
            float partial[kRows][kColumns][4] = {};
            multiply_step<Math, Shape>(partial, stage_a, stage_b, args);
#pragma unroll
            for (int i = 0; i < kRows; ++i)
#pragma unroll
                for (int j = 0; j < kColumns; ++j)
#pragma unroll
                    for (int r = 0; r < 4; ++r) sum[i][j][r] += partial[i][j][r];
        } else {
            multiply_step<Math, Shape>(sum, stage_a, stage_b, args);
        }
    }
    __syncthreads();

    /* The four sums of a 16 x 8 fragment: rows lane / 4, and 8 below it; columns 2 * (lane % 4), and the next. */
    float *sums = reinterpret_cast<float *>(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first_row = warp / Shape::kWarpsN * Shape::kWarpM + lane / 4;
    const int warp_column = warp % Shape::kWarpsN * Shape::kWarpN + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<float2 *>(sums + (first_row + i * 16 + half * 8) * Shape::kSumPitch + warp_column +
                                            j * 8) = make_float2(sum[i][j][2 * half], sum[i][j][2 * half + 1]);
    __syncthreads();
    store_tile<Math, Shape>(args, sums, tile, rows, first_column, rows_a, rows_b);
}

/* ---- launch ---- */

template <typename Math, typename Shape>
fg_status launch_tile(GemmArgs &args, const fg_queue *queue, fg_error *error) {
    args.row_tiles = args.offsets.data ? max_row_tiles(args.m, args.offsets.groups, Shape::kBlockM)
                                       : ceil_div<int64_t>(args.m, Shape::kBlockM);
    args.column_tiles = ceil_div<int64_t>(args.n, Shape::kBlockN);
    if (args.row_tiles > INT_MAX / args.column_tiles)
        return fg_fail(error, FG_ERROR_VALUE, "out: expected fewer than 2^31 tiles of %d x %d, got %lld x %lld",
                       Shape::kBlockM, Shape::kBlockN, static_cast<long long>(args.row_tiles),
                       static_cast<long long>(args.column_tiles));

    static std::atomic<uint64_t> allowed; /* devices on which the kernel may already use its shared memory */
    const uint64_t device_bit = queue->device_index < 64 ? uint64_t{1} << queue->device_index : 0;
    if (!(allowed.load(std::memory_order_relaxed) & device_bit)) {
        FG_CUDA(cudaFuncSetAttribute(gemm_kernel<Math, Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     Shape::kSharedBytes));
        allowed.fetch_or(device_bit, std::memory_order_relaxed);
    }
    const unsigned blocks = static_cast<unsigned>(args.row_tiles * args.column_tiles);
    gemm_kernel<Math, Shape><<<blocks, Shape::kThreads, Shape::kSharedBytes, stream_of(queue)>>>(args);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

template <typename Math>
fg_status launch(const fg_plan &plan, GemmArgs &args, const fg_queue *queue, fg_error *error) {
    switch (plan.block_m) {
        case 16:
            return launch_tile<Math, Tile<16, 64, 1, 4, 6>>(args, queue, error);
        case 64:
            return launch_tile<Math, Tile<64, 64, 2, 2, 4>>(args, queue, error);
        default:
            return launch_tile<Math, Tile<128, 128, 2, 4, 3>>(args, queue, error);
    }
}

fg_status launch_fp8(const fg_plan &plan, GemmArgs &args, fg_dtype a, fg_dtype b, int compute_capability,
                     const fg_queue *queue, fg_error *error) {
    if (compute_capability < 89) {
        args.a.format = fp8_half_format(a);
        args.b.format = fp8_half_format(b);
        args.product_scale = fp8_half_scale(a) * fp8_half_scale(b);
        return launch<Fp8HalfMath>(plan, args, queue, error);
    }
    if (a == FG_FLOAT8_E5M2)
        return b == FG_FLOAT8_E5M2 ? launch<Fp8Math<true, true>>(plan, args, queue, error)
                                   : launch<Fp8Math<true, false>>(plan, args, queue, error);
    return b == FG_FLOAT8_E5M2 ? launch<Fp8Math<false, true>>(plan, args, queue, error)
                               : launch<Fp8Math<false, false>>(plan, args, queue, error);
}

/* Rows are the last but one axis; groups, if any, the one before. */
Operand make_operand(const fg_tensor &tensor) {
    Operand operand = {};
    operand.data = static_cast<const uint8_t *>(tensor.data);
    operand.row_pitch = pitch(tensor, tensor.ndim - 2);
    operand.group_pitch = tensor.ndim == 3 ? pitch(tensor, 0) : 0;
    operand.aligned = is_multiple(tensor.data, kChunkBytes) && operand.row_pitch % kChunkBytes == 0 &&
                      operand.group_pitch % kChunkBytes == 0;
    return operand;
}

fg_status check_alignment(const fg_tensor &tensor, const char *name, fg_error *error) {
    if (!tensor.present || is_multiple(tensor.data, fg_dtype_size(tensor.dtype))) return FG_OK;
    return fg_fail(error, FG_ERROR_VALUE, "%s: expected an address that is a multiple of its %zu-byte element, got %p",
                   name, fg_dtype_size(tensor.dtype), tensor.data);
}

}  // namespace

fg_status gemm_workspace(const fg_gemm_params *params, const fg_queue *queue, size_t *bytes, fg_error *error) {
    (void)params, (void)queue, (void)error;
    *bytes = 0;
    return FG_OK;
}

fg_status gemm(const fg_gemm_params *params, const fg_queue *queue, fg_error *error) {
    const bool grouped = params->layout == FG_GEMM_M_GROUPED;
    const fg_dtype dtype = params->a.dtype;
    const int64_t m = params->a.shape[0], k = params->a.shape[1];
    const int64_t n = params->out.shape[1], groups = grouped ? params->b.shape[0] : 1;
    if (m == 0 || n == 0 || groups == 0) return FG_OK;

    const struct {
        const fg_tensor &tensor;
        const char *name;
    } arguments[] = {{params->a, "a"},
                     {params->b, "b"},
                     {params->scale_a, "scale_a"},
                     {params->scale_b, "scale_b"},
                     {params->bias, "bias"},
                     {params->offsets, "offsets"},
                     {params->out, "out"}};
    for (const auto &argument : arguments) {
        const fg_status status = check_alignment(argument.tensor, argument.name, error);
        if (status != FG_OK) return status;
    }
    int num_sms = 0, compute_capability = 0;
    const fg_status status = device_properties(queue->device_index, &num_sms, &compute_capability, error);
    if (status != FG_OK) return status;

    if (compute_capability == 90 && gemm_sm90_takes(*params)) return gemm_sm90(*params, num_sms, queue, error);

    GemmArgs args = {};
    args.a = make_operand(params->a);
    args.b = make_operand(params->b);
    args.m = m;
    args.n = n;
    args.k_bytes = k * static_cast<int64_t>(fg_dtype_size(dtype));
    args.offsets = make_group_offsets(*params);
    args.epilogue = make_epilogue(*params);
    args.product_scale = 1.0f;

    const fg_plan plan = fg_plan_gemm(m, n, k, groups, dtype, num_sms);
    fg_print_plan(&plan, "gemm", dtype, "m=%lld n=%lld k=%lld groups=%lld", static_cast<long long>(m),
                  static_cast<long long>(n), static_cast<long long>(k), static_cast<long long>(groups));
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    switch (dtype) {
        case FG_FLOAT32:
            return params->precision == FG_PRECISION_TF32 ? launch<Tf32Math>(plan, args, queue, error)
                                                          : launch<Float32Math>(plan, args, queue, error);
        case FG_FLOAT16:
            return launch<HalfMath>(plan, args, queue, error);
        case FG_BFLOAT16:
            return launch<Bfloat16Math>(plan, args, queue, error);
        case FG_FLOAT8_E4M3FN:
        case FG_FLOAT8_E5M2:
            return launch_fp8(plan, args, dtype, params->b.dtype, compute_capability, queue, error);
        default:
            return fg_fail(error, FG_ERROR_TYPE, "a: expected a floating-point dtype, got %s", fg_dtype_name(dtype));
    }
}

}  // namespace flexgemm
