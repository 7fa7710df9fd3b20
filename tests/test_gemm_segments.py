"""Segments of rows whose weights are named, and weights of other layouts: rows of K."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
import scenes
from products import (
    E4M3,
    E5M2,
    FP8,
    KEPT,
    block_scales,
    judge,
    offsets_of,
    operands,
    own_dtype,
    scale_of,
)
from verdicts import assert_gemm_rows

import flexgemm


@pytest.mark.parametrize("dtypes", [FP8, (E5M2, E4M3), ("float16", "float16"), ("bfloat16", "bfloat16")], ids="-".join)
@pytest.mark.parametrize("column_major", [True, False])
@pytest.mark.parametrize("n, k", [(97, 144), (64, 128), (33, 17)])
def test_segments(backend, n, k, column_major, dtypes):
    sizes, weights = [0, 1, 7, 64, 129, 3], np.array([2, 2, 0, 3, 1, 0], np.int64)
    rows = sum(sizes)
    rng, x, w = operands(rows, n, k, *dtypes, groups=4)
    scale_b, bias = scale_of(rng, "row", n, (4,)), rng.standard_normal((4, n)).astype(np.float32)
    ref, begin = np.zeros((rows, n)), 0
    for size, weight in zip(sizes, weights, strict=True):
        own = slice(begin, begin := begin + size)
        ref[own] = reference.gemm(x[own], w[weight], None, scale_b[weight], bias[weight])
    given = w if column_major else np.ascontiguousarray(w.swapaxes(1, 2))
    out_dtype = own_dtype(dtypes)
    how = {"weight_indices": weights, "scale_b": scale_b, "bias": bias, "shape": (rows, n)}
    out = guarded.gemm(backend, x, given, out_dtype, offsets=offsets_of(sizes, "bounds", "int32"),
                       b_row_major=not column_major, **how)  # fmt: skip
    judge(backend, out, ref, dtypes[0], out_dtype)


def test_segments_whose_weight_does_not_exist(cuda):
    """Raise on the CPU; are left alone on a GPU, which does not know them before it is there."""
    _, x, w = operands(40, 70, 64, *FP8, groups=2)
    how = {"offsets": np.array([10, 25, 40], np.int32), "weight_indices": np.array([0, 7, -1], np.int32)}
    out = guarded.gemm(cuda, x, w, "float32", initial=np.full((40, 70), KEPT, np.float32), **how)
    assert (out[10:] == KEPT).all()
    assert_gemm_rows(out[:10], reference.gemm(x[:10], w[0]), "float32")


def test_there_may_be_no_weights(cuda):
    """What an index names is skipped where there is none, on a GPU."""
    _, a, b = operands(40, 70, 64, "float16", "float16", groups=1)
    initial = np.full((40, 70), 7, np.float16)
    how = {"offsets": np.array([25, 40], np.int32), "weight_indices": np.zeros(2, np.int32)}
    out = guarded.gemm(cuda, a, b[:0], "float16", initial=initial, **how)
    np.testing.assert_array_equal(out, initial)


def test_weight_indices_are_checked_on_the_cpu():
    _, x, w = operands(40, 70, 64, *FP8, groups=2)
    with pytest.raises(ValueError, match="weight_indices"):
        flexgemm.segment_gemm(x, w, np.array([10, 40], np.int32), weight_indices=np.array([0, 2], np.int32))


@pytest.mark.parametrize("wrong", [None, 1, "no"])
def test_whether_weights_are_column_major_is_told_by_a_bool(wrong):
    _, x, w = operands(40, 70, 64, *FP8, groups=2)
    with pytest.raises(TypeError, match="^weight_column_major: expected a bool, got "):
        flexgemm.segment_gemm(x, w, np.array([10, 40], np.int32), weight_column_major=wrong)


@pytest.mark.parametrize("layout", ["dense", "batched", "m_grouped_masked", "k_grouped"])
@pytest.mark.parametrize("dtypes", [FP8, ("float32", "float32")], ids="-".join)
def test_row_major_weights_in_any_layout(backend, layout, dtypes):
    rng = np.random.default_rng(0)
    lead = (2,) if layout in ("batched", "m_grouped_masked") else ()
    a, b = scenes.values(rng, (*lead, 33, 80), dtypes[0]), scenes.values(rng, (*lead, 70, 80), dtypes[1])
    grouping = {
        "m_grouped_masked": {"masked_m": np.array([33, 33], np.int32)},
        "k_grouped": {"offsets": np.array([33, 80], np.int32)},
    }.get(layout, {})
    shape = (2, 33, 70) if lead or layout == "k_grouped" else (33, 70)
    how = {"shape": shape, "layout": layout, **grouping}
    out = guarded.gemm(backend, a, np.ascontiguousarray(b.swapaxes(-1, -2)), "float32", b_row_major=True, **how)
    np.testing.assert_array_equal(out, guarded.gemm(backend, a, b, "float32", **how))


@pytest.mark.parametrize("dtypes", [FP8, ("float16", "float16"), ("float32", "float32")], ids="-".join)
@pytest.mark.parametrize("pad, offset", [(3, 0), (16, 1)])
def test_row_major_weights_of_any_pitch_and_alignment(backend, pad, offset, dtypes):
    rng = np.random.default_rng(0)
    a, b = scenes.values(rng, (33, 80), dtypes[0]), scenes.values(rng, (2, 70, 80), dtypes[1])
    given = np.ascontiguousarray(b.swapaxes(1, 2))
    out = guarded.gemm(backend, a, given, "float32", layout="m_grouped", shape=(33, 70), b_row_major=True, pad=pad,
                       offset=offset, offsets=np.array([20, 33], np.int32))  # fmt: skip
    for own, weight in ((slice(20), b[0]), (slice(20, 33), b[1])):
        judge(backend, out[own], reference.gemm(a[own], weight), dtypes[0], "float32")


def test_segments_tell_by_one_argument_how_weights_lie(backend):
    x, weights = backend.array(np.ones((5, 16), np.float32)), backend.array(np.ones((2, 16, 16), np.float32))
    with pytest.raises(TypeError, match="^unexpected keyword argument 'b_row_major': weight_column_major tells it"):
        flexgemm.segment_gemm(x, weights, backend.array(np.array([2, 5], np.int32)), b_row_major=True)


@pytest.mark.parametrize("sms", [1, 2])
@pytest.mark.parametrize("dtypes", [FP8, ("bfloat16", "bfloat16")], ids="-".join)
def test_segments_of_weights_that_have_one_scale_each(backend, dtypes, sms):
    """In tiles of scaled rows, where whoever stores them reads the scale."""
    sizes, weights, n, k = [300, 0, 257, 400], np.array([2, 1, 0, 3], np.int64), 520, 400
    rng, x, w = operands(sum(sizes), n, k, *dtypes, groups=4)
    scale_b = scale_of(rng, "tensor", n, (4,))
    ref, begin = np.zeros((len(x), n)), 0
    for size, weight in zip(sizes, weights, strict=True):
        own = slice(begin, begin := begin + size)
        ref[own] = reference.gemm(x[own], w[weight], None, scale_b[weight])
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, x, w, own_dtype(dtypes), offsets=offsets_of(sizes, "bounds", "int32"),
                           weight_indices=weights, scale_b=scale_b)  # fmt: skip
    judge(backend, out, ref, dtypes[0], own_dtype(dtypes))


def test_segments_have_the_scales_of_blocks_of_their_weights(backend):
    sizes, weights, m, n, k = [10, 15, 20], np.array([2, 0, 1], np.int32), 45, 144, 256
    rng, a, b = operands(m, n, k, *FP8, groups=3)
    scales = block_scales(rng, m, n, k, lead_b=(3,))
    how = {"offsets": offsets_of(sizes, "bounds", np.int32), "weight_indices": weights, "layout": "m_grouped"}
    out = guarded.gemm(backend, a, b, "float32", shape=(m, n), **how, **scales)
    begin = 0
    for size, weight in zip(sizes, weights, strict=True):
        own = slice(begin, begin + size)
        begin += size
        ref = reference.gemm(a[own], b[weight], scale_a=scales["scale_a"][own], scale_b=scales["scale_b"][weight])
        judge(backend, out[own], ref, FP8[0], "float32")
