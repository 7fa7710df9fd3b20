"""Casts to FP8 with a scale per tensor, row or block.

A quantised array stands for `q * scale`: scales multiply.
"""

from __future__ import annotations

from typing import Any

from flexgemm import _C
from flexgemm._arrays import Array, Stream, dtype_name, library_of
from flexgemm.gemm import FP8


def quantize(
    x: Array,
    dtype: Any = "float8_e4m3fn",
    *,
    granularity: str = "tensor",
    scale: Array | None = None,
    device: str | None = None,
    stream: Stream = None,
) -> tuple[Array, Array]:
    """Casts a matrix to FP8: q = saturate(x / scale), rounded to nearest even, NaN kept, so that x ~ q * scale.

    x: (M, K) float32, float16 or bfloat16; rows may be strided.
    dtype: "float8_e4m3fn" (largest value 448) or "float8_e5m2" (57344), by name or as a dtype of NumPy or torch.
    granularity: "tensor" for one scale, "row" for one per row.
    scale: float32, () or (1,) per tensor, (M,) per row; by default largest magnitude / largest FP8 value over the
        finite values of the tensor or row, 1 where that is 0.
    device: "cuda" or "cuda:1" computes NumPy arrays on a GPU. stream: instead of the library's current CUDA stream.

    Returns (q (M, K), scale () or (M,) float32). q is uint8 where the library has no float8 (CuPy).
    Raises TypeError and ValueError by argument name.
    """
    name = dtype_name(dtype, "dtype", FP8)
    if granularity not in ("tensor", "row"):
        raise ValueError(f"granularity: expected 'tensor' or 'row', got {granularity!r}")
    library = library_of(x, "x", device, stream)
    x = library.rows(x, "x")
    if len(x.shape) != 2:
        raise ValueError(f"x: expected (M, K), got {tuple(x.shape)}")
    m, k = x.shape
    if scale is None:
        factors = library.empty(() if granularity == "tensor" else (m,), "float32", x)
    else:
        factors = library.contiguous(scale, "scale")
        expected = ((), (1,)) if granularity == "tensor" else ((m,),)
        if tuple(factors.shape) not in expected:
            need = " or ".join(str(shape) for shape in expected)
            raise ValueError(f"scale: expected {need} for granularity {granularity!r}, got {tuple(factors.shape)}")
    q = library.empty((m, k), name, x)
    workspace, stream = None, library.stream
    while nbytes := _C.quantize(
        x, q, factors, scale_given=scale is not None, dtype=name, workspace=workspace, stream=stream
    ):
        workspace = library.workspace(nbytes, x)
    return library.result(q), library.result(factors) if scale is None else scale
