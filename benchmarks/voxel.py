"""Voxel operations: strided, transposed and inverse convolution and pooling (strided.py), codes, the hash table,
samples and voxels of points (points.py), each row a call.

Both have `cases()`: what they measure, and how each case is made, judged and bounded (work.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks import points, strided
from benchmarks.ceilings import Ceilings
from benchmarks.conv import Scenes
from benchmarks.results import Row, describe, significant
from benchmarks.run import Run
from benchmarks.timing import Timer
from benchmarks.work import Case


def cases(clouds: Iterable[str] = ()) -> list[Case]:
    """Cases of one scene are adjacent, so that a scene is made once."""
    made = [*strided.cases(clouds), *points.cases()]
    order = list(dict.fromkeys(case.scene for case in made))
    return sorted(made, key=lambda case: order.index(case.scene))


def run(run: Run, timer: Timer, ceilings: Ceilings, clouds: dict[str, Path]) -> None:
    todo, made = cases(clouds), Scenes(clouds)
    for number, case in enumerate(todo, 1):
        if not run.pending([case.row()]):
            continue
        with run.guarded(describe(case.row())):
            work = case.make(made[case.scene])
            work.judge(work.call())
            ms, floor_ms = timer.median_ms(work.call), ceilings.floor_ms(work.kind, work.flops, work.moved)
            figures: Row = {"n": work.n, "ms": significant(ms), "floor_ms": significant(floor_ms)}
            figures |= {"keys_per_s": significant(1e3 * work.n / ms)} if case.op.startswith("hash") else {}
            run.record(case.row() | figures, f"[{number}/{len(todo)}] ")
        torch.cuda.empty_cache()
