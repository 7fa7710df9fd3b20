"""Codes along curves, the hash table, samples at points and voxels of points.

Codes are those of a scene's voxels; keys are 64-bit random numbers, in a table of twice as many slots. Points lie
anywhere in the voxels of a scene, so that a sample finds some of the eight voxels around it. grid_sample_fwd begins at
coordinates, as the peers' does; grid_sample_bwd is the gradient in the features, the sort of its pairs included.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

import flexgemm
from benchmarks.check import TOLERANCE, Wrong, judge_result, some_rows
from benchmarks.results import Row
from benchmarks.scenes import Scene
from benchmarks.timing import DEVICE
from benchmarks.work import Case, Work
from flexgemm._built import Built

KEYS = 10_000_000
POINTS = 1_000_000
CODES_SCENE, POINTS_SCENE = "sphere1024", "sphere256"
CHANNELS, DTYPE = 64, "float16"
CURVE = 4096  # consecutive codes that are judged
POINTS_OPS = ("grid_sample_fwd", "grid_sample_bwd", "voxelize")
CORNERS = np.array([(x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1)], np.int32)


@dataclass(frozen=True)
class KeysCase(Case):
    """A case that takes no scene: its keys are random."""

    def row(self, peer: str | None = None) -> Row:
        return super().row(peer) | {"scene": f"keys{KEYS}"}


def cases() -> list[Case]:
    codes = [Case(mode, CODES_SCENE, partial(make_codes, mode)) for mode in ("z_order", "hilbert")]
    keys: list[Case] = [KeysCase(op, "sphere8", partial(make_hash, op)) for op in ("hash_insert", "hash_lookup")]
    points = [Case(op, POINTS_SCENE, partial(make_points, op), "", DTYPE, CHANNELS) for op in POINTS_OPS]
    return [*codes, *keys, *points]


# ---- codes ----


def make_codes(mode: str, scene: Scene) -> Work:
    coords = torch.from_numpy(scene.coords).to(DEVICE)
    call = partial(flexgemm.encode_seq, coords, scene.shape, mode)
    bytes_of_code = 4 if 3 * (max(scene.shape[1:]) - 1).bit_length() <= 32 else 8  # a scene has one sample
    judge = partial(judge_codes, mode, coords, scene)
    moved = scene.n * (16 + bytes_of_code)
    return Work(call, judge, scene.n, moved, peer=lambda flex: flex.codes(mode, coords, scene.shape))


def judge_codes(mode: str, coords: torch.Tensor, scene: Scene, code: torch.Tensor) -> None:
    """Codes lead back to their voxels; a stretch of Hilbert codes goes from face to face, one of Z order is interleaved
    bit by bit."""
    if not torch.equal(flexgemm.decode_seq(code, scene.shape, mode), coords):
        raise Wrong(f"{mode}: codes that are not those of the voxels")
    first = int(code[scene.n // 2]) // CURVE * CURVE
    side = 1 << (max(scene.shape[1:]) - 1).bit_length()
    cube = (1, side, side, side)
    stretch = torch.arange(first, first + min(CURVE, side**3), device=DEVICE, dtype=code.dtype)
    xyz = flexgemm.decode_seq(stretch, cube, mode)[:, 1:].long()
    if mode == "hilbert":
        right = bool((xyz.diff(dim=0).abs().sum(dim=1) == 1).all())
    else:
        bits = torch.arange(side.bit_length() - 1, device=DEVICE)
        digits = (xyz[:, :, None] >> bits & 1) << (3 * bits + torch.tensor([[2], [1], [0]], device=DEVICE))
        right = torch.equal(digits.sum(dim=(1, 2)), stretch.long())
    if not right:
        raise Wrong(f"{mode}: not the curve")


# ---- hash table ----


def make_hash(op: str, scene: Scene) -> Work:
    generator = torch.Generator(DEVICE).manual_seed(0)
    keys = torch.randint(-(2**63), 2**63 - 1, (KEYS,), device=DEVICE, dtype=torch.int64, generator=generator)
    order = torch.randperm(KEYS, device=DEVICE, generator=generator)
    slot = 8 + 4  # a key and its row
    if op == "hash_insert":
        call = partial(flexgemm.HashTable.build, keys)

        def judge_table(table: Any) -> None:
            judge_lookup(keys, keys, torch.arange(KEYS, device=DEVICE), table.lookup(keys))

        return Work(call, judge_table, KEYS, KEYS * (8 + slot), peer=lambda flex: flex.hash_insert(keys))
    queries = keys[order]
    call = partial(flexgemm.HashTable.build(keys).lookup, queries)
    judge, moved = partial(judge_lookup, keys, queries, order), KEYS * (8 + slot + 4)
    return Work(call, judge, KEYS, moved, peer=lambda flex: flex.hash_lookup(keys, queries))


def judge_lookup(keys: torch.Tensor, queries: torch.Tensor, expected: torch.Tensor, found: torch.Tensor) -> None:
    """Random keys may repeat: then a lower row has the same one."""
    found = found.long()
    wrong = (found < 0) | (found > expected) | (keys[found.clamp(min=0)] != queries)
    if bool(wrong.any()):
        raise Wrong(f"hash table: {int(wrong.sum())} of {len(queries)} keys have another row")


# ---- points ----


class Problem:
    """Points in the voxels of a scene, and features of both."""

    def __init__(self, scene: Scene) -> None:
        torch.manual_seed(0)
        rng = np.random.default_rng(0)
        self.scene, self.rng = scene, rng
        inside = rng.integers(0, 1024, (POINTS, 3)) / 1024  # exact in float32 beside any coordinate
        self.xyz = (scene.coords[rng.integers(0, scene.n, POINTS), 1:] + inside).astype(np.float32)
        self.coords = torch.from_numpy(scene.coords).to(DEVICE)
        self.grid = torch.from_numpy(self.xyz[None]).to(DEVICE)
        self.feats = torch.randn(scene.n, CHANNELS, device=DEVICE).to(getattr(torch, DTYPE))
        self.of_points = torch.randn(POINTS, CHANNELS, device=DEVICE).to(getattr(torch, DTYPE))

    def neighbors(self, xyz: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, 8) voxels around these points and their weights in float64."""
        base = np.floor(xyz - 0.5)
        fraction = (xyz - 0.5 - base)[:, None].astype(np.float64)
        near = (base[:, None] + CORNERS).astype(np.int32)
        batch = np.zeros(near.size // 3, np.int32)
        rows = self.scene.find(batch, near.reshape(-1, 3)).reshape(-1, 8)
        weights = np.where(CORNERS, fraction, 1 - fraction).prod(axis=2) * (rows >= 0)
        weights /= weights.sum(axis=1, keepdims=True)
        return torch.from_numpy(rows).to(DEVICE), torch.from_numpy(weights).to(DEVICE)

    def judge_samples(self, out: torch.Tensor) -> None:
        points = some_rows(self.rng, POINTS)
        rows, weights = self.neighbors(self.xyz[points])
        reference = (self.feats[rows.clamp(min=0)].double() * weights[..., None]).sum(dim=1)
        judge_result("out", out[0], torch.from_numpy(points).to(DEVICE), reference, TOLERANCE[DTYPE])

    def judge_gradient(self, grads: tuple[torch.Tensor, None], tolerance: float = TOLERANCE[DTYPE]) -> None:
        """Of a few voxels, against weighted sums over the points around them."""
        voxels = self.rng.choice(self.scene.n, 4, replace=False)
        reference = []
        for voxel in voxels.tolist():
            distance = np.abs(self.xyz - (self.scene.coords[voxel, 1:] + 0.5)).max(axis=1)
            points = np.nonzero(distance < 1)[0]
            rows, weights = self.neighbors(self.xyz[points])
            weight = (weights * (rows == voxel)).sum(dim=1)
            reference.append(weight @ self.of_points[torch.from_numpy(points).to(DEVICE)].double())
        judge_result("grad_feats", grads[0], torch.from_numpy(voxels).to(DEVICE), torch.stack(reference), tolerance)

    def judge_voxels(self, voxels: flexgemm.Voxels) -> None:
        batch, floors = np.zeros(POINTS, np.int32), np.floor(self.xyz).astype(np.int32)
        rows = self.scene.find(batch, floors)  # of the scene, which has every point in a voxel
        unique, inverse = np.unique(rows, return_inverse=True)
        if not np.array_equal(voxels.coords.cpu().numpy(), self.scene.coords[unique]):
            raise Wrong("voxelize: not the voxels that the points lie in")
        of = torch.from_numpy(inverse.reshape(-1)).to(DEVICE)
        some = some_rows(self.rng, len(unique))
        reference = torch.stack([self.of_points[of == voxel].double().mean(dim=0) for voxel in some.tolist()])
        judge_result("feats", voxels.feats, torch.from_numpy(some).to(DEVICE), reference, TOLERANCE[DTYPE])


def make_points(op: str, scene: Scene) -> Work:
    p = Problem(scene)
    row = CHANNELS * p.feats.element_size()
    voxels, points = scene.n * row, POINTS * row
    if op == "voxelize":
        call = partial(flexgemm.voxelize, p.grid[0], p.of_points, voxel_size=1.0, shape=scene.shape)
        return Work(call, p.judge_voxels, POINTS, POINTS * (12 + 4) + points + voxels + scene.n * 16)
    if op == "grid_sample_fwd":
        call = partial(flexgemm.grid_sample_3d, p.feats, p.coords, scene.shape, p.grid)
        moved = scene.n * 16 + voxels + POINTS * 12 + points
        given = p.feats, p.coords, scene.shape, p.grid
        return Work(call, p.judge_samples, POINTS, moved, peer=lambda flex: flex.grid_sample_fwd(*given))
    sample_map = flexgemm.sample_map(p.coords, scene.shape, p.grid)

    def backward() -> tuple[torch.Tensor | None, torch.Tensor | None]:
        gradient = p.of_points[None]
        sample_map._groups = Built()  # as a map that has served no gradient
        return flexgemm.grid_sample_3d_backward(gradient, p.feats, sample_map=sample_map, needs_grad=(True, False))

    return Work(
        backward,
        p.judge_gradient,
        POINTS,
        POINTS * 8 * (4 + 4) + points + voxels,
        peer=lambda flex: flex.grid_sample_bwd(p.of_points[None], p.coords, scene.shape, p.grid),
        judge_peer=partial(p.judge_gradient, tolerance=10 * TOLERANCE[DTYPE]),  # it adds in float16
    )
