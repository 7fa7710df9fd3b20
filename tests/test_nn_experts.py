"""flexgemm.torch.nn: layers of experts against a loop over them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch not installed")

import flexgemm.torch as ft  # noqa: E402
import flexgemm.torch.nn as fnn  # noqa: E402

ENDS = [3, 3, 40, 61]  # of 64 rows: the last three are of no group


def by_loop(x, weight, bias=None, ends=ENDS):
    out, start = torch.zeros(len(x), weight.shape[1], dtype=torch.float64, device=x.device), 0
    for group, end in enumerate(ends):
        out[start:end] = x[start:end].double() @ weight[group].double().t()
        if bias is not None:
            out[start:end] += bias[group].double()
        start = end
    return out


biases = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])


@biases
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_linear(device, dtype, fp8, bias):
    torch.manual_seed(0)
    layer = fnn.GroupedLinear(4, 48, 32, bias=bias, fp8=fp8, device=device, dtype=dtype)
    assert [*layer.state_dict()] == ["weight", "bias"][: 1 + bias]
    x = torch.randn(64, 48, device=device, dtype=dtype, requires_grad=True)
    grad_out = torch.randn(64, 32, device=device, dtype=dtype)
    ends = torch.tensor(ENDS, dtype=torch.int32, device=device)
    out = layer(x, ends)
    assert out.dtype is dtype
    out.backward(grad_out)
    exact = [t.detach().double().requires_grad_() for t in (x, *layer.parameters())]
    expected = by_loop(*exact)
    expected.backward(torch.cat([grad_out[: ENDS[-1]], torch.zeros_like(grad_out[ENDS[-1] :])]).double())
    rounding = 1e-5 if dtype is torch.float32 else 1e-2
    products = 6e-2 if fp8 else rounding  # two factors of 3 bits

    def error(got, want):
        return ((got.double() - want).norm() / want.norm()).item()

    assert error(out[: ENDS[-1]], expected[: ENDS[-1]]) < products
    assert error(x.grad, exact[0].grad) < products
    assert not x.grad[ENDS[-1] :].any()
    for parameter, wanted in zip(layer.parameters(), exact[1:], strict=True):
        assert error(parameter.grad, wanted.grad) < rounding


def test_gradients_in_fp8_have_the_range_of_e5m2(device):
    """A row's elements a million times apart: e4m3 has none so small beside the largest."""
    layer = fnn.GroupedLinear(1, 16, 16, bias=False, fp8=True, device=device)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(16))
    x, grad_out = torch.ones(4, 16, device=device, requires_grad=True), torch.full((4, 16), 1e-6, device=device)
    grad_out[:, 0] = 1
    layer(x, torch.tensor([4], device=device)).backward(grad_out)
    torch.testing.assert_close(x.grad, grad_out, rtol=0.13, atol=0)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("kind", ["fp8", "frozen"])
def test_what_is_not_finite_is_seen_behind_a_cast(device, kind, bad):
    """Which saturates it. Loss scaling has to see what overflows in 16 bits; other rows are as they were."""
    torch.manual_seed(0)
    layer = fnn.GroupedLinear(4, 48, 32, fp8=kind == "fp8", device=device)
    if kind == "frozen":
        layer = layer.frozen()
    ends = torch.tensor(ENDS, dtype=torch.int32, device=device)
    results = []
    for value in (1.0, bad):
        x = torch.ones(ENDS[-1], 48, device=device)
        x[2, 5] = value
        x.requires_grad_()
        grad_out = torch.ones(ENDS[-1], 32, device=device)
        grad_out[3, 7] = value
        out = layer(x, ends)
        results.append((out, *torch.autograd.grad(out, x, grad_out)))
    for row, good, got in zip((2, 3), *results, strict=True):
        others = torch.arange(ENDS[-1], device=device) != row
        assert not got[row].isfinite().any()
        assert torch.equal(got[others], good[others])


@pytest.mark.parametrize("fp8", [False, True])
def test_grouped_linear_without_features_is_its_bias(device, fp8):
    layer = fnn.GroupedLinear(2, 0, 32, fp8=fp8, device=device)
    out = layer(torch.ones(8, 0, device=device), torch.tensor([3, 8], device=device))
    assert torch.equal(out, layer.bias.repeat_interleave(torch.tensor([3, 5], device=device), 0))


def test_grouped_linear_takes_bools():
    with pytest.raises(TypeError, match="^fp8: expected a bool, got str$"):
        fnn.GroupedLinear(2, 16, 32, fp8="no")


@biases
def test_frozen_experts(device, bias):
    torch.manual_seed(0)
    layer = fnn.GroupedLinear(4, 48, 32, bias=bias, device=device)
    frozen = layer.frozen()
    assert (frozen.bias is not None) == bias
    assert frozen.weight.dtype is torch.float8_e4m3fn
    x = torch.randn(64, 48, device=device, requires_grad=True)
    ends = torch.tensor(ENDS, dtype=torch.int32, device=device)
    out, expected = frozen(x, ends)[: ENDS[-1]], layer(x, ends)[: ENDS[-1]]
    assert (out - expected).norm() < 6e-2 * expected.norm()
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (out, expected)]
    assert (gradients[0] - gradients[1]).norm() < 4e-2 * gradients[1].norm()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert torch.equal(frozen(x, ends)[: ENDS[-1]], out), "a copy"
    y = frozen(x, ends)[: ENDS[-1]].sum()
    with torch.autocast(x.device.type, torch.bfloat16):
        assert torch.equal(torch.autograd.grad(y, x)[0], gradients[0]), "in its own dtype"
    again = fnn.GroupedLinear(4, 48, 32, bias=bias, device=device).frozen()
    again.load_state_dict(frozen.state_dict())
    assert torch.equal(again(x, ends)[: ENDS[-1]], out)


@pytest.mark.parametrize("kind", ["plain", "fp8", "frozen"])
def test_autocast_casts_experts_of_another_16_bits(device, kind):
    torch.manual_seed(0)
    layer = fnn.GroupedLinear(4, 48, 32, fp8=kind == "fp8", device=device, dtype=torch.float16)
    used = layer.frozen() if kind == "frozen" else layer
    x, ends = torch.randn(ENDS[-1], 48, device=device), torch.tensor(ENDS, dtype=torch.int32, device=device)
    with torch.autocast(x.device.type, torch.bfloat16):
        out = used(x, ends)
    assert out.dtype is torch.bfloat16
    exact = ft.m_grouped_gemm_nt(x, layer.weight.detach().float(), ends, bias=layer.bias.detach().float())
    assert (out.float() - exact).norm() < 6e-2 * exact.norm()
    if kind != "frozen":
        out.sum().backward()
        assert layer.bias.grad.dtype is torch.float16 and torch.equal(
            layer.bias.grad[2], layer.bias.grad[2, :1].expand(32)
        )


@pytest.mark.parametrize("kind", ["plain", "fp8", "frozen"])
def test_experts_compile(device, kind):
    torch.compiler.reset()
    torch.manual_seed(0)
    layer = fnn.GroupedLinear(4, 48, 32, fp8=kind == "fp8", device=device)
    layer = layer.frozen() if kind == "frozen" else layer
    compiled = torch.compile(lambda x, ends: layer(x, ends) * 2, fullgraph=True, backend="aot_eager")
    for m in (64, 80):
        x = torch.randn(m, 48, device=device, requires_grad=True)
        ends = torch.tensor([3, 3, 40, m], dtype=torch.int32, device=device)
        out, expected = compiled(x, ends), layer(x, ends) * 2
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (out, expected)))
