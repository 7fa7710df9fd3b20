"""Weights that stay FP8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from typing import Self


class KeepsFloat8(torch.nn.Module):
    """A module whose weight, once it has a scale, is of FP8: half(), to(dtype) and the like, which know no other floats
    than theirs, move both and leave them what they are."""

    weight: torch.Tensor
    scale: torch.Tensor | None

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        if self.scale is None:
            return super()._apply(fn, recurse)
        weight, scale = self.weight, self.scale
        super()._apply(fn, recurse)
        if self.weight.dtype is not weight.dtype:
            self.weight = weight.to(self.weight.device)
        if self.scale.dtype is not scale.dtype:
            self.scale = scale.to(self.scale.device)
        return self
