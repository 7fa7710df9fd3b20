/*
 * Ring of (output row, input row) pairs in shared memory, filled by the whole CTA a window of map entries at a time.
 * Every warp looks at the whole window and counts for itself, so that all agree on the length without talking.
 */
#pragma once

#include "common.cuh"

namespace flexgemm {

struct PairQueue {
    static constexpr int kWindow = 128;
    static constexpr int kSegments = kWindow / 32; /* one warp writes one segment's pairs */
    static constexpr int kCapacity = 2 * kWindow;

    struct Storage {
        int32_t out_row[kCapacity]; /* relative to the slice */
        int32_t in_row[kCapacity];
    };

    Storage &ring;
    const int32_t *map; /* of the slice */
    const int rows;     /* of the slice */
    const uint32_t in_rows;
    int scanned = 0, produced = 0;
    int32_t window[kSegments]; /* map entries of the next window, in flight while the CTA computes */

    __device__ PairQueue(Storage &storage, const int32_t *slice_map, int slice_rows, uint32_t limit)
        : ring(storage), map(slice_map), rows(slice_rows), in_rows(limit) {
        fetch_window();
    }

    __device__ void fetch_window() {
#pragma unroll
        for (int s = 0; s < kSegments; ++s) {
            const int m = scanned + 32 * s + static_cast<int>(threadIdx.x) % 32;
            window[s] = m < rows ? map[m] : -1;
        }
    }

    /* Appends until `wanted` pairs have been produced in total, or the slice ends. Holds at most `wanted` - 1 plus a
     * window of pairs; the caller has used all pairs but the last `wanted` - 1. */
    __device__ void fill(int wanted) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        while (produced < wanted && scanned < rows) {
            __syncthreads(); /* the places written below may still be read for an earlier step */
#pragma unroll
            for (int s = 0; s < kSegments; ++s) {
                const bool present = static_cast<uint32_t>(window[s]) < in_rows;
                const unsigned int mask = __ballot_sync(~0u, present);
                if (present && s == warp) {
                    const int place = (produced + __popc(mask & ((1u << lane) - 1))) % kCapacity;
                    ring.out_row[place] = scanned + 32 * s + lane;
                    ring.in_row[place] = window[s];
                }
                produced += __popc(mask);
            }
            scanned += kWindow;
            fetch_window();
            __syncthreads();
        }
    }
};

}  // namespace flexgemm
