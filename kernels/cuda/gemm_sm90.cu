/*
 * Products on Hopper: what its kernels can take, and which of them a product gets.
 */
#include <climits>

#include "gemm_launch_sm90.cuh"

namespace flexgemm {
namespace {

/* 32 of them are looked at at once. */
constexpr int64_t kMostGroups = INT_MAX - 32;

/* How far behind the end of rows a tile or a step may begin, in bytes, and reach. */
constexpr int64_t kMostBehind = 1024;

/* TMA's own rules: addresses, pitches and here rows are multiples of 16 bytes, pitches are positive and below 2^40,
 * coordinates int32. */
bool fits_tma(const TensorRows &rows) {
    constexpr int64_t kPitchLimit = int64_t{1} << 40;
    const auto pitch_fits = [](int64_t count, int64_t pitch) {
        return count == 1 || (pitch > 0 && pitch < kPitchLimit && pitch % 16 == 0);
    };
    return is_multiple(rows.data, 16) && rows.row_bytes > 0 && rows.row_bytes % 16 == 0 &&
           rows.row_bytes <= INT_MAX - kMostBehind && rows.rows > 0 && rows.rows <= INT_MAX - 2 * kSm90BlockM &&
           rows.groups > 0 && rows.groups <= kMostGroups && pitch_fits(rows.rows, rows.row_pitch) &&
           pitch_fits(rows.groups, rows.group_pitch);
}

/* Of such ends, what kernels for many rows have (launch_end): an fp8 output, or SwiGLU beside scales of blocks, without
 * factors of columns; SwiGLU to fp8 in tiles of 256 columns. */
bool has_end_of_many_rows(const GemmSm90Args &args, const fg_plan &plan) {
    const bool to_fp8 = args.epilogue.out_dtype == FG_FLOAT8_E4M3FN;
    if ((to_fp8 || args.epilogue.block_scaled) && args.column_factors) return false;
    return !to_fp8 || !args.epilogue.swiglu || plan.block_n == 256;
}

}  // namespace

bool gemm_sm90_takes(const fg_gemm_params &params) {
    return params.a.dtype != FG_FLOAT32 && fits_tma(make_rows(params.a)) && fits_tma(make_rows(params.b)) &&
           fg_gemm_shape_of(&params).groups <= kMostGroups;
}

/* Boxes begin at multiples of 16 bytes: groups of rows do not where those are what is adjacent, nor do groups of columns.
 * K, counted in bytes, may be limited by neither operand. Activations have kernels of K-major operands alone, and an A in
 * columns has none with factors of columns: it is that of weight gradients. */
bool gemm_sm90_takes_row_major(const fg_gemm_params &params) {
    const bool rows_have_groups =
        params.layout != FG_GEMM_DENSE && params.layout != FG_GEMM_BATCHED && params.layout != FG_GEMM_K_GROUPED;
    const bool takes_a = !fg_lies_in_columns(&params.a) || (!rows_have_groups && fg_gemm_scales_rows(&params));
    return params.b_row_major && fg_dtype_size(params.a.dtype) == 2 && params.layout != FG_GEMM_N_GROUPED && takes_a &&
           fg_gemm_is_linear(&params) && gemm_sm90_takes(params) &&
           fg_gemm_shape_of(&params).k <= (INT_MAX - kMostBehind) / 2;
}

fg_status gemm_sm90(const fg_gemm_params &params, int num_sms, const fg_queue *queue, fg_error *error) {
    const fg_dtype dtype = params.a.dtype;
    const fg_gemm_shape all = fg_gemm_all_rows(&params);
    const fg_plan plan = fg_plan_gemm_sm90(all.m, all.n, all.k, all.groups, dtype, num_sms, fg_gemm_tiles(&params));
    fg_print_plan(&plan, "gemm", dtype, "m=%lld n=%lld k=%lld groups=%lld", static_cast<long long>(all.m),
                  static_cast<long long>(all.n), static_cast<long long>(all.k), static_cast<long long>(all.groups));
    if (plan.few_rows) return gemm_decode_sm90(params, plan, num_sms, queue, error);
    if (plan.some_rows) return gemm_groups_sm90(params, plan, num_sms, queue, error);

    const TensorRows a = make_rows(params.a), b = make_rows(params.b);
    GemmSm90Args args = make_args(params);
    args.steps_per_promote = params.promote_every / FG_SCALE_BLOCK_SIZE;
    const int64_t size = static_cast<int64_t>(fg_dtype_size(params.out.dtype));
    args.out_aligned = is_multiple(params.out.data, 16) && args.epilogue.out_stride * size % 16 == 0 &&
                       args.epilogue.out_group_stride * size % 16 == 0;
    const TensorRows out = make_rows(params.out);
    args.out_grouped = has_groups(params.out);
    args.out_in_boxes = fits_tma(out);
    const Grouping grouping = args.space.major.grouping;
    args.rows_end_anywhere =
        !args.space.major_is_columns && grouping != Grouping::kNone && grouping != Grouping::kUniform;
    const bool each_step = !fg_is_float8(dtype) || args.epilogue.block_scaled || args.steps_per_promote == 1;
    const bool whole = args.out_in_boxes && each_step && all.k > 0 && !args.space.major_is_columns &&
                       params.layout != FG_GEMM_K_GROUPED;
    const bool linear = fg_gemm_is_linear(&params);
    args.usual_end = whole && has_usual_end(params) && has_end_of_many_rows(args, plan);
    args.boxed_tiles = args.out_in_boxes && (linear || args.usual_end);
    args.usual = args.usual_end || (whole && linear && params.out.dtype == fg_usual_output(dtype));
    args.plain = (linear || args.usual_end) && !args.column_factors;
    args.added = plan.adds_in_shared && args.plain && args.boxed_tiles;
    if (args.out_in_boxes) {
        const auto encode = params.accumulate ? encode_sums_map : encode_tensor_map;
        fg_status status = encode(&args.map_out, out, args.added ? kSm90WarpgroupRows : 16, 1, error);
        if (status == FG_OK && args.rows_end_anywhere) status = encode(&args.map_out_row, out, 1, 1, error);
        if (status != FG_OK) return status;
    }

    if (params.b_row_major) {
        const auto launch_row_major = fg_lies_in_columns(&params.a) ? gemm_mn_major_sm90 : gemm_n_major_sm90;
        return launch_row_major(plan, a, b, dtype, args, num_sms, queue, error);
    }
    if (!fg_is_float8(dtype))
        return launch_halves<Sm90Half, Sm90Bfloat16>(plan, a, b, dtype, args, num_sms, queue, error);
    const auto launch_fp8 = dtype == FG_FLOAT8_E5M2 ? gemm_e5m2_sm90 : gemm_e4m3_sm90;
    return launch_fp8(plan, a, b, params.b.dtype, args, num_sms, queue, error);
}

}  // namespace flexgemm
