/*
 * What launches of all Hopper kernels of products share.
 */
#pragma once

#include "gemm_mainloop_sm90.cuh"
#include "tensor_map.cuh"

namespace flexgemm {

inline TensorRows make_rows(const fg_tensor &tensor) {
    const bool grouped = tensor.ndim == 3;
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
    args.a_grouped = params.a.ndim == 3;
    args.b_grouped = params.b.ndim == 3;
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

/* Calls launch with a value of the kind of product that wgmma has for a first operand of one fp8 type and a second one
 * of another. */
template <Sm90Sums kSums, typename Launch>
fg_status with_fp8(fg_dtype first, fg_dtype second, const Launch &launch) {
    if (first == FG_FLOAT8_E5M2)
        return second == FG_FLOAT8_E5M2 ? launch(Sm90E5m2E5m2<kSums>{}) : launch(Sm90E5m2E4m3<kSums>{});
    return second == FG_FLOAT8_E5M2 ? launch(Sm90E4m3E5m2<kSums>{}) : launch(Sm90E4m3E4m3<kSums>{});
}

/* Math::Stored, of products of these. */
inline fg_dtype usual_output(fg_dtype operands) { return operands == FG_FLOAT16 ? FG_FLOAT16 : FG_BFLOAT16; }

/* Of the output nothing but scaled and biased sums in 16 bits, 16 bytes of them at a time: what nearly all products
 * want. Groups of columns begin anywhere. */
inline bool stores_halves(const TileSpace &space, const Epilogue &to) {
    return !space.major_is_columns && !to.accumulate && !to.swiglu && to.activation == FG_ACTIVATION_NONE &&
           to.scale_out == nullptr && fg_dtype_size(to.out_dtype) == 2 && is_multiple(to.out, 16) &&
           space.minor_length % 8 == 0 && to.out_stride % 8 == 0 && to.out_group_stride % 8 == 0;
}

/* What kernels of few and of some rows are told. */
inline GemmSm90Args make_token_args(const fg_gemm_params &params) {
    GemmSm90Args args = make_args(params);
    args.plain = stores_halves(args.space, args.epilogue);
    args.usual = args.plain && params.out.dtype == usual_output(params.a.dtype);
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
