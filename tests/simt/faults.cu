/*
 * Small kernels, each right with kFaulty = false and wrong in one way with true, so that test_emulator.py can show what
 * the emulator notices. A right kernel of 128 threads writes out[i] = i for i < 64.
 */
#include <cstdio>

#include "../../kernels/cuda/ptx.cuh"
#include "../../kernels/cuda/tensor_map.cuh"

namespace {

constexpr int kThreads = 128, kOutputs = 64;

struct Arguments {
    const __half *matrix; /* 64 x 64: the row's number in column 0, 1 in column 1, else 0 */
    float *out;
    alignas(64) CUtensorMap map; /* of `matrix`, a box of all */
};

__device__ void write(float *out, float value) {
    if (threadIdx.x < kOutputs) out[threadIdx.x] = value;
}

/* ---- barriers ---- */

template <bool kFaulty>
__global__ void block_barrier(const __grid_constant__ Arguments args) {
    __shared__ float values[kThreads];
    values[threadIdx.x] = static_cast<float>(kThreads - 1 - threadIdx.x);
    if (!kFaulty) __syncthreads();
    write(args.out, values[kThreads - 1 - threadIdx.x]);
}

template <bool kFaulty>
__global__ void barrier_of_a_branch(const __grid_constant__ Arguments args) {
    if (!kFaulty || threadIdx.x < 64) ptx::named_barrier(1, kThreads);
    __syncthreads();
    write(args.out, static_cast<float>(threadIdx.x));
}

template <bool kFaulty>
__global__ void mbarrier_count(const __grid_constant__ Arguments args) {
    __shared__ uint64_t barrier;
    if (threadIdx.x == 0) ptx::mbarrier_init(&barrier, kFaulty ? kThreads + 1 : kThreads);
    __syncthreads();
    ptx::mbarrier_arrive(&barrier);
    ptx::mbarrier_wait_parity(&barrier, 0);
    write(args.out, static_cast<float>(threadIdx.x));
}

template <bool kFaulty>
__global__ void mbarrier_parity(const __grid_constant__ Arguments args) {
    __shared__ uint64_t barrier;
    __shared__ float values[kThreads];
    if (threadIdx.x == 0) ptx::mbarrier_init(&barrier, kThreads);
    __syncthreads();
    values[threadIdx.x] = static_cast<float>(kThreads - 1 - threadIdx.x);
    ptx::mbarrier_arrive(&barrier);
    ptx::mbarrier_wait_parity(&barrier, kFaulty ? 1 : 0);
    write(args.out, values[kThreads - 1 - threadIdx.x]);
}

/* ---- asynchronous copies ---- */

template <bool kFaulty>
__global__ void copy_wait(const __grid_constant__ Arguments args) {
    __shared__ __align__(16) __half rows[kOutputs][8];
    if (threadIdx.x < kOutputs) ptx::cp_async_16(rows[threadIdx.x], args.matrix + threadIdx.x * 64, true);
    ptx::cp_async_commit();
    ptx::cp_async_wait<kFaulty ? 1 : 0>();
    write(args.out, __half2float(rows[threadIdx.x % kOutputs][0]));
    ptx::cp_async_wait<0>();
}

/* The matrix by TMA, in rows of 128 bytes. */
__device__ void load_matrix(const Arguments &args, char *shared, uint64_t *barrier, uint32_t bytes, int first = 0) {
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(barrier, 1);
        ptx::fence_mbarrier_init();
        ptx::mbarrier_arrive_expect_tx(barrier, bytes);
        ptx::tma_load_3d(shared, &args.map, barrier, first, 0, 0);
    }
    __syncthreads();
    ptx::mbarrier_wait_parity(barrier, 0);
}

template <bool kFaulty>
__global__ void tma_bytes(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) char shared[];
    __shared__ uint64_t barrier;
    load_matrix(args, shared, &barrier, kFaulty ? 8192 + 128 : 8192);
    write(args.out, static_cast<float>(threadIdx.x));
}

template <bool kFaulty>
__global__ void tma_start(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) char shared[];
    __shared__ uint64_t barrier;
    load_matrix(args, shared, &barrier, 8192, kFaulty ? 8 : 16);
    write(args.out, static_cast<float>(threadIdx.x));
}

template <bool kFaulty>
__global__ void tma_swizzle(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) char shared[];
    __shared__ uint64_t barrier;
    load_matrix(args, shared, &barrier, 8192);
    const int row = threadIdx.x % kOutputs, chunk = kFaulty ? 0 : row % 8;
    write(args.out, __half2float(*reinterpret_cast<const __half *>(shared + row * 128 + chunk * 16)));
}

/* ---- wgmma: the matrix times its own column 1, out[i] = matrix[i][0] . 1 ---- */

enum class Step { kWait, kRegisterFence, kProxyFence, kReuse, kNone };

/* kStored: B comes by ordinary stores, else by cp.async. */
template <Step kMissing, bool kStored = false>
__device__ void product(const Arguments &args) {
    extern __shared__ __align__(1024) char shared[];
    __shared__ uint64_t barrier;
    load_matrix(args, shared, &barrier, 8192);
    /* B: row n has 1 in column 0, from column 1 of the matrix. Either way it needs the proxy's fence. */
    const int row = threadIdx.x / 2, first = threadIdx.x % 2 * 4;
    for (int chunk = first; chunk < first + 4; ++chunk) {
        char *target = shared + 8192 + row * 128 + (chunk ^ row % 8) * 16;
        const __half *source = args.matrix + 64 * 64 + chunk * 8;
        if (kStored)
            *reinterpret_cast<uint4 *>(target) = *reinterpret_cast<const uint4 *>(source);
        else
            ptx::cp_async_16(target, source, true);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    if (kMissing != Step::kProxyFence) ptx::fence_proxy_async();
    __syncthreads();

    float d[32] = {};
    if (kMissing != Step::kRegisterFence) ptx::wgmma_fence();
    ptx::wgmma_f16(d, ptx::wgmma_descriptor(shared), ptx::wgmma_descriptor(shared + 8192), 1);
    ptx::wgmma_commit();
    if (kMissing == Step::kReuse) {
        __syncthreads();
        if (threadIdx.x == 0) {
            ptx::mbarrier_arrive_expect_tx(&barrier, 8192);
            ptx::tma_load_3d(shared, &args.map, &barrier, 128, 0, 0); /* outside: zeros */
        }
        ptx::mbarrier_wait_parity(&barrier, 1);
    }
    if (kMissing != Step::kWait) ptx::wgmma_wait<0>();
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16 + lane / 4;
    if (lane % 4 == 0) {
        args.out[first_row] = d[0];
        args.out[first_row + 8] = d[2];
    }
    ptx::wgmma_wait<0>();
}

template <bool kFaulty>
__global__ void wgmma_wait(const __grid_constant__ Arguments args) {
    product<kFaulty ? Step::kWait : Step::kNone>(args);
}
template <bool kFaulty>
__global__ void wgmma_fence(const __grid_constant__ Arguments args) {
    product<kFaulty ? Step::kRegisterFence : Step::kNone>(args);
}
template <bool kFaulty>
__global__ void proxy_fence(const __grid_constant__ Arguments args) {
    product<kFaulty ? Step::kProxyFence : Step::kNone>(args);
}
template <bool kFaulty>
__global__ void proxy_fence_of_stores(const __grid_constant__ Arguments args) {
    product<kFaulty ? Step::kProxyFence : Step::kNone, true>(args);
}
template <bool kFaulty>
__global__ void stage_reuse(const __grid_constant__ Arguments args) {
    product<kFaulty ? Step::kReuse : Step::kNone>(args);
}

/* The matrix is written from shared memory. */
template <bool kFenced, bool kWaited>
__device__ void store_box(const Arguments &args) {
    extern __shared__ __align__(1024) char shared[];
    for (int i = threadIdx.x; i < 8192 / 4; i += kThreads) reinterpret_cast<float *>(shared)[i] = 1.0f;
    if (kFenced) ptx::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::tma_store_3d(&args.map, shared, 0, 0, 0);
        ptx::tma_commit();
        if (kWaited) ptx::tma_wait_read<0>();
    }
    write(args.out, static_cast<float>(threadIdx.x));
}

template <bool kFaulty>
__global__ void store_fence(const __grid_constant__ Arguments args) {
    store_box<!kFaulty, true>(args);
}
template <bool kFaulty>
__global__ void store_wait(const __grid_constant__ Arguments args) {
    store_box<true, !kFaulty>(args);
}

/* ---- memory ---- */

template <bool kFaulty>
__global__ void shared_bounds(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) char shared[];
    reinterpret_cast<float *>(shared)[kFaulty ? 4096 + threadIdx.x : threadIdx.x] = static_cast<float>(threadIdx.x);
    write(args.out, static_cast<float>(threadIdx.x));
}

template <bool kFaulty>
__global__ void global_bounds(const __grid_constant__ Arguments args) {
    args.out[kFaulty ? threadIdx.x : threadIdx.x % kOutputs] = static_cast<float>(threadIdx.x % kOutputs);
}

template <bool kFaulty>
__global__ void alignment(const __grid_constant__ Arguments args) {
    if (threadIdx.x >= kOutputs / 4) return;
    const float first = static_cast<float>(4 * threadIdx.x);
    *reinterpret_cast<float4 *>(args.out + 4 * threadIdx.x + kFaulty) =
        make_float4(first, first + 1, first + 2, first + 3);
}

template <bool kFaulty>
__global__ void uninitialised(const __grid_constant__ Arguments args) {
    __shared__ float values[kThreads];
    if (!kFaulty || threadIdx.x % 2) values[threadIdx.x] = static_cast<float>(threadIdx.x);
    write(args.out, values[threadIdx.x]);
}

/* ---- clusters ---- */

template <bool kFaulty>
__global__ void cluster_exit(const __grid_constant__ Arguments args) {
    __shared__ alignas(16) float values[4 * kThreads];
    __shared__ uint64_t barrier;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&barrier, 1);
        ptx::fence_mbarrier_init();
        ptx::mbarrier_arrive_expect_tx(&barrier, 16 * kThreads);
    }
    ptx::cluster_sync();
    const float own[4] = {static_cast<float>(threadIdx.x)};
    ptx::store_remote(values + threadIdx.x * 4, own, &barrier, ptx::cluster_block_rank() ^ 1);
    if (!kFaulty || ptx::cluster_block_rank() == 0) ptx::mbarrier_wait_cluster(&barrier, 0);
    write(args.out, kFaulty ? 0.0f : values[threadIdx.x * 4]);
}

template <bool kFaulty>
__global__ void block_copy_fence(const __grid_constant__ Arguments args) {
    __shared__ alignas(16) float sent[kThreads];
    __shared__ alignas(16) float received[kThreads];
    __shared__ uint64_t barrier;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&barrier, 1);
        ptx::fence_mbarrier_init();
        ptx::mbarrier_arrive_expect_tx(&barrier, sizeof received);
    }
    sent[threadIdx.x] = static_cast<float>(threadIdx.x);
    if (!kFaulty) ptx::fence_proxy_async();
    ptx::cluster_sync();
    if (threadIdx.x == 0) ptx::copy_remote(received, sent, sizeof sent, &barrier, ptx::cluster_block_rank() ^ 1);
    ptx::mbarrier_wait_parity(&barrier, 0);
    write(args.out, received[threadIdx.x]);
    ptx::cluster_sync(); /* the other block reads what this one has sent */
}

/* ---- launches that may begin early ---- */

template <bool kFaulty>
__global__ void early_launch(const __grid_constant__ Arguments args) {
    if (!kFaulty || threadIdx.x % 2) ptx::wait_for_earlier_kernels();
    write(args.out, static_cast<float>(threadIdx.x));
}

struct Pair {
    const char *name;
    void (*kernels[2])(Arguments);
    bool early = false;
};
#define FG_PAIR(kernel)                                                                                                \
    {                                                                                                                  \
        #kernel, { kernel<false>, kernel<true> }                                                                       \
    }
constexpr Pair kPairs[] = {
    FG_PAIR(block_barrier),    FG_PAIR(barrier_of_a_branch),
    FG_PAIR(mbarrier_count),   FG_PAIR(mbarrier_parity),
    FG_PAIR(copy_wait),        FG_PAIR(tma_bytes),
    FG_PAIR(tma_start),        FG_PAIR(tma_swizzle),
    FG_PAIR(wgmma_wait),       FG_PAIR(wgmma_fence),
    FG_PAIR(proxy_fence),      FG_PAIR(proxy_fence_of_stores),
    FG_PAIR(stage_reuse),      FG_PAIR(store_fence),
    FG_PAIR(store_wait),       FG_PAIR(shared_bounds),
    FG_PAIR(global_bounds),    FG_PAIR(alignment),
    FG_PAIR(uninitialised),    FG_PAIR(cluster_exit),
    FG_PAIR(block_copy_fence), {"early_launch", {early_launch<false>, early_launch<true>}, true},
};
#undef FG_PAIR

fg_status run(int index, int faulty, float *out, fg_error *error) {
    __half host[65 * 64] = {};
    for (int row = 0; row < 64; ++row) host[row * 64] = __float2half_rn(static_cast<float>(row));
    host[64 * 64] = __float2half_rn(1.0f);
    void *matrix, *result;
    FG_CUDA(cudaMalloc(&matrix, sizeof host));
    FG_CUDA(cudaMalloc(&result, kOutputs * sizeof(float)));
    FG_CUDA(cudaMemcpy(matrix, host, sizeof host, cudaMemcpyHostToDevice));
    Arguments args = {static_cast<const __half *>(matrix), static_cast<float *>(result), {}};
    const flexgemm::TensorRows rows = {matrix, 128, 64, 1, 128, 8192};
    fg_status status = flexgemm::encode_tensor_map(&args.map, rows, 64, 1, error);
    if (status != FG_OK) return status;

    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {2, 1, 1}; /* which do the same, but for what is about clusters */
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = kPairs[index].early;
    cudaLaunchConfig_t config = {};
    config.gridDim = {2};
    config.blockDim = {kThreads};
    config.dynamicSmemBytes = 2 * 8192;
    config.attrs = attributes;
    config.numAttrs = 2;
    status = flexgemm::cuda_status(cudaLaunchKernelEx(&config, kPairs[index].kernels[faulty], args), kPairs[index].name,
                                   error);
    FG_CUDA(cudaMemcpy(out, result, kOutputs * sizeof(float), cudaMemcpyDeviceToHost));
    FG_CUDA(cudaFree(matrix));
    FG_CUDA(cudaFree(result));
    return status;
}

}  // namespace

#define FG_EXPORT extern "C" __attribute__((visibility("default")))

/* The name of a pair; NULL behind the last. */
FG_EXPORT const char *fault_name(int index) {
    return index < static_cast<int>(sizeof kPairs / sizeof *kPairs) ? kPairs[index].name : nullptr;
}

/* 0, or an error whose text is in `message` (512 bytes). */
FG_EXPORT int fault_run(int index, int faulty, float *out, char *message) {
    fg_error error = {};
    const fg_status status = run(index, faulty, out, &error);
    if (status != FG_OK) snprintf(message, 512, "%s", error.message);
    return status;
}
