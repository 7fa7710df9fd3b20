/*
 * Weight gradient of sparse convolution,
 *
 *     grad_weight[co, v, ci] = sum_m grad_out[m, co] * feats[map[v, m], ci],
 *
 * a product per offset v whose reduction runs over rows. A CTA owns block_m output x block_n input channels of one
 * offset and one slice of the rows. It packs the rows of its slice that have a neighbour at v into a queue, in rising
 * order, and gathers both operands by the queue, so that no product is spent on missing neighbours. Both tiles are
 * MN-major in shared memory.
 *
 * Slices meet as float32 partial sums in the workspace and are added in a fixed order: the same bits every time.
 *
 * Portable family: mma.sync, ldmatrix, cp.async; sm_80 and later. The plan may name a Hopper kernel instead, by tiles of
 * one offset (conv_wgrad_sm90.cu) or by segments (conv_wgrad_segment_sm90.cu); groups of few channels have one of their
 * own (depthwise.cu).
 */
#include "../channel_groups.h"
#include "../segment.h"
#include "backend.cuh"
#include "column_sum.cuh"
#include "conv_wgrad.cuh"
#include "mma_tile.cuh"
#include "pair_queue.cuh"
#include "tf32.cuh"

namespace flexgemm {
namespace {

template <MathMode kMode, class Shape>
struct WgradKernel {
    using M = Math<kMode>;
    using T = typename M::Element;
    using Bits = typename M::Bits;
    using TileA = OperandTile<Bits, Shape::kBlockM, Major::kMN>;
    using TileB = OperandTile<Bits, Shape::kBlockN, Major::kMN>;
    static constexpr int kDepth = TileA::kDepth;
    static constexpr int kStageBytes = TileA::kBytes + TileB::kBytes;
    static constexpr int kSharedBytes = Shape::kStages * kStageBytes;
    static_assert(kDepth <= PairQueue::kWindow, "a step's pairs and one window fit the ring");
    static_assert(Shape::kWarps >= PairQueue::kSegments, "every segment of a window has its warp");

    /* One operand's stage: row r is the array's row rows[(first + r) % kCapacity]; rows from `count` on are zeros. */
    template <class Tile>
    __device__ static void load(char *tile, const Bits *data, int64_t stride, const int32_t *rows, int first, int count,
                                int column0, int columns, bool aligned) {
        constexpr int kRowStep = Shape::kThreads / Tile::kChunksPerRow;
        static_assert(Shape::kThreads % Tile::kChunksPerRow == 0 && Tile::kRows % kRowStep == 0,
                      "threads cover whole rows and copy alike");
        const int row = threadIdx.x / Tile::kChunksPerRow, chunk = threadIdx.x % Tile::kChunksPerRow;
#pragma unroll
        for (int i = 0; i < Tile::kRows / kRowStep; ++i) {
            const int r = row + i * kRowStep;
            const bool present = r < count;
            const int64_t source = present ? rows[(first + r) % PairQueue::kCapacity] * stride : 0;
            load_chunk(tile + Tile::offset(r, chunk), data + source, column0 + chunk * Tile::kPerChunk, columns,
                       present, aligned);
        }
    }

    /* One sum of a slice in plain float32, where split factors gave none that is finite (conv_plain_sum.cuh). */
    __device__ __noinline__ static float plain_sum(const WgradParams &p, int64_t begin, int rows, int64_t co,
                                                   int64_t ci) {
        float sum = 0.0f;
        for (int64_t m = begin; m < begin + rows && !isnan(sum); ++m) {
            const auto row = static_cast<uint32_t>(p.map[blockIdx.y * p.rows + m]);
            if (row < p.in_rows)
                sum = fmaf(static_cast<const float *>(p.grad_out)[m * p.grad_stride + co],
                           static_cast<const float *>(p.feats)[row * p.feats_stride + ci], sum);
        }
        return sum;
    }

    __device__ static void run(const WgradParams &p, char *shared, PairQueue::Storage &storage) {
        const int ci_tiles = ceil_div(p.ci, Shape::kBlockN), co_tiles = ceil_div(p.co, Shape::kBlockM);
        const int group = static_cast<int>(blockIdx.x) / (ci_tiles * co_tiles);
        const int co0 = static_cast<int>(blockIdx.x) / ci_tiles % co_tiles * Shape::kBlockM;
        const int ci0 = static_cast<int>(blockIdx.x) % ci_tiles * Shape::kBlockN;
        const int64_t group_co = static_cast<int64_t>(group) * p.co, group_ci = static_cast<int64_t>(group) * p.ci;
        const int v = blockIdx.y;
        const int64_t begin = blockIdx.z * p.rows_per_slice;
        const int64_t left = p.rows - begin;
        const int rows = static_cast<int>(left < p.rows_per_slice ? left : p.rows_per_slice);
        const Bits *grad_out = static_cast<const Bits *>(p.grad_out) + begin * p.grad_stride + group_co;
        const Bits *feats = static_cast<const Bits *>(p.feats) + group_ci;
        PairQueue queue(storage, p.map + v * p.rows + begin, rows, p.in_rows);

        Accumulator<kMode, Shape> acc;
        acc.clear();
        /* How many steps there are shows only when the slice has been scanned: a load that finds no pairs is the
         * end. */
        int loaded = 0;
        auto load_step = [&](int stage) {
            const int first = loaded * kDepth;
            queue.fill(first + kDepth);
            const int count = queue.produced - first;
            if (count <= 0) return;
            char *a = shared + stage * kStageBytes;
            load<TileA>(a, grad_out, p.grad_stride, storage.out_row, first, count, co0, p.co, p.grad_aligned);
            load<TileB>(a + TileA::kBytes, feats, p.feats_stride, storage.in_row, first, count, ci0, p.ci,
                        p.feats_aligned);
            ++loaded;
        };

#pragma unroll
        for (int stage = 0; stage < Shape::kStages - 1; ++stage) {
            load_step(stage);
            ptx::cp_async_commit();
        }
        int stage = 0, load_stage = Shape::kStages - 1;
        for (int step = 0; step < loaded; ++step) {
            ptx::cp_async_wait<Shape::kStages - 2>();
            __syncthreads(); /* this stage has arrived for all, and all are done with the one about to be refilled */
            load_step(load_stage);
            ptx::cp_async_commit();
            const char *a = shared + stage * kStageBytes;
            acc.template multiply<TileA, TileB>(a, a + TileA::kBytes);
            stage = stage + 1 < Shape::kStages ? stage + 1 : 0;
            load_stage = load_stage + 1 < Shape::kStages ? load_stage + 1 : 0;
        }

        if constexpr (kMode == MathMode::kIeee)
            acc.replace_not_finite(ci0, [&](int slot, int ci) {
                const bool inside = co0 + slot < p.co && ci < p.ci;
                return inside ? plain_sum(p, begin, rows, group_co + co0 + slot, group_ci + ci) : 0.0f;
            });
        const int64_t stride = static_cast<int64_t>(p.volume) * p.ci;
        const int64_t offset = group_co * stride + static_cast<int64_t>(v) * p.ci;
        if (p.partials) {
            float *partial = p.partials + blockIdx.z * (p.channel_groups * p.co * stride) + offset;
            acc.store(partial, stride, co0, p.co, ci0, p.ci);
        } else {
            acc.store(static_cast<T *>(p.grad_weight) + offset, stride, co0, p.co, ci0, p.ci);
        }
    }
};

/* blockIdx.x: group of channels and tile of these, side by side so that they share the gathered rows in L2; y: offset;
 * z: slice. */
template <MathMode kMode, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm) conv_wgrad_kernel(const WgradParams p) {
    using Kernel = WgradKernel<kMode, Shape>;
    extern __shared__ __align__(128) char shared[];
    __shared__ PairQueue::Storage storage;
    Kernel::run(p, shared, storage);
}

/* Adds the partial sums of all slices, slice 0 first: always the same bits. */
template <typename T>
__global__ void __launch_bounds__(256) add_slices_kernel(const float *partials, int slices, int64_t count, T *out) {
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < count;
         i += static_cast<int64_t>(gridDim.x) * 256) {
        float sum = 0.0f;
#pragma unroll 4
        for (int s = 0; s < slices; ++s) sum += partials[s * count + i];
        out[i] = from_float<T>(sum);
    }
}

template <typename T>
cudaError_t add_slices(const float *partials, int slices, int64_t count, T *out, cudaStream_t stream) {
    constexpr int64_t kMaxBlocks = 1 << 16;
    const int64_t blocks = ceil_div<int64_t>(count, 256);
    add_slices_kernel<T><<<static_cast<unsigned int>(blocks < kMaxBlocks ? blocks : kMaxBlocks), 256, 0, stream>>>(
        partials, slices, count, out);
    return cudaGetLastError();
}

template <MathMode kMode, class Shape>
fg_status launch(const WgradParams &p, const fg_plan &plan, cudaStream_t stream, fg_error *error) {
    using Kernel = WgradKernel<kMode, Shape>;
    using T = typename Kernel::T;
    const int64_t group_tiles = static_cast<int64_t>(ceil_div(p.co, Shape::kBlockM)) * ceil_div(p.ci, Shape::kBlockN);
    const int64_t tiles = group_tiles * p.channel_groups;
    if (tiles > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "grad_weight: %d x %d channels need more tiles than one launch can have",
                       p.co, p.ci);
    constexpr auto kernel = conv_wgrad_kernel<kMode, Shape>;
    const fg_status status = allow_shared<kernel>(Kernel::kSharedBytes, error);
    if (status != FG_OK) return status;
    const dim3 grid(static_cast<unsigned int>(tiles), static_cast<unsigned int>(p.volume),
                    static_cast<unsigned int>(plan.split_k));
    kernel<<<grid, Shape::kThreads, Kernel::kSharedBytes, stream>>>(p);
    FG_CUDA(cudaGetLastError());
    const int64_t weights = static_cast<int64_t>(p.co) * p.channel_groups * p.volume * p.ci;
    if (p.partials) FG_CUDA(add_slices<T>(p.partials, plan.split_k, weights, static_cast<T *>(p.grad_weight), stream));
    return FG_OK;
}

/* The tiles of fg_plan_conv_wgrad. */
template <MathMode kMode>
fg_status launch_shape(const WgradParams &p, const fg_plan &plan, cudaStream_t stream, fg_error *error) {
    if (plan.block_m == 128) return launch<kMode, LargeTile<kMode>>(p, plan, stream, error);
    return launch<kMode, TileShape<64, 64, 2, 2, 4>>(p, plan, stream, error);
}

fg_status launch_mode(const WgradParams &p, const fg_plan &plan, fg_dtype dtype, fg_precision precision,
                      cudaStream_t stream, fg_error *error) {
    if (dtype == FG_FLOAT16) return launch_shape<MathMode::kFloat16>(p, plan, stream, error);
    if (dtype == FG_BFLOAT16) return launch_shape<MathMode::kBFloat16>(p, plan, stream, error);
    if (precision == FG_PRECISION_TF32) return launch_shape<MathMode::kTf32>(p, plan, stream, error);
    return launch_shape<MathMode::kIeee>(p, plan, stream, error);
}

/* ---- host ---- */

/* On Hopper: of a slice whose tasks are short. What is before and after the products of one takes as long as those of
 * some 500 rows. */
constexpr int64_t kShortTaskRows = 4096;

/* How a call is computed: on Hopper both gradients by one launch, whose partial sums lie side by side; else the weight
 * gradient by `plan` and then the bias gradient by `bias`, in the same workspace. */
struct Work {
    fg_plan plan, bias;
    int64_t copied; /* float32 elements at the beginning of the workspace: the operands, rounded for TF32 on Hopper */
    int64_t workspace_bytes;
    bool narrow;     /* the weight gradient by plain arithmetic: groups of few channels */
    int regions;     /* on Hopper: of the rows, each of as many slices as run at once */
    bool handed_out; /* on Hopper: tasks, by a counter at the end of the workspace */
    int num_sms;

    bool fused() const { return plan.family == FG_FAMILY_SM90; }
};

/* 16-byte pieces from one end to the other, and a pitch of 32 bits. */
bool rows_are_near(const fg_tensor &rows) {
    return chunks_aligned(rows.data, rows.strides[0], rows.shape[1], rows.dtype) && 0 <= rows.strides[0] &&
           rows.strides[0] <= INT32_MAX;
}

fg_status make_work(const fg_conv_wgrad_params *p, const fg_queue *queue, Work *work, fg_error *error) {
    int num_sms, compute_capability;
    const fg_status status = device_properties(queue->device_index, &num_sms, &compute_capability, error);
    if (status != FG_OK) return status;
    const int64_t rows = p->grad_out.shape[0], co = p->grad_out.shape[1] / p->groups, volume = p->map.shape[0];
    const int64_t in_rows = p->feats.shape[0], ci = p->feats.shape[1] / p->groups;
    /* The plan sees that rows are whole 16-byte pieces, but not where they are; TF32 works on copies. */
    const bool near = p->feats.dtype == FG_FLOAT32 ? p->precision == FG_PRECISION_TF32
                                                   : rows_are_near(p->grad_out) && rows_are_near(p->feats);
    if (!near || co > kMaxChannels / 4 || ci > kMaxChannels / 4 / volume) compute_capability = 80;
    if (p->groups > 1 && (co < FG_MIN_HOPPER_GROUP || ci < FG_MIN_HOPPER_GROUP)) compute_capability = 80;
    /* Groups are side by side in one launch of the portable kernel: each plans for its share of the multiprocessors. */
    const int share = p->groups < num_sms ? num_sms / static_cast<int>(p->groups) : 1;
    fg_conv_question question = {};
    question.rows = rows;
    question.ci = ci;
    question.co = co;
    question.v = volume;
    question.dtype = p->feats.dtype;
    question.num_sms = share;
    question.compute_capability = compute_capability;
    question.algorithm = p->algorithm;
    const bool by_segments =
        p->grad_weight.present && p->segments.present && reinterpret_cast<uintptr_t>(p->segments.data) % 16 == 0;
    question.segment_tiles = by_segments ? fg_segment_tiles_of(p->segments.shape[1], volume) : 0;
    work->plan = fg_plan_conv_wgrad(&question);
    work->plan.workspace_bytes *= p->groups;
    work->narrow = p->groups > 1 && ci <= FG_MAX_NARROW_GROUP;
    if (work->narrow) { /* a thread has all input channels of its group */
        work->plan = fg_plan_depthwise_wgrad(rows, p->grad_out.shape[1], volume, num_sms);
        work->plan.workspace_bytes *= ci;
    }
    work->bias = fg_plan_column_sum(rows, p->grad_out.shape[1], num_sms);

    constexpr int64_t kFloat = sizeof(float);
    const int64_t weight_bytes = p->grad_weight.present ? work->plan.workspace_bytes : 0;
    work->copied = 0;
    work->regions = 1;
    work->handed_out = false;
    work->num_sms = num_sms;
    if (work->plan.segment_tiles > 0) {
        const int64_t bias_bytes = p->grad_bias.present ? work->plan.split_k * co * kFloat : 0;
        work->workspace_bytes = weight_bytes + bias_bytes;
    } else if (work->fused()) {
        const fg_plan &plan = work->plan;
        const int64_t tiles = ceil_div<int64_t>(co, plan.block_m) * ceil_div<int64_t>(volume * ci, plan.block_n);
        const int64_t at_once = tiles > 0 ? num_sms / tiles : 0;
        work->regions = plan.split_k > at_once ? static_cast<int>(plan.split_k / (at_once > 1 ? at_once : 1)) : 1;
        work->plan.split_k -= plan.split_k % work->regions;
        if (p->feats.dtype == FG_FLOAT32 && p->grad_weight.present) work->copied = rows * co + in_rows * ci;
        const int64_t bias_bytes =
            p->grad_bias.present && work->plan.split_k > 1 ? work->plan.split_k * co * kFloat : 0;
        const int64_t sums_and_copies = work->copied * kFloat + weight_bytes + bias_bytes;
        /* Short tasks are handed out to CTAs that stay: the next one's rows are on their way while sums are stored. */
        work->handed_out = p->grad_weight.present && tiles * plan.split_k > num_sms &&
                           rows <= kShortTaskRows * static_cast<int64_t>(plan.split_k);
        work->workspace_bytes = sums_and_copies + (work->handed_out ? static_cast<int64_t>(sizeof(int)) : 0);
    } else {
        const int64_t bias_bytes = p->grad_bias.present ? work->bias.workspace_bytes : 0;
        work->workspace_bytes = weight_bytes > bias_bytes ? weight_bytes : bias_bytes;
    }
    return FG_OK;
}

WgradParams params_of(const fg_conv_wgrad_params *p, const Work &work) {
    WgradParams w = {};
    w.grad_out = p->grad_out.data;
    w.feats = p->feats.data;
    w.map = static_cast<const int32_t *>(p->map.data);
    w.grad_weight = p->grad_weight.present ? p->grad_weight.data : nullptr;
    w.partials = work.plan.split_k > 1 || work.plan.segment_tiles > 0
                     ? static_cast<float *>(p->workspace.data) + work.copied
                     : nullptr;
    w.grad_stride = p->grad_out.strides[0];
    w.feats_stride = p->feats.strides[0];
    w.rows = p->grad_out.shape[0];
    w.rows_per_slice = ceil_div<int64_t>(w.rows, work.plan.split_k);
    w.regions = work.regions;
    w.phases = work.plan.split_k / work.regions;
    w.in_rows = row_limit(p->feats);
    w.volume = static_cast<int>(p->map.shape[0]);
    w.co = static_cast<int>(p->grad_out.shape[1] / p->groups);
    w.ci = static_cast<int>(p->feats.shape[1] / p->groups);
    w.channel_groups = static_cast<int>(p->groups);
    w.grad_aligned = chunks_aligned(w.grad_out, w.grad_stride, w.co, p->grad_out.dtype);
    w.feats_aligned = chunks_aligned(w.feats, w.feats_stride, w.ci, p->feats.dtype);
    w.grad_bias = p->grad_bias.present ? p->grad_bias.data : nullptr;
    if (work.handed_out)
        w.next_task = reinterpret_cast<int *>(static_cast<char *>(p->workspace.data) + work.workspace_bytes) - 1;
    w.concurrent = p->concurrent && p->groups == 1 && work.copied == 0; /* else what is in front is ours, and read */
    w.segments = static_cast<const int32_t *>(p->segments.data);
    w.segment_tiles = work.plan.segment_tiles;
    w.summed = w.grad_out;
    w.summed_stride = w.grad_stride;
    return w;
}

fg_status both_gradients_sm90(const fg_conv_wgrad_params *p, const Work &work, cudaStream_t stream, fg_error *error) {
    WgradParams w = params_of(p, work);
    if (work.plan.segment_tiles > 0) return launch_wgrad_segments_sm90(w, work.plan, p->feats.dtype, stream, error);
    if (work.copied > 0) {
        float *grad_out = static_cast<float *>(p->workspace.data), *feats = grad_out + w.rows * w.co;
        FG_CUDA(tf32_rows(static_cast<const float *>(w.grad_out), w.grad_stride, w.rows, w.co, grad_out, stream));
        FG_CUDA(tf32_rows(static_cast<const float *>(w.feats), w.feats_stride, w.in_rows, w.ci, feats, stream));
        w.grad_out = grad_out;
        w.feats = feats;
        w.grad_stride = w.co;
        w.feats_stride = w.ci;
    }
    return launch_wgrad_sm90(w, work.plan, p->feats.dtype, work.num_sms, stream, error);
}

fg_status zero(const fg_tensor &tensor, cudaStream_t stream, fg_error *error) {
    int64_t count = tensor.present ? 1 : 0;
    for (int i = 0; i < tensor.ndim; ++i) count *= tensor.shape[i];
    if (count > 0) FG_CUDA(cudaMemsetAsync(tensor.data, 0, count * fg_dtype_size(tensor.dtype), stream));
    return FG_OK;
}

fg_status weight_gradient(const fg_conv_wgrad_params *p, const Work &work, cudaStream_t stream, fg_error *error) {
    const int64_t co = p->grad_out.shape[1], ci = p->feats.shape[1];
    if (ci == 0) return FG_OK;
    if (p->feats.shape[0] == 0) return zero(p->grad_weight, stream, error);
    if (co > kMaxChannels || ci > kMaxChannels)
        return fg_fail(error, FG_ERROR_VALUE, "grad_weight: expected at most %lld channels, got %lld and %lld",
                       static_cast<long long>(kMaxChannels), static_cast<long long>(co), static_cast<long long>(ci));
    if (work.narrow)
        return narrow_wgrad(params_of(p, work), work.plan, static_cast<float *>(p->workspace.data), p->feats.dtype,
                            stream, error);
    return launch_mode(params_of(p, work), work.plan, p->feats.dtype, p->precision, stream, error);
}

template <typename T>
fg_status bias_gradient(const fg_conv_wgrad_params *p, int slices, cudaStream_t stream, fg_error *error) {
    FG_CUDA(column_sum<T>(static_cast<const T *>(p->grad_out.data), p->grad_out.strides[0], p->grad_out.shape[0],
                          p->grad_out.shape[1], slices, static_cast<float *>(p->workspace.data),
                          static_cast<T *>(p->grad_bias.data), stream));
    return FG_OK;
}

/* A call may be computed as several, one after the other in the same workspace: groups where they have a kernel each,
 * and halves of the output channels while partial sums would take more than a gibibyte. */
struct Parts {
    const fg_conv_wgrad_params *whole;
    int64_t count;

    Parts(const fg_conv_wgrad_params *p, const Work &work) : whole(p), count(1) {
        constexpr int64_t kMostBytes = int64_t{1} << 30, kFewestChannels = 32;
        const int64_t co = p->grad_out.shape[1];
        const bool large = p->grad_weight.present && work.plan.workspace_bytes > kMostBytes;
        if (p->groups > 1 && (work.fused() || (large && !work.narrow))) {
            count = p->groups;
        } else if (p->groups == 1 && large && co % 16 == 0 && co >= 2 * kFewestChannels) {
            count = 2; /* which may be halved again */
        }
    }

    /* Those behind the first one must not begin before it has ended. */
    fg_conv_wgrad_params at(int64_t part) const {
        fg_conv_wgrad_params p =
            whole->groups > 1 ? fg_conv_wgrad_group(whole, part) : fg_conv_wgrad_part(whole, count, part);
        p.concurrent = whole->concurrent && part == 0;
        return p;
    }
};

}  // namespace

fg_status conv_wgrad_workspace(const fg_conv_wgrad_params *p, const fg_queue *queue, size_t *bytes, fg_error *error) {
    Work work;
    const fg_status status = make_work(p, queue, &work, error);
    if (status != FG_OK) return status;
    const Parts parts(p, work);
    if (parts.count > 1) {
        const fg_conv_wgrad_params first = parts.at(0);
        return conv_wgrad_workspace(&first, queue, bytes, error);
    }
    *bytes = static_cast<size_t>(work.workspace_bytes);
    return FG_OK;
}

fg_status conv_wgrad(const fg_conv_wgrad_params *p, const fg_queue *queue, fg_error *error) {
    if (p->grad_out.shape[1] == 0 || (!p->grad_weight.present && !p->grad_bias.present)) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const cudaStream_t stream = stream_of(queue);
    Work work;
    fg_status status = make_work(p, queue, &work, error);
    if (status != FG_OK) return status;
    if (p->grad_out.shape[0] == 0) {
        status = zero(p->grad_weight, stream, error);
        return status != FG_OK ? status : zero(p->grad_bias, stream, error);
    }
    const Parts parts(p, work);
    if (parts.count > 1) {
        for (int64_t i = 0; i < parts.count && status == FG_OK; ++i) {
            const fg_conv_wgrad_params part = parts.at(i);
            status = conv_wgrad(&part, queue, error);
        }
        return status;
    }
    if (p->grad_weight.present)
        fg_print_plan(&work.plan, "conv_wgrad", p->feats.dtype, "rows=%lld ci=%lld co=%lld v=%lld",
                      static_cast<long long>(p->map.shape[1]), static_cast<long long>(p->feats.shape[1]),
                      static_cast<long long>(p->grad_out.shape[1]), static_cast<long long>(p->map.shape[0]));
    if (work.fused()) return both_gradients_sm90(p, work, stream, error);

    if (p->grad_weight.present) status = weight_gradient(p, work, stream, error);
    if (status != FG_OK || !p->grad_bias.present) return status;
    switch (p->grad_out.dtype) {
        case FG_FLOAT16:
            return bias_gradient<__half>(p, work.bias.split_k, stream, error);
        case FG_BFLOAT16:
            return bias_gradient<__nv_bfloat16>(p, work.bias.split_k, stream, error);
        default:
            return bias_gradient<float>(p, work.bias.split_k, stream, error);
    }
}

}  // namespace flexgemm
