"""Arrays of the tests on either backend, with every buffer fenced: NaN around inputs, canaries around outputs.

Needs NumPy and the extension only, so that the GPU is tested without torch or CuPy. Strided and misaligned views of
CUDA memory, which DeviceArray does not offer, are exported through DLPack by hand.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np
from exporters import DLTensor, new_capsule
from reference import dtype_of

from flexgemm import _C

# ---- a DLPack exporter: any view of a DeviceArray ----


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class DeviceView:
    """A strided window of a DeviceArray. It owns the DLPack structure, so the structure has no deleter."""

    def __init__(self, base, shape, strides, offset):
        capsule = base.__dlpack__(stream=-1)  # only the address is wanted: the array stays on its stream
        whole = _DLManagedTensor.from_address(_capsule_pointer(capsule, b"dltensor")).tensor
        itemsize = whole.bits // 8
        self.base, self.shape, self.dtype = base, tuple(shape), base.dtype
        self._dims = (ctypes.c_int64 * len(shape))(*shape), (ctypes.c_int64 * len(shape))(*strides)
        self._managed = _DLManagedTensor()
        self._managed.tensor = DLTensor(
            (whole.data or 0) + whole.byte_offset + offset * itemsize,
            whole.device_type,
            whole.device_id,
            len(shape),
            whole.code,
            whole.bits,
            whole.lanes,
            *(ctypes.cast(d, ctypes.POINTER(ctypes.c_int64)) for d in self._dims),
            0,
        )

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return new_capsule(ctypes.addressof(self._managed), b"dltensor", None)

    def __dlpack_device__(self):
        return self._managed.tensor.device_type, self._managed.tensor.device_id


# ---- backends ----


def window(flat, shape, strides, offset):
    """A strided view of a flat NumPy array; strides and offset in elements."""
    size = flat.itemsize
    return np.ndarray(shape, flat.dtype, flat.view(np.uint8).data, offset * size, [s * size for s in strides])


class Host:
    name, device = "cpu", "cpu"

    def array(self, array):
        copy = self.empty(np.shape(array), array.dtype)
        copy[...] = array
        return copy

    def numpy(self, array):
        return np.asarray(array)

    def empty(self, shape, dtype):
        """Aligned to 256 bytes as CUDA allocations are, so that an offset means the same on both."""
        dtype = dtype_of(str(dtype))
        nbytes = int(np.prod(shape)) * dtype.itemsize
        raw = np.empty(nbytes + 255, np.uint8)
        start = -raw.ctypes.data % 256
        return raw[start : start + nbytes].view(dtype).reshape(shape)

    def window(self, base, shape, strides, offset):
        return window(base, shape, strides, offset)

    def run(self, function, buffers, *args, **kwargs):
        """A call whose arrays lie in these buffers; other backends (graphs.py) do more about it."""
        return function(*args, **kwargs)


class Cuda:
    name, device = "cuda", "cuda"
    run = Host.run

    def array(self, array):
        contiguous = np.ascontiguousarray(array).reshape(np.shape(array))  # which gives a scalar an axis
        return _C.DeviceArray.from_numpy(contiguous)

    def numpy(self, array):
        return np.asarray(array) if isinstance(array, np.ndarray) else array.numpy()

    def empty(self, shape, dtype):
        return _C.DeviceArray.empty(shape, str(dtype))

    def window(self, base, shape, strides, offset):
        return DeviceView(base, shape, strides, offset)


def hopper(backend):
    """Whether maps there get what only kernels of Hopper read."""
    return backend.name == "cuda" and _C.device_info("cuda", 0)["compute_capability"] == 90


def hopper_kernels(backend):
    """Whether calls there take the kernels of Hopper."""
    return hopper(backend) and not os.environ.get("FLEXGEMM_ARCH")


# ---- fenced buffers ----

FENCE = 256  # bytes on either side; keeps the alignment that the allocator gave


def poison(shape, dtype):
    """What an output holds before the call: NaN, or a number that no operation writes."""
    dtype = dtype_of(dtype)
    return np.full(shape, {"i": 0x5A5A5A5A, "u": 0xFF}.get(dtype.kind, np.nan), dtype)


class Buffer:
    """An array inside a larger one.

    `row_pad` elements are left between rows (then also a row between matrices) and `offset` elements before the first,
    so that pitches and base pointers of every alignment occur. The surroundings of an input are NaN (zero for integers,
    a legal row), those of an output are random bits. With fence=False the allocation ends where the array does, which
    is what a sanitizer wants to see; initialise=False then leaves the content away as well. Memory comes in pieces of
    256 bytes: with at_end the array lies at the end of the last one, as far as multiples of 16 bytes allow it; what is
    read or written in front of it shows where there is a fence alone.
    """

    def __init__(self, backend, content, *, output=False, row_pad=0, offset=0, fence=True, initialise=True,
                 at_end=False):  # fmt: skip
        content = np.asarray(content)
        shape, dtype = content.shape, content.dtype
        strides = np.ones(len(shape), np.int64)
        for axis in range(len(shape) - 2, -1, -1):
            pitch = shape[axis + 1] + (row_pad if axis == len(shape) - 2 else row_pad > 0)
            strides[axis] = strides[axis + 1] * pitch
        extent = 0 if 0 in shape else 1 + sum((s - 1) * int(t) for s, t in zip(shape, strides, strict=True))
        border = FENCE // dtype.itemsize if fence else 0
        room = -(offset + extent) * dtype.itemsize % 256 // 16 * 16 // dtype.itemsize if at_end else 0
        start, total = border + room + offset, border + room + offset + extent + border
        self._backend, self._layout = backend, (shape, strides.tolist(), start)

        if output:
            self.before = np.frombuffer(np.random.default_rng(0).bytes(total * dtype.itemsize), dtype).copy()
        else:
            self.before = np.full(total, 0 if dtype.kind in "iu" else np.nan, dtype)
        window(self.before, *self._layout)[...] = content
        self._may_change = np.zeros(total, bool)
        window(self._may_change, *self._layout)[...] = output
        self._may_change[:start] |= not initialise
        self.base = backend.array(self.before) if initialise else backend.empty((total,), dtype)
        self.array = backend.window(self.base, *self._layout)

    @property
    def exchanged(self):
        """The array with the last two axes the other way round."""
        shape, strides, start = self._layout
        order = [*range(len(shape) - 2), -1, -2]
        return self._backend.window(self.base, [shape[i] for i in order], [strides[i] for i in order], start)

    def read(self, what="out"):
        """The content after the call, with the proof that nothing around it (in an input, nothing at all) changed."""
        after = self._backend.numpy(self.base)
        changed = (_bytes(after) != _bytes(self.before)).any(axis=1) & ~self._may_change
        assert not changed.any(), f"{what}: {changed.sum()} elements written that were not to be touched"
        return window(after, *self._layout).copy()


def _bytes(flat):
    return np.ascontiguousarray(flat).view(np.uint8).reshape(flat.size, flat.itemsize)
