"""A small residual submanifold network in NumPy, trained with flexgemm's own forward and backward.

    deviation -> conv 1 -> 16, ReLU -> conv 16 -> 16, + skip, ReLU -> conv 16 -> 1 -> what to take off the height

Its input is each noisy height less the mean of its neighbourhood (a convolution with fixed weights), in units of the
noise: so the network need not know the altitude. It sees nothing but noisy heights, and the voxels that they lie in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import flexgemm
from flexgemm import NeighborMap

Floats = NDArray[np.float32]

CHANNELS = 16


def neighborhood_mean(heights: Floats, neighbor_map: NeighborMap) -> Floats:
    """The mean height over each voxel and its neighbours: a convolution with ones sums the heights and counts them."""
    feats = np.stack([heights, np.ones_like(heights)], 1)
    identity = np.eye(2, dtype=np.float32)[:, None, None, None, :]
    weight = np.broadcast_to(identity, (2, *neighbor_map.kernel_size, 2))
    total, count = flexgemm.submanifold_conv3d(feats, weight, neighbor_map=neighbor_map).T
    mean: Floats = total / count
    return mean


class Denoiser:
    """Parameters, and the passes over them."""

    def __init__(self, rng: np.random.Generator) -> None:
        def weight(co: int, ci: int) -> Floats:
            # He's initialisation; of the 27 offsets a surface fills about 9.
            return rng.normal(0, (2 / (9 * ci)) ** 0.5, (co, 3, 3, 3, ci)).astype(np.float32)

        self.weights = [weight(CHANNELS, 1), weight(CHANNELS, CHANNELS), weight(1, CHANNELS)]
        self.weights[2][:] = 0  # starts as "take nothing off"
        self.biases = [np.zeros(len(w), np.float32) for w in self.weights]
        self.saved: tuple[Floats, Floats, Floats] | None = None

    def parameters(self) -> list[Floats]:
        return [*self.weights, *self.biases]

    def forward(self, deviation: Floats, neighbor_map: NeighborMap) -> Floats:
        """deviation (N,) -> correction (N,), both in units of the noise. Keeps what `backward` needs."""

        def conv(layer: int, x: Floats) -> Any:
            return flexgemm.submanifold_conv3d(x, self.weights[layer], self.biases[layer], neighbor_map=neighbor_map)

        x = deviation[:, None]
        hidden1 = np.maximum(conv(0, x), 0)
        hidden2 = np.maximum(conv(1, hidden1) + hidden1, 0)
        self.saved = (x, hidden1, hidden2)
        correction: Floats = conv(2, hidden2)[:, 0]
        return correction

    def backward(self, grad: Floats, neighbor_map: NeighborMap) -> list[Floats]:
        """Gradients of the parameters, in their order, of a loss whose gradient in the last output is `grad` (N,)."""
        assert self.saved is not None, "forward comes first"
        x, hidden1, hidden2 = self.saved

        def conv(layer: int, grad_out: Floats, feats: Floats, needs_feats: bool = True) -> Any:
            return flexgemm.submanifold_conv3d_backward(
                grad_out,
                feats,
                self.weights[layer],
                neighbor_map=neighbor_map,
                needs_grad=(needs_feats, True, True),
            )

        grad_hidden2, weight2, bias2 = conv(2, grad[:, None], hidden2)
        grad_sum = grad_hidden2 * (hidden2 > 0)
        grad_hidden1, weight1, bias1 = conv(1, grad_sum, hidden1)
        grad_hidden1 = (grad_hidden1 + grad_sum) * (hidden1 > 0)
        _, weight0, bias0 = conv(0, grad_hidden1, x, needs_feats=False)
        return [weight0, weight1, weight2, bias0, bias1, bias2]


class Adam:
    """Kingma and Ba, ICLR 2015, for a short training: the rate decays to 0 over `steps` along a cosine, and the second
    moment forgets within 100 steps."""

    def __init__(self, parameters: list[Floats], steps: int, learning_rate: float = 1e-2) -> None:
        self.parameters = parameters
        self.steps = steps
        self.learning_rate = learning_rate
        self.mean = [np.zeros_like(p) for p in parameters]
        self.square = [np.zeros_like(p) for p in parameters]
        self.step_number = 0

    def step(self, gradients: list[Floats]) -> None:
        rate = self.learning_rate * 0.5 * (1 + np.cos(np.pi * self.step_number / self.steps))
        self.step_number += 1
        rate *= (1 - 0.99**self.step_number) ** 0.5 / (1 - 0.9**self.step_number)
        for p, g, m, s in zip(self.parameters, gradients, self.mean, self.square, strict=True):
            m += 0.1 * (g - m)
            s += 0.01 * (g * g - s)
            p -= (rate * m / (np.sqrt(s) + 1e-8)).astype(np.float32)
