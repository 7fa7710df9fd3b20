/* Stands in for CUB: the same call, the same two phases, by the host. */
#pragma once

#include <cstdint>

namespace cub {

struct DeviceScan {
    template <class In, class Out>
    static cudaError_t InclusiveSum(void *temporary, size_t &bytes, const In *in, Out *out, int64_t count,
                                    cudaStream_t stream = nullptr) {
        const size_t needed = static_cast<size_t>(count) + 255;
        if (temporary == nullptr) {
            bytes = needed;
            return cudaSuccess;
        }
        if (bytes < needed) return cudaErrorInvalidValue;
        return simt::in_stream_by_host(stream, [=] {
            memset(temporary, 0xff, needed); /* it may be used, all of it */
            Out sum = 0;
            for (int64_t i = 0; i < count; ++i) out[i] = sum += in[i];
            return cudaSuccess;
        });
    }
};

}  // namespace cub
