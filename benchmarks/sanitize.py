"""compute-sanitizer over the small cases of tests/sanitize_cases.py: `make gpu-sanitize`.

The results file gets, per tool, "clean", "errors" or "timed out". A card or driver that the sanitizer refuses is
"unavailable" with its own words, and counts as a failure: nothing was shown.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
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
PARTS = {"racecheck": 8}  # processes that share the cases of a tool: it takes ten times as long as the others
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


def sanitize(sanitizer: str, tool: str, part: int, timeout: float) -> tuple[str, str]:
    """Verdict and output of one tool on its share of the cases, which import the package of this tree."""
    share = "--part", str(part), str(PARTS.get(tool, 1))
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sanitizer, "--tool", tool, *TOOLS[tool], "--error-exitcode", "1", sys.executable, str(CASES), *share],
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
    shares = [(tool, part) for tool in todo for part in range(PARTS.get(tool, 1))]
    left = Counter(tool for tool, _ in shares)
    with ThreadPoolExecutor(len(shares)) as pool:  # side by side: each leaves most of the card idle
        started = {pool.submit(sanitize, sanitizer, *share, run.seconds_left()): share for share in shares}
        worst = dict.fromkeys(todo, "clean")
        for number, done in enumerate(as_completed(started), 1):
            tool, part = started[done]
            try:
                said, output = done.result()
            except subprocess.TimeoutExpired:
                said, output = "timed out", ""
            if said != "clean":
                worst[tool] = said
                print(output[-SHOWN:], flush=True)
            left[tool] -= 1
            if left[tool] == 0:
                found[tool] = worst[tool]
                run.results.save()
                if worst[tool] != "clean":
                    run.fail(f"sanitize {tool}: {worst[tool]}")
            print(f"[{number}/{len(shares)}] {tool}, part {part + 1}: {said}", flush=True)
