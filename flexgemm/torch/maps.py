"""Neighbour maps where torch looks into them: as leaves of a pytree, as inputs of operators, in torch.load."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from flexgemm.voxel import NeighborMap, Triple

_TENSORS = ("coords", "native", "native_order")
_GEOMETRY = ("shape", "kernel_size", "dilation", "device")


def assemble(
    coords: Any,
    shape: Any,
    kernel_size: Triple,
    dilation: Any,
    device: str | None,
    native: Any,
    native_order: Any,
    native_transposed: Any,
) -> NeighborMap:
    """A NeighborMap of tensors that are there already."""
    nmap = NeighborMap.__new__(NeighborMap)
    nmap.coords = coords
    nmap.shape = shape
    nmap.kernel_size = kernel_size
    nmap.dilation = dilation
    nmap.kernel_volume = kernel_size[0] * kernel_size[1] * kernel_size[2]
    nmap.mirrored = kernel_size[0] & kernel_size[1] & kernel_size[2] & 1 == 1
    nmap.device = device
    nmap.native = native
    nmap.native_order = native_order
    nmap._native_transposed = native_transposed
    nmap._map = nmap._transposed_map = None
    nmap.num_voxels = native.shape[1] if isinstance(native, torch.Tensor) else 0  # pytrees are of any leaves
    return nmap


def from_operators(maps: Any, kernel_size: Any) -> NeighborMap:
    """A NeighborMap as far as a convolution needs it, of the tensors that its operator is given."""
    return _unflatten((None, *maps), (None, tuple(kernel_size), None, None))


def _flatten(nmap: NeighborMap) -> tuple[list[Any], Any]:
    leaves = [getattr(nmap, name) for name in _TENSORS]
    return [*leaves, *(nmap._native_transposed or (None, None))], tuple(getattr(nmap, name) for name in _GEOMETRY)


def _flatten_with_keys(nmap: NeighborMap) -> tuple[list[Any], Any]:
    leaves, geometry = _flatten(nmap)
    names = *_TENSORS, "transposed", "transposed_order"
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(names, leaves, strict=True)], geometry


def _unflatten(leaves: Any, geometry: Any) -> NeighborMap:
    coords, native, order, *transposed = leaves
    shape, kernel_size, dilation, device = geometry
    pair = None if transposed[0] is None else tuple(transposed)
    return assemble(coords, shape, kernel_size, dilation, device, native, order, pair)


pytree.register_pytree_node(
    NeighborMap,
    _flatten,
    _unflatten,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="flexgemm.NeighborMap",
    to_dumpable_context=list,
    from_dumpable_context=lambda geometry: (*map(tuple, geometry[:3]), geometry[3]),
)
torch.serialization.add_safe_globals([NeighborMap])
