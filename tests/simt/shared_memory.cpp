/*
 * Shared memory of a block: dynamic and static parts in memory of their own, at the addresses that PTX sees.
 */
#include <sys/mman.h>

#include <memory>

#include "scheduler.h"

namespace simt {

constexpr size_t kSharedBytes = 227 << 10, kStaticBytes = 48 << 10;
constexpr uint32_t kReserved = 1024; /* bytes of shared memory that the system keeps, in front */

/* Ends at a page that nobody may touch: what is written past dynamic shared memory is noticed at once. */
static char *shared_region_end(uint32_t rank) {
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
    block.dynamic_bytes = static_cast<uint32_t>(state.config->shared_bytes + 15) / 16 * 16;
    block.dynamic_data = shared_region_end(block.rank) - block.dynamic_bytes;
    block.dynamic = 0;
    std::memset(block.dynamic_data, 0xff, block.dynamic_bytes);
    block.static_data = statics[block.rank].get();
    block.statics = (block.dynamic_bytes + 3 * kReserved) / kReserved * kReserved;
    block.static_bytes = 0;
    block.variables.clear();
    block.written.clear();
    block.fenced = 0;
}

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

}  // namespace simt
