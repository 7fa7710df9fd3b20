"""One small call of each operation against the oracle: NumPy and the extension only, no pytest, no torch."""

from __future__ import annotations

import guarded
import map_segments
import numpy as np
import reference
import scenes
import verdicts
from plans import row_orders
from products import (
    block_scales,
    check_output,
    judge_float8,
    nothing_transposed,
    operands,
)
from verdicts import assert_conv_rows, assert_gemm_rows, assert_rows, assert_same_bits

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
    "narrow": (16, 16),  # the same in the forward pass of 300 rows
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
    np.testing.assert_array_equal(orders, row_orders(nmap, kernel_size, groups))


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
    out = guarded.pool(backend, feats, nmap, mode, **layout)[0]
    assert_rows(out, expected, verdicts.ROW_TOLERANCE[dtype])
    assert_same_bits(guarded.pool(backend, feats, nmap, mode, by_products=False, **layout), out)
    given = {"max": (chosen, None), "mean": (None, count), "sum": (None, None)}[mode]
    grad_feats = guarded.pool_backward(backend, grad_out, transposed, mode, *given, **layout)
    expected = reference.pool_backward(grad_out, nmap, N, mode, chosen, count)
    assert_rows(grad_feats, expected, verdicts.ROW_TOLERANCE[dtype])


def depthwise_case(backend, direction, dtype, channels, multiplier, offset):
    rng = np.random.default_rng(0)
    coords, shape = scenes.scene(N)
    kernel_size, co = (2, 3, 3), channels * multiplier
    nmap, transposed = (reference.neighbor_map(coords, shape, kernel_size, transposed=t) for t in (False, True))
    draw = (N, channels), (co, *kernel_size, 1), (co,), (N, co)
    feats, weight, bias, grad_out = (scenes.values(rng, s, dtype, one_sign=True) for s in draw)
    dense = np.zeros((co, 18, channels))
    dense[np.arange(co), :, np.arange(co) // multiplier] = reference.by_offset(weight)[..., 0]
    layout, tolerance = {"fence": False, "offset": offset, "pad": offset}, verdicts.ROW_TOLERANCE[dtype]
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


def order_case(backend, kernel_size, n, groups, phases=(1, 1, 1)):
    """A map of random entries: what is sorted need not come from a scene."""
    nmap = np.random.default_rng(0).integers(-2, 2, (int(np.prod(kernel_size)), n)).astype(np.int32)
    orders = guarded.row_order(backend, nmap, kernel_size, groups, phases, fence=False)
    np.testing.assert_array_equal(orders, row_orders(nmap, kernel_size, groups, phases))
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
    assert map_segments.assert_segments(segments, nmap, order, kernel_size, tiles, rows).all()


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
    tolerance = verdicts.ROW_TOLERANCE[dtype]
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
    assert_rows(got, expected, verdicts.ROW_TOLERANCE[dtype])


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
    assert_rows(out, expected, verdicts.ROW_TOLERANCE[mode])


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
    cut = verdicts.float8_cut(backend.name)
    if scale_out:
        judge_float8(out, expected, out_dtype, cut)
    else:
        assert_rows(out, expected, max(verdicts.ROW_TOLERANCE[out_dtype], verdicts.ROW_CUTS * cut))


def gemm_case(backend, dtypes, out_dtype, precision, shape, sizes, extras, offset, rows=70, num_sms=None, columns=""):
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
    layout = {"fence": False, "offset": offset, "pad": offset, "columns": columns}
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
        assert_rows(out, ref, max(verdicts.ROW_TOLERANCE[d] for d in (dtypes[0], out_dtype, precision) if d != "ieee"))


def outputs_case(backend, dtype, out_dtype, activation, shape, num_sms, scales="row", bias="float32"):
    """What large tiles make of their sums."""
    check_output(backend, *operands(*shape, dtype, dtype), out_dtype, scales, bias, activation, num_sms, fence=False)


def lying_case(backend, case, **how):
    """`case` of operands that Hopper reads as they lie."""
    with nothing_transposed(backend):
        case(backend, **how)


def sums_case(backend, dtype, shape, num_sms, columns=""):
    """A product that is added to what is there, by blocks of several tiles each."""
    m, n, k = shape
    rng = np.random.default_rng(0)
    a, b = scenes.values(rng, (m, k), dtype), scenes.values(rng, (n, k), dtype)
    initial = rng.standard_normal((m, n)).astype(np.float32)
    with guarded.multiprocessors(num_sms):
        out = guarded.gemm(backend, a, b, "float32", accumulate=True, initial=initial, columns=columns, fence=False)
    cuts = verdicts.ROW_CUTS if dtype.startswith("float8") else 0
    assert_rows(out, initial + reference.gemm(a, b), max(1e-4, cuts * verdicts.float8_cut(backend.name)))


def layout_case(backend, layout, dtype, out_dtype, epilogue, shape, num_sms=None, columns=""):
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
        out = guarded.gemm(backend, a, given, out_dtype, shape=expected.shape, initial=initial, columns=columns,
                           fence=False, **how)  # fmt: skip
    assert (reference.f64(out)[~written] == 7).all()
    columns = written.reshape(-1, written.shape[-1]).any(axis=0)
    rows = written[..., columns].all(axis=-1)
    cuts = verdicts.ROW_CUTS * (2 if how.get("activation") == "swiglu" else 1) if dtype.startswith("float8") else 0
    tolerance = max(verdicts.ROW_TOLERANCE[out_dtype], 1e-4, cuts * verdicts.float8_cut(backend.name))
    assert_rows(out[..., columns][rows], expected[..., columns][rows], tolerance)


def quantize_case(backend, source, dtype, granularity, given, offset, columns=False):
    rng = np.random.default_rng(0)
    x = scenes.values(rng, (70, 97), source)
    shape = {"tensor": (), "row": 70, "1x128": (70, 1), "128x128": (1, 1)}[granularity]
    scale = rng.uniform(0.01, 0.1, shape).astype(np.float32) if given else None
    layout = {"fence": False, "offset": offset, "pad": offset, "columns": columns}
    q, used = guarded.quantize(backend, x, dtype, granularity, scale, **layout)
    expected, expected_scale = reference.quantize(x, dtype, granularity, scale)
    assert_same_bits(q, expected)
    assert_same_bits(used, expected_scale)
