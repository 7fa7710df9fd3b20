/*
 * Weight gradient of sparse convolution on Hopper, 16-bit types and TF32: the sum of conv_wgrad.cu,
 *
 *     grad_weight[co, v, ci] = sum_m grad_out[m, co] * feats[map[v, m], ci],
 *
 * with the multiplications by wgmma. As one product, D = G^T . F over rows m: G is grad_out, and F has volume * ci
 * columns, of which column (v, c) in row m is feats[map[v, m], c], or zero where there is no neighbour. A tile takes
 * any stretch of these columns: part of an offset's channels when they are many, several offsets when they are few, so
 * that rows of grad_out are fetched once for all of them.
 *
 * A task is one tile and one slice of the rows. A CTA has one task, or, where tasks are short, takes one after another
 * from a counter. Its four warpgroups share a pipeline of stages of 64 rows each (TF32: of 32):
 *
 *   2 producers  gather both operands (conv_wgrad_producer_sm90.cuh);
 *   2 consumers  multiply, accumulators in registers.
 *
 * The reduction runs across the rows that are gathered. wgmma transposes 16-bit operands, which therefore lie in shared
 * memory as they come, MN-major, by copies of 16 bytes. It does not transpose TF32: of the two operands wgmma takes
 * feats from registers, where consumers put them as it wants them, and the producer transposes grad_out by copies of 4
 * bytes.
 *
 * The producers go ahead into the next task while the consumers store the sums of the last.
 *
 * The bias gradient, sums of the columns of grad_out, is the work of further CTAs of the same launch: beside the others
 * they cost little, and small scenes are spared the launches.
 *
 * Zeros stand for missing neighbours, so that a row of grad_out that is not finite makes NaN at all offsets of a tile.
 * A tile of several offsets that has NaN is computed again, one offset at a time: then no row is there in vain. There
 * the producers wait for the consumers' word before they go on.
 *
 * Slices meet as float32 partial sums in the workspace and are added in a fixed order: the same bits every time.
 */
#include <type_traits>

#include "conv_wgrad_producer_sm90.cuh"
#include "conv_wgrad_sums_sm90.cuh"
#include "quad.cuh"

namespace flexgemm {
namespace {

using namespace wgrad;

/* ---- consumers ---- */

/* D += A.B of 64 output channels and 16 rows, 16-bit operands as the producer left them. */
template <typename T, int kSums>
__device__ __forceinline__ void wgmma(float (&d)[kSums], uint64_t a, uint64_t b) {
    if constexpr (std::is_same<T, __half>::value)
        ptx::wgmma_f16_km_kn(d, a, b, 1);
    else
        ptx::wgmma_bf16_km_kn(d, a, b, 1);
}

template <typename T, class Tile>
struct Consumer {
    static constexpr int kNone = -1;
    using Sums = float[Tile::kProducts][Tile::kSums];

    const WgradParams &p;
    Shared<Tile> &shared;
    const int lane;
    RingPosition<Tile::kStages> place; /* in the pipeline */

    __device__ static int consumer() { return static_cast<int>(threadIdx.x) / ptx::kWarpgroup - kProducers; }
    __device__ static int first_channel() { return consumer() % Tile::kConsumersM * Tile::kConsumerM; }
    __device__ static int first_column() { return consumer() / Tile::kConsumersM * Tile::kConsumerN; }
    /* The row of a wgmma whose sums this thread holds, and the one 8 below it. */
    __device__ static int first_row() { return static_cast<int>(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4); }

    /* Whoever has read the stage: the last of them frees it. */
    __device__ void release(int stage) {
        if (Tile::kTf32 || lane == 0) ptx::mbarrier_arrive(&shared.empty[stage]);
    }

    __device__ void multiply(Sums &d) {
        const char *a = shared.stages[place.slot], *b = a + Tile::kBlocksA * kBlockBytes;
        constexpr int kSteps = kRowBytes / 32; /* from row to row of a block */
        constexpr int kAdvance = kBlockBytes / kSteps / 16, kNextProduct = kBlockBytes / 16;
        const uint64_t descriptor_a = ptx::wgmma_descriptor(a + first_channel() * kRowBytes, kBlockBytes);
        const uint64_t descriptor_b = ptx::wgmma_descriptor(b + first_column() * kRowBytes, kBlockBytes);
        ptx::fence_proxy_async(); /* the rows came through the ordinary path, wgmma reads through another */
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
            for (int i = 0; i < Tile::kProducts; ++i)
                wgmma<T>(d[i], descriptor_a + i * kNextProduct + k * kAdvance, descriptor_b + k * kAdvance);
        }
        ptx::wgmma_commit();
    }

    /* TF32, transposed: columns x output channels. Registers of an operand are free again when its products are done,
     * and the other consumer multiplies while this one loads. */
    __device__ void multiply_tf32(Sums &d) {
        const char *grad_out = shared.stages[place.slot];
        const uint64_t descriptor = ptx::wgmma_descriptor(grad_out + first_channel() * kRowBytes);
        const float *feats = reinterpret_cast<const float *>(grad_out + Tile::kBlocksA * kBlockBytes);
        constexpr int kPitch = Tile::kFeatsPitch / static_cast<int>(sizeof(float)), kStepRows = 8;
        feats += threadIdx.x % 4 * kPitch + first_column() + first_row();
        ptx::fence_proxy_async();
#pragma unroll
        for (int k = 0; k < kBlockK<T>; k += kStepRows) {
#pragma unroll
            for (int i = 0; i < Tile::kProducts; ++i) {
                uint32_t a[4];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    a[j] = __float_as_uint(feats[(k + j / 2 * 4) * kPitch + i * kWgmmaM + j % 2 * 8]);
                ptx::wgmma_fence();
                ptx::wgmma_tf32_from_registers(d[i], a, ptx::wgmma_advance(descriptor, k * sizeof(float)), 1);
                ptx::wgmma_commit();
                ptx::wgmma_wait<0>();
                ptx::wgmma_hold(a);
            }
        }
    }

    /* Multiplies until the end of the slice. One step stays in flight behind the one being issued; its stage is
     * released when the next is issued. */
    __device__ void accumulate(Sums &d) {
        int in_flight = kNone;
        while (true) {
            ptx::mbarrier_wait_parity(&shared.full[place.slot], place.parity);
            /* Read by a lane that releases the stage. A vote, so that the compiler sees one branch for the whole warp:
             * it would serialise wgmma otherwise. */
            if (__any_sync(~0u, lane == 0 && shared.end[place.slot])) break;
            if constexpr (Tile::kTf32)
                multiply_tf32(d);
            else
                multiply(d);
            ptx::wgmma_wait<1>();
            if (in_flight != kNone) release(in_flight);
            in_flight = place.slot;
            place.advance();
        }
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < Tile::kProducts; ++i) ptx::wgmma_hold(d[i]);
        if (in_flight != kNone) release(in_flight);
    }

    /* The producer waits for this where it may have to do the task again. */
    __device__ void judge(const Sums &d) {
        bool found = false;
#pragma unroll
        for (int i = 0; i < Tile::kProducts; ++i)
#pragma unroll
            for (const float sum : d[i]) found |= isnan(sum);
        found = __any_sync(~0u, found);
        if (lane == 0) {
            shared.spoiled[threadIdx.x / 32 - kProducers * ptx::kWarpgroup / 32] = found;
            ptx::mbarrier_arrive(&shared.judged);
        }
    }

    /* What the task was, at the end of its steps. Read by a lane that releases the stage. */
    __device__ TaskOutput ended_task() const {
        const auto read = [this](const int &word) { return __shfl_sync(~0u, lane == 0 ? word : 0, 0); };
        const TaskOutput &task = shared.ended[place.slot];
        return {read(task.co0), read(task.column0), read(task.begin),
                read(task.end), read(task.offsets), read(task.slice)};
    }

    __device__ static int channel_of(const TaskOutput &task, int product, int half) {
        return task.co0 + first_channel() + product * kWgmmaM + first_row() + half * 8;
    }

    /* Into the workspace, where pairs are aligned. */
    __device__ void store_sums(const Sums &d, const TaskOutput &task, float *sums) {
        const int64_t pitch = static_cast<int64_t>(p.volume) * p.ci;
        const int column0 = task.column0 + first_column(), begin = task.begin - column0; /* multiples of 8 */
        sums += column0 + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < Tile::kProducts; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int co = channel_of(task, i, half);
                const uint32_t columns = co < p.co ? task.end - task.begin : 0;
                float *row = sums + co * pitch;
#pragma unroll
                for (int j = 0; j < Tile::kSums / 4; ++j)
                    if (static_cast<uint32_t>(8 * j - begin) < columns)
                        *reinterpret_cast<float2 *>(row + 8 * j) =
                            make_float2(d[i][4 * j + 2 * half], d[i][4 * j + 2 * half + 1]);
            }
        }
    }

    /* TF32: eight threads side by side have eight columns. */
    __device__ void store_transposed(const Sums &d, const TaskOutput &task, float *sums) {
        const int64_t pitch = static_cast<int64_t>(p.volume) * p.ci;
#pragma unroll
        for (int i = 0; i < Tile::kProducts; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = task.column0 + first_column() + i * kWgmmaM + first_row() + half * 8;
                if (column < task.begin || column >= task.end) continue;
                int co = task.co0 + first_channel() + threadIdx.x % 4 * 2;
#pragma unroll
                for (int j = 0; j < Tile::kSums / 4; ++j, co += 8) {
                    if (co >= p.co) break; /* channels are a multiple of 8 */
                    sums[co * pitch + column] = d[i][4 * j + 2 * half];
                    sums[(co + 1) * pitch + column] = d[i][4 * j + 2 * half + 1];
                }
            }
        }
    }

    /* 16-bit elements, 8 columns a thread. */
    __device__ void store(const Sums &d, const TaskOutput &task, T *out) {
        const int64_t pitch = static_cast<int64_t>(p.volume) * p.ci;
        const bool aligned = are_chunks(out, pitch);
        const int lane = threadIdx.x % 32, column0 = task.column0 + first_column() + lane % 4 * 8;
        const int begin = task.begin - column0;
        out += column0;
#pragma unroll
        for (int i = 0; i < Tile::kProducts; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int co = channel_of(task, i, half);
                const uint32_t columns = co < p.co ? task.end - task.begin : 0;
                T *row = out + co * pitch;
#pragma unroll
                for (int j = 0; j < Tile::kSums / 4; j += 4) {
                    uint32_t word[4];
#pragma unroll
                    for (int k = 0; k < 4; ++k)
                        word[k] = pack<T>(d[i][4 * (j + k) + 2 * half], d[i][4 * (j + k) + 2 * half + 1]);
                    transpose_quad(word, lane);
                    if (static_cast<uint32_t>(8 * j - begin) < columns) store_chunk(row + 8 * j, word, aligned);
                }
            }
        }
    }

    __device__ void run() {
        for (;;) {
            Sums d;
#pragma unroll
            for (int i = 0; i < Tile::kProducts; ++i)
#pragma unroll
                for (float &sum : d[i]) sum = 0.0f;
            accumulate(d);
            const TaskOutput task = ended_task();
            if (task.offsets == 0) return;
            if (task.offsets > 1) judge(d);
            float *sums = p.partials ? p.partials + task.slice * partial_pitch(p) : static_cast<float *>(p.grad_weight);
            if constexpr (Tile::kTf32)
                store_transposed(d, task, sums);
            else if (p.partials)
                store_sums(d, task, sums);
            else
                store(d, task, static_cast<T *>(p.grad_weight));
            release(place.slot);
            place.advance();
        }
    }
};

/* ---- kernel and launch ---- */

/* Begins, and lets what follows begin, while the kernel in front ends: memset would wait for that one. A concurrent
 * gradient begins with tasks, which it finds to count from zero in L2. */
__global__ void no_tasks_yet_kernel(int *next_task, bool concurrent) {
    if (concurrent) {
        *next_task = 0;
        __threadfence();
        ptx::let_next_kernel_begin();
        ptx::wait_for_earlier_kernels();
    } else {
        ptx::let_next_kernel_begin();
        ptx::wait_for_earlier_kernels();
        *next_task = 0;
    }
}

/* The first `bias_tasks` CTAs sum the bias gradient. */
template <typename T, class Tile>
__global__ void __launch_bounds__(kThreads, 1)
    conv_wgrad_sm90_kernel(const WgradParams p, int tile_columns, int bias_tasks, int tasks) {
    extern __shared__ __align__(kSwizzleAtomBytes) char dynamic[];
    if (!p.concurrent) ptx::wait_for_earlier_kernels();
    if (p.partials) ptx::let_next_kernel_begin(); /* it is ours */
    if (static_cast<int>(blockIdx.x) < bias_tasks) {
        if (sizeof(T) == 2 || p.grad_aligned)
            sum_bias<T, kChunk / sizeof(T), kThreads>(p, static_cast<int>(blockIdx.x), dynamic);
        else if constexpr (sizeof(T) == 4)
            sum_bias<T, 1, kThreads>(p, static_cast<int>(blockIdx.x), dynamic);
        ptx::wait_for_earlier_kernels();
        return;
    }
    Shared<Tile> &shared = *reinterpret_cast<Shared<Tile> *>(dynamic);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < Tile::kStages; ++stage) {
            /* Every producing thread for its copies, and one more arrival that says what the stage is. */
            ptx::mbarrier_init(&shared.full[stage], kProducerThreads + 1);
            ptx::mbarrier_init(&shared.empty[stage], Tile::kReaders);
        }
        ptx::mbarrier_init(&shared.judged, kConsumerWarps);
        shared.task = static_cast<int>(blockIdx.x) - bias_tasks;
        shared.part = kWhole, shared.parts = 0;
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < kProducerThreads) {
        ptx::setmaxnreg_dec<Tile::kProducerRegisters>();
        Producer<T, Tile>{p, shared, {}, {}}.run(static_cast<int>(gridDim.x) - bias_tasks, tasks, tile_columns);
    } else {
        ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
        Consumer<T, Tile>{p, shared, ptx::opaque(static_cast<int>(threadIdx.x % 32)), {}}.run();
    }
    ptx::wait_for_earlier_kernels(); /* what follows takes this kernel's end for theirs as well */
}

template <typename T, class Tile>
fg_status launch(const WgradParams &p, const fg_plan &plan, int num_sms, cudaStream_t stream, fg_error *error) {
    const int64_t tiles = static_cast<int64_t>(ceil_div(p.co, Tile::kBlockM)) * ceil_div(p.volume * p.ci, plan.block_n);
    const int64_t weight_tasks = p.grad_weight ? tiles * plan.split_k : 0;
    const int64_t bias_tasks = p.grad_bias ? bias_tasks_of<T>(p, plan.split_k) : 0;
    if (weight_tasks + bias_tasks > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "grad_weight: (%d, %d, %d) needs more tiles than one launch can have",
                       p.co, p.volume, p.ci);
    constexpr auto kernel = conv_wgrad_sm90_kernel<T, Tile>;
    constexpr int kSharedBytes = sizeof(Shared<Tile>);
    fg_status status = allow_shared<kernel>(kSharedBytes, error);
    if (status != FG_OK) return status;
    if (p.next_task) status = launch_early(no_tasks_yet_kernel, 1, 1, 0, 90, stream, error, p.next_task, p.concurrent);
    if (status != FG_OK) return status;
    const int64_t ctas = p.next_task ? num_sms : weight_tasks;
    /* early: the kernel in front is often the input gradient's */
    status = launch_early(kernel, static_cast<unsigned int>(ctas + bias_tasks), kThreads, kSharedBytes, 90, stream,
                          error, p, plan.block_n, static_cast<int>(bias_tasks), static_cast<int>(weight_tasks));
    if (status != FG_OK) return status;
    if (p.partials) return reduce_gradients<T>(p, plan.split_k, stream, error);
    return FG_OK;
}

/* The tiles of fg_plan_conv_wgrad. */
template <typename T>
fg_status launch_tile(const WgradParams &p, const fg_plan &plan, int num_sms, cudaStream_t stream, fg_error *error) {
    if constexpr (sizeof(T) == 4) {
        if (plan.block_m == 128) return launch<T, Tile<T, 128, 384, 2>>(p, plan, num_sms, stream, error);
    } else {
        if (plan.block_m == 256) return launch<T, Tile<T, 256, 192, 1>>(p, plan, num_sms, stream, error);
        if (plan.block_m == 128) return launch<T, Tile<T, 128, 256, 2>>(p, plan, num_sms, stream, error);
    }
    return launch<T, Tile<T, 64, 384, 2>>(p, plan, num_sms, stream, error);
}

}  // namespace

fg_status launch_wgrad_sm90(const WgradParams &p, const fg_plan &plan, fg_dtype dtype, int num_sms, cudaStream_t stream,
                            fg_error *error) {
    if (dtype == FG_FLOAT16) return launch_tile<__half>(p, plan, num_sms, stream, error);
    if (dtype == FG_BFLOAT16) return launch_tile<__nv_bfloat16>(p, plan, num_sms, stream, error);
    return launch_tile<float>(p, plan, num_sms, stream, error);
}

}  // namespace flexgemm
