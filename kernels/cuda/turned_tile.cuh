/*
 * A tile of a matrix that is brought the other way round, in shared memory: lines of 128 bytes, each of a row of the
 * result.
 *
 * Eight threads beside each other read vectors of 16 bytes along a row of the source, the same one of as many rows below
 * each other as make 4 bytes of a line; so they fill lines by words. Lines go out by vectors of 16 bytes. The vectors of
 * a line change places, so that neither access meets another in a bank.
 */
#pragma once

#include "vector.cuh"

namespace flexgemm {

constexpr int kLineVectors = 8, kLineBytes = 16 * kLineVectors;
constexpr int kTurningLines = kLineBytes / 4; /* of threads: each fills a word of lines */
constexpr int kTurningThreads = kLineVectors * kTurningLines;

/* kPerVector: elements of the source in 16 bytes, each of which has a line. */
template <int kPerVector>
struct TurnedTile {
    static constexpr int kLines = kLineVectors * kPerVector;
    alignas(16) uint32_t words[kLines][kLineBytes / 4];

    __device__ __forceinline__ static int place_of(int line, int vector) { return vector ^ line / kPerVector; }

    __device__ __forceinline__ uint32_t *word(int line, int index) {
        return &words[line][place_of(line, index / 4) * 4 + index % 4];
    }

    /* By all threads, behind a meeting of them: `count` elements of `lines` lines, or all that there are, to rows of
     * memory `step` elements apart. aligned: each begins at a multiple of 16 bytes. */
    template <typename T>
    __device__ __forceinline__ void store(T *to, int64_t step, int64_t lines, int64_t count, bool aligned) const {
        constexpr int kCount = kChannels<T>, kElements = kLineBytes / sizeof(T);
        const int end_line = static_cast<int>(min(lines, int64_t{kLines}));
        const int end_column = static_cast<int>(min(count, int64_t{kElements}));
        if (!aligned) {
#pragma unroll 1
            for (int i = threadIdx.x; i < end_line * kElements; i += kTurningThreads) {
                const int line = i / kElements, column = i % kElements;
                if (column < end_column) to[line * step + column] = vector<T>(line, column / kCount)[column % kCount];
            }
            return;
        }
        const int place = threadIdx.x % kLineVectors, column = place * kCount;
#pragma unroll
        for (int line = threadIdx.x / kLineVectors; line < kLines; line += kTurningLines) {
            if (line >= end_line) break;
            const T *from = vector<T>(line, place);
            T *at = to + line * step + column;
            if (column + kCount <= end_column)
                *reinterpret_cast<uint4 *>(at) = *reinterpret_cast<const uint4 *>(from);
            else
#pragma unroll 1
                for (int i = 0; column + i < end_column; ++i) at[i] = from[i];
        }
    }

private:
    template <typename T>
    __device__ __forceinline__ const T *vector(int line, int place) const {
        return reinterpret_cast<const T *>(&words[line][place_of(line, place) * 4]);
    }
};

/* 16 bytes of a row of the source, T an unsigned integer: those at `from`, or its first `count` elements and zeros. As
 * words, since smaller elements would take a register each. */
struct Words {
    uint32_t word[4];
};

template <typename T>
__device__ __forceinline__ Words load_words(const T *from, bool aligned, int64_t count) {
    constexpr int kPerWord = 4 / sizeof(T);
    Words words = {};
    if (aligned && count >= kChannels<T>) {
        const uint4 whole = *reinterpret_cast<const uint4 *>(from);
        words = {whole.x, whole.y, whole.z, whole.w};
    } else {
#pragma unroll
        for (int i = 0; i < kChannels<T>; ++i) {
            const uint32_t element = i < count ? from[i] : 0;
            words.word[i / kPerWord] |= element << (i % kPerWord * 8 * sizeof(T));
        }
    }
    return words;
}

}  // namespace flexgemm
