"""The demo: real terrain, honest training, and clouds of the user's own."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import scenes
import verdicts

import flexgemm

pytest.importorskip("matplotlib", reason="matplotlib not installed")
pytest.importorskip("tqdm", reason="tqdm not installed")
from flexgemm import demo  # noqa: E402
from flexgemm.demo import experts, network, terrain  # noqa: E402
from flexgemm.demo.points import PointsError, read_points  # noqa: E402

# ---- terrain ----


def test_the_elevation_model_has_more_than_100_000_surface_voxels():
    ground = terrain.elevation_model()
    noisy = demo.with_noise(ground, np.random.default_rng(0))
    coords, shape = terrain.surface_voxels(ground, noisy)
    assert len(coords) > 100_000
    assert len(np.unique(coords, axis=0)) == len(coords)
    assert (coords >= 0).all()
    assert (coords < shape).all()
    assert 236 <= ground.heights.min() * ground.voxel < ground.heights.max() * ground.voxel <= 1076.1  # metres
    # The layers follow the noisy heights: the truth is nowhere in what the network gets.
    np.testing.assert_array_equal(coords[:, 3], np.floor(noisy) - np.floor(noisy).min())


def test_a_grid_puts_every_height_where_its_cell_is():
    ground = terrain.Terrain("", np.array([[2, 0], [0, 1]], np.int32), np.array([3, 4], np.float32), 10.0, "m")
    image = ground.grid(ground.heights)
    assert image.shape == (2, 3)
    assert (image[0, 2], image[1, 0]) == (30, 40)
    assert np.isnan(image).sum() == 4


def hills(count=10_000, seed=0):
    """Points of a smooth surface, with a little below it that a surface must not show."""
    rng = np.random.default_rng(seed)
    x, y = rng.uniform(-50, 50, (2, count))
    z = 5 * np.sin(x / 14) * np.cos(y / 16) - rng.uniform(0, 0.1, count)
    return np.stack([x, y, z], 1)


def test_a_cloud_becomes_the_highest_points_of_its_cells():
    points = hills()
    ground = terrain.surface_of_points(points, "hills")
    assert len(np.unique(ground.cells, axis=0)) == len(ground.cells) > 3_000
    x, y = (ground.cells + 0.5).T * ground.voxel
    low, high = np.quantile(points, 0.01, axis=0), np.quantile(points, 0.99, axis=0)
    expected = 5 * np.sin((x + low[0]) / 14) * np.cos((high[1] - y) / 16)
    assert np.abs(ground.heights * ground.voxel + low[2] - expected).max() < ground.voxel


def test_a_stray_point_sets_no_scale():
    points = np.concatenate([hills(), [[1e7, -1e7, 1e7]]])
    assert terrain.surface_of_points(points, "").voxel == pytest.approx(
        terrain.surface_of_points(hills(), "").voxel, rel=0.01
    )


# ---- network ----


def network_problem():
    coords, shape = scenes.scene(300)
    net = network.Denoiser(np.random.default_rng(1))
    net.weights[2][:] = np.random.default_rng(2).normal(0, 0.1, net.weights[2].shape)
    x = np.random.default_rng(3).standard_normal(300, np.float32)
    return net, x, flexgemm.neighbor_map(coords, shape), reference.neighbor_map(coords, shape, (3, 3, 3))


def reference_network(weights, biases, x, nmap):
    conv = reference.conv_forward
    hidden1 = np.maximum(conv(x[:, None], weights[0], biases[0], nmap), 0)
    hidden2 = np.maximum(conv(hidden1, weights[1], biases[1], nmap) + hidden1, 0)
    return conv(hidden2, weights[2], biases[2], nmap)[:, 0]


def test_the_network_is_what_it_says():
    net, x, nmap, reference_map = network_problem()
    expected = reference_network(net.weights, net.biases, x, reference_map)
    np.testing.assert_allclose(net.forward(x, nmap), expected, rtol=1e-4, atol=1e-5)


def test_gradients_are_the_slopes_of_the_loss():
    """Along a random direction in each parameter, against central differences in float64."""
    net, x, nmap, reference_map = network_problem()
    grad = np.random.default_rng(4).standard_normal(300, np.float32)
    net.forward(x, nmap)
    gradients = net.backward(grad, nmap)
    parameters = [p.astype(np.float64) for p in net.parameters()]
    for i, gradient in enumerate(gradients):
        direction = np.random.default_rng(5).normal(size=gradient.shape)
        step = 1e-5 / np.linalg.norm(direction)
        ends = []
        for sign in (1, -1):
            moved = [p + sign * step * direction if i == j else p for j, p in enumerate(parameters)]
            ends.append(reference_network(moved[:3], moved[3:], x.astype(np.float64), reference_map) @ grad)
        assert (gradient * direction).sum() == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-3, abs=1e-3)


def test_the_neighborhood_mean_is_a_mean():
    _, x, nmap, reference_map = network_problem()
    there = reference_map >= 0
    expected = np.where(there, x[reference_map], 0).sum(0) / there.sum(0)
    np.testing.assert_allclose(network.neighborhood_mean(x, nmap), expected, rtol=1e-5, atol=1e-6)


def test_adam_goes_downhill():
    parameter = np.array([3.0, -2.0], np.float32)
    adam = network.Adam([parameter], steps=200, learning_rate=0.1)
    for _ in range(200):
        adam.step([2 * parameter])
    assert np.abs(parameter).max() < 0.05


# ---- mixture of experts ----


def test_the_experts_product_is_as_exact_as_its_inputs(backend):
    result = experts.mixture_of_experts(np.random.default_rng(0), backend.device)
    assert sum(result.group_sizes) == experts.TOKENS
    assert len(set(result.group_sizes)) > 1  # ragged
    assert result.error_dequantised < max(1e-4, 2 * verdicts.float8_cut(backend.name))
    assert 0.01 < result.error_unquantised < 0.06  # e4m3 keeps 3 fraction bits


# ---- the whole ----


def test_the_noise_goes_and_a_picture_comes(backend, tmp_path, capsys):
    np.save(tmp_path / "hills.npy", hills())
    out = tmp_path / "picture.png"
    assert demo.run(backend.device, 40, out, tmp_path / "hills.npy") == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for word in ("voxels", "neighbours", "map", "forward", "backward", "held-out", "noisy", "restored", "FP8"):
        assert word in printed
    assert "FAILED" not in printed


def test_a_network_that_learned_nothing_fails(tmp_path, capsys):
    np.save(tmp_path / "hills.npy", hills())
    assert demo.run("cpu", 1, tmp_path / "picture.png", tmp_path / "hills.npy") == 1
    assert "FAILED" in capsys.readouterr().out


# ---- point files ----


def ply(points, layout, before="", after=""):
    header = f"ply\nformat {layout} 1.0\ncomment of a test\n{before}element vertex {len(points)}\n"
    header += "property uchar red\nproperty float x\nproperty double y\nproperty float z\n" + after + "end_header\n"
    if layout == "ascii":
        body = "".join(f"7 {x:.9g} {y:.17g} {z:.9g}\n" for x, y, z in points).encode()
    else:
        record = np.zeros(len(points), [("red", "u1"), ("x", "<f4"), ("y", "<f8"), ("z", "<f4")])
        record["x"], record["y"], record["z"] = points.T
        body = record.tobytes()
    return header.encode() + body


FACES = "element face 1\nproperty list uchar int vertex_indices\n"


@pytest.mark.parametrize("kind", ["npy", "wide.npy", "npz", "named.npz", "xyz", "comma.xyz", "ply", "binary.ply"])
def test_point_files_are_read(tmp_path, kind):
    points = hills(1500)
    path = tmp_path / f"cloud.{kind}"
    match kind:
        case "npy":
            np.save(path, points)
        case "wide.npy":
            np.save(path, np.pad(points, ((0, 0), (0, 2))))
        case "npz":
            np.savez(path, cloud=points)
        case "named.npz":
            np.savez(path, other=np.zeros(3), points=points)
        case "xyz":
            np.savetxt(path, np.pad(points, ((0, 0), (0, 1))), header="x y z intensity")
        case "comma.xyz":
            np.savetxt(path, points, delimiter=",")
        case "ply":
            path.write_bytes(ply(points, "ascii", after=FACES) + b"3 0 1 2\n")
        case "binary.ply":
            path.write_bytes(ply(points, "binary_little_endian", after=FACES) + bytes(13))
    got = read_points(path)
    assert (got.dtype, got.shape) == (np.float64, points.shape)
    np.testing.assert_allclose(got, points, rtol=1e-6, atol=1e-6)


def _saved(array):
    def write(path):
        with open(path, "wb") as file:
            np.save(file, array, allow_pickle=True)

    return write


def _bytes(data):
    return lambda path: path.write_bytes(data)


BAD = {
    "missing file": ("a.npy", lambda path: None, "No such file"),
    "other ending": ("a.las", _bytes(b"x"), "expected a file ending in"),
    "NaN": ("a.npy", _saved(np.full((2000, 3), np.nan)), "2000 of 2000 points have a NaN"),
    "two columns": ("a.npy", _saved(np.zeros((2000, 2))), r"expected numbers of shape \(N, 3\)"),
    "text in the array": ("a.npy", _saved(np.full((2000, 3), "x")), "expected numbers"),
    "pickled objects": ("a.npy", _saved(np.full((2000, 3), None)), "Object arrays"),
    "not what it says": ("a.npy", _bytes(b"hello"), "a.npy"),
    "not an archive": ("a.npz", _bytes(b"hello"), "not an .npz"),
    "half an archive": ("a.npz", _bytes(b"PK\3\4hello"), "not a zip file"),
    "too few": ("a.npy", _saved(np.zeros((10, 3))), "at least 1000 points, got 10"),
    "words": ("a.xyz", _bytes(b"a b c\n"), "a.xyz"),
    "narrow text": ("a.xyz", _bytes(b"1 2\n" * 2000), r"\(N, 3\)"),
    "empty": ("a.xyz", _bytes(b""), "a.xyz"),
    "not a ply": ("a.ply", _bytes(b"obj\n"), "first line is not 'ply'"),
    "endless header": ("a.ply", _bytes(b"ply\nformat ascii 1.0\n"), "header does not end"),
    "big endian": ("a.ply", _bytes(ply(hills(10), "binary_big_endian")), "ascii or binary_little_endian"),
    "truncated": ("a.ply", _bytes(ply(hills(2000), "binary_little_endian")[:-5]), "2000 vertices of 17 bytes"),
    "no z": ("a.ply", _bytes(ply(hills(2000), "ascii").replace(b"float z", b"float w")), "no property z"),
    "lists": ("a.ply", _bytes(ply(hills(10), "ascii", after="property list uchar int n\n")), "list uchar int n"),
    "fewer lines": ("a.ply", _bytes(ply(hills(10), "ascii").replace(b"vertex 10", b"vertex 2000000000")), "000000 ver"),
    "a negative number": ("a.ply", _bytes(ply(hills(10), "ascii").replace(b"vertex 10", b"vertex -1")), "got -1"),
    "too many to count": (
        "a.ply",
        _bytes(ply(hills(10), "binary_little_endian").replace(b"vertex 10", b"vertex " + b"9" * 30)),
        "a.ply: ",
    ),
    "faces first": ("a.ply", _bytes(ply(hills(10), "ascii", before=FACES)), "vertices as the first element"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_what_is_no_cloud_is_refused_by_name(tmp_path, fault):
    name, write, message = BAD[fault]
    write(tmp_path / name)
    with pytest.raises(PointsError, match=message) as caught:
        read_points(tmp_path / name)
    assert name in str(caught.value)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_flat_cloud_has_no_surface(axis):
    points = hills()
    points[:, axis] = 1
    with pytest.raises(PointsError, match="no horizontal extent"):
        terrain.surface_of_points(points, "flat.npy")


@pytest.mark.parametrize("factors", [(1, 1, 1e12), (1e3, 1e-6, 1), (1e12, 1e-12, 1), (1e300, 1e300, 1)], ids=str)
def test_a_cloud_has_the_proportions_of_a_surface(factors):
    with pytest.raises(PointsError, match="flat.npy: expected a surface of 2 to 1048576 cells along each axis, got"):
        terrain.surface_of_points(hills() * factors, "flat.npy")
