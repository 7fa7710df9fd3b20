"""Operators of the layers of experts that cast their operands to FP8 on the way."""

from __future__ import annotations

from typing import Any

import torch

from flexgemm import gemm, quantization
from flexgemm.torch.operators.define import operator


def cast_rows(x: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., K) -> FP8 of that shape, and a scale per row (...).

    What is not finite stays so behind the product: loss scaling goes by that.
    """
    return quantization.quantize(x, dtype, granularity="row", saturate=False)


def float8_experts(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor
) -> torch.Tensor:
    return frozen_experts(x, *cast_rows(weight, "float8_e4m3fn"), bias, offsets)


def frozen_experts(
    x: torch.Tensor, w: torch.Tensor, scale_w: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor
) -> torch.Tensor:
    q, scale = cast_rows(x, "float8_e4m3fn")
    how: Any = {"scale_a": scale, "scale_b": scale_w, "bias": bias, "out_dtype": x.dtype}
    return gemm.product("m_grouped", q, w, offsets=offsets, **how)


float8_experts_operator = operator(float8_experts)
frozen_experts_operator = operator(frozen_experts)


@float8_experts_operator.register_fake
def _(x: Any, weight: Any, *others: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


@frozen_experts_operator.register_fake
def _(x: Any, w: Any, *others: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0], w.shape[1]))
