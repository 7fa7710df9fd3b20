"""What every operation asks of its arrays and scalars: dtypes, shapes, values. A fault names the argument."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from calls import ARRAYS, E4M3, E5M2, LEGAL, call, call_on_host, zeros

import flexgemm
from flexgemm import _C

# ---- dtypes and shapes ----


FAULTY_ARRAYS = {
    "neighbor_map": [
        ({"coords": zeros(5, 4, dtype=np.int64)}, TypeError, "coords: expected dtype int32, got int64"),
        ({"coords": zeros(5, 3, dtype=np.int32)}, ValueError, r"coords: expected \(N, 4\), got \(5, 3\)"),
        ({"coords": zeros(20, dtype=np.int32)}, ValueError, r"coords: expected \(N, 4\), got \(20,\)"),
        ({"map": zeros(3, 6, dtype=np.int32)}, ValueError, r"map: expected \(3, 5\) to match kernel_size"),
        ({"map": zeros(3, 5)}, TypeError, "map: expected dtype int32, got float32"),
        ({"order": zeros(1, 5, dtype=np.int64)}, TypeError, "order: expected dtype int32, got int64"),
        ({"order": zeros(1, 6, dtype=np.int32)}, ValueError, r"order: expected \(1, 5\) to match groups and map"),
        ({"phases": (1, 0, 1)}, ValueError, "phases: expected 1 to 7, got 0"),
    ],
    "row_order": [
        ({"map": zeros(3, 5)}, TypeError, "map: expected dtype int32, got float32"),
        ({"map": zeros(2, 5, dtype=np.int32)}, ValueError, r"map: expected \(3, N\) to match kernel_size"),
        ({"order": zeros(1, 5, dtype=np.int64)}, TypeError, "order: expected dtype int32, got int64"),
        ({"order": zeros(1, 6, dtype=np.int32)}, ValueError, r"order: expected \(1, 5\) to match groups and map"),
        ({"order": zeros(5, dtype=np.int32)}, ValueError, r"order: expected \(1, 5\) to match groups and map"),
        ({"groups": (1, 3)}, ValueError, r"order: expected \(4, 5\) to match groups and map"),
        ({"phases": (2, 2, 2), "groups": (1, 3)}, ValueError, "phases: .* of more orders than one, got .2, 2, 2."),
    ],
    "ordered_map": [
        ({"map": zeros(3, 5)}, TypeError, "map: expected dtype int32, got float32"),
        ({"map": zeros(5, dtype=np.int32)}, ValueError, r"map: expected \(V, N\), got \(5,\)"),
        ({"order": zeros(1, 5, dtype=np.int64)}, TypeError, "order: expected dtype int32, got int64"),
        ({"order": zeros(5, dtype=np.int32)}, ValueError, r"order: expected \(G, 5\) to match map, got \(5,\)"),
        ({"order": zeros(1, 6, dtype=np.int32)}, ValueError, r"order: expected \(G, 5\) to match map, got \(1, 6\)"),
        ({"order": zeros(0, 5, dtype=np.int32)}, ValueError, r"order: expected \(G, N\), G at least 1, got \(0, 5\)"),
        ({"out": zeros(4, 5)}, TypeError, "out: expected dtype int32, got float32"),
        ({"out": zeros(3, 5, dtype=np.int32)}, ValueError, r"out: expected \(4, 5\) to match order and map"),
        ({"out": zeros(4, 6, dtype=np.int32)}, ValueError, r"out: expected \(4, 5\) to match order and map"),
    ],
    "segment_map": [
        ({"map": zeros(3, 5)}, TypeError, "map: expected dtype int32, got float32"),
        ({"map": zeros(2, 5, dtype=np.int32)}, ValueError, r"map: expected \(3, N\) to match kernel_size"),
        ({"order": zeros(5, dtype=np.int64)}, TypeError, "order: expected dtype int32, got int64"),
        ({"order": zeros(6, dtype=np.int32)}, ValueError, r"order: expected \(5,\) to match map, got \(6,\)"),
        ({"segments": zeros(1, 1256)}, TypeError, "segments: expected dtype int32, got float32"),
        (
            {"segments": zeros(2, 1256, dtype=np.int32)},
            ValueError,
            r"segments: expected \(1, 1256\) to match map, kernel_size and tiles, got \(2, 1256\)",
        ),
        ({"tiles": 4}, ValueError, r"segments: expected \(1, 1760\) to match map, kernel_size and tiles"),
    ],
    "conv_forward": [
        ({"order": zeros(1, 6, dtype=np.int32)}, ValueError, r"order: expected \(G, 5\) to match map"),
        ({"order": zeros(5, dtype=np.int32)}, ValueError, r"order: expected \(G, 5\) to match map"),
        ({"order": zeros(1, 5, dtype=np.int64)}, TypeError, "order: expected dtype int32, got int64"),
        ({"order": zeros(2, 5, dtype=np.int32)}, ValueError, r"order: expected \(G, N\), .* divides V"),
        ({"order": zeros(0, 5, dtype=np.int32)}, ValueError, r"order: expected \(G, N\), .* divides V"),
        (
            {"order": zeros(3, 5, dtype=np.int32), "order_groups": (1, 3)},
            ValueError,
            r"order: expected \(G, N\), G the sum of groups",
        ),
        ({"phases": (2, 2, 8)}, ValueError, "phases: expected 1 to 7, got 8"),
        (
            {"order": zeros(3, 5, dtype=np.int32), "phases": (1, 3, 1)},
            ValueError,
            r"phases: expected \(1, 1, 1\) of more orders than one, got \(1, 3, 1\)",
        ),
        (
            {"order": zeros(5, 5, dtype=np.int32), "order_groups": (1,)},
            ValueError,
            r"order: expected \(G, N\), .* or, the first being 1, \(G \+ V, N\), got \(5, 5\)",
        ),
        (
            {"order": zeros(6, 5, dtype=np.int32), "order_groups": (3,)},
            ValueError,
            r"order: expected \(G, N\), .* or, the first being 1, \(G \+ V, N\), got \(6, 5\)",
        ),
        (
            {"order": zeros(4, 5, dtype=np.int32)},
            ValueError,
            r"order: expected \(G, N\), .* \(G \+ V, N\), got \(4, 5\)",
        ),
        ({"segments": zeros(1, 1256)}, TypeError, "segments: expected dtype int32, got float32"),
        ({"segments": zeros(1256, dtype=np.int32)}, ValueError, r"segments: expected \(S, W\), got \(1256,\)"),
        ({"segments": zeros(2, 1256, dtype=np.int32)}, ValueError, "segments: expected that of segment_map for map"),
        ({"segments": zeros(1, 1257, dtype=np.int32)}, ValueError, "segments: expected that of segment_map for map"),
        ({"feats": zeros(5, 6, dtype=np.int32)}, TypeError, "feats: expected dtype float32, float16, bfloat16, fl"),
        ({"feats": zeros(5)}, ValueError, r"feats: expected \(N, C\), got \(5,\)"),
        ({"feats": zeros(1, 1, 1, 5, 6)}, ValueError, r"feats: expected \(N, C\), got \(1, 1, 1, 5, 6\)"),
        (
            {"weight": zeros(4, 1, 3, 1, 8)},
            ValueError,
            r"weight: expected \(Co, 1, 3, 1, 6\) to match feats channels, got \(4, 1, 3, 1, 8\)",
        ),
        ({"weight": zeros(4, 3, 1, 6)}, ValueError, r"weight: expected \(Co, Kw, Kh, Kd, Ci\) or \(Co, V, Ci\)"),
        ({"weight": zeros(4, 0, 6)}, ValueError, "weight: expected a kernel of 1 to 7 along each axis"),
        ({"weight": zeros(4, 8, 1, 1, 6)}, ValueError, "weight: expected a kernel of 1 to 7 along each axis"),
        ({"weight": zeros(4, 344, 6)}, ValueError, "weight: expected a kernel of 1 to 7 .*, V of 1 to 343"),
        ({"weight": zeros(4, 3, 6, dtype=np.float16)}, TypeError, "weight: .* float32 to match feats"),
        ({"bias": zeros(5)}, ValueError, r"bias: expected \(4,\) to match weight, got \(5,\)"),
        ({"bias": zeros(4, dtype=np.float16)}, TypeError, "bias: expected dtype float32 to match feats"),
        ({"map": zeros(2, 5, dtype=np.int32)}, ValueError, r"map: expected \(3, N\) to match weight, got \(2, 5\)"),
        ({"map": zeros(3, 5, dtype=np.int64)}, TypeError, "map: expected dtype int32, got int64"),
        ({"out": zeros(6, 4)}, ValueError, r"out: expected \(5, 4\) to match map and weight, got \(6, 4\)"),
        ({"out": zeros(5, 4, dtype=np.float16)}, TypeError, "out: expected dtype float32 to match feats"),
        ({"groups": 4}, ValueError, "feats: expected channels in 4 groups, got 6 channels"),
        (
            {"groups": 3, "weight": zeros(4, 1, 3, 1, 2)},
            ValueError,
            "weight: expected channels in 3 groups, got 4 channels",
        ),
        ({"feats": None}, TypeError, "feats: expected an array .*NoneType"),
        ({"out": None}, TypeError, "out: expected an array .*NoneType"),
        ({"feats": [[0.0] * 6] * 5}, TypeError, "feats: expected an array .*list"),
    ],
    "conv_dgrad": [
        ({"grad_out": zeros(5, 3)}, ValueError, r"weight: expected \(3, 1, 3, 1, Ci\) to match grad_out channels"),
        ({"order": zeros(1, 5)}, TypeError, "order: expected dtype int32, got float32"),
        ({"order": zeros(1, 5, dtype=np.int32), "phases": (1, 8, 1)}, ValueError, "phases: expected 1 to 7, got 8"),
        ({"grad_feats": zeros(5, 7)}, ValueError, r"grad_feats: expected \(5, 6\) to match map and weight"),
        ({"grad_out": zeros(6, 4), "mirrored": True}, ValueError, r"map: expected \(3, 6\) to match .*mirrored"),
    ],
    "conv_wgrad": [
        ({"map": zeros(3, 6, dtype=np.int32)}, ValueError, r"map: expected \(V, 5\) to match grad_out"),
        ({"feats": zeros(5, 6, dtype=np.float16)}, TypeError, "feats: expected dtype float32 to match grad_out"),
        ({"grad_weight": zeros(4, 2, 6)}, ValueError, r"grad_weight: expected \(4, 3, 6\) to match grad_out, map"),
        ({"grad_bias": zeros(5)}, ValueError, r"grad_bias: expected \(4,\) to match grad_out channels"),
    ],
    "depthwise_forward": [
        (
            {"weight": zeros(10, 1, 3, 1, 1), "out": zeros(4, 10)},
            ValueError,
            "out: expected a multiple of the 6 input channels, got 10",
        ),
        ({"weight": zeros(12, 1, 3, 1, 2)}, ValueError, r"weight: expected \(Co, 1, 3, 1, 1\) of one channel each"),
    ],
    "depthwise_dgrad": [
        ({"grad_feats": zeros(5, 5)}, ValueError, "grad_out: expected a multiple of the 5 input channels, got 12"),
    ],
    "depthwise_wgrad": [
        ({"feats": zeros(5, 5)}, ValueError, "grad_out: expected a multiple of the 5 input channels, got 12"),
    ],
    "gemm": [
        ({"a": zeros(5, 8, dtype=np.int32)}, TypeError, "a: expected dtype float32, .* or float8_e5m2, got int32"),
        ({"b": zeros(7, 8, dtype=np.float16)}, TypeError, "b: expected dtype float32 to match a, got float16"),
        ({"a": zeros(5, 8, dtype=E4M3)}, TypeError, "b: expected dtype float8_e4m3fn or float8_e5m2, got float32"),
        ({"b": zeros(7, 9)}, ValueError, r"b: expected \(N, 8\) to match a, got \(7, 9\)"),
        ({"out": zeros(7, 5)}, ValueError, r"out: expected \(5, 7\) to match a and b, got \(7, 5\)"),
        ({"out": zeros(5, 7, dtype=E4M3)}, TypeError, "out: expected dtype float32, float16 or bfloat16"),
        ({"scale_a": zeros(4)}, ValueError, r"scale_a: expected \(\) or \(M,\) = \(5,\) to match a, got \(4,\)"),
        ({"scale_b": zeros(7, 1)}, ValueError, r"scale_b: expected \(\) or \(N,\) = \(7,\) to match b"),
        ({"out": zeros(5, 7, dtype=E4M3), "scale_out": zeros(5)}, ValueError, r"scale_out: expected \(\) or \(1,\) to"),
        ({"scale_a": zeros(5, dtype=np.float16)}, TypeError, "scale_a: expected dtype float32, got float16"),
        ({"bias": zeros(8)}, ValueError, r"bias: expected \(7,\) to match b, got \(8,\)"),
        ({"bias": zeros(7, dtype=np.int32)}, TypeError, "bias: expected dtype float32, got int32"),
        ({"dtype_a": "float16"}, TypeError, "a: expected dtype float16, got float32"),
        ({"a": zeros(5, 8, dtype=np.uint8)}, TypeError, "a: expected dtype .*, got uint8"),
        ({"offsets": np.zeros(2, np.int32)}, ValueError, r"b: expected \(G, N, 8\) to match a, grouped by offsets"),
    ],
    "grouped": [
        ({"offsets": None}, ValueError, r"b: expected \(N, 8\) to match a"),
        ({"offsets": zeros(4, dtype=np.int32)}, ValueError, r"offsets: expected \(2,\) or \(3,\) to match the groups"),
        ({"offsets": zeros(2)}, TypeError, "offsets: expected dtype int32 or int64, got float32"),
        ({"scale_b": zeros(3)}, ValueError, r"scale_b: expected \(\), \(2,\) or \(2, 7\) to match b, got \(3,\)"),
        ({"bias": zeros(7)}, ValueError, r"bias: expected \(2, 7\) to match b, got \(7,\)"),
    ],
    "contiguous": [
        ({"m_indices": None}, ValueError, "m_indices: expected an array with layout 'm_grouped_contiguous'"),
        ({"offsets": np.zeros(2, np.int32)}, ValueError, "offsets: expected None with layout 'm_grouped_contiguous'"),
        ({"m_indices": np.zeros(4, np.int32)}, ValueError, r"m_indices: expected \(5,\) to match a, got \(4,\)"),
        ({"m_indices": np.zeros(5, np.int64)}, TypeError, "m_indices: expected dtype int32, got int64"),
    ],
    "masked": [
        ({"a": zeros(5, 8)}, ValueError, r"a: expected \(G, M, K\), got \(5, 8\)"),
        ({"b": zeros(3, 7, 8)}, ValueError, r"b: expected \(2, N, 8\) to match a, got \(3, 7, 8\)"),
        ({"out": zeros(2, 5, 8)}, ValueError, r"out: expected \(2, 5, 7\) to match a and b"),
        ({"masked_m": np.zeros(3, np.int32)}, ValueError, r"masked_m: expected \(2,\) to match a, got \(3,\)"),
        ({"scale_a": zeros(5)}, ValueError, r"scale_a: expected \(\), \(2,\) or \(2, 5\) to match a, got \(5,\)"),
    ],
    "n_grouped": [
        (
            {"offsets": np.zeros(5, np.int32)},
            ValueError,
            r"offsets: expected \(2,\) or \(3,\) to match the groups of a",
        ),
        ({"bias": zeros(2, 7)}, ValueError, r"bias: expected \(7,\) to match b, got \(2, 7\)"),
        (
            {"b": zeros(8, 8), "activation": "swiglu"},
            ValueError,
            "b: expected an even N that is not grouped for SwiGLU, got 8",
        ),
        ({"weight_indices": np.zeros(2, np.int32)}, ValueError, "weight_indices: expected None without layout 'm_gr"),
    ],
    "k_grouped": [
        ({"out": zeros(5, 7)}, ValueError, r"out: expected \(G, 5, 7\) to match a and b, got \(5, 7\)"),
        ({"out": zeros(2, 5, 7, dtype=np.float16)}, TypeError, "out: expected dtype float32, got float16"),
        (
            {"offsets": np.zeros(4, np.int32)},
            ValueError,
            r"offsets: expected \(2,\) or \(3,\) to match the groups of out",
        ),
        ({"layout": "dense"}, ValueError, "offsets: expected None|out: expected"),
        ({"layout": "diagonal"}, ValueError, "layout: expected 'dense', .* or 'k_grouped', got 'diagonal'"),
    ],
    "quantize": [
        ({"block_rows": 64}, ValueError, "block_rows: expected 0, 1 or 128, got 64"),
        ({"block_rows": 1}, ValueError, r"scale: expected \(5, 1\) to match x, got \(5,\)"),
        ({"x": zeros(5, 9), "swiglu": True}, ValueError, "x: expected an even number of columns"),
        ({"x": zeros(5, 8), "swiglu": True}, ValueError, r"q: expected \(5, 4\) to match x, got \(5, 8\)"),
        ({"x": zeros(5, 8, dtype=E4M3)}, TypeError, "x: expected dtype float32, float16 or bfloat16"),
        ({"q": zeros(5, 8, dtype=np.uint8)}, TypeError, "q: expected dtype float8_e4m3fn or float8_e5m2, got uint8"),
        ({"q": zeros(5, 9, dtype=E4M3)}, ValueError, r"q: expected \(5, 8\) to match x, got \(5, 9\)"),
        ({"scale": zeros(8)}, ValueError, r"scale: expected \(\) or \(M,\) = \(5,\) to match x, got \(8,\)"),
        ({"dtype": "float8_e5m2"}, TypeError, "q: expected dtype float8_e5m2, got float8_e4m3fn"),
        ({"x": zeros(2, 5, 8), "q": zeros(2, 5, 8, dtype=E4M3)}, ValueError, r"scale: expected \(2, 5\) to match x"),
    ],
}


@pytest.mark.parametrize(
    ("operation", "changes", "error", "message"),
    [(operation, *fault) for operation, faults in FAULTY_ARRAYS.items() for fault in faults],
)
def test_dtype_and_shape_faults(backend, operation, changes, error, message):
    with pytest.raises(error, match=message):
        call(backend, operation, **changes)


@pytest.mark.parametrize(("operation", "name"), ARRAYS)
def test_a_dtype_that_no_argument_has(backend, operation, name):
    wrong = LEGAL[operation]()[name].astype(np.int16)
    with pytest.raises(TypeError, match=f"{name}: expected dtype .*, got int16"):
        call_on_host(operation, **{name: wrong})


@pytest.mark.parametrize(
    "dtype", [np.float64, np.int8, np.uint16, bool, np.complex64, ml_dtypes.float8_e4m3, object, "M8[s]", ">f4"]
)
def test_dtypes_that_flexgemm_does_not_have_are_named(dtype):
    name = str(np.dtype(dtype)).replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(TypeError, match=f"a: expected .*, got {name}"):
        _C.gemm(zeros(5, 8, dtype=dtype), zeros(7, 8), zeros(5, 7))


@pytest.mark.parametrize("name", ["a", "b", "out"])
def test_uint8_arrays_hold_nothing_wider_than_float8(backend, name):
    operands = {"a": zeros(5, 8), "b": zeros(7, 8), "out": zeros(5, 7)}
    operands[name] = operands[name].astype(np.uint8)
    with pytest.raises(TypeError, match=f"^{name}: expected dtype float32, got uint8$"):
        call(backend, "gemm", **operands, **{f"dtype_{name}": "float32"})


def test_more_dimensions_than_any_argument_has():
    with pytest.raises(ValueError, match="a: expected at most 5 dimensions, got 6"):
        _C.gemm(zeros(1, 1, 1, 1, 5, 8), zeros(7, 8), zeros(5, 7))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_uint8_arrays_hold_the_float8_that_is_named(backend, dtype):
    raw = zeros(5, 8, dtype=np.uint8)
    call(backend, "gemm", a=raw, dtype_a=dtype, b=zeros(7, 8, dtype=E5M2))
    call(backend, "gemm", a=zeros(5, 8, dtype=E4M3), b=zeros(7, 8, dtype=np.uint8), dtype_b=dtype)
    call(backend, "quantize", q=raw, dtype=dtype)


@pytest.mark.parametrize("shape", [(), (1,), (5,)])
def test_scales_per_tensor_and_per_row(backend, shape):
    call(backend, "gemm", scale_a=zeros(*shape))
    call(backend, "quantize", scale=np.ones(shape, np.float32), scale_given=True)


# ---- scalars ----


@pytest.mark.parametrize("value", [np.True_, np.False_, True])
def test_a_bool_is_one_of_numpy_s_too(value):
    quantised, _ = flexgemm.quantize(np.ones((2, 4), np.float32), swiglu=value)
    assert quantised.shape == (2, 2 if value else 4)


def test_an_int_beyond_all_is_refused_by_name():
    """Python itself does not print one of so many digits."""
    with pytest.raises(ValueError, match="^shape: expected"):
        flexgemm.neighbor_map(np.zeros((1, 4), np.int32), (1, 10**5000, 8, 8))


def test_several_numbers_are_no_int():
    with pytest.raises(TypeError, match="^index: expected an int, got ndarray$"):
        _C.device_info("cpu", np.array([0, 0]))
    with pytest.raises(TypeError, match="^num_sms: expected an int, got ndarray$"):
        flexgemm.set_num_sms(np.array([3, 4]))


def test_an_array_without_an_axis_is_one_number():
    coords, points = np.zeros((1, 4), np.int32), np.zeros((5, 3), np.float32)
    assert flexgemm.neighbor_map(coords, (1, 4, 4, 4), np.array(3)).kernel_size == (3, 3, 3)
    assert flexgemm.voxelize(points, voxel_size=np.array(1.0), shape=(1, 4, 4, 4)).num_voxels == 1


@pytest.mark.parametrize("size", [10**400, 1e39, "x", [1, 2, "x"]], ids=["huge", "large", "text", "mixed"])
def test_sizes_that_are_no_numbers_are_refused_by_name(size):
    with pytest.raises(ValueError, match="^voxel_size: expected"):
        flexgemm.voxelize(np.zeros((5, 3), np.float32), voxel_size=size, shape=(1, 4, 4, 4))


@pytest.mark.parametrize(
    "mode, error, message",
    [
        ([], TypeError, "expected a str, got list"),
        ("cubic", ValueError, "expected 'trilinear' or 'nearest', got 'cubic'"),
    ],
    ids=["list", "cubic"],
)
def test_a_way_to_sample_is_one_of_two(mode, error, message):
    coords, grid = np.zeros((1, 4), np.int32), np.zeros((1, 5, 3), np.float32)
    with pytest.raises(error, match=f"^mode: {message}$"):
        flexgemm.grid_sample_3d(np.zeros((1, 2), np.float32), coords, (1, 4, 4, 4), grid, mode=mode)


@pytest.mark.parametrize("call", [
    lambda: flexgemm.global_pool(zeros(3, 2), np.zeros((3, 4), np.int32), 1, None),
    lambda: flexgemm.sparse_conv_map(np.zeros((1, 4), np.int32), (1, 4, 4, 4), 2, 2, order=None),
    lambda: flexgemm.encode_seq(np.zeros((1, 4), np.int32), (1, 4, 4, 4), None),
], ids=["pool", "map", "codes"])  # fmt: skip
def test_none_is_no_mode(call):
    with pytest.raises(TypeError, match="^(mode|order): expected a str, got NoneType"):
        call()
