"""What sampling refuses, by argument name, and what it leaves out on a GPU."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
import scenes
from calls import place
from test_grid_sample import problem
from verdicts import assert_rows, assert_same_bits

import flexgemm


@pytest.mark.parametrize(
    "argument, wrong, error",
    [
        ("feats", np.zeros((29, 6), np.float32), ValueError),
        ("feats", np.zeros(30, np.float32), ValueError),
        ("feats", np.zeros((30, 6), np.int32), TypeError),
        ("coords", np.zeros((30, 3), np.int32), ValueError),
        ("coords", None, ValueError),
        ("shape", (2, 0, 1, 1), ValueError),
        ("shape", (2**31, 2**31, 2**31, 1), ValueError),
        ("grid", np.zeros((2, 5), np.float32), ValueError),
        ("grid", np.zeros((3, 5, 3), np.float32), ValueError),
        ("grid", np.zeros((2, 5, 3), np.float16), TypeError),
        ("grid", [[[0, 0, 0]]] * 2, TypeError),
        ("mode", "bilinear", ValueError),
        ("sample_map", 3, TypeError),
    ],
)
def test_impossible_arguments_are_named(backend, argument, wrong, error):
    coords, shape, grid, feats = problem(30, 5, 6, "float32")
    given = {"feats": feats, "coords": coords, "shape": shape, "grid": grid, argument: wrong}
    with pytest.raises(error, match=argument if argument != "coords" or wrong is None else "(coords|keys)"):
        flexgemm.grid_sample_3d(**place(backend, given))


def test_impossible_arguments_of_gradients_are_named(backend):
    coords, shape, grid, feats = problem(30, 5, 6, "float32")
    sample_map = flexgemm.sample_map(backend.array(coords), shape, backend.array(grid))
    x, grad_out = backend.array(feats), np.zeros((*grid.shape[:2], 6))
    with pytest.raises(TypeError, match="^grad_out: expected dtype .* got int32"):
        flexgemm.grid_sample_3d_backward(backend.array(grad_out.astype(np.int32)), x, sample_map=sample_map)
    grad_out = backend.array(grad_out.astype(np.float32))
    for dtype in (np.float16, np.int32):
        with pytest.raises(TypeError, match="^grad_out: expected dtype .* to match feats, got float32$"):
            flexgemm.grid_sample_3d_backward(grad_out, backend.array(feats.astype(dtype)), sample_map=sample_map)
    with pytest.raises(TypeError, match="^sample_map: expected a SampleMap, got NoneType"):
        flexgemm.grid_sample_3d_backward(grad_out, x, sample_map=None)
    for wrong in ((True,), (True, True, True), True):
        with pytest.raises(ValueError, match=r"^needs_grad: expected 2 bools, got .*True"):
            flexgemm.grid_sample_3d_backward(grad_out, x, sample_map=sample_map, needs_grad=wrong)


@pytest.mark.parametrize("device", ["cpu", "cuda:99", "nonsense"])
def test_a_map_has_its_device(backend, device):
    coords, shape, grid, feats = problem(30, 5, 6, "float32")
    sample_map = flexgemm.sample_map(backend.array(coords), shape, backend.array(grid))
    with pytest.raises(ValueError, match=f"^device: expected None beside sample_map, which has one, got '{device}'"):
        flexgemm.grid_sample_3d(backend.array(feats), sample_map=sample_map, device=device)


def test_gradients_of_another_shape(backend):
    coords, shape, grid, feats = problem(30, 5, 6, "float32")
    sample_map = flexgemm.sample_map(backend.array(coords), shape, backend.array(grid))
    with pytest.raises(ValueError, match="grad_out"):
        flexgemm.grid_sample_3d_backward(
            backend.array(np.zeros((2, 5, 7), np.float32)), backend.array(feats), sample_map=sample_map
        )
    for rows in (29, 31):
        with pytest.raises(ValueError, match=rf"feats: expected \(30, C\) to match coords, got \({rows}, 6\)"):
            flexgemm.grid_sample_3d_backward(
                backend.array(np.zeros((*grid.shape[:2], 6), np.float32)),
                backend.array(np.zeros((rows, 6), np.float32)),
                sample_map=sample_map,
            )


def test_indices_and_orders_that_are_no_rows(backend):
    """On a GPU what is out of range is left out, which the fences prove; on the CPU it raises."""
    rng = np.random.default_rng(0)
    feats, weights = scenes.values(rng, (20, 16), "float32"), np.ones((40, 8), np.float32)
    indices = rng.integers(-1, 20, (40, 8)).astype(np.int32)
    grid = rng.random((1, 40, 3), np.float32)
    order, starts = reference.group_rows(indices, 20)
    grad_out = scenes.values(rng, (40, 16), "float32")
    wild = order.copy()
    wild[5] = 320
    for wrong in (20, 2**31 - 1, -2, -(2**31)):
        bad, tamed = indices.copy(), indices.copy()
        for entry in ((7, 3), (7, 5), (8, 0)):  # the first of them is named
            bad[entry], tamed[entry] = wrong, -1
        calls = (
            lambda bad=bad: guarded.gather_sum(backend, feats, bad, weights),
            lambda bad=bad: guarded.sample_grad(backend, grad_out, feats, grid, bad),
            lambda bad=bad: guarded.group_rows(backend, bad, 20),
        )
        if backend.name == "cpu":
            for call in calls:
                with pytest.raises(ValueError, match=rf"indices: entry \(7, 3\) is {wrong}"):
                    call()
            continue
        assert_rows(calls[0](), reference.gather_sum(feats, tamed, weights), 1e-4)
        assert_same_bits(calls[1](), guarded.sample_grad(backend, grad_out, feats, grid, tamed))
        for got, expected in zip(calls[2](), reference.group_rows(tamed, 20), strict=True):
            np.testing.assert_array_equal(got[: len(expected)], expected)
    if backend.name == "cpu":
        with pytest.raises(ValueError, match=r"order: entry 5 is 320"):
            guarded.group_reduce(backend, grad_out, wild, starts, None, "sum")
        for row, wrong in ((2, [0, 3, 400]), (2, [0, 9, 3]), (0, [-1, 3, 9])):
            with pytest.raises(ValueError, match=f"starts: entry {row} is {wrong[row]}"):
                guarded.group_reduce(backend, grad_out, order, np.array(wrong, np.int32), None, "sum")
        return
    guarded.group_reduce(backend, grad_out, wild, starts, None, "sum")
    for wrong in (320 + 9, 2**31 - 1):
        hostile, tamed = np.array([-5, 3, wrong, -(2**31)], np.int32), np.array([0, 3, 320], np.int32)
        expected, _ = reference.group_reduce(grad_out, order, tamed, None, "max")
        out = guarded.group_reduce(backend, grad_out, order, hostile, None, "max", fence=False)
        np.testing.assert_array_equal(out, np.concatenate([expected, np.zeros((1, 16))]))
