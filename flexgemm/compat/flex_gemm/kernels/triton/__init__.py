"""flex_gemm.kernels.triton: its settings; the kernels are flexgemm's."""

from flexgemm.compat.flex_gemm.kernels.triton import spconv

config = spconv.config

__all__ = ["config", "spconv"]
