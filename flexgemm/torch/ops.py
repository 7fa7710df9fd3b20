"""The operations for torch: recorded by autograd, under torch.autocast, in torch.compile and torch.func.

Each function decides how the call goes (dispatch.py). Traced, it is an operator (operators.py); where autograd has to
see it, an autograd.Function; else the array-neutral function, at no more than its cost. Both that record share one
gradient, made of functions of this file, which decide anew how they go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flexgemm import conv, gemm, voxel
from flexgemm._arrays import Stream, library_of
from flexgemm.torch import operators
from flexgemm.torch.autograd import no_gradient, on_stream, recorded, records
from flexgemm.torch.dispatch import autocast, expect_tensor, refuse_stream, setting, traced, transformed
from flexgemm.torch.maps import assemble, from_operators
from flexgemm.voxel import NeighborMap

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


# ---- neighbour maps ----


def neighbor_map(
    coords: torch.Tensor,
    shape: Sequence[int],
    kernel_size: int | Sequence[int] = 3,
    dilation: int | Sequence[int] = 1,
    *,
    check: bool = False,
    stream: Stream = None,
) -> NeighborMap:
    """`flexgemm.neighbor_map` of a torch tensor, which torch.compile can trace."""
    expect_tensor(coords, "coords")
    if not traced(coords, coords):
        return voxel.neighbor_map(coords, shape, kernel_size, dilation, check=check, stream=stream)
    refuse_stream(stream)
    kernel, steps = _triple(kernel_size), _triple(dilation)
    native, order = _build(coords, tuple(shape), kernel, steps, False, check)
    return assemble(coords, tuple(shape), kernel, steps, None, native, order, None)


def _triple(value: int | Sequence[int]) -> Any:
    return tuple(value) if isinstance(value, Sequence) else (value, value, value)


def _build(coords: Any, shape: Any, kernel: Any, dilation: Any, transposed: bool, check: bool) -> Any:
    """A map and its order, by operators."""
    native = operators.neighbor_map(coords, shape, kernel, dilation, transposed, check)
    return native, operators.row_order(native, kernel) if coords.is_cuda else None


def _as_tensors(nmap: NeighborMap, gradient: bool) -> tuple[Any, Any, Any, Any]:
    """A map and its order as operators take them; and the other pair, if a gradient will be asked for that uses it."""
    if not gradient or nmap.mirrored:
        return nmap.native, nmap.native_order, None, None
    if nmap._native_transposed is None:
        nmap._native_transposed = _build(nmap.coords, nmap.shape, nmap.kernel_size, nmap.dilation, True, False)
    return nmap.native, nmap.native_order, *nmap._native_transposed


# ---- submanifold convolution ----


def submanifold_conv3d(
    feats: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    neighbor_map: NeighborMap,
    precision: str | None = None,
    stream: Stream = None,
) -> torch.Tensor:
    """`flexgemm.submanifold_conv3d` of torch tensors, differentiable once in feats, weight and bias.

    feats (N, Ci), weight (Co, Kw, Kh, Kd, Ci), bias (Co) or None -> (N, Co); float32, float16 or bfloat16, and under
        torch.autocast the dtype of that.
    precision: of float32 products, forward and backward; by default torch's own setting at the time of the call,
        torch.backends.cuda.matmul.fp32_precision (which allow_tf32 and set_float32_matmul_precision set too).
    stream: a CUDA stream instead of torch's current one, forward and backward.

    Raises TypeError and ValueError by argument name; TypeError for tensors that are sparse, complex or lazily negated.
    """
    expect_tensor(feats, "feats")
    if traced(feats, weight):
        expect_tensor(weight, "weight")
        refuse_stream(stream)
        feats, weight, bias = autocast(feats, weight, bias)
        maps = _as_tensors(neighbor_map, torch.is_grad_enabled() and feats.requires_grad)
        return operators.submanifold_conv3d(feats, weight, bias, *maps, neighbor_map.kernel_size, precision)
    feats, weight, bias = autocast(feats, weight, bias)
    precision = setting(precision, feats)
    if records(feats, weight, bias):
        return record_conv(feats, weight, bias, neighbor_map, precision, stream)
    library = conv.bind(feats, neighbor_map, stream)
    result: torch.Tensor = conv.forward(library, feats, weight, bias, neighbor_map, None, precision)
    return result


def submanifold_conv3d_backward(
    grad_out: torch.Tensor,
    feats: torch.Tensor,
    weight: torch.Tensor,
    *,
    neighbor_map: NeighborMap,
    needs_grad: tuple[bool, bool, bool] = (True, True, True),
    precision: str | None = None,
    stream: Stream = None,
) -> Gradients:
    """`flexgemm.submanifold_conv3d_backward` of torch tensors; itself not differentiable."""
    expect_tensor(grad_out, "grad_out")
    if traced(grad_out, feats):
        expect_tensor(feats, "feats")
        refuse_stream(stream)
        maps = _as_tensors(neighbor_map, needs_grad[0])
        how = neighbor_map.kernel_size, needs_grad, precision
        gradients = operators.submanifold_conv3d_backward(grad_out, feats, weight, *maps, *how)
        first, second, third = (g if n else None for g, n in zip(gradients, needs_grad, strict=True))
        return first, second, third
    precision = setting(precision, feats)
    if records(grad_out, feats, weight):
        with on_stream(feats, stream):
            first, second, third = _record_conv_backward(grad_out, feats, weight, neighbor_map, needs_grad, precision)
        return first, second, third
    library = conv.bind(feats, neighbor_map, stream)
    return conv.backward(library, grad_out, feats, weight, neighbor_map, needs_grad, precision)


def record_conv(
    feats: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    neighbor_map: NeighborMap,
    precision: str,
    stream: Stream,
) -> torch.Tensor:
    """A convolution that autograd records, on tensors as they are."""
    conv.bind(feats, neighbor_map, None)  # checks their types
    with on_stream(feats, stream):
        result: torch.Tensor = _record_conv(feats, weight, bias, neighbor_map, precision)
    return result


def _conv_forward(feats: Any, weight: Any, bias: Any, neighbor_map: NeighborMap, precision: str) -> Any:
    return conv.forward(library_of(feats, "feats"), feats, weight, bias, neighbor_map, None, precision)


def _conv_save(ctx: Any, args: tuple[Any, ...]) -> None:
    feats, weight, _, ctx.neighbor_map, ctx.precision = args
    ctx.save_for_backward(feats, weight)


def _conv_backward(ctx: Any, grad_out: Any) -> Any:
    feats, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    how = {"neighbor_map": ctx.neighbor_map, "needs_grad": needs, "precision": ctx.precision}
    return *submanifold_conv3d_backward(grad_out, feats, weight, **how), None, None


def _conv_gradients(grad_out: Any, feats: Any, weight: Any, neighbor_map: Any, needs: Any, precision: Any) -> Any:
    return conv.backward(library_of(feats, "feats"), grad_out, feats, weight, neighbor_map, needs, precision)


_record_conv = recorded("SubmanifoldConv3d", _conv_forward, _conv_save, _conv_backward)
_record_conv_backward = recorded("SubmanifoldConv3dBackward", _conv_gradients, lambda ctx, args: None, no_gradient)


def _conv_context(ctx: Any, inputs: Any, output: Any) -> None:
    feats, weight, _, *maps, ctx.kernel_size, ctx.precision = inputs
    ctx.save_for_backward(feats, weight, *maps)


def _conv_gradient(ctx: Any, grad_out: Any) -> Any:
    feats, weight, *maps = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    how = {"neighbor_map": from_operators(maps, ctx.kernel_size), "needs_grad": needs, "precision": ctx.precision}
    return *submanifold_conv3d_backward(grad_out, feats, weight, **how), *[None] * 6


operators.submanifold_conv3d.register_autograd(_conv_gradient, setup_context=_conv_context)


# ---- FP8 ----


def quantize(
    x: torch.Tensor,
    dtype: Any = "float8_e4m3fn",
    *,
    granularity: str = "tensor",
    scale: torch.Tensor | None = None,
    stream: Stream = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flexgemm.quantize` of a torch tensor. No gradient passes it."""
    expect_tensor(x, "x")
    if not (traced(x, x) or transformed()):
        q, used = gemm.quantize(x, dtype, granularity=granularity, scale=scale, stream=stream)
        return q, used
    refuse_stream(stream)
    q, made = operators.quantize(x.detach(), _name(dtype), granularity, scale)
    return q, made if scale is None else scale


def _name(dtype: Any) -> Any:
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


# ---- products ----


def gemm_nt(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: Any = None,
    dtype_a: str | None = None,
    dtype_b: str | None = None,
    precision: str | None = None,
    stream: Stream = None,
) -> torch.Tensor:
    """`flexgemm.gemm_nt` of torch tensors, differentiable in a, b and bias where these are float32, float16 or bfloat16
    without scales; torch.autocast casts such a and b.

    precision: of float32 products, by default torch's own setting, as of `submanifold_conv3d`. Raises ValueError where
    a gradient is asked of a product with scales or of FP8.
    """
    expect_tensor(a, "a")
    a, b = autocast(a, b)
    return _product(a, b, None, scale_a, scale_b, bias, out, out_dtype, dtype_a, dtype_b, precision, stream)


def m_grouped_gemm_nt(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    *,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: Any = None,
    dtype_a: str | None = None,
    dtype_b: str | None = None,
    precision: str | None = None,
    stream: Stream = None,
) -> torch.Tensor:
    """`flexgemm.m_grouped_gemm_nt` of torch tensors, differentiable once, as `gemm_nt` is. Rows of a outside every
    group have a gradient of zero. The gradient of b reads the offsets on the host."""
    expect_tensor(a, "a")
    a, b = autocast(a, b)
    return _product(a, b, offsets, scale_a, scale_b, bias, out, out_dtype, dtype_a, dtype_b, precision, stream)


def _product(
    a: Any,
    b: Any,
    offsets: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any,
    out: Any,
    out_dtype: Any,
    dtype_a: str | None,
    dtype_b: str | None,
    precision: str | None,
    stream: Stream,
) -> torch.Tensor:
    recording = records(a, b, bias)
    if recording:
        expect_differentiable(a, scale_a, scale_b, out)
    if traced(a, b):
        expect_tensor(b, "b")
        refuse_stream(stream)
        if out is not None:
            operators.gemm_nt_into(out, a, b, offsets, scale_a, scale_b, bias, dtype_a, dtype_b, precision)
            return out
        how = scale_a, scale_b, bias, _name(out_dtype), dtype_a, dtype_b, precision
        traced_result: torch.Tensor = (
            operators.gemm_nt(a, b, *how) if offsets is None else operators.m_grouped_gemm_nt(a, b, offsets, *how)
        )
        return traced_result
    precision = setting(precision, a)
    if recording:
        return record_product(a, b, offsets, scale_a, scale_b, bias, out_dtype, dtype_a, dtype_b, precision, stream)
    library = library_of(a, "a", None, stream)
    result: torch.Tensor = gemm.product(
        library, a, b, offsets, scale_a, scale_b, bias, out, out_dtype, dtype_a, dtype_b, precision
    )
    return result


def expect_differentiable(a: torch.Tensor, scale_a: Any, scale_b: Any, out: Any) -> None:
    """Raises for what a product that is recorded cannot have."""
    if transformed() and not torch.is_grad_enabled():
        return
    if out is not None:
        raise ValueError("out: cannot be given when a, b or bias require grad")
    if scale_a is not None or scale_b is not None or a.dtype.itemsize == 1:
        raise ValueError("a: a product of FP8 or with scales is not differentiable, but a, b or bias require grad")


def record_product(a: Any, b: Any, offsets: Any, *args: Any) -> torch.Tensor:
    """A product that autograd records, on tensors as they are; the last of args is the stream."""
    *how, stream = args
    with on_stream(a, stream):
        result: torch.Tensor = _record_product(a, b, offsets, *how)
    return result


def _product_forward(*args: Any) -> Any:
    a, b, offsets, scale_a, scale_b, bias, *how = args
    return gemm.product(library_of(a, "a"), a, b, offsets, scale_a, scale_b, bias, None, *how)


def _product_save(ctx: Any, args: tuple[Any, ...]) -> None:
    a, b, offsets, _, _, bias, *_, precision = args
    _save_product(ctx, a, b, offsets, bias, precision)


def _product_backward(ctx: Any, grad_out: Any) -> Any:
    needs = ctx.needs_input_grad
    grad_a, grad_b, grad_bias = _product_gradient(ctx, grad_out, (needs[0], needs[1], needs[5]))
    return grad_a, grad_b, None, None, None, grad_bias, *[None] * 4


_record_product = recorded("Product", _product_forward, _product_save, _product_backward)


def _save_product(ctx: Any, a: Any, b: Any, offsets: Any, bias: Any, precision: str | None) -> None:
    ctx.precision = precision
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(a, b, offsets)


def _product_gradient(ctx: Any, grad_out: Any, needs: tuple[bool, bool, bool]) -> Gradients:
    """Of out = a . b^T + bias: grad_out . b, grad_out^T . a, and the sum of the rows of grad_out."""
    a, b, offsets = ctx.saved_tensors
    how = None, None, None, None, None, None, None, ctx.precision, None
    grad_a = grad_b = grad_bias = None
    if offsets is None:
        rows = grad_out.to(a.dtype)
        if needs[0]:
            grad_a = _product(rows, b.t(), None, *how)
        if needs[1]:
            grad_b = _product(rows.t(), a.t(), None, *how)
        if needs[2]:
            grad_bias = grad_out.sum(0)
    else:
        if traced(grad_out, a):
            backward: Any = operators.m_grouped_gemm_nt_backward
        else:
            recording = records(grad_out, a, b)
            backward = _record_grouped_backward if recording else operators.m_grouped_backward
        gradients = backward(grad_out, a, b, offsets, needs, ctx.precision)
        grad_a, grad_b, grad_bias = (g if n else None for g, n in zip(gradients, needs, strict=True))
    return grad_a, grad_b, None if grad_bias is None else grad_bias.to(ctx.bias_dtype)


_record_grouped_backward = recorded(
    "GroupedProductBackward", operators.m_grouped_backward, lambda ctx, args: None, no_gradient
)


def _gemm_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, _, _, bias, *_, precision = inputs
    _save_product(ctx, a, b, None, bias, precision)


def _gemm_gradient(ctx: Any, grad_out: Any) -> Any:
    needs = ctx.needs_input_grad
    grad_a, grad_b, grad_bias = _product_gradient(ctx, grad_out, (needs[0], needs[1], needs[4]))
    return grad_a, grad_b, None, None, grad_bias, *[None] * 4


def _grouped_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _product_save(ctx, inputs)


operators.gemm_nt.register_autograd(_gemm_gradient, setup_context=_gemm_context)
operators.m_grouped_gemm_nt.register_autograd(_product_backward, setup_context=_grouped_context)
