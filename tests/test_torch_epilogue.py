"""torch: gradients through bias, residual and activation, against torch's own operations in float64."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import scenes
import verdicts

import flexgemm

torch = pytest.importorskip("torch", reason="torch not installed")
import flexgemm.torch  # noqa: E402

ACTIVATIONS = [None, "relu", "silu", "gelu"]
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
# A 16-bit sum is rounded before SiLU and GELU, and a gradient before it goes through the convolution.
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2}


class Problem:
    def __init__(self, device, dtype="float32", n=300, ci=33, co=40):
        self.tolerance = TOLERANCE[dtype]
        coords, shape = scenes.scene(n)
        self.map = torch.from_numpy(reference.neighbor_map(coords, shape)).to(device, torch.int64)
        self.nmap = flexgemm.neighbor_map(torch.from_numpy(coords).to(device), shape)
        rng = np.random.default_rng(0)
        draw = [(n, ci), (co, 3, 3, 3, ci), (co,), (n, co), (n, co)]
        *leaves, grad_out = (torch.from_numpy(scenes.values(rng, s, "float32")) for s in draw)
        leaves[1] *= (8 * ci) ** -0.5
        self.leaves = [x.to(device, getattr(torch, dtype)).requires_grad_() for x in leaves]
        self.grad_out = grad_out.to(device, getattr(torch, dtype))

    def __call__(self, activation, leaves=None):
        feats, weight, bias, residual = leaves or self.leaves
        how = {"neighbor_map": self.nmap, "precision": "ieee", "residual": residual, "activation": activation}
        return flexgemm.torch.submanifold_conv3d(feats, weight, bias, **how)

    def exact(self, activation):
        """Output and gradients by torch in float64."""
        leaves = [x.detach().double().requires_grad_() for x in self.leaves]
        feats, weight, bias, residual = leaves
        gathered = feats[self.map.clamp(min=0)] * (self.map >= 0)[..., None]
        out = torch.einsum("vnc,ovc->no", gathered, weight.flatten(1, 3)) + bias + residual
        out = getattr(torch.nn.functional, activation)(out) if activation else out
        return out, torch.autograd.grad(out, leaves, self.grad_out.double())


def assert_near(got, expected, tolerance, what):
    """Per row, as everywhere; a weight by output channel, a bias as one row."""
    rows = [np.atleast_2d(x.detach().double().cpu().numpy()) for x in (got, expected)]
    verdicts.assert_rows(*(x.reshape(len(x), -1) for x in rows), tolerance, what)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@every_activation
def test_output_and_gradients(device, dtype, activation):
    p = Problem(device, dtype)
    out = p(activation)
    expected, gradients = p.exact(activation)
    assert_near(out, expected, p.tolerance, "out")
    out.backward(p.grad_out)
    for name, leaf, gradient in zip(("feats", "weight", "bias", "residual"), p.leaves, gradients, strict=True):
        assert (leaf.grad.dtype, leaf.grad.shape) == (leaf.dtype, leaf.shape)
        assert_near(leaf.grad, gradient, p.tolerance, f"{name}.grad")


@every_activation
def test_any_leaf_may_need_its_gradient_alone(device, activation):
    p = Problem(device)
    together = torch.autograd.grad(p(activation), p.leaves, p.grad_out)
    for i, gradient in enumerate(together):
        leaves = [x.detach().requires_grad_(i == j) for j, x in enumerate(p.leaves)]
        out = p(activation, leaves)
        assert out.requires_grad
        out.backward(p.grad_out)
        assert torch.equal(leaves[i].grad, gradient)
        assert all(x.grad is None for j, x in enumerate(leaves) if j != i)


@every_activation
def test_inference_is_one_call(device, activation, monkeypatch):
    """Without gradients nothing is kept, and torch applies nothing."""
    p = Problem(device, "float16")
    monkeypatch.setattr(flexgemm.torch.ops, "_APART", None)
    with torch.no_grad():
        out = p(activation)
    assert out.grad_fn is None
    how = {"neighbor_map": p.nmap, "activation": activation}
    feats, weight, bias, residual = (x.detach() for x in p.leaves)
    assert torch.equal(out, flexgemm.submanifold_conv3d(feats, weight, bias, residual=residual, **how))


@every_activation
def test_the_neutral_function_records_too(device, activation):
    p = Problem(device)
    *args, residual = (x.detach() for x in p.leaves)
    residual.requires_grad_()
    how = {"neighbor_map": p.nmap, "residual": residual, "activation": activation}
    out = flexgemm.submanifold_conv3d(*args, **how)
    out.backward(p.grad_out)
    expected = torch.autograd.grad(p(activation), p.leaves, p.grad_out)[3]
    assert torch.equal(residual.grad, expected)
    with pytest.raises(ValueError, match="out: cannot be given when feats, weight, bias or residual require grad"):
        flexgemm.submanifold_conv3d(*args, **how, out=out.detach())


def test_a_residual_block(device):
    """feats that are their own residual get both gradients."""
    p = Problem(device, ci=40)
    feats, weight, bias, _ = p.leaves
    p.leaves = [feats, weight, bias, feats]
    out = p("relu")
    expected = p.exact("relu")[1]
    out.backward(p.grad_out)
    assert_near(feats.grad, expected[0] + expected[3], p.tolerance, "feats.grad")


def test_an_output_changed_before_backward_is_noticed(device):
    p = Problem(device)
    out = p("relu")
    out.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(p.grad_out)


@pytest.mark.parametrize("activation", ["tanh", 1, ["silu"]])
def test_an_unknown_activation(device, activation):
    with pytest.raises((TypeError, ValueError), match="activation"):
        Problem(device)(activation)
