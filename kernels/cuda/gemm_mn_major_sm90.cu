/*
 * Kernels of gemm_sm90.cuh for 16-bit products whose A is M-major and B N-major: those of weight gradients, whose K is
 * rows of both.
 */
#include "gemm_launch_sm90.cuh"

namespace flexgemm {

fg_status gemm_mn_major_sm90(const fg_plan &plan, const TensorRows &a, const TensorRows &b, fg_dtype dtype,
                             GemmSm90Args &args, int num_sms, const fg_queue *queue, fg_error *error) {
    return launch_halves<Sm90HalfKmKn, Sm90Bfloat16KmKn>(plan, a, b, dtype, args, num_sms, queue, error);
}

}  // namespace flexgemm
