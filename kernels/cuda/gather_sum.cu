/*
 * Weighted sums of gathered rows: a group of lanes an output row, in the order of the terms. Bound by the rows that it
 * reads, from L2 where neighbouring outputs share them.
 */
#include "backend.cuh"
#include "lanes.cuh"

namespace flexgemm {
namespace {

template <class T, int kVector>
__global__ void __launch_bounds__(kLaneThreads)
    gather_sum_kernel(RowsOf<const T> feats, RowsOf<T> out, const int32_t *indices, const float *weights, int64_t terms,
                      int log_lanes) {
    const LaneGroup group(log_lanes);
    if (group.number >= out.rows) return;
    indices += group.number * terms;
    if (weights) weights += group.number * terms;
    for (int64_t c = group.lane * kVector; c < out.columns; c += group.lanes * kVector) {
        float sum[kVector] = {};
#pragma unroll 4
        for (int64_t k = 0; k < terms; ++k) {
            const int32_t row = indices[k];
            const bool present = row >= 0 && row < feats.rows;
            float value[kVector] = {};
            if (present) load_piece(value, feats.row(row) + c);
            const float weight = !present ? 0.0f : weights ? weights[k] : 1.0f;
#pragma unroll
            for (int i = 0; i < kVector; ++i) sum[i] = fmaf(weight, value[i], sum[i]);
        }
        store_piece(out.row(group.number) + c, sum);
    }
}

}  // namespace

fg_status gather_sum(const fg_gather_sum_params *p, const fg_queue *queue, fg_error *error) {
    if (p->out.shape[0] == 0 || p->out.shape[1] == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const bool aligned = is_aligned(p->feats, 16) && is_aligned(p->out, 16);
    return dispatch_rows(p->feats.dtype, aligned, [&](auto *element, auto vector) -> fg_status {
        using T = std::remove_pointer_t<decltype(element)>;
        const int log_lanes = log_lanes_for(p->out.shape[1], vector());
        unsigned int blocks = 0;
        const fg_status status = lane_blocks(p->out.shape[0], log_lanes, "indices", &blocks, error);
        if (status != FG_OK) return status;
        gather_sum_kernel<T, vector()><<<blocks, kLaneThreads, 0, stream_of(queue)>>>(
            RowsOf<const T>(p->feats), RowsOf<T>(p->out), static_cast<const int32_t *>(p->indices.data),
            static_cast<const float *>(p->weights.data), p->indices.shape[1], log_lanes);
        FG_CUDA(cudaGetLastError());
        return FG_OK;
    });
}

}  // namespace flexgemm
