"""What every function on voxels asks of coordinates and of the grid that they lie in."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from flexgemm._arrays import Array, Library

Shape = tuple[int, int, int, int]


def grid_shape(shape: Sequence[int]) -> Shape:
    """(B, W, H, D) as four positive ints."""
    try:
        b, w, h, d = map(index, shape)
    except (TypeError, ValueError):
        raise ValueError(f"shape: expected four positive ints (B, W, H, D), got {shape!r}") from None
    if min(b, w, h, d) < 1:
        raise ValueError(f"shape: expected four positive ints (B, W, H, D), got {shape!r}")
    return b, w, h, d


def rows_of_four(library: Library, coords: Any, name: str) -> Array:
    """coords for the extension: (N, 4), contiguous."""
    coords = library.contiguous(coords, name)
    if len(coords.shape) != 2 or coords.shape[1] != 4:
        raise ValueError(f"{name}: expected (N, 4) [batch, x, y, z], got {tuple(coords.shape)}")
    return coords
