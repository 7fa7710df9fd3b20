"""SiLU, SwiGLU and FP8 outputs of FP8 products, whose tiles end while the next one is multiplied: every tile, last rows
and columns that lack some, groups that end within a tile."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
from products import DENSE, MASKED, PACKED, cut_of, judge_float8, offsets_of, operands, scale_of, width

from flexgemm import _C

E4M3, BF16 = "float8_e4m3fn", "bfloat16"
FP8 = (E4M3, E4M3)
KEPT = 7  # what the rows of no group hold before and after

# Kinds of scales of A and of B, dtype of the bias, activation, dtype of the output.
ENDS = {
    "silu": ("tensor", "tensor", None, "silu", BF16),
    "silu-rows": ("row", "tensor", None, "silu", BF16),
    "silu-columns-bias": ("row", "row", "float32", "silu", BF16),
    "swiglu": ("tensor", "tensor", None, "swiglu", BF16),
    "swiglu-rows": ("row", "tensor", None, "swiglu", BF16),
    "swiglu-columns-bias": ("row", "row", BF16, "swiglu", BF16),
    "fp8": ("tensor", "tensor", None, None, E4M3),
    "fp8-rows": ("row", "tensor", None, None, E4M3),
    "swiglu-fp8": ("tensor", "tensor", None, "swiglu", E4M3),
    "swiglu-fp8-rows": ("row", "tensor", None, "swiglu", E4M3),
}
all_ends = pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)

# Multiprocessors, M, N, K and the tile that the plan then takes; a block has several.
TILES = {
    (1, 260, 320, 144): (128, 128),
    (2, 260, 352, 272): (128, 176),
    (1, 260, 544, 400): (128, 192),
    (1, 260, 480, 400): (128, 256),
    (1, 260, 608, 2064): (128, 256),  # of the last columns there is one part
    (2, 400, 480, 2448): (256, 256),
    (2, 400, 608, 2064): (256, 256),
}


def tile_of(sms, m, n, k, groups, tiles):
    plan = _C.plan_gemm_sm90(m=m, n=n, k=k, groups=groups, dtype=E4M3, num_sms=sms, tiles=tiles)
    assert plan["few_rows"] == plan["some_rows"] == 0
    return plan["block_m"], plan["block_n"]


def epilogue(rng, end, m, n, k, lead_a=(), lead_b=()):
    """What the product is told, but for the scale of its output; and that."""
    kind_a, kind_b, bias, activation, out_dtype = end
    how = {"scale_a": scale_of(rng, kind_a, m, lead_a), "scale_b": scale_of(rng, kind_b, n, lead_b)}
    if bias:
        how["bias"] = rng.standard_normal((*lead_b, n)).astype(reference.dtype_of(bias))
    common = {"alpha": 4 / np.sqrt(k), "activation": activation}
    return how, common, np.asarray(0.03, np.float32) if out_dtype == E4M3 else None


def judge_end(out, ref, scale_out, cut):
    if scale_out is None:
        reference.assert_rows(out, ref, max(reference.ROW_TOLERANCE[BF16], reference.ROW_CUTS * cut))
    else:
        judge_float8(out, ref / reference.f64(scale_out), E4M3, cut)


@all_ends
@pytest.mark.parametrize("sms, m, n, k", TILES)
def test_ends_of_every_tile(backend, sms, m, n, k, end):
    assert tile_of(sms, m, n, k, 1, DENSE) == TILES[sms, m, n, k]
    rng, a, b = operands(m, n, k, *FP8)
    how, common, scale_out = epilogue(rng, end, m, n, k)
    activation, out_dtype = end[3:]
    with guarded.multiprocessors(sms):
        out = guarded.gemm(
            backend, a, b, out_dtype, shape=(m, width(n, activation)), scale_out=scale_out, **how, **common
        )
    judge_end(out, reference.gemm(a, b, **how, **common), scale_out, cut_of(backend, FP8, activation))


def grouped(layout, sizes):
    """Where groups of these sizes have their rows: the shape of all rows, an index of each group's, and what tells."""
    if layout == "m_grouped_masked":
        rows = [(g, slice(0, size)) for g, size in enumerate(sizes)]
        return (len(sizes), max(sizes)), rows, {"masked_m": np.array(sizes, np.int32), "expected_m": 160}
    pitch = [-(-size // 128) * 128 if layout == "m_grouped_contiguous" else size for size in sizes]
    begins = np.cumsum([0, *pitch])
    rows = [slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=False)]
    if layout == "m_grouped":
        return (sum(sizes) + 9,), rows, {"offsets": offsets_of(sizes, "ends", np.int32)}
    m_indices = np.full(begins[-1], -1, np.int32)
    for g, own in enumerate(rows):
        m_indices[own] = g
    return (len(m_indices),), rows, {"m_indices": m_indices}


@all_ends
@pytest.mark.parametrize(
    "layout, sms, k, tile",
    [
        ("m_grouped", 1, 144, (128, 128)),
        ("m_grouped", 1, 1040, (128, 256)),
        ("m_grouped_masked", 1, 1040, (128, 256)),
        ("m_grouped_contiguous", 1, 1040, (128, 256)),
        ("m_grouped_contiguous", 2, 2064, (256, 256)),
    ],
)
def test_ends_of_groups_that_end_within_a_tile(backend, layout, sms, k, tile, end):
    """Their last rows are stored one by one, and what is behind them is left as it was."""
    sizes, n = [48, 127, 176, 300, 80, 0, 1, 128], 480
    lead, rows, told = grouped(layout, sizes)
    asks = {"m_grouped": 0, "m_grouped_masked": MASKED, "m_grouped_contiguous": PACKED}[layout]
    expected = {"m_grouped": sum(sizes), "m_grouped_masked": 160 * len(sizes), "m_grouped_contiguous": lead[0]}[layout]
    assert tile_of(sms, expected, n, k, len(sizes), asks) == tile
    rng, a, b = operands(int(np.prod(lead)), n, k, *FP8, groups=len(sizes))
    a = a.reshape(*lead, k)
    how, common, scale_out = epilogue(rng, end, lead[-1], n, k, lead[:-1], (len(sizes),))
    activation, out_dtype = end[3:]
    initial = np.full((*lead, width(n, activation)), KEPT, reference.dtype_of(out_dtype))
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, out_dtype, layout=layout, shape=initial.shape, initial=initial,
                           scale_out=scale_out, **how, **common, **told)  # fmt: skip
    left = np.ones(lead, bool)
    for g, own in enumerate(rows):
        left[own] = False
        if sizes[g] == 0:
            continue
        part = {name: x[g] for name, x in how.items() if name != "scale_a"}
        of_a = how["scale_a"]
        part["scale_a"] = of_a[own] if end[0] == "row" else of_a[g] if of_a.ndim else of_a
        ref = reference.gemm(a[own], b[g], **part, **common)
        judge_end(out[own], ref, scale_out, cut_of(backend, FP8, activation))
    assert (reference.f64(out[left]) == KEPT).all()


@pytest.mark.parametrize("scale_out", [0.0, 1e-39, 1e-30, -2.0, 1e30, np.inf, np.nan])
@pytest.mark.parametrize("activation", [None, "swiglu", "relu"])
def test_any_scale_of_a_float8_output(backend, scale_out, activation):
    """A quotient that is too large is saturated, and that of 0 is 0 but for a scale that is 0 or no number."""
    m, n, k = 260, 480, 400
    _, a, b = operands(m, n, k, *FP8)
    a[5] = 0
    with guarded.multiprocessors(1):
        out = guarded.gemm(backend, a, b, E4M3, shape=(m, width(n, activation)), activation=activation,
                           scale_out=np.asarray(scale_out, np.float32))  # fmt: skip
    with np.errstate(divide="ignore", invalid="ignore"):
        ref = reference.gemm(a, b, activation=activation) / reference.f64(np.asarray(scale_out, np.float32))
    np.testing.assert_array_equal(np.isnan(reference.f64(out)), np.isnan(ref))
    known = ~np.isnan(ref).any(axis=1)
    judge_float8(out[known], np.clip(ref[known], -448, 448), E4M3, cut_of(backend, FP8, activation))
