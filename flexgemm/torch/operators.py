"""The operations as operators of torch.library, for whoever looks into a program instead of running it: torch.compile,
torch.export, dispatch modes, subclasses of Tensor. `torch.ops.flexgemm` holds them.

Each has what it computes on a CPU or a GPU (the array-neutral function), the shape and dtype of its result for tensors
without memory, and its gradient, made of operators again. ops.py calls them. They take a NeighborMap as its tensors,
dtypes by name, and precision None for torch's setting at the time when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from flexgemm import _C, conv, gemm, voxel
from flexgemm.torch.dispatch import setting
from flexgemm.torch.maps import from_operators

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _operator(function: Callable[..., Any], *, name: str | None = None, writes: Sequence[str] = ()) -> CustomOpDef:
    """The operator of a function's signature and name, or another name, on the CPU and CUDA. Autograd sees it whole."""

    @wraps(function)
    def silent(*args: Any) -> Any:
        with torch.no_grad():
            return function(*args)

    define: Any = torch.library.custom_op  # torch types it for functions whose parameters are known
    name = f"flexgemm::{name or function.__name__}"
    return define(name, silent, mutates_args=writes, device_types=("cpu", "cuda"))


# ---- neighbour maps ----


@_operator
def neighbor_map(
    coords: torch.Tensor,
    shape: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    check: bool,
) -> torch.Tensor:
    nmap = voxel.neighbor_map(coords, shape, kernel_size, dilation, check=check)
    return nmap.transposed_map if transposed else nmap.map


@neighbor_map.register_fake
def _(coords: Any, shape: Any, kernel_size: Any, dilation: Any, transposed: Any, check: Any) -> torch.Tensor:
    volume = kernel_size[0] * kernel_size[1] * kernel_size[2]
    return coords.new_empty((volume, coords.shape[0]), dtype=torch.int32)


@_operator
def row_order(map: torch.Tensor, kernel_size: Sequence[int]) -> torch.Tensor:
    order, workspace = map.new_empty(map.shape[1]), None
    while nbytes := _C.row_order(map, order, kernel_size=tuple(kernel_size), workspace=workspace):
        workspace = map.new_empty(nbytes, dtype=torch.uint8)
    return order


@row_order.register_fake
def _(map: Any, kernel_size: Any) -> torch.Tensor:
    return map.new_empty(map.shape[1])


# ---- submanifold convolution ----


@_operator
def submanifold_conv3d(
    feats: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    map: torch.Tensor,
    order: torch.Tensor | None,
    transposed: torch.Tensor | None,
    transposed_order: torch.Tensor | None,
    kernel_size: Sequence[int],
    precision: str | None,
) -> torch.Tensor:
    nmap = from_operators((map, order, transposed, transposed_order), kernel_size)
    return conv.submanifold_conv3d(feats, weight, bias, neighbor_map=nmap, precision=setting(precision, feats))


@submanifold_conv3d.register_fake
def _(feats: Any, weight: Any, bias: Any, map: Any, *others: Any) -> torch.Tensor:
    torch._check(feats.shape[0] == map.shape[1], lambda: "feats: its rows are not those of neighbor_map")
    torch._check(feats.shape[1] == weight.shape[-1], lambda: "weight: its channels are not those of feats")
    return feats.new_empty((feats.shape[0], weight.shape[0]))


@_operator
def submanifold_conv3d_backward(
    grad_out: torch.Tensor,
    feats: torch.Tensor,
    weight: torch.Tensor,
    map: torch.Tensor,
    order: torch.Tensor | None,
    transposed: torch.Tensor | None,
    transposed_order: torch.Tensor | None,
    kernel_size: Sequence[int],
    needs_grad: Sequence[bool],
    precision: str | None,
) -> Gradients:
    """An empty tensor for each gradient that is not needed."""
    for_feats, for_weight, for_bias = needs_grad
    gradients = conv.submanifold_conv3d_backward(
        grad_out,
        feats,
        weight,
        neighbor_map=from_operators((map, order, transposed, transposed_order), kernel_size),
        needs_grad=(for_feats, for_weight, for_bias),
        precision=setting(precision, feats),
    )
    first, second, third = (feats.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return first, second, third


@submanifold_conv3d_backward.register_fake
def _(grad_out: Any, feats: Any, weight: Any, *others: Any) -> Gradients:
    shapes, needs_grad = (feats.shape, weight.shape, weight.shape[:1]), others[-2]
    first, second, third = (feats.new_empty(s if n else 0) for s, n in zip(shapes, needs_grad, strict=True))
    return first, second, third


# ---- FP8 ----


@_operator
def quantize(
    x: torch.Tensor, dtype: str, granularity: str, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """An empty tensor for a scale that is given: results of an operator are none of its inputs."""
    q, used = gemm.quantize(x, dtype, granularity=granularity, scale=scale)
    return q, used if scale is None else used.new_empty(0)


@quantize.register_fake
def _(x: Any, dtype: Any, granularity: Any, scale: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q = x.new_empty(x.shape, dtype=getattr(torch, dtype))
    size = [0] if scale is not None else [] if granularity == "tensor" else x.shape[:1]
    return q, x.new_empty(size, dtype=torch.float32)


# ---- products ----


@_operator
def gemm_nt(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: str | None,
    dtype_a: str | None,
    dtype_b: str | None,
    precision: str | None,
) -> torch.Tensor:
    how: Any = {"out_dtype": out_dtype, "dtype_a": dtype_a, "dtype_b": dtype_b, "precision": setting(precision, a)}
    return gemm.gemm_nt(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, **how)


@_operator
def m_grouped_gemm_nt(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: str | None,
    dtype_a: str | None,
    dtype_b: str | None,
    precision: str | None,
) -> torch.Tensor:
    how: Any = {"out_dtype": out_dtype, "dtype_a": dtype_a, "dtype_b": dtype_b, "precision": setting(precision, a)}
    return gemm.m_grouped_gemm_nt(a, b, offsets, scale_a=scale_a, scale_b=scale_b, bias=bias, **how)


def _product_shape(a: Any, b: Any, out_dtype: str | None) -> torch.Tensor:
    torch._check(a.shape[1] == b.shape[-1], lambda: "b: its K is not that of a")
    dtype = a.dtype if a.dtype.itemsize > 1 else torch.bfloat16
    return a.new_empty((a.shape[0], b.shape[-2]), dtype=dtype if out_dtype is None else getattr(torch, out_dtype))


@gemm_nt.register_fake
def _(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, out_dtype: Any, *how: Any) -> torch.Tensor:
    return _product_shape(a, b, out_dtype)


@m_grouped_gemm_nt.register_fake
def _(a: Any, b: Any, offsets: Any, scale_a: Any, scale_b: Any, bias: Any, out_dtype: Any, *how: Any) -> torch.Tensor:
    return _product_shape(a, b, out_dtype)


@partial(_operator, writes=("out",))
def gemm_nt_into(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor | None,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype_a: str | None,
    dtype_b: str | None,
    precision: str | None,
) -> None:
    """With offsets m_grouped_gemm_nt, which leaves the rows of out alone that are of no group."""
    how: Any = {"out": out, "dtype_a": dtype_a, "dtype_b": dtype_b, "precision": setting(precision, a)}
    how |= {"scale_a": scale_a, "scale_b": scale_b, "bias": bias}
    gemm.gemm_nt(a, b, **how) if offsets is None else gemm.m_grouped_gemm_nt(a, b, offsets, **how)


def m_grouped_backward(
    grad_out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    needs_grad: Sequence[bool],
    precision: str | None,
) -> Gradients:
    """The gradients of m_grouped_gemm_nt in a, b and bias (float32), and an empty tensor for each that is not needed.
    Rows of no group have a gradient of zero."""
    precision = setting(precision, a)
    needs_a, needs_b, needs_bias = needs_grad
    grad_a = torch.zeros_like(a) if needs_a else a.new_empty(0)
    grad_b = torch.zeros_like(b) if needs_b else b.new_empty(0)
    grad_bias = grad_out.new_zeros(b.shape[:2] if needs_bias else 0, dtype=torch.float32)
    rows = grad_out.to(a.dtype)
    if needs_a:
        gemm.m_grouped_gemm_nt(rows, b.transpose(1, 2), offsets, out=grad_a, precision=precision)
    if needs_b or needs_bias:
        ends = offsets.tolist()
        bounds = pairwise(ends if len(ends) > len(b) else [0, *ends])
        for group, (start, end) in enumerate(bounds):
            if needs_b and start < end:
                gemm.gemm_nt(rows[start:end].t(), a[start:end].t(), out=grad_b[group], precision=precision)
            if needs_bias:
                torch.sum(grad_out[start:end], 0, dtype=torch.float32, out=grad_bias[group])
    return grad_a, grad_b, grad_bias


m_grouped_gemm_nt_backward = _operator(m_grouped_backward, name="m_grouped_gemm_nt_backward")


@m_grouped_gemm_nt_backward.register_fake
def _(grad_out: Any, a: Any, b: Any, offsets: Any, needs_grad: Any, precision: Any) -> Gradients:
    needs_a, needs_b, needs_bias = needs_grad
    grad_bias = grad_out.new_empty(b.shape[:2] if needs_bias else 0, dtype=torch.float32)
    return a.new_empty(a.shape if needs_a else 0), b.new_empty(b.shape if needs_b else 0), grad_bias
