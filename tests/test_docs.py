"""The documentation: its examples run, and every public name is described on one page."""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from pathlib import Path

import pytest

import flexgemm
from flexgemm import compat

torch = pytest.importorskip("torch", reason="torch not installed")

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))


def examples(page):
    """The blocks of Python of a page, one after another, for the CPU; each in its lines, so that errors name them."""
    lines = page.read_text().splitlines()
    inside, kept = False, []
    for line in lines:
        if line.startswith("```"):
            inside, line = line == "```python" and not inside, ""
        kept.append(line.replace('"cuda"', '"cpu"') if inside else "")
    return "\n".join(kept)


@pytest.fixture
def adapters():
    """Those that an example installs go again."""
    yield
    for name in compat.INSTALLABLE:
        compat.uninstall(name)


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_examples_run(page, adapters):
    torch.manual_seed(0)
    exec(compile(examples(page), str(page), "exec"), {"__name__": page.stem})


def described():
    """What the pages have mkdocstrings describe: (name, page)."""
    for page in PAGES:
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
            yield name, page.stem


def resolve(name):
    found = flexgemm
    for part in name.split(".")[1:]:
        if not hasattr(found, part):
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    return found


PUBLIC = [
    f"{module}.{name}"
    for module in ("flexgemm", "flexgemm.torch", "flexgemm.torch.nn", "flexgemm.compat.flashinfer_gemm")
    for name in importlib.import_module(module).__all__
]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_described_once(name):
    """By itself, or with all of its module."""
    module = getattr(resolve(name), "__module__", None)
    places = [
        other for other, _ in described() if other == name or (other == module and inspect.ismodule(resolve(other)))
    ]
    assert len(places) == 1


def test_what_is_described_has_docstrings():
    """Itself, and what a class offers; of modules less what every torch.nn.Module has."""
    for name, _ in described():
        obj = resolve(name)
        assert inspect.getdoc(obj), name
        for member, value in vars(obj).items() if inspect.isclass(obj) else ():
            if member.startswith("_") or hasattr(torch.nn.Module, member):
                continue
            if isinstance(value, property | classmethod) or callable(value):
                assert inspect.getdoc(getattr(obj, member)), f"{name}.{member}"


@pytest.mark.parametrize("module", ["flexgemm", "flexgemm.torch", "flexgemm.torch.nn"])
def test_annotations_resolve(module):
    """For what reads them at run time."""
    module = importlib.import_module(module)
    for name in getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]:
        thing = getattr(module, name)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            typing.get_type_hints(thing.__init__ if inspect.isclass(thing) and "__init__" in vars(thing) else thing)
