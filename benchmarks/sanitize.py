"""compute-sanitizer over the small cases of tests/sanitize_cases.py: `make gpu-sanitize`.

The results file gets, per tool, "clean", "errors" or "timed out". A card or driver that the sanitizer refuses is
"unavailable" with its own words, and counts as a failure: nothing was shown.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

from benchmarks.results import ROOT
from benchmarks.run import Run

# Processes that share the cases of each tool, 16 in all. Racecheck takes ten times as long as the others.
PARTS = {"memcheck": 3, "initcheck": 2, "synccheck": 2, "racecheck": 9}
# Outputs may have rows that nothing is written to, which the cases copy and do not look at: of what was never written
# initcheck is to report what kernels read.
OPTIONS = {"initcheck": ("--check-api-memory-access", "no")}
VERDICTS = ("clean", "timed out", "unavailable", "errors")  # the worst of its shares is a tool's
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
    share = "--part", str(part), str(PARTS[tool])
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    how = "--tool", tool, *OPTIONS.get(tool, ()), "--error-exitcode", "1"
    try:
        done = subprocess.run(
            [sanitizer, *how, sys.executable, str(CASES), *share],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=max(timeout, 0.0),
        )
    except subprocess.TimeoutExpired as error:
        return "timed out", (error.stdout or b"").decode(errors="replace")
    output = done.stdout.decode(errors="replace")
    return verdict(done.returncode, output), output


def run(run: Run) -> None:
    sanitizer = find_sanitizer()
    if sanitizer is None:
        run.fail("sanitize: compute-sanitizer is neither on PATH nor under CUDA_HOME or /usr/local/cuda")
        return
    found: dict[str, str] = run.results.header.setdefault("sanitize", {})
    todo = [tool for tool in PARTS if found.get(tool) != "clean"] or list(PARTS)
    with ThreadPoolExecutor(sum(PARTS.values())) as pool:  # side by side: each leaves most of the card idle
        left = repeat(run.seconds_left())
        shares = {tool: pool.map(sanitize, repeat(sanitizer), repeat(tool), range(PARTS[tool]), left) for tool in todo}
        for tool, outcomes in shares.items():
            verdicts = []
            for part, (said, output) in enumerate(outcomes, 1):
                verdicts.append(said)
                print(f"{tool}, part {part} of {PARTS[tool]}: {said}", flush=True)
                if said != "clean":
                    print(output[-SHOWN:], flush=True)
            found[tool] = max(verdicts, key=VERDICTS.index)
            run.results.save()
            if found[tool] != "clean":
                run.fail(f"sanitize {tool}: {found[tool]}")
