"""Linear layers of a mixture of experts: rows sorted by expert, each group with a weight of its own."""

from __future__ import annotations

import math
from typing import Any

import torch

from flexgemm.torch import ops


class GroupedLinear(torch.nn.Module):
    """num_groups linear layers side by side: rows offsets[g - 1] to offsets[g] of x go through weight[g] and bias[g].

    weight (num_groups, out_features, in_features), bias (num_groups, out_features) or None, initialised as
    torch.nn.Linear does.
    fp8: the products are of FP8, forward and in the gradient of x: weights and rows are cast anew in each pass, e4m3,
        gradients e5m2, with a scale per row; the gradient of the weight is a product of the tensors as they are.

        y = layer(x, offsets)       # x (M, in_features), offsets (num_groups,) ends or (num_groups + 1,) bounds

    Rows of no group are not written and get a gradient of zero.
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
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.fp8 = fp8
        shape = num_groups, out_features, in_features
        self.weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(shape[:2], device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(in_features), weight and bias."""
        bound = 1 / math.sqrt(self.in_features)
        torch.nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        if not self.fp8:
            return ops.m_grouped_gemm_nt(x, self.weight, offsets, bias=self.bias)
        x, weight = autocast(x, self.weight)
        result: torch.Tensor = _Float8Product.apply(x, weight, self.bias, offsets)
        return result

    def frozen(self) -> Float8GroupedLinear:
        """A copy for inference, with weights of FP8."""
        return Float8GroupedLinear(self.weight.detach(), None if self.bias is None else self.bias.detach())

    def extra_repr(self) -> str:
        text = f"{self.num_groups}, {self.in_features}, {self.out_features}"
        return f"{text}, bias={self.bias is not None}, fp8={self.fp8}"
