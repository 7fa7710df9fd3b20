"""Array libraries made by hand: DLPack capsules and exchange tables whose every field a test can set.

They describe the memory of a NumPy array and count what a consumer does with it.
"""

from __future__ import annotations

import ctypes

import numpy as np

CPU, CUDA, CUDA_HOST, CUDA_MANAGED, ROCM = 1, 2, 3, 13, 10
READ_ONLY, IS_COPIED = 1, 2


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", Deleter)]


class ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]

_CODES = {"i": 0, "u": 1, "f": 2, "b": 6, "c": 5}


class Exporter:
    """Exports `array` through __dlpack__ as told. `fields` overrides fields of its DLTensor."""

    def __init__(self, array, *, versioned=True, version=(1, 3), flags=0, announced=None, **fields):
        self.array, self.deleted, self.asked, self.capsule = array, 0, [], None
        self._dims = (
            (ctypes.c_int64 * 8)(*array.shape),
            (ctypes.c_int64 * 8)(*(s // array.itemsize for s in array.strides)),
        )
        tensor = DLTensor(
            array.ctypes.data, CPU, 0, array.ndim, _CODES[array.dtype.kind], array.itemsize * 8, 1, *self._dims, 0
        )
        for name, value in fields.items():
            if name in ("shape", "strides") and value is not None:
                value = (ctypes.c_int64 * 8)(*value)
            setattr(tensor, name, value)
        self._versioned, self._deleter = versioned, Deleter(self._delete)
        if versioned:
            self.managed = ManagedVersioned(*version, None, self._deleter, flags, tensor)
        else:
            self.managed = Managed(tensor, None, self._deleter)
        self._announced = announced or (tensor.device_type, tensor.device_id)

    def _delete(self, _):
        self.deleted += 1

    def __dlpack__(self, **keywords):
        self.asked.append(keywords)
        self.capsule = new_capsule(
            ctypes.addressof(self.managed), b"dltensor_versioned" if self._versioned else b"dltensor", None
        )
        return self.capsule

    def __dlpack_device__(self):
        return self._announced

    @property
    def capsule_name(self):
        return _capsule_name(self.capsule).decode()


class Forwarding:
    """NumPy's own __dlpack__ behind a class that NumPy's C API does not know."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return self.array.__dlpack__(stream=stream, max_version=max_version)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OldForwarding(Forwarding):
    """The same from before max_version."""

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__(stream=stream)


# ---- the C exchange API ----

_FromObject = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
_ManagedFromObject = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.POINTER(ManagedVersioned)))
_CurrentStream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p)


class ExchangeTable(ctypes.Structure):
    pass


ExchangeTable._fields_ = [
    ("major", ctypes.c_uint32),
    ("minor", ctypes.c_uint32),
    ("previous", ctypes.POINTER(ExchangeTable)),
    ("allocate", ctypes.c_void_p),
    ("managed_from_object", _ManagedFromObject),
    ("managed_to_object", ctypes.c_void_p),
    ("tensor_from_object", _FromObject),
    ("current_stream", _CurrentStream),
]


def exchange_type(*, borrowing=True, versions=((1, 3),), capsule_name=b"dlpack_exchange_api", status=0):
    """A new array type with a table of each of `versions`, chained, the first one in the capsule. To be asked for a
    stream fails, as of torch built for CUDA where there is no GPU."""
    used = []

    @_FromObject
    def borrow(x, out):
        used.append("borrowed")
        out[0] = x.managed.tensor
        return status

    @_ManagedFromObject
    def manage(x, out):
        used.append("managed")
        out[0] = ctypes.pointer(x.managed)
        return status

    @_CurrentStream
    def stream(*_):
        used.append("stream")
        return -1

    borrows = borrow if borrowing else _FromObject()
    tables = [ExchangeTable(*v, None, None, manage, None, borrows, stream) for v in versions]
    for table, older in zip(tables, tables[1:], strict=False):
        table.previous = ctypes.pointer(older)
    capsule = new_capsule(ctypes.addressof(tables[0]), capsule_name, None)
    alive = tables, borrow, manage, stream, capsule_name
    members = {"__dlpack_c_exchange_api__": capsule, "used": used, "_alive": alive}
    return type("Exchanged", (Exporter,), members)


def misaligned(array):
    """A copy of the array one byte off its alignment."""
    raw = np.zeros(array.nbytes + 1, np.uint8)
    view = raw[1:].view(array.dtype) if array.dtype.itemsize == 1 else np.ndarray(array.shape, array.dtype, raw.data, 1)
    view[...] = array
    return view
