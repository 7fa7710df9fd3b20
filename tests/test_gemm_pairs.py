"""Dense products by the Hopper kernel for many rows: its tiles of pairs of blocks, its narrower ones, and tiles whose
depth the blocks of a pair share."""

from __future__ import annotations

import guarded
import numpy as np
import products
import pytest
import reference
from products import ADDED, BLOCKS, DENSE, E4M3, E5M2, ROWS, USUAL, block_scales, judge, operands, scale_of

outputs = pytest.mark.parametrize("out_dtype, pad", [("bfloat16", 0), ("float16", 1), ("float32", 0)])


def plan_of(sms, shape, dtype, tiles=DENSE):
    return products.plan_of(sms, *shape, 1, tiles, dtype)


def all_asked(n, tiles=DENSE):
    """What products of n columns may ask, whatever their output: usual ones are whole chunks of 16 bytes."""
    asked = [tiles, tiles | ROWS]
    return asked if n % 8 else [*asked, *(tiles | USUAL for tiles in asked)]


@pytest.mark.parametrize("sms, m, n", [(2, 1300, 120), (4, 1160, 200)])  # of the last pair of 1,300 rows one has none
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@outputs
def test_pairs_of_narrow_tiles(backend, sms, m, n, dtype, out_dtype, pad):
    """Which products of 16 bits have at such a depth already, FP8 at more than twice as much."""
    k = 5648
    for asked in (DENSE, DENSE | USUAL):
        plan = plan_of(sms, (m, n, k), dtype, asked)
        assert (plan["block_m"], plan["block_n"], plan["few_rows"], plan["some_rows"]) == (256, 128, 0, 0)
    rng, a, b = operands(m, n, k, dtype, dtype)
    how = {"scale_a": scale_of(rng, "row", m), "bias": rng.standard_normal(n).astype(np.float32)}
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, out_dtype, pad=pad, **how)
    judge(backend, out, reference.gemm(a, b, **how), dtype, out_dtype)


# Multiprocessors, (m, n, k), tile: several whole tiles to a block; ragged ends; a last pair of which one block has no
# rows. 176 is no multiple of the columns that the epilogue stores at a time. Steps are odd: no blocks share them.
COLUMNS = {
    "192, whole": (2, (1024, 192, 5136), (256, 192)),
    "192, ragged": (6, (570, 570, 5136), (256, 192)),
    "192, half a pair": (4, (600, 380, 5136), (256, 192)),
    "176, whole": (2, (1024, 176, 5648), (256, 176)),
    "176, ragged": (6, (800, 350, 5904), (256, 176)),
    "128, half a pair": (2, (600, 124, 14608), (256, 128)),
    "176, single blocks": (3, (384, 352, 2576), (128, 176)),
    "176, single blocks, ragged": (3, (300, 340, 2576), (128, 176)),
}


@pytest.mark.parametrize("sms, shape, tile", COLUMNS.values(), ids=COLUMNS)
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), ("bfloat16", "bfloat16")], ids="-".join)
@outputs
def test_widths_below_256_columns(backend, sms, shape, tile, dtypes, out_dtype, pad):
    for tiles in all_asked(shape[1]):
        plan = plan_of(sms, shape, dtypes[0], tiles)
        assert (plan["block_m"], plan["block_n"]) == tile
    rng, a, b = operands(*shape, *dtypes)
    how = {"scale_a": scale_of(rng, "row", shape[0]), "scale_b": scale_of(rng, "tensor", shape[1])}
    bias = rng.standard_normal(shape[1]).astype(np.float32)
    before = rng.standard_normal(shape[:2]).astype(np.float32)
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, out_dtype, pad=pad, **how)
        biased = guarded.gemm(backend, a, b, out_dtype, pad=pad, bias=bias, **how)
        added = guarded.gemm(backend, a, b, "float32", accumulate=True, initial=before)
    judge(backend, out, reference.gemm(a, b, **how), dtypes[0], out_dtype)
    judge(backend, biased, reference.gemm(a, b, bias=bias, **how), dtypes[0], out_dtype)
    judge(backend, added, before + reference.gemm(a, b), dtypes[0], "float32")


# The same, and a last tile that has none of the second part's columns. Tiles of 96 and 224 columns are single blocks';
# the parts of 224 are 112, no multiple of the columns that the epilogue stores at a time.
ROWS_TILES = {
    "272, whole": (2, (1024, 272, 1040), (256, 272)),
    "272, ragged": (6, (570, 800, 2064), (256, 272)),
    "272, half a pair": (4, (600, 540, 5136), (256, 272)),
    "272, one part of the last columns": (6, (200, 2310, 2064), (256, 272)),
    "96, whole": (1, (384, 96, 272), (128, 96)),
    "96, ragged": (2, (300, 180, 272), (128, 96)),
    "224, whole": (1, (256, 448, 656), (128, 224)),
    "224, ragged": (2, (300, 416, 528), (128, 224)),
    "224, one part of the last columns": (2, (300, 770, 1040), (128, 224)),
}
rows_tiles = pytest.mark.parametrize("sms, shape, tile", ROWS_TILES.values(), ids=ROWS_TILES)
KINDS = [(a, b) for a in (E4M3, E5M2) for b in (E4M3, E5M2)] + [(d, d) for d in ("float16", "bfloat16")]


@rows_tiles
@pytest.mark.parametrize("dtypes", KINDS, ids="-".join)
@outputs
def test_widths_of_scaled_rows(backend, sms, shape, tile, dtypes, out_dtype, pad):
    """Whatever else there is to do has other tiles."""
    for tiles in all_asked(shape[1], DENSE | ROWS):
        plan = plan_of(sms, shape, dtypes[0], tiles)
        assert (plan["block_m"], plan["block_n"], plan["split_k"]) == (*tile, 1)
    assert plan_of(sms, shape, dtypes[0])["block_n"] not in (96, 224, 272)
    rng, a, b = operands(*shape, *dtypes)
    how = {"scale_a": scale_of(rng, "row", shape[0]), "scale_b": scale_of(rng, "tensor", shape[1])}
    with guarded.multiprocessors(sms):
        plain = guarded.gemm(backend, a, b, out_dtype, pad=pad)
        out = guarded.gemm(backend, a, b, out_dtype, pad=pad, **how)
    judge(backend, plain, reference.gemm(a, b), dtypes[0], out_dtype)
    judge(backend, out, reference.gemm(a, b, **how), dtypes[0], out_dtype)


@rows_tiles
@pytest.mark.parametrize("dtypes", KINDS, ids="-".join)
def test_widths_of_scaled_rows_that_are_added(backend, sms, shape, tile, dtypes):
    """By 224 columns, too; the ends of 272 would be long, and 96 are for few rows."""
    chosen = plan_of(sms, shape, dtypes[0], DENSE | ADDED | ROWS)["block_n"]
    assert chosen == 224 if tile[1] == 224 else chosen not in (96, 272)
    rng, a, b = operands(*shape, *dtypes)
    before = rng.standard_normal(shape[:2]).astype(np.float32)
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, "float32", accumulate=True, initial=before)
    judge(backend, out, before + reference.gemm(a, b), dtypes[0], "float32")


# Multiprocessors, (m, n, k), columns of a tile: behind full waves or not, where usual outputs have other tiles; in the
# last rows both warpgroups have some, or one; an odd number of rows of tiles.
SHARED = {
    E4M3: {
        "128 columns": (4, (1030, 124, 5104), 128),
        "128 columns, no full wave": (4, (200, 124, 8176), 128),
        "176 columns": (4, (600, 170, 5104), 176),
        "176 columns, one warpgroup": (4, (513, 170, 5104), 176),
        "192 columns": (4, (600, 178, 3312), 192),
        "192 columns, one warpgroup": (4, (513, 190, 3312), 192),
        "256 columns": (4, (600, 244, 3056), 256),
        "256 columns, one warpgroup": (4, (2049, 248, 1520), 256),
    },
    "bfloat16": {
        "128 columns": (6, (770, 124, 1912), 128),
        "128 columns, no full wave": (8, (200, 196, 3072), 128),
        "176 columns": (4, (700, 176, 2176), 176),
        "192 columns": (4, (600, 190, 2176), 192),
        "256 columns, one warpgroup": (4, (2054, 248, 1272), 256),
    },
}
shared = pytest.mark.parametrize(
    "dtype, sms, shape, columns",
    [pytest.param(dtype, *case, id=f"{dtype}-{name}") for dtype in SHARED for name, case in SHARED[dtype].items()],
)


def check_shares(columns, *question, tiles=DENSE):
    for asked in all_asked(question[1][1], tiles):
        plan = plan_of(*question, asked)
        assert (plan["block_m"], plan["block_n"], plan["few_rows"], plan["split_k"]) == (256, columns, 0, 2)


@shared
@outputs
def test_pairs_that_share_the_depth(backend, dtype, sms, shape, columns, out_dtype, pad):
    check_shares(columns, sms, shape, dtype)
    rng, a, b = operands(*shape, dtype, dtype)
    how = {"scale_a": scale_of(rng, "row", shape[0]), "scale_b": scale_of(rng, "row", shape[1])}
    how["bias"] = rng.standard_normal(shape[1]).astype(np.float32)
    with guarded.multiprocessors(sms):
        plain = guarded.gemm(backend, a, b, out_dtype, pad=pad)
        out = guarded.gemm(backend, a, b, out_dtype, pad=pad, activation="gelu", **how)
    judge(backend, plain, reference.gemm(a, b), dtype, out_dtype)
    judge(backend, out, reference.gemm(a, b, activation="gelu", **how), dtype, out_dtype)


@shared
def test_pairs_that_share_the_depth_add_once(backend, dtype, sms, shape, columns):
    check_shares(columns, sms, shape, dtype)
    rng, a, b = operands(*shape, dtype, dtype)
    before = rng.standard_normal(shape[:2]).astype(np.float32)
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, "float32", accumulate=True, initial=before)
    judge(backend, out, before + reference.gemm(a, b), dtype, "float32")


@pytest.mark.parametrize(
    "sms, shape, columns", [(16, (300, 196, 8176), 128), (10, (776, 264, 4096), 128), (4, (513, 200, 3056), 256)]
)
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E5M2)], ids="-".join)
@outputs
def test_pairs_that_share_the_depth_have_scales_of_its_blocks(backend, sms, shape, columns, dtypes, out_dtype, pad):
    check_shares(columns, sms, shape, dtypes[0], tiles=DENSE | BLOCKS)
    rng, a, b = operands(*shape, *dtypes)
    how = block_scales(rng, *shape)
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, out_dtype, pad=pad, **how)
    judge(backend, out, reference.gemm(a, b, **how), dtypes[0], out_dtype)
