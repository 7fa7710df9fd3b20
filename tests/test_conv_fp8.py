"""Convolution of FP8 feats and weight with scales, for inference: against float64 of the numbers they stand for."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
import scenes
import verdicts
from calls import call, zeros
from memory import Host
from products import E4M3, E5M2, scale_of
from reference import f64
from verdicts import ELEMENT_CUTS, assert_gemm_rows, assert_rounded_once, assert_same_bits, float8_cut

import flexgemm

KINDS = ["none", "tensor", "row"]
OUT_DTYPES = ["float32", "float16", "bfloat16"]

every_out = pytest.mark.parametrize("out_dtype", OUT_DTYPES)


class Problem:
    """FP8 operands, scales of these kinds, and a bias and a residual of the output's dtype. Few channels have data of
    one sign, so that short rows do not cancel."""

    def __init__(self, n=300, ci=64, co=64, kernel_size=(3, 3, 3), dtypes=(E4M3, E4M3), kinds=("row", "row"),
                 out_dtype="float32", dilation=(1, 1, 1)):  # fmt: skip
        self.coords, self.shape = scenes.scene(n, seed=n)
        self.kernel_size, self.dilation, self.out_dtype = kernel_size, dilation, out_dtype
        self.map = reference.neighbor_map(self.coords, self.shape, kernel_size, dilation)
        rng = np.random.default_rng([n, ci, co])
        one_sign = min(ci, co) < 64
        self.feats = scenes.values(rng, (n, ci), dtypes[0], one_sign=one_sign)
        self.weight = scenes.values(rng, (co, *kernel_size, ci), dtypes[1], one_sign=one_sign)
        self.scale_feats, self.scale_weight = scale_of(rng, kinds[0], n), scale_of(rng, kinds[1], co)
        self.bias = scenes.values(rng, (co,), out_dtype, one_sign=one_sign)
        self.residual = scenes.values(rng, (n, co), out_dtype, one_sign=one_sign)

    @property
    def scales(self):
        return {"scale_feats": self.scale_feats, "scale_weight": self.scale_weight}

    def run(self, backend, bias=True, residual=False, **how):
        how = {"out_dtype": self.out_dtype, "residual": self.residual if residual else None, **self.scales, **how}
        return guarded.conv_forward(backend, self.feats, self.weight, self.bias if bias else None, self.map, **how)

    def expected(self, bias=True, residual=False, activation=None, nmap=None):
        weight = reference.by_offset(self.weight)
        if self.scale_weight is not None:
            weight = weight * f64(self.scale_weight).reshape(-1, 1, 1)
        feats = reference.scaled(self.feats, self.scale_feats, 1)
        added = self.bias if bias else None, self.map if nmap is None else nmap, self.residual if residual else None
        return reference.conv_epilogue(feats, weight, *added, activation)

    def check(self, backend, out, **parts):
        expected, cut = self.expected(**parts), float8_cut(backend.name)
        assert out.dtype == reference.dtype_of(self.out_dtype)
        assert_gemm_rows(out, expected, self.out_dtype, cut=cut)
        if self.out_dtype in verdicts.HALF_ULP:
            assert_rounded_once(out, expected, cut=cut)


# ---- every shape, fenced buffers ----

SHAPES = [
    (300, 1, 1), (300, 7, 13), (300, 16, 16), (300, 33, 65), (300, 64, 64), (300, 48, 24), (129, 80, 72),
    (65, 600, 40),  # a reduction of many steps, in several shares
    (65, 592, 40),  # the same in whole pieces of 16 bytes
    (65, 40, 600),
    (700, 272, 264),  # tiles of the widest kind and a ragged one beside them, the last step of channels ragged
    (20_000, 16, 256),  # more tiles than a GPU takes at once
    (1, 16, 8), (0, 16, 8),
]  # fmt: skip


@every_out
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(backend, shape, out_dtype):
    p = Problem(*shape, out_dtype=out_dtype)
    p.check(backend, p.run(backend))


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)], ids="-".join)
@pytest.mark.parametrize("shape", [(300, 33, 65), (300, 144, 136)], ids=str)
def test_every_mix_of_kinds(backend, shape, dtypes):
    p = Problem(*shape, dtypes=dtypes)
    p.check(backend, p.run(backend))


@pytest.mark.parametrize("kind_weight", KINDS)
@pytest.mark.parametrize("kind_feats", KINDS)
@pytest.mark.parametrize("shape", [(300, 33, 65), (300, 144, 136), (65, 592, 40)], ids=str)
def test_every_kind_of_scale(backend, shape, kind_feats, kind_weight):
    p = Problem(*shape, kinds=(kind_feats, kind_weight))
    p.check(backend, p.run(backend))


def test_scales_of_rows_that_differ_by_orders_of_magnitude(backend):
    """Each gathered row is multiplied by its own scale, at whatever offset and output row it is met."""
    p = Problem(500, 144, 136)
    p.scale_feats = (10.0 ** np.random.default_rng(2).integers(-6, 6, 500)).astype(np.float32)
    p.check(backend, p.run(backend))


@pytest.mark.parametrize("kernel_size", [(1, 1, 1), (2, 3, 2), (5, 5, 5), (7, 7, 7), (1, 3, 5)], ids=str)
@pytest.mark.parametrize("channels", [(16, 40), (19, 24)], ids=str)
def test_kernels_and_dilations(backend, kernel_size, channels):
    p = Problem(300, *channels, kernel_size=kernel_size, dilation=(2, 1, 3))
    p.check(backend, p.run(backend))


# ---- accuracy ----


@pytest.mark.parametrize("one_sign", [False, True])
@pytest.mark.parametrize("channels", [(1024, 128), (2048, 64)], ids=str)
def test_long_sums_keep_float32_accuracy(backend, channels, one_sign):
    """Tensor cores of Hopper keep some 13 bits of a sum. Without promotion to float32 at least every 128 products, sums
    of 27 x 1024 would be beyond the limit, or biased where nothing cancels (test_gemm.py models both)."""
    ci, co = channels
    p = Problem(40, 1, co)
    rng = np.random.default_rng(ci)
    p.map = rng.integers(-1, 40, (27, 40)).astype(np.int32)
    p.feats = scenes.values(rng, (40, ci), E4M3, one_sign=one_sign)
    p.weight = scenes.values(rng, (co, 27, ci), E4M3, one_sign=one_sign)
    out, expected = p.run(backend, bias=False), p.expected(bias=False)
    if one_sign:
        assert abs(out / expected - 1).max() < 2e-3
    else:
        assert_gemm_rows(out, expected, "float32")


# ---- what is added to the sums ----


@every_out
@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize("shape", [(300, 33, 65), (300, 144, 136), (65, 592, 40), (1, 16, 8), (0, 16, 8)], ids=str)
def test_bias_residual_activation(backend, shape, activation, out_dtype):
    p = Problem(*shape, out_dtype=out_dtype)
    p.check(backend, p.run(backend, residual=True, activation=activation), residual=True, activation=activation)


@every_out
@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("shape", [(300, 33, 65), (300, 144, 136), (65, 592, 40)], ids=str)
def test_a_residual_that_is_the_output(backend, shape, pad, out_dtype):
    p = Problem(*shape, out_dtype=out_dtype)
    apart = p.run(backend, residual=True, activation="relu", pad=pad)
    assert_same_bits(p.run(backend, residual=True, activation="relu", pad=pad, in_place=True), apart)


@pytest.mark.parametrize("out_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("added", OUT_DTYPES)
@pytest.mark.parametrize("shape", [(300, 33, 65), (300, 144, 136), (65, 592, 40), (0, 16, 8)], ids=str)
def test_an_output_in_fp8(backend, shape, added, out_dtype):
    """The wide result divided by scale_out, saturated: at most half a step of FP8 from it, and what sums may lose."""
    p = Problem(*shape, out_dtype=added)
    wide = p.expected(residual=True, activation="gelu")
    scale_out = np.float32(np.abs(wide).max(initial=1) / 300 if out_dtype == E4M3 else 2**-9)
    how = {"out_dtype": out_dtype, "residual": True, "activation": "gelu"}
    loss = ELEMENT_CUTS * float8_cut(backend.name) * np.sqrt((wide**2).mean(axis=1, keepdims=True))
    for scale in (scale_out, scale_out / np.float32(64)):  # the second saturates
        out = p.run(backend, **how, scale_out=np.asarray(scale))
        assert out.dtype == reference.dtype_of(out_dtype)
        largest, digits, smallest = {E4M3: (448, 4, 2.0**-9), E5M2: (57344, 3, 2.0**-16)}[out_dtype]
        expected = np.clip(wide / f64(scale), -largest, largest)
        limit = np.maximum(np.abs(expected) * 2.0**-digits, smallest / 2) * 1.001
        limit += 1e-5 * np.abs(expected).max(initial=0) + loss / f64(scale)
        assert (np.abs(f64(out) - expected) <= limit).all()
        assert (np.abs(f64(out)) == largest).any() or scale is scale_out or not len(out)


# ---- layouts, orders, maps ----


@every_out
@pytest.mark.parametrize("offset", [0, 1, 16])
@pytest.mark.parametrize("pad", [1, 16])
@pytest.mark.parametrize("shape", [(129, 33, 65), (129, 64, 64)], ids=str)
def test_strided_rows_and_any_alignment(backend, shape, pad, offset, out_dtype):
    p = Problem(*shape, out_dtype=out_dtype)
    p.check(backend, p.run(backend, residual=True, pad=pad, offset=offset), residual=True)


@pytest.mark.parametrize("algorithm", ["masked_implicit_gemm", "masked_implicit_gemm_splitk"])
@pytest.mark.parametrize("groups", [1, 3, 9])
@pytest.mark.parametrize("shape", [(300, 33, 65), (300, 144, 136), (700, 272, 264)], ids=str)
def test_any_order_gives_the_same_rows(backend, shape, groups, algorithm):
    p = Problem(*shape)
    rng = np.random.default_rng(groups)
    order = np.stack([rng.permutation(shape[0]) for _ in range(groups)]).astype(np.int32)
    p.check(backend, p.run(backend, order=order, groups=(groups,), algorithm=algorithm))


ALGORITHMS = ["auto", "explicit_gemm", "implicit_gemm", "implicit_gemm_splitk", "masked_implicit_gemm"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shape", [(900, 80, 40), (900, 33, 40), (0, 16, 8)], ids=str)
def test_algorithms_agree(backend, shape, algorithm):
    p = Problem(*shape)
    p.check(backend, p.run(backend, algorithm=algorithm))


@pytest.mark.parametrize("shape", [(64, 33, 40), (64, 64, 72)], ids=str)
@pytest.mark.parametrize("m, n", [(200, 77), (77, 200), (0, 50), (50, 1), (129, 0)])
def test_rectangular_maps(backend, shape, m, n):
    """Rows that no output reads hold NaN, and so do their scales."""
    p = Problem(max(m, n), *shape[1:])
    rng = np.random.default_rng(5)
    wanted = rng.permutation(n)[: n * 2 // 3 + (n == 1)]
    nmap = np.full((27, m), -1, np.int32)
    for v in range(27 if n else 0):
        has = rng.permutation(m)[: int(rng.integers(0, m + 1))]
        nmap[v, has] = rng.choice(wanted, len(has))
    unread = np.setdiff1d(np.arange(n), nmap)
    p.feats, p.scale_feats, p.map = p.feats[:n].copy(), p.scale_feats[:n].copy(), nmap
    p.feats[unread], p.scale_feats[unread] = np.nan, np.nan
    p.check(backend, p.run(backend))


def test_map_entries_out_of_range_are_no_neighbours_on_the_gpu(cuda):
    for shape in ((300, 33, 64), (300, 64, 64), (300, 272, 264)):
        p = Problem(*shape)
        p.map = p.map.copy()
        p.map[::2, ::7] = np.resize([-2, -(2**31), 300, 301, 2**31 - 1], p.map[::2, ::7].shape)
        tamed = np.where((p.map < 0) | (p.map >= 300), -1, p.map)
        p.check(cuda, p.run(cuda), nmap=tamed)


def test_nan_and_infinity_reach_the_rows_that_read_them(backend):
    """And no others. e4m3 has a NaN and no infinity, e5m2 both."""
    for dtype, value in ((E4M3, np.nan), (E5M2, np.nan), (E5M2, np.inf)):
        for shape in ((300, 33, 40), (300, 64, 72)):
            p = Problem(*shape, dtypes=(dtype, E4M3))
            p.feats[7, 5] = value
            out = p.run(backend)
            reads = (p.map == 7).any(axis=0)
            assert not np.isfinite(out[reads]).any()
            assert_gemm_rows(out[~reads], p.expected()[~reads], "float32", cut=float8_cut(backend.name))


def test_the_same_bits_again(backend):
    for shape in ((300, 33, 65), (700, 272, 264), (65, 592, 40)):
        p = Problem(*shape)
        assert_same_bits(p.run(backend), p.run(backend))


# ---- the public functions ----


@every_out
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_quantize_and_convolve(backend, granularity, out_dtype):
    """As a user goes: float arrays, cast by quantize, close to the convolution of the floats."""
    coords, shape = scenes.scene(900)
    rng = np.random.default_rng(0)
    feats = scenes.values(rng, (900, 64), "float32")
    weight = scenes.values(rng, (80, 3, 3, 3, 64), "float32") / np.float32(20)
    bias = scenes.values(rng, (80,), out_dtype)
    nmap = flexgemm.neighbor_map(backend.array(coords), shape)
    q, scale_feats = flexgemm.quantize(backend.array(feats), granularity=granularity)
    w, scale_weight = flexgemm.quantize(backend.array(weight.reshape(80, -1)), granularity="row")
    w = backend.array(backend.numpy(w).reshape(weight.shape))
    how = {"neighbor_map": nmap, "scale_feats": scale_feats, "scale_weight": scale_weight, "out_dtype": out_dtype}
    out = backend.numpy(flexgemm.submanifold_conv3d(q, w, backend.array(bias), **how))
    assert out.dtype == reference.dtype_of(out_dtype)

    p = Problem(0, 64, 80, out_dtype=out_dtype)
    p.map = reference.neighbor_map(coords, shape)
    p.feats, p.weight, p.scale_feats, p.scale_weight = map(backend.numpy, (q, w, scale_feats, scale_weight))
    p.bias = bias
    p.check(backend, out)
    assert verdicts.gemm_diff(out, reference.conv_forward(feats, weight, bias, p.map)).max() < 2e-3


def test_bfloat16_is_the_default_and_out_may_be_given(backend):
    p = Problem(300, 64, 48, out_dtype="bfloat16")
    nmap = flexgemm.neighbor_map(backend.array(p.coords), p.shape)
    feats, weight, bias = map(backend.array, (p.feats, p.weight, p.bias))
    scales = {name: backend.array(scale) for name, scale in p.scales.items()}
    p.check(backend, backend.numpy(flexgemm.submanifold_conv3d(feats, weight, bias, neighbor_map=nmap, **scales)))
    out = backend.empty((300, 48), "bfloat16")
    assert flexgemm.sparse_conv3d(feats, weight, bias, neighbor_map=nmap, out=out, **scales) is out
    p.check(backend, backend.numpy(out))


def test_strided_and_inverse_maps(backend):
    p = Problem(400, 32, 48, kernel_size=(2, 2, 2))
    nmap = flexgemm.sparse_conv_map(backend.array(p.coords), p.shape, 2, 2)
    weight, scale_weight = backend.array(p.weight), backend.array(p.scale_weight)
    how = {"neighbor_map": nmap, "scale_weight": scale_weight, "out_dtype": "float32"}
    scale_feats = backend.array(p.scale_feats)
    out = flexgemm.sparse_conv3d(backend.array(p.feats), weight, backend.array(p.bias), **how, scale_feats=scale_feats)
    p.check(backend, backend.numpy(out), nmap=backend.numpy(nmap.map))

    coarse, p.map = nmap.num_out_voxels, backend.numpy(nmap.inverse.map)
    p.feats, p.scale_feats = p.feats[:coarse], p.scale_feats[:coarse]
    how["scale_feats"] = backend.array(p.scale_feats)
    p.check(
        backend,
        backend.numpy(flexgemm.sparse_inverse_conv3d(backend.array(p.feats), weight, backend.array(p.bias), **how)),
    )


def take_groups(p, groups):
    """The weight of so many groups, which the problem's own becomes between zeros."""
    co, *kernel, ci = p.weight.shape
    width, many = ci // groups, co // groups
    weight = np.ascontiguousarray(p.weight[..., :width])
    p.weight = np.zeros_like(p.weight)
    for group in range(groups):
        rows = slice(group * many, (group + 1) * many)
        p.weight[rows, ..., group * width : (group + 1) * width] = weight[rows]
    return weight


@pytest.mark.parametrize("groups", [2, 4, 32])
def test_groups_of_channels(backend, groups):
    p = Problem(300, 32, 64)
    nmap = flexgemm.neighbor_map(backend.array(p.coords), p.shape)
    arrays = map(backend.array, (p.feats, take_groups(p, groups), p.bias))
    scales = {name: backend.array(scale) for name, scale in p.scales.items()}
    how = {"neighbor_map": nmap, "groups": groups, "out_dtype": "float32", **scales}
    p.check(backend, backend.numpy(flexgemm.submanifold_conv3d(*arrays, **how)))


@every_out
@pytest.mark.parametrize("algorithm", ["auto", "implicit_gemm_splitk"])
@pytest.mark.parametrize("n, ci, co, groups", [(70, 33, 66, 3), (65, 160, 144, 2), (65, 1200, 80, 2)])
def test_groups_in_fenced_buffers(backend, n, ci, co, groups, algorithm, out_dtype):
    """A launch of all groups, and one for each: what lies between a group's channels, its scales and what is added."""
    p = Problem(n, ci, co, out_dtype=out_dtype)
    weight, how = take_groups(p, groups), {"algorithm": algorithm, "channel_groups": groups, "activation": "relu"}
    arrays = backend, p.feats, weight, p.bias, p.map
    for in_place, pad in ((False, 16), (True, 1)):
        also = {"residual": p.residual, "in_place": in_place, "pad": pad, "out_dtype": out_dtype, **p.scales}
        p.check(backend, guarded.conv_forward(*arrays, **how, **also), residual=True, activation="relu")
    wide = guarded.conv_forward(*arrays, **how, out_dtype=out_dtype, **p.scales)
    narrow = guarded.conv_forward(*arrays, **how, out_dtype=E4M3, scale_out=np.float32([0.5]), **p.scales)
    expected = np.clip(f64(wide) / 0.5, -448, 448)
    assert (np.abs(f64(narrow) - expected) <= np.maximum(expected * 2.0**-4, 2.0**-10) * 1.1).all()


def test_scales_and_bias_may_be_strided():
    p = Problem(300, 64, 48)
    how = {"neighbor_map": flexgemm.neighbor_map(p.coords, p.shape), "out_dtype": "float32"}
    every_second = {name: np.repeat(scale, 2)[::2] for name, scale in p.scales.items()}
    p.check(Host(), flexgemm.submanifold_conv3d(p.feats, p.weight, np.repeat(p.bias, 2)[::2], **how, **every_second))


def test_uint8_arrays_that_hold_fp8(backend):
    p = Problem(300, 64, 48, dtypes=(E4M3, E5M2))
    nmap = flexgemm.neighbor_map(backend.array(p.coords), p.shape)
    feats, weight = (backend.array(x.view(np.uint8)) for x in (p.feats, p.weight))
    how = {"neighbor_map": nmap, "dtype_feats": E4M3, "dtype_weight": E5M2, "out_dtype": "float32"}
    scales = {name: backend.array(scale) for name, scale in p.scales.items()}
    p.check(backend, backend.numpy(flexgemm.submanifold_conv3d(feats, weight, backend.array(p.bias), **how, **scales)))


def test_numpy_arrays_over_a_map_on_a_gpu(cuda):
    p = Problem(300, 64, 48, out_dtype="float16")
    nmap = flexgemm.neighbor_map(p.coords, p.shape, device="cuda")
    out = np.empty((300, 48), np.float16)
    how = {**p.scales, "neighbor_map": nmap, "out": out}
    assert flexgemm.submanifold_conv3d(p.feats, p.weight, p.bias, **how) is out
    p.check(cuda, out)


# ---- what a caller can get wrong: the legal call has 5 rows, 6 input and 4 output channels ----


def fp8(*shape, dtype=E4M3):
    return zeros(*shape, dtype=reference.dtype_of(dtype))


@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            {"weight": zeros(4, 1, 3, 1, 6)},
            TypeError,
            "weight: expected dtype float8_e4m3fn or float8_e5m2, got float32",
        ),
        ({"out": zeros(5, 4, dtype=np.int32)}, TypeError, "out: expected dtype float32, float16, bfloat16, float8"),
        ({"scale_out": zeros()}, ValueError, "scale_out: expected None, since out is float32, not float8"),
        ({"out": fp8(5, 4), "scale_out": zeros(5)}, ValueError, r"scale_out: expected \(\) or \(1,\) to match out"),
        (
            {"out": fp8(5, 4), "bias": fp8(4)},
            TypeError,
            "bias: expected dtype float32, float16 or bfloat16, got float8",
        ),
        (
            {"out": fp8(5, 4), "residual": zeros(5, 4, dtype=np.float16)},
            TypeError,
            "residual: expected dtype float32 to match bias, got float16",
        ),
        ({"bias": fp8(4)}, TypeError, "bias: expected dtype float32 to match out, got float8_e4m3fn"),
        ({"bias": zeros(4, dtype=np.float16)}, TypeError, "bias: expected dtype float32 to match out"),
        ({"residual": fp8(5, 4)}, TypeError, "residual: expected dtype float32 to match out"),
        ({"scale_feats": zeros(4)}, ValueError, r"scale_feats: expected \(\) or \(5,\) to match feats, got \(4,\)"),
        ({"scale_feats": zeros(5, 1)}, ValueError, r"scale_feats: expected \(\) or \(5,\)"),
        ({"scale_feats": zeros(5, dtype=np.float16)}, TypeError, "scale_feats: expected dtype float32"),
        ({"scale_weight": zeros(5)}, ValueError, r"scale_weight: expected \(\) or \(4,\) to match weight, got \(5,\)"),
        ({"scale_weight": 0.5}, TypeError, "scale_weight"),
        ({"dtype_feats": E5M2}, TypeError, "feats: expected dtype float8_e5m2, got float8_e4m3fn"),
        ({"dtype_weight": "float32"}, TypeError, "weight: expected dtype float32, got float8_e4m3fn"),
        ({"dtype_weight": "int4"}, ValueError, "dtype_weight"),
    ],
)
def test_wrong_arguments(backend, change, error, message):
    legal = {"feats": fp8(5, 6), "weight": fp8(4, 1, 3, 1, 6)}
    call(backend, "conv_forward", **legal)
    with pytest.raises(error, match=message):
        call(backend, "conv_forward", **legal | change)


@pytest.mark.parametrize("name, shape", [("scale_feats", (5,)), ("scale_weight", ())])
def test_scales_are_for_fp8(name, shape):
    with pytest.raises(ValueError, match=f"{name}: expected None, since .* is float32, not float8"):
        call(Host(), "conv_forward", **{name: zeros(*shape)})


def test_dtypes_of_the_public_function():
    p = Problem(50, 16, 8)
    nmap = flexgemm.neighbor_map(p.coords, p.shape)
    scaled = {"neighbor_map": nmap, "scale_out": np.ones((), np.float32)}
    assert flexgemm.submanifold_conv3d(p.feats, p.weight, **scaled).dtype == reference.dtype_of(E4M3)
    assert flexgemm.submanifold_conv3d(p.feats, p.weight, **scaled, out_dtype=E5M2).dtype == reference.dtype_of(E5M2)
    out = np.empty((50, 8), np.uint8)
    assert flexgemm.submanifold_conv3d(p.feats, p.weight, **scaled, out=out, dtype_out=E5M2) is out
    flexgemm.submanifold_conv3d(p.feats, p.weight, **scaled, out=out)
    assert_same_bits(out.view(reference.dtype_of(E4M3)), flexgemm.submanifold_conv3d(p.feats, p.weight, **scaled))
    with pytest.raises(TypeError, match="out: expected a NumPy array"):
        flexgemm.submanifold_conv3d(p.feats, p.weight, neighbor_map=nmap, out=[1])
    with pytest.raises(ValueError, match="out_dtype: expected float8_e4m3fn or float8_e5m2, got float16"):
        flexgemm.submanifold_conv3d(p.feats, p.weight, **scaled, out_dtype="float16")
    with pytest.raises(ValueError, match="out_dtype: expected float32 or float16 or bfloat16, got float8_e4m3fn"):
        flexgemm.submanifold_conv3d(p.feats, p.weight, neighbor_map=nmap, out_dtype=E4M3)
    with pytest.raises(TypeError, match="out: expected out_dtype float16, got float32"):
        out = np.empty((50, 8), np.float32)
        flexgemm.submanifold_conv3d(p.feats, p.weight, neighbor_map=nmap, out=out, out_dtype="float16")
    with pytest.raises(ValueError, match="out_dtype: expected None, since feats are float32, not FP8"):
        floats = p.feats.astype(np.float32), p.weight.astype(np.float32)
        flexgemm.submanifold_conv3d(*floats, neighbor_map=nmap, out_dtype="float16")


@pytest.mark.parametrize("name", ["dtype_weight", "dtype_out"])
def test_dtypes_behind_what_is_not_uint8(name):
    p = Problem(50, 16, 8)
    floats = p.feats.astype(np.float32), p.weight.astype(np.float32)
    with pytest.raises(ValueError, match=f"{name}: expected None, since feats are float32, not FP8"):
        flexgemm.submanifold_conv3d(*floats, neighbor_map=flexgemm.neighbor_map(p.coords, p.shape), **{name: E4M3})


@pytest.mark.parametrize("name", ["scale_feats", "scale_weight"])
def test_scales_of_feats_that_are_not_fp8(name):
    p = Problem(50, 16, 8)
    nmap = flexgemm.neighbor_map(p.coords, p.shape)
    floats = p.feats.astype(np.float32), p.weight.astype(np.float32)
    with pytest.raises(ValueError, match=f"{name}: expected None, since feats are float32, not FP8"):
        flexgemm.submanifold_conv3d(*floats, neighbor_map=nmap, **{name: np.ones((), np.float32)})
    with pytest.raises(TypeError, match="scale"):
        flexgemm.submanifold_conv3d(p.feats, p.weight, neighbor_map=nmap, scale=p.scale_feats)


def test_a_scale_for_all_may_have_one_element(backend):
    p = Problem(70, 16, 24, kinds=("tensor", "tensor"))
    out = p.run(backend)
    p.scale_feats, p.scale_weight = p.scale_feats.reshape(1), p.scale_weight.reshape(1)
    assert_same_bits(p.run(backend), out)


@every_out
def test_an_output_in_fp8_takes_a_residual_alone(backend, out_dtype):
    p = Problem(70, 16, 24, out_dtype=out_dtype)
    how = {"residual": True, "out_dtype": E4M3, "scale_out": np.asarray(0.5, np.float32)}
    alone = p.run(backend, bias=False, **how)
    p.bias = np.zeros_like(p.bias)
    assert_same_bits(alone, p.run(backend, **how))
