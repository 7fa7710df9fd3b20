"""The benchmarks: the results file merges as it says, and steps of gpu-check go on where they were."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import results

torch = pytest.importorskip("torch")

from measured import MACHINE  # noqa: E402

import flexgemm  # noqa: E402
from benchmarks import ceilings, check, cpu, gemm, gpu_check, sanitize  # noqa: E402
from benchmarks.run import OutOfTime, Run  # noqa: E402

# ---- the results file ----


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


def test_the_number_of_voxels_is_a_figure_and_that_of_columns_is_not(tmp_path, same_sources):
    """So that a row is found by who asks for it before it was measured."""
    file = results.Results(tmp_path / "h200.json", MACHINE)
    file.add(row(n=192))
    assert row() in file
    product = {"suite": "gemm", "op": "dense", "dtype": gemm.FP8, "m": 4, "n": 8, "k": 16}
    file.add(product)
    assert product in file
    assert product | {"n": 9} not in file


def test_floors_refer_to_the_ceilings_of_the_file(tmp_path, same_sources):
    file = results.Results(tmp_path / "h200.json", MACHINE)
    figures = [4000.0, 700.0, 350.0, 50.0, 1300.0, 1400.0]
    for ceiling, figure in zip(ceilings.ROWS, figures, strict=True):
        file.add(ceiling | {"GBs" if ceiling["op"] == "copy" else "tflops": figure})
    found = gpu_check._ceilings(Run(file, time.monotonic() - 1), None)  # there is nothing to measure, nor time for it
    assert found.copy_gbs == 4000.0
    assert found.tflops == {"float8": 1400.0, "float16": 700.0, "bfloat16": 700.0, "tf32": 350.0, "ieee": 350.0 / 3}


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
    monkeypatch.setattr(flexgemm, "build_info", lambda: {"source_sha256": "b" * 64})
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


@pytest.mark.parametrize("status, expected", [(0, 5), (1, 5), (2, None), (-11, None)])
def test_tests_that_did_not_come_to_their_end_do_not_count(monkeypatch, status, expected):
    def run(command, **how):
        report = command[-1].removeprefix("--junitxml=")
        Path(report).write_text('<testsuites><testsuite tests="5" failures="0" errors="0" skipped="0"/></testsuites>')
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    counts = gpu_check._pytest(None, 1.0)
    assert (counts and counts["passed"]) == expected


def test_totals_of_the_tests_are_those_of_the_families_that_came_to_their_end(monkeypatch, tmp_path, same_sources):
    """A family with failures is run again; where that does not end, what it had counted before does not either."""
    good = {"passed": 5, "failed": 0, "skipped": 2}
    outcomes = iter([{"passed": 3, "failed": 2, "skipped": 1}, good, None])
    monkeypatch.setattr(gpu_check, "_pytest", lambda arch, timeout: next(outcomes))

    def header_and_failures():
        run = Run(results.Results(tmp_path / "h200.json", MACHINE), float("inf"))
        gpu_check.run_tests(run, gpu_check.parse_arguments([]))
        header = json.loads((tmp_path / "h200.json").read_text())["tests"]
        return {name: header[name] for name in ("passed", "failed", "skipped")}, header["families"], run.failures

    totals, families, failures = header_and_failures()
    assert (totals, list(families)) == ({"passed": 8, "failed": 2, "skipped": 3}, ["default", "sm80"])
    assert failures == ["tests default: {'passed': 3, 'failed': 2, 'skipped': 1}"]
    assert header_and_failures() == (good, {"sm80": good}, ["tests default: did not come to an end"])


def test_wrong_results_on_a_cpu_are_not_timed(monkeypatch):
    right = flexgemm.submanifold_conv3d
    monkeypatch.setattr(cpu, "median_seconds", lambda calls: dict.fromkeys(calls, 1.0))
    assert len(cpu.measure()) == 4
    monkeypatch.setattr(flexgemm, "submanifold_conv3d", lambda *a, **how: right(*a, **how) * np.float32(1.001))
    with pytest.raises(ValueError, match="^out: "):
        cpu.measure()


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
