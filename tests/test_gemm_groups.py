"""Products of groups of rows, ragged, against float64 products of the dequantised inputs."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
from memory import Host, poison
from products import E4M3, E5M2, FAR_APART, FP8_PAIRS, OUT_DTYPES, PLAIN, judge, offsets_of, operands, scale_of
from reference import f64
from verdicts import assert_gemm_rows

import flexgemm
from flexgemm import _C

fp8_pairs = pytest.mark.parametrize("dtypes", FP8_PAIRS, ids="-".join)
out_dtypes = pytest.mark.parametrize("out_dtype", OUT_DTYPES)
layouts = pytest.mark.parametrize("pad, offset", [(0, 0), (0, 1), (1, 0), (3, 2), (16, 0), (64, 16)])
offset_forms = pytest.mark.parametrize("form", ["ends", "bounds"])
ZIPF = np.minimum(np.random.default_rng(7).zipf(1.6, 24), 400).tolist()


GROUPS = {
    "equal": [64, 64, 64],
    "edges": [0, 1, 7, 64, 129, 0],
    "empty": [0, 0, 0],
    "one": [129],
    "many_small": [1] * 70,
    "zipf": ZIPF,
    "holes": [0, 300, 0, 0, 65, 0],
}
group_sizes = pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS.keys())


offset_dtypes = pytest.mark.parametrize("offset_dtype", ["int32", "int64"])


def check_grouped(backend, rows, n, k, offsets, groups, dtypes, out_dtype, precision="ieee", scales=None, bias=False,
                  **layout):  # fmt: skip
    """Rows outside every group hold NaN in A and must keep what out held; weights of empty groups are NaN."""
    rng, a, b = operands(rows, n, k, *dtypes, groups=groups)
    kind_a, kind_b = scales or ("none", "none")
    how = {
        "scale_a": scale_of(rng, kind_a, rows),
        "scale_b": scale_of(rng, kind_b, n, (groups,)),
        "bias": rng.standard_normal((groups, n)).astype(np.float32) if bias else None,
    }
    for g, (begin, end) in enumerate(reference.group_bounds(offsets, groups)):
        if begin == end:
            b[g] = np.nan
    ref, written = reference.grouped_gemm(a, b, offsets, **how)
    a[~written] = np.nan
    initial = poison((rows, n), out_dtype)
    initial[~written] = 7
    out = guarded.gemm(backend, a, b, out_dtype, offsets=offsets, initial=initial, precision=precision, **how, **layout)
    judge(backend, out[written], ref[written], dtypes[0], out_dtype, precision)
    assert (f64(out[~written]) == 7).all()
    return out


@group_sizes
@offset_forms
@offset_dtypes
def test_fp8_groups(backend, sizes, form, offset_dtype):
    offsets = offsets_of(sizes, form, offset_dtype)
    check_grouped(backend, sum(sizes), 97, 144, offsets, len(sizes), (E4M3, E4M3), "bfloat16")


@group_sizes
@offset_forms
def test_rows_past_the_last_group_are_left_alone(backend, sizes, form):
    offsets = offsets_of(sizes, form, "int32")
    check_grouped(backend, sum(sizes) + 77, 70, 64, offsets, len(sizes), (E4M3, E5M2), "float32")


@group_sizes
@offset_dtypes
def test_rows_before_the_first_group_are_left_alone(backend, sizes, offset_dtype):
    offsets = offsets_of(sizes, "bounds", offset_dtype, first=33)
    check_grouped(backend, sum(sizes) + 40, 70, 64, offsets, len(sizes), (E5M2, E4M3), "float16")


@fp8_pairs
@out_dtypes
@pytest.mark.parametrize("n, k", [(64, 64), (33, 17), (129, 576), (1, 5)])
def test_grouped_fp8_dtypes_and_shapes(backend, n, k, out_dtype, dtypes):
    sizes = GROUPS["edges"]
    check_grouped(backend, sum(sizes), n, k, offsets_of(sizes, "bounds", "int32"), len(sizes), dtypes, out_dtype)


@pytest.mark.parametrize("dtype, precision", PLAIN)
@pytest.mark.parametrize("n, k", [(64, 64), (33, 17), (97, 576)])
def test_grouped_plain_dtypes(backend, n, k, dtype, precision):
    sizes = GROUPS["edges"]
    offsets = offsets_of(sizes, "ends", "int64")
    check_grouped(backend, sum(sizes) + 5, n, k, offsets, len(sizes), (dtype, dtype), dtype, precision)


@pytest.mark.parametrize("scales", [(a, b) for a in ("none", "tensor", "row") for b in ("none", "tensor", "row")])
@pytest.mark.parametrize("bias", [False, True])
def test_grouped_scales_and_bias(backend, scales, bias):
    """The scale of B carries the group: (G,) per tensor and (G, N) per row."""
    sizes = GROUPS["edges"]
    offsets = offsets_of(sizes, "bounds", "int32", first=3)
    for out_dtype in OUT_DTYPES:
        check_grouped(
            backend, sum(sizes) + 9, 70, 80, offsets, len(sizes), (E4M3, E4M3), out_dtype, scales=scales, bias=bias
        )


@layouts
def test_grouped_layouts(backend, pad, offset):
    sizes = GROUPS["edges"]
    offsets = offsets_of(sizes, "bounds", "int32")
    check_grouped(backend, sum(sizes), 70, 144, offsets, len(sizes), (E4M3, E4M3), "bfloat16", pad=pad, offset=offset)


def test_grouped_deep_products(backend):
    offsets = offsets_of([3, 64, 40], "ends", "int32")
    check_grouped(backend, 107, 128, 7168, offsets, 3, (E4M3, E4M3), "float32")


# On Hopper groups of some rows are cut into tiles of about the same size, which end where the group does: here of 96
# rows at most, or of 128 rows.
SOME = {
    "less than a tile": [0, 90, 1, 64, 97, 40],
    "a tile or two": [200, 0, 129, 190, 193, 1],
    "several tiles": [400, 193, 0, 385, 200],
}
some_sizes = pytest.mark.parametrize("sizes", SOME.values(), ids=SOME.keys())


@some_sizes
@pytest.mark.parametrize("n, k", [(97, 144), (520, 400), (264, 1040)])
@pytest.mark.parametrize(
    "dtypes, out_dtype",
    [((E4M3, E4M3), "bfloat16"), ((E4M3, E5M2), "float16"), ((E5M2, E4M3), "bfloat16"), ((E5M2, E5M2), "float16"),
     (("float16",) * 2, "float16"), (("bfloat16",) * 2, "bfloat16")],
)  # fmt: skip
def test_groups_of_some_rows(backend, sizes, n, k, dtypes, out_dtype):
    offsets = offsets_of(sizes, "bounds", "int32", first=5)
    check_grouped(backend, sum(sizes) + 9, n, k, offsets, len(sizes), dtypes, out_dtype)


@some_sizes
@pytest.mark.parametrize("scales", [("none", "tensor"), ("tensor", "row"), ("row", "row")])
@pytest.mark.parametrize("n, out_dtype, pad, offset", [(264, "bfloat16", 0, 0), (264, "bfloat16", 1, 1),
                                                       (262, "float16", 0, 0), (264, "float32", 0, 0)])  # fmt: skip
def test_groups_of_some_rows_have_scales_and_bias(backend, sizes, scales, n, out_dtype, pad, offset):
    """Of whole 16-byte chunks of 16-bit sums, and of others, which are stored differently."""
    how = {"scales": scales, "bias": True, "pad": pad, "offset": offset}
    offsets = offsets_of(sizes, "ends", "int64")
    check_grouped(backend, sum(sizes) + 3, n, 528, offsets, len(sizes), (E4M3, E4M3), out_dtype, **how)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_groups_that_end_within_a_tile(backend, out_dtype):
    """By one multiprocessor, which takes tiles of many rows for them: of what is behind a group it writes nothing."""
    sizes = [48, 127, 176, 300, 80, 0, 1, 128, 33]
    offsets = offsets_of(sizes, "bounds", "int32", first=7)
    with guarded.multiprocessors(1):
        check_grouped(backend, sum(sizes) + 99, 520, 400, offsets, len(sizes), (E4M3, E4M3), out_dtype)


@offset_forms
@pytest.mark.parametrize("sms", [1, 2, 3])
def test_tiles_beside_each_other_have_groups_far_apart(backend, form, sms):
    """By tiles of few rows and of some."""
    offsets = offsets_of(FAR_APART, form, "int32")
    with guarded.multiprocessors(sms):
        check_grouped(backend, sum(FAR_APART) + 9, 600, 144, offsets, len(FAR_APART), (E4M3, E4M3), "bfloat16")


def check_taller_tiles(backend, most, sizes, n, k, dtypes, out_dtype, sms=8):
    """Of at most so many rows, which the plan takes for so few multiprocessors; a few rows are of no group."""
    rows, groups = sum(sizes) + 9, len(sizes)
    plan = _C.plan_gemm_sm90(m=rows, n=n, k=k, groups=groups, dtype=dtypes[0], num_sms=sms)
    assert (plan["some_rows"], plan["block_m"]) == (1, most)
    offsets = offsets_of(sizes, "bounds", "int32", first=5)
    with guarded.multiprocessors(sms):
        check_grouped(backend, rows, n, k, offsets, groups, dtypes, out_dtype, scales=("row", "row"), bias=True)


@pytest.mark.parametrize("most, n, sms, sizes", [(160, 136, 10, [150, 16, 159, 146, 80]),
                                                 (192, 392, 12, [177, 129, 1, 175, 191]),
                                                 (192, 392, 6, [207, 150, 61, 191, 182])])  # fmt: skip
@pytest.mark.parametrize("dtypes, out_dtype", [((E4M3, E4M3), "bfloat16"), ((E4M3, E5M2), "float32"),
                                               (("bfloat16",) * 2, "bfloat16")])  # fmt: skip
def test_groups_of_some_rows_in_taller_tiles(backend, most, n, sms, sizes, dtypes, out_dtype):
    check_taller_tiles(backend, most, sizes, n, 1040, dtypes, out_dtype, sms)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16", "float32"])
def test_groups_of_some_rows_in_the_tallest_tiles(backend, dtype, out_dtype):
    """Which only 16-bit products have, where K is deep: by 208, 224, 240 and 256 rows of wgmma, and by 16."""
    check_taller_tiles(backend, 256, [200, 223, 1, 230, 241], 392, 4112, (dtype, dtype), out_dtype, sms=10)


@pytest.mark.parametrize("groups", [2, 31, 32, 33, 65])
@pytest.mark.parametrize("sms", [2, 6])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), ("bfloat16",) * 2], ids=["fp8", "bf16"])
def test_groups_of_some_rows_by_several_waves(backend, dtypes, sms, groups):
    """Of up to 32 groups the device chooses how tall tiles are, and which come first."""
    sizes = [(16, 97, 0, 60, 130, 1, 60)[g % 7] for g in range(groups)]
    rows = sum(sizes) + 9
    plan = _C.plan_gemm_sm90(m=rows, n=392, k=144, groups=groups, dtype=dtypes[0], num_sms=sms)
    assert (plan["some_rows"], plan["least_rows"] > 0) == (1, groups <= 32)
    offsets = offsets_of(sizes, "bounds", "int32", first=5)
    with guarded.multiprocessors(sms):
        check_grouped(backend, rows, 392, 144, offsets, groups, dtypes, "bfloat16")


def test_one_group_equals_the_dense_product(backend):
    _, a, b = operands(129, 97, 576, E4M3, E4M3)
    ref = reference.gemm(a, b)
    judge(backend, guarded.gemm(backend, a, b, "bfloat16"), ref, E4M3, "bfloat16")
    grouped = guarded.gemm(backend, a, b[None], "bfloat16", offsets=np.array([129], np.int32))
    judge(backend, grouped, ref, E4M3, "bfloat16")


HOSTILE = {
    "negative": [0, -50, 100, 200],
    "most_negative": [-(2**31), -(2**31), 100, 200],
    "one_beyond": [0, 50, 100, 201],
    "beyond": [0, 100, 500, 2**31 - 1],
    "all_beyond": [1000, 2000, 3000, 4000],
    "decreasing": [0, 150, 50, 200],
    "backwards": [200, 150, 100, 0],
}
hostile_offsets = pytest.mark.parametrize("bounds", HOSTILE.values(), ids=HOSTILE.keys())


@hostile_offsets
@offset_dtypes
@offset_forms
def test_hostile_offsets_never_write_outside_on_the_gpu(cuda, bounds, form, offset_dtype):
    """Clamped into 0..M; a decreasing pair is an empty group. Where groups overlap, either may win."""
    rows, n, groups = 200, 70, 3
    offsets = np.array(bounds if form == "bounds" else bounds[1:], offset_dtype)
    _, a, b = operands(rows, n, 64, E4M3, E4M3, groups=groups)
    limits = np.clip([0, *offsets] if form == "ends" else offsets, 0, rows)
    owners = np.zeros(rows, int)
    ref = np.zeros((rows, n))
    for g, (begin, end) in enumerate(zip(limits[:-1], limits[1:], strict=True)):
        if begin < end:
            owners[begin:end] += 1
            ref[begin:end] = reference.gemm(a[begin:end], b[g])
    initial = np.full((rows, n), 7, np.float32)
    out = guarded.gemm(cuda, a, b, "float32", offsets=offsets, initial=initial)
    assert (out[owners == 0] == 7).all()
    assert_gemm_rows(out[owners == 1], ref[owners == 1], "float32")
    assert np.isfinite(out).all()


def test_hostile_64_bit_offsets_do_not_wrap_on_the_gpu(cuda):
    _, a, b = operands(100, 64, 64, E4M3, E4M3, groups=3)
    offsets = np.array([-(2**63), 2**32 + 50, 2**63 - 1, 2**32], np.int64)
    initial = np.full((100, 64), 7, np.float32)
    out = guarded.gemm(cuda, a, b, "float32", offsets=offsets, initial=initial)
    assert_gemm_rows(out, reference.gemm(a, b[0]), "float32")  # clamped: 0, 100, 100, 100


@hostile_offsets
@offset_dtypes
@offset_forms
def test_hostile_offsets_raise_on_the_cpu(bounds, form, offset_dtype):
    offsets = np.array(bounds if form == "bounds" else bounds[1:], offset_dtype)
    _, a, b = operands(200, 70, 64, E4M3, E4M3, groups=3)
    with pytest.raises(ValueError, match="offsets"):
        guarded.gemm(Host(), a, b, "float32", offsets=offsets)


@offset_forms
def test_public_grouped(backend, form):
    sizes = GROUPS["edges"]
    rows, offsets = sum(sizes), offsets_of(sizes, form, "int32")
    rng, a, b = operands(rows, 97, 144, E4M3, E5M2, groups=len(sizes))
    how = {"scale_a": scale_of(rng, "row", rows), "scale_b": scale_of(rng, "row", 97, (len(sizes),))}
    ref, _ = reference.grouped_gemm(a, b, offsets, **how)
    given = {name: backend.array(array) for name, array in how.items()}
    arrays = [backend.array(x) for x in (a, b, offsets)]
    for out_dtype in OUT_DTYPES:
        out = flexgemm.m_grouped_gemm_nt(*arrays, out_dtype=out_dtype, **given)
        judge(backend, backend.numpy(out), ref, E4M3, out_dtype)
    mine = backend.array(np.full((rows, 97), np.nan, np.float32))
    assert flexgemm.m_grouped_gemm_nt(*arrays, out=mine, **given) is mine
    judge(backend, backend.numpy(mine), ref, E4M3, "float32")


@pytest.mark.large
@pytest.mark.parametrize("sizes", [[700, 0, 129, 1900, 64, 1], [257] * 12], ids=["uneven", "equal"])
@pytest.mark.parametrize("n", [1000, 2112, 4090])
def test_every_tile_shape_in_groups(cuda, n, sizes):
    offsets = offsets_of(sizes, "bounds", "int32", first=5)
    check_grouped(cuda, sum(sizes) + 40, n, 400, offsets, len(sizes), (E4M3, E4M3), "bfloat16", bias=True)


@pytest.mark.parametrize("first", [[100] * 32, [100] + [0] * 31, [0] * 31 + [100]], ids=["all", "begin", "last"])
def test_decreasing_offsets_of_many_groups(cuda, first):
    """Groups are looked at 32 at a time: those behind begin no earlier than those before have ended."""
    rows, n = 200, 70
    offsets = np.array([*first, 40, 150, 20, 200], np.int32)
    _, a, b = operands(rows, n, 64, E4M3, E4M3, groups=len(offsets))
    ends = np.maximum.accumulate(offsets)
    ref, begin = np.zeros((rows, n)), 0
    for g, end in enumerate(ends):
        ref[begin:end] = reference.gemm(a[begin:end], b[g])
        begin = end
    how = {"offsets": offsets, "initial": np.zeros((rows, n), np.float32), "accumulate": True}  # twice shows
    assert_gemm_rows(guarded.gemm(cuda, a, b, "float32", **how), ref, "float32")


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("of_a, of_b", [((3,), ()), ((3, 260), ()), ((3, 260), (3, 250)), ((), (3, 250)), ((3,), (3,))])
@pytest.mark.parametrize("dtype", [E4M3, "bfloat16"])
def test_scales_of_an_empty_group_along_k_count_for_nothing(backend, dtype, of_a, of_b, accumulate):
    """They may be whatever memory held: of an expert without tokens nobody computes one."""
    rng, a, b = operands(260, 250, 256, dtype, dtype)
    scales = {"scale_a": rng.uniform(0.5, 2, of_a), "scale_b": rng.uniform(0.5, 2, of_b)}
    scales = {name: np.asarray(scale, np.float32) for name, scale in scales.items()}
    offsets, before = np.array([64, 64, 256], np.int32), rng.standard_normal((3, 260, 250)).astype(np.float32)
    for scale in scales.values():
        if scale.ndim:
            scale[1] = np.nan
    out = guarded.gemm(backend, a, b, "float32", layout="k_grouped", shape=before.shape, initial=before,
                       accumulate=accumulate, offsets=offsets, **scales)  # fmt: skip
    before *= accumulate
    np.testing.assert_array_equal(out[1], before[1])
    for g, begin, end in ((0, 0, 64), (2, 64, 256)):
        own = {name: scale[g] if scale.ndim else scale for name, scale in scales.items()}
        judge(backend, out[g] - before[g], reference.gemm(a[:, begin:end], b[:, begin:end], **own), dtype, "float32")
