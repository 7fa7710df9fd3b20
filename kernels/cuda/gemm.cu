/*
 * Products: the entry point, which hands them to the kernels of Hopper (gemm_sm90.cu) or to the portable ones
 * (gemm_portable.cu).
 */
#include "../plan.h"
#include "backend.cuh"
#include "common.cuh"
#include "transpose.cuh"

namespace flexgemm {
namespace {

bool is_k_major(const fg_gemm_params &params) { return !params.b_row_major && !fg_lies_in_columns(&params.a); }

/* The same product of operands that are K-major: those that are not have a place in the workspace, of which they take
 * so many bytes. */
struct KMajor {
    fg_gemm_params product;
    size_t bytes;
};

KMajor make_k_major(const fg_gemm_params &params) {
    KMajor result = {params, 0};
    char *const workspace = static_cast<char *>(params.workspace.data);
    const auto place = [&](const fg_tensor &matrix) {
        const fg_tensor placed = transposed(matrix, workspace ? workspace + result.bytes : nullptr);
        result.bytes += transposed_bytes(matrix);
        return placed;
    };
    if (params.b_row_major) {
        result.product.b = place(params.b);
        result.product.b_row_major = false;
    }
    if (fg_lies_in_columns(&params.a)) result.product.a = place(fg_exchanged(&params.a));
    return result;
}

/* Whether they are multiplied as they lie. By all multiprocessors, whatever the caller may use: a workspace is large
 * enough wherever it is asked for. */
bool stay(const fg_gemm_params &params, const KMajor &k_major, int num_sms, int compute_capability) {
    return compute_capability == 90 && gemm_sm90_takes_row_major(params) &&
           fg_gemm_row_major_pays(&params, &k_major.product, k_major.bytes, num_sms);
}

}  // namespace

fg_status gemm_workspace(const fg_gemm_params *params, const fg_queue *queue, size_t *bytes, fg_error *error) {
    *bytes = 0;
    if (is_k_major(*params)) return FG_OK;
    const fg_gemm_shape shape = fg_gemm_shape_of(params);
    if (fg_gemm_is_empty(&shape)) return FG_OK;
    int num_sms = 0, compute_capability = 0;
    const fg_status status = device_properties(queue->device_index, &num_sms, &compute_capability, error);
    if (status != FG_OK) return status;
    const KMajor k_major = make_k_major(*params);
    if (!stay(*params, k_major, num_sms, compute_capability)) *bytes = k_major.bytes;
    return FG_OK;
}

fg_status gemm(const fg_gemm_params *params, const fg_queue *queue, fg_error *error) {
    const fg_gemm_shape shape = fg_gemm_shape_of(params);
    if (fg_gemm_is_empty(&shape)) return FG_OK;

    int num_sms = 0, compute_capability = 0;
    fg_status status = device_properties(queue->device_index, &num_sms, &compute_capability, error);
    if (status != FG_OK) return status;
    const bool bounded = params->num_sms > 0 && params->num_sms < num_sms;
    const int used_sms = bounded ? params->num_sms : num_sms;

    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    KMajor k_major;
    if (!is_k_major(*params)) {
        k_major = make_k_major(*params);
        if (stay(*params, k_major, num_sms, compute_capability)) return gemm_sm90(*params, used_sms, queue, error);
        const int max_blocks = bounded ? used_sms : INT32_MAX;
        if (params->b_row_major) status = transpose(params->b, k_major.product.b, max_blocks, queue, error);
        if (status == FG_OK && fg_lies_in_columns(&params->a))
            status = transpose(fg_exchanged(&params->a), k_major.product.a, max_blocks, queue, error);
        if (status != FG_OK) return status;
        params = &k_major.product;
    }
    if (compute_capability == 90 && gemm_sm90_takes(*params)) return gemm_sm90(*params, used_sms, queue, error);
    return gemm_portable(*params, used_sms, compute_capability, queue, error);
}

}  // namespace flexgemm
