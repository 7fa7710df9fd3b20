"""flashinfer.gemm's products over flexgemm: bmm_fp8 and SegmentGEMMWrapper. Neither is recorded by autograd."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from flexgemm._arguments import as_int, renamed
from flexgemm.gemm import FP8
from flexgemm.torch.dispatch import casts, expect_tensor, name_of
from flexgemm.torch.products import product, segment_gemm

__all__ = ["SegmentGEMMWrapper", "bmm_fp8"]

_ORDER = ("out", "seg_lens", "seg_indptr", "weight_indices")
_OLDER_ORDER = _ORDER[1:]


@torch.no_grad()
def bmm_fp8(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    backend: str = "cublas",
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """A_scale * B_scale * (A . B) of each matrix of a batch.

    A: (b, m, k), B: (b, k, n), e4m3 or e5m2; B column-major, as of a transposed (b, n, k), or row-major.
    A_scale, B_scale: float32, one element. dtype: float16, bfloat16 or float32, of a new output. out: (b, m, n).
    backend: accepted; there is one. batch_invariant: False; how a product is summed depends on its shape.
    """
    if batch_invariant:
        raise ValueError("batch_invariant: expected False, got True")
    _expect("A", A, (None, None, None))
    _expect("B", B, (A.shape[0], A.shape[2], None))
    for name, x in ("A", A), ("B", B):
        if name_of(x.dtype) not in FP8:
            raise TypeError(f"{name}: expected dtype {' or '.join(FP8)}, got {name_of(x.dtype)}")
    for name, scale in ("A_scale", A_scale), ("B_scale", B_scale):
        expect_tensor(scale, name)
        if scale.numel() != 1:
            raise ValueError(f"{name}: expected one element, got {tuple(scale.shape)}")
    how: Any = {"scale_a": A_scale.reshape(()), "scale_b": B_scale.reshape(()), "out": out}
    if out is None:
        how["out_dtype"] = dtype
    result: torch.Tensor
    with renamed({"a": "A", "b": "B", "scale_a": "A_scale", "scale_b": "B_scale", "out_dtype": "dtype"}):
        result = product("batched", A, B.transpose(-2, -1), **how)
    return result


class SegmentGEMMWrapper:
    """Products of consecutive segments of rows, each with a weight of its own: adapters.

    float_workspace_buffer, backend: accepted; flexgemm takes its own workspace from torch when it needs one.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor | None = None, backend: str = "auto") -> None:
        self.reset_workspace_buffer(float_workspace_buffer)

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any = None) -> None:
        """Accepted."""

    @torch.no_grad()
    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        batch_size: int,
        weight_column_major: bool,
        *rest: torch.Tensor | None,
        **named: torch.Tensor | None,
    ) -> torch.Tensor:
        """y[segment i] = x[segment i] . weights[weight_indices[i]].

        x: (rows, d_in). weights: (w, d_out, d_in) with weight_column_major, else (w, d_in, d_out).
        seg_lens: (batch_size,), or seg_indptr: (batch_size + 1,), where the segments begin and the last one ends.
        weight_indices: (batch_size,); by default segment i has weight i, of at least batch_size.
        out: (rows, d_out), of which rows of no segment are left alone; by default of x's dtype, bfloat16 for FP8, and
            zero in those rows.
        Beside seg_indptr seg_lens are not looked at, and weight_indices without elements are None.
        seg_indptr and weight_indices may be longer, as buffers of CUDA graphs are: their first elements count. Lengths,
        their sums and indices may lie on the CPU, as flashinfer's programs have them.

        rest: out, seg_lens, seg_indptr and weight_indices by position; or, as in an older order of the arguments, which
            is recognised, the last three of them.
        """
        batch_size = as_int(batch_size, "batch_size", least=0)
        order = _OLDER_ORDER if _is_older(rest, batch_size) else _ORDER
        if len(rest) > len(order):
            raise TypeError(f"expected at most {4 + len(order)} positional arguments, got {4 + len(rest)}")
        given = dict(zip(order[: len(rest)], rest, strict=True))
        for name in named:
            if name not in _ORDER:
                raise TypeError(f"unexpected keyword argument {name!r}")
            if given.get(name) is not None:
                raise TypeError(f"{name}: given by position and by name")
        out, seg_lens, seg_indptr, weight_indices = map({**given, **named}.get, _ORDER)
        if out is not None:
            expect_tensor(out, "out")
        if seg_lens is None and seg_indptr is None:
            raise ValueError("seg_lens, seg_indptr: expected one of them, got None")
        _expect("x", x, (None, None))
        _expect("weights", weights, (None, None, None))
        sizes: Any
        if seg_indptr is not None:
            sizes = {"offsets": _first("seg_indptr", seg_indptr, batch_size + 1).to(x.device)}
        else:
            sizes = {"seg_lens": _expect("seg_lens", seg_lens, (batch_size,)).to(x.device)}
        if isinstance(weight_indices, torch.Tensor) and weight_indices.numel() == 0:  # which flashinfer has for None
            weight_indices = None
        if weight_indices is not None:
            weight_indices = _first("weight_indices", weight_indices, batch_size).to(x.device)
        elif len(weights) < batch_size:
            raise ValueError(f"weights: expected one for each of {batch_size} segments, got {len(weights)}")
        else:
            weights = weights[:batch_size]
        if out is None:
            dtype = x.dtype if x.dtype.itemsize > 1 else torch.bfloat16
            out = x.new_zeros((len(x), weights.shape[1 if weight_column_major else 2]), dtype=dtype)
        how: Any = {"weight_indices": weight_indices, "weight_column_major": weight_column_major, "out": out}
        uncast = torch.autocast(x.device.type, enabled=False) if casts() else nullcontext()
        with renamed({"offsets": "seg_indptr"}), uncast:
            return segment_gemm(x, weights, **sizes, **how)

    forward = run


def _expect(name: str, given: Any, shape: tuple[int | None, ...]) -> torch.Tensor:
    """A tensor of that shape, in which None is any length."""
    expect_tensor(given, name)
    if given.ndim != len(shape) or any(n not in (None, own) for n, own in zip(shape, given.shape, strict=True)):
        need = str(shape).replace("None", "any")
        raise ValueError(f"{name}: expected {need}, got {tuple(given.shape)}")
    return given


def _first(name: str, given: Any, length: int) -> torch.Tensor:
    """The first `length` elements: buffers that a CUDA graph reads have room for the largest batch."""
    expect_tensor(given, name)
    if given.ndim != 1 or len(given) < length:
        raise ValueError(f"{name}: expected ({length},), or more, got {tuple(given.shape)}")
    return given[:length]


def _has(array: torch.Tensor | None, length: int) -> bool:
    return isinstance(array, torch.Tensor) and array.shape == (length,)


def _is_older(rest: tuple[Any, ...], batch_size: int) -> bool:
    """Whether arguments by position begin with lengths, or with None and the bounds of the segments."""
    first, second, third = (*rest, None, None, None)[:3]
    if first is not None:
        return isinstance(first, torch.Tensor) and first.ndim == 1 and not first.is_floating_point()
    return _has(second, batch_size + 1) and (third is None or _has(third, batch_size))
