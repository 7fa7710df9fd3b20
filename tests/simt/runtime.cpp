/*
 * The CUDA runtime of the emulated devices, as far as the project calls it: streams do their work at once, memory lies
 * between pages that nobody may touch and starts as NaN. A kernel reaches the memory of its own device alone.
 */
#include "runtime.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "async.h"

namespace simt {
namespace {

constexpr size_t kPage = 4096, kAlignment = 256, kMemoryBytes = size_t{8} << 30;
constexpr size_t kPoisonBytes = size_t{64} << 20; /* of an allocation */
constexpr int kBlockSharedBytes = 227 << 10, kDefaultSharedBytes = 48 << 10;

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;
thread_local bool has_context = false;   /* to the driver a thread has none until it first sets a device or allocates */
thread_local std::string launch_failure; /* what cudaErrorLaunchFailure was about */

/* ---- memory ---- */

struct Allocation {
    char *data, *pages;
    size_t bytes, page_bytes;
    int device;
};

std::mutex memory_mutex;
std::map<const char *, Allocation> allocations;
size_t allocated;

int device_count() {
    const char *text = std::getenv("FLEXGEMM_SIMT_DEVICES");
    return text ? std::atoi(text) : 2;
}

/* Of the memory of all devices but the current one. */
void protect_others(int protection) {
    const std::lock_guard<std::mutex> guard(memory_mutex);
    for (const auto &[data, allocation] : allocations)
        if (allocation.device != current_device)
            mprotect(allocation.pages + kPage, allocation.page_bytes - 2 * kPage, protection);
}

const Allocation *allocation_at(const void *address) {
    const auto byte = static_cast<const char *>(address);
    auto after = allocations.upper_bound(byte);
    if (after == allocations.begin()) return nullptr;
    const Allocation &found = std::prev(after)->second;
    return byte < found.data + found.bytes ? &found : nullptr;
}

cudaError_t allocate(void **data, size_t bytes) {
    *data = nullptr;
    has_context = true;
    if (bytes == 0) return cudaSuccess;
    const std::lock_guard<std::mutex> guard(memory_mutex);
    if (bytes > kMemoryBytes - allocated) return set_error(cudaErrorMemoryAllocation, "");
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    const size_t inner = (rounded + kPage - 1) / kPage * kPage, pages = inner + 2 * kPage;
    void *memory = mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return set_error(cudaErrorMemoryAllocation, "");
    char *first = static_cast<char *>(memory);
    mprotect(first, kPage, PROT_NONE);
    mprotect(first + kPage + inner, kPage, PROT_NONE);
    char *begin = first + kPage + inner - rounded;
    std::memset(begin, 0xff, std::min(rounded, kPoisonBytes));
    allocations[begin] = {begin, first, bytes, pages, current_device};
    allocated += bytes;
    *data = begin;
    return cudaSuccess;
}

cudaError_t release(void *data) {
    if (data == nullptr) return cudaSuccess;
    const std::scoped_lock no_launch(one_launch, memory_mutex);
    const auto found = allocations.find(static_cast<char *>(data));
    if (found == allocations.end()) return set_error(cudaErrorInvalidValue, "");
    const Allocation allocation = found->second;
    /* The slack behind the last byte, up to the page's end, must be as it was. */
    const size_t slack = static_cast<size_t>(-allocation.bytes) % kAlignment;
    const char *end = allocation.data + allocation.bytes;
    const bool intact = allocation.bytes + slack > kPoisonBytes ||
                        std::all_of(end, end + slack, [](char byte) { return byte == '\xff'; });
    allocations.erase(found);
    allocated -= allocation.bytes;
    munmap(allocation.pages, allocation.page_bytes);
    if (!intact)
        return set_error(cudaErrorLaunchFailure,
                         "something wrote behind an allocation of " + std::to_string(allocation.bytes) + " bytes");
    return cudaSuccess;
}

cudaError_t copy(void *target, const void *source, size_t bytes, cudaMemcpyKind kind) {
    const std::scoped_lock no_launch(one_launch, memory_mutex);
    const auto on_device = [bytes](const void *address) {
        const Allocation *found = allocation_at(address);
        return found && found->device == current_device &&
               static_cast<const char *>(address) + bytes <= found->data + found->bytes;
    };
    const bool to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault && (to != on_device(target) || from != on_device(source)))
        return set_error(cudaErrorInvalidValue, "");
    std::memcpy(target, source, bytes);
    return cudaSuccess;
}

cudaError_t set(void *target, int value, size_t bytes) {
    const std::scoped_lock no_launch(one_launch, memory_mutex);
    const Allocation *found = allocation_at(target);
    if (found == nullptr || static_cast<char *>(target) + bytes > found->data + found->bytes)
        return set_error(cudaErrorInvalidValue, "");
    std::memset(target, value, bytes);
    return cudaSuccess;
}

/* ---- tensor maps ---- */

CUresult encode_tiled(CUtensorMap *result, CUtensorMapDataType type, cuuint32_t rank, void *data,
                      const cuuint64_t *sizes, const cuuint64_t *pitches, const cuuint32_t *box,
                      const cuuint32_t *element_steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
    static const uint8_t kBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
    static const uint32_t kSwizzleBytes[] = {UINT32_MAX, 32, 64, 128};
    if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
    if (type > CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ || rank < 1 || rank > 5 || swizzle > CU_TENSOR_MAP_SWIZZLE_128B ||
        interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || reinterpret_cast<uintptr_t>(result) % 64 ||
        reinterpret_cast<uintptr_t>(data) % 16)
        return CUDA_ERROR_INVALID_VALUE;
    TensorMap map = {};
    map.magic = kTensorMapMagic;
    map.rank = static_cast<uint8_t>(rank);
    map.element_bytes = kBytes[type];
    map.swizzle = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 0 : static_cast<uint8_t>(4 - swizzle);
    map.nan_fill = fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
    map.data = static_cast<const char *>(data);
    for (cuuint32_t axis = 0; axis < rank; ++axis) {
        if (sizes[axis] == 0 || sizes[axis] > uint64_t{1} << 32 || box[axis] == 0 || box[axis] > 256 ||
            element_steps[axis] != 1)
            return CUDA_ERROR_INVALID_VALUE;
        map.last[axis] = static_cast<uint32_t>(sizes[axis] - 1);
        map.box[axis] = box[axis];
        if (axis == 0) continue;
        if (pitches[axis - 1] % 16 || pitches[axis - 1] >= uint64_t{1} << 40) return CUDA_ERROR_INVALID_VALUE;
        map.pitch[axis - 1] = pitches[axis - 1];
    }
    const uint32_t row_bytes = box[0] * map.element_bytes;
    if (row_bytes % 16 || row_bytes > kSwizzleBytes[swizzle]) return CUDA_ERROR_INVALID_VALUE;
    std::memcpy(result, &map, sizeof map);
    return CUDA_SUCCESS;
}

using OnDevice = std::pair<int, const void *>; /* a function there */

std::mutex limits_mutex;
std::map<OnDevice, size_t> dynamic_limits;

}  // namespace

std::mutex one_launch;

cudaError_t in_stream_by_host(cudaStream_t stream, std::function<cudaError_t()> work) {
    return in_stream(stream, [work = std::move(work)] {
        const std::lock_guard<std::mutex> no_launch(one_launch);
        return work();
    });
}

OnlyThisDevice::OnlyThisDevice() { protect_others(PROT_NONE); }
OnlyThisDevice::~OnlyThisDevice() { protect_others(PROT_READ | PROT_WRITE); }

cudaError_t set_error(cudaError_t status, const std::string &text) {
    if (!text.empty()) {
        launch_failure = text;
        std::fprintf(stderr, "simt: %s\n", text.c_str());
    }
    return last_error = status;
}

size_t dynamic_shared_limit(const void *function) {
    const std::lock_guard<std::mutex> guard(limits_mutex);
    const auto found = dynamic_limits.find({current_device, function});
    return found == dynamic_limits.end() ? kDefaultSharedBytes : found->second;
}

std::string describe_memory(const void *address) {
    const auto byte = static_cast<const char *>(address);
    const auto after = allocations.upper_bound(byte);
    if (after != allocations.begin()) {
        const Allocation &before = std::prev(after)->second;
        if (byte < before.pages + before.page_bytes)
            return std::to_string(byte - before.data) + " bytes after the begin of an allocation of " +
                   std::to_string(before.bytes) + " on device " + std::to_string(before.device);
    }
    if (after != allocations.end() && byte >= after->second.pages)
        return std::to_string(after->second.data - byte) + " bytes before an allocation of " +
               std::to_string(after->second.bytes);
    return "";
}

}  // namespace simt

/* ---- the interface ---- */

using namespace simt;

extern "C" {

__attribute__((visibility("default"))) cudaError_t cudaGetLastError() { /* for tests/graphs.py */
    const cudaError_t status = last_error;
    last_error = cudaSuccess;
    return status;
}
const char *cudaGetErrorString(cudaError_t status) {
    if (status == cudaErrorLaunchFailure) return launch_failure.c_str();
    if (status == cudaErrorMemoryAllocation) return "out of memory";
    if (status == cudaErrorInvalidConfiguration) return "invalid configuration argument";
    if (status == cudaErrorInvalidDevice) return "invalid device ordinal";
    if (status == cudaErrorStreamCaptureUnsupported) return "operation not permitted when stream is capturing";
    if (status == cudaErrorStreamCaptureImplicit)
        return "operation would make the legacy stream depend on a capturing one";
    return status == cudaSuccess ? "no error" : "invalid argument";
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = device_count();
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) return set_error(cudaErrorInvalidDevice, "");
    current_device = device;
    has_context = true;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    if (device < 0 || device >= device_count()) return set_error(cudaErrorInvalidDevice, "");
    *properties = {};
    std::snprintf(properties->name, sizeof properties->name, "emulated Hopper");
    properties->major = 9;
    properties->totalGlobalMem = kMemoryBytes;
    properties->l2CacheSize = 50 << 20;
    cudaDeviceGetAttribute(&properties->multiProcessorCount, cudaDevAttrMultiProcessorCount, 0);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    if (device < 0 || device >= device_count()) return set_error(cudaErrorInvalidDevice, "");
    const char *multiprocessors = std::getenv("FLEXGEMM_SIMT_SMS");
    switch (attribute) {
        case cudaDevAttrMultiProcessorCount:
            *value = multiprocessors ? std::atoi(multiprocessors) : 8;
            return cudaSuccess;
        case cudaDevAttrL2CacheSize: /* small, so that what is divided by it is divided in tests */
            *value = 1 << 14;
            return cudaSuccess;
        case cudaDevAttrComputeCapabilityMajor:
            *value = 9;
            return cudaSuccess;
        case cudaDevAttrComputeCapabilityMinor:
            *value = 0;
            return cudaSuccess;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = kBlockSharedBytes;
            return cudaSuccess;
        default:
            return set_error(cudaErrorInvalidValue, "");
    }
}

cudaError_t cudaFuncSetAttribute(const void *function, cudaFuncAttribute attribute, int value) {
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout && value >= -1 && value <= 100) return cudaSuccess;
    if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed && value == 1) return cudaSuccess;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value > kBlockSharedBytes)
        return set_error(cudaErrorInvalidValue, "");
    const std::lock_guard<std::mutex> guard(limits_mutex);
    dynamic_limits[{current_device, function}] = static_cast<size_t>(value);
    return cudaSuccess;
}

/* As if its blocks had a multiprocessor each. */
cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *, const cudaLaunchConfig_t *config) {
    int multiprocessors = 0;
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0);
    for (unsigned int i = 0; i < config->numAttrs; ++i)
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
            multiprocessors /= static_cast<int>(config->attrs[i].val.clusterDim.x);
    *clusters = multiprocessors;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned int, unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
    const bool known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
    *function = known ? reinterpret_cast<void *>(encode_tiled) : nullptr;
    *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

/* ---- memory ---- */

cudaError_t cudaMalloc(void **data, size_t bytes) {
    const cudaError_t refused = refuse_in_capture();
    return refused ? refused : allocate(data, bytes);
}
cudaError_t cudaMallocAsync(void **data, size_t bytes, cudaStream_t stream) {
    const cudaError_t refused = refuse_in_capture(stream);
    return refused ? refused : allocate(data, bytes);
}
cudaError_t cudaMallocFromPoolAsync(void **data, size_t bytes, cudaMemPool_t, cudaStream_t stream) {
    return cudaMallocAsync(data, bytes, stream);
}
cudaError_t cudaFree(void *data) {
    const cudaError_t refused = refuse_in_capture();
    return refused ? refused : release(data);
}
cudaError_t cudaFreeAsync(void *data, cudaStream_t stream) {
    const cudaError_t refused = refuse_in_capture(stream);
    return refused ? refused : release(data);
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const cudaMemPoolProps *) {
    *pool = reinterpret_cast<cudaMemPool_t>(&allocations);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int) { return cudaMemPoolCreate(pool, nullptr); }
cudaError_t cudaMemPoolDestroy(cudaMemPool_t) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *) { return cudaSuccess; }

cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    return in_stream(stream, [=] { return copy(target, source, bytes, kind); });
}
cudaError_t cudaMemcpy(void *target, const void *source, size_t bytes, cudaMemcpyKind kind) {
    const cudaError_t refused = refuse_in_capture();
    return refused ? refused : copy(target, source, bytes, kind);
}
cudaError_t cudaMemsetAsync(void *target, int value, size_t bytes, cudaStream_t stream) {
    return in_stream(stream, [=] { return set(target, value, bytes); });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *address) {
    const std::lock_guard<std::mutex> guard(memory_mutex);
    *attributes = {};
    const Allocation *found = allocation_at(address);
    attributes->type = found ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    attributes->device = found ? found->device : 0;
    return cudaSuccess;
}

/* ---- streams: everything has happened already ---- */

cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return refuse_in_capture(stream); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t, unsigned int) { return refuse_in_capture(stream); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int) {
    *event = reinterpret_cast<cudaEvent_t>(new char);
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete reinterpret_cast<char *>(event);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t stream) { return refuse_in_capture(stream); }
cudaError_t cudaEventQuery(cudaEvent_t) { return refuse_in_capture(); }

}  // extern "C"
