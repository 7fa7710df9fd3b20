/*
 * Which kernels of gemm_sm90.cuh exist, what they can take, and their launch.
 */
#include "gemm_sm90.cuh"

#include <atomic>
#include <climits>

#include "../plan.h"
#include "backend.cuh"
#include "tensor_map.cuh"

namespace flexgemm {
namespace {

TensorRows make_rows(const fg_tensor &tensor) {
    const bool grouped = tensor.ndim == 3;
    const int rows = tensor.ndim - 2;
    return {tensor.data,         tensor.shape[rows + 1] * static_cast<int64_t>(fg_dtype_size(tensor.dtype)),
            tensor.shape[rows],  grouped ? tensor.shape[0] : 1,
            pitch(tensor, rows), grouped ? pitch(tensor, 0) : 0};
}

/* TMA's own rules: addresses, pitches and here K are multiples of 16 bytes, pitches are positive and below 2^40,
 * coordinates int32. */
bool fits_tma(const TensorRows &rows) {
    constexpr int64_t kPitchLimit = int64_t{1} << 40;
    const auto pitch_fits = [](int64_t count, int64_t pitch) {
        return count == 1 || (pitch > 0 && pitch < kPitchLimit && pitch % 16 == 0);
    };
    return is_multiple(rows.data, 16) && rows.row_bytes > 0 && rows.row_bytes % 16 == 0 &&
           rows.row_bytes <= INT_MAX - kSm90StepBytes && rows.rows <= INT_MAX - 2 * kSm90BlockM &&
           rows.groups <= INT_MAX && pitch_fits(rows.rows, rows.row_pitch) && pitch_fits(rows.groups, rows.group_pitch);
}

template <typename Math, typename Tile>
fg_status launch_tile(const TensorRows &a, const TensorRows &b, GemmSm90Args &args, int num_sms, const fg_queue *queue,
                      fg_error *error) {
    CUtensorMap map_a, map_b;
    fg_status status = encode_tensor_map(&map_a, a, Tile::kWarpgroupRows, 1, error);
    if (status == FG_OK) status = encode_tensor_map(&map_b, b, Tile::kBlockN / Tile::kCluster, 1, error);
    if (status != FG_OK) return status;

    const auto kernel = [] {
        if constexpr (Math::kPromote)
            return fp8_gemm_sm90_kernel<Math, Tile>;
        else
            return half_gemm_sm90_kernel<Math, Tile>;
    }();
    static std::atomic<uint64_t> allowed; /* devices on which the kernel may already use its shared memory */
    const uint64_t device_bit = queue->device_index < 64 ? uint64_t{1} << queue->device_index : 0;
    if (!(allowed.load(std::memory_order_relaxed) & device_bit)) {
        FG_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes));
        allowed.fetch_or(device_bit, std::memory_order_relaxed);
    }

    args.row_tiles = args.offsets.data ? max_row_tiles(args.m, args.offsets.groups, Tile::kClusterM)
                                       : ceil_div<int64_t>(args.m, Tile::kClusterM);
    args.column_tiles = ceil_div<int64_t>(args.n, Tile::kBlockN);
    const int64_t tiles = args.row_tiles * args.column_tiles, clusters = num_sms / Tile::kCluster;

    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {Tile::kCluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = {static_cast<unsigned>((tiles < clusters ? tiles : clusters) * Tile::kCluster)};
    config.blockDim = {Tile::kThreads};
    config.dynamicSmemBytes = Tile::kSharedBytes;
    config.stream = stream_of(queue);
    config.attrs = &cluster;
    config.numAttrs = 1;
    FG_CUDA(cudaLaunchKernelEx(&config, kernel, map_a, map_b, args));
    return FG_OK;
}

template <typename Math>
fg_status launch(const fg_plan &plan, const TensorRows &a, const TensorRows &b, GemmSm90Args &args, int num_sms,
                 const fg_queue *queue, fg_error *error) {
    if (plan.block_m == 2 * kSm90BlockM) return launch_tile<Math, Sm90Tile<256, 2>>(a, b, args, num_sms, queue, error);
    switch (plan.block_n) {
        case 128:
            return launch_tile<Math, Sm90Tile<128, 1>>(a, b, args, num_sms, queue, error);
        case 192:
            return launch_tile<Math, Sm90Tile<192, 1>>(a, b, args, num_sms, queue, error);
        default:
            return launch_tile<Math, Sm90Tile<256, 1>>(a, b, args, num_sms, queue, error);
    }
}

}  // namespace

bool gemm_sm90_takes(const fg_gemm_params &params) {
    return params.a.dtype != FG_FLOAT32 && fits_tma(make_rows(params.a)) && fits_tma(make_rows(params.b));
}

fg_status gemm_sm90(const fg_gemm_params &params, int num_sms, const fg_queue *queue, fg_error *error) {
    const TensorRows a = make_rows(params.a), b = make_rows(params.b);
    GemmSm90Args args = {};
    args.m = a.rows;
    args.n = b.rows;
    args.steps = static_cast<int32_t>(ceil_div<int64_t>(a.row_bytes, kSm90StepBytes));
    args.offsets = make_group_offsets(params);
    args.epilogue = make_epilogue(params);
    args.out_aligned = is_multiple(params.out.data, 16) &&
                       args.epilogue.out_stride * static_cast<int64_t>(fg_dtype_size(params.out.dtype)) % 16 == 0;

    const fg_plan plan = fg_plan_gemm_sm90(args.m, args.n, params.a.shape[1], b.groups, params.a.dtype, num_sms);
    fg_print_plan(&plan, "gemm", params.a.dtype, "m=%lld n=%lld k=%lld groups=%lld", static_cast<long long>(args.m),
                  static_cast<long long>(args.n), static_cast<long long>(params.a.shape[1]),
                  static_cast<long long>(b.groups));
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const bool a_is_e5m2 = params.a.dtype == FG_FLOAT8_E5M2, b_is_e5m2 = params.b.dtype == FG_FLOAT8_E5M2;
    if (params.a.dtype == FG_FLOAT16) return launch<Sm90Half>(plan, a, b, args, num_sms, queue, error);
    if (params.a.dtype == FG_BFLOAT16) return launch<Sm90Bfloat16>(plan, a, b, args, num_sms, queue, error);
    if (a_is_e5m2)
        return b_is_e5m2 ? launch<Sm90E5m2E5m2>(plan, a, b, args, num_sms, queue, error)
                         : launch<Sm90E5m2E4m3>(plan, a, b, args, num_sms, queue, error);
    return b_is_e5m2 ? launch<Sm90E4m3E5m2>(plan, a, b, args, num_sms, queue, error)
                     : launch<Sm90E4m3E4m3>(plan, a, b, args, num_sms, queue, error);
}

}  // namespace flexgemm
