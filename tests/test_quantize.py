"""Casts to FP8, bit for bit against NumPy and ml_dtypes."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
import scenes
import verdicts
from reference import dtype_of, f64
from verdicts import assert_same_bits

import flexgemm
from flexgemm import _C

FP8 = ["float8_e4m3fn", "float8_e5m2"]
SOURCES = ["float32", "float16", "bfloat16"]

to_fp8 = pytest.mark.parametrize("dtype", FP8)
from_dtype = pytest.mark.parametrize("source", SOURCES)
granularities = pytest.mark.parametrize("granularity", ["tensor", "row", "1x128", "128x128"])
# What lies adjacent in memory: the elements of a row of x, or of a column.
either_way = pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])


def check(backend, x, dtype, granularity, scale=None, saturate=True, **layout):
    """layout: pad, offset, and columns."""
    q, used = guarded.quantize(backend, x, dtype, granularity, scale, saturate=saturate, **layout)
    expected, expected_scale = reference.quantize(x, dtype, granularity, scale, saturate)
    assert_same_bits(used, expected_scale, "scale")
    assert_same_bits(q, expected, "q")
    return q, used


@to_fp8
@from_dtype
@granularities
@either_way
@pytest.mark.parametrize(
    "m, k", [(0, 16), (16, 0), (1, 1), (1, 5000), (5000, 1), (63, 65), (64, 64), (129, 97), (300, 576), (3, 7168)]
)
def test_shapes(backend, m, k, columns, granularity, source, dtype):
    rng = np.random.default_rng([m, k])
    x = (rng.standard_normal((m, k)) * np.exp(rng.uniform(-4, 4, (m, 1)))).astype(dtype_of(source))
    check(backend, x, dtype, granularity, columns=columns)


@to_fp8
@from_dtype
@granularities
@either_way
@pytest.mark.parametrize("pad, offset", [(0, 1), (1, 0), (5, 3), (64, 16)])
def test_layouts(backend, pad, offset, columns, granularity, source, dtype):
    x = scenes.values(np.random.default_rng(1), (65, 70), source)
    check(backend, x, dtype, granularity, pad=pad, offset=offset, columns=columns)


@from_dtype
@granularities
@either_way
@pytest.mark.parametrize("q_offset", [1, 2])
def test_only_the_output_off_alignment(backend, q_offset, columns, granularity, source):
    x = scenes.values(np.random.default_rng(1), (64, 64), source)
    check(backend, x, "float8_e4m3fn", granularity, q_offset=q_offset, columns=columns)


@from_dtype
@granularities
@pytest.mark.parametrize("pitched", ["x", "q"])
def test_one_array_of_rows_apart(backend, pitched, granularity, source):
    """The rows of the other one lie behind each other, which for a scale per tensor are one long row."""
    x = scenes.values(np.random.default_rng(1), (65, 64), source)
    block_rows = guarded.BLOCK_ROWS.get(granularity, 0)
    expected, expected_scale = reference.quantize(x, "float8_e4m3fn", granularity)
    call = guarded.Call(backend, pad=16)
    given = call.give(x, strided=pitched == "x")
    outputs = call.take(x.shape, "float8_e4m3fn", strided=pitched == "q"), call.take(expected_scale.shape, "float32")
    q, scale = call.run("quantize", given, *outputs, scale_given=False, swiglu=False, block_rows=block_rows)
    assert_same_bits(scale, expected_scale, "scale")
    assert_same_bits(q, expected, "q")


@to_fp8
@from_dtype
@either_way
@pytest.mark.parametrize("granularity", ["row", "1x128", "128x128"])
@pytest.mark.parametrize(
    "groups, m, k", [(3, 130, 200), (1, 1, 1), (2, 128, 128), (0, 5, 7), (2, 0, 7), (4, 257, 129), (2, 5, 1100)]
)
@pytest.mark.parametrize("pad", [0, 1])
def test_batches(backend, pad, groups, m, k, granularity, columns, source, dtype):
    x = scenes.values(np.random.default_rng([m, k]), (groups, m, k), source)
    if groups:
        check(backend, x, dtype, granularity, pad=pad, columns=columns)
    else:
        q, scale = guarded.quantize(backend, x, dtype, granularity, columns=columns)
        assert q.shape == x.shape
        assert len(scale) == 0


def check_swiglu(backend, x, dtype, granularity, scale=None, **layout):
    """The activation is not a matter of bits: the scale is, to float32's precision, and q to a step of FP8."""
    exact = reference.activated(f64(x).reshape(-1, x.shape[-1]), "swiglu").reshape(*x.shape[:-1], -1)
    q, used = guarded.quantize(backend, x, dtype, granularity, scale, swiglu=True, **layout)
    _, expected_scale = reference.quantize(exact, dtype, granularity, scale)
    np.testing.assert_allclose(used, expected_scale, rtol=1e-5)
    low, high = (reference.quantize(exact * side, dtype, granularity, used)[0] for side in (1 - 1e-5, 1 + 1e-5))
    low, high = np.minimum(f64(low), f64(high)), np.maximum(f64(low), f64(high))
    assert ((f64(q) >= low) & (f64(q) <= high)).all()


@to_fp8
@from_dtype
@granularities
@pytest.mark.parametrize("m, k", [(1, 1), (65, 70), (130, 200), (3, 2500)])
def test_swiglu(backend, m, k, granularity, source, dtype):
    x = scenes.values(np.random.default_rng([m, k]), (m, 2 * k), source)
    check_swiglu(backend, x, dtype, granularity)


@granularities
@either_way
@pytest.mark.parametrize("pad, offset", [(0, 1), (2, 0), (64, 16)])
def test_swiglu_layouts_and_given_scales(backend, pad, offset, columns, granularity):
    rng = np.random.default_rng(5)
    x = scenes.values(rng, (65, 140), "bfloat16")
    shape = {"tensor": (), "row": 65, "1x128": (65, 1), "128x128": (1, 1)}[granularity]
    scale = np.exp(rng.uniform(-4, -2, shape)).astype(np.float32)
    check_swiglu(backend, x, FP8[0], granularity, scale, pad=pad, offset=offset, columns=columns)


def test_swiglu_feeds_a_product(backend):
    """Between the two products of an expert: interleaved gate and up in, FP8 with block scales out."""
    rng = np.random.default_rng(6)
    x, w = scenes.values(rng, (65, 512), "bfloat16"), scenes.values(rng, (96, 256), "float32")
    q, scale = flexgemm.quantize(backend.array(x), granularity="1x128", swiglu=True)
    weight, weight_scale = flexgemm.quantize(backend.array(w), granularity="128x128")
    out = flexgemm.gemm_nt(q, weight, scale_a=scale, scale_b=weight_scale, out_dtype="float32")
    exact = reference.activated(f64(x), "swiglu") @ f64(w).T
    assert verdicts.gemm_diff(backend.numpy(out), exact).max() < 3e-3


@to_fp8
@granularities
@either_way
def test_every_half_precision_number(backend, columns, granularity, dtype):
    """All 65,536 of them at scale 1: ties, subnormals, both zeros, saturation, infinities and NaN."""
    bits = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    one = np.ones({"tensor": (), "row": 256, "1x128": (256, 2), "128x128": (2, 2)}[granularity], np.float32)
    for source in ("float16", "bfloat16"):
        check(backend, bits.view(dtype_of(source)), dtype, granularity, one, columns=columns)


@to_fp8
def test_every_tie_and_its_neighbours(backend, dtype):
    """Halfway between each pair of neighbouring values, and one float32 step to either side."""
    every = np.arange(256, dtype=np.uint8).view(dtype_of(dtype)).astype(np.float32)
    grid = np.unique(every[np.isfinite(every)])
    middle = ((f64(grid[1:]) + f64(grid[:-1])) / 2).astype(np.float32)
    x = np.stack([np.nextafter(middle, np.float32(-np.inf)), middle, np.nextafter(middle, np.float32(np.inf))])
    check(backend, x, dtype, "tensor", np.ones((), np.float32))


@to_fp8
@granularities
@from_dtype
@either_way
def test_nan_and_infinity(backend, columns, source, granularity, dtype):
    """They take no part in the scale; NaN stays NaN and infinity saturates."""
    x = scenes.values(np.random.default_rng(2), (40, 33), source)
    x[3, 5], x[4, 6], x[5, 7], x[5, 8] = np.nan, np.inf, -np.inf, np.nan
    x[7], x[8], x[9] = np.nan, np.inf, -np.inf
    q, _ = check(backend, x, dtype, granularity, columns=columns)
    limit = reference.FP8_MAX[dtype]
    np.testing.assert_array_equal(np.isnan(f64(q)), np.isnan(f64(x)))
    assert f64(q)[4, 6] == limit
    assert f64(q)[5, 7] == -limit
    assert np.nanmax(np.abs(f64(q))) == limit
    assert (q.view(np.uint8)[np.isnan(f64(q))] & 0x7F == 0x7F).all()  # of all that e5m2 has, on every backend


@to_fp8
@granularities
@from_dtype
@either_way
@pytest.mark.parametrize("m, k", [(40, 33), (3, 7000)])
def test_infinities_that_are_not_saturated(backend, m, k, columns, source, granularity, dtype):
    """Their scale is infinite, so that what is cast beside them is 0 times infinity; NaN alone leaves a scale alone."""
    x = scenes.values(np.random.default_rng(2), (m, k), source)
    for infinity in (np.inf, -np.inf):
        x[0, 5], x[1, k - 1] = np.nan, infinity
        q, scale = check(backend, x, dtype, granularity, saturate=False, columns=columns)
        assert np.isinf(scale).any()
        with np.errstate(invalid="ignore"):
            assert not np.isfinite(f64(q)[1] * np.inf).any()
        if granularity == "row":
            assert np.isfinite(scale[np.arange(m) != 1]).all()


@granularities
def test_gates_that_overflow_are_seen(backend, granularity):
    x = np.ones((40, 2 * 33), np.float32)
    x[3, 4:6] = 3e38
    q, scale = guarded.quantize(backend, x, FP8[0], granularity, swiglu=True, saturate=False)
    assert np.isinf(scale).any()
    assert np.isnan(f64(q)[3, 2])


def test_a_scale_saturates(backend):
    x, scale = backend.array(np.ones((4, 4), np.float32)), backend.array(np.ones((), np.float32))
    with pytest.raises(ValueError, match="^saturate: expected True beside a scale, got False$"):
        flexgemm.quantize(x, scale=scale, saturate=False)
    with pytest.raises(TypeError, match="^saturate: expected a bool, got str$"):
        flexgemm.quantize(x, saturate="no")


@granularities
@either_way
@pytest.mark.parametrize("m, k", [(3, 2500), (2500, 3)])
def test_the_largest_magnitude_counts_wherever_it_lies(backend, m, k, columns, granularity):
    """At both ends of the rows, of the columns, and of stretches of 512 and 1024 of them."""
    for place in (0, 511, 512, 1023, 1024, 2047, 2048, 2499):
        x = np.ones((m, k), np.float32)
        x[place % m, place % k] = 7
        check(backend, x, FP8[0], granularity, columns=columns)


@to_fp8
@granularities
@either_way
@pytest.mark.parametrize("fill", [0.0, -0.0, np.nan, np.inf])
def test_nothing_finite_to_scale_by_gives_scale_one(backend, fill, columns, granularity, dtype):
    x = np.full((5, 40), fill, np.float32)
    _, scale = check(backend, x, dtype, granularity, columns=columns)
    assert (scale == 1).all()


@to_fp8
@granularities
@either_way
@pytest.mark.parametrize("magnitude", [1e-45, 1e-43, 1e-41, 1e-38, 1e-30, 1e30, 3.4e38])
def test_extreme_magnitudes(backend, magnitude, columns, granularity, dtype):
    """Scales that are subnormal, or underflow to zero and become one."""
    rng = np.random.default_rng(3)
    x = (rng.uniform(-1, 1, (9, 50)) * magnitude).astype(np.float32)
    x[2] = magnitude
    check(backend, x, dtype, granularity, columns=columns)


@to_fp8
@granularities
@from_dtype
@either_way
def test_given_scale(backend, columns, source, granularity, dtype):
    rng = np.random.default_rng(4)
    x = scenes.values(rng, (65, 97), source)
    shape = {"tensor": (), "row": 65, "1x128": (65, 1), "128x128": (1, 1)}[granularity]
    scale = np.exp(rng.uniform(-8, 2, shape)).astype(np.float32)
    _, used = check(backend, x, dtype, granularity, scale, columns=columns)
    assert_same_bits(used, scale)  # read, not written


@to_fp8
@granularities
@from_dtype
def test_public_function(backend, source, granularity, dtype):
    x = scenes.values(np.random.default_rng(5), (65, 97), source)
    expected, expected_scale = reference.quantize(x, dtype, granularity)
    q, scale = map(backend.numpy, flexgemm.quantize(backend.array(x), dtype, granularity=granularity))
    assert_same_bits(q, expected)
    assert_same_bits(scale, expected_scale)
    assert np.abs(f64(q) * f64(scale).reshape(-1, 1) - f64(x)).max() < np.abs(f64(x)).max() * 0.08

    again = flexgemm.quantize(backend.array(x), dtype, granularity=granularity, scale=backend.array(scale))
    assert_same_bits(backend.numpy(again[0]), expected)
    assert_same_bits(backend.numpy(again[1]), expected_scale)


@pytest.mark.parametrize("granularity, scale_shape", [("row", (3, 65)), ("1x128", (3, 65, 1)), ("128x128", (3, 1, 1))])
def test_public_function_of_a_batch(backend, granularity, scale_shape):
    x = scenes.values(np.random.default_rng(5), (3, 65, 97), "bfloat16")
    expected, expected_scale = reference.quantize(x, FP8[0], granularity)
    q, scale = flexgemm.quantize(backend.array(x), granularity=granularity)
    assert tuple(scale.shape) == scale_shape
    assert_same_bits(backend.numpy(q), expected)
    assert_same_bits(backend.numpy(scale), expected_scale)
    again, _ = flexgemm.quantize(backend.array(x), granularity=granularity, scale=scale)
    assert_same_bits(backend.numpy(again), expected)


@granularities
@pytest.mark.parametrize(
    "view", [np.s_[:, :], np.s_[::-1], np.s_[:, ::-1], np.s_[::2, ::3], np.s_[:1], np.s_[:, :1], np.s_[:1, ::2]]
)
def test_views_of_either_order(granularity, view):
    """Of NumPy: turned, reversed, of every other element."""
    whole = scenes.values(np.random.default_rng(9), (40, 66), "bfloat16")
    for x in (whole[view], whole.T[view]):
        expected, expected_scale = reference.quantize(x, FP8[0], granularity)
        q, scale = flexgemm.quantize(x, granularity=granularity)
        assert_same_bits(q, expected)
        assert_same_bits(scale, expected_scale)


@either_way
@pytest.mark.parametrize("granularity", ["row", "1x128", "128x128"])
def test_one_matrix_expanded_to_a_batch(backend, granularity, columns):
    x = scenes.values(np.random.default_rng(10), (65, 97), "float32")
    expected, expected_scale = reference.quantize(x, FP8[0], granularity)
    base, strides = (x.T, (0, 1, 65)) if columns else (x, (0, 97, 1))
    view = backend.window(backend.array(np.ascontiguousarray(base)), (3, 65, 97), strides, 0)
    call = guarded.Call(backend)
    outputs = call.take((3, 65, 97), FP8[0]), call.take((3, *expected_scale.shape), "float32")
    q, scale = call.run("quantize", view, *outputs, block_rows=guarded.BLOCK_ROWS.get(granularity, 0))
    for one, of_one in zip(q, scale, strict=True):
        assert_same_bits(one, expected)
        assert_same_bits(of_one, expected_scale)


def test_default_is_e4m3_per_tensor(backend):
    x = scenes.values(np.random.default_rng(6), (16, 32), "float32")
    q, scale = map(backend.numpy, flexgemm.quantize(backend.array(x)))
    assert q.dtype == dtype_of("float8_e4m3fn")
    assert scale.shape == ()


@pytest.mark.parametrize("argument, wrong", [("granularity", "column"), ("dtype", "float16"), ("dtype", 3.5)])
def test_unknown_choices_are_named(backend, argument, wrong):
    with pytest.raises((TypeError, ValueError), match=argument):
        flexgemm.quantize(backend.array(np.ones((4, 4), np.float32)), **{argument: wrong})


@pytest.mark.parametrize(
    "shape, granularity, scale_shape, message",
    [
        ((4,), "tensor", None, r"x: expected \(M, K\), got \(4,\)"),
        ((2, 4, 4), "tensor", None, r"x: expected \(M, K\), got \(2, 4, 4\)"),
        ((2, 2, 4, 4), "row", None, r"x: expected \(M, K\) or \(G, M, K\), got \(2, 2, 4, 4\)"),
        ((2, 2, 4, 4), "1x128", None, r"x: expected \(M, K\) or \(G, M, K\), got \(2, 2, 4, 4\)"),
        ((4, 5), "tensor", (2,), r"scale: expected \(\) or \(1,\) {}, got \(2,\)"),
        ((4, 5), "row", (5,), r"scale: expected \(4,\) {}, got \(5,\)"),
        ((2, 4, 5), "row", (8,), r"scale: expected \(2, 4\) {}, got \(8,\)"),
        ((4, 5), "1x128", (4,), r"scale: expected \(4, 1\) {}, got \(4,\)"),
        ((2, 4, 5), "128x128", (1, 1), r"scale: expected \(2, 1, 1\) {}, got \(1, 1\)"),
    ],
)
def test_wrong_shapes_are_named(backend, shape, granularity, scale_shape, message):
    scale = None if scale_shape is None else backend.array(np.ones(scale_shape, np.float32))
    message = message.format(f"to match x and granularity '{granularity}'")
    with pytest.raises(ValueError, match=f"^{message}$"):
        flexgemm.quantize(backend.array(np.ones(shape, np.float32)), granularity=granularity, scale=scale)


def test_the_same_input_gives_the_same_bits(backend):
    x = scenes.values(np.random.default_rng(7), (3000, 97), "bfloat16")
    first = guarded.quantize(backend, x, FP8[0], "tensor")
    for _ in range(3):
        for again, before in zip(guarded.quantize(backend, x, FP8[0], "tensor"), first, strict=True):
            assert_same_bits(again, before)


@pytest.mark.large
@either_way
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_more_than_2_to_the_31_elements(cuda, granularity, columns):
    block = scenes.values(np.random.default_rng(8), (4000, 512), "float16")
    rows = 2**31 // 512 + 1000
    x = np.tile(block, (rows // 4000 + 1, 1))[:rows]
    x[-1] *= 3  # the largest magnitude is in the last row
    source = cuda.window(cuda.array(x.T), x.shape, (1, rows), 0) if columns else cuda.array(x)
    results = cuda.empty(x.shape, FP8[0]), cuda.empty((rows,) if granularity == "row" else (), "float32")
    workspace = cuda.empty((_C.quantize_workspace(source, *results),), "uint8")
    assert not _C.quantize(source, *results, workspace=workspace)
    q, scale = map(cuda.numpy, results)
    largest = np.abs(x[-1:]).max().astype(np.float32) / np.float32(448)
    given = None if granularity == "row" else largest
    expected, expected_scale = reference.quantize(x[-5000:], FP8[0], granularity, given)
    assert_same_bits(q[-5000:], expected)
    assert_same_bits(scale[-5000:] if granularity == "row" else scale, np.asarray(expected_scale, np.float32))
