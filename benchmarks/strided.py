"""Convolution that changes resolution, forward and backward, and max pooling, at kernels 2 and 3 with stride 2.

strided and transposed derive their output voxels from the scene; inverse leads from the outputs of the strided one back
to the scene. The coarser side has twice the channels, as in a U-Net; a row names those of the finer one. bwd is the
gradients of feats, weight and bias.

Peers are timed on the first sphere and on clouds: FlexGEMM's kernels are tuned anew for every scene, for minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache, partial
from itertools import product

import numpy as np
import torch

import flexgemm
from benchmarks.check import TOLERANCE, Wrong, judge_finite, judge_result, judge_rows, some_rows
from benchmarks.scenes import Scene
from benchmarks.timing import DEVICE
from benchmarks.work import Case, Work

SPHERES = (("sphere128", 64), ("sphere256", 128), ("sphere512", 64))
CLOUD_CHANNELS = 32  # of scenes given with --scene
KERNELS = {"k2s2": 2, "k3s2": 3}
OPS = ("strided_fwd", "strided_bwd", "inverse_fwd", "pool_max", "transposed_fwd", "transposed_bwd")
STRIDE = 2
DTYPE = "float16"


def cases(clouds: Iterable[str] = ()) -> list[Case]:
    with_peers = SPHERES[0][0], *clouds
    return [
        Case(op, scene, partial(make, op, size, channels), variant, DTYPE, channels, beside_peers=scene in with_peers)
        for scene, channels in (*SPHERES, *((name, CLOUD_CHANNELS) for name in clouds))
        for variant, size in KERNELS.items()
        for op in OPS
    ]


class Sites:
    """Voxels on the device, found by a search in their sorted numbers."""

    def __init__(self, coords: torch.Tensor, shape: Sequence[int]) -> None:
        self.coords, self.shape, self.extents = coords, shape, torch.tensor(shape[1:], device=coords.device)
        self._keys, self._order = self.number(coords[:, :1], coords[:, 1:].long()).sort()

    @property
    def n(self) -> int:
        return len(self.coords)

    def inside(self, xyz: torch.Tensor) -> torch.Tensor:
        return ((xyz >= 0) & (xyz < self.extents)).all(dim=1)

    def number(self, batch: torch.Tensor, xyz: torch.Tensor) -> torch.Tensor:
        _, w, h, d = self.shape
        return ((batch[:, 0].long() * w + xyz[:, 0]) * h + xyz[:, 1]) * d + xyz[:, 2]

    def find(self, batch: torch.Tensor, xyz: torch.Tensor) -> torch.Tensor:
        """Row of the voxel at each place, -1 where there is none."""
        wanted = self.number(batch, xyz)
        at = torch.searchsorted(self._keys, wanted).clamp(max=self.n - 1)
        return torch.where(self.inside(xyz) & (self._keys[at] == wanted), self._order[at], -1)


class Geometry:
    """A scene, the voxels that a convolution leads to, and who reads whom. These judge what the package finds."""

    def __init__(self, scene: Scene, size: int, transposed: bool) -> None:
        self.padding, self.transposed = (size - 1) // 2, transposed
        self.taps = torch.tensor(list(product(range(size), repeat=3)), device=DEVICE)
        coords = torch.from_numpy(scene.coords).to(DEVICE)
        self.map = flexgemm.sparse_conv_map(coords, scene.shape, size, STRIDE, self.padding, transposed=transposed)
        self.inputs = Sites(coords, scene.shape)
        self.outputs = Sites(self.map.out_coords, self.map.out_shape)
        reached = []
        for tap in self.taps:
            xyz, whole = self._towards_outputs(coords[:, 1:].long(), tap)
            here = whole & self.outputs.inside(xyz)
            reached.append(self.outputs.number(coords[here, :1], xyz[here]).unique())
        out_coords = self.map.out_coords
        if not torch.equal(torch.cat(reached).unique(), self.outputs.number(out_coords[:, :1], out_coords[:, 1:])):
            raise Wrong("out_coords: not the sites that the voxels reach")

    def _towards_outputs(self, xyz: torch.Tensor, tap: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where an input's place leads at one tap, and whether that is a whole place."""
        return self._scaled(xyz, tap) if self.transposed else self._divided(xyz, tap)

    def _towards_inputs(self, xyz: torch.Tensor, tap: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._divided(xyz, tap) if self.transposed else self._scaled(xyz, tap)

    def _scaled(self, xyz: torch.Tensor, tap: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return xyz * STRIDE + tap - self.padding, torch.ones_like(xyz[:, 0], dtype=torch.bool)

    def _divided(self, xyz: torch.Tensor, tap: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        there = xyz + self.padding - tap
        return there // STRIDE, (there % STRIDE == 0).all(dim=1)

    def inputs_of(self, rows: torch.Tensor | slice, v: int) -> torch.Tensor:
        """The input that each of these outputs reads at offset v, -1 for none."""
        coords = self.outputs.coords[rows]
        xyz, whole = self._towards_inputs(coords[:, 1:].long(), self.taps[v])
        return torch.where(whole, self.inputs.find(coords[:, :1], xyz), -1)

    def outputs_of(self, rows: torch.Tensor | slice, v: int) -> torch.Tensor:
        coords = self.inputs.coords[rows]
        xyz, whole = self._towards_outputs(coords[:, 1:].long(), self.taps[v])
        return torch.where(whole, self.outputs.find(coords[:, :1], xyz), -1)

    @cached_property
    def pairs(self) -> int:
        return sum(int((self.outputs_of(slice(None), v) >= 0).sum()) for v in range(len(self.taps)))


@lru_cache(maxsize=1)
def geometry(scene: Scene, size: int, transposed: bool) -> Geometry:
    """Kept for the next case, which often has the same."""
    return Geometry(scene, size, transposed)


class Problem:
    """Random tensors on the voxels of both sides."""

    def __init__(self, op: str, scene: Scene, size: int, channels: int) -> None:
        torch.manual_seed(0)
        transposed = op.startswith("transposed")
        self.geometry = geometry(scene, size, transposed)
        self.map, self.taps = self.geometry.map, self.geometry.taps
        self.inputs, self.outputs = self.geometry.inputs, self.geometry.outputs
        dtype, volume = getattr(torch, DTYPE), len(self.taps)
        ci, co = (2 * channels, channels) if transposed else (channels, 2 * channels)
        self.feats = torch.randn(self.inputs.n, ci, device=DEVICE, dtype=dtype)
        self.grad_out = torch.randn(self.outputs.n, co, device=DEVICE, dtype=dtype)
        shape = (ci, size, size, size, co) if op.startswith("inverse") else (co, size, size, size, ci)
        self.weight = torch.randn(shape, device=DEVICE, dtype=dtype) * (volume * shape[-1]) ** -0.5
        self.bias = torch.randn(shape[0], device=DEVICE, dtype=dtype)
        self.rng = np.random.default_rng(1)

    def sample(self, towards_inputs: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Some rows of the outputs (or of the inputs) and, (V, rows), what each reads (or who reads it)."""
        found = self.geometry
        rows_of, near = (found.outputs, found.inputs_of) if towards_inputs else (found.inputs, found.outputs_of)
        rows = torch.from_numpy(some_rows(self.rng, rows_of.n)).to(DEVICE)
        return rows, torch.stack([near(rows, v) for v in range(len(self.taps))])

    def judge_gather(
        self, name: str, result: torch.Tensor, source: torch.Tensor, towards_inputs: bool, equation: str
    ) -> None:
        """Rows of a result that is sum_v W_v . source[near[v]]."""
        rows, near = self.sample(towards_inputs)
        gathered = source[near.clamp(min=0)].double() * (near >= 0)[..., None]
        weight = self.weight.reshape(self.weight.shape[0], len(self.taps), -1).double()
        reference = torch.einsum(equation, gathered, weight)
        if name == "out":
            reference = reference + self.bias.double()
        judge_result(name, result, rows, reference, TOLERANCE[DTYPE])

    def judge_backward(self, gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        grad_feats, grad_weight, grad_bias = gradients
        self.judge_gather("grad_feats", grad_feats, self.grad_out, False, "vro,ovi->ri")
        judge_rows("grad_bias", grad_bias, self.grad_out.sum(0, dtype=torch.float64), TOLERANCE[DTYPE])
        judge_finite("grad_weight", grad_weight)
        for v in self.rng.choice(len(self.taps), 4, replace=False).tolist():
            near = self.geometry.inputs_of(slice(None), v)
            has = near >= 0
            outs, ins = (self._channels(x.shape[1]) for x in (self.grad_out, self.feats))
            reference = self.grad_out[has][:, outs].double().t() @ self.feats[near[has]][:, ins].double()
            got = grad_weight.reshape(grad_weight.shape[0], len(self.taps), -1)[outs, v][:, ins]
            judge_rows(f"grad_weight[:, {v}]", got.reshape(1, -1), reference.reshape(1, -1), TOLERANCE[DTYPE])

    def _channels(self, count: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.choice(count, min(8, count), replace=False)).to(DEVICE)

    def judge_pool(self, out: torch.Tensor) -> None:
        rows, near = self.sample(True)
        gathered = self.feats[near.clamp(min=0)].masked_fill((near < 0)[..., None], -torch.inf)
        if not torch.equal(out[rows], gathered.amax(0)):
            raise Wrong("pool_max: not the largest of the voxels that are there")


def make(op: str, size: int, channels: int, scene: Scene) -> Work:
    p = Problem(op, scene, size, channels)
    over = {"neighbor_map": p.map}
    item, pairs = p.feats.element_size(), p.geometry.pairs
    feats, weight = p.feats.numel() * item, p.weight.numel() * item
    rows = feats + p.grad_out.numel() * item
    flops = 2.0 * pairs * p.feats.shape[1] * p.grad_out.shape[1]
    if op == "pool_max":
        rows = feats + p.outputs.n * channels * item
        call = partial(flexgemm.sparse_pool3d, p.feats, mode="max", **over)
        return Work(call, p.judge_pool, scene.n, rows + 4 * pairs)
    if op == "inverse_fwd":
        p.map.inverse  # noqa: B018  built on first use
        call = partial(flexgemm.sparse_inverse_conv3d, p.grad_out, p.weight, p.bias, **over)
        judge = partial(p.judge_gather, "out", source=p.grad_out, towards_inputs=False, equation="vri,ovi->ro")
        return Work(call, lambda out: judge(result=out), scene.n, rows + weight + 4 * pairs, flops)
    if op.endswith("fwd"):
        call = partial(flexgemm.sparse_conv3d, p.feats, p.weight, p.bias, **over)
        judge = partial(p.judge_gather, "out", source=p.feats, towards_inputs=True, equation="vri,ovi->ro")
        moved = rows + weight + 4 * pairs
        peer = None if p.geometry.transposed else lambda flex: flex.strided_fwd(p.feats, p.map, p.weight, p.bias)
        return Work(call, lambda out: judge(result=out), scene.n, moved, flops, peer=peer)
    call = partial(flexgemm.sparse_conv3d_backward, p.grad_out, p.feats, p.weight, **over)
    moved = rows + feats + 2 * weight + 4 * pairs
    peer = (
        None if p.geometry.transposed else lambda flex: flex.strided_bwd(p.grad_out, p.feats, p.map, p.weight, p.bias)
    )
    return Work(call, p.judge_backward, scene.n, moved, 2 * flops, peer=peer)
