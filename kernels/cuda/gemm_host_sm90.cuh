/*
 * What launches of all Hopper kernels of products share.
 */
#pragma once

#include <type_traits>

#include "../plan.h"
#include "gemm_mainloop_sm90.cuh"
#include "tensor_map.cuh"

namespace flexgemm {

/* Whether each group has a matrix of its own: of a matrix that was expanded to all of them the copy engine is told once. */
inline bool has_groups(const fg_tensor &tensor) { return tensor.ndim == 3 && step_of(tensor, 0) != 0; }

/* What is adjacent in memory are its rows, or columns where it lies in columns. */
inline TensorRows make_rows(const fg_tensor &matrix) {
    const fg_tensor tensor = fg_lies_in_columns(&matrix) ? fg_exchanged(&matrix) : matrix;
    const bool grouped = has_groups(tensor);
    const int rows = tensor.ndim - 2;
    return {tensor.data,         tensor.shape[rows + 1] * static_cast<int64_t>(fg_dtype_size(tensor.dtype)),
            tensor.shape[rows],  grouped ? tensor.shape[0] : 1,
            pitch(tensor, rows), grouped ? pitch(tensor, 0) : 0};
}

/* What all Hopper kernels of products are told. */
inline GemmSm90Args make_args(const fg_gemm_params &params) {
    GemmSm90Args args = {};
    args.space = make_tile_space(params);
    args.epilogue = make_epilogue(params);
    args.column_factors = has_column_factors(args.epilogue);
    args.a_grouped = has_groups(params.a);
    args.b_grouped = has_groups(params.b);
    return args;
}

/* The kernel may begin, up to wait_for_earlier_kernels(), when all blocks of the one before it have ended, but before
 * what they wrote is visible. None of its blocks takes a multiprocessor earlier than that: set_num_sms would not
 * hold. */
template <typename Kernel>
fg_status launch_clusters(Kernel *kernel, dim3 grid, int cluster_blocks, int threads, int shared_bytes,
                          const CUtensorMap &map_a, const CUtensorMap &map_b, const GemmSm90Args &args,
                          const fg_queue *queue, fg_error *error) {
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {static_cast<unsigned>(cluster_blocks), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = {static_cast<unsigned>(threads)};
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream_of(queue);
    config.attrs = attributes;
    config.numAttrs = cluster_blocks > 1 ? 2 : 1; /* clusters of one are spread less evenly than blocks */
    FG_CUDA(cudaLaunchKernelEx(&config, kernel, map_a, map_b, args));
    return FG_OK;
}

/* Calls launch with a value of the kind of product of 16 bits that these are of one type and of the other. */
template <template <Sm90Sums> typename OfHalf, template <Sm90Sums> typename OfBfloat16, typename Launch>
fg_status with_halves(fg_dtype dtype, const Launch &launch) {
    return dtype == FG_FLOAT16 ? launch(OfHalf<Sm90Sums::kPlain>{}) : launch(OfBfloat16<Sm90Sums::kPlain>{});
}

/* Calls launch with a value of the kind of product that wgmma has for a first operand of one fp8 type and a second one
 * of another. */
template <Sm90Sums kSums, typename Launch>
fg_status with_fp8(fg_dtype first, fg_dtype second, const Launch &launch) {
    if (first == FG_FLOAT8_E5M2)
        return second == FG_FLOAT8_E5M2 ? launch(Sm90E5m2E5m2<kSums>{}) : launch(Sm90E5m2E4m3<kSums>{});
    return second == FG_FLOAT8_E5M2 ? launch(Sm90E4m3E5m2<kSums>{}) : launch(Sm90E4m3E4m3<kSums>{});
}

/* Calls launch with a value of the kind of product of kernels of few and of some rows, whose first operand are the
 * weights as they lie. fp8 sums are always promoted: reading is what takes the time. */
template <typename Launch>
fg_status with_weights(const fg_gemm_params &params, const Launch &launch) {
    const fg_dtype weights = params.b.dtype, tokens = params.a.dtype;
    if (fg_is_float8(tokens))
        return params.kind_a == FG_SCALE_BLOCK ? with_fp8<Sm90Sums::kScaled>(weights, tokens, launch)
                                               : with_fp8<Sm90Sums::kPromoted>(weights, tokens, launch);
    return params.b_row_major ? with_halves<Sm90HalfKm, Sm90Bfloat16Km>(tokens, launch)
                              : with_halves<Sm90Half, Sm90Bfloat16>(tokens, launch);
}

/* Activations, SwiGLU and fp8 outputs for which there are kernels: of e4m3 and of 16 bits, in the format that usually
 * follows. */
inline bool has_usual_end(const fg_gemm_params &params) {
    const fg_dtype operands = params.a.dtype, out = params.out.dtype;
    const bool active = params.swiglu || params.activation != FG_ACTIVATION_NONE;
    if (operands != params.b.dtype || operands == FG_FLOAT8_E5M2) return false;
    if (params.kind_a == FG_SCALE_BLOCK) return out == FG_BFLOAT16 && params.swiglu;
    if (out == FG_FLOAT8_E4M3FN) return fg_is_float8(operands) && params.activation == FG_ACTIVATION_NONE;
    return out == fg_usual_output(operands) && active;
}

/* Kinds of products that have: those of inference, whose sums are promoted, and of K-major operands of 16 bits. */
template <typename Math>
constexpr bool kHasUsualEnds =
    (!Math::kFp8 && !Math::kMMajor && !Math::kNMajor) || std::is_same_v<Math, Sm90E4m3E4m3<Sm90Sums::kPromoted>> ||
    std::is_same_v<Math, Sm90E4m3E4m3<Sm90Sums::kScaled>>;

template <Sm90End kEnd>
constexpr std::integral_constant<Sm90End, kEnd> kEndIs{};

/* Calls launch with a value of the type that they store, and what makes it of sums. */
template <typename Math, typename Launch>
fg_status with_end(const Epilogue &to, const Launch &launch) {
    const typename Math::Stored halves = {};
    if constexpr (Math::kScaled) {
        return launch(halves, kEndIs<Sm90End::kSwiglu>);
    } else {
        if constexpr (Math::kFp8)
            if (to.out_dtype == FG_FLOAT8_E4M3FN)
                return to.swiglu ? launch(__nv_fp8_e4m3{}, kEndIs<Sm90End::kSwiglu>)
                                 : launch(__nv_fp8_e4m3{}, kEndIs<Sm90End::kNone>);
        if (to.swiglu) return launch(halves, kEndIs<Sm90End::kSwiglu>);
        if (to.activation == FG_ACTIVATION_RELU) return launch(halves, kEndIs<Sm90End::kRelu>);
        if (to.activation == FG_ACTIVATION_GELU) return launch(halves, kEndIs<Sm90End::kGelu>);
        return launch(halves, kEndIs<Sm90End::kSilu>);
    }
}

/* What kernels of few and of some rows are told, which of groups have usual ends or not. Plain outputs are what nearly
 * all products want. */
inline GemmSm90Args make_token_args(const fg_gemm_params &params, bool ends_of_groups) {
    GemmSm90Args args = make_args(params);
    const bool chunks = fg_gemm_stores_chunks(&params), linear = fg_gemm_is_linear(&params);
    const bool has_end = ends_of_groups || args.space.major.grouping == Grouping::kNone;
    args.plain = chunks && linear && fg_dtype_size(params.out.dtype) == 2;
    args.usual_end = chunks && has_end && has_usual_end(params);
    args.usual = args.usual_end || (args.plain && params.out.dtype == fg_usual_output(params.a.dtype));
    return args;
}

/* Calls launch with a value of what the kernel is made for: the usual, which are Stored, or an other use. */
template <typename Stored, typename Other, Sm90End kEnd = Sm90End::kNone, typename Launch>
fg_status with_use(const GemmSm90Args &args, const Launch &launch) {
    if (!args.usual) return launch(Other{});
    if (args.space.major.grouping == Grouping::kNone)
        return launch(Sm90UsualUse<Stored, Other::kRowsOnly, true, kEnd>{});
    return launch(Sm90UsualUse<Stored, Other::kRowsOnly, false, kEnd>{});
}

/* The product of a plan of few rows, and of one of groups of some. (gemm_decode_sm90.cu, gemm_groups_sm90.cu) */
fg_status gemm_decode_sm90(const fg_gemm_params &params, const fg_plan &plan, int num_sms, const fg_queue *queue,
                           fg_error *error);
fg_status gemm_groups_sm90(const fg_gemm_params &params, const fg_plan &plan, int num_sms, const fg_queue *queue,
                           fg_error *error);

}  // namespace flexgemm
