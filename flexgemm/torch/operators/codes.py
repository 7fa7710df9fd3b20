"""Operators of codes along a curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flexgemm import _C, serialize
from flexgemm._voxels import grid_shape
from flexgemm.torch.operators.define import operator


@operator
def encode_seq(coords: torch.Tensor, shape: Sequence[int], mode: str) -> torch.Tensor:
    return serialize.encode_seq(coords, shape, mode)


@encode_seq.register_fake
def _(coords: Any, shape: Any, mode: Any) -> torch.Tensor:
    bits = _C.sequence_bits(shape=grid_shape(shape), mode=mode)
    return coords.new_empty(coords.shape[0], dtype=torch.int32 if bits <= 32 else torch.int64)


@operator
def decode_seq(code: torch.Tensor, shape: Sequence[int], mode: str) -> torch.Tensor:
    return serialize.decode_seq(code, shape, mode)


@decode_seq.register_fake
def _(code: Any, shape: Any, mode: Any) -> torch.Tensor:
    return code.new_empty((code.shape[0], 4), dtype=torch.int32)


@operator
def sort_coords(coords: torch.Tensor, shape: Sequence[int], mode: str) -> torch.Tensor:
    return serialize.sort_coords(coords, shape, mode)


@sort_coords.register_fake
def _(coords: Any, shape: Any, mode: Any) -> torch.Tensor:
    return coords.new_empty(coords.shape[0], dtype=torch.int32)
