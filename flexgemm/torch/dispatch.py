"""How a call of flexgemm.torch goes: straight to the extension, or through torch's dispatcher.

Straight is the rule, because the dispatcher costs more host time than a small kernel takes. Whoever wants to see the
operation rather than its numbers gets it as an operator of torch.library (operators/): torch.compile, torch.export and
torch.jit.trace, dispatch modes (make_fx, FLOP counters, selective checkpointing), and subclasses of Tensor such as
FakeTensor and DTensor.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from flexgemm._arguments import as_bool, type_name

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
in_mode = torch._C._len_torch_dispatch_stack  # how many dispatch modes a call goes through
_jit_trace = torch._C._get_tracing_state  # of torch.jit.trace, None outside of it
transformed = torch._C._are_functorch_transforms_active  # inside torch.func.grad, vmap, ...


def _by_allow_tf32(backend: str, operation: str) -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


# torch.backends.cuda.matmul.fp32_precision, at a third of its time; torch before 2.9 knows allow_tf32 only.
_matmul_precision = getattr(torch._C, "_get_fp32_precision_getter", _by_allow_tf32)


def traced(x: Any, y: Any) -> bool:
    """Whether a call whose first tensors are x and y has to go through the dispatcher."""
    if torch.compiler.is_compiling() or type(x) not in _PLAIN or type(y) not in _PLAIN or in_mode() > 0:
        return True
    return bool(x.is_meta) or _jit_trace() is not None


def beneath_transforms() -> AbstractContextManager[Any]:
    """A context for what is built of coordinates alone: tensors made in it belong to no transform of torch.func."""
    inside = not torch.compiler.is_compiling() and transformed()
    return torch._C._DisableFuncTorch() if inside else nullcontext()


def unwrapped(x: torch.Tensor, name: str) -> torch.Tensor:
    """Coordinates, codes or points beneath all transforms of torch.func, which wrap what is made within them."""
    if torch.compiler.is_compiling():
        return x
    functorch: Any = torch._C._functorch
    while functorch.is_gradtrackingtensor(x):
        x = functorch.get_unwrapped(x)
    if functorch.is_batchedtensor(x):
        raise ValueError(f"{name}: expected the same for all elements of torch.func.vmap, got one for each")
    return x


def expect_tensor(x: Any, name: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type_name(x)}")


def name_of(dtype: Any) -> Any:
    """A dtype as operators take it; what is none stays."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def expect_foreseen(foreseen: bool, names: str) -> None:
    """In the backward pass of an operator. Whether a call has gradients is asked when it is traced, and an exported
    program may be given tensors that require one where those it was traced with did not."""
    if not foreseen:
        raise RuntimeError(f"{names}: requires grad, but not when the call was traced; trace it with tensors that do")


def note_written(out: torch.Tensor) -> None:
    """Tells autograd, which may have saved it for a backward pass."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


def refuse_stream(stream: Any) -> None:
    """An operator runs on torch's current stream."""
    if stream is not None:
        raise ValueError("stream: cannot be given where torch traces the call; use torch.cuda.stream")


def refuse_check(check: Any, where: str) -> None:
    """What an operation is given cannot be looked at where only its shape is known."""
    if as_bool(check, "check"):
        raise ValueError(f"check: expected False {where}, got True")


# Whether torch.autocast is on for any device, in a quarter of the time that it takes to ask for one.
casts = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def autocast(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """The factors of a product as torch.autocast wants them: where it is on for their device, float32, float16 and
    bfloat16 become its dtype; all else, FP8 too, stays."""
    first = tensors[0]
    assert first is not None
    device = "cuda" if first.is_cuda else "cpu"
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x is not None and x.dtype in _FLOATS else x for x in tensors)


def autocast_bias(bias: Any) -> Any:
    """The same of a bias: one of float32, which is added before the sum is rounded, stays."""
    return autocast(bias)[0] if isinstance(bias, torch.Tensor) and bias.dtype is not torch.float32 else bias


def setting(precision: str | None, x: torch.Tensor) -> str:
    """The precision of a product of x: by default of float32 what torch's settings ask of it on CUDA."""
    if precision is not None or x.dtype is not torch.float32:
        return "ieee" if precision is None else precision
    return "tf32" if _matmul_precision("cuda", "matmul") == "tf32" else "ieee"
