"""Voxel scenes of the convolution benchmarks, with an oracle for their neighbours.

`sphere<res>` is the shell that FlexGEMM's own benchmark uses, `sphere<res>-k5` the same under a 5x5x5 kernel;
`--scene name=path.npz` adds a cloud of the user's.
Everything here is NumPy and shares no code with the package, so that a scene also judges the maps built from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)  # itself alone: what is made of a scene can be kept by it
class Scene:
    name: str
    coords: NDArray[np.int32]  # (N, 4) [batch, x, y, z], rows unique
    shape: tuple[int, int, int, int]  # B, W, H, D
    kernel: int = 3  # along each axis, odd

    @property
    def n(self) -> int:
        return len(self.coords)

    @property
    def volume(self) -> int:
        return self.kernel**3

    @property
    def offsets(self) -> NDArray[np.int32]:
        """(V, 3) in the package's order, v = (kx * K + ky) * K + kz."""
        reach = np.arange(self.kernel, dtype=np.int32) - self.kernel // 2
        return np.stack(np.meshgrid(reach, reach, reach, indexing="ij"), axis=-1).reshape(-1, 3)

    @cached_property
    def pairs(self) -> int:
        """(row, offset) pairs that have a neighbour; volume * n where none were missing."""
        below = sum(self._pairs_at(v) for v in range(self.volume // 2))
        return self.n + 2 * below  # being a neighbour is mutual: offset V - 1 - v counts what offset v counts

    def _pairs_at(self, v: int) -> int:
        """Voxels with a neighbour at offset v. Two sorted runs are merged sooner than one is searched in the other."""
        keys, order = self._sorted_keys
        coords = self.coords[order]
        xyz = coords[:, 1:] + self.offsets[v]
        inside = self._inside(xyz)
        merged = np.sort(np.concatenate([keys, self._keys(coords[inside, 0], xyz[inside])]), kind="stable")
        return int(np.count_nonzero(merged[1:] == merged[:-1]))

    def neighbors(self, v: int, rows: NDArray[np.integer] | None = None) -> NDArray[np.int64]:
        """Row of the voxel at offset v of each of `rows` (default all), -1 where there is none."""
        coords = self.coords if rows is None else self.coords[rows]
        return self.find(coords[:, 0], coords[:, 1:] + self.offsets[v])

    def find(self, batch: NDArray[np.int32], xyz: NDArray[np.int32]) -> NDArray[np.int64]:
        """Row of the voxel at each place, -1 where there is none."""
        keys, order = self._sorted_keys
        wanted = self._keys(batch, xyz)
        at = np.minimum(np.searchsorted(keys, wanted), self.n - 1)
        return np.where(self._inside(xyz) & (keys[at] == wanted), order[at], -1)

    def _inside(self, xyz: NDArray[np.int32]) -> NDArray[np.bool_]:
        inside: NDArray[np.bool_] = np.all((xyz >= 0) & (xyz < np.array(self.shape[1:], np.int32)), axis=1)
        return inside

    def _keys(self, batch: NDArray[np.int32], xyz: NDArray[np.int32]) -> NDArray[np.int64]:
        _, w, h, d = self.shape
        return ((batch.astype(np.int64) * w + xyz[:, 0]) * h + xyz[:, 1]) * d + xyz[:, 2]

    @cached_property
    def _sorted_keys(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        keys = self._keys(self.coords[:, 0], self.coords[:, 1:])
        order = np.argsort(keys, kind="stable")
        return keys[order], order


def sphere(res: int, kernel: int = 3) -> Scene:
    """Voxels c in [0, res)^3 with res/2 - 1.25 <= |c - res/2 + 0.5| <= res/2, sorted by x, y, z.

    In d = 2c - res + 1 this reads (res - 2.5)^2 <= |d|^2 <= res^2, exact in integers. One x slab is held at a time:
    at res 1024 the cube has 10^9 cells and the shell 4 million.
    """
    d2 = np.square(2 * np.arange(res, dtype=np.int32) - res + 1)
    plane = d2[:, None] + d2[None, :]
    lowest = -(-((2 * res - 5) ** 2) // 4) if res > 2 else 0  # ceil((res - 2.5)^2); no hole below res 3
    slabs = []
    for x in range(res):
        y, z = np.nonzero((plane >= lowest - d2[x]) & (plane <= res * res - d2[x]))
        slab = np.zeros((len(y), 4), np.int32)
        slab[:, 1], slab[:, 2], slab[:, 3] = x, y, z
        slabs.append(slab)
    name = f"sphere{res}" + (f"-k{kernel}" if kernel != 3 else "")
    return Scene(name, np.concatenate(slabs), (1, res, res, res), kernel)


def sphere_named(name: str) -> Scene:
    """'sphere64' or 'sphere64-k5'."""
    res, _, kernel = name.removeprefix("sphere").partition("-k")
    return sphere(int(res), int(kernel or 3))


def load(name: str, path: str | Path) -> Scene:
    """A scene from an .npz with `coords` (N, 4) [batch, x, y, z] and `shape` (B, W, H, D)."""
    with np.load(path) as file:
        missing = {"coords", "shape"} - set(file.files)
        if missing:
            raise SystemExit(f"{path}: expected arrays 'coords' and 'shape', found {sorted(file.files)}")
        coords, shape = file["coords"], file["shape"]
    if coords.ndim != 2 or coords.shape[1] != 4 or shape.shape != (4,):
        raise SystemExit(f"{path}: expected coords (N, 4) and shape (4,), got {coords.shape} and {shape.shape}")
    b, w, h, d = (int(s) for s in shape)
    return Scene(name, np.ascontiguousarray(coords, dtype=np.int32), (b, w, h, d))


def parse(argument: str) -> tuple[str, Path]:
    """'lidar=cloud.npz' -> ('lidar', Path('cloud.npz')), for argparse."""
    name, equals, path = argument.partition("=")
    if not (name and equals and path):
        raise ValueError(f"expected name=path.npz, got {argument!r}")
    return name, Path(path)
