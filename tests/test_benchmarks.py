"""The benchmarks: their scenes, cases and group sizes are those that peers were measured on."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks import results, row_orders, scenes

torch = pytest.importorskip("torch")

from measured import CEILINGS  # noqa: E402

from benchmarks import cold, conv, gemm, peers, strided, train, voxel  # noqa: E402

# ---- row orders ----


def test_useful_share_of_row_orders():
    """Tiles of two rows, four offsets: pairs of rows agree about the first two offsets, or about the last two."""
    present = np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0], [1, 1, 0, 0]], bool)
    share, as_they_come, by_twos = row_orders.useful_share, [0, 1, 2, 3], [0, 2, 1, 3]
    assert share(present, np.array([as_they_come]), 2) == 8 / 12
    assert share(present, np.array([by_twos]), 2) == 8 / 12
    assert share(present, np.array([by_twos, as_they_come]), 2) == 1


def test_row_orders_of_the_table():
    cells = row_orders.line(scenes.sphere(32)).strip("| ").split(" | ")
    assert cells == ["sphere32", "3,840", ".485 / .491", ".557 / .595", ".725 / .801", ".925 / .955"]
    cells = row_orders.line(scenes.sphere(32), stride=2).strip("| ").split(" | ")
    assert cells == ["sphere32", "3,840", ".132 / .171", ".807 / .916", "(.719 / .831)", "(.719 / .814)"]


# ---- scenes ----


@pytest.mark.parametrize(
    ("res", "n", "pairs"),
    [(8, 192, 2544), (16, 848, 10544), (32, 3840, 50304), (64, 15192, 191208), (128, 64160, 831680)],
)
def test_sphere_is_the_published_one(res, n, pairs):
    scene = scenes.sphere(res)
    assert (scene.n, scene.pairs, scene.shape) == (n, pairs, (1, res, res, res))


def test_sphere_follows_its_definition_in_floats():
    cells = np.argwhere(np.ones((10, 10, 10)))
    distance = np.linalg.norm(cells - 10 / 2 + 0.5, axis=1)
    expected = cells[(distance >= 10 / 2 - 1.25) & (distance <= 10 / 2)]
    np.testing.assert_array_equal(scenes.sphere(10).coords[:, 1:], expected)


@pytest.mark.parametrize("kernel", [3, 5])
def test_neighbors_are_those_of_a_dictionary(kernel):
    rng = np.random.default_rng(0)
    cells = rng.permutation(np.argwhere(rng.random((2, 5, 4, 6)) < 0.5)).astype(np.int32)
    scene = scenes.Scene("cells", cells, (2, 5, 4, 6), kernel)
    rows = {tuple(cell): row for row, cell in enumerate(cells.tolist())}
    pairs = 0
    for v, (x, y, z) in enumerate(scene.offsets.tolist()):
        expected = [rows.get((b, i + x, j + y, k + z), -1) for b, i, j, k in cells.tolist()]
        assert scene.neighbors(v).tolist() == expected
        pairs += sum(row >= 0 for row in expected)
    assert scene.pairs == pairs


def test_a_sphere_is_found_by_its_name():
    for name, kernel in (("sphere8", 3), ("sphere8-k5", 5)):
        scene = scenes.sphere_named(name)
        assert (scene.name, scene.n, scene.kernel, len(scene.offsets)) == (name, 192, kernel, scene.volume)


def test_cloud_is_loaded_from_npz(tmp_path):
    np.savez(tmp_path / "c.npz", coords=np.array([[0, 1, 2, 3]], np.int16), shape=np.array([1, 4, 5, 6]))
    name, path = scenes.parse(f"cloud={tmp_path / 'c.npz'}")
    scene = scenes.load(name, path)
    assert (scene.name, scene.shape, scene.coords.dtype) == ("cloud", (1, 4, 5, 6), np.int32)


def test_cloud_without_its_arrays_is_refused(tmp_path):
    np.savez(tmp_path / "c.npz", points=np.zeros((1, 4)))
    with pytest.raises(SystemExit, match="'coords' and 'shape'"):
        scenes.load("cloud", tmp_path / "c.npz")
    with pytest.raises(ValueError, match=r"name=path\.npz"):
        scenes.parse("cloud.npz")


# ---- cases ----


def test_group_sizes_are_those_that_peers_drew():
    rows = [case.m for case in gemm.cases() if case.op == "m_grouped_ragged" and case.dtype == gemm.FP8]
    assert rows == [34151, 32782, 33694, 38239, 8320, 8593, 8069, 8047]
    masked = [case.m for case in gemm.cases() if case.op == "m_grouped_masked"]
    assert masked == [966, 1134, 1138, 1097, 1002, 1042, 1024, 1001, 1984, 1946]


def test_cases_are_the_measured_ones():
    spheres = [(c.scene, c.channels) for c in conv.peers_cases() if c.dtype == "float16"]
    assert spheres == [(f"sphere{res}", c) for res, c in conv.SPHERES]
    assert [c.channels for c in conv.peers_cases(["lidar"]) if c.scene == "lidar"] == [16, 32, 64, 128]
    others = [(c.scene, c.dtype, c.precision) for c in conv.peers_cases() if c.dtype != "float16"]
    kinds = [("bfloat16", None), ("float32", "tf32"), ("float32", "ieee")]
    assert others == [(scene, *kind) for scene in ("sphere64", "sphere256") for kind in kinds]
    dense = [case for case in gemm.cases() if case.op == "dense"]
    assert len([c for c in dense if c.dtype == gemm.FP8]) == 21
    assert len([c for c in dense if c.dtype == "bfloat16"]) == 4


def test_cases_of_our_own_join_them():
    cases = conv.cases(["lidar"])
    assert set(conv.peers_cases(["lidar"])) < set(cases)
    assert len(set(cases)) == len(cases)
    changes = sum(a.scene != b.scene for a, b in itertools.pairwise(cases))
    assert changes + 1 == len({case.scene for case in cases})
    kinds = {(case.scene, case.channels): set() for case in cases}
    for case in cases:
        kinds[case.scene, case.channels].add(case.kind)
    measured = [(f"sphere{res}", channels) for res, channels in conv.SPHERES]
    measured += [("lidar", channels) for channels in conv.CLOUD_CHANNELS]
    assert all({"float16", "bfloat16", "tf32"} <= kinds.pop(case) for case in measured)
    between = {(f"sphere{res}", channels) for res in (64, 128) for channels in (96, 160, 320)}
    assert kinds.keys() == between | {("sphere64-k5", 256), ("sphere128-k5", 128)}


def test_rows_have_the_fields_of_the_results_format():
    scene = scenes.sphere(8)
    case = conv.Case("sphere8", 1024, "float16")
    row = conv.measured("fwd", case, scene, 1.0, conv.floor_ms("fwd", case, scene, CEILINGS))
    assert list(row) == [
        "suite",
        "op",
        "scene",
        "dtype",
        "channels",
        "family",
        "n",
        "pairs",
        "ms",
        "floor_ms",
        "tflops",
    ]
    assert row["tflops"] == results.significant(2 * 2544 * 1024**2 / 1e-3 / 1e12)
    assert "tflops" not in conv.measured("map_infer", case, scene, 1.0, 0.5)
    assert conv.Case("sphere8", 1024, "float32", "tf32").row("fwd")["precision"] == "tf32"
    dense, grouped = gemm.cases()[0].row(), next(case for case in gemm.cases() if case.sizes).row()
    assert list(dense) == ["suite", "op", "dtype", "m", "n", "k", "family"]
    assert list(grouped) == ["suite", "op", "dtype", "groups", "expected_m", "m", "n", "k", "family"]


def test_all_rows_are_distinct():
    rows = [case.row(op) for case in conv.cases(["lidar"]) for op in (*conv.OPS, *cold.OPS)]
    rows += [case.row("train_step") for case in train.cases()]
    rows.append(train.MEMORY_CASE.row("train_step") | {"suite": "memory"})
    assert train.MEMORY_CASE in train.cases()
    for case in gemm.cases() + gemm.more_cases():
        peers_of_case = () if case.scales else gemm.PEERS.get((case.op, case.dtype), ())
        rows += [case.row(), *(case.row(peer) for peer in peers_of_case)]
    for case in voxel.cases(["lidar"]):
        rows += [case.row(), case.row(peers.NAME)]
    assert len({results.identity(row) for row in rows}) == len(rows)
    beside_peers = [
        row for row in rows if not row.get("peer") and not row.get("scales") and row["suite"] in results.SUITES
    ]
    beside_peers = [row for row in beside_peers if row.get("precision") != "ieee"]
    assert len({(row["op"], results.case_key(row)) for row in beside_peers}) == len(beside_peers)


def test_floor_is_arithmetic_or_bytes():
    large, small = gemm.Case(gemm.FP8, 4096, 4096, 7168), gemm.Case(gemm.FP8, 1, 4096, 7168)
    assert gemm.floor_ms(large, CEILINGS) == pytest.approx(2 * 4096 * 4096 * 7168 / 1300e12 * 1e3, rel=1e-4)
    moved = 7168 + 4096 * 7168 + 2 * 4096
    assert gemm.floor_ms(small, CEILINGS) == pytest.approx(moved / 4000e9 * 1e3, rel=1e-4)
    empty = gemm.Case(gemm.FP8, 1, 4096, 7168, (0, 1, 0), 1)
    assert gemm.floor_ms(empty, CEILINGS) == gemm.floor_ms(small, CEILINGS)


def test_voxel_cases_of_one_scene_are_adjacent():
    names = [case.scene for case in voxel.cases(["lidar"])]
    assert sum(a != b for a, b in zip(names, names[1:], strict=False)) == len(set(names)) - 1
    row = next(case for case in voxel.cases() if case.op == "strided_fwd").row()
    assert row["scene"] == "sphere128-k2s2" and row["channels"] == 64
    assert [n for n, before in zip(names, [None, *names], strict=False) if n != before][:3] == [
        "lidar", "sphere8", "sphere64",
    ]  # fmt: skip
    beside = {case.scene for case in strided.cases(["lidar"]) if case.beside_peers}
    assert beside == {"sphere128", "lidar"}
    lidar = {case.row()["scene"] for case in voxel.cases(["lidar"]) if case.channels == 32}
    assert lidar == {"lidar-k2s2", "lidar-k3s2"}
    assert list(row) == ["suite", "op", "scene", "dtype", "channels", "family"]
