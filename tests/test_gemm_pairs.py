"""Dense products by the Hopper kernel for many rows: its tiles of pairs of blocks, its narrower ones, and tiles whose
depth the blocks of a pair share."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
from products import BLOCKS, DENSE, block_scales, judge, operands, scale_of

from flexgemm import _C

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
outputs = pytest.mark.parametrize("out_dtype, pad", [("bfloat16", 0), ("float16", 1), ("float32", 0)])


def plan_of(sms, shape, dtype, tiles=DENSE):
    return _C.plan_gemm_sm90(**dict(zip("mnk", shape, strict=True)), groups=1, dtype=dtype, num_sms=sms, tiles=tiles)


@pytest.mark.parametrize("sms, m", [(8, 500), (4, 600)])  # of the last pair of 600 rows one block has none
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@outputs
def test_pairs_of_narrow_tiles(backend, sms, m, dtype, out_dtype, pad):
    """Which products of 16 bits have at such a depth already, FP8 at twice as much."""
    n, k = 200, 4112
    plan = plan_of(sms, (m, n, k), dtype)
    assert (plan["block_m"], plan["block_n"], plan["few_rows"], plan["some_rows"]) == (256, 128, 0, 0)
    rng, a, b = operands(m, n, k, dtype, dtype)
    how = {"scale_a": scale_of(rng, "row", m), "bias": rng.standard_normal(n).astype(np.float32)}
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, out_dtype, pad=pad, **how)
    judge(out, reference.gemm(a, b, **how), dtype, out_dtype)


# Multiprocessors, (m, n, k), tile: several whole tiles to a block; ragged ends; a last pair of which one block has no
# rows. 176 is no multiple of the columns that the epilogue stores at a time. Steps are odd: no blocks share them.
COLUMNS = {
    "192, whole": (2, (1024, 192, 2576), (256, 192)),
    "192, ragged": (6, (570, 570, 2576), (256, 192)),
    "192, half a pair": (4, (600, 380, 2576), (256, 192)),
    "176, whole": (2, (1024, 176, 5136), (256, 176)),
    "176, ragged": (6, (570, 520, 5136), (256, 176)),
    "128, whole and half a pair": (2, (600, 128, 9232), (256, 128)),
    "176, single blocks": (3, (384, 352, 2576), (128, 176)),
    "176, single blocks, ragged": (3, (300, 340, 2576), (128, 176)),
}


@pytest.mark.parametrize("sms, shape, tile", COLUMNS.values(), ids=COLUMNS)
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), ("bfloat16", "bfloat16")], ids="-".join)
@outputs
def test_widths_below_256_columns(backend, sms, shape, tile, dtypes, out_dtype, pad):
    plan = plan_of(sms, shape, dtypes[0])
    assert (plan["block_m"], plan["block_n"]) == tile
    rng, a, b = operands(*shape, *dtypes)
    how = {"scale_a": scale_of(rng, "row", shape[0]), "scale_b": scale_of(rng, "tensor", shape[1])}
    bias = rng.standard_normal(shape[1]).astype(np.float32)
    before = rng.standard_normal(shape[:2]).astype(np.float32)
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, out_dtype, pad=pad, **how)
        biased = guarded.gemm(backend, a, b, out_dtype, pad=pad, bias=bias, **how)
        added = guarded.gemm(backend, a, b, "float32", accumulate=True, initial=before)
    judge(out, reference.gemm(a, b, **how), dtypes[0], out_dtype)
    judge(biased, reference.gemm(a, b, bias=bias, **how), dtypes[0], out_dtype)
    judge(added, before + reference.gemm(a, b), dtypes[0], "float32")


# Multiprocessors, (m, n, k), columns of a tile: behind full waves or not; in the last rows both warpgroups have some,
# or one; an odd number of rows of tiles.
SHARED = {
    E4M3: {
        "128 columns": (16, (400, 200, 6144), 128),
        "176 columns": (8, (700, 264, 4096), 176),
        "176 columns, no full wave": (16, (400, 264, 5104), 176),
        "192 columns, one warpgroup": (12, (513, 520, 2048), 192),
        "192 columns, no full wave": (16, (400, 376, 5104), 192),
        "256 columns": (4, (600, 200, 3056), 256),
        "256 columns, one warpgroup": (4, (513, 200, 3056), 256),
    },
    "bfloat16": {
        "128 columns": (8, (600, 200, 3072), 128),
        "128 columns, no full wave": (8, (200, 200, 3072), 128),
        "176 columns": (8, (700, 264, 1528), 176),
        "192 columns": (8, (700, 376, 1024), 192),
        "256 columns, one warpgroup": (4, (1030, 200, 1528), 256),
    },
}
shared = pytest.mark.parametrize(
    "dtype, sms, shape, columns",
    [pytest.param(dtype, *case, id=f"{dtype}-{name}") for dtype in SHARED for name, case in SHARED[dtype].items()],
)


def check_shares(plan, columns):
    assert (plan["block_m"], plan["block_n"], plan["few_rows"], plan["split_k"]) == (256, columns, 0, 2)


@shared
@outputs
def test_pairs_that_share_the_depth(backend, dtype, sms, shape, columns, out_dtype, pad):
    check_shares(plan_of(sms, shape, dtype), columns)
    rng, a, b = operands(*shape, dtype, dtype)
    how = {"scale_a": scale_of(rng, "row", shape[0]), "scale_b": scale_of(rng, "row", shape[1])}
    how["bias"] = rng.standard_normal(shape[1]).astype(np.float32)
    with guarded.multiprocessors(sms):
        plain = guarded.gemm(backend, a, b, out_dtype, pad=pad)
        out = guarded.gemm(backend, a, b, out_dtype, pad=pad, activation="gelu", **how)
    judge(plain, reference.gemm(a, b), dtype, out_dtype)
    judge(out, reference.gemm(a, b, activation="gelu", **how), dtype, out_dtype)


@shared
def test_pairs_that_share_the_depth_add_once(backend, dtype, sms, shape, columns):
    check_shares(plan_of(sms, shape, dtype), columns)
    rng, a, b = operands(*shape, dtype, dtype)
    before = rng.standard_normal(shape[:2]).astype(np.float32)
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, "float32", accumulate=True, initial=before)
    judge(out, before + reference.gemm(a, b), dtype, "float32")


@pytest.mark.parametrize(
    "sms, shape, columns", [(16, (300, 200, 8176), 128), (10, (776, 264, 4096), 128), (4, (513, 200, 3056), 256)]
)
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E5M2)], ids="-".join)
@outputs
def test_pairs_that_share_the_depth_have_scales_of_its_blocks(backend, sms, shape, columns, dtypes, out_dtype, pad):
    check_shares(plan_of(sms, shape, dtypes[0], DENSE | BLOCKS), columns)
    rng, a, b = operands(*shape, *dtypes)
    how = block_scales(rng, *shape)
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, out_dtype, pad=pad, **how)
    judge(out, reference.gemm(a, b, **how), dtypes[0], out_dtype)
