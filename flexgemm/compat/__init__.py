"""The public names of other libraries over flexgemm's functions, for programs written against them.

    flexgemm.compat.flex_gemm              FlexGEMM (sparse convolution, on torch)
    flexgemm.compat.deep_gemm_per_tensor   DeepGEMMPerTensor (FP8 products, on torch)
    flexgemm.compat.flashinfer_gemm        flashinfer.gemm: bmm_fp8, SegmentGEMMWrapper

`install("flex_gemm")` makes `import flex_gemm`, and every import below it, find the adapter, so that a program runs
unchanged. Argument order, defaults, dtypes and results are theirs; where they fail, the adapter does the right thing,
and wrong arguments raise TypeError or ValueError as everywhere in flexgemm.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType

INSTALLABLE = ("flex_gemm", "deep_gemm_per_tensor")


def install(name: str) -> ModuleType:
    """Makes `import <name>` give the adapter of flexgemm.compat, which is returned.

    Raises ValueError for another name and RuntimeError where the real package has been imported already.
    """
    if name not in INSTALLABLE:
        raise ValueError(f"name: expected {' or '.join(map(repr, INSTALLABLE))}, got {name!r}")
    adapter = importlib.import_module(f"{__name__}.{name}")
    present = sys.modules.get(name)
    if present is not None and present is not adapter:
        where = getattr(present, "__file__", None)
        raise RuntimeError(f"{name}: already imported from {where}; call install before anything imports it")
    for module in pkgutil.walk_packages(adapter.__path__, f"{adapter.__name__}."):
        importlib.import_module(module.name)
    for real in _modules(adapter.__name__):
        sys.modules[real.removeprefix(f"{__name__}.")] = sys.modules[real]
    return adapter


def uninstall(name: str) -> None:
    """Takes `install` back: the next `import <name>` looks for the real package."""
    if getattr(sys.modules.get(name), "__name__", "") == f"{__name__}.{name}":
        for alias in _modules(name):
            del sys.modules[alias]


def _modules(package: str) -> list[str]:
    """The imported modules of a package, itself among them."""
    return [name for name in sys.modules if name == package or name.startswith(f"{package}.")]
