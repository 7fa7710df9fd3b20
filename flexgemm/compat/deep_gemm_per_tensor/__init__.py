"""DeepGEMMPerTensor's public names over flexgemm: `flexgemm.compat.install("deep_gemm_per_tensor")`."""

from flexgemm.compat.deep_gemm_per_tensor.jit_kernels import (
    ceil_div,
    gemm_per_tensor_fp8_fp8_bf16_nt,
    get_m_alignment_for_contiguous_layout,
    get_num_sms,
    k_grouped_wgrad_gemm_per_tensor_fp8_fp8_fp32_nt,
    m_grouped_gemm_per_tensor_fp8_fp8_bf16_nt_contiguous,
    m_grouped_gemm_per_tensor_fp8_fp8_bf16_nt_masked,
    set_num_sms,
    wgrad_gemm_per_tensor_fp8_fp8_fp32_nt,
)
from flexgemm.compat.deep_gemm_per_tensor.utils import bench, bench_kineto, calc_diff

__all__ = [
    "bench",
    "bench_kineto",
    "calc_diff",
    "ceil_div",
    "gemm_per_tensor_fp8_fp8_bf16_nt",
    "get_m_alignment_for_contiguous_layout",
    "get_num_sms",
    "k_grouped_wgrad_gemm_per_tensor_fp8_fp8_fp32_nt",
    "m_grouped_gemm_per_tensor_fp8_fp8_bf16_nt_contiguous",
    "m_grouped_gemm_per_tensor_fp8_fp8_bf16_nt_masked",
    "set_num_sms",
    "wgrad_gemm_per_tensor_fp8_fp8_fp32_nt",
]
