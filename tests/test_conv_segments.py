"""Convolution by segments of rows (kernels/segment.h): the same results as without them."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
import scenes
from reference import assert_rows, assert_same_bits

import flexgemm
from flexgemm import _C

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
        self.segments = reference.segment_records(self.map, order, tiles)
        one_sign = min(ci, co) < 32
        draw = (n, ci), (co, *kernel_size, ci), (co,), (n, co), (n, co)
        arrays = (scenes.values(rng, s, dtype, one_sign=one_sign) for s in draw)
        self.feats, self.weight, self.bias, self.grad_out, self.residual = arrays
        self.tolerance = reference.ROW_TOLERANCE[dtype]

    def check(self, backend, segments=None, **how):
        """Both passes; returns their results."""
        how = BY_SEGMENTS | how | {"segments": self.segments if segments is None else segments}
        out = guarded.conv_forward(backend, self.feats, self.weight, self.bias, self.map, **how)
        assert_rows(out, reference.conv_forward(self.feats, self.weight, self.bias, self.map), self.tolerance, "out")
        grad_feats = guarded.conv_dgrad(backend, self.grad_out, self.weight, self.map, mirrored=True, **how)
        expected = reference.conv_dgrad(self.grad_out, self.weight, self.map, len(self.feats))
        assert_rows(grad_feats, expected, self.tolerance, "grad_feats")
        return out, grad_feats


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ci, co", CHANNELS)
def test_both_passes(backend, ci, co, dtype):
    Problem(ci, co, dtype).check(backend)


@pytest.mark.parametrize("tiles", [2, 4, 8])
@pytest.mark.parametrize("n", [1, 63, 128, 129, 512, 700])
def test_segments_of_any_size(backend, tiles, n):
    Problem(64, 64, n=n, tiles=tiles).check(backend)


@pytest.mark.parametrize("kernel_size", [(1, 1, 1), (1, 3, 1), (3, 1, 3), (5, 3, 1), (1, 5, 5), (3, 3, 3)])
@pytest.mark.parametrize("ci", [16, 32, 64])
def test_any_kernel_of_up_to_32_offsets(backend, kernel_size, ci):
    Problem(ci, 32, kernel_size=kernel_size).check(backend)


def test_without_rows(backend):
    p = Problem(64, 64, n=64)
    empty, none = p.map[:, :0], p.segments[:0]
    out = guarded.conv_forward(backend, p.feats, p.weight, p.bias, empty, segments=none)
    assert out.shape == (0, 64)


@pytest.mark.parametrize("ci", [16, 32, 64, 128])
def test_a_segment_that_reads_more_rows_than_there_are_places(backend, ci):
    """Its head says 0 places in use; inputs and places are anything."""
    p = Problem(ci, 64)
    p.segments[::2, 0] = 0
    p.segments[::2, 16 + 64 * 4 :] = np.random.default_rng(0).integers(-(2**31), 2**31, p.segments[::2, 272:].shape)
    p.check(backend)


@pytest.mark.parametrize("ci", [32, 64, 128, 200])
@pytest.mark.parametrize("least", [1000, 1472])
def test_segments_that_fill_all_places(backend, ci, least):
    """64 channels of them take all room there is: the next 64 come when these are no longer needed, or, of somewhat
    smaller segments, those for which there is room come earlier."""
    p = Problem(ci, 32, n=1500, tiles=8, kernel_size=(1, 3, 1))
    counts = p.segments[:, 0]
    assert (counts > 0).all()
    counts[:] = np.maximum(counts, [least, 1472, least])
    p.check(backend)


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize("in_place", [False, True])
def test_epilogue(backend, activation, in_place):
    p = Problem(64, 72)
    how = BY_SEGMENTS | {"segments": p.segments, "residual": p.residual, "activation": activation, "in_place": in_place}
    out = guarded.conv_forward(backend, p.feats, p.weight, p.bias, p.map, **how)
    expected = reference.conv_epilogue(p.feats, p.weight, p.bias, p.map, p.residual, activation)
    assert_rows(out, expected, p.tolerance)


@pytest.mark.parametrize("pad, offset", [(0, 0), (8, 8), (1, 1), (5, 3)])
def test_strided_rows_and_any_alignment(backend, pad, offset):
    Problem(64, 64).check(backend, pad=pad, offset=offset)


def test_the_same_bits_every_time_and_in_any_segments(cuda):
    """The sums of a row are those of its offsets, one after another, wherever it is."""
    p = Problem(64, 64)
    first = p.check(cuda)
    order = np.random.default_rng(5).permutation(700).astype(np.int32)
    for tiles in 2, 4, 8:
        again = p.check(cuda, segments=reference.segment_records(p.map, order, tiles))
        for a, b in zip(first, again, strict=True):
            assert_same_bits(a, b)


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
    how = BY_SEGMENTS | {"segments": hostile}
    guarded.conv_forward(cuda, p.feats, p.weight, p.bias, p.map, **how)
    guarded.conv_dgrad(cuda, p.grad_out, p.weight, p.map, mirrored=True, **how)


@pytest.mark.parametrize("shape", [(5, 10), (2, 4832), (3, 4831)])
def test_segments_of_another_map_are_refused(backend, shape):
    p = Problem(64, 64)
    assert p.segments.shape == (3, 4832)
    with pytest.raises(ValueError, match=r"segments: expected"):
        guarded.conv_forward(backend, p.feats, p.weight, p.bias, p.map, segments=np.zeros(shape, np.int32))


# ---- layers ----


def layer(cuda, dtype, ci, co, n=5000):
    """A map, and what a call over it takes."""
    rng = np.random.default_rng(0)
    coords, shape = scenes.scene(n)
    nmap = flexgemm.neighbor_map(coords, shape, device=cuda.device)
    draw = (n, ci), (co, 3, 3, 3, ci), (n, co)
    return nmap, [scenes.values(rng, s, dtype, one_sign=True) for s in draw]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_of_few_channels_builds_segments_and_goes_by_them(cuda, dtype):
    nmap, (feats, weight, grad_out) = layer(cuda, dtype, 32, 24)
    assert nmap._segments is None
    out = flexgemm.submanifold_conv3d(feats, weight, neighbor_map=nmap)
    built = nmap.segments()
    assert built is not None
    grad_feats, _, _ = flexgemm.submanifold_conv3d_backward(grad_out, feats, weight, neighbor_map=nmap)
    assert nmap.segments() is built
    tolerance = reference.ROW_TOLERANCE[dtype]
    assert_rows(out, reference.conv_forward(feats, weight, None, nmap.map), tolerance)
    assert_rows(grad_feats, reference.conv_dgrad(grad_out, weight, nmap.map, len(feats)), tolerance)


def test_the_gradient_alone_builds_them_too(cuda):
    nmap, (feats, weight, grad_out) = layer(cuda, "float16", 64, 32)
    grad_feats, _, _ = flexgemm.submanifold_conv3d_backward(
        grad_out, feats, weight, neighbor_map=nmap, needs_grad=(True, False, False)
    )
    assert nmap._segments is not None
    assert_rows(grad_feats, reference.conv_dgrad(grad_out, weight, nmap.map, len(feats)), 2e-3)


@pytest.mark.parametrize("dtype, ci, co, how", [
    ("float32", 32, 32, {}),
    ("float16", 7, 32, {}),
    ("float16", 32, 32, {"groups": 2}),
    ("float16", 32, 32, {"groups": 32}),
])  # fmt: skip
def test_other_layers_build_none(cuda, dtype, ci, co, how):
    nmap, (feats, weight, _) = layer(cuda, dtype, ci, co, n=1100)
    weight = np.ascontiguousarray(weight[..., : ci // how.get("groups", 1)])
    flexgemm.submanifold_conv3d(feats, weight, neighbor_map=nmap, **how)
    assert nmap._segments is None


def test_the_plan():
    def tiles(rows, ci, co, segment_tiles=8, **how):
        asked = {"rows": rows, "ci": ci, "co": co, "v": 27, "dtype": "float16", "num_sms": 132}
        asked |= {"compute_capability": 90, "groups": (1,), "segment_tiles": segment_tiles} | how
        return _C.plan_conv(**asked)["segment_tiles"]

    assert tiles(4_113_056, 64, 64) == tiles(1_026_536, 128, 128) == tiles(65_931, 32, 32) == 8
    assert tiles(4_113_056, 64, 64, segment_tiles=0) == 0
    assert tiles(64_160, 512, 512) == 8
    assert tiles(15_192, 1024, 1024, segment_tiles=2) == 0
    assert tiles(65_931, 32, 32, dtype="float32", precision="tf32") == 0
    assert tiles(65_931, 32, 32, compute_capability=89) == 0
    assert tiles(65_931, 32, 32, algorithm="implicit_gemm") == 0
