"""Operands of products, and the verdict on a product by the dtypes it was made of."""

from __future__ import annotations

import guarded
import numpy as np
import reference
import scenes
from reference import assert_gemm_rows, assert_rounded_once, assert_rows

# What a product asks of its tiles: FG_TILES_*
PACKED, NARROW, TALL, MASKED, EQUAL, BLOCKS, FEW_OR_MANY, DENSE, ADDED, ROWS, ASKEW = (1 << bit for bit in range(11))

# Rows of groups: a warp looks at 32 groups at a time, and eight tiles of rows lie beside each other before the next
# columns come, so that a block goes back to groups that it has passed.
FAR_APART = [(37 * g) % 200 if g % 9 == 4 else 0 for g in range(100)]


def operands(m, n, k, dtype_a, dtype_b, groups=None, seed=0):
    """A short row of the output would cancel and could not be judged: few columns take data of one sign."""
    rng = np.random.default_rng([m, n, k, seed])
    one_sign = n < 64
    b_shape = (n, k) if groups is None else (groups, n, k)
    a, b = (scenes.values(rng, s, d, one_sign=one_sign) for s, d in (((m, k), dtype_a), (b_shape, dtype_b)))
    return rng, a, b


def judge(out, ref, dtype_a, out_dtype, precision="ieee", cut=0.0):
    """FP8 by the diff of each row; `cut` is for short sums (reference.float8_cut). Otherwise by its norm: the rounding
    of the output, or the sums of 16-bit products that tensor cores truncate where they add them (2^-24 a step), or
    float32's own bound."""
    if dtype_a.startswith("float8"):
        assert_gemm_rows(out, ref, out_dtype, cut=cut)
    elif dtype_a == "float32":
        own = reference.ROW_TOLERANCE["tf32" if precision == "tf32" else "float32"]
        assert_rows(out, ref, max(own, 0 if out_dtype == "float32" else reference.ROW_TOLERANCE[out_dtype]))
    elif out_dtype == "float32":
        assert_rows(out, ref, 1e-4)
    else:
        assert_rows(out, ref, reference.ROW_TOLERANCE[out_dtype])
        assert_rounded_once(out, ref)


def judge_float8(out, ref, out_dtype, cut=0.0):
    """Each element of an FP8 output is the exact quotient rounded once, or a neighbour of it where the sum was on the
    edge."""
    limit = reference.FP8_MAX[out_dtype]
    slack = max(1e-4, reference.ELEMENT_CUTS * cut) * np.sqrt((ref**2).mean(axis=1, keepdims=True))
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
    return sums * reference.float8_cut(backend.name) if dtypes[0].startswith("float8") else 0.0


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


def epilogue_of(rng, a, b, scales, bias, activation):
    """What a product is told of its sums: scales of this kind for each operand and a bias of this dtype, or None."""
    how = {"scale_a": scale_of(rng, scales, len(a)), "scale_b": scale_of(rng, scales, len(b)), "activation": activation}
    how["alpha"] = 4 / np.sqrt(a.shape[1])
    if bias:
        how["bias"] = rng.standard_normal(len(b)).astype(reference.dtype_of(bias))
    return how


def check_output(backend, rng, a, b, out_dtype, scales, bias, activation, sms, fence=True):
    """A dense product by `sms` multiprocessors, of what `epilogue_of` says."""
    dtypes = str(a.dtype), str(b.dtype)
    how = epilogue_of(rng, a, b, scales, bias, activation)
    ref = reference.gemm(a, b, **how)
    cut = cut_of(backend, dtypes, activation)
    is_float8 = out_dtype.startswith("float8")
    if is_float8:
        how["scale_out"] = np.asarray(0.03, np.float32)
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, out_dtype, shape=(len(a), width(len(b), activation)), fence=fence, **how)
    if is_float8:
        judge_float8(out, ref / reference.f64(how["scale_out"]), out_dtype, cut)
    elif activation:
        own = 1e-4 if out_dtype == "float32" else reference.ROW_TOLERANCE[out_dtype]
        reference.assert_rows(out, ref, max(own, reference.ROW_CUTS * cut))
    else:
        judge(out, ref, dtypes[0], out_dtype, cut=cut)
