"""Products A . B^T of FP8 and 16- or 32-bit float matrices: dense, batched and grouped along M, N or K.

Names are those of DeepGEMM: "nt" is A (M, K) and B (N, K), both with K innermost. What tells the groups apart lies
where the matrices lie and is not read by the host, so every product can be captured in a CUDA graph and replayed with
other group sizes: on a GPU what is out of range is clamped or skipped, on the CPU it raises ValueError.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import numpy as np

from flexgemm import _C
from flexgemm._arguments import as_bool, as_int, dtype_name, renamed, type_name
from flexgemm._arrays import Array, Library, Stream, library_of, on_stream

FP8 = ("float8_e4m3fn", "float8_e5m2")
FLOATS = ("float32", "float16", "bfloat16")


class GradientOptions(TypedDict, total=False):
    """Keywords of every product; `gemm_nt` describes them."""

    scale_a: Array | None
    scale_b: Array | None
    bias: Array | None
    alpha: float
    activation: str | None
    scale_out: Array | None
    out: Array | None
    out_dtype: Any
    dtype_a: str | None
    dtype_b: str | None
    dtype_out: str | None
    precision: str | None
    promote_every: int | None
    b_row_major: bool
    check: bool
    device: str | None
    stream: Stream


class Options(GradientOptions, total=False):
    """Of weight gradients `accumulate` is a parameter of its own."""

    accumulate: bool


def gemm_nt(a: Array, b: Array, **options: Unpack[Options]) -> Array:
    """out = activation(alpha * scale_a * scale_b * (a . b^T) + bias), summed in float32.

    a: (M, K), b: (N, K): FP8 of either kind each, or both float16, bfloat16 or float32; rows may be strided, and each
        may be a transposed view, `x.mT`, which is read where it lies.
    scale_a, scale_b: float32, by their shapes: one, () ; one per row, (M,) and (N,); one per 1 x 128 of a and per
        128 x 128 of b, (M, K / 128) and (N / 128, K / 128) rounded up, FP8 only and both together. None is 1.
    bias: (N,) float32 or of the output's dtype, or None. alpha: a number, by default 1.
    activation: "relu", "silu", "gelu" (by erf), or "swiglu": columns 2 j of the product are gates and 2 j + 1 what they
        gate, and out (M, N / 2) is silu(gate) * up (`interleave_gate_up` orders a weight so).
    out: (M, N) to write into; by default a new array of the library of a, of dtype out_dtype.
    out_dtype: float32, float16 or bfloat16; by default that of out, else of a, else bfloat16 for FP8. With scale_out,
        float32 (), FP8 (e4m3fn by default): the result divided by scale_out, saturated.
    accumulate: adds to out, which is float32.
    dtype_a, dtype_b, dtype_out: the dtype behind uint8 arrays: "float8_e4m3fn" or "float8_e5m2".
    precision: of float32 products: "ieee" (the default), or "tf32", by which a GPU rounds the factors and the CPU does
        not.
    promote_every: FP8 tensor cores of Hopper keep about 13 bits of a sum. After this many products the sum moves to
        float32: 128 (the default), 256 or 512, or None for never. Elsewhere sums are float32 throughout.
    b_row_major: b is (K, N), with a leading axis where it has one, and N is innermost. Hopper reads 16-bit b as it lies
        where that is faster; else a GPU transposes it first.
    check: on a GPU, too, raise ValueError for offsets, m_indices, masked_m and weight_indices that are out of range,
        and so wait for it; the CPU always does.
    device: "cuda" or "cuda:1" computes NumPy arrays on a GPU. stream: instead of the library's current CUDA stream.

    Raises TypeError for arrays of a wrong kind or dtype and ValueError for wrong shapes, devices, an output that is
    read-only or overlaps an input, by argument name.
    """
    return product_of("dense", a, b, options)


def batched_gemm_nt(a: Array, b: Array, **options: Unpack[Options]) -> Array:
    """`gemm_nt` of each a[i] with b[i]. a: (B, M, K), b: (B, N, K), out: (B, M, N).

    Scales: (), or one more axis in front than in `gemm_nt`: (B,), (B, M) and (B, N), blocks likewise. bias: (B, N).
    """
    return product_of("batched", a, b, options)


def m_grouped_gemm_nt(a: Array, b: Array, offsets: Array, **options: Unpack[Options]) -> Array:
    """`gemm_nt` of consecutive groups of rows of a, each with its own b: a mixture of experts.

    a: (M, K). b: (G, N, K).
    offsets: (G,) ends of the groups, or (G + 1,) bounds; int32 or int64, on the device of a, not decreasing. Groups
        may be empty and need no alignment. Rows outside every group are neither read nor written: in a new output
        they are undefined.
    scale_b: float32, (), (G,), (G, N) or (G, N / 128, K / 128). bias: (G, N). The rest as in `gemm_nt`.
    """
    return product_of("m_grouped", a, b, {"offsets": offsets, **options})


def m_grouped_gemm_nt_contiguous(a: Array, b: Array, m_indices: Array, **options: Unpack[Options]) -> Array:
    """The same with the group of each row named: a (M, K), b (G, N, K), m_indices (M,) int32.

    A group starts at a multiple of get_m_alignment_for_contiguous_layout() = 128 rows and its rows are adjacent; rows
    of index -1 behind them are padding, neither read nor written. Scales and bias as in `m_grouped_gemm_nt`.
    """
    return product_of("m_grouped_contiguous", a, b, {"m_indices": m_indices, **options})


def m_grouped_gemm_nt_masked(
    a: Array, b: Array, masked_m: Array, expected_m: int = 0, **options: Unpack[Options]
) -> Array:
    """`gemm_nt` of the first masked_m[g] rows of each a[g]: a (G, M, K), b (G, N, K), masked_m (G,) int32 -> (G, M, N).

    M need not be a multiple of anything. Rows at and past masked_m[g] are neither read nor written.
    expected_m: about how many rows a group has, a hint for the choice of tiles; 0 when unknown.
    Scales and bias as in `batched_gemm_nt`.
    """
    return product_of("m_grouped_masked", a, b, {"masked_m": masked_m, "expected_m": expected_m, **options})


def n_grouped_gemm_nt(a: Array, b: Array, offsets: Array, **options: Unpack[Options]) -> Array:
    """Consecutive groups of rows of b, each with its own a, side by side: a (G, M, K), b (N, K) -> (M, N).

    offsets: (G,) or (G + 1,) as in `m_grouped_gemm_nt`, of columns of out; columns outside every group are not written.
    scale_a: (), (G,) or (G, M). scale_b: () or (N,). bias: (N,). No block scales, no SwiGLU.
    """
    return product_of("n_grouped", a, b, {"offsets": offsets, **options})


def wgrad_gemm_nt(a: Array, b: Array, *, accumulate: bool = True, **options: Unpack[GradientOptions]) -> Array:
    """A weight gradient: a (M, K), b (N, K), out (M, N) float32 += a . b^T; K are the tokens.

    accumulate: False writes out instead. Without `out` there is nothing to add to, and a new array is returned.
    """
    return product("dense", a, b, **of_weight_gradient(accumulate, options))


def k_grouped_wgrad_gemm_nt(
    a: Array, b: Array, offsets: Array, *, num_groups: int | None = None, accumulate: bool = True,
    **options: Unpack[GradientOptions],
) -> Array:  # fmt: skip
    """A weight gradient per group: a (M, K), b (N, K), K in groups, out[g] (M, N) float32 += a_g . b_g^T.

    offsets: (G,) or (G + 1,) as in `m_grouped_gemm_nt`, along K, at any number. An empty group adds nothing, or writes
        zeros with accumulate=False.
    num_groups: G; by default that of out (G, M, N), or without one the length of offsets, taken as ends.
    scale_a: (), (G,) or (G, M). scale_b: (), (G,) or (G, N). accumulate as in `wgrad_gemm_nt`.
    """
    groups = groups_along_k(offsets, num_groups, options.get("out"))
    return product("k_grouped", a, b, offsets=offsets, groups=groups, **of_weight_gradient(accumulate, options))


def of_weight_gradient(accumulate: Any, options: Any) -> dict[str, Any]:
    """The options of a weight gradient: it is float32, and without `out` there is nothing to add to. (Here and below no
    dict is made by `|`, which the first torch that is supported does not trace.)"""
    own: dict[str, Any] = {"accumulate": as_bool(accumulate, "accumulate") and options.get("out") is not None}
    if all(options.get(name) is None for name in ("out_dtype", "dtype_out", "scale_out")):
        own["out_dtype"] = "float32"
    return {**options, **own}


def segment_gemm(
    x: Array,
    weights: Array,
    offsets: Array | None = None,
    *,
    seg_lens: Array | None = None,
    weight_indices: Array | None = None,
    weight_column_major: bool = True,
    **options: Unpack[Options],
) -> Array:
    """Products of consecutive segments of the rows of x, each with the weight that it names: adapters, experts.

    x: (M, K).
    weights: (W, N, K), 16-bit or FP8; or with weight_column_major=False (W, K, N), as b_row_major of `gemm_nt`.
    offsets: (S,) ends or (S + 1,) bounds of the segments, as in `m_grouped_gemm_nt`; or seg_lens: (S,) their lengths.
    weight_indices: (S,) int32 or int64, the weight of each segment; by default segment i has weight i.
    scale_b: (), (W,) or (W, N); bias: (W, N): of the weights. The rest as in `gemm_nt`.
    """
    given = offsets, seg_lens, weight_indices, weight_column_major
    how, names = of_segments(x, weights, *given, options)
    with renamed(names):
        return product("m_grouped", x, weights, **how, **options)


def of_segments(
    x: Any, weights: Any, offsets: Any, seg_lens: Any, weight_indices: Any, weight_column_major: Any, options: Options
) -> tuple[dict[str, Any], dict[str, str]]:
    """The options of a product grouped along M that a product of segments is, and the names that its arguments have."""
    if "b_row_major" in options:
        raise TypeError("unexpected keyword argument 'b_row_major': weight_column_major tells it")
    if (offsets is None) == (seg_lens is None):
        raise ValueError("offsets, seg_lens: expected one of them")
    row_major = not as_bool(weight_column_major, "weight_column_major")
    how, names = {"weight_indices": weight_indices, "b_row_major": row_major}, {"a": "x", "b": "weights"}
    if seg_lens is None:
        return {**how, "offsets": offsets}, names
    if not hasattr(type(seg_lens), "cumsum"):
        raise TypeError(f"seg_lens: expected an array with cumsum, got {type_name(seg_lens)}; give offsets")
    each = weights if weight_indices is None else weight_indices
    got, segments = tuple(seg_lens.shape), tuple(getattr(each, "shape", ()))[:1]
    if segments and got != segments:  # the sums of one more would be bounds
        raise ValueError(f"seg_lens: expected a length for each of {segments[0]} segments, got shape {got}")
    with on_stream(x, options.get("stream")):
        ends = seg_lens.cumsum(0)
    return {**how, "offsets": ends}, {**names, "offsets": "seg_lens.cumsum(0)"}


def groups_along_k(offsets: Any, num_groups: Any, out: Any) -> int:
    """How many groups a product has whose depth they cut: num_groups, or what out and offsets tell."""
    counted = offsets if out is None else out
    for name, rank, x in ("offsets", "one", offsets), ("out", "three", counted):
        if not getattr(x, "shape", ()):
            got = type_name(x) + (" of shape ()" if hasattr(x, "shape") else "")
            raise TypeError(f"{name}: expected a {rank}-dimensional array, got {got}")
    given: int = counted.shape[0]
    if num_groups is None:
        return given
    groups = as_int(num_groups, "num_groups")
    if not 0 <= groups <= _MOST_GROUPS or (out is not None and groups != given):
        need = f"0 to {_MOST_GROUPS}" if out is None else f"{given}, as many as out has"
        raise ValueError(f"num_groups: expected {need}, got {groups}")
    return groups


def interleave_gate_up(x: Array, axis: int = -2) -> Array:
    """The first half of an axis are gates, the second what they gate: brings them side by side, for "swiglu".

    x: a weight (..., 2 H, K), or with axis=-1 a bias or scale (..., 2 H); an array that can reshape and swapaxes.
    """
    if not hasattr(x, "shape"):
        raise TypeError(f"x: expected an array, got {type_name(x)}")
    shape, axis = tuple(x.shape), as_int(axis, "axis")
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis: expected one of the {len(shape)} axes of x, got {axis}")
    axis %= len(shape)
    if shape[axis] % 2:
        raise ValueError(f"x: expected an even length of axis {axis}, got {shape}")
    halves = x.reshape(*shape[:axis], 2, shape[axis] // 2, *shape[axis + 1 :])
    return halves.swapaxes(axis, axis + 1).reshape(shape)


def set_num_sms(num_sms: int | None) -> None:
    """Bounds the multiprocessors that products use, to leave some to other work; None: all of the device."""
    _C.set_num_sms(num_sms)


def get_num_sms() -> int:
    """The bound that `set_num_sms` set, else the multiprocessors of the first GPU, 0 without one."""
    limit = _C.get_num_sms()
    if limit is None:
        return int(_C.device_info("cuda")["num_sms"]) if _C.device_count() > 0 else 0
    return limit


def get_m_alignment_for_contiguous_layout() -> int:
    """Rows to a multiple of which groups of `m_grouped_gemm_nt_contiguous` begin."""
    return 128


_MOST_GROUPS = 2**31 - 1
# Axes of a, b and out in each layout.
_MATRIX, _GROUPED = 2, 3
_AXES = {
    "dense": (_MATRIX, _MATRIX, _MATRIX),
    "batched": (_GROUPED, _GROUPED, _GROUPED),
    "m_grouped": (_MATRIX, _GROUPED, _MATRIX),
    "m_grouped_contiguous": (_MATRIX, _GROUPED, _MATRIX),
    "m_grouped_masked": (_GROUPED, _GROUPED, _GROUPED),
    "n_grouped": (_GROUPED, _MATRIX, _MATRIX),
    "k_grouped": (_MATRIX, _MATRIX, _GROUPED),
}
# Layouts of which no element of the output is left alone.
_WRITTEN_THROUGHOUT = ("dense", "batched", "k_grouped")
# Options that tell groups apart, and all that are arrays.
_GROUPING = ("offsets", "m_indices", "masked_m", "weight_indices")
_ARRAYS = frozenset(("scale_a", "scale_b", "bias", "scale_out", *_GROUPING))


def product(layout: str, a: Array, b: Array, **options: Any) -> Array:
    """Any product. What is not named in `_adapted` goes to the extension as it came, which has the defaults."""
    return product_of(layout, a, b, options)


def product_of(layout: str, a: Array, b: Array, options: Any) -> Array:
    """torch tensors that can be used as they are take the direct way: no Python but this."""
    result = _C.gemm_direct(a, b, layout=layout, options=options)
    return _adapted(layout, a, b, **options) if result is NotImplemented else result


def _adapted(
    layout: str,
    a: Array,
    b: Array,
    *,
    groups: int = 0,
    out: Array | None = None,
    out_dtype: Any = None,
    dtype_out: str | None = None,
    check: bool = False,
    device: str | None = None,
    stream: Stream = None,
    **options: Any,
) -> Array:
    """The product of arrays of any library, of what has to be copied first, or recorded by autograd."""
    for name, given in ("groups", groups and layout != "k_grouped"), ("workspace", "workspace" in options):
        if given:
            raise TypeError(f"unexpected keyword argument '{name}'")
    library = library_of(a, "a", device, stream)
    expect_sum(out, options.get("accumulate"))
    if as_bool(check, "check") and library.on_gpu(a):
        expect_groups(library, layout, a, b, groups, options)
    if library.needs_grad(a, b, *map(options.get, ("bias", "scale_a", "scale_b", "scale_out"))):
        from flexgemm.torch import products

        own = {"out": out, "out_dtype": out_dtype, "dtype_out": dtype_out, "stream": stream}
        return products.record(layout, a, b, options | own)
    a = library.matrix(a, "a")
    b = library.matrix(b, "b")
    for name, value in options.items():
        if name in _ARRAYS and value is not None:
            options[name] = library.contiguous(value, name)
    scaled = options.get("scale_out") is not None
    dtype = dtype_of_out(library, a, out, out_dtype, dtype_out, scaled)
    if scaled:
        options["dtype_out"] = dtype
    swiglu = options.get("activation") == "swiglu"
    shape = out_shape(layout, a.shape, b.shape, groups, options.get("b_row_major", False), swiglu)
    if out is None:
        result = library.empty(shape, dtype, a)
    else:
        result = library.output(out, shape, dtype, a)
        if result is not out and (options.get("accumulate") or layout not in _WRITTEN_THROUGHOUT):
            result = library.contiguous(out, "out")  # which lies on a GPU: what is not written is copied back, too
    _C.gemm(a, b, result, layout=layout, workspace=library.workspace, stream=library.stream, **options)
    return library.result(result)


def expect_sum(out: Array | None, accumulate: Any) -> None:
    """Raises where there is nothing to add to."""
    if accumulate is not None and as_bool(accumulate, "accumulate") and out is None:
        raise ValueError("out: expected an array to add to with accumulate=True, got None")


def expect_groups(library: Library, layout: str, a: Array, b: Array, groups: int, options: dict[str, Any]) -> None:
    """Raises for numbers on a GPU that do not tell the groups of a product apart, by the CPU's product of matrices that
    have the same groups and no elements."""
    told = {name: x for name, x in options.items() if name in _GROUPING and x is not None}
    for name, x in ({"a": a, "b": b} | told).items():
        library.accept(x, name)
    shape = out_shape(layout, a.shape, b.shape, groups, options.get("b_row_major", False), False)
    rows = shape[-2] if layout.startswith("m_grouped") else 0
    columns = shape[-1] if layout == "n_grouped" else 0
    depth = a.shape[-1] if layout == "k_grouped" else 0
    matrices = (*a.shape[:-2], rows, depth), (*b.shape[:-2], columns, depth), (*shape[:-2], rows, columns)
    on_host: Any = {name: library.host(x) for name, x in told.items()}
    _C.gemm(*(np.empty(sizes, np.float32) for sizes in matrices), layout=layout, **on_host)


def out_shape(
    layout: str,
    rows: tuple[int, ...],
    columns: tuple[int, ...],
    groups: int,
    b_row_major: bool,
    swiglu: bool,
) -> tuple[int, ...]:
    """The shape of the output, from those of a and b."""
    of_a, of_b, of_out = _AXES[layout]
    if len(rows) != of_a:
        raise ValueError(f"a: expected {'(M, K)' if of_a == _MATRIX else '(G, M, K)'}, got {tuple(rows)}")
    if len(columns) != of_b:
        matrix = "K, N" if b_row_major else "N, K"
        need = f"({matrix})" if of_b == _MATRIX else f"(G, {matrix})"
        raise ValueError(f"b: expected {need}, got {tuple(columns)}")
    n = columns[-1 if b_row_major else -2]
    if swiglu:
        n //= 2
    if of_out == _MATRIX:
        return rows[-2], n
    return groups if layout == "k_grouped" else rows[0], rows[-2], n


def asked_dtype(out_dtype: Any, dtype_out: str | None, allowed: tuple[str, ...]) -> str | None:
    """The dtype of an output by name, given as either of the two; None is that of a."""
    asked = None if out_dtype is None else dtype_name(out_dtype, "out_dtype", allowed)
    name = asked if dtype_out is None else dtype_name(dtype_out, "dtype_out", allowed)
    if asked not in (None, name):
        raise ValueError(f"dtype_out: expected None or out_dtype, which is {asked}, got {name}")
    return name


def dtype_of_out(
    library: Library, a: Array, out: Array | None, out_dtype: Any, dtype_out: str | None, scaled: bool
) -> str | None:
    """The dtype of the output by name; None is that of a."""
    if out is not None and type(out) not in library.known:
        library.accept(out, "out")
    allowed = FP8 if scaled else FLOATS
    name = asked_dtype(out_dtype, dtype_out, allowed)
    if name is not None:
        if out is not None and library.dtype(out) not in (name, "uint8" if dtype_out else library.storage(name)):
            raise TypeError(f"out: expected out_dtype {name}, got {library.dtype(out)}")
        return name
    if out is not None:
        own = library.dtype(out)
        return own if own in FP8 or not scaled else FP8[0]
    if scaled:
        return FP8[0]
    return None if library.dtype(a) in FLOATS else "bfloat16"
