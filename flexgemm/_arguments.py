"""What functions ask of their arguments, and how errors name them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ContextDecorator
from operator import index
from typing import Any

import numpy as np


def dtype_name(dtype: Any, name: str, allowed: tuple[str, ...]) -> str:
    """The name that NumPy, ml_dtypes and torch share, of a name, a NumPy dtype or a torch dtype."""
    if isinstance(dtype, str) or dtype is None:
        result = str(dtype)
    elif type(dtype).__module__ == "torch":
        result = str(dtype).removeprefix("torch.")
    else:
        try:
            result = np.dtype(dtype).name
        except TypeError:
            result = repr(dtype)
    if result not in allowed:
        raise ValueError(f"{name}: expected {' or '.join(allowed)}, got {result}")
    return result


def type_name(x: Any) -> str:
    """As messages give it: "int", "torch.Tensor"."""
    kind = type(x)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def as_int(value: Any, name: str, *, least: int | None = None) -> int:
    """An int, from `least` on where there is one, given as such or as what stands for it."""
    try:
        number = value if type(value) is int else index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {type_name(value)}") from None
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name}: {error}") from error
    if least is not None and number < least:
        raise ValueError(f"{name}: expected at least {least}, got {number}")
    return number


def expect_float(value: Any, name: str) -> None:
    """Raises unless it is a number or what stands for one."""
    if not (hasattr(type(value), "__float__") or hasattr(type(value), "__index__")):
        raise TypeError(f"{name}: expected a float, got {type_name(value)}")


def as_bool(value: Any, name: str) -> bool:
    """A bool of Python or NumPy: what is merely true says no."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name}: expected a bool, got {type_name(value)}")


def expect_choice(value: Any, name: str, choices: Sequence[str]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a str, got {type_name(value)}")
    if value not in choices:
        need = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
        raise ValueError(f"{name}: expected {need}, got {value!r}")


def expect_bools(needs_grad: Any, count: int) -> None:
    """Raises unless it is told of each of so many gradients, in order, whether to compute it."""
    listed = isinstance(needs_grad, (tuple, list)) and len(needs_grad) == count
    if not listed or not all(isinstance(needed, (bool, np.bool_)) for needed in needs_grad):
        raise ValueError(f"needs_grad: expected {count} bools, got {needs_grad!r}")


_NAMES = re.compile(r"\w+(?=[:,]| and |$)")  # words that may be arguments: behind the article `a` there is a noun


class renamed(ContextDecorator):  # noqa: N801 (reads as contextlib's own)
    """Errors name arguments of the extension; in this context they are the caller's."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (TypeError, ValueError)):
            message = _NAMES.sub(lambda name: self.names.get(name[0], name[0]), str(error))
            if message != str(error):
                raise type(error)(message) from None
