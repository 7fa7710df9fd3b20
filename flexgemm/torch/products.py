"""Casts to FP8 and products for torch: recorded by autograd, under torch.autocast, in torch.compile and torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import torch

from flexgemm import gemm, quantization
from flexgemm._arguments import as_bool, as_int, dtype_name, expect_float, renamed
from flexgemm._arrays import Stream, on_stream, refuse_device
from flexgemm._torch import expect_unrecorded, requires_grad
from flexgemm.gemm import GradientOptions, Options
from flexgemm.torch import operators
from flexgemm.torch.autograd import keep, kept, no_gradient, recorded, records
from flexgemm.torch.dispatch import (
    autocast,
    autocast_bias,
    casts,
    expect_foreseen,
    expect_tensor,
    name_of,
    note_written,
    refuse_check,
    refuse_stream,
    setting,
    traced,
    transformed,
)

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def quantize(
    x: torch.Tensor,
    dtype: Any = "float8_e4m3fn",
    *,
    granularity: str = "tensor",
    scale: torch.Tensor | None = None,
    swiglu: bool = False,
    saturate: bool = True,
    stream: Stream = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flexgemm.quantize` of a torch tensor. No gradient passes it."""
    expect_tensor(x, "x")
    if not (traced(x, x) or transformed()):
        how: Any = {"granularity": granularity, "scale": scale, "swiglu": swiglu, "saturate": saturate}
        q, used = quantization.quantize(x, dtype, **how, stream=stream)
        return q, used
    refuse_stream(stream)
    quantization.expect_granularity(granularity)
    quantization.expect_saturate(saturate, scale)
    name = dtype_name(name_of(dtype), "dtype", gemm.FP8)
    given = scale
    if scale is not None:
        expect_tensor(scale, "scale")
        given = scale.detach()
    q, made = operators.quantize(x.detach(), name, granularity, given, swiglu, saturate)
    return q, made if scale is None else scale


def cast_rows(x: torch.Tensor, dtype: str = "float8_e4m3fn") -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 of the shape of x (..., K), and a scale per row (...). What is not finite stays so behind a product: loss
    scaling goes by that."""
    return quantize(x, dtype, granularity="row", saturate=False)


def gemm_nt(a: torch.Tensor, b: torch.Tensor, **options: Unpack[Options]) -> torch.Tensor:
    """`flexgemm.gemm_nt` of torch tensors, differentiable in a, b and bias, as often as asked, where a and b are
    float32, float16 or bfloat16 and scales, alpha, activation and out are not given. torch.autocast casts such a and b.

    precision: of float32 products, by default torch's own setting, as of `submanifold_conv3d`. Raises ValueError where
    a gradient is asked of another product.
    """
    return product("dense", a, b, **options)


def batched_gemm_nt(a: torch.Tensor, b: torch.Tensor, **options: Unpack[Options]) -> torch.Tensor:
    """`flexgemm.batched_gemm_nt` of torch tensors, differentiable as `gemm_nt` is."""
    return product("batched", a, b, **options)


def m_grouped_gemm_nt(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, **options: Unpack[Options]
) -> torch.Tensor:
    """`flexgemm.m_grouped_gemm_nt` of torch tensors, differentiable as `gemm_nt` is, but once. Rows of a outside every
    group have a gradient of zero."""
    return product("m_grouped", a, b, offsets=offsets, **options)


def m_grouped_gemm_nt_contiguous(
    a: torch.Tensor, b: torch.Tensor, m_indices: torch.Tensor, **options: Unpack[Options]
) -> torch.Tensor:
    """`flexgemm.m_grouped_gemm_nt_contiguous` of torch tensors, differentiable as `m_grouped_gemm_nt` is: padding has a
    gradient of zero, and its rows of the gradient of the output are not read."""
    return product("m_grouped_contiguous", a, b, m_indices=m_indices, **options)


def m_grouped_gemm_nt_masked(
    a: torch.Tensor, b: torch.Tensor, masked_m: torch.Tensor, expected_m: int = 0, **options: Unpack[Options]
) -> torch.Tensor:
    """`flexgemm.m_grouped_gemm_nt_masked` of torch tensors, differentiable as `m_grouped_gemm_nt` is: rows past
    masked_m have a gradient of zero, and those of the gradient of the output are not read."""
    return product("m_grouped_masked", a, b, masked_m=masked_m, expected_m=expected_m, **options)


def n_grouped_gemm_nt(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, **options: Unpack[Options]
) -> torch.Tensor:
    """`flexgemm.n_grouped_gemm_nt` of torch tensors."""
    return product("n_grouped", a, b, offsets=offsets, **options)


def wgrad_gemm_nt(
    a: torch.Tensor, b: torch.Tensor, *, accumulate: bool = True, **options: Unpack[GradientOptions]
) -> torch.Tensor:
    """`flexgemm.wgrad_gemm_nt` of torch tensors, without `out` differentiable as `gemm_nt` is."""
    return product("dense", a, b, **gemm.of_weight_gradient(accumulate, options))


def k_grouped_wgrad_gemm_nt(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, *, num_groups: int | None = None, accumulate: bool = True,
    **options: Unpack[GradientOptions],
) -> torch.Tensor:  # fmt: skip
    """`flexgemm.k_grouped_wgrad_gemm_nt` of torch tensors."""
    groups = gemm.groups_along_k(offsets, num_groups, options.get("out"))
    return product("k_grouped", a, b, offsets=offsets, groups=groups, **gemm.of_weight_gradient(accumulate, options))


def segment_gemm(
    x: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *,
    seg_lens: torch.Tensor | None = None,
    weight_indices: torch.Tensor | None = None,
    weight_column_major: bool = True,
    **options: Unpack[Options],
) -> torch.Tensor:
    """`flexgemm.segment_gemm` of torch tensors, differentiable as `m_grouped_gemm_nt` is without weight_indices."""
    given = offsets, seg_lens, weight_indices, weight_column_major
    how, names = gemm.of_segments(x, weights, *given, options)
    with renamed(names):
        return product("m_grouped", x, weights, **how, **options)


def product(layout: str, a: Any, b: Any, /, **options: Any) -> torch.Tensor:
    """Any product; layouts and options are those of flexgemm.gemm."""
    through_operator = traced(a, b)
    if through_operator:
        expect_tensor(a, "a")
        expect_tensor(b, "b")
    if through_operator or casts():
        own = ("out", "out_dtype", "dtype_out")
        with on_stream(a, options.get("stream")):
            a, b = autocast(a, b)
            if options.get("bias") is not None and a.dtype.itemsize > 1 and all(options.get(x) is None for x in own):
                options["bias"] = autocast_bias(options["bias"])
    if through_operator:
        return _trace(layout, a, b, options)
    options["precision"] = setting(options.get("precision"), a)
    result: torch.Tensor
    if transformed():
        return record(layout, a, b, options)
    result = gemm.product_of(layout, a, b, options)  # which comes back to `record` where autograd has to see it
    if options.get("out") is result:
        note_written(result)
    return result


_WITHOUT_GRADIENT = ("weight_indices", "scale_a", "scale_b", "scale_out")
_TENSORS = ("bias", "offsets", "m_indices", "masked_m", *_WITHOUT_GRADIENT)  # in the order of the operators
_KNOWN = frozenset((*Options.__annotations__, *_TENSORS, "groups", "expected_m"))


def _trace(layout: str, a: Any, b: Any, options: dict[str, Any]) -> torch.Tensor:
    """The product as an operator."""
    for name in options:
        if name not in _KNOWN:
            raise TypeError(f"unexpected keyword argument {name!r}")
    refuse_stream(options.pop("stream", None))
    refuse_check(options.pop("check", False), "where torch traces the call")
    tensors = {name: options.pop(name, None) for name in _TENSORS}
    out, accumulate = options.pop("out", None), options.pop("accumulate", False)
    gemm.expect_sum(out, accumulate)
    expect_unrecorded(out)
    refuse_device(options.pop("device", None), "torch")
    if "out_dtype" in options:
        options["out_dtype"] = name_of(options["out_dtype"])
    followed = _followed(a, b, tensors)
    if records(*followed.values()):
        others = {name: tensors[name] for name in _WITHOUT_GRADIENT}
        others.update(activation=options.get("activation"), out=out)
        others["alpha"] = None if options.get("alpha", 1) == 1 else options["alpha"]
        more = [name for name, x in others.items() if x is not None]
        expect_differentiable(layout, a.dtype, more, followed)
    if out is not None:
        operators.product_into(out, a, b, *tensors.values(), layout=layout, accumulate=accumulate, **options)
        return out
    result: torch.Tensor = operators.product(a, b, *tensors.values(), layout=layout, **options)
    return result


# ---- gradients ----


def differentiable(layout: str, dtype: str, plain: bool) -> bool:
    """Whether a product has a gradient; plain: without scales, alpha, activation and out."""
    return plain and layout in ("dense", "batched", *operators.GROUPING) and dtype in gemm.FLOATS


def _followed(a: Any, b: Any, options: dict[str, Any]) -> dict[str, Any]:
    """What autograd may be asked for a gradient of."""
    return {"a": a, "b": b, **{name: options.get(name) for name in ("bias", "scale_a", "scale_b", "scale_out")}}


def expect_differentiable(layout: str, dtype: torch.dtype, more: list[str], followed: dict[str, Any]) -> None:
    """more: the names of what else is given, of scales, alpha, activation, out and so on."""
    name = name_of(dtype)
    if name not in (*gemm.FLOATS, *gemm.FP8, "uint8"):
        raise TypeError(f"a: expected dtype {', '.join((*gemm.FLOATS, *gemm.FP8))}, got {name}")
    if name not in gemm.FLOATS:
        what = f"of {name}"
    elif not differentiable(layout, name, True):
        what = f"of layout {layout}"
    elif more:
        what = f"with {', '.join(more)}"
    else:
        return
    names = [name for name, x in followed.items() if requires_grad(x)]
    why = "are inside torch.func" if transformed() else "require grad" if len(names) > 1 else "requires grad"
    who = "a, b, bias" if transformed() else ", ".join(names)
    raise ValueError(f"{who}: {why}, but a product {what} is not differentiable")


def record(layout: str, a: Any, b: Any, options: dict[str, Any]) -> torch.Tensor:
    """A product that autograd or torch.func has to see, on tensors as they are."""
    _check(options)
    given = {name: value for name, value in options.items() if value is not None}
    given.pop("promote_every", None)  # of FP8
    for name, neutral in (("alpha", 1), ("accumulate", False)):
        if given.get(name) == neutral:
            del given[name]
    bias, stream = given.pop("bias", None), given.pop("stream", None)
    allowed = gemm.FLOATS if "scale_out" not in given else gemm.FP8
    out_dtype = gemm.asked_dtype(given.pop("out_dtype", None), given.pop("dtype_out", None), allowed)
    grouping = given.pop(operators.GROUPING.get(layout, ""), None)
    row_major, expected_m = given.pop("b_row_major", False), given.pop("expected_m", 0)
    precision = given.pop("precision", "ieee")
    if expected_m and layout != "m_grouped_masked":
        raise ValueError(f"expected_m: expected 0 but for masked groups, got {expected_m!r}")
    expect_differentiable(layout, a.dtype, sorted(given), _followed(a, b, options))
    with on_stream(a, stream):
        result: torch.Tensor = _record(a, b, bias, grouping, layout, row_major, out_dtype, precision, expected_m)
    return result


def _check(options: dict[str, Any]) -> None:
    """What the extension does not see of a product that is recorded."""
    refuse_device(options.pop("device", None), "torch")
    refuse_check(options.pop("check", False), "inside torch.func")
    checks: dict[str, Callable[[Any, str], Any]]
    checks = {"alpha": expect_float, "accumulate": as_bool, "b_row_major": as_bool, "expected_m": as_int}
    for name in checks.keys() & options.keys():
        checks[name](options[name], name)
    gemm.expect_sum(options.get("out"), options.get("accumulate"))
    promote_every = options.get("promote_every")
    if promote_every is not None and as_int(promote_every, "promote_every") not in (128, 256, 512):
        raise ValueError(f"promote_every: expected 128, 256, 512 or None, got {promote_every!r}")


def _forward(
    a: Any, b: Any, bias: Any, grouping: Any, layout: str, row_major: bool, out_dtype: Any, how: Any, expected_m: int
) -> Any:
    given = {"bias": bias, "b_row_major": row_major, "out_dtype": out_dtype, "precision": how}
    if grouping is not None:
        given |= {operators.GROUPING[layout]: grouping, "expected_m": expected_m}
    return gemm.product(layout, a, b, **given)


def _save(ctx: Any, args: tuple[Any, ...], out: Any) -> None:
    a, b, bias, grouping, ctx.layout, ctx.row_major, _, ctx.precision, _ = args
    ctx.bias_dtype = None if bias is None else bias.dtype
    keep(ctx, (a, b), (ctx.needs_input_grad[1], ctx.needs_input_grad[0]), grouping)


def _backward(ctx: Any, grad_out: Any) -> Any:
    return *_gradients(ctx, grad_out), *[None] * 6


def _gradients(ctx: Any, grad_out: Any) -> Gradients:
    """Of out = a . b^T + bias: grad_out . b, grad_out^T . a, and the sum of the rows of grad_out."""
    a, b, grouping = kept(ctx, grad_out)
    needs, row_major = ctx.needs_input_grad[:3], ctx.row_major
    grad_a = grad_b = grad_bias = None
    if grouping is not None:
        given = grad_out, a, b.transpose(1, 2) if row_major else b, grouping, needs, ctx.precision, ctx.layout
        grad_a, grad_b, grad_bias = m_grouped_gradients(*given)
        grad_b = grad_b.transpose(1, 2) if row_major and grad_b is not None else grad_b
    else:
        dtype, precision = operators.of_gradients(grad_out, a, ctx.precision)
        how: Any = {"precision": precision, "out_dtype": a.dtype}
        rows = grad_out.to(dtype)
        if needs[0]:
            grad_a = _uncast(ctx.layout, rows, b.to(dtype), b_row_major=not row_major, **how)
        if needs[1]:
            a = a.to(dtype)
            factors = (a.mT, rows) if row_major else (rows.mT, a)
            grad_b = _uncast(ctx.layout, *factors, b_row_major=True, **how)
        if needs[2]:
            grad_bias = grad_out.sum(-2, dtype=torch.float32)
    return grad_a, grad_b, None if grad_bias is None else grad_bias.to(ctx.bias_dtype)


def _uncast(layout: str, a: Any, b: Any, **options: Any) -> torch.Tensor:
    """`product` of a gradient, which has the dtype that it has."""
    with torch.autocast(a.device.type, enabled=False):
        return product(layout, a, b, **options)


def m_grouped_gradients(
    grad_out: Any, a: Any, b: Any, grouping: Any, needs: Any, precision: str | None, layout: str = "m_grouped"
) -> Gradients:
    """Of products grouped along M in a, b and bias (float32); None where needs is False. Rows of no group have zero."""
    if traced(grad_out, a):
        function: Any = operators.m_grouped_gradients_operator
    else:
        function = _record_grouped_gradients if records(grad_out, a, b) else operators.m_grouped_gradients
    results = function(grad_out, a, b, grouping, layout, needs, precision)
    grad_a, grad_b, grad_bias = (g if n else None for g, n in zip(results, needs, strict=True))
    return grad_a, grad_b, grad_bias


_record = recorded("Product", _forward, _save, _backward)
_record_grouped_gradients = recorded("GroupedProductGradients", operators.m_grouped_gradients, None, no_gradient)


def _operator_save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    a, b, bias, *groupings = inputs[:6]
    how = keyword_only_inputs
    plain = how["alpha"] == 1 and all(x is None for x in (*inputs[6:], how["activation"]))
    ctx.foreseen = differentiable(how["layout"], name_of(a.dtype), plain)
    grouping = next((x for x in groupings if x is not None), None)
    _save(ctx, (a, b, bias, grouping, how["layout"], how["b_row_major"], None, how["precision"], 0), output)


def _operator_backward(ctx: Any, grad_out: Any) -> Any:
    expect_foreseen(ctx.foreseen, "a, b, bias")
    return *_gradients(ctx, grad_out), *[None] * 7


operators.product.register_autograd(_operator_backward, setup_context=_operator_save)
