"""Convolutions as modules: submanifold, strided, transposed, and the inverse of a strided one."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, Self, TypedDict, Unpack

import torch
from torch.nn.utils import parametrize

from flexgemm import _C
from flexgemm._arguments import as_int, expect_choice
from flexgemm._voxels import kernel_axes, three_ints
from flexgemm.torch import ops, products
from flexgemm.torch.dispatch import autocast
from flexgemm.torch.nn.float8 import KeepsFloat8
from flexgemm.torch.nn.tensor import SparseTensor, expect_sparse
from flexgemm.voxel import NeighborMap


class Options(TypedDict, total=False):
    """What every convolution takes, as of `Convolution`, besides the device."""

    groups: int
    bias: bool
    precision: str | None
    dtype: torch.dtype | None


class Convolution(KeepsFloat8):
    """What the convolutions share.

    weight (out_channels, Kw, Kh, Kd, in_channels / groups) and bias (out_channels) or None are initialised as
    torch.nn.Conv3d does.

    kernel_size: 1 to 7, an int, or three (w, h, d); stride, padding, dilation and output_padding likewise.
    groups: the channels are cut into so many, each output channel sees the input channels of its group.
    precision: as of `flexgemm.torch.submanifold_conv3d`.
    """

    bias: torch.Tensor | None
    weight_scale: torch.Tensor | None  # of the output channels of a weight in FP8

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        *,
        groups: int = 1,
        bias: bool = True,
        precision: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        in_channels = as_int(in_channels, "in_channels", least=1)
        out_channels = as_int(out_channels, "out_channels", least=1)
        groups = as_int(groups, "groups")
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(f"groups: expected a divisor of {in_channels} and {out_channels} channels, got {groups}")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        if precision is not None:
            expect_choice(precision, "precision", _C.PRECISIONS)
        self.kernel_size = kernel_axes(kernel_size)
        self.precision = precision
        shape = out_channels, *self.kernel_size, in_channels // groups
        self.weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.register_buffer("weight_scale", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(in_channels / groups * kernel volume), weight and bias."""
        bound = 1 / math.sqrt(math.prod(self.weight.shape[1:]))
        torch.nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def convolve(self, feats: torch.Tensor, nmap: NeighborMap) -> torch.Tensor:
        """Of rows of features over a map."""
        if self._buffers["weight_scale"] is None:  # as `self.weight_scale`, for which torch looks in three places
            parameters: Any = self._parameters
            weight, bias = parameters.get("weight"), parameters.get("bias")
            if weight is None or "bias" not in parameters:  # parametrized
                weight, bias = self.weight, self.bias
            return ops.convolution(feats, weight, bias, None, nmap, None, "auto", self.precision, self.groups, None, {})
        (feats,) = autocast(feats)
        rows, of_rows = products.cast_rows(feats)
        bias = None if self.bias is None else self.bias.to(feats.dtype)
        scales: Any = {"scale_feats": of_rows, "scale_weight": self.weight_scale, "out_dtype": feats.dtype}
        return ops.sparse_conv3d(rows, self.weight, bias, neighbor_map=nmap, groups=self.groups, **scales)

    def frozen(self) -> Self:
        """A copy for inference with a weight of FP8: e4m3, a scale for each output channel. Rows of the features are
        cast in each call, with a scale each; no gradient passes."""
        for name in ("weight", "bias"):
            if name in self._parameters or name in self._buffers or parametrize.is_parametrized(self, name):
                continue
            raise ValueError(
                f"{name}: expected a parameter or a parametrization, got a tensor computed by a hook, as of "
                "torch.nn.utils.prune; make it a parameter first, as prune.remove does"
            )
        result = copy.deepcopy(self)
        if self.weight_scale is not None:
            return result
        if parametrize.is_parametrized(result):
            result.__class__ = parametrize.type_before_parametrizations(result)
            del result.parametrizations
        q, scale = products.cast_rows(self.weight.detach().flatten(1))
        buffers = {
            "weight": q.view(self.weight.shape),
            "bias": None if self.bias is None else self.bias.detach().clone(),
        }
        for name, buffer in buffers.items():
            if name in result._parameters:
                delattr(result, name)
            result.register_buffer(name, buffer)
        result.weight_scale = scale
        return result

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0)):
            if getattr(self, name, (default,) * 3) != (default,) * 3:
                text += f", {name}={getattr(self, name)}"
        text += f", groups={self.groups}" if self.groups != 1 else ""
        text += "" if self.weight_scale is None else ", fp8=True"
        return text if self.bias is not None else f"{text}, bias=False"


class SubMConv3d(Convolution):
    """Submanifold convolution: the voxels of the output are those of the input. The rest as of `Convolution`."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int] = 3,
        *,
        dilation: int | Sequence[int] = 1,
        device: Any = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, device=device, **options)
        self.dilation = three_ints(dilation, "dilation")

    def forward(self, x: SparseTensor) -> SparseTensor:
        expect_sparse(x, "x")
        return x.replace(self.convolve(x.feats, x.sites.neighbor_map(self.kernel_size, self.dilation)))


class SparseConv3d(Convolution):
    """Strided convolution: output o reads the voxels at o * stride + k * dilation - padding, and is there if it reads
    any. The rest as of `Convolution`.

        y = layer(x)
        y = layer(x, onto=z)        # the outputs are the voxels of z, which y + z and cat([y, z]) need

    Behind onto=z an inverse convolution or an upsampling of y goes back to where z came from, not to x.
    """

    transposed = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        *,
        dilation: int | Sequence[int] = 1,
        output_padding: int | Sequence[int] = 0,
        device: Any = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, device=device, **options)
        self.stride, self.dilation = three_ints(stride, "stride"), three_ints(dilation, "dilation")
        self.padding = three_ints(padding, "padding", least=0)
        self.output_padding = three_ints(output_padding, "output_padding", least=0)

    def forward(self, x: SparseTensor, onto: SparseTensor | None = None) -> SparseTensor:
        expect_sparse(x, "x")
        if onto is not None:
            expect_sparse(onto, "onto")
        how = self.kernel_size, self.stride, self.padding, self.dilation, self.transposed, self.output_padding
        nmap, sites = x.sites.strided(*how, None if onto is None else onto.sites)
        return x.replace(self.convolve(x.feats, nmap), sites)


class SparseConvTranspose3d(SparseConv3d):
    """Transposed convolution, which makes voxels: one at i reaches the outputs i * stride + k * dilation - padding.
    Its grid is that of torch.nn.ConvTranspose3d. The rest as of `Convolution`."""

    transposed = True


class SparseInverseConv3d(Convolution):
    """From the outputs of a strided layer (convolution or pooling) back to its inputs, over the same pairs: the way up
    of a U-Net. The tensor must lie on the voxels that such a layer of this kernel_size made. The rest as of
    `Convolution`."""

    def forward(self, x: SparseTensor) -> SparseTensor:
        expect_sparse(x, "x")
        nmap, sites = x.sites.came_from()
        if nmap.kernel_size != self.kernel_size:
            raise ValueError(
                f"kernel_size: expected {nmap.kernel_size}, of the layer gone back, got {self.kernel_size}"
            )
        return x.replace(self.convolve(x.feats, ops.inverse_of(nmap)), sites)
