"""Linear layers of a mixture of experts: rows sorted by expert, each group with a weight of its own."""

from __future__ import annotations

import math
from typing import Any

import torch

from flexgemm._arguments import as_bool, as_int, renamed
from flexgemm.torch import products
from flexgemm.torch.dispatch import autocast, autocast_bias, expect_tensor
from flexgemm.torch.experts import float8_experts, frozen_experts
from flexgemm.torch.nn.float8 import KeepsFloat8

_NAMES = {"a": "x", "b": "weight"}  # what a layer calls the factors of its product


class GroupedLinear(torch.nn.Module):
    """num_groups linear layers side by side: rows offsets[g - 1] to offsets[g] of x go through weight[g] and bias[g].

    weight (num_groups, out_features, in_features), bias (num_groups, out_features) or None, initialised as
    torch.nn.Linear does.
    fp8: the products are of FP8, forward and in the gradient of x: weights and rows are cast anew in each pass, e4m3,
        gradients e5m2, with a scale per row; the gradient of the weight is a product of the tensors as they are.

        y = layer(x, offsets)       # x (M, in_features), offsets (num_groups,) ends or (num_groups + 1,) bounds

    Rows of no group are not written, so that they hold anything, NaN too: leave them out by selecting rows, not by a
    factor of zero. Their gradient is zero.
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        fp8: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"num_groups": num_groups, "in_features": in_features, "out_features": out_features}
        self.num_groups, self.in_features, self.out_features = (as_int(n, name, least=0) for name, n in sizes.items())
        self.fp8 = as_bool(fp8, "fp8")
        shape = self.num_groups, self.out_features, self.in_features
        self.weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(shape[:2], device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(in_features), weight and bias."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0
        torch.nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        _expect_rows(x, self.in_features)
        if not self.fp8:
            with renamed(_NAMES):
                return products.m_grouped_gemm_nt(x, self.weight, offsets, bias=self.bias)
        x, weight = autocast(x, self.weight)
        with renamed(_NAMES):
            return float8_experts(x, weight, autocast_bias(self.bias), offsets)

    def frozen(self) -> Float8GroupedLinear:
        """A copy for inference, with weights of FP8."""
        return Float8GroupedLinear(self.weight.detach(), None if self.bias is None else self.bias.detach().clone())

    def extra_repr(self) -> str:
        text = f"{self.num_groups}, {self.in_features}, {self.out_features}"
        return f"{text}, bias={self.bias is not None}, fp8={self.fp8}"


class Float8GroupedLinear(KeepsFloat8):
    """`GroupedLinear` with weights that stay FP8: e4m3, a scale per row. Rows of x are cast in each call.

    weight (num_groups, out_features, in_features), bias (num_groups, out_features) or None: cast once. Neither has a
    gradient; that of x is a product with the weights as they are, in the dtype of x.
    """

    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        q, scale = products.cast_rows(weight.detach())
        self.register_buffer("weight", q)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        _expect_rows(x, self.weight.shape[2])
        (x,) = autocast(x)
        with renamed(_NAMES):
            return frozen_experts(x, self.weight, self.weight_scale, autocast_bias(self.bias), offsets)

    def extra_repr(self) -> str:
        groups, out_features, in_features = self.weight.shape
        return f"{groups}, {in_features}, {out_features}, bias={self.bias is not None}"


def _expect_rows(x: Any, in_features: int) -> None:
    expect_tensor(x, "x")
    if x.ndim != 2 or x.shape[1] != in_features:
        raise ValueError(f"x: expected (M, {in_features}), got {tuple(x.shape)}")
