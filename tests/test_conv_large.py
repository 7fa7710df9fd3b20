"""Convolution at sizes that need a GPU."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
import scenes
from reference import f64
from test_conv import Case, Problem
from verdicts import assert_conv_rows, assert_rows

import flexgemm
from flexgemm import _C


@pytest.mark.large
@pytest.mark.parametrize("n, channels", [(4_000_000, 64), (200_000, 256)])
def test_millions_of_voxels(cuda, n, channels):
    """Every pass, in the tiles that large scenes get; 4,096 rows and 256 weight entries are judged."""
    rng = np.random.default_rng(0)
    coords, shape = scenes.scene(n)
    feats, grad_out = (scenes.values(rng, (n, channels), "float16") for _ in range(2))
    weight = scenes.values(rng, (channels, 3, 3, 3, channels), "float16")
    bias = scenes.values(rng, (channels,), "float16")
    nmap = flexgemm.neighbor_map(cuda.array(coords), shape)
    arrays = [cuda.array(a) for a in (grad_out, feats, weight)]
    out = cuda.numpy(flexgemm.submanifold_conv3d(*arrays[1:], cuda.array(bias), neighbor_map=nmap))
    gradients = flexgemm.submanifold_conv3d_backward(*arrays, neighbor_map=nmap)
    grad_feats, grad_weight, grad_bias = map(cuda.numpy, gradients)

    rows = rng.choice(n, 4096, replace=False)
    forward = reference.neighbor_map(coords, shape, rows=rows.tolist())
    assert_rows(out[rows], reference.conv_forward(feats, weight, bias, forward), 2e-3)
    swapped = weight[:, ::-1, ::-1, ::-1].transpose(4, 1, 2, 3, 0)  # an odd kernel's adjoint is the mirrored kernel
    assert_rows(grad_feats[rows], reference.conv_forward(grad_out, swapped, None, forward), 2e-3, "grad_feats")

    whole = cuda.numpy(nmap.map)
    np.testing.assert_array_equal(whole[:, rows], forward)
    grad_weight = grad_weight.reshape(channels, 27, channels)
    for v in rng.choice(27, 4, replace=False):
        has = whole[v] >= 0
        co, ci = rng.integers(0, channels, (2, 64))
        g, f = grad_out[has], feats[whole[v][has]]
        expected = [(reference.f64(g[:, o]) * reference.f64(f[:, i])).sum() for o, i in zip(co, ci, strict=True)]
        assert_rows(grad_weight[co, v, ci][None], np.array(expected)[None], 2e-3, "grad_weight entries")
    assert_rows(grad_bias[None], reference.f64(grad_out).sum(axis=0)[None], 2e-3, "grad_bias")


@pytest.mark.large
def test_partial_sums_of_a_weight_gradient_take_no_more_than_a_gibibyte(cuda):
    """Those of a wide 7x7x7 kernel would take 1.8: half of the output channels after the other is computed."""
    rng = np.random.default_rng(0)
    n, volume, channels = 132_000, 343, 512
    grad_out, feats = (np.tile(scenes.values(rng, (n // 100, channels), "float16"), (100, 1)) for _ in range(2))
    nmap = np.where(rng.random((volume, n)) < 0.02, rng.integers(0, n, (volume, n)), -1).astype(np.int32)
    arrays = [cuda.array(a) for a in (grad_out, feats, nmap)]
    outputs = cuda.empty((channels, volume, channels), "float16"), cuda.empty((channels,), "float16")
    nbytes = flexgemm._C.conv_wgrad_workspace(*arrays, *outputs)
    assert nbytes < 1.05 * 2**30
    flexgemm._C.conv_wgrad(*arrays, *outputs, workspace=cuda.empty((nbytes,), "uint8"))
    grad_weight, grad_bias = map(cuda.numpy, outputs)
    for v in (0, 200, 342):
        has = nmap[v] >= 0
        expected = reference.f64(grad_out[has]).T @ reference.f64(feats[nmap[v][has]])
        assert_conv_rows(np.ascontiguousarray(grad_weight[:, v]), expected, "float16", f"grad_weight[:, {v}]")
    assert_rows(grad_bias[None], reference.f64(grad_out).sum(axis=0)[None], 2e-3, "grad_bias")


@pytest.mark.large
def test_a_matrix_that_is_made_in_several_parts(cuda):
    """A row of 27 x 1,024 halves: the 256 MiB that "explicit_gemm" takes hold 4,736 of them."""
    p = Problem(Case(n=10_000, ci=1024, co=24), "float16")
    how = {"algorithm": "explicit_gemm"}
    p.check_forward(guarded.conv_forward(cuda, p.feats, p.weight, p.bias, p.map, **how))
    p = Problem(Case(n=10_000, ci=24, co=1024), "float16")
    p.check_dgrad(guarded.conv_dgrad(cuda, p.grad_out, p.weight, p.map, mirrored=True, **how))


@pytest.mark.large
def test_more_than_2_to_the_31_map_entries(cuda):
    """A full grid of 186^3 voxels under a 7x7x7 kernel: N * V = 2.2e9."""
    rng = np.random.default_rng(0)
    width, channels = 186, 8
    n = width**3
    assert n * 343 > 2**31
    shape = (1, width, width, width)
    coords = np.stack(np.unravel_index(rng.permutation(n), shape), axis=1).astype(np.int32)
    feats, grad_out = (scenes.values(rng, (n, channels), "bfloat16", one_sign=True) for _ in range(2))
    weight = scenes.values(rng, (channels, 7, 7, 7, channels), "bfloat16", one_sign=True)
    nmap = flexgemm.neighbor_map(cuda.array(coords), shape, 7)
    arrays = [cuda.array(a) for a in (grad_out, feats, weight)]
    out = cuda.numpy(flexgemm.submanifold_conv3d(*arrays[1:], neighbor_map=nmap))
    gradients = flexgemm.submanifold_conv3d_backward(*arrays, neighbor_map=nmap, needs_grad=(True, True, False))
    grad_feats, grad_weight, _ = gradients
    assert nmap.num_pairs == sum(width - abs(k - 3) for k in range(7)) ** 3

    rows = rng.choice(n, 4096, replace=False)
    forward = reference.neighbor_map(coords, shape, (7, 7, 7), rows=rows.tolist())
    assert_rows(out[rows], reference.conv_forward(feats, weight, None, forward), 1e-2)
    swapped = weight[:, ::-1, ::-1, ::-1].transpose(4, 1, 2, 3, 0)
    expected = reference.conv_forward(grad_out, swapped, None, forward)
    assert_rows(cuda.numpy(grad_feats)[rows], expected, 1e-2, "grad_feats")

    # On a full grid the pairs of an offset are two shifted boxes.
    order = np.empty(n, np.int64)
    order[np.ravel_multi_index(tuple(coords.T.astype(np.int64)), shape)] = np.arange(n)
    box_of = order.reshape(width, width, width)
    grad_weight = cuda.numpy(grad_weight).reshape(channels, 7, 7, 7, channels)
    for tap in ((0, 0, 0), (6, 6, 6), (3, 3, 3), *map(tuple, rng.integers(0, 7, (3, 3)).tolist())):
        here = tuple(slice(max(0, 3 - t), width - max(0, t - 3)) for t in tap)
        there = tuple(slice(max(0, t - 3), width - max(0, 3 - t)) for t in tap)
        g, f = grad_out[box_of[here].ravel()], feats[box_of[there].ravel()]
        expected = reference.f64(g).T @ reference.f64(f)
        assert_rows(grad_weight[:, *tap], expected, 1e-2, f"grad_weight at {tap}")


@pytest.mark.large
def test_more_than_2_to_the_31_feature_elements(cuda):
    """N * C = 2.2e9 elements in and out, through a pointwise kernel."""
    rng = np.random.default_rng(0)
    n, channels = 17_000_000, 128
    block = scenes.values(rng, (100_000, channels), "float16")
    feats = np.tile(block, (n // len(block), 1))
    weight = scenes.values(rng, (channels, 1, channels), "float16")
    nmap = cuda.array(rng.permutation(n).astype(np.int32)[None])
    out = cuda.empty((n, channels), "float16")
    arrays = cuda.array(feats), cuda.array(weight)
    nbytes = flexgemm._C.conv_forward_workspace(*arrays, None, nmap, out)
    workspace = cuda.empty((nbytes,), "uint8") if nbytes else None
    flexgemm._C.conv_forward(*arrays, None, nmap, out, workspace=workspace)
    rows = np.append(rng.choice(n, 4095, replace=False), n - 1)
    expected = reference.conv_forward(feats, weight, None, cuda.numpy(nmap)[:, rows])
    assert_rows(cuda.numpy(out)[rows], expected, 2e-3)


@pytest.mark.parametrize("shifted", [None, "grad_weight", "grad_bias"])
def test_a_million_sums_off_alignment(cuda, shifted):
    """So many are added up four at a time, where all outputs allow it."""
    n, volume, ci, co = 33_000, 27, 512, 80
    rng = np.random.default_rng(0)
    grad_out, feats = (rng.integers(-2, 3, shape).astype(np.float16) for shape in ((n, co), (3, ci)))
    nmap = np.full((volume, n), -1, np.int32)
    rows = rng.choice(n, 100, replace=False)
    nmap[rng.integers(0, volume, 100), rows] = rng.integers(0, 3, 100)
    call = guarded.Call(cuda, offset=1)
    grad_weight, grad_bias = call.run(
        "conv_wgrad",
        *map(call.give, (grad_out, feats, nmap)),
        call.take((co, volume, ci), "float16", strided=shifted == "grad_weight"),
        call.take((co,), "float16", strided=shifted == "grad_bias"),
    )
    expected = np.zeros((co, volume, ci))
    for v, m in np.argwhere(nmap >= 0):
        expected[:, v] += np.outer(f64(grad_out[m]), f64(feats[nmap[v, m]]))
    np.testing.assert_array_equal(f64(grad_weight).reshape(expected.shape), expected)
    np.testing.assert_array_equal(f64(grad_bias), f64(grad_out).sum(axis=0))


@pytest.mark.large
@pytest.mark.parametrize("activation", [None, "relu"])
def test_residual_of_a_matrix_that_is_made_in_several_parts(cuda, activation):
    """A row of a mebi of halves: 128 of them at a time."""
    n, ci, co = 130, 2**20, 8
    rng = np.random.default_rng(0)
    feats, weight = np.zeros((2, ci), np.float16), np.zeros((co, 1, 1, 1, ci), np.float16)
    feats[:, ::4099], weight[..., ::4099] = rng.standard_normal((2, 256)), rng.standard_normal((co, 1, 1, 1, 256))
    residual = rng.standard_normal((n, co)).astype(np.float16)
    nmap = rng.integers(0, 2, (1, n)).astype(np.int32)
    plan = _C.plan_conv(rows=n, ci=ci, co=co, v=1, dtype="float16", num_sms=8, algorithm="explicit_gemm")
    assert plan["block_m"] == 128
    out = guarded.conv_forward(cuda, feats, weight, None, nmap, residual=residual, activation=activation,
                               algorithm="explicit_gemm")  # fmt: skip
    expected = reference.conv_epilogue(feats[:, ::4099], weight[..., ::4099], None, nmap, residual, activation)
    assert_rows(out, expected, 2e-3)
