"""Spot-checks before timing: some rows of a result against float64, and all of it finite, so that no wrong kernel gets
a time.

The tolerances are the test suite's: per row, relative to the norm of the reference row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from benchmarks.scenes import Scene

TOLERANCE = {"ieee": 1e-5, "tf32": 1e-3, "float16": 2e-3, "bfloat16": 1e-2}
# 1 - cosine-like similarity of a row with the exact product, by the dtype that it was rounded to
PRODUCT_DIFF = {torch.bfloat16: 3e-6, torch.float32: 3e-8}
FLOAT8_SLACK = 2.0**-8  # of a row's root mean square: what sums of FP8 products may lose before they are rounded
ROWS = 64


class Wrong(Exception):
    """A result that differs from the reference."""


def some_rows(rng: np.random.Generator, count: int) -> np.ndarray:
    """Some ROWS of so many, at random, and the first and the last: ends are what tiles get wrong."""
    rows: np.ndarray = np.union1d(rng.choice(count, min(ROWS, count), replace=False), (0, count - 1))
    return rows


def judge_finite(name: str, result: torch.Tensor) -> None:
    if not bool(torch.isfinite(result).all()):
        raise Wrong(f"{name}: not finite throughout")


def judge_rows(name: str, got: torch.Tensor, reference: torch.Tensor, tolerance: float) -> None:
    """|got - reference| <= tolerance * |reference| for each row; NaN fails."""
    error = torch.linalg.vector_norm(got.double() - reference, dim=-1)
    norm = torch.linalg.vector_norm(reference, dim=-1)
    if not bool((error <= tolerance * norm).all()):
        worst = (error / norm).nan_to_num(torch.inf).max().item()
        raise Wrong(f"{name}: relative row error {worst:.2g}, allowed {tolerance:.2g}")


def judge_result(
    name: str, result: torch.Tensor, rows: torch.Tensor, reference: torch.Tensor, tolerance: float
) -> None:
    """All of it is finite, and `rows` of it are the reference's."""
    judge_finite(name, result)
    judge_rows(name, result[rows], reference, tolerance)


def judge_similarity(name: str, got: torch.Tensor, reference: torch.Tensor, limit: float) -> None:
    """1 - 2<x, y> / (<x, x> + <y, y>) <= limit for each row; NaN fails."""
    x = got.double()
    diff = 1 - 2 * (x * reference).sum(-1) / (x.square().sum(-1) + reference.square().sum(-1))
    if not bool((diff <= limit).all()):
        raise Wrong(f"{name}: row difference {diff.nan_to_num(torch.inf).max().item():.2g}, allowed {limit:.2g}")


def judge_float8(name: str, got: torch.Tensor, reference: torch.Tensor) -> None:
    """Each e4m3 element is the exact one rounded once, or a neighbour where the sum was on the edge; NaN fails."""
    slack = FLOAT8_SLACK * reference.square().mean(-1, keepdim=True).sqrt()
    largest = torch.finfo(torch.float8_e4m3fn).max
    low, high = (
        (reference + side).clamp(-largest, largest).float().to(torch.float8_e4m3fn).float() for side in (-slack, slack)
    )
    wrong = ~((got.float() >= low) & (got.float() <= high))
    if bool(wrong.any()):
        raise Wrong(f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are not the exact ones rounded once")


class ConvReference:
    """Float64 answers for some rows of one problem, from neighbours that the package did not find."""

    def __init__(
        self, scene: Scene, feats: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, grad_out: torch.Tensor
    ) -> None:
        self.scene = scene
        self.feats, self.bias, self.grad_out = feats, bias, grad_out
        self.weight = weight.reshape(weight.shape[0], scene.volume, -1)
        self.rng = np.random.default_rng([scene.n, *weight.shape, feats.element_size()])
        rows = some_rows(self.rng, scene.n)
        self.rows = self._tensor(rows)
        self.neighbors = self._tensor(np.stack([scene.neighbors(v, rows) for v in range(scene.volume)]))  # (V, rows)

    def _tensor(self, index: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(index).to(self.feats.device)

    def judge_map(self, map: torch.Tensor, num_pairs: int) -> None:
        if num_pairs != self.scene.pairs:
            raise Wrong(f"neighbor_map: {num_pairs} pairs, expected {self.scene.pairs}")
        if not torch.equal(map[:, self.rows].long(), self.neighbors):
            raise Wrong("neighbor_map: entries differ from the sorted-key search")

    def forward(self) -> torch.Tensor:
        """The rows of the output."""
        return torch.einsum("vri,ovi->ro", self._gather(self.feats), self.weight.double()) + self.bias.double()

    def judge_forward(
        self,
        out: torch.Tensor,
        tolerance: float,
        activation: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    ) -> None:
        judge_result("out", out, self.rows, activation(self.forward()), tolerance)

    def judge_backward(self, grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor], tolerance: float) -> None:
        grad_feats, grad_weight, grad_bias = grads
        # offset v leads from n to m exactly where V - 1 - v leads from m to n
        mirrored = torch.einsum("vro,ovi->ri", self._gather(self.grad_out).flip(0), self.weight.double())
        judge_result("grad_feats", grad_feats, self.rows, mirrored, tolerance)
        judge_rows("grad_bias", grad_bias, self.grad_out.sum(0, dtype=torch.float64), tolerance)
        judge_finite("grad_weight", grad_weight)
        c_out, _, c_in = self.weight.shape
        for v in self.rng.choice(self.scene.volume, 4, replace=False):
            near = self._tensor(self.scene.neighbors(int(v)))
            rows = torch.nonzero(near >= 0).squeeze(1)
            outs = self._tensor(self.rng.choice(c_out, min(8, c_out), replace=False))
            ins = self._tensor(self.rng.choice(c_in, min(8, c_in), replace=False))
            reference = self.grad_out[:, outs][rows].double().t() @ self.feats[:, ins][near[rows]].double()
            got = grad_weight.reshape(self.weight.shape)[outs, int(v)][:, ins]
            judge_rows(f"grad_weight[:, {v}]", got.reshape(1, -1), reference.reshape(1, -1), tolerance)

    def _gather(self, source: torch.Tensor) -> torch.Tensor:
        """Rows of the neighbours (V, rows, C) in float64, zero where there is none."""
        return source[self.neighbors.clamp(min=0)].double() * (self.neighbors >= 0)[..., None]
