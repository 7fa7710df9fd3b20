"""Pooling and upsampling as modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexgemm import _C
from flexgemm._arguments import expect_choice
from flexgemm._voxels import kernel_axes, three_ints
from flexgemm.torch import pooling
from flexgemm.torch.nn.tensor import SparseTensor, expect_sparse


class SparsePool3d(torch.nn.Module):
    """The maximum, mean or sum of the voxels that each output reads, those at o * stride + k - padding.

    kernel_size, stride, padding: an int, or three (w, h, d); stride by default kernel_size.
    mode: "max", "mean" or "sum".
    """

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        *,
        mode: str = "max",
    ) -> None:
        super().__init__()
        expect_choice(mode, "mode", _C.POOL_MODES)
        self.kernel_size, self.padding = kernel_axes(kernel_size), three_ints(padding, "padding", least=0)
        self.stride = self.kernel_size if stride is None else three_ints(stride, "stride")
        self.mode = mode

    def forward(self, x: SparseTensor) -> SparseTensor:
        expect_sparse(x, "x")
        nmap, sites = x.sites.strided(self.kernel_size, self.stride, self.padding)
        return x.replace(pooling.sparse_pool3d(x.feats, neighbor_map=nmap, mode=self.mode), sites)

    def extra_repr(self) -> str:
        return f"{self.kernel_size}, stride={self.stride}, padding={self.padding}, mode={self.mode!r}"


class SparseUpsample3d(torch.nn.Module):
    """Back to the voxels that a layer with stride = kernel_size came from: each takes the features of its cell."""

    def forward(self, x: SparseTensor) -> SparseTensor:
        expect_sparse(x, "x")
        nmap, sites = x.sites.came_from()
        return x.replace(pooling.sparse_upsample3d(x.feats, neighbor_map=nmap), sites)


class GlobalPool(torch.nn.Module):
    """(B, C): the maximum, mean or sum of all voxels of each sample. mode: "max", "mean" or "sum"."""

    def __init__(self, mode: str = "max") -> None:
        super().__init__()
        expect_choice(mode, "mode", _C.POOL_MODES)
        self.mode = mode

    def forward(self, x: SparseTensor) -> torch.Tensor:
        expect_sparse(x, "x")
        return pooling.global_pool(x.feats, x.coords, x.batch_size, self.mode)

    def extra_repr(self) -> str:
        return f"mode={self.mode!r}"
