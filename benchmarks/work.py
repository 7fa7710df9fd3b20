"""What the suites of single operations are made of: a case names its row in the results, its work is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.peers import FlexGemm
from benchmarks.results import Row, kernel_family
from benchmarks.scenes import Scene


@dataclass(frozen=True)
class Work:
    """One call on tensors that are on the device, the judge of its result (who raises Wrong), and the floor of its
    time: floating-point operations of `kind` at dense speed, or bytes moved once at copy speed."""

    call: Callable[[], Any]
    judge: Callable[[Any], None]
    n: int
    moved: float
    flops: float = 0.0
    kind: str = "float16"
    peer: Callable[[FlexGemm], Callable[[], Any]] | None = None  # the same by FlexGEMM
    judge_peer: Callable[[Any], None] | None = None  # where that may be less exact


@dataclass(frozen=True)
class Case:
    op: str
    scene: str  # of scenes.py
    make: Callable[[Scene], Work]
    variant: str = ""  # "k2s2": what is done to the scene, part of its name in the results
    dtype: str = ""
    channels: int = 0
    beside_peers: bool = True

    def row(self, peer: str | None = None) -> Row:
        scene = f"{self.scene}-{self.variant}" if self.variant else self.scene
        row: Row = {"suite": "voxel", "op": self.op, "scene": scene}
        row |= {"dtype": self.dtype} if self.dtype else {}
        row |= {"channels": self.channels} if self.channels else {}
        return row | ({"peer": peer} if peer else {"family": kernel_family(self.dtype)})
