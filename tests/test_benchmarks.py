"""The benchmarks: their scenes, cases and group sizes are those that peers were measured on, no wrong result gets a
time, and the results file merges as it says."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import results, row_orders, scenes

torch = pytest.importorskip("torch")

import flexgemm  # noqa: E402
from benchmarks import (  # noqa: E402
    check,
    cold,
    conv,
    fp8_conv,
    gemm,
    gpu_check,
    peers,
    points,
    sanitize,
    strided,
    train,
    voxel,
)  # fmt: skip
from benchmarks.ceilings import Ceilings  # noqa: E402
from benchmarks.run import OutOfTime, Run  # noqa: E402

CEILINGS = Ceilings(4000.0, {"float8": 1300.0, "float16": 700.0, "bfloat16": 700.0, "tf32": 350.0, "ieee": 50.0})
MACHINE = {"gpu": "NVIDIA H200", "driver": "1.0", "cuda": "13.0", "torch": "2.11.0"}


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


# ---- no wrong result gets a time ----


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("op", strided.OPS)
def test_right_results_on_voxels_pass_and_wrong_ones_do_not(monkeypatch, op, size):
    monkeypatch.setattr(strided, "DEVICE", "cpu")
    work = strided.make(op, size, 16, scenes.sphere(8))
    result = work.call()
    work.judge(result)
    assert work.n == 192
    assert work.moved > 0
    first = result[0] if isinstance(result, tuple) else result
    first[:] = first * 1.1
    with pytest.raises(check.Wrong):
        work.judge(result)
    for index in range(len(result) if isinstance(result, tuple) else 1):
        result = work.call()
        (result[index] if isinstance(result, tuple) else result)[-1] = torch.nan
        with pytest.raises(check.Wrong):
            work.judge(result)


@pytest.mark.parametrize("op", fp8_conv.DTYPES)
def test_right_convolutions_in_fp8_pass_and_wrong_ones_do_not(monkeypatch, op):
    monkeypatch.setattr(fp8_conv, "DEVICE", "cpu")
    work = fp8_conv.make(op, 64, scenes.sphere(8))
    result = work.call()
    work.judge(result)
    assert result.dtype == torch.float16
    assert work.n == 192
    if op == "fp8_fwd":  # half the bytes of feats and weight
        assert work.moved < fp8_conv.make("fp16_fwd", 64, scenes.sphere(8)).moved - 27 * 64 * 64
        with pytest.raises(check.Wrong):
            work.judge((result.float() + 3e-3 * torch.randn(result.shape)).half())
    with pytest.raises(check.Wrong):
        work.judge(result.roll(1, 0))


@pytest.mark.parametrize("case", points.cases(), ids=lambda case: case.op)
def test_right_results_on_points_pass_and_wrong_ones_do_not(monkeypatch, case):
    monkeypatch.setattr(points, "DEVICE", "cpu")
    monkeypatch.setattr(points, "KEYS", 2000)
    monkeypatch.setattr(points, "POINTS", 500)
    work = case.make(scenes.sphere(12))
    result = work.call()
    work.judge(result)
    assert work.moved > 0
    if case.op == "hash_lookup":
        result[7] = result[8]
    elif case.op == "hash_insert":
        result = flexgemm.HashTable(10, like=torch.zeros(1, dtype=torch.int64))
    else:
        spoilt = result.feats if case.op == "voxelize" else result[0] if case.op.startswith("grid") else result
        spoilt[:] = spoilt.roll(1, 0)
    with pytest.raises(check.Wrong):
        work.judge(result)


@pytest.fixture(params=[3, 5])
def conv_problem(monkeypatch, request):
    monkeypatch.setattr(conv, "DEVICE", "cpu")
    case = conv.Case("sphere8", 8, "float32", "ieee")
    return conv.Problem(case, scenes.sphere(8, request.param))


def test_right_convolution_passes_the_spot_check(conv_problem):
    reference = conv_problem.reference()
    neighbor_map = conv_problem.map_train()
    conv_problem.judge("map_train", neighbor_map, reference)
    conv_problem.judge("fwd", conv_problem.fwd(neighbor_map), reference)
    conv_problem.judge("bwd", conv_problem.bwd(neighbor_map), reference)


def without_end(x):
    return torch.cat([x[:-1], torch.full_like(x[-1:], torch.nan)])


@pytest.mark.parametrize(
    "spoil", [torch.zeros_like, lambda x: x * 1.001, lambda x: x.roll(1, 0), lambda x: x / 0, without_end]
)
def test_wrong_convolution_fails_the_spot_check(conv_problem, spoil):
    reference = conv_problem.reference()
    neighbor_map = conv_problem.map_train()
    with pytest.raises(check.Wrong, match="^out"):
        conv_problem.judge("fwd", spoil(conv_problem.fwd(neighbor_map)), reference)
    grads = conv_problem.bwd(neighbor_map)
    for index, name in enumerate(("grad_feats", "grad_weight", "grad_bias")):
        spoilt = [spoil(grad) if i == index else grad for i, grad in enumerate(grads)]
        with pytest.raises(check.Wrong, match=f"^{name}"):
            conv_problem.judge("bwd", spoilt, reference)


def test_wrong_map_fails_the_spot_check(conv_problem):
    reference, right = conv_problem.reference(), conv_problem.map_infer().map
    with pytest.raises(check.Wrong, match="pairs"):
        reference.judge_map(right, conv_problem.scene.pairs - 1)
    with pytest.raises(check.Wrong, match="entries differ"):
        reference.judge_map(right.flip(0), conv_problem.scene.pairs)


@pytest.fixture
def train_problem(monkeypatch):
    monkeypatch.setattr(conv, "DEVICE", "cpu")
    return train.Problem(conv.Case("sphere8", 8, "float32", "ieee"), scenes.sphere(8))


def test_a_training_step_is_judged_layer_by_layer(train_problem):
    train_problem.judge(train_problem.step())
    for index in range(6):
        step = train_problem.step()
        grads = [grad * 1.001 if i == index else grad for i, grad in enumerate(step.grads)]
        with pytest.raises(check.Wrong, match="^grad"):
            train_problem.judge(dataclasses.replace(step, grads=tuple(grads)))
    for name in ("hidden", "out"):
        with pytest.raises(check.Wrong):
            train_problem.judge(dataclasses.replace(step, **{name: getattr(step, name) * 1.001}))


class FakeTimer:
    def median_ms(self, call):
        call()
        return 2.0


def test_training_rows(tmp_path, same_sources, monkeypatch, capsys):
    monkeypatch.setattr(conv, "DEVICE", "cpu")
    # A step holds 100 bytes at once besides the 10 that were there before; the peak before it does not count.
    peaks = [10**9]
    answers = {"memory_allocated": 10, "synchronize": None, "empty_cache": None}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peaks.append(110))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peaks[-1])
    case = conv.Case("sphere8", 8, "float16")
    monkeypatch.setattr(train, "cases", lambda: [case])
    monkeypatch.setattr(train, "MEMORY_CASE", case)
    run = Run(results.Results(tmp_path / "h200.json", MACHINE), float("inf"))
    train.run(run, FakeTimer(), CEILINGS)
    assert run.failures == []
    time_row, memory_row = run.results.rows
    assert (time_row["suite"], time_row["op"], time_row["ms"]) == ("conv", "train_step", 2.0)
    n, v, c = 192, 27, 8
    parts = ("map", "fwd", "fwd", "bwd", "bwd")
    assert time_row["floor_ms"] == pytest.approx(
        sum(conv.floor_ms(part, case, scenes.sphere(8), CEILINGS) for part in parts), rel=1e-4
    )
    assert (memory_row["suite"], memory_row["op"], memory_row["peak_bytes"]) == ("memory", "train_step", 100)
    # feats, grad_out, hidden, out, grad_hidden and grad_feats; two weights and biases and their gradients; coords, map
    assert memory_row["needed_bytes"] == 2 * (6 * n * c + 4 * (v * c * c + c)) + 16 * n + 4 * v * n
    assert "times inputs, outputs and map" in capsys.readouterr().out
    assert "train_step" in "\n".join(results.summary(run.results.rows, []))
    train.run(run, None, CEILINGS)  # all is there


@pytest.mark.parametrize(
    "case",
    [
        gemm.Case(gemm.FP8, 48, 96, 64),
        gemm.Case(gemm.FP8, 60, 96, 64, (7, 0, 33, 20), 15),
        gemm.Case(gemm.FP8, 60, 96, 64, (7, 0, 33, 20), 15, "m_grouped_contiguous"),
        gemm.Case(gemm.FP8, 60, 96, 64, (7, 0, 33, 20), 15, "m_grouped_masked"),
        gemm.Case(gemm.FP8, 48, 96, 64, layout="wgrad"),
        gemm.Case(gemm.FP8, 48, 96, 64, (16, 0, 48), 21, "k_grouped_wgrad"),
        gemm.Case(gemm.FP8, 48, 96, 192, scales="block"),
        gemm.Case(gemm.FP8, 60, 96, 192, (7, 0, 33, 20), 15, scales="block"),
        gemm.Case(gemm.FP8, 60, 96, 192, (7, 0, 33, 20), 15, "m_grouped_masked", "block"),
    ],
    ids=lambda case: case.op + case.scales,
)
def test_product_is_judged_against_the_dequantised_operands(monkeypatch, case):
    monkeypatch.setattr(gemm, "DEVICE", "cpu")
    problem = gemm.Problem(case)
    out = problem.ours()
    problem.judge(out)
    for wrong in (torch.zeros_like(out), out * torch.linspace(0.99, 1.01, case.n), out.roll(1, 1), out / 0):
        with pytest.raises(check.Wrong):
            problem.judge(wrong)
    if out.dtype is torch.float32:  # of which bfloat16 is not enough
        with pytest.raises(check.Wrong):
            problem.judge(out.bfloat16().float())


@pytest.mark.parametrize("ending", ["fp8", "swiglu-fp8"])
def test_elements_in_fp8_are_the_exact_ones_rounded_once(monkeypatch, ending):
    monkeypatch.setattr(gemm, "DEVICE", "cpu")
    problem = gemm.Problem(gemm.Case(gemm.FP8, 48, 96, 64, ending=ending))
    out = problem.ours()
    problem.judge(out)
    values = out.float()
    values[-1, values[-1].abs().argmax()] *= 1.1
    with pytest.raises(check.Wrong):
        problem.judge(values.to(out.dtype))


def test_a_failure_counts_more_than_a_step_to_be_gone_on_with(monkeypatch):
    from benchmarks import __main__ as bench
    from benchmarks import cpu, gpu_check

    monkeypatch.setattr(cpu, "main", lambda arguments: None)
    monkeypatch.setattr(flexgemm, "device_count", lambda: 1)
    monkeypatch.setattr("sys.argv", ["bench"])
    for statuses, expected in (((0, 1, 3, 0), 1), ((0, 3, 0, 0), 3), ((0, 0, 0, 0), 0)):
        answers = iter(statuses)
        monkeypatch.setattr(gpu_check, "main", lambda arguments, answers=answers: next(answers))
        assert bench.main() == expected


# ---- FlexGEMM beside it ----


def scatter(grad_out, indices, weights, n):
    """What FlexGEMM's kernel of this name does."""
    rows, has = indices.view(torch.int32).long(), weights > 0
    parts = (grad_out[:, None].float() * weights[..., None])[has]
    return torch.zeros(n, grad_out.shape[1]).index_add_(0, rows[has], parts).to(grad_out.dtype)


@pytest.fixture
def flex_gemm(monkeypatch):
    """FlexGEMM's functions as flexgemm has them."""
    package = pytest.importorskip("flexgemm.compat.flex_gemm")
    monkeypatch.setattr(package.kernels.triton, "indice_weighed_sum_bwd_input", scatter, raising=False)
    monkeypatch.setitem(sys.modules, "flex_gemm", package)
    return package


def test_peers_are_measured_on_the_same_tensors(flex_gemm, tmp_path, same_sources, monkeypatch):
    for module in (points, strided):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(points, "KEYS", 2000)
    monkeypatch.setattr(points, "POINTS", 500)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    small = [dataclasses.replace(case, scene="sphere12") for case in points.cases()]
    makes = {op: partial(strided.make, op, 3, 16) for op in strided.OPS}
    small += [strided.Case(op, "sphere8", make, "k3s2", "float16", 16) for op, make in makes.items()]
    monkeypatch.setattr(voxel, "cases", lambda clouds: small)
    run = Run(results.Results(tmp_path / "h200.json", MACHINE), float("inf"))
    peer = peers.find()
    voxel.run(run, FakeTimer(), CEILINGS, {}, peer)
    assert run.failures == []
    theirs = [row["op"] for row in run.results.rows if row.get("peer") == "flex_gemm"]
    assert sorted(theirs) == sorted(set(peer.ops) - set(conv.OPS))
    assert len(run.results.rows) == len(small) + len(theirs)
    assert all({"ms", "floor_ms", "n"} <= row.keys() for row in run.results.rows)
    (line,) = (line for line in results.summary(run.results.rows, []) if line.startswith("voxel strided_fwd"))
    assert "beside the fastest peer x1.00" in line
    voxel.run(run, None, CEILINGS, {}, peer)  # all is there


def test_convolutions_of_peers(flex_gemm, tmp_path, same_sources, monkeypatch):
    monkeypatch.setattr(conv, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    theirs, ours = conv.Case("sphere8", 8, "float16"), conv.Case("sphere8", 8, "float32", "ieee")
    monkeypatch.setattr(conv, "peers_cases", lambda clouds: [theirs, ours])
    monkeypatch.setattr(conv, "cases", conv.peers_cases)
    run = Run(results.Results(tmp_path / "h200.json", MACHINE), float("inf"))
    conv.run(run, FakeTimer(), CEILINGS, {}, peers.find())
    assert run.failures == []
    expected = [theirs.row(op) for op in conv.OPS]
    expected += [theirs.row(op, "flex_gemm") for op in ("map_train", "map_infer", "fwd", "bwd")]
    expected += [ours.row(op) for op in conv.OPS]
    assert [results.describe(row) for row in run.results.rows] == [results.describe(row) for row in expected]
    conv.run(run, None, CEILINGS, {}, peers.find())  # all is there


def test_a_wrong_peer_gets_no_time(flex_gemm, tmp_path, same_sources, monkeypatch):
    monkeypatch.setattr(strided, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    function = flex_gemm.ops.spconv.SparseConv3dFunction
    right = function._sparse_conv_forward
    monkeypatch.setattr(function, "_sparse_conv_forward", staticmethod(lambda *a: right(*a) * 1.1))
    case = strided.Case("strided_fwd", "sphere8", partial(strided.make, "strided_fwd", 2, 16), "k2s2", "float16", 16)
    monkeypatch.setattr(voxel, "cases", lambda clouds: [case])
    run = Run(results.Results(tmp_path / "h200.json", MACHINE), float("inf"))
    voxel.run(run, FakeTimer(), CEILINGS, {}, peers.find())
    assert [row.get("peer") for row in run.results.rows] == [None]
    assert "[flex_gemm]" in run.failures[0] and "WRONG" in run.failures[0]


def test_a_peer_is_judged_when_it_has_tuned_its_kernels(flex_gemm, tmp_path, same_sources, monkeypatch):
    monkeypatch.setattr(strided, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    function = flex_gemm.ops.spconv.SparseConv3dFunction
    right, calls = function._sparse_conv_forward, []

    def tuned(*given):
        calls.append(given)
        return right(*given) * (2 if len(calls) == 1 else 1)

    monkeypatch.setattr(function, "_sparse_conv_forward", staticmethod(tuned))
    case = strided.Case("strided_fwd", "sphere8", partial(strided.make, "strided_fwd", 2, 16), "k2s2", "float16", 16)
    monkeypatch.setattr(voxel, "cases", lambda clouds: [case, dataclasses.replace(case, beside_peers=False)])
    run = Run(results.Results(tmp_path / "h200.json", MACHINE), float("inf"))
    voxel.run(run, FakeTimer(), CEILINGS, {}, peers.find())
    assert run.failures == []
    assert [row.get("peer") for row in run.results.rows] == [None, "flex_gemm"]


def test_a_peer_that_fails_costs_nothing_else(flex_gemm, tmp_path, same_sources, monkeypatch):
    monkeypatch.setattr(conv, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(flex_gemm.ops.spconv.SubMConv3dFunction, "_compute_neighbor_cache", None)
    case = conv.Case("sphere8", 8, "float16")
    monkeypatch.setattr(conv, "peers_cases", lambda clouds: [case])
    monkeypatch.setattr(conv, "cases", conv.peers_cases)
    run = Run(results.Results(tmp_path / "h200.json", MACHINE), float("inf"))
    conv.run(run, FakeTimer(), CEILINGS, {}, peers.find())
    assert [(row["op"], row.get("peer")) for row in run.results.rows] == [(op, None) for op in conv.OPS]
    assert all("[flex_gemm]" in failure for failure in run.failures)


def test_peers_are_chosen_by_name():
    assert gpu_check.parse_arguments([]).peers == []
    assert gpu_check.parse_arguments(["--peers", "torch", "flex_gemm"]).peers == ["torch", "flex_gemm"]


def test_a_peer_that_is_not_there_is_said(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "flex_gemm", None)
    assert peers.find() is None
    assert "flex_gemm: not measured" in capsys.readouterr().out


def test_a_peer_without_its_extension_runs_its_triton_kernels(monkeypatch, capsys):
    package = SimpleNamespace(kernels=SimpleNamespace(cuda=SimpleNamespace()))
    monkeypatch.setitem(sys.modules, "flex_gemm", package)
    peer = peers.find()
    assert set(peer.ops) == {"fwd", "bwd", "strided_fwd", "strided_bwd", "grid_sample_bwd"}
    assert hasattr(package.kernels.cuda, "hashmap_build_sparse_conv_neighbour_map")
    assert "not built" in capsys.readouterr().out


# ---- the results file ----


@pytest.fixture
def same_sources(monkeypatch):
    monkeypatch.setattr(results, "source_sha256", lambda: "a" * 64)


def row(op="fwd", **fields):
    return {"suite": "conv", "op": op, "scene": "s", "dtype": "float16", "channels": 16, "ms": 1.0} | fields


def test_file_keeps_rows_of_the_same_sources_and_replaces_equal_ones(tmp_path, same_sources):
    file = results.Results(tmp_path / "h200.json", MACHINE)
    file.add(row())
    file.add(row("bwd"))
    file.header["tests"] = {"passed": 1, "failed": 0, "skipped": 0}
    file.save()
    again = results.Results(tmp_path / "h200.json", MACHINE)
    again.add(row(ms=2.0))
    stored = json.loads((tmp_path / "h200.json").read_text())
    assert stored["rows"] == [row(ms=2.0), row("bwd")]
    assert stored["tests"]["passed"] == 1
    assert {"gpu", "driver", "cuda", "torch", "date", "source_sha256"} < set(stored)
    assert [path.name for path in tmp_path.iterdir()] == ["h200.json"]


@pytest.mark.parametrize("field", ["precision", "family", "peer", "granularity", "channels", "scene", "dtype"])
def test_rows_that_differ_in_identity_stay_apart(tmp_path, same_sources, field):
    file = results.Results(tmp_path / "h200.json", MACHINE)
    file.add(row())
    file.add(row(**{field: "another"}))
    assert len(file.rows) == 2


def test_other_sources_or_another_driver_start_afresh(tmp_path, same_sources, monkeypatch, capsys):
    results.Results(tmp_path / "h200.json", MACHINE).add(row())
    assert results.Results(tmp_path / "h200.json", MACHINE | {"driver": "2.0"}).rows == []
    monkeypatch.setattr(results, "source_sha256", lambda: "b" * 64)
    assert results.Results(tmp_path / "h200.json", MACHINE).rows == []
    assert "starts afresh, source_sha256 changed" in capsys.readouterr().out


def test_file_is_named_after_the_card(tmp_path):
    assert results.gpu_file("NVIDIA H200", tmp_path).name == "h200.json"
    assert results.gpu_file("NVIDIA GeForce RTX 4090", tmp_path).name == "rtx-4090.json"


def test_ragged_fp8_meets_the_contiguous_peer_by_work_done():
    ours = {"suite": "gemm", "op": "m_grouped_ragged", "dtype": gemm.FP8, "groups": 4, "expected_m": 64}
    ours |= {"m": 200, "n": 8, "k": 16, "ms": 1.0, "floor_ms": 0.5, "family": "portable"}
    peer = {k: v for k, v in ours.items() if k != "family"} | {"op": "m_grouped_contiguous", "m": 100, "peer": "them"}
    slower = peer | {"ms": 3.0, "peer": "others"}
    assert results.best_peers([slower, peer]) == {results.case_key(ours): peer}
    assert results.times_faster(ours, peer) == 2.0
    (line,) = results.summary([ours], [peer, slower])
    assert "of floor 50.0%" in line and "x2.00" in line


# ---- steps ----


def test_foreign_build_is_refused(monkeypatch):
    monkeypatch.setattr(gpu_check.flexgemm, "build_info", lambda: {"source_sha256": "b" * 64})
    with pytest.raises(SystemExit, match="built from other sources"):
        gpu_check.main(["--step", "overhead"])


def test_step_resumes_where_its_time_ran_out(tmp_path, same_sources):
    file = results.Results(tmp_path / "h200.json", MACHINE)
    run = Run(file, time.monotonic() + 60)
    assert run.pending([row(), row("bwd")]) == [row(), row("bwd")]
    run.record(row())
    late = Run(file, time.monotonic() - 1)
    assert late.pending([row()]) == []
    with pytest.raises(OutOfTime):
        late.pending([row(), row("bwd")])


def test_failure_is_counted_and_does_not_end_the_run(tmp_path, same_sources):
    run = Run(results.Results(tmp_path / "h200.json", MACHINE), float("inf"))
    with run.guarded("fwd"):
        raise check.Wrong("out: relative row error 1")
    with run.guarded("bwd"):
        raise NotImplementedError("no such kernel")
    assert run.failures == [
        "fwd: WRONG RESULT, not timed: out: relative row error 1",
        "bwd: NotImplementedError: no such kernel",
    ]
    assert run.results.rows == []


def test_pytest_outcomes_are_read_from_its_report(tmp_path):
    report = tmp_path / "junit.xml"
    report.write_text('<testsuites><testsuite tests="9" failures="2" errors="1" skipped="3"/></testsuites>')
    assert gpu_check.read_junit(report) == {"passed": 3, "failed": 3, "skipped": 3}


@pytest.mark.parametrize(
    ("status", "output", "expected"),
    [
        (0, "========= ERROR SUMMARY: 0 errors", "clean"),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", "clean"),
        (1, "========= ERROR SUMMARY: 2 errors", "errors"),
        (0, "no summary at all", "errors"),
        (1, "Traceback: the cases did not run\n========= ERROR SUMMARY: 0 errors", "errors"),
        (1, "========= Error: Device not supported.", "unavailable"),
    ],
)
def test_sanitizer_is_clean_only_when_it_says_so(status, output, expected):
    assert sanitize.verdict(status, output) == expected


def test_the_worst_of_its_shares_is_the_verdict_of_a_tool(monkeypatch, tmp_path, capsys):
    """The cases of a tool are dealt to processes: errors that one finds count, whatever the others come to. Where one
    was when its time ran out is shown."""
    late = {("memcheck", 1), ("synccheck", 0), ("racecheck", 3), ("racecheck", 8)}
    wrong = {("memcheck", 0), ("racecheck", 4)}
    ran = []

    def process(command, *, timeout, **_):
        tool, part = command[command.index("--tool") + 1], command.index("--part")
        share = tool, int(command[part + 1])
        ran.append((*share, int(command[part + 2])))
        if share in late:
            raise subprocess.TimeoutExpired(command, timeout, f"in case {share[1]} of {tool}".encode())
        errors = int(share in wrong)
        return subprocess.CompletedProcess(command, errors, f"ERROR SUMMARY: {errors} errors".encode())

    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: "compute-sanitizer")
    monkeypatch.setattr(subprocess, "run", process)
    run = Run(results.Results(tmp_path / "h200.json", MACHINE), float("inf"))
    sanitize.run(run)
    assert sorted(ran) == sorted((tool, part, n) for tool, n in sanitize.PARTS.items() for part in range(n))
    verdicts = {"memcheck": "errors", "initcheck": "clean", "synccheck": "timed out", "racecheck": "errors"}
    assert json.loads((tmp_path / "h200.json").read_text())["sanitize"] == verdicts
    assert run.failures == [f"sanitize {tool}: {said}" for tool, said in verdicts.items() if said != "clean"]
    shown = capsys.readouterr().out
    assert all(f"in case {part} of {tool}" in shown for tool, part in late)


def test_shares_of_the_cases_are_all_cases():
    def names(*arguments):
        command = [sys.executable, str(sanitize.CASES), "--list", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]

    parts = [names("--part", str(i), "3") for i in range(3)]
    assert sorted(sum(parts, [])) == sorted(names())
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
