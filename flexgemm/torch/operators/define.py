"""What makes an operator of a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def expect_shape(x: Any, name: str, shape: Sequence[Any], why: str) -> None:
    """Raises as the extension would unless a tensor without memory has these sizes, of which those with a name may be
    any. Sizes that are symbols become what the program checks."""

    def message() -> str:
        sizes = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        return f"{name}: expected ({sizes}) to match {why}, got {tuple(x.shape)}"

    torch._check_value(x.ndim == len(shape), message)
    for size, need in zip(x.shape, shape, strict=True):
        if not isinstance(need, str):
            torch._check_value(size == need, message)


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
