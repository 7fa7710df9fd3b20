"""The demo's picture: the noisy terrain, the restored one, and how the loss fell."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexgemm.demo.terrain import Terrain

Floats = NDArray[np.float32]


def draw(
    path: Path, terrain: Terrain, noisy: Floats, restored: Floats, split: int, losses: list[float], titles: list[str]
) -> None:
    """Writes the picture. Left of column `split` the network was trained; right of it, it had never seen the truth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import LightSource

    figure, axes = pyplot.subplots(1, 3, figsize=(18, 5.4), layout="constrained")
    truth = terrain.grid(terrain.heights)
    low, high = float(np.nanmin(truth)), float(np.nanmax(truth))
    light = LightSource(azdeg=315, altdeg=45)
    for axis, heights, title in zip(axes, (noisy, restored), titles[:2], strict=False):
        image = terrain.grid(heights)
        empty = np.isnan(image)
        shaded = light.shade(
            np.where(empty, low, image),
            cmap=pyplot.get_cmap("gist_earth"),
            vmin=low,
            vmax=high,
            blend_mode="soft",
            dx=terrain.voxel,
            dy=terrain.voxel,
        )
        shaded[empty] = 1
        axis.imshow(shaded)
        axis.axvline(split - 0.5, color="white", linestyle="--", linewidth=1)
        for text, side, offset in (("trained on", "right", -4), ("held out", "left", 4)):
            axis.annotate(
                text,
                (split, 1),
                (offset, -4),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha=side,
                va="top",
                color="white",
                bbox={"facecolor": "black", "alpha": 0.5, "linewidth": 0},
            )
        axis.set_title(title)
        axis.set_xticks([])
        axis.set_yticks([])
    axes[2].plot(np.arange(1, len(losses) + 1), losses)
    axes[2].set_yscale("log")
    axes[2].set_xlabel("step")
    axes[2].set_ylabel("mean squared error / noise variance")
    axes[2].set_title(titles[2])
    axes[2].grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
