"""Operators of convolutions, and of the maps that they go over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flexgemm import _C, conv
from flexgemm._arguments import dtype_name
from flexgemm._arrays import library_of
from flexgemm.gemm import FLOATS, FP8
from flexgemm.torch.dispatch import setting
from flexgemm.torch.maps import from_operators
from flexgemm.torch.operators.define import Gradients, expect_shape, operator

# ---- neighbour maps ----


@operator
def neighbor_map(
    coords: torch.Tensor,
    shape: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    check: bool,
) -> torch.Tensor:
    kernel, coords = tuple(kernel_size), coords.contiguous()
    result = coords.new_empty((kernel[0] * kernel[1] * kernel[2], coords.shape[0]), dtype=torch.int32)
    how: Any = {"shape": tuple(shape), "kernel_size": kernel, "dilation": tuple(dilation)}
    library_of(coords, "coords").run(_C.neighbor_map, coords, result, **how, transposed=transposed, check=check)
    return result


@neighbor_map.register_fake
def _(coords: Any, shape: Any, kernel_size: Any, *how: Any) -> torch.Tensor:
    volume = kernel_size[0] * kernel_size[1] * kernel_size[2]
    return coords.new_empty((volume, coords.shape[0]), dtype=torch.int32)


@operator
def row_order(map: torch.Tensor, kernel_size: Sequence[int], phases: Sequence[int]) -> torch.Tensor:
    """One order for all offsets: how many more would pay depends on the number of rows, which a program that is
    compiled for all numbers of rows does not know."""
    order = map.new_empty((1, map.shape[1]))
    library_of(map, "map").run(_C.row_order, map, order, kernel_size=tuple(kernel_size), phases=tuple(phases))
    return order


@row_order.register_fake
def _(map: Any, kernel_size: Any, phases: Any) -> torch.Tensor:
    return map.new_empty((1, map.shape[1]))


# ---- convolution over a map: submanifold, strided, transposed, inverse ----


@operator
def sparse_conv3d(
    feats: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    map: torch.Tensor,
    order: torch.Tensor | None,
    gradient_map: torch.Tensor | None,
    gradient_order: torch.Tensor | None,
    segments: torch.Tensor | None,
    kernel_size: Sequence[int],
    phases: Sequence[int],
    activation: str | None,
    algorithm: str,
    precision: str | None,
    groups: int,
) -> torch.Tensor:
    """gradient_map: the map of the gradient of feats where that is not `map` itself; the forward pass ignores it.
    phases: those of both, one after the other."""
    maps = map, order, gradient_map, gradient_order
    nmap = from_operators(*maps, kernel_size, phases, feats.shape[0], segments)
    how: Any = {"residual": residual, "activation": activation, "algorithm": algorithm, "groups": groups}
    return conv.sparse_conv3d(feats, weight, bias, neighbor_map=nmap, **how, precision=setting(precision, feats))


def _shape(
    feats: Any, weight: Any, bias: Any, residual: Any, map: Any, kernel_size: Any, groups: int
) -> tuple[int, int]:
    """Of the output of tensors without memory, which match."""
    expect_shape(feats, "feats", ("N", "C"), "map")
    expect_shape(weight, "weight", ("Co", *kernel_size, feats.shape[1] // groups), "neighbor_map and feats")
    shape = map.shape[1], weight.shape[0]
    if bias is not None:
        expect_shape(bias, "bias", shape[1:], "weight")
    if residual is not None:
        expect_shape(residual, "residual", shape, "map and weight")
    return shape


@sparse_conv3d.register_fake
def _(feats: Any, weight: Any, bias: Any, residual: Any, map: Any, *others: Any) -> torch.Tensor:
    *_, kernel_size, _, _, _, _, groups = others
    return feats.new_empty(_shape(feats, weight, bias, residual, map, kernel_size, groups))


@operator
def sparse_conv3d_float8(
    feats: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    scale_feats: torch.Tensor | None,
    scale_weight: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    map: torch.Tensor,
    order: torch.Tensor | None,
    kernel_size: Sequence[int],
    phases: Sequence[int],
    activation: str | None,
    algorithm: str,
    groups: int,
    out_dtype: str | None,
    dtype_feats: str | None,
    dtype_weight: str | None,
    dtype_out: str | None,
) -> torch.Tensor:
    """Without a gradient."""
    nmap = from_operators(map, order, None, None, kernel_size, phases, feats.shape[0])
    how: Any = {"residual": residual, "activation": activation, "algorithm": algorithm, "groups": groups}
    how |= {"scale_feats": scale_feats, "scale_weight": scale_weight, "scale_out": scale_out, "out_dtype": out_dtype}
    how |= {"dtype_feats": dtype_feats, "dtype_weight": dtype_weight, "dtype_out": dtype_out}
    return conv.sparse_conv3d(feats, weight, bias, neighbor_map=nmap, **how)


@sparse_conv3d_float8.register_fake
def _(
    feats: Any, weight: Any, bias: Any, residual: Any, of_feats: Any, of_weight: Any, of_out: Any, map: Any, *how: Any
) -> torch.Tensor:
    _, kernel_size, _, _, _, groups, out_dtype, _, _, dtype_out = how
    dtype = out_dtype or dtype_out or ("bfloat16" if of_out is None else "float8_e4m3fn")
    dtype_name(dtype, "out_dtype", FLOATS if of_out is None else FP8)
    shape = _shape(feats, weight, bias, residual, map, kernel_size, groups)
    return feats.new_empty(shape, dtype=getattr(torch, dtype))


@operator
def sparse_conv3d_backward(
    grad_out: torch.Tensor,
    feats: torch.Tensor,
    weight: torch.Tensor,
    map: torch.Tensor,
    order: torch.Tensor | None,
    gradient_map: torch.Tensor | None,
    gradient_order: torch.Tensor | None,
    segments: torch.Tensor | None,
    kernel_size: Sequence[int],
    phases: Sequence[int],
    needs_grad: Sequence[bool],
    algorithm: str,
    precision: str | None,
    groups: int,
) -> Gradients:
    """An empty tensor for each gradient that is not needed."""
    for_feats, for_weight, for_bias = needs_grad
    maps = map, order, gradient_map, gradient_order
    gradients = conv.sparse_conv3d_backward(
        grad_out,
        feats,
        weight,
        neighbor_map=from_operators(*maps, kernel_size, phases, feats.shape[0], segments),
        needs_grad=(for_feats, for_weight, for_bias),
        algorithm=algorithm,
        groups=groups,
        precision=setting(precision, feats),
    )
    first, second, third = (feats.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return first, second, third


@sparse_conv3d_backward.register_fake
def _(grad_out: Any, feats: Any, weight: Any, *others: Any) -> Gradients:
    shapes, needs_grad = (feats.shape, weight.shape, weight.shape[:1]), others[-4]
    first, second, third = (feats.new_empty(s if n else 0) for s, n in zip(shapes, needs_grad, strict=True))
    return first, second, third
