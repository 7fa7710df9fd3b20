"""What large tiles can make of their sums, for every tile: the last rows and columns of each lack some."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
import verdicts
from products import ADDED, DENSE, E4M3, E5M2, check_output, cut_of, elements, epilogue_of, large_tile, operands, width

FP8, BF16 = (E4M3, E4M3), ("bfloat16", "bfloat16")

# Multiprocessors, (M, N, bytes of K) and the tile that the plan then takes.
TILES = {
    (FP8, 2, (300, 160, 272)): (128, 128),
    (FP8, 1, (300, 160, 528)): (128, 176),
    (FP8, 1, (300, 184, 272)): (128, 192),
    (FP8, 1, (300, 248, 528)): (128, 256),
    (FP8, 2, (300, 160, 6672)): (256, 176),
    (FP8, 2, (500, 544, 4112)): (256, 192),
    (FP8, 2, (500, 248, 4112)): (256, 256),
    (BF16, 1, (300, 224, 144)): (128, 128),
    (BF16, 1, (300, 160, 272)): (128, 176),
    (BF16, 1, (300, 544, 272)): (128, 192),
    (BF16, 1, (300, 248, 1040)): (128, 256),
    (BF16, 2, (600, 120, 11296)): (256, 128),
    (BF16, 2, (300, 160, 6160)): (256, 176),
    (BF16, 2, (500, 544, 4112)): (256, 192),
    (BF16, 2, (500, 248, 6160)): (256, 256),
}
all_tiles = pytest.mark.parametrize(
    "dtypes, sms, shape", TILES, ids=[f"{d[0]}-{tile[0]}x{tile[1]}" for (d, _, _), tile in TILES.items()]
)

# Scales, bias, activation, dtype of the output.
OUTPUTS = [
    ("row", None, None, "float16"),
    ("row", "float32", None, "float32"),
    ("none", "float16", "relu", "float16"),
    ("tensor", None, "silu", "bfloat16"),
    ("row", "bfloat16", "gelu", "bfloat16"),
    ("row", "float32", "swiglu", "bfloat16"),
    ("none", None, "swiglu", "float32"),
    ("tensor", None, None, E4M3),
    ("row", "float32", "silu", E5M2),
    ("none", None, "swiglu", E4M3),
]


def operands_of(dtypes, sms, shape, tiles):
    """Whose tile is the wanted one."""
    m, n, k_bytes = shape
    k = elements(k_bytes, dtypes[0])
    assert large_tile(sms, m, n, k, 1, tiles, dtypes[0]) == TILES[dtypes, sms, shape]
    return operands(m, n, k, *dtypes)


@pytest.mark.parametrize("scales, bias, activation, out_dtype", OUTPUTS)
@all_tiles
def test_outputs(backend, dtypes, sms, shape, scales, bias, activation, out_dtype):
    check_output(backend, *operands_of(dtypes, sms, shape, DENSE), out_dtype, scales, bias, activation, sms)


@pytest.mark.parametrize(
    "scales, bias, activation",
    [("none", None, None), ("row", None, None), ("row", "float32", "silu"), ("row", "float32", "swiglu")],
)
@pytest.mark.parametrize("n_more", [0, 2])
@all_tiles
def test_outputs_that_are_added_to(backend, dtypes, sms, shape, scales, bias, activation, n_more):
    """With rows that the copy engine can add to, and without."""
    m, n, k_bytes = shape
    if n_more == 0:
        rng, a, b = operands_of(dtypes, sms, shape, DENSE | ADDED)
    else:
        rng, a, b = operands(m, n + n_more, elements(k_bytes, dtypes[0]), *dtypes)
    how = epilogue_of(rng, a, b, scales, bias, activation)
    before = rng.standard_normal((m, width(n + n_more, activation))).astype(np.float32)
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, "float32", accumulate=True, initial=before, shape=before.shape, **how)
    verdicts.assert_rows(
        out - before, reference.gemm(a, b, **how), max(1e-4, verdicts.ROW_CUTS * cut_of(backend, dtypes, activation))
    )
