/*
 * What a failed launch tells: the kernel, the block, and where its threads are.
 */
#include "report.h"

#include <dlfcn.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <map>

#include "async.h"
#include "runtime.h"
#include "scheduler.h"

namespace simt {
namespace {

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
    const std::vector<std::string> lines = symbolise("-f -C", state.config->function);
    std::string name = lines.empty() ? state.config->name : lines[0];
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
    for (Block *block : state.cluster->blocks)
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

thread_local bool launches = false;
struct sigaction host_segv, host_bus; /* what is done about them between launches */

/* A fault of the memory system while a fiber runs is an error of the kernel. */
void on_fault(int signal, siginfo_t *info, void *context) {
    static char text[256];
    const auto *machine = static_cast<ucontext_t *>(context);
    const void *instruction = reinterpret_cast<void *>(machine->uc_mcontext.gregs[REG_RIP] + 1);
    const auto touched = static_cast<char *>(info->si_addr);
    if (!launches || self == nullptr) { /* the host's own fault, of this thread or another: let it have it */
        sigaction(signal, signal == SIGBUS ? &host_bus : &host_segv, nullptr);
        return;
    }
    const char *kind = "memory";
    for (Block *block : state.cluster->blocks)
        if (touched >= block->dynamic_data && touched < block->dynamic_data + (256 << 10)) kind = "shared memory";
    const std::string nearest = describe_memory(touched);
    std::snprintf(text, sizeof text, "access out of bounds of %s, %p%s%s", kind, static_cast<void *>(touched),
                  nearest.empty() ? "" : ": ", nearest.c_str());
    state.failure = text;
    state.failure_where = instruction;
    leave();
}

}  // namespace

void fail(const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    state.failure = text;
    if (self) {
        const Thread &thread = current();
        state.failure += " (thread " + std::to_string(thread.index) + ")";
        state.failure_where = thread.where;
    }
    leave();
}

/* What code under -fsanitize=alignment calls before such an access, which is an error on a GPU. */
extern "C" __attribute__((visibility("default"))) void __ubsan_handle_type_mismatch_v1(void *, uintptr_t pointer) {
    current().where = __builtin_return_address(0);
    fail("misaligned access of memory at 0x%llx", static_cast<unsigned long long>(pointer));
}

std::string failure_report() {
    const uint3 block = state.cluster->blocks[0]->index;
    char place[64];
    std::snprintf(place, sizeof place, ", block (%u, %u, %u): ", block.x, block.y, block.z);
    if (state.deadlock) return kernel_name() + place + deadlock_report();
    std::string text = kernel_name() + place + state.failure;
    if (state.failure_where) text += " at " + source_line(state.failure_where);
    return text;
}

FaultGuard::FaultGuard() {
    static char stack[64 << 10];
    stack_t own = {};
    own.ss_sp = stack;
    own.ss_size = sizeof stack;
    sigaltstack(&own, &previous_stack_);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    launches = true;
    sigaction(SIGSEGV, &action, &host_segv);
    sigaction(SIGBUS, &action, &host_bus);
}

FaultGuard::~FaultGuard() {
    sigaction(SIGSEGV, &host_segv, nullptr);
    sigaction(SIGBUS, &host_bus, nullptr);
    launches = false;
    sigaltstack(&previous_stack_, nullptr);
}

}  // namespace simt
