"""Which voxels lie around points, and how they weigh."""

from __future__ import annotations

import torch

from flexgemm.grid_sample import SampleMap, sample_map


def hashmap_build_grid_sample_3d_nearest_neighbor_map(
    hashmap_keys: torch.Tensor,
    hashmap_vals: torch.Tensor,
    coords: torch.Tensor,
    grid: torch.Tensor,
    W: int,
    H: int,
    D: int,
) -> torch.Tensor:
    """(B, L) uint32: the voxel that each point of grid (B, L, 3) lies in. The table's memory is not used."""
    return _indices(sample_map(coords, (len(grid), W, H, D), grid, "nearest"), grid.shape[:2])


def hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight(
    hashmap_keys: torch.Tensor,
    hashmap_vals: torch.Tensor,
    coords: torch.Tensor,
    grid: torch.Tensor,
    W: int,
    H: int,
    D: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, L, 8) uint32, the voxels around each point of grid (B, L, 3), and their weights, float32."""
    found, shape = sample_map(coords, (len(grid), W, H, D), grid, "trilinear"), (*grid.shape[:2], 8)
    assert found.weights is not None
    return _indices(found, shape), found.weights.reshape(shape)


def _indices(found: SampleMap, shape: tuple[int, ...]) -> torch.Tensor:
    indices: torch.Tensor = found.indices
    return indices.reshape(shape).view(torch.uint32)
