"""SiLU, SwiGLU and FP8 outputs of FP8 products, which have kernels of their own: every tile, last rows and columns that
lack some, groups that end within a tile."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
from products import (
    DENSE,
    ENDS,
    EXPECTED_M,
    MASKED,
    PACKED,
    check_grouped_output,
    check_output,
    contiguous,
    cut_of,
    judge_float8,
    operands,
    plan_of,
    width,
)

E4M3 = "float8_e4m3fn"
FP8 = (E4M3, E4M3)

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
# The same of the kernels for few and for some rows: tokens to a tile, and whether they are few.
TOKENS = {
    (132, 5, 480, 400): (8, True),
    (132, 16, 352, 1040): (16, True),
    (132, 30, 480, 4112): (32, True),  # K shared by eight blocks
    (132, 64, 96, 272): (64, True),
    (132, 100, 480, 400): (128, True),
    (132, 200, 480, 4112): (128, True),  # two rows of tiles
    (4, 144, 480, 4112): (144, False),
}


def large_tile(*question):
    plan = plan_of(*question)
    assert plan["few_rows"] == plan["some_rows"] == 0
    return plan["block_m"], plan["block_n"]


@all_ends
@pytest.mark.parametrize("sms, m, n, k", TILES)
def test_ends_of_every_tile(backend, sms, m, n, k, end):
    assert large_tile(sms, m, n, k, 1, DENSE) == TILES[sms, m, n, k]
    scales, bias, activation, out_dtype = end
    check_output(backend, *operands(m, n, k, *FP8), out_dtype, scales, bias, activation, sms)


@all_ends
@pytest.mark.parametrize("sms, m, n, k", TOKENS)
def test_ends_of_few_and_some_rows(backend, sms, m, n, k, end):
    plan = plan_of(sms, m, n, k, 1, DENSE)
    assert (plan["block_m"], plan["few_rows"] > 0) == TOKENS[sms, m, n, k]
    assert plan["few_rows"] > 0 or plan["some_rows"]
    scales, bias, activation, out_dtype = end
    check_output(backend, *operands(m, n, k, *FP8), out_dtype, scales, bias, activation, sms)


@all_ends
@pytest.mark.parametrize(
    "layout, sms, sizes, k, tokens",
    [("m_grouped", 8, [3, 0, 17, 33, 64, 1], 400, 96), ("m_grouped_masked", 4, [150, 0, 201, 129, 16, 60], 1040, 192)],
)
def test_ends_of_groups_of_some_rows(backend, layout, sms, sizes, k, tokens, end):
    n = 480
    rows, asks = (EXPECTED_M * len(sizes), MASKED) if layout == "m_grouped_masked" else (sum(sizes), 0)
    plan = plan_of(sms, rows, n, k, len(sizes), asks)
    assert (plan["block_m"], plan["some_rows"]) == (tokens, 1)
    scales, bias, activation, out_dtype = end
    check_grouped_output(backend, layout, sizes, n, k, out_dtype, scales, bias, activation, sms)


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
    rows, asks = {
        "m_grouped": (sum(sizes), 0),
        "m_grouped_masked": (EXPECTED_M * len(sizes), MASKED),
        "m_grouped_contiguous": (len(contiguous(sizes)), PACKED),
    }[layout]
    assert large_tile(sms, rows, n, k, len(sizes), asks) == tile
    scales, bias, activation, out_dtype = end
    check_grouped_output(backend, layout, sizes, n, k, out_dtype, scales, bias, activation, sms)


@pytest.mark.parametrize("scale_out", [0.0, 1e-39, 1e-30, -2.0, 1e30, np.inf, np.nan])
@pytest.mark.parametrize("activation", [None, "swiglu", "relu"])
def test_any_scale_of_a_float8_output(backend, scale_out, activation):
    """A quotient that is too large is saturated, and that of 0 is 0 but for a scale that is 0 or no number."""
    m, n, k = 260, 480, 400
    a, b = (np.abs(x) for x in operands(m, n, k, *FP8)[1:])  # no sum is 0 but those of zeros
    a[5] = 0
    with guarded.multiprocessors(1):
        out = guarded.gemm(backend, a, b, E4M3, shape=(m, width(n, activation)), activation=activation,
                           scale_out=np.asarray(scale_out, np.float32))  # fmt: skip
    with np.errstate(divide="ignore", invalid="ignore"):
        ref = reference.gemm(a, b, activation=activation) / reference.f64(np.asarray(scale_out, np.float32))
    np.testing.assert_array_equal(np.isnan(reference.f64(out)), np.isnan(ref))
    known = ~np.isnan(ref).any(axis=1)
    judge_float8(out[known], np.clip(ref[known], -448, 448), E4M3, cut_of(backend, FP8, activation))
