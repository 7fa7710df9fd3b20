"""Convolution by segments of rows (kernels/segment.h): the same results as without them."""

from __future__ import annotations

import guarded
import map_segments
import numpy as np
import pytest
import reference
import scenes
import verdicts
from verdicts import assert_conv_rows, assert_rows, assert_same_bits

import flexgemm
from flexgemm import _C, _segments

# Channels: those of each tile (16, 32 and 64 of them, 32 and 64 columns), and what fills them in part or is several.
CHANNELS = [(8, 8), (16, 32), (16, 40), (24, 32), (32, 64), (40, 24), (64, 32), (64, 64), (72, 136), (128, 128)]
CHANNELS += [(16, 600)]
DTYPES = ["float16", "bfloat16"]
# What takes segments even where the plan would not.
BY_SEGMENTS = {"algorithm": "masked_implicit_gemm"}


class Problem:
    def __init__(self, ci, co, dtype="float16", n=700, kernel_size=(3, 3, 3), tiles=4, most=None):
        rng = np.random.default_rng([n, ci, co])
        coords, shape = scenes.scene(n, seed=n)
        self.map = reference.neighbor_map(coords, shape, kernel_size)
        # In no order that means anything: which rows share a segment is a matter of speed.
        order = rng.permutation(n).astype(np.int32)
        self.segments = map_segments.segment_records(self.map, order, tiles)
        one_sign = min(ci, co) < 32
        draw = (n, ci), (co, *kernel_size, ci), (co,), (n, co), (n, co)
        arrays = (scenes.values(rng, s, dtype, one_sign=one_sign) for s in draw)
        self.feats, self.weight, self.bias, self.grad_out, self.residual = arrays
        self.dtype, self.tolerance = dtype, verdicts.ROW_TOLERANCE[dtype]

    def check_forward(self, backend, segments=None, **how):
        """Returns the result."""
        how = BY_SEGMENTS | how | {"segments": self.segments if segments is None else segments}
        out = guarded.conv_forward(backend, self.feats, self.weight, self.bias, self.map, **how)
        assert_conv_rows(out, reference.conv_forward(self.feats, self.weight, self.bias, self.map), self.dtype)
        return out

    def check(self, backend, segments=None, **how):
        """Both passes; returns their results."""
        out = self.check_forward(backend, segments, **how)
        how = BY_SEGMENTS | how | {"segments": self.segments if segments is None else segments}
        grad_feats = guarded.conv_dgrad(backend, self.grad_out, self.weight, self.map, mirrored=True, **how)
        expected = reference.conv_dgrad(self.grad_out, self.weight, self.map, len(self.feats))
        assert_conv_rows(grad_feats, expected, self.dtype, "grad_feats")
        return out, grad_feats

    def check_wgrad(self, backend, segments=None, outputs=("weight", "bias"), **how):
        """Returns the gradients."""
        how = BY_SEGMENTS | how | {"segments": self.segments if segments is None else segments, "outputs": outputs}
        got = guarded.conv_wgrad(backend, self.grad_out, self.feats, self.map, **how)
        got = got if isinstance(got, list) else [got]
        expected = dict(zip(("weight", "bias"), reference.conv_wgrad(self.grad_out, self.feats, self.map), strict=True))
        for gradient, name in zip(got, outputs, strict=True):
            assert_conv_rows(gradient.reshape(expected[name].shape), expected[name], self.dtype, name)
            if name == "weight":
                by_offset = (x.reshape(expected[name].shape).swapaxes(0, 1) for x in (gradient, expected[name]))
                assert_conv_rows(*by_offset, self.dtype, "weight by offset")
        return got

    def passes(self, backend, segments, nmap):
        """The results of all of them, as they are."""
        how = BY_SEGMENTS | {"segments": segments}
        yield guarded.conv_forward(backend, self.feats, self.weight, self.bias, nmap, **how)
        yield guarded.conv_dgrad(backend, self.grad_out, self.weight, nmap, mirrored=True, **how)
        yield from guarded.conv_wgrad(backend, self.grad_out, self.feats, nmap, **how)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ci, co", CHANNELS)
def test_both_passes(backend, ci, co, dtype):
    Problem(ci, co, dtype).check(backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ci, co", CHANNELS)
def test_the_weight_gradient(backend, ci, co, dtype):
    Problem(ci, co, dtype).check_wgrad(backend)


@pytest.mark.parametrize("tiles", [2, 4])
@pytest.mark.parametrize("n", [1, 63, 128, 129, 512, 700])
def test_segments_of_any_size(backend, tiles, n):
    p = Problem(64, 64, n=n, tiles=tiles)
    p.check(backend)
    p.check_wgrad(backend)


@pytest.mark.parametrize("kernel_size", [(1, 1, 1), (1, 3, 1), (3, 1, 3), (5, 3, 1), (1, 5, 5), (3, 3, 3)])
@pytest.mark.parametrize("ci", [16, 32, 64])
def test_any_kernel_of_up_to_32_offsets(backend, kernel_size, ci):
    p = Problem(ci, 32, kernel_size=kernel_size)
    p.check(backend)
    p.check_wgrad(backend)


def test_without_rows(backend):
    p = Problem(64, 64, n=64)
    empty, none = p.map[:, :0], p.segments[:0]
    out = guarded.conv_forward(backend, p.feats, p.weight, p.bias, empty, segments=none)
    assert out.shape == (0, 64)
    for gradient in guarded.conv_wgrad(backend, p.grad_out[:0], p.feats, empty, segments=none):
        assert not gradient.any()


@pytest.mark.parametrize("ci, co", [(16, 64), (32, 64), (64, 64), (128, 64), (24, 40), (72, 136)])
def test_a_segment_that_reads_more_rows_than_there_are_places(backend, ci, co):
    """Its head says 0 places in use; inputs and places are anything."""
    p = Problem(ci, co)
    p.segments[::2, 0] = 0
    p.segments[::2, 16 + 64 * 4 :] = np.random.default_rng(0).integers(-(2**31), 2**31, p.segments[::2, 272:].shape)
    p.check(backend)
    p.check_wgrad(backend)


@pytest.mark.parametrize("offsets", [(0, 13, 19), (13, 0, 5), (5, 26, 7)])
@pytest.mark.parametrize("ci, co", [(16, 32), (32, 64), (64, 64), (64, 128)])
def test_tiles_that_have_neighbours_at_one_offset_each(backend, ci, co, offsets):
    """Who has another offset passes by many tiles and has nothing to do."""
    p = Problem(ci, co, n=1100)
    tile = np.arange(1100) // 64 % 8
    offset = np.array(offsets)[np.where(tile == 0, 0, np.where(tile == 7, 2, 1))]
    p.map = np.where(np.arange(27)[:, None] == offset, np.random.default_rng(2).integers(0, 1100, 1100), -1)
    p.map = p.map.astype(np.int32)
    records = map_segments.segment_records(p.map, np.arange(1100, dtype=np.int32), 4)
    p.check_forward(backend, records)
    p.check_wgrad(backend, records)


@pytest.mark.parametrize("ci", [32, 64, 128, 200])
@pytest.mark.parametrize("least", [700, 1104])
def test_segments_that_fill_all_places(backend, ci, least):
    """64 channels of them take all room there is: the next 64 come when these are no longer needed, or, of somewhat
    smaller segments, those for which there is room come earlier."""
    p = Problem(ci, 32, n=1500, tiles=4, kernel_size=(1, 3, 1))
    counts = p.segments[:, 0]
    assert (counts > 0).all()
    counts[:] = np.maximum(counts, [least, 1104] * 3)
    p.check(backend)
    p.check_wgrad(backend)


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize("in_place", [False, True])
def test_epilogue(backend, activation, in_place):
    p = Problem(64, 72)
    how = BY_SEGMENTS | {"segments": p.segments, "residual": p.residual, "activation": activation, "in_place": in_place}
    out = guarded.conv_forward(backend, p.feats, p.weight, p.bias, p.map, **how)
    expected = reference.conv_epilogue(p.feats, p.weight, p.bias, p.map, p.residual, activation)
    assert_conv_rows(out, expected, p.dtype)


@pytest.mark.parametrize("pad, offset", [(0, 0), (8, 8), (1, 1), (5, 3)])
def test_strided_rows_and_any_alignment(backend, pad, offset):
    p = Problem(64, 64)
    p.check(backend, pad=pad, offset=offset)
    p.check_wgrad(backend, pad=pad, offset=offset)


def test_the_same_bits_every_time_and_in_any_segments(cuda):
    """The sums of a row are those of its offsets, one after another, wherever it is."""
    p = Problem(64, 64)
    first = p.check(cuda)
    order = np.random.default_rng(5).permutation(700).astype(np.int32)
    for tiles in 2, 4:
        again = p.check(cuda, segments=map_segments.segment_records(p.map, order, tiles))
        for a, b in zip(first, again, strict=True):
            assert_same_bits(a, b)


def test_the_weight_gradient_of_groups_of_channels(backend):
    p = Problem(128, 192)
    how = BY_SEGMENTS | {"segments": p.segments, "channel_groups": 2}
    grad_weight, _ = guarded.conv_wgrad(backend, p.grad_out, p.feats, p.map, **how)
    for i in range(2):
        own_out, own_in = slice(96 * i, 96 * (i + 1)), slice(64 * i, 64 * (i + 1))
        expected, _ = reference.conv_wgrad(p.grad_out[:, own_out], p.feats[:, own_in], p.map)
        assert_conv_rows(grad_weight[own_out].reshape(expected.shape), expected, p.dtype)


def test_the_weight_gradient_of_fewer_outputs_than_inputs(backend):
    p = Problem(64, 64)
    some = p.map[:, ::3]
    segments = map_segments.segment_records(some, np.arange(some.shape[1], dtype=np.int32), 2)
    grad_out = np.ascontiguousarray(p.grad_out[::3])
    grad_weight, _ = guarded.conv_wgrad(backend, grad_out, p.feats, some.copy(), segments=segments, **BY_SEGMENTS)
    expected, _ = reference.conv_wgrad(grad_out, p.feats, some)
    assert_conv_rows(grad_weight.reshape(expected.shape), expected, p.dtype)


@pytest.mark.parametrize("outputs", [("weight",), ("bias",)])
def test_one_gradient_alone(backend, outputs):
    Problem(64, 64).check_wgrad(backend, outputs=outputs)


@pytest.mark.parametrize("overflows", [False, True])
def test_the_weight_gradient_has_the_same_bits_every_time(cuda, overflows):
    p = Problem(64, 136)
    if overflows:
        p.segments[1, 0] = 0
    for first, again in zip(p.check_wgrad(cuda), p.check_wgrad(cuda), strict=True):
        assert_same_bits(first, again)


@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("ci, co", [(16, 64), (32, 32), (64, 64), (72, 136)])
def test_a_gradient_that_is_not_finite_stays_at_the_offsets_of_its_row(cuda, ci, co, overflows):
    p = Problem(ci, co)
    if overflows:
        p.segments[:, 0] = 0
    p.grad_out[[5, 40, -1], [3, 7, 11]] = [np.inf, -np.inf, np.nan]
    how = BY_SEGMENTS | {"segments": p.segments}
    grad_weight, _ = guarded.conv_wgrad(cuda, p.grad_out, p.feats, p.map, **how)
    expected, _ = reference.conv_wgrad(p.grad_out, p.feats, p.map)
    grad_weight, finite = reference.f64(grad_weight).reshape(expected.shape), np.isfinite(expected)
    assert finite[[3, 7, 11]].any() and not finite[[3, 7, 11]].all()
    np.testing.assert_array_equal(grad_weight[~finite], expected[~finite])
    assert_rows(np.where(finite, grad_weight, 0), np.where(finite, expected, 0), p.tolerance)


def test_an_input_that_is_not_finite_stays_at_the_rows_that_read_it(cuda):
    p = Problem(64, 64)
    p.feats[5] = np.nan
    out = guarded.conv_forward(cuda, p.feats, p.weight, p.bias, p.map, segments=p.segments, **BY_SEGMENTS)
    np.testing.assert_array_equal(np.isnan(out.astype("f4")).any(axis=1), (p.map == 5).any(axis=0))


@pytest.mark.parametrize("ci", [16, 32, 64, 128])
@pytest.mark.parametrize("resident", [True, False])
def test_records_out_of_range_read_and_write_nothing_outside(cuda, ci, resident):
    p = Problem(ci, 64)
    rng = np.random.default_rng(3)
    hostile = rng.integers(-(2**31), 2**31, p.segments.shape).astype(np.int32)
    hostile[:, 0] = np.where(resident, hostile[:, 0], 0)
    list(p.passes(cuda, hostile, p.map))


@pytest.mark.parametrize("n", [700, 2600])
@pytest.mark.parametrize("ci", [16, 32, 64])
def test_bits_past_the_volume_are_no_offsets(cuda, ci, n):
    """One of them in a step of its own brought weights that nobody took, to the segments behind or for ever."""
    p = Problem(ci, 64, n=n)
    none, hostile = p.segments.copy(), p.segments.copy()
    none[0, 1:5], hostile[0, 1:5] = 0, -(1 << 27)
    for got, expected in zip(p.passes(cuda, hostile, p.map), p.passes(cuda, none, p.map), strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("ci", [16, 32, 64])
def test_map_entries_out_of_range_are_no_neighbours_where_places_do_not_suffice(cuda, ci):
    p = Problem(ci, 64)
    p.segments[:, 0] = 0
    missing = p.map < 0
    hostile = p.map.copy()
    hostile[missing] = np.resize([-2, -(2**31), 700, 701, 2**31 - 1], missing.sum())
    for got, expected in zip(p.passes(cuda, p.segments, hostile), p.passes(cuda, p.segments, p.map), strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("shape", [(5, 10), (2, 4832), (3, 4831)])
def test_segments_of_another_map_are_refused(backend, shape):
    p = Problem(64, 64)
    assert p.segments.shape == (3, 4832)
    segments = np.zeros(shape, np.int32)
    with pytest.raises(ValueError, match=r"segments: expected"):
        guarded.conv_forward(backend, p.feats, p.weight, p.bias, p.map, segments=segments)
    with pytest.raises(ValueError, match=r"segments: expected"):
        guarded.conv_wgrad(backend, p.grad_out, p.feats, p.map, segments=segments)


# ---- layers ----


def layer(cuda, dtype, ci, co, n=5000):
    """A map, and what a call over it takes."""
    rng = np.random.default_rng(0)
    coords, shape = scenes.scene(n)
    nmap = flexgemm.neighbor_map(coords, shape, device=cuda.device)
    draw = (n, ci), (co, 3, 3, 3, ci), (n, co)
    return nmap, [scenes.values(rng, s, dtype, one_sign=True) for s in draw]


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_few_channels_go_by_the_segments_of_a_frozen_map(cuda, dtype):
    nmap, (feats, weight, grad_out) = layer(cuda, dtype, 32, 24)
    built = nmap.freeze().segments()
    assert built is not None
    out = flexgemm.submanifold_conv3d(feats, weight, neighbor_map=nmap)
    grad_feats, _, _ = flexgemm.submanifold_conv3d_backward(grad_out, feats, weight, neighbor_map=nmap)
    assert nmap.segments() is built
    assert_conv_rows(out, reference.conv_forward(feats, weight, None, nmap.map), dtype)
    assert_conv_rows(grad_feats, reference.conv_dgrad(grad_out, weight, nmap.map, len(feats)), dtype)


@pytest.mark.parametrize("backward", [False, True])
def test_a_map_builds_them_when_so_many_calls_pay_for_them(cuda, monkeypatch, backward):
    monkeypatch.setattr(_segments, "pay_after", lambda rows: 2 if rows == 15_000 else 0)
    nmap, (feats, weight, grad_out) = layer(cuda, "float16", 32, 32, n=15_000)
    for call in range(4):
        assert (nmap._segments.value is None) == (call < 3)
        if backward:
            got, _, _ = flexgemm.submanifold_conv3d_backward(
                grad_out, feats, weight, neighbor_map=nmap, needs_grad=(True, False, False)
            )
        else:
            got = flexgemm.submanifold_conv3d(feats, weight, neighbor_map=nmap)
    expected = (
        reference.conv_dgrad(grad_out, weight, nmap.map, len(feats))
        if backward
        else reference.conv_forward(feats, weight, None, nmap.map)
    )
    assert_conv_rows(got, expected, "float16")


@pytest.mark.parametrize(("rows", "calls"), [(4224, 144), (65_931, 11), (1_026_536, 2), (2**40, 2)])
def test_the_calls_that_pay(rows, calls):
    assert _segments.pay_after(rows) == calls


@pytest.mark.parametrize("dtype, ci, co, how", [
    ("float32", 32, 32, {}),
    ("float16", 7, 32, {}),
    ("float16", 32, 32, {"groups": 2}),
    ("float16", 32, 32, {"groups": 32}),
])  # fmt: skip
def test_other_layers_build_none(cuda, monkeypatch, dtype, ci, co, how):
    monkeypatch.setattr(_segments, "pay_after", lambda rows: 0)
    nmap, (feats, weight, _) = layer(cuda, dtype, ci, co, n=1100)
    weight = np.ascontiguousarray(weight[..., : ci // how.get("groups", 1)])
    flexgemm.submanifold_conv3d(feats, weight, neighbor_map=nmap, **how)
    assert nmap._segments.value is None


def test_the_plan():
    def tiles(rows, ci, co, segment_tiles=4, **how):
        asked = {"rows": rows, "ci": ci, "co": co, "v": 27, "dtype": "float16", "num_sms": 132}
        asked |= {"compute_capability": 90, "groups": (1,), "segment_tiles": segment_tiles} | how
        return _C.plan_conv(**asked)["segment_tiles"]

    assert tiles(4_113_056, 64, 64) == tiles(1_026_536, 128, 128) == tiles(65_931, 32, 32) == 4
    assert tiles(4_113_056, 64, 64, segment_tiles=0) == 0
    assert tiles(64_160, 512, 512) == tiles(65_931, 16, 16) == 0
    assert tiles(15_192, 1024, 1024, segment_tiles=2) == 0
    assert tiles(65_931, 32, 32, dtype="float32", precision="tf32") == 0
    assert tiles(65_931, 32, 32, compute_capability=89) == 0
    assert tiles(65_931, 32, 32, algorithm="implicit_gemm") == 0


def test_the_plan_of_the_weight_gradient():
    def plan(rows, ci, co, segment_tiles=4, **how):
        asked = {"rows": rows, "ci": ci, "co": co, "v": 27, "dtype": "float16", "num_sms": 132}
        asked |= {"compute_capability": 90, "segment_tiles": segment_tiles} | how
        return _C.plan_conv_wgrad(**asked)

    def tile(*sizes, **how):
        chosen = plan(*sizes, **how)
        return chosen["segment_tiles"] and (chosen["block_m"], chosen["block_n"])

    assert tile(4_113_056, 64, 64) == (64, 64)
    assert tile(65_931, 40, 64) == tile(1_026_536, 128, 128) == 0
    assert tile(65_931, 32, 32) == (32, 32)
    assert tile(1_026_536, 16, 32) == (32, 16)
    assert tile(4_113_056, 64, 64, segment_tiles=0) == 0
    assert tile(252_392, 256, 256) == tile(15_192, 1024, 1024, segment_tiles=2) == 0
    assert tile(252_392, 256, 256, **BY_SEGMENTS) == (128, 64)
    assert tile(65_931, 32, 32, algorithm="implicit_gemm") == 0
    assert tile(65_931, 32, 32, compute_capability=89) == 0
    assert tile(65_931, 32, 32, dtype="float32") == 0
    assert tile(65_931, 33, 32) == tile(65_931, 32, 0) == 0
    for rows, ci, co in ((1, 8, 8), (65_931, 64, 64), (252_392, 1024, 8), (4_113_056, 64, 64), (2**31 - 1, 16, 512)):
        chosen = plan(rows, ci, co, **BY_SEGMENTS)
        assert chosen["segment_tiles"] == 4
        assert chosen["split_k"] <= -(-rows // 256)  # each slice has segments,
        assert rows / chosen["split_k"] <= 2**16 + 256  # and bounds the chain of additions that are truncated
        assert chosen["workspace_bytes"] == chosen["split_k"] * 27 * ci * co * 4
