#include "ptx.h"

#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "async.h"
#include "mma.h"
#include "scheduler.h"

namespace simt {

uint64_t Frame::read(const Argument &argument) const {
    switch (argument.kind) {
        case Argument::kOperand: {
            const Operand &from = operand(argument);
            if (from.place == nullptr) return from.bits;
            if (from.size == 4) return *static_cast<const uint32_t *>(from.place);
            uint64_t bits = 0;
            std::memcpy(&bits, from.place, from.size);
            return bits;
        }
        case Argument::kLocal:
            return locals[argument.value];
        case Argument::kImmediate:
            return static_cast<uint64_t>(argument.value);
        case Argument::kAddress:
            return read(argument.parts[0]) +
                   (argument.parts.size() == 2 && argument.parts[1].kind == Argument::kImmediate
                        ? static_cast<uint64_t>(argument.parts[1].value)
                        : 0);
        case Argument::kBlockRank:
            return current().in->rank;
        default:
            fail("an operand that cannot be read");
    }
}

void Frame::write(const Argument &argument, uint64_t value) {
    if (argument.kind == Argument::kLocal)
        locals[argument.value] = value;
    else if (argument.kind == Argument::kOperand)
        std::memcpy(operand(argument).place, &value, operand(argument).size);
}

namespace {

/* ---- one thread's instructions ---- */

using Arguments = const std::vector<Argument> &;

uint32_t address_in_block(const Frame &frame, const Argument &argument) {
    const Place place = place_of(frame.read(argument));
    if (place.block != current().in) fail("an address in another block, where only the own one is allowed");
    return place.address;
}

void nothing(Frame &, const Instruction &) {}
void trap(Frame &, const Instruction &) { fail("trap"); }

void move(Frame &frame, const Instruction &instruction) {
    frame.write(instruction.arguments[0], frame.read(instruction.arguments[1]));
}

void round_to_tf32(Frame &frame, const Instruction &instruction) {
    auto bits = static_cast<uint32_t>(frame.read(instruction.arguments[1]));
    if ((bits & 0x7f800000u) != 0x7f800000u) bits += 0x1000; /* half of the last place that stays, away from zero */
    frame.write(instruction.arguments[0], bits & 0xffffe000u);
}

/* A function of one float32, whose subnormal argument and result are zeros. */
template <float (*kFunction)(float)>
void approximate(Frame &frame, const Instruction &instruction) {
    const auto flushed = [](float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; };
    const float result = flushed(kFunction(flushed(from_bits(frame.word(instruction.arguments[1])))));
    uint32_t bits;
    std::memcpy(&bits, &result, sizeof bits);
    frame.set_word(instruction.arguments[0], bits);
}

float reciprocal(float x) { return 1.0f / x; }
float power_of_two(float x) { return std::exp2(x); }

void set_predicate(Frame &frame, const Instruction &instruction) {
    Arguments a = instruction.arguments;
    frame.write(a[0], static_cast<uint32_t>(frame.read(a[1])) != static_cast<uint32_t>(frame.read(a[2])));
}

void select(Frame &frame, const Instruction &instruction) {
    Arguments a = instruction.arguments;
    frame.write(a[0], frame.read(a[frame.read(a[3]) ? 1 : 2]));
}

void branch(Frame &frame, const Instruction &instruction) { frame.next = instruction.target; }

void copy_async_once(Frame &frame, const Instruction &instruction) {
    Arguments a = instruction.arguments;
    const auto bytes = static_cast<uint32_t>(frame.read(a[2]));
    uint32_t valid = bytes;
    if (a.size() > 3)
        valid =
            a[3].kind == Argument::kLocal ? (frame.read(a[3]) ? 0 : bytes) : static_cast<uint32_t>(frame.read(a[3]));
    if (valid > bytes) fail("cp.async: %u of %u bytes", valid, bytes);
    if (instruction.has(".cg.") ? bytes != 16 : bytes != 4 && bytes != 8 && bytes != 16)
        fail("cp.async of %u bytes", bytes);
    copy_async(
        {Copy::kCopy, address_in_block(frame, a[0]), reinterpret_cast<const void *>(frame.read(a[1])), bytes, valid});
}

void copy_commit(Frame &, const Instruction &) { copy_async({Copy::kCommit, 0, nullptr, 0, 0}); }

void copy_wait(Frame &frame, const Instruction &instruction) { copy_async_wait(frame.read(instruction.arguments[0])); }

void copy_arrive(Frame &frame, const Instruction &instruction) {
    if (!instruction.has(".noinc")) fail("cp.async.mbarrier.arrive without .noinc is not emulated");
    copy_async({Copy::kArrive, address_in_block(frame, instruction.arguments[0]), nullptr, 0, 0});
}

void barrier_init(Frame &frame, const Instruction &instruction) {
    mbarrier_init(address_in_block(frame, instruction.arguments[0]),
                  static_cast<uint32_t>(frame.read(instruction.arguments[1])));
}

/* mbarrier.arrive _, [barrier] and mbarrier.arrive.expect_tx _, [barrier], bytes */
void barrier_arrive(Frame &frame, const Instruction &instruction) {
    Arguments a = instruction.arguments;
    if (a[0].kind != Argument::kSink || (a.size() > 2 && !instruction.has(".expect_tx")))
        fail("%s: a state or a count is not emulated", instruction.opcode.c_str());
    mbarrier_arrive(place_of(frame.read(a[1])), a.size() > 2 ? static_cast<int64_t>(frame.read(a[2])) : 0);
    yield_to_others();
}

/* Waits where the hardware may. */
void barrier_try_wait(Frame &frame, const Instruction &instruction) {
    Arguments a = instruction.arguments;
    mbarrier_wait(address_in_block(frame, a[1]), static_cast<uint32_t>(frame.read(a[2])));
    frame.write(a[0], true);
}

void barrier_test_wait(Frame &frame, const Instruction &instruction) {
    Arguments a = instruction.arguments;
    frame.write(a[0], mbarrier_passed(address_in_block(frame, a[1]), static_cast<uint32_t>(frame.read(a[2]))));
}

/* [map, {x, y, ..}] and a shared address */
TensorCopy box_of(const Frame &frame, const Argument &tensor, const Argument &shared) {
    TensorCopy copy = {};
    const auto map = reinterpret_cast<const TensorMap *>(frame.read(tensor.parts[0]));
    if (reinterpret_cast<uintptr_t>(map) % 64)
        fail("TMA: the tensor map lies at %p, not a multiple of 64", static_cast<const void *>(map));
    copy.map = *map;
    const std::vector<Argument> &at = tensor.parts[1].parts;
    if (at.size() != copy.map.rank) fail("TMA: %zu coordinates of a tensor of %d axes", at.size(), copy.map.rank);
    for (size_t axis = 0; axis < at.size(); ++axis) copy.at[axis] = static_cast<int32_t>(frame.read(at[axis]));
    copy.block = current().in;
    copy.shared = address_in_block(frame, shared);
    return copy;
}

/* cp.(reduce.)async.bulk.tensor.Nd.global.shared::cta... [map, {x, y, ..}], [source] */
void tensor_store(Frame &frame, const Instruction &instruction) {
    TensorCopy copy = box_of(frame, instruction.arguments[0], instruction.arguments[1]);
    copy.kind = instruction.has(".add") ? TensorCopy::kAdd : TensorCopy::kStore;
    simt::tensor_store(copy);
}

void tensor_commit(Frame &, const Instruction &) {
    TensorCopy end = {};
    end.kind = TensorCopy::kCommit;
    simt::tensor_store(end);
}

void tensor_wait(Frame &frame, const Instruction &instruction) {
    tensor_store_wait(frame.read(instruction.arguments[0]));
}

/* cp.async.bulk.tensor.Nd.shared::cluster.global... [target], [map, {x, y, ..}], [barrier](, blocks)(, policy) */
void tensor_load(Frame &frame, const Instruction &instruction) {
    Arguments a = instruction.arguments;
    TensorCopy copy = box_of(frame, a[1], a[0]);
    copy.barrier = address_in_block(frame, a[2]);
    copy.blocks = instruction.has(".multicast") ? static_cast<uint32_t>(frame.read(a[3])) : 1u << current().in->rank;
    tensor_copy(copy);
}

/* There is no cache to keep anything. */
void cache_policy(Frame &frame, const Instruction &instruction) { frame.write(instruction.arguments[0], 0); }

void fence_proxy(Frame &, const Instruction &) {
    Thread &thread = current();
    thread.fenced = thread.in->fenced = ++thread.in->in->clock;
}

void wait_for_grids(Frame &, const Instruction &) { current().ordered = true; }

void map_address(Frame &frame, const Instruction &instruction) {
    Arguments a = instruction.arguments;
    frame.write(a[0], remote_address(static_cast<uint32_t>(frame.read(a[1])), static_cast<uint32_t>(frame.read(a[2]))));
}

void cluster_barrier_arrive(Frame &, const Instruction &) { cluster_arrive(); }
void cluster_barrier_wait(Frame &, const Instruction &) { cluster_wait(); }

void barrier_sync(Frame &frame, const Instruction &instruction) {
    Arguments a = instruction.arguments;
    named_barrier(static_cast<uint32_t>(frame.read(a[0])), static_cast<uint32_t>(frame.read(a[1])));
}

void barrier_arrive_only(Frame &frame, const Instruction &instruction) {
    Arguments a = instruction.arguments;
    named_barrier_arrive(static_cast<uint32_t>(frame.read(a[0])), static_cast<uint32_t>(frame.read(a[1])));
}

/* st.async...v4.f32 [target], {..}, [barrier], both of one block of the cluster. */
void store_async(Frame &frame, const Instruction &instruction) {
    Arguments a = instruction.arguments;
    const Place place = place_of(frame.read(a[0])), barrier = place_of(frame.read(a[2]));
    if (place.block != barrier.block) fail("%s: target and barrier in two blocks", instruction.opcode.c_str());
    if (place.address % 16) fail("%s at 0x%x: misaligned", instruction.opcode.c_str(), place.address);
    RemoteStore store = {place, barrier.address, {}, {}, 16};
    for (size_t i = 0; i < 4; ++i) store.words[i] = static_cast<uint32_t>(frame.read(a[1].parts[i]));
    store_remote(store);
}

/* cp.async.bulk.shared::cluster.shared::cta... [target], [source], bytes, [barrier], target and barrier of one block. */
void copy_to_block(Frame &frame, const Instruction &instruction) {
    Arguments a = instruction.arguments;
    const Place to = place_of(frame.read(a[0])), from = place_of(frame.read(a[1])),
                barrier = place_of(frame.read(a[3]));
    const auto bytes = static_cast<uint32_t>(frame.read(a[2]));
    if (to.block != barrier.block) fail("%s: target and barrier in two blocks", instruction.opcode.c_str());
    if (to.address % 16 || from.address % 16 || bytes % 16)
        fail("%s of %u bytes from 0x%x to 0x%x: misaligned", instruction.opcode.c_str(), bytes, from.address,
             to.address);
    store_remote({to, barrier.address, {}, from, bytes});
}

/* ---- a warp's instructions ---- */

void set_registers(Frame *const *lanes, const Instruction &instruction) {
    const uint64_t count = lanes[0]->read(instruction.arguments[0]);
    if (count % 8 || count < 24 || count > 256)
        fail("setmaxnreg of %llu registers", static_cast<unsigned long long>(count));
}

/* elect.sync _|predicate, mask. Nothing says which lane it is: the last one, so that a kernel that takes it for the
 * first is noticed. */
void elect(Frame *const *lanes, const Instruction &instruction) {
    Arguments a = instruction.arguments;
    if (lanes[0]->read(a[2]) != 0xffffffffu) fail("elect.sync of a part of a warp is not emulated");
    for (int lane = 0; lane < 32; ++lane) lanes[lane]->write(a[1], lane == 31);
}

/* ---- the table: the longest beginning of a name counts ---- */

struct Entry {
    void (*run)(Frame &, const Instruction &);
    void (*run_warp)(Frame *const *, const Instruction &);
};

const std::map<std::string, Entry> kInstructions = {
    {"cp.async.ca.shared", {copy_async_once, nullptr}},
    {"cp.async.cg.shared", {copy_async_once, nullptr}},
    {"cp.async.commit_group", {copy_commit, nullptr}},
    {"cp.async.wait_group", {copy_wait, nullptr}},
    {"cp.async.mbarrier.arrive", {copy_arrive, nullptr}},
    {"cp.async.bulk.tensor", {tensor_load, nullptr}},
    {"cp.async.bulk.tensor.3d.global", {tensor_store, nullptr}},
    {"cp.reduce.async.bulk.tensor.3d.global", {tensor_store, nullptr}},
    {"cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes", {copy_to_block, nullptr}},
    {"cp.async.bulk.commit_group", {tensor_commit, nullptr}},
    {"cp.async.bulk.wait_group", {tensor_wait, nullptr}},
    {"cp.async.bulk.wait_group.read", {tensor_wait, nullptr}},
    {"mbarrier.init", {barrier_init, nullptr}},
    {"mbarrier.arrive", {barrier_arrive, nullptr}},
    {"mbarrier.try_wait.parity", {barrier_try_wait, nullptr}},
    {"mbarrier.test_wait.parity", {barrier_test_wait, nullptr}},
    {"fence.proxy.async", {fence_proxy, nullptr}},
    {"griddepcontrol.wait", {wait_for_grids, nullptr}},
    {"griddepcontrol.launch_dependents", {nothing, nullptr}},
    {"fence.", {nothing, nullptr}},
    {"createpolicy.fractional", {cache_policy, nullptr}},
    {"prefetch", {nothing, nullptr}},
    {"cp.async.bulk.prefetch.tensor", {nothing, nullptr}},
    {"mapa.shared::cluster", {map_address, nullptr}},
    {"barrier.cluster.arrive", {cluster_barrier_arrive, nullptr}},
    {"barrier.cluster.wait", {cluster_barrier_wait, nullptr}},
    {"bar.sync", {barrier_sync, nullptr}},
    {"bar.arrive", {barrier_arrive_only, nullptr}},
    {"mov.", {move, nullptr}},
    {"cvt.rna.tf32.f32", {round_to_tf32, nullptr}},
    {"ex2.approx.ftz.f32", {approximate<power_of_two>, nullptr}},
    {"rcp.approx.ftz.f32", {approximate<reciprocal>, nullptr}},
    {"setp.ne.b32", {set_predicate, nullptr}},
    {"selp.u32", {select, nullptr}},
    {"bra", {branch, nullptr}},
    {"trap", {trap, nullptr}},
    {"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32", {store_async, nullptr}},
    {"setmaxnreg", {nullptr, set_registers}},
    {"elect.sync", {nullptr, elect}},
    {"ldmatrix.sync.aligned.m8n8", {nullptr, load_matrices}},
    {"stmatrix.sync.aligned.m8n8", {nullptr, store_matrices}},
    {"mma.sync.aligned.m16n8k", {nullptr, multiply}},
    {"wgmma.fence.sync.aligned", {nullptr, wgmma_fence}},
    {"wgmma.commit_group.sync.aligned", {nullptr, wgmma_commit}},
    {"wgmma.wait_group.sync.aligned", {nullptr, wgmma_wait}},
    {"wgmma.mma_async.sync.aligned.m64n", {nullptr, wgmma_multiply}},
};

Type type_named(const std::string &name) {
    static const std::map<std::string, Type> types = {{"f16", Type::kF16},
                                                      {"bf16", Type::kBf16},
                                                      {"tf32", Type::kTf32},
                                                      {"e4m3", Type::kE4m3},
                                                      {"e5m2", Type::kE5m2}};
    const auto found = types.find(name);
    return found == types.end() ? Type::kNone : found->second;
}

void look_up(Instruction &instruction) {
    const std::string &opcode = instruction.opcode;
    size_t longest = 0;
    for (const auto &[name, entry] : kInstructions)
        if (opcode.compare(0, name.size(), name) == 0 && name.size() > longest) {
            longest = name.size();
            instruction.run = entry.run;
            instruction.run_warp = entry.run_warp;
        }
    instruction.transposed = instruction.has(".trans");
    if (opcode.find("mma") == std::string::npos) return;
    for (size_t at = 0; at != std::string::npos; at = opcode.find('.', at + 1)) {
        const std::string part = opcode.substr(at + 1, opcode.find('.', at + 1) - at - 1);
        std::sscanf(part.c_str(), "m%dn%dk%d", &instruction.m, &instruction.n, &instruction.k);
        const Type type = type_named(part);
        if (type == Type::kNone) continue;
        if (instruction.a == Type::kNone)
            instruction.a = type;
        else if (instruction.b == Type::kNone)
            instruction.b = type;
    }
}

/* ---- parsing ---- */

class Parser {
public:
    explicit Parser(const char *text) : at_(text) {}

    std::vector<Instruction> parse() {
        std::map<std::string, size_t> labels;
        for (skip(); *at_; skip()) {
            if (*at_ == '{' || *at_ == '}' || *at_ == ';') {
                ++at_;
                continue;
            }
            Instruction instruction;
            if (*at_ == '@') {
                ++at_;
                instruction.guard_negated = take('!');
                instruction.guard = static_cast<int>(local(word()));
            }
            const std::string name = word();
            if (*at_ == ':') {
                ++at_;
                labels[name] = result_.size();
                continue;
            }
            if (name == ".reg") {
                word(); /* its type */
                do local(word());
                while (take(','));
                continue;
            }
            instruction.opcode = name;
            if (name == "bra")
                instruction.label = word();
            else
                while (*at_ && *at_ != ';') {
                    instruction.arguments.push_back(argument());
                    if (!take(',')) take('|'); /* of two results */
                }
            look_up(instruction);
            result_.push_back(instruction);
        }
        for (Instruction &instruction : result_)
            if (instruction.opcode == "bra") instruction.target = labels.at(instruction.label);
        return result_;
    }

private:
    void skip() {
        while (std::isspace(static_cast<unsigned char>(*at_))) ++at_;
    }
    bool take(char c) {
        skip();
        if (*at_ != c) return false;
        ++at_;
        skip();
        return true;
    }
    /* Names contain "::", but a label ends with one colon. */
    std::string word() {
        skip();
        std::string text;
        while (std::isalnum(static_cast<unsigned char>(*at_)) || std::strchr("._%:-+", *at_)) {
            if (*at_ == '\0' || (*at_ == ':' && at_[1] != ':')) break;
            if (*at_ == ':') text += *at_++;
            text += *at_++;
        }
        skip();
        return text;
    }
    int64_t local(const std::string &name) { return locals_.emplace(name, locals_.size()).first->second; }

    Argument argument() {
        if (take('[')) return list(Argument::kAddress, ']');
        if (take('{')) return list(Argument::kVector, '}');
        const std::string text = word();
        if (text == "_") return {Argument::kSink, 0, {}};
        if (text == "%%cluster_ctarank") return {Argument::kBlockRank, 0, {}};
        if (text[0] == '%') return {Argument::kOperand, std::strtoll(text.c_str() + 1, nullptr, 10), {}};
        if (std::isdigit(static_cast<unsigned char>(text[0])) || text[0] == '-' || text[0] == '+')
            return {Argument::kImmediate, std::strtoll(text.c_str(), nullptr, 0), {}};
        return {Argument::kLocal, local(text), {}};
    }
    Argument list(Argument::Kind kind, char end) {
        Argument result = {kind, 0, {}};
        while (!take(end)) {
            if (*at_ == '\0') break;
            result.parts.push_back(argument());
            take(',');
        }
        return result;
    }

    const char *at_;
    std::vector<Instruction> result_;
    std::map<std::string, int64_t> locals_;
};

void run_collective(void *const *items, const void *how) {
    const auto &instruction = *static_cast<const Instruction *>(how);
    for (int lane = 0; lane < 32; ++lane)
        if (items[lane] == nullptr) fail("%s: lane %d has ended", instruction.opcode.c_str(), lane);
    instruction.run_warp(reinterpret_cast<Frame *const *>(items), instruction);
}

}  // namespace

Program::Program(const char *text) {
    const auto &parsed = *new std::vector<Instruction>(Parser(text).parse());
    instructions_ = parsed.data();
    count_ = parsed.size();
}

void Program::run(std::initializer_list<Operand> outputs, std::initializer_list<Operand> inputs) const {
    const void *where = __builtin_return_address(0);
    Frame frame;
    frame.outputs = outputs.begin();
    frame.inputs = inputs.begin();
    frame.output_count = outputs.size();
    for (frame.next = 0; frame.next < count_;) {
        const Instruction &instruction = instructions_[frame.next++];
        current().where = where;
        if (instruction.guard >= 0 && (frame.locals[instruction.guard] != 0) == instruction.guard_negated) continue;
        if (instruction.run)
            instruction.run(frame, instruction);
        else if (instruction.run_warp)
            warp_collective_at(where, ~0u, run_collective, &frame, &instruction);
        else
            fail("no emulation of %s", instruction.opcode.c_str());
    }
}

}  // namespace simt
