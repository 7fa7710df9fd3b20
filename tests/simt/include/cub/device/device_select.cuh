/* Stands in for CUB: the same call, the same two phases, by the host. */
#pragma once

#include <algorithm>
#include <cstdint>

namespace cub {

struct DeviceSelect {
    template <class Key, class Count>
    static cudaError_t Unique(void *temporary, size_t &bytes, const Key *in, Key *out, Count *kept, int64_t count,
                              cudaStream_t stream = nullptr) {
        const size_t needed = static_cast<size_t>(count) / 16 + 255;
        if (temporary == nullptr) {
            bytes = needed;
            return cudaSuccess;
        }
        if (bytes < needed) return cudaErrorInvalidValue;
        return simt::in_stream_by_host(stream, [=] {
            memset(temporary, 0xff, needed); /* it may be used, all of it */
            *kept = static_cast<Count>(std::unique_copy(in, in + count, out) - out);
            return cudaSuccess;
        });
    }
};

}  // namespace cub
