"""Voxels and values for the tests: unique coordinates in shuffled order, and data that judges rows fairly."""

from __future__ import annotations

import numpy as np
from reference import dtype_of


def scene(n, *, batch=1, density=0.3, seed=0):
    """n unique voxels over `batch` samples at about this density: (coords (n, 4) int32, shape (B, W, H, D))."""
    rng = np.random.default_rng(seed)
    cells = max(n / density / batch, 1.0)
    width = max(int(np.ceil(cells ** (1 / 3))), 2)
    shape = (batch, width, width + 1, max(int(np.ceil(cells / (width * (width + 1)))), 2))
    flat = rng.choice(np.prod(shape), size=n, replace=False)
    return np.stack(np.unravel_index(flat, shape), axis=1).astype(np.int32), shape


def voxels(n, device="cpu"):
    """`scene(n)` as a tensor of torch's."""
    import torch

    coords, shape = scene(n)
    return torch.from_numpy(coords).to(device), shape


def leaves(n, device="cpu", ci=5, co=5, kernel_size=(3, 3, 3)):
    """Features, weight and bias of a convolution that autograd records."""
    import torch

    torch.manual_seed(0)
    shapes = (n, ci), (co, *kernel_size, ci), (co,)
    return [torch.randn(shape, device=device).requires_grad_() for shape in shapes]


def shell(resolution, *, seed=0):
    """The hollow sphere of the benchmarks: a surface, as real scenes are."""
    axis = np.arange(resolution) - resolution / 2 + 0.5
    distance = np.sqrt(axis[:, None, None] ** 2 + axis[None, :, None] ** 2 + axis[None, None, :] ** 2)
    points = np.argwhere((distance >= resolution / 2 - 1.25) & (distance <= resolution / 2))
    coords = np.concatenate([np.zeros((len(points), 1)), points], axis=1).astype(np.int32)
    return np.random.default_rng(seed).permutation(coords), (1, resolution, resolution, resolution)


def far_corner(n, shape, *, seed=0):
    """n unique voxels packed against the last voxel of a huge grid, where keys need 64 bits."""
    coords, _ = scene(n, seed=seed)
    return (np.asarray(shape, np.int64) - 1 - coords).astype(np.int32)


def values(rng, shape, dtype, *, one_sign=False):
    """Standard normal numbers in `dtype`, or their magnitudes.

    Rows are judged relative to their own norm. Where a row has few elements their sums can cancel, and then no
    float32 sum meets a relative bound: such cases use one sign, which makes the bound sharp instead of loose.
    """
    x = rng.standard_normal(shape, dtype=np.float32)
    return (np.abs(x) if one_sign else x).astype(dtype_of(dtype))
