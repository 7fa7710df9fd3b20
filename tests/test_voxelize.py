"""From points to voxels and back, against dictionaries and loops."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
import scenes
from calls import place
from hypothesis import given
from hypothesis import strategies as st
from verdicts import ROW_TOLERANCE, assert_rows

import flexgemm
from flexgemm import _C

SHAPE = (2, 6, 5, 7)
REDUCTIONS = ["mean", "sum", "max", "first"]
COUNTS = [0, 1, 2, 63, 64, 65, 257, 2000]


def cloud(n, *, columns=4, seed=0, reach=9.0):
    """Points in and around the grid, some on the faces of voxels and some that are no numbers."""
    rng = np.random.default_rng(seed)
    points = rng.uniform(-1, reach, (n, 4)).astype(np.float32)
    points[:, 0] = rng.integers(-1, 4, n)
    points[::7, 1:] = np.round(points[::7, 1:])
    special = [[0, np.nan, 1, 1], [np.nan, 1, 1, 1], [0, 1, np.inf, 1], [0, 1, 1, -np.inf], [0, -0.0, 1, 1]]
    points[: len(special)] = np.array(special, np.float32).reshape(-1, 4)[:n]
    return np.ascontiguousarray(points[:, 4 - columns :])


# ---- distinct voxels ----


@pytest.mark.parametrize("n", COUNTS)
def test_distinct_voxels(backend, n):
    rng = np.random.default_rng(0)
    coords = np.stack([rng.integers(0, s, n) for s in SHAPE], axis=1).astype(np.int32)
    unique, inverse, counts = map(backend.numpy, flexgemm.unique_coords(backend.array(coords), SHAPE))
    expected = reference.unique_coords(coords)
    for got, want in zip((unique, inverse, counts), expected, strict=True):
        np.testing.assert_array_equal(got, want, strict=True)
    if n:
        np.testing.assert_array_equal(unique[inverse], coords)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2**8, 2**8, 2**8, 2**8), (2, 2**20, 2**20, 2**20)])
def test_grids_of_any_size(backend, shape):
    """One voxel; 2^32 of them, whose last has the number that marks no voxel in 32 bits; numbers of 61 bits."""
    corner = np.array(shape, np.int64) - 1
    coords = np.array([corner, [0, 0, 0, 0], corner, corner // 2, [0, 0, 0, 0]], np.int32)
    unique, inverse, counts = map(backend.numpy, flexgemm.unique_coords(backend.array(coords), shape))
    for got, want in zip((unique, inverse, counts), reference.unique_coords(coords), strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_last_voxel_where_floats_are_two_apart(backend):
    """2^24 + 1 voxels along an axis: no float32 is that many, but the last voxel's number is one."""
    points = np.array([[2**24, 0, 0], [2**24 + 2, 0, 0], [1, 0, 0]], np.float32)
    voxels = flexgemm.voxelize(backend.array(points), voxel_size=1, shape=(1, 2**24 + 1, 1, 1))
    assert backend.numpy(voxels.coords).tolist() == [[0, 1, 0, 0], [0, 2**24, 0, 0]]
    assert backend.numpy(voxels.inverse).tolist() == [1, -1, 0]


def test_rows_outside_the_shape(backend):
    coords = np.array([[0, 1, 1, 1], [0, 6, 0, 0], [0, 1, 1, 1], [-1, 0, 0, 0], [1, 0, 0, 0]], np.int32)
    if backend.name == "cpu":
        with pytest.raises(ValueError, match="coords: row 1 is"):
            flexgemm.unique_coords(coords, SHAPE)
        return
    unique, inverse, counts = map(backend.numpy, flexgemm.unique_coords(backend.array(coords), SHAPE))
    np.testing.assert_array_equal(unique, [[0, 1, 1, 1], [1, 0, 0, 0]])
    np.testing.assert_array_equal(inverse, [0, -1, 0, -1, 1])
    np.testing.assert_array_equal(counts, [2, 1])


@given(st.integers(0, 300), st.integers(0, 2**32 - 1))
def test_permuting_the_rows_permutes_the_inverse(backend, n, seed):
    rng = np.random.default_rng(seed)
    coords = np.stack([rng.integers(0, s, n) for s in (2, 3, 4, 2)], axis=1).astype(np.int32)
    shuffle = rng.permutation(n)
    first, second = (
        list(map(backend.numpy, flexgemm.unique_coords(backend.array(c), (2, 3, 4, 2))))
        for c in (coords, coords[shuffle])
    )
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1][shuffle], second[1])
    np.testing.assert_array_equal(first[2], second[2])
    assert first[2].sum() == n


# ---- voxels of points ----


@pytest.mark.parametrize("voxel_size", ["123", ("1", 2, 3), (1, 2), None, 0])
def test_impossible_voxel_sizes_are_named(backend, voxel_size):
    points = backend.array(np.zeros((3, 3), np.float32))
    with pytest.raises((TypeError, ValueError), match="^voxel_size: expected "):
        flexgemm.voxelize(points, voxel_size=voxel_size, shape=SHAPE)


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("columns", [3, 4])
@pytest.mark.parametrize("voxel_size, origin", [(1.0, 0.0), ((0.5, 1.25, 2), (1, -0.5, 0.25)), (0.3, 3)])
def test_voxels_of_points(backend, n, columns, voxel_size, origin):
    points = cloud(n, columns=columns)
    voxels = flexgemm.voxelize(backend.array(points), voxel_size=voxel_size, shape=SHAPE, origin=origin)
    expected = reference.unique_coords(reference.voxel_of(points, voxel_size, origin, SHAPE))
    for got, want in zip((voxels.coords, voxels.inverse, voxels.counts), expected, strict=True):
        np.testing.assert_array_equal(backend.numpy(got), want, strict=True)
    assert (voxels.num_points, voxels.num_voxels) == (n, len(expected[0]))
    assert voxels.feats is None


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_codes_and_places(backend, dtype):
    points = cloud(100)
    how = {"voxel_size": (0.5, 1.25, 2), "origin": (1, -0.5, 0.25), "shape": SHAPE}
    coords = reference.voxel_of(points, how["voxel_size"], how["origin"], SHAPE)
    code, places = guarded.voxel_codes(backend, points, dtype, **how)
    np.testing.assert_array_equal(code, [reference.code_of(c, SHAPE, "bxyz") if c[0] >= 0 else -1 for c in coords])
    there = coords[:, 0] >= 0
    np.testing.assert_array_equal(np.floor(places[there]), coords[there])
    np.testing.assert_array_equal(guarded.voxel_codes(backend, points, dtype, with_places=False, **how), code)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("n, channels", [(0, 5), (1, 8), (700, 33), (3000, 64)])
def test_features_of_points_in_voxels(backend, n, channels, reduce, dtype):
    points = cloud(n)
    feats = scenes.values(np.random.default_rng(1), (n, channels), dtype, one_sign=True)
    voxels = flexgemm.voxelize(backend.array(points), backend.array(feats), voxel_size=1.5, shape=SHAPE, reduce=reduce)
    inverse = backend.numpy(voxels.inverse)
    expected = reference.reduce_points(feats, inverse, voxels.num_voxels, reduce)
    got = backend.numpy(voxels.feats)
    assert str(got.dtype) == dtype
    assert_rows(got, expected, ROW_TOLERANCE[dtype])
    if reduce in ("first", "max"):
        np.testing.assert_array_equal(reference.f64(got), expected)
    again = backend.numpy(flexgemm.reduce_points(backend.array(feats), voxels, reduce))
    np.testing.assert_array_equal(again, got)


def test_a_voxel_that_holds_every_point(backend):
    """5,000 points in one voxel: more than a GPU reduces at once."""
    rng = np.random.default_rng(0)
    points, feats = rng.random((5000, 3), dtype=np.float32), scenes.values(rng, (5000, 40), "float32", one_sign=True)
    for reduce in REDUCTIONS:
        voxels = flexgemm.voxelize(
            backend.array(points), backend.array(feats), voxel_size=1, shape=(1, 2, 2, 2), reduce=reduce
        )
        expected = reference.reduce_points(feats, np.zeros(5000, np.int32), 1, reduce)
        assert_rows(backend.numpy(voxels.feats), expected, 1e-5)


# ---- and back ----


@pytest.mark.parametrize("n", [0, 1, 500])
def test_points_get_the_features_of_their_voxel(backend, n):
    points = cloud(n)
    voxels = flexgemm.voxelize(backend.array(points), voxel_size=1, shape=SHAPE)
    feats = scenes.values(np.random.default_rng(1), (voxels.num_voxels, 9), "float32")
    out = backend.numpy(flexgemm.devoxelize(backend.array(feats), voxels))
    inverse = backend.numpy(voxels.inverse)[:, None]
    np.testing.assert_array_equal(out, reference.gather_sum(feats, inverse))


def test_points_get_the_mean_of_the_voxels_around_them(backend):
    points = cloud(500)
    voxels = flexgemm.voxelize(backend.array(points), voxel_size=2, shape=SHAPE, origin=0.5)
    feats = scenes.values(np.random.default_rng(1), (voxels.num_voxels, 9), "float32", one_sign=True)
    out = backend.numpy(flexgemm.devoxelize(backend.array(feats), voxels, "trilinear"))
    places = points[:, 1:] / np.float32(2) - np.float32(0.5)
    for sample in np.unique(points[:, 0]):
        own, coords = points[:, 0] == sample, backend.numpy(voxels.coords).copy()
        coords[:, 0] = np.where(coords[:, 0] == sample, 0, -1)
        around = reference.sample_map(coords, SHAPE, places[None, own], "trilinear")
        assert_rows(out[own], reference.gather_sum(feats, *around), 1e-6)
    twice = backend.numpy(flexgemm.devoxelize(backend.array(feats), voxels, "trilinear"))
    np.testing.assert_array_equal(twice, out)


def test_what_was_given_to_every_point_comes_back(backend):
    points = cloud(500)
    voxels = flexgemm.voxelize(backend.array(points), voxel_size=1, shape=SHAPE)
    feats = scenes.values(np.random.default_rng(1), (voxels.num_voxels, 9), "float32")
    spread = flexgemm.devoxelize(backend.array(feats), voxels)
    for reduce in ("mean", "max", "first"):
        back = backend.numpy(flexgemm.reduce_points(spread, voxels, reduce))
        np.testing.assert_allclose(back, feats, rtol=1e-6)


def test_numpy_points_on_a_gpu(cuda):
    points, feats = cloud(300), scenes.values(np.random.default_rng(1), (300, 8), "float32", one_sign=True)
    here = flexgemm.voxelize(points, feats, voxel_size=1, shape=SHAPE)
    there = flexgemm.voxelize(points, feats, voxel_size=1, shape=SHAPE, device="cuda")
    for name in ("coords", "inverse", "counts"):
        assert isinstance(getattr(there, name), np.ndarray)
        np.testing.assert_array_equal(getattr(there, name), getattr(here, name))
    for mode in ("nearest", "trilinear"):
        first, second = (flexgemm.devoxelize(v.feats, v, mode) for v in (here, there))
        assert isinstance(second, np.ndarray)
        assert_rows(second, first.astype(np.float64), 1e-6)


# ---- faults ----


@pytest.mark.parametrize(
    "argument, wrong, error",
    [
        ("points", np.zeros((5, 2), np.float32), ValueError),
        ("points", np.zeros(5, np.float32), ValueError),
        ("points", np.zeros((5, 3), np.int32), TypeError),
        ("feats", np.zeros((4, 6), np.float32), ValueError),
        ("feats", np.zeros((5, 6), np.int32), TypeError),
        ("voxel_size", 0, ValueError),
        ("voxel_size", (1, -1, 1), ValueError),
        ("voxel_size", (1, 1), ValueError),
        ("voxel_size", float("nan"), ValueError),
        ("voxel_size", 1e300, ValueError),
        ("voxel_size", "small", ValueError),
        ("origin", float("inf"), ValueError),
        ("shape", (1, 2, 3), ValueError),
        ("shape", (2**31, 2**31, 2**31, 1), ValueError),
        ("reduce", "median", ValueError),
    ],
)
def test_impossible_arguments_are_named(backend, argument, wrong, error):
    given = {"points": np.zeros((5, 3), np.float32), "feats": np.zeros((5, 6), np.float32), "voxel_size": 1.0}
    given |= {"shape": SHAPE, argument: wrong}
    with pytest.raises(error, match=f"^{argument}: "):
        flexgemm.voxelize(**place(backend, given))


def test_features_of_other_voxels(backend):
    voxels = flexgemm.voxelize(backend.array(cloud(50)), voxel_size=1, shape=SHAPE)
    wrong = backend.array(np.zeros((voxels.num_voxels + 1, 3), np.float32))
    for mode in ("nearest", "trilinear"):
        with pytest.raises(ValueError, match="feats"):
            flexgemm.devoxelize(wrong, voxels, mode)
    with pytest.raises(ValueError, match="mode"):
        flexgemm.devoxelize(wrong, voxels, "cubic")
    with pytest.raises(TypeError, match="voxels"):
        flexgemm.devoxelize(wrong, wrong)


def test_ranks_and_orders_that_do_not_fit(backend):
    """On a GPU they write nothing outside, which the fences prove; on the CPU they raise."""
    in_order, order = np.array([1, 1, 4, 9]), np.array([0, 1, 2, 3], np.int32)
    for ranks, rows, voxels in (
        ([1, 1, 2, 9], order, 3),
        ([-5, 1, 2, 3], order, 3),
        ([1, 1, 2, 3], np.array([0, 1, 2, 4], np.int32), 3),
        ([1, 1, 2, 3], np.array([0, 1, 2, -1], np.int32), 3),
        ([1, 1, 2, 3], order, 2),
        ([1, 1, 2, 3], order, 4),
    ):
        ranks = np.array(ranks, np.int32)
        if backend.name == "cpu":
            with pytest.raises(ValueError, match="ranks|order"):
                guarded.unique_groups(backend, in_order, rows, ranks, voxels)
        else:
            guarded.unique_groups(backend, in_order, rows, ranks, voxels)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("n", [0, 5])
def test_points_outside_make_no_voxel(backend, n, dtype):
    in_order, order = np.full(n, -1, dtype), np.arange(n, dtype=np.int32)
    ranks, count = guarded.unique_ranks(backend, in_order)
    assert (count.tolist(), ranks.tolist()) == ([0], [0] * n)
    _, starts, _, _, inverse = guarded.unique_groups(backend, in_order, order, ranks, 0)
    assert (starts.tolist(), inverse.tolist()) == ([0], [-1] * n)


def test_a_batch_just_below_0_is_none(backend):
    points = backend.array(np.array([[-0.5, 2.5, 2.5, 2.5]], np.float32))
    assert flexgemm.voxelize(points, voxel_size=1.0, shape=(1, 8, 8, 8)).num_voxels == 0


def test_a_reduction_is_checked_without_features_too(backend):
    points = backend.array(np.zeros((1, 3), np.float32))
    with pytest.raises(ValueError, match="^reduce: expected 'mean', 'sum', 'max' or 'first', got 'avg'$"):
        flexgemm.voxelize(points, voxel_size=1.0, shape=(1, 8, 8, 8), reduce="avg")


@pytest.mark.parametrize("name", ["voxel_size", "origin"])
def test_the_extension_takes_a_number_for_each_axis(name):
    how = {"shape": (1, 8, 8, 8), "voxel_size": (1.0,) * 3, "origin": (0.0,) * 3}
    for count in (2, 4):
        with pytest.raises(ValueError, match=f"^{name}: expected 3 floats, got {count}$"):
            _C.voxel_codes(np.zeros((1, 3), np.float32), np.zeros(1, np.int32), None, **how | {name: (1.0,) * count})
