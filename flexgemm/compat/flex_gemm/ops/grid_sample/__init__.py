"""flex_gemm.ops.grid_sample: features of sparse voxels at points."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import flexgemm.torch
from flexgemm.compat.flex_gemm.kernels.cuda.sampling import numbered
from flexgemm.compat.flex_gemm.ops.grids import grid_of
from flexgemm.grid_sample import SampleMap, sample_map
from flexgemm.torch.dispatch import expect_tensor

HASHMAP_RATIO = 2.0


def set_hashmap_ratio(ratio: float) -> None:
    """Kept; flexgemm chooses the size of its tables."""
    global HASHMAP_RATIO
    HASHMAP_RATIO = ratio


def grid_sample_3d(
    feats: torch.Tensor, coords: torch.Tensor, shape: Sequence[int], grid: torch.Tensor, mode: str = "trilinear"
) -> torch.Tensor:
    """(B, L, C): features at grid (B, L, 3), points x, y, z of each sample, voxel centres at + 0.5.

    feats: (N, C), of any dtype for "nearest". coords: (N, 4). shape: (B, C, W, H, D), whose B need not be that of grid.
    mode: "trilinear", over the voxels that are there, or "nearest". Differentiable in feats, and with flexgemm in the
    points of "trilinear" too.
    """
    expect_tensor(feats, "feats")
    samples, *extents = grid_of(shape)
    points, voxels = grid.float(), coords.int()
    if grid.ndim == 3:
        points = numbered(points) if len(grid) < samples else points
        samples = max(samples, len(grid))
    sites = voxels, (samples, *extents), points, mode
    if mode == "nearest" and feats.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        out = _rows(feats, sample_map(*sites))
    else:
        out = flexgemm.torch.grid_sample_3d(feats, *sites)
    return out.reshape(*grid.shape[:-1], out.shape[-1])


def _rows(feats: torch.Tensor, found: SampleMap) -> torch.Tensor:
    """(Q, C): the rows of feats (N, C) that were found, zeros where there is none."""
    if feats.ndim != 2 or len(feats) != found.num_voxels:
        raise ValueError(f"feats: expected ({found.num_voxels}, C) to match coords, got {tuple(feats.shape)}")
    with_none = torch.cat([feats, feats.new_zeros((1, feats.shape[1]))])
    return with_none.index_select(0, found.indices.flatten() % len(with_none))


grid_sample_3d_torch = grid_sample_3d


class GridSample3dFunction:
    apply = staticmethod(grid_sample_3d)


__all__ = ["HASHMAP_RATIO", "GridSample3dFunction", "grid_sample_3d", "grid_sample_3d_torch", "set_hashmap_ratio"]
