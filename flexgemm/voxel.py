"""Neighbour maps: which voxel lies where a convolution kernel looks."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from flexgemm import _C
from flexgemm._arrays import Array, Library, Stream, cuda_index, library_of

Triple = tuple[int, int, int]

AXES = "a positive int or three of them (w, h, d)"


class NeighborMap:
    """Where each voxel's neighbours are: built once by `neighbor_map`, used by every layer on the same coordinates.

    `map` is (V, N) int32: `map[v, n]` is the row of the voxel at `coords[n] + (k - K // 2) * dilation`, where
    `v = (kx * Kh + ky) * Kd + kz`, or -1 where there is none. It is of the array library of `coords`; for NumPy
    coordinates with device="cuda" it stays on the GPU and is copied to the host when `map` is first read.

    The coordinates are kept, not copied: do not change them in place.
    """

    coords: Array  # (N, 4) int32, as given
    shape: tuple[int, int, int, int]  # B, W, H, D
    kernel_size: Triple  # Kw, Kh, Kd
    dilation: Triple  # dw, dh, dd
    num_voxels: int  # N
    kernel_volume: int  # V = Kw * Kh * Kd
    mirrored: bool  # every kernel axis is odd: the gradient uses the map itself, read backwards
    device: str | None  # the device= of NumPy coordinates
    native: Array  # the map as the extension takes it
    native_order: Array | None  # and its row order

    def __init__(
        self,
        coords: Array,
        shape: tuple[int, int, int, int],
        kernel_size: Triple,
        dilation: Triple,
        *,
        check: bool = False,
        device: str | None = None,
        stream: Stream = None,
    ) -> None:
        self.coords = coords
        self.shape = shape
        self.kernel_size = kernel_size
        self.dilation = dilation
        self.kernel_volume = kernel_size[0] * kernel_size[1] * kernel_size[2]
        self.mirrored = kernel_size[0] & kernel_size[1] & kernel_size[2] & 1 == 1
        self.device = device
        self._native_transposed: tuple[Array, Array | None] | None = None
        self._map: Array | None = None
        self._transposed_map: Array | None = None
        self.native, self.native_order = self._build(False, check, stream)
        self.num_voxels = int(self.native.shape[1])

    @property
    def map(self) -> Array:
        """(V, N) int32, -1 = no neighbour."""
        if self._map is None:
            self._map = self._library(None).result(self.native)
        return self._map

    @property
    def transposed_map(self) -> Array:
        """(V, N) int32: the map with negated offsets, `map[::-1]` when every kernel axis is odd.

        Built on first use, on the stream that is current then. The gradient of an even kernel uses it."""
        if self._transposed_map is None:
            self._transposed_map = self._library(None).result(self._transposed(None)[0])
        return self._transposed_map

    @property
    def num_pairs(self) -> int:
        """The entries of `map` that are not -1. Copies one number, or a DeviceArray's whole map, to the host."""
        pairs = self.map.numpy() if isinstance(self.map, _C.DeviceArray) else self.map
        return int((pairs >= 0).sum())

    @property
    def order(self) -> Array | None:
        """(N,) int32: the columns of `map`, those with neighbours at the same offsets side by side, as a GPU works
        through them; None where an order does not pay: for few voxels, for a volume of 1, on the CPU."""
        return None if self.native_order is None else self._library(None).result(self.native_order)

    def freeze(self, stream: Stream = None) -> NeighborMap:
        """Builds what is otherwise built on first use, so that the map changes no more; returns itself."""
        self.native_gradient(stream)
        return self

    def to(self, device: Any) -> NeighborMap:
        """This map on another device: itself if it is there already, else one built anew there, from the coordinates.

        device: of torch coordinates whatever their `to` takes; of NumPy ones "cpu", "cuda" or "cuda:1", as the device=
            of `neighbor_map`. Raises TypeError for coordinates of other libraries.
        """
        library = self._library(None).name
        if library == "torch":
            coords, target = self.coords.to(device), None
            if coords is self.coords:
                return self
        elif library == "NumPy":
            coords, target = self.coords, None if str(device) == "cpu" else str(device)
            if cuda_index(target) == cuda_index(self.device):
                return self
        else:
            raise TypeError(f"device: maps of {library} coordinates are not moved; build one on the coordinates there")
        return NeighborMap(coords, self.shape, self.kernel_size, self.dilation, device=target)

    def __getstate__(self) -> dict[str, Any]:
        """All but what only this process can hold: maps in CUDA memory of flexgemm's own are built anew."""
        state = self.__dict__.copy()
        if isinstance(self.native, _C.DeviceArray):
            state |= {"native": None, "native_order": None, "_native_transposed": None}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.native is None:
            self.native, self.native_order = self._build(False, False, None)

    def native_gradient(self, stream: Stream = None) -> tuple[Array, Array | None]:
        """The map that the gradient of the features uses and its row order, as the extension takes them.

        A row's mask read backwards sorts as well as the mask itself: a mirrored map shares the order of the map."""
        return (self.native, self.native_order) if self.mirrored else self._transposed(stream)

    def _transposed(self, stream: Stream) -> tuple[Array, Array | None]:
        if self._native_transposed is None:
            self._native_transposed = self._build(True, False, stream)
        return self._native_transposed

    def _library(self, stream: Stream) -> Library:
        return library_of(self.coords, "coords", self.device, stream)

    def _build(self, transposed: bool, check: bool, stream: Stream) -> tuple[Array, Array | None]:
        """A map and its row order, both at once: what is built while a CUDA graph is captured lives in that graph."""
        library = self._library(stream)
        coords = library.contiguous(self.coords, "coords")
        if len(coords.shape) != 2 or coords.shape[1] != 4:
            raise ValueError(f"coords: expected (N, 4) [batch, x, y, z], got {tuple(coords.shape)}")
        result = library.empty((self.kernel_volume, coords.shape[0]), "int32", coords)
        workspace = None
        while nbytes := _C.neighbor_map(
            coords,
            result,
            shape=self.shape,
            kernel_size=self.kernel_size,
            dilation=self.dilation,
            transposed=transposed,
            check=check,
            workspace=workspace,
            stream=library.stream,
        ):
            workspace = library.workspace(nbytes, coords)
        if not library.on_gpu(coords) or not _C.row_order_pays(rows=coords.shape[0], kernel_size=self.kernel_size):
            return result, None
        order = library.empty((coords.shape[0],), "int32", coords)
        workspace = None
        while nbytes := _C.row_order(
            result, order, kernel_size=self.kernel_size, workspace=workspace, stream=library.stream
        ):
            workspace = library.workspace(nbytes, coords)
        return result, order

    def __repr__(self) -> str:
        kernel = f"kernel_size={self.kernel_size}, dilation={self.dilation}"
        return f"NeighborMap({self.num_voxels} voxels in {self.shape}, {kernel})"


def neighbor_map(
    coords: Array,
    shape: Sequence[int],
    kernel_size: int | Sequence[int] = 3,
    dilation: int | Sequence[int] = 1,
    *,
    check: bool = False,
    device: str | None = None,
    stream: Stream = None,
) -> NeighborMap:
    """The neighbour map of a submanifold convolution over the voxels at `coords`.

    coords: (N, 4) int32, rows [batch, x, y, z], unique, in any order; of duplicates the lowest row is found.
    shape: (B, W, H, D), the exclusive upper bounds of batch, x, y and z; their product must be below 2**63.
    kernel_size, dilation: an int, or one per axis (w, h, d); kernels of 1 to 7, odd or even.
    check: raise ValueError for a row out of range or a duplicate row. Synchronises on a GPU, where by default rows
        out of range have no neighbours; on the CPU rows out of range always raise.
    device: "cuda" or "cuda:1" computes NumPy coordinates on a GPU, and with them every convolution of NumPy arrays
        over this map.
    stream: a CUDA stream (an int or an object with __cuda_stream__) instead of the array library's current one.

    Raises TypeError for arrays of a wrong kind or dtype and ValueError for wrong shapes and values, by argument name.
    """
    return NeighborMap(
        coords,
        _ints(shape, "shape", "four positive ints (B, W, H, D)", 4),
        _ints(kernel_size, "kernel_size", AXES, 3),
        _ints(dilation, "dilation", AXES, 3),
        check=check,
        device=device,
        stream=stream,
    )


def _ints(value: Any, name: str, meaning: str, count: int) -> Any:
    """A tuple of `count` positive ints out of a sequence, or of one int that stands for all of them where `count` is
    3."""
    try:
        numbers = tuple(map(index, value)) if hasattr(value, "__len__") else (index(value),) * 3
    except TypeError:
        numbers = ()
    if len(numbers) != count or min(numbers) < 1:
        raise ValueError(f"{name}: expected {meaning}, got {value!r}")
    return numbers
