"""What makes an operator of a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def operator(function: Callable[..., Any], writes: Sequence[str] = (), name: str | None = None) -> CustomOpDef:
    """The operator of a function's signature, on the CPU and CUDA. Autograd sees it whole.

    name: with its namespace; by default that of the function, of ours.
    """

    @wraps(function)
    def silent(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    define: Any = torch.library.custom_op  # torch types it for functions whose parameters are known
    name = f"flexgemm::{function.__name__}" if name is None else name
    return define(name, silent, mutates_args=writes, device_types=("cpu", "cuda"))
