"""Activations, SwiGLU and FP8 outputs, which have kernels of their own: every tile, last rows and columns that lack
some, groups that end within a tile."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
from products import (
    DENSE,
    E4M3,
    ENDS,
    EXPECTED_M,
    FP8,
    MASKED,
    PACKED,
    check_grouped_output,
    check_output,
    contiguous,
    cut_of,
    elements,
    judge_float8,
    large_tile,
    operands,
    plan_of,
    width,
)

all_ends = pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)

# Tiles, and multiprocessors, M, N and K of an FP8 and of a 16-bit product that get them; a block has several.
TILES = [
    ((128, 128), (1, 260, 320, 144), (1, 260, 608, 72)),
    ((128, 176), (2, 260, 352, 272), (1, 260, 320, 136)),
    ((128, 192), (1, 260, 544, 400), (1, 260, 544, 200)),
    ((128, 256), (1, 260, 480, 400), (1, 260, 480, 200)),
    ((128, 256), (1, 260, 608, 2064), (3, 130, 592, 1032)),  # of the last columns there is one part
    ((256, 256), (2, 400, 480, 2448), (2, 400, 480, 2056)),
    ((256, 256), (2, 400, 608, 2064), (4, 200, 784, 3080)),
]
# Of the kernels for few and for some rows: tokens to a tile, whether they are few, and a product, its K in bytes.
TOKENS = [
    (8, True, (132, 5, 480, 400)),
    (16, True, (132, 16, 352, 1040)),
    (32, True, (132, 30, 480, 4112)),  # K shared by eight blocks
    (64, True, (132, 64, 96, 272)),
    (128, True, (132, 100, 480, 400)),
    (128, True, (132, 200, 480, 4112)),  # two rows of tiles
    (144, False, (4, 144, 480, 4112)),
]


@all_ends
@pytest.mark.parametrize("tile, of_float8, of_halves", TILES)
def test_ends_of_every_tile(backend, tile, of_float8, of_halves, end):
    dtype, out_dtype, scales, bias, activation = end
    sms, m, n, k = of_float8 if dtype == E4M3 else of_halves
    assert large_tile(sms, m, n, k, 1, DENSE, dtype) == tile
    check_output(backend, *operands(m, n, k, dtype, dtype), out_dtype, scales, bias, activation, sms)


@all_ends
@pytest.mark.parametrize("tokens, few, question", TOKENS)
def test_ends_of_few_and_some_rows(backend, tokens, few, question, end):
    dtype, out_dtype, scales, bias, activation = end
    sms, m, n, k = *question[:3], elements(question[3], dtype)
    plan = plan_of(sms, m, n, k, 1, DENSE, dtype)
    assert (plan["block_m"], plan["few_rows"] > 0) == (tokens, few)
    assert plan["few_rows"] > 0 or plan["some_rows"]
    check_output(backend, *operands(m, n, k, dtype, dtype), out_dtype, scales, bias, activation, sms)


@all_ends
@pytest.mark.parametrize(
    "layout, sms, sizes, k_bytes, tokens",
    [("m_grouped", 8, [3, 0, 17, 33, 64, 1], 400, 96), ("m_grouped_masked", 4, [150, 0, 201, 129, 16, 60], 2064, 192)],
)
def test_ends_of_groups_of_some_rows(backend, layout, sms, sizes, k_bytes, tokens, end):
    dtype, out_dtype, scales, bias, activation = end
    n, k = 480, elements(k_bytes, dtype)
    rows, asks = (EXPECTED_M * len(sizes), MASKED) if layout == "m_grouped_masked" else (sum(sizes), 0)
    plan = plan_of(sms, rows, n, k, len(sizes), asks, dtype)
    assert (plan["block_m"], plan["some_rows"]) == (tokens, 1)
    check_grouped_output(backend, layout, sizes, n, k, dtype, out_dtype, scales, bias, activation, sms)


@all_ends
@pytest.mark.parametrize(
    "layout, sms, k_bytes, tile",
    [
        ("m_grouped", 1, 144, (128, 128)),
        ("m_grouped", 1, 2064, (128, 256)),
        ("m_grouped_masked", 1, 2064, (128, 256)),
        ("m_grouped_contiguous", 1, 1040, (128, 256)),
        ("m_grouped_contiguous", 2, 4112, (256, 256)),
    ],
)
def test_ends_of_groups_that_end_within_a_tile(backend, layout, sms, k_bytes, tile, end):
    """Their last rows are stored one by one, and what is behind them is left as it was."""
    dtype, out_dtype, scales, bias, activation = end
    sizes, n, k = [48, 127, 176, 300, 80, 0, 1, 128], 480, elements(k_bytes, dtype)
    rows, asks = {
        "m_grouped": (sum(sizes), 0),
        "m_grouped_masked": (EXPECTED_M * len(sizes), MASKED),
        "m_grouped_contiguous": (len(contiguous(sizes)), PACKED),
    }[layout]
    assert large_tile(sms, rows, n, k, len(sizes), asks, dtype) == tile
    check_grouped_output(backend, layout, sizes, n, k, dtype, out_dtype, scales, bias, activation, sms)


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


@pytest.mark.parametrize("scale_out", [0.0, 1e-39, -2.0])
@pytest.mark.parametrize("m", [8, 96, 260])
def test_any_scale_of_a_float8_output_with_a_bias(backend, m, scale_out):
    """It divides the sum of both, which may have another sign than each of them."""
    n, k = 480, 400
    a, b = (np.abs(x) for x in operands(m, n, k, *FP8)[1:])
    typical = np.median(reference.gemm(a, b))
    bias = np.where(np.arange(n) % 2, -0.4, -3).astype(np.float32) * np.float32(typical)
    out = guarded.gemm(backend, a, b, E4M3, bias=bias, scale_out=np.asarray(scale_out, np.float32))
    with np.errstate(divide="ignore"):
        ref = reference.gemm(a, b, bias=bias) / reference.f64(np.asarray(scale_out, np.float32))
    judge_float8(out, np.clip(ref, -448, 448), E4M3, cut_of(backend, FP8, None))


def test_an_infinite_factor_of_a_float8_output(backend):
    m, n, k = 260, 480, 400
    a, b = (np.abs(x) for x in operands(m, n, k, E4M3, E4M3)[1:])
    a[5] = 0
    how = {"scale_a": np.asarray(np.inf, np.float32)}
    with guarded.multiprocessors(1):
        out = guarded.gemm(backend, a, b, E4M3, scale_out=np.asarray(2.0, np.float32), **how)
    nan = np.isnan(reference.f64(out)).any(axis=1)
    np.testing.assert_array_equal(nan, np.arange(m) == 5)
