"""Tells torch.utils.flop_counter what the operators of torch.ops.flexgemm count, for those who import this: twice their
dense multiply-adds, and of a convolution as if every neighbour were there. Apart from the rest, because torch's counter
imports Triton where that is installed.

Formulas are given shapes where operators are given tensors.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from flexgemm.torch import operators  # noqa: F401  defines them

flexgemm = torch.ops.flexgemm


def _of_product(a: Any, b: Any, layout: str, b_row_major: bool = False) -> int:
    matrices = a[0] if layout in ("batched", "m_grouped_masked") else 1
    return 2 * int(matrices * a[-2] * a[-1] * b[-1 if b_row_major else -2])


@register_flop_formula(flexgemm.product)
def _(a: Any, b: Any, *others: Any, layout: str, b_row_major: bool = False, **how: Any) -> int:
    return _of_product(a, b, layout, b_row_major)


@register_flop_formula(flexgemm.product_into)
def _(out: Any, a: Any, b: Any, *others: Any, layout: str, b_row_major: bool = False, **how: Any) -> int:
    return _of_product(a, b, layout, b_row_major)


@register_flop_formula(flexgemm.m_grouped_gradients)
def _(grad_out: Any, a: Any, b: Any, grouping: Any, layout: str, needs_grad: Any, precision: Any, **how: Any) -> int:
    return sum(needs_grad[:2]) * _of_product(a, b, layout)


@register_flop_formula(flexgemm.float8_experts)
def _(x: Any, weight: Any, *others: Any, **how: Any) -> int:
    return _of_product(x, weight, "m_grouped")


@register_flop_formula(flexgemm.frozen_experts)
def _(x: Any, w: Any, *others: Any, **how: Any) -> int:
    return _of_product(x, w, "m_grouped")


@register_flop_formula(flexgemm.sparse_conv3d)
def _(feats: Any, weight: Any, *others: Any, out_shape: Any, **how: Any) -> int:
    return 2 * int(prod(weight) * out_shape[0])


@register_flop_formula(flexgemm.sparse_conv3d_float8)
def _(feats: Any, weight: Any, *others: Any, out_shape: Any, **how: Any) -> int:
    return 2 * int(prod(weight) * out_shape[0])


@register_flop_formula(flexgemm.sparse_conv3d_backward)
def _(grad_out: Any, feats: Any, weight: Any, *others: Any, **how: Any) -> int:
    needs_grad = others[-4]
    return sum(needs_grad[:2]) * 2 * int(prod(weight) * grad_out[0])
