"""python -m flexgemm."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import flexgemm
from flexgemm.__main__ import main


def test_info_says_what_there_is(capsys):
    assert main(["info"]) == 0
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    build = flexgemm.build_info()
    assert printed["flexgemm"] == flexgemm.__version__
    assert printed["source"] == build["source_sha256"]
    assert ("CPU only" in printed["build"]) == (build["cuda"] is None)
    assert printed["numpy"] == np.__version__
    assert "threads" in printed["cpu"]
    for index in range(flexgemm.device_count()):
        assert flexgemm.device_info("cuda", index)["name"] in printed[f"cuda:{index}"]
    assert {"torch", "cupy", "jax", "ml_dtypes"} <= set(printed)


def test_info_imports_no_array_library():
    code = (
        "import sys; from flexgemm.__main__ import main; main(['info']); "
        "assert not {'torch', 'cupy', 'jax', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_it_runs_as_a_module():
    run = subprocess.run([sys.executable, "-m", "flexgemm", "info"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("flexgemm")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required"),
        (["train"], "invalid choice"),
        (["info", "--verbose"], "unrecognized arguments"),
        (["demo", "--steps", "0"], "--steps: expected a number of at least 1"),
        (["demo", "--steps", "many"], "--steps: expected a number of at least 1"),
        (["demo", "--device", "tpu"], "--device: device: expected 'cpu', 'cuda'"),
        (["demo", "--device", "cuda:99"], "'cuda:99' asked for"),
        (["demo", "--steps", "\N{SUPERSCRIPT TWO}"], "--steps: expected a number of at least 1"),
        (["demo", "--out", "picture.txt"], "--out: expected a .png"),
        (["demo", "--out", "no/such/folder/picture.png"], "--out: expected a .png"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_is_no_picture(tmp_path, capsys):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(SystemExit):
        main(["demo", "--out", str(tmp_path / "folder.png")])
    assert "--out: expected a .png" in capsys.readouterr().err


def test_a_cloud_that_cannot_be_read_is_an_error_and_no_traceback(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib not installed")
    assert main(["demo", "--points", str(tmp_path / "none.npy")]) == 2
    assert "--points: " in (printed := capsys.readouterr().err)
    assert "none.npy: No such file or directory" in printed


def test_bench_runs_the_benchmarks_of_the_checkout_with_its_arguments(monkeypatch):
    started = []
    monkeypatch.setattr("subprocess.call", lambda command, cwd: started.append((command, cwd)) or 3)
    assert main(["bench", "--step", "gemm"]) == 3
    ((command, folder),) = started
    assert command[1:] == ["-m", "benchmarks", "--step", "gemm"]
    assert (folder / "benchmarks" / "__main__.py").exists()


def test_an_installed_package_has_no_benchmarks(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(flexgemm, "__file__", str(tmp_path / "flexgemm" / "__init__.py"))
    assert main(["bench"]) == 2
    assert "part of the source checkout" in capsys.readouterr().err
