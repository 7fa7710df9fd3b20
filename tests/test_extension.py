"""The C surface: argument parsing, workspaces, the module. Every fault is an exception that names the argument."""

from __future__ import annotations

import gc
import inspect
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from calls import LEGAL, OPERATIONS, call, call_on_host, functions, place, second_module, zeros
from exporters import Exporter

from flexgemm import _C


@pytest.mark.parametrize("operation", OPERATIONS)
def test_legal_calls_run(backend, operation):
    call(backend, operation)


# ---- the parser ----


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((), {}, r"gemm\(\) missing required argument 'a'"),
        ((1, 2), {}, r"gemm\(\) missing required argument 'out'"),
        ((1, 2), {"scale_a": 3}, r"gemm\(\) missing required argument 'out'"),
        ((1, 2, 3, 4), {}, r"gemm\(\) takes 3 positional arguments but 4 were given"),
        ((1, 2, 3), {"a": 1}, r"gemm\(\) got multiple values for argument 'a'"),
        ((1, 2, 3), {"kernel": 1}, r"gemm\(\) got an unexpected keyword argument 'kernel'"),
        ((1, 2, 3), {"\N{GREEK SMALL LETTER ALPHA}": 1}, r"unexpected keyword argument"),
        ((1, 2, 3), {"feats": 1}, r"gemm\(\) got an unexpected keyword argument 'feats'"),
    ],
)
def test_parser_faults(arguments, keywords, message):
    with pytest.raises(TypeError, match=message):
        _C.gemm(*arguments, **keywords)


def test_keywords_that_are_not_interned_match_by_value():
    legal = {"".join(list(name)): value for name, value in LEGAL["gemm"]().items()}
    assert _C.gemm_workspace(**legal) == _C.gemm_workspace(*LEGAL["gemm"]().values())


def test_every_positional_argument_has_its_keyword():
    legal = LEGAL["conv_dgrad"]()
    expected = _C.conv_dgrad_workspace(**legal)
    names = list(legal)
    for split in range(len(names) + 1):
        rest = {name: legal[name] for name in reversed(names[split:])}
        assert _C.conv_dgrad_workspace(*(legal[name] for name in names[:split]), **rest) == expected


@pytest.mark.parametrize("operation", sorted(set(OPERATIONS) - {"grouped", "sparse_map"}))
def test_signatures_say_what_is_accepted(operation):
    run, workspace_bytes = functions(operation)
    parameters = inspect.signature(run).parameters
    assert parameters == inspect.signature(workspace_bytes).parameters
    legal = LEGAL[operation]()
    optional = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    assert set(legal) <= set(parameters)
    assert set(legal) | set(optional) == set(parameters)
    workspace_bytes(**optional | legal)


@pytest.mark.parametrize(
    ("operation", "changes", "error", "message"),
    [
        ("conv_forward", {"precision": "fast"}, ValueError, "precision: expected 'ieee' or 'tf32', got 'fast'"),
        ("conv_forward", {"precision": 1}, TypeError, "precision: expected a str, got int"),
        (
            "conv_forward",
            {"algorithm": "gemm"},
            ValueError,
            "algorithm: expected 'auto', 'explicit_gemm', 'implicit_gemm', 'implicit_gemm_splitk', "
            "'masked_implicit_gemm' or 'masked_implicit_gemm_splitk', got 'gemm'",
        ),
        ("conv_dgrad", {"algorithm": 1}, TypeError, "algorithm: expected a str, got int"),
        (
            "row_order",
            {"groups": (2,)},
            ValueError,
            r"groups: expected 1, Kw = 1 and Kw\*Kh = 3, each once, got \(2,\)",
        ),
        ("row_order", {"groups": (1, 1, 1, 1)}, ValueError, "groups: expected at most 3 ints, got 4"),
        ("row_order", {"groups": 3}, TypeError, "groups: expected a sequence of ints, got int"),
        ("segment_map", {"tiles": 1}, ValueError, "tiles: expected 2 to 4, got 1"),
        ("segment_map", {"tiles": 3}, ValueError, "tiles: expected 2 or 4, got 3"),
        ("segment_map", {"tiles": 16}, ValueError, "tiles: expected 2 to 4, got 16"),
        ("segment_map", {"in_rows": -1}, ValueError, "in_rows: expected at least 0, got -1"),
        ("segment_map", {"in_rows": 5.0}, TypeError, "in_rows: expected an int, got float"),
        (
            "segment_map",
            {"kernel_size": (3, 3, 5)},
            ValueError,
            "kernel_size: expected a volume of at most 32, got 45",
        ),
        ("conv_dgrad", {"mirrored": 1}, TypeError, "mirrored: expected a bool, got int"),
        ("neighbor_map", {"shape": (1, 1, 5)}, ValueError, "shape: expected 4 ints, got 3"),
        ("neighbor_map", {"shape": (1, 1, 5, 1, 1)}, ValueError, "shape: expected at most 4 ints, got 5"),
        ("neighbor_map", {"shape": (1, 0, 5, 1)}, ValueError, "shape: expected at least 1, got 0"),
        ("neighbor_map", {"shape": (2**21,) * 3 + (1,)}, ValueError, r"shape: expected B\*W\*H\*D below 2\^63"),
        (
            "neighbor_map",
            {"shape": (1, 1, 2**64, 1)},
            ValueError,
            "shape: expected 1 to 9223372036854775807, got 18446744073709551616",
        ),
        (
            "neighbor_map",
            {"shape": (1, 1, -(2**64), 1)},
            ValueError,
            "shape: expected at least 1, got -18446744073709551616",
        ),
        ("neighbor_map", {"shape": (1, 1, 5.0, 1)}, TypeError, "shape: expected an int, got float"),
        ("neighbor_map", {"shape": "1151"}, TypeError, "shape: expected a sequence of ints, got str"),
        ("neighbor_map", {"kernel_size": 3}, TypeError, "kernel_size: expected a sequence of ints, got int"),
        ("neighbor_map", {"kernel_size": (1, 8, 1)}, ValueError, "kernel_size: expected 1 to 7, got 8"),
        ("neighbor_map", {"dilation": (1, 0, 1)}, ValueError, "dilation: expected 1 to 2147483647, got 0"),
        ("gemm", {"dtype_a": "float7"}, ValueError, "dtype_a: expected 'float32', .* or 'uint8', got 'float7'"),
        ("gemm", {"dtype_b": 8}, TypeError, "dtype_b: expected a str, got int"),
        ("gemm", {"alpha": "1"}, TypeError, "alpha: expected a float, got str"),
        ("gemm", {"promote_every": 100}, ValueError, "promote_every: expected 128, 256, 512 or None, got 100"),
        (
            "gemm",
            {"activation": "tanh"},
            ValueError,
            "activation: expected 'relu', 'silu', 'gelu' or 'swiglu', got 'tanh'",
        ),
        ("quantize", {"swiglu": 1}, TypeError, "swiglu: expected a bool, got int"),
        ("gemm", {"accumulate": None}, TypeError, "accumulate: expected a bool"),
        ("gemm", {"stream": "default"}, TypeError, "stream: expected an int or an object with __cuda_stream__"),
        ("gemm", {"stream": -1}, ValueError, "stream: expected at least 0, got -1"),
        ("gemm", {"stream": 2**64}, ValueError, "stream: expected 0 to 9223372036854775807, got 18446744073709551616"),
    ],
)
def test_scalar_faults(backend, operation, changes, error, message):
    with pytest.raises(error, match=message):
        call(backend, operation, **changes)


def test_numpy_integers_are_integers(backend):
    call(backend, "neighbor_map", shape=tuple(np.array([1, 1, 5, 1])), kernel_size=[np.int64(1), np.uint8(3), 1])


# ---- workspaces ----


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_workspace_one_byte_short_is_refused(backend, operation):
    run, workspace_bytes = functions(operation)
    arguments = place(backend, LEGAL[operation]())
    nbytes = workspace_bytes(**arguments)
    assert run(**arguments) == nbytes  # without one, what it needs; 0 when it ran
    if nbytes == 0:
        return
    needed = nbytes - 255
    base = backend.array(zeros(nbytes + 512, dtype=np.uint8))
    for start in (0, 1, 100):  # enough at any address
        assert run(**arguments, workspace=backend.window(base, (nbytes,), (1,), start)) == 0
    with pytest.raises(ValueError, match=f"workspace: expected at least {needed} bytes"):
        run(**arguments, workspace=backend.window(base, (needed - 1,), (1,), 0))


@pytest.mark.parametrize(
    ("workspace", "error", "message"),
    [
        (zeros(2**20), TypeError, "workspace: expected dtype uint8, got float32"),
        (zeros(2**20, 2, dtype=np.uint8)[:, :1], ValueError, "workspace: expected a contiguous array"),
        (np.frombuffer(bytes(2**20), np.uint8), ValueError, "workspace: expected writable memory"),
        ([0], TypeError, "workspace: expected an array"),
    ],
)
def test_workspaces_of_the_wrong_kind(workspace, error, message):
    with pytest.raises(error, match=message):
        _C.gemm(**LEGAL["gemm"](), workspace=workspace)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_function_is_asked_for_the_workspace_once_and_only_in_need(backend, operation):
    run, workspace_bytes = functions(operation)
    arguments = place(backend, LEGAL[operation]())
    nbytes, asked = workspace_bytes(**arguments), []

    def allocate(size, first):
        asked.append((size, first is next(iter(arguments.values()))))
        return backend.array(zeros(size, dtype=np.uint8))

    assert workspace_bytes(**arguments, workspace=allocate) == nbytes
    assert run(**arguments, workspace=allocate) == 0
    assert asked == ([(nbytes, True)] if nbytes else [])


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (zeros(2**20), TypeError, "workspace: expected dtype uint8, got float32"),
        (np.frombuffer(bytes(2**20), np.uint8), ValueError, "workspace: expected writable memory"),
        (zeros(10, dtype=np.uint8), ValueError, "workspace: expected at least"),
        (None, TypeError, "workspace: expected an array"),
    ],
)
def test_a_function_that_returns_no_workspace(returned, error, message):
    with pytest.raises(error, match=message):
        _C.gemm(**LEGAL["gemm"](), workspace=lambda size, first: returned)
    with pytest.raises(ZeroDivisionError):
        _C.gemm(**LEGAL["gemm"](), workspace=lambda size, first: 1 // 0)
    legal, memory = LEGAL["gemm"](), np.zeros(_C.gemm_workspace(**LEGAL["gemm"]()) + 1024, np.uint8)
    with pytest.raises(ValueError, match="workspace: .* overlaps a"):
        _C.gemm(**legal | {"a": memory[:160].view(np.float32).reshape(5, 8)}, workspace=lambda size, first: memory)


def test_a_workspace_that_overlaps_an_input_is_refused():
    legal = LEGAL["gemm"]()
    memory = np.zeros(_C.gemm_workspace(**legal) + 1024, np.uint8)
    a = memory[:160].view(np.float32).reshape(5, 8)
    with pytest.raises(ValueError, match="workspace: .* overlaps a"):
        _C.gemm(**legal | {"a": a}, workspace=memory)


# ---- the module ----


def test_threads_call_side_by_side():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((65, 33), np.float32), rng.standard_normal((40, 33), np.float32)
    expected = zeros(65, 40)
    call_on_host("gemm", a=a, b=b, out=expected)

    def work(_):
        out = zeros(65, 40)
        for _ in range(20):
            call_on_host("gemm", a=Exporter(a), b=b, out=out)
        return out

    with ThreadPoolExecutor(4) as pool:
        for out in pool.map(work, range(8)):
            np.testing.assert_array_equal(out, expected)


def test_build_info_and_devices():
    info = _C.build_info()
    assert set(info) == {"version", "source_sha256", "cuda", "cuda_archs", "compiler", "abi"}
    assert len(info["source_sha256"]) == 64
    assert (info["cuda"] is None) == (info["cuda_archs"] == [])
    cpu = _C.device_info()
    assert cpu == _C.device_info("cpu", 0) == _C.device_info(device="cpu", index=0)
    assert cpu["num_sms"] >= 1
    assert cpu["compute_capability"] == 0
    for wrong in (("tpu",), ("cpu", 1), ("cpu", -1), (0,)):
        with pytest.raises((TypeError, ValueError)):
            _C.device_info(*wrong)


def test_the_module_has_state_of_its_own():
    """A second module object has its own DeviceArray and its own interned names, and both work."""
    second = second_module()
    assert second is not _C
    assert second.DeviceArray is not _C.DeviceArray
    legal = LEGAL["gemm"]()
    expected = _C.gemm_workspace(**legal)
    assert second.gemm_workspace(**legal) == expected
    reference = weakref.ref(second)
    del second
    gc.collect()
    assert reference() is None
    assert _C.gemm_workspace(**legal) == expected


def test_bytes_in_front_of_the_first_aligned_address_do_not_count():
    arrays = {"a": np.ones((2, 4), np.float32), "b": np.ones((3, 4), np.float32), "out": np.zeros((2, 3), np.float32)}
    needed = _C.gemm_workspace(**arrays) - 255
    base = np.zeros(needed + 1024, np.uint8)
    start = -base.ctypes.data % 256 + 1
    with pytest.raises(ValueError, match=f"workspace: expected at least {needed} bytes"):
        _C.gemm(**arrays, workspace=base[start : start + needed])
    _C.gemm(**arrays, workspace=base[start : start + needed + 255])
    assert (arrays["out"] == 4).all()
