"""Sums of gathered rows and of groups by the extension itself, where indices and starts are the caller's."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
from verdicts import ROW_TOLERANCE, assert_rows


@pytest.mark.parametrize("weight", [np.nan, np.inf])
def test_what_is_left_out_has_no_weight(backend, weight):
    feats = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    indices, weights = np.array([[2, -1], [-1, 0]], np.int32), np.array([[1, weight], [weight, -2]], np.float32)
    out = guarded.gather_sum(backend, feats, indices, weights)
    np.testing.assert_array_equal(out, np.stack([feats[2], -2 * feats[0]]))


@pytest.mark.parametrize("first", [0, 10, 512, 600])
@pytest.mark.parametrize("mode", ["sum", "max"])
def test_groups_need_not_begin_with_the_first_entry(backend, first, mode):
    """Long ones, which several threads sum up, and short ones."""
    rng = np.random.default_rng(0)
    src = rng.normal(size=(2700, 9)).astype(np.float32)
    order = rng.permutation(len(src)).astype(np.int32)
    starts = np.array([first, first + 1400, first + 1403, first + 2003], np.int32)
    how = {"with_argmax": mode == "max", "fence": False}
    got = guarded.group_reduce(backend, src, order, starts, None, mode, **how)
    expected, argmax = reference.group_reduce(src, order, starts, None, mode)
    if mode == "max":
        got, rows = got
        np.testing.assert_array_equal(rows, argmax)
    assert_rows(got, expected, ROW_TOLERANCE["float32"])
