"""The benchmarks: no wrong result gets a time, ours or a peer's."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from benchmarks import results, scenes

torch = pytest.importorskip("torch")

from measured import CEILINGS, MACHINE  # noqa: E402

import flexgemm  # noqa: E402
from benchmarks import check, conv, fp8_conv, gemm, gpu_check, peers, points, strided, train, voxel  # noqa: E402
from benchmarks.run import Run  # noqa: E402


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
    assert run.failures == []


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
        gemm.Case("bfloat16", 48, 96, 64, columns="ab"),
        gemm.Case("bfloat16", 48, 96, 64, (16, 0, 48), 21, "k_grouped_wgrad", columns="ab"),
        gemm.Case("bfloat16", 60, 96, 64, (7, 0, 33, 20), 15, columns="b"),
    ],
    ids=lambda case: case.op + case.scales + case.columns,
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


@pytest.mark.parametrize("sizes", [(), (16, 0, 48)], ids=["one", "groups"])
def test_a_gradient_that_is_not_added_is_wrong(monkeypatch, sizes):
    monkeypatch.setattr(gemm, "DEVICE", "cpu")
    problem = gemm.Problem(gemm.Case(gemm.FP8, 48, 96, 64, sizes, 21, "k_grouped_wgrad" if sizes else "wgrad"))
    added = problem.ours().clone()
    problem.judge(added)
    with pytest.raises(check.Wrong):
        problem.judge(added - problem.before.reshape(added.shape))


@pytest.mark.parametrize("granularity", gemm.GRANULARITIES)
def test_casts_are_judged_to_their_last_row(monkeypatch, tmp_path, same_sources, granularity):
    monkeypatch.setattr(gemm, "DEVICE", "cpu")
    right = flexgemm.quantize
    run = Run(results.Results(tmp_path / "h200.json", MACHINE), float("inf"))
    row = {"suite": "quantize", "op": "quantize", "dtype": gemm.FP8, "granularity": granularity, "m": 300, "k": 200}
    gemm.measure_cast(run, FakeTimer(), CEILINGS, row, "")
    assert run.results.rows[0]["ms"] == 2.0

    def spoilt(*args, **kwargs):
        q, scale = right(*args, **kwargs)
        q[-1] = 0
        return q, scale

    monkeypatch.setattr(flexgemm, "quantize", spoilt)
    with pytest.raises(check.Wrong, match="rounded quotient"):
        gemm.measure_cast(run, FakeTimer(), CEILINGS, row, "")


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
    assert run.failures == []


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
    assert run.failures == []


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
