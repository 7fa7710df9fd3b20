/*
 * Launches of the kernels of gemm_sm90.cuh. Those of fp8, by the type of A, and of operands that are not K-major are made
 * in files of their own: together they are what takes longest to compile.
 */
#pragma once

#include "../plan.h"
#include "backend.cuh"
#include "gemm_host_sm90.cuh"
#include "gemm_sm90.cuh"

namespace flexgemm {

template <typename Math, typename Tile>
fg_status launch_tile(const fg_plan &plan, const TensorRows &a, const TensorRows &b, GemmSm90Args &args, int num_sms,
                      const fg_queue *queue, fg_error *error) {
    CUtensorMap map_a, map_b;
    static_assert(Tile::kWarpgroupRows == kSm90LineRows, "boxes of A have as many rows of K or lines of rows");
    fg_status status = encode_tensor_map(&map_a, a, Tile::kWarpgroupRows, 1, error);
    if (status == FG_OK) status = encode_tensor_map(&map_b, b, kSm90WeightBox<Tile>, 1, error);
    if (status != FG_OK) return status;

    constexpr auto kernel = [] {
        if constexpr (Math::kFp8)
            return fp8_gemm_or_fp8_wgrad_gemm_sm90_kernel<Math, Tile>;
        else
            return half_gemm_sm90_kernel<Math, Tile>;
    }();
    status = allow_shared<kernel>(Tile::kSharedBytes, error);
    if (status != FG_OK) return status;
    const int64_t tiles = set_tiles(args.space, Tile::kClusterM, Tile::kBlockN, Tile::kCluster),
                  clusters = num_sms / Tile::kCluster;
    /* The more steps a tile has, the less its sums are beside its products. */
    constexpr int64_t kFewSteps = 48;
    const int64_t groups_along_k = args.space.k_offsets.data ? args.space.major.groups : 1;
    args.staggered = !Tile::kAdded && args.epilogue.accumulate && args.plain && tiles >= 4 * clusters &&
                     args.space.k_bytes <= kFewSteps * kSm90StepBytes * groups_along_k;
    const bool share = plan.split_k == 2 && !args.staggered;
    const int64_t steps = ceil_div<int64_t>(args.space.k_bytes, kSm90StepBytes);
    const int64_t shared = share ? fg_gemm_shared_tiles(tiles, clusters, steps) : 0, works = tiles + shared;
    args.unshared_tiles = static_cast<uint32_t>(tiles - shared);
    const dim3 grid(static_cast<unsigned>((works < clusters ? works : clusters) * Tile::kCluster));
    return launch_clusters(kernel, grid, Tile::kCluster, Tile::kThreads, Tile::kSharedBytes, map_a, map_b, args, queue,
                           error);
}

/* Of outputs that are no more than scaled rows, or of any, as Other says; usual ones are Stored. With scales of blocks there
 * is no room to keep factors of columns. Beside an N-major B they are rare: one kernel is for all of those. */
template <typename Math, typename Other, int kColumns, int kBlocks, Sm90End kEnd = Sm90End::kNone,
          typename Stored = typename Math::Stored>
fg_status launch_use(const fg_plan &plan, const TensorRows &a, const TensorRows &b, GemmSm90Args &args, int num_sms,
                     const fg_queue *queue, fg_error *error) {
    const auto launch = [&](auto use) {
        using Tile = Sm90Tile<Math, kColumns, kBlocks, decltype(use)>;
        return launch_tile<Math, Tile>(plan, a, b, args, num_sms, queue, error);
    };
    if constexpr ((Math::kFp8 && !Math::kPromote) || ((Math::kScaled || Math::kNMajor) && !Other::kRowsOnly))
        return launch(Other{});
    else
        return with_use<Stored, Other, kEnd>(args, launch);
}

/* Of usual ends, for which there are kernels that has_end_of_many_rows names: of fp8 outputs in tiles of less than 256
 * columns SwiGLU is not asked for. */
template <typename Math, int kColumns, int kBlocks>
fg_status launch_end(const fg_plan &plan, const TensorRows &a, const TensorRows &b, GemmSm90Args &args, int num_sms,
                     const fg_queue *queue, fg_error *error) {
    return with_end<Math>(args.epilogue, [&](auto stored, auto end) {
        using Stored = decltype(stored);
        constexpr bool kToFp8 = sizeof(Stored) == 1;
        constexpr Sm90End kEnd = kToFp8 && kColumns < 256 ? Sm90End::kNone : end();
        const auto launch = [&](auto other) {
            return launch_use<Math, decltype(other), kColumns, kBlocks, kEnd, Stored>(plan, a, b, args, num_sms, queue,
                                                                                      error);
        };
        if constexpr (!Math::kScaled && !kToFp8)
            if (!args.plain) return launch(Sm90AnyUse{});
        return launch(Sm90RowsUse{});
    });
}

/* Tiles that there are: with scales of blocks 256 columns are a pair's, and the boxes of an N-major B are each one
 * block's. */
template <typename Math, int kColumns, int kBlocks>
constexpr bool kHasTile = Math::kScaled   ? kColumns < 256 || kBlocks == 2
                          : Math::kNMajor ? kColumns / kBlocks % kSm90LineRows == 0
                                          : true;

/* Of tiles of so many columns, by pairs of blocks or by single ones. */
template <typename Math, int kColumns>
fg_status launch_columns(const fg_plan &plan, const TensorRows &a, const TensorRows &b, GemmSm90Args &args, int num_sms,
                         const fg_queue *queue, fg_error *error) {
    const auto launch_blocks = [&](auto blocks) {
        constexpr int kBlocks = decltype(blocks)::value;
        if constexpr (kHasUsualEnds<Math>)
            if (args.usual_end) return launch_end<Math, kColumns, kBlocks>(plan, a, b, args, num_sms, queue, error);
        if constexpr (kColumns == 128 && !Math::kScaled)
            if (args.added)
                return launch_tile<Math, Sm90Tile<Math, kColumns, kBlocks, Sm90AddedUse>>(plan, a, b, args, num_sms,
                                                                                          queue, error);
        if constexpr (!Math::kMMajor) /* which is taken for plain outputs only */
            if (!args.plain)
                return launch_use<Math, Sm90AnyUse, kColumns, kBlocks>(plan, a, b, args, num_sms, queue, error);
        return launch_use<Math, Sm90RowsUse, kColumns, kBlocks>(plan, a, b, args, num_sms, queue, error);
    };
    if constexpr (!kHasTile<Math, kColumns, 2>) {
        return launch_blocks(std::integral_constant<int, 1>{});
    } else {
        if constexpr (kHasTile<Math, kColumns, 1>)
            if (plan.block_m == kSm90BlockM) return launch_blocks(std::integral_constant<int, 1>{});
        return launch_blocks(std::integral_constant<int, 2>{});
    }
}

template <typename Math>
fg_status launch(const fg_plan &plan, const TensorRows &a, const TensorRows &b, GemmSm90Args &args, int num_sms,
                 const fg_queue *queue, fg_error *error) {
    if (plan.block_n == 128) return launch_columns<Math, 128>(plan, a, b, args, num_sms, queue, error);
    if constexpr (!Math::kScaled) /* whose parts of tiles are blocks */
        if (plan.block_n == 192) return launch_columns<Math, 192>(plan, a, b, args, num_sms, queue, error);
    if constexpr (!Math::kScaled && !Math::kNMajor)
        if (plan.block_n == 176) return launch_columns<Math, 176>(plan, a, b, args, num_sms, queue, error);
    if constexpr (!Math::kScaled && !Math::kNMajor &&
                  (Math::kPromote || !Math::kFp8)) { /* of which rows are scaled, no more */
        if (plan.block_n == 96) return launch_use<Math, Sm90RowsUse, 96, 1>(plan, a, b, args, num_sms, queue, error);
        if (plan.block_n == 224) return launch_use<Math, Sm90RowsUse, 224, 1>(plan, a, b, args, num_sms, queue, error);
        if (plan.block_n == 272) return launch_use<Math, Sm90RowsUse, 272, 2>(plan, a, b, args, num_sms, queue, error);
    }
    return launch_columns<Math, 256>(plan, a, b, args, num_sms, queue, error);
}

/* Of fp8: whose sums are what the scales and `promote_every` ask for, by the type of B. */
template <template <Sm90Sums> typename WithE4m3, template <Sm90Sums> typename WithE5m2>
fg_status launch_fp8(const fg_plan &plan, const TensorRows &a, const TensorRows &b, fg_dtype of_b, GemmSm90Args &args,
                     int num_sms, const fg_queue *queue, fg_error *error) {
    const auto with_sums = [&](auto sums) {
        constexpr Sm90Sums kSums = decltype(sums)::value;
        return of_b == FG_FLOAT8_E5M2 ? launch<WithE5m2<kSums>>(plan, a, b, args, num_sms, queue, error)
                                      : launch<WithE4m3<kSums>>(plan, a, b, args, num_sms, queue, error);
    };
    if (args.epilogue.block_scaled) return with_sums(std::integral_constant<Sm90Sums, Sm90Sums::kScaled>{});
    if (args.steps_per_promote == 0) return with_sums(std::integral_constant<Sm90Sums, Sm90Sums::kPlain>{});
    return with_sums(std::integral_constant<Sm90Sums, Sm90Sums::kPromoted>{});
}

/* Of 16 bits. */
template <template <Sm90Sums> typename OfHalf, template <Sm90Sums> typename OfBfloat16>
fg_status launch_halves(const fg_plan &plan, const TensorRows &a, const TensorRows &b, fg_dtype dtype,
                        GemmSm90Args &args, int num_sms, const fg_queue *queue, fg_error *error) {
    return with_halves<OfHalf, OfBfloat16>(
        dtype, [&](auto math) { return launch<decltype(math)>(plan, a, b, args, num_sms, queue, error); });
}

/* Of these: B N-major (gemm_n_major_sm90.cu), and A M-major too (gemm_mn_major_sm90.cu). */
fg_status gemm_n_major_sm90(const fg_plan &plan, const TensorRows &a, const TensorRows &b, fg_dtype dtype,
                            GemmSm90Args &args, int num_sms, const fg_queue *queue, fg_error *error);
fg_status gemm_mn_major_sm90(const fg_plan &plan, const TensorRows &a, const TensorRows &b, fg_dtype dtype,
                             GemmSm90Args &args, int num_sms, const fg_queue *queue, fg_error *error);

/* A of e4m3 (gemm_e4m3_sm90.cu) and of e5m2 (gemm_e5m2_sm90.cu). */
fg_status gemm_e4m3_sm90(const fg_plan &plan, const TensorRows &a, const TensorRows &b, fg_dtype of_b,
                         GemmSm90Args &args, int num_sms, const fg_queue *queue, fg_error *error);
fg_status gemm_e5m2_sm90(const fg_plan &plan, const TensorRows &a, const TensorRows &b, fg_dtype of_b,
                         GemmSm90Args &args, int num_sms, const fg_queue *queue, fg_error *error);

}  // namespace flexgemm
