"""flex_gemm.ops.spconv.sparse_conv3d."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from flexgemm._voxels import three_ints
from flexgemm.compat.flex_gemm.kernels.cuda import maps
from flexgemm.compat.flex_gemm.ops import spconv
from flexgemm.compat.flex_gemm.ops.grids import grid_of
from flexgemm.compat.flex_gemm.ops.spconv import _convolve as convolve
from flexgemm.compat.flex_gemm.ops.spconv._convolve import NeighborCache, Triple
from flexgemm.voxel import NeighborMap, sparse_conv_map


class SparseConv3dNeighborCache(NeighborCache):
    """Names with `_bwd` are of the map from the inputs to the outputs that read them. A missing item is None."""

    def __init__(self, nmap: NeighborMap | None = None, **items: Any) -> None:
        if nmap is None or items:
            raise _other_map("neighbor_map")
        super().__init__(nmap)

    def _given_map(self, feats: torch.Tensor, weight: torch.Tensor) -> NeighborMap:
        raise _other_map("neighbor_map")

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key, None)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("neighbor_map", "neighbor_map_bwd"):
            raise _other_map(name)
        super().__setattr__(name, value)

    @cached_property
    def out_coords(self) -> torch.Tensor:
        """(M, 4) int32: the voxels of the outputs. The map, which gradients go by, keeps its own."""
        out_coords: torch.Tensor = self.nmap.out_coords.clone()
        return out_coords

    @cached_property
    def neighbor_map_bwd(self) -> torch.Tensor:
        """(N, V) uint32: the output that reads each input at each offset."""
        return maps.unsigned(self.nmap.transposed_map)

    @cached_property
    def _backward(self) -> NeighborCache:
        return NeighborCache(self.nmap.inverse)

    @cached_property
    def gray_code_bwd(self) -> torch.Tensor:
        return self._backward.gray_code

    @cached_property
    def sorted_idx_bwd(self) -> torch.Tensor:
        return self._backward.sorted_idx

    def compute_kernel_idx_bwd(self, block_size: int) -> None:
        """Makes the items valid_kernel_bwd_<block_size> and valid_kernel_bwd_seg_<block_size>."""
        self[f"valid_kernel_bwd_{block_size}"] = self._backward.valid_kernel_callback(block_size)
        self[f"valid_kernel_bwd_seg_{block_size}"] = self._backward.valid_kernel_seg_callback(block_size)

    def valid_kernel_bwd_callback(self, block_size: int) -> torch.Tensor:
        return self._kept(f"valid_kernel_bwd_{block_size}", self.compute_kernel_idx_bwd, block_size)

    def valid_kernel_bwd_seg_callback(self, block_size: int) -> torch.Tensor:
        return self._kept(f"valid_kernel_bwd_seg_{block_size}", self.compute_kernel_idx_bwd, block_size)


def _other_map(name: str) -> TypeError:
    """Of a cache that is given another map, as those that FlexGEMM kept are, or whose map a program wrote into."""
    need = "expected no other map, since convolutions go by the one that a cache is made of"
    return TypeError(f"{name}: {need}; build it anew, with neighbor_cache=None")


def _map(coords: torch.Tensor, out_coords: torch.Tensor | None, shape: Sequence[int], *how: Triple) -> NeighborMap:
    """The map between given outputs, or those that any voxel reaches; how: kernel size, stride, padding, dilation.

    A kernel larger than the padded grid has no outputs, where torch raises."""
    order = maps.order_of(spconv.SERIALIZATION_MODE, "SERIALIZATION_MODE")
    names = ("kernel_size", 1), ("stride", 1), ("padding", 0), ("dilation", 1)
    numbers = (three_ints(x, name, least=least) for x, (name, least) in zip(how, names, strict=True))
    grid, (kernel, stride, padding, dilation) = grid_of(shape), numbers
    reach = tuple(d * (k - 1) for k, d in zip(kernel, dilation, strict=True))
    fits = all(w + 2 * p > r for w, p, r in zip(grid[1:], padding, reach, strict=True))
    if not fits and (out_coords is None or len(out_coords) == 0):
        out_coords, padding = coords.new_empty((0, 4)), reach
    return sparse_conv_map(coords, grid, kernel, stride, padding, dilation, out_coords=out_coords, order=order)


class SparseConv3dFunction:
    """The steps of `sparse_conv3d`."""

    @staticmethod
    def apply(
        feats: torch.Tensor,
        coords: torch.Tensor,
        shape: Sequence[int],
        neighbor_cache: SparseConv3dNeighborCache | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out_coords: torch.Tensor | None = None,
        stride: Triple = (1, 1, 1),
        padding: Triple = (0, 0, 0),
        dilation: Triple = (1, 1, 1),
    ) -> tuple[torch.Tensor, torch.Tensor, SparseConv3dNeighborCache]:
        convolve.expect_arguments(weight, neighbor_cache, SparseConv3dNeighborCache)
        if neighbor_cache is None:
            how = weight.shape[1:4], stride, padding, dilation
            neighbor_cache = SparseConv3dFunction._compute_neighbor_cache(coords, out_coords, shape, *how)
        nmap = neighbor_cache.map_for(feats, weight)
        return convolve.forward(feats, nmap, weight, bias), neighbor_cache.out_coords, neighbor_cache

    @staticmethod
    def _get_output_coords(
        coords: torch.Tensor,
        shape: Sequence[int],
        kernel_size: Triple,
        stride: Triple,
        padding: Triple,
        dilation: Triple,
    ) -> torch.Tensor:
        """(M, 4) int32: the outputs that any voxel reaches, sorted as SERIALIZATION_MODE says."""
        out_coords: torch.Tensor = _map(coords, None, shape, kernel_size, stride, padding, dilation).out_coords
        return out_coords

    _get_output_coords_torch = _get_output_coords

    @staticmethod
    def _compute_neighbor_cache(
        coords: torch.Tensor,
        out_coords: torch.Tensor | None,
        shape: Sequence[int],
        kernel_size: Triple,
        stride: Triple,
        padding: Triple,
        dilation: Triple,
        needs_grad: bool = True,
        is_out_coords_given: bool = False,
    ) -> SparseConv3dNeighborCache:
        """needs_grad, is_out_coords_given: accepted; every cache serves the backward pass. Its map of the gradients is
        built later, of coordinates that programs may have changed by then: it has copies."""
        convolve.expect_algorithm()
        sites = None if out_coords is None else out_coords.clone()
        cache = SparseConv3dNeighborCache(_map(coords.clone(), sites, shape, kernel_size, stride, padding, dilation))
        if out_coords is not None:
            cache.out_coords = out_coords
        return cache

    _compute_neighbor_cache_torch = _compute_neighbor_cache

    _sparse_conv_forward = staticmethod(convolve.cached_forward)
    _sparse_conv_backward = staticmethod(convolve.cached_backward)


def sparse_conv3d(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    neighbor_cache: SparseConv3dNeighborCache | None = None,
    out_coords: torch.Tensor | None = None,
    stride: Triple = (1, 1, 1),
    padding: Triple = (0, 0, 0),
    dilation: Triple = (1, 1, 1),
) -> tuple[torch.Tensor, torch.Tensor, SparseConv3dNeighborCache]:
    """Strided sparse convolution: output o reads the voxels at o * stride + k * dilation - padding.

    feats: (N, Ci). coords: (N, 4) int32 [batch, x, y, z]. shape: (B, C, W, H, D). weight: (Co, Kw, Kh, Kd, Ci).
    out_coords: (M, 4) int32, the outputs to compute; by default all that any voxel reaches.
    neighbor_cache: what an earlier call on the same coordinates returned.

    Returns (out (M, Co), out_coords, neighbor_cache).
    """
    return SparseConv3dFunction.apply(
        feats, coords, shape, neighbor_cache, weight, bias, out_coords, stride, padding, dilation
    )
