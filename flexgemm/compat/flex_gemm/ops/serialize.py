"""flex_gemm.ops.serialize: voxels in Z order or along a Hilbert curve."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import flexgemm.torch
from flexgemm._arguments import expect_choice
from flexgemm.compat.flex_gemm.ops.grids import grid_of


def encode_seq(coords: torch.Tensor, shape: Sequence[int], mode: str = "z_order") -> torch.Tensor:
    """The code of each voxel, (N,) int32 up to 32 bits, else int64. coords (N, 4), shape (B, C, W, H, D)."""
    return flexgemm.torch.encode_seq(coords.int(), grid_of(shape), _curve(mode))


def decode_seq(code: torch.Tensor, shape: Sequence[int], mode: str = "z_order") -> torch.Tensor:
    """The voxels (N, 4) int32 of codes that `encode_seq` gave for this shape."""
    return flexgemm.torch.decode_seq(code, grid_of(shape), _curve(mode))


def _curve(mode: str) -> str:
    expect_choice(mode, "mode", ("z_order", "hilbert"))
    return mode


__all__ = ["decode_seq", "encode_seq"]
