/*
 * An interpreter for the inline PTX of kernels/cuda/ptx.cuh: the text of an asm statement is taken apart once and run
 * by every thread. What is emulated is in the table of ptx.cpp; anything else is an error that names the instruction.
 */
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "simt.h"

namespace simt {

struct Argument {
    enum Kind { kOperand, kLocal, kImmediate, kSink, kBlockRank, kAddress, kVector } kind;
    int64_t value;               /* number of the operand or local register, the immediate */
    std::vector<Argument> parts; /* of an address: base, offset or coordinates; of a vector */
};

/* A run of one asm statement by one thread. */
struct Frame {
    const Operand *outputs, *inputs;
    size_t output_count;
    uint64_t locals[8];
    size_t next; /* instruction */

    const Operand &operand(const Argument &argument) const {
        const auto index = static_cast<size_t>(argument.value);
        return index < output_count ? outputs[index] : inputs[index - output_count];
    }
    uint64_t read(const Argument &argument) const;
    void write(const Argument &argument, uint64_t value);

    /* The same of a 32-bit operand, which most are. */
    uint32_t word(const Argument &argument) const {
        const Operand &from = operand(argument);
        return from.place ? *static_cast<const uint32_t *>(from.place) : static_cast<uint32_t>(from.bits);
    }
    void set_word(const Argument &argument, uint32_t value) const {
        *static_cast<uint32_t *>(operand(argument).place) = value;
    }
};

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

enum class Type : uint8_t { kNone, kF16, kBf16, kTf32, kE4m3, kE5m2 };

struct Instruction {
    std::string opcode;
    std::vector<Argument> arguments;
    int guard = -1; /* local register of a predicate */
    bool guard_negated = false;
    std::string label; /* of bra */
    size_t target = 0;
    /* One of the two. The warp's sees the frames of all its lanes. */
    void (*run)(Frame &frame, const Instruction &instruction) = nullptr;
    void (*run_warp)(Frame *const *lanes, const Instruction &instruction) = nullptr;
    int m = 0, n = 0, k = 0; /* of matrix instructions */
    Type a = Type::kNone, b = Type::kNone;
    bool transposed = false; /* ldmatrix */

    bool has(const char *part) const { return opcode.find(part) != std::string::npos; }
};

}  // namespace simt
