"""Products at the sizes that peers were measured at: dense FP8 and bf16, groups in every layout, weight gradients and
casts to FP8; and at sizes of decoding and of other mixtures of experts.

FP8 products carry one scale per tensor (one per group for b), or where `scales` says "row" one per row of each, or
where it says "block" one per 1 x 128 of a and 128 x 128 of b, and write bf16, weight gradients float32. What else a
product makes of its sums is its `ending`. `--peers torch` times torch's own kernels on the same tensors in the same
run.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

import flexgemm
from benchmarks.ceilings import Ceilings
from benchmarks.check import PRODUCT_DIFF, ROWS, Wrong, judge_finite, judge_float8, judge_similarity, some_rows
from benchmarks.results import Row, describe, kernel_family, significant
from benchmarks.run import Run
from benchmarks.timing import DEVICE, Timer

FP8 = "float8_e4m3fn"
FP8_MAX = 448.0
ALIGNMENT = flexgemm.get_m_alignment_for_contiguous_layout()

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
MASKED_FP8 = [
    (1, 1024, 4096, 7168), (1, 1024, 7168, 2048), (2, 512, 4096, 7168), (2, 512, 7168, 2048), (4, 256, 4096, 7168),
    (4, 256, 7168, 2048), (32, 32, 4096, 7168), (32, 32, 7168, 2048), (128, 16, 4096, 7168), (128, 16, 7168, 2048),
]  # fmt: skip
WGRAD_FP8 = [(m, n, k) for k in (4096, 8192) for m, n in ((7168, 2112), (2048, 7168), (7168, 4096))]
K_GROUPED_FP8 = [(4, 4096, 7168, 4096), (8, 4096, 2048, 7168), (32, 1024, 7168, 2048)]  # (groups, expected k, m, n)
SHORT_FP8 = (128, 512, 2048, 768)  # likewise, where what is added to the output counts most
# (groups, n, k) of other models, with groups of one size and with few large groups beside many small and empty ones
EXPERTS_FP8 = [(32, 5760, 2880), (128, 1536, 2048), (128, 2048, 768), (8, 28672, 4096), (256, 4096, 7168)]
EXPERT_ROWS = (1, 7, 64, 300)
DECODE_FP8 = [(m, n, k) for m in (1, 2, 4, 8, 16, 32) for n, k in ((7168, 2048), (4096, 7168), (24576, 1536))]
SERVED_FP8 = [(m, n, k) for m in (256, 512) for n, k in ((2112, 7168), (4096, 7168), (7168, 2048))]
# (m, n, k), bf16 and FP8, that large tiles cut badly: few columns, and any number of rows
ANY_ROWS = [(m, n, 8192) for m in (520, 1024) for n in (256, 512, 1024)]
ANY_ROWS += [(75, 24576, 1536), (140, 6144, 4096), (317, 2112, 7168), (595, 4096, 14336), (675, 1024, 8192)]
ANY_ROWS += [(836, 5120, 5120), (1146, 2048, 2048), (1530, 1536, 7168)]
CASTS = [(4096, 7168), (32768, 7168)]  # (m, k), bf16 to FP8
# bf16 products of operands whose columns are adjacent elements, as gradients of a linear layer have them: of its input
# b is the weight as it is, of the weight both are rows of tokens
COLUMNS_BF16 = [("b", m, 4096, 7168) for m in (16, 128, 4096)]  # (operands, m, n, k)
COLUMNS_BF16 += [("b", 8192, 8192, 8192), ("ab", 4096, 4096, 7168), ("ab", 7168, 4096, 8192)]
COLUMNS_GROUPED = [(32, 8, 4096, 7168), (32, 256, 7168, 4096), (128, 64, 1536, 2048)]  # b: (groups, m of each, n, k)
COLUMNS_ALONG_K = (32, 256, 4096, 7168)  # ab: (groups, k of each, m, n)
# (op, m, n) of the cases that are measured with scales of blocks as well
BLOCK_SCALED = {
    ("dense", 64, 4096), ("dense", 128, 4096), ("dense", 4096, 4096), ("dense", 4096, 24576),
    ("m_grouped_ragged", 8320, 4096), ("m_grouped_ragged", 8069, 1536), ("m_grouped_contiguous", 34151, 4096),
    ("m_grouped_masked", 1024, 4096), ("m_grouped_masked", 1984, 4096),
}  # fmt: skip
# (m, n, k) of products with scales per row, and of FP8 ones that end as inference wants; the second one also with each
# of the endings in each dtype
ENDED = [(4096, 4096, 7168), (4096, 7168, 2048), (4096, 24576, 1536)]
ENDINGS = ("bias", "relu", "silu", "gelu", "swiglu", "fp8")
SERVED_ENDINGS = ("swiglu", "fp8", "swiglu-fp8")
ENDED_FEW = (128, 24576, 1536)  # few rows, with SwiGLU in each dtype and FP8 outputs
ENDED_GROUPS = {("m_grouped_masked", 4, 4096), ("m_grouped_contiguous", 32, 4096)}  # layout, groups, n
ACTIVATIONS = {"relu": torch.relu, "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}
LOOSE_DIFF = 1e-3  # of peers, which may accumulate in reduced precision
GRANULARITIES = ("tensor", "row", "1x128", "128x128", "row of mT")  # mT: of a transposed view
BLOCK = 128

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
    sizes: tuple[int, ...] = ()  # rows per group, or K per group; () when dense
    expected_m: int = 0
    layout: str = ""  # "" is dense or m_grouped_ragged
    scales: str = ""  # "" is one per tensor, or "row" or "block"
    ending: str = ""  # one of ENDINGS or SERVED_ENDINGS
    columns: str = ""  # "b" or "ab": operands whose columns are adjacent elements
    suite: str = "gemm"  # of the others no peer was measured elsewhere

    @property
    def op(self) -> str:
        return self.layout or ("m_grouped_ragged" if self.sizes else "dense")

    def row(self, peer: str | None = None) -> Row:
        row: Row = {"suite": self.suite, "op": self.op, "dtype": self.dtype}
        if self.sizes:
            row |= {"groups": len(self.sizes), "expected_m": self.expected_m}
        row |= {"m": self.m, "n": self.n, "k": self.k}
        if self.scales:
            row |= {"scales": self.scales}
        if self.ending:
            row |= {"ending": self.ending}
        if self.columns:
            row |= {"columns": self.columns}
        return row | ({"peer": peer} if peer else {"family": kernel_family(self.dtype)})


def cases() -> list[Case]:
    """Those of the peers' measured shapes, and the same groups in the other layouts."""
    draw = random.Random(0)
    made = [Case(FP8, *shape) for shape in DENSE_FP8] + [Case("bfloat16", *shape) for shape in DENSE_BF16]
    contiguous, masked = [], []
    for groups, expected_m, n, k in GROUPED_FP8:
        sizes = tuple(int(expected_m * draw.uniform(0.7, 1.3)) for _ in range(groups))
        made.append(Case(FP8, sum(sizes), n, k, sizes, expected_m))
        contiguous.append(Case(FP8, sum(sizes), n, k, sizes, expected_m, "m_grouped_contiguous"))
    for groups, expected_m, n, k in MASKED_FP8:
        sizes = tuple(max(1, int(expected_m * draw.uniform(0.7, 1.3))) for _ in range(groups))
        masked.append(Case(FP8, sum(sizes), n, k, sizes, expected_m, "m_grouped_masked"))
    for groups, expected_m, n, k in GROUPED_BF16:
        made.append(Case("bfloat16", groups * expected_m, n, k, (expected_m,) * groups, expected_m))
    return made + contiguous + masked + [Case(FP8, *shape, layout="wgrad") for shape in WGRAD_FP8]


def more_cases() -> list[Case]:
    """Shapes that no peer was measured at."""
    draw = random.Random(0)
    made = [Case(FP8, *shape) for shape in DECODE_FP8 + SERVED_FP8]
    made += [Case(dtype, *shape, suite="any_rows") for dtype in (FP8, "bfloat16") for shape in ANY_ROWS]

    def groups_along_k(groups: int, expected_k: int, m: int, n: int) -> Case:
        sizes = tuple(16 * int(expected_k / 16 * draw.uniform(0.7, 1.3)) for _ in range(groups))
        return Case(FP8, m, n, sum(sizes), sizes, expected_k, "k_grouped_wgrad")

    made += [groups_along_k(*shape) for shape in K_GROUPED_FP8]
    for groups, n, k in EXPERTS_FP8:
        mixtures = [(rows,) * groups for rows in EXPERT_ROWS]
        mixtures.append(tuple(min(int(draw.paretovariate(0.8)) - 1, 4096) for _ in range(groups)))
        made += [Case(FP8, sum(sizes), n, k, sizes, sum(sizes) // groups, suite="experts") for sizes in mixtures]
    made.append(groups_along_k(*SHORT_FP8))
    blocks = [case for case in cases() if case.dtype == FP8 and (case.op, case.m, case.n) in BLOCK_SCALED]
    made += [Case(FP8, *shape, scales="row", suite="endings") for shape in ENDED]
    made += [Case(dtype, *ENDED[1], ending=e, suite="endings") for dtype in (FP8, "bfloat16") for e in ENDINGS]
    made += [Case(FP8, *ENDED[1], scales=s, ending="swiglu", suite="endings") for s in ("row", "block")]
    served = [Case(FP8, *shape, ending=e, suite="endings") for shape in [*ENDED, ENDED_FEW] for e in SERVED_ENDINGS]
    made += [case for case in served if case not in made]
    made.append(Case("bfloat16", *ENDED_FEW, ending="swiglu", suite="endings"))
    grouped = [case for case in cases() if (case.op, len(case.sizes), case.n) in ENDED_GROUPS]
    made += [replace(case, ending=e, suite="endings") for case in grouped for e in ("swiglu", "swiglu-fp8")]
    made += [Case("bfloat16", *shape, columns=c, suite="columns") for c, *shape in COLUMNS_BF16]
    for groups, rows, n, k in COLUMNS_GROUPED:
        made.append(Case("bfloat16", groups * rows, n, k, (rows,) * groups, rows, columns="b", suite="columns"))
    groups, of_group, m, n = COLUMNS_ALONG_K
    along_k = Case("bfloat16", m, n, groups * of_group, (of_group,) * groups, of_group, "k_grouped_wgrad")
    made.append(replace(along_k, columns="ab", suite="columns"))
    return made + [replace(case, scales="block") for case in blocks]


class Problem:
    """Random operands of one case on the device, and the calls that are timed."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        sizes, groups = case.sizes, len(case.sizes)
        along_k = case.op == "k_grouped_wgrad"
        weights = groups if not along_k else 0
        if case.op == "m_grouped_masked":
            a_shape: tuple[int, ...] = (groups, _round_up(max(sizes), ALIGNMENT), case.k)
        elif case.op == "m_grouped_contiguous":
            a_shape = (sum(_round_up(size, ALIGNMENT) for size in sizes), case.k)
        else:
            a_shape = (case.m, case.k)
        self.a = torch.randn(*a_shape, device=DEVICE, dtype=torch.bfloat16)
        self.b = torch.randn(*([weights] if weights else []), case.n, case.k, device=DEVICE, dtype=torch.bfloat16)
        self.scale_a = self.scale_b = None
        if case.scales == "block":
            self.a, self.scale_a = _quantize_blocks(self.a, 1)
            self.b, self.scale_b = _quantize_blocks(self.b, BLOCK)
        elif case.dtype == FP8:
            of_rows = (1,) if case.scales == "row" else None
            self.a, self.scale_a = _quantize(self.a, dim=of_rows)
            self.b, self.scale_b = _quantize(self.b, dim=(1, 2) if weights else of_rows)
        if "a" in case.columns:
            self.a = self.a.mT.contiguous().mT
        if "b" in case.columns:
            self.b = self.b.mT.contiguous().mT
        self.bias = torch.randn(case.n, device=DEVICE, dtype=torch.bfloat16) if case.ending == "bias" else None
        largest = case.k / 16 if "swiglu" in case.ending else 1.0  # saturates nothing: products of sums of random data
        self.scale_out = torch.tensor(largest, device=DEVICE) if "fp8" in case.ending else None
        self.ends = list(itertools.accumulate(sizes))
        self.offsets = self._integers(self.ends)
        self.masked_m = self._integers(sizes)
        self.m_indices = self._integers(
            [i for g, size in enumerate(sizes) for i in [g] * size + [-1] * (-size % ALIGNMENT)]
            if case.op == "m_grouped_contiguous"
            else []
        )
        self.grads = torch.randn(groups or 1, case.m, case.n, device=DEVICE) if "wgrad" in case.op else None
        self.before = None if self.grads is None else self.grads.clone()

    @staticmethod
    def _integers(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    def ours(self) -> torch.Tensor:
        scales = {"scale_a": self.scale_a, "scale_b": self.scale_b}
        how = scales | {"out_dtype": torch.bfloat16}
        if self.scale_out is not None:
            how |= {"scale_out": self.scale_out, "out_dtype": torch.float8_e4m3fn}
        match self.case.ending.removesuffix("fp8").removesuffix("-"):
            case "bias":
                how |= {"bias": self.bias}
            case "":
                pass
            case activation:
                how |= {"activation": activation}
        match self.case.op:
            case "dense":
                return flexgemm.gemm_nt(self.a, self.b, **how)
            case "m_grouped_ragged":
                return flexgemm.m_grouped_gemm_nt(self.a, self.b, self.offsets, **how)
            case "m_grouped_contiguous":
                return flexgemm.m_grouped_gemm_nt_contiguous(self.a, self.b, self.m_indices, **how)
            case "m_grouped_masked":
                expected_m = self.case.expected_m
                return flexgemm.m_grouped_gemm_nt_masked(self.a, self.b, self.masked_m, expected_m, **how)
            case "wgrad":
                return flexgemm.wgrad_gemm_nt(self.a, self.b, out=self.grads[0], **scales)
            case _:
                return flexgemm.k_grouped_wgrad_gemm_nt(self.a, self.b, self.offsets, out=self.grads, **scales)

    def products(self, out: torch.Tensor) -> list[tuple[Any, Any, torch.Tensor]]:
        """The dense products that the case consists of: where in a, where in b, and what ours() made of them."""
        spans = [(g, hi - size, hi) for g, (size, hi) in enumerate(zip(self.case.sizes, self.ends, strict=True))]
        match self.case.op:
            case "m_grouped_ragged":
                return [(slice(lo, hi), g, out[lo:hi]) for g, lo, hi in spans]
            case "m_grouped_contiguous":
                starts = itertools.accumulate((_round_up(size, ALIGNMENT) for size in self.case.sizes), initial=0)
                spans = [(g, lo, lo + size) for g, (lo, size) in enumerate(zip(starts, self.case.sizes, strict=False))]
                return [(slice(lo, hi), g, out[lo:hi]) for g, lo, hi in spans]
            case "m_grouped_masked":
                return [((g, slice(size)), g, out[g, :size]) for g, size in enumerate(self.case.sizes)]
            case "k_grouped_wgrad":
                return [((slice(None), slice(lo, hi)),) * 2 + (out[g],) for g, lo, hi in spans]
            case _:
                return [(..., ..., out)]

    def peers(self) -> dict[str, Callable[[], torch.Tensor]]:
        """torch's kernels for the same product, by the names in PEERS."""
        a, b = self.a, self.b.transpose(-2, -1)
        offsets = self.offsets if self.case.sizes else None
        if self.scale_a is None or self.scale_b is None:
            call = partial(torch.matmul, a, b) if offsets is None else partial(torch._grouped_mm, a, b, offs=offsets)
            calls = [call]
        elif offsets is None:
            scale_a, scale_b = self.scale_a, self.scale_b
            if self.case.scales == "row":
                scale_a, scale_b = scale_a[:, None], scale_b[None]
            call = partial(torch._scaled_mm, a, b, scale_a, scale_b, bias=self.bias, out_dtype=torch.bfloat16)
            calls = [partial(call, use_fast_accum=fast) for fast in (False, True)]
        else:  # takes scales per row only
            scale_a = self.scale_a.expand(self.case.m).contiguous()
            scale_b = self.scale_b[:, None].expand(-1, self.case.n).contiguous()
            call = partial(torch._scaled_grouped_mm, a, b, scale_a, scale_b, offs=offsets, out_dtype=torch.bfloat16)
            calls = [partial(call, use_fast_accum=fast) for fast in (False, True)]
        return dict(zip(PEERS[self.case.op, self.case.dtype], calls, strict=True))

    def factor(self, rows: Sequence[int], group: int) -> torch.Tensor | float:
        """What the operands' product is multiplied by, in float64: nothing where their blocks were."""
        if self.scale_a is None or self.scale_b is None or self.case.scales == "block":
            return 1.0
        if self.case.scales == "row":
            return self.scale_a[rows, None].double() * self.scale_b.double()
        return self.scale_a.double() * self.scale_b.double().reshape(-1)[group if self.scale_b.dim() else 0]

    def judge(self, out: torch.Tensor, limit: float | None = None) -> None:
        """Random rows and the last one, from up to 8 groups, against the float64 product of the dequantised operands,
        within `limit` or what their dtype allows; all are finite."""
        if self.before is not None:  # of gradients the first call is judged: later ones have added more
            out = out - self.before.reshape(out.shape)
        picks = random.Random(1)
        products = [(g, *product) for g, product in enumerate(self.products(out)) if self.a[product[0]].numel() > 0]
        products = picks.sample(products, min(8, len(products)))
        for g, of_a, of_b, result in products:
            judge_finite("out", result.float())
            rows = picks.sample(range(len(result)), min(ROWS // len(products), len(result)))
            rows[0] = len(result) - 1
            if self.case.scales == "block":
                a = _by_blocks(self.a[of_a][rows], self.scale_a[of_a][rows], 1)
                b = _by_blocks(self.b[of_b], self.scale_b[of_b], BLOCK)
            else:
                a, b = self.a[of_a][rows].double(), self.b[of_b].double()
            reference = a @ b.t() * self.factor(rows, g)
            if self.bias is not None:
                reference = reference + self.bias.double()
            if self.case.ending in ACTIVATIONS:
                reference = ACTIVATIONS[self.case.ending](reference)
            elif "swiglu" in self.case.ending:
                reference = torch.nn.functional.silu(reference[:, 0::2]) * reference[:, 1::2]
            name = f"group {g}" if self.case.sizes else "out"
            if self.scale_out is not None:
                judge_float8(name, result[rows], reference / self.scale_out.double())
            else:
                judge_similarity(name, result[rows], reference, limit or PRODUCT_DIFF[result.dtype])


def _round_up(length: int, unit: int) -> int:
    return -(-length // unit) * unit


def _quantize(x: torch.Tensor, dim: tuple[int, ...] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """q, scale with x ~ q * scale: one scale for all, or one per entry of the axes that `dim` leaves."""
    amax = x.abs().amax() if dim is None else x.abs().amax(dim=dim)
    scale = amax.float() / FP8_MAX
    per_entry = scale.reshape(scale.shape + (1,) * (x.dim() - scale.dim()))
    return (x / per_entry.to(x.dtype)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def _blocks_of(x: torch.Tensor, block_rows: int) -> torch.Tensor:
    """(..., R, K) -> (..., R / block_rows, block_rows, K / 128, 128), with zeros behind what does not come out even."""
    rows, k = x.shape[-2:]
    x = torch.nn.functional.pad(x, (0, -k % BLOCK, 0, -rows % block_rows))
    return x.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, block_rows))


def _quantize_blocks(x: torch.Tensor, block_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q, scale with a scale for each block_rows x 128 of x."""
    blocks = _blocks_of(x, block_rows)
    scale = blocks.abs().amax(dim=(-3, -1)).float().clamp(min=1e-6) / FP8_MAX
    q = (blocks / scale[..., None, :, None].to(x.dtype)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    rows, k = x.shape[-2:]
    q = q.flatten(-2).flatten(-3, -2).view(torch.uint8)[..., :rows, :k].contiguous()
    return q.view(torch.float8_e4m3fn), scale


def _by_blocks(q: torch.Tensor, scale: torch.Tensor, block_rows: int) -> torch.Tensor:
    """What q and scale stand for, in float64."""
    by_element = scale.double().repeat_interleave(block_rows, -2).repeat_interleave(BLOCK, -1)
    return q.double() * by_element[..., : q.shape[-2], : q.shape[-1]]


def floor_ms(case: Case, ceilings: Ceilings) -> float:
    """Multiply-adds at dense speed, or a, b and out once at copy speed (a gradient is read and written); groups without
    rows do not read their b."""
    size = getattr(torch, case.dtype).itemsize
    halved = ("swiglu" in case.ending) + ("fp8" in case.ending)  # half of the columns, of the bytes
    along_k = case.op == "k_grouped_wgrad"
    weights = sum(rows > 0 for rows in case.sizes) if case.sizes and not along_k else 1
    out_bytes = 8 * (len(case.sizes) if along_k else 1) if "wgrad" in case.op else 2 / 2**halved
    moved = size * (case.m * case.k + weights * case.n * case.k) + out_bytes * case.m * case.n
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
            problem.judge(calls[peer](), LOOSE_DIFF if peer else None)
            ms = timer.median_ms(calls[peer])
            speed = {"tflops": significant(2e-9 * case.m * case.n * case.k / ms)}
            run.record(row | {"ms": significant(ms)} | speed | {"floor_ms": floor_ms(case, ceilings)}, at)


def measure_cast(run: Run, timer: Timer, ceilings: Ceilings, row: Row, at: str) -> None:
    torch.manual_seed(0)
    granularity, _, is_transposed = row["granularity"].partition(" of ")
    shape = (row["k"], row["m"]) if is_transposed else (row["m"], row["k"])
    x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    x = x.mT if is_transposed else x
    cast = partial(flexgemm.quantize, x, FP8, granularity=granularity)
    q, scale = cast()
    block_rows = {"1x128": 1, "128x128": BLOCK}.get(granularity)
    if block_rows:
        amax = _blocks_of(x, block_rows).abs().amax(dim=(-3, -1)).float()
    else:
        amax = x.abs().amax(dim=1 if granularity == "row" else (0, 1)).float()
    # a tensor as divisor: by a number, torch multiplies with the rounded reciprocal on a GPU
    if not torch.equal(scale.reshape(amax.shape), amax / torch.full_like(amax, FP8_MAX)):
        raise Wrong("scale is not amax / 448")
    rows = torch.from_numpy(some_rows(np.random.default_rng(1), len(x))).to(DEVICE)
    if block_rows:
        divisor = scale.repeat_interleave(block_rows, 0)[rows].repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    else:
        divisor = scale.expand(len(x))[rows, None]
    expected = (x[rows].float() / divisor).to(torch.float8_e4m3fn)
    if not torch.equal(q.view(torch.uint8)[rows], expected.view(torch.uint8)):
        raise Wrong("q is not the rounded quotient")
    moved = x.numel() * 2 + q.numel() + 4 * scale.numel()  # x once: a floor that the second read of x stays above
    floor = ceilings.floor_ms("float8", 0.0, moved)
    source = torch.randint(256, (moved // 2,), dtype=torch.uint8, device=DEVICE)
    copy = timer.median_ms(partial(torch.empty_like(source).copy_, source))
    figures = {"ms": significant(timer.median_ms(cast)), "floor_ms": floor, "copy_ms": significant(copy)}
    run.record(row | figures, at)


def run(run: Run, timer: Timer, ceilings: Ceilings, with_peers: bool) -> None:
    todo = cases() + more_cases()
    total = len(todo) + len(GRANULARITIES) * len(CASTS)
    for number, case in enumerate(todo, 1):
        torch_has_it = case.scales != "block" and (not case.ending or (case.ending == "bias" and case.dtype == FP8))
        peers = PEERS.get((case.op, case.dtype), ()) if with_peers and torch_has_it else ()
        missing = run.pending([case.row(peer) for peer in (None, *peers)])
        if missing:
            with run.guarded(describe(case.row())):
                measure_case(run, timer, ceilings, case, missing, f"[{number}/{total}] ")
            torch.cuda.empty_cache()
    casts: list[Row] = [
        {"suite": "quantize", "op": "quantize", "dtype": FP8, "granularity": granularity, "m": m, "k": k,
         "family": kernel_family()}
        for m, k in CASTS for granularity in GRANULARITIES
    ]  # fmt: skip
    for number, row in enumerate(casts, len(todo) + 1):
        if run.pending([row]):
            with run.guarded(describe(row)):
                measure_cast(run, timer, ceilings, row, f"[{number}/{total}] ")
