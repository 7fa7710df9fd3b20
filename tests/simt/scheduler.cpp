#include "scheduler.h"

#include <sys/mman.h>

#include "async.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace simt {

Thread *self;
State state;

namespace {

/* ---- fibers ---- */

constexpr size_t kStackBytes = 256 << 10;
#ifndef __x86_64__
#error "the switch between fibers is written for x86-64"
#endif
extern "C" void simt_switch(void **save, void *load);
asm(R"(
.text
.local simt_switch
.type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

void *launcher; /* its stack pointer */

char *stack_of(size_t index) {
    static std::vector<char *> stacks;
    while (stacks.size() <= index) {
        void *memory =
            mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) abort();
        mprotect(memory, 4096, PROT_NONE);
        stacks.push_back(static_cast<char *>(memory));
    }
    /* Tops at different places of their pages: the same one would fill one set of the cache. */
    return stacks[index] + kStackBytes - index % 32 * 448 - 64;
}

/* ---- who runs next ---- */

/* The warp that runs goes on while it can, or only if it has the highest priority. */
Thread *pick(bool anew = false) {
    if (anew || state.warp->runnable == 0) {
        if (state.cluster->random(16) == 0) redraw(*state.warp);
        if (state.cluster->timing != Timing::kLazy && state.cluster->random(4) == 0) land(*state.cluster);
        Warp *best = nullptr;
        do {
            for (Block *block : state.cluster->blocks)
                for (Warp &warp : block->warps)
                    if (warp.runnable && (best == nullptr || warp.priority > best->priority)) best = &warp;
        } while (best == nullptr && land(*state.cluster));
        if (best == nullptr) {
            state.deadlock = state.cluster->live > 0;
            return nullptr;
        }
        state.warp = best;
    }
    Warp &warp = *state.warp;
    const int lane = warp.downwards ? 31 - __builtin_clz(warp.runnable) : __builtin_ctz(warp.runnable);
    warp.runnable &= ~(1u << lane);
    return warp.threads[lane];
}

/* Makes a thread, or NULL the launcher, the one that runs; the stack to switch to. */
void *resume(Thread *thread) {
    self = thread;
    if (thread == nullptr) return launcher;
    threadIdx = thread->place;
    blockIdx = thread->in->index;
    return thread->stack_pointer;
}

void switch_from(Thread &thread) {
    Thread *next = pick();
    if (next != &thread) simt_switch(&thread.stack_pointer, resume(next));
}

/* ---- the life of a thread ---- */

void complete_collectives(Warp &warp);

void finish_block_barrier(Block &block) {
    Barrier &barrier = block.barriers[0];
    if (barrier.arrived == 0 || barrier.arrived < block.live) return;
    barrier.arrived = 0;
    wake_all(barrier.waiting);
}

void finish_cluster_barrier() {
    if (state.cluster->arrived == 0 || state.cluster->arrived < state.cluster->live) return;
    state.cluster->arrived = 0;
    ++state.cluster->met;
    wake_all(state.cluster->waiting);
}

void thread_main() {
    (*state.body)();
    Thread &thread = current();
    check_exit(thread);
    thread.warp->exited |= 1u << thread.lane;
    --thread.in->live;
    --state.cluster->live;
    complete_collectives(*thread.warp);
    finish_block_barrier(*thread.in);
    finish_cluster_barrier();
    void *nowhere;
    simt_switch(&nowhere, resume(pick()));
}

/* ---- collectives ---- */

/* Ends the collective that `lane` waits in, if everybody is there. */
bool complete_collective(Warp &warp, int lane) {
    const Thread &first = *warp.threads[lane];
    const uint32_t needed = first.mask & ~warp.exited;
    if ((warp.collecting & needed) != needed) return false;
    void *items[32] = {};
    for (uint32_t left = needed; left; left &= left - 1) {
        const int i = __builtin_ctz(left);
        const Thread &thread = *warp.threads[i];
        if (thread.combine != first.combine || thread.how != first.how || thread.mask != first.mask) return false;
        items[i] = thread.item;
    }
    warp.collecting &= ~needed;
    warp.runnable |= needed;
    first.combine(items, first.how);
    return true;
}

void complete_collectives(Warp &warp) {
    for (uint32_t left = warp.collecting; left; left &= left - 1)
        if (complete_collective(warp, __builtin_ctz(left))) return complete_collectives(warp);
}

}  // namespace

/* ---- what the other files call ---- */

uint32_t Cluster::random(uint32_t limit) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>((random_state >> 33) * limit >> 31);
}

void redraw(Warp &warp) {
    warp.priority = state.cluster->random(1u << 30);
    warp.downwards = state.cluster->random(2);
}

void start(Thread &thread, size_t stack_index) {
    void **stack = reinterpret_cast<void **>(stack_of(stack_index));
    *--stack = nullptr;
    *--stack = reinterpret_cast<void *>(thread_main);
    for (int i = 0; i < 6; ++i) *--stack = nullptr;
    thread.stack_pointer = stack;
}

void run_threads() {
    simt_switch(&launcher, resume(pick()));
    self = nullptr;
}

void leave() {
    void *nowhere;
    simt_switch(&nowhere, launcher);
    abort();
}

void wait(const char *format, unsigned long long a, unsigned long long b) {
    Thread &thread = current();
    thread.waits_for = format;
    thread.number[0] = a;
    thread.number[1] = b;
    switch_from(thread);
}

void wake(Thread *thread) { thread->warp->runnable |= 1u << thread->lane; }

void wake_all(std::vector<Thread *> &threads) {
    for (Thread *thread : threads) wake(thread);
    threads.clear();
}

void yield_to_others() {
    Thread &thread = current();
    wake(&thread);
    Thread *next = pick(true);
    if (next != &thread) simt_switch(&thread.stack_pointer, resume(next));
}

void warp_collective(uint32_t mask, Combine combine, void *item, const void *how) {
    warp_collective_at(__builtin_return_address(0), mask, combine, item, how);
}

void warp_collective_at(const void *where, uint32_t mask, Combine combine, void *item, const void *how) {
    Thread &thread = current();
    thread.where = where;
    if (!(mask >> thread.lane & 1)) fail("a lane that its own mask 0x%08x leaves out", mask);
    thread.mask = mask;
    thread.combine = combine;
    thread.item = item;
    thread.how = how;
    Warp &warp = *thread.warp;
    warp.collecting |= 1u << thread.lane;
    if (complete_collective(warp, thread.lane)) {
        warp.runnable &= ~(1u << thread.lane);
        return;
    }
    wait("the other lanes of its warp");
}

void block_barrier() {
    SIMT_HERE;
    named_barrier(0, 0);
}

/* `threads` 0: all that live. */
void named_barrier(uint32_t id, uint32_t threads) {
    Thread &thread = current();
    Block &block = *thread.in;
    if (id > 15) fail("barrier %u: there are 16", id);
    if (threads % 32) fail("barrier %u of %u threads: expected a multiple of 32", id, threads);
    if (threads == block.threads.size() && id == 0) threads = 0;
    Barrier &barrier = block.barriers[id];
    if (barrier.arrived > 0 && barrier.expected != threads)
        fail("barrier %u: %u threads expected here, %u where others wait", id, threads, barrier.expected);
    barrier.expected = threads;
    ++barrier.arrived;
    barrier.waiting.push_back(&thread);
    if (threads == 0) {
        finish_block_barrier(block);
    } else if (barrier.arrived == threads) {
        barrier.arrived = 0;
        wake_all(barrier.waiting);
    }
    wait("barrier %llu of %llu threads", id, threads ? threads : block.live);
}

void named_barrier_arrive(uint32_t id, uint32_t threads) {
    if (id > 15) fail("barrier %u: there are 16", id);
    if (threads == 0 || threads % 32) fail("barrier %u of %u threads: expected a multiple of 32", id, threads);
    Barrier &barrier = current().in->barriers[id];
    if (barrier.arrived > 0 && barrier.expected != threads)
        fail("barrier %u: %u threads expected here, %u where others wait", id, threads, barrier.expected);
    barrier.expected = threads;
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        wake_all(barrier.waiting);
    }
}

void cluster_arrive() {
    current().meeting = state.cluster->met;
    ++state.cluster->arrived;
    finish_cluster_barrier();
}

void cluster_wait() {
    if (state.cluster->met != current().meeting) return;
    state.cluster->waiting.push_back(&current());
    wait("the barrier of the cluster");
}

}  // namespace simt
