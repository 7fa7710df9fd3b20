"""Layouts of groups beyond the ragged one (test_gemm_groups.py): what is multiplied, written, and not read."""

from __future__ import annotations

from itertools import pairwise

import guarded
import numpy as np
import pytest
import reference
import scenes
from memory import Host, poison, window
from products import (
    E4M3,
    E5M2,
    FP8,
    KEPT,
    MIXES,
    PACKED,
    contiguous,
    initial_of,
    judge,
    offsets_of,
    operands,
    own_dtype,
    scale_of,
)
from reference import dtype_of, f64
from verdicts import assert_gemm_rows, assert_rows, assert_same_bits, float8_cut

import flexgemm
from flexgemm import _C

SIZES = [0, 1, 7, 64, 129, 0]

all_dtypes = pytest.mark.parametrize("dtypes", MIXES, ids="-".join)
offset_forms = pytest.mark.parametrize("form", ["ends", "bounds"])
layouts = pytest.mark.parametrize("pad, offset", [(0, 0), (1, 1), (16, 16)])


def judge_written(backend, out, ref, written, dtypes, out_dtype):
    """Rows that are written whole are judged; what is not keeps what it held."""
    assert (f64(out)[~written] == KEPT).all()
    rows = written.all(axis=-1)
    judge(backend, out[rows], ref[rows], dtypes[0], out_dtype)


def operands_of_two():
    rng = np.random.default_rng(0)
    return (scenes.values(rng, shape, E4M3) for shape in ((2, 71, 64), (2, 33, 64)))


# ---- contiguous ----


def check_contiguous(backend, m_indices, groups, n, k, dtypes, out_dtype, scales=("none", "none"), **layout):
    rows = len(m_indices)
    rng, a, b = operands(rows, n, k, *dtypes, groups=groups)
    how = {
        "scale_a": scale_of(rng, scales[0], rows),
        "scale_b": scale_of(rng, scales[1], n, (groups,)),
        "bias": rng.standard_normal((groups, n)).astype(np.float32),
    }
    ref, written = np.zeros((rows, n)), np.zeros((rows, n), bool)
    for g in range(groups):
        own = m_indices == g
        part = {name: x if x is None or x.ndim == 0 else x[own if name == "scale_a" else g] for name, x in how.items()}
        ref[own], written[own] = reference.gemm(a[own], b[g], **part), True
        if not own.any():
            b[g] = np.nan
    a[~written[:, 0]] = np.nan
    out = guarded.gemm(
        backend, a, b, out_dtype, m_indices=m_indices, layout="m_grouped_contiguous",
        initial=initial_of((rows, n), out_dtype, written), **how, **layout,
    )  # fmt: skip
    judge_written(backend, out, ref, written, dtypes, out_dtype)


@all_dtypes
@pytest.mark.parametrize("n, k", [(97, 144), (64, 33)])
def test_contiguous(backend, n, k, dtypes):
    check_contiguous(backend, contiguous([130, 0, 1, 128]), 4, n, k, dtypes, own_dtype(dtypes))


@layouts
@pytest.mark.parametrize("scales", [("none", "tensor"), ("tensor", "row"), ("row", "none")])
def test_contiguous_scales_and_strides(backend, scales, pad, offset):
    m_indices = contiguous([1, 200, 7], order=[2, 0, 1])[:-40]
    check_contiguous(backend, m_indices, 3, 70, 80, FP8, "float32", scales, pad=pad, offset=offset)


@pytest.mark.parametrize("dtypes", [FP8, ("bfloat16", "bfloat16")], ids="-".join)
@pytest.mark.parametrize("sms, n", [(2, 192), (4, 380)])
def test_contiguous_in_pairs_of_192_columns(backend, sms, n, dtypes):
    """A pair may have rows of two groups, and then copies a B for each."""
    m_indices, k = contiguous([256, 128, 0, 128, 100]), 5136
    plan = _C.plan_gemm_sm90(m=len(m_indices), n=n, k=k, groups=5, dtype=dtypes[0], num_sms=sms, tiles=PACKED)
    assert (plan["block_m"], plan["block_n"]) == (256, 192)
    with guarded.multiprocessors(sms):
        check_contiguous(backend, m_indices, 5, n, k, dtypes, own_dtype(dtypes))


@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sms", [1, 2])
def test_contiguous_groups_that_end_within_a_tile(backend, sms, out_dtype, scales):
    """A block stores 16 rows at a time and those behind one by one, while it multiplies the next tile."""
    m_indices = contiguous([48, 127, 16, 64, 80, 0, 1, 128, 100, 112])
    with guarded.multiprocessors(sms):
        check_contiguous(backend, m_indices, 10, 520, 400, FP8, out_dtype, (scales, "tensor"))


@pytest.mark.parametrize("sms", [1, 3])
@pytest.mark.parametrize("dtypes", [FP8, ("bfloat16",) * 2], ids=lambda d: d[0])
def test_contiguous_groups_far_apart(backend, sms, dtypes):
    """More tiles of padding, one after the other, than a warp looks at in one turn, in front, between and behind."""
    m_indices = np.full(128 * 112, -1, np.int32)
    for tile, rows, group in (35, 128, 2), (36, 1, 2), (71, 60, 0), (73, 128, 1), (74, 128, 1), (76, 9, 3), (78, 77, 3):
        m_indices[128 * tile : 128 * tile + rows] = group
    with guarded.multiprocessors(sms):
        check_contiguous(backend, m_indices, 4, 200, 160, dtypes, own_dtype(dtypes))
        check_contiguous(backend, m_indices, 4, 1040, 160, dtypes, own_dtype(dtypes))


def test_contiguous_without_a_valid_row(backend):
    check_contiguous(backend, np.full(200, -1, np.int32), 2, 33, 64, FP8, "bfloat16")
    check_contiguous(backend, np.zeros(0, np.int32), 2, 33, 64, FP8, "bfloat16")


@pytest.mark.parametrize("wrong", [[0, 1], [0, -1, 0], [0] * 64 + [1], [2], [-2]])
def test_contiguous_faults_raise_on_the_cpu(wrong):
    _, a, b = operands(len(wrong), 33, 64, *FP8, groups=2)
    with pytest.raises(ValueError, match="m_indices"):
        guarded.gemm(Host(), a, b, "float32", m_indices=np.array(wrong, np.int32), layout="m_grouped_contiguous")


def test_contiguous_skips_indices_of_no_group_on_the_gpu(cuda):
    m_indices = np.repeat(np.array([5, 1, -7, 2**31 - 1], np.int32), 128)
    rows = len(m_indices)
    _, a, b = operands(rows, 33, 64, *FP8, groups=2)
    initial = np.full((rows, 33), KEPT, np.float32)
    out = guarded.gemm(cuda, a, b, "float32", m_indices=m_indices, layout="m_grouped_contiguous", initial=initial)
    own = m_indices == 1
    assert (out[~own] == KEPT).all()
    assert_gemm_rows(out[own], reference.gemm(a[own], b[1]), "float32")


# ---- batched ----


@all_dtypes
@layouts
@pytest.mark.parametrize("scales", [("none", "none"), ("tensor", "row"), ("row", "tensor")])
def test_batched(backend, scales, pad, offset, dtypes):
    batch, m, n, k = 3, 65, 70, 80
    rng = np.random.default_rng(0)
    a, b = scenes.values(rng, (batch, m, k), dtypes[0]), scenes.values(rng, (batch, n, k), dtypes[1])
    how = {
        "scale_a": scale_of(rng, scales[0], m, (batch,)),
        "scale_b": scale_of(rng, scales[1], n, (batch,)),
        "bias": rng.standard_normal((batch, n)).astype(np.float32),
    }
    out_dtype = own_dtype(dtypes)
    out = guarded.gemm(backend, a, b, out_dtype, shape=(batch, m, n), layout="batched", pad=pad, offset=offset, **how)
    for i in range(batch):
        part = {name: None if x is None else x[i] for name, x in how.items()}
        judge(backend, out[i], reference.gemm(a[i], b[i], **part), dtypes[0], out_dtype)


def matrices_apart(backend, matrices, elements):
    """The memory, and the view of it that has so many elements between the matrices of a batch."""
    shape, step = matrices.shape, matrices[0].size + elements
    layout = shape, (step, shape[2], 1), 0
    flat = np.full(shape[0] * step, KEPT, matrices.dtype)
    window(flat, *layout)[...] = matrices
    base = backend.array(flat)
    return base, backend.window(base, *layout)


@pytest.mark.parametrize("apart", ["a", "b", "out"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_matrices_of_a_batch_that_begin_anywhere(backend, dtype, apart):
    """Rows of the first one are aligned, and those of the second are not."""
    rng = np.random.default_rng(0)
    a, b, out = (scenes.values(rng, shape, dtype) for shape in ((2, 65, 64), (2, 72, 64), (2, 65, 72)))
    given = [matrices_apart(backend, x, int(name == apart)) for name, x in (("a", a), ("b", b), ("out", out))]
    guarded.Call(backend).run("gemm", *(view for _, view in given), layout="batched")
    after = backend.numpy(given[-1][0]).reshape(2, -1)
    for i in range(2):
        judge(backend, after[i, : out[i].size].reshape(65, 72), reference.gemm(a[i], b[i]), dtype, dtype)
    assert (f64(after[:, out[0].size :]) == KEPT).all()


@pytest.mark.parametrize("expanded", [("a",), ("b",), ("a", "b")], ids="-".join)
@pytest.mark.parametrize("m", [5, 65, 300])
@pytest.mark.parametrize("dtypes", [FP8, ("bfloat16", "bfloat16")], ids="-".join)
@pytest.mark.parametrize("b_row_major", [False, True])
def test_one_matrix_for_all_of_a_batch(backend, b_row_major, dtypes, m, expanded):
    """Expanded to it, without copies, it gives the bits that copies give: the kernels are the same."""
    batch, n, k = 3, 72, 144
    rng = np.random.default_rng(0)

    def operand(name, shape, dtype):
        matrices = scenes.values(rng, (batch, *shape), dtype)
        if name not in expanded:
            return (backend.array(matrices),) * 2
        one = backend.array(matrices[0].reshape(-1))
        copies = backend.array(np.broadcast_to(matrices[0], matrices.shape))
        return backend.window(one, matrices.shape, (0, shape[1], 1), 0), copies

    outputs = []
    shape_b = (k, n) if b_row_major else (n, k)
    for a, b in zip(operand("a", (m, k), dtypes[0]), operand("b", shape_b, dtypes[1]), strict=True):
        out = backend.array(np.zeros((batch, m, n), dtype_of("bfloat16")))
        guarded.Call(backend).run("gemm", a, b, out, layout="batched", b_row_major=b_row_major)
        outputs.append(backend.numpy(out))
    assert_same_bits(*outputs)
    assert np.isfinite(f64(outputs[0])).all()
    assert f64(outputs[0]).any()


def test_one_matrix_is_transposed_once(cuda):
    """For all of a batch, and not at all where there is nothing to multiply."""
    one = cuda.array(np.zeros(64 * 40, dtype_of(E4M3)))

    def workspace(groups, rows):
        a, out = (cuda.array(np.zeros((groups, rows, n), dtype_of(d))) for n, d in ((64, E4M3), (40, "bfloat16")))
        b = cuda.window(one, (groups, 64, 40), (0, 40, 1), 0)
        return _C.gemm_workspace(a, b, out, layout="batched", b_row_major=True)

    assert workspace(7, 3) == workspace(1, 3) > 0
    assert workspace(7, 0) == 0


def test_a_batch_of_no_matrices_takes_no_workspace(backend):
    """However deep they are."""
    a, b = (backend.array(np.zeros((0, m, 2**40), np.float32)) for m in (16, 24))
    assert flexgemm.batched_gemm_nt(a, b).shape == (0, 16, 24)


def test_one_scale_for_all_of_a_batch(backend):
    a, b = (x[:, :33] for x in operands_of_two())
    scale = np.asarray(0.375, np.float32)
    out = guarded.gemm(backend, a, b, "float32", shape=(2, 33, 33), layout="batched", scale_a=scale, scale_b=scale)
    for i in range(2):
        assert_rows(out[i], reference.gemm(a[i], b[i]) * 0.375**2, 1e-3)


# ---- grouped along N ----


@all_dtypes
@offset_forms
@pytest.mark.parametrize("m, k, whole", [(65, 80, 1), (3, 144, 1), (24, 144, 8)])
def test_n_grouped(backend, m, k, whole, form, dtypes):
    """Of few rows and of many. Groups begin anywhere, of rows of whole 16-byte chunks too."""
    groups, first = len(SIZES), 5 if form == "bounds" else 0
    offsets = offsets_of(SIZES, form, "int32", first)
    n = sum(SIZES) + first + 9
    n += -n % whole
    rng = np.random.default_rng(0)
    a = scenes.values(rng, (groups, m, k), dtypes[0], one_sign=True)
    b = scenes.values(rng, (n, k), dtypes[1], one_sign=True)
    how = {"scale_a": scale_of(rng, "row", m, (groups,)), "scale_b": scale_of(rng, "row", n)}
    bias = rng.standard_normal(n).astype(np.float32)
    ref, written = np.zeros((m, n)), np.zeros((m, n), bool)
    for g, (begin, end) in enumerate(reference.group_bounds(offsets, groups)):
        own = slice(begin, end)
        ref[:, own] = reference.gemm(a[g], b[own], how["scale_a"][g], how["scale_b"][own], bias[own])
        written[:, own] = True
    b[~written[0]] = np.nan
    out_dtype = own_dtype(dtypes)
    out = guarded.gemm(backend, a, b, out_dtype, offsets=offsets, layout="n_grouped", bias=bias, **how, shape=(m, n),
                       initial=initial_of((m, n), out_dtype, written))  # fmt: skip
    assert (f64(out)[~written] == KEPT).all()
    columns = written[0]
    judge(backend, out[:, columns], ref[:, columns], dtypes[0], out_dtype)


# ---- bounds out of range ----


HOSTILE = {"negative": [-50, 30, 64], "beyond": [10, 500, 2**31 - 1], "decreasing": [90, 20, 64]}


@pytest.mark.parametrize("ends", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("layout", ["n_grouped", "k_grouped"])
def test_hostile_offsets_raise_on_the_cpu(layout, ends):
    with pytest.raises(ValueError, match="offsets"):
        hostile(Host(), layout, ends)


@pytest.mark.parametrize("ends", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("layout", ["n_grouped", "k_grouped"])
def test_hostile_offsets_never_write_outside_on_the_gpu(cuda, layout, ends):
    """Clamped into what there is, beside the fences around out; a decreasing pair is an empty group. Where groups of
    columns overlap, either may win."""
    out, a, b = hostile(cuda, layout, ends)
    limits = np.clip([0, *ends], 0, len(b) if layout == "n_grouped" else b.shape[1])
    spans = [slice(begin, max(begin, end)) for begin, end in zip(limits[:-1], limits[1:], strict=True)]
    if layout == "k_grouped":
        for g, span in enumerate(spans):
            judge(cuda, out[g], reference.gemm(a[:, span], b[:, span]), E4M3, "float32", cut=float8_cut(cuda.name))
        return
    owners = np.zeros(len(b), int)
    for span in spans:
        owners[span] += 1
    assert (out[:, owners == 0] == 7).all()
    for g, span in enumerate(spans):
        own = np.arange(len(b))[span][owners[span] == 1]
        if own.size:
            judge(cuda, out[:, own], reference.gemm(a[g], b[own]), E4M3, "float32", cut=float8_cut(cuda.name))
    assert np.isfinite(out).all()


def hostile(backend, layout, ends):
    """The product, of which groups of columns begin as sevens and sums along K as zeros, and its operands."""
    rng = np.random.default_rng(0)
    a_shape, shape = ((3, 33, 64), (33, 70)) if layout == "n_grouped" else ((33, 64), (3, 33, 70))
    a, b = (scenes.values(rng, x, E4M3, one_sign=True) for x in (a_shape, (70, 64)))
    initial = np.full(shape, 7 if layout == "n_grouped" else 0, np.float32)
    how = {"offsets": np.array(ends, np.int32), "layout": layout, "shape": shape, "initial": initial}
    return guarded.gemm(backend, a, b, "float32", **how), a, b


# ---- the public functions ----


def test_public_layouts(backend):
    """Each public function gives what the extension gives, into a new output and into the caller's."""
    rng = np.random.default_rng(0)
    a, b = scenes.values(rng, (2, 130, 64), E4M3), scenes.values(rng, (2, 70, 64), E4M3)
    rows = np.concatenate([a[0], a[1]])
    ends, m_indices = np.array([130, 200], np.int32), contiguous([130, 4])
    masked_m = np.array([130, 4], np.int32)
    cases = [
        (flexgemm.batched_gemm_nt, (a, b), "batched", (2, 130, 70), {}),
        (flexgemm.m_grouped_gemm_nt_contiguous, (rows, b, m_indices[:260]), "m_grouped_contiguous", (260, 70),
         {"m_indices": m_indices[:260]}),
        (flexgemm.m_grouped_gemm_nt_masked, (a, b, masked_m), "m_grouped_masked", (2, 130, 70), {"masked_m": masked_m}),
        (flexgemm.n_grouped_gemm_nt, (a, b[0], np.array([30, 70], np.int32)), "n_grouped", (130, 70),
         {"offsets": np.array([30, 70], np.int32)}),
        (flexgemm.k_grouped_wgrad_gemm_nt, (a[0], b[0], np.array([30, 64], np.int32)), "k_grouped", (2, 130, 70),
         {"offsets": np.array([30, 64], np.int32)}),
        (flexgemm.wgrad_gemm_nt, (a[0], b[0]), "dense", (130, 70), {}),
        (flexgemm.segment_gemm, (rows, b, ends), "m_grouped", (260, 70), {"offsets": ends}),
    ]  # fmt: skip
    for function, arguments, layout, shape, how in cases:
        out_dtype = "float32" if "wgrad" in function.__name__ else "bfloat16"
        expected = guarded.gemm(backend, *arguments[:2], out_dtype, layout=layout, shape=shape,
                                initial=np.full(shape, KEPT, dtype_of(out_dtype)), **how)  # fmt: skip
        placed = [backend.array(x) for x in arguments]
        new = backend.numpy(function(*placed))
        assert new.dtype == expected.dtype
        written = f64(expected) != KEPT
        np.testing.assert_array_equal(new[written], expected[written])
        mine = backend.array(np.full(shape, KEPT, dtype_of(out_dtype)))
        keeps = {"accumulate": False} if "wgrad" in function.__name__ else {}
        assert function(*placed, out=mine, **keeps) is mine
        np.testing.assert_array_equal(backend.numpy(mine), expected)


@pytest.mark.parametrize(
    "function, a, b, how, message",
    [
        ("gemm_nt", (2, 3, 8), (5, 8), {}, r"a: expected \(M, K\), got \(2, 3, 8\)"),
        ("gemm_nt", (3, 8), (2, 5, 8), {}, r"b: expected \(N, K\), got \(2, 5, 8\)"),
        ("batched_gemm_nt", (3, 8), (2, 5, 8), {}, r"a: expected \(G, M, K\), got \(3, 8\)"),
        ("m_grouped_gemm_nt", (3, 8), (5, 8), {}, r"b: expected \(G, N, K\), got \(5, 8\)"),
        ("n_grouped_gemm_nt", (3, 8), (5, 8), {}, r"a: expected \(G, M, K\), got \(3, 8\)"),
        ("k_grouped_wgrad_gemm_nt", (3, 8), (8,), {}, r"b: expected \(N, K\), got \(8,\)"),
        ("segment_gemm", (8,), (2, 5, 8), {}, r"x: expected \(M, K\), got \(8,\)"),
        (
            "segment_gemm",
            (3, 8),
            (8, 5),
            {"weight_column_major": False},
            r"weights: expected \(G, K, N\), got \(8, 5\)",
        ),
    ],
)
def test_operands_of_another_rank_are_named(backend, function, a, b, how, message):
    offsets = () if function in ("gemm_nt", "batched_gemm_nt") else (np.array([3, 8], np.int32),)
    arrays = [backend.array(x) for x in (np.ones(a, np.float32), np.ones(b, np.float32), *offsets)]
    with pytest.raises(ValueError, match=f"^{message}$"):
        getattr(flexgemm, function)(*arrays, **how)


def test_lengths_of_segments():
    _, x, w = operands(40, 70, 64, *FP8, groups=2)
    lengths, ends = np.array([10, 30], np.int32), np.array([10, 40], np.int32)
    np.testing.assert_array_equal(flexgemm.segment_gemm(x, w, seg_lens=lengths), flexgemm.segment_gemm(x, w, ends))
    for neither in ({}, {"offsets": ends, "seg_lens": lengths}):
        with pytest.raises(ValueError, match="offsets, seg_lens"):
            flexgemm.segment_gemm(x, w, **neither)
    one = {"weight_indices": np.array([1], np.int32)}
    for segments, given, how in (2, [10, 20, 10], {}), (2, [40], {}), (1, [10, 30], one), (2, [[10, 30]], {}):
        with pytest.raises(ValueError, match=f"^seg_lens: expected a length for each of {segments} segments"):
            flexgemm.segment_gemm(x, w, seg_lens=np.array(given, np.int32), **how)


def test_the_number_of_multiprocessors_changes_nothing(backend):
    assert flexgemm.get_m_alignment_for_contiguous_layout() == 128
    _, a, b = operands(300, 97, 144, *FP8)
    x, y = backend.array(a), backend.array(b)
    everywhere = backend.numpy(flexgemm.gemm_nt(x, y, out_dtype="float32"))
    try:
        flexgemm.set_num_sms(2)
        assert flexgemm.get_num_sms() == 2
        np.testing.assert_array_equal(backend.numpy(flexgemm.gemm_nt(x, y, out_dtype="float32")), everywhere)
        with pytest.raises(ValueError, match="num_sms"):
            flexgemm.set_num_sms(0)
    finally:
        flexgemm.set_num_sms(None)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("m, n, k", [(512, 512, 576), (512, 768, 128), (500, 776, 256)])
def test_tiles_one_after_the_other(backend, m, n, k, out_dtype):
    """Few multiprocessors have many tiles each, whole ones and the last of a row or column."""
    rng, a, b = operands(m, n, k, *FP8)
    scales = {"scale_a": scale_of(rng, "row", m), "scale_b": scale_of(rng, "tensor", n)}
    with guarded.multiprocessors(2):
        out = guarded.gemm(backend, a, b, out_dtype, initial=poison((m, n), out_dtype), **scales)
    judge(backend, out, reference.gemm(a, b, **scales), FP8[0], out_dtype)


LEFT_ALONE = {  # layout, what tells its groups apart, and which elements of the output they have
    "m_grouped": ("m_grouped", {"offsets": np.array([3, 3, 40], np.int32)}, np.s_[:40]),
    "contiguous": ("m_grouped_contiguous", {"m_indices": contiguous([100, 0, 20])}, contiguous([100, 0, 20]) >= 0),
    "masked": ("m_grouped_masked", {"masked_m": np.array([0, 256, 0], np.int32)}, 1),
    "n_grouped": ("n_grouped", {"offsets": np.array([3, 3, 40], np.int32)}, np.s_[:, :40]),
    "missing weights": (
        "m_grouped",
        {"offsets": np.array([3, 9, 40], np.int32), "weight_indices": np.array([3, -1, 0], np.int32)},
        np.s_[9:40],
    ),
}


@pytest.mark.parametrize("what", LEFT_ALONE)
def test_outputs_on_the_host_keep_what_is_of_no_group(cuda, what):
    layout, how, where = LEFT_ALONE[what]
    rng, shapes = np.random.default_rng(0), {"n_grouped": ((3, 24, 16), (256, 16))}
    shapes["m_grouped_masked"] = (3, 256, 16), (3, 24, 16)
    a, b = (rng.standard_normal(s).astype(np.float32) for s in shapes.get(layout, ((256, 16), (3, 24, 16))))
    new = flexgemm.gemm.product(layout, a, b, device="cuda", **how)
    out = np.full(new.shape, KEPT, np.float32)
    assert flexgemm.gemm.product(layout, a, b, out=out, device="cuda", **how) is out
    expected = np.full(new.shape, KEPT, np.float32)
    expected[where] = new[where]
    np.testing.assert_array_equal(out, expected)


def test_more_tiles_than_are_counted_are_refused(cuda):
    groups = 2**29
    one, out = cuda.array(np.ones(1, np.float16)), cuda.empty((groups, 1, 1), "float16")
    a, b = (cuda.window(one, (groups, 1, 1), (0, 1, 1), 0) for _ in "ab")
    with pytest.raises(ValueError, match=r"^out: expected fewer than 2\^29 tiles of"):
        _C.gemm(a, b, out, layout="batched")


@pytest.mark.parametrize("layout", ["dense", "n_grouped", "k_grouped"])
def test_more_weights_than_a_cpu_packs_at_a_time(backend, layout):
    """In three parts, with what is theirs of scales and bias."""
    rng, n, k = np.random.default_rng(0), 2100, 8192
    ends = {"dense": [], "n_grouped": [1300, n], "k_grouped": [4100, k]}[layout]
    grouped = (2,) if ends else ()
    along_k = grouped if layout == "k_grouped" else ()
    a_shape = (3, k) if along_k else (*grouped, 3, k)
    a, b = scenes.values(rng, a_shape, "float32"), scenes.values(rng, (n, k), "float32")
    how = {"scale_a": scale_of(rng, "row", 3, grouped), "scale_b": scale_of(rng, "row", n, along_k)}
    if not along_k:
        how["bias"] = scenes.values(rng, (n,), "float32")
    told = {"offsets": np.array(ends, np.int32)} if ends else {}
    out = guarded.gemm(backend, a, b, "float32", layout=layout, shape=(*along_k, 3, n), **told, **how)

    parts = [(np.s_[:], a, b, how)]  # of the output, with what makes them
    spans = [slice(*span) for span in pairwise([0, *ends])]
    if along_k:
        parts = [(g, a[:, s], b[:, s], {name: x[g] for name, x in how.items()}) for g, s in enumerate(spans)]
    elif ends:
        parts = [
            (np.s_[:, s], a[g], b[s], {name: x[g if name == "scale_a" else s] for name, x in how.items()})
            for g, s in enumerate(spans)
        ]
    for part, of_a, of_b, factors in parts:
        assert_rows(out[part], reference.gemm(of_a, of_b, **factors), 1e-5)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_an_fp8_output_that_is_given_says_its_dtype(backend, dtype):
    a, b = (backend.array(scenes.values(np.random.default_rng(i), (8, 32), "float32")) for i in range(2))
    scale = backend.array(np.asarray(0.25, np.float32))
    out = backend.array(np.zeros((8, 8), dtype_of(dtype)))
    flexgemm.gemm_nt(a, b, scale_out=scale, out=out)
    expected = backend.numpy(flexgemm.gemm_nt(a, b, scale_out=scale, out_dtype=dtype))
    assert_same_bits(backend.numpy(out), expected)
    assert f64(expected).any()


def test_more_row_major_weights_than_a_cpu_packs_at_a_time(backend):
    rng = np.random.default_rng(0)
    a, b = (scenes.values(rng, s, "bfloat16", one_sign=True) for s in ((5, 8192), (8192, 1100)))
    out = guarded.gemm(backend, a, b, "float32", b_row_major=True, shape=(5, 1100))
    assert_rows(out, reference.gemm(a, b.T), 1e-4)


@pytest.mark.parametrize("sms", [1, 2])
@pytest.mark.parametrize("dtypes", [FP8, ("bfloat16", "bfloat16")], ids="-".join)
def test_groups_of_columns_that_end_within_a_tile(backend, dtypes, sms):
    """Groups begin at whole 16-byte chunks: what is behind the last one is left as it was."""
    sizes, m, k = [64, 8, 128, 304, 40], 200, 144
    n = sum(sizes) + 200
    rng = np.random.default_rng(0)
    a = scenes.values(rng, (len(sizes), m, k), dtypes[0], one_sign=True)
    b = scenes.values(rng, (n, k), dtypes[1], one_sign=True)
    ref, written, begin = np.zeros((m, n)), np.zeros((m, n), bool), 0
    for g, size in enumerate(sizes):
        own = slice(begin, begin := begin + size)
        ref[:, own], written[:, own] = reference.gemm(a[g], b[own]), True
    out_dtype = own_dtype(dtypes)
    with guarded.multiprocessors(sms):
        out = guarded.gemm(backend, a, b, out_dtype, offsets=np.cumsum(sizes).astype(np.int32), layout="n_grouped",
                           shape=(m, n), initial=initial_of((m, n), out_dtype, written))  # fmt: skip
    assert (f64(out)[~written] == KEPT).all()
    judge(backend, out[:, :begin], ref[:, :begin], dtypes[0], out_dtype)
