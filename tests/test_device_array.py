"""DeviceArray: CUDA memory that outlives its users and follows their streams."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest
from calls import Stream, zeros
from exporters import CPU, CUDA

import flexgemm
from flexgemm import _C


def test_device_arrays_need_a_cuda_build():
    if _C.build_info()["cuda"] is None:
        with pytest.raises(NotImplementedError, match="no CUDA backend"):
            _C.DeviceArray.empty((3,), "float32")
        with pytest.raises(NotImplementedError, match="no CUDA backend"):
            _C.device_info("cuda")
        with pytest.raises(NotImplementedError, match="^device: 'cuda' asked for, but .* no CUDA backend$"):
            flexgemm.gemm_nt(zeros(3, 8), zeros(5, 8), device="cuda")
        assert _C.device_count() == 0
    elif _C.device_count() == 0:
        with pytest.raises(RuntimeError, match="^device: 'cuda' asked for, but this build sees 0 CUDA devices$"):
            _C.device_info("cuda")
    with pytest.raises(TypeError):
        _C.DeviceArray()


@pytest.mark.parametrize(
    ("faulty", "error", "message"),
    [
        (
            lambda: _C.DeviceArray.empty((2**40, 2**40), "float32"),
            ValueError,
            r"shape: expected at most 2\^63 - 1 bytes",
        ),
        (lambda: _C.DeviceArray.empty((-1,), "float32"), ValueError, "shape: expected at least 0, got -1"),
        (lambda: _C.DeviceArray.empty((1,) * 6, "float32"), ValueError, "shape: expected at most 5 ints, got 6"),
        (lambda: _C.DeviceArray.empty(3, "float32"), TypeError, "shape: expected a sequence of ints, got int"),
        (lambda: _C.DeviceArray.empty((3,), "float64"), ValueError, "dtype: expected .* got 'float64'"),
        (lambda: _C.DeviceArray.empty((3,), "float32", device=-1), ValueError, "device: expected 0 to"),
        (lambda: _C.DeviceArray.from_numpy([1.0]), TypeError, "array: expected a NumPy array, got <class 'list'>"),
        (
            lambda: _C.DeviceArray.from_numpy(zeros(3, dtype=np.float64)),
            TypeError,
            "array: expected a dtype .* got float64",
        ),
        (lambda: _C.DeviceArray.from_numpy(zeros(*(1,) * 6)), ValueError, "array: expected at most 5 dim"),
    ],
)
def test_device_array_faults(faulty, error, message):
    with pytest.raises((error, NotImplementedError), match=f"{message}|no CUDA backend"):
        faulty()


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32", "int64", "uint8"]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (2, 3, 4, 5, 6)])
def test_a_device_array_brings_back_what_went_in(cuda, dtype, shape):
    host = (np.arange(np.prod(shape, dtype=int)) % 200).reshape(shape).astype(getattr(ml_dtypes, dtype, dtype))
    array = _C.DeviceArray.from_numpy(host)
    assert (array.shape, array.dtype, array.device, array.nbytes) == (shape, dtype, 0, host.nbytes)
    back = array.numpy()
    assert back.dtype == host.dtype
    np.testing.assert_array_equal(back, host)


def test_a_device_array_takes_any_layout_and_the_source_may_change(cuda):
    host = np.arange(24, dtype=np.int32).reshape(4, 6)
    for source in (host.T, host[::2, ::-1], np.asfortranarray(host)):
        expected = source.copy()
        array = _C.DeviceArray.from_numpy(source)
        np.testing.assert_array_equal(array.numpy(), expected)
    source = np.ones(1 << 20, np.float32)
    array = _C.DeviceArray.from_numpy(source)
    source[:] = 2
    assert (array.numpy() == 1).all()


def test_a_view_keeps_the_memory_alive(cuda):
    view = _C.DeviceArray.from_numpy(np.arange(6, dtype=np.int32)).reshape((2, 3)).reshape((3, 2))
    for _ in range(10):
        _C.DeviceArray.from_numpy(np.full(6, -1, np.int32))
    np.testing.assert_array_equal(view.numpy(), [[0, 1], [2, 3], [4, 5]])
    with pytest.raises(ValueError, match=r"shape: expected as many elements as \(3, 2\) has, got \(4,\)"):
        view.reshape((4,))


def test_a_capsule_keeps_the_memory_alive(cuda):
    array = _C.DeviceArray.from_numpy(np.arange(6, dtype=np.float32).reshape(1, 6))

    class Holder:
        capsule = array.__dlpack__(max_version=(1, 3))

        def __dlpack__(self, **keywords):
            return self.capsule

        def __dlpack_device__(self):
            return CUDA, 0

    del array
    gc.collect()
    out = _C.DeviceArray.empty((1, 1), "float32")
    b = _C.DeviceArray.from_numpy(np.ones((1, 6), np.float32))
    nbytes = _C.gemm_workspace(b, b, out)
    _C.gemm(Holder(), b, out, workspace=_C.DeviceArray.empty((nbytes,), "uint8") if nbytes else None)
    assert out.numpy() == 15


def test_a_device_array_follows_the_streams_that_use_it(cuda):
    a = _C.DeviceArray.from_numpy(np.ones((512, 512), np.float32), stream=2)
    for stream in (0, 2, 1, Stream((0, 2)), None) * 3:
        out = _C.DeviceArray.empty((512, 512), "float32", stream=2)
        nbytes = _C.gemm_workspace(a, a, out)
        workspace = _C.DeviceArray.empty((nbytes,), "uint8") if nbytes else None
        _C.gemm(a, a, out, stream=stream, workspace=workspace)
        del workspace
        np.testing.assert_array_equal(out.numpy(stream=stream), np.full((512, 512), 512, np.float32))


def test_device_array_export(cuda):
    array = _C.DeviceArray.empty((2, 3), "float16")
    assert array.__dlpack_device__() == (CUDA, 0)
    assert '"dltensor"' in repr(array.__dlpack__())
    assert '"dltensor"' in repr(array.__dlpack__(max_version=(0, 8)))
    assert '"dltensor_versioned"' in repr(
        array.__dlpack__(max_version=(1, 0), stream=-1, dl_device=(CUDA, 0), copy=False)
    )
    for wrong, error in (
        ({"copy": True}, BufferError),
        ({"dl_device": (CPU, 0)}, BufferError),
        ({"stream": -2}, ValueError),
        ({"stream": "x"}, TypeError),
        ({"max_version": 1}, TypeError),
    ):
        with pytest.raises(error):
            array.__dlpack__(**wrong)


def test_too_much_device_memory_is_a_memory_error(cuda):
    with pytest.raises(MemoryError, match="cannot allocate"):
        _C.DeviceArray.empty((1 << 50,), "uint8")
    _C.DeviceArray.empty((1 << 10,), "uint8")


def test_a_device_that_is_not_there_is_an_error(cuda):
    with pytest.raises((RuntimeError, ValueError)):
        _C.DeviceArray.empty((3,), "float32", device=99)
