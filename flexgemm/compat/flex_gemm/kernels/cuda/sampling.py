"""Which voxels lie around points, and how they weigh."""

from __future__ import annotations

import torch

from flexgemm.compat.flex_gemm.kernels.cuda.maps import of_any_sample
from flexgemm.grid_sample import SampleMap, sample_map


def numbered(grid: torch.Tensor) -> torch.Tensor:
    """(B * L, 4): each point of grid (B, L, 3) behind the number of its sample."""
    samples = torch.arange(len(grid), dtype=grid.dtype, device=grid.device)
    return torch.cat([samples.view(-1, 1, 1).expand(*grid.shape[:2], 1), grid], 2).flatten(0, 1)


def _sample_map(coords: torch.Tensor, grid: torch.Tensor, W: int, H: int, D: int, mode: str) -> SampleMap:
    """Voxels may be of samples without points: a GPU leaves them out, the CPU refuses what the shape does not count."""
    if grid.is_cuda:
        return sample_map(coords, (len(grid), W, H, D), grid, mode)
    return sample_map(coords, of_any_sample(W, H, D), numbered(grid), mode)


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
    indices: torch.Tensor = _sample_map(coords, grid, W, H, D, "nearest").indices
    return indices.reshape(grid.shape[:2]).view(torch.uint32)


def hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight(
    hashmap_keys: torch.Tensor,
    hashmap_vals: torch.Tensor,
    coords: torch.Tensor,
    grid: torch.Tensor,
    W: int,
    H: int,
    D: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, L, 8) uint32, the voxels around each point of grid (B, L, 3), and their weights, float32; corner
    kx + 2 ky + 4 kz, where a map of flexgemm has 4 kx + 2 ky + kz."""
    found, shape = _sample_map(coords, grid, W, H, D, "trilinear"), (*grid.shape[:2], 2, 2, 2)
    assert found.weights is not None
    weights, indices = (x.reshape(shape).transpose(2, 4).flatten(2) for x in (found.weights, found.indices))
    return indices.view(torch.uint32), weights
