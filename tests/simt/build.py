"""Builds flexgemm with its CUDA kernels for the emulator: build/simt/flexgemm, a package like the one of the root.

The build of setup.py with g++ in nvcc's place: the same steps, skipped when nothing changed that they read.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import sysconfig  # noqa: E402

import numpy  # noqa: E402
from translate import translate_tree  # noqa: E402

import setup  # noqa: E402

HERE = Path("tests/simt")  # like all names below relative to the root
TARGET = Path("build/simt")
CXX = os.environ.get("CXX", "g++")
# -g1: error messages name lines of kernels/cuda. Contraction is left to the kernels' own fma calls.
CXX_FLAGS = ["-std=c++17", "-g1", "-march=native", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
KERNEL_FLAGS = [
    "-O1",  # with more, the compiler takes longer than the tests gain
    "-ffp-contract=off",
    "-fsanitize=alignment",  # whose findings come to report.cpp
    "-Wno-unknown-pragmas",
    "-Wno-psabi",
    "-Wno-ignored-attributes",
    "-Wno-unused-variable",  # this and what follows: nvcc's front end says nothing either
    "-Wno-missing-field-initializers",
    "-Wno-class-memaccess",
]


def cuda_headers() -> Path:
    toolkit = setup.find_toolkit()
    if toolkit is None:
        sys.exit("simt: the headers of a CUDA toolkit are needed: set CUDA_HOME")
    for folder in (toolkit.lib.parent / "include", *toolkit.lib.parent.parent.parent.glob("include")):
        if (folder / "cuda_runtime.h").is_file():
            return folder
    sys.exit(f"simt: no cuda_runtime.h near {toolkit.lib}")


def compile_steps() -> list[setup.Step]:
    """One per source, the slow ones first."""
    headers = [f"-I{HERE}", f"-I{HERE}/include", f"-isystem{cuda_headers()}"]
    python = [*setup.PYTHON_DEFINES, "-Ikernels", f"-isystem{sysconfig.get_path('include')}"]
    python += [f"-isystem{numpy.get_include()}", "-DFLEXGEMM_WITH_CUDA"]
    info = ['-DFLEXGEMM_VERSION="0"', f'-DFLEXGEMM_SOURCE_SHA256="{setup.source_sha256()}"']
    info += ['-DFLEXGEMM_CUDA_VERSION="emulated"', '-DFLEXGEMM_CUDA_ARCHS=""']

    def step(source: Path, compiler: list[str], flags: list[str]) -> setup.Step:
        name = source.relative_to(TARGET) if source.is_relative_to(TARGET) else source
        output = TARGET / "objects" / f"{name}.o"
        depfile = str(output.with_suffix(".d"))
        return setup.Step(output, [*compiler, *flags, "-MD", "-MF", depfile, "-c", str(source), "-o", str(output)], "")

    kernels = sorted(translate_tree(Path(), TARGET), key=lambda path: -path.stat().st_size)
    cxx, kernel = [CXX, *CXX_FLAGS], [*KERNEL_FLAGS, "-include", "simt.h", *headers, "-x", "c++"]
    result = [step(source, cxx, kernel) for source in kernels]
    result += [step(source, cxx, ["-O3", "-ffp-contract=fast", *headers]) for source in sorted(HERE.glob("*.cpp"))]
    for folder in ("csrc", "kernels", "kernels/cpu"):
        for source in sorted(Path(folder).glob("*.c")):
            flags = python * (folder == "csrc") + info * (str(source) == setup.BUILD_INFO_SOURCE)
            result.append(step(source, setup.find_cc(), [*setup.C_FLAGS, *flags]))
    return result


def run(stale: list[setup.Step]) -> None:
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        for step, future in [(step, pool.submit(step.run)) for step in stale]:
            print(f"{step.output}\n{future.result()}", end="", flush=True)
    except subprocess.CalledProcessError as failure:
        sys.exit(f"{failure.output}simt: build failed")
    finally:
        pool.shutdown(cancel_futures=True)


def build() -> Path:
    """The folder that belongs on PYTHONPATH."""
    os.chdir(ROOT)
    steps = compile_steps()
    run([step for step in steps if not step.is_fresh()])
    package = TARGET / "flexgemm"
    package.mkdir(parents=True, exist_ok=True)
    for path in Path("flexgemm").iterdir():
        link, source = package / path.name, ROOT / path
        if path.name.startswith(("_C.abi3", "__pycache__")) or (link.is_symlink() and link.readlink() == source):
            continue
        link.unlink(missing_ok=True)  # of another checkout whose build folder this was
        link.symlink_to(source)
    objects = {str(step.output.relative_to(TARGET / "objects")): step.output for step in steps}
    faults = "tests/simt/faults.cu.o"
    module = [output for name, output in objects.items() if name != faults]
    needed = ("tests/simt/", "kernels/cuda/tensor_map", "kernels/error")
    links = [
        link_step(package / "_C.abi3.so", module),
        link_step(TARGET / "libfaults.so", [output for name, output in objects.items() if name.startswith(needed)]),
    ]
    run([link for link in links if not link.is_fresh()])
    return ROOT / TARGET


def link_step(output: Path, objects: list[Path]) -> setup.Step:
    command = [CXX, "-shared", "-fopenmp", *map(str, objects), "-o", str(output), "-ldl", "-lpthread"]
    return setup.Step(output, command, "", inputs=objects)


if __name__ == "__main__":
    print(build())
