"""Weights that stay FP8."""

from __future__ import annotations

from typing import Any, Self

import torch


class KeepsFloat8(torch.nn.Module):
    """A module whose weight, once it has a scale, is of FP8: half(), to(dtype) and the like, which know no other floats
    than theirs, move both and leave them what they are."""

    weight: torch.Tensor
    weight_scale: torch.Tensor | None

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        if self.weight_scale is None:
            return super()._apply(fn, recurse)
        kept = {"weight": self.weight, "weight_scale": self.weight_scale}
        super()._apply(fn, recurse)
        for name, x in kept.items():
            moved = getattr(self, name)
            if moved.dtype is not x.dtype:
                setattr(self, name, x.to(moved.device))
        return self
