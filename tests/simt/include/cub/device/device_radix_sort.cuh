/* Stands in for CUB: the same calls, the same two phases, by the host. */
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace cub {

struct DeviceRadixSort {
    template <class Key, class Value>
    static cudaError_t SortPairs(void *temporary, size_t &bytes, const Key *keys_in, Key *keys_out,
                                 const Value *values_in, Value *values_out, int64_t count, int begin_bit = 0,
                                 int end_bit = sizeof(Key) * 8, cudaStream_t = nullptr) {
        const size_t needed = static_cast<size_t>(count) * 4 + 255;
        if (temporary == nullptr) {
            bytes = needed;
            return cudaSuccess;
        }
        if (bytes < needed || begin_bit < 0 || end_bit > static_cast<int>(sizeof(Key) * 8) || end_bit <= begin_bit)
            return cudaErrorInvalidValue;
        memset(temporary, 0xff, needed); /* it may be used, all of it */
        const auto part = [=](Key key) {
            const uint64_t bits = static_cast<uint64_t>(key) >> begin_bit;
            return end_bit - begin_bit == 64 ? bits : bits & ((uint64_t{1} << (end_bit - begin_bit)) - 1);
        };
        std::vector<int64_t> order(static_cast<size_t>(count));
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int64_t a, int64_t b) { return part(keys_in[a]) < part(keys_in[b]); });
        std::vector<Key> keys;
        std::vector<Value> values;
        for (int64_t at : order) {
            keys.push_back(keys_in[at]);
            values.push_back(values_in[at]);
        }
        std::copy(keys.begin(), keys.end(), keys_out);
        std::copy(values.begin(), values.end(), values_out);
        return cudaSuccess;
    }

    template <class Key>
    static cudaError_t SortKeys(void *temporary, size_t &bytes, const Key *keys_in, Key *keys_out, int64_t count,
                                int begin_bit = 0, int end_bit = sizeof(Key) * 8, cudaStream_t stream = nullptr) {
        std::vector<int32_t> values(static_cast<size_t>(count));
        return SortPairs(temporary, bytes, keys_in, keys_out, values.data(), values.data(), count, begin_bit, end_bit,
                         stream);
    }
};

}  // namespace cub
