"""compute-sanitizer over the small cases of tests/sanitize_cases.py: `make gpu-sanitize`.

The results file gets, per tool, "clean", "errors" or "timed out". A card or driver that the sanitizer refuses is
"unavailable" with its own words, and counts as a failure: nothing was shown.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from benchmarks.results import ROOT
from benchmarks.run import Run

# Each with its options. Outputs may have rows that nothing is written to, which the cases copy and do not look at: of
# what was never written initcheck is to report what kernels read.
TOOLS: dict[str, tuple[str, ...]] = {
    "memcheck": (),
    "racecheck": (),
    "initcheck": ("--check-api-memory-access", "no"),
    "synccheck": (),
}
CASES = ROOT / "tests" / "sanitize_cases.py"
SHOWN = 4000  # characters of a failing tool's output


def find_sanitizer() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    extra = [str(Path(home, folder)) for home in homes if home for folder in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(extra))


def verdict(returncode: int, output: str) -> str:
    if "Device not supported" in output or "No attachable process" in output:
        return "unavailable"
    return "clean" if returncode == 0 and "SUMMARY: 0 " in output else "errors"


def sanitize(sanitizer: str, tool: str, timeout: float) -> tuple[str, str]:
    """Verdict and output of one tool. The cases import the package of this tree."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sanitizer, "--tool", tool, *TOOLS[tool], "--error-exitcode", "1", sys.executable, str(CASES)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=max(timeout, 0.0),
    )
    return verdict(done.returncode, done.stdout), done.stdout


def run(run: Run) -> None:
    sanitizer = find_sanitizer()
    if sanitizer is None:
        run.fail("sanitize: compute-sanitizer is neither on PATH nor under CUDA_HOME or /usr/local/cuda")
        return
    found: dict[str, str] = run.results.header.setdefault("sanitize", {})
    todo = [tool for tool in TOOLS if found.get(tool) != "clean"] or list(TOOLS)
    with ThreadPoolExecutor(len(todo)) as pool:  # side by side: each leaves most of the card idle
        started = {pool.submit(sanitize, sanitizer, tool, run.seconds_left()): tool for tool in todo}
        for number, done in enumerate(as_completed(started), 1):
            tool = started[done]
            try:
                found[tool], output = done.result()
            except subprocess.TimeoutExpired:
                found[tool], output = "timed out", ""
            run.results.save()
            print(f"[{number}/{len(todo)}] {tool}: {found[tool]}", flush=True)
            if found[tool] != "clean":
                print(output[-SHOWN:], flush=True)
                run.fail(f"sanitize {tool}: {found[tool]}")
