"""Casts to FP8 with a scale per tensor, row or block.

A quantised array stands for `q * scale`: scales multiply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexgemm import _C
from flexgemm._arguments import dtype_name, expect_choice
from flexgemm._arrays import Array, Stream, library_of
from flexgemm.gemm import FP8

# Rows of a block that shares a scale; its columns are 128.
_BLOCK_ROWS = {"1x128": 1, "128x128": 128}
_BLOCK_COLUMNS = 128


def quantize(
    x: Array,
    dtype: Any = "float8_e4m3fn",
    *,
    granularity: str = "tensor",
    scale: Array | None = None,
    swiglu: bool = False,
    saturate: bool = True,
    device: str | None = None,
    stream: Stream = None,
) -> tuple[Array, Array]:
    """Casts a matrix to FP8: q = saturate(x / scale), rounded to nearest even, NaN kept, so that x ~ q * scale.

    x: (M, K) float32, float16 or bfloat16, by row or block also (G, M, K). Rows may be strided, and x may be a
        transposed view: `weight.mT` is cast where it lies.
    dtype: "float8_e4m3fn" (largest value 448) or "float8_e5m2" (57344), by name or as a dtype of NumPy or torch.
    granularity: "tensor" for one scale, "row" for one per row, "1x128" and "128x128" for one per block of that many
        rows and columns, of activations and of weights.
    scale: float32, () or (1,) per tensor, (..., M) per row, (..., M, K / 128) or (..., M / 128, K / 128) rounded up; by
        default largest magnitude / largest FP8 value over the finite values that share it, 1 where that is 0.
    swiglu: x (..., 2 K) holds gates in columns 2 j and what they gate in 2 j + 1; silu(gate) * up, in float32, is cast.
    saturate: False lets infinities be seen behind the cast: a scale is infinite where what shares it holds one, and
        what is multiplied by that is NaN. Without `scale`.
    device: "cuda" or "cuda:1" computes NumPy arrays on a GPU. stream: instead of the library's current CUDA stream.

    Returns (q (..., M, K), scale float32). q is uint8 where the library has no float8 (CuPy).
    Raises TypeError and ValueError by argument name.
    """
    name = dtype_name(dtype, "dtype", FP8)
    expect_granularity(granularity)
    expect_saturate(saturate, scale)
    library = library_of(x, "x", device, stream)
    x = library.matrix(x, "x")
    shape, of_scale = shapes(x.shape, granularity, swiglu)
    if scale is None:
        factors = library.empty(of_scale, "float32", x)
    else:
        factors = library.contiguous(scale, "scale")
        expected = ((), (1,)) if granularity == "tensor" else (of_scale,)
        if tuple(factors.shape) not in expected:
            need = " or ".join(str(shape) for shape in expected)
            got = tuple(factors.shape)
            raise ValueError(f"scale: expected {need} to match x and granularity {granularity!r}, got {got}")
    q = library.empty(shape, name, x)
    _C.quantize(
        x,
        q,
        factors,
        scale_given=scale is not None,
        dtype=name,
        swiglu=swiglu,
        saturate=saturate,
        block_rows=_BLOCK_ROWS.get(granularity, 0),
        workspace=library.workspace,
        stream=library.stream,
    )
    return library.result(q), library.result(factors) if scale is None else scale


def shapes(x: Sequence[int], granularity: str, swiglu: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of q and of its scale, from that of x."""
    batches = granularity != "tensor"
    if len(x) != 2 and not (batches and len(x) == 3):
        raise ValueError(f"x: expected (M, K){' or (G, M, K)' if batches else ''}, got {tuple(x)}")
    *lead, m, columns = x
    k = columns // 2 if swiglu else columns
    block_rows = _BLOCK_ROWS.get(granularity)
    if block_rows:
        scale: tuple[int, ...] = (*lead, -(-m // block_rows), -(-k // _BLOCK_COLUMNS))
    else:
        scale = (*lead, m) if batches else ()
    return (*lead, m, k), scale


def expect_granularity(granularity: Any) -> None:
    expect_choice(granularity, "granularity", ("tensor", "row", *_BLOCK_ROWS))


def expect_saturate(saturate: Any, scale: Any) -> None:
    if saturate is False and scale is not None:
        raise ValueError("saturate: expected True beside a scale, got False")
