"""How an operation is recorded for autograd and torch.func: an autograd.Function out of three plain functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from flexgemm._torch import requires_grad
from flexgemm.torch.dispatch import transformed


def records(*tensors: Any) -> bool:
    """Whether autograd or torch.func has to see an operation on these."""
    return requires_grad(*tensors) or transformed()


def keep(ctx: Any, factors: Sequence[Any], read: Sequence[bool], *others: Any) -> None:
    """For a backward pass: those factors that it reads, and all else. A gradient reads the other factor of its product,
    and what none reads is not to be held until then: the activations in front of a frozen layer."""
    ctx.of_factors = tuple((x.shape, x.dtype) for x in factors)
    ctx.save_for_backward(*(x if needed else None for x, needed in zip(factors, read, strict=True)), *others)


def kept(ctx: Any, grad_out: Any) -> tuple[Any, ...]:
    """What `keep` was given; for factors that it let go tensors of their shape and dtype that hold anything, in the
    memory of a row."""
    count, saved = len(ctx.of_factors), ctx.saved_tensors
    factors = (
        grad_out.new_empty(shape[-1:], dtype=dtype).expand(shape) if x is None else x
        for x, (shape, dtype) in zip(saved[:count], ctx.of_factors, strict=True)
    )
    return *factors, *saved[count:]


class _Alive:
    """The context of a Function that torch.func has called. It may be read when the transform is over: then torch's own
    operations alone can read the tensors in it as they are."""

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx

    def __getattr__(self, name: str) -> Any:
        return pytree.tree_map_only(torch.Tensor, torch._C._functorch.unwrap_if_dead, getattr(self.ctx, name))


def recorded(name: str, forward: Any, save: Any, backward: Any) -> Callable[..., Any]:
    """forward(*args) as a Function whose context `save(ctx, args, result)` fills, unless it is None, and
    `backward(ctx, *grads)` reads.

    torch.func asks for forward and context apart, and torch then takes 10 us more for every call: two Functions.
    """

    def together(ctx: Any, *args: Any) -> Any:
        result = forward(*args)
        if save is not None:
            save(ctx, args, result)
        return result

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if save is not None:
            save(ctx, inputs, output)

    def backward_of_one(ctx: Any, *gradients: Any) -> Any:
        try:
            return backward(ctx, *map(_as_it_is, gradients))
        except RuntimeError:
            if any(isinstance(g, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(g) for g in gradients):
                raise NotImplementedError(
                    f"{name}: gradients come one at a time, without is_grads_batched=True or vectorize=True; "
                    "torch.func.vmap takes several"
                ) from None
            raise

    def backward_behind_func(ctx: Any, *gradients: Any) -> Any:
        return backward(_Alive(ctx), *map(_as_it_is, gradients))

    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        """One call for each element of the batch."""

        def element(i: int) -> Any:
            return apply(*(x.select(d, i) if type(d) is int else x for x, d in zip(args, in_dims, strict=True)))

        if info.batch_size == 0:
            raise ValueError(f"torch.vmap of {name}: expected a batch of at least one element, got none")
        results = [element(i) for i in range(info.batch_size)]
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        stacked = tuple(None if x[0] is None else torch.stack(x) for x in zip(*results, strict=True))
        return stacked, tuple(None if x is None else 0 for x in stacked)

    plain = _function(name, forward=together, backward=backward_of_one)
    apart = _function(name, forward=forward, setup_context=setup_context, backward=backward_behind_func, vmap=vmap)
    # As plain.apply without what torch.autograd.Function does for torch.func, which takes it as long as the rest.
    record = super(torch.autograd.Function, plain).apply

    def apply(*args: Any) -> Any:
        return apart.apply(*args) if transformed() else record(*args)

    return apply


def _as_it_is(gradient: Any) -> Any:
    """Of complex numbers made from a result autograd may give a gradient that is negated when it is read."""
    return gradient.resolve_neg() if isinstance(gradient, torch.Tensor) else gradient


def _function(name: str, **methods: Any) -> Any:
    methods = {method: staticmethod(function) for method, function in methods.items()}
    return type(name, (torch.autograd.Function,), methods)


def no_gradient(ctx: Any, *gradients: Any) -> Any:
    raise NotImplementedError("flexgemm: this operation is differentiable once; its gradient has no gradient")
