"""Submanifold convolution: neighbour map, forward and backward, 3x3x3 at the sizes that peers were measured at, and
cases of our own: every scene in bfloat16 and TF32, channels between powers of two, a 5x5x5 kernel.

map_train builds all that forward and backward need, map_infer what forward needs, map_frozen also what makes both
faster over a map that is used again and again, as fwd and bwd do; bwd is the gradients of feats, weight and bias.
`--peers flex_gemm` times FlexGEMM beside it (peers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import flexgemm
from benchmarks import scenes
from benchmarks.ceilings import Ceilings
from benchmarks.check import TOLERANCE, ConvReference
from benchmarks.peers import NAME, FlexGemm
from benchmarks.results import Row, describe, kernel_family, significant
from benchmarks.run import Run
from benchmarks.scenes import Scene
from benchmarks.timing import DEVICE, Timer

SPHERES = ((8, 1024), (16, 1024), (32, 1024), (64, 1024), (128, 512), (256, 256), (512, 128), (1024, 64))
OTHER_DTYPES = ((64, 1024), (256, 256))  # spheres that are measured in bfloat16 and float32 too
CLOUD_CHANNELS = (16, 32, 64, 128)  # of scenes given with --scene
BETWEEN = tuple((res, channels) for res in (64, 128) for channels in (96, 160, 320))
WIDE_KERNELS = ((64, 256), (128, 128))  # spheres under a 5x5x5 kernel

OPS = ("map_train", "map_infer", "map_frozen", "fwd", "bwd")


@dataclass(frozen=True)
class Case:
    scene: str
    channels: int
    dtype: str
    precision: str | None = None  # of float32: "tf32" or "ieee"

    @property
    def kind(self) -> str:
        """What decides tolerance and arithmetic speed."""
        return self.precision or self.dtype

    def row(self, op: str, peer: str | None = None) -> Row:
        row: Row = {"suite": "conv", "op": op, "scene": self.scene, "dtype": self.dtype, "channels": self.channels}
        if self.precision:
            row["precision"] = self.precision
        return row | ({"peer": peer} if peer else {"family": kernel_family("" if op.startswith("map") else self.kind)})


def peers_cases(clouds: Iterable[str] = ()) -> list[Case]:
    """What peers were measured at, and true float32 beside TF32."""
    made = []
    for res, channels in SPHERES:
        made.append(Case(f"sphere{res}", channels, "float16"))
        if (res, channels) in OTHER_DTYPES:
            made.append(Case(f"sphere{res}", channels, "bfloat16"))
            made += [Case(f"sphere{res}", channels, "float32", precision) for precision in ("tf32", "ieee")]
    return made + [Case(name, channels, "float16") for name in clouds for channels in CLOUD_CHANNELS]


def cases(clouds: Iterable[str] = ()) -> list[Case]:
    """All; those of one scene are adjacent, so that a scene is made once."""
    made = peers_cases(clouds)
    made += [Case(f"sphere{res}", channels, "float16") for res, channels in BETWEEN]
    made += [Case(f"sphere{res}-k5", channels, "float16") for res, channels in WIDE_KERNELS]
    for case in peers_cases(clouds):
        made += [Case(case.scene, case.channels, "bfloat16"), Case(case.scene, case.channels, "float32", "tf32")]
    scenes_in_order = list(dict.fromkeys(case.scene for case in made))
    return sorted(dict.fromkeys(made), key=lambda case: scenes_in_order.index(case.scene))


class Scenes:
    """Makes or loads scenes by name and keeps the last one."""

    def __init__(self, clouds: dict[str, Path]) -> None:
        self._clouds = clouds
        self._last: Scene | None = None

    def __getitem__(self, name: str) -> Scene:
        if self._last is None or self._last.name != name:
            cloud = self._clouds.get(name)
            self._last = scenes.load(name, cloud) if cloud else scenes.sphere_named(name)
        return self._last


class Problem:
    """Random tensors of one case on the device, and the calls that are timed."""

    def __init__(self, case: Case, scene: Scene) -> None:
        torch.manual_seed(0)
        self.case, self.scene = case, scene
        dtype, c = getattr(torch, case.dtype), case.channels
        self.coords = torch.from_numpy(scene.coords).to(DEVICE)
        self.feats = torch.randn(scene.n, c, device=DEVICE, dtype=dtype)
        self.grad_out = torch.randn(scene.n, c, device=DEVICE, dtype=dtype)
        self.weight = torch.randn(c, *(scene.kernel,) * 3, c, device=DEVICE, dtype=dtype) * (scene.volume * c) ** -0.5
        self.bias = torch.randn(c, device=DEVICE, dtype=dtype)
        self.precision = case.precision or "ieee"

    def map_infer(self) -> flexgemm.NeighborMap:
        return flexgemm.neighbor_map(self.coords, self.scene.shape, kernel_size=self.scene.kernel)

    def map_train(self) -> flexgemm.NeighborMap:
        neighbor_map = self.map_infer()
        if not neighbor_map.mirrored:
            neighbor_map.transposed_map  # noqa: B018  built on first use
        return neighbor_map

    def map_frozen(self) -> flexgemm.NeighborMap:
        return self.map_infer().freeze()

    def fwd(self, neighbor_map: flexgemm.NeighborMap) -> torch.Tensor:
        return flexgemm.submanifold_conv3d(
            self.feats, self.weight, self.bias, neighbor_map=neighbor_map, precision=self.precision
        )

    def bwd(self, neighbor_map: flexgemm.NeighborMap) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return flexgemm.submanifold_conv3d_backward(
            self.grad_out, self.feats, self.weight, neighbor_map=neighbor_map, precision=self.precision
        )

    def peer_calls(self, peer: FlexGemm) -> dict[str, Callable[[], Any]]:
        maps = {
            op: peer.map(self.coords, self.scene.shape, self.scene.kernel, op == "map_train")
            for op in ("map_train", "map_infer")
        }
        cache = maps["map_train"]()
        return maps | {
            "fwd": peer.fwd(self.feats, cache, self.weight, self.bias),
            "bwd": peer.bwd(self.grad_out, self.feats, cache, self.weight, self.bias),
        }

    def reference(self) -> ConvReference:
        return ConvReference(self.scene, self.feats, self.weight, self.bias, self.grad_out)

    def judge(self, op: str, result: Any, reference: ConvReference) -> None:
        tolerance = TOLERANCE[self.case.kind]
        if op.startswith("map") and isinstance(result, flexgemm.NeighborMap):
            reference.judge_map(result.map, result.num_pairs)
        elif op.startswith("map"):  # FlexGEMM's
            transposed = result["neighbor_map"].view(torch.int32).t()
            reference.judge_map(transposed, int((transposed >= 0).sum()))
        elif op == "fwd":
            reference.judge_forward(result, tolerance)
        else:
            reference.judge_backward(result, tolerance)


def useful_flops(op: str, case: Case, scene: Scene) -> float:
    """A multiply-add for each pair and two channels; backward, one for the features and one for the weight."""
    return {"fwd": 2.0, "bwd": 4.0}.get(op, 0.0) * scene.pairs * case.channels**2


def floor_ms(op: str, case: Case, scene: Scene, ceilings: Ceilings) -> float:
    """Useful multiply-adds at dense speed, or each operand once at copy speed. A map costs 4 bytes a pair to read."""
    c, size = case.channels, getattr(torch, case.dtype).itemsize
    rows, weight, pairs = scene.n * c * size, scene.volume * c * c * size, scene.pairs * 4
    moved = {
        "map": scene.n * 16 + scene.volume * scene.n * 4,
        "fwd": 2 * rows + weight + pairs,
        "bwd": 3 * rows + 2 * weight + pairs,
    }[op.partition("_")[0]]
    return ceilings.floor_ms(case.kind, useful_flops(op, case, scene), moved)


def measured(op: str, case: Case, scene: Scene, ms: float, floor: float, peer: str | None = None) -> Row:
    row = case.row(op, peer) | {
        "n": scene.n, "pairs": scene.pairs, "ms": significant(ms), "floor_ms": significant(floor),
    }  # fmt: skip
    flops = useful_flops(op, case, scene)
    return row | {"tflops": significant(flops / ms / 1e9)} if flops else row


def measure_case(
    run: Run,
    timer: Timer,
    ceilings: Ceilings,
    case: Case,
    scene: Scene,
    rows: list[Row],
    peer: FlexGemm | None,
    at: str,
) -> None:
    problem = Problem(case, scene)
    reference = problem.reference()
    neighbor_map = problem.map_frozen()
    calls: dict[str, Callable[[], Any]] = {
        "map_train": problem.map_train,
        "map_infer": problem.map_infer,
        "map_frozen": problem.map_frozen,
        "fwd": partial(problem.fwd, neighbor_map),
        "bwd": partial(problem.bwd, neighbor_map),
    }
    theirs: dict[str, Callable[[], Any]] = {}
    for row in rows:
        op, name = row["op"], row.get("peer")
        with run.guarded(describe(row)):
            if peer is not None and name and not theirs:
                theirs = problem.peer_calls(peer)
            call = theirs[op] if name else calls[op]
            problem.judge(op, call(), reference)
            ms = timer.median_ms(call)
            run.record(measured(op, case, scene, ms, floor_ms(op, case, scene, ceilings), name), at)


def run(run: Run, timer: Timer, ceilings: Ceilings, clouds: dict[str, Path], peer: FlexGemm | None = None) -> None:
    todo = cases(clouds)
    beside = [case for case in peers_cases(clouds) if case.precision != "ieee"]  # FlexGEMM rounds float32 to TF32
    made = Scenes(clouds)
    for number, case in enumerate(todo, 1):
        rows = [case.row(op) for op in OPS]
        if peer is not None and case in beside:
            rows += [case.row(op, NAME) for op in OPS if op in peer.ops]
        missing = run.pending(rows)
        if missing:
            with run.guarded(f"conv {case}"):
                at = f"[{number}/{len(todo)}] "
                measure_case(run, timer, ceilings, case, made[case.scene], missing, peer, at)
            torch.cuda.empty_cache()
