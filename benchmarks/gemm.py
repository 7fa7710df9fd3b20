"""Products at the sizes that peers were measured at: dense FP8 and bf16, ragged groups of both, and casts to FP8.

FP8 products carry one scale per tensor (one per group for b) and write bf16. `--peers torch` times torch's own kernels
on the same tensors in the same run.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

import flexgemm
from benchmarks.ceilings import Ceilings
from benchmarks.check import BF16_OUT_DIFF, ROWS, Wrong, judge_similarity
from benchmarks.results import Row, describe, kernel_family, significant
from benchmarks.run import Run
from benchmarks.timing import DEVICE, Timer

FP8 = "float8_e4m3fn"
FP8_MAX = 448.0

# (n, k) of a large mixture-of-experts model's layers
LAYERS = ((7168, 576), (2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
DENSE_FP8 = [(m, n, k) for m in (64, 128, 4096) for n, k in LAYERS]
DENSE_BF16 = [(4096, 4096, 7168), (4096, 7168, 2048), (128, 4096, 7168), (8192, 8192, 8192)]
# (groups, expected_m, n, k), in the order in which the group sizes are drawn
GROUPED_FP8 = [
    (4, 8192, 4096, 7168), (4, 8192, 7168, 2048),
    (8, 4096, 4096, 7168), (8, 4096, 7168, 2048),
    (32, 256, 4096, 7168), (32, 256, 7168, 2048),
    (128, 64, 1536, 2048), (128, 64, 2048, 768),
]  # fmt: skip
GROUPED_BF16 = [(4, 8192, 4096, 7168), (8, 4096, 7168, 2048), (32, 256, 4096, 7168), (128, 64, 1536, 2048)]
CASTS = [(4096, 7168), (32768, 7168)]  # (m, k), bf16 to FP8

PEERS = {
    ("dense", FP8): ("torch._scaled_mm", "torch._scaled_mm(fast_accum)"),
    ("dense", "bfloat16"): ("torch.matmul",),
    ("m_grouped_ragged", FP8): ("torch._scaled_grouped_mm", "torch._scaled_grouped_mm(fast_accum)"),
    ("m_grouped_ragged", "bfloat16"): ("torch._grouped_mm",),
}


@dataclass(frozen=True)
class Case:
    dtype: str
    m: int
    n: int
    k: int
    sizes: tuple[int, ...] = ()  # rows per group; () when dense
    expected_m: int = 0

    @property
    def op(self) -> str:
        return "m_grouped_ragged" if self.sizes else "dense"

    def row(self, peer: str | None = None) -> Row:
        row: Row = {"suite": "gemm", "op": self.op, "dtype": self.dtype}
        if self.sizes:
            row |= {"groups": len(self.sizes), "expected_m": self.expected_m}
        row |= {"m": self.m, "n": self.n, "k": self.k}
        return row | ({"peer": peer} if peer else {"family": kernel_family(self.dtype)})


def cases() -> list[Case]:
    draw = random.Random(0)
    made = [Case(FP8, *shape) for shape in DENSE_FP8] + [Case("bfloat16", *shape) for shape in DENSE_BF16]
    for groups, expected_m, n, k in GROUPED_FP8:
        sizes = tuple(int(expected_m * draw.uniform(0.7, 1.3)) for _ in range(groups))
        made.append(Case(FP8, sum(sizes), n, k, sizes, expected_m))
    for groups, expected_m, n, k in GROUPED_BF16:
        made.append(Case("bfloat16", groups * expected_m, n, k, (expected_m,) * groups, expected_m))
    return made


class Problem:
    """Random operands of one case on the device, and the calls that are timed."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        groups = len(case.sizes)
        self.a = torch.randn(case.m, case.k, device=DEVICE, dtype=torch.bfloat16)
        self.b = torch.randn(*([groups] if groups else []), case.n, case.k, device=DEVICE, dtype=torch.bfloat16)
        self.scale_a = self.scale_b = None
        if case.dtype == FP8:
            self.a, self.scale_a = _quantize(self.a, dim=None)
            self.b, self.scale_b = _quantize(self.b, dim=(1, 2) if groups else None)
        ends = list(itertools.accumulate(case.sizes))
        self.offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE) if groups else None

    def ours(self) -> torch.Tensor:
        scales = {"scale_a": self.scale_a, "scale_b": self.scale_b}
        if self.offsets is None:
            return flexgemm.gemm_nt(self.a, self.b, out_dtype=torch.bfloat16, **scales)
        return flexgemm.m_grouped_gemm_nt(self.a, self.b, self.offsets, out_dtype=torch.bfloat16, **scales)

    def peers(self) -> dict[str, Callable[[], torch.Tensor]]:
        """torch's kernels for the same product, by the names in PEERS."""
        a, b, offsets = self.a, self.b.transpose(-2, -1), self.offsets
        if self.scale_a is None or self.scale_b is None:
            call = partial(torch.matmul, a, b) if offsets is None else partial(torch._grouped_mm, a, b, offs=offsets)
            calls = [call]
        elif offsets is None:
            call = partial(torch._scaled_mm, a, b, self.scale_a, self.scale_b, out_dtype=torch.bfloat16)
            calls = [partial(call, use_fast_accum=fast) for fast in (False, True)]
        else:  # takes scales per row only
            scale_a = self.scale_a.expand(self.case.m).contiguous()
            scale_b = self.scale_b[:, None].expand(-1, self.case.n).contiguous()
            call = partial(torch._scaled_grouped_mm, a, b, scale_a, scale_b, offs=offsets, out_dtype=torch.bfloat16)
            calls = [partial(call, use_fast_accum=fast) for fast in (False, True)]
        return dict(zip(PEERS[self.case.op, self.case.dtype], calls, strict=True))

    def judge(self, out: torch.Tensor, limit: float = BF16_OUT_DIFF) -> None:
        """Random rows, from up to 8 groups, against the float64 product of the dequantised operands."""
        picks = random.Random(1)
        bounds = [0, *itertools.accumulate(self.case.sizes or (self.case.m,))]
        spans = [(g, lo, hi) for g, (lo, hi) in enumerate(itertools.pairwise(bounds)) if lo < hi]
        spans = picks.sample(spans, min(8, len(spans)))
        for g, lo, hi in spans:
            rows = picks.sample(range(lo, hi), min(ROWS // len(spans), hi - lo))
            b = self.b[g] if self.case.sizes else self.b
            reference = torch.stack([self.a[row].double() for row in rows]) @ b.double().t()
            if self.scale_a is not None and self.scale_b is not None:
                reference = reference * self.scale_a.double() * self.scale_b.reshape(-1)[g].double()
            judge_similarity(f"group {g}" if self.case.sizes else "out", out[rows], reference, limit)


def _quantize(x: torch.Tensor, dim: tuple[int, ...] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """q, scale with x ~ q * scale: one scale for all, or one per entry of the axes that `dim` leaves."""
    amax = x.abs().amax() if dim is None else x.abs().amax(dim=dim)
    scale = amax.float() / FP8_MAX
    per_entry = scale.reshape(scale.shape + (1,) * (x.dim() - scale.dim()))
    return (x / per_entry.to(x.dtype)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def floor_ms(case: Case, ceilings: Ceilings) -> float:
    """Multiply-adds at dense speed, or a, b and out once at copy speed; groups without rows do not read their b."""
    size = getattr(torch, case.dtype).itemsize
    weights = sum(rows > 0 for rows in case.sizes) if case.sizes else 1
    moved = size * (case.m * case.k + weights * case.n * case.k) + 2 * case.m * case.n
    kind = "float8" if case.dtype == FP8 else case.dtype
    return ceilings.floor_ms(kind, 2.0 * case.m * case.n * case.k, moved)


def measure_case(run: Run, timer: Timer, ceilings: Ceilings, case: Case, missing: list[Row], at: str) -> None:
    problem = Problem(case)
    calls: dict[str | None, Callable[[], torch.Tensor]] = {None: problem.ours}
    if any(row.get("peer") for row in missing):
        calls |= problem.peers()
    for row in missing:
        peer = row.get("peer")
        with run.guarded(describe(row)):
            # a peer may accumulate in reduced precision: its row only has to be the right product
            problem.judge(calls[peer](), 1e-3 if peer else BF16_OUT_DIFF)
            ms = timer.median_ms(calls[peer])
            speed = {"tflops": significant(2e-9 * case.m * case.n * case.k / ms)}
            run.record(row | {"ms": significant(ms)} | speed | {"floor_ms": floor_ms(case, ceilings)}, at)


def measure_cast(run: Run, timer: Timer, ceilings: Ceilings, row: Row, at: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(row["m"], row["k"], device=DEVICE, dtype=torch.bfloat16)
    cast = partial(flexgemm.quantize, x, FP8, granularity=row["granularity"])
    q, scale = cast()
    amax = x.abs().amax(dim=1 if row["granularity"] == "row" else (0, 1)).float()
    # a tensor as divisor: by a number, torch multiplies with the rounded reciprocal on a GPU
    if not torch.equal(scale.reshape(amax.shape), amax / torch.full_like(amax, FP8_MAX)):
        raise Wrong("scale is not amax / 448")
    expected = (x[:ROWS].float() / scale.reshape(-1, 1)[:ROWS]).to(torch.float8_e4m3fn)
    if not torch.equal(q[:ROWS].float(), expected.float()):
        raise Wrong("q is not the rounded quotient")
    moved = x.numel() * 2 + q.numel() + 4 * scale.numel()  # x once: a floor that the second read of x stays above
    floor = ceilings.floor_ms("float8", 0.0, moved)
    run.record(row | {"ms": significant(timer.median_ms(cast)), "floor_ms": floor}, at)


def run(run: Run, timer: Timer, ceilings: Ceilings, with_peers: bool) -> None:
    todo = cases()
    total = len(todo) + 2 * len(CASTS)
    for number, case in enumerate(todo, 1):
        peers = PEERS[case.op, case.dtype] if with_peers else ()
        missing = run.pending([case.row(peer) for peer in (None, *peers)])
        if missing:
            with run.guarded(describe(case.row())):
                measure_case(run, timer, ceilings, case, missing, f"[{number}/{total}] ")
            torch.cuda.empty_cache()
    casts: list[Row] = [
        {"suite": "quantize", "op": "quantize", "dtype": FP8, "granularity": granularity, "m": m, "k": k,
         "family": kernel_family()}
        for m, k in CASTS for granularity in ("tensor", "row")
    ]  # fmt: skip
    for number, row in enumerate(casts, len(todo) + 1):
        if run.pending([row]):
            with run.guarded(describe(row)):
                measure_cast(run, timer, ceilings, row, f"[{number}/{total}] ")
