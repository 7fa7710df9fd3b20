/*
 * The CUDA column of the backend table: devices, stream-ordered memory, copies, and the operations' entry points.
 */
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "backend.cuh"
#include "common.cuh"

namespace flexgemm {
namespace {

/* ---- properties ---- */

/* Highest compute capability to use, from FLEXGEMM_ARCH; 0 when its value is unknown. */
int architecture_limit() {
    static const int limit = [] {
        const char *value = std::getenv("FLEXGEMM_ARCH");
        if (value == nullptr || *value == '\0') return INT32_MAX;
        if (std::strcmp(value, "sm80") == 0) return 80;
        if (std::strcmp(value, "sm89") == 0) return 89;
        return 0;
    }();
    return limit;
}

fg_status device_count(int32_t *count, fg_error *error) {
    int found = 0;
    const cudaError_t status = cudaGetDeviceCount(&found);
    if (status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver || status == cudaErrorStubLibrary) {
        cudaGetLastError(); /* or the next launch check would report it */
        *count = 0;
        return FG_OK;
    }
    *count = found;
    return cuda_status(status, "cudaGetDeviceCount", error);
}

fg_status device_info(int32_t device_index, fg_device_info *info, fg_error *error) {
    int32_t count = 0;
    const fg_status status = device_count(&count, error);
    if (status != FG_OK) return status;
    if (count == 0)
        return fg_fail(error, FG_ERROR_DEVICE, "device: 'cuda' asked for, but this build sees 0 CUDA devices");
    if (device_index < 0 || device_index >= count)
        return fg_fail(error, FG_ERROR_VALUE, "index: expected a CUDA device below %d, got %d", count, device_index);

    cudaDeviceProp properties;
    FG_CUDA(cudaGetDeviceProperties(&properties, device_index));
    std::snprintf(info->name, sizeof info->name, "%s", properties.name);
    info->compute_capability = 10 * properties.major + properties.minor;
    info->num_sms = properties.multiProcessorCount;
    info->memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
    info->l2_bytes = properties.l2CacheSize;
    FG_CUDA(cudaDriverGetVersion(&info->driver_version));
    FG_CUDA(cudaRuntimeGetVersion(&info->runtime_version));
    return FG_OK;
}

/* ---- memory ---- */

/* Memory that a pool keeps across synchronisations instead of handing it back to the driver, which costs milliseconds
 * to map again. */
constexpr uint64_t kPoolKeepsBytes = uint64_t{1} << 30;

/* A pool of our own: the device's default pool belongs to the whole process, and raising its threshold would change
 * the memory use of other libraries. Lives as long as the process. */
fg_status memory_pool(int device, cudaMemPool_t *pool, fg_error *error) {
    static std::atomic<cudaMemPool_t> pools[kMaxCachedDevices];
    if (device >= kMaxCachedDevices) {
        FG_CUDA(cudaDeviceGetDefaultMemPool(pool, device));
        return FG_OK;
    }
    *pool = pools[device].load(std::memory_order_acquire);
    if (*pool != nullptr) return FG_OK;

    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.handleTypes = cudaMemHandleTypeNone;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = device;
    cudaMemPool_t created = nullptr;
    FG_CUDA(cudaMemPoolCreate(&created, &properties));
    uint64_t threshold = kPoolKeepsBytes;
    const cudaError_t status = cudaMemPoolSetAttribute(created, cudaMemPoolAttrReleaseThreshold, &threshold);
    if (status != cudaSuccess || !pools[device].compare_exchange_strong(*pool, created)) {
        cudaMemPoolDestroy(created); /* failed, or another thread was first and *pool is now its pool */
    } else {
        *pool = created;
    }
    return cuda_status(status, "cudaMemPoolSetAttribute", error);
}

fg_status allocate(size_t bytes, const fg_queue *queue, void **data, fg_error *error) {
    *data = nullptr;
    if (bytes == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    cudaMemPool_t pool = nullptr;
    const fg_status status = memory_pool(queue->device_index, &pool, error);
    if (status != FG_OK) return status;

    const cudaError_t allocated = cudaMallocFromPoolAsync(data, bytes, pool, stream_of(queue));
    if (allocated == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        return fg_fail(error, FG_ERROR_MEMORY, "CUDA device %d: cannot allocate %zu bytes", queue->device_index, bytes);
    }
    return cuda_status(allocated, "cudaMallocFromPoolAsync", error);
}

fg_status release(void *data, const fg_queue *queue, fg_error *error) {
    if (data == nullptr) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    if (guard.status() == cudaErrorCudartUnloading) return FG_OK; /* the process ends and takes the memory with it */
    FG_CUDA(guard.status());
    FG_CUDA(cudaFreeAsync(data, stream_of(queue)));
    return FG_OK;
}

/* ---- copies and order ---- */

/* The source may be reused on return. The runtime stages pageable memory before it returns; it would read page-locked
 * memory later, so the copy is waited for. */
fg_status copy_to_device(void *dst, const void *src, size_t bytes, const fg_queue *queue, fg_error *error) {
    if (bytes == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    cudaPointerAttributes attributes;
    FG_CUDA(cudaPointerGetAttributes(&attributes, src));
    FG_CUDA(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, stream_of(queue)));
    if (attributes.type != cudaMemoryTypeUnregistered) FG_CUDA(cudaStreamSynchronize(stream_of(queue)));
    return FG_OK;
}

/* Complete on return when dst is pageable; queued when it is page-locked, so synchronise before reading it. */
fg_status copy_to_host(void *dst, const void *src, size_t bytes, const fg_queue *queue, fg_error *error) {
    if (bytes == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    FG_CUDA(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, stream_of(queue)));
    return FG_OK;
}

/* Record and wait around an event whose life ends here; the driver keeps it until the wait is over. */
cudaError_t record_and_wait(const fg_queue *waiter, const fg_queue *queue, cudaEvent_t event) {
    const cudaError_t recorded = cudaEventRecord(event, stream_of(queue));
    if (recorded != cudaSuccess) return recorded;
    const DeviceGuard guard(waiter->device_index);
    if (guard.status() != cudaSuccess) return guard.status();
    return cudaStreamWaitEvent(stream_of(waiter), event, 0);
}

fg_status wait_for(const fg_queue *waiter, const fg_queue *queue, fg_error *error) {
    if (waiter->device_index == queue->device_index && waiter->stream == queue->stream) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    cudaEvent_t event;
    FG_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    const cudaError_t ordered = record_and_wait(waiter, queue, event);
    FG_CUDA(cudaEventDestroy(event));
    return cuda_status(ordered, "ordering two streams", error);
}

fg_status synchronize(const fg_queue *queue, fg_error *error) {
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    FG_CUDA(cudaStreamSynchronize(stream_of(queue)));
    return FG_OK;
}

/* A mark is an event. */
fg_status mark(const fg_queue *queue, void **mark, fg_error *error) {
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    cudaEvent_t event;
    FG_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    const cudaError_t recorded = cudaEventRecord(event, stream_of(queue));
    if (recorded == cudaSuccess)
        *mark = event;
    else
        cudaEventDestroy(event);
    return cuda_status(recorded, "cudaEventRecord", error);
}

/* Another call's mark, perhaps asked for while a graph is captured: a capture would else be lost by the question. */
fg_status passed(void *mark, bool *passed, fg_error *error) {
    const cudaEvent_t event = static_cast<cudaEvent_t>(mark);
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    FG_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
    const cudaError_t status = cudaEventQuery(event);
    FG_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
    *passed = status != cudaErrorNotReady;
    if (!*passed) {
        cudaGetLastError(); /* not ready is an answer, not a failure */
        return FG_OK;
    }
    cudaEventDestroy(event);
    return cuda_status(status, "cudaEventQuery", error);
}

fg_status wait_for_mark(const fg_queue *waiter, void *mark, fg_error *error) {
    const DeviceGuard guard(waiter->device_index);
    FG_CUDA(guard.status());
    FG_CUDA(cudaStreamWaitEvent(stream_of(waiter), static_cast<cudaEvent_t>(mark), 0));
    return FG_OK;
}

void forget(void *mark) { cudaEventDestroy(static_cast<cudaEvent_t>(mark)); }

fg_status is_capturing(const fg_queue *queue, bool *capturing, fg_error *error) {
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    const cudaError_t status = cudaStreamIsCapturing(stream_of(queue), &capture);
    *capturing = capture != cudaStreamCaptureStatusNone;
    if (status != cudaErrorStreamCaptureImplicit) return cuda_status(status, "cudaStreamIsCapturing", error);
    cudaGetLastError();
    *capturing = true; /* of another stream, for which the legacy default stream would have to wait */
    return FG_OK;
}

}  // namespace

fg_status device_properties(int device, int *num_sms, int *compute_capability, fg_error *error) {
    /* num_sms << 16 | compute capability; 0 is unknown. Threads that meet here store the same value. */
    static std::atomic<uint32_t> cache[kMaxCachedDevices];

    const int limit = architecture_limit();
    if (limit == 0)
        return fg_fail(error, FG_ERROR_VALUE, "FLEXGEMM_ARCH: expected sm80 or sm89, got %s",
                       std::getenv("FLEXGEMM_ARCH"));

    const bool cached = device >= 0 && device < kMaxCachedDevices;
    uint32_t packed = cached ? cache[device].load(std::memory_order_relaxed) : 0;
    if (packed == 0) {
        int sms = 0, major = 0, minor = 0;
        FG_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
        FG_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
        FG_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
        if (major < 8)
            return fg_fail(error, FG_ERROR_UNSUPPORTED,
                           "CUDA device %d: compute capability %d.%d, flexgemm needs 8.0 or later", device, major,
                           minor);
        packed = static_cast<uint32_t>(sms) << 16 | static_cast<uint32_t>(10 * major + minor);
        if (cached) cache[device].store(packed, std::memory_order_relaxed);
    }
    *num_sms = static_cast<int>(packed >> 16);
    *compute_capability = std::min(static_cast<int>(packed & 0xffff), limit);
    return FG_OK;
}

}  // namespace flexgemm

#define FG_ENTRY(operation) .operation##_workspace = flexgemm::operation##_workspace, .operation = flexgemm::operation
#define FG_ENTRY_RUN(operation) .operation##_workspace = nullptr, .operation = flexgemm::operation

extern "C" const fg_backend *fg_cuda_backend(void) {
    static const fg_backend backend = {
        .name = "cuda",
        FG_ENTRY(neighbor_map),
        FG_ENTRY(conv_sites),
        FG_ENTRY(row_order),
        FG_ENTRY_RUN(ordered_map),
        FG_ENTRY_RUN(segment_map),
        FG_ENTRY_RUN(encode_seq),
        FG_ENTRY_RUN(decode_seq),
        FG_ENTRY(sort_keys),
        FG_ENTRY(hash_insert),
        FG_ENTRY_RUN(hash_lookup),
        FG_ENTRY(sample_map),
        FG_ENTRY(sample_forward),
        FG_ENTRY_RUN(sample_grad),
        FG_ENTRY_RUN(gather_sum),
        FG_ENTRY(group_rows),
        FG_ENTRY(group_reduce),
        FG_ENTRY_RUN(voxel_codes),
        FG_ENTRY(unique_ranks),
        FG_ENTRY_RUN(unique_groups),
        FG_ENTRY(conv_forward),
        FG_ENTRY(conv_dgrad),
        FG_ENTRY(conv_wgrad),
        FG_ENTRY(depthwise_forward),
        FG_ENTRY(depthwise_dgrad),
        FG_ENTRY(depthwise_wgrad),
        FG_ENTRY_RUN(pool),
        FG_ENTRY_RUN(pool_backward),
        FG_ENTRY_RUN(batch_indices),
        FG_ENTRY(gemm),
        FG_ENTRY(quantize),
        .device_count = flexgemm::device_count,
        .device_info = flexgemm::device_info,
        .allocate = flexgemm::allocate,
        .release = flexgemm::release,
        .copy_to_device = flexgemm::copy_to_device,
        .copy_to_host = flexgemm::copy_to_host,
        .wait_for = flexgemm::wait_for,
        .synchronize = flexgemm::synchronize,
        .mark = flexgemm::mark,
        .passed = flexgemm::passed,
        .wait_for_mark = flexgemm::wait_for_mark,
        .forget = flexgemm::forget,
        .is_capturing = flexgemm::is_capturing,
    };
    return &backend;
}
