"""A sparse U-Net that tells the ridges, slopes and valleys of real terrain apart.

    python examples/terrain_unet.py [--steps 600] [--batch 4] [--device cuda] [--out terrain_unet.png] [--seed 0]
    torchrun --nproc-per-node 2 examples/terrain_unet.py [...]      # the same on two GPUs, or in two CPU processes

The terrain is that of `python -m flexgemm demo`: 344 x 403 elevations, one surface voxel of 90 m over each. The label
of a voxel is how the ground bends there: the heights are smoothed by a Gaussian, the principal curvature of larger
magnitude is taken, and where it is stronger than the trained half's median the voxel is on a ridge (bent down) or in a
valley (bent up), else on a slope, which may be level.

The network is trained on square patches of the northern half and counted on the southern half. What it gets is the
patch's voxels, and for each its height above the patch's mean and where in the voxel the ground lies: no curvature, no
smoothing, no altitude above the sea. A voxel whose label reads a height of the other half counts in neither.

Beside its accuracy stand those of the most frequent class, of a logistic regression on the raw height, and of one on
the raw heights of all 15 x 15 cells that the label reads: how far a linear model gets that sees as much.

Processes of torchrun share the patches of each step, and torch's DistributedDataParallel adds their gradients (by NCCL
between GPUs, gloo between CPUs). Loss and parameters are those of one process, but for rounding: each loss is divided
by the labelled voxels of all processes, and the batch norms take the means of all processes.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib import colormaps, colors
from matplotlib.figure import Figure
from torch import distributed
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import flexgemm
import flexgemm.torch.nn as fnn
from flexgemm.demo.terrain import elevation_model

CLASSES = ("ridge", "slope", "valley")
UNKNOWN = -1  # the label of cells that do not count
SMOOTHING = 2  # standard deviation of the labels' Gaussian, in cells
REACH = 3 * SMOOTHING + 1  # how far from a cell its label reads heights
PATCH = 64  # edge of a patch in cells
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
    """The surfaces of patches (B, P, P) of heights, in voxel edges: a voxel per cell, in the order of the cells."""
    relative = heights - heights.mean((1, 2), keepdim=True)
    layer = relative.floor()
    feats = torch.stack([relative, relative - layer, torch.ones_like(relative)], -1).flatten(0, 2)
    layer = (layer - layer.amin((1, 2), keepdim=True)).int()
    cells = torch.meshgrid(*(torch.arange(n, device=heights.device) for n in heights.shape), indexing="ij")
    coords = torch.stack([*cells, layer], -1).flatten(0, 2)
    # The grid is a cube with an edge of a power of two: halving an odd one leaves its last layer out, as torch's own
    # convolutions do.
    return fnn.SparseTensor(feats, coords.int(), (len(heights), PATCH, PATCH, PATCH))


def block(in_channels: int, out_channels: int) -> torch.nn.Sequential:
    """Two convolutions on the voxels there are. Of one process a SyncBatchNorm is a BatchNorm."""
    layers: list[torch.nn.Module] = []
    for channels in (in_channels, out_channels):
        layers += [fnn.SubMConv3d(channels, out_channels, bias=False), fnn.SyncBatchNorm(out_channels), fnn.ReLU()]
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


# ---- training, in one process or several ----


def process() -> tuple[int, int]:
    """The number of this process and how many there are."""
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def total(value: torch.Tensor) -> torch.Tensor:
    """The sum over the processes of what each has."""
    if distributed.is_initialized():
        distributed.all_reduce(value)
    return value


def random_patches(heights: torch.Tensor, labels: torch.Tensor, batch: int) -> tuple[fnn.SparseTensor, torch.Tensor]:
    """This process's share of `batch` patches, each turned and mirrored at random, and the labels of their voxels. All
    processes draw the same numbers, and each takes every patch that is its turn."""
    rank, processes = process()
    ends = [n - PATCH + 1 for n in heights.shape]
    choices = torch.stack([torch.randint(n, (batch,)) for n in (*ends, 4, 2)])[:, rank::processes]
    top, left, turns, mirrored = choices.to(heights.device)[..., None, None]
    row, column = torch.meshgrid(*[torch.arange(PATCH, device=heights.device)] * 2, indexing="ij")
    row, column = torch.where(mirrored > 0, column, row), torch.where(mirrored > 0, row, column)
    for turn in range(3):  # a quarter of a circle each
        row, column = torch.where(turns > turn, column, row), torch.where(turns > turn, PATCH - 1 - row, column)
    cells = top + row, left + column
    return voxels(heights[cells]), labels[cells].flatten()


def train(
    network: UNet, heights: torch.Tensor, labels: torch.Tensor, steps: int, batch: int
) -> tuple[list[float], float]:
    """The loss of each step, and the samples per second of the second half of them: the first warms up."""
    rank, processes = process()
    model = DistributedDataParallel(network) if processes > 1 else network
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    model.train()
    losses: list[float] = []
    bar = tqdm(range(steps), desc="training", unit="step", disable=rank > 0)
    for step in bar:
        if step == steps // 2:
            since = time.perf_counter()
        x, answers = random_patches(heights, labels, batch)
        labelled = total((answers != UNKNOWN).sum())
        loss = functional.cross_entropy(model(x).feats, answers, ignore_index=UNKNOWN, reduction="sum") / labelled
        optimizer.zero_grad()
        (processes * loss).backward()  # DistributedDataParallel takes the mean of the gradients, and this is a sum
        optimizer.step()
        schedule.step()
        losses.append(total(loss.detach()).item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    return losses, (steps - steps // 2) * batch / (time.perf_counter() - since)


@torch.no_grad()
def predict(network: UNet, heights: torch.Tensor) -> torch.Tensor:
    """Classes (H, W): patches that overlap by half vote by their logits."""
    network.eval()
    votes = heights.new_zeros(*heights.shape, len(CLASSES))
    tops, lefts = ([*range(0, n - PATCH, PATCH // 2), n - PATCH] for n in heights.shape)
    for top in tops:
        x = voxels(torch.stack([heights[top : top + PATCH, left : left + PATCH] for left in lefts]))
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


def join(device: str) -> torch.device:
    """The device of this process. Those of torchrun, which numbers them in the environment, join into one group."""
    if "RANK" not in os.environ:
        return torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Returns the accuracies on the held-out half, of all voxels and of each class, by the name of the method; nothing
    in processes but the first, which alone reports."""
    here = "cuda" if torch.cuda.is_available() and flexgemm.device_count() else "cpu"
    parser = argparse.ArgumentParser(description="Train a sparse U-Net to tell ridges, slopes and valleys apart.")
    parser.add_argument("--steps", type=int, default=600, help="training steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="patches of a step (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=here, help="default: a GPU if there is one")
    parser.add_argument("--out", type=Path, default=Path("terrain_unet.png"), help="picture (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and patches (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1 or arguments.out.suffix != ".png" or not arguments.out.parent.is_dir():
        parser.error("expected --steps of at least 1, and --out a .png file in an existing folder")
    if arguments.batch < int(os.environ.get("WORLD_SIZE", 1)):
        parser.error("expected --batch of at least 1, and of no less than there are processes")
    device = join(arguments.device)
    rank, processes = process()
    torch.manual_seed(arguments.seed)

    ground = elevation_model()
    heights = torch.from_numpy(ground.grid(ground.heights)) / ground.voxel  # (H, W), in voxel edges, north up
    # Each half by itself: no label reads a height beyond the border, and no patch crosses it.
    north, south = heights.tensor_split(2)
    curved = [curvature(half) for half in (north, south)]
    threshold = curved[0].abs().nanmedian()
    north_labels, south_labels = (classify(half, threshold) for half in curved)
    counts = ", ".join(f"{(south_labels == i).sum():,} {name}" for i, name in enumerate(CLASSES))
    if rank == 0:
        print(f"terrain    {ground.name}, voxels of {ground.voxel:.3g} {ground.unit}")
        print(f"trained on {(north_labels != UNKNOWN).sum():,} voxels of the north, held out {counts} of the south")
    north, north_labels, south = (x.to(device) for x in (north, north_labels, south))

    network = UNet(in_channels=3, classes=len(CLASSES)).to(device)
    parameters = sum(p.numel() for p in network.parameters())
    since = time.perf_counter()
    _, rate = train(network, north, north_labels, arguments.steps, arguments.batch)
    elapsed = time.perf_counter() - since
    if distributed.is_initialized():
        distributed.destroy_process_group()
    if rank > 0:
        return {}
    print(f"network    {parameters:,} parameters, {arguments.steps} steps in {elapsed:.0f} s")
    print(f"speed      {rate:.1f} samples per second, {processes} x {device.type}")

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
