"""16-bit operands that Hopper's kernels read as they lie: a row-major B, and of many rows A in columns beside it."""

from __future__ import annotations

from itertools import pairwise

import guarded
import numpy as np
import pytest
import reference
import scenes
from memory import hopper_kernels
from products import (
    ADDED,
    ASKEW,
    COLUMNS,
    DENSE,
    E4M3,
    EQUAL,
    KEPT,
    MASKED,
    PACKED,
    ROW_MAJOR,
    ROWS,
    TALL,
    USUAL,
    contiguous,
    epilogue_of,
    judge,
    nothing_transposed,
    operands,
    plan_of,
)

from flexgemm import _C

# Multiprocessors, M, N, K, the kernel, its tile, and blocks that share the depth of those that full waves leave over.
# The last rows and columns lack some, and so may the last step of K.
MANY = {
    "128x128": (1, 264, 72, 136, ("many", 128, 128, 1)),
    "128x192": (1, 264, 136, 136, ("many", 128, 192, 1)),
    "128x256": (1, 264, 200, 264, ("many", 128, 256, 1)),
    "256x128": (8, 2056, 120, 2048, ("many", 256, 128, 2)),
    "256x256": (2, 2056, 248, 2048, ("many", 256, 256, 1)),
    "256x256 shared": (4, 2056, 240, 2048, ("many", 256, 256, 2)),
}
FEW = {  # and blocks that share the depth of each
    "8x128": (1, 1, 200, 136, ("few", 8, 128, 1)),
    "16x128": (1, 16, 200, 1032, ("few", 16, 128, 1)),
    "24x128": (1, 20, 200, 1032, ("few", 24, 128, 1)),
    "32x128": (1, 30, 200, 1032, ("few", 32, 128, 1)),
    "64x128": (1, 64, 200, 1032, ("few", 64, 128, 1)),
    "8x64": (2, 3, 328, 1032, ("few", 8, 64, 1)),
    "16x64": (2, 16, 328, 1032, ("few", 16, 64, 1)),
    "24x64 shared": (8, 20, 200, 1032, ("few", 24, 64, 2)),
    "32x64 shared": (20, 30, 200, 1544, ("few", 32, 64, 4)),
    "64x64 shared": (20, 40, 200, 1544, ("few", 64, 64, 4)),
    "128x64": (2, 116, 136, 264, ("few", 128, 64, 1)),
    "128x64 shared": (8, 116, 136, 1032, ("few", 128, 64, 2)),
    "80x64": (1, 75, 56, 136, ("few", 80, 64, 1)),
    "112x64 shared": (4, 107, 56, 520, ("few", 112, 64, 3)),
    "208x64": (2, 203, 72, 136, ("few", 208, 64, 1)),
    "80x128": (2, 139, 72, 1032, ("few", 80, 128, 1)),
    "192x128": (2, 187, 200, 264, ("few", 192, 128, 1)),
    "144x256": (2, 140, 712, 520, ("some", 144, 256, 1)),
    "160x256": (2, 150, 712, 520, ("some", 160, 256, 1)),
}
halves = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
columns = pytest.mark.parametrize("columns", ["b", "ab"])
PAD = 8  # elements between rows, which are NaNs: the copy engine asks for whole chunks of 16 bytes


@pytest.fixture
def lying(backend):
    with nothing_transposed(backend):
        yield backend


def tile_of(sms, m, n, k, groups, asked, dtype, columns):
    """The kernel, its tile and blocks that share depth, of operands with what is between their rows or columns."""
    pitches = n + PAD, (m // groups if "a" in columns else k) + PAD
    askew = ASKEW if any(pitch % 16 for pitch in pitches) else 0
    asked |= ROW_MAJOR | askew | (COLUMNS if "a" in columns else 0)
    plan = plan_of(sms, m, n, k, groups, asked, dtype)
    kernel = "few" if plan["few_rows"] else "some" if plan["some_rows"] else "many"
    return kernel, plan["block_m"], plan["block_n"], plan["split_k"]


@pytest.mark.parametrize(
    "tile, columns", [*((tile, c) for c in ("b", "ab") for tile in MANY), *((tile, "b") for tile in FEW)]
)
@halves
def test_tiles(lying, tile, dtype, columns):
    sms, m, n, k, expected = (MANY | FEW)[tile]
    assert tile_of(sms, m, n, k, 1, DENSE | ROWS | USUAL, dtype, columns) == expected
    _, a, b = operands(m, n, k, dtype, dtype)
    with guarded.multiprocessors(sms):
        out = guarded.gemm(lying, a, b, dtype, columns=columns, pad=PAD)
    judge(lying, out, reference.gemm(a, b), dtype, dtype)


@columns
@pytest.mark.parametrize(
    "sms, m, n, k, tile",
    [(1, 264, 72, 136, ("many", 128, 128)), (1, 264, 136, 136, ("many", 128, 192)),
     (1, 264, 200, 264, ("many", 128, 256)), (2, 776, 128, 1032, ("many", 256, 128)),
     (2, 520, 256, 3080, ("many", 256, 256))],
)  # fmt: skip
def test_sums_that_are_added(lying, sms, m, n, k, tile, columns):
    assert tile_of(sms, m, n, k, 1, DENSE | ADDED | ROWS, "bfloat16", columns)[:3] == tile
    rng, a, b = operands(m, n, k, "bfloat16", "bfloat16")
    before = rng.standard_normal((m, n)).astype(np.float32)
    with guarded.multiprocessors(sms):
        out = guarded.gemm(lying, a, b, "float32", accumulate=True, initial=before, columns=columns, pad=PAD)
    judge(lying, out - before, reference.gemm(a, b), "bfloat16", "float32")


@pytest.mark.parametrize("scales", ["none", "row"])
@halves
@pytest.mark.parametrize("tile", MANY | FEW)
def test_factors_of_columns(lying, tile, dtype, scales):
    sms, m, n, k, _ = (MANY | FEW)[tile]
    rng, a, b = operands(m, n, k, dtype, dtype)
    how = epilogue_of(rng, a, b, scales, "float32", None)
    with guarded.multiprocessors(sms):
        out = guarded.gemm(lying, a, b, dtype, columns="b", pad=PAD, **how)
    judge(lying, out, reference.gemm(a, b, **how), dtype, dtype)


# ---- groups of rows ----

# Layout, rows of each group, multiprocessors, N, K, what is asked of tiles, the kernel and its tile.
GROUPS = [
    *(
        (layout, sizes, 1, n, k, asked, ("many", 128, columns))
        for layout, sizes, asked in (
            ("m_grouped", [130, 0, 97, 261], 0),
            ("m_grouped_contiguous", [130, 0, 128, 200], PACKED),
            ("m_grouped_masked", [130, 0, 97, 261], MASKED),
            ("batched", [264, 264, 264, 264], EQUAL),
        )
        for n, k, columns in ((72, 136, 128), (136, 136, 192), (200, 1032, 256))
    ),
    ("m_grouped", [520, 0, 777, 261], 2, 72, 2048, 0, ("many", 256, 128)),
    ("m_grouped", [520, 0, 777, 261], 2, 392, 1032, 0, ("many", 256, 256)),
    ("m_grouped_contiguous", [130, 0, 128, 200], 2, 72, 2048, PACKED, ("many", 256, 128)),
    ("m_grouped_contiguous", [130, 0, 128, 200], 2, 200, 2048, PACKED, ("many", 256, 256)),
    ("m_grouped_masked", [130, 0, 97, 261], 2, 392, 2048, MASKED, ("many", 256, 256)),
    ("batched", [264, 264, 264, 264], 8, 72, 2048, EQUAL, ("many", 256, 128)),
    ("m_grouped", [1, 0, 7, 30], 1, 200, 1032, 0, ("few", 32, 128)),
    ("m_grouped_contiguous", [100, 0, 0, 0, 0, 0], 1, 200, 1032, PACKED, ("few", 32, 128)),
    ("m_grouped_contiguous", [100, 0, 0, 0, 0], 2, 328, 1032, PACKED, ("few", 64, 128)),
    ("m_grouped", [1, 0, 7, 64], 2, 200, 264, 0, ("some", 96, 256)),
    ("m_grouped", [70, 9], 2, 328, 264, 0, ("some", 96, 256)),
    ("m_grouped", [128, 97], 2, 200, 1032, 0, ("some", 160, 256)),
    ("m_grouped", [140, 0, 265], 6, 200, 264, 0, ("some", 192, 256)),
    ("m_grouped_masked", [166, 64], 4, 200, 1032, MASKED, ("some", 256, 256)),
    ("batched", [131, 131], 2, 200, 1032, EQUAL, ("some", 144, 256)),
]


@halves
@pytest.mark.parametrize("layout, sizes, sms, n, k, asked, tile", GROUPS)
def test_groups_of_rows(lying, layout, sizes, sms, n, k, asked, tile, dtype):
    """What lies behind the depth of one group's weights is the next group's: NaNs, where nobody multiplies by them."""
    rng, groups = np.random.default_rng(0), len(sizes)
    b = scenes.values(rng, (groups, n, k), dtype, one_sign=True)
    b[[size == 0 for size in sizes]] = np.nan
    begins, how = np.cumsum([0, *sizes]), {}
    if layout == "m_grouped":
        how["offsets"] = begins[1:].astype(np.int32)
    elif layout == "m_grouped_contiguous":
        how["m_indices"] = contiguous(sizes)
        begins = np.cumsum([0, *(-(-size // 128) * 128 for size in sizes)])
    elif layout == "m_grouped_masked":
        how["masked_m"] = np.array(sizes, np.int32)
    matrices = layout in ("m_grouped_masked", "batched")
    shape = (groups, max(sizes)) if matrices else (begins[-1] + 9 * (layout == "m_grouped"),)
    assert tile_of(sms, int(np.prod(shape)), n, k, groups, asked, dtype, "b")[:3] == tile
    a = scenes.values(rng, (*shape, k), dtype, one_sign=True)
    kept = np.full((*shape, n), KEPT, a.dtype)
    with guarded.multiprocessors(sms):
        out = guarded.gemm(
            lying, a, b, dtype, layout=layout, shape=kept.shape, columns="b", pad=PAD, initial=kept, **how
        )
    left = np.ones(shape, bool)
    for g, (size, begin) in enumerate(zip(sizes, begins, strict=False)):
        own = (g, slice(0, size)) if matrices else slice(begin, begin + size)
        left[own] = False
        if size:
            judge(lying, out[own], reference.gemm(a[own], b[g]), dtype, dtype)
    assert (reference.f64(out[left]) == KEPT).all()


# ---- groups along K, of which rows are tokens ----

TOKENS = [  # multiprocessors, M, N, tokens of each group, the tile, and that of sums that are added
    (1, 104, 72, [64, 0, 1, 130, 17, 401], (128, 128), (128, 128)),
    (1, 200, 136, [64, 0, 1, 130, 17, 401], (128, 192), (128, 192)),
    (1, 264, 456, [64, 0, 1, 130, 17, 401], (128, 256), (128, 192)),
    (2, 200, 72, [1500, 900, 17, 1801], (256, 128), (256, 128)),
    (2, 200, 392, [700, 0, 530, 901], (256, 256), (128, 256)),
]


@halves
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("sms, m, n, sizes, tile, added_tile", TOKENS)
def test_groups_of_tokens(lying, sms, m, n, sizes, tile, added_tile, accumulate, dtype):
    """They begin at any token, and those of no group are NaNs."""
    groups, first, last = len(sizes), 5, 20
    rng = np.random.default_rng(0)
    bounds = np.cumsum([first, *sizes]).astype(np.int32)
    k = int(bounds[-1]) + last
    asked = TALL | EQUAL | ASKEW | (ADDED if accumulate else 0)
    chosen = tile_of(sms, m * groups, n, -(-k // groups), groups, asked, dtype, "ab")
    assert chosen[:3] == ("many", *(added_tile if accumulate else tile))
    a, b = (scenes.values(rng, (rows, k), dtype, one_sign=True) for rows in (m, n))
    for operand in (a, b):
        operand[:, :first] = operand[:, bounds[-1] :] = np.nan
    shape = (groups, m, n)
    before = rng.standard_normal(shape).astype(np.float32) if accumulate else None
    out_dtype = "float32" if accumulate else dtype
    with guarded.multiprocessors(sms):
        out = guarded.gemm(lying, a, b, out_dtype, layout="k_grouped", offsets=bounds, shape=shape, columns="ab",
                           accumulate=accumulate, initial=before, pad=PAD)  # fmt: skip
    for g, (begin, end) in enumerate(pairwise(bounds)):
        ref = reference.gemm(a[:, begin:end], b[:, begin:end])
        judge(lying, out[g] - before[g] if accumulate else out[g], ref, dtype, out_dtype)


@columns
def test_groups_of_tokens_whose_neighbours_are_infinite(lying, columns):
    """Whatever the other operand has there; A by rows begins at whole chunks of K."""
    rng = np.random.default_rng(0)
    m, n, bounds = 136, 200, np.array([16, 40, 120, 200], np.int32)
    a, b = (scenes.values(rng, (rows, 216), "bfloat16", one_sign=True) for rows in (m, n))
    for group in range(3):
        begin, end = bounds[group : group + 2]
        own = np.zeros(216, bool)
        own[begin:end] = True
        x, y = (np.where(own, operand, np.asarray(np.inf, operand.dtype)) for operand in (a, b))
        out = guarded.gemm(lying, x, y, "float32", layout="k_grouped", offsets=bounds, shape=(3, m, n),
                           columns=columns)  # fmt: skip
        judge(lying, out[group], reference.gemm(a[:, own], b[:, own]), "bfloat16", "float32")


# ---- what is read as it lies ----


def workspace_of(backend, m, n, k, dtype="bfloat16", columns="b", *, lead_a=(), lead_b=(), shape=None,
                 out_dtype="bfloat16", **how):  # fmt: skip
    b, out = backend.empty((*lead_b, k, n), dtype), backend.empty(shape or (m, n), out_dtype)
    if "a" in columns:
        a = backend.window(backend.empty((*lead_a, k, m), dtype), (*lead_a, m, k), (*(m * k for _ in lead_a), 1, m), 0)
    else:
        a = backend.empty((*lead_a, m, k), dtype)
    return _C.gemm_workspace(a, b, out, b_row_major=True, **how)


def test_what_is_read_as_it_lies_needs_no_workspace(cuda):
    if not hopper_kernels(cuda):
        pytest.skip("no Hopper kernels")
    bias = cuda.array(np.zeros(512, np.float32))
    ends = cuda.array(np.array([300, 700, 1024], np.int32))
    for m in (1, 64, 300):
        assert workspace_of(cuda, m, 512, 1024) == 0, m
    for how in (
        {},
        {"dtype": "float16", "out_dtype": "float32"},
        {"bias": bias},
        {"columns": "ab", "out_dtype": "float32"},
        {"columns": "ab", "accumulate": True, "out_dtype": "float32"},
        {"layout": "m_grouped", "lead_b": (3,), "offsets": ends},
        {"layout": "k_grouped", "columns": "ab", "offsets": ends, "shape": (3, 1024, 512)},
        {"layout": "batched", "columns": "ab", "lead_a": (3,), "lead_b": (3,), "shape": (3, 1024, 512)},
    ):
        assert workspace_of(cuda, 1024, 512, 1024, **how) == 0, how
    assert workspace_of(cuda, 4096, 512, 1024, columns="ab") == 0


def test_what_is_transposed_has_a_workspace(cuda):
    bias = cuda.array(np.zeros(512, np.float32))
    ends = cuda.array(np.array([100, 300, 512], np.int32))
    b_bytes = 512 * 1024 * 2
    of_b = 0 if hopper_kernels(cuda) else b_bytes  # beside a transposed A
    for how, nbytes in (
        ({"dtype": E4M3}, b_bytes // 2),
        ({"dtype": "float32"}, 2 * b_bytes),
        ({"columns": "ab", "bias": bias}, 2 * b_bytes + of_b),  # beside which A in columns is not multiplied
        ({"columns": "ab", "bias": bias, "activation": "relu"}, 3 * b_bytes),
        ({"activation": "relu"}, b_bytes),
        ({"activation": "swiglu", "shape": (1024, 256)}, b_bytes),
        ({"layout": "n_grouped", "lead_a": (3,), "offsets": ends}, b_bytes),  # groups begin at any column
        ({"layout": "m_grouped", "columns": "ab", "lead_b": (3,), "offsets": ends}, 2 * b_bytes + 3 * of_b),  # or row
    ):
        assert nbytes <= workspace_of(cuda, 1024, 512, 1024, **how) < nbytes + 1024, how
    assert workspace_of(cuda, 1024, 508, 1024) >= 508 * 1024 * 2  # rows are no whole chunks
    for shape in ((8, 1024, 8192), (16, 256, 16384)):  # the kernel for few rows reads those of A by rows
        nbytes = 2 * shape[2] * (shape[0] + (0 if hopper_kernels(cuda) else shape[1]))
        assert nbytes <= workspace_of(cuda, *shape, columns="ab") < nbytes + 1024


@pytest.mark.parametrize("layout", ["dense", "batched"])
def test_one_row_of_b_whose_elements_lie_apart(backend, layout):
    lead = (3,) if layout == "batched" else ()
    rng = np.random.default_rng(0)
    a, b = (scenes.values(rng, (*lead, rows, 64), "bfloat16", one_sign=True) for rows in (5, 1))
    out = guarded.gemm(backend, a, b, "bfloat16", layout=layout, shape=(*lead, 5, 1), columns="b", pad=PAD)
    expected = reference.f64(a) @ reference.f64(b).swapaxes(-1, -2)
    judge(backend, out, expected, "bfloat16", "bfloat16")


@pytest.mark.parametrize("m, n, k", [(8, 1024, 8192), (300, 512, 1544)])
def test_a_transposed_a_beside_what_is_read_as_it_lies(backend, m, n, k):
    assert not hopper_kernels(backend) or 0 < workspace_of(backend, m, n, k, columns="ab") < 2 * n * k
    _, a, b = operands(m, n, k, "bfloat16", "bfloat16")
    judge(backend, guarded.gemm(backend, a, b, "bfloat16", columns="ab"), reference.gemm(a, b), "bfloat16", "bfloat16")


def test_a_workspace_does_not_depend_on_how_many_multiprocessors_are_used(cuda):
    for shape, columns in (((64, 128, 4096), "ab"), ((64, 128, 4096), "b"), ((1024, 512, 1024), "b")):
        anywhere = workspace_of(cuda, *shape, columns=columns)
        with guarded.multiprocessors(1):
            assert workspace_of(cuda, *shape, columns=columns) == anywhere
