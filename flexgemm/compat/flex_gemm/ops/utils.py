"""flex_gemm.ops.utils."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexgemm.compat.flex_gemm.ops.grids import grid_of


def init_hashmap(
    spatial_size: Sequence[int], hashmap_size: int, device: torch.device | str, with_values: bool = True
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """An empty table for the voxels of a grid (B, C, W, H, D): keys, uint32 below 2**32 voxels and else uint64, and
    unless told otherwise uint32 values."""
    batch, w, h, d = grid_of(spatial_size)
    dtype = torch.uint32 if batch * w * h * d < 2**32 else torch.uint64
    keys = torch.full((hashmap_size,), torch.iinfo(dtype).max, dtype=dtype, device=device)
    if not with_values:
        return keys
    return keys, torch.empty((hashmap_size,), dtype=torch.uint32, device=device)
