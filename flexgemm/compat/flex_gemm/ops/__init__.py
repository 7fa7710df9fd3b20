"""flex_gemm.ops."""

from flexgemm.compat.flex_gemm.ops import spconv

__all__ = ["spconv"]
