"""What the adapter of torch's arrays and flexgemm.torch share. It imports torch, so it is imported behind it; and it
names torch, where `sys.modules` would have torch.compile guard every module there is."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad


def requires_grad(*tensors: Any) -> bool:
    """Whether torch is asked for a gradient of an operation on these, of which some may be None; or for a derivative in
    forward mode, which it then refuses, since an autograd.Function has none."""
    if torch.is_grad_enabled():
        for x in tensors:
            if getattr(x, "requires_grad", False):
                return True
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def expect_unrecorded(out: Any) -> None:
    """Raises for an output whose gradient torch is asked for."""
    if requires_grad(out):
        raise ValueError("out: expected a tensor that does not require grad: autograd would not see it written")
