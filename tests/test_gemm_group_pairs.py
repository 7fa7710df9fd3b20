"""Groups of rows by pairs of blocks of the Hopper kernel for many rows: the rests of two groups make a pair."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
import scenes
from memory import poison
from products import E4M3, KEPT, MASKED, elements, judge, large_tile, offsets_of, scale_of
from reference import f64

# Rows of groups. A block takes 128 of them. Five groups leave a rest, of which the last has a pair alone; groups of few
# blocks; three of the 32 groups that a warp looks at at once leave one, and none behind them.
SIZES = {
    "odd ends": [300, 100, 0, 257, 128, 500, 1],
    "one block or two": [128, 250, 256, 5, 0, 0, 129],
    "33 groups": [300, 128, 0, 400] + [0] * 27 + [257, 200],
    "no rows": [0] * 7,
}
DTYPES = {"fp8": (E4M3, "bfloat16"), "fp8-float32": (E4M3, "float32"), "bf16": ("bfloat16", "bfloat16")}
SHAPES = [(4, 400, 4112, 256), (2, 320, 4112, 176)]  # multiprocessors, N, bytes of K, and columns of a tile
EXPECTED_M = 512  # rows of a group, as far as the plan knows

shapes = pytest.mark.parametrize("shape", SHAPES, ids=["256 columns", "176 columns"])
sizes_of_groups = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
dtypes = pytest.mark.parametrize("dtype, out_dtype", DTYPES.values(), ids=DTYPES)


def check(backend, layout, sizes, shape, dtype, out_dtype, weights=None, scales="none"):
    """Rows behind those of a group, and of groups whose weight does not exist, are neither read nor written."""
    sms, n, k_bytes, columns = shape
    masked, groups, k = layout == "m_grouped_masked", len(sizes), elements(k_bytes, dtype)
    tile = large_tile(sms, groups * EXPECTED_M, n, k, groups, MASKED if masked else 0, dtype)
    assert tile == (256, columns)

    rng = np.random.default_rng(groups)
    lead, rows = ((groups,), max(sizes) + 9) if masked else ((), groups * EXPECTED_M)
    a, b = scenes.values(rng, (*lead, rows, k), dtype), scenes.values(rng, (groups, n, k), dtype)
    scale_a, scale_b = scale_of(rng, scales, rows, lead), scale_of(rng, scales, n, (groups,))
    ref, written = np.zeros((*lead, rows, n)), np.zeros((*lead, rows), bool)
    for g, (size, end) in enumerate(zip(sizes, np.cumsum(sizes), strict=True)):
        own = (g, slice(0, size)) if masked else slice(end - size, end)
        weight = g if weights is None else weights[g]
        if 0 <= weight < groups:
            of_rows, of_columns = (None, None) if scales == "none" else (scale_a[own], scale_b[weight])
            ref[own], written[own] = reference.gemm(a[own], b[weight], of_rows, of_columns), True
    a[~written] = np.nan
    initial = poison(ref.shape, out_dtype)
    initial[~written] = KEPT

    how = {"layout": layout, "scale_a": scale_a, "scale_b": scale_b, "initial": initial}
    if masked:
        how |= {"masked_m": np.array(sizes, np.int32), "expected_m": EXPECTED_M}
    else:
        how |= {"offsets": offsets_of(sizes, "ends", "int32")}
    if weights is not None:
        how |= {"weight_indices": np.array(weights, np.int32)}
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, out_dtype, shape=ref.shape, **how)
    assert (f64(out[~written]) == KEPT).all()
    judge(backend, out[written], ref[written], dtype, out_dtype)


@sizes_of_groups
@shapes
@dtypes
@pytest.mark.parametrize("scales", ["none", "row"])
@pytest.mark.parametrize("layout", ["m_grouped", "m_grouped_masked"])
def test_groups(backend, layout, sizes, shape, dtype, out_dtype, scales):
    check(backend, layout, sizes, shape, dtype, out_dtype, scales=scales)


@dtypes
@pytest.mark.parametrize("weights", [[0, 7, 2, 1, -1, 0, 5], [-1, 0, 1, 7, 2, 7, 7], [7] * 7])
@pytest.mark.parametrize("name", ["odd ends", "one block or two"])
def test_weights_that_do_not_exist(cuda, name, weights, dtype, out_dtype):
    """One block of a pair may have one that does, and the other none."""
    check(cuda, "m_grouped", SIZES[name], SHAPES[0], dtype, out_dtype, weights=weights)
