"""Convolutions as modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from flexgemm.torch import ops
from flexgemm.torch.nn.tensor import SparseTensor
from flexgemm.voxel import Triple


def triple(value: int | Sequence[int]) -> Triple:
    """An int for each axis."""
    w, h, d = (value, value, value) if isinstance(value, int) else value
    return w, h, d


class SubMConv3d(torch.nn.Module):
    """Submanifold convolution: the voxels of the output are those of the input.

    weight (out_channels, Kw, Kh, Kd, in_channels), bias (out_channels) or None, initialised as torch.nn.Conv3d does.
    kernel_size (1 to 7), dilation: an int, or three (w, h, d). precision: as of flexgemm.torch.submanifold_conv3d.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int] = 3,
        *,
        dilation: int | Sequence[int] = 1,
        bias: bool = True,
        precision: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.dilation = triple(kernel_size), triple(dilation)
        self.precision = precision
        shape = out_channels, *self.kernel_size, in_channels
        self.weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(in_channels * kernel volume), weight and bias."""
        bound = 1 / math.sqrt(self.in_channels * math.prod(self.kernel_size))
        torch.nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: SparseTensor) -> SparseTensor:
        nmap = x.sites.neighbor_map(self.kernel_size, self.dilation)
        return x.replace(
            ops.submanifold_conv3d(x.feats, self.weight, self.bias, neighbor_map=nmap, precision=self.precision)
        )

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        if self.dilation != (1, 1, 1):
            text += f", dilation={self.dilation}"
        return text if self.bias is not None else f"{text}, bias=False"
