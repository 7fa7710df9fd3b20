"""Tiles of the Hopper kernel for few rows that fit: of usual outputs, of any number of rows, 16 apart."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
from products import (
    ADDED,
    BLOCKS,
    DENSE,
    E4M3,
    E5M2,
    FP8_PAIRS,
    ROWS,
    USUAL,
    block_scales,
    judge,
    operands,
    own_dtype,
    plan_of,
    scale_of,
    tile_of,
    width,
)

# Rows and columns of a tile; multiprocessors and (m, n, k). Rows are cut evenly, some tiles have one more; the last
# columns, and the last step of K, lack some.
TILES = {
    E4M3: {
        (80, 64): (1, (75, 56, 288)),
        (96, 64): (1, (91, 56, 288)),
        (112, 64): (1, (107, 56, 288)),
        (144, 64): (2, (283, 56, 288)),
        (160, 64): (2, (315, 56, 288)),
        (176, 64): (2, (347, 56, 288)),
        (192, 64): (2, (379, 56, 288)),
        (80, 128): (3, (233, 120, 1056)),
        (96, 128): (3, (281, 120, 1056)),
        (112, 128): (2, (219, 120, 2080)),
        (128, 128): (2, (251, 120, 2080)),
        (144, 128): (2, (283, 72, 416)),
        (160, 128): (2, (315, 120, 288)),
    },
    "bfloat16": {
        (80, 64): (1, (75, 56, 144)),
        (96, 64): (1, (91, 56, 144)),
        (112, 64): (1, (107, 56, 144)),
        (144, 64): (2, (139, 72, 144)),
        (160, 64): (2, (155, 72, 144)),
        (176, 64): (2, (171, 72, 144)),
        (192, 64): (2, (187, 72, 144)),
        (208, 64): (2, (203, 72, 144)),
        (224, 64): (2, (443, 56, 144)),
        (80, 128): (3, (233, 120, 400)),
        (96, 128): (3, (281, 120, 528)),
        (112, 128): (3, (329, 120, 1040)),
        (128, 128): (2, (251, 120, 2064)),
        (144, 128): (2, (283, 72, 144)),
        (160, 128): (2, (155, 200, 144)),
        (176, 128): (2, (347, 72, 272)),
        (192, 128): (2, (187, 200, 272)),
    },
}
KINDS = {E4M3: FP8_PAIRS, "bfloat16": [("bfloat16", "bfloat16"), ("float16", "float16")]}
every_tile = pytest.mark.parametrize(
    "dtypes, tile, sms, shape",
    [
        pytest.param(dtypes, tile, *question, id=f"{'-'.join(dtypes)}-{tile[0]}x{tile[1]}")
        for kind, tiles in TILES.items()
        for dtypes in KINDS[kind]
        for tile, question in tiles.items()
    ],
)

# Of two waves of tiles, by 128 columns one warpgroup of the last has none; and multiprocessors, (m, n, k) and how many
# blocks share the K of a tile.
TWO_WAVES = [
    (E4M3, (144, 64), 2, (521, 56, 288)),
    (E4M3, (112, 128), 3, (219, 312, 2080)),
    (E4M3, (144, 128), 2, (130, 440, 288)),
    ("bfloat16", (144, 64), 2, (521, 56, 144)),
    ("bfloat16", (144, 128), 2, (130, 312, 528)),
]
SHARED = [
    (E4M3, (80, 64), 2, (75, 56, 800), 2),
    (E4M3, (112, 64), 5, (107, 56, 2080), 5),
    (E4M3, (144, 64), 4, (283, 56, 8224), 2),
    ("bfloat16", (80, 64), 3, (75, 56, 528), 3),
    ("bfloat16", (112, 64), 4, (107, 56, 400), 2),
    ("bfloat16", (144, 64), 2, (139, 56, 6160), 2),
    ("bfloat16", (160, 64), 2, (155, 56, 6160), 2),
]


def check_tile(tile, sms, shape, dtype, split_k=1, more=0):
    for asked in (DENSE | USUAL, DENSE | USUAL | ROWS):
        plan = plan_of(sms, *shape, 1, asked | more, dtype)
        assert (plan["block_m"], plan["block_n"]) == tile
        assert (plan["few_rows"], plan["split_k"]) == (1, split_k)


def check_sums(backend, sms, shape, dtypes):
    """As they are, and with everything that a usual output may have besides."""
    m, n, _ = shape
    rng, a, b = operands(*shape, *dtypes)
    out_dtype = own_dtype(dtypes)
    how = {"scale_a": scale_of(rng, "row", m), "scale_b": scale_of(rng, "row", n), "alpha": -0.5}
    how["bias"] = rng.standard_normal(n).astype(np.float32)
    with guarded.multiprocessors(sms):
        plain = guarded.gemm(backend, a, b, out_dtype)
        out = guarded.gemm(backend, a, b, out_dtype, pad=8, **how)
    judge(backend, plain, reference.gemm(a, b), dtypes[0], out_dtype)
    judge(backend, out, reference.gemm(a, b, **how), dtypes[0], out_dtype)


@every_tile
def test_every_tile(backend, dtypes, tile, sms, shape):
    check_tile(tile, sms, shape, dtypes[0])
    check_sums(backend, sms, shape, dtypes)


@pytest.mark.parametrize("dtype, tile, sms, shape", TWO_WAVES)
def test_two_waves(backend, dtype, tile, sms, shape):
    check_tile(tile, sms, shape, dtype)
    check_sums(backend, sms, shape, (dtype, dtype))


@pytest.mark.parametrize("dtype, tile, sms, shape, split_k", SHARED)
def test_blocks_that_share_the_depth(backend, dtype, tile, sms, shape, split_k):
    check_tile(tile, sms, shape, dtype, split_k)
    check_sums(backend, sms, shape, (dtype, dtype))


@pytest.mark.parametrize("rows", [80, 96, 112])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E5M2)], ids="-".join)
def test_scales_of_blocks(backend, rows, dtypes):
    shape = rows - 5, 56, 288
    check_tile((rows, 64), 1, shape, dtypes[0], more=BLOCKS)
    rng, a, b = operands(*shape, *dtypes)
    how = block_scales(rng, *shape)
    with guarded.multiprocessors(1):
        out = guarded.gemm(backend, a, b, "bfloat16", **how)
    judge(backend, out, reference.gemm(a, b, **how), dtypes[0], "bfloat16")


# What is no usual output at the same sizes: another format, rows of no whole chunks, an activation.
UNUSUAL = {
    "float32": ("float32", {}, {}),
    "float16": ("float16", {}, {}),
    "rows apart": ("bfloat16", {"pad": 3}, {}),
    "rows askew": ("bfloat16", {"offset": 1}, {}),
    "activation": ("bfloat16", {}, {"activation": "silu"}),
    "SwiGLU": ("bfloat16", {}, {"activation": "swiglu"}),
}


@pytest.mark.parametrize("out_dtype, layout, how", UNUSUAL.values(), ids=UNUSUAL)
@pytest.mark.parametrize("dtype", [E4M3, "bfloat16"])
@pytest.mark.parametrize("tile", [(80, 64), (144, 64), (176, 64), (96, 128), (160, 128)])
def test_other_outputs_have_other_tiles(backend, tile, dtype, out_dtype, layout, how):
    sms, shape = TILES[dtype][tile]
    assert tile_of(sms, *shape, 1, DENSE, dtype) != tile
    _, a, b = operands(*shape, dtype, dtype)
    result = shape[0], width(shape[1], how.get("activation"))
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, out_dtype, shape=result, **layout, **how)
    judge(backend, out, reference.gemm(a, b, **how), dtype, out_dtype)


@pytest.mark.parametrize("dtype", [E4M3, "bfloat16"])
@pytest.mark.parametrize("tile", [(80, 64), (144, 64), (96, 128)])
def test_added_sums_have_other_tiles(backend, tile, dtype):
    sms, shape = TILES[dtype][tile]
    assert tile_of(sms, *shape, 1, DENSE | ADDED, dtype) != tile
    rng, a, b = operands(*shape, dtype, dtype)
    before = rng.standard_normal(shape[:2]).astype(np.float32)
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, "float32", accumulate=True, initial=before)
    judge(backend, out, before + reference.gemm(a, b), dtype, "float32")
