#include "scheduler.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

#include "async.h"
#include "mma.h"
#include "runtime.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace simt {

Thread *self;

namespace {

/* ---- fibers ---- */

constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kSharedBytes = 227 << 10, kStaticBytes = 48 << 10;
constexpr uint32_t kReserved = 1024; /* bytes of shared memory that the system keeps, in front */

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

std::mutex one_launch; /* all below belongs to the launch that runs */
void *launcher;        /* its stack pointer */
const Config *config;
const Body *body;
Cluster *cluster;
Warp *running;
std::string failure;
const void *failure_where;
bool deadlock;

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

[[noreturn]] void leave() {
    void *nowhere;
    simt_switch(&nowhere, launcher);
    abort();
}

/* ---- who runs next ---- */

void redraw(Warp &warp) {
    warp.priority = cluster->random(1u << 30);
    warp.downwards = cluster->random(2);
}

Thread *pick() {
    if (running->runnable == 0) {
        if (cluster->random(16) == 0) redraw(*running);
        if (cluster->timing != Timing::kLazy && cluster->random(4) == 0) land(*cluster);
        Warp *best = nullptr;
        do {
            for (Block *block : cluster->blocks)
                for (Warp &warp : block->warps)
                    if (warp.runnable && (best == nullptr || warp.priority > best->priority)) best = &warp;
        } while (best == nullptr && land(*cluster));
        if (best == nullptr) {
            deadlock = cluster->live > 0;
            return nullptr;
        }
        running = best;
    }
    Warp &warp = *running;
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
    for (Thread *thread : barrier.waiting) thread->result = barrier.predicates;
    barrier.arrived = 0;
    barrier.predicates = 0;
    wake_all(barrier.waiting);
}

void finish_cluster_barrier() {
    if (cluster->arrived == 0 || cluster->arrived < cluster->live) return;
    cluster->arrived = 0;
    wake_all(cluster->waiting);
}

void thread_main() {
    (*body)();
    Thread &thread = current();
    check_exit(thread);
    thread.warp->exited |= 1u << thread.lane;
    --thread.in->live;
    --cluster->live;
    complete_collectives(*thread.warp);
    finish_block_barrier(*thread.in);
    finish_cluster_barrier();
    void *nowhere;
    simt_switch(&nowhere, resume(pick()));
}

void start(Thread &thread, char *top) {
    void **stack = reinterpret_cast<void **>(top);
    *--stack = nullptr;
    *--stack = reinterpret_cast<void *>(thread_main);
    for (int i = 0; i < 6; ++i) *--stack = nullptr;
    thread.stack_pointer = stack;
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

/* ---- memory of a block ---- */

/* Ends at a page that nobody may touch: what is written past dynamic shared memory is noticed at once. */
char *shared_region_end(uint32_t rank) {
    constexpr size_t kBytes = 256 << 10;
    static std::vector<char *> ends;
    while (ends.size() <= rank) {
        void *memory = mmap(nullptr, 2 * kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) abort();
        ends.push_back(static_cast<char *>(memory) + kBytes);
        mprotect(ends.back(), kBytes, PROT_NONE);
    }
    return ends[rank];
}

/* Static shared memory in front of dynamic, both uninitialised: all ones is NaN in every type. */
void lay_out_shared(Block &block) {
    static std::vector<std::unique_ptr<char[]>> statics;
    while (statics.size() <= block.rank) statics.push_back(std::make_unique<char[]>(kStaticBytes));
    block.dynamic_bytes = static_cast<uint32_t>(config->shared_bytes + 15) / 16 * 16;
    block.dynamic_data = shared_region_end(block.rank) - block.dynamic_bytes;
    block.dynamic = 0;
    std::memset(block.dynamic_data, 0xff, block.dynamic_bytes);
    block.static_data = statics[block.rank].get();
    block.statics = (block.dynamic_bytes + 3 * kReserved) / kReserved * kReserved;
    block.static_bytes = 0;
    block.variables.clear();
    block.written.clear();
}

/* ---- errors ---- */

/* What addr2line says about an address: lines. */
std::vector<std::string> symbolise(const char *options, const void *address) {
    Dl_info info;
    std::vector<std::string> lines;
    if (address == nullptr || !dladdr(address, &info) || !info.dli_fname) return lines;
    char text[4096];
    const size_t offset = static_cast<const char *>(address) - static_cast<const char *>(info.dli_fbase);
    std::snprintf(text, sizeof text, "addr2line %s -e '%s' 0x%zx 2>/dev/null", options, info.dli_fname, offset);
    FILE *pipe = popen(text, "r");
    if (pipe == nullptr) return lines;
    while (std::fgets(text, sizeof text, pipe)) lines.emplace_back(text, std::strcspn(text, "\n"));
    pclose(pipe);
    return lines;
}

/* Without what surrounds it: "void (anonymous namespace)::kernel<16>(Arguments)" is kernel<16>. */
std::string kernel_name() {
    const std::vector<std::string> lines = symbolise("-f -C", config->function);
    std::string name = lines.empty() ? config->name : lines[0];
    for (const std::string noise : {"(anonymous namespace)::", "flexgemm::", "void "})
        for (size_t at; (at = name.find(noise)) != std::string::npos;) name.erase(at, noise.size());
    const size_t end = name.find(">(");
    return end == std::string::npos ? name.substr(0, name.find('(')) : name.substr(0, end + 1);
}

/* The line of the kernel that a return address belongs to, and those it was inlined into. */
std::string source_line(const void *address) {
    static std::map<const void *, std::string> known;
    if (known.count(address)) return known[address];
    std::string result;
    for (const std::string &line : symbolise("-i", static_cast<const char *>(address) - 1)) {
        const size_t begin = std::min(line.find("kernels/cuda/"), line.find("tests/simt/faults.cu"));
        if (begin == std::string::npos) continue;
        if (!result.empty()) result += " < ";
        result += line.substr(begin, line.find(' ', begin) - begin);
    }
    return known[address] = result.empty() ? "somewhere" : result;
}

std::string lanes_text(uint32_t lanes) {
    char text[32];
    std::snprintf(text, sizeof text, lanes == ~0u ? "all lanes" : "lanes %08x", lanes);
    return text;
}

std::string waits_for(const Thread &thread) {
    char text[256];
    std::snprintf(text, sizeof text, thread.waits_for, thread.number[0], thread.number[1]);
    if (thread.waits_for != kWaitsForMBarrier) return text;
    const MBarrier &barrier = thread.in->mbarriers[static_cast<uint32_t>(thread.number[0])];
    return text + (", which misses " + std::to_string(barrier.pending)) + " arrivals and " +
           std::to_string(barrier.bytes) + " bytes";
}

std::string deadlock_report() {
    std::string report = "deadlock: no thread can go on";
    for (Block *block : cluster->blocks)
        for (Warp &warp : block->warps) {
            std::map<std::string, uint32_t> waits;
            for (int lane = 0; lane < 32; ++lane)
                if (!(warp.exited >> lane & 1)) {
                    Thread &thread = *warp.threads[lane];
                    waits[waits_for(thread) + " at " + source_line(thread.where)] |= 1u << lane;
                }
            for (const auto &[text, lanes] : waits)
                report += "\n  block " + std::to_string(block->index.x) + " warp " + std::to_string(warp.index) + ", " +
                          lanes_text(lanes) + ": " + text;
        }
    return report;
}

std::string failure_report() {
    const uint3 block = cluster->blocks[0]->index;
    char place[64];
    std::snprintf(place, sizeof place, ", block (%u, %u, %u): ", block.x, block.y, block.z);
    if (deadlock) return kernel_name() + place + deadlock_report();
    std::string text = kernel_name() + place + failure;
    if (failure_where) text += " at " + source_line(failure_where);
    return text;
}

/* A fault of the memory system while a fiber runs is an error of the kernel. */
void on_fault(int, siginfo_t *info, void *context) {
    static char text[256];
    const auto *state = static_cast<ucontext_t *>(context);
    const void *instruction = reinterpret_cast<void *>(state->uc_mcontext.gregs[REG_RIP] + 1);
    const auto touched = static_cast<char *>(info->si_addr);
    if (self == nullptr) { /* the host's own fault: let it have it */
        signal(SIGSEGV, SIG_DFL);
        return;
    }
    const char *kind = "memory";
    for (Block *block : cluster->blocks)
        if (touched >= block->dynamic_data && touched < block->dynamic_data + (256 << 10)) kind = "shared memory";
    const std::string nearest = describe_memory(touched);
    std::snprintf(text, sizeof text, "access out of bounds of %s, %p%s%s", kind, static_cast<void *>(touched),
                  nearest.empty() ? "" : ": ", nearest.c_str());
    failure = text;
    failure_where = instruction;
    leave();
}

class FaultGuard {
public:
    FaultGuard() {
        static char stack[64 << 10];
        stack_t own = {};
        own.ss_sp = stack;
        own.ss_size = sizeof stack;
        sigaltstack(&own, &previous_stack_);
        struct sigaction action = {};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigaction(SIGSEGV, &action, &previous_segv_);
        sigaction(SIGBUS, &action, &previous_bus_);
    }
    ~FaultGuard() {
        sigaction(SIGSEGV, &previous_segv_, nullptr);
        sigaction(SIGBUS, &previous_bus_, nullptr);
        sigaltstack(&previous_stack_, nullptr);
    }

private:
    stack_t previous_stack_;
    struct sigaction previous_segv_, previous_bus_;
};

/* ---- one cluster ---- */

uint64_t mixed(uint64_t x) { /* the finaliser of SplitMix64 */
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

uint64_t seed_of_environment() {
    const char *text = std::getenv("FLEXGEMM_SIMT_SEED");
    return text ? std::strtoull(text, nullptr, 0) : 0;
}

Timing timing_of_environment(Timing otherwise) {
    const char *text = std::getenv("FLEXGEMM_SIMT_TIMING");
    if (text == nullptr) return otherwise;
    return *text == 'e' ? Timing::kEager : *text == 'l' ? Timing::kLazy : Timing::kMixed;
}

struct Run { /* of a cluster; kept from one to the next, since blocks are many and alike */
    Cluster cluster;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<std::unique_ptr<WgmmaQueue>> queues;
};

void prepare_block(Run &run, size_t rank, uint3 index) {
    const dim3 size = config->block;
    const size_t count = size_t{size.x} * size.y * size.z, warps = (count + 31) / 32;
    while (run.blocks.size() <= rank) run.blocks.push_back(std::make_unique<Block>());
    while (run.threads.size() < (rank + 1) * count) run.threads.push_back(std::make_unique<Thread>());
    while (run.queues.size() < (rank + 1) * warps) run.queues.push_back(std::make_unique<WgmmaQueue>());
    Block &block = *run.blocks[rank];
    block.in = &run.cluster;
    block.index = index;
    block.rank = static_cast<uint32_t>(rank);
    block.live = count;
    block.threads.resize(count);
    block.warps.resize(warps);
    block.mbarriers.clear();
    for (Barrier &barrier : block.barriers) barrier = {};
    lay_out_shared(block);
    for (size_t i = 0; i < warps; ++i) {
        Warp &warp = block.warps[i];
        warp.in = &block;
        warp.index = static_cast<int>(i);
        warp.runnable = warp.collecting = 0;
        warp.exited = ~0u;
        warp.wgmma = run.queues[rank * warps + i].get();
        *warp.wgmma = {};
        redraw(warp);
    }
    for (size_t i = 0; i < count; ++i) {
        Thread &thread = *run.threads[rank * count + i];
        block.threads[i] = &thread;
        thread.place = {static_cast<unsigned int>(i % size.x), static_cast<unsigned int>(i / size.x % size.y),
                        static_cast<unsigned int>(i / size.x / size.y)};
        thread.in = &block;
        thread.warp = &block.warps[i / 32];
        thread.lane = static_cast<int>(i % 32);
        thread.index = static_cast<int>(i);
        thread.copies.clear();
        thread.fenced = 0;
        thread.warp->threads[i % 32] = &thread;
        thread.warp->exited &= ~(1u << i % 32);
        thread.warp->runnable |= 1u << i % 32;
        start(thread, stack_of(rank * count + i));
    }
    run.cluster.live += count;
}

bool run_cluster(uint64_t first) {
    static Run run;
    cluster = &run.cluster;
    cluster->random_state = mixed(seed_of_environment() ^ mixed(first ^ mixed(config->grid.x)));
    constexpr Timing kTimings[] = {Timing::kLazy, Timing::kLazy, Timing::kEager, Timing::kMixed};
    cluster->timing = timing_of_environment(kTimings[cluster->random(4)]);
    cluster->blocks.clear();
    cluster->pending.clear();
    cluster->arriving.clear();
    cluster->waiting.clear();
    cluster->arrived = 0;
    cluster->live = 0;
    cluster->clock = 0;
    const dim3 grid = config->grid;
    for (uint32_t rank = 0; rank < config->cluster; ++rank) {
        const uint64_t index = first + rank;
        prepare_block(run, rank,
                      {static_cast<unsigned int>(index % grid.x), static_cast<unsigned int>(index / grid.x % grid.y),
                       static_cast<unsigned int>(index / grid.x / grid.y)});
        cluster->blocks.push_back(run.blocks[rank].get());
    }
    running = &cluster->blocks[0]->warps[0];
    blockDim = config->block;
    gridDim = grid;
    simt_switch(&launcher, resume(pick()));
    self = nullptr;
    return !deadlock && failure.empty();
}

}  // namespace

/* ---- what the other files call ---- */

uint32_t Cluster::random(uint32_t limit) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>((random_state >> 33) * limit >> 31);
}

void fail(const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    failure = text;
    if (self) {
        const Thread &thread = current();
        failure += " (thread " + std::to_string(thread.index) + ")";
        failure_where = thread.where;
    }
    leave();
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

void yield() {
    wake(&current());
    redraw(*running);
    wait("its turn");
}

/* After something that others may wait for. */
void yield_to_others() {
    if (cluster->random(2)) yield();
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

uint64_t block_barrier(int predicate) {
    SIMT_HERE;
    return named_barrier(0, 0, predicate, true);
}

/* `threads` 0: all that live. */
uint64_t named_barrier(uint32_t id, uint32_t threads, int predicate, bool wait_for_it) {
    Thread &thread = current();
    Block &block = *thread.in;
    if (id > 15) fail("barrier %u: there are 16", id);
    if (threads % 32) fail("barrier %u of %u threads: expected a multiple of 32", id, threads);
    if (threads == block.threads.size() && id == 0) threads = 0;
    Barrier &barrier = block.barriers[id];
    if (barrier.arrived > 0 && barrier.expected != threads)
        fail("barrier %u: %u threads expected here, %u where others wait", id, threads, barrier.expected);
    barrier.expected = threads;
    barrier.predicates += predicate != 0;
    ++barrier.arrived;
    if (wait_for_it) barrier.waiting.push_back(&thread);
    if (threads == 0) {
        finish_block_barrier(block);
    } else if (barrier.arrived == threads) {
        for (Thread *waiting : barrier.waiting) waiting->result = barrier.predicates;
        barrier.arrived = 0;
        barrier.predicates = 0;
        wake_all(barrier.waiting);
    }
    if (wait_for_it) wait("barrier %llu of %llu threads", id, threads ? threads : block.live);
    return thread.result;
}

void cluster_arrive() { ++cluster->arrived; }

void cluster_wait() {
    cluster->waiting.push_back(&current());
    finish_cluster_barrier();
    wait("the barrier of the cluster");
}

/* ---- shared memory ---- */

void *dynamic_shared(size_t alignment) {
    SIMT_HERE;
    Block &block = *current().in;
    /* Aligned as declared and no further. */
    const auto unit = static_cast<uint32_t>(alignment < 16 ? 16 : alignment);
    const uint32_t address = kReserved + (unit < kReserved ? unit : 0);
    if (block.dynamic != 0 && block.dynamic != address) fail("dynamic shared memory declared with two alignments");
    block.dynamic = address;
    return block.dynamic_data;
}

void *static_shared(const void *key, size_t bytes, size_t alignment) {
    SIMT_HERE;
    Block &block = *current().in;
    for (const Variable &variable : block.variables)
        if (variable.key == key) return block.static_data + (variable.address - block.statics);
    const uint32_t unit = static_cast<uint32_t>(alignment), offset = (block.static_bytes + unit - 1) / unit * unit;
    block.static_bytes = offset + static_cast<uint32_t>(bytes);
    if (block.static_bytes > kStaticBytes || block.static_bytes + block.dynamic_bytes > kSharedBytes)
        fail("%u bytes of static and %u of dynamic shared memory", block.static_bytes, block.dynamic_bytes);
    block.variables.push_back({key, block.statics + offset});
    std::memset(block.static_data + offset, 0xff, bytes);
    return block.static_data + offset;
}

char *Block::at(uint32_t address, size_t bytes) {
    if (dynamic && address >= dynamic && address + bytes <= dynamic + dynamic_bytes)
        return dynamic_data + (address - dynamic);
    if (address >= statics && address + bytes <= statics + static_bytes) return static_data + (address - statics);
    fail("shared memory at 0x%x: %zu bytes there are not the block's", address, bytes);
}

uint32_t Block::address_of(const void *pointer) const {
    const auto byte = static_cast<const char *>(pointer);
    if (byte >= dynamic_data && byte <= dynamic_data + dynamic_bytes)
        return dynamic + static_cast<uint32_t>(byte - dynamic_data);
    if (byte >= static_data && byte < static_data + static_bytes)
        return statics + static_cast<uint32_t>(byte - static_data);
    return 0;
}

uint32_t shared_address(const void *pointer) {
    SIMT_HERE;
    const uint32_t address = current().in->address_of(pointer);
    if (address == 0) fail("%p is not in the shared memory of the block", pointer);
    return address;
}

/* ---- launch ---- */

cudaError_t launch(const Config &given, const Body &kernel) {
    const dim3 grid = given.grid, block = given.block;
    const uint64_t threads = uint64_t{block.x} * block.y * block.z, blocks = uint64_t{grid.x} * grid.y * grid.z;
    if (threads == 0 || threads > 1024 || block.z > 64 || blocks == 0 || grid.x > INT32_MAX || grid.y > 65535 ||
        grid.z > 65535 || grid.x % given.cluster || given.cluster > 8)
        return set_error(cudaErrorInvalidConfiguration, "");
    if (given.shared_bytes > dynamic_shared_limit(given.function)) return set_error(cudaErrorInvalidValue, "");

    const std::lock_guard<std::mutex> guard(one_launch);
    const FaultGuard faults;
    config = &given;
    body = &kernel;
    failure.clear();
    failure_where = nullptr;
    deadlock = false;
    /* Blocks may come in any order. */
    const uint64_t clusters = blocks / given.cluster;
    const bool backwards = mixed(seed_of_environment() + clusters) & 1;
    for (uint64_t i = 0; i < clusters; ++i)
        if (!run_cluster((backwards ? clusters - 1 - i : i) * given.cluster))
            return set_error(cudaErrorLaunchFailure, failure_report());
    return cudaSuccess;
}

Config config_of(const cudaLaunchConfig_t &launch) {
    Config result = {"cudaLaunchKernelEx", launch.gridDim, launch.blockDim, launch.dynamicSmemBytes, 1, nullptr};
    for (unsigned int i = 0; i < launch.numAttrs; ++i)
        if (launch.attrs[i].id == cudaLaunchAttributeClusterDimension)
            result.cluster = launch.attrs[i].val.clusterDim.x;
    return result;
}

}  // namespace simt
