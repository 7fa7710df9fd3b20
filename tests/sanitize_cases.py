"""One small case of every kernel path, for compute-sanitizer: NumPy and the extension only, no pytest, no torch.

    compute-sanitizer --tool memcheck python tests/sanitize_cases.py [--list] [--device cpu] [--part I N] [NAME ...]

NAME keeps the cases whose name contains it, --part every N-th of these from the I-th on. Allocations are exact and
outputs start uninitialised, so that the tools see what the canaries and the poison of the test suite would hide. Every
result is compared with the oracle. Exit status 1 on a wrong result or when no case matches.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a build in place needs no installation

import guarded
import numpy as np
import reference
import scenes
from memory import Cuda, Host
from products import (
    E4M3,
    E5M2,
    ENDS,
    block_scales,
    check_grouped_output,
    check_output,
    elements,
    judge_float8,
    operands,
)
from reference import assert_conv_rows, assert_gemm_rows, assert_rows, assert_same_bits

from flexgemm import _C

MODES = {
    "float32": ("float32", "ieee"),
    "tf32": ("float32", "tf32"),
    "float16": ("float16", "ieee"),
    "bfloat16": ("bfloat16", "ieee"),
}
# few: warps that gather their own rows; wide: more than one tile of channels; broad: the widest tiles, and rows whose
# last 128-byte step is ragged; tall: the tallest tiles of the weight gradient, with several offsets each; square: the
# tallest of the other passes, of many rows
CHANNELS = {
    "aligned": (64, 64),
    "odd": (33, 37),
    "few": (24, 16),
    "wide": (136, 72),
    "broad": (200, 264),
    "tall": (40, 200),
    "square": (200, 200),
    "deep": (2000, 40),  # more tiles of a weight gradient than a GPU has multiprocessors
    "long": (24, 1600),  # of many rows: more tiles of the forward pass, and not all of the same columns
}
N = 150  # two row tiles of 128 or three of 64, the last one ragged


def map_case(backend, kernel_size, dilation, transposed, check, shape=None):
    coords, shape = (scenes.far_corner(N, shape), shape) if shape else scenes.scene(N)
    if not check and backend.name == "cuda":
        coords = np.concatenate([coords, coords[:5], [[0, -1, 0, 0], [shape[0], 0, 0, 0]]]).astype(np.int32)
    nmap = guarded.neighbor_map(
        backend, coords, shape, kernel_size, dilation, transposed=transposed, check=check, fence=False
    )
    np.testing.assert_array_equal(nmap, reference.neighbor_map(coords, shape, kernel_size, dilation, transposed))
    groups = tuple(sorted({1, kernel_size[0]}))
    how = {"transposed": transposed, "fence": False, "groups": groups}
    orders, nmap = guarded.neighbor_map(backend, coords, shape, kernel_size, dilation, **how)
    plan = _C.plan_row_orders(rows=len(coords), kernel_size=kernel_size, groups=groups)
    np.testing.assert_array_equal(orders, reference.row_orders(nmap, plan["offsets"], plan["segment"]))


def sparse_map_case(backend, stride, transposed, mode, shape=None):
    """Output sites, and the maps both ways."""
    coords, shape = (scenes.far_corner(N, shape), shape) if shape else scenes.scene(N)
    how = {"kernel_size": (3, 2, 3), "stride": stride, "padding": (1, 0, 2), "dilation": (1, 2, 1)}
    to_shape = reference.out_shape(shape, **how, transposed=transposed)
    sites = reference.conv_sites(coords, shape, to_shape, **how, transposed=transposed)
    got = guarded.conv_sites(backend, coords, shape, to_shape, **how, transposed=transposed, mode=mode, fence=False)
    order = np.argsort([reference.code_of(site, to_shape, mode) for site in sites])
    np.testing.assert_array_equal(got, sites[order])
    for given, asked in (
        ((coords, shape, sites, to_shape), transposed),
        ((sites, to_shape, coords, shape), not transposed),
    ):
        nmap = guarded.sparse_map(backend, *given, **how, transposed=asked, fence=False)
        np.testing.assert_array_equal(nmap, reference.sparse_map(*given, **how, transposed=asked))


def pool_case(backend, mode, dtype, channels, offset):
    rng = np.random.default_rng(0)
    coords, shape = scenes.scene(N)
    nmap, transposed = (reference.neighbor_map(coords, shape, (2, 2, 3), transposed=t) for t in (False, True))
    feats, grad_out = (scenes.values(rng, (N, channels), dtype, one_sign=True) for _ in range(2))
    layout = {"fence": False, "offset": offset, "pad": offset}
    expected, chosen, count = reference.pool(feats, nmap, mode)
    assert_rows(guarded.pool(backend, feats, nmap, mode, **layout)[0], expected, reference.ROW_TOLERANCE[dtype])
    given = {"max": (chosen, None), "mean": (None, count), "sum": (None, None)}[mode]
    grad_feats = guarded.pool_backward(backend, grad_out, transposed, mode, *given, **layout)
    expected = reference.pool_backward(grad_out, nmap, N, mode, chosen, count)
    assert_rows(grad_feats, expected, reference.ROW_TOLERANCE[dtype])


def depthwise_case(backend, direction, dtype, channels, multiplier, offset):
    rng = np.random.default_rng(0)
    coords, shape = scenes.scene(N)
    kernel_size, co = (2, 3, 3), channels * multiplier
    nmap, transposed = (reference.neighbor_map(coords, shape, kernel_size, transposed=t) for t in (False, True))
    draw = (N, channels), (co, *kernel_size, 1), (co,), (N, co)
    feats, weight, bias, grad_out = (scenes.values(rng, s, dtype, one_sign=True) for s in draw)
    dense = np.zeros((co, 18, channels))
    dense[np.arange(co), :, np.arange(co) // multiplier] = reference.by_offset(weight)[..., 0]
    layout, tolerance = {"fence": False, "offset": offset, "pad": offset}, reference.ROW_TOLERANCE[dtype]
    if direction == "forward":
        added = {"residual": grad_out, "activation": "silu"}
        out = guarded.depthwise_forward(backend, feats, weight, bias, nmap, **added, **layout)
        assert_rows(out, reference.conv_epilogue(feats, dense, bias, nmap, grad_out, "silu"), tolerance)
    elif direction == "dgrad":
        grad_feats = guarded.depthwise_dgrad(backend, grad_out, weight, transposed, channels, **layout)
        assert_rows(grad_feats, reference.conv_dgrad(grad_out, dense, nmap, N), tolerance)
    else:
        grad_weight = guarded.depthwise_wgrad(backend, grad_out, feats, nmap, **layout)
        expected = reference.conv_wgrad(grad_out, feats, nmap)[0]
        expected = expected[np.arange(co), :, np.arange(co) // multiplier]
        assert_rows(grad_weight[..., 0], expected, tolerance)


def batch_case(backend, n):
    """The samples of rows, and the gradient of a mean over them."""
    rng = np.random.default_rng(0)
    coords = rng.integers(0, 7, (n, 4)).astype(np.int32)
    batch = guarded.batch_indices(backend, coords, 7, fence=False)
    np.testing.assert_array_equal(batch, coords[:, :1])
    grad_out = scenes.values(rng, (7, 40), "float16")
    bounds = np.searchsorted(np.sort(coords[:, 0]), np.arange(8)).astype(np.int32)
    grad_feats = guarded.pool_backward(backend, grad_out, batch.reshape(1, n), "mean", None, bounds, fence=False)
    assert_rows(grad_feats, reference.f64(grad_out)[batch[:, 0]] / np.diff(bounds)[batch], 2e-3)


def order_case(backend, kernel_size, n, groups):
    """A map of random entries: what is sorted need not come from a scene."""
    nmap = np.random.default_rng(0).integers(-2, 2, (int(np.prod(kernel_size)), n)).astype(np.int32)
    orders = guarded.row_order(backend, nmap, kernel_size, groups, fence=False)
    plan = _C.plan_row_orders(rows=n, kernel_size=kernel_size, groups=groups)
    np.testing.assert_array_equal(orders, reference.row_orders(nmap, plan["offsets"], plan["segment"]))
    orders[0, [0, n - 1]] = -1, n
    ordered = guarded.ordered_map(backend, nmap, orders, fence=False)
    np.testing.assert_array_equal(ordered, reference.ordered_map(nmap, orders))


def map_of_near_rows(volume, rows, rng):
    nmap = (np.arange(rows) + rng.integers(-40, 40, (volume, rows))).astype(np.int32)
    nmap[rng.random(nmap.shape) < 0.5] = -1
    return nmap


def segment_case(backend, kernel_size, tiles):
    """Two segments, the second ragged; a scene of few voxels lies together in any order."""
    volume, rows = int(np.prod(kernel_size)), 64 * tiles + 70
    rng = np.random.default_rng(0)
    nmap = map_of_near_rows(volume, rows, rng)
    order = rng.permutation(rows).astype(np.int32)
    segments = guarded.segment_map(backend, nmap, order, kernel_size, tiles, rows, fence=False)
    assert reference.assert_segments(segments, nmap, order, kernel_size, tiles, rows).all()


def sequence_case(backend, mode, shape, offset):
    coords = np.stack([np.random.default_rng(0).integers(0, s, N) for s in shape], axis=1).astype(np.int32)
    code = guarded.encode_seq(backend, coords, shape, mode, fence=False, offset=offset)
    np.testing.assert_array_equal(code, reference.encode_seq(coords, shape, mode))
    np.testing.assert_array_equal(guarded.decode_seq(backend, code, shape, mode, fence=False, offset=offset), coords)


def sort_case(backend, dtype, bits, n, with_sorted):
    keys = np.random.default_rng(0).integers(0, 2 ** min(bits, 31), n).astype(dtype)
    got = guarded.sort_keys(backend, keys, bits, with_sorted=with_sorted, fence=False)
    order = np.argsort(keys, kind="stable")
    np.testing.assert_array_equal(got[0] if with_sorted else got, order)


def hash_case(backend, key_dtype, value_dtype, voxels):
    rng = np.random.default_rng(0)
    shape = (2, 5, 6, 7) if voxels else None
    if voxels:
        keys = np.stack([rng.integers(0, s, N) for s in shape], axis=1).astype(np.int32)
        names = list(map(tuple, keys.tolist()))
    else:
        keys = rng.integers(-20, 80, N).astype(key_dtype)
        names = keys.tolist()
    values = rng.integers(0, 1000, N).astype(value_dtype)
    for given, word in ((None, None), (values, None), (None, "int64"), (values, "int64")):
        contents = {}
        for name, value in zip(names, range(N) if given is None else values.tolist(), strict=True):
            contents.setdefault(name, value)
        how = {"shape": shape, "fence": False}
        into = how | {"word": word}
        table = guarded.hash_insert(backend, keys, given, 200, value_dtype, clear=True, **into)
        table = guarded.hash_insert(backend, keys[::-1].copy(), values, 200, value_dtype, initial=table, **into)
        how["value_dtype"] = value_dtype
        found = guarded.hash_lookup(backend, keys, *table, **how)
        np.testing.assert_array_equal(found, [contents[name] for name in names])
        table = guarded.hash_insert(backend, keys, values, 200, value_dtype, initial=table, replace=True, **into)
        first = dict(zip(names[::-1], values[::-1].tolist(), strict=True))
        found = guarded.hash_lookup(backend, keys, *table, **how)
        np.testing.assert_array_equal(found, [first[name] for name in names])


def sample_case(backend, mode, dtype, channels, offset):
    rng = np.random.default_rng(0)
    coords, shape = scenes.scene(N, batch=2)
    grid = (np.floor(rng.uniform(-1, max(shape[1:]) + 1, (2, 70, 3)) * 1024) / 1024).astype(np.float32)
    grid[0, :2, 0] = np.nan, np.inf
    how = {"fence": False, "offset": offset, "pad": offset}
    got = guarded.sample_map(backend, grid, coords, shape, mode, fence=False)
    indices, weights = reference.sample_map(coords, shape, grid, mode)
    np.testing.assert_array_equal(got[0] if mode == "trilinear" else got, indices)
    feats, grad_out = (scenes.values(rng, s, dtype, one_sign=True) for s in ((N, channels), (140, channels)))
    tolerance = reference.ROW_TOLERANCE[dtype]
    flat = weights.astype(np.float32) if mode == "trilinear" else None
    out = guarded.gather_sum(backend, feats, indices, flat, **how)
    assert_rows(out, reference.gather_sum(feats, indices, weights), tolerance)
    if mode == "trilinear":
        out = guarded.sample_forward(backend, grid, coords, feats, shape, **how)
        assert_rows(out, reference.gather_sum(feats, indices, weights), tolerance)
    order, starts = guarded.group_rows(backend, indices, N, fence=False)
    flat = None if flat is None else flat.ravel()
    grad_feats = guarded.group_reduce(backend, grad_out, order, starts, flat, "sum", **how)
    assert_rows(grad_feats, reference.scatter_sum(grad_out, indices, weights, N), tolerance)
    if mode == "trilinear":
        grad_grid = guarded.sample_grad(backend, grad_out, feats, grid, indices, **how)
        expected, scale = reference.sample_grad(grad_out, feats, grid, indices)
        assert (np.abs(grad_grid - expected) <= 4e-6 * scale).all()


def reduce_case(backend, reduction, dtype, channels, offset):
    """Groups of one entry, of as many as are reduced at once, and of more."""
    rng = np.random.default_rng(0)
    starts = np.cumsum([0, 1, 1100, 0, 512, 7, 513]).astype(np.int32)
    src = scenes.values(rng, (starts[-1] + 5, channels), dtype, one_sign=True)
    order = rng.permutation(len(src)).astype(np.int32)
    how = {"fence": False, "offset": offset, "pad": offset, "with_argmax": reduction == "max"}
    got = guarded.group_reduce(backend, src, order, starts, None, reduction, **how)
    expected, argmax = reference.group_reduce(src, order, starts, None, reduction)
    if reduction == "max":
        got, rows = got
        np.testing.assert_array_equal(rows, argmax)
    assert_rows(got, expected, reference.ROW_TOLERANCE[dtype])


def voxelize_case(backend, dtype, columns):
    rng = np.random.default_rng(0)
    shape, how = (2, 5, 6, 7), {"voxel_size": (0.5, 1, 2), "origin": (1, 0, 0.5)}
    points = rng.uniform(-1, 8, (N, columns)).astype(np.float32)
    if columns == 4:
        points[:, 0] = rng.integers(-1, 3, N)
    points[3] = np.nan
    code, _ = guarded.voxel_codes(backend, points, dtype, shape=shape, fence=False, **how)
    coords = reference.voxel_of(points, how["voxel_size"], how["origin"], shape)
    np.testing.assert_array_equal(code, [reference.code_of(c, shape, "bxyz") if c[0] >= 0 else -1 for c in coords])
    order, in_order = guarded.sort_keys(backend, code, 32, fence=False)
    ranks, count = guarded.unique_ranks(backend, in_order, fence=False)
    unique, inverse, counts = reference.unique_coords(coords)
    assert count.item() == len(unique)
    groups = guarded.unique_groups(backend, in_order, order, ranks, len(unique), fence=False)
    np.testing.assert_array_equal(groups[0], [reference.code_of(c, shape, "bxyz") for c in unique])
    np.testing.assert_array_equal(groups[3], counts)
    np.testing.assert_array_equal(groups[4], inverse)


def conv_case(backend, direction, mode, channels, kernel_size, offset, groups=0, rows=N, algorithm="auto",
              ordered=False):  # fmt: skip
    """groups: of the offsets, each with an order. ordered: with the map in the one order."""
    dtype, precision = MODES[mode]
    ci, co = CHANNELS[channels]
    rng = np.random.default_rng(0)
    coords, shape = scenes.scene(rows)
    nmap, transposed = (reference.neighbor_map(coords, shape, kernel_size, transposed=t) for t in (False, True))
    draw = (rows, ci), (co, *kernel_size, ci), (co,), (rows, co)
    feats, weight, bias, grad_out = (scenes.values(rng, s, dtype) for s in draw)
    how = {"precision": precision, "fence": False, "offset": offset, "pad": offset}
    if algorithm != "auto":
        how["algorithm"] = algorithm
    if groups:
        how["order"] = np.stack([rng.permutation(rows).astype(np.int32) for _ in range(groups)])
        how["algorithm"] = "masked_implicit_gemm_splitk"
    mirrored = all(k % 2 for k in kernel_size)
    given = nmap if mirrored or direction == "forward" else transposed
    if ordered:
        how |= {"order": reference.ordered_map(given, how["order"]), "groups": (1,)}
    if direction == "forward":
        out = guarded.conv_forward(backend, feats, weight, bias, nmap, **how)
        assert_conv_rows(out, reference.conv_forward(feats, weight, bias, nmap), mode)
    elif direction == "dgrad":
        grad_feats = guarded.conv_dgrad(backend, grad_out, weight, given, mirrored=mirrored, **how)
        assert_conv_rows(grad_feats, reference.conv_dgrad(grad_out, weight, nmap, rows), mode)
    else:
        grad_weight, grad_bias = guarded.conv_wgrad(backend, grad_out, feats, nmap, **how)
        expected, expected_bias = reference.conv_wgrad(grad_out, feats, nmap)
        assert_conv_rows(grad_weight, expected, mode)
        assert_conv_rows(grad_bias[None], expected_bias[None], mode)


def grouped_case(backend, direction, mode, ci, co, groups, rows=N):
    dtype, precision = MODES[mode]
    rng = np.random.default_rng(0)
    coords, shape = scenes.scene(rows)
    nmap, own = reference.neighbor_map(coords, shape), ci // groups
    draw = (rows, ci), (co, 3, 3, 3, own), (rows, co)
    feats, weight, grad_out = (scenes.values(rng, s, dtype, one_sign=True) for s in draw)
    dense = np.zeros((co, 27, groups, own))
    group = np.arange(co) // (co // groups)
    dense[np.arange(co), :, group] = reference.by_offset(weight)
    dense = dense.reshape(co, 27, ci)
    how = {"precision": precision, "fence": False, "channel_groups": groups}
    if direction == "forward":
        got = guarded.conv_forward(backend, feats, weight, None, nmap, **how)
        expected = reference.conv_forward(feats, dense, None, nmap)
    elif direction == "dgrad":
        got = guarded.conv_dgrad(backend, grad_out, weight, nmap, mirrored=True, **how)
        expected = reference.conv_dgrad(grad_out, dense, nmap, rows)
    else:
        got, _ = guarded.conv_wgrad(backend, grad_out, feats, nmap, **how)
        expected = reference.conv_wgrad(grad_out, feats, nmap)[0].reshape(co, 27, groups, own)
        expected = expected[np.arange(co), :, group]
    assert_conv_rows(got, expected, mode)


def conv_segment_case(backend, dtype, ci, co, tiles, overflows=False):
    """All passes, four segments or five."""
    rows = 64 * tiles * 4 + 30
    rng = np.random.default_rng(0)
    nmap = map_of_near_rows(27, rows, rng)
    nmap[(nmap < 0) | (nmap >= rows)] = -1
    order = np.arange(rows, dtype=np.int32)
    segments = guarded.segment_map(backend, nmap, order, (3, 3, 3), tiles, rows, fence=False)
    if overflows:
        segments[1::2, 0] = 0
    draw = (rows, ci), (co, 27, ci), (co,), (rows, co)
    feats, weight, bias, grad_out = (scenes.values(rng, s, dtype, one_sign=min(ci, co) < 32) for s in draw)
    how = {"segments": segments, "algorithm": "masked_implicit_gemm", "fence": False}
    out = guarded.conv_forward(backend, feats, weight, bias, nmap, **how)
    assert_conv_rows(out, reference.conv_forward(feats, weight, bias, nmap), dtype)
    grad_feats = guarded.conv_dgrad(backend, grad_out, weight, nmap, mirrored=True, **how)
    mirrored = weight.transpose(2, 1, 0)[:, ::-1]
    assert_conv_rows(grad_feats, reference.conv_forward(grad_out, mirrored, None, nmap), dtype)
    grad_weight, grad_bias = guarded.conv_wgrad(backend, grad_out, feats, nmap, **how)
    expected = reference.conv_wgrad(grad_out, feats, nmap)
    assert_conv_rows(grad_weight, expected[0], dtype)
    assert_conv_rows(grad_bias, expected[1], dtype)
    # a task that has NaN is done again
    grad_out[5] = np.nan
    guarded.conv_wgrad(backend, grad_out, feats, nmap, **how)


def epilogue_case(backend, mode, channels, activation, in_place, offset, n=N):
    dtype, precision = MODES[mode]
    ci, co = CHANNELS[channels]
    rng = np.random.default_rng(0)
    coords, shape = scenes.scene(n)
    nmap = reference.neighbor_map(coords, shape)
    draw = (n, ci), (co, 3, 3, 3, ci), (co,), (n, co)
    feats, weight, bias, residual = (scenes.values(rng, s, dtype) for s in draw)
    how = {"precision": precision, "fence": False, "offset": offset, "pad": offset}
    how |= {"residual": residual, "activation": activation, "in_place": in_place}
    out = guarded.conv_forward(backend, feats, weight, bias, nmap, **how)
    expected = reference.conv_epilogue(feats, weight, bias, nmap, residual, activation)
    assert_rows(out, expected, reference.ROW_TOLERANCE[mode])


def fp8_conv_case(backend, dtypes, out_dtype, channels, of_rows, offset, groups=0, scale_out=None):
    ci, co = channels
    rng = np.random.default_rng(0)
    coords, shape = scenes.scene(N)
    nmap = reference.neighbor_map(coords, shape)
    feats, weight = scenes.values(rng, (N, ci), dtypes[0]), scenes.values(rng, (co, 27, ci), dtypes[1])
    added = out_dtype if scale_out is None else "bfloat16"
    bias, residual = scenes.values(rng, (co,), added), scenes.values(rng, (N, co), added)
    scale_feats = rng.uniform(0.25, 0.75, N if of_rows else ()).astype(np.float32)
    scale_weight = rng.uniform(0.25, 0.75, co if of_rows else ()).astype(np.float32)
    how = {"residual": residual, "activation": "gelu", "out_dtype": out_dtype, "fence": False}
    how |= {"scale_feats": scale_feats, "scale_weight": scale_weight, "offset": offset, "pad": offset}
    if scale_out:
        how["scale_out"] = np.float32(scale_out).reshape(())
    if groups:
        how["order"] = np.stack([rng.permutation(N).astype(np.int32) for _ in range(groups)])
        how["algorithm"] = "masked_implicit_gemm_splitk"
    out = guarded.conv_forward(backend, feats, weight, bias, nmap, **how)
    meant = reference.scaled(feats, scale_feats, 1), reference.f64(weight) * scale_weight.reshape(-1, 1, 1)
    expected = reference.conv_epilogue(*meant, bias, nmap, residual, "gelu") / (scale_out or 1)
    cut = reference.float8_cut(backend.name)
    if scale_out:
        judge_float8(out, expected, out_dtype, cut)
    else:
        assert_rows(out, expected, max(reference.ROW_TOLERANCE[out_dtype], reference.ROW_CUTS * cut))


def gemm_case(backend, dtypes, out_dtype, precision, shape, sizes, extras, offset, rows=70, num_sms=None):
    n, k = shape
    rng = np.random.default_rng(0)
    rows = sum(sizes) + 3 if sizes else rows
    lead = (len(sizes),) if sizes else ()
    a, b = scenes.values(rng, (rows, k), dtypes[0]), scenes.values(rng, (*lead, n, k), dtypes[1])
    how = {}
    if extras == "blocks":
        how = block_scales(rng, rows, n, k, lead_b=lead)
    elif extras:
        how = {
            "scale_a": rng.uniform(0.5, 1, rows).astype(np.float32),
            "scale_b": rng.uniform(0.5, 1, (*lead, n)).astype(np.float32),
            "bias": rng.standard_normal((*lead, n)).astype(np.float32),
        }
    offsets = np.cumsum(sizes).astype(np.int32) if sizes else None
    initial = np.zeros((rows, n), reference.dtype_of(out_dtype)) if sizes else None  # some rows are never written
    layout = {"fence": False, "offset": offset, "pad": offset}
    with guarded.multiprocessors(num_sms):
        out = guarded.gemm(backend, a, b, out_dtype, offsets=offsets, initial=initial, precision=precision, **how,
                           **layout)  # fmt: skip
    if sizes:
        ref, written = reference.grouped_gemm(a, b, offsets, **how)
        out, ref = out[written], ref[written]
    else:
        ref = reference.gemm(a, b, **how)
    if dtypes[0].startswith("float8"):
        assert_gemm_rows(out, ref, out_dtype)
    else:
        assert_rows(out, ref, max(reference.ROW_TOLERANCE[d] for d in (dtypes[0], out_dtype, precision) if d != "ieee"))


def outputs_case(backend, dtype, out_dtype, activation, shape, num_sms, scales="row", bias="float32"):
    """What large tiles make of their sums."""
    check_output(backend, *operands(*shape, dtype, dtype), out_dtype, scales, bias, activation, num_sms, fence=False)


def sums_case(backend, dtype, shape, num_sms):
    """A product that is added to what is there, by blocks of several tiles each."""
    m, n, k = shape
    rng = np.random.default_rng(0)
    a, b = scenes.values(rng, (m, k), dtype), scenes.values(rng, (n, k), dtype)
    initial = rng.standard_normal((m, n)).astype(np.float32)
    with guarded.multiprocessors(num_sms):
        out = guarded.gemm(backend, a, b, "float32", accumulate=True, initial=initial, fence=False)
    cuts = reference.ROW_CUTS if dtype.startswith("float8") else 0
    assert_rows(out, initial + reference.gemm(a, b), max(1e-4, cuts * reference.float8_cut(backend.name)))


def layout_case(backend, layout, dtype, out_dtype, epilogue, shape, num_sms=None):
    """Two groups; what is compared is the product of float64 and whether rows outside of groups were left alone."""
    m, n, k = shape
    rng = np.random.default_rng(0)
    a_lead = (2,) if layout in ("batched", "m_grouped_masked", "n_grouped") else ()
    b_lead = (2,) if layout in ("batched", "m_grouped_masked", "m_grouped_contiguous", "segments") else ()
    a, b = scenes.values(rng, (*a_lead, m, k), dtype), scenes.values(rng, (*b_lead, n, k), dtype)
    row, column = np.zeros((m, 1), int), np.zeros((1, n), int)  # of a dense product: group 0
    how, dense = {"layout": layout}, {}
    if layout == "m_grouped_contiguous":
        place = np.arange(m)
        how["m_indices"] = np.select([place < 70, place < 128, place < 384], [1, -1, 0], -1).astype(np.int32)
        row = how["m_indices"][:, None]
    elif layout == "m_grouped_masked":
        how["masked_m"] = np.array([m - 3, 5], np.int32)
    elif layout == "n_grouped":
        how["offsets"] = np.array([37, n - 3], np.int32)
        column = np.where(np.arange(n) < 37, 0, np.where(np.arange(n) < n - 3, 1, -1))[None]
    elif layout == "k_grouped":
        how["offsets"] = np.array([k // 3, k], np.int32)
    elif layout == "segments":
        how |= {"layout": "m_grouped", "offsets": np.array([40, m], np.int32), "b_row_major": True}
        how["weight_indices"] = np.array([1, 0], np.int32)
        row = np.where(np.arange(m) < 40, 1, 0)[:, None]
    if epilogue:
        dense = {"alpha": 0.1, "activation": "swiglu" if layout != "n_grouped" else "gelu"}
        how |= dense
    three = layout in ("batched", "m_grouped_masked", "k_grouped")
    ref = []
    for g in range(2):
        x, y = a[g] if a_lead else a, b[g] if b_lead else b
        if layout == "k_grouped":
            x, y = (z[:, : k // 3] if g == 0 else z[:, k // 3 :] for z in (x, y))
        ref.append(reference.gemm(x, y, **dense))
    group = np.broadcast_to(np.where(column < 0, -1, np.maximum(row, column) if row.min() >= 0 else row), (m, n))
    if three:
        expected, written = np.stack(ref), np.ones((2, *ref[0].shape), bool)
        for g, rows in enumerate(how.get("masked_m", [m, m])):
            written[g, rows:] = False
    else:
        group = group[:, : ref[0].shape[1]] if epilogue and layout != "n_grouped" else group
        expected, written = np.where(group == 1, ref[1], ref[0]), group >= 0
    given = np.ascontiguousarray(b.swapaxes(-1, -2)) if how.get("b_row_major") else b
    initial = np.full(expected.shape, 7, reference.dtype_of(out_dtype))
    with guarded.multiprocessors(num_sms):
        out = guarded.gemm(backend, a, given, out_dtype, shape=expected.shape, initial=initial, fence=False, **how)
    assert (reference.f64(out)[~written] == 7).all()
    columns = written.reshape(-1, written.shape[-1]).any(axis=0)
    rows = written[..., columns].all(axis=-1)
    cuts = reference.ROW_CUTS * (2 if how.get("activation") == "swiglu" else 1) if dtype.startswith("float8") else 0
    tolerance = max(reference.ROW_TOLERANCE[out_dtype], 1e-4, cuts * reference.float8_cut(backend.name))
    assert_rows(out[..., columns][rows], expected[..., columns][rows], tolerance)


def quantize_case(backend, source, dtype, granularity, given, offset):
    rng = np.random.default_rng(0)
    x = scenes.values(rng, (70, 97), source)
    shape = {"tensor": (), "row": 70, "1x128": (70, 1), "128x128": (1, 1)}[granularity]
    scale = rng.uniform(0.01, 0.1, shape).astype(np.float32) if given else None
    q, used = guarded.quantize(backend, x, dtype, granularity, scale, fence=False, offset=offset, pad=offset)
    expected, expected_scale = reference.quantize(x, dtype, granularity, scale)
    assert_same_bits(q, expected)
    assert_same_bits(used, expected_scale)


def all_cases():
    cases = {}
    for kernel_size, dilation in (((3, 3, 3), (1, 1, 1)), ((2, 3, 4), (2, 1, 3)), ((7, 7, 7), (1, 1, 1))):
        for transposed in (False, True):
            name = f"map/{'x'.join(map(str, kernel_size))}/{'transposed' if transposed else 'forward'}"
            cases[name] = partial(
                map_case, kernel_size=kernel_size, dilation=dilation, transposed=transposed, check=False
            )
    plain = {"kernel_size": (3, 3, 3), "dilation": (1, 1, 1), "transposed": False}
    cases["map/3x3x3/check"] = partial(map_case, check=True, **plain)
    for check in (False, True):  # more cells than 32 bits can number
        name = "map/3x3x3/huge" + "/check" * check
        cases[name] = partial(map_case, check=check, shape=(2, 2**20, 2**20, 2**20), **plain)

    for transposed in (False, True):
        name = "transposed" if transposed else "forward"
        for stride in ((1, 1, 1), (2, 3, 1)):
            cases[f"sparse_map/{'x'.join(map(str, stride))}/{name}"] = partial(
                sparse_map_case, stride=stride, transposed=transposed, mode="bxyz"
            )
        for mode in ("z_order", "hilbert"):
            cases[f"sparse_map/{mode}/{name}"] = partial(
                sparse_map_case, stride=(2, 3, 1), transposed=transposed, mode=mode
            )
    cases["sparse_map/huge"] = partial(
        sparse_map_case, stride=(2, 3, 1), transposed=False, mode="bxyz", shape=(2, 2**20, 2**20, 2**20)
    )

    for mode in ("max", "mean", "sum"):
        for dtype in ("float32", "float16", "bfloat16"):
            for channels, offset in ((64, 0), (33, 1)):
                cases[f"pool/{mode}/{dtype}/{channels}"] = partial(
                    pool_case, mode=mode, dtype=dtype, channels=channels, offset=offset
                )
    cases["batch_indices"] = partial(batch_case, n=N)

    for direction in ("forward", "dgrad", "wgrad"):
        for dtype in ("float32", "float16", "bfloat16"):
            for channels, multiplier, offset in ((64, 1, 0), (33, 1, 1), (7, 3, 0)):
                cases[f"depthwise/{direction}/{dtype}/{channels}x{multiplier}"] = partial(
                    depthwise_case,
                    direction=direction,
                    dtype=dtype,
                    channels=channels,
                    multiplier=multiplier,
                    offset=offset,
                )

    for kernel_size, n, groups in (
        ((3, 3, 3), 150, (1, 3, 9)),
        ((1, 1, 1), 150, (1,)),
        ((2, 7, 7), 150, (2, 14)),
        ((3, 3, 3), 40_000, (1,)),
    ):
        name = f"order/{'x'.join(map(str, kernel_size))}/{n}"
        cases[name] = partial(order_case, kernel_size=kernel_size, n=n, groups=groups)

    for kernel_size, tiles in (((3, 3, 3), 4), ((2, 2, 2), 2), ((2, 4, 4), 2)):
        name = f"segments/{'x'.join(map(str, kernel_size))}/{tiles}"
        cases[name] = partial(segment_case, kernel_size=kernel_size, tiles=tiles)

    # every tile in all passes, tiles of a segment, what is several tiles and what does not fit
    for dtype, ci, co, tiles in (
        ("float16", 16, 32, 2),
        ("bfloat16", 16, 40, 2),
        ("bfloat16", 32, 64, 2),
        ("float16", 32, 24, 4),
        ("float16", 64, 64, 4),
        ("bfloat16", 64, 16, 2),
        ("bfloat16", 72, 136, 4),
    ):
        for overflows in (False, True):
            name = f"conv/segments/{dtype}/{ci}-{co}" + "/overflow" * overflows
            case = partial(conv_segment_case, dtype=dtype, ci=ci, co=co, tiles=tiles, overflows=overflows)
            cases[name] = case

    for mode in ("bxyz", "z_order", "hilbert"):
        for name, shape in (("32", (2, 30, 40, 50)), ("64", (2, 2**20, 3, 2**20))):
            for offset in (0, 1):
                cases[f"sequence/{mode}/{name}/{offset}"] = partial(
                    sequence_case, mode=mode, shape=shape, offset=offset
                )
    for dtype, bits, n in ((np.int32, 9, 150), (np.int64, 40, 150), (np.int32, 20, 40_000), (np.int64, 20, 40_000)):
        for with_sorted in (False, True):
            name = f"sort/{np.dtype(dtype)}/{n}" + "/sorted" * with_sorted
            cases[name] = partial(sort_case, dtype=dtype, bits=bits, n=n, with_sorted=with_sorted)

    for value_dtype in ("int32", "int64"):
        for key_dtype in ("int32", "int64"):
            cases[f"hash/{key_dtype}/{value_dtype}"] = partial(
                hash_case, key_dtype=key_dtype, value_dtype=value_dtype, voxels=False
            )
        cases[f"hash/voxels/{value_dtype}"] = partial(
            hash_case, key_dtype="int64", value_dtype=value_dtype, voxels=True
        )

    for dtype in ("float32", "float16", "bfloat16"):
        for channels, offset in ((64, 0), (37, 1)):
            layout = f"{dtype}/{channels}"
            for mode in ("trilinear", "nearest"):
                cases[f"sample/{mode}/{layout}"] = partial(
                    sample_case, mode=mode, dtype=dtype, channels=channels, offset=offset
                )
            for reduction in ("sum", "mean", "max"):
                cases[f"reduce/{reduction}/{layout}"] = partial(
                    reduce_case, reduction=reduction, dtype=dtype, channels=channels, offset=offset
                )

    for dtype in ("int32", "int64"):
        for columns in (3, 4):
            cases[f"voxelize/{dtype}/{columns}"] = partial(voxelize_case, dtype=dtype, columns=columns)

    for direction in ("forward", "dgrad", "wgrad"):
        for mode in MODES:
            conv = partial(conv_case, direction=direction, mode=mode, offset=0)
            for channels in CHANNELS:
                if channels in ("square", "deep", "long"):  # they are below
                    continue
                if channels == "broad" and direction == "wgrad":
                    continue
                if channels == "tall" and (direction != "wgrad" or mode == "float32"):
                    continue
                for offset in (0, 1):
                    layout = "strided" if offset else "plain"
                    cases[f"conv/{direction}/{mode}/{channels}/{layout}"] = partial(
                        conv, channels=channels, kernel_size=(3, 1, 3), offset=offset
                    )
            cases[f"conv/{direction}/{mode}/even"] = partial(conv, channels="aligned", kernel_size=(2, 2, 2))

            for groups in (0, 3) if direction != "wgrad" and mode in ("float16", "bfloat16") else ():
                cases[f"conv/{direction}/{mode}/many-rows/{groups}-orders"] = partial(
                    conv, channels="square", kernel_size=(3, 1, 3), groups=groups, rows=3100
                )

            if direction == "forward" and mode in ("float16", "tf32"):
                cases[f"conv/forward/{mode}/many-tiles"] = partial(
                    conv, channels="long", kernel_size=(3, 1, 3), rows=3100
                )

            if direction == "wgrad":
                cases[f"conv/wgrad/{mode}/many-tiles"] = partial(conv, channels="deep", kernel_size=(3, 3, 3))
                cases[f"conv/wgrad/{mode}/split"] = partial(conv, channels="aligned", kernel_size=(3, 1, 3), rows=1100)

            for ci, co, groups in ((16, 24, 4), (33, 66, 3), (128, 128, 2)):
                how = {"ci": ci, "co": co, "groups": groups}
                cases[f"conv/{direction}/{mode}/{groups}-channel-groups"] = partial(
                    grouped_case, direction=direction, mode=mode, **how
                )

            for channels, groups in (("odd", 1), ("wide", 1), ("odd", 3), ("wide", 9)) if direction != "wgrad" else ():
                cases[f"conv/{direction}/{mode}/{channels}/{groups}-orders"] = partial(
                    conv, channels=channels, kernel_size=(3, 1, 3), groups=groups
                )
            for kernel_size in ((3, 1, 3), (2, 2, 2)) if direction != "wgrad" else ():
                cases[f"conv/{direction}/{mode}/{'x'.join(map(str, kernel_size))}/ordered-map"] = partial(
                    conv, channels="wide", kernel_size=kernel_size, groups=1, ordered=True
                )

    for direction in ("forward", "dgrad"):
        for mode in MODES:
            for channels in ("aligned", "odd"):
                cases[f"conv/{direction}/{mode}/{channels}/explicit"] = partial(
                    conv_case,
                    direction=direction,
                    mode=mode,
                    channels=channels,
                    kernel_size=(3, 1, 3),
                    offset=int(channels == "odd"),
                    algorithm="explicit_gemm",
                )

    for mode in MODES:
        for channels in ("aligned", "odd"):
            for name, how in (
                ("gelu", {"activation": "gelu", "in_place": False, "offset": 0}),
                ("silu/strided", {"activation": "silu", "in_place": False, "offset": 1}),
                ("relu/in_place", {"activation": "relu", "in_place": True, "offset": 0}),
            ):
                cases[f"epilogue/{mode}/{channels}/{name}"] = partial(
                    epilogue_case, mode=mode, channels=channels, **how
                )
        # so many tiles that the offsets are not shared out
        cases[f"epilogue/{mode}/whole"] = partial(
            epilogue_case, mode=mode, channels="aligned", activation="gelu", in_place=True, offset=0, n=13_000
        )

    for dtypes in ((a, b) for a in (E4M3, E5M2) for b in (E4M3, E5M2)):
        # the three widths of Hopper's tiles, and what takes the portable kernel
        for channels in ((64, 64), (144, 72), (208, 136), (33, 37)):
            for of_rows, out_dtype, groups in ((True, "float32", 0), (False, "bfloat16", 0), (True, "float16", 9)):
                name = f"conv/fp8/{'-'.join(dtypes)}/{channels[0]}-{channels[1]}/{out_dtype}"
                common = {"dtypes": dtypes, "out_dtype": out_dtype, "channels": channels, "of_rows": of_rows}
                cases[name] = partial(fp8_conv_case, offset=int(out_dtype == "bfloat16"), groups=groups, **common)
            for groups in (0, 9):
                name = f"conv/fp8/{'-'.join(dtypes)}/{channels[0]}-{channels[1]}/fp8/{groups}-orders"
                common = {"dtypes": dtypes, "out_dtype": dtypes[0], "channels": channels, "of_rows": True}
                cases[name] = partial(fp8_conv_case, offset=0, groups=groups, scale_out=0.5, **common)

    mixes = [(a, b, "ieee") for a in (E4M3, E5M2) for b in (E4M3, E5M2)]
    mixes += [(dtype, dtype, precision) for dtype, precision in MODES.values()]
    for a, b, precision in mixes:
        own = "bfloat16" if a.startswith("float8") else a
        for layout, sizes in (("dense", ()), ("grouped", (0, 1, 64, 30))):
            for place, shape, offset in (("aligned", (72, 192), 0), ("odd", (65, 97), 0), ("strided", (72, 192), 1)):
                name = f"gemm/{layout}/{a}-{b}-{precision}/{place}"
                common = {"dtypes": (a, b), "precision": precision, "shape": shape, "sizes": sizes, "offset": offset}
                cases[name] = partial(gemm_case, out_dtype=own, extras=place == "odd", **common)
                if place == "aligned":
                    cases[f"{name}/float32"] = partial(gemm_case, out_dtype="float32", extras=True, **common)

    # Enough tiles for the larger shapes of the Hopper kernel, and for blocks that walk over more than one.
    for dtype in (E4M3, "bfloat16"):
        common = {"dtypes": (dtype, dtype), "out_dtype": "bfloat16", "precision": "ieee", "offset": 0, "extras": False}
        for name, sms, rows, n, k in (("128x128", None, 1100, 1000, 208), ("128x176", 3, 300, 340, 528),
                                      ("128x192", 2, 570, 380, 528), ("128x256", 2, 570, 500, 528),
                                      ("256x176", 6, 570, 520, 5136), ("256x192", 4, 600, 380, 2576),
                                      ("256x256", 4, 600, 510, 5136)):  # fmt: skip
            how = common | {"rows": rows, "shape": (n, k), "num_sms": sms}
            cases[f"gemm/large/{dtype}/{name}"] = partial(gemm_case, sizes=(), **how)
        sizes = (900, 129, 1900)
        cases[f"gemm/large/{dtype}/grouped"] = partial(gemm_case, shape=(2112, 208), sizes=sizes, **common)
        # Pairs of blocks, of which two have the rests of two groups, and one that of the last alone.
        rests = {"shape": (400, elements(2064, dtype)), "sizes": (300, 128, 0, 400, 257), "num_sms": 2}
        cases[f"gemm/large/{dtype}/rests"] = partial(gemm_case, **common | rests)
        cases[f"gemm/large/{dtype}/rests/scales"] = partial(
            gemm_case, **common | rests | {"extras": True, "out_dtype": "float32"}
        )
        # The kernel for groups of some rows: its tiles, of 96, 160, 192 and, of 16-bit products, 256 rows at most, as 8
        # multiprocessors take them.
        for name, sizes, shape in (("96", (0, 90, 1, 64, 97, 40), (264, 1040)),
                                   ("160", (150, 19, 159, 146, 83), (776, 1040)),
                                   ("192", (207, 153, 192, 194, 191), (776, 1040)),
                                   ("256", (200, 223, 1, 230, 241), (1544, 4112))):  # fmt: skip
            how = common | {"shape": shape, "sizes": sizes, "num_sms": 8}
            cases[f"gemm/some/{dtype}/{name}"] = partial(gemm_case, **how)
            cases[f"gemm/some/{dtype}/{name}/scales"] = partial(
                gemm_case, **how | {"extras": True, "out_dtype": "float32"}
            )

    # Scales of blocks, in pairs of blocks whose last columns are of two blocks or of one, and in groups of some rows.
    common = {"dtypes": (E4M3, E4M3), "out_dtype": "float32", "precision": "ieee", "extras": "blocks", "offset": 0}
    for name, rows, n, num_sms in (("128x128", 300, 400, 1), ("pairs", 500, 400, 2), ("pairs/128", 512, 640, 2)):
        how = {"rows": rows, "shape": (n, 4112), "sizes": (), "num_sms": num_sms}
        cases[f"gemm/large/{E4M3}/blocks/{name}"] = partial(gemm_case, **common | how)
    for name, sizes, shape, num_sms in (("few", (16, 0, 9, 1), (200, 2064), 1),
                                        ("96", (0, 90, 1, 64, 97, 40), (264, 2064), 8),
                                        ("160", (90, 160, 97, 128, 130), (400, 1040), 2)):  # fmt: skip
        how = {"sizes": sizes, "shape": shape, "num_sms": num_sms}
        cases[f"gemm/some/{E4M3}/blocks/{name}"] = partial(gemm_case, **common | how)

    # Every tile of the Hopper kernel for few rows; the deep ones in clusters.
    for rows in (5, 12, 20, 30, 60, 120):
        for dtype, extras in ((E4M3, True), (E4M3, "blocks"), ("bfloat16", True)):
            common = {"dtypes": (dtype, dtype), "out_dtype": "float32", "precision": "ieee", "sizes": (), "offset": 0}
            cases[f"gemm/few/{dtype}/{rows}" + "/blocks" * (extras == "blocks")] = partial(
                gemm_case, rows=rows, shape=(200, 4112), extras=extras, **common
            )

        common = {"dtypes": (E4M3, E4M3), "out_dtype": "bfloat16", "precision": "ieee", "sizes": (), "offset": 0}
        cases[f"gemm/few/16-bit/{rows}"] = partial(gemm_case, rows=rows, shape=(200, 4112), extras=True, **common)
        if rows <= 64:  # 128 rows of weights to a tile
            for name, shape, num_sms in (("wide", (1032, 272), 2), ("wide/deep", (120, 6160), 7)):
                how = common | {"rows": rows, "shape": shape, "num_sms": num_sms, "extras": True}
                cases[f"gemm/few/{name}/{rows}"] = partial(gemm_case, **how)

    # Tiles whose depth the blocks of a pair share, behind full waves or not.
    for dtype, extras, columns, sms, rows, n, k in (
        (E4M3, True, 128, 16, 400, 200, 6144), (E4M3, True, 176, 8, 700, 264, 4096),
        (E4M3, True, 256, 4, 513, 200, 3056), (E4M3, "blocks", 128, 10, 776, 264, 4096),
        (E4M3, "blocks", 256, 4, 513, 200, 3056),
        ("bfloat16", True, 128, 16, 300, 200, 3072), ("bfloat16", True, 192, 8, 700, 376, 1024),
        ("bfloat16", True, 256, 4, 1030, 200, 1528),
    ):  # fmt: skip
        name = f"gemm/shared/{dtype}/{columns}"
        cases[name + "/blocks" * (extras == "blocks")] = partial(
            gemm_case, dtypes=(dtype, dtype), out_dtype="bfloat16", precision="ieee", sizes=(), offset=0, rows=rows,
            shape=(n, k), extras=extras, num_sms=sms,
        )  # fmt: skip
        if extras is True:
            cases[f"{name}/added"] = partial(sums_case, dtype=dtype, shape=(rows, n, k), num_sms=sms)

    for rows, num_sms in ((500, 8), (600, 4)):
        cases[f"gemm/large/bfloat16/narrow/{rows}"] = partial(
            gemm_case,
            dtypes=("bfloat16", "bfloat16"),
            out_dtype="bfloat16",
            precision="ieee",
            sizes=(),
            offset=0,
            rows=rows,
            shape=(200, 4112),
            extras=True,
            num_sms=num_sms,
        )

    # More of them, in two rows of tiles; by pairs that share K; and cut evenly by the kernel for groups of some rows.
    for dtype, extras in ((E4M3, True), (E4M3, "blocks"), ("bfloat16", True)):
        common = {"dtypes": (dtype, dtype), "precision": "ieee", "sizes": (), "offset": 0, "extras": extras}
        for name, rows, shape, num_sms in (("tiles", 200, (200, 528), None), ("shared", 200, (200, 2064), None),
                                           ("pairs", 100, (248, 4112), 4), ("pairs/tiles", 200, (248, 4112), 8),
                                           ("even", 300, (520, 1040), 4)):  # fmt: skip
            for out_dtype in ("float32", "bfloat16"):
                how = common | {"rows": rows, "shape": shape, "num_sms": num_sms, "out_dtype": out_dtype}
                cases[f"gemm/dense/{dtype}/{name}/{out_dtype}" + "/blocks" * (extras == "blocks")] = partial(
                    gemm_case, **how
                )

    for layout in ("batched", "m_grouped_contiguous", "m_grouped_masked", "n_grouped", "k_grouped", "segments"):
        for dtype in (E4M3, "bfloat16", "float32"):
            for epilogue in (False, True):
                name = f"gemm/{layout}/{dtype}{'/epilogue' * epilogue}"
                common = {"layout": layout, "dtype": dtype, "out_dtype": "float32", "epilogue": epilogue}
                cases[name] = partial(layout_case, shape=(150, 72, 272), **common)
                if not epilogue and dtype != "float32":  # few multiprocessors take large tiles and more than one each
                    cases[f"{name}/large"] = partial(layout_case, shape=(450, 520, 272), num_sms=2, **common)

    for dtype in (E4M3, "bfloat16"):
        for out_dtype, activation in (("bfloat16", None), ("float16", "gelu"), ("bfloat16", "swiglu"), (E4M3, "silu"),
                                      (E5M2, "swiglu")):  # fmt: skip
            for place, shape in (("few", (570, 416, 272)), ("deep", (500, 224, 2064))):
                cases[f"gemm/outputs/{dtype}/{out_dtype}-{activation}/{place}"] = partial(
                    outputs_case, dtype=dtype, out_dtype=out_dtype, activation=activation, shape=shape, num_sms=2
                )

    for name, (dtype, out_dtype, scales, bias, activation) in ENDS.items():
        how = {"dtype": dtype, "out_dtype": out_dtype, "activation": activation, "scales": scales, "bias": bias}
        few, deep, most = (elements(k_bytes, dtype) for k_bytes in (400, 2064, 4112))
        cases[f"gemm/ends/{name}"] = partial(outputs_case, shape=(260, 480, few), num_sms=1, **how)
        cases[f"gemm/ends/{name}/pairs"] = partial(outputs_case, shape=(400, 480, most), num_sms=2, **how)
        cases[f"gemm/ends/{name}/groups"] = partial(
            check_grouped_output, layout="m_grouped", sizes=[48, 127, 176, 0, 130], n=480, k=deep, sms=1,
            fence=False, **how,
        )  # fmt: skip

    for dtype in (E4M3, "bfloat16"):
        cases[f"gemm/staggered/{dtype}"] = partial(sums_case, dtype=dtype, shape=(1100, 1050, 528), num_sms=8)
        few, deep = (elements(k_bytes, dtype) for k_bytes in (544, 2064))
        cases[f"gemm/added/{dtype}"] = partial(sums_case, dtype=dtype, shape=(700, 392, few), num_sms=1)
        cases[f"gemm/added/{dtype}/pairs"] = partial(sums_case, dtype=dtype, shape=(700, 640, deep), num_sms=2)

    for source in ("float32", "float16", "bfloat16"):
        for dtype in (E4M3, E5M2):
            for granularity in ("tensor", "row", "1x128", "128x128"):
                for given in (False, True):
                    name = f"quantize/{source}/{dtype}/{granularity}/{'given' if given else 'computed'}"
                    cases[name] = partial(
                        quantize_case,
                        source=source,
                        dtype=dtype,
                        granularity=granularity,
                        given=given,
                        offset=int(given),
                    )
    return cases


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="keep the cases whose name contains one of these")
    parser.add_argument("--part", nargs=2, type=int, default=(0, 1), metavar=("I", "N"), help="every N-th, from I on")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args()
    named = [
        (name, case)
        for name, case in all_cases().items()
        if not options.names or any(part in name for part in options.names)
    ]
    cases = dict(named[options.part[0] :: options.part[1]])
    if options.list:
        print("\n".join(cases))
        return 0
    if not cases:
        print(f"no case matches {' '.join(options.names)}", file=sys.stderr)
        return 1
    if options.device == "cuda" and _C.device_count() == 0:
        print("no CUDA device", file=sys.stderr)
        return 1
    backend, failed = {"cpu": Host, "cuda": Cuda}[options.device](), []
    for name, case in cases.items():
        print(name, end=" ", flush=True)  # the last one is where the tool was, if it never came back
        start = time.monotonic()
        try:
            case(backend)
        except Exception:
            failed.append(name)
            print(f"FAILED\n{traceback.format_exc()}", flush=True)
        print(f"{time.monotonic() - start:.1f} s", flush=True)
    print(f"{len(cases) - len(failed)} of {len(cases)} cases right on {options.device}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
