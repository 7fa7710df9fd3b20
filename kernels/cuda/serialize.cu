/*
 * Codes of voxels along a curve, and back: one thread a voxel, bound by the bytes it moves.
 */
#include "../sequence.h"
#include "backend.cuh"
#include "common.cuh"
#include "coords.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256;

template <class Code>
__global__ void __launch_bounds__(kThreads) encode_kernel(Coords coords, fg_curve curve, Code *code) {
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (n >= coords.count) return;
    const int4 c = coords[n];
    const int32_t coord[4] = {c.x, c.y, c.z, c.w};
    code[n] = fg_curve_contains(&curve, coord) ? static_cast<Code>(fg_encode(&curve, coord)) : ~Code{0};
}

template <class Code>
__global__ void __launch_bounds__(kThreads) decode_kernel(const Code *code, fg_curve curve, WritableCoords coords) {
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (n >= coords.count) return;
    int32_t coord[4];
    const bool inside = fg_decode(&curve, code[n], coord);
    coords.store(n, inside ? make_int4(coord[0], coord[1], coord[2], coord[3]) : make_int4(-1, -1, -1, -1));
}

}  // namespace

fg_status encode_seq_workspace(const fg_encode_seq_params *, const fg_queue *, size_t *bytes, fg_error *) {
    *bytes = 0;
    return FG_OK;
}

fg_status encode_seq(const fg_encode_seq_params *p, const fg_queue *queue, fg_error *error) {
    const int64_t count = p->coords.shape[0];
    if (count == 0) return FG_OK;
    unsigned int blocks = 0;
    const fg_status status = grid_for(count, kThreads, "coords", &blocks, error);
    if (status != FG_OK) return status;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const fg_curve curve = fg_make_curve(p->mode, p->shape);
    const Coords coords(p->coords);
    if (p->code.dtype == FG_INT32)
        encode_kernel<uint32_t>
            <<<blocks, kThreads, 0, stream_of(queue)>>>(coords, curve, static_cast<uint32_t *>(p->code.data));
    else
        encode_kernel<uint64_t>
            <<<blocks, kThreads, 0, stream_of(queue)>>>(coords, curve, static_cast<uint64_t *>(p->code.data));
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

fg_status decode_seq_workspace(const fg_decode_seq_params *, const fg_queue *, size_t *bytes, fg_error *) {
    *bytes = 0;
    return FG_OK;
}

fg_status decode_seq(const fg_decode_seq_params *p, const fg_queue *queue, fg_error *error) {
    const int64_t count = p->coords.shape[0];
    if (count == 0) return FG_OK;
    unsigned int blocks = 0;
    const fg_status status = grid_for(count, kThreads, "code", &blocks, error);
    if (status != FG_OK) return status;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const fg_curve curve = fg_make_curve(p->mode, p->shape);
    const WritableCoords coords(p->coords);
    if (p->code.dtype == FG_INT32)
        decode_kernel<uint32_t>
            <<<blocks, kThreads, 0, stream_of(queue)>>>(static_cast<const uint32_t *>(p->code.data), curve, coords);
    else
        decode_kernel<uint64_t>
            <<<blocks, kThreads, 0, stream_of(queue)>>>(static_cast<const uint64_t *>(p->code.data), curve, coords);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

}  // namespace flexgemm
