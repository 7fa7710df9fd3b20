"""One small adapter per array library, so that every operation is written once.

The extension computes on arrays that exist already; what differs between torch, NumPy, CuPy, JAX and DeviceArray is
how an output is allocated, how a strided array is made contiguous, and how a result is handed back. `library_of`
recognises an array by its type, without importing a library that the caller has not imported, and remembers the
answer per type: for a torch tensor it costs one dictionary lookup.

An operation goes: library_of(first array) -> rows(), matrix() or contiguous() of its inputs -> empty() for its outputs
-> the extension, which may ask for a workspace() -> result().
"""

from __future__ import annotations

import re
import sys
from contextlib import AbstractContextManager, nullcontext
from operator import index
from typing import Any

import numpy as np

from flexgemm import _C
from flexgemm._arguments import renamed, type_name

Array = Any
Stream = Any

_NOTHING: AbstractContextManager[Any] = nullcontext()
_MOST_TYPES = 64  # of arrays are remembered: one that is made for each call would live for ever
_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_DTYPES = ("float32", "float16", "int32", "int64", "uint8", *_ML_DTYPES)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name; bfloat16 and float8 are those of ml_dtypes, imported on first use."""
    if name not in _ML_DTYPES:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(f"NumPy arrays of {name} need ml_dtypes: pip install ml_dtypes") from error
    result: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return result


def cuda_index(device: str | None) -> int | None:
    """The index of "cuda" or "cuda:1"; None for "cpu" and None."""
    if device is None or device == "cpu":
        return None
    match = re.fullmatch(r"cuda(?::(\d+))?", str(device))
    if match is None:
        raise ValueError(f"device: expected 'cpu', 'cuda' or 'cuda:<index>', got {device!r}")
    number, count = int(match[1] or 0), _C.device_count()
    if number < count:
        return number
    if _C.build_info()["cuda"] is None:
        raise NotImplementedError(f"device: {device!r} asked for, but this build of flexgemm has no CUDA backend")
    raise RuntimeError(f"device: {device!r} asked for, but this build sees {count} CUDA devices")


def refuse_device(device: str | None, library: str) -> None:
    """Of a call whose arrays are not NumPy's."""
    if device is not None:
        raise ValueError(f"device: only NumPy arrays are moved; {library} arrays are computed where they are")


class Library:
    """An array library. Stateless, but for the stream that `bind` ties to one call."""

    name: str
    array_types: tuple[type, ...]
    immutable = False

    def __init__(self) -> None:
        self.known: set[type] = set()  # types accepted before
        self.stream: Stream = None  # None: the library's current stream

    def bind(self, x: Array, name: str, device: str | None, stream: Stream) -> Library:
        """The adapter for one call whose first array is x, with the caller's device= and stream=."""
        refuse_device(device, self.name)
        if stream is None:
            return self
        bound = type(self)()
        bound.stream = stream
        return bound

    def accept(self, x: Array, name: str) -> None:
        """Raises unless x is an array of this library that the extension can read."""
        if type(x) not in self.known:
            # Not by np.ma, which NumPy imports when it is first named, in 40 ms.
            if any(base.__module__ in ("numpy.ma", "numpy.ma.core") for base in type(x).__mro__):
                raise TypeError(f"{name}: expected an array without a mask, got a MaskedArray; call .filled()")
            if not isinstance(x, self.array_types):
                raise TypeError(f"{name}: expected a {self.name} array like the first argument, got {type_name(x)}")
            if len(self.known) >= _MOST_TYPES:
                self.known.clear()  # those in use come back
            self.known.add(type(x))

    def dtype(self, x: Array) -> str:
        return str(x.dtype)

    def expect_dtype_of(self, like: Array, x: Array, name: str, of: str) -> None:
        """Raises unless x, an argument of this name, has the dtype of `like`, which is called `of`."""
        need, got = self.dtype(like), self.dtype(x)
        if got != need:
            raise TypeError(f"{name}: expected dtype {need} to match {of}, got {got}")

    def storage(self, dtype: str) -> str:
        """The dtype that holds `dtype` in this library: uint8 where it has no float8."""
        return dtype

    def rows(self, x: Array, name: str) -> Array:
        """x for the extension, with an innermost stride of 1: x itself where it has that, else a copy."""
        return self.contiguous(x, name)

    def matrix(self, x: Array, name: str) -> Array:
        """x for the extension, with a stride of 1 along one of the last two axes: x itself where it has that, else a
        copy."""
        self.accept(x, name)
        if self.has_columns(x):
            return self.rows(x.swapaxes(-1, -2), name).swapaxes(-1, -2)
        return self.rows(x, name)

    def has_columns(self, x: Array) -> bool:
        """Whether the elements of a column of x are adjacent."""
        return False

    def contiguous(self, x: Array, name: str) -> Array:
        """x for the extension, contiguous: x itself where it is, else a copy."""
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], dtype: str | None, like: Array) -> Array:
        """An uninitialised array for the extension to write, where `like` is; dtype None: that of `like`."""
        raise NotImplementedError

    def lasting(self, shape: tuple[int, ...], dtype: str | None, like: Array) -> Array:
        """As `empty`, for an array that other calls use too."""
        return self.empty(shape, dtype, like)

    def workspace(self, nbytes: int, like: Array) -> Array:
        """The scratch memory that an operation of the extension asks for, given this as its `workspace`."""
        return self.empty((nbytes,), "uint8", like)

    def run(self, operation: Any, *arrays: Array, workspace: Any = None, **scalars: Any) -> None:
        """Calls an operation of the extension, on this library's stream and with its memory, or `workspace`'s."""
        workspace = self.workspace if workspace is None else workspace
        operation(*arrays, workspace=workspace, stream=self.stream, **scalars)

    def result(self, x: Array) -> Array:
        """An array from `empty`, as the caller wants it."""
        return x

    def host(self, x: Array) -> np.ndarray[Any, Any]:
        """x as an array of NumPy. Waits for a GPU."""
        return x.numpy(stream=self.stream) if isinstance(x, _C.DeviceArray) else np.asarray(x)

    def output(self, out: Array, shape: tuple[int, ...], dtype: str | None, like: Array) -> Array:
        """What the extension writes when the caller has given out=; arguments as of `empty`."""
        if self.immutable:
            raise TypeError(f"out: {self.name} arrays are immutable; leave it out and take the returned array")
        self.accept(out, "out")
        return out

    def on_gpu(self, x: Array) -> bool:
        """Whether the extension's CUDA backend takes x."""
        return True

    def needs_grad(self, *arrays: Array | None) -> bool:
        """Whether autograd must record an operation on these."""
        return False


class NumpyLibrary(Library):
    name = "NumPy"
    array_types = (np.ndarray, np.generic)

    def bind(self, x: Array, name: str, device: str | None, stream: Stream) -> Library:
        number = cuda_index(device)
        return self if number is None else NumpyOnCuda(number, stream)

    def dtype(self, x: Array) -> str:
        return str(x.dtype.name)

    def on_gpu(self, x: Array) -> bool:
        return False

    def rows(self, x: Array, name: str) -> Array:
        self.accept(x, name)
        if x.ndim and x.shape[-1] > 1 and x.strides[-1] != x.itemsize:
            return np.ascontiguousarray(x)
        return x

    def has_columns(self, x: Array) -> bool:
        return x.ndim > 1 and x.strides[-2] == x.itemsize

    def contiguous(self, x: Array, name: str) -> Array:
        self.accept(x, name)
        return np.asarray(x, order="C")

    def empty(self, shape: tuple[int, ...], dtype: str | None, like: Array) -> Array:
        return np.empty(shape, like.dtype if dtype is None else numpy_dtype(dtype))


class DeviceLibrary(Library):
    """flexgemm's own CUDA arrays: always contiguous, allocated and freed in the order of their stream."""

    name = "DeviceArray"
    array_types = (_C.DeviceArray,)

    def contiguous(self, x: Array, name: str) -> Array:
        self.accept(x, name)
        return x

    def empty(self, shape: tuple[int, ...], dtype: str | None, like: Array) -> Array:
        return _C.DeviceArray.empty(shape, dtype or like.dtype, device=like.device, stream=self.stream)


class NumpyOnCuda(Library):
    """NumPy arrays computed on a GPU: copied up, computed there, copied back."""

    name = "NumPy"
    array_types = (np.ndarray, np.generic, _C.DeviceArray)

    def __init__(self, number: int, stream: Stream) -> None:
        super().__init__()
        self.number = number
        self.stream = stream
        self.host_out: Array | None = None

    def contiguous(self, x: Array, name: str) -> Array:
        self.accept(x, name)
        if isinstance(x, _C.DeviceArray):
            return x
        host = np.asarray(x, order="C")
        with renamed({"array": name}):
            return _C.DeviceArray.from_numpy(host, device=self.number, stream=self.stream)

    def empty(self, shape: tuple[int, ...], dtype: str | None, like: Array) -> Array:
        return _C.DeviceArray.empty(shape, dtype or like.dtype, device=self.number, stream=self.stream)

    def output(self, out: Array, shape: tuple[int, ...], dtype: str | None, like: Array) -> Array:
        self.accept(out, "out")
        if isinstance(out, _C.DeviceArray):
            raise TypeError("out: expected a NumPy array like the first argument, got flexgemm._C.DeviceArray")
        as_bytes = out.dtype == np.uint8 and dtype is not None and dtype.startswith("float8")
        result = self.empty(shape, "uint8" if as_bytes else dtype, like)
        if out.shape != shape or out.dtype.name != result.dtype:
            raise ValueError(f"out: expected {shape} {result.dtype}, got {out.shape} {out.dtype}")
        if not out.flags.writeable:
            raise ValueError("out: expected a writable array, got a read-only one")
        self.host_out = out
        return result

    def result(self, x: Array) -> Array:
        if self.host_out is None:
            return x.numpy(stream=self.stream)
        np.copyto(self.host_out, x.numpy(stream=self.stream))
        return self.host_out


class TorchLibrary(Library):
    name = "torch"

    def __init__(self) -> None:
        super().__init__()
        from flexgemm import _torch

        self.torch = torch = sys.modules["torch"]
        self.requires_grad, self.expect_unrecorded = _torch.requires_grad, _torch.expect_unrecorded
        self.array_types = (torch.Tensor,)
        self.strided = torch.strided
        self.dtypes = {getattr(torch, name): name for name in _DTYPES}
        self.by_name = {name: dtype for dtype, name in self.dtypes.items()}
        # Without the exchange API a tensor is exported by __dlpack__, which refuses tensors that require grad.
        self.detaches = not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")

    def bind(self, x: Array, name: str, device: str | None, stream: Stream) -> Library:
        if device is None and stream is None:
            return self
        super().bind(x, name, device, stream)
        return TorchOnStream(x, stream) if x.is_cuda else self

    def accept(self, x: Array, name: str) -> None:
        if type(x) not in self.known:
            super().accept(x, name)
        # The exchange API hands out the raw memory, whatever view of it the tensor is.
        if x.layout is not self.strided:
            raise TypeError(f"{name}: expected a dense (strided) tensor, got layout {x.layout}; call .to_dense()")
        if x.is_neg():
            raise TypeError(f"{name}: expected a tensor without the negative bit, got one; call .resolve_neg()")

    def dtype(self, x: Array) -> str:
        return self.dtypes.get(x.dtype) or str(x.dtype)

    def on_gpu(self, x: Array) -> bool:
        return bool(x.is_cuda)

    def has_columns(self, x: Array) -> bool:
        return bool(x.ndim > 1 and x.stride()[-2] == 1)

    # These two run for every argument of every call: what `accept` would refuse is asked for in line.
    def rows(self, x: Array, name: str) -> Array:
        if type(x) not in self.known or x.layout is not self.strided or x.is_neg():
            self.accept(x, name)
        if not (x.is_contiguous() or x.stride()[-1] == 1):
            x = x.contiguous()
        return x.detach() if self.detaches else x

    def contiguous(self, x: Array, name: str) -> Array:
        if type(x) not in self.known or x.layout is not self.strided or x.is_neg():
            self.accept(x, name)
        if not x.is_contiguous():
            x = x.contiguous()
        return x.detach() if self.detaches else x

    # torch takes half a microsecond less over a size that is named.
    def empty(self, shape: tuple[int, ...], dtype: str | None, like: Array) -> Array:
        if dtype is None:
            return like.new_empty(size=shape)
        return self.torch.empty(size=shape, dtype=self.by_name[dtype], device=like.device)

    def lasting(self, shape: tuple[int, ...], dtype: str | None, like: Array) -> Array:
        if not self.torch.is_inference_mode_enabled():
            return self.empty(shape, dtype, like)
        with self.torch.inference_mode(False):  # none that training refuses
            return self.empty(shape, dtype, like)

    def host(self, x: Array) -> np.ndarray[Any, Any]:
        return np.asarray(x.detach().cpu())

    def output(self, out: Array, shape: tuple[int, ...], dtype: str | None, like: Array) -> Array:
        self.expect_unrecorded(super().output(out, shape, dtype, like))
        return out

    def needs_grad(self, *arrays: Array | None) -> bool:
        return self.requires_grad(*arrays)


def _pointer(stream: Stream) -> int:
    """The cudaStream_t of a stream= argument."""
    return int(index(stream) if hasattr(stream, "__index__") else stream.__cuda_stream__()[1])


def torch_scope(x: Array, stream: Stream) -> Any:
    """A context in which `stream`, of the device of tensor x, is torch's current one."""
    cuda, pointer = sys.modules["torch"].cuda, _pointer(stream)
    # 0 and 1 are the legacy default stream.
    return cuda.stream(cuda.ExternalStream(pointer, x.device) if pointer > 1 else cuda.default_stream(x.device))


def on_stream(x: Array, stream: Stream) -> AbstractContextManager[Any]:
    """A context in which what is made of x belongs to `stream`, for torch, whose memory does not wait for readers on
    other streams. Other libraries' arrays are put in order where they are read."""
    return _NOTHING if stream is None or not getattr(x, "is_cuda", False) else torch_scope(x, stream)


class TorchOnStream(TorchLibrary):
    """torch with an explicit stream=: what is allocated or copied for the call belongs to that stream too."""

    def __init__(self, x: Array, stream: Stream) -> None:
        super().__init__()
        self.stream = stream
        self.scope = torch_scope(x, stream)

    def rows(self, x: Array, name: str) -> Array:
        with self.scope:
            return super().rows(x, name)

    def contiguous(self, x: Array, name: str) -> Array:
        with self.scope:
            return super().contiguous(x, name)

    def empty(self, shape: tuple[int, ...], dtype: str | None, like: Array) -> Array:
        with self.scope:
            return super().empty(shape, dtype, like)

    def host(self, x: Array) -> np.ndarray[Any, Any]:
        with self.scope:
            return super().host(x)


class CupyLibrary(Library):
    name = "CuPy"

    def __init__(self) -> None:
        super().__init__()
        self.cupy = sys.modules["cupy"]
        self.array_types = (self.cupy.ndarray,)

    def storage(self, dtype: str) -> str:
        return "uint8" if dtype.startswith("float8") else dtype

    def rows(self, x: Array, name: str) -> Array:
        self.accept(x, name)
        if x.ndim and x.shape[-1] > 1 and x.strides[-1] != x.itemsize:
            return self.contiguous(x, name)
        return x

    def has_columns(self, x: Array) -> bool:
        return bool(x.ndim > 1 and x.strides[-2] == x.itemsize)

    def contiguous(self, x: Array, name: str) -> Array:
        self.accept(x, name)
        with x.device:
            return self.cupy.ascontiguousarray(x)

    def host(self, x: Array) -> np.ndarray[Any, Any]:
        if self.stream is not None:
            self.cupy.cuda.ExternalStream(_pointer(self.stream)).synchronize()
        result: np.ndarray[Any, Any] = self.cupy.asnumpy(x)
        return result

    def empty(self, shape: tuple[int, ...], dtype: str | None, like: Array) -> Array:
        with like.device:
            return self.cupy.empty(shape, like.dtype if dtype is None else numpy_dtype(self.storage(dtype)))


class JaxLibrary(Library):
    """JAX arrays are immutable: results are written to a NumPy array or a DeviceArray, which JAX then takes over."""

    name = "JAX"
    immutable = True
    device: Any = None  # of the call

    def __init__(self) -> None:
        super().__init__()
        self.jax = sys.modules["jax"]
        self.array_types = (self.jax.Array,)

    def bind(self, x: Array, name: str, device: str | None, stream: Stream) -> Library:
        super().bind(x, name, device, None)
        bound = JaxLibrary()
        bound.stream = stream
        bound.accept(x, name)
        (bound.device,) = x.devices()
        return bound

    def accept(self, x: Array, name: str) -> None:
        super().accept(x, name)
        if isinstance(x, self.jax.core.Tracer):
            raise TypeError(f"{name}: expected a concrete JAX array, got a tracer; call flexgemm outside jax.jit")
        devices = x.devices()
        if len(devices) > 1:
            raise ValueError(f"{name}: expected an array on one device, got one on {len(devices)}")
        if self.device is not None and self.device not in devices:
            raise ValueError(f"{name}: expected an array on {self.device}, got one on {next(iter(devices))}")

    def contiguous(self, x: Array, name: str) -> Array:
        self.accept(x, name)
        return np.asarray(x) if self.device.platform == "cpu" else x

    def on_gpu(self, x: Array) -> bool:
        return bool(self.device.platform != "cpu")

    def empty(self, shape: tuple[int, ...], dtype: str | None, like: Array) -> Array:
        name = dtype or like.dtype.name
        if self.device.platform == "cpu":
            return np.empty(shape, numpy_dtype(name))
        return _C.DeviceArray.empty(shape, name, device=self.device.local_hardware_id, stream=self.stream)

    def result(self, x: Array) -> Array:
        on_host = isinstance(x, np.ndarray)
        given = self.jax.device_put(x, self.device) if on_host else self.jax.dlpack.from_dlpack(x)
        dtype = x.dtype.name if on_host else x.dtype
        if given.dtype.name != dtype:
            raise TypeError(f"expected JAX to take a result of {dtype}, got {given.dtype.name}: set jax_enable_x64")
        return given


_ALWAYS: dict[type, Library] = {np.ndarray: NumpyLibrary(), _C.DeviceArray: DeviceLibrary()}
_LIBRARIES = dict(_ALWAYS)
_BY_MODULE: dict[str, type[Library]] = {
    "numpy": NumpyLibrary,
    "torch": TorchLibrary,
    "cupy": CupyLibrary,
    "jax": JaxLibrary,
    "jaxlib": JaxLibrary,
}


def library_of(x: Array, name: str, device: str | None = None, stream: Stream = None) -> Library:
    """The adapter of x's library for one call. Raises TypeError naming the argument when x is no array."""
    library = _LIBRARIES.get(type(x))
    if library is None:
        library = _recognise(x, name)
    return library.bind(x, name, device, stream)


def _recognise(x: Array, name: str) -> Library:
    for base in type(x).__mro__:
        make = _BY_MODULE.get(base.__module__.partition(".")[0])
        if make is not None:
            library = make()
            if isinstance(x, library.array_types):
                if len(_LIBRARIES) >= _MOST_TYPES:
                    _LIBRARIES.clear()  # those in use come back
                    _LIBRARIES.update(_ALWAYS)
                return _LIBRARIES.setdefault(type(x), library)
    raise TypeError(f"{name}: expected an array of NumPy, torch, CuPy, JAX or a DeviceArray, got {type_name(x)}")
