/*
 * Kernels of gemm_sm90.cuh for A of e4m3.
 */
#include "gemm_launch_sm90.cuh"

namespace flexgemm {

fg_status gemm_e4m3_sm90(const fg_plan &plan, const TensorRows &a, const TensorRows &b, fg_dtype of_b,
                         GemmSm90Args &args, int num_sms, const fg_queue *queue, fg_error *error) {
    return launch_fp8<Sm90E4m3E4m3, Sm90E4m3E5m2>(plan, a, b, of_b, args, num_sms, queue, error);
}

}  // namespace flexgemm
