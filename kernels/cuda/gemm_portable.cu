/*
 * GEMM of the portable family (sm_80 and later): D = act(alpha * scale_a * scale_b * A . B^T + bias), in every layout.
 *
 * One block computes a block_m x block_n tile at a time. K advances in steps of 128 bytes for every dtype; a step of A
 * and of B is block_m and block_n rows of 128 bytes in shared memory, `stages` of them in flight through cp.async:
 *
 *     byte of row r, 16-byte chunk c  ->  r * 128 + ((c ^ (r % 8)) * 16)
 *
 * With that swizzle eight rows of one chunk column (an ldmatrix) and eight chunks of one row (a copy) both touch all
 * 32 banks once. Each warp multiplies its own part of the tile; the sums go back through shared memory so that the
 * epilogue reads scales and bias and writes the output along rows, in a loop small enough to hold every dtype.
 */
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
    TileSpace space;
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
                                          bool aligned, int64_t k, int64_t k_bytes) {
    using Unit =
        std::conditional_t<kElementBytes == 4, uint32_t, std::conditional_t<kElementBytes == 2, uint16_t, uint8_t>>;
    const int in_step = k_bytes - k < kStepBytes ? static_cast<int>(k_bytes - k) : kStepBytes;
    const int chunk = threadIdx.x % kChunks;
    const int bytes = min(max(in_step - chunk * kChunkBytes, 0), kChunkBytes);
    const uint8_t *source = first_row + k + chunk * kChunkBytes;
    if (aligned) {
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

/* One output in plain float32. A factor that is infinite, or rounds to an infinite tf32, leaves NaN as its low part,
 * and with it a NaN sum where IEEE arithmetic may have none; the product of two that were rounded up, or lack that of
 * their low parts, may be infinite: sums that are not finite are computed again, as far as they are numbers. */
__device__ float dot_float32(const uint8_t *row_a, const uint8_t *row_b, int64_t k) {
    const float *a = reinterpret_cast<const float *>(row_a), *b = reinterpret_cast<const float *>(row_b);
    float sum = 0.0f;
    for (int64_t i = 0; i < k && !isnan(sum); ++i) sum = fmaf(a[i], b[i], sum);
    return sum;
}

/* Where the tile's operands begin, and how much of them there is. */
struct TileRows {
    const uint8_t *a, *b;
    int rows, columns;
    bool a_aligned, b_aligned;
    int64_t k_bytes;
};

template <int kBlockM, int kBlockN>
__device__ __forceinline__ TileRows rows_of(const GemmArgs &args, const OutputTile<int64_t> &tile) {
    TileRows rows;
    rows.a = args.a.data + tile.group * args.a.group_pitch + tile.row * args.a.row_pitch + tile.k_begin;
    rows.b = args.b.data + tile.weight * args.b.group_pitch + tile.column * args.b.row_pitch + tile.k_begin;
    rows.rows = tile.row_end - tile.row < kBlockM ? static_cast<int>(tile.row_end - tile.row) : kBlockM;
    rows.columns = tile.column_end - tile.column < kBlockN ? static_cast<int>(tile.column_end - tile.column) : kBlockN;
    const bool k_aligned = tile.k_begin % kChunkBytes == 0;
    rows.a_aligned = args.a.aligned && k_aligned;
    rows.b_aligned = args.b.aligned && k_aligned;
    rows.k_bytes = tile.k_end - tile.k_begin;
    return rows;
}

/* Scales, bias, activation and store of the tile whose sums lie in shared memory. A thread keeps its four columns. */
template <typename Math, typename Shape>
__device__ __forceinline__ void store_tile(const GemmArgs &args, const float *sums, const OutputTile<int64_t> &tile,
                                           const TileRows &from) {
    const Epilogue &to = args.epilogue;
    constexpr int kVectors = Shape::kBlockN / 4;
    static_assert(Shape::kThreads % kVectors == 0, "a thread keeps its columns from row to row");
    const int local_column = threadIdx.x % kVectors * 4;
    const int64_t column = tile.column + local_column;
    const int count = from.columns - local_column < 4 ? from.columns - local_column : 4;
    if (count <= 0) return;

    const bool multiplied = from.k_bytes > 0; /* else sums stay 0, whatever their scales */
    float scale_b[4] = {}, bias[4] = {};
    for (int i = 0; i < 4; ++i)
        if (i < count) {
            scale_b[i] = args.product_scale * to.alpha;
            if (!to.block_scaled) scale_b[i] *= scale_at(to.scale_b, tile.weight, column + i);
            if (!multiplied) scale_b[i] = 0.0f;
            if (to.bias) bias[i] = load_as_float(to.bias, tile.weight * to.bias_step + column + i, to.bias_dtype);
        }

#pragma unroll 1
    for (int row = threadIdx.x / kVectors; row < from.rows; row += Shape::kThreads / kVectors) {
        const float scale_a = to.block_scaled || !multiplied ? 1.0f : scale_at(to.scale_a, tile.group, tile.row + row);
        const float4 sum = *reinterpret_cast<const float4 *>(sums + row * Shape::kSumPitch + local_column);
        float value[4] = {sum.x, sum.y, sum.z, sum.w};
        for (int i = 0; i < 4; ++i) {
            if constexpr (std::is_same_v<Math, Float32Math>)
                if (!isfinite(value[i]) && i < count)
                    value[i] = dot_float32(from.a + row * args.a.row_pitch,
                                           from.b + (local_column + i) * args.b.row_pitch, from.k_bytes / 4);
            value[i] = fmaf(value[i], scale_a * scale_b[i], bias[i]);
        }
        activate_and_store(to, value, tile.group, tile.row + row, column, count);
    }
}

/* sum += partial, times the scales of this block of K where the operands have such. */
template <typename Shape, int kRows, int kColumns>
__device__ __forceinline__ void promote(float (&sum)[kRows][kColumns][4], const float (&partial)[kRows][kColumns][4],
                                        const Epilogue &to, const OutputTile<int64_t> &tile, const TileRows &from,
                                        int step) {
    const int first_row = threadIdx.x / 32 / Shape::kWarpsN * Shape::kWarpM + threadIdx.x % 32 / 4;
    static_assert(FG_SCALE_BLOCK_SIZE % Shape::kBlockN == 0, "the columns of a tile have one scale");
    const float scale_b =
        to.block_scaled ? scale_at(to.scale_b, tile.weight, tile.column / FG_SCALE_BLOCK_SIZE, step) : 1;
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + i * 16 + half * 8;
            float scale = scale_b;
            if (to.block_scaled && row < from.rows) scale *= scale_at(to.scale_a, tile.group, tile.row + row, step);
#pragma unroll
            for (int j = 0; j < kColumns; ++j)
#pragma unroll
                for (int r = 2 * half; r < 2 * half + 2; ++r)
                    sum[i][j][r] = fmaf(partial[i][j][r], scale, sum[i][j][r]);
        }
}

template <typename Math, typename Shape>
__device__ __forceinline__ void compute_tile(const GemmArgs &args, const OutputTile<int64_t> &tile, uint8_t *shared) {
    const TileRows from = rows_of<Shape::kBlockM, Shape::kBlockN>(args, tile);
    constexpr int kRows = Shape::kWarpM / 16, kColumns = Shape::kWarpN / 8;
    float sum[kRows][kColumns][4] = {};

    /* Step s is loaded while step s - (stages - 1) is multiplied; the first stages - 1 turns only load. */
    const int steps = static_cast<int>(ceil_div<int64_t>(from.k_bytes, kStepBytes));
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
            load_step<Shape::kBlockM, Shape::kThreads, Math::kElementBytes>(stage_a, args.a, from.a, from.rows,
                                                                            from.a_aligned, k, from.k_bytes);
            load_step<Shape::kBlockN, Shape::kThreads, Math::kElementBytes>(stage_b, args.b, from.b, from.columns,
                                                                            from.b_aligned, k, from.k_bytes);
        }
        ptx::cp_async_commit(); /* empty at the end, so that the count of groups in flight stays the same */
        if (multiplying < 0) continue;

        const uint8_t *stage_a = shared + multiplying % Shape::kStages * Shape::kStageBytes;
        const uint8_t *stage_b = stage_a + Shape::kBlockM * kStepBytes;
        if constexpr (Math::kPromote) {
            float partial[kRows][kColumns][4] = {};
            multiply_step<Math, Shape>(partial, stage_a, stage_b, args);
            promote<Shape>(sum, partial, args.epilogue, tile, from, multiplying);
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
    store_tile<Math, Shape>(args, sums, tile, from);
}

template <typename Math, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads) gemm_kernel(const __grid_constant__ GemmArgs args) {
    extern __shared__ __align__(128) uint8_t shared[];
    TileWalk<int64_t, Shape::kBlockM, Shape::kBlockN> walk(args.space, blockIdx.x, gridDim.x);
    OutputTile<int64_t> tile;
    while (walk.next(tile)) {
        compute_tile<Math, Shape>(args, tile, shared);
        __syncthreads(); /* the sums lie where the next tile's stages go */
    }
}

/* ---- launch ---- */

template <typename Math, typename Shape>
fg_status launch_tile(GemmArgs &args, int max_blocks, const fg_queue *queue, fg_error *error) {
    const int64_t tiles = set_tiles(args.space, Shape::kBlockM, Shape::kBlockN);
    if (tiles > kMostTiles)
        return fg_fail(error, FG_ERROR_VALUE, "out: expected fewer than 2^29 tiles of %d x %d elements, got %lld",
                       Shape::kBlockM, Shape::kBlockN, static_cast<long long>(tiles));
    const fg_status status = allow_shared<gemm_kernel<Math, Shape>>(Shape::kSharedBytes, error);
    if (status != FG_OK) return status;
    const unsigned blocks = static_cast<unsigned>(tiles < max_blocks ? tiles : max_blocks);
    gemm_kernel<Math, Shape><<<blocks, Shape::kThreads, Shape::kSharedBytes, stream_of(queue)>>>(args);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

template <typename Math>
fg_status launch(const fg_plan &plan, GemmArgs &args, int max_blocks, const fg_queue *queue, fg_error *error) {
    switch (plan.block_m) {
        case 16:
            return launch_tile<Math, Tile<16, 64, 1, 4, 6>>(args, max_blocks, queue, error);
        case 64:
            return launch_tile<Math, Tile<64, 64, 2, 2, 4>>(args, max_blocks, queue, error);
        default:
            return launch_tile<Math, Tile<128, 128, 2, 4, 3>>(args, max_blocks, queue, error);
    }
}

fg_status launch_fp8(const fg_plan &plan, GemmArgs &args, int max_blocks, fg_dtype a, fg_dtype b,
                     int compute_capability, const fg_queue *queue, fg_error *error) {
    if (compute_capability < 89) {
        args.a.format = fp8_half_format(a);
        args.b.format = fp8_half_format(b);
        args.product_scale = fp8_half_scale(a) * fp8_half_scale(b);
        return launch<Fp8HalfMath>(plan, args, max_blocks, queue, error);
    }
    if (a == FG_FLOAT8_E5M2)
        return b == FG_FLOAT8_E5M2 ? launch<Fp8Math<true, true>>(plan, args, max_blocks, queue, error)
                                   : launch<Fp8Math<true, false>>(plan, args, max_blocks, queue, error);
    return b == FG_FLOAT8_E5M2 ? launch<Fp8Math<false, true>>(plan, args, max_blocks, queue, error)
                               : launch<Fp8Math<false, false>>(plan, args, max_blocks, queue, error);
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

}  // namespace

fg_status gemm_portable(const fg_gemm_params &params, int num_sms, int compute_capability, const fg_queue *queue,
                        fg_error *error) {
    GemmArgs args = {};
    args.a = make_operand(params.a);
    args.b = make_operand(params.b);
    args.space = make_tile_space(params);
    args.epilogue = make_epilogue(params);
    args.product_scale = 1.0f;

    const int max_blocks = params.num_sms > 0 ? params.num_sms : INT_MAX; /* one to a multiprocessor at most */
    const fg_dtype dtype = params.a.dtype;
    const fg_gemm_shape all = fg_gemm_all_rows(&params);
    const fg_plan plan = fg_plan_gemm(all.m, all.n, all.k, all.groups, dtype, num_sms);
    fg_print_plan(&plan, "gemm", dtype, "m=%lld n=%lld k=%lld groups=%lld", static_cast<long long>(all.m),
                  static_cast<long long>(all.n), static_cast<long long>(all.k), static_cast<long long>(all.groups));
    switch (dtype) {
        case FG_FLOAT32:
            return params.precision == FG_PRECISION_TF32 ? launch<Tf32Math>(plan, args, max_blocks, queue, error)
                                                         : launch<Float32Math>(plan, args, max_blocks, queue, error);
        case FG_FLOAT16:
            return launch<HalfMath>(plan, args, max_blocks, queue, error);
        case FG_BFLOAT16:
            return launch<Bfloat16Math>(plan, args, max_blocks, queue, error);
        case FG_FLOAT8_E4M3FN:
        case FG_FLOAT8_E5M2:
            return launch_fp8(plan, args, max_blocks, dtype, params.b.dtype, compute_capability, queue, error);
        default:
            return fg_fail(error, FG_ERROR_TYPE, "a: expected a floating-point dtype, got %s", fg_dtype_name(dtype));
    }
}

}  // namespace flexgemm
