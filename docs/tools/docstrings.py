"""Docstrings of flexgemm as Markdown, for mkdocstrings: an extension of griffe, which reads the sources.

A docstring is plain text. A line `name: text`, where name is a parameter or an attribute, becomes an entry of a list,
with the indented lines behind it; a quoted value may have a line of its own there. An indented paragraph is code.
The comments behind a class's attributes are its last paragraph.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from griffe import Alias, Class, Extension, Function, Module, Object

_NAME = r"[a-zA-Z_]\w*(?: \([^)]*\))?"  # may have its shape behind it
_ENTRY = re.compile(rf"({_NAME}(?:, {_NAME})*): (.*)")
_VALUE = re.compile(r'\s+("\w+"): (.*)')
_ATTRIBUTE = re.compile(r"^    (?!_|native)(\w+): .*?  # (.*)$", re.MULTILINE)


class Docstrings(Extension):
    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        names = [*pkg.exports, *(f"torch.{name}" for name in pkg["torch"].exports)]
        links = {name: f"{pkg.path}.{name}" for name in names}
        _rewrite(pkg, links | {name: f"{pkg.path}.torch.nn.{name}" for name in pkg["torch.nn"].exports})


def _rewrite(obj: Object, links: dict[str, str]) -> None:
    if obj.docstring is not None:
        text = inspect.cleandoc(obj.docstring.value)
        if isinstance(obj, Class):
            text += "\n\n" + "\n".join(f"{name}: {comment}" for name, comment in _ATTRIBUTE.findall(obj.source))
        obj.docstring.value = markdown(text, _names(obj), links)
    for member in obj.members.values():
        if not isinstance(member, Alias):
            _rewrite(member, links)


def _names(obj: Object) -> set[str]:
    """What lines of the docstring may describe."""
    names = {parameter.name for parameter in obj.parameters} if isinstance(obj, (Class, Function)) else set()
    if "options" in names:
        names |= set(obj.package["gemm.Options"].members)
    return names | set(obj.members)


def markdown(text: str, names: set[str], links: dict[str, str]) -> str:
    """links: the full name of what may be named in backquotes."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(_code(part) or _paragraph(part, names, links) for part in paragraphs)


def _code(text: str) -> str:
    """Fenced, since an indented paragraph behind a list would belong to its last entry; "" for what is no code."""
    is_code = all(line.startswith("    ") for line in text.splitlines())
    return f"```python\n{inspect.cleandoc(text)}\n```" if is_code else ""


def _paragraph(text: str, names: set[str], links: dict[str, str]) -> str:
    lines: list[str] = []
    in_list = False
    for line in text.splitlines():
        entry = _ENTRY.fullmatch(line)
        if entry and names.issuperset(re.findall(r"(?:^|, )(\w+)", re.sub(r" \([^)]*\)", "", entry[1]))):
            lines += [] if in_list else [""]
            lines.append(f"- **{_inline(entry[1], {})}**: {_inline(entry[2], links)}")
            in_list = True
        elif in_list and (value := _VALUE.fullmatch(line)):
            lines.append(f"    - `{value[1]}`: {_inline(value[2], links)}")
        else:
            lines += [""] if in_list and not line.startswith(" ") else []
            in_list = in_list and line.startswith(" ")
            lines.append(("    " if in_list else "") + _inline(line.strip(), links))
    return "\n".join(lines).strip("\n")


def _inline(text: str, links: dict[str, str]) -> str:
    """What Markdown would take for markup is not; names in backquotes are links where there is something to link to."""

    def piece(match: re.Match[str]) -> str:
        if match[1] is None:
            return "\\" + match[0]
        name = match[1].removeprefix("flexgemm.")
        return f"[{match[0]}][{links[name]}]" if name in links else match[0]

    return re.sub(r"`([^`]*)`|[*_<\[\]]", piece, text)
