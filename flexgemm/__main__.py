"""python -m flexgemm info | demo | bench"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path

import flexgemm
from flexgemm._arrays import cuda_index

ARRAY_LIBRARIES = ("numpy", "ml_dtypes", "torch", "cupy", "jax")
PICTURES = (".png", ".pdf", ".svg")


def info() -> int:
    build = flexgemm.build_info()
    rows = [("flexgemm", build["version"]), ("location", str(Path(flexgemm.__file__).parent))]
    if build["cuda"] is None:
        rows.append(("build", "CPU only (no CUDA code in this build)"))
    else:
        rows.append(("build", f"CUDA {build['cuda']} for {', '.join(build['cuda_archs'])}"))
    rows += [("compiler", build["compiler"]), ("abi", build["abi"]), ("source", build["source_sha256"])]

    cpu = flexgemm.device_info("cpu")
    rows.append(("cpu", f"{cpu['name']}, {cpu['num_sms']} threads"))
    count = flexgemm.device_count()
    for i in range(count):
        gpu = flexgemm.device_info("cuda", i)
        major, minor = divmod(gpu["compute_capability"], 10)
        rows.append(
            (
                f"cuda:{i}",
                f"{gpu['name']}, compute capability {major}.{minor}, {gpu['num_sms']} SMs, "
                f"{gpu['memory_bytes'] / 2**30:.0f} GiB, driver {_cuda_version(gpu['driver_version'])}, "
                f"runtime {_cuda_version(gpu['runtime_version'])}",
            )
        )
    if not count:
        rows.append(("cuda", "no device" if build["cuda"] else "not built"))
    rows += [(name, _installed(name)) for name in ARRAY_LIBRARIES]

    for name, value in rows:
        print(f"{name:<10} {value}")
    return 0


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _installed(name: str) -> str:
    """The version of an array library, without importing it."""
    if util.find_spec(name) is None:
        return "not installed"
    names = metadata.packages_distributions().get(name, [name])  # CuPy comes as cupy-cuda13x and the like
    try:
        return metadata.version(names[0])
    except metadata.PackageNotFoundError:
        return "installed"


def demo(arguments: argparse.Namespace) -> int:
    missing = [name for name in ("matplotlib", "tqdm") if util.find_spec(name) is None]
    if missing:
        print(f"the demo needs {' and '.join(missing)}: pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    from flexgemm import demo
    from flexgemm.demo.points import PointsError

    device = arguments.device or ("cuda" if flexgemm.device_count() else "cpu")
    try:
        return demo.run(device, arguments.steps, arguments.out, arguments.points)
    except PointsError as error:
        print(f"flexgemm demo: --points: {error}", file=sys.stderr)
        return 2


def bench(arguments: Sequence[str]) -> int:
    root = Path(flexgemm.__file__).parent.parent
    if not (root / "benchmarks" / "__init__.py").exists():
        print("the benchmarks are part of the source checkout, not of the installed package", file=sys.stderr)
        return 2
    return subprocess.call([sys.executable, "-m", "benchmarks", *arguments], cwd=root)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def _device(text: str) -> str:
    try:
        cuda_index(text)
    except (ValueError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in PICTURES or not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a {', '.join(PICTURES)} file in an existing folder, got {text!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text!r}")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flexgemm", description="Sparse convolution and FP8 products.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="version, build, devices, array libraries")
    demo_parser = commands.add_parser("demo", help="train a small network to take noise off real terrain")
    demo_parser.add_argument("--device", type=_device, help="cpu, cuda or cuda:<index>; default: a GPU if there is one")
    demo_parser.add_argument("--steps", type=_positive, default=200, help="training steps (default: %(default)s)")
    demo_parser.add_argument(
        "--out", type=_picture, default=Path("demo.png"), help="the picture (default: %(default)s)"
    )
    demo_parser.add_argument("--points", type=Path, help="a point cloud instead: .npy, .npz, .ply or .xyz")
    commands.add_parser("bench", help="run the benchmarks of a source checkout", add_help=False)
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command == "bench":
        return bench(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return info() if arguments.command == "info" else demo(arguments)


if __name__ == "__main__":
    sys.exit(main())
