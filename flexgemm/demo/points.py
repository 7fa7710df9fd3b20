"""Reads a point cloud: .npy, .npz, .ply (ascii, binary_little_endian) or .xyz, as (N, 3) float64."""

from __future__ import annotations

import io
import warnings
import zipfile
import zlib
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

MIN_POINTS = 1000

_PLY_TYPES = {
    "char": "i1", "int8": "i1", "uchar": "u1", "uint8": "u1", "short": "i2", "int16": "i2", "ushort": "u2",
    "uint16": "u2", "int": "i4", "int32": "i4", "uint": "u4", "uint32": "u4", "float": "f4", "float32": "f4",
    "double": "f8", "float64": "f8",
}  # fmt: skip


# RuntimeError is zipfile's of an encrypted archive, NotImplementedError of one that is compressed in an unknown way.
_OF_READERS = (ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


class PointsError(ValueError):
    """The file is no point cloud that can be read; the message says why."""


def read_points(path: Path) -> NDArray[np.float64]:
    """The first three columns (the vertex properties x, y, z of a .ply). Raises PointsError naming the file."""
    readers = {".npy": _read_npy, ".npz": _read_npz, ".ply": _read_ply, ".xyz": _read_xyz}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise PointsError(f"{path}: expected a file ending in {', '.join(readers)}")
    try:
        with open(path, "rb") as file:
            points = reader(file)
    except OSError as error:
        raise PointsError(f"{path}: {error.strerror or error}") from error
    except (*_OF_READERS, MemoryError, OverflowError) as error:  # the last two of sizes that a broken header tells
        raise PointsError(f"{path}: {error}") from error
    bad = int((~np.isfinite(points).all(axis=1)).sum())
    if bad:
        raise PointsError(f"{path}: {bad} of {len(points)} points have a NaN or infinite coordinate")
    if len(points) < MIN_POINTS:
        raise PointsError(f"{path}: expected at least {MIN_POINTS} points, got {len(points)}")
    return points


def _columns(array: NDArray[np.generic], what: str) -> NDArray[np.float64]:
    if array.ndim != 2 or array.shape[1] < 3 or array.dtype.kind not in "fiu":
        raise ValueError(f"{what}: expected numbers of shape (N, 3) or wider, got {array.dtype} {array.shape}")
    return array[:, :3].astype(np.float64)


def _read_npy(file: BinaryIO) -> NDArray[np.float64]:
    return _columns(np.lib.format.read_array(file, allow_pickle=False), "array")


def _read_npz(file: BinaryIO) -> NDArray[np.float64]:
    """The array named points or xyz, or the only array there is."""
    if not file.read(2) == b"PK":
        raise ValueError("not an .npz archive")
    file.seek(0)
    with np.load(file, allow_pickle=False) as archive:
        names = archive.files
        name = next((n for n in ("points", "xyz") if n in names), names[0] if len(names) == 1 else None)
        if name is None:
            raise ValueError(f"expected an array named points or xyz, or a single one, got {', '.join(names)}")
        return _columns(archive[name], name)


def _read_xyz(file: BinaryIO) -> NDArray[np.float64]:
    """Text: x y z and whatever follows, separated by blanks or commas; # starts a comment."""
    text = file.read().decode("utf-8-sig").replace(",", " ")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a file without numbers; the columns say it
        return _columns(np.loadtxt(io.StringIO(text), ndmin=2), "columns")


def _read_ply(file: BinaryIO) -> NDArray[np.float64]:
    if file.readline().strip() != b"ply":
        raise ValueError("not a .ply file: its first line is not 'ply'")
    layout, count, properties = _read_ply_header(file)
    names = [name for name, _ in properties]
    for axis in "xyz":
        if axis not in names:
            raise ValueError(f"the vertices have no property {axis}, only {', '.join(names)}")
    if layout == "ascii":
        lines = io.StringIO("".join(line.decode() for line in islice(file, count)))
        table = np.loadtxt(lines, ndmin=2) if count else np.empty((0, len(names)))
        if table.shape != (count, len(names)):
            raise ValueError(f"expected {count} vertices of {len(names)} values, got {table.shape}")
        return np.stack([table[:, names.index(axis)] for axis in "xyz"], 1)
    record = np.dtype([(name, "<" + kind) for name, kind in properties])
    data = file.read(count * record.itemsize)
    if len(data) != count * record.itemsize:
        raise ValueError(f"expected {count} vertices of {record.itemsize} bytes, got {len(data)} bytes")
    vertices = np.frombuffer(data, record)
    return np.stack([vertices[axis].astype(np.float64) for axis in "xyz"], 1)


def _read_ply_header(file: BinaryIO) -> tuple[str, int, list[tuple[str, str]]]:
    """(format, number of vertices, their properties as (name, NumPy type)); the vertices must come first."""
    layout, elements = "", []
    properties: list[tuple[str, str]] = []
    for line in iter(file.readline, b""):
        match line.decode("ascii", "replace").split():
            case ["end_header"]:
                break
            case ["format", form, _]:
                layout = form
            case ["element", name, count]:
                elements.append((name, int(count)))
            case ["property", *rest] if elements and elements[-1][0] == "vertex":
                if len(rest) != 2 or rest[0] not in _PLY_TYPES:
                    raise ValueError(f"cannot read the vertex property {' '.join(rest)!r}")
                properties.append((rest[1], _PLY_TYPES[rest[0]]))
    else:
        raise ValueError("the header does not end")
    if layout not in ("ascii", "binary_little_endian"):
        raise ValueError(f"expected format ascii or binary_little_endian, got {layout!r}")
    if not elements or elements[0][0] != "vertex":
        raise ValueError("expected vertices as the first element")
    if elements[0][1] < 0:
        raise ValueError(f"expected a number of vertices, got {elements[0][1]}")
    return layout, elements[0][1], properties
