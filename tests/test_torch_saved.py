"""What a call keeps for its backward pass: no factor whose values no gradient reads, as torch's own layers do. A frozen
layer then holds no activations, and they may change."""

from __future__ import annotations

from functools import partial

import pytest
from scenes import leaves, voxels

torch = pytest.importorskip("torch", reason="torch not installed")

import flexgemm.torch as ft  # noqa: E402
import flexgemm.torch.nn as fnn  # noqa: E402

M, N, K, G = 24, 16, 32, 3


def ends(device):
    return torch.tensor([4, 4, M], dtype=torch.int32, device=device)


def products(device):
    """A call of two factors and a bias each, and these. The shapes of all are different."""
    a, b, bias = (torch.randn(shape, device=device) for shape in ((M, K), (N, K), (N,)))
    ws, of_ws = torch.randn(G, N, K, device=device), torch.randn(G, N, device=device)
    indices = torch.zeros(M, dtype=torch.int32, device=device)
    experts = fnn.GroupedLinear(G, K, N, fp8=True, device=device)

    def fp8(x, weight, bias):
        return torch.func.functional_call(experts, {"weight": weight, "bias": bias}, (x, ends(device)))

    return {
        "dense": (lambda a, b, bias: ft.gemm_nt(a, b, bias=bias), a, b, bias),
        "row-major": (lambda a, b, bias: ft.gemm_nt(a, b, bias=bias, b_row_major=True), a, b.t().contiguous(), bias),
        "batched": (lambda a, b, bias: ft.batched_gemm_nt(a[None], b, bias=bias), a, b[None].clone(), bias[None]),
        "ragged": (lambda a, b, bias: ft.m_grouped_gemm_nt(a, b, ends(device), bias=bias), a, ws, of_ws),
        "contiguous": (lambda a, b, bias: ft.m_grouped_gemm_nt_contiguous(a, b, indices, bias=bias), a, ws, of_ws),
        "fp8 experts": (fp8, a, ws, of_ws),
    }


def convolutions(device):
    coords, shape = voxels(20, device)
    feats, weight, bias = (x.detach() for x in leaves(20, device))
    nmap = ft.neighbor_map(coords, shape)
    depthwise = torch.randn(5, 3, 3, 3, 1, device=device)

    def convolved(feats, weight, bias, groups=1):
        return ft.submanifold_conv3d(feats, weight, bias, neighbor_map=nmap, groups=groups)

    return {
        "convolution": (convolved, feats, weight, bias),
        "depthwise": (partial(convolved, groups=5), feats, depthwise, bias),
    }


CALLS = ["dense", "row-major", "batched", "ragged", "contiguous", "fp8 experts", "convolution", "depthwise"]
NEEDS = [(True, False, False), (False, True, False), (False, False, True), (True, False, True), (True, True, True)]


@pytest.fixture(params=["direct", "operators"])
def way(request):
    """Calls as they are, and as operators, which a compiled function has."""
    return request.param


def result_and_kept(call, operands, way):
    """The result of a call, and where the tensors lie that it keeps."""
    function, kept = torch.compile(call, backend="eager") if way == "operators" else call, []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        return function(*operands), kept


@pytest.mark.parametrize("needs", NEEDS, ids=str)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("fresh_compiler")
def test_what_no_gradient_reads_is_not_kept(device, way, name, needs):
    call, *inputs = (products(device) | convolutions(device))[name]
    operands = [x.clone().requires_grad_(needed) for x, needed in zip(inputs, needs, strict=True)]
    all_of_them = [x.clone().requires_grad_() for x in inputs]
    out, kept = result_and_kept(call, operands, way)
    grad_out = torch.randn_like(out)
    expected = torch.autograd.grad(call(*all_of_them), all_of_them, grad_out)

    of_bias_too = name in ("convolution", "depthwise")  # one pass makes it and the gradient of the weight
    reads = needs[1] or (of_bias_too and needs[2]), needs[0]
    for x, read in zip(operands, reads, strict=False):
        assert (x.data_ptr() in kept) == read
        if not read and not x.requires_grad:
            x.fill_(torch.nan)
    out.backward(grad_out)
    for x, needed, wanted in zip(operands, needs, expected, strict=True):
        assert (x.grad is not None) == needed
        if needed:
            torch.testing.assert_close(x.grad, wanted)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("of_points", [False, True])
def test_samples_keep_features_for_the_gradient_of_points_alone(device, way, of_points):
    coords, shape = voxels(20, device)
    feats = torch.randn(20, 5, device=device, requires_grad=True)
    grid = (torch.rand(shape[0], 7, 3, device=device) * 4).requires_grad_(of_points)

    def call(feats, grid):
        return ft.grid_sample_3d(feats, coords, shape, grid, mode="trilinear")

    out, kept = result_and_kept(call, (feats, grid), way)
    assert (feats.data_ptr() in kept) == of_points
    (got,) = torch.autograd.grad(out.sum(), feats)
    torch.testing.assert_close(got, torch.autograd.grad(call(feats, grid.detach()).sum(), feats)[0])


def test_a_frozen_layer_lets_its_input_change(device):
    """As torch.nn.Linear does: activations in place behind it, and steps of an optimiser between."""
    layer = fnn.GroupedLinear(G, K, N, device=device).requires_grad_(False)
    x = torch.randn(M, K, device=device, requires_grad=True)
    h = x * 1
    y = layer(h, ends(device))
    h.add_(1)
    y.sum().backward()
    expected = layer.weight.sum(1).repeat_interleave(torch.tensor([4, 0, M - 4], device=device), 0)
    torch.testing.assert_close(x.grad, expected)
