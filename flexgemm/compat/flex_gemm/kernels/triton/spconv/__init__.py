"""flex_gemm.kernels.triton.spconv."""

from flexgemm.compat.flex_gemm.kernels.triton.spconv import config

__all__ = ["config"]
