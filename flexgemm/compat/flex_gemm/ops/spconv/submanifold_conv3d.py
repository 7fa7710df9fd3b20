"""flex_gemm.ops.spconv.submanifold_conv3d."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from flexgemm._arguments import type_name
from flexgemm.compat.flex_gemm.kernels.cuda import maps
from flexgemm.compat.flex_gemm.ops.grids import grid_of
from flexgemm.compat.flex_gemm.ops.spconv import _convolve as convolve
from flexgemm.compat.flex_gemm.ops.spconv._convolve import NeighborCache, Triple
from flexgemm.torch import neighbor_map
from flexgemm.voxel import NeighborMap


@dataclass(eq=False)
class SpConvConfig:
    """A cache whose map changes no more, for torch.compile. splitk and algorithm are kept; flexgemm plans by itself.
    What else FlexGEMM's config holds is made when asked for."""

    nmap: NeighborMap
    splitk: int = 1
    algorithm: str = "masked_implicit_gemm_splitk"

    def __getattr__(self, name: str) -> Any:
        if name in ("neighbor_map", "sorted_idx", "valid_signal_i", "valid_signal_o", "valid_signal_seg"):
            return getattr(self._cache, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def block_sizes(self) -> list[int]:
        return [32, 64, 128, 256]

    @property
    def valid_kernels(self) -> list[torch.Tensor]:
        return [self._cache.valid_kernel_callback(size) for size in self.block_sizes]

    @property
    def valid_kernel_segs(self) -> list[torch.Tensor]:
        return [self._cache.valid_kernel_seg_callback(size) for size in self.block_sizes]

    @cached_property
    def _cache(self) -> NeighborCache:
        return NeighborCache(self.nmap)


class SubMConv3dNeighborCache(NeighborCache):
    """Programs give it a `neighbor_map` (M, V) uint32 of their own, too: when they make it, or in place of the one that
    it has, or by writing into that."""

    _made_of: tuple[Any, ...] | None = None  # of a map that was given: what nmap was made of

    def __init__(self, nmap: NeighborMap | None = None, **items: Any) -> None:
        if nmap is not None:
            super().__init__(nmap)
        if "neighbor_map" in items:  # first: what is derived from another map is forgotten
            self.neighbor_map = items.pop("neighbor_map")
        for name, value in items.items():
            self[name] = value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "neighbor_map":
            _expect_map(value)
            self._forget("neighbor_map", "nmap")
            self._made_of, self._version = (), None
        super().__setattr__(name, value)

    def _forget(self, *names: str) -> None:
        """These, and what is derived from the map."""
        for name in [x for x in vars(self) if x in names or x in _DERIVED or x.startswith("valid_kernel_")]:
            del self.__dict__[name]

    def _given_map(self, feats: torch.Tensor, weight: torch.Tensor) -> NeighborMap:
        if "neighbor_map" not in self.__dict__:
            raise TypeError("neighbor_cache: expected one with a neighbor_map, got one without")
        if self._made_of is None:  # written into, or out of a file
            self.neighbor_map = self.neighbor_map
        rows, volume = len(feats), self.neighbor_map.shape[1]
        kernel: Any = tuple(weight.shape[1:4])
        if math.prod(kernel) != volume:
            need = f"(Co, Kw, Kh, Kd, Ci), {volume} offsets as of neighbor_map"
            raise ValueError(f"weight: expected {need}, got {tuple(weight.shape)}")
        # What is in it; of tensors of inference mode, which count no versions, any time something else.
        version = object() if self.neighbor_map.is_inference() else self.neighbor_map._version
        if self._made_of != (kernel, rows, version):
            if self._made_of and self._made_of[-1] != version:
                self._forget()
            self.nmap, self._made_of = maps.native(self.neighbor_map, kernel, rows), (kernel, rows, version)
        return self.nmap

    def freeze(self, splitk: int = 1, algorithm: str = "masked_implicit_gemm_splitk") -> SpConvConfig:
        if not self._is_own():
            raise TypeError("freeze: expected a cache of coordinates, got one of a neighbor_map that was given")
        return SpConvConfig(self.nmap.freeze(), splitk, algorithm)


_DERIVED = {name for name, value in vars(NeighborCache).items() if isinstance(value, cached_property)} - {
    "neighbor_map"
}


def _expect_map(given: Any) -> None:
    if not isinstance(given, torch.Tensor) or given.ndim != 2 or given.dtype not in (torch.uint32, torch.int32):
        got = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, torch.Tensor) else type_name(given)
        raise TypeError(f"neighbor_map: expected a tensor (M, V) of uint32, got {got}")


class SubMConv3dFunction:
    """The steps of `sparse_submanifold_conv3d`."""

    @staticmethod
    def apply(
        feats: torch.Tensor,
        coords: torch.Tensor | None,
        shape: Sequence[int] | None,
        neighbor_cache: SubMConv3dNeighborCache | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        dilation: Triple = (1, 1, 1),
    ) -> tuple[torch.Tensor, SubMConv3dNeighborCache]:
        convolve.expect_arguments(weight, neighbor_cache, SubMConv3dNeighborCache)
        if neighbor_cache is None:
            if coords is None or shape is None:
                raise TypeError("coords, shape: expected without config and neighbor_cache, got None")
            neighbor_cache = SubMConv3dFunction._compute_neighbor_cache(coords, shape, weight.shape[1:4], dilation)
        return convolve.forward(feats, neighbor_cache.map_for(feats, weight), weight, bias), neighbor_cache

    @staticmethod
    def _compute_neighbor_cache(
        coords: torch.Tensor, shape: Sequence[int], kernel_size: Triple, dilation: Triple, needs_grad: bool = True
    ) -> SubMConv3dNeighborCache:
        """needs_grad: accepted; every cache serves the backward pass."""
        convolve.expect_algorithm()
        if any(size % 2 == 0 for size in kernel_size):
            coords = coords.clone()  # the map of the gradients is built later, when a program may have changed them
        return SubMConv3dNeighborCache(neighbor_map(coords, grid_of(shape), tuple(kernel_size), dilation))

    _compute_neighbor_cache_torch = _compute_neighbor_cache

    _sparse_submanifold_conv_forward = staticmethod(convolve.cached_forward)
    _sparse_submanifold_conv_backward = staticmethod(convolve.cached_backward)


def sparse_submanifold_conv3d(
    feats: torch.Tensor,
    coords: torch.Tensor | None = None,
    shape: Sequence[int] | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    neighbor_cache: SubMConv3dNeighborCache | None = None,
    dilation: Triple = (1, 1, 1),
    *,
    config: SpConvConfig | None = None,
) -> torch.Tensor | tuple[torch.Tensor, SubMConv3dNeighborCache]:
    """Submanifold convolution of the features of N voxels.

    feats: (N, Ci). coords: (N, 4) int32 [batch, x, y, z]. shape: (B, C, W, H, D). weight: (Co, Kw, Kh, Kd, Ci).
    neighbor_cache: what an earlier call on the same coordinates returned, in place of coords and shape.
    config: what `cache.freeze()` gave, in place of coords, shape, neighbor_cache and dilation; for torch.compile.

    Returns (out (N, Co), neighbor_cache); with config only out.
    """
    if weight is None:
        raise TypeError("weight: expected a tensor (Co, Kw, Kh, Kd, Ci), got None")
    if config is not None:
        return convolve.forward(feats, config.nmap, weight, bias)
    return SubMConv3dFunction.apply(feats, coords, shape, neighbor_cache, weight, bias, dilation)
