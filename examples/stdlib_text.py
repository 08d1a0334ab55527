"""Text that every machine has: the source of Python's standard library, and its functions with their docstrings."""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

#: Folders that do not belong to the library: installed packages and tests.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def source_files() -> list[Path]:
    """The files of the library, in the same order on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    return [root / path for path in sorted(files) if not LEFT_OUT.intersection(path.parts)]


@dataclass(frozen=True)
class SourceText:
    """Bytes of the source. A twentieth of the files is for validation."""

    train: Tensor
    validation: Tensor

    @classmethod
    def load(cls) -> SourceText:
        parts = (bytearray(), bytearray())
        for index, path in enumerate(source_files()):
            parts[index % 20 == 0].extend(path.read_bytes())
        train, validation = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
        return cls(train, validation)


def random_rows(text: Tensor, rows: int, length: int) -> Tensor:
    """(rows, length) bytes as int64, from random positions of torch's CPU generator."""
    begins = torch.randint(len(text) - length, (rows, 1))
    return text[begins + torch.arange(length)].long()


@dataclass(frozen=True)
class Function:
    """A public function or class of the library with the first sentence of its docstring."""

    name: str
    summary: str
    code: str


def documented() -> list[Function]:
    """All functions and classes with a docstring, in the order of the files."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in source_files():
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about escapes in old string literals
                text = path.read_text(encoding="utf-8")
                tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):  # templates and other encodings
            continue
        found += list(documented_in(tree, module, text.splitlines()))
    return found


def documented_in(tree: ast.Module | ast.ClassDef, prefix: str, lines: list[str]) -> Iterator[Function]:
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        name = f"{prefix}.{node.name}"
        docstring = ast.get_docstring(node)
        if docstring and len(node.body) > 1:
            after = (
                node.body[0].end_lineno or node.lineno
            )  # without the docstring, which is what the search compares with
            head, body = lines[node.lineno - 1 : node.body[0].lineno - 1], lines[after : node.end_lineno]
            yield Function(name, " ".join(docstring.split("\n\n")[0].split()), "\n".join(head + body))
        if isinstance(node, ast.ClassDef):
            yield from documented_in(node, name, lines)
