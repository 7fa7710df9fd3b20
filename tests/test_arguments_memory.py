"""How the arrays of an operation lie in memory: strides, alignment, outputs of their own, memory that goes."""

from __future__ import annotations

import re

import numpy as np
import pytest
from calls import ARRAYS, LEGAL, call, call_on_host, zeros
from exporters import IS_COPIED, READ_ONLY, Exporter, misaligned
from hypothesis import given
from hypothesis import strategies as st

from flexgemm import _C

# ---- strides ----


def test_rows_may_be_strided_but_channels_may_not(backend):
    base = backend.array(zeros(160))
    call(backend, "gemm", {"a": backend.window(base, (5, 8), (16, 1), 3)})
    with pytest.raises(ValueError, match=r"out: expected inner stride 1, got strides \(1, 5\) of shape \(5, 7\)"):
        call(backend, "gemm", {"out": backend.window(base, (5, 7), (1, 5), 0)})


TURNED = [("gemm", "a"), ("gemm", "b"), ("quantize", "x")]  # what may lie in columns as well
EITHER_WAY = "expected stride 1 along one of the last two axes"


@pytest.mark.parametrize(("operation", "name"), TURNED)
def test_of_what_is_multiplied_or_cast_rows_or_columns_lie_side_by_side(backend, operation, name):
    base, shape = backend.array(zeros(300)), LEGAL[operation]()[name].shape
    for strides in ((16, 1), (1, 9), (0, 1), (1, 0), (1, -9)):
        call(backend, operation, {name: backend.window(base, shape, strides, 100)})
    message = f"{name}: {EITHER_WAY}, got strides (16, 2) of shape {shape}"
    with pytest.raises(ValueError, match=re.escape(message)):
        call(backend, operation, {name: backend.window(base, shape, (16, 2), 0)})


def test_an_output_may_lie_beside_transposed_views(backend):
    """Columns of one buffer, of which the operands take some as their rows."""
    base = backend.array(zeros(8 * 24))
    views = {"a": backend.window(base, (5, 8), (1, 24), 0), "b": backend.window(base, (7, 8), (1, 24), 5)}
    call(backend, "gemm", views | {"out": backend.window(base, (5, 7), (24, 1), 12)})
    for at, name in ((4, "a"), (11, "b")):
        with pytest.raises(ValueError, match=f"out: expected memory of its own, got memory that overlaps {name}"):
            call(backend, "gemm", views | {"out": backend.window(base, (5, 7), (24, 1), at)})


def test_an_input_may_repeat_rows_but_an_output_may_not(backend):
    base = backend.array(zeros(40))
    call(backend, "gemm", {"a": backend.window(base, (5, 8), (0, 1), 0)})
    for pitch in (0, 6):
        with pytest.raises(ValueError, match="out: expected rows that do not overlap"):
            call(backend, "gemm", {"out": backend.window(base, (5, 7), (pitch, 1), 0)})
    with pytest.raises(ValueError, match="out: expected rows that do not run backwards"):
        call(backend, "gemm", {"out": backend.window(base, (5, 7), (-8, 1), 32)})


@pytest.mark.parametrize(("operation", "name"), ARRAYS)
def test_elements_that_are_not_side_by_side(backend, operation, name):
    array = LEGAL[operation]()[name]
    base = backend.array(np.zeros(2 * array.size, array.dtype))
    strides = [2 * s // array.itemsize for s in array.strides]
    turned = name in {name for _, name in TURNED}  # of products by every layout
    expected = EITHER_WAY if turned else "expected (a contiguous array|inner stride 1)"
    with pytest.raises(ValueError, match=f"{name}: {expected}, got strides"):
        call(backend, operation, {name: backend.window(base, array.shape, strides, 0)})


@pytest.mark.parametrize(
    ("operation", "name"),
    [("neighbor_map", "map"), ("row_order", "map"), ("ordered_map", "map"), ("segment_map", "map"),
     ("conv_forward", "map"), ("conv_forward", "weight"), ("conv_wgrad", "grad_weight"), ("pool", "map"),
     ("pool", "argmax")],
)  # fmt: skip
def test_matrices_without_a_pitch(backend, operation, name):
    array = LEGAL[operation]()[name]
    base = backend.array(np.zeros(2 * array.size, array.dtype))
    strides = [2 * s // array.itemsize for s in array.strides[:-1]]
    with pytest.raises(ValueError, match=f"{name}: expected a contiguous array, got strides"):
        call(backend, operation, {name: backend.window(base, array.shape, [*strides, 1], 0)})


def test_strides_of_size_1_dimensions_mean_nothing(backend):
    base = backend.array(zeros(72))
    call(backend, "gemm", {"out": backend.window(base, (1, 7), (0, 1), 0)}, a=zeros(1, 8))
    call(backend, "conv_forward", {"weight": backend.window(base, (4, 1, 3, 1, 6), (18, 5, 6, 9, 1), 0)})
    column = {"a": backend.window(base, (5, 1), (3, 9), 0), "b": backend.window(base, (7, 1), (1, 0), 0)}
    call(backend, "gemm", column)


def test_null_strides_mean_contiguous():
    call_on_host("gemm", a=Exporter(zeros(5, 8), strides=None), b=Exporter(zeros(7, 8), versioned=False, strides=None))


def test_arrays_without_elements(backend):
    call(backend, "gemm", a=zeros(0, 8), out=zeros(0, 7))
    call(backend, "gemm", a=zeros(5, 0), b=zeros(7, 0))
    call(backend, "conv_forward", feats=zeros(0, 6), map=zeros(3, 0, dtype=np.int32), out=zeros(0, 4))
    call(backend, "neighbor_map", coords=zeros(0, 4, dtype=np.int32), map=zeros(3, 0, dtype=np.int32))
    call(backend, "row_order", map=zeros(3, 0, dtype=np.int32), order=zeros(1, 0, dtype=np.int32))
    empty = {"map": zeros(3, 0, dtype=np.int32), "order": zeros(1, 0, dtype=np.int32)}
    call(backend, "ordered_map", **empty, out=zeros(4, 0, dtype=np.int32))
    empty = {"map": zeros(3, 0, dtype=np.int32), "order": zeros(0, dtype=np.int32)}
    call(backend, "segment_map", **empty, segments=zeros(0, 1256, dtype=np.int32))
    call(backend, "row_order", order=zeros(0, 5, dtype=np.int32), groups=())


def test_a_null_pointer_is_legal_only_without_elements():
    call_on_host("gemm", a=Exporter(zeros(0, 8), data=None), out=Exporter(zeros(0, 7), data=None))
    with pytest.raises(BufferError, match="a: the exporter gave a NULL pointer"):
        call_on_host("gemm", a=Exporter(zeros(5, 8), data=None))


def test_misaligned_inputs_are_read_and_misaligned_outputs_refused():
    a, b = (np.random.default_rng(0).standard_normal((n, 8), np.float32) for n in (5, 7))
    got, expected = zeros(5, 7), zeros(5, 7)
    call_on_host("gemm", a=a, b=b, out=expected)
    call_on_host("gemm", a=misaligned(a), b=misaligned(b), out=got)
    np.testing.assert_array_equal(got, expected)
    with pytest.raises(ValueError, match="out: expected memory aligned to its elements"):
        call_on_host("gemm", out=misaligned(zeros(5, 7)))
    with pytest.raises(ValueError, match="a: expected memory aligned to its elements, of 4 bytes each"):
        call_on_host("gemm", a=Exporter(misaligned(a)))


# ---- outputs ----


def test_read_only_outputs_are_refused_and_inputs_accepted():
    frozen = LEGAL["conv_forward"]()
    for array in frozen.values():
        array.flags.writeable = False
    writable = LEGAL["conv_forward"]()["out"]
    call_on_host("conv_forward", **frozen | {"out": writable})
    with pytest.raises(ValueError, match="out: expected writable memory, got a read-only array"):
        call_on_host("conv_forward", **frozen)
    call_on_host("gemm", a=Exporter(zeros(5, 8), flags=READ_ONLY))
    with pytest.raises(ValueError, match="out: expected writable memory"):
        call_on_host("gemm", out=Exporter(zeros(5, 7), flags=READ_ONLY))


def test_a_scale_is_an_output_unless_it_is_given():
    scale = np.ones(5, np.float32)
    scale.flags.writeable = False
    call_on_host("quantize", scale=scale, scale_given=True)
    with pytest.raises(ValueError, match="scale: expected writable memory"):
        call_on_host("quantize", scale=scale)


def test_an_exporter_that_copies_is_no_output():
    call_on_host("gemm", a=Exporter(zeros(5, 8), flags=IS_COPIED))
    with pytest.raises(ValueError, match="out: expected the array's own memory, got a copy"):
        call_on_host("gemm", out=Exporter(zeros(5, 7), flags=IS_COPIED))


def test_overlap_with_an_input_or_another_output_is_refused(backend):
    base = backend.array(zeros(200))
    a, out = backend.window(base, (5, 8), (8, 1), 0), backend.window(base, (5, 7), (7, 1), 39)
    with pytest.raises(ValueError, match="out: expected memory of its own, got memory that overlaps a"):
        call(backend, "gemm", {"a": a, "out": out})
    grad_weight = backend.window(base, (4, 3, 6), (18, 6, 1), 0)
    with pytest.raises(ValueError, match="grad_weight: .* overlaps grad_bias"):
        call(backend, "conv_wgrad", {"grad_weight": grad_weight, "grad_bias": backend.window(base, (4,), (1,), 71)})
    call(backend, "conv_wgrad", {"grad_weight": grad_weight, "grad_bias": backend.window(base, (4,), (1,), 72)})


def test_an_output_may_be_the_neighbouring_columns_of_an_input(backend):
    base = backend.array(zeros(100))
    a = backend.window(base, (5, 8), (20, 1), 0)
    call(backend, "gemm", {"a": a, "out": backend.window(base, (5, 7), (20, 1), 8)})
    with pytest.raises(ValueError, match="out: .* overlaps a"):
        call(backend, "gemm", {"a": a, "out": backend.window(base, (5, 7), (20, 1), 7)})


def test_matrices_of_an_output_with_others_between(backend):
    """Of a batch whose matrices do not lie one behind the other the second is memory of its own as well."""
    base = backend.array(zeros(700))
    given = {"out": backend.window(base, (2, 5, 7), (300, 20, 1), 0), "b": backend.array(zeros(2, 7, 8))}
    how = {"layout": "batched"}
    with pytest.raises(ValueError, match="out: .* overlaps a"):
        call(backend, "gemm", given | {"a": backend.window(base, (2, 5, 8), (100, 20, 1), 300)}, **how)
    call(backend, "gemm", given | {"a": backend.window(base, (2, 5, 8), (100, 20, 1), 500)}, **how)


@pytest.mark.parametrize("rows", [1, 2])
def test_matrices_of_one_row_may_be_the_neighbouring_columns_too(backend, rows):
    """As those of more rows; what their rows are apart is then what the matrices are."""
    base = backend.array(zeros(4 * rows * 15))
    a, b = (backend.window(base, (4, rows, columns), (15 * rows, 15, 1), first) for columns, first in ((8, 0), (7, 8)))
    given = {"a": a, "b": backend.array(zeros(4, 7, 8))}
    call(backend, "gemm", given | {"out": b}, layout="batched")
    with pytest.raises(ValueError, match="out: .* overlaps a"):
        out = backend.window(base, (4, rows, 7), (15 * rows, 15, 1), 7)
        call(backend, "gemm", given | {"out": out}, layout="batched")


@pytest.mark.parametrize("rows, columns", [(1, 7), (5, 1)])
def test_one_row_beside_several(backend, rows, columns):
    """One row of the output beside the rows of b, and the other way round: a single row has no pitch of its own."""
    base = backend.array(zeros(140))
    pitched, single = ((columns, 8), (rows, columns)) if rows == 1 else ((rows, columns), (columns, 8))
    for start in (pitched[1], pitched[1] - 1):
        arrays = backend.window(base, pitched, (20, 1), 0), backend.window(base, single, (single[1], 1), 40 + start)
        b, out = arrays if rows == 1 else arrays[::-1]
        given = {"a": backend.array(zeros(rows, 8)), "b": b, "out": out}
        if start == pitched[1]:
            call(backend, "gemm", given)
        else:
            with pytest.raises(ValueError, match="out: .* overlaps b"):
                call(backend, "gemm", given)


@given(
    rows=st.integers(1, 4),
    widths=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    starts=st.tuples(*[st.integers(0, 30)] * 2),
)
def test_overlap_of_equal_pitch_is_exact(rows, widths, starts):
    base = zeros(100)
    a, out = (
        np.lib.stride_tricks.as_strided(base[start:], (rows, width), (36, 4))
        for start, width in zip(starts, widths, strict=True)
    )
    arguments = {"a": a, "b": zeros(widths[1], widths[0]), "out": out}
    if np.shares_memory(a, out):
        with pytest.raises(ValueError, match="out: .* overlaps a"):
            call_on_host("gemm", **arguments)
    else:
        call_on_host("gemm", **arguments)


def test_a_stream_is_read_before_arrays_are_opened():
    """One of the caller's own class may free what would be written to."""
    a, b, out = zeros(64, 16), zeros(64, 16), zeros(64, 64)

    class Stream:
        def __index__(self):
            out.resize((1, 1), refcheck=False)
            return 0

    with pytest.raises(ValueError, match=r"^out: expected \(64, 64\)"):
        _C.gemm(a, b, out, stream=Stream())


class Meddler:
    """An array whose exporter first exchanges the memory of another one."""

    def __init__(self, array, other):
        self.array, self.other = array, other

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **how):
        self.other.resize((1, 1), refcheck=False)
        return self.array.__dlpack__(**how)


@pytest.mark.parametrize("name", ["a", "out"])
def test_memory_that_an_exporter_exchanges_is_not_used(name):
    arrays = {"a": zeros(64, 16), "out": zeros(64, 64)}
    with pytest.raises(ValueError, match=f"^{name}: its memory was exchanged while other arguments were read"):
        _C.gemm(arrays["a"], Meddler(zeros(64, 16), arrays[name]), arrays["out"])


@pytest.mark.parametrize("told", [0, 17])
def test_memory_that_goes_while_a_sequence_is_read_late_is_not_used(told):
    coords, out, room = np.zeros((4096, 4), np.int32), np.empty((27, 4096), np.int32), np.empty(1 << 20, np.uint8)

    class Growing:
        """Of another length when it is asked again."""

        lengths = [told]

        def __len__(self):
            return self.lengths.pop() if self.lengths else 3

        def __getitem__(self, i):
            if not self.lengths:
                coords.resize((1, 4), refcheck=False)
            return 1

    with pytest.raises(ValueError, match="^coords: its memory was exchanged while other arguments were read"):
        _C.neighbor_map(coords, out, shape=(1, 2, 2, 2), kernel_size=(3, 3, 3), dilation=Growing(), workspace=room)


def test_memory_that_goes_while_a_workspace_is_made_is_not_used():
    keys, order = np.arange(100_000, dtype=np.int32)[::-1].copy(), np.zeros(100_000, np.int32)

    def workspace(nbytes, like):
        keys.resize(1, refcheck=False)
        return np.empty(nbytes, np.uint8)

    with pytest.raises(ValueError, match="its memory was exchanged"):
        _C.sort_keys(keys, order, None, bits=32, workspace=workspace)


def test_a_misaligned_array_of_a_subclass_is_copied_without_its_code():
    class Loud(np.ndarray):
        def __array_finalize__(self, obj):
            if seen is not None:
                seen.append(obj)

    seen = None
    a = misaligned(zeros(5, 8)).view(Loud)
    seen = []
    _C.gemm(a, zeros(7, 8), zeros(5, 7))
    assert seen == []
