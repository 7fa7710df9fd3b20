"""True float32 is IEEE arithmetic: what is not finite, or nearly not, goes where it belongs and nowhere else."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
import scenes

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
