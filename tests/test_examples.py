"""The examples: they run as a user would run them, and the network learns from one half of the map what the other half
is."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch not installed")
pytest.importorskip("matplotlib", reason="matplotlib not installed")
pytest.importorskip("tqdm", reason="tqdm not installed")

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    """examples/<name>.py, which no package holds, as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def unet():
    return load("terrain_unet")


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device, or torch without CUDA")
    return request.param


# ---- labels ----


def bowl(angle):
    """Curvatures 1 and 3 along two axes at right angles, `angle` off those of the grid."""
    y, x = np.mgrid[:40, :40] - 20.0
    along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    return torch.from_numpy(0.5 * along**2 + 1.5 * across**2).float()


@pytest.mark.parametrize("angle", [0.0, 0.3, np.pi / 4, 2.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_curvature_is_the_principal_one_of_larger_magnitude(unet, angle, sign):
    curved = unet.curvature(sign * bowl(angle))
    known = curved[unet.REACH : -unet.REACH, unet.REACH : -unet.REACH]
    torch.testing.assert_close(known, torch.full_like(known, 3.0 * sign), rtol=1e-3, atol=1e-3)
    assert int(curved.isnan().sum()) == 40 * 40 - known.numel()


def test_a_label_reads_no_further_than_its_reach(unet):
    heights = torch.from_numpy(np.random.default_rng(0).normal(size=(40, 40)).astype(np.float32))
    moved = heights.clone()
    moved[20 + unet.REACH + 1 :] += 1.5
    a, b = unet.curvature(heights), unet.curvature(moved)
    torch.testing.assert_close(a[20, unet.REACH : -unet.REACH], b[20, unet.REACH : -unet.REACH], rtol=0, atol=0)
    assert (a[21, unet.REACH : -unet.REACH] != b[21, unet.REACH : -unet.REACH]).any()


def test_classes_are_ridge_slope_valley(unet):
    curved = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0, float("nan")])
    assert unet.classify(curved, torch.tensor(1.0)).tolist() == [0, 1, 1, 1, 2, unet.UNKNOWN]


# ---- the network ----


def test_a_patch_has_one_voxel_per_cell_and_knows_no_altitude(unet):
    heights = torch.from_numpy(np.random.default_rng(0).normal(100, 2, (2, 64, 64)).astype(np.float32))
    x = unet.voxels(heights)
    cells = [[patch, row, column] for patch in range(2) for row in range(64) for column in range(64)]
    assert x.coords[:, :3].tolist() == cells
    assert x.coords[:, 3].view(2, -1).amin(1).tolist() == [0, 0]
    higher = unet.voxels(heights + 32)
    assert torch.equal(x.coords, higher.coords)
    torch.testing.assert_close(x.feats, higher.feats, rtol=0, atol=1e-3)


def test_random_patches_are_squares_of_the_map_in_any_of_eight_positions(unet):
    labels = torch.arange(70 * 66).reshape(70, 66)  # a cell's label says where it was
    torch.manual_seed(0)
    x, answers = unet.random_patches(labels / 100, labels, 40)
    assert x.shape == (40, 64, 64, 64)
    positions = set()
    for patch, voxels in zip(answers.view(40, 64, 64), x.feats.view(40, 64, 64, 3), strict=True):
        top, left = divmod(int(patch.min()), 66)
        square = labels[top : top + 64, left : left + 64]
        seen = [square.rot90(i) for i in range(4)] + [square.rot90(i).mT for i in range(4)]
        positions |= {i for i, position in enumerate(seen) if torch.equal(patch, position)}
        torch.testing.assert_close(100 * voxels[..., 0], patch - patch.float().mean(), rtol=0, atol=0.01)
    assert positions == set(range(8))


def test_the_network_answers_for_each_voxel_in_float32(unet, device):
    torch.manual_seed(0)
    network = unet.UNet(in_channels=3, classes=3).to(device)
    heights = torch.rand(64, 64).to(device)
    x = unet.voxels(torch.stack([heights, heights.T]))
    logits = network(x).feats
    assert (logits.shape, logits.dtype) == ((2 * 64 * 64, 3), torch.float32)
    logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


def test_predictions_cover_the_map_whatever_its_size(unet):
    torch.manual_seed(0)
    network = unet.UNet(in_channels=3, classes=3, channels=(4, 4))
    classes = unet.predict(network, torch.rand(64, 97))
    assert classes.shape == (64, 97)


# ---- what it is compared with ----


def test_logistic_regression_finds_a_line(unet):
    rng = np.random.default_rng(0)
    feats = torch.from_numpy(rng.normal(size=(2, 30, 40, 2)).astype(np.float32))
    labels = (feats @ torch.tensor([1.0, -2.0])).sign().long() + 1
    labels[0, :3] = unet.UNKNOWN
    found = unet.logistic_regression(feats[0], labels[0], feats[1])
    assert (found == labels[1]).float().mean() > 0.98


def test_windows_are_the_heights_around(unet):
    heights = torch.arange(20.0).reshape(4, 5)
    assert unet.windows(heights, 3)[1, 1].tolist() == [0, 1, 2, 5, 6, 7, 10, 11, 12]
    assert unet.windows(heights, 3)[0, 0].tolist() == [0, 0, 1, 0, 0, 1, 5, 5, 6]


# ---- the whole ----


def test_the_example_reports_every_method_and_draws(unet, device, tmp_path, capsys):
    out = tmp_path / "picture.png"
    arguments = ["--steps", "2", "--device", device, "--out", str(out), "--seed", "3"]
    results = unet.main(arguments)
    assert out.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "samples per second, 1 x " in printed
    assert set(results) == {"most frequent", "logistic, height", "logistic, 15 x 15", "U-Net"}
    for name, shares in results.items():
        assert len(shares) == 4 and all(0 <= share <= 1 for share in shares)  # of all, ridge, slope, valley
        line = next(line for line in printed.splitlines() if line.strip().startswith(name))
        assert f"{shares[0]:.1%}" in line
    assert results["most frequent"][1:] == [0, 1, 0]
    assert results["most frequent"][0] < results["logistic, height"][0] < results["logistic, 15 x 15"][0]
    assert unet.main(arguments) == results  # to the bit


def test_small_patches_and_a_few_steps_already_beat_a_height(unet, tmp_path, monkeypatch):
    monkeypatch.setattr(unet, "PATCH", 32)
    results = unet.main(["--steps", "40", "--device", "cpu", "--out", str(tmp_path / "picture.png")])
    assert results["U-Net"][0] > results["logistic, height"][0]


def test_help_names_the_options(unet, capsys):
    with pytest.raises(SystemExit) as stop:
        unet.main(["--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    for option in ("--steps", "--batch", "--device", "--out", "--seed"):
        assert option in printed


@pytest.mark.parametrize(
    "wrong",
    [["--steps", "0"], ["--batch", "0"], ["--out", "no/folder/picture.png"], ["--out", "a.txt"], ["--device", "tpu"]],
)
def test_wrong_arguments_are_refused(unet, wrong, capsys):
    with pytest.raises(SystemExit) as stop:
        unet.main(wrong)
    assert stop.value.code == 2
    assert wrong[0] in capsys.readouterr().err


# ---- the small examples ----


def test_numpy_products(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["numpy_products.py"])
    load("numpy_products").main()
    printed = capsys.readouterr().out
    assert "convolution: (5000, 16) -> (5000, 32) float32" in printed
    assert float(re.search(r"relative error ([\d.]+)%", printed)[1]) < 6  # e4m3 keeps 3 fraction bits


def test_torch_training(capsys):
    load("torch_training").main()
    right = [float(share) for share in re.findall(r"right ([\d.]+)%", capsys.readouterr().out)]
    assert len(right) == 5
    assert right[-1] > 95
