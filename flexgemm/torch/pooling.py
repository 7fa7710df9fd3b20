"""Pooling and upsampling for torch: recorded by autograd, in torch.compile and torch.func."""

from __future__ import annotations

from typing import Any

import torch

from flexgemm import conv, pool
from flexgemm._arrays import Stream, library_of, on_stream
from flexgemm.torch import operators
from flexgemm.torch.autograd import no_gradient, recorded, records
from flexgemm.torch.dispatch import expect_foreseen, expect_tensor, refuse_stream, traced
from flexgemm.torch.ops import expect_gradient_map, inverse_of, maps_of
from flexgemm.voxel import NeighborMap


def sparse_pool3d(
    feats: torch.Tensor, *, neighbor_map: NeighborMap, mode: str = "max", stream: Stream = None
) -> torch.Tensor:
    """`flexgemm.sparse_pool3d` of torch tensors, differentiable once in feats: (N, C) -> (M, C)."""
    expect_tensor(feats, "feats")
    conv.expect_map(neighbor_map)
    recording, out = records(feats), feats
    if traced(feats, feats):
        refuse_stream(stream)
        conv.expect_rows(feats, neighbor_map, "C")
        native, _, gradient, *_ = maps_of(neighbor_map, recording)
        out, _ = operators.sparse_pool3d(feats, native, native if gradient is None else gradient, mode, recording)
    elif recording:
        with on_stream(feats, stream):
            out, _ = _record_pool(feats, neighbor_map, mode)
    else:
        library = conv.bind(feats, neighbor_map, stream)
        out, _ = pool.forward(library, feats, neighbor_map, mode, with_gradient=False)
    return out


def sparse_upsample3d(feats: torch.Tensor, *, neighbor_map: NeighborMap, stream: Stream = None) -> torch.Tensor:
    """`flexgemm.sparse_upsample3d` of torch tensors, differentiable once in feats: (M, C) -> (N, C)."""
    pool.expect_cells(neighbor_map)
    return sparse_pool3d(feats, neighbor_map=inverse_of(neighbor_map), mode="sum", stream=stream)


def global_pool(
    feats: torch.Tensor, coords: torch.Tensor, batch_size: int, mode: str = "max", *, stream: Stream = None
) -> torch.Tensor:
    """`flexgemm.global_pool` of torch tensors, differentiable once in feats: (N, C) -> (B, C)."""
    expect_tensor(feats, "feats")
    recording, out = records(feats), feats
    if traced(feats, coords):
        expect_tensor(coords, "coords")
        refuse_stream(stream)
        out, _, _ = operators.global_pool(feats, coords, batch_size, mode, recording)
    elif recording:
        with on_stream(feats, stream):
            out, _, _ = _record_global_pool(feats, coords, batch_size, mode)
    else:
        library = library_of(feats, "feats", None, stream)
        out, _, _ = pool.global_forward(library, feats, coords, batch_size, mode, with_gradient=False)
    return out


def broadcast_samples(values: torch.Tensor, coords: torch.Tensor, *, stream: Stream = None) -> torch.Tensor:
    """`flexgemm.broadcast_samples` of torch tensors, differentiable once in values: (B, C) -> (N, C)."""
    expect_tensor(values, "values")
    result: torch.Tensor
    if traced(values, coords):
        expect_tensor(coords, "coords")
        refuse_stream(stream)
        result = operators.broadcast_samples(values, coords)
    elif records(values):
        with on_stream(values, stream):
            result = _record_broadcast(values, coords)
    else:
        result = pool.rows_of_samples(library_of(values, "values", None, stream), values, coords)
    return result


# ---- gradients: a pooling over the transposed map, with what the forward pass noted ----


def _gradient(grad_out: Any, map: Any, noted: Any, mode: str) -> Any:
    """map: from inputs to the outputs that read them, or the NeighborMap that has it. noted: the row of each maximum,
    how many rows a mean is of, or, of a sum, nothing."""
    if traced(grad_out, grad_out):
        return operators.sparse_pool3d_backward(grad_out, _map_of_gradient(map), noted, mode)
    return (_record_gradient if records(grad_out) else _gradient_directly)(grad_out, map, noted, mode)


def _gradient_directly(grad_out: Any, map: Any, noted: Any, mode: str) -> Any:
    """Under torch.func this runs beneath the transform, where alone a map that stays can be built."""
    library, by_products = library_of(grad_out, "grad_out"), operators.by_products(noted, mode)
    return pool.gradient(library, grad_out, grad_out, _map_of_gradient(map), mode, by_products)


def _map_of_gradient(map: Any) -> Any:
    return map.native_gradient()[0] if isinstance(map, NeighborMap) else map


def _forward(feats: Any, nmap: NeighborMap, mode: str) -> Any:
    library = conv.bind(feats, nmap, None)
    out, (chosen, count) = pool.forward(library, feats, nmap, mode, with_gradient=True)
    return out, chosen if count is None else count


def _save(ctx: Any, args: tuple[Any, ...], result: Any) -> None:
    _, ctx.nmap, ctx.mode = args
    ctx.save_for_backward(result[1])


def _backward(ctx: Any, grad_out: Any, _: Any) -> Any:
    (noted,) = ctx.saved_tensors
    return _gradient(grad_out, ctx.nmap, noted, ctx.mode), None, None


def _global_forward(feats: Any, coords: Any, batch_size: int, mode: str) -> Any:
    library = library_of(feats, "feats")
    out, batch, noted = pool.global_forward(library, feats, coords, batch_size, mode, with_gradient=True)
    chosen, count = noted
    return out, batch, chosen if count is None else count


def _save_global(ctx: Any, args: tuple[Any, ...], result: Any) -> None:
    *_, ctx.mode = args
    ctx.save_for_backward(*result[1:])


def _global_backward(ctx: Any, grad_out: Any, *_: Any) -> Any:
    batch, noted = ctx.saved_tensors
    return _gradient(grad_out, batch, noted, ctx.mode), None, None, None


def _broadcast(values: Any, coords: Any) -> Any:
    return pool.rows_of_samples(library_of(values, "values"), values, coords)


def _save_broadcast(ctx: Any, args: tuple[Any, ...], result: Any) -> None:
    values, coords = args
    ctx.samples = values.shape[0]
    ctx.save_for_backward(coords.clone() if coords.is_inference() else coords)  # torch saves none of inference mode


def _broadcast_backward(ctx: Any, grad_out: Any) -> Any:
    (coords,) = ctx.saved_tensors
    return _sum_of_samples(grad_out, coords, ctx.samples), None


def _sum_of_samples(grad_out: Any, coords: Any, samples: int) -> Any:
    if traced(grad_out, coords):
        return operators.global_pool(grad_out, coords, samples, "sum", False)[0]
    return (_record_sum if records(grad_out) else _sum_directly)(grad_out, coords, samples)


def _sum_directly(grad_out: Any, coords: Any, samples: int) -> Any:
    library = library_of(grad_out, "grad_out")
    return pool.global_forward(library, grad_out, coords, samples, "sum", with_gradient=False)[0]


_record_pool = recorded("SparsePool3d", _forward, _save, _backward)
_record_global_pool = recorded("GlobalPool", _global_forward, _save_global, _global_backward)
_record_broadcast = recorded("BroadcastSamples", _broadcast, _save_broadcast, _broadcast_backward)
_record_sum = recorded("SumOfSamples", _sum_directly, None, no_gradient)
_record_gradient = recorded("PoolingGradient", _gradient_directly, None, no_gradient)


def _operator_save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, map, gradient_map, ctx.mode, with_gradient = inputs
    ctx.foreseen = with_gradient or ctx.mode == "sum"
    ctx.save_for_backward(map, gradient_map, output[1])


def _operator_backward(ctx: Any, grad_out: Any, _: Any) -> Any:
    map, gradient_map, noted = ctx.saved_tensors
    expect_foreseen(ctx.foreseen, "feats")
    expect_gradient_map(map, gradient_map)
    return _gradient(grad_out, gradient_map, noted, ctx.mode), None, None, None, None


def _broadcast_operator_save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _save_broadcast(ctx, inputs, output)


def _global_operator_save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *_, ctx.mode, with_gradient = inputs
    ctx.foreseen = with_gradient or ctx.mode == "sum"
    ctx.save_for_backward(*output[1:])


def _global_operator_backward(ctx: Any, grad_out: Any, *_: Any) -> Any:
    expect_foreseen(ctx.foreseen, "feats")
    return *_global_backward(ctx, grad_out), None


operators.sparse_pool3d.register_autograd(_operator_backward, setup_context=_operator_save)
operators.broadcast_samples.register_autograd(_broadcast_backward, setup_context=_broadcast_operator_save)
operators.global_pool.register_autograd(_global_operator_backward, setup_context=_global_operator_save)
