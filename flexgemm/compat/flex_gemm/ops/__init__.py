"""flex_gemm.ops."""

from flexgemm.compat.flex_gemm.ops import grid_sample, serialize, spconv, utils

__all__ = ["grid_sample", "serialize", "spconv", "utils"]
