"""Linear layers of a mixture of experts: rows sorted by expert, each group with a weight of its own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from flexgemm._arguments import as_bool, as_int, renamed
from flexgemm.torch import products
from flexgemm.torch.dispatch import autocast, autocast_bias, expect_tensor
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
            result: torch.Tensor = _Float8Product.apply(x, weight, autocast_bias(self.bias), offsets)
        return result

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
        q, scale = _cast_rows(weight, "float8_e4m3fn")
        self.register_buffer("weight", q)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        _expect_rows(x, self.weight.shape[2])
        (x,) = autocast(x)
        operands = x, self.weight, self.weight_scale, autocast_bias(self.bias)
        with renamed(_NAMES):
            result: torch.Tensor = _FrozenProduct.apply(*operands, offsets)
        return result

    def extra_repr(self) -> str:
        groups, out_features, in_features = self.weight.shape
        return f"{groups}, {in_features}, {out_features}, bias={self.bias is not None}"


def _expect_rows(x: Any, in_features: int) -> None:
    expect_tensor(x, "x")
    if x.ndim != 2 or x.shape[1] != in_features:
        raise ValueError(f"x: expected (M, {in_features}), got {tuple(x.shape)}")


def _cast_rows(x: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., K) -> FP8 of that shape, and a scale per row (...).

    What is not finite stays so behind the product: loss scaling goes by that.
    """
    return products.quantize(x.detach(), dtype, granularity="row", saturate=False)


class _Float8Product(torch.autograd.Function):
    """Straight through the casts: the gradient is that of the product of what was cast."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, offsets: Any) -> Any:
        ctx.save_for_backward(x, weight, offsets)
        ctx.bias_dtype = None if bias is None else bias.dtype
        (q, scale), (w, scale_w) = _cast_rows(x, "float8_e4m3fn"), _cast_rows(weight, "float8_e4m3fn")
        how: Any = {"scale_a": scale, "scale_b": scale_w, "bias": bias, "out_dtype": x.dtype}
        return products.m_grouped_gemm_nt(q, w, offsets, **how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Any) -> Any:
        x, weight, offsets = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            (q, scale), (w, scale_w) = _cast_rows(grad_out, "float8_e5m2"), _cast_rows(weight.mT, "float8_e4m3fn")
            grad_x = x.new_zeros(x.shape)
            products.m_grouped_gemm_nt(q, w, offsets, scale_a=scale, scale_b=scale_w, out=grad_x)
        if needs_weight or needs_bias:
            needs = False, needs_weight, needs_bias
            _, grad_weight, grad_bias = products.m_grouped_gradients(grad_out, x, weight, offsets, needs, None)
        return grad_x, grad_weight, grad_bias if grad_bias is None else grad_bias.to(ctx.bias_dtype), None


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, scale_w: Any, bias: Any, offsets: Any) -> Any:
        ctx.save_for_backward(w, scale_w, offsets)
        q, scale = _cast_rows(x, "float8_e4m3fn")
        how: Any = {"scale_a": scale, "scale_b": scale_w, "bias": bias, "out_dtype": x.dtype}
        return products.m_grouped_gemm_nt(q, w, offsets, **how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Any) -> Any:
        w, scale_w, offsets = ctx.saved_tensors
        weight = (w.to(torch.float32) * scale_w[..., None]).to(grad_out.dtype)
        grad_x = grad_out.new_zeros((grad_out.shape[0], w.shape[2]))
        with torch.autocast(grad_out.device.type, enabled=False):
            products.product("m_grouped", grad_out, weight, offsets=offsets, b_row_major=True, out=grad_x)
        return grad_x, None, None, None, None
