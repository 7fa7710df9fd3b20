"""Voxels in a line, for torch: codes along a curve and the order of voxels, which torch.compile can trace."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexgemm import serialize
from flexgemm._arrays import Stream
from flexgemm.torch import operators
from flexgemm.torch.dispatch import beneath_transforms, expect_tensor, refuse_stream, traced, unwrapped


def encode_seq(
    coords: torch.Tensor, shape: Sequence[int], mode: str = "z_order", *, stream: Stream = None
) -> torch.Tensor:
    """`flexgemm.encode_seq` of a torch tensor."""
    return _call("encode_seq", coords, "coords", shape, mode, stream)


def decode_seq(
    code: torch.Tensor, shape: Sequence[int], mode: str = "z_order", *, stream: Stream = None
) -> torch.Tensor:
    """`flexgemm.decode_seq` of a torch tensor."""
    return _call("decode_seq", code, "code", shape, mode, stream)


def sort_coords(
    coords: torch.Tensor, shape: Sequence[int], mode: str = "z_order", *, stream: Stream = None
) -> torch.Tensor:
    """`flexgemm.sort_coords` of a torch tensor."""
    return _call("sort_coords", coords, "coords", shape, mode, stream)


def _call(operation: str, x: torch.Tensor, name: str, shape: Sequence[int], mode: str, stream: Stream) -> torch.Tensor:
    expect_tensor(x, name)
    result: torch.Tensor
    if traced(x, x):
        refuse_stream(stream)
        result = getattr(operators, operation)(x, tuple(shape), mode)
    else:
        with beneath_transforms():
            result = getattr(serialize, operation)(unwrapped(x, name), shape, mode, stream=stream)
    return result
