"""flexgemm in place of torch's own scaled and grouped products, for programs that call those.

    flexgemm.torch.aten.enable()            # from here on; disable() takes it back
    with flexgemm.torch.aten.use(): ...     # only here

torch._scaled_mm (scales per tensor or per row), torch._scaled_grouped_mm (scales per row) and torch._grouped_mm, in all
four combinations of 2-D and 3-D operands, then run flexgemm's kernels wherever these read the operands as they are, and
with them scaled_mm, scaled_grouped_mm and grouped_mm of torch.nn.functional; what would need a copy, another scale,
dtype or option goes to torch's own kernel, as before. Autograd, torch.compile and everything else above the kernels
stay torch's.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from flexgemm import _C, gemm
from flexgemm._lock import ProcessLock

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_HALF = (torch.float16, torch.bfloat16)
_OUTPUTS = (torch.float32, *_HALF)
_TENSOR, _ROW = 0, 1  # recipes of torch.nn.functional.ScalingType

_enabled: dict[str, torch.library.Library] = {}
_kept: set[str] = set()  # by `enable`
_bodies: Counter[str] = Counter()  # of `use`, in any thread
_lock = ProcessLock()


def enable(device_type: str = "cuda") -> None:
    """Registers flexgemm for tensors of a kind of device, "cuda" or "cpu". A second call does nothing.

    Raises RuntimeError before torch 2.10, which cannot hand out its own kernels, and for "cuda" where flexgemm was
    built without CUDA.
    """
    with _lock.held():
        _register(device_type)
        _kept.add(device_type)


def _register(device_type: str) -> None:
    if device_type not in ("cuda", "cpu"):
        raise ValueError(f"device_type: expected 'cuda' or 'cpu', got {device_type!r}")
    if not hasattr(torch.library, "get_kernel"):
        raise RuntimeError(f"flexgemm.torch.aten: needs torch 2.10 or later, got {torch.__version__}")
    if device_type == "cuda" and _C.build_info()["cuda"] is None:
        raise NotImplementedError("flexgemm.torch.aten: needs flexgemm with CUDA, got a build without it")
    if device_type in _enabled:
        return
    library, key = torch.library.Library("aten", "IMPL"), device_type.upper()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name, choose in _CHOICES.items():
            operator, _, overload = name.partition(".")
            if hasattr(getattr(torch.ops.aten, operator, None), overload or "default"):
                library.impl(name, _override(name, key, choose), key, with_keyset=True)
    _enabled[device_type] = library


def disable(device_type: str = "cuda") -> None:
    """Takes `enable` back."""
    with _lock.held():
        _kept.discard(device_type)
        library = _enabled.pop(device_type, None)
        if library is not None:
            library._destroy()


@contextmanager
def use(device_type: str = "cuda") -> Iterator[None]:
    """`enable` for the body of a with statement, and of others that run beside it; where `enable` was called, it stays
    so."""
    with _lock.held():
        _register(device_type)
        _bodies[device_type] += 1
    try:
        yield
    finally:
        with _lock.held():
            _bodies[device_type] -= 1
            if not _bodies[device_type] and device_type not in _kept:
                disable(device_type)


def _override(name: str, key: str, choose: Callable[..., dict[str, Any] | None]) -> Callable[..., torch.Tensor]:
    """The kernel of one operator: flexgemm's where `choose` gives a product, else torch's own."""
    try:
        own = torch.library.get_kernel(f"aten::{name}", key)
    except RuntimeError:  # torch has none on this device
        own = None

    def kernel(keyset: Any, *args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        chosen = choose(*args, **kwargs)
        if chosen is not None and (out is None or _is_output(out, chosen)):
            with torch.no_grad():  # autograd has recorded torch's operator
                result: torch.Tensor = gemm.product(**(chosen if out is None else chosen | {"out": out}))
            return result
        if own is None:
            raise NotImplementedError(f"torch.{name}: neither flexgemm nor torch computes these arguments on {key}")
        given = kwargs if out is None else kwargs | {"out": out}
        result = own.call_boxed(keyset, *args, **given)
        return result

    return kernel


# ---- which calls flexgemm takes: the arguments of gemm.product for them, else None ----


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> dict[str, Any] | None:
    """a (M, K), b (K, N); scales of one element, or (M, 1) and (1, N)."""
    layout = _layout(a, b, None)
    if layout != {"layout": "dense"} or not _is_fp8(a, b, out_dtype, scale_result) or not _are_scales(scale_a, scale_b):
        return None
    rows = scale_a.shape == (a.shape[0], 1) and scale_b.shape == (1, b.shape[1])
    tensor = scale_a.numel() == scale_b.numel() == 1
    if not (rows or tensor) or not _is_bias(bias, b.shape[1], out_dtype):
        return None
    scales = (scale_a.reshape(()), scale_b.reshape(())) if tensor else (scale_a[:, 0], scale_b[0])
    return _product(layout, a, b, scales, bias, None, out_dtype, use_fast_accum)


def scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> dict[str, Any] | None:
    """Scales per row: (rows of a) and (columns of b), a leading G for 3-D operands, flat (G * rows) for 2-D by 2-D."""
    layout = _grouped_layout(a, b, offs)
    out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
    if layout is None or layout.get("b_row_major") or bias is not None:
        return None
    if not _is_fp8(a, b, out_dtype, scale_result) or not _are_scales(scale_a, scale_b):
        return None
    of_a, of_b = tuple(a.shape[:-1]), (*b.shape[:-2], b.shape[-1])
    groups = layout.get("groups")
    if groups is not None:
        of_a, of_b = (groups * of_a[0],), (groups * of_b[0],)
    if scale_a.shape != of_a or scale_b.shape != of_b:
        return None
    scales = (
        (scale_a, scale_b) if groups is None else (scale_a.view(groups, a.shape[0]), scale_b.view(groups, b.shape[1]))
    )
    return _product(layout, a, b, scales, None, offs, out_dtype, use_fast_accum)


def scaled_mm_v2(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: Sequence[torch.Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[torch.Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> dict[str, Any] | None:
    """Of torch.nn.functional.scaled_mm: scales per tensor or per row on both sides, as `scaled_mm`."""
    if contraction_dim or any((*swizzle_a, *swizzle_b)) or list(recipe_a) != list(recipe_b):
        return None
    if list(recipe_a) == [_TENSOR]:
        right = scale_a[0].numel() == scale_b[0].numel() == 1
    else:
        rows = a.ndim == b.ndim == 2 and list(recipe_a) == [_ROW]
        right = rows and (scale_a[0].shape, scale_b[0].shape) == ((a.shape[0], 1), (1, b.shape[1]))
    return scaled_mm(a, b, scale_a[0], scale_b[0], bias, None, out_dtype, use_fast_accum) if right else None


def scaled_grouped_mm_v2(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: Sequence[torch.Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[torch.Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> dict[str, Any] | None:
    """Of torch.nn.functional.scaled_grouped_mm: scales per row on both sides, as `scaled_grouped_mm`."""
    if contraction_dim or any((*swizzle_a, *swizzle_b)) or not list(recipe_a) == list(recipe_b) == [_ROW]:
        return None
    return scaled_grouped_mm(a, b, scale_a[0], scale_b[0], offs, bias, None, out_dtype, use_fast_accum)


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> dict[str, Any] | None:
    """bfloat16 or float16, all operands alike."""
    layout = _grouped_layout(a, b, offs)
    if layout is None or bias is not None or a.dtype not in _HALF or b.dtype is not a.dtype:
        return None
    out_dtype = a.dtype if out_dtype is None else out_dtype
    return None if out_dtype not in _OUTPUTS else _product(layout, a, b, (None, None), None, offs, out_dtype, False)


_CHOICES: dict[str, Callable[..., dict[str, Any] | None]] = {
    "_scaled_mm": scaled_mm,
    "_scaled_mm.out": scaled_mm,  # what inductor calls
    "_scaled_grouped_mm": scaled_grouped_mm,
    "_grouped_mm": grouped_mm,
    "_scaled_mm_v2": scaled_mm_v2,
    "_scaled_mm_v2.out": scaled_mm_v2,
    "_scaled_grouped_mm_v2": scaled_grouped_mm_v2,
}


def _grouped_layout(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> dict[str, Any] | None:
    """Of two matrices torch refuses without offsets."""
    layout = _layout(a, b, offs)
    return None if layout is None or layout["layout"] == "dense" else layout


def _layout(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> dict[str, Any] | None:
    """The layout of a product of a (..., M, K) and b (..., K, N) whose operands can be read as they are: K innermost,
    or, where kernels of flexgemm read that, N innermost in b, and M in a beside it."""
    axes = a.ndim, b.ndim
    if axes not in ((2, 2), (2, 3), (3, 2), (3, 3)):
        return None
    names = {(2, 2): "k_grouped", (2, 3): "m_grouped", (3, 2): "n_grouped", (3, 3): "batched"}
    name = "dense" if offs is None and axes == (2, 2) else names[axes]
    if (offs is not None) != (name in ("k_grouped", "m_grouped", "n_grouped")):
        return None
    if offs is not None and (offs.ndim != 1 or offs.dtype is not torch.int32):
        return None
    if a.shape[-1] != b.shape[-2] or (axes == (3, 3) and a.shape[0] != b.shape[0]):
        return None
    groups = 0 if offs is None else offs.shape[0]
    if axes in ((2, 3), (3, 2)) and groups != (b if axes == (2, 3) else a).shape[0]:
        return None
    layout: dict[str, Any] = {"layout": name}
    if name == "k_grouped":
        layout["groups"] = groups
    if not _readable(b.mT):
        if not _readable(b) or name == "n_grouped":
            return None
        layout["b_row_major"] = True
    beside_it = "b_row_major" in layout and name in ("batched", "k_grouped")
    return layout if _readable(a) or (beside_it and _readable(a.mT)) else None


def _readable(x: torch.Tensor) -> bool:
    """Whether rows lie one after another, each contiguous."""
    return x.stride(-1) == 1 and all(stride >= size for stride, size in zip(x.stride(), x.shape[1:], strict=False))


def _is_fp8(a: torch.Tensor, b: torch.Tensor, out_dtype: Any, scale_result: torch.Tensor | None) -> bool:
    return a.dtype in _FP8 and b.dtype in _FP8 and out_dtype in _OUTPUTS and scale_result is None


def _is_output(out: torch.Tensor, chosen: dict[str, Any]) -> bool:
    """Whether a dense product can be written there as it is; torch gives an output of another shape the right one."""
    shape = chosen["a"].shape[0], chosen["b"].shape[0]
    return out.shape == shape and out.dtype is chosen["out_dtype"] and _readable(out)


def _is_bias(bias: torch.Tensor | None, n: int, out_dtype: torch.dtype | None) -> bool:
    return bias is None or (bias.shape == (n,) and bias.is_contiguous() and bias.dtype in (torch.float32, out_dtype))


def _are_scales(*scales: torch.Tensor) -> bool:
    return all(scale.dtype is torch.float32 and scale.is_contiguous() for scale in scales)


def _product(
    layout: dict[str, Any],
    a: torch.Tensor,
    b: torch.Tensor,
    scales: tuple[Any, Any],
    bias: torch.Tensor | None,
    offs: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    fast: bool,
) -> dict[str, Any]:
    factors = {"a": a, "b": b if layout.get("b_row_major") else b.mT, "scale_a": scales[0], "scale_b": scales[1]}
    how = {"bias": bias, "offsets": offs, "out_dtype": out_dtype, "promote_every": None if fast else 128}
    how["out"] = None if layout["layout"] == "dense" else _output(layout, a, b, out_dtype)
    return layout | factors | how


def _output(layout: dict[str, Any], a: torch.Tensor, b: torch.Tensor, out_dtype: Any) -> torch.Tensor:
    """An output as torch's grouped products have it, which its traced graphs expect and the next such product needs:
    rows begin at multiples of 16 bytes."""
    leading = {"k_grouped": (layout.get("groups"), *a.shape[:-1]), "n_grouped": a.shape[1:-1]}
    n, unit = b.shape[-1], 16 // out_dtype.itemsize
    rows = leading.get(layout["layout"], a.shape[:-1])
    return a.new_empty((*rows, -(-n // unit) * unit), dtype=out_dtype)[..., :n]
