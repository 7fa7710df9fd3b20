/*
 * Codes of voxels along a curve, and back: bound by the bytes it moves, 20 a voxel where codes have 32 bits.
 *
 * That leaves some 100 instructions a voxel. Ten bits of each axis are therefore a word of 32-bit arithmetic, the
 * Hilbert curve takes six bits of a word by a look-up in shared memory (curve_machine.cuh), and a thread has kBatch
 * voxels in flight, which share what does not depend on them.
 */
#include "../sequence.h"
#include "backend.cuh"
#include "common.cuh"
#include "coords.cuh"
#include "curve_machine.cuh"
#include "voxel_number.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256, kBatch = 4, kTile = kThreads * kBatch;
constexpr int kBlocksPerSm = 8;
constexpr int kWordBits = 10; /* of an axis */

__device__ constexpr CurveMachine kMachine;

/* ---- words ---- */

/* Bit i of 10 to bit 3 i. Nothing meets in the sums, which are one instruction where an `or` would be two. */
__device__ __forceinline__ uint32_t spread_word(uint32_t axis) {
    uint32_t bits = axis & 0x3ff;
    bits = bits * 0x10001 & 0x030000ff;
    bits = bits * 0x101 & 0x0300f00f;
    bits = bits * 0x11 & 0x030c30c3;
    return bits * 0x5 & 0x09249249;
}

/* Bit 3 i to bit i. */
__device__ __forceinline__ uint32_t gather_word(uint32_t bits) {
    bits &= 0x09249249;
    bits = (bits | bits >> 2) & 0x030c30c3;
    bits = (bits | bits >> 4) & 0x0300f00f;
    bits = (bits | bits >> 8) & 0x030000ff;
    return (bits | bits >> 16) & 0x3ff;
}

/* What the machine writes for each word's low `pairs` pairs of triples. state: its number << 7. */
__device__ __forceinline__ void run_machine(const uint16_t *table, int pairs, uint32_t (&state)[kBatch],
                                            uint32_t (&word)[kBatch]) {
    uint32_t written[kBatch] = {};
    for (int shift = 6 * (pairs - 1); shift >= 0; shift -= 6) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const uint32_t at = ((word[i] << 1) >> shift & 0x7e) | (state[i] & ~0x7fu);
            state[i] = *reinterpret_cast<const uint16_t *>(reinterpret_cast<const char *>(table) + at);
            written[i] = written[i] << 6 | (state[i] & 0x7e);
        }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) word[i] = written[i] >> 1;
}

/* ---- codes ---- */

template <class Code, fg_sequence kMode>
struct Curve {
    const fg_curve &curve;
    const uint16_t *table; /* of the machine, in shared memory */

    /* Calls visit(lowest bit of an axis, how many of them) for the words of a code, from the highest down. */
    template <class Visit>
    __device__ __forceinline__ void for_each_word(const Visit &visit) const {
        const int bits = curve.axis_bits;
        int low = sizeof(Code) == 4 || bits == 0 ? 0 : (bits - 1) / kWordBits * kWordBits;
        for (int end = bits; low >= 0; end = low, low -= kWordBits) visit(low, end - low);
    }

    __device__ __forceinline__ void start(uint32_t (&state)[kBatch]) const {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) state[i] = curve.axis_bits % 2 ? kCurveMachine.odd << 7 : 0;
    }

    __device__ __forceinline__ void encode(const int4 (&coord)[kBatch], Code (&code)[kBatch]) const {
        uint32_t state[kBatch];
        start(state);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) code[i] = static_cast<uint32_t>(coord[i].x);
        for_each_word([&](int low, int bits) {
            uint32_t word[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
                word[i] = spread_word(coord[i].y >> low) << 2 | spread_word(coord[i].z >> low) << 1 |
                          spread_word(coord[i].w >> low);
            if constexpr (kMode == FG_HILBERT) run_machine(table, (bits + 1) / 2, state, word);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) code[i] = code[i] << 3 * bits | word[i];
        });
    }

    /* Batch numbers may be larger than coordinates can be. */
    __device__ __forceinline__ void decode(const Code (&code)[kBatch], Code (&batch)[kBatch],
                                           uint32_t (&axes)[kBatch][3]) const {
        uint32_t state[kBatch];
        start(state);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            batch[i] = code[i] >> 3 * curve.axis_bits;
#pragma unroll
            for (int axis = 0; axis < 3; ++axis) axes[i][axis] = 0;
        }
        for_each_word([&](int low, int bits) {
            uint32_t word[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
                word[i] = static_cast<uint32_t>(code[i] >> 3 * low) & ((1u << 3 * bits) - 1);
            if constexpr (kMode == FG_HILBERT) run_machine(table, (bits + 1) / 2, state, word);
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
#pragma unroll
                for (int axis = 0; axis < 3; ++axis) axes[i][axis] |= gather_word(word[i] >> (2 - axis)) << low;
        });
    }
};

/* ((b * W + x) * H + y) * D + z, in as many bits as it takes. */
template <class Code>
struct Curve<Code, FG_BXYZ> {
    const fg_curve &curve;
    const uint16_t *table; /* not used */

    __device__ __forceinline__ void encode(const int4 (&coord)[kBatch], Code (&code)[kBatch]) const {
        const Code w = static_cast<Code>(curve.shape[1]), h = static_cast<Code>(curve.shape[2]);
        const Code d = static_cast<Code>(curve.shape[3]);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const Code x = static_cast<Code>(coord[i].x) * w + static_cast<uint32_t>(coord[i].y);
            code[i] = (x * h + static_cast<uint32_t>(coord[i].z)) * d + static_cast<uint32_t>(coord[i].w);
        }
    }

    __device__ __forceinline__ void decode(const Code (&code)[kBatch], Code (&batch)[kBatch],
                                           Code (&axes)[kBatch][3]) const {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            batch[i] = code[i];
#pragma unroll
            for (int axis = 2; axis >= 0; --axis) {
                const Code extent = static_cast<Code>(curve.shape[axis + 1]); /* 0: 2^32, which no code reaches */
                const Code rest = extent != 0 ? batch[i] / extent : 0;
                axes[i][axis] = batch[i] - rest * extent;
                batch[i] = rest;
            }
        }
    }
};

/* ---- kernels ---- */

/* The machine's table of one direction, for the whole block. */
template <fg_sequence kMode>
__device__ __forceinline__ const uint16_t *load_table(const uint16_t *from) {
    if constexpr (kMode == FG_HILBERT) {
        __shared__ uint16_t table[kCurveStates * kCurvePairs];
        for (int i = threadIdx.x; i < kCurveStates * kCurvePairs; i += kThreads) table[i] = from[i];
        __syncthreads();
        return table;
    } else {
        return nullptr;
    }
}

template <class Code, fg_sequence kMode>
__global__ void __launch_bounds__(kThreads)
    encode_kernel(Coords coords, fg_curve curve, VoxelBounds bounds, Code *code) {
    const Curve<Code, kMode> codes = {curve, load_table<kMode>(kMachine.encode)};
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * kTile + threadIdx.x; first < coords.count;
         first += static_cast<int64_t>(gridDim.x) * kTile) {
        int4 coord[kBatch];
        Code result[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            coord[i] = first + i * kThreads < coords.count ? coords[first + i * kThreads] : make_int4(0, 0, 0, 0);
        codes.encode(coord, result);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (first + i * kThreads >= coords.count) continue;
            code[first + i * kThreads] = bounds.contain(coord[i]) ? result[i] : ~Code{0};
        }
    }
}

template <class Code, fg_sequence kMode>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(const Code *code, fg_curve curve, VoxelBounds bounds, WritableCoords coords) {
    using Axis = std::conditional_t<kMode == FG_BXYZ, Code, uint32_t>;
    const Curve<Code, kMode> codes = {curve, load_table<kMode>(kMachine.decode)};
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * kTile + threadIdx.x; first < coords.count;
         first += static_cast<int64_t>(gridDim.x) * kTile) {
        Code given[kBatch], batch[kBatch];
        Axis axes[kBatch][3];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            given[i] = first + i * kThreads < coords.count ? code[first + i * kThreads] : 0;
        codes.decode(given, batch, axes);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (first + i * kThreads >= coords.count) continue;
            const bool inside = batch[i] < bounds.batch && axes[i][0] < bounds.width && axes[i][1] < bounds.height &&
                                axes[i][2] < bounds.depth;
            const int4 voxel = make_int4(static_cast<int32_t>(batch[i]), static_cast<int32_t>(axes[i][0]),
                                         static_cast<int32_t>(axes[i][1]), static_cast<int32_t>(axes[i][2]));
            coords.store(first + i * kThreads, inside ? voxel : make_int4(-1, -1, -1, -1));
        }
    }
}

/* ---- launches ---- */

/* Calls launch(code, mode, blocks), the type of codes and the mode as constants. */
template <class Code, class Launch>
void dispatch_mode(fg_sequence mode, unsigned int blocks, const Launch &launch) {
    if (mode == FG_BXYZ) return launch(Code(), std::integral_constant<fg_sequence, FG_BXYZ>(), blocks);
    if (mode == FG_Z_ORDER) return launch(Code(), std::integral_constant<fg_sequence, FG_Z_ORDER>(), blocks);
    launch(Code(), std::integral_constant<fg_sequence, FG_HILBERT>(), blocks);
}

/* On the Hilbert curve as many blocks as the device holds at once at most, each of which loads the table; else a block
 * a tile, so that no multiprocessor waits for others' last one. */
template <class Params, class Launch>
fg_status run(const Params &p, const fg_queue *queue, fg_error *error, const Launch &launch) {
    const int64_t tiles = ceil_div<int64_t>(p.coords.shape[0], kTile);
    if (tiles == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    int num_sms, compute_capability;
    const fg_status status = device_properties(queue->device_index, &num_sms, &compute_capability, error);
    if (status != FG_OK) return status;
    const int64_t most = p.mode == FG_HILBERT ? static_cast<int64_t>(num_sms) * kBlocksPerSm : INT32_MAX;
    const unsigned int blocks = static_cast<unsigned int>(tiles < most ? tiles : most);
    if (p.code.dtype == FG_INT32)
        dispatch_mode<uint32_t>(p.mode, blocks, launch);
    else
        dispatch_mode<uint64_t>(p.mode, blocks, launch);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

}  // namespace

fg_status encode_seq(const fg_encode_seq_params *p, const fg_queue *queue, fg_error *error) {
    const fg_curve curve = fg_make_curve(p->mode, p->shape);
    return run(*p, queue, error, [&](auto code, auto mode, unsigned int blocks) {
        using Code = decltype(code);
        encode_kernel<Code, mode()><<<blocks, kThreads, 0, stream_of(queue)>>>(
            Coords(p->coords), curve, VoxelBounds(p->shape), static_cast<Code *>(p->code.data));
    });
}

fg_status decode_seq(const fg_decode_seq_params *p, const fg_queue *queue, fg_error *error) {
    const fg_curve curve = fg_make_curve(p->mode, p->shape);
    return run(*p, queue, error, [&](auto code, auto mode, unsigned int blocks) {
        using Code = decltype(code);
        decode_kernel<Code, mode()><<<blocks, kThreads, 0, stream_of(queue)>>>(
            static_cast<const Code *>(p->code.data), curve, VoxelBounds(p->shape), WritableCoords(p->coords));
    });
}

}  // namespace flexgemm
