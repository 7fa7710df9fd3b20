/*
 * Products: the entry point, which hands them to the kernels of Hopper (gemm_sm90.cu) or to the portable ones
 * (gemm_portable.cu).
 */
#include <cmath>

#include "../plan.h"
#include "backend.cuh"
#include "common.cuh"
#include "transpose.cuh"

namespace flexgemm {
namespace {

bool is_k_major(const fg_gemm_params &params) { return !params.b_row_major && !fg_lies_in_columns(&params.a); }

/* The same product with operands that are not K-major transposed, which have places in the workspace: so many bytes of
 * each, or none. */
struct Way {
    fg_gemm_params product;
    size_t bytes_a, bytes_b;
};

Way transposing(const fg_gemm_params &params, bool a, bool b) {
    Way way = {params, 0, 0};
    char *const workspace = static_cast<char *>(params.workspace.data);
    if (b) {
        way.bytes_b = transposed_bytes(params.b);
        way.product.b = transposed(params.b, workspace);
        way.product.b_row_major = false;
    }
    if (a) {
        const fg_tensor rows = fg_exchanged(&params.a);
        way.bytes_a = transposed_bytes(rows);
        way.product.a = transposed(rows, workspace ? workspace + way.bytes_b : nullptr);
    }
    return way;
}

/* The way of least cost: Hopper takes some products as they lie, others beside a transposed A. By all multiprocessors,
 * whatever the caller may use, and wherever the output begins: a workspace is large enough whenever it is asked for. */
Way choose_way(const fg_gemm_params &params, int num_sms, int compute_capability) {
    const bool a = fg_lies_in_columns(&params.a), b = params.b_row_major;
    Way best = transposing(params, a, b);
    if (compute_capability != 90 || !b) return best;
    const auto cost_of = [&](const Way &way) {
        fg_gemm_params product = way.product;
        product.out.data = nullptr;
        return fg_gemm_cost_sm90(&product, num_sms) + fg_transposition_cost_sm90(way.bytes_a) +
               fg_transposition_cost_sm90(way.bytes_b);
    };
    double least = gemm_sm90_takes(best.product) ? cost_of(best) : INFINITY;
    for (const bool with_a : {true, false}) {
        if (with_a && !a) continue;
        const Way way = transposing(params, with_a, false);
        if (!gemm_sm90_takes_row_major(way.product)) continue;
        const double cost = cost_of(way);
        if (cost > least) continue;
        least = cost;
        best = way;
    }
    return best;
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
    const Way way = choose_way(*params, num_sms, compute_capability);
    *bytes = way.bytes_a + way.bytes_b;
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
    Way way;
    if (!is_k_major(*params)) {
        way = choose_way(*params, num_sms, compute_capability);
        const int max_blocks = bounded ? used_sms : INT32_MAX;
        if (way.bytes_b > 0) status = transpose(params->b, way.product.b, max_blocks, queue, error);
        if (status == FG_OK && way.bytes_a > 0)
            status = transpose(fg_exchanged(&params->a), way.product.a, max_blocks, queue, error);
        if (status != FG_OK) return status;
        params = &way.product;
    }
    if (compute_capability == 90 && gemm_sm90_takes(*params)) return gemm_sm90(*params, used_sms, queue, error);
    return gemm_portable(*params, used_sms, compute_capability, queue, error);
}

}  // namespace flexgemm
