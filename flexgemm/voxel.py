"""Neighbour maps: which voxel lies where a convolution kernel looks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexgemm import _C, _orders, _segments
from flexgemm._arguments import as_bool, renamed
from flexgemm._arrays import Array, Library, Stream, cuda_index, library_of
from flexgemm._built import Built
from flexgemm._voxels import Shape, Triple, conv_grids, grid_shape, kernel_axes, reached_sites, rows_of_four, three_ints

# What a copy or a file of a map does not have.
_NOT_KEPT = ("_plain_orders", "_segments", "_segment_layers", "_segment_calls", "_map", "_transposed_map", "_inverse")


class NeighborMap:
    """Which input voxel each output voxel reads at each kernel offset: built once by `neighbor_map` (submanifold) or
    `sparse_conv_map`, used by every layer on the same coordinates.

    `map` is (V, M) int32: `map[v, m]` is the row in `coords` of the voxel that output m reads at offset
    `v = (kx * Kh + ky) * Kd + kz`, or -1 where there is none. That voxel lies at

        out_coords[m] * stride + k * dilation - padding                  of a convolution
        (out_coords[m] + padding - k * dilation) / stride, where whole   of a transposed one

    and a submanifold map is that of a convolution with stride 1 and padding K // 2 * dilation whose outputs are its
    inputs. Arrays are of the library of `coords`; for NumPy coordinates with device="cuda" they stay on the GPU and
    are copied to the host when they are first read.

    It also says what it is of: coords and out_coords, shape and out_shape, kernel_size, stride, padding, dilation,
    transposed, submanifold, num_voxels, num_out_voxels, kernel_volume and device.

    The coordinates are kept, not copied: do not change them in place.
    """

    coords: Array  # (N, 4) int32, the inputs, as given
    shape: Shape  # B, W, H, D of coords
    out_shape: Shape  # B, W, H, D of out_coords
    kernel_size: Triple  # Kw, Kh, Kd
    stride: Triple  # along w, h, d
    padding: Triple  # along w, h, d
    dilation: Triple  # along w, h, d
    transposed: bool  # whether of a transposed convolution
    submanifold: bool  # whether the outputs are the inputs
    num_voxels: int  # N, of coords
    num_out_voxels: int  # M, of out_coords
    kernel_volume: int  # V = Kw * Kh * Kd
    mirrored: bool  # submanifold, every kernel axis odd: the gradient uses the map itself, read backwards
    phases: tuple[Triple, Triple]  # of the outputs, and of those of the gradient's map: 1s without a stride
    device: str | None  # the device= that NumPy coordinates were given
    native: Array  # the map as the extension takes it
    native_order: Array | None  # and its row orders, of a frozen map with the entries behind them

    def __init__(
        self,
        coords: Array,
        shape: Shape,
        kernel_size: Triple,
        dilation: Triple,
        *,
        stride: Triple = (1, 1, 1),
        padding: Triple | None = None,
        transposed: bool = False,
        out_coords: Array | None = None,
        out_shape: Shape | None = None,
        order: str = "bxyz",
        check: bool = False,
        device: str | None = None,
        stream: Stream = None,
    ) -> None:
        """Without `padding`: a submanifold map. With it and without `out_coords`: the outputs are those reached, in
        the order `order`."""
        # Before arrays of their volume: it refuses larger kernels.
        self.phases = _orders.phases_of(kernel_size, stride, dilation, transposed)
        self.submanifold = padding is None
        same = kernel_size[0] // 2 * dilation[0], kernel_size[1] // 2 * dilation[1], kernel_size[2] // 2 * dilation[2]
        self.coords = coords
        self.shape = shape
        self.out_shape = shape if out_shape is None else out_shape
        self.kernel_size = kernel_size
        self.stride = stride
        self.padding = same if padding is None else padding
        self.dilation = dilation
        self.transposed = transposed
        self.kernel_volume = kernel_size[0] * kernel_size[1] * kernel_size[2]
        self.mirrored = self.submanifold and kernel_size[0] & kernel_size[1] & kernel_size[2] & 1 == 1
        self.device = device
        library = self._library(stream)
        self._native_transposed = Built()  # the map from the inputs to the outputs that read them, and its row orders
        self._begin(Built(done=not (self.mirrored and library.on_gpu(coords))))
        # Inputs and outputs as the extension takes them; a submanifold map has its inputs at hand.
        self._sites: tuple[Array, Array] | None = None
        self._out_coords: Array | None = coords
        if not self.submanifold:
            sites = rows_of_four(library, coords, "coords")
            self._out_coords = out_coords
            if out_coords is None:
                self._sites = sites, reached_sites(self, library, sites, order)
            else:
                self._sites = sites, rows_of_four(library, out_coords, "out_coords")
        self.native, self.native_order = self._build(False, check, stream)
        self.num_voxels = int(coords.shape[0])
        self.num_out_voxels = int(self.native.shape[1])
        if check and out_coords is not None:
            self._native_transposed.keep(self._build(True, check, stream), self.native, library.stream)

    def _begin(self, segments: Built) -> None:
        """What comes with use, of a map that has had none."""
        self._plain_orders: tuple[Array | None, Array | None] = None, None  # of the map, of the gradient's
        self._segments = segments
        self._segment_layers: dict[tuple[int, int], bool] = {}
        self._segment_calls = 0  # that would have been faster by them
        self._map: Array | None = None
        self._transposed_map: Array | None = None
        self._inverse: NeighborMap | None = None

    @property
    def out_coords(self) -> Array:
        """(M, 4) int32, the voxels of the output: `coords` of a submanifold map, those given, or those derived."""
        if self._out_coords is None:
            assert self._sites is not None
            self._out_coords = self._library(None).result(self._sites[1])
        return self._out_coords

    @property
    def map(self) -> Array:
        """(V, M) int32, -1 = no neighbour."""
        if self._map is None:
            self._map = self._library(None).result(self.native)
        return self._map

    @property
    def transposed_map(self) -> Array:
        """(V, N) int32: `transposed_map[v, n]` is the output that reads voxel n at offset v, or -1.

        Of a submanifold map it is the map with negated offsets, `map[::-1]` when every kernel axis is odd. Built on
        first use, on the stream that is current then, for which others wait. The gradient of any but a mirrored map
        uses it."""
        native, _ = self._transposed(None)
        if not self._keeps(native):
            return self._library(None).result(native)
        if self._transposed_map is None:
            self._transposed_map = self._library(None).result(native)
        return self._transposed_map

    @property
    def inverse(self) -> NeighborMap:
        """The same pairs the other way round, from the outputs back to `coords`: what an inverse convolution and
        upsampling use. Made on first use; both share their arrays."""
        return self._inverse_by(self._transposed(None))

    def _inverse_by(self, transposed: tuple[Array, Array | None]) -> NeighborMap:
        """`inverse`, of the map from the inputs to the outputs that read them and its row orders: kept if they are."""
        kept = self._keeps(transposed[0])
        if kept and self._inverse is not None:
            return self._inverse
        other = NeighborMap.__new__(NeighborMap)  # by name, for torch.compile: not every torch traces copies
        other.kernel_size, other.kernel_volume = self.kernel_size, self.kernel_volume
        other.stride, other.padding, other.dilation = self.stride, self.padding, self.dilation
        other.submanifold, other.device = self.submanifold, self.device
        other.coords, other._out_coords = self.out_coords, self.coords
        other.shape, other.out_shape = self.out_shape, self.shape
        other.num_voxels, other.num_out_voxels = self.num_out_voxels, self.num_voxels
        other.transposed, other.mirrored = not self.transposed, False
        other.phases = self.phases[::-1]
        other._sites = None if self._sites is None else self._sites[::-1]
        other.native, other.native_order = transposed
        other._native_transposed = Built((self.native, self.native_order), done=True)
        other._begin(Built(done=True))
        other._plain_orders = self._plain_orders[::-1]
        other._map, other._transposed_map = self._transposed_map, self._map
        if kept:
            self._inverse = other
        return other

    @property
    def num_pairs(self) -> int:
        """The entries of `map` that are not -1. Copies one number, or a DeviceArray's whole map, to the host."""
        pairs = self.map.numpy() if isinstance(self.map, _C.DeviceArray) else self.map
        return int((pairs >= 0).sum())

    @property
    def order_groups(self) -> tuple[int, ...]:
        """The groups of offsets of each set of row orders; () where none pays."""
        return _orders.groups_of(self.native_order, self.kernel_size)

    @property
    def order(self) -> Array | None:
        """(sum(order_groups), M) int32: orders of the columns of `map`, as a GPU works through them; None where none
        pays: for few voxels, for a volume of 1, on the CPU.

        A set of orders cuts the V offsets into as many groups, one after another, and has one order for each, in which
        columns with neighbours at the same offsets of the group lie side by side. Each layer works with the set that
        suits its channels. Maps with phases have one order, in which columns of a phase lie side by side."""
        if self.native_order is None:
            return None
        library, plain = self._library(None), self._plain_orders[0]
        if plain is not None:
            return library.result(plain)
        order, count = library.result(self.native_order), sum(self.order_groups)
        return order if order.shape[0] == count else order[:count]  # out of a file or a pytree: no DeviceArray

    def freeze(self, stream: Stream = None) -> NeighborMap:
        """Builds what is otherwise built on first use, so that the map changes no more; returns itself.

        On a Hopper GPU that is the map's segments, and a copy of the map, 4 bytes for each entry, whose columns lie in
        the order of rows: where there is one order of all rows for all offsets, as of 3x3x3 from 128,000 voxels to
        2**18, and of maps back from the outputs of a layer with a stride from 512 to 2**18. The map of the gradient
        gets such a copy too, unless it is the map itself. While a CUDA graph is captured neither is built."""
        gradient, gradient_order = self.native_gradient(stream)
        library, (plain, plain_gradient) = self._library(stream), self._plain_orders
        order, plain = _orders.with_entries(self, self.native, self.native_order, plain, library)
        if not self.mirrored:
            given = self, gradient, gradient_order, plain_gradient, library
            ordered, plain_gradient = _orders.with_entries(*given)
            if ordered is not gradient_order:
                fresh = Built()
                fresh.keep((gradient, ordered), self.native, library.stream)
                self._native_transposed = fresh
        self.native_order, self._plain_orders = order, (plain, plain_gradient)
        built = self.segments(stream)
        if built is not None:  # like the map itself: other streams wait for this one, or the caller does
            self._segments = Built(built, done=True)
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
        if self.submanifold:
            moved = NeighborMap(coords, self.shape, self.kernel_size, self.dilation, device=target)
            return moved.inverse if self.transposed else moved
        return NeighborMap(
            coords,
            self.shape,
            self.kernel_size,
            self.dilation,
            stride=self.stride,
            padding=self.padding,
            transposed=self.transposed,
            out_coords=self.out_coords if library == "NumPy" else self.out_coords.to(device),
            out_shape=self.out_shape,
            device=target,
        )

    def __copy__(self) -> NeighborMap:
        other = NeighborMap.__new__(NeighborMap)
        other.__dict__.update(self.__dict__)
        return other

    def __getstate__(self) -> dict[str, Any]:
        """For copies and files, which are made on the current stream: what only this process can hold, in CUDA memory
        of flexgemm's own, is left out."""
        state = {name: x for name, x in self.__dict__.items() if name not in _NOT_KEPT}
        state["_native_transposed"] = self._native_transposed.get(self.native, None)
        if isinstance(self.native, _C.DeviceArray):
            built = ("native", "native_order", "_native_transposed", "_sites")
            state |= {"_out_coords": self.out_coords} | dict.fromkeys(built)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        pair = state["_native_transposed"]
        self._native_transposed = Built(pair, done=pair is not None)
        self._begin(Built())
        if self.native is None:
            library = self._library(None)
            if not self.submanifold:
                pair = (self.coords, "coords"), (self.out_coords, "out_coords")
                self._sites = rows_of_four(library, *pair[0]), rows_of_four(library, *pair[1])
            self.native, self.native_order = self._build(False, False, None)

    def native_gradient(self, stream: Stream = None) -> tuple[Array, Array | None]:
        """The map that the gradient of the features uses and its row orders, as the extension takes them.

        A mirrored map is the map itself with the weights read backwards, so that it has the same orders."""
        return (self.native, self.native_order) if self.mirrored else self._transposed(stream)

    def segments_for(
        self, ci: int, co: int, rows: Array, stream: Stream = None, *, again: bool = False
    ) -> Array | None:
        """segments() for a layer of 16-bit features, ci channels to co, which works where work on `rows` goes; None if
        it would not go by them, and until so many calls would have that building them pays: a map that serves a layer
        or two has none. again: the same call has asked before."""
        wanted = self._segment_layers.get((ci, co))
        if wanted is None:
            tiles, gpu = _segments.tiles_of(self)
            if tiles == 0:
                self._segments = Built(done=True)
                return None
            wanted = self._segment_layers[ci, co] = _segments.pay_for(self, tiles, gpu, ci, co)
        if not wanted:
            return None
        self._segment_calls += not again
        paid = self._segments.value is not None or self._segment_calls > _segments.pay_after(self.num_voxels)
        return self.segments(stream, rows) if paid else None

    def segments(self, stream: Stream = None, rows: Array | None = None) -> Array | None:
        """The segments of the map as the extension takes them: rows near each other in space and the inputs that they
        share, for layers on Hopper. None where there are none: for maps that are not mirrored, dilated ones, a volume
        of 1 or above 32, few voxels.

        Built by freeze(), or when calls over the map have been so many that they pay, on the stream that is current
        then, and other streams wait until they are there; but not while a CUDA graph is captured, whose they would be.
        rows: the array that the caller works on, by default the map.
        """
        kept = self._segments
        if kept.value is None and not kept.done:
            tiles, _ = _segments.tiles_of(self)
            if tiles == 0:
                self._segments = Built(done=True)
                return None
            library = self._library(stream)
            if _C.is_capturing(self.native, stream=library.stream):
                return None
            kept.keep(_segments.build(self, tiles, library), self.native, library.stream)
        return kept.get(self.native if rows is None else rows, stream)

    def _transposed(self, stream: Stream) -> tuple[Array, Array | None]:
        """The map from the inputs to the outputs that read them and its row orders."""
        kept = self._native_transposed
        pair: tuple[Array, Array | None] | None = kept.ready
        if pair is not None:
            return pair
        return kept.of(self.native, self._library(stream).stream, lambda: self._build(True, False, stream))

    def _keeps(self, transposed: Array) -> bool:
        """Whether this is the transposed map that is kept, and not one that a graph has for itself."""
        pair = self._native_transposed.value
        return pair is not None and pair[0] is transposed

    def _library(self, stream: Stream) -> Library:
        return library_of(self.coords, "coords", self.device, stream)

    def _build(self, backward: bool, check: bool, stream: Stream) -> tuple[Array, Array | None]:
        """A map and its row orders, all at once: what is built while a CUDA graph is captured lives in that graph.

        backward: from the inputs to the outputs that read them."""
        library = self._library(stream)
        asked: dict[str, Any]
        if self._sites is None:
            coords = queries = rows_of_four(library, self.coords, "coords")
            asked = {"shape": self.shape, "transposed": self.transposed != backward}
            names = {}
        else:
            coords, queries = self._sites[::-1] if backward else self._sites
            shape, query_shape = (self.out_shape, self.shape) if backward else (self.shape, self.out_shape)
            asked = {"shape": shape, "queries": queries, "query_shape": query_shape}
            asked |= {"stride": self.stride, "padding": self.padding, "transposed": self.transposed != backward}
            names = {"coords": "out_coords", "queries": "coords"} if backward else {"queries": "out_coords"}
            names |= {"query_shape": "shape", "shape": "out_shape"} if backward else {"query_shape": "out_shape"}
        sets: tuple[int, ...] = ()
        order = None
        if library.on_gpu(coords):
            how: dict[str, Any] = {"kernel_size": self.kernel_size, "phases": self.phases[backward]}
            sets = _C.plan_order_sets(rows=queries.shape[0], **how)
        result = library.lasting((self.kernel_volume, queries.shape[0]), "int32", coords)
        if sets:
            order = library.lasting((sum(sets), queries.shape[0]), "int32", coords)
            asked |= {"order": order, "groups": sets, "phases": self.phases[backward]}
        with renamed(names):
            library.run(
                _C.neighbor_map,
                coords,
                result,
                kernel_size=self.kernel_size,
                dilation=self.dilation,
                check=check,
                **asked,
            )
        return result, order

    def __repr__(self) -> str:
        kernel = f"kernel_size={self.kernel_size}, dilation={self.dilation}"
        if self.submanifold:
            return f"NeighborMap({self.num_voxels} voxels in {self.shape}, {kernel})"
        kind = "transposed, " if self.transposed else ""
        sites = f"{self.num_voxels} voxels in {self.shape} to {self.num_out_voxels} in {self.out_shape}"
        return f"NeighborMap({kind}{sites}, {kernel}, stride={self.stride}, padding={self.padding})"


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
        grid_shape(shape),
        kernel_axes(kernel_size),
        three_ints(dilation, "dilation"),
        check=check,
        device=device,
        stream=stream,
    )


def sparse_conv_map(
    coords: Array,
    shape: Sequence[int],
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    *,
    transposed: bool = False,
    output_padding: int | Sequence[int] = 0,
    out_coords: Array | None = None,
    order: str = "bxyz",
    check: bool = False,
    device: str | None = None,
    stream: Stream = None,
) -> NeighborMap:
    """The map of a sparse convolution, of a pooling or, with transposed=True, of a transposed convolution.

    Output site o reads the voxels at o * stride + k * dilation - padding, k from 0 to kernel_size - 1; transposed, a
    voxel at i reaches the sites i * stride + k * dilation - padding. The grid of the outputs is, along each axis,

        (W + 2 * padding - dilation * (K - 1) - 1) // stride + 1
        (W - 1) * stride - 2 * padding + dilation * (K - 1) + output_padding + 1      transposed

    as in torch. The outputs are all sites of that grid that any voxel reaches and int32 counts, in the order `order`,
    or `out_coords`. The grid's volume, too, is below 2**63.

    coords: (N, 4) int32, rows [batch, x, y, z], unique, in any order; of duplicates the lowest row is found.
    shape: (B, W, H, D), the exclusive upper bounds of batch, x, y and z; their product must be below 2**63.
    kernel_size, stride, padding, dilation, output_padding: an int, or one per axis (w, h, d); kernels of 1 to 7, odd or
        even; output_padding only with transposed=True, below stride or dilation.
    out_coords: (M, 4) int32, unique rows, in any order: the outputs to compute instead of those reached.
    order: of the outputs reached: "bxyz" sorts them by batch, x, y and z; "z_order" and "hilbert" along those curves
        (encode_seq), with as many bits as the larger of both grids needs.
    check: raise ValueError for a row out of range or a duplicate row of coords or out_coords. Synchronises on a GPU,
        where by default rows out of range have no neighbours; on the CPU rows out of range always raise.
    device: "cuda" or "cuda:1" computes NumPy coordinates on a GPU, and with them everything over this map.
    stream: a CUDA stream (an int or an object with __cuda_stream__) instead of the array library's current one.

    On a GPU, finding the outputs waits for it once, to learn their number; with out_coords nothing waits.

    Raises TypeError for arrays of a wrong kind or dtype and ValueError for wrong shapes and values, by argument name.
    """
    transposed = as_bool(transposed, "transposed")
    grid, kernel, steps, pads, dilations, out_grid = conv_grids(
        shape, kernel_size, stride, padding, dilation, transposed, output_padding
    )
    with renamed({"mode": "order"}):
        _C.sequence_bits(shape=(1, 1, 1, 1), mode=order)  # refuses what is none, which nothing asks of given outputs
    return NeighborMap(
        coords,
        grid,
        kernel,
        dilations,
        stride=steps,
        padding=pads,
        transposed=transposed,
        out_coords=out_coords,
        out_shape=out_grid,
        order=order,
        check=check,
        device=device,
        stream=stream,
    )
