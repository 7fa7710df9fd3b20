"""Operators of products and of the casts that feed them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from flexgemm import gemm, quantization
from flexgemm._arguments import dtype_name
from flexgemm.torch.dispatch import name_of, setting
from flexgemm.torch.operators.define import Gradients, expect_shape, operator

# ---- FP8 ----


@operator
def quantize(
    x: torch.Tensor, dtype: str, granularity: str, scale: torch.Tensor | None, swiglu: bool, saturate: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """An empty tensor for a scale that is given: results of an operator are none of its inputs."""
    how: Any = {"granularity": granularity, "scale": scale, "swiglu": swiglu, "saturate": saturate}
    q, used = quantization.quantize(x, dtype, **how)
    return q, used if scale is None else used.new_empty(0)


@quantize.register_fake
def _(
    x: Any, dtype: Any, granularity: Any, scale: Any, swiglu: Any, saturate: Any = True
) -> tuple[torch.Tensor, torch.Tensor]:
    shape, of_scale = quantization.shapes(x.shape, granularity, swiglu)
    columns = x.shape[-1]
    if swiglu:
        torch._check_value(columns % 2 == 0, lambda: f"x: expected an even number of columns, got {tuple(x.shape)}")
    if scale is not None and not (granularity == "tensor" and scale.ndim == 0):
        one = granularity == "tensor"
        expect_shape(scale, "scale", (1,) if one else of_scale, f"x and granularity {granularity!r}")
    q = x.new_empty(shape, dtype=getattr(torch, dtype))
    return q, x.new_empty(of_scale if scale is None else 0, dtype=torch.float32)


# ---- products: dense, batched, grouped along M, N or K ----


@operator
def product(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    offsets: torch.Tensor | None,
    m_indices: torch.Tensor | None,
    masked_m: torch.Tensor | None,
    weight_indices: torch.Tensor | None,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    *,
    layout: str,
    groups: int = 0,
    expected_m: int = 0,
    b_row_major: bool = False,
    alpha: float = 1.0,
    activation: str | None = None,
    out_dtype: str | None = None,
    dtype_a: str | None = None,
    dtype_b: str | None = None,
    dtype_out: str | None = None,
    precision: str | None = None,
    promote_every: int | None = 128,
) -> torch.Tensor:
    how: Any = {key: value for key, value in locals().items() if key not in ("a", "b", "layout")}
    return gemm.product(layout, a, b, **(how | {"precision": setting(precision, a)}))


def _shape(
    a: Any, b: Any, *tensors: Any, layout: str, groups: int = 0, b_row_major: bool = False, **how: Any
) -> tuple[int, ...]:
    """Of the output of matrices without memory, which match."""
    (bias, _, m_indices, masked_m, *_), swiglu = tensors, how.get("activation") == "swiglu"
    shape = gemm.out_shape(layout, a.shape, b.shape, groups, b_row_major, swiglu)
    last = (a.shape[-1], "N") if b_row_major else ("N", a.shape[-1])
    expect_shape(b, "b", (a.shape[0] if a.ndim == b.ndim == 3 else "G", *last)[-b.ndim :], "a")
    if b.dtype.itemsize != a.dtype.itemsize or (b.dtype is not a.dtype and a.dtype.itemsize > 1):
        raise TypeError(f"b: expected dtype {name_of(a.dtype)} to match a, got {name_of(b.dtype)}")
    n = b.shape[-1 if b_row_major else -2]
    if swiglu:
        torch._check_value(n % 2 == 0, lambda: f"b: expected an even N for SwiGLU, got {n}")
    for x, name, sizes, like in (
        (bias, "bias", (*b.shape[:-2], n), "b"),
        (m_indices, "m_indices", a.shape[:1], "a"),
        (masked_m, "masked_m", a.shape[:1], "a"),
    ):
        if x is not None:
            expect_shape(x, name, sizes, like)
    return shape


@product.register_fake
def _(a: Any, b: Any, *tensors: Any, **how: Any) -> torch.Tensor:
    shape = _shape(a, b, *tensors, **how)
    scale_out, dtype = tensors[-1], how.get("out_dtype") or how.get("dtype_out")
    if dtype is None:
        narrow = a.dtype.itemsize == 1
        dtype = "float8_e4m3fn" if scale_out is not None else "bfloat16" if narrow else None
    else:
        dtype_name(dtype, "out_dtype", gemm.FLOATS if scale_out is None else gemm.FP8)
    return a.new_empty(shape, dtype=a.dtype if dtype is None else getattr(torch, dtype))


@partial(operator, writes=("out",))
def product_into(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    offsets: torch.Tensor | None,
    m_indices: torch.Tensor | None,
    masked_m: torch.Tensor | None,
    weight_indices: torch.Tensor | None,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    *,
    layout: str,
    groups: int = 0,
    expected_m: int = 0,
    b_row_major: bool = False,
    alpha: float = 1.0,
    activation: str | None = None,
    accumulate: bool = False,
    out_dtype: str | None = None,
    dtype_a: str | None = None,
    dtype_b: str | None = None,
    dtype_out: str | None = None,
    precision: str | None = None,
    promote_every: int | None = 128,
) -> None:
    """Leaves alone what is of no group. Not `product` itself: torch gives gradients to operators alone that write
    nothing."""
    how: Any = {key: value for key, value in locals().items() if key not in ("a", "b", "layout")}
    gemm.product(layout, a, b, **(how | {"precision": setting(precision, a)}))


@product_into.register_fake
def _(out: Any, a: Any, b: Any, *tensors: Any, groups: int = 0, **how: Any) -> None:
    shape = _shape(a, b, *tensors, groups=groups or next(iter(out.shape), 0), **how)
    expect_shape(out, "out", shape, "a and b")


# What tells the groups of rows apart.
GROUPING = {"m_grouped": "offsets", "m_grouped_contiguous": "m_indices", "m_grouped_masked": "masked_m"}


def of_gradients(grad_out: torch.Tensor, a: torch.Tensor, precision: str | None) -> tuple[torch.dtype, str]:
    """In what a product's gradients are multiplied, which is what its factors are; but float16 may not hold the
    gradient of a float32 output, and TF32 has its digits."""
    if a.dtype is torch.float16 and grad_out.dtype is torch.float32:
        return torch.float32, "tf32"
    return a.dtype, setting(precision, a)


def m_grouped_gradients(
    grad_out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    grouping: torch.Tensor,
    layout: str,
    needs_grad: Sequence[bool],
    precision: str | None,
) -> Gradients:
    """The gradients of a product grouped along M in a, b and bias (float32), and an empty tensor for each that is not
    needed. Rows of no group have a gradient of zero, and are not read."""
    dtype, precision = of_gradients(grad_out, a, precision)
    how: Any = {"precision": precision}
    grad_a, grad_b, grad_bias = (grad_out.new_empty(0, dtype=dtype) for dtype in (a.dtype, b.dtype, torch.float32))
    if needs_grad[0]:
        into = how | {GROUPING[layout]: grouping, "b_row_major": True, "out": a.new_zeros(a.shape)}
        grad_a = gemm.product(layout, grad_out.to(dtype), b.to(dtype), **into)
    if needs_grad[1] or needs_grad[2]:
        order, ends = _order_by_group(layout, grouping, a, b.shape[0])
        how |= {"offsets": ends, "groups": b.shape[0]}
        columns = _columns(grad_out, order)
        if needs_grad[1]:
            factors = columns.to(dtype), _columns(a.to(dtype), order)
            grad_b = gemm.product("k_grouped", *factors, out_dtype=b.dtype, **how)
        if needs_grad[2]:
            ones = columns.new_ones(1, columns.shape[1])
            how |= {"precision": "ieee", "out_dtype": "float32"}
            grad_bias = gemm.product("k_grouped", columns, ones, **how)[..., 0]
    return grad_a, grad_b, grad_bias


def _order_by_group(
    layout: str, grouping: torch.Tensor, a: torch.Tensor, groups: int
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The rows of a, group after group and at last those of none (None: as they are), and where each group ends."""
    if layout == "m_grouped":
        return None, grouping
    numbers = torch.arange(groups, device=a.device)
    if layout == "m_grouped_masked":
        inside = torch.arange(a.shape[1], device=a.device) < grouping[:, None]
        group = torch.where(inside, numbers[:, None], groups).flatten()
    else:
        group = torch.where((grouping >= 0) & (grouping < groups), grouping.long(), groups)
    in_order, order = torch.sort(group, stable=True)
    return order, torch.searchsorted(in_order, numbers, right=True)


def _columns(x: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """(..., C) -> (C, rows), the rows in this order."""
    rows = x.flatten(0, -2)
    return (rows if order is None else rows.index_select(0, order)).t()


m_grouped_gradients_operator = operator(m_grouped_gradients)


@m_grouped_gradients_operator.register_fake
def _(grad_out: Any, a: Any, b: Any, grouping: Any, layout: Any, needs_grad: Any, precision: Any) -> Gradients:
    needs_a, needs_b, needs_bias = needs_grad
    grad_bias = grad_out.new_empty(b.shape[:2] if needs_bias else 0, dtype=torch.float32)
    return a.new_empty(a.shape if needs_a else 0), b.new_empty(b.shape if needs_b else 0), grad_bias
