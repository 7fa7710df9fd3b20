/*
 * Forward and input gradient of sparse convolution: each is put as one problem (conv_gather.cuh), planned, and handed
 * to the kernel that the plan names. Where that kernel knows no groups of channels, each group is a problem of its own.
 */
#include "../channel_groups.h"
#include "../segment.h"
#include "backend.cuh"
#include "conv_gather.cuh"
#include "mma_tile.cuh"
#include "tf32.cuh"

namespace flexgemm {
namespace {

/* What both passes ask of a plan and of the kernel, under the names they share here. */
struct Problem {
    const char *name;
    const fg_tensor &in, &weight, &map, &order, &segments, &out, &workspace;
    SumEpilogue epilogue;
    fg_dtype added_dtype; /* of bias and residual */
    const float *row_scales;
    const fg_order_sets &orders;
    int64_t channel_groups;
    fg_algorithm algorithm;
    fg_precision precision;
    Major major; /* of the weight */
    bool mirrored;

    /* Of a group of channels. */
    int64_t depth() const { return in.shape[1] / channel_groups; }
    int64_t columns() const { return out.shape[1] / channel_groups; }

    bool in_aligned() const { return chunks_aligned(in.data, in.strides[0], depth(), in.dtype); }
    bool weight_aligned() const {
        const int64_t row = major == Major::kK ? depth() : columns();
        return chunks_aligned(weight.data, row, row, in.dtype);
    }

    fg_status plan(const fg_queue *queue, fg_plan *result, int *num_sms, fg_error *error) const {
        int compute_capability;
        const fg_status status = device_properties(queue->device_index, num_sms, &compute_capability, error);
        if (status != FG_OK) return status;
        /* The plan sees that rows are whole 16-byte pieces, but not where they are; float32 is copied first. */
        const bool near = in.dtype == FG_FLOAT32 ||
                          (in_aligned() && weight_aligned() && 0 <= in.strides[0] && in.strides[0] <= INT32_MAX);
        if (!near || in.shape[1] > kMaxChannels / 8 || out.shape[1] > kMaxChannels / 8) compute_capability = 80;
        const fg_conv_question question = {out.shape[0],   depth(),         columns(),          map.shape[0], in.dtype,
                                           precision,      *num_sms,        compute_capability, algorithm,    orders,
                                           channel_groups, segment_tiles(), major == Major::kMN};
        *result = fg_plan_conv(&question);
        return FG_OK;
    }

    /* Of the records that came and lie where the copy engine can read them. */
    int32_t segment_tiles() const {
        if (!segments.present || reinterpret_cast<uintptr_t>(segments.data) % 16 != 0) return 0;
        return fg_segment_tiles_of(segments.shape[1], map.shape[0]);
    }

    /* Whether `chosen` is for all groups of channels at once, or for each of them as a problem of its own. */
    bool is_one_launch(const fg_plan &chosen) const {
        return channel_groups == 1 || (chosen.family == FG_FAMILY_PORTABLE && algorithm != FG_ALGORITHM_EXPLICIT_GEMM);
    }

    /* The orders of the set that the plan chose. */
    const int32_t *order_of(const fg_plan &plan) const {
        const int32_t *set = static_cast<const int32_t *>(order.data);
        if (plan.groups == 0) return nullptr;
        for (int i = 0; orders.groups[i] != plan.groups; ++i) set += orders.groups[i] * out.shape[0];
        return set;
    }

    /* What lies behind the orders, for the plan that chose the one it is in. */
    const int32_t *ordered_map_of(const fg_plan &plan) const {
        const int64_t count = fg_order_count(&orders);
        if (plan.groups != 1 || order.shape[0] == count) return nullptr;
        return static_cast<const int32_t *>(order.data) + count * out.shape[0];
    }

    /* The rounded or split copies that the Hopper kernels take, in the workspace behind which partial sums lie: rows of
     * so many elements. */
    int64_t copied_depth() const { return precision == FG_PRECISION_TF32 ? depth() : split_depth(depth()); }
    int64_t copied_elements(const fg_plan &chosen) const {
        if (chosen.family != FG_FAMILY_SM90 || in.dtype != FG_FLOAT32) return 0;
        return (in.shape[0] + map.shape[0] * out.shape[1]) * copied_depth();
    }

    fg_status copy_operands(GatherParams *p, float *copies, cudaStream_t stream, fg_error *error) const {
        const PlainOperands from = {static_cast<const float *>(p->in), static_cast<const float *>(p->weight),
                                    p->in_stride, p->depth, major == Major::kK};
        if (precision == FG_PRECISION_IEEE) p->plain = from;
        float *copied_weight = copies + in.shape[0] * copied_depth();
        const auto copy_rows = precision == FG_PRECISION_TF32 ? tf32_rows : tf32_split_rows;
        const auto copy_transposed = precision == FG_PRECISION_TF32 ? tf32_transposed : tf32_split_transposed;
        FG_CUDA(copy_rows(from.in, from.in_stride, in.shape[0], from.depth, copies, stream));
        if (from.is_k_major) {
            const int64_t rows = static_cast<int64_t>(p->columns) * p->volume;
            FG_CUDA(copy_rows(from.weight, from.depth, rows, from.depth, copied_weight, stream));
        } else {
            FG_CUDA(copy_transposed(from.weight, from.depth, p->volume, p->columns, copied_weight, stream));
        }
        p->in = copies;
        p->depth = static_cast<int>(copied_depth());
        p->in_stride = p->depth;
        p->weight = copied_weight;
        return FG_OK;
    }

    int64_t sums_and_copies(const fg_plan &chosen) const {
        return chosen.workspace_bytes + copied_elements(chosen) * static_cast<int64_t>(sizeof(float));
    }

    /* What lies behind them: a counter that hands out tiles, where each multiprocessor has so many that it pays. */
    int64_t counter_bytes(const fg_plan &chosen, int num_sms) const {
        constexpr int kTilesPerSm = 4;
        if (chosen.family != FG_FAMILY_SM90 || chosen.split_k > 1) return 0; /* slices share weights in step */
        if (chosen.segment_tiles > 0) return 0;                              /* segments keep their turns */
        if (chosen.block_m == FG_OWN_ROWS) return 0;                         /* all of its tiles are alike */
        const int64_t tiles =
            ceil_div<int64_t>(out.shape[0], chosen.block_m) * ceil_div<int64_t>(columns(), chosen.block_n);
        return tiles >= kTilesPerSm * static_cast<int64_t>(num_sms) ? static_cast<int64_t>(sizeof(int)) : 0;
    }

    GatherParams params(const fg_plan &chosen, int num_sms) const {
        GatherParams p = {};
        p.in = in.data;
        p.weight = weight.data;
        p.channel_groups = static_cast<int>(channel_groups);
        p.epilogue = epilogue;
        p.map = static_cast<const int32_t *>(map.data);
        p.order = order_of(chosen);
        p.ordered_map = ordered_map_of(chosen);
        p.groups = chosen.groups > 0 ? chosen.groups : 1;
        p.splits = chosen.split_k / p.groups;
        p.segments = static_cast<const int32_t *>(segments.data);
        p.segment_tiles = chosen.segment_tiles;
        p.out = out.data;
        float *const copies = static_cast<float *>(workspace.data);
        p.partials = chosen.split_k > 1 ? copies + copied_elements(chosen) : nullptr;
        if (counter_bytes(chosen, num_sms) > 0)
            p.next_task = reinterpret_cast<int *>(static_cast<char *>(workspace.data) + sums_and_copies(chosen));
        p.out_dtype = out.dtype;
        p.added_dtype = added_dtype;
        p.row_scales = row_scales;
        p.in_format = fp8_half_format(in.dtype);
        p.weight_format = fp8_half_format(weight.dtype);
        p.product_scale = fp8_half_scale(in.dtype) * fp8_half_scale(weight.dtype);
        p.in_stride = in.strides[0];
        p.out_stride = out.strides[0];
        p.rows = out.shape[0];
        p.in_rows = row_limit(in);
        p.volume = static_cast<int>(map.shape[0]);
        p.depth = static_cast<int>(depth());
        p.columns = static_cast<int>(columns());
        p.mirrored = mirrored;
        p.in_aligned = in_aligned();
        p.weight_aligned = weight_aligned();
        return p;
    }

    fg_status check(fg_error *error) const {
        if (in.shape[1] > kMaxChannels || out.shape[1] > kMaxChannels)
            return fg_fail(error, FG_ERROR_VALUE, "weight: expected at most %lld channels, got %lld and %lld",
                           static_cast<long long>(kMaxChannels), static_cast<long long>(in.shape[1]),
                           static_cast<long long>(out.shape[1]));
        return FG_OK;
    }

    /* By a plan for all of it. */
    fg_status run(const fg_plan &chosen, int num_sms, const fg_queue *queue, fg_error *error) const {
        fg_print_plan(&chosen, name, in.dtype, "rows=%lld ci=%lld co=%lld v=%lld", static_cast<long long>(out.shape[0]),
                      static_cast<long long>(depth()), static_cast<long long>(columns()),
                      static_cast<long long>(map.shape[0]));

        GatherParams p = params(chosen, num_sms);
        if (algorithm == FG_ALGORITHM_EXPLICIT_GEMM)
            return conv_explicit(p, chosen, queue, in.dtype, precision, major == Major::kK, workspace, error);
        const cudaStream_t stream = stream_of(queue);
        if (chosen.block_k == 1)
            return conv_narrow(p, in.dtype, major == Major::kK, static_cast<float *>(workspace.data), stream, error);
        if (chosen.family == FG_FAMILY_SM90 && in.dtype == FG_FLOAT32) {
            const fg_status copied = copy_operands(&p, static_cast<float *>(workspace.data), stream, error);
            if (copied != FG_OK) return copied;
            return precision == FG_PRECISION_TF32
                       ? launch_gather_sm90(p, chosen, in.dtype, true, num_sms, stream, error)
                       : launch_ieee_sm90(p, chosen, num_sms, stream, error);
        }
        if (chosen.family == FG_FAMILY_SM90 && fg_is_float8(in.dtype))
            return launch_fp8_sm90(p, chosen, in.dtype, weight.dtype, num_sms, stream, error);
        if (chosen.segment_tiles > 0)
            return launch_segments_sm90(p, chosen, in.dtype, major == Major::kK, workspace.data, num_sms, stream,
                                        error);
        if (chosen.family == FG_FAMILY_SM90 && chosen.block_m == FG_OWN_ROWS)
            return launch_own_rows_sm90(p, chosen, in.dtype, major == Major::kK, num_sms, stream, error);
        if (chosen.family == FG_FAMILY_SM90)
            return launch_gather_sm90(p, chosen, in.dtype, major == Major::kK, num_sms, stream, error);
        return launch_gather_portable(p, chosen, in.dtype, precision, major == Major::kK, stream, error);
    }
};

template <typename T>
const T *data_of(const fg_tensor &tensor) {
    return tensor.present ? static_cast<const T *>(tensor.data) : nullptr;
}

Problem problem_of(const fg_conv_forward_params *p) {
    const bool of_rows = p->scale_feats.present && p->scale_feats.ndim == 1;
    const float *const scale_feats = data_of<float>(p->scale_feats);
    const SumEpilogue epilogue = {
        data_of<void>(p->bias), data_of<void>(p->residual),      p->residual.strides[0],
        p->activation,          of_rows ? nullptr : scale_feats, data_of<float>(p->scale_weight),
        p->scale_weight.ndim,   data_of<float>(p->scale_out)};
    const fg_dtype given = p->bias.present ? p->bias.dtype : p->residual.present ? p->residual.dtype : FG_FLOAT32;
    const fg_dtype added = fg_is_float8(p->out.dtype) ? given : p->out.dtype;
    /* The gathered rows of float8 cannot be multiplied by scales of their own in a product of theirs. */
    const bool implicit = fg_is_float8(p->feats.dtype) && p->algorithm == FG_ALGORITHM_EXPLICIT_GEMM;
    const fg_algorithm algorithm = implicit ? FG_ALGORITHM_AUTO : p->algorithm;
    return {"conv_forward",
            p->feats,
            p->weight,
            p->map,
            p->order,
            p->segments,
            p->out,
            p->workspace,
            epilogue,
            added,
            of_rows ? scale_feats : nullptr,
            p->sets,
            p->groups,
            algorithm,
            p->precision,
            Major::kK,
            false};
}

Problem problem_of(const fg_conv_dgrad_params *p) {
    return {"conv_dgrad", p->grad_out, p->weight,           p->map,  p->order, p->segments, p->grad_feats,
            p->workspace, {},          p->grad_feats.dtype, nullptr, p->sets,  p->groups,   p->algorithm,
            p->precision, Major::kMN,  p->mirrored};
}

fg_conv_forward_params group_of(const fg_conv_forward_params *p, int64_t group) {
    return fg_conv_forward_group(p, group);
}
fg_conv_dgrad_params group_of(const fg_conv_dgrad_params *p, int64_t group) { return fg_conv_dgrad_group(p, group); }

template <class Params>
fg_status workspace_of(const Params *p, const fg_queue *queue, size_t *bytes, fg_error *error) {
    fg_plan plan;
    int num_sms;
    const Problem problem = problem_of(p);
    const fg_status status = problem.plan(queue, &plan, &num_sms, error);
    if (status != FG_OK) return status;
    if (!problem.is_one_launch(plan)) {
        const Params part = group_of(p, 0);
        return workspace_of(&part, queue, bytes, error);
    }
    if (problem.algorithm == FG_ALGORITHM_EXPLICIT_GEMM)
        return conv_explicit_workspace(problem.params(plan, num_sms), plan, queue, problem.in.dtype, problem.precision,
                                       problem.major == Major::kK, bytes, error);
    *bytes = static_cast<size_t>(problem.sums_and_copies(plan) + problem.counter_bytes(plan, num_sms));
    return FG_OK;
}

template <class Params>
fg_status run(const Params *p, const fg_queue *queue, fg_error *error) {
    const Problem problem = problem_of(p);
    if (problem.out.shape[0] == 0 || problem.out.shape[1] == 0) return FG_OK;
    fg_status status = problem.check(error);
    if (status != FG_OK) return status;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    fg_plan plan;
    int num_sms;
    status = problem.plan(queue, &plan, &num_sms, error);
    if (status != FG_OK) return status;
    if (problem.is_one_launch(plan)) return problem.run(plan, num_sms, queue, error);
    for (int64_t group = 0; group < p->groups && status == FG_OK; ++group) {
        const Params part = group_of(p, group);
        status = run(&part, queue, error);
    }
    return status;
}

}  // namespace

fg_status conv_forward_workspace(const fg_conv_forward_params *p, const fg_queue *queue, size_t *bytes,
                                 fg_error *error) {
    return workspace_of(p, queue, bytes, error);
}

fg_status conv_forward(const fg_conv_forward_params *p, const fg_queue *queue, fg_error *error) {
    return run(p, queue, error);
}

fg_status conv_dgrad_workspace(const fg_conv_dgrad_params *p, const fg_queue *queue, size_t *bytes, fg_error *error) {
    return workspace_of(p, queue, bytes, error);
}

fg_status conv_dgrad(const fg_conv_dgrad_params *p, const fg_queue *queue, fg_error *error) {
    return run(p, queue, error);
}

}  // namespace flexgemm
