"""Groups of rows of which the first masked_m[g] count: what is multiplied, written, and not read."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
import scenes
from products import E4M3, FAR_APART, FP8, KEPT, initial_of, operands, own_dtype, scale_of
from test_gemm_layouts import all_dtypes, judge_written, layouts, operands_of_two
from verdicts import assert_rows

import flexgemm


def check_masked(backend, masked_m, m_max, n, k, dtypes, out_dtype, scales=("none", "none"), **layout):
    groups = len(masked_m)
    rng, b, a = operands(n, m_max, k, dtypes[1], dtypes[0], groups=groups)
    b = scenes.values(rng, (groups, n, k), dtypes[1], one_sign=n < 64)
    a = scenes.values(rng, (groups, m_max, k), dtypes[0], one_sign=n < 64)
    how = {
        "scale_a": scale_of(rng, scales[0], m_max, (groups,)),
        "scale_b": scale_of(rng, scales[1], n, (groups,)),
    }
    ref, written = np.zeros((groups, m_max, n)), np.zeros((groups, m_max, n), bool)
    for g, rows in enumerate(masked_m):
        part = {name: None if x is None else x[g] for name, x in how.items()}
        part["scale_a"] = part["scale_a"][:rows] if scales[0] == "row" else part["scale_a"]
        ref[g, :rows], written[g, :rows] = reference.gemm(a[g, :rows], b[g], **part), True
        a[g, rows:] = np.nan
    out = guarded.gemm(
        backend, a, b, out_dtype, masked_m=np.array(masked_m, np.int32), layout="m_grouped_masked",
        shape=(groups, m_max, n), initial=initial_of((groups, m_max, n), out_dtype, written), **how, **layout,
    )  # fmt: skip
    judge_written(backend, out, ref, written, dtypes, out_dtype)


@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_masked_groups_that_end_within_a_tile(backend, out_dtype, scales):
    """By one multiprocessor, which takes tiles of many rows for them."""
    with guarded.multiprocessors(1):
        check_masked(
            backend, [48, 127, 176, 300, 80, 0, 1, 128], 300, 520, 400, FP8, out_dtype, (scales, "tensor"),
            expected_m=160,
        )  # fmt: skip


@pytest.mark.parametrize("expected_m", [16, 160])
@pytest.mark.parametrize("sms", [1, 2, 3])
def test_masked_tiles_beside_each_other_have_groups_far_apart(backend, sms, expected_m):
    """By tiles of few rows, of some and of many."""
    with guarded.multiprocessors(sms):
        check_masked(backend, FAR_APART, 200, 600, 144, FP8, "bfloat16", expected_m=expected_m)


@all_dtypes
@pytest.mark.parametrize("m_max", [5, 65, 129])
def test_masked(backend, m_max, dtypes):
    masked_m = [0, m_max, 1, m_max - 1, m_max // 2]
    check_masked(backend, masked_m, m_max, 97, 144, dtypes, own_dtype(dtypes), expected_m=m_max)


@layouts
@pytest.mark.parametrize("scales", [("none", "tensor"), ("tensor", "row"), ("row", "none")])
def test_masked_scales_and_strides(backend, scales, pad, offset):
    check_masked(backend, [3, 0, 70, 71], 71, 70, 80, FP8, "float32", scales, pad=pad, offset=offset)


@all_dtypes
@pytest.mark.parametrize("n, k", [(264, 144), (97, 528)])
def test_masked_groups_of_some_rows(backend, n, k, dtypes):
    """The hint need not be true."""
    check_masked(backend, [0, 400, 1, 193, 192, 97, 16], 400, n, k, dtypes, own_dtype(dtypes), expected_m=128)
    check_masked(backend, [130], 400, n, k, dtypes, own_dtype(dtypes), expected_m=200)


@pytest.mark.parametrize("dtype", [E4M3, "bfloat16"])
@pytest.mark.parametrize("expected_m", [1, 8, 17, 24])
@pytest.mark.parametrize("m", [9, 40, 63, 200])
def test_one_masked_group_of_more_rows_than_expected(backend, m, expected_m, dtype):
    """Of tiles of 8 and 24 rows."""
    check_masked(backend, [m], m + 9, 136, 144, (dtype, dtype), "bfloat16", expected_m=expected_m)


@pytest.mark.parametrize("wrong", [-1, 72, 2**31 - 1])
def test_masked_faults_raise_on_the_cpu(wrong):
    with pytest.raises(ValueError, match="masked_m"):
        flexgemm.m_grouped_gemm_nt_masked(*operands_of_two(), np.array([3, wrong], np.int32))


def test_masked_m_is_clamped_on_the_gpu(cuda):
    a, b = operands_of_two()
    initial = np.full((2, 71, 33), KEPT, np.float32)
    out = guarded.gemm(cuda, a, b, "float32", masked_m=np.array([-5, 2**31 - 1], np.int32), shape=(2, 71, 33),
                       layout="m_grouped_masked", initial=initial)  # fmt: skip
    assert (out[0] == KEPT).all()
    assert_rows(out[1], reference.gemm(a[1], b[1]), 1e-3)
