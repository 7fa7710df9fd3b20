"""Neighbour maps where torch looks into them: as leaves of a pytree, as inputs of operators, in torch.load."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from flexgemm._built import Built
from flexgemm.torch.dispatch import beneath_transforms
from flexgemm.voxel import NeighborMap

# What a map is besides numbers, in the order in which pytrees have it. The rest is made from these when asked for.
_LEAVES = ("coords", "out_coords", "native", "native_order", "gradient", "gradient_order", "segments")
_NUMBERS = (
    *("shape", "out_shape", "kernel_size", "stride", "padding", "dilation"),
    *("transposed", "submanifold", "phases", "device"),
)


def assemble(leaves: Any, numbers: Any) -> NeighborMap:
    """A NeighborMap of tensors that are there already; leaves and numbers as their names stand above."""
    coords, out_coords, native, order, gradient, gradient_order, segments = leaves
    nmap = NeighborMap.__new__(NeighborMap)
    shape, out_shape, kernel, stride, padding, dilation, transposed, submanifold, phases, device = numbers
    nmap.shape, nmap.out_shape, nmap.device = shape, out_shape, device
    nmap.kernel_size, nmap.stride, nmap.padding, nmap.dilation = kernel, stride, padding, dilation
    nmap.transposed, nmap.submanifold = transposed, submanifold
    nmap.kernel_volume = kernel[0] * kernel[1] * kernel[2]
    nmap.mirrored = submanifold and not transposed and kernel[0] & kernel[1] & kernel[2] & 1 == 1
    nmap.phases = phases
    nmap.coords, nmap._out_coords = coords, out_coords
    nmap._sites = None if submanifold else (_contiguous(coords), _contiguous(out_coords))
    nmap.native, nmap.native_order = native, order
    nmap._native_transposed = Built() if gradient is None else Built((gradient, gradient_order), done=True)
    nmap._begin(Built(segments, done=True))
    nmap.num_voxels = coords.shape[0] if isinstance(coords, torch.Tensor) else 0
    nmap.num_out_voxels = native.shape[1] if isinstance(native, torch.Tensor) else 0
    return nmap


def _contiguous(leaf: Any) -> Any:
    """As the extension takes coordinates. Leaves of a pytree are anything."""
    if not isinstance(leaf, torch.Tensor) or leaf.is_contiguous():
        return leaf
    with beneath_transforms():
        return leaf.contiguous()


def from_operators(
    map: Any, order: Any, gradient: Any, gradient_order: Any, kernel: Any, phases: Any, rows: int, segments: Any = None
) -> NeighborMap:
    """A NeighborMap as far as a convolution needs it, of what its operator is given; `rows` are those of feats.

    Without a map of its own for the gradient it is mirrored, or the gradient is not asked for. phases: of the map, and
    behind them of that one."""
    numbers = (None, None, tuple(kernel), *[None] * 5, (tuple(phases[:3]), tuple(phases[3:])), None)
    nmap = assemble((None, None, map, order, gradient, gradient_order, segments), numbers)
    nmap.mirrored, nmap.num_voxels = gradient is None, rows
    return nmap


def gradient_of(nmap: NeighborMap) -> Any:
    """The map of the gradient and its order, if they are there."""
    return _built_of(nmap, nmap._native_transposed)


def segments_of(nmap: NeighborMap) -> Any:
    """The segments, if they are there."""
    return _built_of(nmap, nmap._segments)


def _built_of(nmap: NeighborMap, built: Built) -> Any:
    """The current stream waits for what is still in the building; a program that is compiled runs later."""
    return built.value if torch.compiler.is_compiling() else built.get(nmap.native, None)


def _flatten(nmap: NeighborMap) -> tuple[list[Any], Any]:
    pair = gradient_of(nmap) or (None, None)
    segments = segments_of(nmap)
    out_coords = nmap._out_coords
    if out_coords is None and isinstance(nmap.coords, torch.Tensor):  # leaves of a pytree are anything
        out_coords = nmap.out_coords
    leaves = [nmap.coords, out_coords, nmap.native, nmap.native_order, *pair, segments]
    return leaves, tuple(getattr(nmap, name) for name in _NUMBERS)


def _flatten_with_keys(nmap: NeighborMap) -> tuple[list[Any], Any]:
    leaves, numbers = _flatten(nmap)
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(_LEAVES, leaves, strict=True)], numbers


def _from_json(numbers: Any) -> Any:
    return tuple(map(_from_json, numbers)) if isinstance(numbers, list) else numbers


pytree.register_pytree_node(
    NeighborMap,
    _flatten,
    assemble,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="flexgemm.NeighborMap",
    to_dumpable_context=list,
    from_dumpable_context=_from_json,
)
torch.serialization.add_safe_globals([NeighborMap])
