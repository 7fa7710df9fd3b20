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
    *bytes = 0;
    if (!params->b_row_major && !lies_in_columns(params->a)) return FG_OK;
    const fg_gemm_shape shape = fg_gemm_shape_of(params);
    if (fg_gemm_is_empty(&shape)) return FG_OK;
    if (params->b_row_major) *bytes += transposed_bytes(params->b);
    if (lies_in_columns(params->a)) *bytes += transposed_bytes(exchanged(params->a));
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
    char *workspace = static_cast<char *>(params->workspace.data);
    const auto turn = [&](const fg_tensor &matrix, fg_tensor *result) {
        *result = transposed(matrix, workspace);
        workspace += transposed_bytes(matrix);
        return transpose(matrix, *result, bounded ? num_sms : INT32_MAX, queue, error);
    };
    if (params->b_row_major) {
        status = turn(params->b, &given.b);
        if (status != FG_OK) return status;
        given.b_row_major = false;
    }
    if (lies_in_columns(params->a)) {
        status = turn(exchanged(params->a), &given.a);
        if (status != FG_OK) return status;
    }
    if (compute_capability == 90 && gemm_sm90_takes(given)) return gemm_sm90(given, num_sms, queue, error);
    return gemm_portable(given, num_sms, compute_capability, queue, error);
}

}  // namespace flexgemm
