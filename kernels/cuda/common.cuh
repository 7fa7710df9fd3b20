/*
 * What every .cu file of the backend shares: status of CUDA calls, the device guard, launches, dtype traits.
 */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdio>

#include "../flexgemm.h"

/* Returns from the enclosing function with FG_ERROR_DEVICE when a CUDA runtime call fails. */
#define FG_CUDA(call)                                                                                                  \
    do {                                                                                                               \
        const fg_status status_ = flexgemm::cuda_status((call), #call, error);                                         \
        if (status_ != FG_OK) return status_;                                                                          \
    } while (0)

namespace flexgemm {

/* Clears the runtime's last error as well, so that a failure reported here is not found again by the next launch. */
inline fg_status cuda_status(cudaError_t status, const char *what, fg_error *error) {
    if (status == cudaSuccess) return FG_OK;
    cudaGetLastError();
    return fg_fail(error, FG_ERROR_DEVICE, "%s: %s", what, cudaGetErrorString(status));
}

constexpr int kMaxCachedDevices = 64; /* of devices beyond nothing is remembered */

/* How making a device current went. */
struct DeviceStatus {
    cudaError_t error;
    int device;
    operator cudaError_t() const { return error; }
};

/* FG_CUDA(guard.status()) names the device. */
inline fg_status cuda_status(DeviceStatus status, const char *, fg_error *error) {
    char what[32];
    snprintf(what, sizeof what, "making cuda:%d current", status.device);
    return cuda_status(status.error, what, error);
}

/* Makes a device current for the life of the object and restores the caller's. */
class DeviceGuard {
public:
    explicit DeviceGuard(int device) : device_(device) {
        status_ = cudaGetDevice(&previous_);
        if (status_ == cudaSuccess && previous_ != device) {
            status_ = cudaSetDevice(device);
            switched_ = status_ == cudaSuccess;
        }
    }
    ~DeviceGuard() {
        if (switched_) cudaSetDevice(previous_);
    }
    DeviceGuard(const DeviceGuard &) = delete;
    DeviceGuard &operator=(const DeviceGuard &) = delete;
    DeviceStatus status() const { return {status_, device_}; }

private:
    int device_, previous_ = 0;
    bool switched_ = false;
    cudaError_t status_;
};

/* Dynamic shared memory for a kernel, and if asked for the percentage of a multiprocessor's memory that is shared, the
 * rest being L1. Once per device, since it takes the driver as long as a launch. */
template <auto kKernel>
fg_status allow_shared(int bytes, fg_error *error, int percent = cudaSharedmemCarveoutDefault) {
    static std::atomic<uint64_t> allowed; /* a bit for each device */
    int device = 0;
    FG_CUDA(cudaGetDevice(&device));
    const uint64_t bit = device < kMaxCachedDevices ? uint64_t{1} << device : 0;
    if (allowed.load(std::memory_order_relaxed) & bit) return FG_OK;
    FG_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    FG_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, percent));
    allowed.fetch_or(bit, std::memory_order_relaxed);
    return FG_OK;
}

/* Launches a kernel that from compute capability 9.0 on may begin while the one in front of it ends. Up to
 * ptx::wait_for_earlier_kernels() it must not read what that one writes, nor write what that one uses. */
template <typename... Parameters, typename... Arguments>
fg_status launch_early(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes,
                       int compute_capability, cudaStream_t stream, fg_error *error, Arguments... arguments) {
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = {static_cast<unsigned int>(threads)};
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = compute_capability >= 90 ? 1 : 0;
    FG_CUDA(cudaLaunchKernelEx(&config, kernel, arguments...));
    return FG_OK;
}

inline cudaStream_t stream_of(const fg_queue *queue) { return static_cast<cudaStream_t>(queue->stream); }

template <typename T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

/* Blocks of a launch with one thread for each of `count` > 0 elements of an argument. */
inline fg_status grid_for(int64_t count, int threads, const char *argument, unsigned int *blocks, fg_error *error) {
    const int64_t needed = ceil_div<int64_t>(count, threads);
    *blocks = static_cast<unsigned int>(needed);
    if (needed <= INT32_MAX) return FG_OK;
    return fg_fail(error, FG_ERROR_VALUE, "%s: expected at most %lld elements for one launch, got %lld", argument,
                   static_cast<long long>(INT32_MAX) * threads, static_cast<long long>(count));
}

/* The rows of a tensor that an int32 can name: an entry of a map is one of them when it is less as an unsigned
 * number. */
inline uint32_t row_limit(const fg_tensor &tensor) {
    return static_cast<uint32_t>(tensor.shape[0] < INT32_MAX ? tensor.shape[0] : INT32_MAX);
}

/* Conversions through float32, the accumulator type of every kernel. */
template <typename T>
__device__ __forceinline__ float to_float(T x) {
    return static_cast<float>(x);
}
template <typename T>
__device__ __forceinline__ T from_float(float x) {
    return static_cast<T>(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
    return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

/* Cached per device: multiprocessors and compute capability (90 for 9.0), the latter lowered to 80 or 89 by
 * FLEXGEMM_ARCH=sm80|sm89, which is how the portable family is tested on a newer card. (device.cu) */
fg_status device_properties(int device, int *num_sms, int *compute_capability, fg_error *error);

}  // namespace flexgemm
