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
                                 int end_bit = sizeof(Key) * 8, cudaStream_t stream = nullptr) {
        const size_t needed = static_cast<size_t>(count) * 4 + 255;
        if (temporary == nullptr) {
            bytes = needed;
            return cudaSuccess;
        }
        if (bytes < needed || begin_bit < 0 || end_bit > static_cast<int>(sizeof(Key) * 8) || end_bit <= begin_bit)
            return cudaErrorInvalidValue;
        return simt::in_stream_by_host(stream, [=] {
            memset(temporary, 0xff, needed); /* it may be used, all of it */
            const std::vector<int64_t> order = sorted(keys_in, count, begin_bit, end_bit);
            gather(order, keys_in, keys_out);
            if (values_in) gather(order, values_in, values_out);
            return cudaSuccess;
        });
    }

    template <class Key>
    static cudaError_t SortKeys(void *temporary, size_t &bytes, const Key *keys_in, Key *keys_out, int64_t count,
                                int begin_bit = 0, int end_bit = sizeof(Key) * 8, cudaStream_t stream = nullptr) {
        return SortPairs<Key, int>(temporary, bytes, keys_in, keys_out, nullptr, nullptr, count, begin_bit, end_bit,
                                   stream);
    }

private:
    template <class Key>
    static std::vector<int64_t> sorted(const Key *keys, int64_t count, int begin_bit, int end_bit) {
        const auto part = [=](int64_t at) {
            const uint64_t bits = static_cast<uint64_t>(keys[at]) >> begin_bit;
            return end_bit - begin_bit == 64 ? bits : bits & ((uint64_t{1} << (end_bit - begin_bit)) - 1);
        };
        std::vector<int64_t> order(static_cast<size_t>(count));
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return part(a) < part(b); });
        return order;
    }

    template <class T>
    static void gather(const std::vector<int64_t> &order, const T *in, T *out) {
        std::vector<T> result;
        for (int64_t at : order) result.push_back(in[at]);
        std::copy(result.begin(), result.end(), out);
    }
};

}  // namespace cub
