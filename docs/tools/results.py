"""The page of measured results, made of benchmarks/results/*.json while the site is built: a hook of MkDocs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from setup import source_sha256  # noqa: E402


def on_files(files: Files, *, config: Any) -> Files:
    measured = {path: json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks/results").glob("*.json"))}
    pictures = {path: draw(path, ROOT / "build/pictures") for path, results in measured.items() if "gpu" in results}
    for picture in sum(pictures.values(), []):
        files.append(File.generated(config, f"pictures/{picture.name}", abs_src_path=str(picture)))
    sections = [section(results, pictures.get(path, [])) for path, results in measured.items()]
    files.append(
        File.generated(config, "results.md", content="\n\n".join([introduction(measured.values()), *sections]))
    )
    return files


def draw(path: Path, folder: Path) -> list[Path]:
    from benchmarks import plot  # which needs the extension

    folder.mkdir(parents=True, exist_ok=True)
    return plot.draw(path, [], folder)


def introduction(measured: Any) -> str:
    lines = [
        "# Results",
        "",
        "What the files in `benchmarks/results` hold; [Performance](performance.md) says how it is",
    ]
    lines += ["measured, and what each column is."]
    if not any("gpu" in results and results["source_sha256"] == source_sha256() for results in measured):
        lines += ["", "**No figures of a GPU belong to these sources.**"]
    return "\n".join(lines)


def section(results: dict[str, Any], pictures: list[Path]) -> str:
    rows = results["rows"]
    same = results["source_sha256"] == source_sha256()
    head = [f"{name} {results[name]}" for name in ("driver", "cuda", "torch", "numpy") if name in results]
    lines = [f"## {results.get('gpu') or results['cpu']}", "", f"{results['date']}, {', '.join(head)}; measured from "]
    lines[-1] += "these sources." if same else f"other sources than these, of hash {results['source_sha256'][:12]}."
    lines += [f"\n![{picture.stem}](pictures/{picture.name})" for picture in pictures]
    for suite in dict.fromkeys(row["suite"] for row in rows):
        lines += ["", f"### {suite}", "", *table([row for row in rows if row["suite"] == suite])]
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row if name != "suite"))
    lines = [columns, ["---"] * len(columns)]
    lines += [[str(row.get(name, "")) for name in columns] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]
