"""The operations for torch: recorded by autograd, under torch.autocast, in torch.compile and torch.func.

Each function decides how the call goes (dispatch.py). Traced, it is an operator (operators/); where autograd has to
see it, an autograd.Function; else the array-neutral function, at no more than its cost. Both that record share one
gradient, made of functions of this file, which decide anew how they go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch

from flexgemm import conv, voxel
from flexgemm._arguments import as_int, expect_bools, renamed
from flexgemm._arrays import Stream, on_stream
from flexgemm._built import Built
from flexgemm._torch import requires_grad
from flexgemm._voxels import Triple
from flexgemm.conv import Float8
from flexgemm.torch import operators
from flexgemm.torch.autograd import keep, kept, no_gradient, recorded, records
from flexgemm.torch.dispatch import (
    autocast,
    beneath_transforms,
    casts,
    expect_foreseen,
    expect_tensor,
    in_mode,
    name_of,
    refuse_stream,
    setting,
    traced,
    transformed,
    unwrapped,
)
from flexgemm.torch.maps import assemble, from_operators, gradient_of, segments_of
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
        with beneath_transforms():
            given = unwrapped(coords, "coords")
            return voxel.neighbor_map(given, shape, kernel_size, dilation, check=check, stream=stream)
    refuse_stream(stream)
    grid, kernel, steps = tuple(shape), _triple(kernel_size), _triple(dilation)
    padding = tuple(k // 2 * step for k, step in zip(kernel, steps, strict=True))
    native, order = _build(coords, grid, kernel, steps, False, check)
    numbers = grid, grid, kernel, (1, 1, 1), padding, steps, False, True, ((1, 1, 1), (1, 1, 1)), None
    return assemble((coords, coords, native, order, None, None, None), numbers)


def _triple(value: int | Sequence[int]) -> Any:
    return tuple(value) if isinstance(value, Sequence) else (value, value, value)


def _build(coords: Any, shape: Any, kernel: Any, dilation: Any, transposed: bool, check: bool) -> Any:
    """A submanifold map and its order, by operators."""
    with torch.inference_mode(False):  # none that training refuses
        native = operators.neighbor_map(coords, shape, kernel, dilation, transposed, check)
        return native, operators.row_order(native, kernel, (1, 1, 1)) if coords.is_cuda else None


def _turned(nmap: NeighborMap) -> Any:
    """The map of a strided layer the other way round and its order, by operators, of which none finds its voxels: from
    its entries, where each pair of voxels is there once."""
    map, rows = nmap.native, nmap.coords.shape[0]
    with torch.inference_mode(False):
        outputs = torch.arange(map.shape[1], dtype=map.dtype, device=map.device).expand_as(map)
        places = torch.where(map < 0, rows, map).long()  # of an entry without a voxel, behind the others
        native = map.new_full((map.shape[0], rows + 1), -1).scatter(1, places, outputs)[:, :-1].contiguous()
        return native, operators.row_order(native, nmap.kernel_size, nmap.phases[1]) if map.is_cuda else None


def lasts(built: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether what was built of a tensor may be kept beside it: a FakeTensor, which is of one trace, not beside a real
    one; and in a dispatch mode nothing, since selective checkpointing expects the same operators when it runs a block
    anew."""
    return type(built) is type(given) and (torch.compiler.is_compiling() or not in_mode())


def maps_of(nmap: NeighborMap, gradient: bool) -> tuple[Any, Any, Any, Any, Any]:
    """A map and its orders as operators take them; the other pair, none of a mirrored map, and without entries if no
    gradient will be asked for that uses it; and the segments, if it has them: a traced call builds none."""
    segments = segments_of(nmap)
    if nmap.mirrored:
        return nmap.native, nmap.native_order, None, None, segments
    if not gradient:
        return nmap.native, nmap.native_order, nmap.native.new_empty((0, 0)), None, segments
    return nmap.native, nmap.native_order, *transposed_of(nmap), segments


def _both(phases: tuple[Triple, Triple]) -> tuple[int, ...]:
    """Of a map and of its gradient's, as operators take them."""
    return *phases[0], *phases[1]


def transposed_of(nmap: NeighborMap) -> Any:
    """The map from inputs to outputs and its order, kept with the map where that lasts."""
    pair = gradient_of(nmap)
    if pair is None:
        how = nmap.coords, nmap.shape, nmap.kernel_size, nmap.dilation
        pair = _build(*how, not nmap.transposed, False) if nmap.submanifold else _turned(nmap)
        if lasts(pair[0], nmap.native):
            _keep(nmap, pair)
    return pair


def _keep(nmap: NeighborMap, pair: Any) -> None:
    """With the map, what operators made. Where they only traced a program, no stream is building it."""
    if torch.compiler.is_compiling() or type(nmap.native) is not torch.Tensor or not nmap.native.is_cuda:
        nmap._native_transposed = Built(pair, done=True)
    else:
        nmap._native_transposed.keep(pair, nmap.native, None)


def inverse_of(nmap: NeighborMap) -> NeighborMap:
    """`NeighborMap.inverse`, which a traced program makes by operators."""
    conv.expect_map(nmap)
    if isinstance(nmap.native, torch.Tensor) and traced(nmap.native, nmap.native):
        return nmap._inverse_by(transposed_of(nmap))
    with beneath_transforms():
        return nmap.inverse


def expect_gradient_map(map: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """An exported program asks for gradients that were not foreseen when it was traced."""
    expect_foreseen(gradient is None or gradient.shape[0] == map.shape[0], "feats")


# ---- convolution ----


def submanifold_conv3d(
    feats: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    neighbor_map: NeighborMap,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    groups: int = 1,
    algorithm: str = "auto",
    precision: str | None = None,
    stream: Stream = None,
    **float8: Unpack[Float8],
) -> torch.Tensor:
    """`flexgemm.submanifold_conv3d` of torch tensors, differentiable once in feats, weight, bias and residual.

    feats (N, Ci), weight (Co, Kw, Kh, Kd, Ci / groups), bias (Co) or None, residual (N, Co) or None -> (N, Co);
        float32, float16 or bfloat16, and under torch.autocast the dtype of that.
        activation(convolution + bias + residual).
    activation: None, "relu", "silu" or "gelu" (the exact one). SiLU and GELU are fused only where nothing requires
        grad: their gradient needs the sum, which is rounded to the dtype of feats then.
    algorithm: as there, forward and in the gradient of feats.
    precision: of float32 products, forward and backward; by default torch's own setting at the time of the call,
        torch.backends.cuda.matmul.fp32_precision (which allow_tf32 and set_float32_matmul_precision set too).
    stream: a CUDA stream instead of torch's current one, forward and backward.
    float8: scale_feats, scale_weight, scale_out, out_dtype, dtype_feats, dtype_weight, dtype_out, as there, of FP8
        feats and weight: a forward pass without a gradient, which torch.autocast leaves alone.

    Raises TypeError and ValueError by argument name; TypeError for tensors that are sparse, complex or lazily negated,
    ValueError where a gradient is asked of FP8.
    """
    conv.expect_submanifold(neighbor_map)
    how = activation, algorithm, precision, groups, stream, float8
    return convolution(feats, weight, bias, residual, neighbor_map, *how)


def sparse_conv3d(
    feats: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    neighbor_map: NeighborMap,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    groups: int = 1,
    algorithm: str = "auto",
    precision: str | None = None,
    stream: Stream = None,
    **float8: Unpack[Float8],
) -> torch.Tensor:
    """`flexgemm.sparse_conv3d` of torch tensors, differentiable once in feats, weight, bias and residual.

    feats (N, Ci), weight (Co, Kw, Kh, Kd, Ci / groups), bias (Co) or None, residual (M, Co) or None -> (M, Co);
    the rest as of submanifold_conv3d.
    """
    conv.expect_map(neighbor_map)
    how = activation, algorithm, precision, groups, stream, float8
    return convolution(feats, weight, bias, residual, neighbor_map, *how)


def sparse_inverse_conv3d(
    feats: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    neighbor_map: NeighborMap,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    groups: int = 1,
    algorithm: str = "auto",
    precision: str | None = None,
    stream: Stream = None,
    **float8: Unpack[Float8],
) -> torch.Tensor:
    """`flexgemm.sparse_inverse_conv3d` of torch tensors, differentiable once in feats, weight, bias and residual.

    feats (M, Ci), weight (Co, Kw, Kh, Kd, Ci / groups), bias (Co) or None, residual (N, Co) or None -> (N, Co);
    the rest as of submanifold_conv3d.
    """
    inverse = inverse_of(neighbor_map)
    how = activation, algorithm, precision, groups, stream, float8
    return convolution(feats, weight, bias, residual, inverse, *how)


# ReLU's gradient needs the output alone. That of the others needs their input, which a fused kernel does not keep:
# where a gradient will be asked for, torch applies them.
_APART = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}


def _apart(activation: Any) -> Any:
    """None also for what is no activation at all: the extension says so."""
    return _APART.get(activation) if isinstance(activation, str) else None


def convolution(
    feats: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    nmap: NeighborMap,
    activation: str | None,
    algorithm: str,
    precision: str | None,
    groups: int,
    stream: Stream,
    float8: Float8,
) -> torch.Tensor:
    """A convolution over any map."""
    through_operator = traced(feats, weight)
    if through_operator:
        expect_tensor(feats, "feats")
    if float8:
        conv.expect_known(float8)
    if feats.dtype.itemsize == 1:
        return _float8_convolution(feats, weight, bias, residual, nmap, activation, algorithm, groups, stream, float8)
    if through_operator or casts():
        with on_stream(feats, stream):
            feats, weight, bias, residual = autocast(feats, weight, bias, residual)
    recording = records(weight, feats, bias, residual)
    if float8:
        conv.expect_none(name_of(feats.dtype), float8)
    if not through_operator:
        precision = setting(precision, feats)
        if recording:
            return record_conv(feats, weight, bias, residual, nmap, activation, algorithm, precision, groups, stream)
        result: torch.Tensor = conv.convolution(
            feats, weight, bias, residual, nmap, activation, algorithm, precision, groups, None, stream
        )
        return result
    expect_tensor(weight, "weight")
    refuse_stream(stream)
    apart = _apart(activation) if recording else None
    conv.expect_rows(feats, nmap, "Ci")
    maps = maps_of(nmap, recording and feats.requires_grad)
    how = None if apart else activation, algorithm, precision, as_int(groups, "groups")
    out: torch.Tensor = operators.sparse_conv3d(
        feats, weight, bias, residual, *maps, nmap.kernel_size, _both(nmap.phases), *how
    )
    return apart(out) if apart else out


def _float8_convolution(
    feats: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    nmap: NeighborMap,
    activation: str | None,
    algorithm: str,
    groups: int,
    stream: Stream,
    float8: Float8,
) -> torch.Tensor:
    if requires_grad(feats, weight, bias, residual, *map(float8.get, conv.SCALES)):
        conv.expect_differentiable(name_of(feats.dtype), float8)
    result: torch.Tensor
    if not (traced(feats, weight) or transformed()):
        how = activation, algorithm, "ieee", groups, None, stream, float8
        result = conv.convolution(feats, weight, bias, residual, nmap, *how)
        return result
    expect_tensor(weight, "weight")
    refuse_stream(stream)
    scales = map(float8.get, conv.SCALES)
    dtypes = [name_of(float8.get(name)) for name in ("out_dtype", "dtype_feats", "dtype_weight", "dtype_out")]
    conv.expect_rows(feats, nmap, "Ci")
    maps = nmap.native, nmap.native_order, nmap.kernel_size, _both(nmap.phases)
    traced_how = activation, algorithm, as_int(groups, "groups"), *dtypes
    result = operators.sparse_conv3d_float8(feats, weight, bias, residual, *scales, *maps, *traced_how)
    return result


def submanifold_conv3d_backward(
    grad_out: torch.Tensor,
    feats: torch.Tensor,
    weight: torch.Tensor,
    *,
    neighbor_map: NeighborMap,
    groups: int = 1,
    needs_grad: tuple[bool, bool, bool] = (True, True, True),
    algorithm: str = "auto",
    precision: str | None = None,
    stream: Stream = None,
) -> Gradients:
    """`flexgemm.submanifold_conv3d_backward` of torch tensors; itself not differentiable."""
    conv.expect_submanifold(neighbor_map)
    how: Any = {"neighbor_map": neighbor_map, "groups": groups, "needs_grad": needs_grad, "algorithm": algorithm}
    return sparse_conv3d_backward(grad_out, feats, weight, **how, precision=precision, stream=stream)


def sparse_conv3d_backward(
    grad_out: torch.Tensor,
    feats: torch.Tensor,
    weight: torch.Tensor,
    *,
    neighbor_map: NeighborMap,
    groups: int = 1,
    needs_grad: tuple[bool, bool, bool] = (True, True, True),
    algorithm: str = "auto",
    precision: str | None = None,
    stream: Stream = None,
) -> Gradients:
    """`flexgemm.sparse_conv3d_backward` of torch tensors; itself not differentiable."""
    conv.expect_map(neighbor_map)
    expect_bools(needs_grad, 3)
    with renamed(conv.OF_GRADIENTS):
        return _conv_gradients(grad_out, feats, weight, neighbor_map, needs_grad, algorithm, precision, groups, stream)


# ---- its gradients ----


def _conv_gradients(
    grad_out: Any,
    feats: Any,
    weight: Any,
    nmap: NeighborMap,
    needs: Any,
    algorithm: str,
    precision: str | None,
    groups: int,
    stream: Stream,
) -> Gradients:
    expect_tensor(grad_out, "grad_out")
    if traced(grad_out, feats):
        expect_tensor(feats, "feats")
        refuse_stream(stream)
        conv.expect_rows(feats, nmap, "Ci")
        maps = maps_of(nmap, needs[0])
        how = nmap.kernel_size, _both(nmap.phases), needs, algorithm, precision, as_int(groups, "groups")
        results = operators.sparse_conv3d_backward(grad_out, feats, weight, *maps, *how)
        first, second, third = (g if n else None for g, n in zip(results, needs, strict=True))
        return first, second, third
    precision = setting(precision, feats)
    if records(grad_out, feats, weight):
        with on_stream(feats, stream):
            first, second, third = _record_conv_gradients(
                grad_out, feats, weight, nmap, needs, algorithm, precision, groups
            )
        return first, second, third
    return conv.backward(
        conv.bind(feats, nmap, stream), grad_out, feats, weight, nmap, needs, algorithm, precision, groups
    )


def record_conv(
    feats: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    neighbor_map: NeighborMap,
    activation: str | None,
    algorithm: str,
    precision: str,
    groups: int,
    stream: Stream,
) -> torch.Tensor:
    """A convolution that autograd records, on tensors as they are."""
    if stream is not None:
        with on_stream(feats, stream):
            return record_conv(
                feats, weight, bias, residual, neighbor_map, activation, algorithm, precision, groups, None
            )
    apart = None if activation is None else _apart(activation)
    how = neighbor_map, None if apart else activation, algorithm, precision, groups
    out = _record_conv(feats, weight, bias, residual, how)
    return apart(out) if apart else out


# What is no tensor goes through autograd as one argument: each takes it time.
def _forward(feats: Any, weight: Any, bias: Any, residual: Any, how: tuple[Any, ...]) -> Any:
    nmap, activation, algorithm, precision, groups = how
    return conv.convolution(feats, weight, bias, residual, nmap, activation, algorithm, precision, groups)


def _save(ctx: Any, args: tuple[Any, ...], out: Any) -> None:
    feats, weight, _, _, how = args
    ctx.how = how
    keep(ctx, (feats, weight), _read(ctx), out if how[1] == "relu" else None)


def _read(ctx: Any) -> tuple[bool, bool]:
    """Whether gradients read feats and weight; that of the bias comes with the weight's."""
    of_feats, of_weight, of_bias = ctx.needs_input_grad[:3]
    return of_weight or of_bias, of_feats


def _backward(ctx: Any, grad_out: Any) -> Any:
    feats, weight, out = kept(ctx, grad_out)
    nmap, _, *how = ctx.how
    return *_gradients(ctx, grad_out, feats, weight, out, nmap, how), None


def _gradients(ctx: Any, grad_out: Any, feats: Any, weight: Any, out: Any, nmap: NeighborMap, how: Any) -> Any:
    """In feats, weight, bias and residual; out where ReLU was applied to it."""
    if out is not None:
        grad_out = torch.ops.aten.threshold_backward(grad_out, out, 0)
    needs, (algorithm, precision, groups) = ctx.needs_input_grad, how
    gradients = _conv_gradients(grad_out, feats, weight, nmap, needs[:3], algorithm, precision, groups, None)
    return *gradients, grad_out if needs[3] else None


def _gradients_directly(grad_out: Any, feats: Any, weight: Any, nmap: NeighborMap, needs: Any, *how: Any) -> Any:
    return conv.backward(conv.bind(feats, nmap, None), grad_out, feats, weight, nmap, needs, *how)


_record_conv = recorded("SparseConv3d", _forward, _save, _backward)
_record_conv_gradients = recorded("SparseConv3dGradients", _gradients_directly, None, no_gradient)


def _operator_save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    feats, weight, _, _, *maps, ctx.kernel_size, ctx.phases, activation, algorithm, precision, groups = inputs
    ctx.how = algorithm, precision, groups
    ctx.foreseen = activation in (None, "relu")
    keep(ctx, (feats, weight), _read(ctx), output if activation == "relu" else None, *maps)


def _operator_backward(ctx: Any, grad_out: Any) -> Any:
    feats, weight, out, map, order, gradient, gradient_order, segments = kept(ctx, grad_out)
    expect_foreseen(ctx.foreseen, "feats, weight, bias, residual")
    if ctx.needs_input_grad[0]:
        expect_gradient_map(map, gradient)
    maps = map, order, gradient, gradient_order
    nmap = from_operators(*maps, ctx.kernel_size, ctx.phases, feats.shape[0], segments)
    return *_gradients(ctx, grad_out, feats, weight, out, nmap, ctx.how), *[None] * 11


operators.sparse_conv3d.register_autograd(_operator_backward, setup_context=_operator_save)
