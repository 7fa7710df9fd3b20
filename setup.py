"""
Builds flexgemm/_C.abi3.so with nothing but a C compiler, NumPy's headers and, when there is one, nvcc.

setuptools has no notion of CUDA, and its compiler classes rebuild everything when anything changes, so the extension
brings its own build_ext: one command per source file, run in a thread pool, skipped when the object's key is still
the same. The key hashes the command and the content of every file that the compiler read (from its depfile), so that
neither a checkout that touches all mtimes nor a second configuration costs more than what really changed.

Environment: FLEXGEMM_CUDA=0 builds CPU-only. FLEXGEMM_CUDA_ARCHS=sm90 (or "sm80,sm90", ...) narrows the GPU
architectures of a development build. FLEXGEMM_WERROR=1 makes warnings errors. CC names the C compiler, CUDA_HOME the
toolkit.
"""

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OBJECTS = Path("build/objects")  # stable across interpreters and kinds of install; relative to ROOT

# Which file is compiled for which architectures; the first match counts. sm_80 code also runs on sm_86 and sm_89,
# which gets its own where FP8 mma.sync begins; compute_90 is PTX for whatever comes after.
CUDA_ARCHS = (
    ("*_sm90.cu", ("sm_90a",)),
    ("gemm_portable.cu", ("sm_80", "sm_89", "sm_90", "compute_90")),
    ("*.cu", ("sm_80", "sm_90", "compute_90")),
)
MINIMUM_CUDA = (12, 4)  # the first whose PTX has FP8 mma.sync for sm_89

C_FLAGS = ["-std=c11", "-O3", "-fPIC", "-fvisibility=hidden", "-fopenmp", "-Wall", "-Wextra", "-Wconversion"]
CUDA_FLAGS = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
# What ptxas says, and no more than says, of a kernel that it makes wait for each product of the tensor cores.
SERIALISED = "wgmma.mma_async instructions are serialized"
PYTHON_DEFINES = [  # of csrc/: CPython 3.11 and NumPy 2.0, or later
    "-DPy_LIMITED_API=0x030B0000",
    "-DNPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION",
    "-DNPY_TARGET_VERSION=NPY_2_0_API_VERSION",
]
BUILD_INFO_SOURCE = "csrc/module.c"  # the one file that sees version and hash, so that they rebuild one object


def source_sha256(root: Path = ROOT) -> str:
    """The hash that says which sources a binary or a results file belongs to. It is what this prints at the root:

    find csrc kernels flexgemm benchmarks setup.py pyproject.toml -type f \\( -name '*.c' -o -name '*.h' \\
        -o -name '*.cu' -o -name '*.cuh' -o -name '*.py' -o -name '*.toml' \\) \\
        | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-64
    """
    files = [root / "setup.py", root / "pyproject.toml"]
    for folder in ("csrc", "kernels", "flexgemm", "benchmarks"):
        files += (root / folder).rglob("*")
    names = sorted(
        os.fsencode(path.relative_to(root))
        for path in files
        if path.suffix in {".c", ".h", ".cu", ".cuh", ".py", ".toml"} and path.is_file() and not path.is_symlink()
    )
    listing = hashlib.sha256()
    for name in names:
        content = hashlib.sha256((root / os.fsdecode(name)).read_bytes())
        listing.update(content.hexdigest().encode() + b"  " + name + b"\n")
    return listing.hexdigest()


# ---- toolchains ----


def output_of(command: Sequence[str | Path]) -> str:
    """What a command prints; both streams, since nvcc --dryrun writes to stderr."""
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout


def find_cc() -> list[str]:
    """CC, else the first usual name. Not sysconfig's CC: that is the compiler of the machine that built Python."""
    if "CC" in os.environ:
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    sys.exit("flexgemm: no C compiler: expected cc, gcc or clang on PATH, or CC=...")


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: its compiler, the folder of libcudart_static.a, and its release."""

    nvcc: Path
    lib: Path
    version: str


def find_toolkit() -> Toolkit | None:
    """CUDA_HOME, then PATH, then the nvidia-cuda-nvcc wheel of the running interpreter.

    sysconfig names that interpreter's site-packages even inside pip's isolated build environment, whose sys.path
    hides them.
    """
    if os.environ.get("FLEXGEMM_CUDA") == "0":
        return None
    candidates = []
    if os.environ.get("CUDA_HOME"):
        candidates.append(Path(os.environ["CUDA_HOME"], "bin", "nvcc"))
    if on_path := shutil.which("nvcc"):
        candidates.append(Path(on_path))
    candidates += sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvcc"), reverse=True)
    nvcc = next((path for path in candidates if path.is_file()), None)
    if nvcc is None:
        return None

    release = re.search(r"release (\d+)\.(\d+)", output_of([nvcc, "--version"]))
    if not release or tuple(map(int, release.groups())) < MINIMUM_CUDA:
        sys.exit(
            f"flexgemm: {nvcc}: expected CUDA {MINIMUM_CUDA[0]}.{MINIMUM_CUDA[1]} or later, got "
            f"{release[0] if release else 'an unknown release'}; set CUDA_HOME, or FLEXGEMM_CUDA=0 for a CPU-only build"
        )
    # nvcc on PATH may be a link or a wrapper script: only nvcc itself knows where its toolkit lies.
    top = re.search(r"^#\$ TOP=(.*)$", output_of([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull]), re.MULTILINE)
    root = Path(top[1]).resolve() if top else nvcc.resolve().parent.parent
    libraries = [root / "lib64", root / "lib", *root.glob("targets/*/lib")]
    lib = next((path for path in libraries if (path / "libcudart_static.a").is_file()), None)
    if lib is None:
        sys.exit(f"flexgemm: {nvcc}: expected libcudart_static.a in {root}/lib64 or {root}/lib, found none")
    return Toolkit(nvcc, lib, f"{release[1]}.{release[2]}")


def cuda_archs_of(source: str) -> tuple[str, ...]:
    """The architectures of one .cu file: its row of CUDA_ARCHS, narrowed by FLEXGEMM_CUDA_ARCHS.

    "sm90" keeps sm_90 and sm_90a, and "sm80" sm_89, whose cards run what there is of sm_80: where FP8 has instructions
    of theirs, that is not for them. A file that has none of the named ones keeps its first, because the backend table
    needs its symbols.
    """
    archs = next(archs for pattern, archs in CUDA_ARCHS if fnmatch(Path(source).name, pattern))
    wanted = os.environ.get("FLEXGEMM_CUDA_ARCHS", "").replace("_", "").replace(",", " ").split()
    if not wanted:
        return archs
    plain = {arch: arch.replace("_", "") for _, row in CUDA_ARCHS for arch in row}
    if unknown := [name for name in wanted if name not in plain.values()]:
        sys.exit(f"FLEXGEMM_CUDA_ARCHS: expected some of {', '.join(sorted(set(plain)))}, got {', '.join(unknown)}")
    kept = {*wanted, "sm89"} if "sm80" in wanted else set(wanted)
    return tuple(arch for arch in archs if {plain[arch], plain[arch].rstrip("a")} & kept) or archs[:1]


def gencode(arch: str) -> str:
    """sm_90a -> machine code of that architecture; compute_90 -> PTX."""
    return f"-gencode=arch=compute_{arch.partition('_')[2]},code={arch}"


# ---- one output file ----


@dataclass(frozen=True)
class Step:
    """One command that writes one file. `key_extra` is what the command does not show, such as compiler releases."""

    output: Path
    command: list[str]
    key_extra: str
    inputs: list[Path] = field(default_factory=list)  # of a link; a compilation has a depfile
    unkeyed: list[str] = field(default_factory=list)  # flags that leave the output as it is
    refused: str | None = None  # a remark that counts as an error

    def key(self) -> str | None:
        """Hash of the command and of all that it read, or None when a file it read is gone."""
        depfile = self.output.with_suffix(".d")
        try:
            read = self.inputs or dependencies(depfile)
            contents = [f"{path} {digest(path, *fingerprint(path))}" for path in read]
        except FileNotFoundError:
            return None
        return hashlib.sha256("\n".join([*self.command, self.key_extra, *contents]).encode()).hexdigest()

    def is_fresh(self) -> bool:
        key_file = self.output.with_suffix(".key")
        return self.output.is_file() and key_file.is_file() and key_file.read_text() == self.key()

    def run(self) -> str:
        """Runs the command and returns what it printed; CalledProcessError holds the output when it fails."""
        key_file = self.output.with_suffix(".key")
        self.output.parent.mkdir(parents=True, exist_ok=True)
        key_file.unlink(missing_ok=True)
        started = time.time_ns()
        printed = output_of([*self.command, *self.unkeyed])
        if self.refused and self.refused in printed:
            raise subprocess.CalledProcessError(1, self.command, printed)
        read = self.inputs or dependencies(self.output.with_suffix(".d"))
        # A file edited while the compiler ran leaves no key: what the object was made of is unknown.
        if all(fingerprint(path)[0] < started for path in read):
            key_file.write_text(self.key() or "")
        return printed


def dependencies(depfile: Path) -> list[Path]:
    """The files named in a make rule "object: source header \\ header"."""
    _, _, names = depfile.read_text().replace("\\\n", " ").partition(": ")
    return [Path(name.replace("\\ ", " ")) for name in re.findall(r"(?:\\ |\S)+", names)]


def fingerprint(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


@cache
def digest(path: Path, mtime_ns: int, size: int) -> str:
    """Hash of a file's content; mtime and size let one build hash each system header once."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- the command ----


class BuildExtension(build_ext):
    """build_ext whose one extension is compiled and linked by the steps above."""

    def build_extension(self, ext: Extension) -> None:
        os.chdir(ROOT)  # commands and depfiles hold relative names
        toolkit = find_toolkit()
        if toolkit:
            print(f"flexgemm: CUDA {toolkit.version} from {toolkit.nvcc}")
        elif os.environ.get("FLEXGEMM_CUDA") == "0":
            print("flexgemm: CPU-only build: FLEXGEMM_CUDA=0")
        else:
            print("flexgemm: CPU-only build: no nvcc in CUDA_HOME, on PATH or among the installed wheels")

        OBJECTS.mkdir(parents=True, exist_ok=True)
        with open(OBJECTS / "lock", "w") as lock:  # two builds of one tree take turns
            fcntl.flock(lock, fcntl.LOCK_EX)
            compile_steps = self.compile_steps(toolkit)
            self.run_steps(compile_steps)
            link = self.link_step([step.output for step in compile_steps], toolkit)
            self.run_steps([link])
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # a new file: a process may have the old one mapped
            shutil.copy2(link.output, target)

    def compile_steps(self, toolkit: Toolkit | None) -> list[Step]:
        """One step per source file, the slow ones (CUDA) first."""
        import numpy  # a build requirement, but not one of `setup.py --version`

        strict = os.environ.get("FLEXGEMM_WERROR") == "1"
        cc = find_cc()
        cc_release = output_of([*cc, "--version"]).splitlines()[0]
        sources = sorted(
            str(path) for folder in ("csrc", "kernels", "kernels/cpu") for path in Path(folder).glob("*.c")
        )
        cuda_sources = sorted(str(path) for path in Path("kernels/cuda").glob("*.cu")) if toolkit else []
        archs = sorted({a for source in cuda_sources for a in cuda_archs_of(source)}, key=lambda a: (a[0] != "s", a))

        python_flags = [*PYTHON_DEFINES, "-Ikernels", f"-isystem{sysconfig.get_path('include')}"]
        python_flags += [f"-isystem{numpy.get_include()}"]
        info_flags = [
            f'-DFLEXGEMM_VERSION="{self.distribution.get_version()}"',
            f'-DFLEXGEMM_SOURCE_SHA256="{source_sha256()}"',
        ]
        if toolkit:
            python_flags += ["-DFLEXGEMM_WITH_CUDA"]
            info_flags += [f'-DFLEXGEMM_CUDA_VERSION="{toolkit.version}"', f'-DFLEXGEMM_CUDA_ARCHS="{",".join(archs)}"']

        # Cores beyond one per file compile several architectures of a file at once.
        threads = [f"--threads={max(1, self.jobs() // max(1, len(cuda_sources)))}"]
        steps = []
        for source in cuda_sources:
            assert toolkit
            output = OBJECTS / f"{source}.o"
            flags = [*CUDA_FLAGS, *map(gencode, cuda_archs_of(source))]
            command = [str(toolkit.nvcc), *flags, "-MD", "-MF", str(output.with_suffix(".d"))]
            command += ["-c", source, "-o", str(output)]
            unkeyed = [*threads, *["-Werror=all-warnings"] * strict]
            steps.append(
                Step(output, command, toolkit.version, unkeyed=unkeyed, refused=SERIALISED if strict else None)
            )
        for source in sources:
            output = OBJECTS / f"{source}.o"
            flags = C_FLAGS + python_flags * source.startswith("csrc/") + info_flags * (source == BUILD_INFO_SOURCE)
            command = [*cc, *flags, "-MD", "-MF", str(output.with_suffix(".d")), "-c", source, "-o", str(output)]
            steps.append(Step(output, command, cc_release, unkeyed=["-Werror"] * strict))
        return steps

    def link_step(self, objects: list[Path], toolkit: Toolkit | None) -> Step:
        """Objects of nvcc pull in the C++ runtime: it is linked statically and hidden, like the CUDA runtime. There is
        no -lcuda, so that the module imports on a machine without a driver."""
        output = OBJECTS / "_C.abi3.so"
        command = [*find_cc(), "-shared", "-fopenmp", *map(str, objects), "-o", str(output)]
        if toolkit:
            command += [f"-L{toolkit.lib}", "-lcudart_static", "-ldl", "-lrt", "-lpthread", "-l:libstdc++.a"]
        command += ["-static-libgcc", "-Wl,--exclude-libs,ALL", "-lm"]
        return Step(output, command, toolkit.version if toolkit else "", inputs=objects)

    def run_steps(self, steps: list[Step]) -> None:
        """Runs the stale ones side by side, shows each as it ends, and stops at the first that fails."""
        stale = [step for step in steps if not step.is_fresh()]
        pool = ThreadPoolExecutor(self.jobs())
        try:
            futures = [pool.submit(step.run) for step in stale]
            for index, (step, future) in enumerate(zip(stale, futures, strict=True), 1):
                print(
                    f"[{index:{len(str(len(stale)))}}/{len(stale)}] {step.output}\n{future.result()}",
                    end="",
                    flush=True,
                )
        except subprocess.CalledProcessError as failure:
            sys.exit(f"{shlex.join(map(str, failure.cmd))}\n{failure.output}flexgemm: build failed")
        finally:
            pool.shutdown(cancel_futures=True)

    def jobs(self) -> int:
        """All cores that this process may use, or `build_ext -j N`."""
        return self.parallel or len(os.sched_getaffinity(0))


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("flexgemm._C", sources=[], py_limited_api=True)],
        cmdclass={"build_ext": BuildExtension},
        options={"bdist_wheel": {"py_limited_api": "cp311"}},
    )
