"""A sparse U-Net that tells the ridges, slopes and valleys of real terrain apart.

    python examples/terrain_unet.py [--steps 600] [--device cuda] [--out terrain_unet.png] [--seed 0]

The terrain is that of `python -m flexgemm demo`: 344 x 403 elevations, one surface voxel of 90 m over each. The label
of a voxel is how the ground bends there: the heights are smoothed by a Gaussian, the principal curvature of larger
magnitude is taken, and where it is stronger than the trained half's median the voxel is on a ridge (bent down) or in a
valley (bent up), else on a slope, which may be level.

The network is trained on square patches of the northern half and counted on the southern half. What it gets is the
patch's voxels, and for each its height above the patch's mean and where in the voxel the ground lies: no curvature, no
smoothing, no altitude above the sea. A voxel whose label reads a height of the other half counts in neither.

Beside its accuracy stand those of the most frequent class, of a logistic regression on the raw height, and of one on
the raw heights of all 15 x 15 cells that the label reads: how far a linear model gets that sees as much.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib import colormaps, colors
from matplotlib.figure import Figure
from torch.nn import functional
from tqdm import tqdm

import flexgemm
import flexgemm.torch.nn as fnn
from flexgemm.demo.terrain import elevation_model

CLASSES = ("ridge", "slope", "valley")
UNKNOWN = -1  # the label of cells that do not count
SMOOTHING = 2  # standard deviation of the labels' Gaussian, in cells
REACH = 3 * SMOOTHING + 1  # how far from a cell its label reads heights
PATCH = 64  # edge of a patch in cells
BATCH = 4  # patches of a step
WINDOW = 2 * REACH + 1  # edge of what a label reads, and the wider logistic regression


# ---- labels ----


def curvature(heights: torch.Tensor) -> torch.Tensor:
    """Of heights (H, W), smoothed: the principal curvature of larger magnitude, negative where the ground bends down.
    NaN within REACH of the edge."""
    gaussian = torch.exp(-0.5 * (torch.arange(1 - REACH, REACH) / SMOOTHING) ** 2)
    gaussian /= gaussian.sum()
    smooth = functional.conv2d(heights[None, None], (gaussian[:, None] * gaussian)[None, None])[0, 0]

    center = smooth[1:-1, 1:-1]
    xx = smooth[1:-1, 2:] - 2 * center + smooth[1:-1, :-2]
    yy = smooth[2:, 1:-1] - 2 * center + smooth[:-2, 1:-1]
    xy = (smooth[2:, 2:] + smooth[:-2, :-2] - smooth[2:, :-2] - smooth[:-2, 2:]) / 4
    mean = (xx + yy) / 2
    spread = (((xx - yy) / 2) ** 2 + xy**2).sqrt()
    return functional.pad(mean + torch.where(mean < 0, -spread, spread), [REACH] * 4, value=float("nan"))


def classify(curved: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Classes of the cells, as numbers into CLASSES; UNKNOWN where there is no curvature."""
    label = 1 - (curved < -threshold).long() + (curved > threshold).long()
    return torch.where(curved.isnan(), UNKNOWN, label)


# ---- the network ----


def voxels(heights: torch.Tensor) -> fnn.SparseTensor:
    """The surface of a patch (P, P) of heights, in voxel edges: a voxel per cell, in the order of the cells."""
    relative = heights - heights.mean()
    layer = relative.floor()
    feats = torch.stack([relative, relative - layer, torch.ones_like(relative)], -1).flatten(0, 1)
    layer = (layer - layer.min()).int()
    row, column = torch.meshgrid(*(torch.arange(n, device=heights.device) for n in heights.shape), indexing="ij")
    coords = torch.stack([torch.zeros_like(layer), row, column, layer], -1).flatten(0, 1)
    # The grid is a cube with an edge of a power of two: halving an odd one leaves its last layer out, as torch's own
    # convolutions do.
    return fnn.SparseTensor(feats, coords.int(), (1, PATCH, PATCH, PATCH))


def block(in_channels: int, out_channels: int) -> torch.nn.Sequential:
    """Two convolutions on the voxels there are."""
    layers: list[torch.nn.Module] = []
    for channels in (in_channels, out_channels):
        layers += [fnn.SubMConv3d(channels, out_channels, bias=False), fnn.BatchNorm(out_channels), fnn.ReLU()]
    return torch.nn.Sequential(*layers)


class UNet(torch.nn.Module):
    """On each level a block on the way down and one on the way up, which also gets what the one on the way down gave.
    Down: cells of 2 x 2 x 2 voxels become one; up: from it back to those of them that there were."""

    def __init__(self, in_channels: int, classes: int, channels: Sequence[int] = (16, 32, 48, 64)) -> None:
        super().__init__()
        self.encoders = torch.nn.ModuleList([block(in_channels, channels[0])])
        self.downs, self.ups, self.decoders = (torch.nn.ModuleList() for _ in range(3))
        for fine, coarse in zip(channels[:-1], channels[1:], strict=True):
            self.downs.append(fnn.SparseConv3d(fine, coarse, kernel_size=2, stride=2))
            self.encoders.append(block(coarse, coarse))
            self.ups.append(fnn.SparseInverseConv3d(coarse, fine, kernel_size=2))
            self.decoders.append(block(2 * fine, fine))
        self.head = fnn.Linear(channels[0], classes)

    def forward(self, x: fnn.SparseTensor) -> fnn.SparseTensor:
        x = self.encoders[0](x)
        skips = []
        for down, encoder in zip(self.downs, self.encoders[1:], strict=True):
            skips.append(x)
            x = encoder(down(x))
        for up, decoder, skip in zip(reversed(self.ups), reversed(self.decoders), reversed(skips), strict=True):
            x = decoder(fnn.cat([skip, up(x)]))  # up(x) is on the voxels of skip
        return self.head(x)


def random_patches(heights: torch.Tensor, labels: torch.Tensor) -> tuple[fnn.SparseTensor, torch.Tensor]:
    """BATCH patches, each turned and mirrored at random, and the labels (BATCH * P * P) of their voxels."""
    both, squares = torch.stack([heights, labels.to(heights.dtype)]), []
    for _ in range(BATCH):
        top, left = (int(torch.randint(n - PATCH + 1, ())) for n in heights.shape)
        square = both[:, top : top + PATCH, left : left + PATCH].rot90(int(torch.randint(4, ())), (1, 2))
        squares.append(square.mT if torch.randint(2, ()) else square)
    answers = torch.stack([square[1] for square in squares]).long().flatten()
    return fnn.SparseTensor.collate([voxels(square[0]) for square in squares]), answers


def train(network: UNet, heights: torch.Tensor, labels: torch.Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    network.train()
    with tqdm(total=steps, desc="training", unit="step") as bar:
        for _ in range(steps):
            x, answers = random_patches(heights, labels)
            loss = functional.cross_entropy(network(x).feats, answers, ignore_index=UNKNOWN)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            bar.update()


@torch.no_grad()
def predict(network: UNet, heights: torch.Tensor) -> torch.Tensor:
    """Classes (H, W): patches that overlap by half vote by their logits."""
    network.eval()
    votes = heights.new_zeros(*heights.shape, len(CLASSES))
    tops, lefts = ([*range(0, n - PATCH, PATCH // 2), n - PATCH] for n in heights.shape)
    for top in tops:
        x = fnn.SparseTensor.collate([voxels(heights[top : top + PATCH, left : left + PATCH]) for left in lefts])
        for left, logits in zip(lefts, network(x).feats.view(-1, PATCH, PATCH, len(CLASSES)), strict=True):
            votes[top : top + PATCH, left : left + PATCH] += logits
    return votes.argmax(-1)


# ---- what it is compared with ----


def windows(heights: torch.Tensor, size: int) -> torch.Tensor:
    """(H, W, size * size): the heights around each cell; at the edge the last one goes on."""
    padded = functional.pad(heights[None, None], [size // 2] * 4, mode="replicate")
    return functional.unfold(padded, size)[0].T.reshape(*heights.shape, -1)


def logistic_regression(trained: torch.Tensor, labels: torch.Tensor, held_out: torch.Tensor) -> torch.Tensor:
    """Fitted to features (H, W, F) and labels (H, W): the classes of other features (H, W, F)."""
    rows, answers = trained[labels != UNKNOWN].double(), labels[labels != UNKNOWN]
    mean = rows.mean(0)
    variance, axes = torch.linalg.eigh(torch.cov((rows - mean).T).reshape(len(mean), -1))
    whiten = axes / variance.sqrt()  # neighbouring heights are almost the same: raw, they would take L-BFGS forever
    rows = (rows - mean) @ whiten
    model = torch.nn.Linear(len(mean), len(CLASSES), device=rows.device, dtype=rows.dtype)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = functional.cross_entropy(model(rows), answers)
        value.backward()
        return value

    optimizer.step(loss)
    with torch.no_grad():
        return model((held_out.double() - mean) @ whiten).argmax(-1)


# ---- report ----


def accuracies(predicted: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """The share of right voxels, of all and of each class."""
    right = predicted == labels
    return [
        float(right[which].float().mean()) for which in (labels != UNKNOWN, *(labels == c for c in range(len(CLASSES))))
    ]


def draw(path: Path, heights: torch.Tensor, labels: torch.Tensor, predicted: torch.Tensor, titles: list[str]) -> None:
    """The held-out half: its relief, its labels, and what the network made of it; grey where there is no label."""
    figure = Figure(figsize=(18, 3), layout="constrained")
    axes = figure.subplots(1, 3)
    axes[0].imshow(colors.LightSource(azdeg=315, altdeg=45).shade(heights.numpy(), colormaps["gist_earth"]))
    palette = colors.ListedColormap(["0.8", "tab:red", "wheat", "tab:blue"])
    for axis, classes in zip(axes[1:], (labels, predicted.where(labels != UNKNOWN, UNKNOWN)), strict=True):
        image = axis.imshow(
            classes.numpy(), palette, vmin=UNKNOWN - 0.5, vmax=len(CLASSES) - 0.5, interpolation="nearest"
        )
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xticks=[], yticks=[])
    bar = figure.colorbar(image, ax=axes, ticks=range(UNKNOWN, len(CLASSES)), pad=0.01, shrink=0.8)
    bar.ax.set_yticklabels(["unlabelled", *CLASSES])
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Returns the accuracies on the held-out half, of all voxels and of each class, by the name of the method."""
    here = "cuda" if torch.cuda.is_available() and flexgemm.device_count() else "cpu"
    parser = argparse.ArgumentParser(description="Train a sparse U-Net to tell ridges, slopes and valleys apart.")
    parser.add_argument("--steps", type=int, default=600, help="training steps (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=here, help="default: a GPU if there is one")
    parser.add_argument("--out", type=Path, default=Path("terrain_unet.png"), help="picture (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and patches (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1 or arguments.out.suffix != ".png" or not arguments.out.parent.is_dir():
        parser.error("expected --steps of at least 1, and --out a .png file in an existing folder")
    torch.manual_seed(arguments.seed)

    ground = elevation_model()
    heights = torch.from_numpy(ground.grid(ground.heights)) / ground.voxel  # (H, W), in voxel edges, north up
    # Each half by itself: no label reads a height beyond the border, and no patch crosses it.
    north, south = heights.tensor_split(2)
    curved = [curvature(half) for half in (north, south)]
    threshold = curved[0].abs().nanmedian()
    north_labels, south_labels = (classify(half, threshold) for half in curved)
    counts = ", ".join(f"{(south_labels == i).sum():,} {name}" for i, name in enumerate(CLASSES))
    print(f"terrain    {ground.name}, voxels of {ground.voxel:.3g} {ground.unit}, device {arguments.device}")
    print(f"trained on {(north_labels != UNKNOWN).sum():,} voxels of the north, held out {counts} of the south")
    north, north_labels, south = (x.to(arguments.device) for x in (north, north_labels, south))

    network = UNet(in_channels=3, classes=len(CLASSES)).to(arguments.device)
    parameters = sum(p.numel() for p in network.parameters())
    since = time.perf_counter()
    train(network, north, north_labels, arguments.steps)
    print(f"network    {parameters:,} parameters, {arguments.steps} steps in {time.perf_counter() - since:.0f} s")

    most_frequent = int(north_labels[north_labels != UNKNOWN].bincount().argmax())
    predicted = {"most frequent": torch.full_like(south_labels, most_frequent)}
    for name, size in (("logistic, height", 1), (f"logistic, {WINDOW} x {WINDOW}", WINDOW)):
        predicted[name] = logistic_regression(windows(north, size), north_labels, windows(south, size)).cpu()
    predicted["U-Net"] = predict(network, south).cpu()
    results = {name: accuracies(classes, south_labels) for name, classes in predicted.items()}
    print("accuracy   on the held-out half" + "".join(f"{name:>8}" for name in ("all", *CLASSES)))
    for name, shares in results.items():
        print(f"           {name:20}" + "".join(f"{share:8.1%}" for share in shares))

    titles = ["held-out half", "labels", f"U-Net: {results['U-Net'][0]:.1%} right"]
    draw(arguments.out, south.cpu(), south_labels, predicted["U-Net"], titles)
    print(f"picture    {arguments.out}")
    return results


if __name__ == "__main__":
    main()
