/*
 * Which kernels of gemm_sm90.cuh exist, what they can take, and their launch.
 */
#include "gemm_sm90.cuh"

#include <climits>

#include "../plan.h"
#include "backend.cuh"
#include "tensor_map.cuh"

namespace flexgemm {
namespace {

/* TMA's own rules: addresses, pitches and here K are multiples of 16 bytes, pitches are positive and below 2^40,
 * coordinates int32. */
bool fits_tma(const TensorRows &rows) {
    constexpr int64_t kPitchLimit = int64_t{1} << 40;
    const auto pitch_fits = [](int64_t count, int64_t pitch) {
        return count == 1 || (pitch > 0 && pitch < kPitchLimit && pitch % 16 == 0);
    };
    return is_multiple(rows.data, 16) && rows.row_bytes > 0 && rows.row_bytes % 16 == 0 &&
           rows.row_bytes <= INT_MAX - kSm90StepBytes && rows.rows <= INT_MAX - 2 * kSm90BlockM && rows.groups > 0 &&
           rows.groups <= INT_MAX && pitch_fits(rows.rows, rows.row_pitch) && pitch_fits(rows.groups, rows.group_pitch);
}

template <typename Math, typename Tile>
fg_status launch_tile(const fg_plan &plan, const TensorRows &a, const TensorRows &b, GemmSm90Args &args, int num_sms,
                      const fg_queue *queue, fg_error *error) {
    CUtensorMap map_a, map_b;
    fg_status status = encode_tensor_map(&map_a, a, Tile::kWarpgroupRows, 1, error);
    if (status == FG_OK) status = encode_tensor_map(&map_b, b, Tile::kBlockN / Tile::kCluster, 1, error);
    if (status != FG_OK) return status;

    constexpr auto kernel = [] {
        if constexpr (Math::kFp8)
            return fp8_gemm_or_fp8_wgrad_gemm_sm90_kernel<Math, Tile>;
        else
            return half_gemm_sm90_kernel<Math, Tile>;
    }();
    status = allow_shared<kernel>(Tile::kSharedBytes, error);
    if (status != FG_OK) return status;
    const int64_t tiles = set_tiles(args.space, Tile::kClusterM, Tile::kBlockN), clusters = num_sms / Tile::kCluster;
    /* The more steps a tile has, the less its sums are beside its products. */
    constexpr int64_t kFewSteps = 48;
    const int64_t groups_along_k = args.space.k_offsets.data ? args.space.major.groups : 1;
    args.staggered = args.epilogue.accumulate && args.plain && args.epilogue.bias == nullptr && tiles >= 4 * clusters &&
                     args.space.k_bytes <= kFewSteps * kSm90StepBytes * groups_along_k;
    const bool share = plan.split_k == 2 && !args.staggered;
    const int64_t steps = ceil_div<int64_t>(args.space.k_bytes, kSm90StepBytes);
    const int64_t shared = share ? fg_gemm_shared_tiles(tiles, clusters, steps) : 0, works = tiles + shared;
    args.unshared_tiles = static_cast<uint32_t>(tiles - shared);
    const dim3 grid(static_cast<unsigned>((works < clusters ? works : clusters) * Tile::kCluster));
    return launch_clusters(kernel, grid, Tile::kCluster, Tile::kThreads, Tile::kSharedBytes, map_a, map_b, args, queue,
                           error);
}

/* Of tiles of so many columns, by pairs of blocks or by single ones; with scales of blocks 256 columns are a pair's. */
template <typename Math, int kColumns>
fg_status launch_columns(const fg_plan &plan, const TensorRows &a, const TensorRows &b, GemmSm90Args &args, int num_sms,
                         const fg_queue *queue, fg_error *error) {
    constexpr bool kScaled = Math::kScaled;
    if constexpr (!kScaled || kColumns < 256) {
        if (plan.block_m == kSm90BlockM)
            return launch_tile<Math, Sm90Tile<kColumns, 1, kScaled>>(plan, a, b, args, num_sms, queue, error);
    }
    return launch_tile<Math, Sm90Tile<kColumns, 2, kScaled>>(plan, a, b, args, num_sms, queue, error);
}

template <typename Math>
fg_status launch(const fg_plan &plan, const TensorRows &a, const TensorRows &b, GemmSm90Args &args, int num_sms,
                 const fg_queue *queue, fg_error *error) {
    if (plan.block_n == 128) return launch_columns<Math, 128>(plan, a, b, args, num_sms, queue, error);
    if constexpr (!Math::kScaled) { /* whose parts of tiles are blocks */
        if (plan.block_n == 176) return launch_columns<Math, 176>(plan, a, b, args, num_sms, queue, error);
        if (plan.block_n == 192) return launch_columns<Math, 192>(plan, a, b, args, num_sms, queue, error);
    }
    return launch_columns<Math, 256>(plan, a, b, args, num_sms, queue, error);
}

/* Of the output nothing but scaled and biased sums, in 16 bits or float32. */
bool is_plain(const fg_gemm_params &params) {
    return !params.swiglu && params.activation == FG_ACTIVATION_NONE && !params.scale_out.present &&
           fg_dtype_size(params.out.dtype) > 1;
}

}  // namespace

bool gemm_sm90_takes(const fg_gemm_params &params) {
    return params.a.dtype != FG_FLOAT32 && fits_tma(make_rows(params.a)) && fits_tma(make_rows(params.b));
}

fg_status gemm_sm90(const fg_gemm_params &params, int num_sms, const fg_queue *queue, fg_error *error) {
    const fg_dtype dtype = params.a.dtype;
    const bool block_scaled = params.kind_a == FG_SCALE_BLOCK;
    const fg_gemm_shape all = fg_gemm_all_rows(&params);
    const fg_plan plan = fg_plan_gemm_sm90(all.m, all.n, all.k, all.groups, dtype, num_sms, fg_gemm_tiles(&params));
    fg_print_plan(&plan, "gemm", dtype, "m=%lld n=%lld k=%lld groups=%lld", static_cast<long long>(all.m),
                  static_cast<long long>(all.n), static_cast<long long>(all.k), static_cast<long long>(all.groups));
    if (plan.few_rows) return gemm_decode_sm90(params, plan, num_sms, queue, error);
    if (plan.some_rows) return gemm_groups_sm90(params, plan, num_sms, queue, error);

    const TensorRows a = make_rows(params.a), b = make_rows(params.b);
    GemmSm90Args args = make_args(params);
    args.steps_per_promote = params.promote_every / FG_SCALE_BLOCK_SIZE;
    args.plain = is_plain(params);
    const int64_t size = static_cast<int64_t>(fg_dtype_size(params.out.dtype));
    args.out_aligned = is_multiple(params.out.data, 16) && args.epilogue.out_stride * size % 16 == 0 &&
                       args.epilogue.out_group_stride * size % 16 == 0;
    const TensorRows out = make_rows(params.out);
    args.out_grouped = params.out.ndim == 3;
    args.out_in_boxes = fits_tma(out);
    args.whole_boxes = args.out_in_boxes && args.plain && !has_column_factors(args.epilogue);
    if (args.out_in_boxes) {
        const auto encode = params.accumulate ? encode_sums_map : encode_tensor_map;
        const fg_status status = encode(&args.map_out, out, 16, 1, error);
        if (status != FG_OK) return status;
    }

    const fg_dtype of_b = params.b.dtype;
    if (dtype == FG_FLOAT16) return launch<Sm90Half<Sm90Sums::kPlain>>(plan, a, b, args, num_sms, queue, error);
    if (dtype == FG_BFLOAT16) return launch<Sm90Bfloat16<Sm90Sums::kPlain>>(plan, a, b, args, num_sms, queue, error);
    const auto launch_math = [&](auto math) { return launch<decltype(math)>(plan, a, b, args, num_sms, queue, error); };
    if (block_scaled) return with_fp8<Sm90Sums::kScaled>(dtype, of_b, launch_math);
    if (args.steps_per_promote == 0) return with_fp8<Sm90Sums::kPlain>(dtype, of_b, launch_math);
    return with_fp8<Sm90Sums::kPromoted>(dtype, of_b, launch_math);
}

}  // namespace flexgemm
