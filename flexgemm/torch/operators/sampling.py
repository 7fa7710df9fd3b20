"""Operators between points and voxels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flexgemm import _C, grid_sample
from flexgemm._arrays import library_of
from flexgemm._voxels import grid_shape
from flexgemm.torch.operators.define import operator
from flexgemm.voxelize import Groups, reduced, spread
from flexgemm.voxelize import group_points as grouped_points
from flexgemm.voxelize import unique_coords as distinct_coords

# ---- sampling ----


@operator
def grid_sample_3d(
    feats: torch.Tensor, coords: torch.Tensor, grid: torch.Tensor, shape: Sequence[int], mode: str
) -> torch.Tensor:
    return grid_sample.grid_sample_3d(feats, coords, tuple(shape), grid, mode)


@grid_sample_3d.register_fake
def _(feats: Any, coords: Any, grid: Any, shape: Any, mode: Any) -> torch.Tensor:
    return feats.new_empty((*grid.shape[:-1], feats.shape[1]))


@operator
def grid_sample_3d_backward(
    grad_out: torch.Tensor,
    feats: torch.Tensor,
    coords: torch.Tensor,
    grid: torch.Tensor,
    shape: Sequence[int],
    mode: str,
    needs_grad: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """An empty tensor for a gradient that is not needed. Finds the voxels once more."""
    samples = grid_sample.sample_map(coords, tuple(shape), grid, mode)
    for_feats, for_grid = needs_grad
    gradients = grid_sample.grid_sample_3d_backward(
        grad_out, feats, sample_map=samples, needs_grad=(for_feats, for_grid)
    )
    first, second = (feats.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return first, second


@grid_sample_3d_backward.register_fake
def _(
    grad_out: Any, feats: Any, coords: Any, grid: Any, shape: Any, mode: Any, needs_grad: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    for_feats, for_grid = needs_grad[0], needs_grad[1] and mode == "trilinear"
    of_grid = grid.new_empty(grid.shape) if for_grid else feats.new_empty(0)
    return feats.new_empty(feats.shape if for_feats else 0), of_grid


# ---- points and voxels ----


@operator
def group_points(
    points: torch.Tensor, voxel_size: Sequence[float], origin: Sequence[float], shape: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The voxels of points, the five tensors of flexgemm.voxelize.Groups, and the points in units of voxels."""
    arrays = points, tuple(voxel_size), grid_shape(shape), tuple(origin)
    coords, groups, places = grouped_points(library_of(points, "points"), *arrays)
    return coords, *groups, places


@group_points.register_fake
def _(points: Any, voxel_size: Any, origin: Any, shape: Any) -> Any:
    n, m = points.shape[0], torch.library.get_ctx().new_dynamic_size()
    sizes = (m, 4), n, m + 1, m, m, n
    return *(points.new_empty(size, dtype=torch.int32) for size in sizes), points.new_empty((n, 4))


@operator
def unique_coords(coords: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return distinct_coords(coords, shape)


@unique_coords.register_fake
def _(coords: Any, shape: Any) -> Any:
    m = torch.library.get_ctx().new_dynamic_size()
    return tuple(coords.new_empty(size) for size in ((m, 4), coords.shape[0], m))


@operator
def reduce_points(
    feats: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    first: torch.Tensor,
    counts: torch.Tensor,
    inverse: torch.Tensor,
    reduce: str,
    with_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The features of voxels, and the points that maxima are of, if asked for."""
    library, groups = library_of(feats, "feats"), Groups(order, starts, first, counts, inverse)
    out, argmax = reduced(library, feats, groups, reduce, with_gradient)
    return out, feats.new_empty(0, dtype=torch.int32) if argmax is None else argmax


@reduce_points.register_fake
def _(feats: Any, order: Any, starts: Any, first: Any, counts: Any, inverse: Any, reduce: Any, gradient: Any) -> Any:
    shape = first.shape[0], feats.shape[1]
    return feats.new_empty(shape), feats.new_empty(shape if gradient and reduce == "max" else 0, dtype=torch.int32)


def reduced_points_gradient(
    grad_out: torch.Tensor,
    argmax: torch.Tensor | None,
    first: torch.Tensor,
    counts: torch.Tensor,
    inverse: torch.Tensor,
    reduce: str,
) -> torch.Tensor:
    """The gradient of reduce_points in feats: each point takes that of its voxel, as far as it had a part in it."""
    shape, voxels = (inverse.shape[0], grad_out.shape[1]), first.shape[0]
    if reduce == "max":
        assert argmax is not None
        return grad_out.new_zeros(shape).scatter_(0, argmax.long(), grad_out)
    source, weights = inverse, None
    if reduce == "first":
        source = torch.full_like(inverse, -1)
        source[first.long()] = torch.arange(voxels, dtype=torch.int32, device=source.device)
    if reduce == "mean" and voxels:
        weights = counts.float().reciprocal()[source.clamp_min(0).long()][:, None]
    library = library_of(grad_out, "grad_out")
    grad = grad_out.new_empty(shape)
    library.run(_C.gather_sum, library.rows(grad_out, "grad_out"), source[:, None], weights, grad)
    return grad


reduced_points_gradient_operator = operator(reduced_points_gradient)


@reduced_points_gradient_operator.register_fake
def _(grad_out: Any, argmax: Any, first: Any, counts: Any, inverse: Any, reduce: Any) -> torch.Tensor:
    return grad_out.new_empty((inverse.shape[0], grad_out.shape[1]))


@operator
def devoxelize(
    feats: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    first: torch.Tensor,
    counts: torch.Tensor,
    inverse: torch.Tensor,
) -> torch.Tensor:
    return spread(library_of(feats, "feats"), feats, Groups(order, starts, first, counts, inverse))


@devoxelize.register_fake
def _(feats: Any, order: Any, starts: Any, first: Any, counts: Any, inverse: Any) -> torch.Tensor:
    return feats.new_empty((inverse.shape[0], feats.shape[1]))
