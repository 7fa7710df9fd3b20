"""Voxel operations: strided, transposed and inverse convolution and pooling (strided.py), convolution in FP8
(fp8_conv.py), codes, the hash table, samples and voxels of points (points.py), each row a call.

A family of operations is a module with `cases()`: what it measures, and how each case is made, judged and bounded
(work.py).
"""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks import fp8_conv, points, strided
from benchmarks.ceilings import Ceilings
from benchmarks.conv import Scenes
from benchmarks.results import describe, significant
from benchmarks.run import Run
from benchmarks.timing import Timer
from benchmarks.work import Case

FAMILIES = (strided, fp8_conv, points)


def cases() -> list[Case]:
    """Cases of one scene are adjacent, so that a scene is made once."""
    made = [case for family in FAMILIES for case in family.cases()]
    order = list(dict.fromkeys(case.scene for case in made))
    return sorted(made, key=lambda case: order.index(case.scene))


def run(run: Run, timer: Timer, ceilings: Ceilings, clouds: dict[str, Path]) -> None:
    todo, made = cases(), Scenes(clouds)
    for number, case in enumerate(todo, 1):
        if not run.pending([case.row()]):
            continue
        with run.guarded(describe(case.row())):
            work = case.make(made[case.scene])
            work.judge(work.call())
            figures = {
                "n": work.n,
                "ms": significant(timer.median_ms(work.call)),
                "floor_ms": significant(ceilings.floor_ms(work.kind, work.flops, work.moved)),
            }
            run.record(case.row() | figures, f"[{number}/{len(todo)}] ")
        torch.cuda.empty_cache()
