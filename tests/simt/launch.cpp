/*
 * Launches: the blocks of a grid one after another, those of a cluster together.
 */
#include <cstdlib>
#include <memory>
#include <mutex>

#include "async.h"
#include "mma.h"
#include "report.h"
#include "runtime.h"
#include "scheduler.h"

namespace simt {
namespace {

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
    const dim3 size = state.config->block;
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
        thread.stores.clear();
        thread.fenced = 0;
        thread.ordered = !state.config->early;
        thread.warp->threads[i % 32] = &thread;
        thread.warp->exited &= ~(1u << i % 32);
        thread.warp->runnable |= 1u << i % 32;
        start(thread, rank * count + i);
    }
    run.cluster.live += count;
}

bool run_cluster(uint64_t first) {
    static Run run;
    state.cluster = &run.cluster;
    Cluster *const cluster = state.cluster;
    cluster->random_state = mixed(seed_of_environment() ^ mixed(first ^ mixed(state.config->grid.x)));
    constexpr Timing kTimings[] = {Timing::kLazy, Timing::kLazy, Timing::kEager, Timing::kMixed};
    cluster->timing = timing_of_environment(kTimings[cluster->random(4)]);
    cluster->blocks.clear();
    cluster->pending.clear();
    cluster->stores.clear();
    cluster->arriving.clear();
    cluster->waiting.clear();
    cluster->arrived = 0;
    cluster->met = 0;
    cluster->live = 0;
    cluster->clock = 0;
    const dim3 grid = state.config->grid;
    for (uint32_t rank = 0; rank < state.config->cluster; ++rank) {
        const uint64_t index = first + rank;
        prepare_block(run, rank,
                      {static_cast<unsigned int>(index % grid.x), static_cast<unsigned int>(index / grid.x % grid.y),
                       static_cast<unsigned int>(index / grid.x / grid.y)});
        cluster->blocks.push_back(run.blocks[rank].get());
    }
    state.warp = &cluster->blocks[0]->warps[0];
    blockDim = state.config->block;
    gridDim = grid;
    run_threads();
    return !state.deadlock && state.failure.empty();
}

}  // namespace

static cudaError_t run(const Config &given, const Body &kernel) {
    const uint64_t blocks = uint64_t{given.grid.x} * given.grid.y * given.grid.z;
    const std::lock_guard<std::mutex> guard(one_launch);
    const FaultGuard faults;
    const OnlyThisDevice device;
    state = {};
    state.config = &given;
    state.body = &kernel;
    /* Blocks may come in any order. */
    const uint64_t clusters = blocks / given.cluster;
    const bool backwards = mixed(seed_of_environment() + clusters) & 1;
    for (uint64_t i = 0; i < clusters; ++i)
        if (!run_cluster((backwards ? clusters - 1 - i : i) * given.cluster))
            return set_error(cudaErrorLaunchFailure, failure_report());
    return cudaSuccess;
}

cudaError_t launch(const Config &given, const Body &kernel) {
    const dim3 grid = given.grid, block = given.block;
    const uint64_t threads = uint64_t{block.x} * block.y * block.z, blocks = uint64_t{grid.x} * grid.y * grid.z;
    if (threads == 0 || threads > 1024 || block.z > 64 || blocks == 0 || grid.x > INT32_MAX || grid.y > 65535 ||
        grid.z > 65535 || grid.x % given.cluster || given.cluster > 16)
        return set_error(cudaErrorInvalidConfiguration, "");
    if (given.shared_bytes > dynamic_shared_limit(given.function)) return set_error(cudaErrorInvalidValue, "");
    return in_stream(given.stream, [given, kept = kernel.copy()] { return run(given, *kept); });
}

Config config_of(const cudaLaunchConfig_t &launch) {
    Config result = {"cudaLaunchKernelEx", launch.gridDim, launch.blockDim, launch.dynamicSmemBytes, 1, nullptr,
                     launch.stream,        false};
    for (unsigned int i = 0; i < launch.numAttrs; ++i) {
        if (launch.attrs[i].id == cudaLaunchAttributeClusterDimension)
            result.cluster = launch.attrs[i].val.clusterDim.x;
        if (launch.attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization)
            result.early = launch.attrs[i].val.programmaticStreamSerializationAllowed;
    }
    return result;
}

}  // namespace simt
