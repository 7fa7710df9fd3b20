"""The operations as operators of torch.library, for whoever looks into a program instead of running it: torch.compile,
torch.export, dispatch modes, subclasses of Tensor. `torch.ops.flexgemm` holds them.

Each has what it computes on a CPU or a GPU (the array-neutral function), the shape and dtype of its result for tensors
without memory, and its gradient, made of operators again. ops.py calls them. They take a NeighborMap as its tensors,
dtypes by name, and precision None for torch's setting at the time when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch

from flexgemm import _C, conv, gemm, grid_sample, pool, quantization, serialize
from flexgemm._arrays import library_of
from flexgemm._voxels import grid_shape
from flexgemm.torch.dispatch import setting
from flexgemm.torch.maps import from_operators
from flexgemm.voxelize import Groups, reduced, spread
from flexgemm.voxelize import group_points as grouped_points
from flexgemm.voxelize import unique_coords as distinct_coords

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _operator(function: Callable[..., Any], writes: Sequence[str] = ()) -> CustomOpDef:
    """The operator of a function's name and signature, on the CPU and CUDA. Autograd sees it whole."""

    @wraps(function)
    def silent(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    define: Any = torch.library.custom_op  # torch types it for functions whose parameters are known
    return define(f"flexgemm::{function.__name__}", silent, mutates_args=writes, device_types=("cpu", "cuda"))


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
    kernel, coords = tuple(kernel_size), coords.contiguous()
    result = coords.new_empty((kernel[0] * kernel[1] * kernel[2], coords.shape[0]), dtype=torch.int32)
    how: Any = {"shape": tuple(shape), "kernel_size": kernel, "dilation": tuple(dilation)}
    library_of(coords, "coords").run(_C.neighbor_map, coords, result, **how, transposed=transposed, check=check)
    return result


@neighbor_map.register_fake
def _(coords: Any, shape: Any, kernel_size: Any, *how: Any) -> torch.Tensor:
    volume = kernel_size[0] * kernel_size[1] * kernel_size[2]
    return coords.new_empty((volume, coords.shape[0]), dtype=torch.int32)


@_operator
def row_order(map: torch.Tensor, kernel_size: Sequence[int]) -> torch.Tensor:
    """One order for all offsets: how many more would pay depends on the number of rows, which a program that is
    compiled for all numbers of rows does not know."""
    order = map.new_empty((1, map.shape[1]))
    library_of(map, "map").run(_C.row_order, map, order, kernel_size=tuple(kernel_size))
    return order


@row_order.register_fake
def _(map: Any, kernel_size: Any) -> torch.Tensor:
    return map.new_empty((1, map.shape[1]))


# ---- convolution over a map: submanifold, strided, transposed, inverse ----


@_operator
def sparse_conv3d(
    feats: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    map: torch.Tensor,
    order: torch.Tensor | None,
    gradient_map: torch.Tensor | None,
    gradient_order: torch.Tensor | None,
    kernel_size: Sequence[int],
    activation: str | None,
    algorithm: str,
    precision: str | None,
    groups: int,
) -> torch.Tensor:
    """gradient_map: the map of the gradient of feats where that is not `map` itself; the forward pass ignores it."""
    nmap = from_operators(map, order, gradient_map, gradient_order, kernel_size, feats.shape[0])
    how: Any = {"residual": residual, "activation": activation, "algorithm": algorithm, "groups": groups}
    return conv.sparse_conv3d(feats, weight, bias, neighbor_map=nmap, **how, precision=setting(precision, feats))


@sparse_conv3d.register_fake
def _(feats: Any, weight: Any, bias: Any, residual: Any, map: Any, *others: Any) -> torch.Tensor:
    torch._check(feats.shape[1] == others[-1] * weight.shape[-1], lambda: "weight: its channels are not those of feats")
    return feats.new_empty((map.shape[1], weight.shape[0]))


@_operator
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
    activation: str | None,
    algorithm: str,
    groups: int,
    out_dtype: str | None,
    dtype_feats: str | None,
    dtype_weight: str | None,
    dtype_out: str | None,
) -> torch.Tensor:
    """Without a gradient."""
    nmap = from_operators(map, order, None, None, kernel_size, feats.shape[0])
    how: Any = {"residual": residual, "activation": activation, "algorithm": algorithm, "groups": groups}
    how |= {"scale_feats": scale_feats, "scale_weight": scale_weight, "scale_out": scale_out, "out_dtype": out_dtype}
    how |= {"dtype_feats": dtype_feats, "dtype_weight": dtype_weight, "dtype_out": dtype_out}
    return conv.sparse_conv3d(feats, weight, bias, neighbor_map=nmap, **how)


@sparse_conv3d_float8.register_fake
def _(
    feats: Any, weight: Any, bias: Any, residual: Any, of_feats: Any, of_weight: Any, of_out: Any, map: Any, *how: Any
) -> torch.Tensor:
    *_, groups, out_dtype, _, _, dtype_out = how
    torch._check(feats.shape[1] == groups * weight.shape[-1], lambda: "weight: its channels are not those of feats")
    dtype = out_dtype or dtype_out or ("bfloat16" if of_out is None else "float8_e4m3fn")
    return feats.new_empty((map.shape[1], weight.shape[0]), dtype=getattr(torch, dtype))


@_operator
def sparse_conv3d_backward(
    grad_out: torch.Tensor,
    feats: torch.Tensor,
    weight: torch.Tensor,
    map: torch.Tensor,
    order: torch.Tensor | None,
    gradient_map: torch.Tensor | None,
    gradient_order: torch.Tensor | None,
    kernel_size: Sequence[int],
    needs_grad: Sequence[bool],
    algorithm: str,
    precision: str | None,
    groups: int,
) -> Gradients:
    """An empty tensor for each gradient that is not needed."""
    for_feats, for_weight, for_bias = needs_grad
    gradients = conv.sparse_conv3d_backward(
        grad_out,
        feats,
        weight,
        neighbor_map=from_operators(map, order, gradient_map, gradient_order, kernel_size, feats.shape[0]),
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


# ---- pooling ----


def by_products(noted: torch.Tensor | None, mode: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What a pooling noted for its gradient as flexgemm.pool has it: the rows of maxima, and the counts of means."""
    return noted if mode == "max" else None, noted if mode == "mean" else None


@_operator
def sparse_pool3d(
    feats: torch.Tensor, map: torch.Tensor, gradient_map: torch.Tensor, mode: str, with_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pooled rows, and, if asked for, what their gradient needs: a pooling over gradient_map."""
    nmap = from_operators(map, None, None, None, (1, 1, 1), feats.shape[0])
    out, noted = pool.forward(library_of(feats, "feats"), feats, nmap, mode, with_gradient=with_gradient)
    return out, _noted(feats, *noted)


@sparse_pool3d.register_fake
def _(feats: Any, map: Any, gradient_map: Any, mode: Any, with_gradient: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _pooled(feats, map.shape[1], mode, with_gradient)


@_operator
def sparse_pool3d_backward(grad_out: torch.Tensor, map: torch.Tensor, noted: torch.Tensor, mode: str) -> torch.Tensor:
    library = library_of(grad_out, "grad_out")
    return pool.gradient(library, grad_out, grad_out, map, mode, by_products(noted, mode))


@sparse_pool3d_backward.register_fake
def _(grad_out: Any, map: Any, noted: Any, mode: Any) -> torch.Tensor:
    return grad_out.new_empty((map.shape[1], grad_out.shape[1]))


@_operator
def global_pool(
    feats: torch.Tensor, coords: torch.Tensor, batch_size: int, mode: str, with_gradient: bool
) -> Gradients:
    """The pooled samples, the sample of each row as a map (1, N), and, if asked for, what the gradient needs."""
    library = library_of(feats, "feats")
    out, batch, noted = pool.global_forward(library, feats, coords, batch_size, mode, with_gradient=with_gradient)
    return out, batch, _noted(feats, *noted)


@global_pool.register_fake
def _(feats: Any, coords: Any, batch_size: Any, mode: Any, with_gradient: Any) -> Gradients:
    out, noted = _pooled(feats, batch_size, mode, with_gradient)
    return out, coords.new_empty((1, coords.shape[0])), noted


@_operator
def broadcast_samples(values: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
    return pool.rows_of_samples(library_of(values, "values"), values, coords)


@broadcast_samples.register_fake
def _(values: Any, coords: Any) -> torch.Tensor:
    return values.new_empty((coords.shape[0], values.shape[1]))


def _noted(feats: torch.Tensor, chosen: torch.Tensor | None, count: torch.Tensor | None) -> torch.Tensor:
    noted = chosen if count is None else count
    return feats.new_empty(0, dtype=torch.int32) if noted is None else noted


def _pooled(feats: Any, rows: Any, mode: str, with_gradient: bool) -> tuple[torch.Tensor, torch.Tensor]:
    shapes: Any = {"max": (rows, feats.shape[1]), "mean": (rows,)} if with_gradient else {}
    return feats.new_empty((rows, feats.shape[1])), feats.new_empty(shapes.get(mode, 0), dtype=torch.int32)


# ---- sampling ----


@_operator
def grid_sample_3d(
    feats: torch.Tensor, coords: torch.Tensor, grid: torch.Tensor, shape: Sequence[int], mode: str
) -> torch.Tensor:
    return grid_sample.grid_sample_3d(feats, coords, tuple(shape), grid, mode)


@grid_sample_3d.register_fake
def _(feats: Any, coords: Any, grid: Any, shape: Any, mode: Any) -> torch.Tensor:
    return feats.new_empty((*grid.shape[:-1], feats.shape[1]))


@_operator
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
def _(grad_out: Any, feats: Any, coords: Any, grid: Any, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    for_feats, for_grid = others[-1]
    return feats.new_empty(feats.shape if for_feats else 0), (grid if for_grid else feats).new_empty(
        grid.shape if for_grid else 0
    )


# ---- points and voxels ----


@_operator
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


@_operator
def unique_coords(coords: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return distinct_coords(coords, shape)


@unique_coords.register_fake
def _(coords: Any, shape: Any) -> Any:
    m = torch.library.get_ctx().new_dynamic_size()
    return tuple(coords.new_empty(size) for size in ((m, 4), coords.shape[0], m))


@_operator
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


reduced_points_gradient_operator = _operator(reduced_points_gradient)


@reduced_points_gradient_operator.register_fake
def _(grad_out: Any, argmax: Any, first: Any, counts: Any, inverse: Any, reduce: Any) -> torch.Tensor:
    return grad_out.new_empty((inverse.shape[0], grad_out.shape[1]))


@_operator
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


# ---- codes ----


@_operator
def encode_seq(coords: torch.Tensor, shape: Sequence[int], mode: str) -> torch.Tensor:
    return serialize.encode_seq(coords, shape, mode)


@encode_seq.register_fake
def _(coords: Any, shape: Any, mode: Any) -> torch.Tensor:
    bits = _C.sequence_bits(shape=grid_shape(shape), mode=mode)
    return coords.new_empty(coords.shape[0], dtype=torch.int32 if bits <= 32 else torch.int64)


@_operator
def decode_seq(code: torch.Tensor, shape: Sequence[int], mode: str) -> torch.Tensor:
    return serialize.decode_seq(code, shape, mode)


@decode_seq.register_fake
def _(code: Any, shape: Any, mode: Any) -> torch.Tensor:
    return code.new_empty((code.shape[0], 4), dtype=torch.int32)


@_operator
def sort_coords(coords: torch.Tensor, shape: Sequence[int], mode: str) -> torch.Tensor:
    return serialize.sort_coords(coords, shape, mode)


@sort_coords.register_fake
def _(coords: Any, shape: Any, mode: Any) -> torch.Tensor:
    return coords.new_empty(coords.shape[0], dtype=torch.int32)


# ---- FP8 ----


@_operator
def quantize(
    x: torch.Tensor, dtype: str, granularity: str, scale: torch.Tensor | None, swiglu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """An empty tensor for a scale that is given: results of an operator are none of its inputs."""
    q, used = quantization.quantize(x, dtype, granularity=granularity, scale=scale, swiglu=swiglu)
    return q, used if scale is None else used.new_empty(0)


@quantize.register_fake
def _(x: Any, dtype: Any, granularity: Any, scale: Any, swiglu: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *lead, rows, columns = x.shape
    columns = columns // 2 if swiglu else columns
    blocks = (columns + 127) // 128
    sizes: Any = {"tensor": [], "row": [rows], "1x128": [*lead, rows, blocks]}
    sizes["128x128"] = [*lead, (rows + 127) // 128, blocks]
    q = x.new_empty((*lead, rows, columns), dtype=getattr(torch, dtype))
    return q, x.new_empty(sizes[granularity] if scale is None else 0, dtype=torch.float32)


# ---- products: dense, batched, grouped along M, N or K ----


@_operator
def product(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    offsets: torch.Tensor | None,
    m_indices: torch.Tensor | None,
    masked_m: torch.Tensor | None,
    weight_indices: torch.Tensor | None,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    *,
    layout: str,
    groups: int = 0,
    expected_m: int = 0,
    b_row_major: bool = False,
    alpha: float = 1.0,
    activation: str | None = None,
    out_dtype: str | None = None,
    dtype_a: str | None = None,
    dtype_b: str | None = None,
    dtype_out: str | None = None,
    precision: str | None = None,
    promote_every: int | None = 128,
) -> torch.Tensor:
    how: Any = {key: value for key, value in locals().items() if key not in ("a", "b", "layout")}
    return gemm.product(layout, a, b, **(how | {"precision": setting(precision, a)}))


@product.register_fake
def _(a: Any, b: Any, *tensors: Any, layout: str, groups: int = 0, b_row_major: bool = False, **how: Any) -> Any:
    n, k = b.shape[-2:][:: -1 if b_row_major else 1]
    torch._check(a.shape[-1] == k, lambda: "b: its K is not that of a")
    shape: Any = a.shape[-2], n // 2 if how.get("activation") == "swiglu" else n
    if layout in ("batched", "m_grouped_masked", "k_grouped"):
        shape = (groups if layout == "k_grouped" else a.shape[0], *shape)
    scale_out, dtype = tensors[-1], how.get("out_dtype") or how.get("dtype_out")
    if dtype is None:
        narrow = a.dtype.itemsize == 1
        dtype = "float8_e4m3fn" if scale_out is not None else "bfloat16" if narrow else None
    return a.new_empty(shape, dtype=a.dtype if dtype is None else getattr(torch, dtype))


@partial(_operator, writes=("out",))
def product_into(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    offsets: torch.Tensor | None,
    m_indices: torch.Tensor | None,
    masked_m: torch.Tensor | None,
    weight_indices: torch.Tensor | None,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    *,
    layout: str,
    groups: int = 0,
    expected_m: int = 0,
    b_row_major: bool = False,
    alpha: float = 1.0,
    activation: str | None = None,
    accumulate: bool = False,
    out_dtype: str | None = None,
    dtype_a: str | None = None,
    dtype_b: str | None = None,
    dtype_out: str | None = None,
    precision: str | None = None,
    promote_every: int | None = 128,
) -> None:
    """Leaves alone what is of no group. Not `product` itself: torch gives gradients to operators alone that write
    nothing."""
    how: Any = {key: value for key, value in locals().items() if key not in ("a", "b", "layout")}
    gemm.product(layout, a, b, **(how | {"precision": setting(precision, a)}))


# What tells the groups of rows apart.
GROUPING = {"m_grouped": "offsets", "m_grouped_contiguous": "m_indices", "m_grouped_masked": "masked_m"}


def m_grouped_gradients(
    grad_out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    grouping: torch.Tensor,
    layout: str,
    needs_grad: Sequence[bool],
    precision: str | None,
) -> Gradients:
    """The gradients of a product grouped along M in a, b and bias (float32), and an empty tensor for each that is not
    needed. Rows of no group have a gradient of zero, and are not read."""
    how: Any = {"precision": setting(precision, a)}
    grad_a, grad_b, grad_bias = (grad_out.new_empty(0, dtype=dtype) for dtype in (a.dtype, b.dtype, torch.float32))
    if needs_grad[0]:
        into = how | {GROUPING[layout]: grouping, "b_row_major": True, "out": torch.zeros_like(a)}
        grad_a = gemm.product(layout, grad_out.to(a.dtype), b, **into)
    if needs_grad[1] or needs_grad[2]:
        order, ends = _order_by_group(layout, grouping, a, b.shape[0])
        how |= {"offsets": ends, "groups": b.shape[0], "out_dtype": "float32"}
        columns = _columns(grad_out, order)
        if needs_grad[1]:
            grad_b = gemm.product("k_grouped", columns.to(a.dtype), _columns(a, order), **how).to(b.dtype)
        if needs_grad[2]:
            grad_bias = gemm.product("k_grouped", columns, columns.new_ones(1, columns.shape[1]), **how)[..., 0]
    return grad_a, grad_b, grad_bias


def _order_by_group(
    layout: str, grouping: torch.Tensor, a: torch.Tensor, groups: int
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The rows of a, group after group and at last those of none (None: as they are), and where each group ends."""
    if layout == "m_grouped":
        return None, grouping
    numbers = torch.arange(groups, device=a.device)
    if layout == "m_grouped_masked":
        inside = torch.arange(a.shape[1], device=a.device) < grouping[:, None]
        group = torch.where(inside, numbers[:, None], groups).flatten()
    else:
        group = torch.where((grouping >= 0) & (grouping < groups), grouping.long(), groups)
    in_order, order = torch.sort(group, stable=True)
    return order, torch.searchsorted(in_order, numbers, right=True)


def _columns(x: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """(..., C) -> (C, rows), the rows in this order."""
    columns = x.flatten(0, -2).t()
    return columns if order is None else columns.index_select(1, order)


m_grouped_gradients_operator = _operator(m_grouped_gradients)


@m_grouped_gradients_operator.register_fake
def _(grad_out: Any, a: Any, b: Any, grouping: Any, layout: Any, needs_grad: Any, precision: Any) -> Gradients:
    needs_a, needs_b, needs_bias = needs_grad
    grad_bias = grad_out.new_empty(b.shape[:2] if needs_bias else 0, dtype=torch.float32)
    return a.new_empty(a.shape if needs_a else 0), b.new_empty(b.shape if needs_b else 0), grad_bias
