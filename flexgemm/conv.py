"""Sparse 3-D convolution over a neighbour map.

    out[m] = bias + sum_v weight[:, v, :] . feats[map[v, m]]

where offsets without a neighbour contribute nothing, and FP8 numbers stand for themselves times their scales. The map
decides what the convolution is: submanifold (Graham, Engelcke, van der Maaten, CVPR 2018), whose output voxels are its
input voxels, strided, transposed, or the inverse of an earlier one.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import numpy as np

from flexgemm import _C
from flexgemm._arguments import as_int, expect_bools, expect_choice, renamed, type_name
from flexgemm._arrays import Array, Library, Stream, library_of
from flexgemm._orders import groups_of
from flexgemm.gemm import FP8, dtype_of_out
from flexgemm.voxel import NeighborMap


class Float8(TypedDict, total=False):
    """Keywords of a convolution of FP8 feats and weight; `submanifold_conv3d` describes them."""

    scale_feats: Array | None
    scale_weight: Array | None
    scale_out: Array | None
    out_dtype: Any
    dtype_feats: str | None
    dtype_weight: str | None
    dtype_out: str | None


OF_GRADIENTS = {"grad_feats": "feats", "grad_weight": "weight", "grad_bias": "weight"}  # what each is like
SCALES = ("scale_feats", "scale_weight", "scale_out")  # those of Float8, in the order of the operators
_FLOAT8 = frozenset(Float8.__annotations__)


def submanifold_conv3d(
    feats: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    neighbor_map: NeighborMap,
    residual: Array | None = None,
    activation: str | None = None,
    groups: int = 1,
    out: Array | None = None,
    algorithm: str = "auto",
    precision: str = "ieee",
    stream: Stream = None,
    **float8: Unpack[Float8],
) -> Array:
    """Submanifold convolution of the features of N voxels: activation(convolution + bias + residual).

    feats: (N, Ci) float32, float16 or bfloat16; rows may be strided.
    weight: (Co, Kw, Kh, Kd, Ci / groups) of the same dtype, Kw, Kh, Kd being neighbor_map.kernel_size.
    bias: (Co) of the same dtype, or None.
    residual: (N, Co) of the same dtype, added before the activation; rows may be strided.
    activation: None, "relu", "silu" or "gelu" (the exact one, by erf).
    groups: of channels, each convolved by itself: the first Co / groups outputs read the first Ci / groups inputs, and
        so on. groups = Ci is a depthwise convolution and has kernels of its own, in float32; other groups do best with
        a multiple of 16 bytes of channels each.
    out: (N, Co) to write into; by default a new array of the library of feats. It may be the residual itself, with the
        same strides, but overlap no input otherwise.
    algorithm: how a GPU computes it; the CPU has one way. The results are the same within rounding.
        "auto": whatever is expected to be fastest for this number of voxels and these channels.
        "explicit_gemm": neighbours written side by side, some 256 MiB at a time, and the kernels of gemm_nt.
        "implicit_gemm": one pass over all offsets, voxels as they come.
        "implicit_gemm_splitk": the offsets split among blocks, where there are too few of them.
        "masked_implicit_gemm": voxels with the same neighbours side by side, where neighbor_map has such an order.
        "masked_implicit_gemm_splitk": the same for groups of offsets, each with an order of its own.
    precision: of float32 products: "ieee" is true float32; "tf32" rounds factors to TF32, on a GPU. Sums are float32.
    stream: a CUDA stream instead of the array library's current one.

    For inference feats and weight may be FP8, of either kind each (`quantize`), and stand for themselves times scales:
    activation(convolution of scale_feats * feats with scale_weight * weight + bias + residual). Then

    scale_feats: float32, () for all feats or (N,) for each row, or None for 1.
    scale_weight: float32, () for all or (Co,) for each output channel, or None for 1.
    out_dtype: float32, float16 or bfloat16, which bias and residual have too; by default that of out, or bfloat16. With
        scale_out, float32 (), FP8 (e4m3fn by default): the result divided by scale_out, saturated; bias and residual
        are then of one of the others.
    dtype_feats, dtype_weight, dtype_out: the dtype behind uint8 arrays: "float8_e4m3fn" or "float8_e5m2".
    algorithm: "explicit_gemm" is "auto".

    Returns (N, Co). Bias, residual and activation are applied to the float32 sums, which are rounded once.
    Deterministic: the same calls give the same bits, and over a frozen map each call does. torch tensors that require
    grad are recorded by autograd (flexgemm.torch); FP8 has no gradient. NumPy arrays over a map that was built with
    device="cuda" are computed on that GPU.

    Raises TypeError for arrays of a wrong kind or dtype and ValueError for wrong shapes, devices, an output that is
    read-only or overlaps an input, by argument name.
    """
    expect_submanifold(neighbor_map)
    how: Any = activation, algorithm, precision, groups, out, stream, float8
    return convolution(feats, weight, bias, residual, neighbor_map, *how)


def submanifold_conv3d_backward(
    grad_out: Array,
    feats: Array,
    weight: Array,
    *,
    neighbor_map: NeighborMap,
    groups: int = 1,
    needs_grad: tuple[bool, bool, bool] = (True, True, True),
    algorithm: str = "auto",
    precision: str = "ieee",
    stream: Stream = None,
) -> tuple[Array | None, Array | None, Array | None]:
    """The gradients of `submanifold_conv3d` in feats, weight and bias.

    grad_out: (N, Co), the gradient of the output; with an activation that of its input, which is the residual's too.
    feats, weight, precision, stream: as in the forward pass.
    algorithm: of the gradient in feats, as in the forward pass; the gradient in weight has one.
    needs_grad: which of the three gradients to compute.

    Returns (grad_feats (N, Ci), grad_weight like weight, grad_bias (Co)), None where needs_grad is False.
    Deterministic; sums are float32. Raises as `submanifold_conv3d` does.
    """
    expect_submanifold(neighbor_map)
    how: Any = {"neighbor_map": neighbor_map, "groups": groups, "needs_grad": needs_grad, "algorithm": algorithm}
    return sparse_conv3d_backward(grad_out, feats, weight, **how, precision=precision, stream=stream)


def sparse_conv3d(
    feats: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    neighbor_map: NeighborMap,
    residual: Array | None = None,
    activation: str | None = None,
    groups: int = 1,
    out: Array | None = None,
    algorithm: str = "auto",
    precision: str = "ieee",
    stream: Stream = None,
    **float8: Unpack[Float8],
) -> Array:
    """Convolution over any neighbour map: strided, transposed (sparse_conv_map) or submanifold (neighbor_map).

    feats: (N, Ci), one row for each of neighbor_map.coords; float32, float16 or bfloat16; rows may be strided.
    weight: (Co, Kw, Kh, Kd, Ci / groups) of the same dtype, also of a transposed convolution, where the voxel at i and
        the output at i * stride + k * dilation - padding meet in weight[:, k]. torch's conv3d has it as (Co, Ci, Kw,
        Kh, Kd), its conv_transpose3d as (Ci, Co, Kw, Kh, Kd).
    bias: (Co) of the same dtype, or None.
    residual (M, Co), activation, groups, out, algorithm, precision, stream, and those of FP8: as of submanifold_conv3d.

    Returns (M, Co), one row for each of neighbor_map.out_coords. Deterministic, recorded by autograd and computed where
    the map is, and raises, as submanifold_conv3d.
    """
    how: Any = activation, algorithm, precision, groups, out, stream, float8
    return convolution(feats, weight, bias, residual, expect_map(neighbor_map), *how)


def sparse_conv3d_backward(
    grad_out: Array,
    feats: Array,
    weight: Array,
    *,
    neighbor_map: NeighborMap,
    groups: int = 1,
    needs_grad: tuple[bool, bool, bool] = (True, True, True),
    algorithm: str = "auto",
    precision: str = "ieee",
    stream: Stream = None,
) -> tuple[Array | None, Array | None, Array | None]:
    """The gradients of `sparse_conv3d` in feats, weight and bias.

    grad_out: (M, Co), the gradient of the output; the rest and the result as of submanifold_conv3d_backward. Those of
    `sparse_inverse_conv3d` come with neighbor_map.inverse.
    """
    library = bind(feats, expect_map(neighbor_map), stream)
    expect_bools(needs_grad, 3)
    with renamed(OF_GRADIENTS):
        return backward(library, grad_out, feats, weight, neighbor_map, needs_grad, algorithm, precision, groups)


def sparse_inverse_conv3d(
    feats: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    neighbor_map: NeighborMap,
    residual: Array | None = None,
    activation: str | None = None,
    groups: int = 1,
    out: Array | None = None,
    algorithm: str = "auto",
    precision: str = "ieee",
    stream: Stream = None,
    **float8: Unpack[Float8],
) -> Array:
    """The transposed convolution from the outputs of an earlier convolution back to its inputs: `sparse_conv3d` over
    neighbor_map.inverse.

    feats: (M, Ci), one row for each of neighbor_map.out_coords.
    weight: (Co, Kw, Kh, Kd, Ci / groups), Kw, Kh, Kd being neighbor_map.kernel_size.

    Returns (N, Co), one row for each of neighbor_map.coords; a voxel that no output read gets the bias.
    """
    inverse = expect_map(neighbor_map).inverse
    how: Any = activation, algorithm, precision, groups, out, stream, float8
    return convolution(feats, weight, bias, residual, inverse, *how)


def convolution(
    feats: Array,
    weight: Array,
    bias: Array | None,
    residual: Array | None,
    neighbor_map: NeighborMap,
    activation: str | None,
    algorithm: str,
    precision: str,
    groups: int,
    out: Array | None = None,
    stream: Stream = None,
    float8: Float8 | None = None,
) -> Array:
    """A convolution over any map. torch tensors that can be used as they are take no more Python than this."""
    order, kernel_size = neighbor_map.native_order, neighbor_map.kernel_size
    result = _C.conv_forward_direct(
        feats,
        weight,
        bias,
        neighbor_map.native,
        out=out,
        order=order,
        segments=_segments(feats, weight, neighbor_map, algorithm, groups, stream),
        residual=residual,
        order_groups=None if order is None else groups_of(order, kernel_size),
        phases=neighbor_map.phases[0],
        activation=activation,
        algorithm=algorithm,
        precision=precision,
        groups=groups,
        kernel_size=kernel_size,
        rows=neighbor_map.num_voxels,
        options=float8,
        stream=stream,
    )
    if result is not NotImplemented:
        return result
    library, given = bind(feats, neighbor_map, stream), float8 or Float8()
    expect_known(given)
    scales = map(given.get, SCALES)
    if not library.needs_grad(feats, weight, bias, residual, *scales):
        how: Any = activation, algorithm, precision, groups, out
        return forward(library, feats, weight, bias, residual, neighbor_map, *how, **given)
    if out is not None:
        raise ValueError("out: cannot be given when feats, weight, bias or residual require grad")
    expect_differentiable(library.dtype(feats), given)
    from flexgemm.torch import ops

    how = activation, algorithm, precision, groups, stream
    return ops.record_conv(feats, weight, bias, residual, neighbor_map, *how)


def forward(
    library: Library,
    feats: Array,
    weight: Array,
    bias: Array | None,
    residual: Array | None,
    neighbor_map: NeighborMap,
    activation: str | None,
    algorithm: str,
    precision: str,
    groups: int,
    out: Array | None = None,
    *,
    scale_feats: Array | None = None,
    scale_weight: Array | None = None,
    scale_out: Array | None = None,
    out_dtype: Any = None,
    dtype_feats: str | None = None,
    dtype_weight: str | None = None,
    dtype_out: str | None = None,
) -> Array:
    """`sparse_conv3d` without autograd, of arrays of any library, or of what has to be copied first."""
    is_float8 = dtype_feats in FP8 or library.dtype(feats) in FP8
    dtype = None
    if is_float8:
        dtype = dtype_of_out(library, feats, out, out_dtype, dtype_out, scale_out is not None)
    elif not (
        scale_feats is scale_weight is scale_out is out_dtype is dtype_feats is dtype_weight is dtype_out is None
    ):
        given: Float8 = {"scale_feats": scale_feats, "scale_weight": scale_weight, "scale_out": scale_out}
        given |= {"dtype_feats": dtype_feats, "dtype_weight": dtype_weight, "dtype_out": dtype_out}
        expect_none(library.dtype(feats), {**given, "out_dtype": out_dtype})
    feats = library.rows(feats, "feats")
    weight = library.contiguous(weight, "weight")
    bias = None if bias is None else library.contiguous(bias, "bias")
    residual = None if residual is None else library.rows(residual, "residual")
    scales = zip(SCALES, (scale_feats, scale_weight, scale_out), strict=True)
    scale_feats, scale_weight, scale_out = (s if s is None else library.contiguous(s, name) for name, s in scales)
    shape = _check_shapes(feats, weight, neighbor_map, groups)
    out = library.empty(shape, dtype, feats) if out is None else library.output(out, shape, dtype, feats)
    map, order = neighbor_map.native, neighbor_map.native_order
    if _is_depthwise(feats, groups, algorithm, precision) and not is_float8:
        library.run(_C.depthwise_forward, feats, weight, bias, map, out, residual=residual, activation=activation)
        return library.result(out)
    _C.conv_forward(
        feats,
        weight,
        bias,
        map,
        out,
        order=order,
        segments=_segments(feats, weight, neighbor_map, algorithm, groups, library.stream, again=True),
        residual=residual,
        scale_feats=scale_feats,
        scale_weight=scale_weight,
        scale_out=scale_out,
        order_groups=groups_of(order, neighbor_map.kernel_size),
        phases=neighbor_map.phases[0],
        activation=activation,
        algorithm=algorithm,
        precision=precision,
        dtype_feats=dtype_feats,
        dtype_weight=dtype_weight,
        dtype_out=dtype if scale_out is not None else None,
        groups=groups,
        workspace=library.workspace,
        stream=library.stream,
    )
    return library.result(out)


def backward(
    library: Library,
    grad_out: Array,
    feats: Array,
    weight: Array,
    neighbor_map: NeighborMap,
    needs_grad: tuple[bool, bool, bool],
    algorithm: str,
    precision: str,
    groups: int,
) -> tuple[Array | None, Array | None, Array | None]:
    """`sparse_conv3d_backward` with the library already bound."""
    if (dtype := library.dtype(feats)) in FP8:
        raise ValueError(f"feats: expected numbers that have a gradient in convolutions, not FP8, got {dtype}")
    grad_out = library.rows(grad_out, "grad_out")
    feats = library.rows(feats, "feats")
    weight = library.contiguous(weight, "weight")
    expected = _check_shapes(feats, weight, neighbor_map, groups)
    if grad_out.shape != expected:
        raise ValueError(f"grad_out: expected {expected}, got {tuple(grad_out.shape)}")
    library.expect_dtype_of(weight, grad_out, "grad_out", "weight")
    depthwise = _is_depthwise(feats, groups, algorithm, precision)
    how: dict[str, Any] = {"algorithm": algorithm, "precision": precision, "groups": groups}
    grad_feats = library.empty(tuple(feats.shape), None, feats) if needs_grad[0] else None
    grad_weight = library.empty(tuple(weight.shape), None, weight) if needs_grad[1] else None
    grad_bias = library.empty((weight.shape[0],), None, weight) if needs_grad[2] else None
    map, mirrored = neighbor_map.native, neighbor_map.mirrored
    gradient_map = order = None
    if needs_grad[0]:
        gradient_map, order = neighbor_map.native_gradient(library.stream)

    if depthwise:
        if needs_grad[0]:
            library.run(_C.depthwise_dgrad, grad_out, weight, gradient_map, grad_feats, mirrored=mirrored)
        if needs_grad[1]:
            library.run(_C.depthwise_wgrad, grad_out, feats, map, grad_weight)
        if needs_grad[2]:
            library.run(_C.conv_wgrad, grad_out, feats, map, None, grad_bias)
    else:
        asked = algorithm, groups, library.stream
        orders: dict[str, Any] = {"order": order, "order_groups": groups_of(order, neighbor_map.kernel_size)}
        orders |= {"phases": neighbor_map.phases[1], "mirrored": mirrored}
        of_weights = needs_grad[1] or needs_grad[2]
        if needs_grad[0] and mirrored:
            orders["segments"] = _segments(grad_out, weight, neighbor_map, *asked, backward=True)
        segments = _segments(grad_out, weight, neighbor_map, *asked) if of_weights else None
        # Without elements the input gradient is no operation: what is in front then may still write grad_out.
        beside = {"segments": segments, "concurrent": needs_grad[0] and 0 not in feats.shape}
        operands = grad_out, feats, map, grad_weight, grad_bias
        held = None  # for the second operation, before the first begins: what runs beside that uses no other memory
        if needs_grad[0]:
            if of_weights:
                nbytes = _C.conv_wgrad_workspace(*operands, stream=library.stream, **beside, **how)
                held = library.workspace(nbytes, grad_out) if nbytes else None
            library.run(_C.conv_dgrad, grad_out, weight, gradient_map, grad_feats, **orders, **how)
        if of_weights:
            library.run(_C.conv_wgrad, *operands, workspace=held, **beside, **how)

    grad_feats = library.result(grad_feats) if needs_grad[0] else None
    grad_weight = library.result(grad_weight) if needs_grad[1] else None
    grad_bias = library.result(grad_bias) if needs_grad[2] else None
    return grad_feats, grad_weight, grad_bias


def _segments(
    rows: Array,
    weight: Array,
    neighbor_map: NeighborMap,
    algorithm: str,
    groups: int,
    stream: Stream,
    *,
    backward: bool = False,
    again: bool = False,
) -> Array | None:
    """The segments of the map, if they are there or this is the call by which they pay. `rows`, feats or
    the gradient of the output, and weight have not been looked at yet. again: the call has asked before."""
    found = neighbor_map._segments
    if found.done:
        return found.ready
    dtype = getattr(rows, "dtype", None)
    shape: tuple[int, ...] = getattr(weight, "shape", ())
    two_bytes = getattr(dtype, "itemsize", 0) == 2 or dtype in ("float16", "bfloat16")  # a DeviceArray has names
    if not two_bytes or len(shape) != 5 or groups != 1 or algorithm != "auto":
        return None
    ci, co = (shape[0], shape[4]) if backward else (shape[4], shape[0])
    place = neighbor_map.native if isinstance(rows, np.ndarray) else rows
    return neighbor_map.segments_for(ci, co, place, stream, again=again)


def bind(feats: Array, neighbor_map: NeighborMap, stream: Stream) -> Library:
    """The library of feats; NumPy features go where the map is."""
    expect_map(neighbor_map)
    device = neighbor_map.device
    if device is not None and not isinstance(feats, np.ndarray):
        device = None
    return library_of(feats, "feats", device, stream)


def expect_map(neighbor_map: NeighborMap) -> NeighborMap:
    if not isinstance(neighbor_map, NeighborMap):
        raise TypeError(f"neighbor_map: expected a NeighborMap, got {type_name(neighbor_map)}")
    return neighbor_map


def expect_rows(feats: Array, neighbor_map: NeighborMap, channels: str) -> None:
    """Raises unless feats have a row for each voxel of the map."""
    rows, shape = neighbor_map.num_voxels, feats.shape
    if len(shape) != 2 or shape[0] != rows:
        raise ValueError(f"feats: expected ({rows}, {channels}) to match neighbor_map, got {tuple(shape)}")


def expect_submanifold(neighbor_map: NeighborMap) -> None:
    if not expect_map(neighbor_map).submanifold:
        raise ValueError(f"neighbor_map: expected a submanifold one, of neighbor_map(), got {neighbor_map!r}")


def expect_differentiable(dtype: str, float8: Float8) -> None:
    """Raises for feats that have no gradient."""
    if dtype in (*FP8, "uint8"):
        raise ValueError(f"feats, weight, bias, residual: require grad, but a convolution of {dtype} has no gradient")
    expect_none(dtype, float8)


def expect_known(float8: Float8) -> None:
    """The rest of a call's keywords: raises for what is none."""
    for name in float8:
        if name not in _FLOAT8:
            raise TypeError(f"unexpected keyword argument {name!r}")


def expect_none(dtype: str, float8: Float8) -> None:
    """Of feats that are not FP8."""
    for name, value in float8.items():
        if value is not None:
            raise ValueError(f"{name}: expected None, since feats are {dtype}, not FP8")


def _is_depthwise(feats: Array, groups: int, algorithm: str, precision: str) -> bool:
    """Whether every channel is a group. Then arithmetic is float32 whatever the precision, and there is one algorithm;
    they must be what they can be still."""
    depthwise = groups > 1 and groups == feats.shape[1]
    if depthwise:
        expect_choice(algorithm, "algorithm", _C.ALGORITHMS)
        if precision is not None:
            expect_choice(precision, "precision", _C.PRECISIONS)
    return depthwise


def _check_shapes(feats: Array, weight: Array, neighbor_map: NeighborMap, groups: int) -> tuple[int, int]:
    """The shape of the output. Checks what the extension cannot see: it is given V, not the kernel's axes."""
    expect_rows(feats, neighbor_map, "Ci")
    shape, co_and_kernel = feats.shape, weight.shape
    co = co_and_kernel[0] if co_and_kernel else 0
    if type(groups) is not int or groups != 1:
        groups, counts = as_int(groups, "groups"), (shape[1], co)
        if groups < 1 or any(count % groups for count in counts):
            raise ValueError(f"groups: expected a divisor of Ci and Co, {counts[0]} and {counts[1]}, got {groups!r}")
        if groups > 1 and shape[1] and not co:
            raise ValueError(f"weight: expected channels in {groups} groups, got 0 channels")
    expected = (co, *neighbor_map.kernel_size, shape[1] // groups)
    if co_and_kernel != expected:
        need = ", ".join(str(n) for n in expected[1:])
        raise ValueError(f"weight: expected (Co, {need}) to match neighbor_map and feats, got {tuple(co_and_kernel)}")
    return neighbor_map.num_out_voxels, co
