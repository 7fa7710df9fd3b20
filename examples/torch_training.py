"""Trains a two-layer submanifold network in torch: which side of a sphere is each of its surface voxels on?

python examples/torch_training.py
"""

import numpy as np
import torch

import flexgemm
import flexgemm.torch


def sphere(resolution: int) -> torch.Tensor:
    """(N, 4) int32 [batch, x, y, z]: the voxels of a shell."""
    axis = np.arange(resolution) - resolution / 2 + 0.5
    radius = np.sqrt(axis[:, None, None] ** 2 + axis[:, None] ** 2 + axis**2)
    xyz = np.argwhere((radius >= resolution / 2 - 1.25) & (radius <= resolution / 2))
    return torch.from_numpy(np.pad(xyz, ((0, 0), (1, 0))).astype(np.int32))


class SubmanifoldConv3d(torch.nn.Module):
    def __init__(self, in_channels: int, out_channels: int, kernel_size: int = 3) -> None:
        super().__init__()
        fan_in = in_channels * kernel_size**3
        self.weight = torch.nn.Parameter(torch.randn(out_channels, *[kernel_size] * 3, in_channels) * fan_in**-0.5)
        self.bias = torch.nn.Parameter(torch.zeros(out_channels))

    def forward(self, feats: torch.Tensor, neighbor_map: flexgemm.NeighborMap) -> torch.Tensor:
        return flexgemm.torch.submanifold_conv3d(feats, self.weight, self.bias, neighbor_map=neighbor_map)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() and flexgemm.device_count() else "cpu"
    resolution = 32
    coords = sphere(resolution).to(device)
    neighbor_map = flexgemm.neighbor_map(coords, (1, resolution, resolution, resolution))
    print(f"{device}: {len(coords)} voxels, {neighbor_map.num_pairs} neighbours")

    height = coords[:, 3:].float() / resolution - 0.5
    label = (height > 0).float()
    noisy_height = height + 0.2 * torch.randn_like(height)  # neighbours know better than the voxel itself
    first, second = SubmanifoldConv3d(1, 16).to(device), SubmanifoldConv3d(16, 1).to(device)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=1e-2)
    for step in range(1, 101):
        logits = second(torch.relu(first(noisy_height, neighbor_map)), neighbor_map)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            right = ((logits > 0) == (label > 0)).float().mean()
            print(f"step {step:3d}  loss {loss.item():.4f}  right {right.item():.1%}")


if __name__ == "__main__":
    main()
