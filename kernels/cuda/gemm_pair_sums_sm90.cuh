/*
 * Tiles of gemm_sm90.cuh whose K the two blocks of a pair share: each has sums of half of it.
 *
 * Both blocks have the same rows. The warpgroup of block r that has rows 64 r .. 64 r + 63 adds the other block's sums to
 * its own and finishes the tile for them; the other warpgroup sends its sums. They travel as they are in registers: to
 * shared memory, from there by the copy engine, and their arrival is counted by a barrier. Their places are those of the
 * stages, which both blocks have read by then: such a tile is the last one that a block has.
 */
#pragma once

#include "gemm_rings_sm90.cuh"

namespace flexgemm {

template <typename Tile, bool kShares = Tile::kSharesTiles>
class PairSums {
public:
    /* By one thread, before the pair meets. */
    __device__ __forceinline__ void init() {
        ptx::mbarrier_init(&stages_read_, kSm90ConsumerWarps<Tile> * Tile::kCluster);
        ptx::mbarrier_init(&received_, 1);
    }

    /* By a warp of consumers that has multiplied all that it had to: it reads no stage any more. */
    __device__ __forceinline__ void leave_stages() { arrive_at_blocks<Tile::kCluster>(&stages_read_); }

    /* By a warpgroup: whether the sums are now those of all of K, to be finished by it. */
    template <typename Sums>
    __device__ __forceinline__ bool add_up(Sums &sum, uint8_t *stages, int warpgroup) {
        constexpr int kWarpBytes = Sums::kColumns / 2 * 32 * 4, kBytes = 4 * kWarpBytes;
        static_assert(2 * kBytes <= Tile::kStages * Tile::kStageBytes, "sums that go and sums that come");
        const int rank = static_cast<int>(ptx::cluster_block_rank()), lane = threadIdx.x % 32;
        const int warp = threadIdx.x % ptx::kWarpgroup / 32 * kWarpBytes;
        uint8_t *const sent = stages + warp, *const received = stages + kBytes + warp;
        leave_stages();
        if (warpgroup != rank) {
            ptx::mbarrier_wait_cluster(&stages_read_, 0);
            sum.each([&](auto &own, int part) { send(own, sent, received, first_of<Sums>(own, part), 1 - rank); });
            return false;
        }
        if (threadIdx.x % ptx::kWarpgroup == 0) ptx::mbarrier_arrive_expect_tx(&received_, kBytes);
        ptx::mbarrier_wait_cluster(&received_, 0);
        sum.each([&](auto &own, int part) { add(own, received, first_of<Sums>(own, part), lane); });
        return true;
    }

private:
    /* The number of a part's first sum among all of a thread. */
    template <typename Sums, int kCount>
    __device__ __forceinline__ static int first_of(const float (&)[kCount], int part) {
        return part * (Sums::kColumns / 2 - kCount);
    }

    /* Of a thread's sums i to i + 3. */
    __device__ __forceinline__ static float4 *place_of(uint8_t *warp, int i, int lane) {
        return reinterpret_cast<float4 *>(warp) + i / 4 * 32 + lane;
    }

    template <int kCount>
    __device__ __forceinline__ static void add(float (&sum)[kCount], uint8_t *received, int first_sum, int lane) {
#pragma unroll
        for (int i = 0; i < kCount; i += 4) {
            const float4 other = *place_of(received, first_sum + i, lane);
            sum[i] += other.x, sum[i + 1] += other.y, sum[i + 2] += other.z, sum[i + 3] += other.w;
        }
    }

    /* A warp's sums of a part, a few at a time: some are on their way while others are stored. */
    template <int kCount>
    __device__ __forceinline__ void send(const float (&sum)[kCount], uint8_t *from, uint8_t *to, int first_sum,
                                         int block) {
        constexpr int kTogether = kCount % 32 ? kCount / 2 : 32;
        static_assert(kCount % kTogether == 0 && kTogether % 4 == 0, "copies of as many sums");
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int first = 0; first < kCount; first += kTogether) {
#pragma unroll
            for (int i = first; i < first + kTogether; i += 4)
                *place_of(from, first_sum + i, lane) = {sum[i], sum[i + 1], sum[i + 2], sum[i + 3]};
            ptx::fence_proxy_async();
            __syncwarp();
            if (ptx::elect())
                ptx::copy_remote(place_of(to, first_sum + first, 0), place_of(from, first_sum + first, 0),
                                 kTogether * 32 * 4, &received_, static_cast<uint32_t>(block));
        }
    }

    uint64_t stages_read_, received_; /* by all consumers of both blocks; sums, in bytes */
};

/* Blocks that share no tile. */
template <typename Tile>
class PairSums<Tile, false> {
public:
    __device__ __forceinline__ void init() {}
    __device__ __forceinline__ void leave_stages() {}
    template <typename Sums>
    __device__ __forceinline__ bool add_up(Sums &, uint8_t *, int) {
        return true;
    }
};

}  // namespace flexgemm
