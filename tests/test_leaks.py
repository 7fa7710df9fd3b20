"""A hundred thousand calls leave memory and reference counts as they were, errors included."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from exporters import Exporter, Forwarding, OldForwarding, exchange_type, misaligned

import flexgemm
from flexgemm import _C

CALLS = 100_000
SLACK = 4 << 20  # bytes of whatever kind


@pytest.fixture(autouse=True)
def quick_collections():
    """Whatever else the session has imported is left out of the many collections here."""
    gc.freeze()
    yield
    gc.unfreeze()


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Mallinfo2(ctypes.Structure):
    """What is asked for are the bytes in mapped blocks, and those in use of the others."""

    _fields_ = [("before", 4 * ctypes.c_size_t), ("mapped", ctypes.c_size_t), ("between", 2 * ctypes.c_size_t)]
    _fields_ += [("used", ctypes.c_size_t), ("after", 2 * ctypes.c_size_t)]


def allocated_bytes():
    """Of malloc. Where there is no glibc that tells, 0."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = Mallinfo2
    info = mallinfo2()
    return info.used + info.mapped


def assert_flat(function, calls=CALLS):
    for _ in range(1000):
        function()
    gc.collect()
    before, allocated, blocks = resident_bytes(), allocated_bytes(), sys.getallocatedblocks()
    for _ in range(calls):
        function()
    gc.collect()
    assert resident_bytes() - before < SLACK
    # Free lists and caches grow a little; the least that malloc gives is 32 bytes.
    assert allocated_bytes() - allocated < calls * 16
    assert sys.getallocatedblocks() - blocks < calls // 20


def product(wrap=lambda array: array):
    """Keyword arguments of a 2 x 4 by 3 x 4 product, its arrays wrapped."""
    a, b, out = (np.ones(shape, np.float32) for shape in ((2, 4), (3, 4), (2, 3)))
    plain = {"a": a, "b": b, "out": out}
    workspace = np.empty(_C.gemm_workspace(**plain), np.uint8)
    return {name: wrap(array) for name, array in plain.items()} | {"workspace": workspace}


@pytest.mark.parametrize(
    ("wrap", "calls"),
    [
        pytest.param(lambda a: a, CALLS, id="numpy"),
        pytest.param(Forwarding, CALLS // 2, id="versioned"),
        pytest.param(OldForwarding, CALLS // 4, id="unversioned"),
        pytest.param(Exporter, CALLS // 4, id="counted"),
        pytest.param(exchange_type(), CALLS // 4, id="exchange"),
        pytest.param(exchange_type(borrowing=False), CALLS // 4, id="exchange-managed"),
    ],
)
def test_products_of_any_exporter(wrap, calls):
    arguments = product(wrap)
    if wrap is Exporter or "_alive" in vars(wrap):
        for array in list(arguments.values())[:3]:
            array.asked = _Forgetful()
    used = vars(wrap).get("used", [])

    def call():
        _C.gemm(**arguments)
        used.clear()

    assert_flat(call, calls)


class _Forgetful(list):
    def append(self, _):
        pass


def test_torch_tensors():
    torch = pytest.importorskip("torch", reason="torch not installed")
    arguments = product(torch.from_numpy)
    assert_flat(lambda: _C.gemm(**arguments))
    del arguments["workspace"]  # torch lends it
    assert_flat(lambda: _C.gemm(**arguments))


def test_misaligned_inputs_are_copied_and_forgotten():
    arguments = product() | {"a": misaligned(np.ones((2, 4), np.float32))}
    assert_flat(lambda: _C.gemm(**arguments))


def test_workspaces_of_a_function():
    arguments = product() | {"workspace": lambda nbytes, like: np.empty(nbytes, np.uint8)}
    assert_flat(lambda: _C.gemm(**arguments), CALLS // 4)


class Raising:
    def __dlpack__(self, **keywords):
        raise BufferError("no")


FAULTS = {
    "missing": lambda p: _C.gemm(p["a"], p["b"]),
    "number": lambda p: _C.gemm(**p, alpha=10**400),
    "unknown": lambda p: _C.gemm(**p, kernel=3),
    "twice": lambda p: _C.gemm(p["a"], **p),
    "dtype": lambda p: _C.gemm(**p | {"b": p["workspace"]}),
    "shape": lambda p: _C.gemm(**p | {"b": p["out"]}),
    "strides": lambda p: _C.gemm(**p | {"a": p["a"][:, ::2]}),
    "overlap": lambda p: _C.gemm(**p | {"out": p["b"][:2, :3]}),
    "workspace": lambda p: _C.gemm(**p | {"workspace": p["workspace"][:1]}),
    "precision": lambda p: _C.gemm(**p, precision="fast"),
    "scale": lambda p: _C.gemm(**p, scale_a=p["b"]),
    "stream": lambda p: _C.gemm(**p, stream=-1),
    "no array": lambda p: _C.gemm(**p | {"out": None}),
    "exporter": lambda p: _C.gemm(**p | {"out": Raising()}),
    "second exporter": lambda p: _C.gemm(**p | {"a": Forwarding(p["a"]), "out": Raising()}),
    "backend": lambda p: _C.neighbor_map(
        np.full((1, 4), 9, np.int32), np.empty((1, 1), np.int32), shape=(1, 1, 1, 1), kernel_size=(1, 1, 1),
        dilation=(1, 1, 1), workspace=np.empty(1 << 16, np.uint8)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_error_paths(fault):
    arguments = product()
    counted = [*arguments.values(), Raising, Forwarding, np.float32]
    run = FAULTS[fault]

    def failing():
        with pytest.raises((TypeError, ValueError, BufferError)):
            run(arguments)

    def quietly():
        try:
            run(arguments)
        except Exception:
            return
        raise AssertionError("no error")

    failing()
    gc.collect()
    before = [sys.getrefcount(x) for x in counted]
    for _ in range(100):
        quietly()
    gc.collect()
    assert [sys.getrefcount(x) for x in counted] == before
    assert_flat(quietly, CALLS // 20)


def test_reference_counts_after_success():
    arguments = product(Forwarding)
    inner = [x.array for x in arguments.values() if isinstance(x, Forwarding)]
    counted = [*arguments.values(), *inner, Forwarding]
    _C.gemm(**arguments)
    before = [sys.getrefcount(x) for x in counted]
    for _ in range(100):
        _C.gemm(**arguments)
        _C.gemm_workspace(**arguments)
    assert [sys.getrefcount(x) for x in counted] == before


def test_reference_counts_of_numbers_in_sequences():
    number, fraction = 10**6, 0.75
    before = sys.getrefcount(number), sys.getrefcount(fraction)
    points, codes = np.zeros((1, 3), np.float32), np.zeros(1, np.int32)
    for _ in range(100):
        _C.voxel_codes(points, codes, None, shape=(1, number, 1, 1), voxel_size=[fraction] * 3, origin=[fraction] * 3)
    assert (sys.getrefcount(number), sys.getrefcount(fraction)) == before


def test_device_memory(cuda):
    """Far more than any card holds passes through, and host memory stays flat."""
    for _ in range(1000):
        _C.DeviceArray.empty((1 << 30,), "uint8")
    host = np.ones((64, 64), np.float32)
    capsules = []

    def use():
        array = _C.DeviceArray.from_numpy(host)
        view = array.reshape((4096,))
        capsules[:] = [view.__dlpack__(max_version=(1, 0)), array.__dlpack__(stream=2)]

    assert_flat(use, CALLS // 5)


def test_device_calls(cuda):
    arguments = {name: cuda.array(value) for name, value in product().items() if name != "workspace"}
    nbytes = _C.gemm_workspace(**arguments)
    arguments["workspace"] = cuda.empty((nbytes,), "uint8") if nbytes else None
    assert_flat(lambda: _C.gemm(**arguments))


def test_reference_counts_of_what_errors_name():
    class Wrong:
        pass

    arguments, name = product(), Wrong.__name__
    before = sys.getrefcount(name)
    for _ in range(100):
        with pytest.raises(TypeError, match="b_row_major: expected a bool, got Wrong"):
            _C.gemm(**arguments, b_row_major=Wrong())
    assert sys.getrefcount(name) < before + 50


@pytest.mark.parametrize("argument", [0, 1])
def test_types_of_arrays_do_not_live_for_ever(argument):
    def used():
        class Array(np.ndarray):
            pass

        factors = [np.ones((rows, 4), np.float32) for rows in (2, 3)]
        factors[argument] = factors[argument].view(Array)
        flexgemm.gemm_nt(*factors)
        return weakref.ref(Array)

    made = [used() for _ in range(200)]
    gc.collect()
    assert sum(array() is not None for array in made) <= 100


def test_reference_counts_of_a_stream_s_answer():
    class Stream:
        pair = (0, 2**40)

        def __cuda_stream__(self):
            return self.pair

    arguments = product()
    _C.gemm(**arguments, stream=Stream())
    before = sys.getrefcount(Stream.pair)
    for _ in range(100):
        _C.gemm(**arguments, stream=Stream())
    after = sys.getrefcount(Stream.pair)  # not inside the assert: pytest would hold it
    assert after == before
