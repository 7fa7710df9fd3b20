"""Trains a two-layer submanifold network in torch: which side of a sphere is each of its surface voxels on?

python examples/torch_training.py
"""

import numpy as np
import torch

import flexgemm
import flexgemm.torch.nn as fnn


def sphere(resolution: int) -> torch.Tensor:
    """(N, 4) int32 [batch, x, y, z]: the voxels of a shell."""
    axis = np.arange(resolution) - resolution / 2 + 0.5
    radius = np.sqrt(axis[:, None, None] ** 2 + axis[:, None] ** 2 + axis**2)
    xyz = np.argwhere((radius >= resolution / 2 - 1.25) & (radius <= resolution / 2))
    return torch.from_numpy(np.pad(xyz, ((0, 0), (1, 0))).astype(np.int32))


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() and flexgemm.device_count() else "cpu"
    resolution = 32
    coords = sphere(resolution).to(device)
    print(f"{device}: {len(coords)} voxels")

    height = coords[:, 3:].float() / resolution - 0.5
    label = (height > 0).float()
    noisy_height = height + 0.2 * torch.randn_like(height)  # neighbours know better than the voxel itself
    network = torch.nn.Sequential(fnn.SubMConv3d(1, 16), fnn.ReLU(), fnn.SubMConv3d(16, 1)).to(device)
    x = fnn.SparseTensor(noisy_height, coords, (1, resolution, resolution, resolution))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for step in range(1, 101):
        logits = network(x).feats
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            right = ((logits > 0) == (label > 0)).float().mean()
            print(f"step {step:3d}  loss {loss.item():.4f}  right {right.item():.1%}")


if __name__ == "__main__":
    main()
