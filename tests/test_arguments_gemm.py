"""What a product asks of arrays together: groups and offsets, scales of both sides, memory."""

from __future__ import annotations

import numpy as np
import pytest
from calls import E4M3, LEGAL, call, call_on_host, zeros
from memory import Host

import flexgemm
from flexgemm import _C


def test_offsets_have_an_end_for_each_group_and_may_have_a_start(backend):
    for length in (1, 2, 3, 4, 5):
        changes = {"b": zeros(3, 7, 8), "offsets": zeros(length, dtype=np.int32), "layout": "m_grouped"}
        if length in (3, 4):
            call(backend, "gemm", **changes)
            continue
        message = rf"^offsets: expected \(3,\) or \(4,\) to match the groups of b, got \({length},\)$"
        with pytest.raises(ValueError, match=message):
            call(backend, "gemm", **changes)


def test_scales_of_blocks_are_on_both_sides_or_on_neither(backend):
    operands = {"a": zeros(5, 8, dtype=E4M3), "b": zeros(7, 8, dtype=E4M3)}
    blocks = {"scale_a": zeros(5, 1), "scale_b": zeros(1, 1)}
    call(backend, "gemm", **operands, **blocks)
    for name in blocks:
        for other in (None, zeros()):
            with pytest.raises(ValueError, match="^scale_a, scale_b: expected both per block"):
                call(backend, "gemm", **operands, **blocks | {name: other})


def test_rows_that_run_backwards_have_the_memory_of_those_that_do_not():
    base = zeros(100)
    a = base[20:60].reshape(5, 8)[::-1]
    for start in (0, 25, 59):
        with pytest.raises(ValueError, match="^out: expected memory of its own, got memory that overlaps a$"):
            call_on_host("gemm", a=a, out=base[start : start + 35].reshape(5, 7))
    call_on_host("gemm", a=a, out=base[60:95].reshape(5, 7))


def test_an_output_is_no_part_of_any_matrix_or_row_of_an_input(backend):
    base = backend.array(zeros(400))
    message = "^out: expected memory of its own, got memory that overlaps a$"
    a, out = backend.window(base, (2, 5, 8), (100, 8, 1), 0), backend.window(base, (2, 5, 7), (35, 7, 1), 101)
    with pytest.raises(ValueError, match=message):
        call(backend, "gemm", {"a": a, "out": out}, b=zeros(2, 7, 8), layout="batched")
    beside_each_other = backend.window(base, (5, 16), (4, 1), 0)  # rows of 16 that begin every 4
    for start in (0, 13, 29, 31):
        with pytest.raises(ValueError, match=message):
            out = backend.window(base, (5, 3), (4, 1), start)
            call(backend, "gemm", {"a": beside_each_other, "out": out}, b=zeros(3, 16))
    call(backend, "gemm", {"a": beside_each_other, "out": backend.window(base, (5, 3), (4, 1), 32)}, b=zeros(3, 16))


def test_a_workspace_one_byte_too_small_is_refused():
    arguments = LEGAL["gemm"]()
    nbytes = _C.gemm_workspace(**arguments) - 255  # without the room to align it
    workspace = Host().empty((nbytes,), "uint8")
    assert _C.gemm(**arguments, workspace=workspace) == 0
    with pytest.raises(ValueError, match=rf"^workspace: expected at least {nbytes} bytes .* got {nbytes - 1}$"):
        _C.gemm(**arguments, workspace=workspace[:-1])


def test_no_rows_of_any_depth_are_a_product(backend):
    a = np.empty((0, 2**61), np.float16)
    call(backend, "gemm", a=a, b=a, out=np.empty((0, 0), np.float16))
    assert _C.gemm_workspace(a, a, np.empty((0, 0), np.float16)) == 0


# Numbers that do not tell the groups apart, and some that do, of two groups and 256 rows, columns or depth each.
INT32, INT64 = np.int32, np.int64
FACTORS = {  # axes of a and b, and the function
    "m_grouped": ((256, 16), (2, 8, 16), flexgemm.m_grouped_gemm_nt),
    "contiguous": ((256, 16), (2, 8, 16), flexgemm.m_grouped_gemm_nt_contiguous),
    "masked": ((2, 256, 16), (2, 8, 16), flexgemm.m_grouped_gemm_nt_masked),
    "n_grouped": ((2, 8, 16), (256, 16), flexgemm.n_grouped_gemm_nt),
    "k_grouped": ((8, 256), (8, 256), flexgemm.k_grouped_wgrad_gemm_nt),
}
RIGHT = {"contiguous": np.repeat(np.array([1, 0], INT32), 128), "masked": np.array([256, 0], INT32)}
WRONG = [
    ("m_grouped", np.array([200, 100], INT32), "offsets: expected non-decreasing numbers in 0..256, got 100 after 200"),
    ("m_grouped", np.array([-1, 256], INT64), "offsets: expected non-decreasing numbers in 0..256, got -1 after 0"),
    ("n_grouped", np.array([0, 9, 257], INT64), "offsets: expected non-decreasing numbers in 0..256, got 257 after 9"),
    ("k_grouped", np.array([100, 300], INT32), "offsets: expected non-decreasing numbers in 0..256, got 300 after 100"),
    ("contiguous", np.repeat(np.array([0, 2], INT32), 128), "m_indices: expected -1 to 1, got 2 at 128"),
    ("contiguous", np.repeat(np.array([0, 1], INT32), [100, 156]), "m_indices: expected groups that start at"),
    ("masked", np.array([3, 257], INT32), "masked_m: expected 0 to 256, got 257 at 1"),
]


@pytest.mark.parametrize("layout, numbers, message", WRONG)
def test_what_tells_groups_apart_is_checked_when_asked(backend, layout, numbers, message):
    """On a GPU, too, in the CPU's words."""
    *shapes, function = FACTORS[layout]
    a, b = (np.ones(shape, np.float32) for shape in shapes)
    how = {"device": backend.device, "check": True}
    with pytest.raises(ValueError, match=f"^{message}"):
        function(a, b, numbers, **how)
    right = RIGHT.get(layout, np.array([100, 256], INT32))
    written = np.zeros_like(function(a, b, right, **how))
    expected = function(a, b, right, out=written.copy(), device=backend.device)
    np.testing.assert_array_equal(function(a, b, right, out=written, **how), expected)
    assert expected.max() >= 16


@pytest.mark.parametrize("empty", ["rows", "columns"])
def test_groups_of_no_elements_are_told_apart_too(backend, empty):
    a, b = np.ones((0 if empty == "rows" else 256, 16), np.float32), np.ones((2, 0, 16), np.float32)
    with pytest.raises(ValueError, match="^offsets: expected non-decreasing numbers in 0"):
        flexgemm.m_grouped_gemm_nt(a, b, np.array([3, 257]), device=backend.device, check=True)


def test_weights_of_segments_are_checked_when_asked(backend):
    x, weights, ends = np.ones((9, 16), np.float32), np.ones((3, 8, 16), np.float32), np.array([2, 9])
    how = {"device": backend.device, "check": True}
    with pytest.raises(ValueError, match="^weight_indices: expected 0 to 2, got 3 at 1$"):
        flexgemm.segment_gemm(x, weights, ends, weight_indices=np.array([0, 3]), **how)
    with pytest.raises(TypeError, match="^check: expected a bool, got int$"):
        flexgemm.segment_gemm(x, weights, ends, weight_indices=np.array([0, 2]), check=1, device=backend.device)
    for row_major in (False, True):
        given = weights.swapaxes(1, 2) if row_major else weights
        out = flexgemm.segment_gemm(
            x, given, ends, weight_indices=np.array([0, 2]), weight_column_major=not row_major, **how
        )
        assert (out == 16).all()
