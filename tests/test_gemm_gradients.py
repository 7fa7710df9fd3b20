"""Weight gradients: products that are added to the output, and groups along K."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
from memory import poison
from products import E4M3, FP8, MIXES, block_scales, judge, offsets_of, operands, scale_of

import flexgemm

SIZES = [0, 1, 7, 64, 129, 0]

all_dtypes = pytest.mark.parametrize("dtypes", MIXES, ids="-".join)
offset_forms = pytest.mark.parametrize("form", ["ends", "bounds"])
layouts = pytest.mark.parametrize("pad, offset", [(0, 0), (1, 1), (16, 16)])


@all_dtypes
@pytest.mark.parametrize("m, n", [(65, 97), (384, 513)])
def test_products_are_added_to_the_output(backend, m, n, dtypes):
    """Tiles of any backend, whole ones and the last."""
    rng, a, b = operands(m, n, 144, *dtypes)
    before = rng.standard_normal((m, n)).astype(np.float32)
    out = guarded.gemm(backend, a, b, "float32", accumulate=True, initial=before)
    judge(backend, out, before + reference.gemm(a, b), dtypes[0], "float32")


@pytest.mark.parametrize("dtypes, scales", [(FP8, "none"), (FP8, "block"), (("bfloat16", "bfloat16"), "none")])
@pytest.mark.parametrize("m, n", [(1100, 1050), (1024, 1024)])
def test_products_are_added_in_parts_of_their_depth(backend, m, n, dtypes, scales):
    """Where there are many tiles, some are added in two parts, in an order that does not change."""
    k = 528
    rng, a, b = operands(m, n, k, *dtypes)
    how = block_scales(rng, m, n, k) if scales == "block" else {}
    before = rng.standard_normal((m, n)).astype(np.float32)
    with guarded.multiprocessors(8):
        outs = [guarded.gemm(backend, a, b, "float32", accumulate=True, initial=before, **how) for _ in range(2)]
    judge(backend, outs[0], before + reference.gemm(a, b, *how.values()), dtypes[0], "float32")
    np.testing.assert_array_equal(*outs)


def check_k_grouped(backend, sizes, m, n, dtypes, form="ends", first=0, accumulate=False, **layout):
    """Each group once more with NaN all around it: what lies beside a group must not be read."""
    groups, offsets = len(sizes), offsets_of(sizes, form, "int32", first)
    k = -(-(sum(sizes) + first + 1) // 32) * 32  # rows that TMA can copy
    rng, a, b = operands(m, n, k, *dtypes)
    how = {"scale_a": scale_of(rng, "row", m, (groups,)), "scale_b": scale_of(rng, "tensor", n, (groups,))}
    # Of sums much smaller than the products', so that these keep what a difference is judged by.
    before = poison((groups, m, n), "float32")
    if accumulate:
        before = (rng.standard_normal((groups, m, n)) / 64).astype(np.float32)
    call = {"offsets": offsets, "layout": "k_grouped", "shape": (groups, m, n), "accumulate": accumulate} | how | layout
    bounds = reference.group_bounds(offsets, groups)
    whole = guarded.gemm(backend, a, b, "float32", initial=before, **call)
    for g, (begin, end) in enumerate(bounds):
        own = slice(begin, end)
        ref = reference.gemm(a[:, own], b[:, own], how["scale_a"][g], how["scale_b"][g])
        judge(backend, whole[g] - before[g] if accumulate else whole[g], ref, dtypes[0], "float32")
    for g in range(groups):
        begin, end = bounds[g]
        alone = [x.copy() for x in (a, b)]
        for x in alone:
            x[:, :begin] = x[:, end:] = np.nan
        out = guarded.gemm(backend, *alone, "float32", initial=before, **call)
        np.testing.assert_array_equal(out[g], whole[g])


@all_dtypes
@pytest.mark.parametrize("m, n", [(65, 97), (130, 64)])
def test_k_grouped(backend, m, n, dtypes):
    check_k_grouped(backend, [64, 0, 144, 129], m, n, dtypes)


@offset_forms
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("sizes", [SIZES, [16, 128, 0, 32], [1] * 9, [0, 0], [300]])
def test_k_groups_of_any_size(backend, sizes, accumulate, form):
    check_k_grouped(backend, sizes, 65, 70, FP8, form, first=3 if form == "bounds" else 0, accumulate=accumulate)


@pytest.mark.parametrize("sms", [1, 2, 3, None])
@pytest.mark.parametrize("dtype, promote_every", [("bfloat16", 128), (E4M3, None), (E4M3, 128), (E4M3, 512)])
def test_k_grouped_tiles_of_few_rows_before_others(backend, dtype, promote_every, sms):
    """Where one of two warpgroups has no rows, it goes on to the next tile: they clear what is not a group's apart."""
    sizes = [30, 31, 36, 33, 31, 29, 35, 25]
    with guarded.multiprocessors(sms):
        for first in (0, 5):
            check_k_grouped(backend, sizes, 192, 192, (dtype, dtype), first=first, promote_every=promote_every)


@pytest.mark.parametrize("dtypes", [FP8, ("bfloat16", "bfloat16")], ids="-".join)
@pytest.mark.parametrize("m, sms", [(192, 1), (520, 2)])
def test_k_groups_that_end_within_a_step_of_wide_tiles(backend, m, sms, dtypes):
    """Tiles of 256 columns look at the next step early, or begin while another one ends: what is not a group's is
    cleared when it has come. Of one step, two, and more."""
    sizes = [64, 0, 144, 130, 400, 17]
    with guarded.multiprocessors(sms):
        for first in (0, 5):
            check_k_grouped(backend, sizes, m, 256, dtypes, first=first)


@pytest.mark.parametrize("out_dtype", [E4M3, "float32"])
def test_nothing_is_added_to_scaled_outputs(backend, out_dtype):
    _, a, b = operands(3, 64, 64, E4M3, E4M3)
    how = {"scale_out": np.ones((), np.float32), "accumulate": True}
    with pytest.raises(ValueError, match="scale_out: expected None with accumulate=True"):
        guarded.gemm(backend, a, b, out_dtype, **how)


def test_offsets_along_k_are_an_array():
    x = np.ones((3, 8), np.float32)
    with pytest.raises(TypeError, match="offsets: expected a one-dimensional array, got list"):
        flexgemm.k_grouped_wgrad_gemm_nt(x, x, [4, 8])


@layouts
def test_k_grouped_strides(backend, pad, offset):
    check_k_grouped(backend, [64, 5, 144], 65, 70, ("bfloat16", "bfloat16"), pad=pad, offset=offset)


def test_public_weight_gradients_add(backend):
    _, a, b = operands(33, 70, 64, *FP8)
    x, y = backend.array(a), backend.array(b)
    once = backend.numpy(flexgemm.wgrad_gemm_nt(x, y))
    mine = backend.array(np.zeros((33, 70), np.float32))
    for _ in range(2):
        flexgemm.wgrad_gemm_nt(x, y, out=mine)
    np.testing.assert_array_equal(backend.numpy(mine), 2 * once)
    with pytest.raises(ValueError, match="out"):
        flexgemm.gemm_nt(x, y, accumulate=True)


def test_public_weight_gradients_between_bounds(backend):
    """Without an output to count them in, num_groups tells that offsets are G + 1 bounds."""
    _, a, b = operands(33, 70, 64, *FP8)
    bounds = [5, 30, 64]
    offsets = backend.array(np.array(bounds, np.int32))
    out = flexgemm.k_grouped_wgrad_gemm_nt(backend.array(a), backend.array(b), offsets, num_groups=2)
    assert tuple(out.shape) == (2, 33, 70)
    for got, begin, end in zip(backend.numpy(out), bounds[:-1], bounds[1:], strict=True):
        judge(backend, got, reference.gemm(a[:, begin:end], b[:, begin:end]), E4M3, "float32")


@pytest.mark.parametrize("dtype, own, first", [("bfloat16", 60, 8), (E4M3, 120, 16)])
def test_k_groups_whose_first_tiles_are_parted_along_k(backend, dtype, own, first):
    """Of two steps, of which the group has 120 bytes behind 16 that are not its own."""
    with guarded.multiprocessors(4):
        check_k_grouped(backend, [own, 300, 200], 600, 520, (dtype, dtype), "bounds", first=first, accumulate=True)
