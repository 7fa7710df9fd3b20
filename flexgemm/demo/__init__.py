"""Trains a small submanifold network, in NumPy, to take the noise off the heights of real terrain.

Every step draws new noise, lays the surface voxels along the noisy heights, builds their neighbour map and does one
forward and one backward pass over all of them. The loss counts the western three quarters of the terrain; the error
that is reported is that of the eastern quarter, with noise of its own.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import flexgemm
from flexgemm import NeighborMap
from flexgemm.demo import picture
from flexgemm.demo.experts import EXPERTS, IN_FEATURES, OUT_FEATURES, TOKENS, mixture_of_experts
from flexgemm.demo.network import Adam, Denoiser, Floats, neighborhood_mean
from flexgemm.demo.points import PointsError, read_points
from flexgemm.demo.terrain import Terrain, elevation_model, surface_of_points, surface_voxels

NOISE = 0.25  # standard deviation in voxel edges
TRAINED_SHARE = 0.75  # of the terrain, from the west
GOAL = 0.6  # the restored error must be below this share of the noisy one
FP8_GOAL = 1e-3  # of the grouped product, against the exact product of its FP8 inputs


class Clock:
    """Seconds per named part of the work."""

    def __init__(self) -> None:
        self.seconds = {"map": 0.0, "forward": 0.0, "backward": 0.0}
        self.since = 0.0

    def start(self) -> None:
        self.since = time.perf_counter()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] += now - self.since
        self.since = now


def restore(network: Denoiser, noisy: Floats, neighbor_map: NeighborMap) -> Floats:
    deviation = (noisy - neighborhood_mean(noisy, neighbor_map)) / np.float32(NOISE)
    restored: Floats = noisy - np.float32(NOISE) * network.forward(deviation, neighbor_map)
    return restored


def train(terrain: Terrain, trained: NDArray[np.bool_], steps: int, device: str) -> tuple[Denoiser, list[float], Clock]:
    """The trained network, the loss of each step (in units of the noise's variance) and where the time went."""
    from tqdm import tqdm

    rng = np.random.default_rng(1)
    network = Denoiser(rng)
    adam = Adam(network.parameters(), steps)
    clock = Clock()
    losses: list[float] = []
    with tqdm(total=steps, desc="training", unit="step") as bar:
        for _ in range(steps):
            noisy = with_noise(terrain, rng)
            coords, shape = surface_voxels(terrain, noisy)
            clock.start()
            neighbor_map = flexgemm.neighbor_map(coords, shape, device=device)
            clock.lap("map")
            error = np.where(trained, restore(network, noisy, neighbor_map) - terrain.heights, np.float32(0))
            clock.lap("forward")
            # loss = mean(error**2) / NOISE**2 and restored = noisy - NOISE * correction
            gradients = network.backward(error * np.float32(-2 / (NOISE * trained.sum())), neighbor_map)
            clock.lap("backward")
            adam.step(gradients)
            losses.append(float((error**2).sum() / trained.sum()) / NOISE**2)
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            bar.update()
    return network, losses, clock


def with_noise(terrain: Terrain, rng: np.random.Generator) -> Floats:
    noise = rng.standard_normal(len(terrain.heights), np.float32)
    noisy: Floats = terrain.heights + np.float32(NOISE) * noise
    return noisy


def run(device: str, steps: int, out: Path, points: Path | None = None) -> int:
    """The whole demo; prints its report. Returns the exit status: 0 when the errors are below their goals.

    Raises PointsError when `points` cannot be used."""
    terrain = elevation_model() if points is None else surface_of_points(read_points(points), points.name)
    split = int(np.quantile(terrain.cells[:, 0], TRAINED_SHARE))
    trained = terrain.cells[:, 0] < split
    if not trained.any():
        raise PointsError(f"{terrain.name}: the points are too narrow in x to hold a part of them out")

    noisy = with_noise(terrain, np.random.default_rng(2))
    coords, shape = surface_voxels(terrain, noisy)
    neighbor_map = flexgemm.neighbor_map(coords, shape, device=device)
    print(f"terrain    {terrain.name}, voxels of {terrain.voxel:.3g} {terrain.unit}, device {device}")
    print(f"voxels     {len(coords):,} in {' x '.join(str(n) for n in shape[1:])}")
    print(f"neighbours {neighbor_map.num_pairs:,} ({neighbor_map.num_pairs / len(coords):.1f} per voxel)")

    network, losses, clock = train(terrain, trained, steps, device)
    total = sum(clock.seconds.values()) / steps
    parts = ", ".join(f"{part} {1e3 * seconds / steps:.1f}" for part, seconds in clock.seconds.items())
    print(f"time       {1e3 * total:.1f} ms per step: {parts}")

    restored = restore(network, noisy, neighbor_map)
    mean = neighborhood_mean(noisy, neighbor_map)

    def error(heights: Floats) -> float:
        """Root mean square over the held-out part, in the terrain's unit."""
        return float(np.sqrt(np.mean((heights - terrain.heights)[~trained] ** 2))) * terrain.voxel

    before, after, unit = error(noisy), error(restored), terrain.unit
    print(f"error      root mean square of the heights of {np.sum(~trained):,} held-out voxels, in {unit}:")
    print(f"           noisy {before:.2f}, mean of the neighbourhood {error(mean):.2f}, restored {after:.2f}")
    print(f"           restored / noisy = {after / before:.2f} (goal: below {GOAL})")
    titles = [f"noisy: error {before:.3g} {unit}", f"restored: error {after:.3g} {unit}", "training loss"]
    picture.draw(out, terrain, noisy, restored, split, losses, titles)
    print(f"picture    {out}")

    experts = mixture_of_experts(np.random.default_rng(3), device)
    print(f"experts    FP8 product of {TOKENS} x {IN_FEATURES} tokens with {EXPERTS} x {OUT_FEATURES} x {IN_FEATURES}")
    print(f"           weights in groups of {', '.join(map(str, experts.group_sizes))}; error against float64:")
    print(f"           {experts.error_dequantised:.1e} of the FP8 inputs, {experts.error_unquantised:.1e} unquantised")

    failures = []
    if not after < GOAL * before:
        failures.append(f"the restored error is {after / before:.2f} of the noisy one, not below {GOAL}")
    if not experts.error_dequantised < FP8_GOAL:
        failures.append(f"the grouped product is off by {experts.error_dequantised:.1e}, not below {FP8_GOAL}")
    for failure in failures:
        print(f"FAILED     {failure}")
    return 1 if failures else 0
