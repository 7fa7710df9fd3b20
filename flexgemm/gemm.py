"""Products A . B^T of FP8 and 16- or 32-bit float matrices, dense and grouped, and the casts to FP8.

A quantised array stands for `q * scale`: scales multiply.
"""

from __future__ import annotations

from typing import Any

from flexgemm import _C
from flexgemm._arrays import Array, Library, Stream, dtype_name, library_of

FP8 = ("float8_e4m3fn", "float8_e5m2")
FLOATS = ("float32", "float16", "bfloat16")


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


def gemm_nt(
    a: Array,
    b: Array,
    *,
    scale_a: Array | None = None,
    scale_b: Array | None = None,
    bias: Array | None = None,
    out: Array | None = None,
    out_dtype: Any = None,
    dtype_a: str | None = None,
    dtype_b: str | None = None,
    precision: str = "ieee",
    device: str | None = None,
    stream: Stream = None,
) -> Array:
    """out = scale_a * scale_b * (a . b^T) + bias, summed in float32.

    a: (M, K), b: (N, K): FP8 of either kind each, or both float16, bfloat16 or float32; rows may be strided.
    scale_a: float32, () or (M,). scale_b: float32, () or (N,). None is 1.
    bias: (N,) float32 or of the output's dtype, or None.
    out: (M, N) to write into; by default a new array of the library of a, of dtype out_dtype.
    out_dtype: float32, float16 or bfloat16; by default that of out, else of a, else bfloat16 for FP8.
    dtype_a, dtype_b: the dtype behind uint8 arrays: "float8_e4m3fn" or "float8_e5m2".
    precision: of float32 products: "ieee", or "tf32".
    device: "cuda" or "cuda:1" computes NumPy arrays on a GPU. stream: instead of the library's current CUDA stream.

    Raises TypeError for arrays of a wrong kind or dtype and ValueError for wrong shapes, devices, an output that is
    read-only or overlaps an input, by argument name.
    """
    return _product(a, b, None, scale_a, scale_b, bias, out, out_dtype, dtype_a, dtype_b, precision, device, stream)


def m_grouped_gemm_nt(
    a: Array,
    b: Array,
    offsets: Array,
    *,
    scale_a: Array | None = None,
    scale_b: Array | None = None,
    bias: Array | None = None,
    out: Array | None = None,
    out_dtype: Any = None,
    dtype_a: str | None = None,
    dtype_b: str | None = None,
    precision: str = "ieee",
    device: str | None = None,
    stream: Stream = None,
) -> Array:
    """`gemm_nt` of consecutive groups of rows of a, each with its own b: a mixture of experts.

    a: (M, K). b: (G, N, K).
    offsets: (G,) ends of the groups, or (G + 1,) bounds; int32 or int64, on the device of a, not decreasing. Groups
        may be empty and need no alignment. Rows outside every group are neither read nor written: in a new output
        they are undefined.
    scale_b: float32, (G,) or (G, N). bias: (G, N). The rest as in `gemm_nt`.

    Offsets on a GPU are not read by the host: what is out of range is clamped. On the CPU it raises ValueError.
    """
    return _product(a, b, offsets, scale_a, scale_b, bias, out, out_dtype, dtype_a, dtype_b, precision, device, stream)


def _product(
    a: Array,
    b: Array,
    offsets: Array | None,
    scale_a: Array | None,
    scale_b: Array | None,
    bias: Array | None,
    out: Array | None,
    out_dtype: Any,
    dtype_a: str | None,
    dtype_b: str | None,
    precision: str,
    device: str | None,
    stream: Stream,
) -> Array:
    library = library_of(a, "a", device, stream)
    if library.needs_grad(a, b, bias):
        from flexgemm.torch import ops

        ops.expect_differentiable(a, scale_a, scale_b, out)
        return ops.record_product(a, b, offsets, scale_a, scale_b, bias, out_dtype, dtype_a, dtype_b, precision, stream)
    return product(library, a, b, offsets, scale_a, scale_b, bias, out, out_dtype, dtype_a, dtype_b, precision)


def product(
    library: Library,
    a: Array,
    b: Array,
    offsets: Array | None,
    scale_a: Array | None,
    scale_b: Array | None,
    bias: Array | None,
    out: Array | None,
    out_dtype: Any,
    dtype_a: str | None,
    dtype_b: str | None,
    precision: str,
) -> Array:
    """A product without autograd; dense without offsets."""
    a = library.rows(a, "a")
    b = library.rows(b, "b")
    rows, columns = a.shape, b.shape
    if len(rows) != 2:
        raise ValueError(f"a: expected (M, K), got {tuple(rows)}")
    if len(columns) != (2 if offsets is None else 3):
        layout = "(N, K)" if offsets is None else "(G, N, K)"
        raise ValueError(f"b: expected {layout}, got {tuple(columns)}")
    if offsets is not None:
        offsets = library.contiguous(offsets, "offsets")
    if scale_a is not None:
        scale_a = library.contiguous(scale_a, "scale_a")
    if scale_b is not None:
        scale_b = library.contiguous(scale_b, "scale_b")
    if bias is not None:
        bias = library.contiguous(bias, "bias")
    if out_dtype is not None:
        out_dtype = dtype_name(out_dtype, "out_dtype", FLOATS)
        if out is not None and library.dtype(out) != out_dtype:
            raise TypeError(f"out: expected out_dtype {out_dtype}, got {library.dtype(out)}")
    elif library.dtype(a) not in FLOATS:
        out_dtype = "bfloat16"  # None is the dtype of a
    shape = (rows[0], columns[-2])
    out = library.empty(shape, out_dtype, a) if out is None else library.output(out, shape, out_dtype, a)
    workspace, stream = None, library.stream
    while nbytes := _C.gemm(
        a,
        b,
        out,
        scale_a=scale_a,
        scale_b=scale_b,
        bias=bias,
        offsets=offsets,
        dtype_a=dtype_a,
        dtype_b=dtype_b,
        precision=precision,
        workspace=workspace,
        stream=stream,
    ):
        workspace = library.workspace(nbytes, a)
    return library.result(out)
