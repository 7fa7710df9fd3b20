"""What a product goes through after it is summed: block scales, alpha, activations, SwiGLU, FP8 output, promotion."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
import scenes
import verdicts
from memory import hopper_kernels
from products import (
    BLOCKS,
    DENSE,
    E4M3,
    E5M2,
    EQUAL,
    FP8,
    MASKED,
    OUT_DTYPES,
    PACKED,
    block_scales,
    cut_of,
    judge,
    judge_float8,
    judge_output,
    offsets_of,
    operands,
    tile_of,
    width,
)
from reference import dtype_of, f64
from verdicts import ROW_CUTS, assert_gemm_rows, float8_cut

import flexgemm

ACTIVATIONS = [None, "relu", "silu", "gelu", "swiglu"]
PROMOTIONS = (128, 512, None)

activations = pytest.mark.parametrize("activation", ACTIVATIONS)
all_dtypes = pytest.mark.parametrize(
    "dtypes", [FP8, (E5M2, E4M3), *((d, d) for d in ("float16", "float32"))], ids="-".join
)


# ---- block scales ----


@pytest.mark.parametrize("dtypes", [(a, b) for a in (E4M3, E5M2) for b in (E4M3, E5M2)], ids="-".join)
@pytest.mark.parametrize(
    "m, n, k", [(65, 97, 144), (129, 300, 400), (16, 129, 16), (1, 64, 1000), (7, 70, 33), (40, 130, 2064)]
)
def test_block_scales(backend, m, n, k, dtypes):
    rng, a, b = operands(m, n, k, *dtypes)
    how = block_scales(rng, m, n, k)
    for out_dtype in OUT_DTYPES:
        out = guarded.gemm(backend, a, b, out_dtype, **how)
        judge(backend, out, reference.gemm(a, b, **how), dtypes[0], out_dtype, cut=float8_cut(backend.name))


SHAPES = {
    "two rows of tiles": (132, 144, 200, 528, (128, 64)),
    "two rows of tiles that share K": (132, 200, 520, 4112, (128, 64)),
    "cut evenly": (4, 144, 264, 1040, (144, 256)),
    "128 rows": (1, 300, 400, 272, (128, 128)),
    "one row of tiles": (1, 100, 700, 272, (128, 128)),
    "pairs of blocks": (2, 500, 400, 4112, (256, 256)),
    "last columns of one block": (2, 512, 640, 4112, (256, 256)),
}


@pytest.mark.parametrize("sms, m, n, k, tile", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "out_dtype, activation", [("float32", None), ("bfloat16", None), ("float32", "swiglu"), ("bfloat16", "swiglu")]
)
def test_block_scales_in_every_tile(backend, sms, m, n, k, tile, out_dtype, activation):
    """Which the plan takes for so few multiprocessors. Columns of pairs are of two blocks, the last ones too or of
    one."""
    assert tile_of(sms, m, n, k, 1, DENSE | BLOCKS) == tile
    rng, a, b = operands(m, n, k, *FP8)
    how = block_scales(rng, m, n, k) | {"activation": activation}
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, out_dtype, shape=(m, width(n, activation)), **how)
    ref, cut = reference.gemm(a, b, **how), cut_of(backend, FP8, activation)
    if out_dtype == "bfloat16":  # of SwiGLU, a product of two sums, few elements may make a row
        judge_output(backend, out, ref, E4M3, out_dtype, None, activation, cut)
    else:
        judge(backend, out, ref, E4M3, out_dtype, cut=cut)


GROUPS = {  # the deep ones have more steps than a ring has stages
    "few rows": (132, [3, 0, 30, 9, 1], 200, 528, (96, 256)),
    "few rows, deep": (132, [3, 0, 30, 9, 1], 200, 2576, (96, 256)),
    "some rows": (132, [3, 0, 70, 129], 200, 2576, (96, 256)),
    "taller tiles": (12, [90, 160, 131, 128, 132], 200, 528, (160, 256)),
    "taller tiles, deep": (4, [90, 160, 97, 124], 200, 2576, (160, 256)),
    "few rows of one multiprocessor": (1, [16, 0, 9, 1], 200, 2576, (32, 128)),
    "128 rows": (1, [300, 0, 129, 171], 400, 272, (128, 128)),
    "pairs": (2, [300, 0, 129, 171], 400, 2576, (256, 256)),
}


@pytest.mark.parametrize("sms, sizes, n, k, tile", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("dtypes, out_dtype", [((E4M3, E4M3), "bfloat16"), ((E4M3, E5M2), "float32"),
                                               ((E5M2, E4M3), "float32"), ((E5M2, E5M2), "float16")])  # fmt: skip
def test_block_scales_of_groups(backend, sms, sizes, n, k, tile, dtypes, out_dtype):
    rows, groups = sum(sizes) + 9, len(sizes)
    assert tile_of(sms, rows, n, k, groups, BLOCKS) == tile
    rng, a, b = operands(rows, n, k, *dtypes, groups=groups)
    how = block_scales(rng, rows, n, k, lead_b=(groups,))
    offsets = offsets_of(sizes, "bounds", "int32", first=5)
    ref, written = reference.grouped_gemm(a, b, offsets, **how)
    initial = np.full((rows, n), 7, dtype_of(out_dtype))
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, out_dtype, offsets=offsets, initial=initial, **how)
    judge(backend, out[written], ref[written], dtypes[0], out_dtype, cut=float8_cut(backend.name))
    assert (f64(out[~written]) == 7).all()


# Multiprocessors, M, N, K, groups, rows of some groups, tile.
PACKED_GROUPS = {
    "pairs that share no group": (2, 768, 400, 4112, 3, {0: (0, 383), 2: (384, 512), 1: (640, 701)}, (256, 256)),
    "few rows": (132, 256, 100, 2576, 8, {5: (0, 64), 2: (128, 131)}, (64, 128)),
    "few rows, many columns": (132, 256, 300, 2576, 8, {5: (0, 100), 2: (128, 131)}, (64, 128)),
}


@pytest.mark.parametrize("sms, m, n, k, groups, rows, tile", PACKED_GROUPS.values(), ids=PACKED_GROUPS)
def test_block_scales_of_contiguous_groups(backend, sms, m, n, k, groups, rows, tile):
    """Tiles of 64 rows, too, are of pairs of blocks, of which the second may have no columns."""
    assert tile_of(sms, m, n, k, groups, BLOCKS | PACKED) == tile
    m_indices = np.full(m, -1)
    for g, (begin, end) in rows.items():
        m_indices[begin:end] = g
    rng, a, b = operands(m, n, k, *FP8, groups=groups)
    how = block_scales(rng, m, n, k, lead_b=(groups,))
    grouping = {"layout": "m_grouped_contiguous", "m_indices": m_indices.astype(np.int32)}
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, "float32", initial=np.full((m, n), 7, np.float32), **grouping, **how)
    for g, (begin, end) in rows.items():
        ref = reference.gemm(a[begin:end], b[g], how["scale_a"][begin:end], how["scale_b"][g])
        assert_gemm_rows(out[begin:end], ref, "float32", cut=float8_cut(backend.name))
    assert (out[m_indices < 0] == 7).all()


@pytest.mark.parametrize("sms, tile", [(132, (96, 256)), (1, (128, 128))])
def test_block_scales_of_segments(backend, sms, tile):
    """The scales of a segment's weights are those of the weights, not of the segment."""
    sizes, weights, n, k = [0, 1, 7, 64, 129, 3], np.array([2, 2, 0, 3, 1, 0], np.int64), 200, 528
    rows = sum(sizes)
    assert tile_of(sms, rows, n, k, len(sizes), BLOCKS) == tile
    rng, x, w = operands(rows, n, k, *FP8, groups=4)
    how = block_scales(rng, rows, n, k, lead_b=(4,))
    offsets = offsets_of(sizes, "bounds", "int32")
    ref, _ = reference.grouped_gemm(x, w[weights], offsets, how["scale_a"], how["scale_b"][weights])
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, x, w, "float32", offsets=offsets, weight_indices=weights, shape=(rows, n), **how)
    assert_gemm_rows(out, ref, "float32", cut=float8_cut(backend.name))


EQUAL_GROUPS = {
    "batched": ("batched", EQUAL, 132, 65, 130, 272, (128, 128)),
    "batched, few rows": ("batched", EQUAL, 132, 40, 300, 1168, (96, 256)),
    "batched, pairs": ("batched", EQUAL, 2, 500, 400, 4112, (256, 256)),
    "masked, some rows": ("m_grouped_masked", MASKED, 132, 64, 300, 1168, (96, 256)),
    "masked, pairs": ("m_grouped_masked", MASKED, 2, 500, 400, 4112, (256, 256)),
}


@pytest.mark.parametrize("layout, tiles, sms, m, n, k, tile", EQUAL_GROUPS.values(), ids=EQUAL_GROUPS)
def test_block_scales_of_equal_groups(backend, layout, tiles, sms, m, n, k, tile):
    """Masked ones have all of their rows, none, or some."""
    groups = 3
    assert tile_of(sms, groups * m, n, k, groups, BLOCKS | tiles) == tile
    rng = np.random.default_rng(0)
    a, b = (scenes.values(rng, (groups, rows, k), E4M3) for rows in (m, n))
    how = block_scales(rng, m, n, k, (groups,), (groups,))
    sizes = [m, 0, m - 28] if tiles == MASKED else [m] * groups
    if tiles == MASKED:
        how["masked_m"] = np.array(sizes, np.int32)
    initial = np.full((groups, m, n), 7, np.float32)
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, "float32", layout=layout, shape=initial.shape, initial=initial, **how)
    for i, rows in enumerate(sizes):
        expected = reference.gemm(a[i, :rows], b[i], how["scale_a"][i, :rows], how["scale_b"][i])
        assert_gemm_rows(out[i, :rows], expected, "float32", cut=float8_cut(backend.name))
        assert (out[i, rows:] == 7).all()


@pytest.mark.parametrize("dtypes", [FP8, ("float16", "float16")], ids="-".join)
def test_block_scales_come_in_pairs_and_with_float8(backend, dtypes):
    rng, a, b = operands(65, 97, 144, *dtypes)
    how = block_scales(rng, 65, 97, 144)
    for name in how:
        with pytest.raises(ValueError, match="scale_a"):
            guarded.gemm(backend, a, b, "float32", **(how if dtypes != FP8 else {name: how[name]}))


# ---- alpha, activations ----


def reaching(a, activation):
    """A factor that brings sums to where an activation bends; of SwiGLU both columns."""
    return 1.0 if activation is None else 2.0 / np.sqrt(a.shape[1])


@all_dtypes
@activations
@pytest.mark.parametrize(
    "m, n, k, sms", [(65, 98, 144, None), (129, 256, 33, None), (129, 256, 33, 1), (16, 600, 80, None)]
)
def test_activations(backend, m, n, k, sms, activation, dtypes):
    rng = np.random.default_rng(0)
    a, b = scenes.values(rng, (m, k), dtypes[0]), scenes.values(rng, (n, k), dtypes[1])
    alpha = reaching(a, activation)
    bias = rng.standard_normal(n).astype(np.float32)
    cut = cut_of(backend, dtypes, activation)
    ref = reference.gemm(a, b, bias=bias, alpha=alpha, activation=activation)
    for out_dtype in OUT_DTYPES:
        with guarded.multiprocessors(sms):  # one: large tiles
            out = guarded.gemm(backend, a, b, out_dtype, shape=(m, width(n, activation)), alpha=alpha, bias=bias,
                               activation=activation)  # fmt: skip
        if out_dtype == "float32":
            verdicts.assert_rows(out, ref, max(1e-4, ROW_CUTS * cut))
        else:
            judge(backend, out, ref, dtypes[0], out_dtype, cut=cut)


@activations
def test_no_depth_gives_the_activated_bias(backend, activation):
    _, a, b = operands(65, 98, 0, *FP8)
    bias = np.linspace(-8, 8, 98).astype(np.float32)
    expected = reference.activated(f64(bias)[None], activation)
    out = guarded.gemm(backend, a, b, "float32", bias=bias, shape=(65, width(98, activation)), activation=activation)
    np.testing.assert_allclose(out, np.broadcast_to(expected, out.shape), rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "swiglu"])
def test_activations_far_from_zero(backend, activation):
    """What overflows inside an activation does not spoil its result."""
    one = np.zeros((1, 16), dtype_of("float32"))
    bias = np.array([-1e30, 3, -200, 3, -89, 3, 200, 3, 1e30, 3], np.float32)
    out = guarded.gemm(backend, one, np.zeros((10, 16), np.float32), "float32", bias=bias,
                       shape=(1, width(10, activation)), activation=activation)  # fmt: skip
    ref = reference.activated(f64(bias)[None], activation)
    np.testing.assert_allclose(out, ref, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("dtypes", [FP8, ("bfloat16", "bfloat16")], ids="-".join)
def test_swiglu_of_groups(backend, dtypes):
    """The layer that it is for: gate and up of a mixture of experts, interleaved by the helper."""
    sizes, hidden, k = [3, 0, 70, 129], 66, 144
    rows = sum(sizes)
    rng = np.random.default_rng(0)
    x = scenes.values(rng, (rows, k), dtypes[0])
    gate, up = (scenes.values(rng, (len(sizes), hidden, k), dtypes[1]) for _ in range(2))
    offsets = np.cumsum(sizes).astype(np.int32)
    weight = flexgemm.interleave_gate_up(np.concatenate([gate, up], axis=1))
    ref = np.concatenate([
        reference.activated(0.1 * f64(x[lo:hi]) @ f64(gate[g]).T, "silu") * (0.1 * f64(x[lo:hi]) @ f64(up[g]).T)
        for g, (lo, hi) in enumerate(reference.group_bounds(offsets, len(sizes)))
    ])  # fmt: skip
    out = flexgemm.m_grouped_gemm_nt(*map(backend.array, (x, weight, offsets)), alpha=0.1, activation="swiglu",
                                     out_dtype="float32")  # fmt: skip
    verdicts.assert_rows(backend.numpy(out), ref, max(1e-4, ROW_CUTS * cut_of(backend, dtypes, "swiglu")))


def test_interleaving():
    x = np.arange(24).reshape(2, 6, 2)
    np.testing.assert_array_equal(flexgemm.interleave_gate_up(x), x[:, [0, 3, 1, 4, 2, 5]])
    np.testing.assert_array_equal(flexgemm.interleave_gate_up(np.arange(4), axis=-1), [0, 2, 1, 3])
    for wrong in ((x, x.ndim), (x, -x.ndim - 1), (np.zeros(()), -1)):
        with pytest.raises(ValueError, match="axis: expected one of the"):
            flexgemm.interleave_gate_up(*wrong)
    with pytest.raises(ValueError, match="x"):
        flexgemm.interleave_gate_up(np.zeros((3, 2)))
    with pytest.raises(TypeError, match="^x: expected an array, got list"):
        flexgemm.interleave_gate_up([[1, 2]])


def test_swiglu_needs_pairs_of_columns(backend):
    _, a, b = operands(5, 7, 16, *FP8)
    with pytest.raises(ValueError, match="b: expected an even N"):
        flexgemm.gemm_nt(backend.array(a), backend.array(b), activation="swiglu")
    with pytest.raises(ValueError, match="activation"):
        flexgemm.gemm_nt(backend.array(a), backend.array(b), activation="tanh")


# ---- float8 output ----


@pytest.mark.parametrize("out_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dtypes", [FP8, ("bfloat16", "bfloat16")], ids="-".join)
@activations
@pytest.mark.parametrize("m, n, k", [(65, 98, 144), (16, 600, 80)])
def test_float8_output(backend, m, n, k, activation, dtypes, out_dtype):
    """Each element is the exact quotient rounded once, or a neighbour of it where the sum was on the edge."""
    rng = np.random.default_rng(0)
    a, b = scenes.values(rng, (m, k), dtypes[0]), scenes.values(rng, (n, k), dtypes[1])
    scale_out = np.asarray(0.02, np.float32)
    ref = reference.gemm(a, b, alpha=0.3, activation=activation) / f64(scale_out)
    out = guarded.gemm(backend, a, b, out_dtype, alpha=0.3, scale_out=scale_out, shape=ref.shape,
                       activation=activation)  # fmt: skip
    judge_float8(out, ref, out_dtype, cut_of(backend, dtypes, activation))
    assert (np.abs(ref) > reference.FP8_MAX[out_dtype]).any() == (out_dtype == E4M3)  # saturation is part of the test


@pytest.mark.parametrize("m", [16, 100, 300, 700])
def test_an_output_scale_of_zero_saturates(backend, m):
    """As the quotient by it does, however the rows are multiplied."""
    _, a, b = operands(m, 256, 256, *FP8)
    ref = reference.gemm(a, b)
    none, scales = np.zeros((), np.float32), np.ones(m, np.float32)
    out = f64(guarded.gemm(backend, a, b, E4M3, scale_a=scales, scale_out=none, shape=ref.shape))
    counts = np.abs(ref) > 1e-3 * np.abs(ref).max()
    np.testing.assert_array_equal(out[counts], 448 * np.sign(ref[counts]))
    assert counts.mean() > 0.9


@pytest.mark.parametrize("of_b", ["tensor", "row"])
@pytest.mark.parametrize("of_a", ["tensor", "row"])
@pytest.mark.parametrize("m", [16, 100, 300, 700])
def test_factors_are_multiplied_in_one_order(backend, m, of_a, of_b):
    """scale_a * (alpha * scale_b), whichever kernel it is: in any other this product would be infinite."""
    _, a, b = operands(m, 256, 256, *FP8)
    scale_a, scale_b = (
        np.full(shape, factor, np.float32)
        for shape, factor in ((m if of_a == "row" else (), 2.0**100), (256 if of_b == "row" else (), 2.0**-100))
    )
    how = {"alpha": 2.0**100, "scale_a": scale_a, "scale_b": scale_b}
    ref = reference.gemm(a, b, **how)
    assert np.abs(ref).max() < np.finfo(np.float32).max
    for out_dtype in ("float32", "bfloat16"):
        judge(backend, guarded.gemm(backend, a, b, out_dtype, shape=ref.shape, **how), ref, FP8[0], out_dtype)


def test_public_float8_output(backend):
    _, a, b = operands(65, 98, 64, *FP8)
    x, y, scale = backend.array(a), backend.array(b), backend.array(np.asarray(2.0, np.float32))
    out = backend.numpy(flexgemm.gemm_nt(x, y, scale_out=scale))
    assert out.dtype == dtype_of(E4M3)
    narrow = backend.numpy(flexgemm.gemm_nt(x, y, scale_out=scale, out_dtype=E5M2))
    assert narrow.dtype == dtype_of(E5M2)
    mine = backend.array(np.zeros((65, 98), np.uint8))
    flexgemm.gemm_nt(x, y, scale_out=scale, out=mine, dtype_out=E5M2)
    np.testing.assert_array_equal(backend.numpy(mine), narrow.view(np.uint8))
    with pytest.raises((TypeError, ValueError), match="out"):
        flexgemm.gemm_nt(x, y, scale_out=scale, out_dtype="bfloat16")


# ---- promotion ----


@pytest.mark.parametrize("promote_every", [128, 256, 512, None])
@pytest.mark.parametrize("m, n, k", [(65, 97, 1168), (129, 300, 640), (16, 64, 128), (65, 97, 0)])
def test_promotion_reaches_all_of_k(backend, m, n, k, promote_every):
    """Coarse sums may lose digits but no product: the bound is what 13 bits lose at this depth."""
    _, a, b = operands(m, n, k, *FP8)
    out = guarded.gemm(backend, a, b, "float32", promote_every=promote_every)
    assert verdicts.gemm_diff(out, reference.gemm(a, b)).max() <= (3e-8 if promote_every == 128 else 1e-5)


@pytest.mark.parametrize("promote_every", [128, 256, 512, None])
def test_block_scales_promote_at_every_block(backend, promote_every):
    rng, a, b = operands(65, 97, 1168, *FP8)
    how = block_scales(rng, 65, 97, 1168)
    out = guarded.gemm(backend, a, b, "float32", promote_every=promote_every, **how)
    assert_gemm_rows(out, reference.gemm(a, b, **how), "float32")


@pytest.mark.parametrize("wrong", [0, 64, 384, 1024])
def test_unknown_promotions_are_named(backend, wrong):
    _, a, b = operands(5, 7, 16, *FP8)
    with pytest.raises(ValueError, match="promote_every"):
        flexgemm.gemm_nt(backend.array(a), backend.array(b), promote_every=wrong)


@pytest.mark.large
@pytest.mark.parametrize("k", [7168, 16384])
def test_coarse_promotion_shows_on_hopper(cuda, k):
    """The limits of test_gemm.py see a missing promotion. Only Hopper's FP8 tensor cores have the coarse accumulator:
    the CPU and mma.sync, which is lowered to fp16 products there, sum in float32 however rarely they promote."""
    if not hopper_kernels(cuda):
        pytest.skip("needs the wgmma kernels of compute capability 9.0")
    _, a, b = operands(256, 256, k, *FP8)
    ref = reference.gemm(a, b)
    diff = {p: verdicts.gemm_diff(guarded.gemm(cuda, a, b, "float32", promote_every=p), ref).mean() for p in PROMOTIONS}
    assert diff[128] < 3e-8 < diff[512] < diff[None]
    a, b = np.abs(a), np.abs(b)
    ref = reference.gemm(a, b)
    bias = {p: abs((f64(guarded.gemm(cuda, a, b, "float32", promote_every=p)) / ref).mean() - 1) for p in PROMOTIONS}
    assert bias[128] < 2e-3 < bias[512] < bias[None]


@pytest.mark.parametrize("promote_every", [128, 256, 512])
def test_sums_are_promoted_as_often_as_asked_for(cuda, promote_every):
    """Each part of the depth is a sum of its own, from zero: added up in float32 they give the same bits."""
    if not hopper_kernels(cuda):
        pytest.skip("other kernels promote every step")
    m, n, k = 700, 392, 1040
    _, a, b = operands(m, n, k, *FP8)
    with guarded.multiprocessors(2):
        out = guarded.gemm(cuda, a, b, "float32", promote_every=promote_every)
        parts = np.zeros((m, n), np.float32)
        for first in range(0, k, promote_every):
            own = np.s_[:, first : first + promote_every]
            parts += guarded.gemm(cuda, a[own], b[own], "float32", promote_every=512)
    np.testing.assert_array_equal(out, parts)
