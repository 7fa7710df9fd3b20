"""The oracle: float64 NumPy, naive and obviously right. It shares no code with the package.

The second half is the verdict: every output row is judged against its own reference row, so that one bad row in a
million cannot hide in a mean, and a NaN never passes because every comparison is written so that NaN fails it.
"""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np

FP8_MAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def dtype_of(name):
    """The NumPy dtype behind the names that NumPy, ml_dtypes and torch share."""
    return np.dtype(getattr(ml_dtypes, name) if name.startswith(("bfloat", "float8")) else name)


def f64(array):
    return np.asarray(array).astype(np.float64)


# ---- neighbour maps ----


def kernel_offsets(kernel_size, dilation):
    """(V, 3) displacement of each weight slice, v = (kx * Kh + ky) * Kd + kz."""
    taps = itertools.product(*(range(k) for k in kernel_size))
    return [tuple((t - k // 2) * d for t, k, d in zip(tap, kernel_size, dilation, strict=True)) for tap in taps]


def in_range(coords, shape):
    return (np.asarray(coords) >= 0).all(axis=1) & (np.asarray(coords, np.int64) < np.asarray(shape)).all(axis=1)


def row_orders(nmap, keys, segment):
    """One order for each of the keys, {offset: code}: each segment of rows sorted, stably, by the place in the
    reflected Gray code of what the codes of a row's offsets make together: each bit of that place is the parity of the
    bits of the code down to it."""
    rows = nmap.shape[1]
    orders = np.zeros((len(keys), rows), np.int32)
    for order, codes in zip(orders, keys, strict=True):
        places, parity = np.zeros(rows, np.int64), np.zeros(rows, bool)
        for bit in reversed(range(max(codes.values(), default=0).bit_length())):
            parity ^= (nmap[[offset for offset, code in codes.items() if code >> bit & 1]] >= 0).any(axis=0)
            places = 2 * places + parity
        for start in range(0, rows, segment):
            order[start : start + segment] = start + np.argsort(places[start : start + segment], kind="stable")
    return orders


def ordered_map(nmap, orders):
    """The orders, and behind them the columns of the map in the first one, -1 where that names none."""
    is_column = (orders[0] >= 0) & (orders[0] < nmap.shape[1])
    return np.concatenate([orders, np.where(is_column, nmap[:, orders[0] * is_column], -1)])


def neighbor_map(coords, shape, kernel_size=(3, 3, 3), dilation=(1, 1, 1), transposed=False, rows=None):
    """map[v, n] by looking every neighbour up in a dictionary of coordinates; `rows` restricts n."""
    sign = -1 if transposed else 1
    inside = in_range(coords, shape)
    points = [tuple(p) for p in np.asarray(coords).tolist()]
    row_of = {}
    for row, point in enumerate(points):
        if inside[row]:
            row_of.setdefault(point, row)  # of duplicates, the lowest row
    rows = range(len(points)) if rows is None else rows
    offsets = kernel_offsets(kernel_size, dilation)
    result = np.full((len(offsets), len(rows)), -1, np.int32)
    for column, row in enumerate(rows):
        if not inside[row]:
            continue
        b, x, y, z = points[row]
        for v, (dx, dy, dz) in enumerate(offsets):
            result[v, column] = row_of.get((b, x + sign * dx, y + sign * dy, z + sign * dz), -1)
    return result


def out_shape(shape, kernel_size, stride, padding, dilation, transposed=False, output_padding=(0, 0, 0)):
    axes = zip(shape[1:], kernel_size, stride, padding, dilation, output_padding, strict=True)
    if transposed:
        return shape[0], *((w - 1) * s - 2 * p + d * (k - 1) + more + 1 for w, k, s, p, d, more in axes)
    return shape[0], *((w + 2 * p - d * (k - 1) - 1) // s + 1 for w, k, s, p, d, _ in axes)


def conv_sites(coords, shape, to_shape, kernel_size, stride, padding, dilation, transposed=False):
    """(M, 4): the sites of `to_shape` that any voxel inside `shape` reaches, sorted."""
    reached = set()
    for b, *voxel in np.asarray(coords)[in_range(coords, shape)].tolist():
        for tap in itertools.product(*(range(k) for k in kernel_size)):
            steps = list(zip(voxel, tap, stride, padding, dilation, strict=True))
            if transposed:
                site = [c * s + k * d - p for c, k, s, p, d in steps]
            elif all((c + p - k * d) % s == 0 for c, k, s, p, d in steps):
                site = [(c + p - k * d) // s for c, k, s, p, d in steps]
            else:
                continue
            if all(0 <= x < min(extent, 2**31) for x, extent in zip(site, to_shape[1:], strict=True)):
                reached.add((b, *site))
    return np.array(sorted(reached), np.int32).reshape(-1, 4)


def sparse_map(coords, shape, sites, sites_shape, kernel_size, stride, padding, dilation, transposed=False):
    """map[v, m]: the row of coords at site * stride + k * dilation - padding; transposed, the row of the voxel that
    reaches the site from voxel * stride + k * dilation - padding."""
    row_of = {}
    for row, inside in enumerate(in_range(coords, shape)):
        if inside:
            row_of.setdefault(tuple(np.asarray(coords)[row].tolist()), row)
    taps = list(itertools.product(*(range(k) for k in kernel_size)))
    result = np.full((len(taps), len(sites)), -1, np.int32)
    for m, inside in enumerate(in_range(sites, sites_shape)):
        b, *site = np.asarray(sites)[m].tolist()
        for v, tap in enumerate(taps if inside else ()):
            steps = list(zip(site, tap, stride, padding, dilation, strict=True))
            if not transposed:
                result[v, m] = row_of.get((b, *(c * s + k * d - p for c, k, s, p, d in steps)), -1)
            elif all((c + p - k * d) % s == 0 for c, k, s, p, d in steps):
                result[v, m] = row_of.get((b, *((c + p - k * d) // s for c, k, s, p, d in steps)), -1)
    return result


def map_back(coords, shape, kernel_size, stride, sites=None):
    """From the outputs of a layer with a stride, all that there are or those `sites`, to its voxels."""
    how = kernel_size, stride, tuple(k // 2 for k in kernel_size), (1, 1, 1)
    to_shape = out_shape(shape, *how)
    sites = conv_sites(coords, shape, to_shape, *how) if sites is None else sites
    return sparse_map(sites, to_shape, coords, shape, *how, transposed=True)


# ---- codes of voxels ----


def axis_bits(shape):
    return (max(shape[1:]) - 1).bit_length()


def hilbert_axes(x, y, z, bits):
    """Skilling's AxestoTranspose: the numbers whose interleaved bits are the place on the curve."""
    axes, q = [x, y, z], 1 << (bits - 1) if bits else 0
    while q > 1:
        for i in range(3):
            if axes[i] & q:
                axes[0] ^= q - 1
            else:
                exchange = (axes[0] ^ axes[i]) & (q - 1)
                axes[0] ^= exchange
                axes[i] ^= exchange
        q >>= 1
    axes[1] ^= axes[0]
    axes[2] ^= axes[1]
    flip = 0
    for bit in range(1, bits):
        if axes[2] >> bit & 1:
            flip ^= (1 << bit) - 1
    return [axis ^ flip for axis in axes]


def code_of(coord, shape, mode):
    """The number of one voxel along a curve, a Python int."""
    b, x, y, z = (int(c) for c in coord)
    if mode == "bxyz":
        return ((b * shape[1] + x) * shape[2] + y) * shape[3] + z
    bits = axis_bits(shape)
    if mode == "hilbert":
        x, y, z = hilbert_axes(x, y, z, bits)
    digits = "".join(f"{4 * (x >> i & 1) + 2 * (y >> i & 1) + (z >> i & 1):03b}" for i in reversed(range(bits)))
    return int(f"{b:b}{digits}", 2)


def encode_seq(coords, shape, mode):
    """Codes as the package stores them: int32 up to 32 bits, else int64, unsigned numbers in either."""
    last = code_of([s - 1 for s in shape], shape, "bxyz") if mode == "bxyz" else None
    bits = last.bit_length() if last is not None else 3 * axis_bits(shape) + (shape[0] - 1).bit_length()
    unsigned, signed = (np.uint32, np.int32) if bits <= 32 else (np.uint64, np.int64)
    return np.array([code_of(c, shape, mode) for c in np.asarray(coords)], unsigned).view(signed)


# ---- sampling ----


def rows_of_voxels(coords, shape):
    rows = {}
    for row, point in enumerate(map(tuple, np.asarray(coords).tolist())):
        if all(0 <= c < s for c, s in zip(point, shape, strict=True)):
            rows.setdefault(point, row)
    return rows


CORNERS = list(itertools.product((0, 1), repeat=3))


def sample_map(coords, shape, grid, mode):
    """indices (Q, K) and float64 weights (Q, K); a point that is not finite has no voxels."""
    rows, points = rows_of_voxels(coords, shape), f64(grid).reshape(-1, 3)
    per_sample = np.shape(grid)[1]
    if mode == "nearest":
        found = [
            rows.get((q // per_sample, *(int(c) for c in p)), -1) if np.isfinite(p).all() and (p > -1).all() else -1
            for q, p in enumerate(points)
        ]
        indices = np.array(found, np.int32).reshape(-1, 1)
        return indices, (indices >= 0).astype(np.float64)
    indices, weights = np.full((len(points), 8), -1, np.int32), np.zeros((len(points), 8))
    for q, p in enumerate(points):
        if not np.isfinite(p).all():
            continue
        base = np.floor(p - 0.5)
        for k, corner in enumerate(CORNERS):
            indices[q, k] = rows.get((q // per_sample, *(int(b) + c for b, c in zip(base, corner, strict=True))), -1)
            if indices[q, k] >= 0:
                weights[q, k] = np.prod(np.where(corner, p - 0.5 - base, 1 - (p - 0.5 - base)))
    total = weights.sum(axis=1, keepdims=True)
    return indices, np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)


def gather_sum(feats, indices, weights=None):
    weights = np.ones(indices.shape) if weights is None else f64(weights)
    rows = np.concatenate([f64(feats), np.zeros((1, feats.shape[1]))])  # -1 is the last one
    return (rows[indices] * weights[..., None]).sum(axis=1)


def scatter_sum(grad_out, indices, weights, rows):
    """The adjoint of gather_sum in the features."""
    out = np.zeros((rows, grad_out.shape[1]))
    q, k = np.nonzero(indices >= 0)
    np.add.at(out, indices[q, k], f64(grad_out)[q] * f64(weights)[q, k][:, None])
    return out


def sample_grad(grad_out, feats, grid, indices):
    """The gradient of trilinear samples in their points by the quotient rule, and what its terms add up to without
    their signs, which is the scale of what float32 sums lose."""
    points, product = f64(grid).reshape(-1, 3), np.zeros(indices.shape)
    size = np.zeros(indices.shape)
    for k in range(8):
        there = indices[:, k] >= 0
        product[there, k] = (f64(grad_out)[there] * f64(feats)[indices[there, k]]).sum(axis=1)
        size[there, k] = np.abs(f64(grad_out)[there] * f64(feats)[indices[there, k]]).sum(axis=1)
    points = np.where(np.isfinite(points), points, 0) - 0.5
    fraction = points - np.floor(points)
    parts = np.stack([np.where(corner, fraction, 1 - fraction) for corner in CORNERS], axis=1)  # (Q, 8, 3)
    weight = parts.prod(axis=2) * (indices >= 0)
    total = weight.sum(axis=1)
    safe = np.where(total > 0, total, 1)
    gradient, scale = np.zeros_like(points), np.zeros_like(points)
    for axis in range(3):
        slope = np.where([c[axis] for c in CORNERS], 1, -1) * np.delete(parts, axis, axis=2).prod(axis=2)
        slope = slope * (indices >= 0)
        above, below = (weight * product).sum(axis=1), (slope * product).sum(axis=1)
        gradient[:, axis] = below / safe - above * slope.sum(axis=1) / safe**2
        scale[:, axis] = (np.abs(slope) * size).sum(axis=1) / safe
        scale[:, axis] += (weight * size).sum(axis=1) * np.abs(slope).sum(axis=1) / safe**2
    empty = ~(total > 0)
    gradient[empty] = scale[empty] = 0
    return gradient.reshape(np.shape(grid)), scale.reshape(np.shape(grid))


def group_rows(indices, rows):
    """(order, starts): the positions of each row in a list of indices."""
    flat = indices.ravel().tolist()
    groups = [[i for i, row in enumerate(flat) if row == m] for m in range(rows)] if rows * len(flat) < 10**7 else None
    if groups is None:
        keys = np.where(indices.ravel() < 0, rows, indices.ravel())
        order = np.argsort(keys, kind="stable")
        return order.astype(np.int32), np.searchsorted(keys[order], np.arange(rows + 1)).astype(np.int32)
    none = [i for i, row in enumerate(flat) if not 0 <= row < rows]
    order = np.array([i for group in groups for i in group] + none, np.int32)
    return order, np.cumsum([0, *map(len, groups)]).astype(np.int32)


def group_reduce(src, order, starts, weights, reduction):
    """(out float64, argmax)."""
    terms = max(len(order) // max(len(src), 1), 1)
    weights = np.ones(len(order)) if weights is None else f64(weights)
    out, argmax = np.zeros((len(starts) - 1, src.shape[1])), np.full((len(starts) - 1, src.shape[1]), -1)
    for m, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
        entries = order[begin:end]
        if len(entries) == 0:
            continue
        values = f64(src)[entries // terms] * weights[entries, None]
        if reduction == "max":
            best = np.argmax(values, axis=0)  # the first; of NaN too
            out[m], argmax[m] = values.max(axis=0), (entries // terms)[best]
        else:
            out[m] = values.sum(axis=0) if reduction == "sum" else values.mean(axis=0)
    return out, argmax.astype(np.int32)


# ---- points and voxels ----


def voxel_of(points, voxel_size, origin, shape):
    """(N, 4) [batch, x, y, z], rows of -1 for points outside, by float32 arithmetic as the points are."""
    points = np.asarray(points, np.float32)
    if points.shape[1] == 3:
        points = np.concatenate([np.zeros((len(points), 1), np.float32), points], axis=1)
    with np.errstate(all="ignore"):
        places = points[:, 1:] / np.asarray(voxel_size, np.float32) - np.asarray(origin, np.float32)
        coords = np.concatenate([np.trunc(points[:, :1]), np.floor(places)], axis=1).astype(np.float64)
        inside = ((coords >= 0) & (coords < np.asarray(shape, np.float64))).all(axis=1) & (points[:, 0] >= 0)
    return np.where(inside[:, None], coords, -1).astype(np.int32)


def unique_coords(coords):
    """(unique, inverse, counts) by a dictionary, sorted; rows of -1 are none."""
    rows = {}
    for row, voxel in enumerate(map(tuple, np.asarray(coords).tolist())):
        if voxel[0] >= 0:
            rows.setdefault(voxel, []).append(row)
    unique, inverse = sorted(rows), np.full(len(coords), -1, np.int32)
    for m, voxel in enumerate(unique):
        inverse[rows[voxel]] = m
    counts = np.array([len(rows[voxel]) for voxel in unique], np.int32)
    return np.array(unique, np.int32).reshape(-1, 4), inverse, counts


def reduce_points(feats, inverse, voxels, how):
    out = np.zeros((voxels, feats.shape[1]))
    for m in range(voxels):
        rows = f64(feats[inverse == m])
        out[m] = {"sum": rows.sum(0), "mean": rows.mean(0), "max": rows.max(0), "first": rows[0]}[how]
    return out


# ---- convolution ----


def by_offset(weight):
    """(Co, Kw, Kh, Kd, Ci) or (Co, V, Ci) -> float64 (Co, V, Ci)."""
    return f64(weight).reshape(weight.shape[0], -1, weight.shape[-1])


def conv_forward(feats, weight, bias, nmap):
    weight = by_offset(weight)
    out = np.zeros((nmap.shape[1], weight.shape[0]))
    for v, sources in enumerate(nmap):
        has = sources >= 0
        out[has] += f64(feats[sources[has]]) @ weight[:, v].T
    return out if bias is None else out + f64(bias)


def activate(x, activation):
    """None, relu, silu or gelu, of float64."""
    if activation == "relu":
        return np.maximum(x, 0)
    if activation == "silu":
        return x / (1 + np.exp(-x))
    if activation == "gelu":  # x times the normal distribution function
        return x * 0.5 * np.vectorize(math.erfc, otypes=[float])(-x / math.sqrt(2))
    return x


def conv_epilogue(feats, weight, bias, nmap, residual, activation):
    out = conv_forward(feats, weight, bias, nmap)
    return activate(out if residual is None else out + f64(residual), activation)


def conv_dgrad(grad_out, weight, nmap, num_rows):
    """The adjoint of conv_forward in feats, scattered through the forward map."""
    weight = by_offset(weight)
    grad_feats = np.zeros((num_rows, weight.shape[2]))
    for v, sources in enumerate(nmap):
        has = sources >= 0
        np.add.at(grad_feats, sources[has], f64(grad_out[has]) @ weight[:, v])
    return grad_feats


def conv_wgrad(grad_out, feats, nmap):
    """grad_weight (Co, V, Ci) and grad_bias (Co)."""
    grad_weight = np.zeros((grad_out.shape[1], nmap.shape[0], feats.shape[1]))
    for v, sources in enumerate(nmap):
        has = sources >= 0
        grad_weight[:, v] = f64(grad_out[has]).T @ f64(feats[sources[has]])
    return grad_weight, f64(grad_out).sum(axis=0)


# ---- pooling ----


def pool(feats, nmap, mode):
    """(out, chosen, count): the first maximum in the order of v, NaN above all; 0 and -1 where there is no entry."""
    feats = f64(feats)
    out, count = np.zeros((nmap.shape[1], feats.shape[1])), (nmap >= 0).sum(axis=0).astype(np.int32)
    chosen = np.full(out.shape, -1, np.int32)
    for sources in nmap:
        for m in np.nonzero(sources >= 0)[0]:
            x, row = feats[sources[m]], sources[m]
            if mode == "max":
                takes = (chosen[m] < 0) | (x > out[m]) | (np.isnan(x) & ~np.isnan(out[m]))
                out[m], chosen[m] = np.where(takes, x, out[m]), np.where(takes, row, chosen[m])
            else:
                out[m] += x
    if mode == "mean":
        out /= np.maximum(count, 1)[:, None]
    return out, chosen, count


def pool_backward(grad_out, nmap, num_rows, mode, chosen, count):
    """The adjoint of pool, scattered through the forward map."""
    grad_out, grad_feats = f64(grad_out), np.zeros((num_rows, grad_out.shape[1]))
    for sources in nmap:
        for m in np.nonzero(sources >= 0)[0]:
            share = {"max": chosen[m] == sources[m], "mean": 1 / max(count[m], 1), "sum": 1}[mode]
            grad_feats[sources[m]] += share * grad_out[m]
    return grad_feats


def batch_map(batch, samples):
    """A map with which `pool` pools samples: as many offsets as the largest has rows, in rising order."""
    rows = [np.nonzero(batch == b)[0] for b in range(samples)]
    nmap = np.full((max([len(r) for r in rows], default=0), samples), -1, np.int32)
    for b, of_sample in enumerate(rows):
        nmap[: len(of_sample), b] = of_sample
    return nmap


# ---- GEMM ----


SCALE_BLOCK = 128


def scaled(x, scale, block_rows):
    """x times its scale: one, one per row, or (two axes) one per block of block_rows x 128."""
    if scale is None:
        return f64(x)
    scale = f64(scale)
    if scale.ndim == 2:
        scale = scale.repeat(block_rows, axis=0)[: len(x)].repeat(SCALE_BLOCK, axis=1)[:, : x.shape[1]]
    return f64(x) * (scale.reshape(-1, 1) if scale.ndim < 2 else scale)


def activated(x, activation):
    """SwiGLU halves the columns: 2 j is the gate of 2 j + 1."""
    if activation == "swiglu":
        return activated(x[:, 0::2], "silu") * x[:, 1::2]
    with np.errstate(over="ignore"):
        return {
            None: lambda: x,
            "relu": lambda: np.where(x < 0, 0, x),
            "silu": lambda: x / (1 + np.exp(-x)),
            "gelu": lambda: x * 0.5 * np.vectorize(math.erfc, otypes=[float])(-x / math.sqrt(2)),
        }[activation]()


def gemm(a, b, scale_a=None, scale_b=None, bias=None, alpha=1.0, activation=None):
    """act(alpha * A . B^T + bias) of the dequantised inputs."""
    out = alpha * (scaled(a, scale_a, 1) @ scaled(b, scale_b, SCALE_BLOCK).T)
    return activated(out if bias is None else out + f64(bias), activation)


def group_bounds(offsets, groups):
    """G ends (the first group starts at 0) or G + 1 bounds -> [(begin, end)]."""
    bounds = [int(o) for o in offsets]
    if len(bounds) == groups:
        bounds = [0, *bounds]
    return list(itertools.pairwise(bounds))


def grouped_gemm(a, b, offsets, scale_a=None, scale_b=None, bias=None):
    """The ragged product and the mask of rows that belong to a group; the others are left alone."""
    out, written = np.zeros((a.shape[0], b.shape[1])), np.zeros(a.shape[0], bool)
    for g, (begin, end) in enumerate(group_bounds(offsets, b.shape[0])):
        rows = slice(begin, end)
        of_rows = None if scale_a is None else scale_a if np.size(scale_a) == 1 else scale_a[rows]
        out[rows] = gemm(
            a[rows],
            b[g],
            of_rows,
            None if scale_b is None else scale_b[g],
            None if bias is None else bias[g],
        )
        written[rows] = True
    return out, written


# ---- quantisation: the one place where the answer is defined in float32, bit for bit ----


def over_blocks(x, block_rows, reduce):
    """reduce() of each block of block_rows x 128 of a matrix."""
    starts = [range(0, length, step) for length, step in zip(x.shape, (block_rows, SCALE_BLOCK), strict=True)]
    result = np.zeros([len(s) for s in starts], np.float32)
    for (i, row), (j, column) in itertools.product(*map(enumerate, starts)):
        result[i, j] = reduce(x[row : row + block_rows, column : column + SCALE_BLOCK])
    return result


def quantize(x, dtype, granularity, scale=None, saturate=True):
    """q = saturate(x / scale) rounded to nearest even, scale = amax / max over finite values, or over all numbers."""
    if np.ndim(x) == 3:
        scales = [None] * len(x) if scale is None else scale
        parts = [quantize(m, dtype, granularity, s, saturate) for m, s in zip(x, scales, strict=True)]
        return tuple(np.stack(part) for part in zip(*parts, strict=True))
    x = np.asarray(x).astype(np.float32)
    limit = np.float32(FP8_MAX[dtype])
    block_rows = {"1x128": 1, "128x128": SCALE_BLOCK}.get(granularity)
    if scale is None:
        counted = np.isfinite(x) if saturate else ~np.isnan(x)
        magnitude = np.where(counted, np.abs(x), np.float32(0))
        if block_rows:
            largest = over_blocks(magnitude, block_rows, np.max)
        else:
            largest = magnitude.max(axis=None if granularity == "tensor" else 1, initial=0)
        scale = np.asarray(largest / limit, np.float32)
        scale = np.where(scale == 0, np.float32(1), scale).astype(np.float32)
    if block_rows:
        per_element = scale.repeat(block_rows, axis=0)[: len(x)].repeat(SCALE_BLOCK, axis=1)[:, : x.shape[1]]
    else:
        per_element = np.reshape(scale, (-1, 1))
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return np.clip(x / per_element, -limit, limit).astype(dtype_of(dtype)), scale
