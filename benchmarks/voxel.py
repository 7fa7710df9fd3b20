"""Voxel operations: strided, transposed and inverse convolution and pooling (strided.py), convolution in FP8
(fp8_conv.py), codes, the hash table, samples and voxels of points (points.py), each row a call.

A family of operations is a module with `cases()`: what it measures, and how each case is made, judged and bounded
(work.py).
`--peers flex_gemm` times FlexGEMM beside it where it has the operation (peers.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks import fp8_conv, points, strided
from benchmarks.ceilings import Ceilings
from benchmarks.conv import Scenes
from benchmarks.peers import NAME, FlexGemm
from benchmarks.results import Row, describe, significant
from benchmarks.run import Run
from benchmarks.timing import Timer
from benchmarks.work import Case, Work


def cases(clouds: Iterable[str] = ()) -> list[Case]:
    """Cases of one scene are adjacent, so that a scene is made once: clouds, then spheres from the smallest on."""
    clouds = list(clouds)
    made = [*strided.cases(clouds), *fp8_conv.cases(), *points.cases()]

    def place(case: Case) -> int:
        return (
            clouds.index(case.scene) - len(clouds) if case.scene in clouds else int(case.scene.removeprefix("sphere"))
        )

    return sorted(made, key=place)


def run(run: Run, timer: Timer, ceilings: Ceilings, clouds: dict[str, Path], peer: FlexGemm | None = None) -> None:
    todo, made = cases(clouds), Scenes(clouds)
    for number, case in enumerate(todo, 1):
        has_peer = peer is not None and case.beside_peers and case.op in peer.ops
        rows = [case.row(), *([case.row(NAME)] if has_peer else [])]
        missing = run.pending(rows)
        if not missing:
            continue
        with run.guarded(describe(case.row())):
            work = case.make(made[case.scene])
            floor = significant(ceilings.floor_ms(work.kind, work.flops, work.moved))
            for row in missing:
                with run.guarded(describe(row)):
                    ms = _measure(work, timer, row, peer)
                    figures: Row = {"n": work.n, "ms": significant(ms), "floor_ms": floor}
                    figures |= {"keys_per_s": significant(1e3 * work.n / ms)} if case.op.startswith("hash") else {}
                    run.record(row | figures, f"[{number}/{len(todo)}] ")
        torch.cuda.empty_cache()


def _measure(work: Work, timer: Timer, row: Row, peer: FlexGemm | None) -> float:
    call, judge = work.call, work.judge
    if "peer" in row:
        assert peer is not None and work.peer is not None  # of every case whose operation is in peer.ops
        call, judge = work.peer(peer), work.judge_peer or work.judge
        call()  # tunes its kernels, some of which then add to one result many times
    judge(call())
    return timer.median_ms(call)
