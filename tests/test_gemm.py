"""Dense and m-grouped products against float64 products of the dequantised inputs."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
import scenes
import verdicts
from products import (
    DENSE,
    E4M3,
    E5M2,
    FP8_PAIRS,
    OUT_DTYPES,
    PLAIN,
    USUAL,
    block_scales,
    judge,
    operands,
    plan_of,
    scale_of,
)
from reference import dtype_of, f64
from verdicts import assert_gemm_rows, assert_same_bits

import flexgemm
from flexgemm import _C

M = [0, 1, 16, 63, 64, 65, 129, 300]
N = [1, 7, 16, 33, 64, 97, 129, 256]
K = [0, 1, 5, 16, 17, 100, 127, 129, 576, 2880]

fp8_pairs = pytest.mark.parametrize("dtypes", FP8_PAIRS, ids="-".join)
out_dtypes = pytest.mark.parametrize("out_dtype", OUT_DTYPES)
layouts = pytest.mark.parametrize("pad, offset", [(0, 0), (0, 1), (1, 0), (3, 2), (16, 0), (64, 16)])
multiprocessors = pytest.mark.parametrize("sms", [None, 1], ids=["all", "one"])  # one: by large tiles from 65 rows on


def check_dense(backend, m, n, k, dtypes=(E4M3, E4M3), out_dtype="bfloat16", precision="ieee", **layout):
    _, a, b = operands(m, n, k, *dtypes)
    out = guarded.gemm(backend, a, b, out_dtype, precision=precision, **layout)
    judge(backend, out, reference.gemm(a, b), dtypes[0], out_dtype, precision)


# ---- dense ----


@multiprocessors
@out_dtypes
@pytest.mark.parametrize("k", [16, 576])
@pytest.mark.parametrize("m", M)
def test_fp8_row_counts(backend, m, k, out_dtype, sms):
    with guarded.multiprocessors(sms):
        check_dense(backend, m, 97, k, out_dtype=out_dtype)


@out_dtypes
@pytest.mark.parametrize("m", [16, 65])
@pytest.mark.parametrize("n", N)
def test_fp8_column_counts(backend, n, m, out_dtype):
    check_dense(backend, m, n, 576, out_dtype=out_dtype)


@pytest.mark.parametrize("n, k", [(97, 1168), (300, 4112)])  # the latter deep enough for clusters that share it
@pytest.mark.parametrize("scales", ["none", "row", "block"])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), ("bfloat16", "bfloat16")], ids="-".join)
@pytest.mark.parametrize("m", [1, 7, 8, 9, 16, 17, 24, 25, 32, 33, 64, 65, 128])
def test_few_rows(backend, m, n, k, scales, dtypes):
    if scales == "block" and dtypes[0] == "bfloat16":
        pytest.skip("scales of blocks are for FP8")
    rng, a, b = operands(m, n, k, *dtypes)
    how = {"bias": rng.standard_normal(n).astype(np.float32)}
    if scales == "block":
        how |= block_scales(rng, m, n, k)
    else:
        how |= {"scale_a": scale_of(rng, scales, m), "scale_b": scale_of(rng, scales, n)}
    out = guarded.gemm(backend, a, b, "float32", **how)
    judge(backend, out, reference.gemm(a, b, **how), dtypes[0], "float32")


@pytest.mark.parametrize("n, k", [(304, 1168), (1032, 576), (320, 4112)])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("m", [1, 9, 24, 32, 33, 64, 65, 128])
def test_few_rows_of_whole_16_byte_chunks(backend, m, n, k, out_dtype):
    rng, a, b = operands(m, n, k, E4M3, E4M3)
    how = {"scale_a": scale_of(rng, "row", m), "scale_b": scale_of(rng, "row", n)}
    how["bias"] = rng.standard_normal(n).astype(np.float32)
    out = guarded.gemm(backend, a, b, out_dtype, **how)
    judge(backend, out, reference.gemm(a, b, **how), E4M3, out_dtype)


# Multiprocessors and (n, k) where the kernel for few rows takes 128 rows of weights to a tile.
@pytest.mark.parametrize("sms, n, k, split_k", [(2, 248, 528, 1), (2, 1032, 272, 1), (7, 120, 6160, 7)])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), ("bfloat16", "bfloat16")], ids="-".join)
@pytest.mark.parametrize("m, most", [(1, 8), (16, 16), (20, 24), (32, 32), (33, 64), (64, 64)])
def test_few_rows_by_128_rows_of_weights(backend, m, most, dtypes, sms, n, k, split_k):
    if dtypes[0] != E4M3:
        k //= 2  # a step is 128 bytes of any type
    plan = _C.plan_gemm_sm90(m=m, n=n, k=k, groups=1, dtype=dtypes[0], num_sms=sms, tiles=DENSE)
    assert [plan[key] for key in ("block_m", "block_n", "few_rows", "split_k")] == [most, 128, 1, split_k]
    rng, a, b = operands(m, n, k, *dtypes)
    how = {"scale_a": scale_of(rng, "row", m), "scale_b": scale_of(rng, "row", n)}
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, "bfloat16", **how)
    judge(backend, out, reference.gemm(a, b, **how), dtypes[0], "bfloat16")


@pytest.mark.parametrize("dtypes, k", [((E4M3, E4M3), 6160), (("bfloat16", "bfloat16"), 3080)])
def test_equal_rows_come_out_equal(backend, dtypes, k):
    """Of blocks that share K each adds up some of the rows, and all of them in the same order."""
    m, n, sms = 64, 120, 7
    assert _C.plan_gemm_sm90(m=m, n=n, k=k, groups=1, dtype=dtypes[0], num_sms=sms, tiles=DENSE)["split_k"] == sms
    _, a, b = operands(m, n, k, *dtypes)
    a[:] = a[0]
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, "float32")
    assert_same_bits(out, np.broadcast_to(out[0], out.shape))


# Multiprocessors, (m, n, k), and of the plan for fp8: block_m, block_n, few_rows, some_rows, split_k.
SOME_ROWS = {
    "two rows of tiles": (132, (144, 200, 528), (128, 64, 1, 0, 1)),
    "two rows of tiles that share K": (132, (200, 520, 4112), (128, 64, 1, 0, 6)),
    "one row of tiles": (4, (120, 248, 4112), (128, 64, 1, 0, 1)),
    "cut evenly": (2, (260, 712, 2064), (144, 256, 0, 1, 1)),
    "cut evenly, one row of tiles": (2, (140, 712, 1040), (144, 256, 0, 1, 1)),
    "cut evenly, several tiles to a block": (2, (144, 696, 2064), (144, 256, 0, 1, 1)),
    "large": (1, (129, 97, 576), (128, 128, 0, 0, 1)),
    "large, several tiles to a block": (1, (300, 264, 528), (128, 176, 0, 0, 1)),
}


@pytest.mark.parametrize("sms, shape, tile", SOME_ROWS.values(), ids=SOME_ROWS)
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), ("bfloat16", "bfloat16")], ids="-".join)
@pytest.mark.parametrize("out_dtype, pad", [("bfloat16", 0), ("float16", 1), ("float32", 0)])
def test_some_rows(backend, sms, shape, tile, dtypes, out_dtype, pad):
    """By the kernels for few rows, for groups of some rows, and for many."""
    for asked in (DENSE, DENSE | USUAL):
        plan = plan_of(sms, *shape, 1, asked)
        assert tuple(plan[key] for key in ("block_m", "block_n", "few_rows", "some_rows", "split_k")) == tile
    rng, a, b = operands(*shape, *dtypes)
    how = {"scale_a": scale_of(rng, "row", shape[0]), "scale_b": scale_of(rng, "row", shape[1])}
    how["bias"] = rng.standard_normal(shape[1]).astype(np.float32)
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, out_dtype, pad=pad, **how)
    judge(backend, out, reference.gemm(a, b, **how), dtypes[0], out_dtype)


@pytest.mark.parametrize("sms, shape, tile", SOME_ROWS.values(), ids=SOME_ROWS)
def test_some_rows_are_added(backend, sms, shape, tile):
    rng, a, b = operands(*shape, E4M3, E4M3)
    before = rng.standard_normal(shape[:2]).astype(np.float32)
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, "float32", accumulate=True, initial=before)
    judge(backend, out, before + reference.gemm(a, b), E4M3, "float32")


@fp8_pairs
@pytest.mark.parametrize("k", K)
def test_fp8_depths(backend, k, dtypes):
    check_dense(backend, 65, 97, k, dtypes, "float32")


@fp8_pairs
@out_dtypes
@layouts
def test_fp8_layouts(backend, pad, offset, out_dtype, dtypes):
    check_dense(backend, 65, 70, 144, dtypes, out_dtype, pad=pad, offset=offset)


@pytest.mark.parametrize("dtype, precision", PLAIN)
@pytest.mark.parametrize("m, n, k", [(m, 65, 100) for m in M] + [(65, n, 64) for n in N] + [(65, 97, k) for k in K])
def test_plain_dtypes(backend, m, n, k, dtype, precision):
    check_dense(backend, m, n, k, (dtype, dtype), dtype, precision)


@pytest.mark.parametrize("dtype, precision", PLAIN)
@out_dtypes
@layouts
def test_plain_layouts(backend, pad, offset, out_dtype, dtype, precision):
    check_dense(backend, 65, 70, 72, (dtype, dtype), out_dtype, precision, pad=pad, offset=offset)


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), ("float16", "float16"), ("float32", "float32")])
@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("shifted", ["a", "b", "out"])
def test_any_one_matrix_off_alignment(backend, shifted, pad, dtypes):
    """A fast path that looks at one pointer or pitch and trusts the others would fault or read its neighbour."""
    _, a, b = operands(65, 96, 192, *dtypes)
    call = guarded.Call(backend, offset=1, pad=pad)
    out = call.run(
        "gemm",
        call.give(a, strided=shifted == "a"),
        call.give(b, strided=shifted == "b"),
        call.take((65, 96), "float32", strided=shifted == "out"),
    )
    judge(backend, out, reference.gemm(a, b), dtypes[0], "float32")


@pytest.mark.parametrize("dtype, precision", PLAIN)
def test_plain_deep_products_accumulate_in_float32(backend, dtype, precision):
    check_dense(backend, 64, 128, 7168, (dtype, dtype), "float32", precision)


def test_wide_and_deep(backend):
    check_dense(backend, 5, 1100, 7203, out_dtype="float32")


def test_no_columns(backend):
    check_dense(backend, 65, 0, 64)
    check_dense(backend, 0, 0, 0)


@pytest.mark.parametrize("name", [E4M3, E5M2])
def test_every_encoding_is_decoded(backend, name):
    """Column 0 of A walks through all 256 bytes; one times it must come back exactly, NaN and infinities included."""
    a = np.zeros((256, 32), np.uint8)
    a[:, 0] = np.arange(256)
    a = a.view(dtype_of(name))
    one = np.zeros((64, 32), dtype_of(name))
    one[:, 0] = 1
    expected = np.broadcast_to(f64(a[:, :1]), (256, 64))
    np.testing.assert_array_equal(guarded.gemm(backend, a, one, "float32"), expected)
    np.testing.assert_array_equal(guarded.gemm(backend, one, a, "float32"), expected.T)


# ---- accuracy ----


@fp8_pairs
@pytest.mark.parametrize("k", [7168, 7203, 16384])
def test_fp8_deep_products(backend, k, dtypes):
    _, a, b = operands(64, 128, k, *dtypes)
    ref = reference.gemm(a, b)
    assert verdicts.gemm_diff(guarded.gemm(backend, a, b, "float32"), ref).max() < 3e-8
    assert verdicts.gemm_diff(guarded.gemm(backend, a, b, "bfloat16"), ref).max() < 3e-6


@pytest.mark.parametrize("name", [E4M3, E5M2])
def test_fp8_sums_of_one_sign_are_not_biased(backend, name):
    rng = np.random.default_rng(3)
    a, b = (scenes.values(rng, (s, 7168), name, one_sign=True) for s in (64, 128))
    ref = reference.gemm(a, b)
    ratio = f64(guarded.gemm(backend, a, b, "float32")) / ref
    assert abs(ratio.mean() - 1) < 2e-3
    assert abs(ratio - 1).max() < 2e-3


def hopper_accumulator(a, b, promote_every, step=32):
    """A model of an FP8 tensor core: a step's products and the accumulator are aligned to their largest exponent and
    cut to 13 fraction bits before they are added. promote_every moves the sum to a float64 one."""
    total = np.zeros((len(a), len(b)))
    partial = np.zeros_like(total)
    for k in range(0, a.shape[1], step):
        terms = a[:, None, k : k + step] * b[None, :, k : k + step]
        terms = np.concatenate([terms, partial[..., None]], axis=-1)
        quantum = 2.0 ** (np.frexp(np.abs(terms).max(axis=-1, keepdims=True))[1] - 1 - 13)
        partial = (np.trunc(terms / quantum) * quantum).sum(axis=-1)
        if promote_every and (k + step) % promote_every == 0:
            total, partial = total + partial, np.zeros_like(total)
    return total + partial


def test_the_criteria_see_a_missing_promotion():
    """So that the limits above cannot quietly become ones that any kernel meets."""
    rng = np.random.default_rng(4)
    a, b = (f64(scenes.values(rng, (s, 7168), E4M3)) for s in (4, 96))
    diff = {p: verdicts.gemm_diff(hopper_accumulator(a, b, p), a @ b.T).mean() for p in (128, 512, None)}
    assert diff[128] < 3e-8 < diff[512] < diff[None]
    a, b = np.abs(a), np.abs(b)
    bias = {p: abs((hopper_accumulator(a, b, p) / (a @ b.T)).mean() - 1) for p in (128, 512, None)}
    assert bias[128] < 2e-3 < bias[512] < bias[None]


# ---- scales and bias ----


@pytest.mark.parametrize("kind_b", ["none", "tensor", "row"])
@pytest.mark.parametrize("kind_a", ["none", "tensor", "row"])
@pytest.mark.parametrize("bias_dtype", [None, "float32", "out"])
@pytest.mark.parametrize(
    "m, n, k, sms", [(65, 97, 144, None), (129, 70, 33, None), (129, 70, 33, 1), (16, 64, 0, None)]
)
def test_scales_and_bias(backend, m, n, k, sms, bias_dtype, kind_a, kind_b):
    rng, a, b = operands(m, n, k, E4M3, E5M2)
    scale_a, scale_b = scale_of(rng, kind_a, m), scale_of(rng, kind_b, n)
    for out_dtype in OUT_DTYPES:
        bias = None
        if bias_dtype:
            bias = rng.standard_normal(n).astype(dtype_of(out_dtype if bias_dtype == "out" else bias_dtype))
        how = {"scale_a": scale_a, "scale_b": scale_b, "bias": bias}
        with guarded.multiprocessors(sms):
            out = guarded.gemm(backend, a, b, out_dtype, **how)
        judge(backend, out, reference.gemm(a, b, **how), E4M3, out_dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_plain_dtypes_take_scales_and_bias(backend, dtype):
    rng, a, b = operands(65, 97, 64, dtype, dtype)
    how = {
        "scale_a": scale_of(rng, "row", 65),
        "scale_b": scale_of(rng, "tensor", 97),
        "bias": np.arange(97, dtype="f4"),
    }
    out = guarded.gemm(backend, a, b, "float32", **how)
    judge(backend, out, reference.gemm(a, b, **how), dtype, "float32")


@pytest.mark.parametrize("bias_dtype", ["float32", "bfloat16"])
def test_no_depth_gives_the_bias_exactly(backend, bias_dtype):
    rng, a, b = operands(65, 97, 0, E4M3, E4M3)
    bias = rng.standard_normal(97).astype(dtype_of(bias_dtype))
    out = guarded.gemm(backend, a, b, "bfloat16", bias=bias, scale_a=scale_of(rng, "row", 65))
    assert_same_bits(out, np.broadcast_to(bias.astype(dtype_of("bfloat16")), out.shape))
    assert not guarded.gemm(backend, a, b, "bfloat16").any()


def test_output_overflows_to_infinity_as_a_conversion_does(backend):
    a, b = np.full((16, 64), 448, dtype_of(E4M3)), np.full((64, 64), 448, dtype_of(E4M3))
    assert np.isposinf(f64(guarded.gemm(backend, a, b, "float16"))).all()


@pytest.mark.parametrize("m", [5, 65, 300])
def test_true_float32_is_infinite_only_where_products_are(backend, m):
    """The product of two of the factors is the largest number. Tensor cores multiply their high and low parts, but not
    the low ones with each other: those have different signs here, and without them the sum is infinite."""
    _, a, b = operands(m, 97, 40, "float32", "float32")
    a[::4, 3], factor = float.fromhex("0x1.ee6128p63"), float.fromhex("0x1.091fcep64")
    b[::5, 3], b[1::5, 3], b[2::5, 3] = factor, -factor, 2 * factor
    with np.errstate(over="ignore"):
        expected = reference.gemm(a, b).astype(np.float32)
    largest = np.finfo(np.float32).max
    assert (expected[::4, ::5] == largest).all()
    assert (expected[::4, 1::5] == -largest).all()
    assert np.isposinf(expected[::4, 2::5]).all()
    np.testing.assert_allclose(guarded.gemm(backend, a, b, "float32"), expected, rtol=1e-5, atol=1e-4)


# ---- uint8 with the dtype told ----


@fp8_pairs
def test_bytes_with_an_explicit_dtype(backend, dtypes):
    _, a, b = operands(65, 97, 64, *dtypes)
    told = {"dtype_a": dtypes[0], "dtype_b": dtypes[1]}
    typed = guarded.gemm(backend, a, b, "float32")
    for x, y in ((a.view(np.uint8), b.view(np.uint8)), (a, b.view(np.uint8)), (a.view(np.uint8), b)):
        assert_same_bits(guarded.gemm(backend, x, y, "float32", **told), typed)
    with pytest.raises((TypeError, ValueError), match=r"\ba\b"):
        guarded.gemm(backend, a.view(np.uint8), b, "float32")


# ---- m-grouped ----


# ---- the public functions ----


@pytest.mark.parametrize("dtypes", [*FP8_PAIRS, *((d, d) for d in ("float16", "bfloat16", "float32"))], ids="-".join)
def test_public_dense(backend, dtypes):
    rng, a, b = operands(65, 97, 144, *dtypes)
    how = {
        "scale_a": scale_of(rng, "row", 65),
        "scale_b": scale_of(rng, "tensor", 97),
        "bias": rng.standard_normal(97).astype(np.float32),
    }
    ref = reference.gemm(a, b, **how)
    given = {name: backend.array(array) for name, array in how.items()}
    x, y = backend.array(a), backend.array(b)
    for out_dtype in OUT_DTYPES:
        out = backend.numpy(flexgemm.gemm_nt(x, y, out_dtype=out_dtype, **given))
        assert out.dtype == dtype_of(out_dtype)
        judge(backend, out, ref, dtypes[0], out_dtype)
    mine = backend.array(np.full((65, 97), np.nan, np.float32))
    assert flexgemm.gemm_nt(x, y, out=mine, **given) is mine
    judge(backend, backend.numpy(mine), ref, dtypes[0], "float32")


def test_public_bytes(backend):
    _, a, b = operands(65, 97, 64, E4M3, E5M2)
    x, y = backend.array(a.view(np.uint8)), backend.array(b.view(np.uint8))
    out = flexgemm.gemm_nt(x, y, out_dtype="float32", dtype_a=E4M3, dtype_b=E5M2)
    judge(backend, backend.numpy(out), reference.gemm(a, b), E4M3, "float32")


@pytest.mark.parametrize("m, n, k", [(16, 129, 7168), (300, 97, 576)])
def test_the_same_input_gives_the_same_bits(backend, m, n, k):
    for dtype in (E4M3, "float16", "float32"):
        _, a, b = operands(m, n, k, dtype, dtype)
        first = guarded.gemm(backend, a, b, "float32")
        for _ in range(3):
            assert_same_bits(guarded.gemm(backend, a, b, "float32"), first)


# ---- sizes that need a GPU ----


@pytest.mark.large
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_large_products(cuda, out_dtype):
    _, a, b = operands(4096, 4096, 7168, E4M3, E4M3)
    out = cuda.numpy(flexgemm.gemm_nt(cuda.array(a), cuda.array(b), out_dtype=out_dtype))
    assert_gemm_rows(out, reference.gemm(a, b), out_dtype)


# Many tiles for 132 multiprocessors, the last ones ragged; which shape they have follows the depth, too.
TILES = [(1100, 1000), (4090, 2110), (1100, 3490), (3900, 4090)]


@pytest.mark.large
@pytest.mark.parametrize("m, n", TILES)
@pytest.mark.parametrize("k", [16, 400, 1552])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), ("bfloat16", "bfloat16")], ids="-".join)
def test_every_tile_shape(cuda, m, n, k, dtypes):
    rng, a, b = operands(m, n, k, *dtypes)
    how = {"scale_a": scale_of(rng, "row", m), "bias": rng.standard_normal(n).astype(np.float32)}
    out = guarded.gemm(cuda, a, b, "float32", **how)
    judge(cuda, out, reference.gemm(a, b, **how), dtypes[0], "float32")


@pytest.mark.large
def test_more_than_2_to_the_31_output_elements(cuda):
    _, a, b = operands(300, 64, 32, E4M3, E4M3)
    rows = 2**31 // 64 + 12345
    whole = np.tile(a, (rows // 300 + 1, 1))[:rows]
    out = cuda.numpy(flexgemm.gemm_nt(cuda.array(whole), cuda.array(b), out_dtype="bfloat16"))
    some = np.append(np.random.default_rng(0).choice(rows, 4095, replace=False), rows - 1)
    assert_gemm_rows(out[some], reference.gemm(whole[some], b), "bfloat16")
