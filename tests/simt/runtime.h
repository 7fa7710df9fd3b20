/* The emulated CUDA runtime, as far as the scheduler needs it. */
#pragma once

#include <cuda_runtime.h>

#include <mutex>
#include <string>

namespace simt {

extern std::mutex one_launch; /* at a time, and memory is neither copied, set nor freed meanwhile */

cudaError_t set_error(cudaError_t status, const std::string &text);
size_t dynamic_shared_limit(const void *function);
std::string describe_memory(const void *address); /* which allocation is near */

/* While it lives, nobody reaches the memory of devices but the current one. */
class OnlyThisDevice {
public:
    OnlyThisDevice();
    ~OnlyThisDevice();
};

/* ---- capture (graph.cpp) ---- */

cudaError_t refuse_in_capture(); /* for calls that no thread may make while a capture is under way */
cudaError_t refuse_in_capture(cudaStream_t stream);

}  // namespace simt
