/* A ring of stages or slots in shared memory that some warps fill and others empty, round after round. */
#pragma once

#include <cstdint>

namespace flexgemm {

/* Stage or slot of a ring, and the parity of its current round, which is that of its barriers. */
template <int kSlots>
struct RingPosition {
    int slot = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == kSlots) slot = 0, parity ^= 1;
    }
};

/* Where a producer is that has filled the first `early` of all stages. */
template <int kSlots>
__device__ __forceinline__ RingPosition<kSlots> position_after(int early) {
    return {early % kSlots, early == kSlots};
}

}  // namespace flexgemm
