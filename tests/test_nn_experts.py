"""flexgemm.torch.nn: layers of experts against a loop over them."""

from __future__ import annotations

import io

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


kinds = pytest.mark.parametrize("kind", ["fp8", "frozen"])


def experts_of(kind, device="cpu"):
    torch.manual_seed(0)
    layer = fnn.GroupedLinear(4, 48, 32, fp8=kind == "fp8", device=device)
    return layer.frozen() if kind == "frozen" else layer


@kinds
@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
def test_exported_experts_have_their_gradients(kind, strict):
    """Beside a way around them, whose gradient alone would look like one."""

    class Residual(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts, self.out = experts_of(kind), torch.nn.Linear(32, 48)

        def forward(self, x, ends):
            return x + self.out(self.experts(x, ends))

    network, x, ends = Residual(), torch.randn(ENDS[-1], 48, requires_grad=True), torch.tensor(ENDS)
    program = torch.export.export(network, (x, ends), strict=strict).module()
    results = []
    for module in (network, program):
        parameters = dict(module.named_parameters())
        gradients = torch.autograd.grad(module(x, ends).square().sum(), [x, *parameters.values()])
        results.append(dict(zip(["x", *parameters], gradients, strict=True)))
    assert ("experts.weight" in results[0]) == (kind == "fp8")
    torch.testing.assert_close(*results)


@kinds
def test_traced_experts_are_saved(kind):
    layer, ends = experts_of(kind), torch.tensor(ENDS)
    with torch.no_grad():
        traced = torch.jit.trace(layer, (torch.randn(ENDS[-1], 48), ends))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    x = torch.randn(ENDS[-1] + 9, 48)
    again = torch.jit.load(file)
    assert torch.equal(again(x, ends)[: ENDS[-1]], layer(x, ends)[: ENDS[-1]])


def test_the_gradient_of_a_gradient_of_cast_experts_is_refused(device):
    """Which depends on the weight, whether the gradient that came in does or not."""
    layer, ends = experts_of("fp8", device), torch.tensor(ENDS, device=device)
    x = torch.randn(ENDS[-1], 48, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x, ends).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        gradient.square().sum().backward()


@kinds
def test_cast_experts_in_torch_func(device, kind):
    layer, ends = experts_of(kind, device), torch.tensor(ENDS, device=device)
    parameters = dict(layer.named_parameters())
    x = torch.randn(2, ENDS[-1], 48, device=device)

    def loss(x, parameters):
        return torch.func.functional_call(layer, parameters, (x, ends)).square().sum()

    expected = []
    for one in x:
        leaves = [one.clone().requires_grad_(), *parameters.values()]
        expected.append(torch.autograd.grad(loss(leaves[0], parameters), leaves))
    detached = {name: parameter.detach() for name, parameter in parameters.items()}
    of_each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))(x, detached)
    for i, gradients in enumerate(expected):
        of_one = [of_each[0][i], *(of_each[1][name][i] for name in parameters)]
        torch.testing.assert_close(of_one, list(gradients))
    with pytest.raises(NotImplementedError, match="gradients come one at a time"):
        torch.autograd.functional.jacobian(lambda x: layer(x, ends), x[0], vectorize=True)
