"""Voxels in a line: codes along a space-filling curve, and the order of voxels sorted by them."""

from __future__ import annotations

from collections.abc import Sequence

from flexgemm import _C
from flexgemm._arrays import Array, Library, Stream, library_of
from flexgemm._voxels import Shape, grid_shape, rows_of_four


def encode_seq(
    coords: Array,
    shape: Sequence[int],
    mode: str = "z_order",
    *,
    device: str | None = None,
    stream: Stream = None,
) -> Array:
    """The number of each voxel along a curve through the grid.

    coords: (N, 4) int32, rows [batch, x, y, z].
    shape: (B, W, H, D), the exclusive upper bounds of batch, x, y and z.
    mode: "z_order" or "hilbert", whose x, y and z have (max(W, H, D) - 1).bit_length() bits each, with the batch above
        them, or "bxyz", which is ((b * W + x) * H + y) * D + z. In Z order the bits of a voxel are interleaved, each
        triple being 4x + 2y + z; the Hilbert code interleaves in the same way what Skilling's transform (AIP Conference
        Proceedings 707, 2004) makes of (x, y, z), so that consecutive codes of a cube are face neighbours.
    device, stream: as in `neighbor_map`.

    Returns (N,) int32 where a code has up to 32 bits, else int64. Codes are unsigned numbers: one that fills its dtype
    reads as negative. On a GPU a row outside `shape` gets the code -1; on the CPU it raises.

    Raises ValueError for a shape whose codes need more than 64 bits (63 for "bxyz"), and by argument name for wrong
    shapes and values; TypeError for arrays of a wrong kind or dtype.
    """
    library = library_of(coords, "coords", device, stream)
    return library.result(native_codes(library, coords, grid_shape(shape), mode))


def decode_seq(
    code: Array,
    shape: Sequence[int],
    mode: str = "z_order",
    *,
    device: str | None = None,
    stream: Stream = None,
) -> Array:
    """The voxels of these codes: (N, 4) int32, rows [batch, x, y, z]. The inverse of `encode_seq`.

    code: (N,) of the dtype that `encode_seq` gives for this shape and mode, or int64. On a GPU the code of no voxel
    of `shape` gives (-1, -1, -1, -1); on the CPU it raises ValueError.
    """
    library = library_of(code, "code", device, stream)
    code = library.contiguous(code, "code")
    if len(code.shape) != 1:
        raise ValueError(f"code: expected (N,), got {tuple(code.shape)}")
    coords = library.empty((code.shape[0], 4), "int32", code)
    library.run(_C.decode_seq, code, coords, shape=grid_shape(shape), mode=mode)
    return library.result(coords)


def sort_coords(
    coords: Array,
    shape: Sequence[int],
    mode: str = "z_order",
    *,
    device: str | None = None,
    stream: Stream = None,
) -> Array:
    """The permutation that sorts voxels by their code: (N,) int32, so that `coords[order]` follows the curve.

    Arguments as of `encode_seq`. The sort is stable: rows of one voxel keep their order. On a GPU rows outside `shape`
    come last, or where codes fill all 32 or 64 bits, among those of the last voxel.
    """
    library = library_of(coords, "coords", device, stream)
    extents = grid_shape(shape)
    return library.result(native_order(library, native_codes(library, coords, extents, mode), extents, mode))


def native_codes(library: Library, coords: Array, shape: Shape, mode: str) -> Array:
    """encode_seq on arrays as the extension takes them."""
    coords = rows_of_four(library, coords, "coords")
    dtype = "int32" if _C.sequence_bits(shape=shape, mode=mode) <= 32 else "int64"
    code = library.empty((coords.shape[0],), dtype, coords)
    library.run(_C.encode_seq, coords, code, shape=shape, mode=mode)
    return code


def native_order(library: Library, code: Array, shape: Shape, mode: str) -> Array:
    """The order of codes. One bit more than a code has, where there is one, tells the code -1 from the last voxel's."""
    width = 32 if library.dtype(code) == "int32" else 64
    order = library.empty((code.shape[0],), "int32", code)
    library.run(_C.sort_keys, code, order, None, bits=min(_C.sequence_bits(shape=shape, mode=mode) + 1, width))
    return order
