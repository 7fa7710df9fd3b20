"""Sums that are added to an output in float32: in tiles of 128 columns, which are copied to shared memory and back; and
once, whatever tiles a block passes over."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
import verdicts
from products import (
    ADDED,
    ASKEW,
    DENSE,
    E4M3,
    E5M2,
    EQUAL,
    PACKED,
    ROWS,
    TALL,
    elements,
    judge,
    large_plan,
    large_tile,
    offsets_of,
    operands,
    scale_of,
)

PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2), ("bfloat16",) * 2, ("float16",) * 2]

# Multiprocessors, M, N, bytes of K, and rows of the tile. The last rows and columns lack some; a block, or a pair, has
# several tiles.
SHAPES = [(1, 700, 636, 544, 128), (3, 640, 636, 272, 128), (4, 640, 248, 288, 128), (2, 700, 640, 2064, 256)]


def askew(k_bytes):
    """What rows of so many bytes, one behind the other, ask of tiles."""
    return ASKEW if k_bytes % 32 else 0


def tile_of(*question, dtype):
    plan = large_plan(*question, dtype)
    assert (plan["split_k"], plan["adds_in_shared"]) == (1, 1)
    return plan["block_m"], plan["block_n"], plan["num_stages"]


@pytest.mark.parametrize("scales", ["none", "row of a"])
@pytest.mark.parametrize("dtypes", PAIRS, ids="-".join)
@pytest.mark.parametrize("sms, m, n, k_bytes, block_m", SHAPES)
def test_tiles_that_are_added(backend, sms, m, n, k_bytes, block_m, dtypes, scales):
    k = elements(k_bytes, dtypes[0])
    assert tile_of(sms, m, n, k, 1, DENSE | ADDED | ROWS | askew(k_bytes), dtype=dtypes[0]) == (block_m, 128, 5)
    rng, a, b = operands(m, n, k, *dtypes)
    how = {"alpha": 0.5, "scale_a": scale_of(rng, "row", m) if scales == "row of a" else None}
    before = rng.standard_normal((m, n)).astype(np.float32)
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, "float32", accumulate=True, initial=before, **how)
    judge(backend, out - before, reference.gemm(a, b, **how), dtypes[0], "float32")


@pytest.mark.parametrize("promote_every", [None, 256, 512])
def test_sums_that_are_promoted_seldom(backend, promote_every):
    m, n, k = 700, 392, 1040
    rng, a, b = operands(m, n, k, E4M3, E4M3)
    before = rng.standard_normal((m, n)).astype(np.float32)
    with guarded.multiprocessors(2):
        out = guarded.gemm(backend, a, b, "float32", accumulate=True, initial=before, promote_every=promote_every)
    verdicts.assert_rows(out - before, reference.gemm(a, b), 1e-3)


@pytest.mark.parametrize("pad", [0, 4])
@pytest.mark.parametrize("dtype", [E4M3, "bfloat16"])
@pytest.mark.parametrize(
    "sms, sizes, block_m", [(3, [150, 0, 17, 300, 1, 96], 128), (2, [500, 480, 520, 516], 256), (2, [0, 0, 40, 0], 128)]
)
def test_groups_along_k_that_are_added(backend, sms, sizes, block_m, dtype, pad):
    """Groups without any leave the output as it is. What it holds is small: float32 rounds every sum with it, and those
    of a group of one are small as well."""
    m, n, groups = 700, 636, len(sizes)
    k = -(-sum(sizes) // 32) * 32 + (16 if block_m == 256 else 0)
    tiles = TALL | EQUAL | ADDED | (askew(k) if dtype == E4M3 else ASKEW)
    tile = tile_of(sms, groups * m, n, -(-k // groups), groups, tiles, dtype=dtype)
    assert tile[1:] == (128, 5) and (tile[0] == block_m or dtype != E4M3)
    rng, a, b = operands(m, n, k, dtype, dtype)
    scale = scale_of(rng, "row", m, (groups,))
    before = (rng.standard_normal((groups, m, n)) / 64).astype(np.float32)
    offsets = offsets_of(sizes, "ends", np.int32)
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, "float32", layout="k_grouped", shape=before.shape, initial=before, pad=pad,
                           accumulate=True, offsets=offsets, scale_a=scale)  # fmt: skip
    for g, (begin, end) in enumerate(reference.group_bounds(offsets, groups)):
        if begin == end:
            np.testing.assert_array_equal(out[g], before[g])
        else:
            ref = reference.gemm(a[:, begin:end], b[:, begin:end], scale[g])
            judge(backend, out[g] - before[g], ref, dtype, "float32")


# N, bytes of K, and the tile: of a block, and of a pair of them.
WIDTHS = [(256, 128, (128, 128)), (400, 4112, (256, 256))]


def check_rows_without_weight(backend, layout, sizes, owners, width, dtype, tiles, **how):
    """Groups, of which those of the owner -1 have no weight: their rows stay as they are, and all others have their
    products added once, though blocks pass over what are no tiles of theirs."""
    n, k_bytes, tile = width
    rows, k = sum(sizes), elements(k_bytes, dtype)
    assert large_tile(4, rows, n, k, len(sizes), tiles, dtype) == tile
    rng, a, b = operands(rows, n, k, dtype, dtype, groups=len(sizes))
    before = (rng.standard_normal((rows, n)) / 64).astype(np.float32)
    with guarded.multiprocessors(4):
        out = guarded.gemm(backend, a, b, "float32", layout=layout, initial=before, accumulate=True, **how)
    ends = np.cumsum(sizes)
    for owner, begin, end in zip(owners, ends - sizes, ends, strict=True):
        if owner < 0:
            np.testing.assert_array_equal(out[begin:end], before[begin:end])
        else:
            ref = reference.gemm(a[begin:end], b[owner])
            judge(backend, out[begin:end] - before[begin:end], ref, dtype, "float32")


@pytest.mark.parametrize("dtype", [E4M3, "bfloat16"])
@pytest.mark.parametrize("width", WIDTHS, ids=["blocks", "pairs"])
@pytest.mark.parametrize("owners", [[-1, -1, -1, -1, 0, 1], [-1, 0, -1, -1, 5, -1], [2, -1, -1, -1, -1, -1]])
def test_weights_that_do_not_exist(cuda, owners, width, dtype):
    sizes = [512, 300, 512, 512, 900, 65]
    weights = np.array([len(sizes) if owner < 0 else owner for owner in owners], np.int32)
    how = {"offsets": offsets_of(sizes, "ends", np.int32), "weight_indices": weights}
    check_rows_without_weight(cuda, "m_grouped", sizes, owners, width, dtype, 0, **how)


@pytest.mark.parametrize("dtype", [E4M3, "bfloat16"])
@pytest.mark.parametrize("width", WIDTHS, ids=["blocks", "pairs"])
@pytest.mark.parametrize("owners", [[-1, -1, 0, 1], [-1, 3, -1, 1], [0, -1, -1, -1]])
def test_tiles_of_padding(backend, owners, width, dtype):
    sizes = [1024, 512, 384, 640]
    how = {"m_indices": np.repeat(np.array(owners, np.int32), sizes)}
    check_rows_without_weight(backend, "m_grouped_contiguous", sizes, owners, width, dtype, PACKED, **how)
