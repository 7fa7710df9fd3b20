"""True float32 is IEEE arithmetic: what is not finite, or nearly not, goes where it belongs and nowhere else."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
import scenes
from verdicts import assert_rows

N = 300
HUGE = np.finfo(np.float32).max
sizes = pytest.mark.parametrize("ci, co", [(33, 40), (64, 64), (200, 136)])


def problem(ci, co, seed=0):
    """Factors among which are zeros and numbers of few digits, which have no low part, and large ones that round up to
    infinity when digits are cut off."""
    rng = np.random.default_rng(seed)
    coords, shape = scenes.scene(N)
    nmap = reference.neighbor_map(coords, shape)
    feats, weight, grad_out = (scenes.values(rng, s, "float32") / 8 for s in ((N, ci), (co, 3, 3, 3, ci), (N, co)))
    for x in (feats, weight, grad_out):
        chosen = rng.random(x.shape)
        x[chosen < 0.2] = 0
        x[chosen > 0.8] = 0.25
    return nmap, feats, weight, grad_out


def spoil(x, columns):
    """Some rows of a matrix get one element each that is not finite or nearly not."""
    special = [np.inf, -np.inf, HUGE, -HUGE, np.nan]
    for i, row in enumerate(np.random.default_rng(1).choice(len(x), 15, replace=False)):
        x[row, i % columns] = special[i % 5]


def assert_same_numbers(out, function, *factors):
    """NaN and infinities where float64 has them, and everything else right to the rounding of its terms."""
    with np.errstate(invalid="ignore", over="ignore"):
        expected = function(*factors).astype(np.float32)
    finite = np.isfinite(expected)
    assert finite.any()
    assert not finite.all()
    np.testing.assert_array_equal(out[~finite], expected[~finite])
    assert np.isfinite(out[finite]).all()
    terms = function(*(np.abs(np.nan_to_num(x, posinf=0, neginf=0)) for x in factors))
    assert (np.abs(reference.f64(out[finite]) - expected[finite]) <= 1e-5 * terms[finite]).all()


@sizes
def test_features(backend, ci, co):
    nmap, feats, weight, _ = problem(ci, co)
    spoil(feats, ci)
    out = guarded.conv_forward(backend, feats, weight, None, nmap)
    assert_same_numbers(out, lambda x, w: reference.conv_forward(x, w, None, nmap), feats, weight)


@sizes
def test_weights(backend, ci, co):
    """A missing neighbour is no zero: an infinite weight does not touch a row that has no neighbour there."""
    nmap, feats, weight, _ = problem(ci, co)
    spoil(weight.reshape(-1, ci), ci)
    out = guarded.conv_forward(backend, feats, weight, None, nmap)
    assert_same_numbers(out, lambda x, w: reference.conv_forward(x, w, None, nmap), feats, weight)


@sizes
def test_input_gradient(backend, ci, co):
    nmap, _, weight, grad_out = problem(ci, co)
    spoil(grad_out, co)
    spoil(weight.reshape(-1, ci), ci)
    grad_feats = guarded.conv_dgrad(backend, grad_out, weight, nmap, mirrored=True)
    swapped = weight[:, ::-1, ::-1, ::-1].transpose(4, 1, 2, 3, 0)  # an odd kernel's adjoint is the mirrored kernel
    assert_same_numbers(grad_feats, lambda g, w: reference.conv_forward(g, w, None, nmap), grad_out, swapped)


@sizes
def test_weight_gradient(backend, ci, co):
    nmap, feats, _, grad_out = problem(ci, co)
    spoil(grad_out, 3)
    spoil(feats, 3)
    grad_weight, grad_bias = guarded.conv_wgrad(backend, grad_out, feats, nmap)
    assert_same_numbers(grad_weight, lambda g, x: reference.conv_wgrad(g, x, nmap)[0], grad_out, feats)
    assert_same_numbers(grad_bias, lambda g: g.astype(np.float64).sum(axis=0), grad_out)


def test_a_split_reduction(backend):
    """Few rows and many channels: the offsets are shared out, and partial sums meet in the workspace."""
    nmap, feats, weight, _ = problem(600, 40)
    feats, nmap = feats[:65], np.where(nmap[:, :65] < 65, nmap[:, :65], -1)
    spoil(feats, 600)
    out = guarded.conv_forward(backend, feats, weight, None, nmap)
    assert_same_numbers(out, lambda x, w: reference.conv_forward(x, w, None, nmap), feats, weight)


@pytest.mark.parametrize("groups", [3, 9])
@pytest.mark.parametrize("ci, co", [(64, 64), (72, 264)])
def test_orders_of_groups_of_offsets(backend, groups, ci, co):
    """Partial sums of each group in an order of its own; the mirrored gradient takes orders and offsets backwards."""
    nmap, feats, weight, grad_out = problem(ci, co)
    for x, columns in ((feats, ci), (grad_out, co), (weight.reshape(-1, ci), ci)):
        spoil(x, columns)
    order = np.stack([np.random.default_rng(groups).permutation(N).astype(np.int32) for _ in range(groups)])
    how = {"order": order, "algorithm": "masked_implicit_gemm_splitk"}
    out = guarded.conv_forward(backend, feats, weight, None, nmap, **how)
    assert_same_numbers(out, lambda x, w: reference.conv_forward(x, w, None, nmap), feats, weight)
    grad_feats = guarded.conv_dgrad(backend, grad_out, weight, nmap, mirrored=True, **how)
    swapped = weight[:, ::-1, ::-1, ::-1].transpose(4, 1, 2, 3, 0)
    assert_same_numbers(grad_feats, lambda g, w: reference.conv_forward(g, w, None, nmap), grad_out, swapped)


def test_what_is_not_finite_goes_through_bias_and_activation(backend):
    """A sum is made right before it is finished."""
    nmap, feats, weight, residual = problem(64, 72)
    spoil(feats, 64)
    bias = residual[0].copy()
    how = {"residual": residual, "activation": "relu", "algorithm": "implicit_gemm"}
    out = guarded.conv_forward(backend, feats, weight, bias, nmap, **how)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = reference.conv_epilogue(feats, weight, bias, nmap, residual, "relu").astype(np.float32)
    wild = ~np.isfinite(expected)
    assert wild.any()
    np.testing.assert_array_equal(out[wild], expected[wild])
    assert np.isfinite(out[~wild]).all()


@sizes
def test_a_product_just_below_the_largest_number(backend, ci, co):
    """Each factor has 13 digits, of which a tensor core takes 11: rounded up, their product would be infinite."""
    nmap, feats, weight, grad_out = (np.zeros_like(x) if x.dtype == np.float32 else x for x in problem(ci, co))
    x, w = np.float32(2**64 * (2 - 2**-12)), np.float32(2**63)
    feats[::7, 3], grad_out[::7, 3], weight[3, 1, 1, 1, 3] = x, x, w
    expected = np.zeros((N, co), np.float32)
    expected[::7, 3] = x * w
    np.testing.assert_array_equal(guarded.conv_forward(backend, feats, weight, None, nmap), expected)
    grad_feats = guarded.conv_dgrad(backend, grad_out, weight, nmap, mirrored=True)
    np.testing.assert_array_equal(grad_feats[:, :33], expected[:, :33])
    assert not grad_feats[:, 33:].any()


@sizes
@pytest.mark.parametrize("factors", [(1e30, 1e-30), (1e-30, 1e30), (1e18, 1e17), (1e-15, 1e-15)], ids=str)
def test_large_and_small_numbers(backend, ci, co, factors):
    rng = np.random.default_rng(0)
    nmap, *_ = problem(ci, co)
    feats, weight, grad_out = (
        scenes.values(rng, s, "float32") * np.float32(factor)
        for s, factor in zip(((N, ci), (co, 3, 3, 3, ci), (N, co)), (*factors, factors[0]), strict=True)
    )
    out = guarded.conv_forward(backend, feats, weight, None, nmap)
    assert_rows(out, reference.conv_forward(feats, weight, None, nmap), 1e-5)
    grad_feats = guarded.conv_dgrad(backend, grad_out, weight, nmap, mirrored=True)
    assert_rows(grad_feats, reference.conv_dgrad(grad_out, weight, nmap, N), 1e-5)


@pytest.mark.parametrize("one_sign", [False, True])
@pytest.mark.parametrize("ci, co", [(384, 64), (72, 400)])
def test_sums_of_thousands_of_products(backend, one_sign, ci, co):
    """Neither the digits that one product of TF32 lacks nor, of one sign, what tensor cores cut off of a long sum."""
    rng = np.random.default_rng(0)
    nmap, *_ = problem(ci, co)
    shapes = (N, ci), (co, 3, 3, 3, ci), (N, co)
    feats, weight, grad_out = (scenes.values(rng, s, "float32", one_sign=one_sign) for s in shapes)
    expected = reference.conv_forward(feats, weight, None, nmap)
    assert_rows(guarded.conv_forward(backend, feats, weight, None, nmap), expected, 1e-5)
    grad_feats = guarded.conv_dgrad(backend, grad_out, weight, nmap, mirrored=True)
    assert_rows(grad_feats, reference.conv_dgrad(grad_out, weight, nmap, N), 1e-5)
    if backend.name == "cuda" and not one_sign:
        rounded = guarded.conv_forward(backend, feats, weight, None, nmap, precision="tf32")
        assert (np.linalg.norm(rounded - expected, axis=1) > 1e-4 * np.linalg.norm(expected, axis=1)).all()


def test_slices_of_a_weight_gradient_that_are_computed_again(backend):
    """The largest number is infinite in TF32: both slices of the rows are summed again, each for itself."""
    n, ci, co = 1200, 33, 40
    feats, grad_out = np.zeros((n, ci), np.float32), np.zeros((n, co), np.float32)
    feats[[100, 1100], 3], grad_out[[100, 1100], 5] = HUGE, 0.125
    grad_weight, _ = guarded.conv_wgrad(backend, grad_out, feats, np.arange(n, dtype=np.int32)[None])
    expected = np.zeros((co, 1, ci), np.float32)
    expected[5, 0, 3] = HUGE / 4
    np.testing.assert_array_equal(np.reshape(grad_weight, expected.shape), expected)
