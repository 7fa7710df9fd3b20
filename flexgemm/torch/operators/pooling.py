"""Operators of pooling over maps and over samples."""

from __future__ import annotations

from typing import Any

import torch

from flexgemm import pool
from flexgemm._arrays import library_of
from flexgemm.torch.maps import from_operators
from flexgemm.torch.operators.define import Gradients, operator


def by_products(noted: torch.Tensor | None, mode: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What a pooling noted for its gradient as flexgemm.pool has it: the rows of maxima, and the counts of means."""
    return noted if mode == "max" else None, noted if mode == "mean" else None


@operator
def sparse_pool3d(
    feats: torch.Tensor, map: torch.Tensor, gradient_map: torch.Tensor, mode: str, with_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pooled rows, and, if asked for, what their gradient needs: a pooling over gradient_map."""
    nmap = from_operators(map, None, None, None, (1, 1, 1), (1,) * 6, feats.shape[0])
    out, noted = pool.forward(library_of(feats, "feats"), feats, nmap, mode, with_gradient=with_gradient)
    return out, _noted(feats, *noted)


@sparse_pool3d.register_fake
def _(feats: Any, map: Any, gradient_map: Any, mode: Any, with_gradient: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows = map.shape[1]
    return _pooled(feats, rows, rows, mode, with_gradient)


@operator
def sparse_pool3d_backward(grad_out: torch.Tensor, map: torch.Tensor, noted: torch.Tensor, mode: str) -> torch.Tensor:
    library = library_of(grad_out, "grad_out")
    return pool.gradient(library, grad_out, grad_out, map, mode, by_products(noted, mode))


@sparse_pool3d_backward.register_fake
def _(grad_out: Any, map: Any, noted: Any, mode: Any) -> torch.Tensor:
    return grad_out.new_empty((map.shape[1], grad_out.shape[1]))


@operator
def global_pool(
    feats: torch.Tensor, coords: torch.Tensor, batch_size: int, mode: str, with_gradient: bool
) -> Gradients:
    """The pooled samples, the sample of each row as a map (1, N), and, if asked for, what the gradient needs."""
    library = library_of(feats, "feats")
    out, batch, noted = pool.global_forward(library, feats, coords, batch_size, mode, with_gradient=with_gradient)
    return out, batch, _noted(feats, *noted)


@global_pool.register_fake
def _(feats: Any, coords: Any, batch_size: Any, mode: Any, with_gradient: Any) -> Gradients:
    out, noted = _pooled(feats, batch_size, batch_size + 1, mode, with_gradient)
    return out, coords.new_empty((1, coords.shape[0])), noted


@operator
def broadcast_samples(values: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
    return pool.rows_of_samples(library_of(values, "values"), values, coords)


@broadcast_samples.register_fake
def _(values: Any, coords: Any) -> torch.Tensor:
    return values.new_empty((coords.shape[0], values.shape[1]))


def _noted(feats: torch.Tensor, chosen: torch.Tensor | None, count: torch.Tensor | None) -> torch.Tensor:
    noted = chosen if count is None else count
    return feats.new_empty(0, dtype=torch.int32) if noted is None else noted


def _pooled(feats: Any, rows: Any, counts: Any, mode: str, with_gradient: bool) -> tuple[torch.Tensor, torch.Tensor]:
    shapes: Any = {"max": (rows, feats.shape[1]), "mean": (counts,)} if with_gradient else {}
    return feats.new_empty((rows, feats.shape[1])), feats.new_empty(shapes.get(mode, 0), dtype=torch.int32)
