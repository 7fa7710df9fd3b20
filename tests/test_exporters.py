"""How the extension meets other array libraries: DLPack capsules, the C exchange API, devices and streams."""

from __future__ import annotations

import gc
import sys
import types
import weakref

import numpy as np
import pytest
from calls import LEGAL, Stream, call, call_on_host, second_module, zeros
from exporters import (
    CPU,
    CUDA,
    CUDA_HOST,
    READ_ONLY,
    ROCM,
    Deleter,
    Exporter,
    Forwarding,
    OldForwarding,
    exchange_type,
)

from flexgemm import _C

BUILT_WITH_CUDA = _C.build_info()["cuda"] is not None

# ---- exporters ----


@pytest.mark.parametrize("wrap", [Forwarding, OldForwarding, Exporter, lambda a: Exporter(a, versioned=False)])
def test_exporters_give_what_numpy_gives(wrap):
    a, b = (np.random.default_rng(n).standard_normal((n, 8), np.float32) for n in (5, 7))
    got, expected = zeros(5, 7), zeros(5, 7)
    call_on_host("gemm", a=a, b=b, out=expected)
    call_on_host("gemm", a=wrap(a), b=wrap(b), out=wrap(got))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("versioned", [True, False])
def test_a_capsule_is_renamed_and_its_deleter_called_once(versioned):
    exporter = Exporter(zeros(5, 8), versioned=versioned)
    legal = LEGAL["gemm"]() | {"a": exporter}
    nbytes = _C.gemm_workspace(**legal)
    assert exporter.deleted == 1
    assert exporter.capsule_name == ("used_dltensor_versioned" if versioned else "used_dltensor")
    _C.gemm(**legal, workspace=zeros(nbytes, dtype=np.uint8))
    assert exporter.deleted == 2
    with pytest.raises(ValueError, match="out: "):
        _C.gemm(**legal | {"out": zeros(1, 1)})
    assert exporter.deleted == 3
    with pytest.raises(TypeError, match="b: "):
        _C.gemm(exporter, None, None)
    assert exporter.deleted == 3, "the capsule was asked for before the devices were known"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torch_lends_the_workspace(device):
    """A library whose exchange API allocates is asked for the scratch memory, on its current stream only."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__") or (device == "cuda" and not torch.cuda.is_available()):
        pytest.skip("no exchange API, or no CUDA device")
    torch.manual_seed(0)
    grad_out, feats = torch.randn(5000, 24, device=device), torch.randn(5000, 40, device=device)
    nmap = torch.randint(-1, 5000, (27, 5000), dtype=torch.int32, device=device)
    lent, given = (torch.full((24, 27, 40), torch.nan, device=device) for _ in range(2))
    assert _C.conv_wgrad(grad_out, feats, nmap, lent, None) == 0
    nbytes = _C.conv_wgrad_workspace(grad_out, feats, nmap, given, None)
    assert nbytes > 0
    workspace = torch.empty(nbytes, dtype=torch.uint8, device=device)
    assert _C.conv_wgrad(grad_out, feats, nmap, given, None, workspace=workspace) == 0
    assert torch.equal(lent, given)
    if device == "cuda":
        other = torch.cuda.Stream()
        assert _C.conv_wgrad(grad_out, feats, nmap, lent, None, stream=other.cuda_stream) == nbytes


def test_every_export_offers_version_1():
    exporter = Exporter(zeros(5, 8))
    call_on_host("gemm", a=exporter)
    assert exporter.asked == [{"max_version": (1, 3)}] * 2


class Refused(Exception):
    pass


@pytest.mark.parametrize("error", [Refused("boom"), TypeError("boom"), BufferError("boom"), KeyboardInterrupt("boom")])
def test_an_exporters_exception_passes_through_and_names_the_argument(error):
    class Raising(Forwarding):
        calls = 0

        def __dlpack__(self, **keywords):
            Raising.calls += 1
            raise error

    with pytest.raises(type(error), match="boom") as raised:
        _C.gemm(zeros(5, 8), Raising(zeros(7, 8)), zeros(5, 7))
    assert raised.value is error
    assert any("'b'" in note for note in error.__notes__)
    assert Raising.calls == 1


def test_only_an_unknown_keyword_is_retried_and_the_stream_kept():
    class Old(OldForwarding):
        asked = []

        def __dlpack_device__(self):
            return CUDA, 0

        def __dlpack__(self, stream=None):
            self.asked.append(stream)
            raise Refused("enough")

    with pytest.raises(Refused if BUILT_WITH_CUDA else NotImplementedError):
        _C.gemm(Old(zeros(5, 8)), Old(zeros(7, 8)), Old(zeros(5, 7)), stream=77)
    assert Old.asked == [77] * BUILT_WITH_CUDA


@pytest.mark.parametrize("junk", [None, 7, "capsule", b"", object()])
def test_junk_instead_of_a_capsule(junk):
    class Junk(Forwarding):
        def __dlpack__(self, **keywords):
            return junk

    with pytest.raises(TypeError, match="a: expected __dlpack__ to return a fresh DLPack capsule, got"):
        _C.gemm(Junk(zeros(5, 8)), zeros(7, 8), zeros(5, 7))


def test_a_used_capsule_is_refused():
    exporter = Exporter(zeros(5, 8))
    call_on_host("gemm", a=exporter)
    deleted, used = exporter.deleted, exporter.capsule

    class Again(Forwarding):
        def __dlpack__(self, **keywords):
            return used

    with pytest.raises(TypeError, match="a: expected __dlpack__ to return a fresh"):
        _C.gemm(Again(zeros(5, 8)), zeros(7, 8), zeros(5, 7))
    assert exporter.deleted == deleted


@pytest.mark.parametrize("device", [None, (), (1,), ("cpu", 0), (1.5, 0), 1])
def test_junk_instead_of_a_device(device):
    class Junk(Forwarding):
        def __dlpack_device__(self):
            return device

    with pytest.raises((TypeError, IndexError)) as raised:
        _C.gemm(zeros(5, 8), Junk(zeros(7, 8)), zeros(5, 7))
    assert any("'b'" in note for note in raised.value.__notes__)


def test_a_device_is_assumed_to_be_the_host_when_none_is_told():
    class Deviceless:
        def __dlpack__(self):
            return np.zeros((5, 8), np.float32).__dlpack__()

    call_on_host("gemm", a=Deviceless())


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"device_type": ROCM}, ValueError, "a: expected CPU or CUDA memory, got DLPack device type 10"),
        ({"announced": (ROCM, 0)}, ValueError, "a: expected CPU or CUDA memory, got DLPack device type 10"),
        (
            {"announced": (CPU, 0), "device_type": CUDA},
            BufferError,
            "a: __dlpack_device__ said cpu, .* memory on cuda:0",
        ),
        ({"version": (2, 0)}, BufferError, "a: expected DLPack version 1, got 2.0"),
        ({"ndim": -1}, ValueError, "a: expected at most 5 dimensions, got -1"),
        ({"ndim": 6}, ValueError, "a: expected at most 5 dimensions, got 6"),
        ({"shape": None}, BufferError, "a: the exporter gave 2 dimensions and no shape"),
        ({"shape": (-5, 8)}, BufferError, r"a: the exporter gave an impossible shape or strides: \(-5, 8\)"),
        ({"shape": (2**62, 8)}, BufferError, "a: the exporter gave an impossible shape"),
        ({"shape": (2**40, 2**40), "strides": (0, 1)}, BufferError, "a: the exporter gave an impossible shape"),
        ({"strides": (2**62, 1)}, BufferError, "a: the exporter gave an impossible shape or strides"),
        ({"bits": 64}, TypeError, "a: expected dtype .*, got float64"),
        ({"code": 14, "bits": 8}, TypeError, "a: expected dtype .*, got float8_e8m0fnu"),
        ({"lanes": 4}, TypeError, r"a: expected dtype .*, got DLPack dtype \(code 2, 32 bits, 4 lanes\)"),
        ({"code": 99}, TypeError, r"a: expected dtype .*, got DLPack dtype \(code 99"),
    ],
)
def test_impossible_exports(fields, error, message):
    exporter = Exporter(zeros(5, 8), **fields)
    with pytest.raises(error, match=message):
        _C.gemm(exporter, zeros(7, 8), zeros(5, 7))
    assert exporter.deleted == (0 if "announced" in fields and fields["announced"][0] == ROCM else len(exporter.asked))


@pytest.mark.parametrize("versioned", [True, False])
def test_a_producer_without_a_deleter(versioned):
    exporter = Exporter(zeros(5, 8), versioned=versioned)
    exporter.managed.deleter = Deleter()
    call_on_host("gemm", a=exporter)
    assert exporter.asked and exporter.deleted == 0


def test_byte_offsets_and_pinned_memory():
    memory = np.arange(48, dtype=np.float32)
    a = Exporter(memory[8:].reshape(5, 8), data=memory.ctypes.data, byte_offset=32, device_type=CUDA_HOST, device_id=3)
    got, expected, b = zeros(5, 7), zeros(5, 7), np.ones((7, 8), np.float32)
    call_on_host("gemm", a=a, b=b, out=got)
    call_on_host("gemm", a=memory[8:].reshape(5, 8), b=b, out=expected)
    np.testing.assert_array_equal(got, expected)


# ---- the exchange API ----


def test_the_exchange_api_borrows_without_a_capsule():
    Type = exchange_type()
    arrays = {"a": Type(zeros(5, 8)), "b": Type(zeros(7, 8)), "out": Type(zeros(5, 7))}
    assert _C.gemm_workspace(**arrays) == _C.gemm_workspace(**LEGAL["gemm"]())
    assert Type.used == ["borrowed"] * 3
    assert not any(array.asked or array.deleted for array in arrays.values())


def test_arrays_of_the_host_are_asked_for_no_stream():
    Type = exchange_type()
    array = Type(zeros(5, 8))
    assert not _C.is_capturing(array)
    assert _C.wait_for(_C.mark(array), array)
    assert set(Type.used) == {"borrowed"}


def test_a_table_without_borrowing_gives_managed_tensors():
    Type = exchange_type(borrowing=False)
    array = Type(zeros(5, 8))
    call_on_host("gemm", a=array)
    assert Type.used == ["managed"] * 2
    assert array.deleted == 2
    with pytest.raises(ValueError, match="out: expected writable"):
        call_on_host("gemm", out=Type(zeros(5, 7), flags=READ_ONLY))


def test_an_older_table_behind_a_newer_one_is_found():
    Type = exchange_type(versions=((3, 0), (2, 0), (1, 1)))
    call_on_host("gemm", a=Type(zeros(5, 8)))
    assert Type.used == ["borrowed"] * 2


@pytest.mark.parametrize("how", [{"versions": ((2, 0),)}, {"capsule_name": b"another_table"}])
def test_a_table_that_is_not_ours_to_read_is_passed_over(how):
    Type = exchange_type(**how)
    array = Type(zeros(5, 8))
    call_on_host("gemm", a=array)
    assert Type.used == []
    assert array.deleted == 2


def test_a_failing_table_names_the_argument():
    Type = exchange_type(status=-1)
    with pytest.raises(BufferError, match="exchange API failed") as raised:
        call_on_host("gemm", b=Type(zeros(7, 8)))
    assert any("'b'" in note for note in raised.value.__notes__)


def test_many_types_of_arrays_come_and_go():
    types = []
    for _ in range(40):
        Type = type("Wrapped", (Forwarding,), {})
        call_on_host("gemm", a=Type(zeros(5, 8)))
        types.append(weakref.ref(Type))
        del Type
    gc.collect()
    assert sum(ref() is not None for ref in types) <= 8, "types are kept beyond the cache"


# ---- devices and streams ----


def test_mixed_devices_are_both_named():
    elsewhere = Exporter(zeros(7, 8), announced=(CUDA, 1))
    with pytest.raises(ValueError, match="b: expected memory on cpu like a, got memory on cuda:1"):
        _C.gemm(zeros(5, 8), elsewhere, zeros(5, 7))
    with pytest.raises(ValueError, match="b: expected memory on cuda:1 like a, got memory on cuda:0"):
        _C.gemm(elsewhere, Exporter(zeros(7, 8), announced=(CUDA, 0)), zeros(5, 7))
    assert not elsewhere.asked


@pytest.mark.parametrize(
    ("stream", "number"),
    [
        (None, 1),
        (0, 1),
        (1, 1),
        (2, 2),
        (2**40, 2**40),
        (Stream((0, 0)), 1),
        (Stream((0, 2)), 2),
        (Stream((0, 99)), 99),
    ],
)
def test_producers_are_told_the_stream_by_dlpacks_numbers(stream, number):
    asked = []

    class Elsewhere(Forwarding):
        def __dlpack_device__(self):
            return CUDA, 0

        def __dlpack__(self, *, stream, max_version):
            asked.append(stream)
            raise Refused

    expected = Refused if BUILT_WITH_CUDA else NotImplementedError
    with pytest.raises(expected, match=None if BUILT_WITH_CUDA else "gemm: a is on cuda:0, and this build .* no CUDA"):
        _C.gemm(*(Elsewhere(array) for array in LEGAL["gemm"]().values()), stream=stream)
    assert asked == [number] * BUILT_WITH_CUDA


@pytest.mark.parametrize("stream", [None, 0, 1, 2, True, np.int64(2), Stream((0, 2))])
def test_streams_of_any_form(backend, stream):
    call(backend, "gemm", stream=stream)


@pytest.mark.parametrize(
    ("stream", "error", "message"),
    [
        (Stream((1, 0)), ValueError, "version of __cuda_stream__"),
        (Stream((0, -1)), ValueError, "stream: expected at least 0"),
        (Stream((0, "x")), TypeError, "stream: expected an int, got str"),
        (Stream(()), IndexError, "index out of range"),
        (Stream(None), TypeError, "NoneType"),
    ],
)
def test_stream_protocol_faults(backend, stream, error, message):
    with pytest.raises(error, match=message):
        call(backend, "gemm", stream=stream)


def test_cupys_current_stream_of_the_device_is_taken(monkeypatch):
    """A stand-in for CuPy: the call itself ends where the memory would be asked for."""
    asked = []

    class Elsewhere(Forwarding):
        __module__ = "cupy._core"

        def __dlpack_device__(self):
            return CUDA, 3

        def __dlpack__(self, *, stream, max_version):
            asked.append(stream)
            raise Refused

    def get_current_stream(device):
        return types.SimpleNamespace(ptr=1000 + device)

    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", types.ModuleType("cupy.cuda"))
    sys.modules["cupy.cuda"].get_current_stream = get_current_stream
    module = second_module()  # whose memory of CuPy ends with this test
    arrays = [Elsewhere(array) for array in LEGAL["gemm"]().values()]
    for stream in (None, 2):
        with pytest.raises(Refused if BUILT_WITH_CUDA else NotImplementedError):
            module.gemm(*arrays, stream=stream)
    assert asked == [1003, 2] * BUILT_WITH_CUDA


@pytest.mark.parametrize("name", ["a", "out"])
def test_memory_of_torch_that_an_exporter_exchanges_is_not_used(name):
    torch = pytest.importorskip("torch", reason="torch not installed")
    arrays = {"a": torch.ones(64, 16), "out": torch.ones(64, 64)}

    class Meddler(Exporter):
        def __dlpack__(self, **how):
            arrays[name].set_(torch.zeros(1))
            return super().__dlpack__(**how)

    with pytest.raises(ValueError, match=f"^{name}: its memory was exchanged while other arguments were read"):
        _C.gemm(arrays["a"], Meddler(zeros(64, 16)), arrays["out"])
    whole = {"a": torch.ones(64, 16), "out": torch.ones(64, 64)}
    assert _C.gemm(whole["a"], Exporter(np.ones((64, 16), np.float32)), whole["out"]) == 0
    assert (whole["out"] == 16).all()
