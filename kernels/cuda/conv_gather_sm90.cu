/*
 * Forward and input gradient of sparse convolution on Hopper, 16-bit types and TF32: the pipeline of
 * conv_gather_sm90.cuh, whose consumers let all products of a tile run into the accumulators of wgmma.
 *
 * wgmma transposes 16-bit operands only: TF32 has K-major weights in both passes.
 */
#include <type_traits>

#include "activation.cuh"
#include "conv_gather_sm90.cuh"

namespace flexgemm {
namespace {

/* D += A.B of 64 rows, B as the pass has it. */
template <typename T, bool kKMajor, int kRegisters>
__device__ __forceinline__ void wgmma(float (&d)[kRegisters], uint64_t a, uint64_t b) {
    static_assert(sizeof(T) == 2 || kKMajor, "wgmma transposes 16-bit operands only");
    if constexpr (std::is_same<T, float>::value)
        ptx::wgmma_tf32(d, a, b, 1);
    else if constexpr (std::is_same<T, __half>::value && kKMajor)
        ptx::wgmma_f16(d, a, b, 1);
    else if constexpr (std::is_same<T, __half>::value)
        ptx::wgmma_f16_kn(d, a, b, 1);
    else if constexpr (kKMajor)
        ptx::wgmma_bf16(d, a, b, 1);
    else
        ptx::wgmma_bf16_kn(d, a, b, 1);
}

template <typename T, class Tile, bool kKMajor>
struct Consumer {
    static constexpr int kRegisters = Tile::kBlockN / 2; /* accumulators of a thread */
    /* ptxas wants 154 registers at launch for a wgmma of 256 columns; four warpgroups have 128. */
    static constexpr int kParts = Tile::kConsumers > 2 ? 2 : 1;
    /* Where three take turns, two keep the tensor cores busy while one waits for its products and frees their stage;
     * each of two has another step in flight before it does. */
    static constexpr int kBehind = Tile::kConsumers > 2 ? 0 : 1;
    static constexpr int kNone = -1;

    const GatherParams &p;
    GatherShared<Tile> &shared;
    const int lane;
    RingPosition<Tile::kStages> place; /* in the pipeline */

    __device__ void multiply(float (&d)[kRegisters]) {
        const char *a = shared.stages[place.slot], *b = a + Tile::kBytesA;
        constexpr int kSteps = kSwizzleRowBytes / kWgmmaBytes, kAdvanceA = kWgmmaBytes / 16;
        constexpr int kAdvanceB = kKMajor ? kAdvanceA : kBlockK<T> / kSteps * kSwizzleRowBytes / 16;
        constexpr int kNextPart = Tile::kBlockN / kParts * kSwizzleRowBytes / 16; /* either way: whole blocks of 64 */
        const uint64_t descriptor_a = ptx::wgmma_descriptor(a + consumer_of_thread() * kWgmmaM * kSwizzleRowBytes);
        const uint64_t descriptor_b =
            kKMajor ? ptx::wgmma_descriptor(b) : ptx::wgmma_descriptor(b, kBlockK<T> * kSwizzleRowBytes);
        ptx::fence_proxy_async(); /* the rows of A came through the ordinary path, wgmma reads through another */
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
            for (int part = 0; part < kParts; ++part)
                wgmma<T, kKMajor>(reinterpret_cast<float (&)[kParts][kRegisters / kParts]>(d)[part],
                                  descriptor_a + k * kAdvanceA, descriptor_b + part * kNextPart + k * kAdvanceB);
        }
        ptx::wgmma_commit();
    }

    /* Multiplies until the end of the tile, whose word is returned; *any: there was something to multiply. Of two
     * consumers, one step stays in flight behind the one being issued; its stage is released when the next is issued,
     * or at a step that is passed over, which the producer may wait for. */
    __device__ uint32_t accumulate(float (&d)[kRegisters], bool *any) {
        int in_flight = kNone;
        uint32_t step;
        do {
            ptx::mbarrier_wait_parity(&shared.full[place.slot], place.parity);
            step = step_of(shared, place.slot, lane);
            const bool active = concerns(step, consumer_of_thread());
            const bool kept = active && kBehind > 0;
            if (active) {
                multiply(d);
                ptx::wgmma_wait<kBehind>();
            } else {
                ptx::wgmma_wait<0>();
            }
            if (!kept) release_stage(shared, place.slot, lane);
            if (in_flight != kNone) release_stage(shared, in_flight, lane);
            in_flight = kept ? place.slot : kNone;
            *any |= active;
            place.advance();
        } while (!ends_tile(step));
        ptx::wgmma_wait<0>(); /* nothing is in flight after a step without operands; the compiler cannot know */
        ptx::wgmma_hold(d);
        return __shfl_sync(~0u, step, 0);
    }

    __device__ void write(float (&d)[kRegisters], const GatherTask<Tile> &task, const int64_t (&rows)[2]) {
        if (p.partials) {
            store_partials(d, p, task.slice, task.n0, rows);
            return;
        }
        if constexpr (kKMajor) { /* the forward pass */
            add_rows<T>(d, bias_of<T>(shared, p, task), p, task.n0, rows);
            activate(d, p.epilogue.activation);
        }
        store_rows<T>(d, p, task.n0, rows);
    }

    __device__ void run() {
        consume_tiles<Tile>(
            p, [this](float (&d)[kRegisters], bool *any) { return accumulate(d, any); },
            [this](float (&d)[kRegisters], const GatherTask<Tile> &task, const int64_t (&rows)[2]) {
                write(d, task, rows);
            });
    }
};

/* ---- kernel and launch ---- */

template <typename T, class Tile, bool kKMajor>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    conv_gather_sm90_kernel(const GatherParams p, const __grid_constant__ CUtensorMap weight_map, int tasks) {
    gather_block<T, Tile, kKMajor, Consumer<T, Tile, kKMajor>>(p, weight_map, tasks);
}

template <typename T, bool kKMajor>
fg_status launch(const GatherParams &p, const fg_plan &plan, int num_sms, cudaStream_t stream, fg_error *error) {
    const auto launch_tile = [&](auto tile) {
        using Tile = decltype(tile);
        return launch_gather<conv_gather_sm90_kernel<T, Tile, kKMajor>, T, Tile, kKMajor>(p, num_sms, stream, error);
    };
    if constexpr (sizeof(T) == 2 && kKMajor) /* the narrowest that transposed weights have is 64 columns */
        if (plan.block_n == 32) return launch_tile(GatherTile<128, 32, 4, 2>{});
    if constexpr (sizeof(T) == 2)
        if (plan.block_m == 192) return launch_tile(GatherTile<192, 256, 3, 1>{});
    return with_gather_tile(plan, launch_tile);
}

}  // namespace

fg_status launch_gather_sm90(const GatherParams &p, const fg_plan &plan, fg_dtype dtype, bool weight_is_k_major,
                             int num_sms, cudaStream_t stream, fg_error *error) {
    if (dtype == FG_FLOAT32) return launch<float, true>(p, plan, num_sms, stream, error);
    if (dtype == FG_FLOAT16)
        return weight_is_k_major ? launch<__half, true>(p, plan, num_sms, stream, error)
                                 : launch<__half, false>(p, plan, num_sms, stream, error);
    return weight_is_k_major ? launch<__nv_bfloat16, true>(p, plan, num_sms, stream, error)
                             : launch<__nv_bfloat16, false>(p, plan, num_sms, stream, error);
}

}  // namespace flexgemm
