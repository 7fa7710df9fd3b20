"""flex_gemm.ops.grid_sample.grid_sample_torch."""

from flexgemm.compat.flex_gemm.ops.grid_sample import grid_sample_3d_torch


class GridSample3dTorch:
    forward = staticmethod(grid_sample_3d_torch)


__all__ = ["GridSample3dTorch", "grid_sample_3d_torch"]
