"""flex_gemm.kernels.triton: its settings; the kernels are flexgemm's."""

from flexgemm.compat.flex_gemm.kernels.triton import spconv

__all__ = ["spconv"]
