/*
 * Products: the entry point, which hands them to the kernels of Hopper (gemm_sm90.cu) or to the portable ones
 * (gemm_portable.cu).
 */
#include "../plan.h"
#include "backend.cuh"
#include "common.cuh"
#include "transpose.cuh"

namespace flexgemm {

fg_status gemm_workspace(const fg_gemm_params *params, const fg_queue *queue, size_t *bytes, fg_error *error) {
    (void)queue, (void)error;
    const fg_gemm_shape shape = fg_gemm_shape_of(params);
    *bytes = params->b_row_major && !fg_gemm_is_empty(&shape) ? transposed_bytes(params->b) : 0;
    return FG_OK;
}

fg_status gemm(const fg_gemm_params *params, const fg_queue *queue, fg_error *error) {
    const fg_gemm_shape shape = fg_gemm_shape_of(params);
    if (fg_gemm_is_empty(&shape)) return FG_OK;

    int num_sms = 0, compute_capability = 0;
    fg_status status = device_properties(queue->device_index, &num_sms, &compute_capability, error);
    if (status != FG_OK) return status;
    const bool bounded = params->num_sms > 0 && params->num_sms < num_sms;
    if (bounded) num_sms = params->num_sms;

    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    fg_gemm_params given = *params;
    if (params->b_row_major) {
        given.b = transposed(params->b, params->workspace.data);
        status = transpose(params->b, given.b, bounded ? num_sms : INT32_MAX, queue, error);
        if (status != FG_OK) return status;
        given.b_row_major = false;
    }
    if (compute_capability == 90 && gemm_sm90_takes(given)) return gemm_sm90(given, num_sms, queue, error);
    return gemm_portable(given, num_sms, compute_capability, queue, error);
}

}  // namespace flexgemm
