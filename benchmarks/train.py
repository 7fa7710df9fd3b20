"""A whole training step: the map once, two layers with a ReLU between them, forward and backward through autograd.

train_step is its time. `memory` is the most device memory that the step holds at once, beside the bytes of what it is
given, what it returns and the map: what lies above them is workspace and intermediate results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

import flexgemm
import flexgemm.torch
from benchmarks import conv
from benchmarks.ceilings import Ceilings
from benchmarks.check import TOLERANCE, ConvReference
from benchmarks.results import Row, describe
from benchmarks.run import Run
from benchmarks.scenes import Scene
from benchmarks.timing import Timer

MEMORY_CASE = conv.Case("sphere256", 256, "float16")


def cases() -> list[conv.Case]:
    return [conv.Case(f"sphere{res}", channels, "float16") for res, channels in conv.SPHERES]


@dataclass
class Step:
    """What one step made."""

    neighbor_map: flexgemm.NeighborMap
    hidden: torch.Tensor
    out: torch.Tensor
    grads: tuple[torch.Tensor, ...]  # of hidden, feats, weight and bias of the first layer, of the second

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (self.neighbor_map.map, self.hidden, self.out, *self.grads)
        if self.neighbor_map.order is not None:
            yield self.neighbor_map.order


class Problem:
    def __init__(self, case: conv.Case, scene: Scene) -> None:
        layer = conv.Problem(case, scene)
        self.case, self.scene, self.coords, self.grad_out = case, scene, layer.coords, layer.grad_out
        leaves = (layer.feats, layer.weight, layer.bias, layer.weight.flip(0), layer.bias.flip(0))
        self.leaves = [x.requires_grad_() for x in leaves]

    def inputs(self) -> list[torch.Tensor]:
        return [self.coords, self.grad_out, *self.leaves]

    def step(self) -> Step:
        feats, weight_1, bias_1, weight_2, bias_2 = self.leaves
        neighbor_map = flexgemm.neighbor_map(self.coords, self.scene.shape, kernel_size=self.scene.kernel)
        layer = partial(flexgemm.torch.submanifold_conv3d, neighbor_map=neighbor_map, precision="ieee")
        hidden = layer(feats, weight_1, bias_1, activation="relu")
        out = layer(hidden, weight_2, bias_2)
        return Step(neighbor_map, hidden, out, torch.autograd.grad(out, [hidden, *self.leaves], self.grad_out))

    def judge(self, step: Step) -> None:
        """Each layer by itself, given what the other handed over."""
        tolerance = TOLERANCE[self.case.kind]
        feats, weight_1, bias_1, weight_2, bias_2 = (x.detach() for x in self.leaves)
        grad_hidden, grad_feats, grad_weight_1, grad_bias_1, grad_weight_2, grad_bias_2 = step.grads
        second = ConvReference(self.scene, step.hidden.detach(), weight_2, bias_2, self.grad_out)
        second.judge_forward(step.out.detach(), tolerance)
        second.judge_backward((grad_hidden, grad_weight_2, grad_bias_2), tolerance)
        first = ConvReference(self.scene, feats, weight_1, bias_1, grad_hidden * (step.hidden > 0))
        first.judge_forward(step.hidden.detach(), tolerance, torch.relu)
        first.judge_backward((grad_feats, grad_weight_1, grad_bias_1), tolerance)


def nbytes(tensors: list[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def time_row(case: conv.Case, scene: Scene, timer: Timer, ceilings: Ceilings) -> Row:
    problem = Problem(case, scene)
    problem.judge(problem.step())
    floor = sum(conv.floor_ms(part, case, scene, ceilings) for part in ("map", "fwd", "fwd", "bwd", "bwd"))
    return conv.measured("train_step", case, scene, timer.median_ms(problem.step), floor)


def memory_row(case: conv.Case, scene: Scene) -> Row:
    """Of a second step: the first loads kernels. Only what this case allocated counts."""
    before = torch.cuda.memory_allocated()
    problem = Problem(case, scene)
    problem.judge(problem.step())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step = problem.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    needed = nbytes([*problem.inputs(), *step.tensors()])
    row = case.row("train_step") | {"suite": "memory", "n": scene.n, "pairs": scene.pairs}
    return row | {"peak_bytes": peak, "needed_bytes": needed}


def run(run: Run, timer: Timer, ceilings: Ceilings) -> None:
    made = conv.Scenes({})
    for case in cases():
        row = case.row("train_step")
        wanted = [row, row | {"suite": "memory"}] if case == MEMORY_CASE else [row]
        for missing in run.pending(wanted):
            with run.guarded(describe(missing)):
                scene = made[case.scene]
                memory = missing["suite"] == "memory"
                run.record(memory_row(case, scene) if memory else time_row(case, scene, timer, ceilings))
            torch.cuda.empty_cache()
