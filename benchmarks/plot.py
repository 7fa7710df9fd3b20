"""Pictures of a results file: ours, the fastest peer and the floor of every case, as PNG beside the file.

Usage: python -m benchmarks.plot [benchmarks/results/h200.json] [--anchors peers.json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import results

PANELS = {
    "conv": ("map_train", "map_infer", "map_frozen", "fwd", "bwd", "train_step", "cold_fwd", "cold_train"),
    "gemm": ("dense", "m_grouped_ragged"),
}


def draw_panel(axes: Any, rows: list[results.Row], peers: dict[tuple[Any, ...], results.Row], title: str) -> None:
    """One line per case, time to the right on a log scale."""
    for y, row in enumerate(rows):
        axes.plot([row["floor_ms"], row["ms"]], [y, y], color="0.85", linewidth=4, zorder=1, solid_capstyle="round")
    places = range(len(rows))
    axes.scatter([row["ms"] for row in rows], places, s=28, color="tab:blue", label="flexgemm", zorder=3)
    axes.scatter([row["floor_ms"] for row in rows], places, s=40, marker="|", color="black", label="floor", zorder=2)
    alike = [(y, results.case_key(row)) for y, row in enumerate(rows) if results.is_alike(row)]
    known = [(y, peers[key]) for y, key in alike if key in peers]
    if known:
        times = [peer["ms"] for _, peer in known]
        axes.scatter(times, [y for y, _ in known], s=28, marker="D", color="tab:orange", label="fastest peer", zorder=3)
    labels = [results.describe(row).split(" ", 2)[2] for row in rows]
    axes.set_yticks(places, labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("ms")
    axes.set_title(title)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=7)


def draw(file: Path, anchors: list[results.Row], folder: Path) -> list[Path]:
    measured = json.loads(file.read_text())
    peers = results.best_peers(anchors + measured["rows"])
    pictures = []
    for suite, ops in PANELS.items():
        rows = [row for row in measured["rows"] if row["suite"] == suite]
        ours = [row for row in rows if not row.get("peer") and row.get("precision") != "ieee"]
        panels = [(op, [r for r in ours if r["op"] == op]) for op in ops]
        panels = [(op, rows) for op, rows in panels if rows]
        if not panels:
            continue
        columns = min(2, len(panels))
        lines = -(-len(panels) // columns)
        height = max(2.5, 0.25 * max(len(rows) for _, rows in panels) + 1)
        figure, grid = plt.subplots(lines, columns, figsize=(7 * columns, height * lines), squeeze=False)
        for axes, (op, rows) in zip(grid.flat, panels, strict=False):
            draw_panel(axes, rows, peers, f"{suite} {op}")
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_visible(False)
        figure.suptitle(f"{measured['gpu']}, {measured['date']}, sources {measured['source_sha256'][:12]}")
        figure.tight_layout()
        pictures.append(folder / f"{file.stem}-{suite}.png")
        figure.savefig(pictures[-1], dpi=120)
        plt.close(figure)
    return pictures


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", default=results.DIRECTORY / "h200.json")
    parser.add_argument("--anchors", type=Path, help="a file of peers' times")
    options = parser.parse_args(argv)
    anchors = json.loads(options.anchors.read_text())["rows"] if options.anchors else []
    for picture in draw(options.file, anchors, options.file.parent):
        print(picture)


if __name__ == "__main__":
    main()
