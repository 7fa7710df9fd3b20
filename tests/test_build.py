"""The build: what setup.py hashes and rebuilds, and what the built module needs and costs to import."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from calls import run_python

import flexgemm
from flexgemm import _C

ROOT = Path(__file__).resolve().parent.parent

HASH_PIPELINE = r"""
find csrc kernels flexgemm benchmarks setup.py pyproject.toml -type f \( -name '*.c' -o -name '*.h' \
    -o -name '*.cu' -o -name '*.cuh' -o -name '*.py' -o -name '*.toml' \) \
    | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-64"""


@pytest.fixture(scope="module")
def build():
    """setup.py as a module."""
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("flexgemm_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def printed(code: str, **environment: str) -> str:
    """By a fresh interpreter."""
    done = run_python(["-c", code], **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- source hash ----


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="needs find, xargs and sha256sum")
def test_source_hash_is_that_of_the_documented_pipeline(build):
    printed = subprocess.run(HASH_PIPELINE, shell=True, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert build.source_sha256() == printed.strip()


def test_source_hash_sees_content_and_names_of_sources_only(build, tmp_path):
    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    for name in ("setup.py", "pyproject.toml", "csrc/a.c", "kernels/cuda/b.cu"):
        write(name, name)
    first = build.source_sha256(tmp_path)
    write("csrc/notes.txt", "not a source")
    write("tests/test_a.py", "not hashed")
    assert build.source_sha256(tmp_path) == first
    write("csrc/a.c", "changed")
    second = build.source_sha256(tmp_path)
    (tmp_path / "csrc/a.c").rename(tmp_path / "csrc/c.c")
    third = build.source_sha256(tmp_path)
    assert len({first, second, third}) == 3


# ---- what is rebuilt ----


@pytest.fixture
def step(build, tmp_path):
    """Makes the compilation of a file with one header; `step(*flags)`."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler")
    (tmp_path / "a.h").write_text("#define A 1\n")
    (tmp_path / "a.c").write_text('#include "a.h"\nint a = A;\n')
    past = 1_000_000_000
    for name in ("a.h", "a.c"):
        os.utime(tmp_path / name, (past, past))

    def make(*flags):
        output = tmp_path / "a.o"
        command = [*build.find_cc(), *flags, "-MD", "-MF", str(output.with_suffix(".d")), "-c", str(tmp_path / "a.c")]
        return build.Step(output, [*command, "-o", str(output)], "release 1")

    return make


def test_an_object_is_stale_until_it_is_built(step):
    assert not step().is_fresh()
    step().run()
    assert step().is_fresh()


def test_an_object_is_stale_when_a_header_changes_but_not_when_it_is_touched(step, tmp_path):
    step().run()
    os.utime(tmp_path / "a.h")
    assert step().is_fresh()
    (tmp_path / "a.h").write_text("#define A 2\n")
    assert not step().is_fresh()


def test_an_object_is_stale_when_flags_change_or_a_header_is_gone(step, tmp_path):
    step().run()
    assert not step("-DB").is_fresh()
    (tmp_path / "a.h").unlink()
    assert not step().is_fresh()


def test_a_failed_compilation_leaves_a_stale_object(build, step, tmp_path):
    step().run()
    (tmp_path / "a.h").write_text("#error broken\n")
    with pytest.raises(subprocess.CalledProcessError) as failure:
        step().run()
    assert "broken" in failure.value.output
    assert not step().is_fresh()


def test_a_remark_can_count_as_an_error(build, step):
    remark = "WAITS_FOR_PRODUCTS"
    noisy = step(f'-DA_NOTE="{remark}"', "-v")
    noisy.run()
    assert noisy.is_fresh()
    refusing = build.Step(noisy.output, noisy.command, noisy.key_extra, refused=remark)
    with pytest.raises(subprocess.CalledProcessError) as failure:
        refusing.run()
    assert remark in failure.value.output
    assert not refusing.is_fresh()


# ---- architectures ----


def test_every_cuda_source_has_its_architectures(build, monkeypatch):
    monkeypatch.delenv("FLEXGEMM_CUDA_ARCHS", raising=False)
    assert build.cuda_archs_of("kernels/cuda/conv_gather.cu") == ("sm_80", "sm_90", "compute_90")
    assert "sm_89" in build.cuda_archs_of("kernels/cuda/gemm_portable.cu")
    assert build.cuda_archs_of("kernels/cuda/gemm_sm90.cu") == ("sm_90a",)


@pytest.mark.parametrize(
    ("wanted", "portable", "products", "hopper"),
    [
        ("sm90", ("sm_90",), ("sm_90",), ("sm_90a",)),
        ("sm_80,compute_90", ("sm_80", "compute_90"), ("sm_80", "sm_89", "compute_90"), ("sm_90a",)),
        ("sm89", ("sm_80",), ("sm_89",), ("sm_90a",)),
    ],
)
def test_cuda_archs_narrow_the_build(build, monkeypatch, wanted, portable, products, hopper):
    """Cards of 8.9 run code for 8.0, but not the FP8 products in it."""
    monkeypatch.setenv("FLEXGEMM_CUDA_ARCHS", wanted)
    assert build.cuda_archs_of("kernels/cuda/conv_gather.cu") == portable
    assert build.cuda_archs_of("kernels/cuda/gemm_portable.cu") == products
    assert build.cuda_archs_of("kernels/cuda/conv_sm90.cu") == hopper


def test_an_unknown_architecture_is_refused_with_the_known_ones(build, monkeypatch):
    monkeypatch.setenv("FLEXGEMM_CUDA_ARCHS", "sm75")
    with pytest.raises(SystemExit, match=r"FLEXGEMM_CUDA_ARCHS: expected some of .*sm_80.*, got sm75"):
        build.cuda_archs_of("kernels/cuda/conv_gather.cu")


def test_cuda_0_finds_no_toolkit(build, monkeypatch):
    monkeypatch.setenv("FLEXGEMM_CUDA", "0")
    assert build.find_toolkit() is None


# ---- make module ----


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize(
    ("sha", "cuda", "toolkit", "environment", "code", "said"),
    [
        ("this", "13.0", None, {}, 0, ""),
        ("other", "13.0", "nvcc", {}, 0, "BUILDS"),
        ("other", None, None, {}, 0, "BUILDS"),
        ("other", "13.0", None, {}, 2, "no nvcc"),
        ("other", "13.0", None, {"FLEXGEMM_CUDA": "0"}, 0, "BUILDS"),
        (None, None, None, {}, 0, "BUILDS"),
    ],
)
def test_a_carried_gpu_module_is_not_replaced_by_a_cpu_one(tmp_path, sha, cuda, toolkit, environment, code, said):
    """A tree in which the module's and the build's answers are given."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    text = f"def source_sha256(): return 'this'\ndef find_toolkit(): return {toolkit!r}\n"
    (tmp_path / "setup.py").write_text(text + "if __name__ == '__main__': print('BUILDS')\n")
    (tmp_path / "flexgemm").mkdir()
    text = f"def build_info(): return {{'source_sha256': {sha!r}, 'cuda': {cuda!r}}}\n"
    (tmp_path / "flexgemm" / "__init__.py").write_text(text if sha else "raise ImportError\n")
    env = {k: v for k, v in os.environ.items() if k not in ("FLEXGEMM_CUDA", "PYTHONPATH")} | environment
    command = ["make", "-s", "module", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done
    assert "BUILDS" not in done.stdout or said == "BUILDS"


# ---- the built module ----


def test_build_info_says_what_was_built():
    info = flexgemm.build_info()
    assert info["version"] == flexgemm.__version__
    assert re.fullmatch(r"[0-9a-f]{64}", info["source_sha256"])
    assert (info["cuda"] is None) == (info["cuda_archs"] == [])


def test_sources_that_were_not_built_say_so(tmp_path):
    """Where Python finds them before the package that is installed: in a checkout."""
    package = tmp_path / "flexgemm"
    package.mkdir()
    shutil.copy(flexgemm.__file__, package)
    run = subprocess.run([sys.executable, "-c", "import flexgemm"], cwd=tmp_path, capture_output=True, text=True)
    assert f"ImportError: flexgemm: {package} holds sources without a built extension: " in run.stderr


def test_import_needs_no_torch():
    loaded = printed("import sys, flexgemm; print(*sys.modules)").split()
    assert "numpy" in loaded
    assert not {"torch", "cupy", "jax", "matplotlib", "tqdm"} & set(loaded)


def test_an_older_torch_is_named():
    pytest.importorskip("torch", reason="torch not installed")
    older = "import torch; torch.__version__ = type(torch.__version__)('2.6.0'); import flexgemm"
    tried = f"{older}\ntry: import flexgemm.torch\nexcept ImportError as error: print(error)"
    assert printed(tried) == "flexgemm.torch needs torch 2.7 or later, got 2.6.0\n"


def test_import_takes_under_50_ms_besides_numpy(tmp_path):
    """Of compiled bytecode, as an installer leaves it: the first of these processes writes it. Where NumPy's own import
    takes longer than 100 ms, the machine is slow or busy: then half of that."""
    clock = "t.append(time.perf_counter())"
    imports = f"import time; t = []; {clock}; import numpy; {clock}; import flexgemm; {clock}"
    code = f"{imports}; print(t[1] - t[0], t[2] - t[1])"
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    times = [[float(seconds) for seconds in printed(code, **bytecode).split()] for _ in range(8)]
    of_numpy, of_ours = (min(column) for column in zip(*times, strict=True))
    assert list(tmp_path.rglob("flexgemm/__init__.*.pyc"))
    assert of_ours < max(0.05, of_numpy / 2)


@pytest.fixture(scope="module")
def readelf():
    if not shutil.which("readelf"):
        pytest.skip("needs readelf")
    return lambda *flags: (
        subprocess.run(["readelf", "-W", *flags, _C.__file__], capture_output=True, text=True, check=True).stdout
    )


def test_the_module_exports_its_init_function_alone(readelf):
    rows = [line.split() for line in readelf("--dyn-syms").splitlines() if re.match(r"\s*\d+:", line)]
    defined = [row[7] for row in rows if len(row) > 7 and row[6] != "UND" and row[4] != "LOCAL"]
    assert defined == ["PyInit__C"]


def test_what_the_module_leaves_undefined_is_python_or_a_versioned_system_symbol(readelf):
    rows = [line.split() for line in readelf("--dyn-syms").splitlines() if re.match(r"\s*\d+:", line)]
    undefined = [row[7] for row in rows if len(row) > 7 and row[6] == "UND" and row[4] == "GLOBAL"]
    assert [name for name in undefined if "@" not in name and not re.match("_?Py", name)] == []


def test_the_module_needs_no_cuda_or_cxx_library(readelf):
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("-d"))
    assert needed
    assert [name for name in needed if re.match(r"lib(cuda|cudart|stdc\+\+|gcc_s|python)", name)] == []


def test_a_first_call_loads_next_to_nothing():
    """It is waited for: NumPy's masked arrays alone, which it imports when they are first asked for, take 40 ms."""
    pytest.importorskip("torch", reason="torch not installed")
    code = """
import sys, torch, flexgemm.torch.nn as fnn
assert "triton" not in sys.modules
coords = torch.tensor([[0, 0, y, 0] for y in range(5)], dtype=torch.int32)
x, layer = fnn.SparseTensor(torch.ones(5, 8), coords, (1, 1, 5, 1)), fnn.SubMConv3d(8, 8)
before = set(sys.modules)
layer(x).feats.sum().backward()
print(*(name.partition(".")[0] for name in set(sys.modules) - before if not name.startswith(("flexgemm", "torch"))))
assert "numpy.ma" not in sys.modules
"""
    assert printed(code).split() == []
