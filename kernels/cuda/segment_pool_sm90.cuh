/*
 * The input rows of segments (segment.h) in shared memory, for the convolution kernels of Hopper: a pool around which
 * one resident lies behind the other, the inputs of a segment or some of them. Some warps bring the next one by 16-byte
 * cp.async as far as there is room, while consumers read the one before by its places.
 */
#pragma once

#include <algorithm>

#include "../segment.h"
#include "ptx.cuh"
#include "ring.cuh"

namespace flexgemm {

/* In shared memory. Inputs of 32, 64 or 128 bytes; swizzled, those that lie anywhere meet few bank conflicts when a
 * chunk of each is read. kWarps fill it. kRoom inputs of 128 bytes fit, no more than twice as many of fewer. */
template <int kInputBytes_, bool kSwizzled, int kWarps_, int kRoom>
struct SegmentPool {
    static constexpr int kWarps = kWarps_, kInputBytes = kInputBytes_, kChunks = kInputBytes / 16;
    static constexpr int kBytes = std::min(2 * kRoom * kInputBytes, kRoom * 128);
    static_assert(kRoom >= FG_SEGMENT_PLACES, "a segment at its largest fits; most leave room for all of the next");

    struct Resident {
        uint32_t begin; /* byte of the pool */
        int whole;      /* all inputs of a segment */
        uint32_t masks[FG_SEGMENT_TILES];
    };

    alignas(1024) char inputs[kBytes];
    Resident residents[2];
    alignas(8) uint64_t arrived[2], left[2];

    /* One thread. Each of `consumers`, who are threads, arrives when it has left a resident. */
    __device__ void init(int consumers) {
        /* Every gathering thread for its rows, and one more arrival that announces where they are. */
        for (uint64_t &barrier : arrived) ptx::mbarrier_init(&barrier, kWarps * 32 + 1);
        for (uint64_t &barrier : left) ptx::mbarrier_init(&barrier, static_cast<uint32_t>(consumers));
    }

    /* Where an input lies, less than once around the pool; and anything else is somewhere in the pool as well. */
    __device__ static __forceinline__ uint32_t around(uint32_t byte) {
        constexpr uint32_t kEnd = kBytes, kLast = kEnd - kInputBytes;
        return min(min(byte, byte - kEnd), kLast); /* below the end the difference is a huge number */
    }

    /* The byte of the input that has a place of the resident at `begin`; its chunk c of 16 bytes is at byte ^ 16 c. */
    __device__ static __forceinline__ uint32_t at(uint32_t begin, uint32_t place) {
        const uint32_t byte = around(begin + place * kInputBytes);
        return kSwizzled ? byte ^ (byte >> 3 & 0x70) : byte;
    }

    /* The same of two places, in the low and the high half of a word, where nothing is swizzled; `begin` may be any
     * byte of the first input. */
    __device__ static __forceinline__ uint2 at_both(uint32_t begin, uint32_t places) {
        static_assert(!kSwizzled && (FG_SEGMENT_PLACES * kInputBytes <= kBytes) && FG_SEGMENT_PLACES < 0x10000, "");
        constexpr uint32_t kEnd = kBytes, kLast = FG_SEGMENT_PLACES - 1;
        const uint32_t known = __vminu2(places, kLast << 16 | kLast);
        const uint32_t low = begin + (known & 0xffff) * kInputBytes, high = begin + (known >> 16) * kInputBytes;
        return make_uint2(min(low, low - kEnd), min(high, high - kEnd)); /* below the end the difference is huge */
    }
};

/* Where rows are brought from: a lane's 8 channels of the first one. Of a row that is none of these come zeros. */
struct PoolSource {
    uint64_t first;
    uint32_t row_bytes, rows;

    template <typename T>
    __device__ PoolSource(const T *data, int64_t stride, uint32_t rows, int channel, int channels)
        : first(reinterpret_cast<uint64_t>(data + channel)),
          row_bytes(static_cast<uint32_t>(sizeof(T) * stride)),
          rows(channel < channels ? rows : 0) {}
};

/* What fills the pool: a thread of its warps. */
template <class Pool>
struct PoolGatherer {
    Pool &pool;
    const int warp, lane;
    uint32_t begin = 0, before = 0; /* bytes of the residents before, which may be in use */
    RingPosition<2> resident;

    __device__ PoolGatherer(Pool &pool, int warp, int lane) : pool(pool), warp(warp), lane(lane) {}

    /* Which of a row's channels are this lane's. */
    __device__ int channel() const { return lane % Pool::kChunks * 8; }

    /* Starts the copies of the inputs that have places `first` to `end`. Each lane looks at one place of 32, the lanes
     * that copy an input together at those they copy one after the other. */
    template <class InputAt>
    __device__ void load(const PoolSource &source, const InputAt &input_at, int first, int end) const {
        constexpr int kChunks = Pool::kChunks, kRows = 32 / kChunks; /* that a warp copies at once */
        constexpr int kAtOnce = kChunks < 4 ? kChunks : 4;           /* copies behind their shuffles */
        constexpr uint32_t kNone = ~0u;
        int place = first + warp * 32 + lane % kChunks * kRows + lane / kChunks;
        uint32_t next = place < end ? input_at(place) : kNone;
        while (__any_sync(~0u, place < end)) {
            const uint32_t input = next, at = place < end ? Pool::at(begin, static_cast<uint32_t>(place)) : kNone;
            place += Pool::kWarps * 32;
            next = place < end ? input_at(place) : kNone;
#pragma unroll
            for (int i = 0; i < kChunks; i += kAtOnce) {
                uint32_t rows[kAtOnce], targets[kAtOnce];
#pragma unroll
                for (int k = 0; k < kAtOnce; ++k) {
                    rows[k] = __shfl_sync(~0u, input, i + k, kChunks);
                    targets[k] = __shfl_sync(~0u, at, i + k, kChunks);
                }
#pragma unroll
                for (int k = 0; k < kAtOnce; ++k) {
                    /* Where zeros are asked for, the row is not read and may lie anywhere. */
                    if (targets[k] != kNone)
                        ptx::cp_async_16_or_zeros(
                            pool.inputs + (targets[k] ^ lane % kChunks * 16),
                            reinterpret_cast<const void *>(source.first + uint64_t{rows[k]} * source.row_bytes),
                            rows[k] >= source.rows);
                }
            }
        }
    }

    /* Brings a resident of `count` inputs, some of them when the one before is no longer needed. input_at(place) is the
     * row that has a place; `masks` are those of the segment. */
    template <class InputAt>
    __device__ void bring(const PoolSource &source, const int32_t *masks, bool whole, int count,
                          const InputAt &input_at) {
        uint64_t *const arrived = &pool.arrived[resident.slot];
        ptx::mbarrier_wait_parity(&pool.left[resident.slot], resident.parity ^ 1); /* those before the last */
        const int fitting = min(count, static_cast<int>(Pool::kBytes - before) / Pool::kInputBytes);
        load(source, input_at, 0, fitting);
        if (fitting < count) {
            /* The resident before: in the first slot of this round, or in the second one of the round before. */
            ptx::mbarrier_wait_parity(&pool.left[resident.slot ^ 1], resident.parity ^ resident.slot ^ 1);
            load(source, input_at, fitting, count);
        }
        if (warp == 0 && lane < FG_SEGMENT_TILES) {
            typename Pool::Resident &here = pool.residents[resident.slot];
            here.masks[lane] = static_cast<uint32_t>(__ldcg(masks + lane));
            if (lane == 0) here.begin = begin, here.whole = whole;
        }
        __syncwarp();
        if (warp == 0 && lane == 0) ptx::mbarrier_arrive(arrived);
        ptx::mbarrier_arrive_after_cp_async(arrived);
        before = static_cast<uint32_t>(count) * Pool::kInputBytes;
        begin = Pool::around(begin + before);
        resident.advance();
    }

    /* No thread leaves with copies under way. */
    __device__ void finish() const {
        ptx::cp_async_commit(); /* only groups can be waited for */
        ptx::cp_async_wait<0>();
    }
};

}  // namespace flexgemm
