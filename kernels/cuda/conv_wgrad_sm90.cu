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
 * A CTA owns one tile and one slice of the rows. Its three warpgroups share a pipeline of stages of 64 rows each (TF32:
 * of 32):
 *
 *   producer     gathers both operands (conv_wgrad_producer_sm90.cuh);
 *   2 consumers  multiply, accumulators in registers.
 *
 * The reduction runs across the rows that are gathered. wgmma transposes 16-bit operands, which therefore lie in shared
 * memory as they come, MN-major, by copies of 16 bytes. It does not transpose TF32: the producer does, by copies of 4.
 *
 * The bias gradient, sums of the columns of grad_out, is the work of further CTAs of the same launch: beside the others
 * they cost little, and small scenes are spared the launches.
 *
 * Zeros stand for missing neighbours, so that a row of grad_out that is not finite makes NaN at all offsets of a tile. A
 * tile of several offsets that has NaN is computed again, one offset at a time: then no row is there in vain.
 *
 * Slices meet as float32 partial sums in the workspace and are added in a fixed order: the same bits every time.
 */
#include <type_traits>

#include "column_sum.cuh"
#include "conv_wgrad_producer_sm90.cuh"
#include "quad.cuh"

namespace flexgemm {
namespace {

using namespace wgrad;

/* Elements of the outputs, one after the other in the partial sums of a slice. */
__host__ __device__ inline int64_t weights_of(const WgradParams &p) {
    return p.grad_weight ? static_cast<int64_t>(p.co) * p.volume * p.ci : 0;
}
__host__ __device__ inline int64_t partial_pitch(const WgradParams &p) {
    return weights_of(p) + (p.grad_bias ? p.co : 0);
}

/* ---- consumers ---- */

/* D += A.B of 64 output channels and 32 bytes of rows, operands as the producer left them. */
template <typename T, int kRegisters>
__device__ __forceinline__ void wgmma(float (&d)[kRegisters], uint64_t a, uint64_t b) {
    if constexpr (std::is_same<T, __half>::value)
        ptx::wgmma_f16_km_kn(d, a, b, 1);
    else if constexpr (std::is_same<T, __nv_bfloat16>::value)
        ptx::wgmma_bf16_km_kn(d, a, b, 1);
    else
        ptx::wgmma_tf32(d, a, b, 1);
}

template <typename T, class Tile>
struct Consumer {
    static constexpr int kRegisters = Tile::kConsumerN / 2; /* accumulators of a thread, for each wgmma tile */
    static constexpr int kNone = -1;

    const WgradParams &p;
    Shared<Tile> &shared;
    const Task<Tile> &task;
    RingPosition<Tile::kStages> place; /* in the pipeline */

    __device__ static int consumer() { return static_cast<int>(threadIdx.x) / kWarpgroup - 1; }
    __device__ static int first_channel() { return consumer() % Tile::kConsumersM * Tile::kConsumerM * kWgmmaM; }
    __device__ static int first_column() { return consumer() / Tile::kConsumersM * Tile::kConsumerN; }

    /* Each warp for itself: the last of them frees the stage. */
    __device__ void release(int stage) {
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.empty[stage]);
    }

    __device__ void multiply(float (&d)[Tile::kConsumerM][kRegisters]) {
        const char *a = shared.stages[place.slot], *b = a + Tile::kBlocksA * kBlockBytes;
        constexpr int kSteps = kRowBytes / 32; /* of wgmma: along the rows of a block, or from row to row */
        constexpr int kAdvance = (sizeof(T) == 4 ? 32 : kBlockBytes / kSteps) / 16, kNextTile = kBlockBytes / 16;
        const uint64_t descriptor_a = ptx::wgmma_descriptor(a + first_channel() * kRowBytes, kBlockBytes);
        const uint64_t descriptor_b = ptx::wgmma_descriptor(b + first_column() * kRowBytes, kBlockBytes);
        ptx::fence_proxy_async(); /* the rows came through the ordinary path, wgmma reads through another */
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
            for (int i = 0; i < Tile::kConsumerM; ++i)
                wgmma<T>(d[i], descriptor_a + i * kNextTile + k * kAdvance, descriptor_b + k * kAdvance);
        }
        ptx::wgmma_commit();
    }

    /* Multiplies until the end of the slice. One step stays in flight behind the one being issued; its stage is
     * released when the next is issued. */
    __device__ void accumulate(float (&d)[Tile::kConsumerM][kRegisters]) {
        int in_flight = kNone;
        while (true) {
            ptx::mbarrier_wait_parity(&shared.full[place.slot], place.parity);
            /* A vote, so that the compiler sees one branch for the whole warp: it would serialise wgmma otherwise. */
            if (__any_sync(~0u, shared.end[place.slot])) break;
            multiply(d);
            ptx::wgmma_wait<1>();
            if (in_flight != kNone) release(in_flight);
            in_flight = place.slot;
            place.advance();
        }
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < Tile::kConsumerM; ++i) ptx::wgmma_hold(d[i]);
        if (in_flight != kNone) release(in_flight);
        release(place.slot);
        place.advance();
    }

    __device__ void look_for_nan(const float (&d)[Tile::kConsumerM][kRegisters]) {
        bool found = false;
#pragma unroll
        for (int i = 0; i < Tile::kConsumerM; ++i)
#pragma unroll
            for (const float sum : d[i]) found |= isnan(sum);
        if (found) shared.spoiled = true;
    }

    /* The output channel and the first column of what this thread holds of a tile of 64 channels. */
    __device__ int channel_of(int tile, int half) const {
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        return task.co0 + first_channel() + tile * kWgmmaM + warp * 16 + half * 8 + lane / 4;
    }

    __device__ void store_sums(const float (&d)[Tile::kConsumerM][kRegisters], float *sums) {
        const int64_t pitch = static_cast<int64_t>(p.volume) * p.ci;
        const bool aligned = reinterpret_cast<uintptr_t>(sums) % sizeof(float2) == 0;
#pragma unroll
        for (int i = 0; i < Tile::kConsumerM; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int co = channel_of(i, half);
                if (co >= p.co) continue;
#pragma unroll
                for (int j = 0; j < Tile::kConsumerN / 8; ++j) {
                    const int column = task.column0 + first_column() + 8 * j + threadIdx.x % 4 * 2;
                    if (column < task.begin || column >= task.end) continue; /* columns are a multiple of 8 */
                    const float2 pair = make_float2(d[i][4 * j + 2 * half], d[i][4 * j + 2 * half + 1]);
                    float *target = sums + co * pitch + column;
                    if (aligned) {
                        *reinterpret_cast<float2 *>(target) = pair;
                    } else {
                        target[0] = pair.x;
                        target[1] = pair.y;
                    }
                }
            }
        }
    }

    /* 16-bit elements, 8 columns a thread. */
    __device__ void store(const float (&d)[Tile::kConsumerM][kRegisters], T *out) {
        const int64_t pitch = static_cast<int64_t>(p.volume) * p.ci;
        const bool aligned = are_chunks(out, pitch);
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < Tile::kConsumerM; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int co = channel_of(i, half);
#pragma unroll
                for (int j = 0; j < Tile::kConsumerN / 8; j += 4) {
                    uint32_t word[4];
#pragma unroll
                    for (int k = 0; k < 4; ++k)
                        word[k] = pack<T>(d[i][4 * (j + k) + 2 * half], d[i][4 * (j + k) + 2 * half + 1]);
                    transpose_quad(word, lane);
                    const int column = task.column0 + first_column() + 8 * (j + lane % 4);
                    if (co < p.co && task.begin <= column && column < task.end)
                        store_chunk(out + co * pitch + column, word, aligned);
                }
            }
        }
    }

    __device__ void run() {
        float d[Tile::kConsumerM][kRegisters];
#pragma unroll
        for (int i = 0; i < Tile::kConsumerM; ++i)
#pragma unroll
            for (float &sum : d[i]) sum = 0.0f;
        accumulate(d);
        look_for_nan(d);
        if (std::is_same<T, float>::value || p.partials)
            store_sums(d,
                       p.partials ? p.partials + task.slice * partial_pitch(p) : static_cast<float *>(p.grad_weight));
        else
            store(d, static_cast<T *>(p.grad_weight));
    }
};

/* ---- bias gradient ---- */

/* Output channels of a CTA: a line of 16-bit elements, a line of float32. */
template <typename T>
constexpr int kBiasChannels = kRowBytes / static_cast<int>(sizeof(T));

template <typename T, int kVector>
__device__ void sum_bias(const WgradParams &p, int index, char *dynamic) {
    using Sum = ColumnSum<T, kVector, kThreads>;
    static_assert(Sum::kColumns == kBiasChannels<T>, "as the launch counts CTAs");
    const int groups = ceil_div(p.co, Sum::kColumns), slice = index / groups;
    const int64_t begin = slice * p.rows_per_slice, end = min(begin + p.rows_per_slice, p.rows);
    const int co0 = index % groups * Sum::kColumns, co = co0 + static_cast<int>(threadIdx.x);
    const float sum = Sum::run(static_cast<const T *>(p.summed), p.summed_stride, begin, end, co0, p.co,
                               *reinterpret_cast<typename Sum::Sums *>(dynamic));
    if (threadIdx.x >= Sum::kColumns || co >= p.co) return;
    if (p.partials)
        p.partials[slice * partial_pitch(p) + weights_of(p) + co] = sum;
    else
        static_cast<T *>(p.grad_bias)[co] = from_float<T>(sum);
}

/* Adds the slices, the first one first. */
template <typename T>
__global__ void __launch_bounds__(256) reduce_gradients_kernel(const WgradParams p, int slices) {
    const int64_t weights = weights_of(p), pitch = partial_pitch(p);
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < pitch;
         i += static_cast<int64_t>(gridDim.x) * 256) {
        float sum = 0.0f;
#pragma unroll 8
        for (int s = 0; s < slices; ++s) sum += p.partials[s * pitch + i];
        T *out = i < weights ? static_cast<T *>(p.grad_weight) + i : static_cast<T *>(p.grad_bias) + (i - weights);
        *out = from_float<T>(sum);
    }
}

/* ---- kernel and launch ---- */

/* A role's share of a task, and once more offset by offset if that made NaN. */
template <class Role, class Tile>
__device__ __forceinline__ void run(Role role, const Task<Tile> &whole) {
    for (int part = 0;; ++part) {
        role.run();
        if (whole.offsets == 1 || part == whole.offsets) return;
        ptx::named_barrier(kTaskBarrier, kThreads);
        if (!__any_sync(~0u, role.shared.spoiled)) return;
        if (threadIdx.x == 0) role.shared.task = whole.at_offset(role.p, part);
        ptx::named_barrier(kTaskBarrier, kThreads);
    }
}

/* The first `bias_tasks` CTAs sum the bias gradient. */
template <typename T, class Tile>
__global__ void __launch_bounds__(kThreads, 1)
    conv_wgrad_sm90_kernel(const WgradParams p, int tile_columns, int bias_tasks) {
    extern __shared__ __align__(kSwizzleAtomBytes) char dynamic[];
    if (static_cast<int>(blockIdx.x) < bias_tasks) {
        if (sizeof(T) == 2 || p.grad_aligned)
            sum_bias<T, kChunk / sizeof(T)>(p, static_cast<int>(blockIdx.x), dynamic);
        else if constexpr (sizeof(T) == 4)
            sum_bias<T, 1>(p, static_cast<int>(blockIdx.x), dynamic);
        return;
    }
    Shared<Tile> &shared = *reinterpret_cast<Shared<Tile> *>(dynamic);
    const Task<Tile> whole(p, tile_columns, static_cast<int>(blockIdx.x) - bias_tasks);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < Tile::kStages; ++stage) {
            /* Every producing thread for its copies, and one more arrival that says what the stage is. */
            ptx::mbarrier_init(&shared.full[stage], kWarpgroup + 1);
            ptx::mbarrier_init(&shared.empty[stage], kConsumerWarps);
        }
        ptx::fence_mbarrier_init();
        shared.task = whole;
        shared.spoiled = false;
    }
    __syncthreads();
    if (threadIdx.x < kWarpgroup) {
        ptx::setmaxnreg_dec<kProducerRegisters>();
        run(Producer<T, Tile>{p, shared, {}, {}}, whole);
    } else {
        ptx::setmaxnreg_inc<kConsumerRegisters>();
        run(Consumer<T, Tile>{p, shared, shared.task, {}}, whole);
    }
}

template <typename T, class Tile>
fg_status launch(const WgradParams &p, const fg_plan &plan, cudaStream_t stream, fg_error *error) {
    const int64_t tiles = static_cast<int64_t>(ceil_div(p.co, Tile::kBlockM)) * ceil_div(p.volume * p.ci, plan.block_n);
    const int64_t weight_tasks = p.grad_weight ? tiles * plan.split_k : 0;
    const int64_t bias_tasks = p.grad_bias ? static_cast<int64_t>(ceil_div(p.co, kBiasChannels<T>)) * plan.split_k : 0;
    if (weight_tasks + bias_tasks > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "grad_weight: (%d, %d, %d) needs more tiles than one launch can have",
                       p.co, p.volume, p.ci);
    constexpr auto kernel = conv_wgrad_sm90_kernel<T, Tile>;
    constexpr int kSharedBytes = sizeof(Shared<Tile>);
    /* 85 % of 228 KB: the next size is 196, which leaves L1 60. */
    constexpr int kSharedPercent = Tile::kThroughL1 ? 85 : cudaSharedmemCarveoutDefault;
    static_assert(kSharedBytes + 1024 <= 196 * 1024, "as asked for");
    const fg_status status = allow_shared<kernel>(kSharedBytes, error, kSharedPercent);
    if (status != FG_OK) return status;
    kernel<<<static_cast<unsigned int>(weight_tasks + bias_tasks), kThreads, kSharedBytes, stream>>>(
        p, plan.block_n, static_cast<int>(bias_tasks));
    FG_CUDA(cudaGetLastError());
    if (p.partials) {
        const int64_t blocks = ceil_div<int64_t>(partial_pitch(p), 256);
        constexpr int64_t kMaxBlocks = 1 << 16;
        reduce_gradients_kernel<T>
            <<<static_cast<unsigned int>(blocks < kMaxBlocks ? blocks : kMaxBlocks), 256, 0, stream>>>(p, plan.split_k);
        FG_CUDA(cudaGetLastError());
    }
    return FG_OK;
}

/* The tiles of fg_plan_conv_wgrad. */
template <typename T>
fg_status launch_tile(const WgradParams &p, const fg_plan &plan, cudaStream_t stream, fg_error *error) {
    if (plan.block_m == 256) return launch<T, Tile<256, 192, 1>>(p, plan, stream, error);
    if (plan.block_m == 128) return launch<T, Tile<128, 256, 1>>(p, plan, stream, error);
    return launch<T, Tile<64, 384, 2>>(p, plan, stream, error);
}

}  // namespace

fg_status launch_wgrad_sm90(const WgradParams &p, const fg_plan &plan, fg_dtype dtype, cudaStream_t stream,
                            fg_error *error) {
    if (dtype == FG_FLOAT16) return launch_tile<__half>(p, plan, stream, error);
    if (dtype == FG_BFLOAT16) return launch_tile<__nv_bfloat16>(p, plan, stream, error);
    return launch_tile<float>(p, plan, stream, error);
}

}  // namespace flexgemm
