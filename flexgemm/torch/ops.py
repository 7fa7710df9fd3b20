"""torch.autograd over the array-neutral operations, on torch's current stream and the tensors' device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from flexgemm import conv
from flexgemm._arrays import Stream, library_of, torch_scope
from flexgemm.voxel import NeighborMap

# The gradient of ReLU needs its output, that of the others their input: then the sum is stored as it is before the
# activation, which torch applies, and both are kept.
_SPLIT: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.ops.aten.silu,
    "gelu": torch.ops.aten.gelu,
}
_GRADIENT: dict[str | None, Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]] = {
    None: lambda grad, _: grad,
    "relu": lambda grad, out: torch.ops.aten.threshold_backward(grad, out, 0),
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
}


class _SubmanifoldConv3d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        feats: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        neighbor_map: NeighborMap,
        activation: str | None,
        algorithm: str,
        precision: str,
    ) -> torch.Tensor:
        ctx.neighbor_map = neighbor_map
        ctx.activation = activation
        ctx.algorithm = algorithm
        ctx.precision = precision
        library = library_of(feats, "feats")
        apply = _SPLIT.get(activation)
        how = algorithm, precision, residual, None if apply else activation
        out: torch.Tensor = conv.forward(library, feats, weight, bias, neighbor_map, None, *how)
        ctx.save_for_backward(feats, weight, None if activation is None else out)
        return apply(out) if apply else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        feats, weight, kept = ctx.saved_tensors
        library = library_of(feats, "feats")
        needs_grad = ctx.needs_input_grad[:3]
        how = ctx.algorithm, ctx.precision
        grad_sum = _GRADIENT[ctx.activation](grad_out, kept)
        grads = conv.backward(library, grad_sum, feats, weight, ctx.neighbor_map, needs_grad, *how)
        return *grads, grad_sum if ctx.needs_input_grad[3] else None, None, None, None, None


def submanifold_conv3d(
    feats: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    neighbor_map: NeighborMap,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    algorithm: str = "auto",
    precision: str | None = None,
    stream: Stream = None,
) -> torch.Tensor:
    """`flexgemm.submanifold_conv3d` of torch tensors, differentiable once in feats, weight, bias and residual.

    feats (N, Ci), weight (Co, Kw, Kh, Kd, Ci), bias (Co) or None, residual (N, Co) or None -> (N, Co); float32,
        float16 or bfloat16: activation(convolution + bias + residual).
    activation: None, "relu", "silu" or "gelu" (the exact one). SiLU and GELU are fused only where nothing requires
        grad: their gradient needs the sum, which is rounded to the dtype of feats then.
    algorithm: as there, forward and in the gradient of feats.
    precision: of float32 products, forward and backward; by default torch's own setting at the time of the call,
        torch.backends.cuda.matmul.fp32_precision (which allow_tf32 and set_float32_matmul_precision set too).
    stream: a CUDA stream instead of torch's current one, forward and backward.

    Raises TypeError and ValueError by argument name; TypeError for tensors that are sparse, complex or lazily negated.
    """
    if not isinstance(feats, torch.Tensor):
        raise TypeError(f"feats: expected a torch.Tensor, got {type(feats).__module__}.{type(feats).__qualname__}")
    if precision is None:
        precision = float32_precision() if feats.dtype is torch.float32 else "ieee"
    library = conv.bind(feats, neighbor_map, stream)
    if not library.needs_grad(feats, weight, bias, residual):
        how = algorithm, precision, residual, activation
        out: torch.Tensor = conv.forward(library, feats, weight, bias, neighbor_map, None, *how)
        return out
    if activation not in list(_GRADIENT):
        raise ValueError(f"activation: expected None, 'relu', 'silu' or 'gelu', got {activation!r}")
    # The stream that is current in the forward pass is the one on which autograd runs the backward pass.
    on_stream = contextlib.nullcontext() if stream is None or not feats.is_cuda else torch_scope(feats, stream)
    apply: Any = _SubmanifoldConv3d.apply  # torch leaves it untyped
    with on_stream:
        result: torch.Tensor = apply(feats, weight, bias, residual, neighbor_map, activation, algorithm, precision)
    return result


def float32_precision() -> str:
    """What torch's settings ask of float32 products on CUDA: "tf32" or "ieee"."""
    matmul = torch.backends.cuda.matmul
    try:
        tf32 = matmul.fp32_precision == "tf32"
    except AttributeError:  # torch before 2.9 knows allow_tf32 only
        tf32 = matmul.allow_tf32
    return "tf32" if tf32 else "ieee"
