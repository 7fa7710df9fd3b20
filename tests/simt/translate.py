"""Rewrites what g++ cannot parse of CUDA C++; all else of a kernel is compiled as it stands.

    kernel<T><<<grid, block, bytes>>>(args)              simt::Launch("kernel<T>", grid, block, bytes)(kernel<T>, args)
    __shared__ float sums[8][32];                        a reference into the shared memory of the block
    extern __shared__ __align__(128) char shared[];      a pointer to the dynamic part of it
    asm volatile("text" : outputs : inputs : clobbers)   the same text for the interpreter of ptx.cpp

Line numbers stay, so that compilers, debuggers and error messages name lines of kernels/cuda. A template that is
launched must name its arguments: kernel<T><<<...>>>, not a deduced kernel<<<...>>>.
"""

from __future__ import annotations

import re
from pathlib import Path

COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
STATIC_SHARED = re.compile(r"(?<!extern )__shared__\s+([^;{}]*?\b(\w+)\s*(?:\[[^;]*\])?);")
DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+(?:(?:__align__|alignas)\(([^;]*?)\)\s+)?([\w:]+)\s+(\w+)\[\];")
ASM = re.compile(r"\basm(?:\s+volatile)?\s*\(")
CONSTRAINT = re.compile(r'"([=+]?)[a-z]"(?=\s*\()')
OPENING, CLOSING = "([{<", ")]}>"


class Source:
    """Text with edits at places of the original, found in a copy whose comments and strings are blank."""

    def __init__(self, name: str, text: str):
        self.name, self.text = name, text
        self.code = COMMENT_OR_STRING.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
        self.edits: list[tuple[int, int, str]] = []

    def replace(self, begin: int, end: int, new: str) -> None:
        """Keeps the lines (of a macro too): those of what goes follow what comes."""
        self.edits.append((begin, end, new + "".join(re.findall(r"\\?\n", self.text[begin:end]))))

    def fail(self, at: int, message: str) -> None:
        raise SystemExit(f"{self.name}:{self.text.count(chr(10), 0, at) + 1}: {message}")

    def closing(self, opening: int) -> int:
        """The place of the bracket that closes the one at `opening`; only its own kind counts."""
        kind, depth = self.code[opening], 0
        other = CLOSING[OPENING.index(kind)]
        for at in range(opening, len(self.code)):
            depth += (self.code[at] == kind) - (self.code[at] == other)
            if depth == 0:
                return at
        self.fail(opening, f"no {other} to this {kind}")
        raise AssertionError

    def result(self) -> str:
        text = self.text
        for begin, end, new in sorted(self.edits, reverse=True):
            text = text[:begin] + new + text[end:]
        return text


def kernel_begin(source: Source, end: int) -> int:
    """Where the expression in front of <<< begins: a name, its template arguments, subscripts."""
    code, at = source.code, end
    while True:
        while code[at - 1].isspace():
            at -= 1
        if code[at - 1] in "]>":
            closing, depth = code[at - 1], 0
            opening = OPENING[CLOSING.index(closing)]
            while True:
                at -= 1
                depth += (code[at] == closing) - (code[at] == opening)
                if depth == 0:
                    break
        elif code[at - 1].isalnum() or code[at - 1] in "_:":
            while code[at - 1].isalnum() or code[at - 1] in "_:":
                at -= 1
            return at
        else:
            source.fail(end, "<<< without a kernel")


def translate_launches(source: Source) -> None:
    for match in re.finditer("<<<", source.code):
        begin = kernel_begin(source, match.start())
        depth, at = 0, match.end()
        while depth or not source.code.startswith(">>>", at):
            depth += (source.code[at] in "([{") - (source.code[at] in ")]}")
            at += 1
        opening = source.code.index("(", at)
        kernel = " ".join(source.text[begin : match.start()].split())
        has_arguments = source.code[opening + 1 : source.closing(opening)].strip()
        source.replace(begin, match.end(), f'simt::Launch("{kernel}", ')
        source.replace(at, opening + 1, f")({kernel}" + ", " * bool(has_arguments))


def translate_shared(source: Source) -> None:
    for match in DYNAMIC_SHARED.finditer(source.code):
        alignment, kind, name = match[1] or f"alignof({match[2]})", match[2], match[3]
        source.replace(
            *match.span(), f"{kind} *const {name} = static_cast<{kind} *>(simt::dynamic_shared({alignment}));"
        )
    for match in STATIC_SHARED.finditer(source.code):
        declaration, name = source.text[match.start(1) : match.end(1)], match[2]
        kind = f"simt_shared_{name}"
        source.replace(
            *match.span(), f"struct {kind} {{ {declaration}; }}; auto &{name} = simt::shared<{kind}>().{name};"
        )


def translate_asm(source: Source) -> None:
    for match in ASM.finditer(source.code):
        closing = source.closing(match.end() - 1)
        end = source.code.index(";", closing) + 1
        colons, depth = [], 0
        for at in range(match.end(), closing):
            depth += (source.code[at] in "([{") - (source.code[at] in ")]}")
            if source.code[at] == ":" and depth == 0:
                colons.append(at)
        source.replace(*match.span(), "{ static const simt::Program simt_program(")
        between = ["); simt_program.run({", "}, {", "}); }"]
        for at, new in zip(colons[:2], between, strict=False):
            source.replace(at, at + 1, new)
        clobbers = colons[2] if len(colons) > 2 else closing
        source.replace(clobbers, end, "".join(between[len(colons[:2]) :]))


def translate(name: str, text: str) -> str:
    source = Source(name, text)
    translate_launches(source)
    translate_shared(source)
    translate_asm(source)
    result = source.result()
    result = CONSTRAINT.sub(lambda m: "simt::output" if m[1] else "simt::input", result)
    return f'#line 1 "{name}"\n' + result.replace("__CUDA_ARCH__", "SIMT_CUDA_ARCH")


def translate_tree(root: Path, target: Path) -> list[Path]:
    """CUDA files and the headers that they include, below `target`; returns the .cu files. Keeps what is as it was."""
    translated = []
    for path in sorted([*root.glob("kernels/*.h"), *root.glob("kernels/cuda/*.cu*"), root / "tests/simt/faults.cu"]):
        name = path.relative_to(root)
        text = path.read_text()
        if path.suffix != ".h":
            text = translate(str(name), text)
        out = target / name
        out.parent.mkdir(parents=True, exist_ok=True)
        if not out.is_file() or out.read_text() != text:
            out.write_text(text)
        if path.suffix == ".cu":
            translated.append(out)
    return translated
