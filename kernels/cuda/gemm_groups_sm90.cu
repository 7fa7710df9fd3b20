/*
 * The kernels of gemm_groups_sm90.cuh and their launch.
 */
#include "gemm_groups_sm90.cuh"

#include "gemm_host_sm90.cuh"

namespace flexgemm {
namespace {

template <typename Math, typename Tile>
fg_status launch_tile(const fg_plan &plan, const fg_gemm_params &params, GemmSm90Args &args, int num_sms,
                      const fg_queue *queue, fg_error *error) {
    args.split = 1;
    args.part_steps = static_cast<int>(ceil_div<int64_t>(args.space.k_bytes, kSm90StepBytes));
    args.space.least_block = plan.least_rows;
    args.space.block_overhead = static_cast<uint32_t>(plan.overhead_rows);
    const int64_t tiles = set_tiles(args.space, plan.least_rows > 0 ? plan.least_rows : plan.block_m, Tile::kWeights),
                  pairs = num_sms / Tile::kCluster;
    set_tokens<Tile>(args);
    const TensorRows weights = make_rows(params.b);
    args.read_once = plan.weights == FG_WEIGHTS_GIVE_WAY;
    const auto encode_weights = plan.weights == FG_WEIGHTS_BY_LINES ? encode_lines_map : encode_tensor_map;
    CUtensorMap map_weights, map_tokens;
    fg_status status = encode_weights(&map_weights, weights, kSm90WeightBox<Tile>, 1, error);
    if (status == FG_OK) status = encode_tensor_map(&map_tokens, make_rows(params.a), args.box_tokens, 1, error);
    if (status != FG_OK) return status;

    constexpr auto kernel = [] {
        if constexpr (Math::kFp8)
            return fp8_gemm_groups_sm90_kernel<Math, Tile>;
        else
            return half_gemm_groups_sm90_kernel<Math, Tile>;
    }();
    status = allow_shared<kernel>(Tile::kSharedBytes, error);
    if (status != FG_OK) return status;
    const dim3 grid(Tile::kCluster, static_cast<unsigned>(tiles < pairs ? tiles : pairs));
    return launch_clusters(kernel, grid, Tile::kCluster, Tile::kThreads, Tile::kSharedBytes, map_weights, map_tokens,
                           args, queue, error);
}

/* Of at most so many tokens. */
template <typename Math, int kTokens>
fg_status launch_tokens(const fg_plan &plan, const fg_gemm_params &params, int num_sms, const fg_queue *queue,
                        fg_error *error) {
    GemmSm90Args args = make_token_args(params, true);
    const auto launch_use = [&](auto use) {
        using Tile = Sm90GroupTile<Math, kTokens, decltype(use)>;
        return launch_tile<Math, Tile>(plan, params, args, num_sms, queue, error);
    };
    if constexpr (kHasUsualEnds<Math>)
        if (args.usual_end)
            return with_end<Math>(args.epilogue, [&](auto stored, auto end) {
                return with_use<decltype(stored), Sm90AnyUse, end()>(args, launch_use);
            });
    return with_use<typename Math::Stored, Sm90AnyUse>(args, launch_use);
}

template <typename Math>
fg_status launch(const fg_plan &plan, const fg_gemm_params &params, int num_sms, const fg_queue *queue,
                 fg_error *error) {
    /* That there are registers for. */
    constexpr int kTallest = Math::kScaled ? FG_SOME_SCALED : Math::kPromote ? FG_SOME_PROMOTED : FG_SOME_HALVES;
    if (plan.block_m <= FG_SOME_LEAST) return launch_tokens<Math, FG_SOME_LEAST>(plan, params, num_sms, queue, error);
    if constexpr (kTallest >= FG_SOME_HALVES)
        if (plan.block_m > FG_SOME_PROMOTED)
            return launch_tokens<Math, FG_SOME_HALVES>(plan, params, num_sms, queue, error);
    if constexpr (kTallest >= FG_SOME_PROMOTED)
        if (plan.block_m > FG_SOME_SCALED)
            return launch_tokens<Math, FG_SOME_PROMOTED>(plan, params, num_sms, queue, error);
    return launch_tokens<Math, FG_SOME_SCALED>(plan, params, num_sms, queue, error);
}

}  // namespace

fg_status gemm_groups_sm90(const fg_gemm_params &params, const fg_plan &plan, int num_sms, const fg_queue *queue,
                           fg_error *error) {
    return with_weights(params, [&](auto math) { return launch<decltype(math)>(plan, params, num_sms, queue, error); });
}

}  // namespace flexgemm
