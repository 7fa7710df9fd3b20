"""What both convolutions share: their settings, their calls, and the cache that stands for a NeighborMap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

import flexgemm.torch
from flexgemm._arguments import expect_choice, type_name
from flexgemm.compat.flex_gemm.kernels.cuda import maps
from flexgemm.compat.flex_gemm.kernels.triton.spconv import config
from flexgemm.compat.flex_gemm.ops import spconv
from flexgemm.torch.dispatch import expect_tensor
from flexgemm.voxel import NeighborMap

Triple = Sequence[int]

_ALGORITHMS = [value for name, value in vars(spconv.Algorithm).items() if name.isupper()]


def expect_algorithm() -> None:
    expect_choice(spconv.ALGORITHM, "ALGORITHM", _ALGORITHMS)


def expect_arguments(weight: Any, neighbor_cache: Any, kind: type[NeighborCache]) -> None:
    """neighbor_cache: None, or a cache of this kind."""
    expect_tensor(weight, "weight")
    if neighbor_cache is not None and not isinstance(neighbor_cache, kind):
        raise TypeError(f"neighbor_cache: expected None or a {kind.__name__}, got {type_name(neighbor_cache)}")
    expect_algorithm()


def bias_for(feats: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """FlexGEMM adds a bias of any dtype; flexgemm's is of that of feats."""
    return None if bias is None else bias.to(feats.dtype)


def precision() -> str:
    """Of float32 convolutions, as programs set it."""
    return "tf32" if config.allow_tf32 else "ieee"


def forward(feats: torch.Tensor, nmap: NeighborMap, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The convolution, recorded by autograd; in the dtype of its arguments under torch.autocast too."""
    bias = bias_for(feats, bias)
    with torch.autocast(feats.device.type, enabled=False):
        return flexgemm.torch.sparse_conv3d(feats, weight, bias, neighbor_map=nmap, precision=precision())


def backward(
    grad_output: torch.Tensor,
    feats: torch.Tensor,
    nmap: NeighborMap,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of what requires one."""
    needs = feats.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad
    with torch.no_grad():
        return flexgemm.torch.sparse_conv3d_backward(
            grad_output, feats, weight, neighbor_map=nmap, needs_grad=needs, precision=precision()
        )


class NeighborCache:
    """A NeighborMap, `nmap`, with what FlexGEMM derives from it under its own names, made when asked for.

    As attributes and as items; valid_kernel_callback(block) and valid_kernel_seg_callback(block) too.
    """

    _version: int | None = None  # of the neighbor_map that is made here, when it is made

    def __init__(self, nmap: NeighborMap) -> None:
        self.nmap = nmap

    def map_for(self, feats: torch.Tensor, weight: torch.Tensor) -> NeighborMap:
        """The map that a convolution of these goes by."""
        return self.nmap if self._is_own() else self._given_map(feats, weight)

    def _given_map(self, feats: torch.Tensor, weight: torch.Tensor) -> NeighborMap:
        """The same where neighbor_map, if there is one, is a program's: given, or made here and written into since."""
        raise NotImplementedError

    def _is_own(self) -> bool:
        here = self.__dict__
        if "neighbor_map" not in here:
            return "nmap" in here
        if self._version is None:
            return False
        # A compiled program cannot ask for versions.
        return torch.compiler.is_compiling() or here["neighbor_map"]._version == self._version

    def __getstate__(self) -> dict[str, Any]:
        """Tensors of a copy count their versions anew: it makes a map of its own, or has one that is a program's."""
        left_out = {"_version", "neighbor_map"} if self._is_own() else {"_version", "_made_of"}
        return {name: x for name, x in vars(self).items() if name not in left_out}

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self, key, value)

    @cached_property
    def neighbor_map(self) -> torch.Tensor:
        with torch.inference_mode(False):  # whose tensors count no versions
            made = maps.unsigned(self.nmap.map)
        self._version = made._version
        return made

    @cached_property
    def _pairs(self) -> tuple[torch.Tensor, ...]:
        return maps.neighbor_map_post_process_for_masked_implicit_gemm_1(self.neighbor_map)

    @cached_property
    def _sorted(self) -> tuple[torch.Tensor, torch.Tensor]:
        return maps.neighbor_map_post_process_for_masked_implicit_gemm_1_no_bwd(self.neighbor_map)

    @cached_property
    def gray_code(self) -> torch.Tensor:
        return self._sorted[0]

    @cached_property
    def sorted_idx(self) -> torch.Tensor:
        return self._sorted[1]

    @cached_property
    def valid_signal_i(self) -> torch.Tensor:
        return self._pairs[2]

    @cached_property
    def valid_signal_o(self) -> torch.Tensor:
        return self._pairs[3]

    @cached_property
    def valid_signal_seg(self) -> torch.Tensor:
        return self._pairs[4]

    def compute_kernel_idx(self, block_size: int) -> None:
        """Makes the items valid_kernel_<block_size> and valid_kernel_seg_<block_size>."""
        self[f"valid_kernel_{block_size}"], self[f"valid_kernel_seg_{block_size}"] = (
            maps.neighbor_map_post_process_for_masked_implicit_gemm_2(self.gray_code, self.sorted_idx, block_size)
        )

    def valid_kernel_callback(self, block_size: int) -> torch.Tensor:
        return self._kept(f"valid_kernel_{block_size}", self.compute_kernel_idx, block_size)

    def valid_kernel_seg_callback(self, block_size: int) -> torch.Tensor:
        return self._kept(f"valid_kernel_seg_{block_size}", self.compute_kernel_idx, block_size)

    def _kept(self, name: str, compute: Callable[[int], None], block_size: int) -> torch.Tensor:
        """The item of this name, which `compute` makes where it is missing."""
        if name not in vars(self):
            compute(block_size)
        item: torch.Tensor = self[name]
        return item


def cached_forward(
    feats: torch.Tensor, neighbor_cache: NeighborCache, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`forward` by the name that both autograd classes have for it: without autograd."""
    expect_algorithm()
    with torch.no_grad():
        return forward(feats, neighbor_cache.map_for(feats, weight), weight, bias)


def cached_backward(
    grad_output: torch.Tensor,
    feats: torch.Tensor,
    neighbor_cache: NeighborCache,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    expect_algorithm()
    return backward(grad_output, feats, neighbor_cache.map_for(feats, weight), weight, bias)
