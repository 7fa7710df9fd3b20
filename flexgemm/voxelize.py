"""From points to voxels and back: the voxels that a cloud of points fills, and features brought to them and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flexgemm import _C
from flexgemm._arguments import expect_choice, renamed, type_name
from flexgemm._arrays import Array, Library, Stream, library_of
from flexgemm._built import Built
from flexgemm._voxels import Shape, grid_shape, is_sequence, rows_of_four
from flexgemm.grid_sample import SampleMap, grid_sample_3d

REDUCTIONS = ("mean", "sum", "max", "first")


class Groups(NamedTuple):
    """Rows grouped by voxel, as the extension takes them. Voxels are in the order of their number."""

    order: Array  # (N,) int32: rows of voxel m are order[starts[m]:starts[m + 1]], ascending
    starts: Array  # (M + 1,) int32
    first: Array  # (M,) int32
    counts: Array  # (M,) int32
    inverse: Array  # (N,) int32, -1 for a row in no voxel


def _group(library: Library, code: Array, shape: Shape) -> tuple[Array, Groups]:
    """The voxels (M, 4) of codes, (N,) BXYZ numbers, -1 for no voxel, of a dtype with more bits than a number has."""
    rows = code.shape[0]
    dtype = library.dtype(code)
    order, inverse = (library.lasting((rows,), "int32", code) for _ in range(2))
    in_order = library.empty((rows,), dtype, code)
    library.run(_C.sort_keys, code, order, in_order, bits=_C.sequence_bits(shape=shape, mode="bxyz") + 1)
    ranks, count = library.empty((rows,), "int32", code), library.empty((1,), "int32", code)
    library.run(_C.unique_ranks, in_order, ranks, count)
    voxels = int(library.host(count)[0]) if rows else 0
    keys = library.empty((voxels,), dtype, code)
    coords = library.lasting((voxels, 4), "int32", code)
    starts, first, counts = (library.lasting((n,), "int32", code) for n in (voxels + 1, voxels, voxels))
    library.run(_C.unique_groups, in_order, order, ranks, keys, starts, first, counts, inverse)
    library.run(_C.decode_seq, keys, coords, shape=shape, mode="bxyz")
    return coords, Groups(order, starts, first, counts, inverse)


def _code_dtype(shape: Shape) -> str:
    """Of numbers that leave -1 to rows without a voxel."""
    return "int32" if _C.sequence_bits(shape=shape, mode="bxyz") < 32 else "int64"


def unique_coords(
    coords: Array, shape: Sequence[int], *, device: str | None = None, stream: Stream = None
) -> tuple[Array, Array, Array]:
    """The distinct voxels of a list.

    coords: (N, 4) int32, rows [batch, x, y, z].
    shape: (B, W, H, D), the exclusive upper bounds of batch, x, y and z; their product must be below 2**63.
    device, stream: as in `neighbor_map`.

    Returns (unique (M, 4) int32, sorted by batch, x, y and z; inverse (N,) int32, the row of unique that each row of
    coords is; counts (M,) int32). On the CPU a row outside the shape raises ValueError; on a GPU it is left out, and
    its inverse is -1. M is known to the device: the call waits for it once.
    """
    library = library_of(coords, "coords", device, stream)
    extents = grid_shape(shape)
    coords = rows_of_four(library, coords, "coords")
    code = library.empty((coords.shape[0],), _code_dtype(extents), coords)
    library.run(_C.encode_seq, coords, code, shape=extents, mode="bxyz")
    unique, groups = _group(library, code, extents)
    return library.result(unique), library.result(groups.inverse), library.result(groups.counts)


class Voxels:
    """The M voxels that N points fill, from `voxelize`: sorted by batch, x, y and z.

    coords (M, 4) int32; feats (M, C), what became of the points' features, or None; inverse (N,) int32, the voxel of
    each point, -1 for one outside the shape; counts (M,) int32, the points of each voxel; shape; num_points;
    num_voxels; device, that of NumPy points.
    """

    coords: Array  # (M, 4) int32, rows [batch, x, y, z]
    feats: Array | None  # (M, C), what became of the points' features
    inverse: Array  # (N,) int32: the voxel of each point, -1 for a point outside the shape
    counts: Array  # (M,) int32: the points of each voxel
    shape: Shape  # B, W, H, D
    num_points: int  # N
    num_voxels: int  # M
    device: str | None  # the device= of NumPy points
    groups: Groups
    native: Array  # coords as the extension takes them
    places: Array  # (N, 4) float32 [batch, x, y, z]: the points in units of voxels, as the extension takes them

    def __init__(
        self, results: Sequence[Array], native: Array, groups: Groups, places: Array, shape: Shape, device: str | None
    ) -> None:
        """results: coords, inverse and counts as the caller has them."""
        self.native, self.groups, self.places, self.shape, self.device = native, groups, places, shape, device
        self.feats = None
        self._sample_map = Built()
        self.coords, self.inverse, self.counts = results
        self.num_points, self.num_voxels = groups.inverse.shape[0], native.shape[0]

    def __repr__(self) -> str:
        return f"Voxels({self.num_points} points in {self.num_voxels} voxels of {self.shape})"


def voxelize(
    points: Array,
    feats: Array | None = None,
    *,
    voxel_size: float | Sequence[float],
    shape: Sequence[int],
    origin: float | Sequence[float] = 0.0,
    reduce: str = "mean",
    device: str | None = None,
    stream: Stream = None,
) -> Voxels:
    """The voxels that points lie in, and the points' features brought together in them.

    points: (N, 3) float32 [x, y, z], all of batch 0; or (N, 4) [batch, x, y, z].
    feats: (N, C) float32, float16 or bfloat16; or None.
    voxel_size: edge of a voxel in the units of the points, one number or three. A point p lies in the voxel
        floor(p / voxel_size - origin).
    shape: (B, W, H, D), the exclusive upper bounds of batch, x, y and z. Points outside it are in no voxel.
    origin: where the grid begins, in voxels, one number or three.
    reduce: as of `reduce_points`.
    device, stream: as in `neighbor_map`.

    Returns Voxels. How many there are is known to the device: the call waits for that number once. Deterministic; torch
    features that require grad are recorded by autograd.

    Raises TypeError for arrays of a wrong kind or dtype and ValueError for wrong shapes and values, by argument name.
    """
    library = library_of(points, "points", device, stream)
    extents = grid_shape(shape)
    expect_choice(reduce, "reduce", REDUCTIONS)
    native, groups, places = group_points(library, points, voxel_size, extents, origin)
    results = [library.result(x) for x in (native, groups.inverse, groups.counts)]
    voxels = Voxels(results, native, groups, places, extents, device)
    if feats is not None:
        voxels.feats = reduce_points(feats, voxels, reduce, stream=stream)
    return voxels


def group_points(
    library: Library, points: Array, voxel_size: Any, shape: Shape, origin: Any
) -> tuple[Array, Groups, Array]:
    """The voxels of points, which point lies where, and the points in units of voxels, (N, 4)."""
    points = library.contiguous(points, "points")
    if len(points.shape) != 2 or points.shape[1] not in (3, 4):
        raise ValueError(f"points: expected (N, 3) or (N, 4) [batch, x, y, z], got {tuple(points.shape)}")
    size, begin = three(voxel_size, "voxel_size"), three(origin, "origin")
    code = library.empty((points.shape[0],), _code_dtype(shape), points)
    places = library.lasting((points.shape[0], 4), "float32", points)
    library.run(_C.voxel_codes, points, code, places, voxel_size=size, origin=begin, shape=shape)
    return *_group(library, code, shape), places


def reduce_points(feats: Array, voxels: Voxels, reduce: str = "mean", *, stream: Stream = None) -> Array:
    """Features of points brought together in their voxels.

    feats: (N, C) float32, float16 or bfloat16, of the points that `voxels` was made of; rows may be strided.
    reduce: "mean", "sum", "max" or "first", which is the point of the lowest row. Sums are float32, in the order of the
        rows. The gradient of "max" goes to the first of equal points.

    Returns (M, C) of the dtype of feats. Deterministic; torch features that require grad are recorded by autograd.
    """
    library = bind(feats, voxels, stream)
    if library.needs_grad(feats, None, None):
        from flexgemm.torch import sampling

        return sampling.reduce_points(feats, voxels, reduce, stream=stream)
    return reduced(library, feats, voxels.groups, reduce)[0]


def devoxelize(feats: Array, voxels: Voxels, mode: str = "nearest", *, stream: Stream = None) -> Array:
    """Features of voxels given to their points.

    feats: (M, C) float32, float16 or bfloat16.
    mode: "nearest" gives a point the features of its voxel, 0 to a point in none; "trilinear" weighs the voxels around
        it as `grid_sample_3d` does.

    Returns (N, C) of the dtype of feats. torch features that require grad are recorded by autograd.
    """
    library = bind(feats, voxels, stream)
    expect_choice(mode, "mode", ("nearest", "trilinear"))
    if library.needs_grad(feats, None, None):
        from flexgemm.torch import sampling

        return sampling.devoxelize(feats, voxels, mode, stream=stream)
    if mode == "trilinear":
        return grid_sample_3d(feats, sample_map=points_map(library, voxels), stream=stream)
    return spread(library, feats, voxels.groups)


@renamed({"src": "feats"})
def reduced(
    library: Library, feats: Array, groups: Groups, reduce: str, with_argmax: bool = False
) -> tuple[Array, Array | None]:
    """`reduce_points` without autograd, and the points that maxima are of."""
    expect_choice(reduce, "reduce", REDUCTIONS)
    feats = _rows(library, feats, groups.inverse.shape[0], "points")
    shape = groups.first.shape[0], feats.shape[1]
    out, argmax = library.empty(shape, None, feats), None
    if reduce == "first":
        library.run(_C.gather_sum, feats, groups.first.reshape((shape[0], 1)), None, out)
    else:
        argmax = library.empty(shape, "int32", feats) if with_argmax and reduce == "max" else None
        library.run(_C.group_reduce, feats, groups.order, groups.starts, None, out, argmax, mode=reduce)
    return library.result(out), argmax


def spread(library: Library, feats: Array, groups: Groups) -> Array:
    """`devoxelize` to the nearest voxel, without autograd."""
    feats, points = _rows(library, feats, groups.first.shape[0], "voxels"), groups.inverse.shape[0]
    out = library.empty((points, feats.shape[1]), None, feats)
    library.run(_C.gather_sum, feats, groups.inverse.reshape((points, 1)), None, out)
    return library.result(out)


def bind(feats: Array, voxels: Voxels, stream: Stream) -> Library:
    """The library of feats; NumPy features go where the voxels are."""
    expect_voxels(voxels)
    device = voxels.device if isinstance(feats, np.ndarray) else None
    return library_of(feats, "feats", device, stream)


def expect_voxels(voxels: Any) -> None:
    if not isinstance(voxels, Voxels):
        raise TypeError(f"voxels: expected Voxels, got {type_name(voxels)}")


def points_map(library: Library, voxels: Voxels) -> SampleMap:
    """The points among the voxels, for trilinear samples; made once."""

    def make() -> SampleMap:
        arrays = voxels.native, voxels.shape, voxels.places
        result = SampleMap(*arrays, "trilinear", device=None, stream=library.stream)
        result.device = voxels.device
        return result

    made: SampleMap = voxels._sample_map.of(voxels.places, library.stream, make)
    return made


def _rows(library: Library, feats: Array, count: int, what: str) -> Array:
    feats = library.rows(feats, "feats")
    if len(feats.shape) != 2 or feats.shape[0] != count:
        raise ValueError(f"feats: expected ({count}, C) to match the {what}, got {tuple(feats.shape)}")
    return feats


def three(value: float | Sequence[float], name: str) -> tuple[float, ...]:
    try:
        if isinstance(value, (int, float)):  # or what stands for one where torch traces
            return (float(value),) * 3
        numbers: Any = value if is_sequence(value) else (value,) * 3
        if any(isinstance(number, str) for number in numbers):
            raise ValueError
        return tuple(map(float, numbers))  # the extension counts them and checks their range
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}: expected a number or three of them (x, y, z), got {value!r}") from None
