"""Features on voxels, and the voxels with the maps over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

from flexgemm._arguments import type_name
from flexgemm._voxels import Shape, Triple, conv_grids, grid_shape
from flexgemm.torch import ops
from flexgemm.torch.dispatch import beneath_transforms, expect_tensor, traced, unwrapped
from flexgemm.voxel import NeighborMap, sparse_conv_map


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _made(build: Callable[[], Any]) -> Any:
    """What `build()` gives, which torch.compile leaves a program for, instead of tracing how maps are made."""
    return build()


class Token:
    """Stands for a set of voxels, as in the key of a map onto them, and holds nothing of it."""


class Maps(dict[Any, Any]):
    """What has been built over a set of voxels. Copied and pickled as a snapshot: other threads may add to it."""

    def __reduce__(self) -> Any:
        return Maps, (), None, None, iter(list(self.items()))


class Sites:
    """A set of voxels and what has been built over it: tensors on the same voxels share it, and so build each map once.

    The outputs of a strided layer hold its inputs. These hold of the outputs only what all Sites of them share: were
    both to hold each other, a batch would keep its memory until Python looks for cycles.
    """

    coords: torch.Tensor  # (N, 4) int32 [batch, x, y, z]
    shape: Shape  # B, W, H, D
    origin: tuple[NeighborMap, Sites] | None  # the map of the strided layer whose outputs these are, and its inputs
    maps: Maps  # shared, as the token is, by all Sites of the same voxels
    token: Token

    def __init__(
        self,
        coords: torch.Tensor,
        shape: Sequence[int],
        origin: tuple[NeighborMap, Sites] | None = None,
        shared: tuple[Maps, Token] | None = None,
    ) -> None:
        """shared: maps and token of the same voxels."""
        self.coords = unwrapped(coords, "coords")
        self.origin = origin
        b, w, h, d = shape
        self.shape = b, w, h, d
        self.maps, self.token = (Maps(), Token()) if shared is None else shared

    def cached(self, key: Any, build: Callable[[], Any]) -> Any:
        """What `build()` gave when it was first asked for under this key."""
        found = self.maps.get(key)
        if found is None:
            found = self.maps.setdefault(key, _made(build))  # one of what two threads built at once
        return found

    def neighbor_map(self, kernel_size: Sequence[int], dilation: Sequence[int]) -> NeighborMap:
        """The map of a submanifold convolution, three ints each."""
        key = tuple(kernel_size), tuple(dilation)
        nmap: NeighborMap | None = self.maps.get(key)
        if nmap is None:
            nmap = ops.neighbor_map(self.coords, self.shape, *key)
            if ops.lasts(nmap.native, self.coords):
                self.maps[key] = nmap
        return nmap

    def strided(
        self,
        kernel_size: Triple,
        stride: Triple,
        padding: Triple,
        dilation: Triple = (1, 1, 1),
        transposed: bool = False,
        output_padding: Triple = (0, 0, 0),
        onto: Sites | None = None,
    ) -> tuple[NeighborMap, Sites]:
        """The map of a strided or transposed convolution, or of a pooling, and its outputs: those that are reached, or
        `onto`."""
        how = kernel_size, stride, padding, dilation
        given: Any = {"transposed": transposed, "output_padding": output_padding}

        def build() -> tuple[NeighborMap, tuple[Maps, Token]]:
            if isinstance(self.coords, FakeTensor):
                need = "a tensor with data: build the map before, or call the module once outside of the trace"
                raise TypeError(f"coords: expected {need}, got a FakeTensor")
            targets = None if onto is None else onto.coords
            *_, grid = conv_grids(self.shape, *how, transposed, output_padding)
            if onto is not None and onto.shape != grid:
                raise ValueError(f"onto: expected voxels of a grid {grid}, got one of {onto.shape}")
            with beneath_transforms():
                nmap = sparse_conv_map(self.coords, self.shape, *how, **given, out_coords=targets)
                if torch.is_grad_enabled():
                    nmap.native_gradient()  # training needs it, and a traced program takes it as it is
            return nmap, (Maps(), Token())

        nmap, shared = self.cached((*how, transposed, output_padding, None if onto is None else onto.token), build)
        return nmap, onto or Sites(nmap.out_coords, nmap.out_shape, (nmap, self), shared)

    def came_from(self) -> tuple[NeighborMap, Sites]:
        """The map of the strided layer that made these voxels, and the voxels that it read."""
        if self.origin is None:
            need = "expected a tensor on the voxels that a strided layer made"
            raise ValueError(f"x: {need}, got one on voxels that were given, pruned or collated")
        return self.origin


# A dataclass, since that is where fully_shard and DistributedDataParallel look for tensors in what a module gives.
@dataclass(init=False, repr=False, eq=False)
class SparseTensor:
    """Features of N voxels in a batch of grids.

    feats: (N, C).
    coords: (N, 4) int32, rows [batch, x, y, z], unique; on the CPU rows outside shape raise.
    shape: (B, W, H, D), the exclusive upper bounds of batch, x, y and z.

    Tensors made from one another by `replace`, arithmetic and the modules of flexgemm.torch.nn share their `sites`, and
    with them the neighbour maps.
    """

    feats: torch.Tensor
    sites: Sites  # the voxels and the maps over them, shared by all tensors made from this one

    def __init__(
        self,
        feats: torch.Tensor,
        coords: torch.Tensor | None = None,
        shape: Sequence[int] | None = None,
        *,
        sites: Sites | None = None,
    ) -> None:
        """sites: those of another tensor, instead of coords and shape."""
        expect_tensor(feats, "feats")
        if sites is None:
            sites = _sites_of(coords, shape)
        elif not isinstance(sites, Sites):
            raise TypeError(f"sites: expected those of a SparseTensor, got {type_name(sites)}")
        elif coords is not None or shape is not None:
            raise ValueError("sites: expected them instead of coords and shape, got both")
        voxels = sites.coords.shape[0]
        if feats.ndim != 2 or feats.shape[0] != voxels:
            raise ValueError(f"feats: expected ({voxels}, C) to match the voxels, got {tuple(feats.shape)}")
        self.feats = feats
        self.sites = sites

    @classmethod
    def from_dense(cls, dense: torch.Tensor, mask: torch.Tensor | None = None) -> SparseTensor:
        """The voxels of a (B, C, W, H, D) tensor where mask (B, W, H, D), or by default any channel, is not zero."""
        expect_tensor(dense, "dense")
        if dense.ndim != 5:
            raise ValueError(f"dense: expected (B, C, W, H, D), got {tuple(dense.shape)}")
        voxels = dense.permute(0, 2, 3, 4, 1)
        if mask is not None:
            expect_tensor(mask, "mask")
            if mask.shape != voxels.shape[:4]:
                raise ValueError(f"mask: expected {tuple(voxels.shape[:4])} to match dense, got {tuple(mask.shape)}")
        mask = (voxels != 0).any(-1) if mask is None else mask != 0
        coords = mask.nonzero()
        return cls(voxels[coords.unbind(1)], coords.int(), mask.shape)

    @classmethod
    def collate(cls, tensors: Sequence[SparseTensor]) -> SparseTensor:
        """One batch of all samples of the tensors, in a grid that holds each of theirs."""
        tensors = _listed(tensors)
        channels = [x.feats.shape[1] for x in tensors]
        if any(c != channels[0] for c in channels):  # not as a set: torch.jit.trace has numbers of its own
            raise ValueError(f"tensors: expected as many channels in each, got {sorted(set(channels))}")
        first, coords = 0, []
        for x in tensors:
            coords.append(x.coords + torch.tensor([first, 0, 0, 0], dtype=torch.int32, device=x.coords.device))
            first += x.shape[0]
        extent = (max(sizes) for sizes in zip(*(x.shape[1:] for x in tensors), strict=True))
        return cls(torch.cat([x.feats for x in tensors]), sites=Sites(torch.cat(coords), (first, *extent)))

    @property
    def coords(self) -> torch.Tensor:
        """(N, 4) int32, rows [batch, x, y, z]."""
        return self.sites.coords

    @property
    def shape(self) -> Shape:
        """(B, W, H, D)."""
        return self.sites.shape

    @property
    def batch_size(self) -> int:
        """B."""
        return self.sites.shape[0]

    @property
    def device(self) -> torch.device:
        """Of the features."""
        return self.feats.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the features."""
        return self.feats.dtype

    def __len__(self) -> int:
        """Voxels."""
        return self.feats.shape[0]

    def replace(self, feats: torch.Tensor, sites: Sites | None = None) -> SparseTensor:
        """Other features (N, C') on the same voxels, or on those of `sites`."""
        sites = self.sites if sites is None else sites
        if not isinstance(feats, torch.Tensor) or feats.dim() != 2 or feats.size(0) != sites.coords.size(0):
            return SparseTensor(feats, sites=sites)  # which raises
        result = SparseTensor.__new__(SparseTensor)
        result.feats, result.sites = feats, sites
        return result

    def prune(self, mask: torch.Tensor) -> SparseTensor:
        """The voxels where mask (N,) bool is True, in their order. Waits for their number. No way leads back from them
        to the inputs of a strided layer that made x."""
        expect_tensor(mask, "mask")
        if mask.dtype != torch.bool:
            raise TypeError(f"mask: expected bool, got {mask.dtype}")
        if mask.shape != self.feats.shape[:1]:
            raise ValueError(f"mask: expected ({len(self)},), one for each voxel, got {tuple(mask.shape)}")
        kept = mask.nonzero().flatten()
        return SparseTensor(self.feats[kept], sites=Sites(self.coords[kept], self.shape))

    def to(self, *args: Any, **kwargs: Any) -> SparseTensor:
        """As torch.Tensor.to: the dtype applies to the features, the device to all. Maps are built anew elsewhere."""
        feats = self.feats.to(*args, **kwargs)
        if feats.device == self.coords.device:
            return self.replace(feats)
        coords = self.coords.to(feats.device, non_blocking=bool(kwargs.get("non_blocking")))
        return SparseTensor(feats, sites=Sites(coords, self.shape))

    def pin_memory(self) -> SparseTensor:
        """In pinned memory, from where `to(device, non_blocking=True)` copies while the host goes on: what
        torch.utils.data.DataLoader(pin_memory=True) asks of a batch."""
        return SparseTensor(self.feats.pin_memory(), sites=Sites(self.coords.pin_memory(), self.shape))

    def dense(self) -> torch.Tensor:
        """(B, C, W, H, D), zero where there is no voxel."""
        voxels = self.feats.new_zeros((*self.shape, self.feats.shape[1]))
        return voxels.index_put(self.coords.long().unbind(1), self.feats).permute(0, 4, 1, 2, 3)

    def batch_counts(self) -> torch.Tensor:
        """(B,) int64: the voxels of each sample."""
        return torch.bincount(self.coords[:, 0], minlength=self.batch_size)

    def split(self) -> list[SparseTensor]:
        """The samples of the batch, each a tensor of batch size 1. Reads their sizes on the host."""
        sample = self.coords[:, 0]
        order = torch.argsort(sample, stable=True)
        counts = self.batch_counts().tolist()
        coords = self.coords[order]
        coords = torch.cat([torch.zeros_like(coords[:, :1]), coords[:, 1:]], dim=1)
        parts = zip(self.feats[order].split(counts), coords.split(counts), strict=True)
        return [SparseTensor(feats, sites=Sites(where, (1, *self.shape[1:]))) for feats, where in parts]

    def _operand(self, other: Operand) -> torch.Tensor | float:
        """The features of a tensor on the same voxels, or what can be combined with features."""
        if not isinstance(other, SparseTensor):
            return other
        if other.sites.token is not self.sites.token:
            raise ValueError("other: expected a SparseTensor made from the same one; voxels are not compared")
        return other.feats

    def __add__(self, other: Operand) -> SparseTensor:
        return self.replace(self.feats + self._operand(other))

    def __sub__(self, other: Operand) -> SparseTensor:
        return self.replace(self.feats - self._operand(other))

    def __mul__(self, other: Operand) -> SparseTensor:
        return self.replace(self.feats * self._operand(other))

    def __truediv__(self, other: Operand) -> SparseTensor:
        return self.replace(self.feats / self._operand(other))

    def __neg__(self) -> SparseTensor:
        return self.replace(-self.feats)

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: torch.Tensor | float) -> SparseTensor:
        return self.replace(other - self.feats)

    def __rtruediv__(self, other: torch.Tensor | float) -> SparseTensor:
        return self.replace(other / self.feats)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """An operator with a torch.Tensor, of which torch.compile asks here alone. No other function takes this."""
        of_this = _OPERATORS.get(function.__name__)
        if of_this is not None and not kwargs and len(args) == 2 and isinstance(args[1], SparseTensor):
            return of_this(args[1], args[0])
        if any(kind is not SparseTensor for kind in types):
            return NotImplemented
        instead = "a module of flexgemm.torch.nn, fnn.Features(module), fnn.cat, or x.replace(function(x.feats))"
        raise TypeError(f"{function.__name__}: expected tensors, got a SparseTensor: take {instead}")

    __array_ufunc__ = None  # arrays of NumPy leave operators to the methods above

    def __repr__(self) -> str:
        channels, where = self.feats.shape[1], f"{self.dtype}, {self.device}"
        return f"SparseTensor({len(self)} voxels in {self.shape}, {channels} channels, {where})"


def _flatten(x: SparseTensor) -> tuple[list[torch.Tensor], Sites]:
    if isinstance(x.coords, FakeTensor) and torch.compiler.is_exporting():
        _refuse_export(x)
    return [x.feats], x.sites


def _refuse_export(x: SparseTensor) -> Any:
    """A program would hold the voxels of its trace. torch.export alone asks for leaves by their paths."""
    raise TypeError("expected tensors to go into and out of a traced program, got a SparseTensor")


def _assemble(leaves: Any, sites: Sites) -> SparseTensor:
    result = SparseTensor.__new__(SparseTensor)  # leaves of a pytree are anything
    (result.feats,), result.sites = leaves, sites
    return result


# Where DistributedDataParallel with static_graph, and before torch 2.13 fully_shard, look for tensors in what a module
# gives.
pytree.register_pytree_node(SparseTensor, _flatten, _assemble, flatten_with_keys_fn=_refuse_export)

Operand = SparseTensor | torch.Tensor | float

# By the names of the tensor's methods, to which the SparseTensor is the argument: by the last two it stands in front.
_OPERATORS: dict[str, Callable[[SparseTensor, Any], SparseTensor]] = {
    "add": SparseTensor.__radd__,
    "sub": SparseTensor.__rsub__,
    "mul": SparseTensor.__rmul__,
    "div": SparseTensor.__rtruediv__,
    "__rsub__": SparseTensor.__sub__,
    "__rdiv__": SparseTensor.__truediv__,
}


def _sites_of(coords: Any, shape: Any) -> Sites:
    expect_tensor(coords, "coords")
    if coords.ndim != 2 or coords.shape[1] != 4:
        raise ValueError(f"coords: expected (N, 4) [batch, x, y, z], got {tuple(coords.shape)}")
    if coords.dtype != torch.int32:
        raise TypeError(f"coords: expected int32, got {coords.dtype}")
    if torch.compiler.is_compiling():  # where sizes need not be ints
        return Sites(coords, shape)
    sites = Sites(coords, grid_shape(shape))
    if coords.is_cpu and not traced(coords, coords):
        _expect_inside(sites.coords, sites.shape)
    return sites


def _expect_inside(coords: torch.Tensor, shape: Shape) -> None:
    outside = ((coords < 0) | (coords >= torch.tensor(shape, device=coords.device))).any(1)
    if outside.any():
        row = int(outside.int().argmax())
        raise ValueError(f"coords: row {row} is {tuple(coords[row].tolist())}, outside shape {shape}")


def expect_sparse(x: Any, name: str) -> None:
    if not isinstance(x, SparseTensor):
        raise TypeError(f"{name}: expected a SparseTensor, got {type_name(x)}")


def _listed(tensors: Any) -> list[SparseTensor]:
    if not isinstance(tensors, Iterable):
        raise TypeError(f"tensors: expected a sequence of SparseTensors, got {type_name(tensors)}")
    result = list(tensors)
    if not result:
        raise ValueError("tensors: expected at least one, got none")
    for x in result:
        expect_sparse(x, "tensors")
    return result


def cat(tensors: Sequence[SparseTensor]) -> SparseTensor:
    """The channels of tensors on the same voxels side by side: the skip connections of a U-Net."""
    tensors = _listed(tensors)
    feats: Any = [tensors[0]._operand(x) for x in tensors]
    return tensors[0].replace(torch.cat(feats, dim=1))
