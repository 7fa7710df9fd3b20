"""A convolution of torch tensors that autograd records, and the same in float64; work that keeps a stream busy."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import scenes
import verdicts
from verdicts import assert_rows

import flexgemm

torch = pytest.importorskip("torch", reason="torch not installed")
import flexgemm.torch  # noqa: E402


def keep_busy():
    """Work of several milliseconds on the current stream: what does not wait for it reads unfinished data."""
    torch.cuda._sleep(20_000_000)


def numpy(tensor):
    return tensor.detach().cpu().to(torch.float64).numpy()


class Problem:
    """Inputs as torch tensors that require grad, the map, and the same numbers in NumPy."""

    def __init__(self, device, mode="float32", n=300, ci=33, co=40, kernel_size=(3, 3, 3)):
        self.mode, self.precision = mode, "tf32" if mode == "tf32" else "ieee"
        self.dtype = torch.float32 if mode == "tf32" else getattr(torch, mode)
        self.tolerance = verdicts.ROW_TOLERANCE[mode]
        self.coords, self.shape = scenes.scene(n)
        self.map = reference.neighbor_map(self.coords, self.shape, kernel_size)
        self.nmap = flexgemm.neighbor_map(torch.from_numpy(self.coords).to(device), self.shape, kernel_size)
        rng = np.random.default_rng(0)
        draw = [(n, ci), (co, *kernel_size, ci), (co,), (n, co)]
        self.feats, self.weight, self.bias, self.grad_out = (
            torch.from_numpy(scenes.values(rng, s, "float32", one_sign=min(ci, co) < 32)).to(device, self.dtype)
            for s in draw
        )
        for leaf in (self.feats, self.weight, self.bias):
            leaf.requires_grad_()

    def __call__(self, feats=None, weight=None, bias=None, **how):
        return flexgemm.torch.submanifold_conv3d(
            self.feats if feats is None else feats,
            self.weight if weight is None else weight,
            self.bias if bias is None else bias,
            neighbor_map=self.nmap,
            **{"precision": self.precision, **how},
        )

    def check(self, out, grad_out=None):
        """The output, and the gradients that its backward pass left in the leaves."""
        feats, weight, bias = map(numpy, (self.feats, self.weight, self.bias))
        assert_rows(numpy(out), reference.conv_forward(feats, weight, bias, self.map), self.tolerance)
        grad_out = numpy(self.grad_out if grad_out is None else grad_out)
        grad_weight, grad_bias = reference.conv_wgrad(grad_out, feats, self.map)
        grad_feats = reference.conv_dgrad(grad_out, weight, self.map, len(feats))
        assert_rows(numpy(self.feats.grad), grad_feats, self.tolerance, "feats.grad")
        got = numpy(self.weight.grad).reshape(grad_weight.shape)
        assert_rows(got, grad_weight, self.tolerance, "weight.grad")
        assert_rows(got.swapaxes(0, 1), grad_weight.swapaxes(0, 1), self.tolerance, "weight.grad by offset")
        assert_rows(numpy(self.bias.grad)[None], grad_bias[None], self.tolerance, "bias.grad")
