"""Pooling over maps and over samples, and upsampling, against float64."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
import scenes
import verdicts
from hypothesis import given
from hypothesis import strategies as st
from memory import Host
from reference import f64
from verdicts import assert_rounded_once, assert_rows, assert_same_bits

import flexgemm

DTYPES = ["float32", "float16", "bfloat16"]
MODES = ["max", "mean", "sum"]
CHANNELS = [1, 3, 8, 13, 64, 100, 520]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_mode = pytest.mark.parametrize("mode", MODES)


def random_map(volume, columns, rows, *, seed=0, share=0.4):
    """Each entry a row or -1, no row twice in a column or an offset: what a map of unique voxels has."""
    rng = np.random.default_rng(seed)
    nmap = np.full((volume, columns), -1, np.int32)
    taken = set()
    for v in range(volume):
        for m, row in enumerate(rng.permutation(max(rows, columns))[:columns]):
            if row < rows and (m, row) not in taken and rng.random() < share:
                nmap[v, m] = row
                taken.add((m, row))
    return nmap


def transpose(nmap, rows):
    result = np.full((len(nmap), rows), -1, np.int32)
    v, m = np.nonzero(nmap >= 0)
    result[v, nmap[v, m]] = m
    return result


def judge(out, expected, dtype, what="out"):
    assert out.dtype.name == dtype
    assert_rows(out, expected, verdicts.ROW_TOLERANCE[dtype], what)
    if dtype in verdicts.HALF_ULP:
        assert_rounded_once(out, expected, what)


def check(backend, nmap, rows, channels, mode, dtype, **layout):
    """Forward and backward of one map, in fenced buffers."""
    rng = np.random.default_rng(0)
    feats = scenes.values(rng, (rows, channels), dtype, one_sign=mode != "max")
    grad_out = scenes.values(rng, (nmap.shape[1], channels), dtype, one_sign=True)
    expected, chosen, count = reference.pool(feats, nmap, mode)
    got = guarded.pool(backend, feats, nmap, mode, **layout)
    judge(got[0], expected, dtype)
    np.testing.assert_array_equal(got[-1], count)
    if mode == "max":
        assert_same_bits(got[0], expected.astype(feats.dtype))
        np.testing.assert_array_equal(got[1], chosen)
    by_products = {"max": (chosen, None), "mean": (None, count), "sum": (None, None)}[mode]
    grad_feats = guarded.pool_backward(backend, grad_out, transpose(nmap, rows), mode, *by_products, **layout)
    judge(grad_feats, reference.pool_backward(grad_out, nmap, rows, mode, chosen, count), dtype, "grad_feats")


@every_dtype
@every_mode
@pytest.mark.parametrize("channels", CHANNELS)
def test_channels(backend, channels, mode, dtype):
    check(backend, random_map(8, 120, 90), 90, channels, mode, dtype)


@every_mode
@pytest.mark.parametrize("volume", [1, 2, 27, 343])
@pytest.mark.parametrize("columns, rows", [(0, 5), (5, 0), (1, 1), (257, 130), (63, 1000)])
def test_sizes(backend, columns, rows, volume, mode):
    check(backend, random_map(volume, columns, rows), rows, 16, mode, "float16")


@every_dtype
@every_mode
@pytest.mark.parametrize("pad, offset", [(1, 0), (0, 1), (0, 4), (0, 8), (8, 0), (5, 3)])
def test_strided_rows_and_any_alignment(backend, pad, offset, mode, dtype):
    check(backend, random_map(8, 70, 60), 60, 40, mode, dtype, pad=pad, offset=offset)


def test_no_channels(backend):
    assert guarded.pool(backend, np.zeros((5, 0), np.float32), random_map(8, 4, 5), "sum")[0].shape == (4, 0)


def test_equal_maxima_choose_the_first_offset(backend):
    rng = np.random.default_rng(0)
    nmap = random_map(8, 200, 150)
    feats = rng.integers(0, 3, (150, 24)).astype(np.float16)
    _, chosen, _ = guarded.pool(backend, feats, nmap, "max")
    np.testing.assert_array_equal(chosen, reference.pool(feats, nmap, "max")[1])


def test_nan_and_infinity(backend):
    """NaN wins over all; -inf alone is a maximum too."""
    rng = np.random.default_rng(0)
    nmap = random_map(8, 200, 150)
    feats = rng.choice(np.array([np.nan, -np.inf, np.inf, 1], np.float32), (150, 24), p=[0.1, 0.6, 0.1, 0.2])
    out, chosen, _ = guarded.pool(backend, feats, nmap, "max")
    expected, expected_chosen, _ = reference.pool(feats, nmap, "max")
    assert_same_bits(out, expected.astype(np.float32))
    np.testing.assert_array_equal(chosen, expected_chosen)


@every_dtype
@pytest.mark.parametrize("volume", [8, 343])
def test_maxima_alone_are_those_whose_rows_are_told(backend, volume, dtype):
    """Bit for bit, of infinities and zeros of both signs, where NaN is in one of two neighbouring channels or both."""
    rng = np.random.default_rng(0)
    nmap = random_map(volume, 200, 150, share=3 / volume)
    values = np.array([np.nan, -np.inf, np.inf, 1, 0.0, -0.0], np.float32)
    feats = rng.choice(values, (150, 24), p=[0.1, 0.2, 0.05, 0.05, 0.3, 0.3]).astype(reference.dtype_of(dtype))
    expected = reference.pool(feats, nmap, "max")[0].astype(feats.dtype)
    assert_same_bits(guarded.pool(backend, feats, nmap, "max")[0], expected)
    assert_same_bits(guarded.pool(backend, feats, nmap, "max", by_products=False), expected)


@every_mode
@pytest.mark.parametrize("entry", [-2, -(2**31), 80, 2**31 - 1])
def test_entries_out_of_range(backend, entry, mode):
    nmap = random_map(8, 100, 80)
    tamed, nmap[7, 99] = nmap.copy(), entry
    tamed[7, 99] = -1
    rng = np.random.default_rng(0)
    feats, grad_out = (scenes.values(rng, (80, 16), "float32", one_sign=True) for _ in range(2))
    expected, chosen, count = reference.pool(feats, tamed, mode)
    back, chosen_back, count_back = reference.pool(np.ones((100, 16), np.float32), transpose(tamed, 80), mode)
    by_products = {"max": (chosen_back, None), "mean": (None, count_back), "sum": (None, None)}[mode]
    if backend.name == "cpu":
        with pytest.raises(ValueError, match=rf"map: entry \(7, 99\) is {entry}"):
            guarded.pool(backend, feats, nmap, mode)
        with pytest.raises(ValueError, match=rf"map: entry \(7, 99\) is {entry}"):
            guarded.pool_backward(backend, grad_out, nmap, mode, *by_products)
        return
    judge(guarded.pool(backend, feats, nmap, mode)[0], expected, "float32")
    judge(guarded.pool(backend, feats, nmap, mode, fence=False)[0], expected, "float32")  # nothing lies behind feats
    got = guarded.pool_backward(backend, grad_out, nmap, mode, *by_products)
    expected = reference.pool_backward(grad_out, transpose(tamed, 80), 100, mode, chosen_back, count_back)
    judge(got, expected, "float32")


@every_dtype
@every_mode
def test_the_same_input_gives_the_same_bits_on_either_backend(backend, mode, dtype):
    """Sums are in the order of offsets, so that the CPU's are the GPU's."""
    nmap = random_map(27, 300, 250, share=0.9)
    feats = scenes.values(np.random.default_rng(0), (250, 33), dtype)
    first = guarded.pool(Host(), feats, nmap, mode)
    for _ in range(2):
        for again, before in zip(guarded.pool(backend, feats, nmap, mode), first, strict=True):
            assert_same_bits(again, before)


# ---- the public functions ----


def problem(n=300, channels=24, dtype="float32", size=2, stride=2, batch=3):
    coords, shape = scenes.scene(n, batch=batch)
    rng = np.random.default_rng(0)
    how = (size,) * 3, (stride,) * 3, ((size - 1) // 2,) * 3, (1, 1, 1)
    to_shape = reference.out_shape(shape, *how)
    sites = reference.conv_sites(coords, shape, to_shape, *how)
    nmap = reference.sparse_map(coords, shape, sites, to_shape, *how)
    feats, grad_out = (scenes.values(rng, (rows, channels), dtype, one_sign=True) for rows in (n, len(sites)))
    return coords, shape, nmap, feats, grad_out


def made(backend, coords, shape, size, stride, **how):
    return flexgemm.sparse_conv_map(backend.array(coords), shape, size, stride, (size - 1) // 2, **how)


@every_dtype
@every_mode
@pytest.mark.parametrize("size", [2, 3])
def test_pooling_of_voxels(backend, size, mode, dtype):
    coords, shape, nmap, feats, grad_out = problem(size=size, dtype=dtype)
    over = {"neighbor_map": made(backend, coords, shape, size, 2), "mode": mode}
    out = flexgemm.sparse_pool3d(backend.array(feats), **over)
    expected, chosen, count = reference.pool(feats, nmap, mode)
    judge(backend.numpy(out), expected, dtype)
    grad_feats = flexgemm.sparse_pool3d_backward(backend.array(grad_out), backend.array(feats), **over)
    judge(backend.numpy(grad_feats), reference.pool_backward(grad_out, nmap, 300, mode, chosen, count), dtype)


@every_mode
@pytest.mark.parametrize("size", [2, 3])
def test_pooling_in_place(backend, size, mode):
    """Over a submanifold map, whose gradient uses the map itself where the kernel is odd."""
    coords, shape = scenes.scene(200)
    nmap = reference.neighbor_map(coords, shape, (size,) * 3)
    rng = np.random.default_rng(0)
    feats, grad_out = (scenes.values(rng, (200, 8), "float32", one_sign=True) for _ in range(2))
    over = {"neighbor_map": flexgemm.neighbor_map(backend.array(coords), shape, size), "mode": mode}
    expected, chosen, count = reference.pool(feats, nmap, mode)
    judge(backend.numpy(flexgemm.sparse_pool3d(backend.array(feats), **over)), expected, "float32")
    got = flexgemm.sparse_pool3d_backward(backend.array(grad_out), backend.array(feats), **over)
    judge(backend.numpy(got), reference.pool_backward(grad_out, nmap, 200, mode, chosen, count), "float32")


def test_the_maximum_is_taken_by_default(backend):
    coords, shape, nmap, feats, grad_out = problem()
    over = {"neighbor_map": made(backend, coords, shape, 2, 2)}
    expected, chosen, count = reference.pool(feats, nmap, "max")
    judge(backend.numpy(flexgemm.sparse_pool3d(backend.array(feats), **over)), expected, "float32")
    grad_feats = flexgemm.sparse_pool3d_backward(backend.array(grad_out), backend.array(feats), **over)
    judge(backend.numpy(grad_feats), reference.pool_backward(grad_out, nmap, 300, "max", chosen, count), "float32")


@every_dtype
def test_upsampling(backend, dtype):
    coords, shape, nmap, _, coarse = problem(dtype=dtype)
    pool_map = made(backend, coords, shape, 2, 2)
    fine = backend.numpy(flexgemm.sparse_upsample3d(backend.array(coarse), neighbor_map=pool_map))
    parent = transpose(nmap, len(coords)).max(axis=0)
    assert_same_bits(fine, np.where((parent >= 0)[:, None], coarse[parent], 0).astype(coarse.dtype))
    assert (parent >= 0).sum() > 200


def test_upsampling_needs_cells_side_by_side(backend):
    coords, shape, _, feats, _ = problem()
    array = backend.array(coords)
    for wrong in (
        flexgemm.sparse_conv_map(array, shape, 3, 2, 1),
        flexgemm.sparse_conv_map(array, shape, 2, 2, 0, 2),
        flexgemm.sparse_conv_map(array, shape, 2, 2, transposed=True),
        flexgemm.neighbor_map(array, shape, 1),
    ):
        with pytest.raises(ValueError, match="^neighbor_map: "):
            flexgemm.sparse_upsample3d(backend.array(feats), neighbor_map=wrong)


# ---- over samples ----


@pytest.mark.parametrize("n", [0, 1, 300])
def test_samples_of_rows(backend, n):
    coords = np.random.default_rng(0).integers(0, 7, (n, 4)).astype(np.int32)
    np.testing.assert_array_equal(guarded.batch_indices(backend, coords, 7), coords[:, :1])


def test_rows_of_no_sample(backend):
    coords = np.array([[b, 0, 0, 0] for b in (1, -1, 0, 3, 1, 2**31 - 1, -(2**31))], np.int32)
    feats = np.arange(56, dtype=np.float32).reshape(7, 8)
    if backend.name == "cpu":
        for row in (1, 3, 5, 6):
            with pytest.raises(ValueError, match=f"coords: row 2 is of sample {coords[row, 0]}, expected 0 to 2"):
                guarded.batch_indices(backend, coords[[0, 2, row]], 3)
        return
    assert guarded.batch_indices(backend, coords, 3)[:, 0].tolist() == [1, -1, 0, -1, 1, -1, -1]
    out = backend.numpy(flexgemm.global_pool(*map(backend.array, (feats, coords)), 3, "sum"))
    np.testing.assert_array_equal(out, [feats[2], feats[0] + feats[4], np.zeros(8)])
    grad_out = backend.array(np.ones((3, 8), np.float32))
    got = flexgemm.global_pool_backward(grad_out, *map(backend.array, (feats, coords)), "mean")
    np.testing.assert_array_equal(backend.numpy(got)[:, 0], [0.5, 0, 1, 0, 0.5, 0, 0])


@every_dtype
@every_mode
@pytest.mark.parametrize("channels", [1, 8, 33, 100])
@pytest.mark.parametrize("n, samples", [(0, 2), (1, 1), (300, 1), (300, 40), (3000, 3)])
def test_global_pooling(backend, n, samples, channels, mode, dtype):
    rng = np.random.default_rng(0)
    feats = scenes.values(rng, (n, channels), dtype, one_sign=mode != "max")
    grad_out = scenes.values(rng, (samples, channels), dtype, one_sign=True)
    coords = rng.integers(0, samples, (n, 4)).astype(np.int32)
    coords[coords[:, 0] == 1, 0] = 0  # a sample without rows
    nmap = reference.batch_map(coords[:, 0], samples)
    expected, chosen, count = reference.pool(feats, nmap, mode)
    x, c = backend.array(feats), backend.array(coords)
    out = backend.numpy(flexgemm.global_pool(x, c, samples, mode))
    assert_rows(out, expected, max(verdicts.ROW_TOLERANCE[dtype], 1e-5))
    got = backend.numpy(flexgemm.global_pool_backward(backend.array(grad_out), x, c, mode))
    judge(got, reference.pool_backward(grad_out, nmap, n, mode, chosen, count), dtype, "grad_feats")


@pytest.mark.parametrize("mode", ["mean", "sum"])
def test_sums_of_many_rows_keep_their_digits(backend, mode):
    """Added one after the other a million float32 numbers lose a hundredth of their sum."""
    n = 2**20 + 77
    feats = np.random.default_rng(0).uniform(99, 101, (n, 2)).astype(np.float32)
    out = flexgemm.global_pool(backend.array(feats), backend.array(np.zeros((n, 4), np.int32)), 1, mode)
    expected = reference.f64(feats).mean(0) if mode == "mean" else reference.f64(feats).sum(0)
    np.testing.assert_allclose(backend.numpy(out)[0], expected, rtol=1e-6)


def test_the_gradient_of_global_maxima_goes_to_the_first_row(backend):
    rng = np.random.default_rng(0)
    feats = rng.choice(np.array([np.nan, -np.inf, 1, 2], np.float32), (3000, 40), p=[0.001, 0.5, 0.299, 0.2])
    coords = rng.integers(0, 4, (3000, 4)).astype(np.int32)
    expected, chosen, count = reference.pool(feats, reference.batch_map(coords[:, 0], 4), "max")
    x, c = backend.array(feats), backend.array(coords)
    assert_same_bits(backend.numpy(flexgemm.global_pool(x, c, 4)), expected.astype(np.float32))
    grad_out = np.ones((4, 40), np.float32)
    got = backend.numpy(flexgemm.global_pool_backward(backend.array(grad_out), x, c))
    where = np.zeros((3000, 40))
    where[chosen, np.arange(40)] = 1
    np.testing.assert_array_equal(got, where)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("n, channels", [(0, 4), (1, 1), (130, 7), (130, 64)])
def test_rows_of_samples(backend, n, channels, dtype):
    rng = np.random.default_rng(0)
    coords = rng.integers(0, 3, (n, 4)).astype(np.int32)
    values = scenes.values(rng, (3, channels), dtype)
    out = flexgemm.broadcast_samples(*map(backend.array, (values, coords)))
    assert_same_bits(backend.numpy(out), values[coords[:, 0]])
    coords[: n // 2, 0] = 7
    if n > 1 and backend.name == "cpu":
        with pytest.raises(ValueError, match="coords"):
            flexgemm.broadcast_samples(*map(backend.array, (values, coords)))
    elif n > 1:
        out = backend.numpy(flexgemm.broadcast_samples(*map(backend.array, (values, coords))))
        assert not out[: n // 2].any()
        assert_same_bits(out[n // 2 :], values[coords[n // 2 :, 0]])
    with pytest.raises(ValueError, match="values"):
        flexgemm.broadcast_samples(backend.array(values[0]), backend.array(coords))


@every_mode
def test_global_pooling_of_voxels(backend, mode):
    coords, _, _, feats, _ = problem(batch=3)
    nmap = reference.batch_map(coords[:, 0], 4)
    expected, chosen, count = reference.pool(feats, nmap, mode)
    x, c = backend.array(feats), backend.array(coords)
    judge(backend.numpy(flexgemm.global_pool(x, c, 4, mode)), expected, "float32")
    grad_out = scenes.values(np.random.default_rng(1), (4, 24), "float32", one_sign=True)
    got = flexgemm.global_pool_backward(backend.array(grad_out), x, c, mode)
    judge(backend.numpy(got), reference.pool_backward(grad_out, nmap, 300, mode, chosen, count), "float32")


@every_mode
def test_numpy_arrays_on_a_gpu(cuda, mode):
    coords, shape, nmap, feats, grad_out = problem()
    over = {"neighbor_map": flexgemm.sparse_conv_map(coords, shape, 2, 2, device="cuda"), "mode": mode}
    expected, chosen, count = reference.pool(feats, nmap, mode)
    judge(flexgemm.sparse_pool3d(feats, **over), expected, "float32")
    grad_feats = flexgemm.sparse_pool3d_backward(grad_out, feats, **over)
    judge(grad_feats, reference.pool_backward(grad_out, nmap, 300, mode, chosen, count), "float32")
    assert flexgemm.sparse_upsample3d(grad_out, neighbor_map=over["neighbor_map"]).shape == feats.shape
    samples = reference.batch_map(coords[:, 0], 3)
    expected, chosen, count = reference.pool(feats, samples, mode)
    judge(flexgemm.global_pool(feats, coords, 3, mode, device="cuda"), expected, "float32")
    got = flexgemm.global_pool_backward(expected.astype(np.float32), feats, coords, mode, device="cuda")
    judge(got, reference.pool_backward(expected, samples, 300, mode, chosen, count), "float32")


# ---- invariants ----


@given(st.integers(1, 30), st.integers(1, 40), st.sampled_from(MODES), st.integers(0, 2**32 - 1))
def test_the_gradient_is_the_adjoint(backend, rows, columns, mode, seed):
    """<pool(x), g> = <x, gradient(g)> for what is linear, and for a maximum around x."""
    nmap = random_map(8, columns, rows, seed=seed)
    rng = np.random.default_rng(seed)
    feats, grad_out = (scenes.values(rng, (n, 5), "float32") for n in (rows, columns))
    out, *by_products = guarded.pool(backend, feats, nmap, mode)
    given = {"max": (by_products[0], None), "mean": (None, by_products[-1]), "sum": (None, None)}[mode]
    grad_feats = guarded.pool_backward(backend, grad_out, transpose(nmap, rows), mode, *given)
    left, right = f64(out) * f64(grad_out), f64(feats) * f64(grad_feats)
    assert abs(left.sum() - right.sum()) <= 1e-5 * (abs(left).sum() + abs(right).sum() + 1e-3)


# ---- faults ----


@pytest.mark.parametrize("function", [flexgemm.sparse_pool3d, flexgemm.sparse_upsample3d])
def test_shapes_that_do_not_match_the_map(backend, function):
    coords, shape, _, feats, _ = problem()
    nmap = made(backend, coords, shape, 2, 2)
    with pytest.raises(ValueError, match="^feats: expected"):
        function(backend.array(np.zeros((7, 8), np.float32)), neighbor_map=nmap)
    with pytest.raises(TypeError, match="^neighbor_map: "):
        function(backend.array(feats), neighbor_map=coords)


def test_impossible_arguments_are_named(backend):
    coords, shape, _, feats, grad_out = problem()
    x, c, nmap = backend.array(feats), backend.array(coords), made(backend, coords, shape, 2, 2)
    with pytest.raises(ValueError, match="^mode: "):
        flexgemm.sparse_pool3d(x, neighbor_map=nmap, mode="min")
    with pytest.raises(ValueError, match="^grad_out: "):
        flexgemm.sparse_pool3d_backward(x, x, neighbor_map=nmap)
    for wrong in (0, -1, 1.5, None, 2**31 - 1, 2**70):
        with pytest.raises(ValueError, match="^batch_size: "):
            flexgemm.global_pool(x, c, wrong)
    with pytest.raises(ValueError, match="^feats: "):
        flexgemm.global_pool(backend.array(grad_out), c, 3)
    with pytest.raises(ValueError, match="^coords: "):
        flexgemm.global_pool(x, backend.array(coords[:, :3].copy()), 3)
    with pytest.raises(TypeError, match="^feats: "):
        flexgemm.sparse_pool3d(c, neighbor_map=flexgemm.neighbor_map(c, shape))
    for wrong in ((), (8,), (0, 8)):
        with pytest.raises(ValueError, match=r"^grad_out: expected \(B, C\) of at least one sample, got"):
            flexgemm.global_pool_backward(backend.array(np.zeros(wrong, np.float32)), x, c)
    for wrong in (None, [[1.0] * 8]):
        with pytest.raises(TypeError, match="^grad_out: "):
            flexgemm.global_pool_backward(wrong, x, c)


def test_arrays_of_another_dtype_are_named(backend):
    coords, shape, _, feats, grad_out = problem()
    c, nmap = backend.array(coords), made(backend, coords, shape, 2, 2)
    whole, half = (backend.array(feats.astype(dtype)) for dtype in (np.int32, np.float16))
    samples, whole_samples = (backend.array(np.zeros((3, feats.shape[1]), dtype)) for dtype in (np.float32, np.int32))
    for name, call in (
        ("feats", lambda: flexgemm.global_pool(whole, c, 3)),
        ("values", lambda: flexgemm.broadcast_samples(whole_samples, c)),
        ("feats", lambda: flexgemm.global_pool_backward(samples, whole, c)),
        ("grad_out", lambda: flexgemm.global_pool_backward(samples, half, c)),
        ("grad_out", lambda: flexgemm.sparse_pool3d_backward(backend.array(grad_out), half, neighbor_map=nmap)),
    ):
        with pytest.raises(TypeError, match=f"^{name}: expected dtype float.* got"):
            call()
