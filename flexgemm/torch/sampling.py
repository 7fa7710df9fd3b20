"""Points and voxels for torch: sampling voxels at points, and points gathered into voxels and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from flexgemm import _C, grid_sample
from flexgemm._arrays import Stream, library_of
from flexgemm.grid_sample import SampleMap
from flexgemm.torch import operators
from flexgemm.torch.autograd import on_stream
from flexgemm.torch.dispatch import expect_tensor, refuse_stream, traced
from flexgemm.voxelize import Voxels, reduced, spread


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
    expect_tensor(feats, "feats")
    if traced(feats, feats if grid is None else grid):
        refuse_stream(stream)
        if coords is None or shape is None or grid is None:
            raise ValueError("coords, shape, grid: expected all of them where torch traces the call")
        traced_result: torch.Tensor = operators.grid_sample_3d(feats, coords, grid, tuple(shape), mode)
        return traced_result
    with on_stream(feats, stream):
        if sample_map is None:
            if coords is None or shape is None or grid is None:
                raise ValueError("coords, shape, grid: expected all of them, or sample_map")
            sample_map = grid_sample.sample_map(coords, shape, grid.detach(), mode)
        apply: Any = _GridSample3d.apply
        result: torch.Tensor = apply(feats, grid, sample_map)
    return result


def _operator_save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    feats, coords, grid, ctx.shape, ctx.mode = inputs
    ctx.save_for_backward(feats, coords, grid)


def _operator_backward(ctx: Any, grad_out: Any) -> Any:
    needs = ctx.needs_input_grad[0], ctx.needs_input_grad[2] and ctx.mode == "trilinear"
    gradients = operators.grid_sample_3d_backward(grad_out, *ctx.saved_tensors, ctx.shape, ctx.mode, needs)
    for_feats, for_grid = (g if n else None for g, n in zip(gradients, needs, strict=True))
    return for_feats, None, for_grid, None, None


operators.grid_sample_3d.register_autograd(_operator_backward, setup_context=_operator_save)


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
    with on_stream(feats, stream):
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
    with on_stream(feats, stream):
        result: torch.Tensor = apply(feats, voxels)
    return result
