#include "async.h"

#include <algorithm>

#include "mma.h"

namespace simt {

/* ---- places ---- */

constexpr uint64_t kRemote = 1u << 24; /* times one more than the rank */

Place place_of(uint64_t address) {
    Block &own = *current().in;
    if (address >= kRemote) {
        const uint64_t rank = address / kRemote - 1;
        if (rank >= own.in->blocks.size())
            fail("block %llu of a cluster of %zu", static_cast<unsigned long long>(rank), own.in->blocks.size());
        return {own.in->blocks[rank], static_cast<uint32_t>(address % kRemote)};
    }
    return {&own, static_cast<uint32_t>(address)};
}

uint64_t remote_address(uint32_t address, uint32_t rank) {
    if (rank >= current().in->in->blocks.size())
        fail("block %u of a cluster of %zu", rank, current().in->in->blocks.size());
    return (rank + 1) * kRemote + address % kRemote;
}

/* ---- mbarriers ---- */

/* The word in shared memory holds a mark, so that what writes over it is noticed; the rest is in the block's table. */
static constexpr uint64_t kMark = 0x6d62617272696572;
static constexpr int64_t kMostArrivals = (1 << 20) - 1, kMostBytes = (1 << 20) - 1;

static MBarrier &find(Place place) {
    if (place.block->live == 0) fail("mbarrier of a block that has ended");
    const auto found = place.block->mbarriers.find(place.address);
    if (found == place.block->mbarriers.end()) fail("mbarrier at 0x%x: not initialised", place.address);
    uint64_t word;
    std::memcpy(&word, place.block->at(place.address, 8), 8);
    if (word != (kMark ^ place.address)) fail("mbarrier at 0x%x: something else was written there", place.address);
    return found->second;
}

static void finish_phase(MBarrier &barrier) {
    if (barrier.pending != 0 || barrier.bytes != 0) return;
    barrier.pending = barrier.expected;
    ++barrier.phase;
    wake_all(barrier.waiting);
}

void mbarrier_init(uint32_t address, uint32_t arrivals) {
    Block &block = *current().in;
    if (address % 8) fail("mbarrier at 0x%x: expected a multiple of 8", address);
    if (arrivals == 0 || arrivals > kMostArrivals) fail("mbarrier of %u arrivals", arrivals);
    if (block.mbarriers.count(address)) fail("mbarrier at 0x%x: initialised twice", address);
    const uint64_t word = kMark ^ address;
    std::memcpy(block.at(address, 8), &word, 8);
    block.mbarriers[address] = {arrivals, arrivals, 0, 0, {}};
}

/* `bytes`: that copies must deliver in this phase besides. */
void mbarrier_arrive(Place place, int64_t bytes) {
    MBarrier &barrier = find(place);
    if (barrier.pending == 0)
        fail("mbarrier at 0x%x: more than %lld arrivals in one phase", place.address,
             static_cast<long long>(barrier.expected));
    barrier.bytes += bytes;
    if (std::abs(barrier.bytes) > kMostBytes)
        fail("mbarrier at 0x%x: %lld bytes are missing", place.address, static_cast<long long>(barrier.bytes));
    --barrier.pending;
    finish_phase(barrier);
}

bool mbarrier_passed(uint32_t address, uint32_t parity) {
    if (parity > 1) fail("mbarrier: parity %u", parity);
    return (find({current().in, address}).phase & 1) != parity;
}

const char *const kWaitsForMBarrier = "mbarrier 0x%llx, phase of parity %llu";

void mbarrier_wait(uint32_t address, uint32_t parity) {
    while (!mbarrier_passed(address, parity)) {
        MBarrier &barrier = find({current().in, address});
        barrier.waiting.push_back(&current());
        wait(kWaitsForMBarrier, address, parity);
    }
}

static void complete_bytes(Place place, int64_t bytes) {
    MBarrier &barrier = find(place);
    barrier.bytes -= bytes;
    if (barrier.bytes < -kMostBytes) fail("mbarrier at 0x%x: bytes that nobody expects", place.address);
    if (barrier.bytes < 0 && barrier.pending == 0)
        fail("mbarrier at 0x%x: %lld bytes more than expected", place.address, static_cast<long long>(-barrier.bytes));
    finish_phase(barrier);
}

/* ---- who wrote shared memory, and when ---- */

/* Nobody has written yet: shared memory is all ones. */
static Block::Written &written_at(Block &block, uint32_t address) {
    static const Block::Written nobody = [] {
        Block::Written never = {0, kCopyEngine, {}};
        std::memset(never.content, 0xff, sizeof never.content);
        return never;
    }();
    if (block.written.size() <= address / 16) block.written.resize(address / 16 + 1, nobody);
    return block.written[address / 16];
}

void note_written(Block &block, uint32_t address, uint32_t bytes, int32_t by) {
    const uint64_t now = ++block.in->clock;
    for (uint32_t at = address, next; at < address + bytes; at = next) {
        next = std::min(at / 16 * 16 + 16, address + bytes);
        Block::Written &written = written_at(block, at);
        written.when = now;
        written.by = by;
        std::memcpy(written.content + at % 16, block.at(at, next - at), next - at);
    }
}

/* Ordinary stores are not seen, but what they changed is; some thread must have executed the fence since. */
static void check_fenced(Block &block, uint32_t address) {
    const Block::Written &last = written_at(block, address);
    if (block.fenced <= last.when && std::memcmp(last.content, block.at(address, 16), 16) != 0)
        fail("no fence.proxy.async since a store changed shared memory at 0x%x", address);
}

/* Before wgmma reads what it was asked for at `issued`. */
void check_written(Block &block, uint32_t address, uint64_t issued, uint64_t fenced) {
    const Block::Written &last = written_at(block, address);
    if (last.when > issued) fail("wgmma: shared memory at 0x%x is written while it is read", address);
    check_fenced(block, address);
    if (last.by == kCopyEngine) return;
    if (fenced < last.when && block.threads[static_cast<size_t>(last.by)]->fenced < last.when)
        fail("wgmma: no fence.proxy.async since cp.async wrote shared memory at 0x%x", address);
}

/* ---- cp.async ---- */

static void happen(Thread &thread, const Copy &copy) {
    Block &block = *thread.in;
    if (copy.kind == Copy::kCopy) {
        char *target = block.at(copy.target, copy.bytes);
        if (copy.valid) std::memcpy(target, copy.source, copy.valid);
        std::memset(target + copy.valid, 0, copy.bytes - copy.valid);
        note_written(block, copy.target, copy.bytes, thread.index);
    } else if (copy.kind == Copy::kArrive) {
        mbarrier_arrive({&block, copy.target}, 0);
        std::vector<Thread *> &arriving = block.in->arriving;
        arriving.erase(std::find(arriving.begin(), arriving.end(), &thread));
    }
}

/* The first `count` entries of a thread's list. */
static void land_copies(Thread &thread, size_t count) {
    for (size_t i = 0; i < count; ++i) happen(thread, thread.copies[i]);
    thread.copies.erase(thread.copies.begin(), thread.copies.begin() + static_cast<std::ptrdiff_t>(count));
}

void copy_async(const Copy &copy) {
    Thread &thread = current();
    if (copy.kind == Copy::kCopy) {
        if (copy.target % copy.bytes || reinterpret_cast<uintptr_t>(copy.source) % copy.bytes)
            fail("cp.async: %u bytes from %p to 0x%x: misaligned", copy.bytes, copy.source, copy.target);
        thread.in->at(copy.target, copy.bytes);
    }
    if (copy.kind == Copy::kArrive) {
        find({thread.in, copy.target});
        thread.in->in->arriving.push_back(&thread);
    }
    thread.copies.push_back(copy);
    if (copy.kind == Copy::kCommit || !thread.in->in->early()) return;
    /* The ends of groups stay: they are counted. */
    std::vector<Copy> groups;
    for (const Copy &one : thread.copies) {
        happen(thread, one);
        if (one.kind == Copy::kCommit) groups.push_back(one);
    }
    thread.copies = groups;
}

void copy_async_wait(size_t groups) {
    Thread &thread = current();
    size_t commits = 0, count = 0;
    for (const Copy &copy : thread.copies) commits += copy.kind == Copy::kCommit;
    while (commits > groups) commits -= thread.copies[count++].kind == Copy::kCommit;
    land_copies(thread, count);
}

/* ---- TMA ---- */

/* A box of shared memory to the tensor, or added to what is there. */
static void store(const TensorCopy &copy) {
    const TensorMap &map = copy.map;
    Block &block = *copy.block;
    uint32_t elements = 1;
    for (int axis = 0; axis < map.rank; ++axis) elements *= map.box[axis];
    for (uint32_t element = 0; element < elements; ++element) {
        int64_t offset = 0;
        bool inside = true;
        uint32_t rest = element;
        for (int axis = 0; axis < map.rank; ++axis) {
            const int64_t at = copy.at[axis] + rest % map.box[axis];
            rest /= map.box[axis];
            inside = inside && at >= 0 && at <= map.last[axis];
            offset += at * static_cast<int64_t>(axis ? map.pitch[axis - 1] : map.element_bytes);
        }
        const uint32_t at = copy.shared + element * map.element_bytes;
        const uint32_t address = swizzled(at / 16 * 16, map.swizzle) + at % 16;
        if (at % 16 == 0) check_fenced(block, address);
        if (!inside) continue;
        char *target = const_cast<char *>(map.data) + offset;
        const char *source = block.at(address, map.element_bytes);
        if (copy.kind == TensorCopy::kStore) {
            std::memcpy(target, source, map.element_bytes);
        } else {
            float sum, term;
            std::memcpy(&sum, target, sizeof sum);
            std::memcpy(&term, source, sizeof term);
            sum += term;
            std::memcpy(target, &sum, sizeof sum);
        }
    }
    note_written(block, copy.shared, elements * map.element_bytes, kCopyEngine); /* later stores need another fence */
}

/* One box, or the part of it that lies in the tensor. */
static void transfer(const TensorCopy &copy, Block &block) {
    const TensorMap &map = copy.map;
    const uint32_t row_bytes = map.box[0] * map.element_bytes;
    uint32_t rows = 1;
    for (int axis = 1; axis < map.rank; ++axis) rows *= map.box[axis];
    for (uint32_t row = 0; row < rows; ++row) {
        int64_t offset = copy.at[0] * map.element_bytes;
        bool inside = true;
        uint32_t rest = row;
        for (int axis = 1; axis < map.rank; ++axis) {
            const int64_t at = copy.at[axis] + rest % map.box[axis];
            rest /= map.box[axis];
            inside = inside && at >= 0 && at <= map.last[axis];
            offset += at * static_cast<int64_t>(map.pitch[axis - 1]);
        }
        for (uint32_t byte = 0; byte < row_bytes; byte += 16) {
            const uint32_t target = swizzled(copy.shared + row * row_bytes + byte, map.swizzle);
            char *shared = block.at(target, 16);
            const int64_t first = copy.at[0] + byte / map.element_bytes, last = first + 16 / map.element_bytes - 1;
            if (inside && first >= 0 && last <= map.last[0]) {
                std::memcpy(shared, map.data + offset + byte, 16);
                continue;
            }
            for (uint32_t i = 0; i < 16; i += map.element_bytes) {
                const int64_t x = first + i / map.element_bytes;
                if (inside && x >= 0 && x <= map.last[0])
                    std::memcpy(shared + i, map.data + offset + byte + i, map.element_bytes);
                else
                    std::memset(shared + i, map.nan_fill ? 0xff : 0, map.element_bytes);
            }
        }
    }
    note_written(block, copy.shared, rows * row_bytes, kCopyEngine);
}

static void land_copy(const TensorCopy &copy) {
    uint32_t bytes = copy.map.element_bytes;
    for (int axis = 0; axis < copy.map.rank; ++axis) bytes *= copy.map.box[axis];
    for (Block *block : copy.block->in->blocks) {
        if (!(copy.blocks >> block->rank & 1)) continue;
        if (block->live == 0) fail("TMA: block %u of the cluster has ended before its copy came", block->rank);
        transfer(copy, *block);
        complete_bytes({block, copy.barrier}, bytes);
    }
}

static void check_box(const TensorCopy &copy) {
    if (copy.map.magic != kTensorMapMagic) fail("TMA: not a tensor map");
    if (!current().ordered) fail("TMA before griddepcontrol.wait, in a launch that may begin early");
    if (copy.shared % 128) fail("TMA: shared memory at 0x%x, expected a multiple of 128", copy.shared);
    if (copy.at[0] * static_cast<int64_t>(copy.map.element_bytes) % 16)
        fail("TMA: illegal instruction: begins at element %lld of a row, which is no multiple of 16 bytes",
             static_cast<long long>(copy.at[0]));
}

void tensor_copy(const TensorCopy &copy) {
    Cluster &cluster = *copy.block->in;
    check_box(copy);
    for (Block *block : cluster.blocks)
        if (copy.blocks >> block->rank & 1) find({block, copy.barrier});
    if (cluster.early())
        land_copy(copy);
    else
        cluster.pending.push_back(copy);
}

/* A store happens at once or when its group is waited for. */
void tensor_store(const TensorCopy &copy) {
    Thread &thread = current();
    if (copy.kind != TensorCopy::kCommit) {
        check_box(copy);
        if (copy.kind == TensorCopy::kAdd && copy.map.element_bytes != 4) fail("TMA: only float32 can be added");
        if (thread.in->in->early()) return store(copy);
    }
    thread.stores.push_back(copy);
}

void tensor_store_wait(size_t groups) {
    Thread &thread = current();
    size_t commits = 0, count = 0;
    for (const TensorCopy &copy : thread.stores) commits += copy.kind == TensorCopy::kCommit;
    for (; commits > groups; ++count) {
        const TensorCopy &copy = thread.stores[count];
        if (copy.kind == TensorCopy::kCommit)
            --commits;
        else
            store(copy);
    }
    thread.stores.erase(thread.stores.begin(), thread.stores.begin() + static_cast<std::ptrdiff_t>(count));
}

/* ---- st.async, and copies to another block ---- */

static void land_store(const RemoteStore &store) {
    Block &block = *store.to.block;
    if (block.live == 0) fail("shared memory of block %u of the cluster, which has ended", block.rank);
    char *const target = block.at(store.to.address, store.bytes);
    if (Block *const from = store.from.block) {
        if (from->live == 0) fail("block %u of the cluster has ended before its copy was made", from->rank);
        for (uint32_t byte = 0; byte < store.bytes; byte += 16) check_fenced(*from, store.from.address + byte);
        std::memcpy(target, from->at(store.from.address, store.bytes), store.bytes);
        note_written(*from, store.from.address, store.bytes, kCopyEngine); /* as a store of TMA does */
        note_written(block, store.to.address, store.bytes, kCopyEngine);
    } else {
        std::memcpy(target, store.words, sizeof store.words);
    }
    complete_bytes({&block, store.barrier}, store.bytes);
}

void store_remote(const RemoteStore &store) {
    Cluster &cluster = *store.to.block->in;
    find({store.to.block, store.barrier});
    if (cluster.early())
        land_store(store);
    else
        cluster.stores.push_back(store);
}

/* ---- the scheduler's side ---- */

bool land(Cluster &cluster) {
    const size_t count = cluster.pending.size() + cluster.arriving.size() + cluster.stores.size();
    if (count == 0) return false;
    const size_t which = cluster.random(static_cast<uint32_t>(count));
    if (which >= cluster.pending.size() + cluster.arriving.size()) {
        const size_t at = which - cluster.pending.size() - cluster.arriving.size();
        const RemoteStore store = cluster.stores[at];
        cluster.stores[at] = cluster.stores.back();
        cluster.stores.pop_back();
        land_store(store);
    } else if (which < cluster.pending.size()) {
        const TensorCopy copy = cluster.pending[which];
        cluster.pending.erase(cluster.pending.begin() + static_cast<std::ptrdiff_t>(which));
        land_copy(copy);
    } else {
        Thread &thread = *cluster.arriving[which - cluster.pending.size()];
        size_t until = 0;
        while (thread.copies[until].kind != Copy::kArrive) ++until;
        land_copies(thread, until + 1);
    }
    return true;
}

/* wgmma is a matter of four warps: none may have issued more than another. */
static void check_warpgroups(const Block &block) {
    for (const Warp &warp : block.warps)
        if (warp.wgmma->count != block.warps[static_cast<size_t>(warp.index) / 4 * 4].wgmma->count)
            fail("wgmma: issued by some warps of a warpgroup only");
}

void check_exit(Thread &thread) {
    for (const Copy &copy : thread.copies)
        if (copy.kind != Copy::kCommit) fail("the thread ends with a cp.async under way");
    for (const TensorCopy &copy : thread.stores)
        if (copy.kind != TensorCopy::kCommit) fail("the thread ends with a TMA store under way");
    if (!thread.warp->wgmma->products.empty()) fail("the thread ends with a wgmma under way");
    if (!thread.ordered) fail("the thread ends without griddepcontrol.wait, in a launch that may begin early");
    if (thread.in->live == 1) check_warpgroups(*thread.in);
}

}  // namespace simt
