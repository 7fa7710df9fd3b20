/*
 * CUDA graphs: between cudaStreamBeginCapture and cudaStreamEndCapture what goes to the stream is kept, with the
 * arguments that it has, and done when the graph is launched. One capture at a time; branches through events are not
 * emulated. What a card refuses in the meantime is an error here too, and the capture is lost.
 */
#include "runtime.h"
#include "simt.h"

#include <vector>

namespace simt {
namespace {

using Graph = std::vector<std::function<cudaError_t()>>;

struct Capture {
    cudaStream_t stream;
    Graph *work;
    bool intact;
} capture; /* work NULL: none is under way */

thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

/* The legacy default stream waits for all others, captured ones too. */
bool concerned(cudaStream_t stream) { return capture.work && (stream == capture.stream || stream == nullptr); }

cudaError_t lose(cudaError_t status) {
    capture.intact = false;
    return set_error(status, "");
}

}  // namespace

cudaError_t in_stream(cudaStream_t stream, std::function<cudaError_t()> work) {
    if (!concerned(stream)) return work();
    if (stream != capture.stream) return lose(cudaErrorStreamCaptureImplicit);
    capture.work->push_back(std::move(work));
    return cudaSuccess;
}

cudaError_t refuse_in_capture() {
    if (capture.work == nullptr || mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
    return lose(cudaErrorStreamCaptureUnsupported);
}

cudaError_t refuse_in_capture(cudaStream_t stream) {
    return concerned(stream) ? lose(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

}  // namespace simt

using namespace simt;

#pragma GCC visibility push(default) /* for tests, through ctypes */
extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (capture.work || stream == nullptr) return set_error(cudaErrorStreamCaptureUnsupported, "");
    capture = {stream, new Graph, true};
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    if (!concerned(stream)) return cudaSuccess;
    if (stream != capture.stream) return set_error(cudaErrorStreamCaptureImplicit, "");
    *status = capture.intact ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusInvalidated;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    *graph = nullptr;
    if (capture.work == nullptr || stream != capture.stream) return set_error(cudaErrorIllegalState, "");
    Graph *const work = capture.work;
    capture.work = nullptr;
    if (!capture.intact) {
        delete work;
        return set_error(cudaErrorStreamCaptureInvalidated, "");
    }
    *graph = reinterpret_cast<cudaGraph_t>(work);
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long) {
    *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph *>(graph)));
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
    for (const auto &work : *reinterpret_cast<Graph *>(executable)) {
        const cudaError_t status = work();
        if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete reinterpret_cast<Graph *>(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    delete reinterpret_cast<Graph *>(executable);
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *other) {
    std::swap(mode, *other);
    return cudaSuccess;
}

}  // extern "C"
#pragma GCC visibility pop
