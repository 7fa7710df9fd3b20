/*
 * The Hilbert curve of sequence.h as a machine, made at compile time: it reads a voxel's triples of bits (x, y, z) from
 * the highest down and writes the triples of the code. Its state is how the bits still to come are permuted and
 * reflected, of which there are 24 ways. A table takes two triples at a time:
 *
 *     entry[64 * state + 6 bits read] = next state << 7 | 6 bits written << 1
 *
 * so that an entry without its low bits is the byte offset of the next state's entries. A code of an odd number of
 * triples has a zero in front, read in the state that this leads back from.
 */
#pragma once

#include "common.cuh"

namespace flexgemm {

constexpr int kCurveStates = 24, kCurvePairs = 64; /* pairs of triples */

/* Bit i of a triple as the curve sees it is bit axis[i] of the voxel's, flipped where flip[i] is. */
struct Orientation {
    int axis[3], flip[3];

    constexpr bool operator==(const Orientation &other) const {
        bool equal = true;
        for (int i = 0; i < 3; ++i) equal = equal && axis[i] == other.axis[i] && flip[i] == other.flip[i];
        return equal;
    }
};

/* A triple of the code, and the orientation of what comes below: each bit reflects x where it is set, else swaps x with
 * its axis. Below an odd z all bits of the code are complemented, as by another reflection of x. */
constexpr int read_triple(Orientation &way, int triple) {
    int bit[3] = {};
    for (int i = 0; i < 3; ++i) bit[i] = (triple >> (2 - way.axis[i]) & 1) ^ way.flip[i];
    const int y = bit[1] ^ bit[0], z = bit[2] ^ y;
    for (int i = 0; i < 3; ++i) {
        if (bit[i]) {
            way.flip[0] ^= 1;
            continue;
        }
        const int axis = way.axis[0], flip = way.flip[0];
        way.axis[0] = way.axis[i];
        way.flip[0] = way.flip[i];
        way.axis[i] = axis;
        way.flip[i] = flip;
    }
    way.flip[0] ^= z;
    return bit[0] << 2 | y << 1 | z;
}

struct CurveMachine {
    Orientation states[kCurveStates] = {};
    int count = 0, odd = 0; /* odd: the state from which a zero leads to state 0 */
    uint16_t encode[kCurveStates * kCurvePairs] = {}, decode[kCurveStates * kCurvePairs] = {};

    /* The number of a state, a new one if need be. */
    constexpr int number_of(const Orientation &way) {
        for (int i = 0; i < count; ++i)
            if (states[i] == way) return i;
        states[count] = way;
        return count++;
    }

    constexpr CurveMachine() {
        number_of({{0, 1, 2}, {0, 0, 0}});
        for (int state = 0; state < count; ++state)
            for (int pair = 0; pair < kCurvePairs; ++pair) {
                Orientation way = states[state];
                const int high = read_triple(way, pair >> 3);
                if (pair == 0 && high == 0 && number_of(way) == 0) odd = state;
                const int code = high << 3 | read_triple(way, pair & 7);
                const int next = number_of(way) << 7;
                encode[state * kCurvePairs + pair] = static_cast<uint16_t>(next | code << 1);
                decode[state * kCurvePairs + code] = static_cast<uint16_t>(next | pair << 1);
            }
    }
};

constexpr CurveMachine kCurveMachine;
static_assert(kCurveMachine.count == kCurveStates, "all states are reached");
static_assert((kCurveMachine.encode[kCurveMachine.odd * kCurvePairs] & 0x7f) == 0, "a zero in front stays one");

}  // namespace flexgemm
