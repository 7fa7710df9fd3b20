/*
 * Threads as fibers. One cluster of blocks runs at a time, on the thread that launched the kernel; a fiber runs until
 * it has to wait, and then the next one is picked: of the warp with the highest priority, priorities being drawn anew
 * now and then. That lets some warps run far ahead of others, which is how a missing barrier shows.
 *
 * What is asynchronous on a GPU lies in wait (async.h, mma.cpp) until something asks for it or nobody can run.
 */
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "simt.h"

namespace simt {

struct Block;
struct Warp;
struct Cluster;
struct WgmmaQueue;
struct TensorCopy; /* async.h */

/* One step of a thread's cp.async: a copy, the end of a commit group, or an arrival that waits for all before. */
struct Copy {
    enum { kCopy, kCommit, kArrive } kind;
    uint32_t target; /* shared address of the data or of the mbarrier */
    const void *source;
    uint32_t bytes, valid; /* those behind `valid` become zeros */
};

struct Thread {
    uint3 place; /* threadIdx */
    void *stack_pointer;
    Block *in;
    Warp *warp;
    int lane, index; /* within the warp, the block */

    const void *where;     /* return address of what it called last: for reports */
    const char *waits_for; /* the same: a format and its numbers */
    unsigned long long number[2];
    uint32_t mask; /* of the warp_collective it waits in */
    Combine combine;
    void *item;
    const void *how;

    std::vector<Copy> copies;       /* not landed */
    std::vector<TensorCopy> stores; /* that may still read shared memory, and the ends of their groups */
    uint64_t fenced;                /* when it last executed fence.proxy.async */
    uint64_t meeting;               /* of the cluster, that it arrived for */
    bool ordered;                   /* behind the kernels in front of its own: by the launch, or griddepcontrol.wait */
};

struct Warp {
    Block *in;
    int index;
    Thread *threads[32];
    uint32_t runnable, collecting, exited; /* a bit for each lane; absent lanes have exited */
    uint32_t priority;
    bool downwards; /* whether the highest lane goes first */
    WgmmaQueue *wgmma;
};

struct Barrier { /* bar.sync */
    uint32_t expected, arrived;
    std::vector<Thread *> waiting;
};

struct MBarrier {
    int64_t expected, pending, bytes; /* arrivals of a phase, those that are missing, bytes that are missing */
    uint32_t phase;
    std::vector<Thread *> waiting;
};

struct Variable { /* in static shared memory */
    const void *key;
    uint32_t address;
};

struct Block {
    Cluster *in;
    uint3 index;
    uint32_t rank;
    std::vector<Thread *> threads;
    std::vector<Warp> warps;
    size_t live;
    Barrier barriers[16];

    char *dynamic_data, *static_data;
    uint32_t dynamic, dynamic_bytes; /* shared address, 0 before its first use */
    uint32_t statics, static_bytes;  /* from the address on */
    std::vector<Variable> variables;
    std::unordered_map<uint32_t, MBarrier> mbarriers;
    /* Of each 16 bytes of shared memory, when cp.async or TMA wrote them last; the thread, or kCopyEngine; and what. */
    struct Written {
        uint64_t when;
        int32_t by;
        char content[16];
    };
    std::vector<Written> written; /* from address 0 on, as far as it was asked for */
    uint64_t fenced;              /* when any thread last executed fence.proxy.async */

    char *at(uint32_t address, size_t bytes);       /* where shared memory lies; fails outside */
    uint32_t address_of(const void *pointer) const; /* the other way; 0 outside */
};
constexpr int32_t kCopyEngine = -1;

struct RemoteStore; /* async.h */

enum class Timing { kEager, kLazy, kMixed }; /* of what is asynchronous: at once, as late as legal, either */

struct Cluster {
    std::vector<Block *> blocks;
    std::vector<TensorCopy> pending; /* TMA copies under way */
    std::vector<RemoteStore> stores; /* to other blocks, under way */
    std::vector<Thread *> arriving;  /* threads whose copies end in an arrival */
    uint32_t arrived;                /* at the barrier of the cluster */
    uint64_t met;                    /* how often all have met there */
    std::vector<Thread *> waiting;   /* there */
    size_t live;
    uint64_t clock;
    uint64_t random_state;
    Timing timing;

    uint32_t random(uint32_t limit);
    bool early() { return timing == Timing::kEager || (timing == Timing::kMixed && random(2)); }
};

extern Thread *self; /* that runs; NULL outside a launch */
inline Thread &current() { return *self; }

struct State { /* of the launch that runs */
    const Config *config;
    const Body *body;
    Cluster *cluster;
    Warp *warp; /* that runs */
    std::string failure;
    const void *failure_where;
    bool deadlock;
};
extern State state;

#define SIMT_HERE current().where = __builtin_return_address(0)

/* Ends the launch with an error. */
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Sleeps until somebody calls wake(). The format has a %llu for each number. */
void wait(const char *format, unsigned long long a = 0, unsigned long long b = 0);
void wake(Thread *thread);
void wake_all(std::vector<Thread *> &threads);

void yield_to_others(); /* lets a warp of higher priority go on, if one can */
void warp_collective_at(const void *where, uint32_t mask, Combine combine, void *item, const void *how);
void redraw(Warp &warp); /* its priority */
void start(Thread &thread, size_t stack_index);
void run_threads(); /* until all have ended, or one failed */
[[noreturn]] void leave();
void lay_out_shared(Block &block);

void named_barrier(uint32_t id, uint32_t threads);
void named_barrier_arrive(uint32_t id, uint32_t threads); /* without waiting */
void cluster_arrive();
void cluster_wait();

}  // namespace simt
