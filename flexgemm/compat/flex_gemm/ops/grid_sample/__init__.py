"""flex_gemm.ops.grid_sample: features of sparse voxels at points."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import flexgemm.torch
from flexgemm.compat.flex_gemm.ops.grids import grid_of

HASHMAP_RATIO = 2.0


def set_hashmap_ratio(ratio: float) -> None:
    """Kept; flexgemm chooses the size of its tables."""
    global HASHMAP_RATIO
    HASHMAP_RATIO = ratio


def grid_sample_3d(
    feats: torch.Tensor, coords: torch.Tensor, shape: Sequence[int], grid: torch.Tensor, mode: str = "trilinear"
) -> torch.Tensor:
    """(B, L, C): features at grid (B, L, 3), points x, y, z of each sample, voxel centres at + 0.5.

    feats: (N, C). coords: (N, 4). shape: (B, C, W, H, D). mode: "trilinear", over the voxels that are there, or
    "nearest". Differentiable in feats, and with flexgemm in the points of "trilinear" too.
    """
    return flexgemm.torch.grid_sample_3d(feats, coords.int(), grid_of(shape), grid.float(), mode)


grid_sample_3d_torch = grid_sample_3d


class GridSample3dFunction:
    apply = staticmethod(grid_sample_3d)


__all__ = ["HASHMAP_RATIO", "GridSample3dFunction", "grid_sample_3d", "grid_sample_3d_torch", "set_hashmap_ratio"]
