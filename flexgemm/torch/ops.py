"""torch.autograd over the array-neutral operations, on torch's current stream and the tensors' device."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from flexgemm import _C, conv, grid_sample, pool
from flexgemm._arrays import Stream, library_of, torch_scope
from flexgemm.grid_sample import SampleMap
from flexgemm.voxel import NeighborMap
from flexgemm.voxelize import Voxels, reduced, spread


class _SparseConv3d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        feats: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        neighbor_map: NeighborMap,
        precision: str,
        groups: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(feats, weight)
        ctx.neighbor_map = neighbor_map
        ctx.precision = precision
        ctx.groups = groups
        library = library_of(feats, "feats")
        out: torch.Tensor = conv.forward(library, feats, weight, bias, neighbor_map, None, precision, groups)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        feats, weight = ctx.saved_tensors
        library = library_of(feats, "feats")
        needs_grad = ctx.needs_input_grad[:3]
        how = ctx.neighbor_map, needs_grad, ctx.precision, ctx.groups
        return *conv.backward(library, grad_out, feats, weight, *how), None, None, None


def submanifold_conv3d(
    feats: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    neighbor_map: NeighborMap,
    groups: int = 1,
    precision: str | None = None,
    stream: Stream = None,
) -> torch.Tensor:
    """`flexgemm.submanifold_conv3d` of torch tensors, differentiable once in feats, weight and bias.

    feats (N, Ci), weight (Co, Kw, Kh, Kd, Ci / groups), bias (Co) or None -> (N, Co); float32, float16 or bfloat16.
    precision: of float32 products, forward and backward; by default torch's own setting at the time of the call,
        torch.backends.cuda.matmul.fp32_precision (which allow_tf32 and set_float32_matmul_precision set too).
    stream: a CUDA stream instead of torch's current one, forward and backward.

    Raises TypeError and ValueError by argument name; TypeError for tensors that are sparse, complex or lazily negated.
    """
    conv.expect_submanifold(neighbor_map)
    return sparse_conv3d(
        feats, weight, bias, neighbor_map=neighbor_map, groups=groups, precision=precision, stream=stream
    )


def sparse_conv3d(
    feats: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    neighbor_map: NeighborMap,
    groups: int = 1,
    precision: str | None = None,
    stream: Stream = None,
) -> torch.Tensor:
    """`flexgemm.sparse_conv3d` of torch tensors, differentiable once in feats, weight and bias.

    feats (N, Ci), weight (Co, Kw, Kh, Kd, Ci / groups), bias (Co) or None -> (M, Co). The rest as of
    submanifold_conv3d.
    """
    _expect_tensor(feats)
    if precision is None:
        precision = float32_precision() if feats.dtype is torch.float32 else "ieee"
    library = conv.bind(feats, neighbor_map, stream)
    if not library.needs_grad(feats, weight, bias):
        out: torch.Tensor = conv.forward(library, feats, weight, bias, neighbor_map, None, precision, groups)
        return out
    return _recorded(_SparseConv3d, stream, feats, weight, bias, neighbor_map, precision, groups)


def sparse_inverse_conv3d(
    feats: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    neighbor_map: NeighborMap,
    groups: int = 1,
    precision: str | None = None,
    stream: Stream = None,
) -> torch.Tensor:
    """`flexgemm.sparse_inverse_conv3d` of torch tensors, differentiable once in feats, weight and bias.

    feats (M, Ci), weight (Co, Kw, Kh, Kd, Ci / groups), bias (Co) or None -> (N, Co). The rest as of
    submanifold_conv3d.
    """
    inverse = conv.expect_map(neighbor_map).inverse
    return sparse_conv3d(feats, weight, bias, neighbor_map=inverse, groups=groups, precision=precision, stream=stream)


class _SparsePool3d(torch.autograd.Function):
    """Pooling over a map, or, with coordinates and a number of samples in its place, over samples."""

    @staticmethod
    def forward(
        ctx: Any, feats: torch.Tensor, neighbor_map: NeighborMap | tuple[torch.Tensor, int], mode: str
    ) -> torch.Tensor:
        library = library_of(feats, "feats")
        out: torch.Tensor
        if isinstance(neighbor_map, NeighborMap):
            ctx.neighbor_map = neighbor_map
            out, by_products = pool.forward(library, feats, neighbor_map, mode, with_gradient=True)
        else:
            out, ctx.batch, by_products = pool.global_forward(library, feats, *neighbor_map, mode, with_gradient=True)
        ctx.save_for_backward(*by_products)
        ctx.mode = mode
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        library = library_of(grad_out, "grad_out")
        map = ctx.batch if hasattr(ctx, "batch") else ctx.neighbor_map.native_gradient()[0]
        return pool.gradient(library, grad_out, grad_out, map, ctx.mode, ctx.saved_tensors), None, None


def sparse_pool3d(
    feats: torch.Tensor, *, neighbor_map: NeighborMap, mode: str = "max", stream: Stream = None
) -> torch.Tensor:
    """`flexgemm.sparse_pool3d` of torch tensors, differentiable once in feats: (N, C) -> (M, C)."""
    library = conv.bind(_expect_tensor(feats), neighbor_map, stream)
    if not library.needs_grad(feats, None, None):
        out: torch.Tensor = pool.forward(library, feats, neighbor_map, mode, with_gradient=False)[0]
        return out
    return _recorded(_SparsePool3d, stream, feats, neighbor_map, mode)


def sparse_upsample3d(feats: torch.Tensor, *, neighbor_map: NeighborMap, stream: Stream = None) -> torch.Tensor:
    """`flexgemm.sparse_upsample3d` of torch tensors, differentiable once in feats: (M, C) -> (N, C)."""
    return sparse_pool3d(feats, neighbor_map=pool.to_voxels(neighbor_map), mode="sum", stream=stream)


def global_pool(
    feats: torch.Tensor, coords: torch.Tensor, batch_size: int, mode: str = "max", *, stream: Stream = None
) -> torch.Tensor:
    """`flexgemm.global_pool` of torch tensors, differentiable once in feats: (N, C) -> (B, C)."""
    library = library_of(_expect_tensor(feats), "feats", None, stream)
    if not library.needs_grad(feats, None, None):
        out: torch.Tensor = pool.global_forward(library, feats, coords, batch_size, mode, with_gradient=False)[0]
        return out
    return _recorded(_SparsePool3d, stream, feats, (coords, batch_size), mode)


def _expect_tensor(feats: torch.Tensor) -> torch.Tensor:
    if not isinstance(feats, torch.Tensor):
        raise TypeError(f"feats: expected a torch.Tensor, got {type(feats).__module__}.{type(feats).__qualname__}")
    return feats


def _recorded(function: Any, stream: Stream, feats: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """function.apply. The stream that is current in the forward pass is the one on which autograd runs the backward
    pass."""
    on_stream = contextlib.nullcontext() if stream is None or not feats.is_cuda else torch_scope(feats, stream)
    with on_stream:
        result: torch.Tensor = function.apply(feats, *arguments)
    return result


def float32_precision() -> str:
    """What torch's settings ask of float32 products on CUDA: "tf32" or "ieee"."""
    matmul = torch.backends.cuda.matmul
    try:
        tf32 = matmul.fp32_precision == "tf32"
    except AttributeError:  # torch before 2.9 knows allow_tf32 only
        tf32 = matmul.allow_tf32
    return "tf32" if tf32 else "ieee"


class _GridSample3d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, feats: torch.Tensor, grid: torch.Tensor | None, sample_map: SampleMap) -> torch.Tensor:
        ctx.save_for_backward(feats)
        ctx.sample_map = sample_map
        out: torch.Tensor = grid_sample.forward(library_of(feats, "feats"), feats, sample_map)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (feats,) = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad[:2]
        grads = grid_sample.backward(library_of(feats, "feats"), grad_out, feats, ctx.sample_map, needs_grad)
        return *grads, None


def grid_sample_3d(
    feats: torch.Tensor,
    coords: torch.Tensor | None = None,
    shape: Sequence[int] | None = None,
    grid: torch.Tensor | None = None,
    mode: str = "trilinear",
    *,
    sample_map: SampleMap | None = None,
    stream: Stream = None,
) -> torch.Tensor:
    """`flexgemm.grid_sample_3d` of torch tensors, differentiable once in feats and, for "trilinear", in grid.

    With `sample_map` instead of coords, shape and grid it is differentiable in feats alone.
    """
    if not isinstance(feats, torch.Tensor):
        raise TypeError(f"feats: expected a torch.Tensor, got {type(feats).__module__}.{type(feats).__qualname__}")
    with _on_stream(feats, stream):
        if sample_map is None:
            if coords is None or shape is None or grid is None:
                raise ValueError("coords, shape, grid: expected all of them, or sample_map")
            sample_map = grid_sample.sample_map(coords, shape, grid.detach(), mode)
        apply: Any = _GridSample3d.apply
        result: torch.Tensor = apply(feats, grid, sample_map)
    return result


class _ReducePoints(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, feats: torch.Tensor, voxels: Voxels, reduce: str) -> torch.Tensor:
        out, argmax = reduced(library_of(feats, "feats"), feats, voxels, reduce, with_argmax=True)
        ctx.voxels, ctx.reduce, ctx.argmax = voxels, reduce, argmax
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        voxels, reduce = ctx.voxels, ctx.reduce
        groups, shape = voxels.groups, (voxels.num_points, grad_out.shape[1])
        if reduce == "max":
            grad = grad_out.new_zeros(shape)
            return grad.scatter_(0, ctx.argmax.long(), grad_out), None, None
        source, weights = groups.inverse, None
        if reduce == "first":
            source = torch.full_like(groups.inverse, -1)
            source[groups.first.long()] = torch.arange(voxels.num_voxels, dtype=torch.int32, device=source.device)
        if reduce == "mean" and voxels.num_voxels:
            weights = groups.counts.float().reciprocal()[source.clamp_min(0).long()][:, None]
        library = library_of(grad_out, "grad_out")
        grad = grad_out.new_empty(shape)
        library.run(_C.gather_sum, library.rows(grad_out, "grad_out"), source[:, None], weights, grad)
        return grad, None, None


def reduce_points(feats: torch.Tensor, voxels: Voxels, reduce: str = "mean", *, stream: Stream = None) -> torch.Tensor:
    """`flexgemm.reduce_points` of torch tensors, differentiable once in feats."""
    apply: Any = _ReducePoints.apply
    with _on_stream(feats, stream):
        result: torch.Tensor = apply(feats, voxels, reduce)
    return result


class _Devoxelize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, feats: torch.Tensor, voxels: Voxels) -> torch.Tensor:
        ctx.voxels = voxels
        out: torch.Tensor = spread(library_of(feats, "feats"), feats, voxels)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return reduced(library_of(grad_out, "grad_out"), grad_out, ctx.voxels, "sum")[0], None


def devoxelize(feats: torch.Tensor, voxels: Voxels, *, stream: Stream = None) -> torch.Tensor:
    """`flexgemm.devoxelize` to the nearest voxel, of torch tensors, differentiable once in feats."""
    apply: Any = _Devoxelize.apply
    with _on_stream(feats, stream):
        result: torch.Tensor = apply(feats, voxels)
    return result


def _on_stream(feats: torch.Tensor, stream: Stream) -> Any:
    """The stream that is current in the forward pass is the one on which autograd runs the backward pass."""
    return contextlib.nullcontext() if stream is None or not feats.is_cuda else torch_scope(feats, stream)
