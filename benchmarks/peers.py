"""FlexGEMM beside flexgemm: its functions on the same tensors, timed and judged by the same procedure.

`--peers flex_gemm` looks for the package `flex_gemm`. Where it is a checkout on PYTHONPATH, its CUDA extension is not
built: then its Triton kernels alone are measured, on maps that flexgemm makes in its form (flexgemm.compat), and rows
that the extension computes are left out. Triton tunes a kernel when it is first called, outside the time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch

NAME = "flex_gemm"
TRITON = ("fwd", "bwd", "strided_fwd", "strided_bwd", "grid_sample_bwd")  # operations on given maps
EXTENSION = ("map_train", "map_infer", "z_order", "hilbert", "hash_insert", "hash_lookup", "grid_sample_fwd")

Call = Callable[[], Any]


def find() -> FlexGemm | None:
    """FlexGEMM, unless it cannot be imported: that is said and no failure."""
    try:
        package = importlib.import_module(NAME)
    except Exception as error:  # of Triton's and others' making too
        print(f"{NAME}: not measured: {type(error).__name__}: {error}", flush=True)
        return None
    built = hasattr(package.kernels.cuda, "hashmap_insert")
    if not built:
        package.kernels.cuda = importlib.import_module("flexgemm.compat.flex_gemm.kernels.cuda")
        print(f"{NAME}: its extension is not built: only its Triton kernels are measured", flush=True)
    return FlexGemm(package, TRITON + EXTENSION if built else TRITON)


class FlexGemm:
    """Calls of FlexGEMM whose results are what flexgemm's are; `ops` names those that can be made."""

    def __init__(self, package: ModuleType, ops: Sequence[str]) -> None:
        self.package: Any = package
        self.ops = ops

    # ---- submanifold convolution ----

    def map(self, coords: torch.Tensor, shape: Sequence[int], kernel: int, training: bool) -> Call:
        """Makes its neighbour cache."""
        compute = self.package.ops.spconv.SubMConv3dFunction._compute_neighbor_cache
        return partial(compute, coords, _with_channels(shape), (kernel,) * 3, (1, 1, 1), training)

    def fwd(self, feats: torch.Tensor, cache: Any, weight: torch.Tensor, bias: torch.Tensor) -> Call:
        forward = self.package.ops.spconv.SubMConv3dFunction._sparse_submanifold_conv_forward
        return partial(forward, feats, cache, weight, bias)

    def bwd(
        self, grad_out: torch.Tensor, feats: torch.Tensor, cache: Any, weight: torch.Tensor, bias: torch.Tensor
    ) -> Call:
        backward = self.package.ops.spconv.SubMConv3dFunction._sparse_submanifold_conv_backward
        of_feats, of_weight, of_bias = _leaves(feats, weight, bias)
        return partial(backward, grad_out, of_feats, cache, of_weight, of_bias)

    # ---- strided convolution ----

    def strided_fwd(self, feats: torch.Tensor, nmap: Any, weight: torch.Tensor, bias: torch.Tensor) -> Call:
        forward = self.package.ops.spconv.SparseConv3dFunction._sparse_conv_forward
        return partial(forward, feats, self._cache(nmap, training=False), weight, bias)

    def strided_bwd(
        self, grad_out: torch.Tensor, feats: torch.Tensor, nmap: Any, weight: torch.Tensor, bias: torch.Tensor
    ) -> Call:
        backward = self.package.ops.spconv.SparseConv3dFunction._sparse_conv_backward
        of_feats, of_weight, of_bias = _leaves(feats, weight, bias)
        return partial(backward, grad_out, of_feats, self._cache(nmap, training=True), of_weight, of_bias)

    def _cache(self, nmap: Any, training: bool) -> Any:
        compute = self.package.ops.spconv.SparseConv3dFunction._compute_neighbor_cache
        how = nmap.kernel_size, nmap.stride, nmap.padding, nmap.dilation
        return compute(nmap.coords, nmap.out_coords, _with_channels(nmap.shape), *how, training)

    # ---- codes, tables, samples ----

    def codes(self, mode: str, coords: torch.Tensor, shape: Sequence[int]) -> Call:
        return partial(self.package.ops.serialize.encode_seq, coords, _with_channels(shape), mode)

    def hash_insert(self, keys: torch.Tensor) -> Call:
        return partial(Table, self.package.kernels.cuda, keys.view(torch.uint64), _rows(keys))

    def hash_lookup(self, keys: torch.Tensor, queries: torch.Tensor) -> Call:
        return partial(self.hash_insert(keys)().lookup, queries)

    def grid_sample_fwd(
        self, feats: torch.Tensor, coords: torch.Tensor, shape: Sequence[int], grid: torch.Tensor
    ) -> Call:
        whole = _with_channels(shape, feats.shape[1])
        return partial(self.package.ops.grid_sample.grid_sample_3d, feats, coords, whole, grid)

    def grid_sample_bwd(
        self, grad_out: torch.Tensor, coords: torch.Tensor, shape: Sequence[int], grid: torch.Tensor
    ) -> Call:
        """The gradient in the features alone, in a tuple as flexgemm's."""
        cuda, _, *extents = self.package.kernels.cuda, *shape
        slots = torch.full((2 * len(coords),), -1, dtype=torch.int64, device=coords.device).view(torch.uint64)
        table = slots, torch.empty(2 * len(coords), dtype=torch.uint32, device=coords.device)
        found = cuda.hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight(*table, coords, grid, *extents)
        indices, weights = (x.view(-1, 8) for x in found)
        scatter = self.package.kernels.triton.indice_weighed_sum_bwd_input
        return lambda: (scatter(grad_out.flatten(0, -2), indices, weights, len(coords)),)


class Table:
    """FlexGEMM's hash table of two tensors, as many slots as flexgemm's has."""

    def __init__(self, cuda: Any, keys: torch.Tensor, rows: torch.Tensor) -> None:
        self._cuda, slots = cuda, 2 * len(keys)
        self._keys = torch.full((slots,), -1, dtype=torch.int64, device=keys.device).view(torch.uint64)
        self._values = torch.empty(slots, dtype=torch.uint32, device=keys.device)
        cuda.hashmap_insert(self._keys, self._values, keys, rows)

    def lookup(self, queries: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._cuda.hashmap_lookup(self._keys, self._values, queries.view(torch.uint64))
        return found.view(torch.int32)


def _leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """FlexGEMM computes the gradients of what requires one."""
    return [x.detach().requires_grad_() for x in tensors]


def _rows(keys: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(keys), dtype=torch.int32, device=keys.device).view(torch.uint32)


def _with_channels(shape: Sequence[int], channels: int = 1) -> torch.Size:
    """(B, C, W, H, D) of (B, W, H, D), as its functions take it; only samples depend on C."""
    return torch.Size([shape[0], channels, *shape[1:]])
