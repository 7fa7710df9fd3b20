"""Everything that needs a GPU, in steps: the tests of a GPU for both kernel families, the benchmarks and
compute-sanitizer, merged into one benchmarks/results/<gpu>.json.

    python -m benchmarks.gpu_check --step tests|conv|gemm|voxel|overhead|sanitize|all [--scene lidar=cloud.npz]

A step stops by itself before 8 minutes and goes on where it stopped when it is run again; what the file has from the
same sources on the same machine is not timed twice (delete the file to start over). A `_C` that was built from
other sources is refused. Needs torch, NumPy and pytest in the running interpreter, and no network.

Exit status: 0 all well, 1 a failed test, check or refusal, 3 time ran out first: run it again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch

from benchmarks import ceilings, cold, conv, gemm, overhead, peers, results, sanitize, scenes, train, voxel
from benchmarks.run import OutOfTime, Run
from benchmarks.timing import Timer

STEP_SECONDS = 440  # the case that is running then ends within the 8 minutes
FAMILIES = {"default": None, "sm80": "sm80"}  # name in the results file -> FLEXGEMM_ARCH
OUTCOMES = "passed", "failed", "skipped"  # of tests, counted in the results file


# ---- steps ----


def run_tests(run: Run, options: argparse.Namespace) -> None:
    """The tests of a GPU once per kernel family, each time in a process of its own; totals over both, and each.
    PYTEST_ADDOPTS may spread them over processes, by pytest-xdist."""
    families: dict[str, dict[str, int]] = run.results.header.get("tests", {}).get("families", {})
    todo = [name for name in FAMILIES if name not in families or families[name]["failed"]] or list(FAMILIES)
    for number, family in enumerate(todo, 1):
        print(f"[{number}/{len(todo)}] pytest, kernel family {family}", flush=True)
        try:
            counts = _pytest(FAMILIES[family], run.seconds_left())
        except subprocess.TimeoutExpired:
            if number > 1:
                raise OutOfTime from None  # it may fit into a step of its own
            counts = None
        families.pop(family, None)  # an earlier run's
        if counts:
            families[family] = counts
        totals = {name: sum(done[name] for done in families.values()) for name in OUTCOMES}
        run.results.header["tests"] = {**totals, "families": families}
        run.results.save()
        if counts is None:
            run.fail(f"tests {family}: did not come to an end")
        elif counts["failed"] or not counts["passed"]:
            run.fail(f"tests {family}: {counts}")


def _pytest(arch: str | None, timeout: float) -> dict[str, int] | None:
    """Outcomes, errors counted as failed; None when pytest did not come to its end."""
    environment = dict(os.environ) | ({"FLEXGEMM_ARCH": arch} if arch else {})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "junit.xml")
        command = [sys.executable, "-m", "pytest", "tests", "-m", "gpu", "-q", "--tb=short", f"--junitxml={report}"]
        run = subprocess.run(command, cwd=results.ROOT, env=environment, timeout=max(timeout, 0.0))
        return read_junit(report) if run.returncode in (0, 1) else None


def read_junit(report: Path) -> dict[str, int]:
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))

    def total(name: str) -> int:
        return sum(int(suite.get(name, 0)) for suite in suites)

    failed, skipped = total("failures") + total("errors"), total("skipped")
    return {"passed": total("tests") - failed - skipped, "failed": failed, "skipped": skipped}


def run_conv(run: Run, options: argparse.Namespace) -> None:
    timer = Timer()
    measured = _ceilings(run, timer)
    conv.run(run, timer, measured, dict(options.scene), _flex_gemm(run, options))
    train.run(run, timer, measured)
    cold.run(run, measured, dict(options.scene))


def run_gemm(run: Run, options: argparse.Namespace) -> None:
    timer = Timer()
    gemm.run(run, timer, _ceilings(run, timer), with_peers="torch" in options.peers)


def run_voxel(run: Run, options: argparse.Namespace) -> None:
    timer = Timer()
    voxel.run(run, timer, _ceilings(run, timer), dict(options.scene), _flex_gemm(run, options))


def run_overhead(run: Run, options: argparse.Namespace) -> None:
    overhead.run(run)


def run_sanitize(run: Run, options: argparse.Namespace) -> None:
    sanitize.run(run)


def _flex_gemm(run: Run, options: argparse.Namespace) -> peers.FlexGemm | None:
    if peers.NAME not in options.peers:
        return None
    found = peers.find()
    if found is None:
        run.fail(f"--peers {peers.NAME}: cannot be imported")
    return found


def _ceilings(run: Run, timer: Timer) -> ceilings.Ceilings:
    """Those of the file, measured once: all floors in it refer to them."""
    if run.pending(ceilings.ROWS):
        for row in ceilings.measure(timer):
            run.record(row)
    return ceilings.of_rows(run.results.rows)


STEPS = {
    "tests": run_tests,
    "conv": run_conv,
    "gemm": run_gemm,
    "voxel": run_voxel,
    "overhead": run_overhead,
    "sanitize": run_sanitize,
}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step", choices=["all", *STEPS], default="all")
    parser.add_argument(
        "--scene", type=scenes.parse, action="append", default=[], metavar="NAME=FILE.npz",
        help="a cloud to convolve as well: arrays coords (N, 4) and shape (B, W, H, D)",
    )  # fmt: skip
    parser.add_argument(
        "--peers", choices=["torch", peers.NAME], nargs="+", default=[],
        help="time in the same run: torch's own products; FlexGEMM's operations, where it can be imported",
    )  # fmt: skip
    parser.add_argument("--anchors", type=Path, help="a file of peers' times, for the summary at the end")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY, help="folder of the results file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    results.refuse_foreign_build()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: `python -m benchmarks` measures what a CPU can")
    machine = results.gpu_machine()
    file = results.Results(results.gpu_file(machine["gpu"], options.out), machine)
    print(f"{file.path}: {len(file.rows)} rows so far, {machine}", flush=True)
    failures: list[str] = []
    unfinished = []
    for step in STEPS if options.step == "all" else [options.step]:
        print(f"\n== {step} ==", flush=True)
        run = Run(file, time.monotonic() + STEP_SECONDS)
        try:
            STEPS[step](run, options)
        except OutOfTime:
            unfinished.append(step)
        file.header.setdefault("cards", {})[step] = results.gpu_uuid()
        file.header.setdefault("failures", {})[step] = run.failures
        file.save()
        failures += run.failures
    print()
    for line in results.summary(file.rows, json.loads(options.anchors.read_text())["rows"] if options.anchors else []):
        print(line)
    for failure in failures:
        print(f"FAILED {failure}")
    for step in unfinished:
        print(f"UNFINISHED {step}: its time is over; run it again to go on")
    return 1 if failures else 3 if unfinished else 0


if __name__ == "__main__":
    sys.exit(main())
