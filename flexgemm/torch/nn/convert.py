"""State dicts of other sparse convolution libraries, for a model of flexgemm.torch.nn with the same names.

    model.load_state_dict(from_torchsparse(torch.load(path), model))

A converter rewrites what belongs to the model's convolutions and wrapped modules and leaves the rest alone. A weight
here is (Co, Kw, Kh, Kd, Ci), cross-correlation with coordinates [batch, x, y, z]: weight[:, i, j, k] meets the voxel at
(x, y, z) + (i, j, k) - K // 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from flexgemm._arguments import expect_choice
from flexgemm.torch.nn.conv import Convolution, SubMConv3d
from flexgemm.torch.nn.normalization import InstanceNorm
from flexgemm.torch.nn.pointwise import BatchNorm, Linear

State = dict[str, torch.Tensor]

_SPCONV = {"KRSC": (0, 1, 2, 3, 4), "RSKC": (3, 0, 1, 2, 4), "RSCK": (4, 0, 1, 2, 3)}


def from_spconv(state: Mapping[str, torch.Tensor], model: torch.nn.Module, layout: str = "KRSC") -> State:
    """From spconv. Its coordinates are [batch, z, y, x]: give flexgemm the same columns, and the axes agree.

    layout: of its weights: "KRSC" (Co, kernel, Ci) since 2.1, "RSKC" (kernel, Co, Ci) in 2.0, "RSCK" (kernel, Ci, Co)
        in 1.x.
    """
    expect_choice(layout, "layout", tuple(_SPCONV))
    return _convert(state, model, "weight", lambda weight, conv: weight.permute(_SPCONV[layout]))


def from_torchsparse(state: Mapping[str, torch.Tensor], model: torch.nn.Module) -> State:
    """From torchsparse: `kernel` (V, Ci, Co), or (Ci, Co) for V = 1. Its offsets count x fastest where V is odd, z
    fastest where it is even. A kernel begins (K - 1) // 2 before o * stride: the padding of a strided layer. Outputs
    where kernel and stride differ are others there: give them as `onto=`."""

    def weight(kernel: torch.Tensor, conv: Convolution) -> torch.Tensor:
        _expect_centred(conv)
        odd = math.prod(conv.kernel_size) % 2 == 1
        return _x_fastest(kernel, conv) if odd else _z_fastest(kernel, conv)

    return _convert(state, model, "kernel", weight)


def from_minkowski(state: Mapping[str, torch.Tensor], model: torch.nn.Module) -> State:
    """From MinkowskiEngine: `kernel` (V, Ci, Co), or (Ci, Co) for V = 1, x fastest; bias (1, Co), and weight and bias
    of instance norms (1, C), whose eps is 1e-8; batch norms and linear layers inside a module of their own (`bn.`,
    `linear.`). An odd kernel begins K // 2 before o * stride, an even one there: the padding of a strided layer.
    Its outputs there are the inputs' voxels divided by the stride: `onto=SparsePool3d(stride)(x)` in a grid of even
    extents."""

    def weight(kernel: torch.Tensor, conv: Convolution) -> torch.Tensor:
        _expect_centred(conv)
        return _x_fastest(kernel, conv)

    result = _convert(state, model, "kernel", weight)
    for prefix, module in _named(model, (BatchNorm, Linear)):
        inner = prefix + ("bn." if isinstance(module, BatchNorm) else "linear.")
        for name in [name for name in result if name.startswith(inner)]:
            result[prefix + name.removeprefix(inner)] = result.pop(name)
    for prefix, module in _named(model, (Convolution, InstanceNorm)):
        for name in ("bias",) if isinstance(module, Convolution) else ("weight", "bias"):
            if prefix + name in result:
                result[prefix + name] = result[prefix + name].reshape(-1)
    return result


def _named(model: torch.nn.Module, kinds: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """The model's modules of these kinds, each with the prefix of its entries in a state dict; one that has several
    names with each of them."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kinds):
            yield f"{name}." if name else "", module


def _convert(
    state: Mapping[str, torch.Tensor],
    model: torch.nn.Module,
    name: str,
    weight: Callable[[torch.Tensor, Convolution], torch.Tensor],
) -> State:
    """The state with `name` of each convolution replaced by its `weight`."""
    result = dict(state)
    for prefix, module in _named(model, Convolution):
        assert isinstance(module, Convolution)
        if prefix + name not in result:
            continue
        given = result.pop(prefix + name)
        if name == "kernel":
            _expect_kernel(prefix + name, given, module)
        elif given.numel() != module.weight.numel():
            need = tuple(module.weight.shape)
            raise ValueError(f"{prefix}{name}: expected the elements of {need}, got {tuple(given.shape)}")
        result[prefix + "weight"] = weight(given, module).contiguous()
    return result


def _expect_kernel(name: str, kernel: torch.Tensor, conv: Convolution) -> None:
    """(V, Ci, Co), of which one axis of length 1, but not the last, may be missing."""
    co, *sizes, ci = conv.weight.shape
    volume = math.prod(sizes)
    shapes = {(volume, ci, co)} | ({(ci, co)} if volume == 1 else set()) | ({(volume, co)} if ci == 1 else set())
    if tuple(kernel.shape) not in shapes:
        raise ValueError(f"{name}: expected (V, Ci, Co) = {(volume, ci, co)}, got {tuple(kernel.shape)}")


def _x_fastest(kernel: torch.Tensor, conv: Convolution) -> torch.Tensor:
    """(V, Ci, Co), offsets counted with x fastest -> (Co, Kw, Kh, Kd, Ci)."""
    kernel = kernel.reshape(*conv.kernel_size[::-1], conv.weight.shape[-1], conv.out_channels)
    return kernel.permute(4, 2, 1, 0, 3)


def _z_fastest(kernel: torch.Tensor, conv: Convolution) -> torch.Tensor:
    kernel = kernel.reshape(*conv.kernel_size, conv.weight.shape[-1], conv.out_channels)
    return kernel.permute(4, 0, 1, 2, 3)


def _expect_centred(conv: Convolution) -> None:
    """An even kernel of stride 1 starts at the voxel itself there, and here K // 2 before it."""
    if isinstance(conv, SubMConv3d) and any(size % 2 == 0 for size in conv.kernel_size):
        raise ValueError(f"kernel_size: {conv.kernel_size} is even, and an even kernel looks elsewhere there")
