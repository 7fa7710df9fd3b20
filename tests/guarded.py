"""Every operation of the extension, called with fenced buffers and an exact workspace; NumPy in, NumPy out.

Each call proves that inputs stayed as they were and that nothing outside the outputs and the workspace was written.
`pad` and `offset` place the matrices with strided rows and off alignment, in and out.
"""

from __future__ import annotations

from contextlib import contextmanager

import map_segments
import numpy as np
from memory import Buffer, poison

from flexgemm import _C


@contextmanager
def multiprocessors(count):
    """Products within take at most so many; None: all."""
    _C.set_num_sms(count)
    try:
        yield
    finally:
        _C.set_num_sms(None)


class Call:
    """The buffers of one call: inputs by give(), outputs by take(), then run()."""

    def __init__(self, backend, *, pad=0, offset=0, fence=True):
        self.backend, self.pad, self.offset, self.fence = backend, pad, offset, fence
        self.inputs, self.outputs = [], []

    def _layout(self, strided):
        return {"row_pad": self.pad, "offset": self.offset} if strided else {}

    def give(self, array, *, strided=False, columns=False):
        """columns: those of its matrices are adjacent elements, where rows are otherwise."""
        if array is None:
            return None
        layout = self._layout(strided) | {"fence": self.fence, "at_end": not self.fence}
        self.inputs.append(Buffer(self.backend, array.swapaxes(-1, -2) if columns else array, **layout))
        return self.inputs[-1].exchanged if columns else self.inputs[-1].array

    def take(self, shape, dtype, *, strided=False, initial=None):
        """An output of poison, or of what it should hold before the call."""
        content = poison(shape, str(dtype)) if initial is None else initial
        layout = self._layout(strided)
        bare = not self.fence and initial is None and not any(layout.values())
        layout |= {"fence": self.fence, "at_end": not self.fence}
        self.outputs.append(Buffer(self.backend, content, output=True, initialise=not bare, **layout))
        return self.outputs[-1].array

    def run(self, operation, *args, **kwargs):
        """Buffers start at multiples of 256: the room that the query leaves to align others is not given."""
        nbytes = max(getattr(_C, f"{operation}_workspace")(*args, **kwargs) - 255, 0)
        workspace = Buffer(self.backend, poison(nbytes, "uint8"), output=True, fence=self.fence, initialise=self.fence)
        kwargs["workspace"] = workspace.array if nbytes else None
        buffers = [*self.inputs, *self.outputs, workspace]
        still_needed = self.backend.run(getattr(_C, operation), buffers, *args, **kwargs)
        assert not still_needed, f"{operation}: did not run, asks for a workspace of {still_needed} bytes"
        for buffer in self.inputs:
            buffer.read(f"{operation}: an input")
        if self.fence:
            workspace.read(f"{operation}: workspace of {nbytes} bytes")
        results = [buffer.read(f"{operation}: output {i}") for i, buffer in enumerate(self.outputs)]
        return results[0] if len(results) == 1 else results


def neighbor_map(backend, coords, shape, kernel_size, dilation=(1, 1, 1), *, transposed=False, check=False, fence=True,
                 groups=()):  # fmt: skip
    """The map, and with groups its orders."""
    call = Call(backend, fence=fence)
    volume = int(np.prod(kernel_size))
    orders = {"order": call.take((sum(groups), len(coords)), "int32"), "groups": groups} if groups else {}
    return call.run(
        "neighbor_map",
        call.give(coords),
        call.take((volume, len(coords)), "int32"),
        shape=shape,
        kernel_size=kernel_size,
        dilation=dilation,
        transposed=transposed,
        check=check,
        **orders,
    )


def sparse_map(backend, coords, shape, sites, sites_shape, kernel_size, stride, padding, dilation, *, transposed=False,
               fence=True, groups=(), phases=(1, 1, 1)):  # fmt: skip
    """The map, and with groups its orders."""
    call = Call(backend, fence=fence)
    orders = {}
    if groups:
        orders = {"order": call.take((sum(groups), len(sites)), "int32"), "groups": groups, "phases": phases}
    return call.run(
        "neighbor_map",
        call.give(coords),
        call.take((int(np.prod(kernel_size)), len(sites)), "int32"),
        queries=call.give(sites),
        shape=shape,
        query_shape=sites_shape,
        kernel_size=kernel_size,
        stride=stride,
        padding=padding,
        dilation=dilation,
        transposed=transposed,
        **orders,
    )


def conv_sites(backend, coords, shape, to_shape, kernel_size, stride, padding, dilation, *, transposed=False,
               mode="bxyz", code_shape=None, fence=True):  # fmt: skip
    """(M, 4) int32, by way of the codes."""
    call = Call(backend, fence=fence)
    kernel = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation, "transposed": transposed}
    code_shape = code_shape or to_shape
    code, count = call.run(
        "conv_sites",
        call.give(coords),
        call.take((len(coords) * _C.plan_conv_sites(**kernel),), "int64"),
        call.take((1,), "int64"),
        shape=shape,
        out_shape=to_shape,
        code_shape=code_shape,
        mode=mode,
        padding=padding,
        **kernel,
    )
    call = Call(backend, fence=fence)
    sites = call.take((int(count[0]), 4), "int32")
    return call.run("decode_seq", call.give(code), sites, shape=code_shape, mode=mode)


def row_order(backend, nmap, kernel_size, groups=(1,), phases=(1, 1, 1), **layout):
    call = Call(backend, **layout)
    how = {"kernel_size": kernel_size, "groups": groups, "phases": phases}
    return call.run("row_order", call.give(nmap), call.take((sum(groups), nmap.shape[1]), "int32"), **how)


def ordered_map(backend, nmap, order, **layout):
    call = Call(backend, **layout)
    shape = len(order) + len(nmap), nmap.shape[1]
    return call.run("ordered_map", call.give(nmap), call.give(order), call.take(shape, "int32"))


def segment_map(backend, nmap, order, kernel_size, tiles, in_rows, **layout):
    call = Call(backend, **layout)
    volume, columns = nmap.shape
    shape = -(-columns // (64 * tiles)), map_segments.segment_words(tiles, volume)
    return call.run(
        "segment_map",
        call.give(nmap),
        call.give(order),
        call.take(shape, "int32"),
        kernel_size=kernel_size,
        tiles=tiles,
        in_rows=in_rows,
    )


def encode_seq(backend, coords, shape, mode, **layout):
    call = Call(backend, **layout)
    dtype = "int32" if _C.sequence_bits(shape=shape, mode=mode) <= 32 else "int64"
    given = call.give(coords, strided=True)
    return call.run("encode_seq", given, call.take((len(coords),), dtype), shape=shape, mode=mode)


def decode_seq(backend, code, shape, mode, **layout):
    call = Call(backend, **layout)
    coords = call.take((len(code), 4), "int32", strided=True)
    return call.run("decode_seq", call.give(code), coords, shape=shape, mode=mode)


def sort_keys(backend, keys, bits, *, with_sorted=True, **layout):
    """(order, sorted), or order alone."""
    call = Call(backend, **layout)
    order = call.take((len(keys),), "int32")
    return call.run(
        "sort_keys", call.give(keys), order, call.take(keys.shape, keys.dtype) if with_sorted else None, bits=bits
    )


def hash_insert(
    backend, keys, values, slots, value_dtype, *, shape=None, word=None, initial=None, clear=False, replace=False,
    **layout,
):  # fmt: skip
    """The table (keys, values, state) after the insertion, or (slots of two words, None, state); `initial` is one from
    before."""
    call = Call(backend, **layout)
    initial = initial or (None, None, None)
    key_dtype = "int64" if shape else keys.dtype
    arrays = [call.give(keys, strided=keys.ndim == 2), call.give(values)]
    arrays.append(call.take((slots, 2) if word else (slots,), word or key_dtype, initial=initial[0]))
    arrays.append(None if word else call.take((slots,), value_dtype, initial=initial[1]))
    arrays.append(call.take((2,), "int64", initial=initial[2]))
    result = call.run("hash_insert", *arrays, shape=shape, clear=clear, replace=replace)
    return (result[0], None, result[1]) if word else result


def hash_lookup(backend, keys, table_keys, table_values, state, *, value_dtype=None, shape=None, **layout):
    call = Call(backend, **layout)
    table = [call.give(array) for array in (table_keys, table_values, state)]
    out = call.take(keys.shape[:1], value_dtype or table_values.dtype)
    return call.run("hash_lookup", call.give(keys, strided=keys.ndim == 2), *table, out, shape=shape)


def sample_map(backend, grid, coords, shape, mode, **layout):
    """(indices, weights), or the indices of the nearest voxels."""
    call = Call(backend, **layout)
    points = grid.shape[0] * grid.shape[1]
    given = [call.give(grid), call.give(coords, strided=True)]
    indices = call.take((points, 8 if mode == "trilinear" else 1), "int32", strided=True)
    weights = call.take((points, 8), "float32", strided=True) if mode == "trilinear" else None
    return call.run("sample_map", *given, indices, weights, shape=shape)


def sample_forward(backend, grid, coords, feats, shape, **layout):
    call = Call(backend, **layout)
    given = call.give(grid), call.give(coords), call.give(feats, strided=True)
    out = call.take((grid.shape[0] * grid.shape[1], feats.shape[1]), feats.dtype, strided=True)
    return call.run("sample_forward", *given, out, shape=shape)


def sample_grad(backend, grad_out, feats, grid, indices, **layout):
    call = Call(backend, **layout)
    rows = [call.give(array, strided=True) for array in (grad_out, feats)]
    return call.run("sample_grad", *rows, call.give(grid), call.give(indices), call.take(grid.shape, "float32"))


def gather_sum(backend, feats, indices, weights, **layout):
    call = Call(backend, **layout)
    arrays = call.give(feats, strided=True), call.give(indices), call.give(weights)
    return call.run("gather_sum", *arrays, call.take((len(indices), feats.shape[1]), feats.dtype, strided=True))


def group_rows(backend, indices, rows, **layout):
    """(order, starts)."""
    call = Call(backend, **layout)
    return call.run(
        "group_rows", call.give(indices), call.take((indices.size,), "int32"), call.take((rows + 1,), "int32")
    )


def group_reduce(backend, src, order, starts, weights, reduction, *, rows=None, with_argmax=False, **layout):
    """out, or (out, argmax)."""
    call = Call(backend, **layout)
    shape = (len(starts) - 1 if rows is None else rows, src.shape[1])
    return call.run(
        "group_reduce",
        call.give(src, strided=True),
        *(call.give(array) for array in (order, starts, weights)),
        call.take(shape, src.dtype, strided=True),
        call.take(shape, "int32") if with_argmax else None,
        mode=reduction,
    )


def voxel_codes(backend, points, dtype, *, with_places=True, **how):
    """(code, places), or the codes alone."""
    call = Call(backend, fence=how.pop("fence", True))
    code = call.take((len(points),), dtype)
    places = call.take((len(points), 4), "float32") if with_places else None
    return call.run("voxel_codes", call.give(points), code, places, **how)


def unique_ranks(backend, in_order, **layout):
    """(ranks, count)."""
    call = Call(backend, **layout)
    return call.run("unique_ranks", call.give(in_order), call.take(in_order.shape, "int32"), call.take((1,), "int32"))


def unique_groups(backend, in_order, order, ranks, voxels, **layout):
    """(keys, starts, first, counts, inverse)."""
    call = Call(backend, **layout)
    sizes = {"starts": voxels + 1, "first": voxels, "counts": voxels, "inverse": len(in_order)}
    given = [call.give(array) for array in (in_order, order, ranks)]
    keys = call.take((voxels,), in_order.dtype)
    return call.run("unique_groups", *given, keys, *(call.take((size,), "int32") for size in sizes.values()))


def conv_forward(backend, feats, weight, bias, nmap, *, order=None, groups=None, phases=(1, 1, 1), segments=None,
                 residual=None, activation=None, in_place=False, algorithm="auto", precision="ieee", channel_groups=1,
                 out_dtype=None, scale_feats=None, scale_weight=None, scale_out=None, **layout):  # fmt: skip
    """in_place: the output is the residual itself. out_dtype: that of feats by default."""
    call = Call(backend, **layout)
    shape = nmap.shape[1], len(weight)
    out = call.take(shape, out_dtype or feats.dtype, strided=True, initial=residual if in_place else None)
    return call.run(
        "conv_forward",
        call.give(feats, strided=True),
        call.give(weight),
        call.give(bias),
        call.give(nmap),
        out,
        order=call.give(order),
        segments=call.give(segments),
        residual=out if in_place else call.give(residual, strided=True),
        scale_feats=call.give(scale_feats),
        scale_weight=call.give(scale_weight),
        scale_out=call.give(scale_out),
        activation=activation,
        order_groups=groups,
        phases=phases,
        algorithm=algorithm,
        precision=precision,
        groups=channel_groups,
    )


def conv_dgrad(backend, grad_out, weight, nmap, *, order=None, groups=None, phases=(1, 1, 1), segments=None,
               algorithm="auto", mirrored=False, precision="ieee", channel_groups=1, **layout):  # fmt: skip
    """nmap is the transposed map, or with mirrored=True the forward map."""
    call = Call(backend, **layout)
    return call.run(
        "conv_dgrad",
        call.give(grad_out, strided=True),
        call.give(weight),
        call.give(nmap),
        call.take((nmap.shape[1], channel_groups * weight.shape[-1]), grad_out.dtype, strided=True),
        order=call.give(order),
        segments=call.give(segments),
        order_groups=groups,
        phases=phases,
        algorithm=algorithm,
        mirrored=mirrored,
        precision=precision,
        groups=channel_groups,
    )


def conv_wgrad(backend, grad_out, feats, nmap, *, outputs=("weight", "bias"), segments=None, algorithm="auto",
               precision="ieee", channel_groups=1, **layout):  # fmt: skip
    """grad_weight (Co, V, Ci / channel_groups) and grad_bias (Co); one of them alone when `outputs` names one."""
    call = Call(backend, **layout)
    co, ci, dtype = grad_out.shape[1], feats.shape[1], feats.dtype
    return call.run(
        "conv_wgrad",
        call.give(grad_out, strided=True),
        call.give(feats, strided=True),
        call.give(nmap),
        call.take((co, len(nmap), ci // channel_groups), dtype) if "weight" in outputs else None,
        call.take((co,), dtype) if "bias" in outputs else None,
        segments=call.give(segments),
        algorithm=algorithm,
        precision=precision,
        groups=channel_groups,
    )


def depthwise_forward(backend, feats, weight, bias, nmap, *, residual=None, activation=None, in_place=False, **layout):
    call = Call(backend, **layout)
    shape = nmap.shape[1], len(weight)
    out = call.take(shape, feats.dtype, strided=True, initial=residual if in_place else None)
    return call.run(
        "depthwise_forward",
        call.give(feats, strided=True),
        call.give(weight),
        call.give(bias),
        call.give(nmap),
        out,
        residual=out if in_place else call.give(residual, strided=True),
        activation=activation,
    )


def depthwise_dgrad(backend, grad_out, weight, nmap, channels, **layout):
    """nmap is the transposed map."""
    call = Call(backend, **layout)
    return call.run(
        "depthwise_dgrad",
        call.give(grad_out, strided=True),
        call.give(weight),
        call.give(nmap),
        call.take((nmap.shape[1], channels), grad_out.dtype, strided=True),
    )


def depthwise_wgrad(backend, grad_out, feats, nmap, **layout):
    call = Call(backend, **layout)
    return call.run(
        "depthwise_wgrad",
        call.give(grad_out, strided=True),
        call.give(feats, strided=True),
        call.give(nmap),
        call.take((grad_out.shape[1], len(nmap), 1), feats.dtype),
    )


ARRAYS = ("scale_a", "scale_b", "bias", "scale_out", "offsets", "m_indices", "masked_m", "weight_indices")


def pool(backend, feats, nmap, mode, *, by_products=True, **layout):
    """(out, chosen of max, count), or out alone."""
    call = Call(backend, **layout)
    shape = nmap.shape[1], feats.shape[1]
    return call.run(
        "pool",
        call.give(feats, strided=True),
        call.give(nmap),
        call.take(shape, feats.dtype, strided=True),
        call.take(shape, "int32", strided=not call.pad) if by_products and mode == "max" else None,
        call.take(shape[:1], "int32") if by_products else None,
        mode=mode,
    )


def pool_backward(backend, grad_out, nmap, mode, chosen=None, count=None, **layout):
    """nmap is the transposed map."""
    call = Call(backend, **layout)
    return call.run(
        "pool_backward",
        call.give(grad_out, strided=True),
        call.give(nmap),
        call.take((nmap.shape[1], grad_out.shape[1]), grad_out.dtype, strided=True),
        call.give(chosen, strided=not call.pad),
        call.give(count),
        mode=mode,
    )


def batch_indices(backend, coords, samples, **layout):
    call = Call(backend, **layout)
    return call.run("batch_indices", call.give(coords), call.take((len(coords), 1), "int32"), samples=samples)


def gemm(backend, a, b, out_dtype, *, shape=None, initial=None, columns="", pad=0, offset=0, fence=True, **how):
    """`shape` of the output is that of a dense or m-grouped product by default. columns: "a", "b" or "ab", the operands
    whose columns are adjacent elements."""
    call = Call(backend, pad=pad, offset=offset, fence=fence)
    given = {name: call.give(value) if name in ARRAYS else value for name, value in how.items()}
    return call.run(
        "gemm",
        call.give(a, strided=True, columns="a" in columns),
        call.give(b, strided=True, columns="b" in columns),
        call.take(shape or (len(a), b.shape[-2]), out_dtype, strided=True, initial=initial),
        **given,
    )


BLOCK_ROWS = {"1x128": 1, "128x128": 128}


def quantize(backend, x, dtype, granularity, scale=None, *, columns=False, swiglu=False, saturate=True, q_offset=None,
             **layout):  # fmt: skip
    """(q, scale). columns: those of x are adjacent elements."""
    call = Call(backend, **layout)
    given = call.give(x, strided=True, columns=columns)
    call.offset = call.offset if q_offset is None else q_offset
    *lead, m, k = x.shape
    k //= 2 if swiglu else 1
    block_rows = BLOCK_ROWS.get(granularity, 0)
    shape = {"tensor": (), "row": (*lead, m)}.get(granularity)
    if block_rows:
        shape = (*lead, -(-m // block_rows), -(-k // 128))
    return call.run(
        "quantize",
        given,
        call.take((*lead, m, k), dtype, strided=True),
        call.take(shape, "float32", initial=scale),
        scale_given=scale is not None,
        swiglu=swiglu,
        saturate=saturate,
        block_rows=block_rows,
    )
