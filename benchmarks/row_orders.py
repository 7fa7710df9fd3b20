"""What row orders are worth, without a GPU: how much of a convolution's arithmetic is with neighbours that exist.

    python -m benchmarks.row_orders                              the spheres
    python -m benchmarks.row_orders --scene lidar=cloud.npz      and a cloud

A tile of rows works through the union of its rows' neighbours, group by group of the offsets. The table has, for tiles
of 128 and of 64 rows, the useful share with rows as they come and with every set of orders of 3x3x3, as the extension
builds them on the CPU (they are the same on a GPU); a set that a map of this size does not get is in brackets. First
for submanifold maps, then for maps back from the outputs of a layer of stride 2.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

import flexgemm
from benchmarks import scenes
from flexgemm import _C
from flexgemm._voxels import Triple

SPHERES = (16, 32, 64, 128, 256)
KERNEL = (3, 3, 3)
GROUPS = (1, 3, 9)
TILES = (128, 64)


def useful_share(present: NDArray[np.bool_], orders: NDArray[np.int32], tile: int) -> float:
    """`present` (V, N): where the map has neighbours; `orders` (G, N)."""
    worked = 0
    for order, of_group in zip(orders, np.split(present, len(orders)), strict=True):
        padded = np.pad(of_group[:, order], [(0, 0), (0, -len(order) % tile)])
        worked += tile * int(padded.reshape(len(of_group), -1, tile).any(axis=2).sum())
    return float(present.sum() / worked)


def row_orders(nmap: NDArray[np.int32], groups: int, phases: Triple) -> NDArray[np.int32]:
    orders = np.empty((groups, nmap.shape[1]), np.int32)
    how = {"kernel_size": KERNEL, "groups": (groups,), "phases": phases if groups == 1 else (1, 1, 1)}
    workspace = np.empty(_C.row_order_workspace(nmap, orders, **how), np.uint8)
    _C.row_order(nmap, orders, **how, workspace=workspace)
    return orders


def line(scene: scenes.Scene, stride: int = 1) -> str:
    """With a stride: of the map back to the scene from the outputs of a layer that has it."""
    if stride == 1:
        nmap = flexgemm.neighbor_map(scene.coords, scene.shape, KERNEL)
    else:
        nmap = flexgemm.sparse_conv_map(scene.coords, scene.shape, KERNEL, stride, padding=1).inverse
    present = nmap.map >= 0
    planned = _C.plan_order_sets(rows=scene.n, kernel_size=KERNEL, phases=nmap.phases[0])
    cells = [scene.name, f"{scene.n:,}"]
    for groups in (0, *GROUPS):
        as_they_come = np.arange(scene.n, dtype=np.int32)[None]
        orders = row_orders(nmap.map, groups, nmap.phases[0]) if groups else as_they_come
        shares = " / ".join(f"{useful_share(present, orders, tile):.3f}".lstrip("0") for tile in TILES)
        cells.append(shares if groups in (0, *planned) else f"({shares})")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scene", type=scenes.parse, action="append", default=[], metavar="NAME=PATH")
    given = [scenes.load(name, path) for name, path in parser.parse_args().scene]
    headers = ["scene", "rows", "as they come, tile 128 / 64", *(f"{g} group{'s' * (g > 1)}" for g in GROUPS)]
    for stride in (1, 2):
        print(f"| {' | '.join(headers)} |\n|{' --- |' * len(headers)}")
        for scene in [*map(scenes.sphere, SPHERES), *given]:
            print(line(scene, stride), flush=True)
        print()


if __name__ == "__main__":
    main()
