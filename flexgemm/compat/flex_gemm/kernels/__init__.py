"""flex_gemm.kernels."""

from flexgemm.compat.flex_gemm.kernels import cuda, triton

__all__ = ["cuda", "triton"]
