"""Operands of products, and the verdict on a product by the dtypes it was made of."""

from __future__ import annotations

from contextlib import contextmanager

import guarded
import numpy as np
import reference
import scenes
import verdicts
from memory import hopper_kernels, poison
from verdicts import assert_gemm_rows, assert_rounded_once, assert_rows

from flexgemm import _C

# What a product asks of its tiles: FG_TILES_*
PACKED, NARROW, TALL, MASKED, EQUAL, BLOCKS, FEW_OR_MANY, DENSE, ADDED, ROWS, ASKEW, ROW_MAJOR, COLUMNS, USUAL = (
    1 << bit for bit in range(14)
)

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FP8 = (E4M3, E4M3)
MIXES = [FP8, (E4M3, E5M2), (E5M2, E4M3), *((d, d) for d in ("float16", "bfloat16", "float32"))]
FP8_PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]
PLAIN = [("float16", "ieee"), ("bfloat16", "ieee"), ("float32", "ieee"), ("float32", "tf32")]
OUT_DTYPES = ["float32", "float16", "bfloat16"]
EXPECTED_M = 160  # of masked groups
KEPT = 7  # what the output holds where nothing is to be written

# Rows of groups: a warp looks at 32 groups at a time, and eight tiles of rows lie beside each other before the next
# columns come, so that a block goes back to groups that it has passed.
FAR_APART = [(37 * g) % 200 if g % 9 == 4 else 0 for g in range(100)]


# What products have kernels of their own for: dtypes of both operands and of the output, scales, dtype of the bias,
# activation.
ENDS = {
    "relu": (E4M3, "bfloat16", "tensor", None, "relu"),
    "relu-columns-bias": (E4M3, "bfloat16", "row", "float32", "relu"),
    "silu": (E4M3, "bfloat16", "tensor", None, "silu"),
    "silu-rows": (E4M3, "bfloat16", "row of a", None, "silu"),
    "silu-columns-bias": (E4M3, "bfloat16", "row", "float32", "silu"),
    "gelu": (E4M3, "bfloat16", "tensor", None, "gelu"),
    "gelu-columns-bias": (E4M3, "bfloat16", "row", "bfloat16", "gelu"),
    "swiglu": (E4M3, "bfloat16", "tensor", None, "swiglu"),
    "swiglu-rows": (E4M3, "bfloat16", "row of a", None, "swiglu"),
    "swiglu-columns-bias": (E4M3, "bfloat16", "row", "bfloat16", "swiglu"),
    "fp8": (E4M3, E4M3, "tensor", None, None),
    "fp8-rows": (E4M3, E4M3, "row of a", None, None),
    "swiglu-fp8": (E4M3, E4M3, "tensor", None, "swiglu"),
    "swiglu-fp8-rows": (E4M3, E4M3, "row of a", None, "swiglu"),
    "bf16-relu": ("bfloat16", "bfloat16", "none", None, "relu"),
    "bf16-silu": ("bfloat16", "bfloat16", "none", None, "silu"),
    "bf16-gelu-bias": ("bfloat16", "bfloat16", "none", "bfloat16", "gelu"),
    "bf16-swiglu": ("bfloat16", "bfloat16", "none", None, "swiglu"),
    "fp16-relu-bias": ("float16", "float16", "none", "float16", "relu"),
    "fp16-silu-columns-bias": ("float16", "float16", "row", "float32", "silu"),
    "fp16-gelu": ("float16", "float16", "none", None, "gelu"),
    "fp16-swiglu-columns-bias": ("float16", "float16", "row", "float32", "swiglu"),
}


def plan_of(sms, m, n, k, groups, tiles, dtype=E4M3):
    """Of a product, by so many multiprocessors of Hopper."""
    return _C.plan_gemm_sm90(m=m, n=n, k=k, groups=groups, dtype=dtype, num_sms=sms, tiles=tiles)


def elements(k_bytes, dtype):
    """Of a dtype in so many bytes."""
    return k_bytes // reference.dtype_of(dtype).itemsize


@contextmanager
def nothing_transposed(backend):
    """Of products in its body Hopper reads the operands as they lie: they ask for no workspace."""
    query, asked = _C.gemm_workspace, []

    def ask(*args, **how):
        asked.append(query(*args, **how))
        return asked[-1]

    _C.gemm_workspace = ask
    try:
        yield
    finally:
        _C.gemm_workspace = query
    assert asked
    assert not hopper_kernels(backend) or not any(asked)


def large_plan(*question):
    """That of a product for the kernel for many rows."""
    plan = plan_of(*question)
    assert plan["few_rows"] == plan["some_rows"] == 0
    return plan


def large_tile(*question):
    plan = large_plan(*question)
    return plan["block_m"], plan["block_n"]


def tile_of(*question):
    plan = plan_of(*question)
    return plan["block_m"], plan["block_n"]


def operands(m, n, k, dtype_a, dtype_b, groups=None, seed=0):
    """A short row of the output would cancel and could not be judged: few columns take data of one sign."""
    rng = np.random.default_rng([m, n, k, seed])
    one_sign = n < 64
    b_shape = (n, k) if groups is None else (groups, n, k)
    a, b = (scenes.values(rng, s, d, one_sign=one_sign) for s, d in (((m, k), dtype_a), (b_shape, dtype_b)))
    return rng, a, b


def judge(backend, out, ref, dtype_a, out_dtype, precision="ieee", cut=0.0):
    """FP8 by the diff of each row, and 16-bit outputs of it by each element; `cut` is for short sums
    (verdicts.float8_cut). Otherwise by its norm: the rounding of the output, or the sums of 16-bit products that
    tensor cores truncate where they add them (2^-24 a step), or float32's own bound."""
    if dtype_a.startswith("float8"):
        own = verdicts.float8_cut(backend.name)
        assert_gemm_rows(out, ref, out_dtype, cut=cut, truncated=own > 0)
        if out_dtype in verdicts.HALF_ULP:
            assert_rounded_once(out, ref, cut=max(cut, own))
    elif dtype_a == "float32":
        own = verdicts.ROW_TOLERANCE["tf32" if precision == "tf32" else "float32"]
        assert_rows(out, ref, max(own, 0 if out_dtype == "float32" else verdicts.ROW_TOLERANCE[out_dtype]))
    elif out_dtype == "float32":
        assert_rows(out, ref, 1e-4)
    else:
        assert_rows(out, ref, verdicts.ROW_TOLERANCE[out_dtype])
        assert_rounded_once(out, ref)


def judge_float8(out, ref, out_dtype, cut=0.0):
    """Each element of an FP8 output is the exact quotient rounded once, or a neighbour of it where the sum was on the
    edge."""
    limit = reference.FP8_MAX[out_dtype]
    slack = max(1e-4, verdicts.ELEMENT_CUTS * cut) * np.sqrt((ref**2).mean(axis=1, keepdims=True))
    low, high = (
        reference.f64(np.clip(ref + side, -limit, limit).astype(reference.dtype_of(out_dtype)))
        for side in (-slack, slack)
    )
    assert ((reference.f64(out) >= low) & (reference.f64(out) <= high)).all()


def width(n, activation):
    """Columns of an output of n columns of products."""
    return n // 2 if activation == "swiglu" else n


def cut_of(backend, dtypes, activation):
    """SwiGLU is a product of two sums, and their losses add up."""
    sums = 2 if activation == "swiglu" else 1
    return sums * verdicts.float8_cut(backend.name) if dtypes[0].startswith("float8") else 0.0


def scale_of(rng, kind, rows, lead=()):
    """None, one per tensor or one per row; away from 1, so that a scale used twice or not at all is seen."""
    if kind == "none":
        return None
    return rng.uniform(0.25, 0.75, (*lead, rows) if kind == "row" else lead).astype(np.float32)


def block_scales(rng, m, n, k, lead_a=(), lead_b=()):
    """Of 1 x 128 of A and 128 x 128 of B; far apart, so that a neighbour's scale is seen."""
    blocks = -(-k // 128)
    shapes = (*lead_a, m, blocks), (*lead_b, -(-n // 128), blocks)
    return {
        name: np.exp(rng.uniform(-2, 2, shape)).astype(np.float32)
        for name, shape in zip(("scale_a", "scale_b"), shapes, strict=True)
    }


def offsets_of(sizes, form, dtype, first=0):
    bounds = first + np.concatenate([[0], np.cumsum(sizes)])
    return (bounds if form == "bounds" else bounds[1:]).astype(dtype)


def contiguous(sizes, order=None):
    """m_indices of groups in the given order, each padded with -1 to a multiple of 128."""
    parts = [np.zeros(0, np.int32)]
    for group in range(len(sizes)) if order is None else order:
        padding = -sizes[group] % 128
        parts += [np.full(sizes[group], group, np.int32), np.full(padding, -1, np.int32)]
    return np.concatenate(parts)


def epilogue_of(rng, a, b, scales, bias, activation):
    """What a product is told of its sums: scales of this kind for each operand, or "row of a" and one for b, and a bias
    of this dtype, or None. Groups have their own."""
    of_b = "tensor" if scales == "row of a" else scales
    how = {
        "scale_a": scale_of(rng, scales.removesuffix(" of a"), a.shape[-2], a.shape[:-2]),
        "scale_b": scale_of(rng, of_b, b.shape[-2], b.shape[:-2]),
        "activation": activation,
        "alpha": 4 / np.sqrt(a.shape[-1]),
    }
    if bias:
        how["bias"] = rng.standard_normal(b.shape[:-1]).astype(reference.dtype_of(bias))
    return how


def judge_output(backend, out, ref, dtype, out_dtype, scale_out, activation, cut):
    if scale_out is not None:
        judge_float8(out, ref / reference.f64(scale_out), out_dtype, cut)
    elif activation:
        own = 1e-4 if out_dtype == "float32" else verdicts.ROW_TOLERANCE[out_dtype]
        verdicts.assert_rows(out, ref, max(own, verdicts.ROW_CUTS * cut))
        if out_dtype in verdicts.HALF_ULP:
            assert_rounded_once(out, ref, cut=1.2 * cut)  # SiLU and GELU are that much steeper at the most
    else:
        judge(backend, out, ref, dtype, out_dtype, cut=cut)


def scale_out_of(out_dtype):
    return np.asarray(0.03, np.float32) if out_dtype.startswith("float8") else None


def check_output(backend, rng, a, b, out_dtype, scales, bias, activation, sms, fence=True):
    """A dense product by `sms` multiprocessors, of what `epilogue_of` says."""
    dtypes, scale_out = (str(a.dtype), str(b.dtype)), scale_out_of(out_dtype)
    how = epilogue_of(rng, a, b, scales, bias, activation)
    ref = reference.gemm(a, b, **how)
    shape = len(a), width(len(b), activation)
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, out_dtype, shape=shape, scale_out=scale_out, fence=fence, **how)
    cut = cut_of(backend, dtypes, activation)
    judge_output(backend, out, ref, dtypes[0], out_dtype, scale_out, activation, cut)


def lay_out(layout, sizes):
    """Groups of these sizes: the shape of all rows, an index of those of each, and what tells."""
    if layout == "m_grouped_masked":
        rows = [(g, slice(0, size)) for g, size in enumerate(sizes)]
        return (len(sizes), max(sizes)), rows, {"masked_m": np.array(sizes, np.int32), "expected_m": EXPECTED_M}
    padded = layout == "m_grouped_contiguous"
    begins = np.cumsum([0, *(-(-size // 128) * 128 if padded else size for size in sizes)])
    rows = [slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=False)]
    if padded:
        return (begins[-1],), rows, {"m_indices": contiguous(sizes)}
    return (begins[-1] + 9,), rows, {"offsets": offsets_of(sizes, "ends", np.int32)}


def check_grouped_output(backend, layout, sizes, n, k, dtype, out_dtype, scales, bias, activation, sms, fence=True):
    """A product of groups of rows, likewise; what is of no group stays as it was."""
    dtypes, scale_out = (dtype, dtype), scale_out_of(out_dtype)
    lead, rows, told = lay_out(layout, sizes)
    rng, a, b = operands(int(np.prod(lead)), n, k, *dtypes, groups=len(sizes))
    a = a.reshape(*lead, k)
    how = epilogue_of(rng, a, b, scales, bias, activation)
    initial = np.full((*lead, width(n, activation)), KEPT, reference.dtype_of(out_dtype))
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, out_dtype, layout=layout, shape=initial.shape, initial=initial,
                           scale_out=scale_out, fence=fence, **how, **told)  # fmt: skip
    left = np.ones(lead, bool)
    for g, own in enumerate(rows):
        left[own] = False
        if sizes[g] == 0:
            continue
        of_a = how["scale_a"]
        part = {name: x[g] if name in ("scale_b", "bias") and x is not None else x for name, x in how.items()}
        if of_a is not None:
            part["scale_a"] = of_a[own] if scales != "tensor" else of_a[g] if of_a.ndim else of_a
        ref = reference.gemm(a[own], b[g], **part)
        cut = cut_of(backend, dtypes, activation)
        judge_output(backend, out[own], ref, dtypes[0], out_dtype, scale_out, activation, cut)
    assert (reference.f64(out[left]) == KEPT).all()


def own_dtype(dtypes):
    """Of the output, where no other is asked for."""
    return "bfloat16" if dtypes[0].startswith("float8") else dtypes[0]


def initial_of(shape, dtype, written):
    """What the output holds before: KEPT where it stays."""
    initial = poison(shape, dtype)
    initial[~written] = KEPT
    return initial
