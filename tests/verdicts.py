"""Verdicts: what results may differ by from the float64 ones of reference.py."""

from __future__ import annotations

import os

import numpy as np
from reference import dtype_of, f64

ROW_TOLERANCE = {"float32": 1e-5, "tf32": 1e-3, "float16": 2e-3, "bfloat16": 1e-2}


def assert_rows(out, ref, tolerance, what="out"):
    """||out row - ref row|| <= tolerance * ||ref row|| for every row. A zero output passes only for a zero row."""
    out, ref = np.asarray(out), np.asarray(ref)
    assert out.shape == ref.shape, f"{what}: shape {out.shape}, expected {ref.shape}"
    flat = len(out), int(np.prod(out.shape[1:]))
    out, ref = f64(out).reshape(flat), ref.reshape(flat)
    if not np.isfinite(out).all():
        row, column = np.argwhere(~np.isfinite(out))[0]
        raise AssertionError(f"{what}[{row}, {column}] is {out[row, column]}, expected {ref[row, column]}")
    error, limit = np.linalg.norm(out - ref, axis=1), tolerance * np.linalg.norm(ref, axis=1)
    bad = ~(error <= limit)
    if bad.any():
        worst = int(np.argmax(np.where(bad, error / np.maximum(limit, 1e-300), 0)))
        raise AssertionError(
            f"{what}: {bad.sum()} of {len(bad)} rows beyond {tolerance:g}, worst row {worst}: "
            f"error {error[worst]:.3g}, limit {limit[worst]:.3g}\n out {out[worst][:6]}\n ref {ref[worst][:6]}"
        )


def float8_cut(device):
    """What a step of Hopper's tensor cores loses of a sum of FP8 products; 0 where sums are float32 throughout.

    A step aligns 32 products and the running sum to the largest of them and cuts each behind 13 fraction bits. Products
    have 6 to 8 bits, so what is cut is the running sum: less than 2^-13 of the power of two above it. Four steps lie
    between promotions to float32. At worst, for a row that hangs on a few elements or on one chain of 128 products, the
    steps add up to 4 cuts of the row's norm; an element, with running sums of four times the root mean square, loses 16
    of those. The steps of long sums do not agree in sign: sqrt(4) cuts, which is the diff of 3e-8 below, and which
    promotion every 512 products (sqrt(16)) or none exceeds (test_gemm.py)."""
    return 2.0**-13 if device == "cuda" and os.environ.get("FLEXGEMM_ARCH") not in ("sm80", "sm89") else 0.0


ROW_CUTS, ELEMENT_CUTS = 4, 16


HALF_ULP = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def assert_rounded_once(out, ref, what="out", cut=0.0):
    """A 16-bit output is a float32 sum rounded once: each element within half a unit in its last place and 1e-4 of the
    row's root mean square, which is what float32 sums may lose, or what sums of FP8 products may (float8_cut). Partial
    sums kept in 16 bits fail this, though they pass the bound of the row."""
    half_ulp = HALF_ULP[out.dtype.name]
    out, ref = (f64(a).reshape(len(a), int(np.prod(a.shape[1:]))) for a in (out, ref))
    if out.size:
        loss = max(1e-4, ELEMENT_CUTS * cut)
        limit = half_ulp * np.abs(ref) + loss * np.sqrt((ref**2).mean(axis=1, keepdims=True))
        bad = ~(np.abs(out - ref) <= limit)
        assert not bad.any(), f"{what}: {bad.sum()} of {bad.size} elements are not a float32 sum rounded once"


def assert_conv_rows(out, ref, mode, what="out"):
    """By the bound of the mode, "tf32" or the dtype of all arrays; a 16-bit output is a sum rounded once."""
    assert out.dtype == dtype_of("float32" if mode == "tf32" else mode)
    assert_rows(out, ref, ROW_TOLERANCE[mode], what)
    if mode in HALF_ULP:
        assert_rounded_once(out, ref, what)


def gemm_diff(out, ref):
    """1 - 2<x,y> / (<x,x> + <y,y>) per row; 0 where both rows are zero."""
    out, ref = f64(out), f64(ref)
    total = (out * out + ref * ref).sum(axis=1)
    squared = ((out - ref) ** 2).sum(axis=1)  # <x,x> + <y,y> - 2<x,y>, without the cancellation
    return np.where(total == 0, 0.0, squared / np.where(total == 0, 1.0, total))


def diff_limit(out_dtype, columns, cut=0.0, truncated=True):
    """Accumulation may add 3e-8, where sums of FP8 products are short ROW_CUTS (float8_cut). A row of few columns is
    judged on data of one sign, where truncation does not cancel and a bias of 0.2 % is allowed: 2e-6. Rounding of the
    output alone gives bfloat16 1.3e-6 on average over a row and 2^-17 at worst in a short one; float16 keeps 3 bits
    more, which is a factor of 64."""
    rounding = 3e-6 if columns >= 64 else 2.0**-17
    accumulation = 2e-6 if columns < 64 and truncated else max(3e-8, (ROW_CUTS * cut) ** 2 / 2)
    return {"float32": accumulation, "float16": rounding / 64 + accumulation, "bfloat16": rounding}[out_dtype]


def assert_gemm_rows(out, ref, out_dtype, what="out", cut=0.0, truncated=True):
    assert out.shape == ref.shape, f"{what}: shape {out.shape}, expected {ref.shape}"
    diff, limit = gemm_diff(out, ref), diff_limit(out_dtype, out.shape[1], cut, truncated)
    bad = ~(diff < limit)
    assert not bad.any(), f"{what}: {bad.sum()} of {len(bad)} rows beyond diff {limit:g}, worst {diff[bad].max():.3g}"


def assert_same_bits(out, ref, what="out"):
    """Equal bit for bit, where any NaN equals any other."""
    out, ref = np.ascontiguousarray(out), np.ascontiguousarray(ref)
    assert (out.shape, out.dtype) == (ref.shape, ref.dtype), f"{what}: {out.shape} {out.dtype}, {ref.shape} {ref.dtype}"
    bits = f"u{out.dtype.itemsize}"
    same = (out.view(bits) == ref.view(bits)) | (np.isnan(f64(out)) & np.isnan(f64(ref)))
    if not same.all():
        at = tuple(np.argwhere(~same)[0])
        raise AssertionError(f"{what}: {(~same).sum()} elements differ, first {at}: {out[at]!r}, expected {ref[at]!r}")
