"""Backends on which every call is captured in a CUDA graph and takes effect when the graph is replayed.

A call is captured while its arrays hold nothing but zeros, replayed on those, and replayed on what they should hold.
On a card arrays are torch tensors and torch captures; on the emulator (tests/simt) its own CUDA runtime does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc

import numpy as np
from memory import Cuda
from reference import dtype_of

from flexgemm import _C


class Replayed:
    """What both have in common: `capture(function)` gives what replays it."""

    def run(self, function, buffers, *args, **kwargs):
        contents = [buffer.before for buffer in buffers]
        for buffer, content in zip(buffers, contents, strict=True):
            self.write(buffer.base, np.zeros_like(content))
        replay = self.capture(lambda: function(*args, **kwargs, stream=self.stream))
        replay()
        for buffer, content in zip(buffers, contents, strict=True):
            self.write(buffer.base, content)
        return replay()


class TorchGraphs(Replayed):
    name, device = "cuda", "cuda"

    def __init__(self, torch):
        self._torch, self._stream = torch, torch.cuda.Stream()
        self.stream = self._stream.cuda_stream

    def empty(self, shape, dtype):
        dtype = dtype_of(str(dtype))
        raw = self._torch.empty(int(np.prod(shape)) * dtype.itemsize, dtype=self._torch.uint8, device="cuda")
        return raw.view(getattr(self._torch, str(dtype))).reshape(shape)

    def array(self, array):
        tensor = self.empty(np.shape(array), array.dtype)
        self.write(tensor, array)
        return tensor

    def write(self, tensor, array):
        raw = self._torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        tensor.reshape(-1).view(self._torch.uint8).copy_(raw)

    def numpy(self, tensor):
        raw = tensor.reshape(-1).view(self._torch.uint8).cpu().numpy()
        return raw.view(dtype_of(str(tensor.dtype).removeprefix("torch."))).reshape(tuple(tensor.shape))

    def window(self, base, shape, strides, offset):
        return base.as_strided(shape, strides, base.storage_offset() + offset)

    def capture(self, function):
        graph, returned = self._torch.cuda.CUDAGraph(), []
        with self._torch.cuda.stream(self._stream):
            function()  # kernels are loaded at their first launch, which is no matter of a graph
        self._torch.cuda.synchronize()
        with self._torch.cuda.graph(graph, stream=self._stream):
            returned.append(function())

        def replay():
            graph.replay()
            self._torch.cuda.synchronize()
            return returned[0]

        return replay


class EmulatedGraphs(Replayed, Cuda):
    stream = 64  # any number: the emulator's streams are nothing but their names

    def __init__(self):
        self._runtime = ctypes.CDLL(_C.__file__)

    def empty(self, shape, dtype):
        return _C.DeviceArray.empty(shape, str(dtype), stream=self.stream)

    def array(self, array):
        contiguous = np.ascontiguousarray(array).reshape(np.shape(array))
        return _C.DeviceArray.from_numpy(contiguous, stream=self.stream)

    def write(self, array, content):
        """Memory of the emulated device is memory of this process."""
        content = np.ascontiguousarray(content)
        if content.size:
            address = self.window(array, (1,), (1,), 0)._managed.tensor.data
            ctypes.memmove(address, content.ctypes.data, content.nbytes)

    def _check(self, status):
        if status:
            self._runtime.cudaGetLastError()  # or the next launch would find it
            raise RuntimeError(f"CUDA error {status}")

    @contextlib.contextmanager
    def _capturing(self, graph):
        """Without the garbage collector: it would free other tests' arrays meanwhile."""
        gc.disable()
        stream = ctypes.c_void_p(self.stream)
        self._check(self._runtime.cudaStreamBeginCapture(stream, 0))
        try:
            yield
        finally:
            status = self._runtime.cudaStreamEndCapture(stream, ctypes.byref(graph))
            gc.enable()
        self._check(status)

    def capture(self, function):
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        with self._capturing(graph):
            returned = function()
        self._check(self._runtime.cudaGraphInstantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)))
        self._check(self._runtime.cudaGraphDestroy(graph))

        def replay():
            self._check(self._runtime.cudaGraphLaunch(executable, ctypes.c_void_p(self.stream)))
            return returned

        return replay
