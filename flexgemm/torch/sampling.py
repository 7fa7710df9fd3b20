"""Points and voxels for torch: sampling voxels at points, and points gathered into voxels and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import flexgemm
from flexgemm import grid_sample
from flexgemm._arguments import expect_choice
from flexgemm._arrays import Stream, library_of, on_stream
from flexgemm._voxels import grid_shape
from flexgemm.grid_sample import SampleMap
from flexgemm.torch import operators
from flexgemm.torch.autograd import keep, kept, no_gradient, recorded, records
from flexgemm.torch.dispatch import (
    beneath_transforms,
    expect_foreseen,
    expect_tensor,
    refuse_stream,
    traced,
    transformed,
    unwrapped,
)
from flexgemm.voxelize import (
    REDUCTIONS,
    Groups,
    Voxels,
    bind,
    expect_voxels,
    points_map,
    reduced,
    spread,
    three,
)


def grid_sample_3d(
    feats: torch.Tensor,
    coords: torch.Tensor | None = None,
    shape: Sequence[int] | None = None,
    grid: torch.Tensor | None = None,
    mode: str | None = None,
    *,
    sample_map: SampleMap | None = None,
    stream: Stream = None,
) -> torch.Tensor:
    """`flexgemm.grid_sample_3d` of torch tensors, differentiable once in feats and, for "trilinear", in grid.

    With `sample_map` instead of coords, shape and grid it is differentiable in feats alone.
    """
    expect_tensor(feats, "feats")
    mode = grid_sample.expect_sites(coords, shape, grid, mode, sample_map)
    if traced(feats, feats if grid is None else grid):
        refuse_stream(stream)
        if coords is None or shape is None or grid is None:
            raise ValueError("coords, shape, grid: expected all of them where torch traces the call")
        expect_tensor(coords, "coords")
        expect_tensor(grid, "grid")
        traced_result: torch.Tensor = operators.grid_sample_3d(feats, coords, grid, tuple(shape), mode)
        return traced_result
    if not records(feats, grid):
        return flexgemm.grid_sample_3d(feats, coords, shape, grid, mode, sample_map=sample_map, stream=stream)
    samples: Any = sample_map
    with on_stream(feats, stream):
        if samples is None:
            assert shape is not None and grid is not None
            if transformed():  # torch.func lets an operation alone read coords and grid: it makes the map
                samples = tuple(shape), mode
            else:
                samples = grid_sample.sample_map(coords, shape, grid.detach(), mode)
        result: torch.Tensor = _record_sample(feats, coords, grid, samples)
    return result


def _sample_map(coords: Any, grid: Any, samples: Any) -> SampleMap:
    """samples, here and below: a SampleMap, or the shape and the mode of that of coords and grid."""
    return samples if isinstance(samples, SampleMap) else grid_sample.sample_map(coords, samples[0], grid, samples[1])


def _sample(feats: Any, coords: Any, grid: Any, samples: Any) -> Any:
    return grid_sample.forward(library_of(feats, "feats"), feats, _sample_map(coords, grid, samples))


def _save_sample(ctx: Any, args: tuple[Any, ...], out: Any) -> None:
    feats, coords, grid, samples = args
    mode = samples.mode if isinstance(samples, SampleMap) else samples[1]
    of_points = ctx.needs_input_grad[2] and mode == "trilinear"
    if isinstance(samples, SampleMap):
        # The gradient in the points reads the map's, which may be these: saved, so that autograd sees them changed.
        coords, grid = None, grid if of_points else None
    ctx.samples = samples
    keep(ctx, (feats,), (of_points,), coords, grid)


def _sample_backward(ctx: Any, grad_out: Any) -> Any:
    for_feats, _, for_grid, _ = ctx.needs_input_grad
    tensors = grad_out, *kept(ctx, grad_out)
    gradients: Any = _record_sample_gradients if records(*tensors) else _sample_gradients
    of_feats, of_grid = gradients(*tensors, ctx.samples, (for_feats, for_grid))
    return of_feats, None, of_grid, None


def _sample_gradients(grad_out: Any, feats: Any, coords: Any, grid: Any, samples: Any, needs: Any) -> Any:
    sample_map = _sample_map(coords, grid, samples)
    return grid_sample.backward(library_of(feats, "feats"), grad_out, feats, sample_map, needs)


_record_sample = recorded("GridSample3d", _sample, _save_sample, _sample_backward)
_record_sample_gradients = recorded("GridSample3dGradients", _sample_gradients, None, no_gradient)


def _operator_save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    feats, coords, grid, ctx.shape, ctx.mode = inputs
    ctx.needs = ctx.needs_input_grad[0], ctx.needs_input_grad[2] and ctx.mode == "trilinear"
    keep(ctx, (feats,), ctx.needs[1:], coords, grid)


def _operator_backward(ctx: Any, grad_out: Any) -> Any:
    gradients = operators.grid_sample_3d_backward(grad_out, *kept(ctx, grad_out), ctx.shape, ctx.mode, ctx.needs)
    for_feats, for_grid = (g if n else None for g, n in zip(gradients, ctx.needs, strict=True))
    return for_feats, None, for_grid, None, None


operators.grid_sample_3d.register_autograd(_operator_backward, setup_context=_operator_save)


# ---- points to voxels ----


def voxelize(
    points: torch.Tensor,
    feats: torch.Tensor | None = None,
    *,
    voxel_size: float | Sequence[float],
    shape: Sequence[int],
    origin: float | Sequence[float] = 0.0,
    reduce: str = "mean",
    stream: Stream = None,
) -> Voxels:
    """`flexgemm.voxelize` of torch tensors, differentiable once in feats."""
    expect_tensor(points, "points")
    if traced(points, points):
        refuse_stream(stream)
        size, begin = (three(x, name) for x, name in ((voxel_size, "voxel_size"), (origin, "origin")))
        expect_choice(reduce, "reduce", REDUCTIONS)
        b, w, h, d = shape if len(shape) == 4 else grid_shape(shape)  # which need not be ints yet
        coords, *groups, places = operators.group_points(points.detach(), size, begin, (b, w, h, d))
        grouped = Groups(*groups)
        voxels = Voxels((coords, grouped.inverse, grouped.counts), coords, grouped, places, (b, w, h, d), None)
    else:
        how: Any = {"voxel_size": voxel_size, "shape": shape, "origin": origin, "reduce": reduce, "stream": stream}
        with beneath_transforms():
            voxels = flexgemm.voxelize(unwrapped(points, "points"), **how)
    voxels.feats = None if feats is None else reduce_points(feats, voxels, reduce, stream=stream)
    return voxels


def unique_coords(
    coords: torch.Tensor, shape: Sequence[int], *, stream: Stream = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`flexgemm.unique_coords` of a torch tensor."""
    expect_tensor(coords, "coords")
    if not traced(coords, coords):
        with beneath_transforms():
            return flexgemm.unique_coords(unwrapped(coords, "coords"), shape, stream=stream)
    refuse_stream(stream)
    unique, inverse, counts = operators.unique_coords(coords, tuple(shape))
    return unique, inverse, counts


def reduce_points(feats: torch.Tensor, voxels: Voxels, reduce: str = "mean", *, stream: Stream = None) -> torch.Tensor:
    """`flexgemm.reduce_points` of torch tensors, differentiable once in feats."""
    expect_tensor(feats, "feats")
    expect_voxels(voxels)
    recording = records(feats)
    if traced(feats, feats):
        refuse_stream(stream)
        out, _ = operators.reduce_points(feats, *voxels.groups, reduce, recording)
    elif recording:
        with on_stream(feats, stream):
            out, _ = _record_reduce(feats, voxels.groups, reduce)
    else:
        library = bind(feats, voxels, stream)
        out, _ = reduced(library, feats, voxels.groups, reduce)
    result: torch.Tensor = out
    return result


def devoxelize(feats: torch.Tensor, voxels: Voxels, mode: str = "nearest", *, stream: Stream = None) -> torch.Tensor:
    """`flexgemm.devoxelize` of torch tensors, differentiable once in feats."""
    expect_tensor(feats, "feats")
    expect_voxels(voxels)
    result: torch.Tensor
    if mode == "trilinear":
        if traced(feats, feats) or transformed():  # where no map can be made that stays
            return grid_sample_3d(feats, voxels.native, voxels.shape, voxels.places, mode, stream=stream)
        sample_map = points_map(bind(feats, voxels, stream), voxels)
        return grid_sample_3d(feats, sample_map=sample_map, stream=stream)
    if mode != "nearest":
        result = flexgemm.devoxelize(feats, voxels, mode, stream=stream)  # names the modes
    elif traced(feats, feats):
        refuse_stream(stream)
        result = operators.devoxelize(feats, *voxels.groups)
    elif records(feats):
        with on_stream(feats, stream):
            result = _record_devoxelize(feats, voxels.groups)
    else:
        result = spread(bind(feats, voxels, stream), feats, voxels.groups)
    return result


# ---- their gradients: voxels to points, and points to voxels ----


def _reduced_gradient(grad_out: Any, argmax: Any, groups: Groups, reduce: str) -> Any:
    tensors = grad_out, argmax, groups.first, groups.counts, groups.inverse
    if traced(grad_out, groups.inverse):
        return operators.reduced_points_gradient_operator(*tensors, reduce)
    plainly = not records(grad_out)
    return (operators.reduced_points_gradient if plainly else _record_reduced_gradient)(*tensors, reduce)


def _devoxelized_gradient(grad_out: Any, groups: Groups) -> Any:
    if traced(grad_out, groups.inverse):
        return operators.reduce_points(grad_out, *groups, "sum", False)[0]
    return (_record_sum if records(grad_out) else _sum)(grad_out, groups)


def _reduce(feats: Any, groups: Groups, reduce: str) -> Any:
    return reduced(library_of(feats, "feats"), feats, groups, reduce, with_argmax=True)


def _save_reduce(ctx: Any, args: tuple[Any, ...], result: Any) -> None:
    _, groups, ctx.reduce = args
    ctx.save_for_backward(result[1], *groups)


def _reduce_backward(ctx: Any, grad_out: Any, _: Any) -> Any:
    argmax, *groups = ctx.saved_tensors
    return _reduced_gradient(grad_out, argmax, Groups(*groups), ctx.reduce), None, None


def _spread(feats: Any, groups: Groups) -> Any:
    return spread(library_of(feats, "feats"), feats, groups)


def _save_spread(ctx: Any, args: tuple[Any, ...], result: Any) -> None:
    ctx.save_for_backward(*args[1])


def _spread_backward(ctx: Any, grad_out: Any) -> Any:
    return _devoxelized_gradient(grad_out, Groups(*ctx.saved_tensors)), None


def _sum(grad_out: Any, groups: Groups) -> Any:
    return reduced(library_of(grad_out, "grad_out"), grad_out, groups, "sum")[0]


_record_reduce = recorded("ReducePoints", _reduce, _save_reduce, _reduce_backward)
_record_devoxelize = recorded("Devoxelize", _spread, _save_spread, _spread_backward)
_record_reduced_gradient = recorded("ReducePointsGradient", operators.reduced_points_gradient, None, no_gradient)
_record_sum = recorded("DevoxelizeGradient", _sum, None, no_gradient)


def _reduce_operator_save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, *groups, ctx.reduce, with_gradient = inputs
    ctx.foreseen = with_gradient or ctx.reduce != "max"
    ctx.save_for_backward(output[1], *groups)


def _reduce_operator_backward(ctx: Any, grad_out: Any, _: Any) -> Any:
    expect_foreseen(ctx.foreseen, "feats")
    return _reduce_backward(ctx, grad_out, None)[0], *[None] * 7


def _spread_operator_save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:])


def _spread_operator_backward(ctx: Any, grad_out: Any) -> Any:
    return _spread_backward(ctx, grad_out)[0], *[None] * 5


operators.reduce_points.register_autograd(_reduce_operator_backward, setup_context=_reduce_operator_save)
operators.devoxelize.register_autograd(_spread_operator_backward, setup_context=_spread_operator_save)
