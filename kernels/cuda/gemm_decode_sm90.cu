/*
 * The kernels of gemm_decode_sm90.cuh and their launch.
 */
#include "gemm_decode_sm90.cuh"

#include <type_traits>

#include "gemm_host_sm90.cuh"

namespace flexgemm {
namespace {

/* How many clusters of a kernel run at once: of small ones two blocks share a multiprocessor. The device is asked once for
 * each size of them. */
template <auto kKernel>
fg_status clusters_at_once(int cluster, int threads, int shared_bytes, const fg_queue *queue, int *count,
                           fg_error *error) {
    static std::atomic<int> known[kMaxCachedDevices][FG_MOST_SHARING + 1];
    const bool kept = queue->device_index < kMaxCachedDevices;
    *count = kept ? known[queue->device_index][cluster].load(std::memory_order_relaxed) : 0;
    if (*count > 0) return FG_OK;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = {static_cast<unsigned>(cluster)};
    config.blockDim = {static_cast<unsigned>(threads)};
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.attrs = &attribute;
    config.numAttrs = 1;
    FG_CUDA(cudaOccupancyMaxActiveClusters(count, reinterpret_cast<const void *>(+kKernel), &config));
    if (kept) known[queue->device_index][cluster].store(*count, std::memory_order_relaxed);
    return FG_OK;
}

template <typename Math, typename Tile>
fg_status launch_tile(const fg_plan &plan, const TensorRows &weights, const TensorRows &tokens, GemmSm90Args &args,
                      int num_sms, const fg_queue *queue, fg_error *error) {
    const int64_t tiles = set_tiles(args.space, Tile::kBlockN, Tile::kWeights);
    args.read_once = plan.weights == FG_WEIGHTS_GIVE_WAY;
    set_tokens<Tile>(args);
    CUtensorMap map_weights, map_tokens;
    fg_status status = encode_tensor_map(&map_weights, weights, kSm90WeightBox<Tile>, 1, error);
    if (status == FG_OK) status = encode_tensor_map(&map_tokens, tokens, args.box_tokens, 1, error);
    if (status != FG_OK) return status;

    constexpr auto kernel = [] {
        if constexpr (Math::kFp8)
            return fp8_gemm_or_fp8_wgrad_gemm_decode_sm90_kernel<Math, Tile>;
        else
            return half_gemm_decode_sm90_kernel<Math, Tile>;
    }();
    status = allow_shared<kernel>(Tile::kSharedBytes, error);
    if (status != FG_OK) return status;

    for (args.split = plan.split_k; args.split > 1; --args.split) {
        const int cluster = args.split * Tile::kCluster;
        int clusters = 0;
        status = clusters_at_once<kernel>(cluster, Tile::kThreads, Tile::kSharedBytes, queue, &clusters, error);
        if (status != FG_OK) return status;
        if (tiles <= clusters && tiles * cluster <= num_sms) break;
    }
    const int64_t at_once = num_sms / Tile::kCluster, clusters = args.split > 1 || tiles < at_once ? tiles : at_once;
    const int cluster = args.split * Tile::kCluster;
    const int steps = static_cast<int>(ceil_div<int64_t>(args.space.k_bytes, kSm90StepBytes));
    args.part_steps = steps / args.split;
    args.longer_parts = steps % args.split;
    const dim3 grid(static_cast<unsigned>(cluster), static_cast<unsigned>(clusters));
    return launch_clusters(kernel, grid, cluster, Tile::kThreads, Tile::kSharedBytes, map_weights, map_tokens, args,
                           queue, error);
}

/* The most tokens that there are registers for, beside so many warpgroups of weights. */
template <typename Math, int kOfWeights>
constexpr int kMostTokens = kOfWeights == 2 ? (Math::kScaled ? FG_FITTING_SCALED_WIDE
                                               : Math::kFp8  ? FG_FITTING_FP8_WIDE
                                                             : FG_FITTING_HALVES_WIDE)
                                            : (Math::kScaled ? FG_FITTING_SCALED
                                               : Math::kFp8  ? FG_FITTING_FP8
                                                             : FG_FITTING_HALVES);

/* Of a usual output and as many tokens as fit, kTokens at least. */
template <typename Math, int kOfWeights, int kTokens = FG_FITTING_LEAST>
fg_status launch_fitting(const fg_plan &plan, const TensorRows &weights, const TensorRows &tokens, GemmSm90Args &args,
                         int num_sms, const fg_queue *queue, fg_error *error) {
    if constexpr (kTokens <= kMostTokens<Math, kOfWeights>) {
        if (plan.block_m > kTokens)
            return launch_fitting<Math, kOfWeights, kTokens + FG_FITTING_UNIT>(plan, weights, tokens, args, num_sms,
                                                                               queue, error);
        using Use = Sm90UsualUse<typename Math::Stored, Sm90AnyUse::kRowsOnly, true>;
        using Tile = Sm90DecodeTile<Math, kTokens, 1, kOfWeights, Use>;
        return launch_tile<Math, Tile>(plan, weights, tokens, args, num_sms, queue, error);
    }
    return fg_fail(error, FG_ERROR_VALUE, "expected tiles of at most %d rows, got a plan of %d",
                   kMostTokens<Math, kOfWeights>, static_cast<int>(plan.block_m));
}

template <typename Math>
fg_status launch(const fg_plan &plan, const fg_gemm_params &params, int num_sms, const fg_queue *queue,
                 fg_error *error) {
    const TensorRows weights = make_rows(params.b), tokens = make_rows(params.a);
    GemmSm90Args args = make_token_args(params, false);
    args.alike =
        (args.plain || args.usual_end) && args.epilogue.bias == nullptr && (args.epilogue.one_factor || Math::kScaled);
    /* By blocks, or pairs of them, of 64 rows of weights or of 128. */
    const auto launch_blocks = [&](auto tokens_of_tile, auto blocks, auto of_weights) {
        const auto launch_use = [&](auto use) {
            using Tile = Sm90DecodeTile<Math, tokens_of_tile(), blocks(), of_weights(), decltype(use)>;
            return launch_tile<Math, Tile>(plan, weights, tokens, args, num_sms, queue, error);
        };
        if constexpr (kHasUsualEnds<Math>)
            if (args.usual_end)
                return with_end<Math>(args.epilogue, [&](auto stored, auto end) {
                    return launch_use(Sm90UsualUse<decltype(stored), false, true, end()>{});
                });
        return with_use<typename Math::Stored, Sm90AnyUse>(args, launch_use);
    };
    constexpr std::integral_constant<int, 1> one;
    constexpr std::integral_constant<int, 2> two;
    const auto launch_either = [&](auto tokens_of_tile) {
        return plan.block_n == 64 ? launch_blocks(tokens_of_tile, one, one) : launch_blocks(tokens_of_tile, one, two);
    };
    switch (plan.block_m) {
        case 8:
            return launch_either(std::integral_constant<int, 8>{});
        case 16:
            return launch_either(std::integral_constant<int, 16>{});
        case 24:
            return launch_either(std::integral_constant<int, 24>{});
        case 32:
            return launch_either(std::integral_constant<int, 32>{});
        case 64:
            if (plan.few_rows == 1) return launch_either(std::integral_constant<int, 64>{});
            return launch_blocks(std::integral_constant<int, 64>{}, two, two);
        case 128:
            if (plan.block_n == 64) return launch_blocks(std::integral_constant<int, 128>{}, one, one);
            break;
        default:
            break;
    }
    return plan.block_n == 64 ? launch_fitting<Math, 1>(plan, weights, tokens, args, num_sms, queue, error)
                              : launch_fitting<Math, 2>(plan, weights, tokens, args, num_sms, queue, error);
}

}  // namespace

fg_status gemm_decode_sm90(const fg_gemm_params &params, const fg_plan &plan, int num_sms, const fg_queue *queue,
                           fg_error *error) {
    return with_weights(params, [&](auto math) { return launch<decltype(math)>(plan, params, num_sms, queue, error); });
}

}  // namespace flexgemm
