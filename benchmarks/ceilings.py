"""What the card can do, measured by torch: the figures that floors divide by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.results import Row, significant
from benchmarks.timing import DEVICE, Timer

COPY_BYTES = 1 << 30
SIDE = 8192  # of the square products


@dataclass(frozen=True)
class Ceilings:
    copy_gbs: float  # bytes read plus bytes written
    tflops: dict[str, float]  # dense products by input: float8, float16, bfloat16; of float32: tf32, ieee

    def floor_ms(self, kind: str, flops: float, bytes_once: float) -> float:
        """Useful arithmetic at dense speed, or operands once at copy speed, whichever takes longer. A product that
        draws less power than the square one may end a tenth sooner, and so may what reads more than it writes."""
        return significant(max(flops / self.tflops[kind] / 1e9, bytes_once / self.copy_gbs / 1e6))


_PRODUCTS = "bf16", "tf32", "ieee", "fp8_fast0", "fp8_fast1"


def _row(name: str) -> Row:
    kind, _, fast = name.partition("_")
    return {"suite": "ceiling", "op": f"{kind}_{SIDE}" + (f"_{fast}" if fast else "")}


_COPY: Row = {"suite": "ceiling", "op": "copy"}
ROWS = [_COPY, *map(_row, _PRODUCTS)]  # what `measure` gives, but for the figures


def measure(timer: Timer) -> list[Row]:
    source = torch.randint(-128, 127, (COPY_BYTES,), dtype=torch.int8, device=DEVICE)
    target = torch.empty_like(source)
    copy_gbs = 2 * COPY_BYTES / timer.median_ms(partial(target.copy_, source)) / 1e6
    a = torch.randn(SIDE, SIDE, device=DEVICE)
    b = torch.randn(SIDE, SIDE, device=DEVICE)
    tflops = {"bf16": _matmul(timer, a.bfloat16(), b.bfloat16())}
    setting = torch.backends.cuda.matmul.allow_tf32
    for name, allow in (("tf32", True), ("ieee", False)):
        torch.backends.cuda.matmul.allow_tf32 = allow
        tflops[name] = _matmul(timer, a, b)
    torch.backends.cuda.matmul.allow_tf32 = setting
    one = torch.ones((), device=DEVICE)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    for fast in (False, True):
        product = partial(torch._scaled_mm, a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)
        tflops[f"fp8_fast{int(fast)}"] = _tflops(timer.median_ms(product))
    products = [_row(name) | {"tflops": round(tflops[name], 1)} for name in _PRODUCTS]
    return [_COPY | {"GBs": round(copy_gbs, 1)}, *products]


def of_rows(rows: Iterable[Row]) -> Ceilings:
    """Of rows among which there are those of `measure`."""
    figures = {row["op"]: row for row in rows if row["suite"] == "ceiling"}
    tflops = {name: float(figures[_row(name)["op"]]["tflops"]) for name in _PRODUCTS}
    by_input = {
        "float8": max(tflops["fp8_fast0"], tflops["fp8_fast1"]),
        "float16": tflops["bf16"],
        "bfloat16": tflops["bf16"],
        "tf32": tflops["tf32"],
        "ieee": max(tflops["ieee"], tflops["tf32"] / 3),  # as three products of TF32
    }
    return Ceilings(float(figures["copy"]["GBs"]), by_input)


def _matmul(timer: Timer, a: torch.Tensor, b: torch.Tensor) -> float:
    return _tflops(timer.median_ms(partial(torch.matmul, a, b.t())))


def _tflops(ms: float) -> float:
    return 2e-9 * SIDE**3 / ms
