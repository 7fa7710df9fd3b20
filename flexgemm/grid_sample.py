"""Features of sparse voxels sampled at points, with gradients in the features and in the points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flexgemm import _C
from flexgemm._arguments import expect_bools, expect_choice, renamed, type_name
from flexgemm._arrays import Array, Library, Stream, library_of
from flexgemm._built import Built
from flexgemm._voxels import Shape, grid_shape, rows_of_four

MODES = {"trilinear": 8, "nearest": 1}


class SampleMap:
    """Which voxels lie around the points of a grid, and how they weigh: built once by `sample_map`, used by every layer
    that samples the same voxels at the same points, forward and backward.

    `indices` is (Q, K) int32, Q = B * L: the rows of the voxels around each point, -1 where there is none. K is 8 for
    "trilinear", corner 4 kx + 2 ky + kz of the cell, and 1 for "nearest". `weights` is (Q, 8) float32.

    The points are kept, not copied: do not change them in place.
    """

    shape: Shape  # B, W, H, D
    mode: str  # "trilinear" or "nearest"
    grid: Array  # as given
    grid_shape: tuple[int, ...]  # (B, L) or (Q,)
    num_voxels: int  # N
    device: str | None  # the device= of NumPy coordinates
    native: tuple[Array, Array, Array | None]  # grid, indices, weights as the extension takes them

    def __init__(
        self, coords: Array, shape: Shape, grid: Array, mode: str, *, device: str | None, stream: Stream
    ) -> None:
        library = library_of(coords, "coords", device, stream)
        expect_choice(mode, "mode", tuple(MODES))
        self.grid, self.shape, self.mode, self.device = grid, shape, mode, device
        coords, grid = _checked(library, coords, shape, grid)
        self.grid_shape = tuple(map(int, grid.shape[:-1]))
        self.num_voxels = int(coords.shape[0])
        size = (math.prod(self.grid_shape), MODES[mode])
        indices = library.lasting(size, "int32", grid)
        weights = library.lasting(size, "float32", grid) if mode == "trilinear" else None
        library.run(_C.sample_map, grid, coords, indices, weights, shape=shape)
        self.native = grid, indices, weights
        self._groups = Built()

    @property
    def indices(self) -> Array:
        """(Q, K) int32, -1 = no voxel."""
        return _bind(self.grid, self, None).result(self.native[1])

    @property
    def weights(self) -> Array | None:
        """(Q, 8) float32: they add up to 1, or to 0 where no voxel is near. None for "nearest"."""
        return None if self.native[2] is None else _bind(self.grid, self, None).result(self.native[2])

    def groups(self, library: Library) -> tuple[Array, Array]:
        """The entries of `indices` grouped by voxel, for the gradient of the features; built on first use."""
        return self._groups.of(self.native[1], library.stream, lambda: self._group(library))

    def _group(self, library: Library) -> tuple[Array, Array]:
        indices = self.native[1]
        order = library.lasting((indices.shape[0] * indices.shape[1],), "int32", indices)
        starts = library.lasting((self.num_voxels + 1,), "int32", indices)
        library.run(_C.group_rows, indices, order, starts)
        return order, starts

    def __repr__(self) -> str:
        return f"SampleMap({self.grid_shape} points, {self.num_voxels} voxels in {self.shape}, {self.mode})"


def sample_map(
    coords: Array,
    shape: Sequence[int],
    grid: Array,
    mode: str = "trilinear",
    *,
    device: str | None = None,
    stream: Stream = None,
) -> SampleMap:
    """The voxels around the points of a grid, for `grid_sample_3d` of one feature array after another.

    Arguments as of `grid_sample_3d`.
    """
    return SampleMap(coords, grid_shape(shape), grid, mode, device=device, stream=stream)


def grid_sample_3d(
    feats: Array,
    coords: Array | None = None,
    shape: Sequence[int] | None = None,
    grid: Array | None = None,
    mode: str | None = None,
    *,
    sample_map: SampleMap | None = None,
    device: str | None = None,
    stream: Stream = None,
) -> Array:
    """Samples the features of sparse voxels at points.

    feats: (N, C) float32, float16 or bfloat16; rows may be strided.
    coords: (N, 4) int32, rows [batch, x, y, z]; of duplicates the lowest row is found.
    shape: (B, W, H, D), the exclusive upper bounds of batch, x, y and z; their product must be below 2**63.
    grid: (B, L, 3) float32 points (x, y, z) in units of voxels, those of sample b in batch b. The centre of voxel
        (i, j, k) lies at (i + 0.5, j + 0.5, k + 0.5). Or (Q, 4), rows [batch, x, y, z].
    mode: "trilinear", the default, weighs the up to eight voxels whose centres surround a point; the weights of those
        that are there are scaled to add up to 1, and where there is none the sample is 0. "nearest" takes the voxel
        that the point lies in (coordinates are truncated towards 0), or 0.
    sample_map: what `sample_map` made of coords, shape, grid, mode and device, instead of them.
    device, stream: as in `neighbor_map`.

    Returns (B, L, C), or (Q, C), of the dtype of feats; sums are float32. Deterministic: the same input gives the same
    bits. torch tensors that require grad are recorded by autograd, in feats and, for "trilinear", in grid.

    Raises TypeError for arrays of a wrong kind or dtype and ValueError for wrong shapes and values, by argument name.
    On the CPU a row of coords outside the shape raises; on a GPU it is left out.
    """
    mode = expect_sites(coords, shape, grid, mode, sample_map)
    if sample_map is not None and device is not None:
        raise ValueError(f"device: expected None beside sample_map, which has one, got {device!r}")
    library = library_of(feats, "feats", device, stream) if sample_map is None else _bind(feats, sample_map, stream)
    if library.needs_grad(feats, grid, None):
        from flexgemm.torch import sampling

        return sampling.grid_sample_3d(feats, coords, shape, grid, mode, sample_map=sample_map, stream=stream)
    if sample_map is None:
        assert coords is not None and shape is not None and grid is not None
        if mode == "trilinear":
            return _forward_directly(library, feats, coords, grid_shape(shape), grid)
        sample_map = SampleMap(coords, grid_shape(shape), grid, mode, device=device, stream=stream)
    return forward(library, feats, sample_map)


def grid_sample_3d_backward(
    grad_out: Array,
    feats: Array,
    *,
    sample_map: SampleMap,
    needs_grad: tuple[bool, bool] = (True, True),
    stream: Stream = None,
) -> tuple[Array | None, Array | None]:
    """The gradients of `grid_sample_3d` in feats and in the points.

    grad_out: (B, L, C) or (Q, C), the gradient of the output; feats as in the forward pass.
    needs_grad: which of the two gradients to compute.

    Returns (grad_feats (N, C) of the dtype of feats, grad_grid like the grid, float32); None where needs_grad is False,
    and for grad_grid of "nearest", which is constant almost everywhere. Deterministic; sums are float32.
    """
    expect_bools(needs_grad, 2)
    library = _bind(feats, sample_map, stream)
    return backward(library, grad_out, feats, sample_map, needs_grad)


def expect_sites(coords: Any, shape: Any, grid: Any, mode: Any, sample_map: Any) -> str:
    """The mode of a call that is told once where to sample: by voxels and points, or by a map of them."""
    if mode is not None:
        expect_choice(mode, "mode", tuple(MODES))
    if sample_map is None:
        if coords is None or shape is None or grid is None:
            raise ValueError("coords, shape, grid: expected all of them, or sample_map")
        return mode or "trilinear"
    _expect_map(sample_map)
    if not (coords is shape is grid is None):
        raise ValueError("sample_map: expected it instead of coords, shape and grid, got both")
    of_map: str = sample_map.mode
    if mode not in (None, of_map):
        raise ValueError(f"mode: expected None or {of_map!r}, that of sample_map, got {mode!r}")
    return of_map


def forward(library: Library, feats: Array, sample_map: SampleMap) -> Array:
    """`grid_sample_3d` without autograd."""
    feats = _rows_of(library, feats, sample_map.num_voxels)
    _, indices, weights = sample_map.native
    out = library.empty((indices.shape[0], feats.shape[1]), None, feats)
    library.run(_C.gather_sum, feats, indices, weights, out)
    return library.result(out).reshape((*sample_map.grid_shape, feats.shape[1]))


def _forward_directly(library: Library, feats: Array, coords: Array, shape: Shape, grid: Array) -> Array:
    """Trilinear samples whose map nobody keeps."""
    coords, grid = _checked(library, coords, shape, grid)
    feats = _rows_of(library, feats, coords.shape[0])
    out = library.empty((math.prod(grid.shape[:-1]), feats.shape[1]), None, feats)
    library.run(_C.sample_forward, grid, coords, feats, out, shape=shape)
    return library.result(out).reshape((*grid.shape[:-1], feats.shape[1]))


@renamed({"src": "grad_out", "out": "feats"})
def backward(
    library: Library, grad_out: Array, feats: Array, sample_map: SampleMap, needs_grad: tuple[bool, bool]
) -> tuple[Array | None, Array | None]:
    """`grid_sample_3d_backward` with the library already bound."""
    feats = _rows_of(library, feats, sample_map.num_voxels)
    grad_out = library.contiguous(grad_out, "grad_out")
    expected = (*sample_map.grid_shape, *feats.shape[1:])
    if tuple(grad_out.shape) != expected:
        raise ValueError(f"grad_out: expected {expected} to match the grid and feats, got {tuple(grad_out.shape)}")
    library.expect_dtype_of(feats, grad_out, "grad_out", "feats")
    grid, indices, weights = sample_map.native
    grad_out = grad_out.reshape((indices.shape[0], feats.shape[1]))
    grad_feats = grad_grid = None
    if needs_grad[0]:
        order, starts = sample_map.groups(library)
        grad_feats = library.empty(tuple(feats.shape), None, feats)
        flat = None if weights is None else weights.reshape((indices.shape[0] * indices.shape[1],))
        library.run(_C.group_reduce, grad_out, order, starts, flat, grad_feats, None)
        grad_feats = library.result(grad_feats)
    if needs_grad[1] and sample_map.mode == "trilinear":
        grad_grid = library.empty(tuple(grid.shape), "float32", grid)
        library.run(_C.sample_grad, grad_out, feats, grid, indices, grad_grid)
        grad_grid = library.result(grad_grid)
    return grad_feats, grad_grid


def _checked(library: Library, coords: Array, shape: Shape, grid: Array) -> tuple[Array, Array]:
    """Voxels and points as the extension takes them."""
    grid = library.contiguous(grid, "grid")
    given = tuple(grid.shape)
    if not (len(given) == 3 and given[0] == shape[0] and given[2] == 3) and given[1:] != (4,):
        raise ValueError(f"grid: expected ({shape[0]}, L, 3) to match shape, or (Q, 4), got {given}")
    return rows_of_four(library, coords, "coords"), grid


def _rows_of(library: Library, feats: Array, num_voxels: int) -> Array:
    """Features as the extension takes them, a row for each voxel."""
    feats = library.rows(feats, "feats")
    if len(feats.shape) != 2 or feats.shape[0] != num_voxels:
        raise ValueError(f"feats: expected ({num_voxels}, C) to match coords, got {tuple(feats.shape)}")
    return feats


def _bind(x: Array, sample_map: SampleMap, stream: Stream) -> Library:
    """The library of features or points; those of NumPy go where the map is."""
    _expect_map(sample_map)
    device = sample_map.device if isinstance(x, np.ndarray) else None
    return library_of(x, "feats", device, stream)


def _expect_map(sample_map: Any) -> None:
    if not isinstance(sample_map, SampleMap):
        raise TypeError(f"sample_map: expected a SampleMap, got {type_name(sample_map)}")
