"""torch.autocast: which operands it casts, and which it leaves."""

from __future__ import annotations

import pytest
from scenes import leaves, voxels

import flexgemm

torch = pytest.importorskip("torch", reason="torch not installed")
from test_torch_compile import counted  # noqa: E402

import flexgemm.torch as ft  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast(device, dtype, compiled):
    coords, shape = voxels(20, device)
    inputs, nmap = leaves(20, device), ft.neighbor_map(coords, shape)

    def network(feats, weight, bias):
        with torch.autocast(device.type, dtype):
            out = ft.submanifold_conv3d(feats, weight, bias, neighbor_map=nmap)
            return out, ft.gemm_nt(out.float(), feats)

    out, product = (counted(network)[0] if compiled else network)(*inputs)
    assert (out.dtype, product.dtype) == (dtype, dtype)
    halves = [t.detach().to(dtype) for t in inputs]
    assert torch.equal(out, ft.submanifold_conv3d(*halves, neighbor_map=nmap))
    gradients = torch.autograd.grad(product.float().square().sum(), inputs)
    assert all(g.dtype is torch.float32 and torch.isfinite(g).all() for g in gradients)


def test_autocast_casts_a_bias_of_16_bits(device):
    x, half = torch.randn(8, 16, device=device), torch.randn(8, device=device).half()
    q, _ = ft.quantize(x)
    with torch.autocast(device.type, torch.bfloat16):
        out = ft.gemm_nt(x, x, bias=half)
        assert torch.equal(out, ft.gemm_nt(x, x, bias=half.bfloat16())) and out.dtype is torch.bfloat16
        for name in ("out_dtype", "dtype_out"):
            assert ft.gemm_nt(x, x, bias=half, **{name: "float16"}).dtype is torch.float16
        assert ft.gemm_nt(q, q, bias=half, out_dtype=torch.float16).dtype is torch.float16
        with pytest.raises(TypeError, match="^bias: expected dtype"):  # FP8 products are none of its
            ft.gemm_nt(q, q, bias=half)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast_casts_a_residual(device, compiled):
    coords, shape = voxels(20, device)
    nmap = ft.neighbor_map(coords, shape)
    feats, weight, bias = (t.detach() for t in leaves(20, device))
    residual = torch.randn(20, len(weight), device=device)

    def layer(feats, weight, bias, residual):
        with torch.autocast(device.type, torch.bfloat16):
            return ft.submanifold_conv3d(feats, weight, bias, residual=residual, neighbor_map=nmap) * 1

    out = (counted(layer)[0] if compiled else layer)(feats, weight, bias, residual)
    halves = [t.bfloat16() for t in (feats, weight, bias)]
    assert torch.equal(out, ft.submanifold_conv3d(*halves, residual=residual.bfloat16(), neighbor_map=nmap))


def test_autocast_leaves_fp8_and_the_neutral_functions_alone(device):
    x = torch.randn(8, 16, device=device)
    q, scale = ft.quantize(x)
    with torch.autocast(device.type, torch.bfloat16):
        assert ft.gemm_nt(q, q, scale_a=scale, out_dtype="float32").dtype is torch.float32
        assert flexgemm.gemm_nt(x, x).dtype is torch.float32
        assert flexgemm.gemm_nt(x.clone().requires_grad_(), x).dtype is torch.float32


def test_gradients_have_the_dtype_of_their_product(device):
    """Wherever they are asked for."""
    a, b = (torch.randn(8, 16, device=device, requires_grad=True) for _ in range(2))
    out = ft.gemm_nt(a, b)
    expected = torch.autograd.grad(out.square().sum(), (a, b), retain_graph=True)
    with torch.autocast(device.type, torch.bfloat16):
        found = torch.autograd.grad(out, (a, b), 2 * out.detach())
    assert all(map(torch.equal, found, expected))


def test_autocast_leaves_a_float32_bias(device):
    """It is added before the sum is rounded."""
    a, b = torch.full((1, 8), -0.125, device=device), torch.ones(8, 8, device=device)
    bias = torch.full((8,), 1 + 2**-10, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        out = ft.gemm_nt(a, b, bias=bias)
    assert out.dtype is torch.bfloat16
    assert (out == 2**-10).all()


def test_autocast_leaves_what_is_neither_float32_nor_16_bits(device):
    x, w = (torch.randn(64, 256, device=device) for _ in range(2))
    (q, scale_a), (v, scale_b) = ft.quantize(x, granularity="1x128"), ft.quantize(w, granularity="128x128")
    expected = ft.gemm_nt(q, v, scale_a=scale_a, scale_b=scale_b)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(ft.gemm_nt(q, v, scale_a=scale_a, scale_b=scale_b), expected)
        with pytest.raises(TypeError, match="a: expected dtype"):
            ft.gemm_nt(x.double(), w.double())
