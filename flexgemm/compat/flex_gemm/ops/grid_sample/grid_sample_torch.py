"""flex_gemm.ops.grid_sample.grid_sample_torch."""

from flexgemm.compat.flex_gemm.ops.grid_sample import grid_sample_3d_torch

__all__ = ["grid_sample_3d_torch"]
