"""Shapes as flex_gemm has them."""

from __future__ import annotations

from collections.abc import Sequence


def grid_of(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """(B, W, H, D) of (B, C, W, H, D)."""
    if len(shape) != 5:
        raise ValueError(f"shape: expected (B, C, W, H, D), got {tuple(shape)}")
    b, _, w, h, d = shape
    return b, w, h, d
