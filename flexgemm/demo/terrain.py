"""Terrain as surface voxels: the elevation model that matplotlib ships, or the surface of a point cloud.

A terrain is a height over each occupied cell of a horizontal grid; its surface is one voxel per cell, at the voxel
layer that holds the height. Lengths are in voxel edges, so that neighbouring cells of ordinary ground lie at most one
layer apart and a 3 x 3 x 3 kernel sees them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexgemm.demo.points import PointsError

# The elevation model is sampled every 3 arcseconds, 75 by 93 m at its latitude.
DEM_VOXEL_METRES = 90.0

# Voxels that a point cloud is cut into at most, and the points that a cell should hold on average.
CLOUD_VOXELS = 150_000
POINTS_PER_CELL = 2
MOST_CELLS = 2**20  # along an axis: float32 holds heights to a sixteenth of a cell


@dataclass
class Terrain:
    name: str
    cells: NDArray[np.int32]  # (N, 2): x eastwards, y southwards
    heights: NDArray[np.float32]  # (N,), in voxel edges
    voxel: float  # edge of a voxel in `unit`
    unit: str

    @property
    def size(self) -> tuple[int, int]:
        """The grid's extent in cells: W, H."""
        return int(self.cells[:, 0].max()) + 1, int(self.cells[:, 1].max()) + 1

    def grid(self, heights: NDArray[np.float32]) -> NDArray[np.float32]:
        """Heights as an image (H, W), in `unit`, NaN where no cell is occupied."""
        w, h = self.size
        image = np.full((h, w), np.nan, np.float32)
        image[self.cells[:, 1], self.cells[:, 0]] = heights * self.voxel
        return image


def elevation_model() -> Terrain:
    """The Jacksboro fault, Tennessee: 344 x 403 elevations of the U.S. Geological Survey."""
    from matplotlib.cbook import get_sample_data

    data: Any = get_sample_data("jacksboro_fault_dem.npz")
    with data:
        elevation = data["elevation"]
    y, x = np.divmod(np.arange(elevation.size, dtype=np.int32), np.int32(elevation.shape[1]))
    heights = elevation.reshape(-1).astype(np.float32) / np.float32(DEM_VOXEL_METRES)
    return Terrain("Jacksboro fault (USGS)", np.stack([x, y], 1), heights, DEM_VOXEL_METRES, "m")


def surface_of_points(points: NDArray[np.float64], name: str) -> Terrain:
    """The highest point of each horizontal cell, in cells small enough for CLOUD_VOXELS of them."""
    low, high = np.quantile(points, 0.01, axis=0), np.quantile(points, 0.99, axis=0)  # a stray point sets no scale
    with np.errstate(over="ignore", invalid="ignore"):
        area = float((high[0] - low[0]) * (high[1] - low[1]))
        if not area > 0:
            raise PointsError(f"{name}: the points have no horizontal extent in x and y")
        voxel = (area / min(CLOUD_VOXELS, max(1, len(points) // POINTS_PER_CELL))) ** 0.5
        inside = np.all((points[:, :2] >= low[:2]) & (points[:, :2] <= high[:2]), axis=1)
        sizes = [float(size / voxel) for size in (*(high - low)[:2], np.ptp(points[inside, 2]))]
    if not (min(sizes[:2]) >= 2 and max(sizes) <= MOST_CELLS):
        got = " x ".join(f"{size:.3g}" for size in sizes)
        raise PointsError(f"{name}: expected a surface of 2 to {MOST_CELLS} cells along each axis, got {got}")
    x = ((points[inside, 0] - low[0]) / voxel).astype(np.int32)
    y = ((high[1] - points[inside, 1]) / voxel).astype(np.int32)  # southwards, as in an image
    height = int(y.max()) + 1
    keys, cell = np.unique(x.astype(np.int64) * height + y, return_inverse=True)
    heights = np.full(len(keys), -np.inf)
    np.maximum.at(heights, cell, (points[inside, 2] - low[2]) / voxel)
    cells = np.stack(np.divmod(keys, height), 1).astype(np.int32)
    return Terrain(name, cells, heights.astype(np.float32), voxel, "units of the cloud")


def surface_voxels(
    terrain: Terrain, heights: NDArray[np.float32]
) -> tuple[NDArray[np.int32], tuple[int, int, int, int]]:
    """(coords (N, 4), shape (B, W, H, D)) of the surface at `heights`, which may be noisy: layers follow them."""
    layer = np.floor(heights).astype(np.int32)
    layer -= layer.min()
    coords = np.zeros((len(layer), 4), np.int32)
    coords[:, 1:3] = terrain.cells
    coords[:, 3] = layer
    return coords, (1, *terrain.size, int(layer.max()) + 1)
