"""Sampling of sparse voxels at points, forward and backward, against loops over a dictionary of voxels.

Points are multiples of 1/1024 in small grids, so that the oracle and the kernels see the same cell and fractions.
"""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
import scenes
from hypothesis import given
from hypothesis import strategies as st
from verdicts import ROW_TOLERANCE, assert_rows, assert_same_bits

import flexgemm

MODES = ["trilinear", "nearest"]
DTYPES = ["float32", "float16", "bfloat16"]
CHANNELS = [1, 7, 8, 13, 33, 64, 97, 300]


def points(rng, shape, count, *, margin=1.5):
    """(B, count, 3) points in and around the grid; the first ones are corners, centres and no numbers."""
    low, high = -margin, np.array(shape[1:]) + margin
    grid = np.floor(rng.uniform(low, high, (shape[0], count, 3)) * 1024) / 1024
    special = [[0, 0, 0], [0.5, 0.5, 0.5], shape[1:], [np.nan, 1, 1], [1, np.inf, 1], [1, 1, -np.inf], [1e30, 1, 1],
               [-0.25, 0.25, 0.25], [-1, 1, 1], [-0.5, 0.5, 0.5]]  # fmt: skip
    if count:
        grid[:, : len(special)] = special[:count]
    return grid.astype(np.float32)


def problem(n, count, channels, dtype, *, batch=2, density=0.4, seed=0, one_sign=True):
    rng = np.random.default_rng(seed)
    coords, shape = scenes.scene(n, batch=batch, density=density, seed=seed)
    grid = points(rng, shape, count)
    return coords, shape, grid, scenes.values(rng, (n, channels), dtype, one_sign=one_sign)


# ---- which voxels, and their weights ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n, count", [(0, 20), (1, 40), (300, 0), (300, 1), (300, 127), (500, 1025)])
def test_voxels_around_points(backend, n, count, mode):
    coords, shape, grid, _ = problem(n, count, 1, "float32")
    got = guarded.sample_map(backend, grid, coords, shape, mode)
    indices, weights = reference.sample_map(coords, shape, grid, mode)
    np.testing.assert_array_equal(got[0] if mode == "trilinear" else got, indices)
    if mode == "trilinear":
        np.testing.assert_allclose(got[1], weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("offset", [1, 2])
def test_maps_of_any_alignment(backend, offset, mode):
    coords, shape, grid, _ = problem(300, 40, 1, "float32")
    for got, expected in zip(
        guarded.sample_map(backend, grid, coords, shape, mode, offset=offset),
        guarded.sample_map(backend, grid, coords, shape, mode),
        strict=True,
    ):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("shifted", ["indices", "weights"])
def test_one_array_of_a_map_off_alignment(backend, shifted):
    coords, shape, grid, _ = problem(300, 65, 8, "float32")
    call = guarded.Call(backend, offset=1)
    given = call.give(grid), call.give(coords)
    kinds = (("indices", "int32"), ("weights", "float32"))
    outputs = [call.take((130, 8), dtype, strided=shifted == name) for name, dtype in kinds]
    got = call.run("sample_map", *given, *outputs, shape=shape)
    for own, expected in zip(got, guarded.sample_map(backend, grid, coords, shape, "trilinear"), strict=True):
        assert_same_bits(own, expected)


@pytest.mark.parametrize("mode", MODES)
def test_voxels_at_the_far_corner(backend, mode):
    shape = (2, 2**20, 2**20, 2**20)
    coords = scenes.far_corner(300, shape)
    rng = np.random.default_rng(0)
    near = np.array(shape[1:]) - rng.integers(-1, 12, (2, 200, 3)) + rng.choice([0, 0.25, 0.5, 0.75], (2, 200, 3))
    grid = near.astype(np.float32)
    got = guarded.sample_map(backend, grid, coords, shape, mode)
    indices, weights = reference.sample_map(coords, shape, grid, mode)
    assert (indices >= 0).any()
    np.testing.assert_array_equal(got[0] if mode == "trilinear" else got, indices)
    if mode == "trilinear":
        np.testing.assert_allclose(got[1], weights, rtol=1e-6, atol=0)


# ---- forward ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("mode", MODES)
def test_samples(backend, mode, channels, dtype):
    coords, shape, grid, feats = problem(300, 65, channels, dtype)
    arrays = map(backend.array, (feats, coords))
    out = backend.numpy(flexgemm.grid_sample_3d(*arrays, shape, backend.array(grid), mode))
    assert out.shape == (2, 65, channels) and str(out.dtype) == dtype
    expected = reference.gather_sum(feats, *reference.sample_map(coords, shape, grid, mode))
    assert_rows(out.reshape(-1, channels), expected, ROW_TOLERANCE[dtype])


@pytest.mark.parametrize("mode", MODES)
def test_no_voxels_and_no_points(backend, mode):
    for n, count in ((0, 5), (5, 0), (0, 0)):
        coords, shape, grid, feats = problem(n, count, 6, "float32")
        arrays = map(backend.array, (feats, coords))
        out = backend.numpy(flexgemm.grid_sample_3d(*arrays, shape, backend.array(grid), mode))
        np.testing.assert_array_equal(out, np.zeros((2, count, 6)))


def test_a_point_at_a_centre_is_the_voxel(backend):
    coords, shape, _, feats = problem(200, 0, 16, "float32", batch=1)
    grid = (coords[None, :, 1:] + 0.5).astype(np.float32)
    for mode in MODES:
        arrays = map(backend.array, (feats, coords))
        out = backend.numpy(flexgemm.grid_sample_3d(*arrays, shape, backend.array(grid), mode))
        np.testing.assert_array_equal(out[0], feats)


def test_a_voxel_that_is_not_there_takes_no_weight(backend):
    coords = np.array([[0, 1, 1, 1]], np.int32)
    grid = np.array([[[1.0, 1.0, 1.0], [2.4, 1.2, 0.6], [2.6, 1.5, 1.5]]], np.float32)
    out = flexgemm.grid_sample_3d(
        backend.array(np.array([[3.0]], np.float32)), backend.array(coords), (1, 4, 4, 4), backend.array(grid)
    )
    np.testing.assert_array_equal(backend.numpy(out).ravel(), [3, 3, 0])


@pytest.mark.parametrize("layout", [{"pad": 1}, {"offset": 1}])
@pytest.mark.parametrize("operation, apart", [
    ("gather_sum", "feats"), ("gather_sum", "out"), ("sample_forward", "feats"), ("sample_forward", "out"),
    ("group_reduce", "src"), ("group_reduce", "out"),
])  # fmt: skip
def test_one_array_of_rows_off_alignment(backend, operation, apart, layout):
    """Changes no bit: what reads and writes 16 bytes at a time has to look at both ends."""
    coords, shape, grid, feats = problem(300, 65, 72, "float16")
    indices, weights = guarded.sample_map(backend, grid, coords, shape, "trilinear")
    order, starts = reference.group_rows(indices, 300)
    grad_out = scenes.values(np.random.default_rng(1), (130, 72), "float16", one_sign=True)

    def run(call):
        give = lambda name, array: call.give(array, strided=name == apart)  # noqa: E731
        take = lambda rows: call.take((rows, 72), "float16", strided=apart == "out")  # noqa: E731
        if operation == "gather_sum":
            return call.run(operation, give("feats", feats), call.give(indices), call.give(weights), take(130))
        if operation == "sample_forward":
            given = call.give(grid), call.give(coords), give("feats", feats)
            return call.run(operation, *given, take(130), shape=shape)
        given = give("src", grad_out), call.give(order), call.give(starts), call.give(weights.ravel())
        return call.run(operation, *given, take(300), None, mode="sum")

    assert_same_bits(run(guarded.Call(backend, **layout)), run(guarded.Call(backend)))


@pytest.mark.parametrize("layout", [{}, {"pad": 3}, {"offset": 1}, {"pad": 8}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_pitch_and_alignment(backend, dtype, layout):
    rng = np.random.default_rng(0)
    feats, indices = scenes.values(rng, (50, 72), dtype, one_sign=True), rng.integers(-1, 50, (130, 8)).astype(np.int32)
    weights = rng.random((130, 8), dtype=np.float32)
    out = guarded.gather_sum(backend, feats, indices, weights, **layout)
    assert_rows(out, reference.gather_sum(feats, indices, weights), ROW_TOLERANCE[dtype])
    alone = guarded.gather_sum(backend, feats, indices[:, :1], None, **layout)
    assert_rows(alone, reference.gather_sum(feats, indices[:, :1]), ROW_TOLERANCE[dtype])


@pytest.mark.parametrize("layout", [{}, {"pad": 3}, {"offset": 1}, {"pad": 8}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_without_a_map_have_its_bits(backend, dtype, layout):
    coords, shape, grid, feats = problem(300, 65, 72, dtype, one_sign=False)
    indices, weights = guarded.sample_map(backend, grid, coords, shape, "trilinear")
    assert_same_bits(
        guarded.sample_forward(backend, grid, coords, feats, shape, **layout),
        guarded.gather_sum(backend, feats, indices, weights),
    )


def test_one_map_serves_many_layers(backend):
    coords, shape, grid, feats = problem(300, 65, 16, "float32")
    sample_map = flexgemm.sample_map(backend.array(coords), shape, backend.array(grid))
    indices, weights = reference.sample_map(coords, shape, grid, "trilinear")
    np.testing.assert_array_equal(backend.numpy(sample_map.indices), indices)
    np.testing.assert_allclose(backend.numpy(sample_map.weights), weights, rtol=1e-6)
    for layer in (feats, feats[:, :7].astype(np.float16)):
        out = backend.numpy(flexgemm.grid_sample_3d(backend.array(layer), sample_map=sample_map))
        assert_rows(out.reshape(-1, layer.shape[1]), reference.gather_sum(layer, indices, weights), 2e-3)


# ---- backward ----


@pytest.mark.parametrize(
    "rows, shape", [(1, (0, 8)), (1, (5, 8)), (40, (130, 8)), (64, (130, 8)), (300, (1, 1)), (3, (1000, 1))]
)
def test_entries_are_grouped_by_row(backend, rows, shape):
    """Those of none behind all others: of 64 rows, with a number that needs a bit more than theirs."""
    indices = np.random.default_rng(0).integers(-1, rows, shape).astype(np.int32)
    order, starts = guarded.group_rows(backend, indices, rows)
    expected_order, expected_starts = reference.group_rows(indices, rows)
    np.testing.assert_array_equal(starts, expected_starts)
    np.testing.assert_array_equal(order, expected_order)


def groups_of(rng, sizes, source_rows, terms):
    """An order whose groups have these sizes, and some entries in none."""
    entries = source_rows * terms
    order = rng.permutation(entries).astype(np.int32)
    starts = np.cumsum([0, *sizes]).astype(np.int32)
    assert starts[-1] <= entries
    return order, starts


SIZES = [(), (0,), (1,), (3, 0, 5, 1), (512, 513), (511, 2, 1300, 0, 7, 512), (1, 1023, 1, 2049, 3), (1536,), (0, 4000)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("reduction", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype, channels, terms", [("float32", 8, 1), ("float16", 65, 8), ("bfloat16", 64, 8)])
def test_groups_of_any_size_are_reduced(backend, sizes, reduction, dtype, channels, terms):
    """Those of more than 512 entries are reduced in parts on a GPU."""
    rng = np.random.default_rng(sum(sizes))
    source_rows = max(-(-sum(sizes) // terms), 1) + 3
    src = scenes.values(rng, (source_rows, channels), dtype, one_sign=True)
    order, starts = groups_of(rng, sizes, source_rows, terms)
    weights = rng.uniform(0.5, 1, len(order)).astype(np.float32) if terms > 1 else None
    out = guarded.group_reduce(backend, src, order, starts, weights, reduction, with_argmax=reduction == "max")
    expected, argmax = reference.group_reduce(src, order, starts, weights, reduction)
    if reduction == "max":
        out, got = out
        np.testing.assert_array_equal(got, argmax)
    assert_rows(out, expected, ROW_TOLERANCE[dtype])


@pytest.mark.parametrize("order, total", [([0, 1, 2, 3], 3.0), ([0, 2, 1, 3], 4.0)])
def test_the_order_of_a_group_is_the_order_of_the_sum(backend, order, total):
    """2^30 swallows a 1 that comes before it is taken away again."""
    src = np.array([[2.0**30], [1.0], [-(2.0**30)], [3.0]], np.float32)
    given = np.array(order, np.int32), np.array([0, 4], np.int32)
    assert guarded.group_reduce(backend, src, *given, None, "sum").item() == total


def test_of_equal_maxima_the_first_counts(backend):
    src = np.array([[1, 3], [3, 1], [3, 3]], np.float32)
    order, starts = np.array([2, 1, 0], np.int32), np.array([0, 3], np.int32)
    _, argmax = guarded.group_reduce(backend, src, order, starts, None, "max", with_argmax=True)
    np.testing.assert_array_equal(argmax, [[2, 2]])
    _, argmax = guarded.group_reduce(backend, src, order[::-1].copy(), starts, None, "max", with_argmax=True)
    np.testing.assert_array_equal(argmax, [[1, 0]])


def test_the_maximum_of_no_numbers(backend):
    src = np.array([[1, np.nan, -np.inf], [np.nan, 2, -np.inf], [3, np.nan, -np.inf]], np.float32)
    out, argmax = guarded.group_reduce(backend, src, np.arange(3, dtype=np.int32), np.array([0, 3], np.int32), None,
                                       "max", with_argmax=True)  # fmt: skip
    np.testing.assert_array_equal(out, [[np.nan, np.nan, -np.inf]])
    np.testing.assert_array_equal(argmax, [[1, 0, 0]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1, 8, 33, 64, 300])
@pytest.mark.parametrize("mode", MODES)
def test_gradients(backend, mode, channels, dtype):
    coords, shape, grid, feats = problem(300, 65, channels, dtype)
    grad_out = scenes.values(np.random.default_rng(1), (2, 65, channels), dtype, one_sign=True)
    sample_map = flexgemm.sample_map(backend.array(coords), shape, backend.array(grid), mode)
    grads = flexgemm.grid_sample_3d_backward(backend.array(grad_out), backend.array(feats), sample_map=sample_map)
    indices, weights = reference.sample_map(coords, shape, grid, mode)
    flat = grad_out.reshape(-1, channels)
    assert_rows(backend.numpy(grads[0]), reference.scatter_sum(flat, indices, weights, 300), ROW_TOLERANCE[dtype])
    if mode == "nearest":
        assert grads[1] is None
    else:
        check_points(backend.numpy(grads[1]), flat, feats, grid, indices)


def check_points(got, grad_out, feats, grid, indices):
    """The terms of a gradient in the points cancel: it is judged by what they add up to without their signs."""
    expected, scale = reference.sample_grad(grad_out, feats, grid, indices)
    assert np.isfinite(got).all()
    assert (np.abs(got - expected) <= 4e-6 * scale).all()
    assert (np.abs(expected) > 1e-3 * scale).mean() > 0.1 or not scale.any()  # zeros would not pass


@pytest.mark.parametrize("layout", [{"pad": 3}, {"offset": 1}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_any_pitch_and_alignment(backend, dtype, layout):
    coords, shape, grid, feats = problem(200, 70, 72, dtype)
    indices, _ = reference.sample_map(coords, shape, grid, "trilinear")
    grad_out = scenes.values(np.random.default_rng(1), (len(indices), 72), dtype)
    got = guarded.sample_grad(backend, grad_out, feats, grid, indices, **layout)
    check_points(got, grad_out, feats, grid, indices)


def test_points_that_no_grid_has_move_nothing(backend):
    """Below -0.5, from 2^31 on or no number along one axis: a gradient of 0, whatever rows their indices name."""
    rng = np.random.default_rng(0)
    far = [-0.75, -1.5, -3e9, 2.0**31, 2.0**33, np.inf, -np.inf, np.nan]
    grid = rng.uniform(1, 3, (3, len(far), 3)).astype(np.float32)
    for axis in range(3):
        grid[axis, :, axis] = far
    feats, grad_out = scenes.values(rng, (20, 16), "float32"), scenes.values(rng, (3 * len(far), 16), "float32")
    indices = rng.integers(0, 20, (len(grad_out), 8)).astype(np.int32)
    assert not guarded.sample_grad(backend, grad_out, feats, grid, indices).any()


def test_the_oracle_s_gradient_is_its_slope():
    coords, shape, grid, feats = problem(300, 80, 5, "float32", one_sign=False)
    grad_out = np.random.default_rng(1).standard_normal((160, 5))
    grid = grid.astype(np.float64)
    indices, _ = reference.sample_map(coords, shape, grid, "trilinear")
    gradient, _ = reference.sample_grad(grad_out, feats, grid, indices)

    def loss(points):
        return (grad_out * reference.gather_sum(feats, *reference.sample_map(coords, shape, points, "trilinear"))).sum(
            1
        )

    finite = np.isfinite(grid).all(axis=2)
    for axis in range(3):
        step = np.zeros(3)
        step[axis] = 1e-6
        slope = (loss(grid + step) - loss(grid - step)).reshape(2, 80) / 2e-6
        smooth = finite & (np.abs(np.where(finite, grid[..., axis], 0) % 1 - 0.5) > 1e-3)  # away from where cells meet
        np.testing.assert_allclose(slope[smooth], gradient[..., axis][smooth], rtol=1e-4, atol=1e-5)


def test_a_voxel_that_every_point_asks_for(backend):
    """5,000 points in one cell: the sums of its voxels are as long as the list, and in its order."""
    coords = np.array([[0, x, y, z] for x in (1, 2) for y in (1, 2) for z in (1, 2)] + [[0, 5, 5, 5]], np.int32)
    rng = np.random.default_rng(0)
    grid = (np.floor(rng.uniform(1.5, 2.5, (1, 5000, 3)) * 1024) / 1024).astype(np.float32)
    feats, grad_out = (scenes.values(rng, s, "float32", one_sign=True) for s in ((9, 40), (1, 5000, 40)))
    sample_map = flexgemm.sample_map(backend.array(coords), (1, 8, 8, 8), backend.array(grid))
    grads = [
        backend.numpy(
            flexgemm.grid_sample_3d_backward(backend.array(grad_out), backend.array(feats), sample_map=sample_map)[0]
        )
        for _ in range(3)
    ]
    indices, weights = reference.sample_map(coords, (1, 8, 8, 8), grid, "trilinear")
    assert_rows(grads[0], reference.scatter_sum(grad_out[0], indices, weights, 9), 1e-5)
    assert not grads[0][8].any()
    for again in grads[1:]:
        np.testing.assert_array_equal(again, grads[0])


@given(st.integers(0, 60), st.integers(0, 40), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_backward_is_the_adjoint(backend, n, count, channels, seed):
    """<sample(x), g> = <x, grad(g)>."""
    coords, shape, grid, feats = problem(n, count, channels, "float32", seed=seed)
    grad_out = scenes.values(np.random.default_rng(seed), (2, count, channels), "float32", one_sign=True)
    sample_map = flexgemm.sample_map(backend.array(coords), shape, backend.array(grid))
    out = backend.numpy(flexgemm.grid_sample_3d(backend.array(feats), sample_map=sample_map))
    grads = flexgemm.grid_sample_3d_backward(
        backend.array(grad_out), backend.array(feats), sample_map=sample_map, needs_grad=(True, False)
    )
    assert grads[1] is None
    left, right = np.vdot(reference.f64(out), grad_out), np.vdot(reference.f64(backend.numpy(grads[0])), feats)
    np.testing.assert_allclose(left, right, rtol=1e-5)


def test_permuting_the_voxels_changes_no_sample(backend):
    coords, shape, grid, feats = problem(300, 65, 16, "float32")
    shuffle = np.random.default_rng(0).permutation(300)
    first, second = (
        backend.numpy(flexgemm.grid_sample_3d(backend.array(f), backend.array(c), shape, backend.array(grid)))
        for f, c in ((feats, coords), (feats[shuffle], coords[shuffle]))
    )
    np.testing.assert_array_equal(first, second)


# ---- points with a batch of their own ----


@pytest.mark.parametrize("mode", MODES)
def test_points_that_tell_their_batch(backend, mode):
    """Rows [batch, x, y, z] in any order give what the points give sample by sample, forward and backward."""
    coords, shape, grid, feats = problem(300, 65, 16, "float32")
    batch = np.repeat(np.arange(2, dtype=np.float32), 65)[:, None]
    shuffle = np.random.default_rng(0).permutation(130)
    rows = np.concatenate([batch, grid.reshape(-1, 3)], axis=1)[shuffle]
    rows = np.concatenate([rows, [[-1, 2, 2, 2], [2, 2, 2, 2], [np.nan, 2, 2, 2]]]).astype(np.float32)
    grad_out = scenes.values(np.random.default_rng(1), (133, 16), "float32", one_sign=True)
    nested = np.empty((130, 16), np.float32)
    nested[shuffle] = grad_out[:130]

    def run(points, gradient):
        sample_map = flexgemm.sample_map(backend.array(coords), shape, backend.array(points), mode)
        out = flexgemm.grid_sample_3d(backend.array(feats), sample_map=sample_map)
        grads = flexgemm.grid_sample_3d_backward(backend.array(gradient), backend.array(feats), sample_map=sample_map)
        return [None if a is None else backend.numpy(a) for a in (out, *grads)]

    out, grad_feats, grad_rows = run(rows, grad_out)
    expected, expected_feats, expected_grid = run(grid, nested.reshape(2, 65, 16))
    np.testing.assert_array_equal(out[:130], expected.reshape(130, 16)[shuffle])
    assert not out[130:].any()
    assert_rows(grad_feats, expected_feats.astype(np.float64), 1e-6)
    if mode == "trilinear":
        np.testing.assert_array_equal(grad_rows[:130, 1:], expected_grid.reshape(130, 3)[shuffle])
        assert not grad_rows[:, 0].any() and not grad_rows[130:].any()


@pytest.mark.parametrize("mode", MODES)
def test_the_last_voxels_of_a_grid_that_float32_cannot_measure(backend, mode):
    """Of 2^24 + 1 voxels the last one is at 2^24; as a float the extent would be that, too."""
    coords, shape = np.array([[0, 2**24, 0, 0]], np.int32), (1, 2**24 + 1, 1, 1)
    grid = np.array([[[2**24, 0.5, 0.5], [2**24 + 2, 0.5, 0.5]]], np.float32)
    how = {"mode": mode}
    out = flexgemm.grid_sample_3d(backend.array(np.ones((1, 2), np.float32)), backend.array(coords), shape,
                                  backend.array(grid), **how)  # fmt: skip
    np.testing.assert_array_equal(backend.numpy(out), [[[1, 1], [0, 0]]])


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_past_the_last_does_not_come_back_around(backend, mode):
    """Its cells would have numbers past 2^32: with that of the voxel among them, if 32 bits counted them."""
    shape, cells, behind = (1, 6000, 2000, 2600), (3000, 1000, 1300), 2**32 + 12345
    x, rest = divmod(behind - np.prod(cells), cells[1] * cells[2])
    point = 2 * np.array([x, *divmod(rest, cells[2])]) + 1.0  # the middle of that cell of sample 1
    voxel = 2 * np.array([0, *divmod(12345, cells[2])])
    points = np.array([[1, *point], [0, *(voxel + 0.5)]], np.float32)
    coords = np.array([[0, *(voxel + corner)] for corner in reference.CORNERS], np.int32)
    sample_map = flexgemm.sample_map(backend.array(coords), shape, backend.array(points), mode)
    indices = backend.numpy(sample_map.indices)
    assert (indices[0] == -1).all() and (indices[1] >= 0).any()


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_just_below_0_is_none(backend, mode):
    coords, shape = np.array([[0, 2, 2, 2]], np.int32), (1, 8, 8, 8)
    points = np.array([[-0.5, 2.5, 2.5, 2.5]], np.float32)
    sample_map = flexgemm.sample_map(backend.array(coords), shape, backend.array(points), mode)
    out = flexgemm.grid_sample_3d(backend.array(np.ones((1, 4), np.float32)), sample_map=sample_map)
    assert not backend.numpy(out).any()
