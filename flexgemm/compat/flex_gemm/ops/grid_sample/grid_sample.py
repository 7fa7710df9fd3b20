"""flex_gemm.ops.grid_sample.grid_sample."""

from flexgemm.compat.flex_gemm.ops.grid_sample import GridSample3dFunction, grid_sample_3d

__all__ = ["GridSample3dFunction", "grid_sample_3d"]
