"""Codes of voxels along curves, against plain Python, and the order of sorted keys."""

from __future__ import annotations

import itertools

import guarded
import numpy as np
import pytest
import reference
import scenes
from hypothesis import given
from hypothesis import strategies as st

import flexgemm
from flexgemm import _C

MODES = ["bxyz", "z_order", "hilbert"]
CURVES = ["z_order", "hilbert"]
SHAPES = [
    (1, 1, 1, 1),
    (1, 2, 2, 2),
    (3, 5, 1, 9),
    (2, 1, 1, 64),
    (4, 1024, 7, 300),  # 32 bits on the curves
    (5, 1024, 1000, 3),  # 33
    (16, 2**20, 2**20, 2**20),  # 64 bits on the curves; too many voxels to number
    (2, 2**21, 5, 2),
    (2, 2**21, 2**21, 2**21),  # the longest: 21 bits an axis, in words of 1, 10 and 10
    (3, 2**11, 2**11, 2**11),
    (1, 2**13, 2**12, 2**13),
]
ROWS = [0, 1, 63, 64, 65, 255, 257, 1000, 1025, 9000]


def draw(shape, n, seed=0):
    """Any rows, and the corners of the grid."""
    rng = np.random.default_rng(seed)
    corners = list(itertools.product(*((0, s - 1) for s in shape)))
    coords = np.stack([rng.integers(0, s, n) for s in shape], axis=1)
    return np.concatenate([coords, corners])[-n:].astype(np.int32) if n else np.zeros((0, 4), np.int32)


def fits(shape, mode):
    return mode != "bxyz" or np.prod(np.asarray(shape, object)) < 2**63


CASES = [(shape, mode) for shape in SHAPES for mode in MODES if fits(shape, mode)]


@pytest.mark.parametrize("shape, mode", CASES)
def test_codes_and_back(backend, shape, mode):
    coords = draw(shape, 200)
    code = guarded.encode_seq(backend, coords, shape, mode)
    expected = reference.encode_seq(coords, shape, mode)
    np.testing.assert_array_equal(code, expected, strict=True)
    np.testing.assert_array_equal(guarded.decode_seq(backend, code, shape, mode), coords)


@pytest.mark.large
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", [1000, 2**20])
def test_more_rows_than_a_gpu_takes_at_once(backend, mode, side):
    shape = (1, side, side, side)
    coords = draw(shape, 1_500_001)
    code = flexgemm.encode_seq(backend.array(coords), shape, mode)
    some = np.random.default_rng(1).integers(0, len(coords), 4096)
    np.testing.assert_array_equal(backend.numpy(code)[some], reference.encode_seq(coords[some], shape, mode))
    np.testing.assert_array_equal(backend.numpy(flexgemm.decode_seq(code, shape, mode)), coords)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("offset", [0, 1])
def test_row_counts_and_alignments(backend, n, mode, offset):
    shape = (3, 40, 50, 60)
    coords = draw(shape, n)
    code = guarded.encode_seq(backend, coords, shape, mode, offset=offset)
    np.testing.assert_array_equal(code, reference.encode_seq(coords, shape, mode))
    np.testing.assert_array_equal(guarded.decode_seq(backend, code, shape, mode, offset=offset), coords)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_hilbert_curve_goes_from_face_to_face_through_every_voxel(backend, bits):
    side = 1 << bits
    shape = (2, side, side, side)
    code = np.arange(2 * side**3, dtype=np.int32)
    coords = guarded.decode_seq(backend, code, shape, "hilbert")
    assert len(np.unique(coords, axis=0)) == len(coords)
    steps = np.abs(np.diff(coords[: side**3], axis=0)).sum(axis=1)
    assert (steps == 1).all()
    np.testing.assert_array_equal(coords[side**3 :], coords[: side**3] + [1, 0, 0, 0])  # the next sample


def test_the_first_hilbert_curve_is_skilling_s(backend):
    """The Gray code of the corners of a cube, x highest."""
    coords = guarded.decode_seq(backend, np.arange(8, dtype=np.int32), (1, 2, 2, 2), "hilbert")
    gray = [(0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 0), (1, 1, 0), (1, 1, 1), (1, 0, 1), (1, 0, 0)]
    assert [tuple(c) for c in coords[:, 1:].tolist()] == gray


def test_the_bit_triple_of_z_order_is_4x_2y_z(backend):
    code = guarded.encode_seq(backend, np.array([[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], np.int32), (1, 2, 2, 2),
                              "z_order")  # fmt: skip
    assert code.tolist() == [4, 2, 1]


@pytest.mark.parametrize("mode", CURVES)
@pytest.mark.parametrize("batch, dtype", [(2**11, np.int32), (2**12, np.int64)])
def test_the_batch_is_never_lost(backend, mode, batch, dtype):
    """7 bits an axis and 11 of the batch fill 32 bits: the largest codes read as negative, and none is shared."""
    shape = (batch, 128, 100, 3)
    coords = np.array([[b, 127, 99, 2] for b in range(batch)], np.int32)
    code = guarded.encode_seq(backend, coords, shape, mode)
    assert code.dtype == dtype
    assert len(np.unique(code)) == batch
    assert (code[-1] < 0) == (dtype == np.int32)
    np.testing.assert_array_equal(guarded.decode_seq(backend, code, shape, mode), coords)


def test_one_extent_may_be_all_that_a_code_counts(backend):
    coords = np.array([[0, 0, 0, z] for z in (0, 5, 2**31 - 1)], np.int32)
    for shape in ((1, 1, 1, 2**32), (1, 1, 2**32, 1)):
        placed = coords[:, [0, 1, 3, 2]].copy() if shape[2] > 1 else coords
        code = guarded.encode_seq(backend, placed, shape, "bxyz")
        assert code.dtype == np.int32
        np.testing.assert_array_equal(guarded.decode_seq(backend, code, shape, "bxyz"), placed)


grids = st.tuples(st.integers(1, 7), *[st.integers(1, 2**20)] * 3)


@given(grids, st.sampled_from(MODES), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_decoding_is_the_inverse(backend, shape, mode, n, seed):
    coords = draw(shape, n, seed)
    code = flexgemm.encode_seq(backend.array(coords), shape, mode)
    np.testing.assert_array_equal(backend.numpy(flexgemm.decode_seq(code, shape, mode)), coords)
    np.testing.assert_array_equal(backend.numpy(code), reference.encode_seq(coords, shape, mode))


OUTSIDE = [(-1, 0, 0, 0), (2, 0, 0, 0), (0, -1, 0, 0), (0, 5, 0, 0), (0, 0, 6, 0), (0, 0, 0, 7), (0, 0, 0, 2**31 - 1)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrong", OUTSIDE)
def test_rows_out_of_range(backend, mode, wrong):
    shape = (2, 5, 6, 7)
    coords = draw(shape, 100)
    coords[[40, 41, 70]] = wrong
    if backend.name == "cpu":
        with pytest.raises(ValueError, match=r"coords: row 40 is"):
            flexgemm.encode_seq(coords, shape, mode)
        return
    code = guarded.encode_seq(backend, coords, shape, mode)
    assert (code == -1).nonzero()[0].tolist() == [40, 41, 70]
    order = backend.numpy(flexgemm.sort_coords(backend.array(coords), shape, mode))
    assert order[-3:].tolist() == [40, 41, 70]


PAST_ONE_AXIS = [
    reference.code_of(voxel, (2, 8, 8, 8), "z_order") for voxel in ((0, 5, 0, 0), (0, 0, 6, 0), (0, 0, 0, 7))
]


@pytest.mark.parametrize(
    "mode, wrong",
    [
        ("bxyz", 420),
        ("z_order", 511),
        ("hilbert", -1),
        ("z_order", 3 << 9),
        *(("z_order", code) for code in PAST_ONE_AXIS),
    ],
)
def test_codes_of_no_voxel(backend, mode, wrong):
    """Of voxels past the end of one axis alone, too."""
    shape = (2, 5, 6, 7)
    code = reference.encode_seq(draw(shape, 100), shape, mode)
    code[40] = wrong
    if backend.name == "cpu":
        with pytest.raises(ValueError, match=r"code: entry 40 is"):
            flexgemm.decode_seq(code, shape, mode)
        return
    coords = guarded.decode_seq(backend, code, shape, mode)
    assert coords[40].tolist() == [-1] * 4
    assert (np.delete(coords, 40, axis=0) >= 0).all()


@pytest.mark.parametrize(
    "argument, wrong, error",
    [
        ("shape", (1, 8, 8), ValueError),
        ("shape", (1, 8, 8, 0), ValueError),
        ("shape", (1, 8, 8, 8.0), ValueError),
        ("shape", (2**5, 2**20, 1, 1), ValueError),  # 65 bits
        ("shape", (1, 2**22, 1, 1), ValueError),
        ("mode", "morton", ValueError),
        ("mode", 1, TypeError),
        ("coords", np.zeros((5, 3), np.int32), ValueError),
        ("coords", np.zeros(4, np.int32), ValueError),
        ("coords", np.zeros((5, 4), np.int64), TypeError),
    ],
)
@pytest.mark.parametrize("function", [flexgemm.encode_seq, flexgemm.sort_coords])
def test_impossible_arguments_are_named(backend, function, argument, wrong, error):
    arguments = {"coords": np.zeros((1, 4), np.int32), "shape": (1, 8, 8, 8), argument: wrong}
    arguments["coords"] = backend.array(arguments["coords"])
    with pytest.raises(error, match=argument):
        function(**arguments)


@pytest.mark.parametrize("wrong", [np.zeros((), np.int32), np.zeros((2, 2), np.int32), np.zeros(5, np.float32)])
def test_codes_of_another_rank_or_dtype(backend, wrong):
    with pytest.raises((TypeError, ValueError), match="code"):
        flexgemm.decode_seq(backend.array(wrong), (1, 8, 8, 8))


def test_the_curve_is_the_z_order_by_default(backend):
    coords, shape = scenes.scene(300)
    coords = backend.array(coords)
    code = flexgemm.encode_seq(coords, shape)
    for got, expected in (
        (code, flexgemm.encode_seq(coords, shape, "z_order")),
        (flexgemm.decode_seq(code, shape), coords),
        (flexgemm.sort_coords(coords, shape), flexgemm.sort_coords(coords, shape, "z_order")),
    ):
        np.testing.assert_array_equal(backend.numpy(got), backend.numpy(expected))


# ---- sorting ----


@pytest.mark.parametrize("dtype, bits", [(np.int32, 1), (np.int32, 9), (np.int32, 32), (np.int64, 17), (np.int64, 64)])
@pytest.mark.parametrize("n", [0, 1, 2, 64, 1000, 100_000])
def test_keys_are_sorted_stably_as_unsigned_numbers(backend, n, dtype, bits):
    unsigned = np.uint32 if dtype == np.int32 else np.uint64
    keys = np.frombuffer(np.random.default_rng(0).bytes(n * dtype().nbytes), unsigned)
    low = keys if bits == 8 * dtype().nbytes else keys & unsigned((1 << bits) - 1)
    if n > 1000:
        keys = keys[np.random.default_rng(1).integers(0, n // 3, n)]  # many equal ones
        low = keys if bits == 8 * dtype().nbytes else keys & unsigned((1 << bits) - 1)
    expected = np.argsort(low, kind="stable")
    order, in_order = guarded.sort_keys(backend, keys.view(dtype), bits)
    np.testing.assert_array_equal(order, expected)
    np.testing.assert_array_equal(in_order, keys.view(dtype)[expected])
    np.testing.assert_array_equal(guarded.sort_keys(backend, keys.view(dtype), bits, with_sorted=False), expected)


@pytest.mark.parametrize("bits", [0, 33])
def test_bits_that_a_key_has_not(backend, bits):
    with pytest.raises(ValueError, match="bits"):
        guarded.sort_keys(backend, np.zeros(5, np.int32), bits)


@pytest.mark.parametrize("mode", MODES)
def test_voxels_in_the_order_of_a_curve(backend, mode):
    coords, shape = scenes.scene(3000, batch=3)
    order = backend.numpy(flexgemm.sort_coords(backend.array(coords), shape, mode))
    codes = reference.encode_seq(coords, shape, mode)
    np.testing.assert_array_equal(order, np.argsort(codes, kind="stable"))
    if mode == "bxyz":
        np.testing.assert_array_equal(order, np.lexsort(coords.T[::-1]))


@pytest.mark.parametrize("mode", MODES)
def test_permuting_the_rows_permutes_the_codes(backend, mode):
    coords, shape = scenes.scene(500, batch=2)
    shuffle = np.random.default_rng(0).permutation(500)
    codes = backend.numpy(flexgemm.encode_seq(backend.array(coords), shape, mode))
    again = backend.numpy(flexgemm.encode_seq(backend.array(coords[shuffle]), shape, mode))
    np.testing.assert_array_equal(again, codes[shuffle])


def test_bits_of_a_code():
    assert _C.sequence_bits(shape=(1, 1, 1, 1), mode="hilbert") == 0
    assert _C.sequence_bits(shape=(1, 2, 1, 1)) == 3
    assert _C.sequence_bits(shape=(5, 1, 1, 9)) == 3 * 4 + 3
    assert _C.sequence_bits(shape=(5, 1, 1, 9), mode="bxyz") == 6


@pytest.mark.parametrize(
    "shape, mode, wrong",
    [
        ((2, 5, 6, 7), "z_order", 1 << 41),
        ((2, 5, 6, 7), "hilbert", 1 << 41),
        ((1, 2**32, 1, 1), "bxyz", 1 << 31),
        ((1, 1, 1, 2**33), "bxyz", 1 << 32),
    ],
)
def test_codes_whose_voxel_no_int32_holds(backend, shape, mode, wrong):
    code = backend.array(np.array([wrong], np.int64))
    if backend.name == "cpu":
        with pytest.raises(ValueError, match="code: entry 0 is"):
            flexgemm.decode_seq(code, shape, mode)
    else:
        assert backend.numpy(flexgemm.decode_seq(code, shape, mode)).tolist() == [[-1] * 4]
