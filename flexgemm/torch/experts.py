"""Products of experts that cast their operands to FP8 on the way, with a scale per row, and their gradients: straight
through the casts, that is those of the product of what was cast."""

from __future__ import annotations

from typing import Any

import torch

from flexgemm.torch import operators, products
from flexgemm.torch.autograd import keep, kept, no_gradient, recorded, records
from flexgemm.torch.dispatch import traced


def float8_experts(x: Any, weight: Any, bias: Any, offsets: Any) -> torch.Tensor:
    """x (M, K), weight (G, N, K), bias (G, N) or None, offsets as of `m_grouped_gemm_nt`: (M, N) of the dtype of x.
    Gradients are cast to e5m2; that of the weight is a product of the tensors as they are."""
    function: Any = operators.float8_experts_operator if traced(x, weight) else _record
    result: torch.Tensor = function(x, weight, bias, offsets)
    return result


def frozen_experts(x: Any, w: Any, scale_w: Any, bias: Any, offsets: Any) -> torch.Tensor:
    """The same with a weight that is FP8 already, w (G, N, K) and scale_w (G, N), which has no gradient: that of x is a
    product with the weight as it stands, in the dtype of x."""
    function: Any = operators.frozen_experts_operator if traced(x, w) else _record_frozen
    result: torch.Tensor = function(x, w, scale_w, bias, offsets)
    return result


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, offsets = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    keep(ctx, (x, weight), (ctx.needs_input_grad[1], ctx.needs_input_grad[0]), offsets)


def _backward(ctx: Any, grad_out: Any) -> Any:
    x, weight, offsets = kept(ctx, grad_out)
    function = _record_gradients if records(grad_out, x, weight) else _gradients
    grad_x, grad_weight, grad_bias = function(grad_out, x, weight, offsets, ctx.needs_input_grad[:3])
    return grad_x, grad_weight, None if grad_bias is None else grad_bias.to(ctx.bias_dtype), None


def _gradients(grad_out: Any, x: Any, weight: Any, offsets: Any, needs: Any) -> products.Gradients:
    grad_out, x, weight = grad_out.detach(), x.detach(), weight.detach()
    grad_x = grad_weight = grad_bias = None
    if needs[0]:
        q, scale = products.cast_rows(grad_out, "float8_e5m2")
        w, scale_w = products.cast_rows(weight.mT)
        grad_x = x.new_zeros(x.shape)
        products.m_grouped_gemm_nt(q, w, offsets, scale_a=scale, scale_b=scale_w, out=grad_x)
    if needs[1] or needs[2]:
        needs = False, *needs[1:]
        _, grad_weight, grad_bias = products.m_grouped_gradients(grad_out, x, weight, offsets, needs, None)
    return grad_x, grad_weight, grad_bias


def _save_frozen(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, w, scale_w, _, offsets = inputs
    ctx.save_for_backward(w, scale_w, offsets)


def _frozen_backward(ctx: Any, grad_out: Any) -> Any:
    function = _record_frozen_gradient if records(grad_out) else _frozen_gradient
    return function(grad_out, *ctx.saved_tensors), None, None, None, None


def _frozen_gradient(grad_out: Any, w: Any, scale_w: Any, offsets: Any) -> torch.Tensor:
    weight = (w.to(torch.float32) * scale_w[..., None]).to(grad_out.dtype)
    grad_x: torch.Tensor = grad_out.new_zeros((grad_out.shape[0], w.shape[2]))
    with torch.autocast(grad_out.device.type, enabled=False):
        products.product("m_grouped", grad_out.detach(), weight, offsets=offsets, b_row_major=True, out=grad_x)
    return grad_x


_record = recorded("Float8Experts", operators.float8_experts, _save, _backward)
_record_gradients = recorded("Float8ExpertsGradients", _gradients, None, no_gradient)
_record_frozen = recorded("FrozenExperts", operators.frozen_experts, _save_frozen, _frozen_backward)
_record_frozen_gradient = recorded("FrozenExpertsGradient", _frozen_gradient, None, no_gradient)

operators.float8_experts_operator.register_autograd(_backward, setup_context=_save)
operators.frozen_experts_operator.register_autograd(_frozen_backward, setup_context=_save_frozen)
