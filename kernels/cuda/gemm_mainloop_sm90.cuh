/*
 * The multiplication of a tile, which the Hopper kernels of products share.
 *
 * Hopper's fp8 tensor cores keep about 13 fraction bits of a running sum. fp8 sums are therefore promoted: each stage
 * (K = 128) is summed from zero by the tensor cores and then added to float32 registers. The registers of a partial sum
 * are those of the next one too, so that a warpgroup adds and multiplies by turns, and the products of the other one
 * fill the time in which it adds. A tile of 256 columns or more is two parts, for want of registers; one of 128 has
 * registers for the partial sums of two steps. Sums of 16-bit operands need none of this: a tile of 256 columns is two
 * parts all the same, so that one is finished, or begins the next tile, while the other is multiplied.
 */
#pragma once

#include "gemm_rings_sm90.cuh"
#include "gemm_sums_sm90.cuh"

namespace flexgemm {

/* Two warpgroups that promote take turns at starting products, so that one adds while the tensor cores work for the
 * other: left to themselves they may do both at the same time. A barrier for each has the arrivals of the other. */
template <typename Tile>
__device__ __forceinline__ void await_turn(int warpgroup) {
    static_assert(Tile::kWarpgroups == 2, "a turn goes to the other one");
    ptx::named_barrier(2 + warpgroup, Tile::kWarpgroups * ptx::kWarpgroup);
}

template <typename Tile>
__device__ __forceinline__ void pass_turn(int warpgroup) {
    ptx::named_barrier_arrive(3 - warpgroup, Tile::kWarpgroups * ptx::kWarpgroup);
}

/* Before the first turn, which is the first warpgroup's, and after the last, which the other has passed to it. */
template <typename Tile>
__device__ __forceinline__ void begin_turns(int warpgroup) {
    if (warpgroup == 1) pass_turn<Tile>(warpgroup);
}

template <typename Tile>
__device__ __forceinline__ void end_turns(int warpgroup) {
    if (warpgroup == 0) await_turn<Tile>(warpgroup);
}

/* Hands a stage back to the producers of all blocks that write to it, once per warp. */
template <typename Tile>
__device__ __forceinline__ void hand_back(Sm90Shared<Tile> &shared, int slot) {
    arrive_at_blocks<Tile::kCluster>(&shared.empty[slot]);
}

/* Lets scales of blocks be copied to a slot again. Every lane says so for itself: one for its warp would do, but
 * racecheck follows lanes one by one. */
template <typename Tile>
__device__ __forceinline__ void leave_scales(Sm90Shared<Tile> &shared, int slot) {
    ptx::mbarrier_arrive(&shared.scales_read[slot]);
}

/* What a warpgroup multiplies: descriptors of its rows of A and of B in slot 0, which is at `stages`. */
struct StageDescriptors {
    uint8_t *stages;
    uint64_t a, b;
    int warpgroup = 0; /* of the consumers, where they take turns */
};

/* How a tile goes through K. Of a group along K the first step begins with `head` bytes that are not its own, and the
 * last one ends with what follows on its `tail` own bytes (0: with its own); that is cleared by the `threads` threads
 * that multiply. */
struct Depth {
    int steps, head, tail, threads;
};

template <typename Tile>
__device__ __forceinline__ Depth depth_of(const Sm90Work &work, const GemmSm90Args &args) {
    /* Without the branches that this leaves out ptxas finds too few registers for promoted sums of 272 columns, and waits
     * for products where columns have factors. */
    if constexpr (Tile::kUsual && Tile::kRowsOnly && Tile::kBlockN <= 256) return {steps_of(work), 0, 0, 0};
    const int head = head_of(work);
    const uint32_t end = static_cast<uint32_t>(head + work.k_bytes);
    const int tail = args.space.k_offsets.data ? static_cast<int>(end % kSm90StepBytes) : 0;
    return {steps_of(work), head, tail, ptx::kWarpgroup * (work.rows > Tile::kWarpgroupRows ? Tile::kWarpgroups : 1)};
}

/* Clears bytes begin .. end - 1 of rows of a stage, whose 16-byte chunks are dealt to `threads` threads. */
__device__ __forceinline__ void clear_rows(uint8_t *rows, int count, int begin, int end, int thread, int threads) {
    constexpr int kChunks = kSm90StepBytes / 16;
#pragma unroll 1
    for (int i = thread; i < count * kChunks; i += threads) {
        const int row = i / kChunks, first = i % kChunks * 16, from = max(begin - first, 0), to = min(end - first, 16);
        uint8_t *chunk = rows + row * kSm90StepBytes + (i % kChunks ^ row % 8) * 16;
        if (from == 0 && to == 16) {
            *reinterpret_cast<uint4 *>(chunk) = {};
        } else {
#pragma unroll 1
            for (int byte = from; byte < to; ++byte) chunk[byte] = 0;
        }
    }
}

/* The same of rows that are lines of K, `kSm90LineRows` of them in a box: a line is 2 bytes of each. */
__device__ __forceinline__ void clear_lines(uint8_t *boxes, int count, int begin, int end, int thread, int threads) {
    const int lines = (end - begin) / 2, of_box = lines * kSm90StepBytes / 16;
#pragma unroll 1
    for (int i = thread; i < count / kSm90LineRows * of_box; i += threads) {
        uint8_t *const first = boxes + i / of_box * kSm90LinesBytes + begin / 2 * kSm90StepBytes;
        *reinterpret_cast<uint4 *>(first + i % of_box * 16) = {};
    }
}

template <bool kLines>
__device__ __forceinline__ void clear_operand(uint8_t *rows, int count, int begin, int end, int thread, int threads) {
    if constexpr (kLines)
        clear_lines(rows, count, begin, end, thread, threads);
    else
        clear_rows(rows, count, begin, end, thread, threads);
}

/* Of a step's stage, which is there, each warpgroup clears what is not the group's: its rows of A and a share of B. */
template <typename Tile>
__device__ __forceinline__ void clear_others(const StageDescriptors &stage, const Depth &depth, int step, int slot) {
    const int head = step == 0 ? depth.head : 0, tail = step + 1 == depth.steps ? depth.tail : 0;
    if (head == 0 && tail == 0) return;
    const int thread = threadIdx.x - ptx::kWarpgroup;
    uint8_t *rows_a = stage.stages + slot * Tile::kStageBytes, *rows_b = rows_a + Tile::kWarpgroups * Tile::kBytesA;
    const auto clear = [&](int begin, int end) {
        clear_operand<Tile::kMMajor>(rows_a + thread / ptx::kWarpgroup * Tile::kBytesA, Tile::kWarpgroupRows, begin,
                                     end, thread % ptx::kWarpgroup, ptx::kWarpgroup);
        clear_operand<Tile::kNMajor>(rows_b, Tile::kBlockN, begin, end, thread, depth.threads);
    };
    clear(0, head);
    if (tail > 0) clear(tail, kSm90StepBytes);
    ptx::fence_proxy_async();
    /* A warpgroup that is alone in a tile has a barrier of its own: the other may be in the next tile already. */
    ptx::named_barrier(depth.threads == ptx::kWarpgroup ? 4 : 1, depth.threads);
}

/* Waits for the stage of a step, and clears what is not the group's. */
template <typename Tile>
__device__ __forceinline__ void await_stage(Sm90Shared<Tile> &shared, const StageDescriptors &stage, const Depth &depth,
                                            int step, const RingPosition<Tile::kStages> &at) {
    ptx::mbarrier_wait_parity(&shared.full[at.slot], at.parity);
    clear_others<Tile>(stage, depth, step, at.slot);
}

/* The operands of a step that is multiplied in parts. */
template <typename Tile>
struct StepOperands {
    Sm90Shared<Tile> &shared;
    const StageDescriptors &stage;
    uint64_t a, b;

    __device__ __forceinline__ void await(const Depth &depth, int step, const RingPosition<Tile::kStages> &at) {
        await_stage(shared, stage, depth, step, at);
        a = ptx::wgmma_advance(stage.a, at.slot * Tile::kStageBytes);
        b = ptx::wgmma_advance(stage.b, at.slot * Tile::kStageBytes);
        ptx::wgmma_hold(a);
        ptx::wgmma_hold(b);
    }
};

/* Sums of one part of one step, which are then promoted; of two steps where kSums is 2. */
template <typename Math, bool kTurns, typename Tile, int kLast, int kFirst = 0, int kSums = 1>
struct PartialProducts : StepOperands<Tile> {
    using StepOperands<Tile>::stage, StepOperands<Tile>::a, StepOperands<Tile>::b;
    float sum[kSums][(kFirst > 0 ? kFirst : kLast) / 2];
    float narrow[kLast / 2]; /* of a last part with fewer columns */

    /* Those of the last part are not there at the same time as those of the first. ptxas lets one array serve both only
     * if they are as many, and two arrays only if they are not. */
    __device__ __forceinline__ auto &last() {
        if constexpr (kFirst > 0 && kLast < kFirst)
            return narrow;
        else
            return sum[0];
    }

    /* A product of a step's columns from `column` on. */
    template <int kCount>
    __device__ __forceinline__ void start(float (&to)[kCount], int column) {
        if constexpr (kTurns) await_turn<Tile>(stage.warpgroup);
        multiply_columns<Math>(to, a, b, column, false);
        if constexpr (kTurns) pass_turn<Tile>(stage.warpgroup);
    }

    __device__ __forceinline__ void start_first() { start(sum[0], 0); }
    __device__ __forceinline__ void start_last() { start(last(), kFirst); }

    /* The first step of a tile. There is nothing to add to yet: its products are made where the sums are to be, but those
     * of the last part, whose sums may still be those of the tile before. */
    __device__ __forceinline__ void start_tile(TileSums<kLast, kFirst> &sums) {
        if constexpr (kFirst > 0) start(sums.first, 0);
        start_last();
    }

    /* When those are no longer wanted. */
    __device__ __forceinline__ void finish_start(TileSums<kLast, kFirst> &sums) { clear(sums.last); }
};

/* Sums that need no promotion: each part of a step is added to its own. */
template <typename Math, typename Tile, int kLast, int kFirst>
struct PlainProducts : StepOperands<Tile> {
    using StepOperands<Tile>::a, StepOperands<Tile>::b;

    __device__ __forceinline__ void start_tile(TileSums<kLast, kFirst> &sums) {
        multiply_columns<Math>(sums.first, a, b, 0, false);
    }

    __device__ __forceinline__ void finish_start(TileSums<kLast, kFirst> &sums) {
        multiply_columns<Math>(sums.last, a, b, kFirst, false);
    }
};

/* All of K, a step at least, into promoted sums: each part of a step is summed from zero and then added. The first step
 * has been started, and the sums of the last part are zeros. Whatever else there is to do, the wait for the next stage,
 * addresses, the loop, is done while the tensor cores are busy: nothing but additions lies between a warpgroup's
 * products. */
template <typename Partial, typename Tile, int kColumns, typename Scales, typename Finish>
__device__ __forceinline__ void multiply_steps(TileSums<kColumns> &sum, Partial &partial, Sm90Shared<Tile> &shared,
                                               const Depth &depth, Scales &scales, RingPosition<Tile::kStages> &at,
                                               Finish &finish) {
    typename Scales::Step scale;
    scales.load(scale, at.slot);
    finish.prepare();
    for (int step = 1; step < depth.steps; ++step) {
        const int slot = at.slot;
        at.advance();
        partial.await(depth, step, at);
        ptx::wgmma_wait<0>();
        hand_back(shared, slot);
        promote(sum.last, partial.last(), scale.part(0));
        partial.start_last();
        scales.load(scale, at.slot);
    }
    ptx::wgmma_wait<0>();
    hand_back(shared, at.slot);
    at.advance();
    promote(sum.last, partial.last(), scale.part(0));
}

/* The same in two parts. What a warpgroup does under the products of a part, with all latencies of it, has to end before
 * they do, or the tensor cores wait: so the next stage is looked at under the first part, which has time to spare, and
 * what controls the loop is in uniform registers, where neither addresses nor descriptors take instructions to get
 * to. The sums of the first part are finished while the last products of the other one run. */
template <typename Partial, typename Tile, int kLast, int kFirst, typename Scales, typename Finish>
__device__ __forceinline__ void multiply_steps(TileSums<kLast, kFirst> &sum, Partial &partial, Sm90Shared<Tile> &shared,
                                               const Depth &depth, Scales &scales, RingPosition<Tile::kStages> &at,
                                               Finish &finish) {
    typename Scales::Step scale;
    scales.load(scale, at.slot);
    ptx::wgmma_wait<1>();
    ptx::wgmma_hold(sum.first);
    scale_first(sum.first, scale.part(0));
    finish.prepare();
    const int steps = ptx::uniform(depth.steps), cut_step = ptx::uniform(depth.tail > 0 ? depth.steps - 1 : 0);
    at = {ptx::uniform(at.slot), ptx::uniform(at.parity)};
    const uint64_t first_a = ptx::wgmma_uniform(partial.stage.a), first_b = ptx::wgmma_uniform(partial.stage.b);
    struct {
        uint64_t a, b;
        bool full; /* its stage */
    } next;
    const auto look_ahead = [&] {
        RingPosition<Tile::kStages> to = at;
        to.advance();
        next.full = ptx::mbarrier_test_parity(&shared.full[to.slot], to.parity);
        next.a = ptx::wgmma_advance(first_a, to.slot * Tile::kStageBytes);
        next.b = ptx::wgmma_advance(first_b, to.slot * Tile::kStageBytes);
    };
    look_ahead();
    for (int step = 1; step < steps; ++step) {
        const int slot = at.slot;
        at.advance();
        if (!next.full) ptx::mbarrier_wait_parity(&shared.full[at.slot], at.parity);
        if (step == cut_step) clear_others<Tile>(partial.stage, depth, step, at.slot);
        partial.a = next.a;
        partial.b = next.b;
        ptx::wgmma_wait<0>();
        promote(sum.last, partial.last(), scale.part(1));
        partial.start_first();
        hand_back(shared, slot);
        scales.load(scale, at.slot);
        look_ahead();
        ptx::wgmma_wait<0>();
        promote(sum.first, partial.sum[0], scale.part(0));
        partial.start_last();
    }
    finish.fill(sum.first, 0);
    ptx::wgmma_wait<0>();
    hand_back(shared, at.slot);
    at.advance();
    promote(sum.last, partial.last(), scale.part(1));
    finish.send(sum.first, 0);
}

/* The same where there are registers for the partial sums of two steps: while one is added the next is multiplied, so
 * that tensor cores have work whatever the other warpgroup does. */
template <typename Math, typename Tile, int kColumns, typename Scales, typename Finish>
__device__ __forceinline__ void multiply_steps(TileSums<kColumns> &sum,
                                               PartialProducts<Math, false, Tile, kColumns, 0, 2> &partial,
                                               Sm90Shared<Tile> &shared, const Depth &depth, Scales &scales,
                                               RingPosition<Tile::kStages> &at, Finish &finish) {
    finish.prepare();
    RingPosition<Tile::kStages> ahead = at;
    const auto start = [&](int step, int i) {
        ahead.advance();
        partial.await(depth, step, ahead);
        partial.start(partial.sum[i], 0);
    };
    const auto add = [&](int i) { /* which has been waited for */
                                  typename Scales::Step scale;
                                  scales.load(scale, at.slot);
                                  hand_back(shared, at.slot);
                                  at.advance();
                                  promote(sum.last, partial.sum[i], scale.part(0));
    };
    int step = 1;
    for (; step + 1 < depth.steps; step += 2) {
        start(step, 1);
        ptx::wgmma_wait<1>();
        add(0);
        start(step + 1, 0);
        ptx::wgmma_wait<1>();
        add(1);
    }
    if (step < depth.steps) {
        start(step, 1);
        ptx::wgmma_wait<1>();
        add(0);
        ptx::wgmma_wait<0>();
        add(1);
    } else {
        ptx::wgmma_wait<0>();
        add(0);
    }
}

/* The same with a partial sum of `steps` steps, at most a ring of stages. */
template <typename Math, typename Tile, int kCount>
__device__ __forceinline__ void multiply_seldom_promoted(float (&sum)[kCount], Sm90Shared<Tile> &shared,
                                                         const StageDescriptors &stage, const Depth &depth, int steps,
                                                         RingPosition<Tile::kStages> &at) {
    clear(sum);
    for (int first = 0; first < depth.steps; first += steps) {
        float partial[kCount];
        clear(partial);
        RingPosition<Tile::kStages> back = at;
        const int end = min(first + steps, depth.steps);
        for (int step = first; step < end; ++step, at.advance()) {
            await_stage(shared, stage, depth, step, at);
            multiply_columns<Math>(partial, ptx::wgmma_advance(stage.a, at.slot * Tile::kStageBytes),
                                   ptx::wgmma_advance(stage.b, at.slot * Tile::kStageBytes), 0, true);
        }
        ptx::wgmma_wait<0>();
        for (int step = first; step < end; ++step, back.advance()) hand_back(shared, back.slot);
        promote(sum, partial, NoScales::Step{});
    }
}

/* All of K into sums that need no promotion. */
template <typename Math, typename Tile, int kCount>
__device__ __forceinline__ void multiply_plain(float (&sum)[kCount], Sm90Shared<Tile> &shared,
                                               const StageDescriptors &stage, const Depth &depth,
                                               RingPosition<Tile::kStages> &at) {
    clear(sum);
    int before = 0; /* the slot of the step before */
    for (int step = 0; step < depth.steps; ++step, before = at.slot, at.advance()) {
        await_stage(shared, stage, depth, step, at);
        multiply_columns<Math>(sum, ptx::wgmma_advance(stage.a, at.slot * Tile::kStageBytes),
                               ptx::wgmma_advance(stage.b, at.slot * Tile::kStageBytes), 0, true);
        if (step > 0) {
            ptx::wgmma_wait<1>();
            hand_back(shared, before);
        }
    }
    ptx::wgmma_wait<0>();
    if (depth.steps > 0) hand_back(shared, before);
}

/* The same in two parts. The first step has been started. The sums of the first part are finished while the last products
 * of the other one run. */
template <typename Math, typename Tile, int kLast, int kFirst, typename Scales, typename Finish>
__device__ __forceinline__ void multiply_steps(TileSums<kLast, kFirst> &sum,
                                               PlainProducts<Math, Tile, kLast, kFirst> &products,
                                               Sm90Shared<Tile> &shared, const Depth &depth, Scales &,
                                               RingPosition<Tile::kStages> &at, Finish &finish) {
    finish.prepare();
    for (int step = 1; step < depth.steps; ++step) {
        const int slot = at.slot;
        at.advance();
        products.await(depth, step, at);
        multiply_columns<Math>(sum.first, products.a, products.b, 0, true);
        multiply_columns<Math>(sum.last, products.a, products.b, kFirst, true);
        ptx::wgmma_wait<2>();
        hand_back(shared, slot);
    }
    ptx::wgmma_wait<1>();
    ptx::wgmma_hold(sum.first);
    finish.fill(sum.first, 0);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(sum.last);
    hand_back(shared, at.slot);
    at.advance();
    finish.send(sum.first, 0);
}

/* All of K of one tile, in turns where the tile takes them; every stage is waited for and handed back in order. */
template <typename Math, typename Tile, int kColumns, typename Scales>
__device__ __forceinline__ void multiply_tile(TileSums<kColumns> &sum, Sm90Shared<Tile> &shared,
                                              const StageDescriptors &stage, const Depth &depth, Scales &scales,
                                              RingPosition<Tile::kStages> &at) {
    if constexpr (Math::kPromote) {
        if (depth.steps == 0) return clear(sum.last);
        PartialProducts<Math, Tile::takes_turns(kColumns), Tile, kColumns> partial = {{shared, stage}};
        partial.await(depth, 0, at);
        partial.start_tile(sum);
        partial.finish_start(sum);
        struct {
            __device__ void prepare() {}
        } finish;
        multiply_steps(sum, partial, shared, depth, scales, at, finish);
    } else {
        multiply_plain<Math>(sum.last, shared, stage, depth, at);
    }
    ptx::wgmma_hold(sum.last);
}

/* Stands in for multiply_tile where a warpgroup has no rows. */
template <typename Tile>
__device__ __forceinline__ void skip_tile(Sm90Shared<Tile> &shared, const StageDescriptors &stage, const Depth &depth,
                                          RingPosition<Tile::kStages> &at, int turns_per_step = 0) {
    for (int step = 0; step < depth.steps; ++step, at.advance()) {
        ptx::mbarrier_wait_parity(&shared.full[at.slot], at.parity);
        if constexpr (Tile::kWarpgroups == 2)
            for (int turn = 0; turn < turns_per_step; ++turn) {
                await_turn<Tile>(stage.warpgroup);
                pass_turn<Tile>(stage.warpgroup);
            }
        if constexpr (Tile::kScaleThreads > 0) leave_scales(shared, at.slot);
        __syncwarp();
        hand_back(shared, at.slot);
    }
}

}  // namespace flexgemm
