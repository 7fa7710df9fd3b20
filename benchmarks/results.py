"""The results file: one JSON object per machine, its header, and rows that are unique in what they measured.

A file belongs to one state of the sources (`source_sha256`) on one machine: opening it under another starts afresh.
It is written whole and renamed into place after every row, so that an interrupted run loses nothing.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import flexgemm
from flexgemm import _C
from setup import source_sha256  # the build's own, so that a binary and a file of figures agree

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = ROOT / "benchmarks" / "results"

Row = dict[str, Any]

# What makes two rows the same measurement. The rest of a row (ms, pairs, floor_ms, ...) follows from the run.
IDENTITY = (
    "suite", "op", "scene", "dtype", "channels", "m", "n", "k", "groups", "expected_m",
    "precision", "granularity", "scales", "ending", "columns", "family", "peer",
)  # fmt: skip


HOPPER_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "tf32", "ieee")


def kernel_family(dtype: str = "") -> str:
    """The architecture family whose kernels a row measured: "sm90" where Hopper has kernels of its own for products of
    this dtype, or of float32 in this precision, and FLEXGEMM_ARCH does not forbid them. Without a dtype: that of maps,
    orders and casts."""
    hopper = _C.device_count() > 0 and _C.device_info("cuda")["compute_capability"] == 90
    return "sm90" if hopper and dtype in HOPPER_DTYPES and not os.environ.get("FLEXGEMM_ARCH") else "portable"


def identity(row: Row) -> tuple[Any, ...]:
    """n counts among the sizes of a product; elsewhere it is how many voxels or points there were, a figure."""
    return tuple(None if field == "n" and "k" not in row else row.get(field) for field in IDENTITY)


def significant(value: float) -> float:
    """Five significant digits: below any run-to-run spread."""
    return float(f"{value:.5g}")


class Results:
    """Rows and header of one file. `machine` names what figures depend on besides the sources (gpu, driver, ...)."""

    def __init__(self, path: Path, machine: dict[str, Any]) -> None:
        self.path = path
        self.header: dict[str, Any] = {
            **machine, "date": datetime.date.today().isoformat(), "source_sha256": source_sha256(),
        }  # fmt: skip
        self._rows: dict[tuple[Any, ...], Row] = {}
        if path.exists():
            self._merge(json.loads(path.read_text()), (*machine, "source_sha256"))

    def _merge(self, old: dict[str, Any], must_agree: Iterable[str]) -> None:
        changed = [field for field in must_agree if old.get(field) != self.header[field]]
        if changed:
            print(f"{self.path}: starts afresh, {', '.join(changed)} changed", flush=True)
            return
        self._rows = {identity(row): row for row in old.pop("rows")}
        self.header = {**old, **self.header}

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def __contains__(self, row: Row) -> bool:
        return identity(row) in self._rows

    def add(self, row: Row) -> None:
        """Adds the row, in the place of an earlier one of the same identity, and writes the file."""
        self._rows[identity(row)] = row
        self.save()

    def save(self) -> None:
        """One row per line, so that a change of figures reads well in a diff."""
        fields = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in self.header.items()]
        rows = ",\n".join(json.dumps(row) for row in self.rows)
        text = "{\n" + ",\n".join([*fields, '"rows": [\n' + rows + "\n]"]) + "\n}\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(text)
        os.replace(partial, self.path)


def refuse_foreign_build() -> None:
    """Figures must belong to the sources beside them."""
    built, tree = flexgemm.build_info()["source_sha256"], source_sha256()
    if built != tree:
        sys.exit(
            f"flexgemm._C was built from other sources (source_sha256 {built[:12]}, the tree is {tree[:12]}):\n"
            f"rebuild it: {sys.executable} setup.py build_ext --inplace"
        )


def gpu_file(gpu: str, directory: Path = DIRECTORY) -> Path:
    """'NVIDIA H200' -> h200.json."""
    name = re.sub(r"^(nvidia\s+)?(geforce\s+)?", "", gpu.lower())
    return directory / (re.sub(r"[^a-z0-9]+", "-", name).strip("-") + ".json")


def gpu_machine() -> dict[str, Any]:
    """Header fields of the current CUDA device."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver_version(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__.partition("+")[0],
    }


def gpu_uuid() -> str:
    """Which of all cards of its kind the current CUDA device is."""
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        found = re.search(r"\d+\.\d+(\.\d+)?", _read("/proc/driver/nvidia/version"))
        return found.group() if found else "unknown"


def cpu_machine() -> dict[str, Any]:
    """Header fields of a CPU run."""
    import numpy as np

    model = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return {"cpu": model.group(1) if model else "unknown", "numpy": np.__version__}


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


# ---- beside peers ----

SUITES = ("conv", "gemm", "experts", "endings", "columns", "any_rows", "voxel")


def case_key(row: Row) -> tuple[Any, ...]:
    """What a row of ours and a row of a peer share. A ragged FP8 product is a contiguous one without its padding."""
    if row["suite"] in ("conv", "voxel"):
        return (row["suite"], row["op"], row["scene"], row.get("dtype"), row.get("channels"))
    own = {"endings": ("scales", "ending"), "columns": ("columns",)}.get(row["suite"], ())
    ending = tuple(row.get(field) for field in own)
    if row.get("groups"):
        ragged_fp8 = row["op"] == "m_grouped_ragged" and row["dtype"].startswith("float8")
        op = "m_grouped_contiguous" if ragged_fp8 else row["op"]
        return (row["suite"], op, row["dtype"], row["groups"], row["expected_m"], row["n"], row["k"], *ending)
    return (row["suite"], row["op"], row["dtype"], row["m"], row["n"], row["k"], *ending)


def is_alike(row: Row) -> bool:
    """Whether peers of its case compute the same: they round float32 factors to TF32, and have one scale per tensor but
    for endings."""
    return row.get("precision") != "ieee" and (row["suite"] == "endings" or not row.get("scales"))


def best_peers(rows: Iterable[Row]) -> dict[tuple[Any, ...], Row]:
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["suite"] in SUITES and row.get("peer"):
            key = case_key(row)
            if key not in best or row["ms"] < best[key]["ms"]:
                best[key] = row
    return best


def times_faster(row: Row, peer: Row) -> float:
    """Above 1 where ours is faster. Group sizes are drawn, so grouped products compare by the work done in the time."""
    work = row["m"] / peer["m"] if row.get("groups") else 1.0
    return float(work * peer["ms"] / row["ms"])


def summary(rows: Iterable[Row], anchors: Iterable[Row]) -> list[str]:
    """One line per (suite, op, dtype): cases, share of the floor, and speed beside the fastest peer of each case."""
    rows = list(rows)
    peers = best_peers([*anchors, *rows])
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["suite"] in SUITES and not row.get("peer"):
            name = " ".join(row[field] for field in ("suite", "op", "dtype", "precision", "scales") if field in row)
            groups.setdefault(name, []).append(row)
    lines = []
    for name, members in groups.items():
        line = (
            f"{name:44} cases {len(members):3}, of floor {geometric_mean(r['floor_ms'] / r['ms'] for r in members):.1%}"
        )
        beside = [(r, peers[case_key(r)]) for r in members if is_alike(r) and case_key(r) in peers]
        if beside:
            ratios = [times_faster(row, peer) for row, peer in beside]
            line += f", beside the fastest peer x{geometric_mean(ratios):.2f} (lowest x{min(ratios):.2f})"
        lines.append(line)
    return lines


def describe(row: Row) -> str:
    """'conv fwd sphere64 float16 C=1024': the identity of a row in words."""
    words = [row["suite"], row["op"]]
    words += [str(row[f]) for f in ("scene", "dtype", "precision", "granularity", "scales", "columns") if row.get(f)]
    if "channels" in row:
        words.append(f"C={row['channels']}")
    if "k" in row:
        words.append("x".join(str(row[f]) for f in ("m", "n", "k") if f in row))
    if row.get("groups"):
        words.append(f"G={row['groups']}")
    if row.get("peer"):
        words.append(f"[{row['peer']}]")
    return " ".join(words)


def figures(row: Row) -> str:
    """'1.651 ms, floor 0.56 ms (34 %)': what a row measured, in words."""
    if "us" in row:
        return f"{row['us']:.2f} us"
    if "peak_bytes" in row:
        share = row["peak_bytes"] / row["needed_bytes"]
        return f"peak {row['peak_bytes'] / 2**20:.1f} MiB, {share:.2f} times inputs, outputs and map"
    if "GBs" in row:
        return f"{row['GBs']:.0f} GB/s"
    if "ms" not in row:
        return f"{row['tflops']:.1f} TFLOP/s"
    parts = [f"{row['ms']:.4g} ms"]
    if row.get("floor_ms"):
        parts.append(f"floor {row['floor_ms']:.3g} ms ({row['floor_ms'] / row['ms']:.0%})")
    if row.get("copy_ms"):
        parts.append(f"a copy of as many bytes {row['copy_ms']:.3g} ms ({row['copy_ms'] / row['ms']:.0%})")
    if "tflops" in row:
        parts.append(f"{row['tflops']:.1f} TFLOP/s")
    return ", ".join(parts)
