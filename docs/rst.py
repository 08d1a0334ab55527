"""Docstrings as they are written here, for Sphinx and readers of source, turned into what mkdocstrings renders.

Roles become links or code, ``.. math::`` becomes MathML, which browsers draw without a script or a font.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert

PACKAGE = Path(__file__).parents[1] / "fastlayers"
ROLE = re.compile(r":(?:func|class|mod|meth|attr):`~?([^`]+)`")
#: A directive and its lines: what follows on the same line, and all that is indented deeper.
MATH = re.compile(r"^\.\. math::(.*(?:\n[ \t]+\S.*)*)", re.MULTILINE)


def exported(module: Path) -> list[str]:
    """The names in its ``__all__`` as it is written, without importing it."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    raise ValueError(f"{module} has no __all__")


def targets() -> dict[str, str]:
    """What has a place on the pages, by every name that a docstring may give it."""
    places = {
        "fastlayers.functional": exported(PACKAGE / "functional/__init__.py"),
        "fastlayers.modules": [name for name in exported(PACKAGE / "modules/__init__.py") if name != "DROP_IN"],
        "fastlayers.patching": exported(PACKAGE / "patching/__init__.py"),
        "fastlayers.checkpoint": exported(PACKAGE / "checkpoint.py"),
        "fastlayers.backends": exported(PACKAGE / "backends.py"),
    }
    found: dict[str, str] = {}
    for place, names in places.items():
        for name in names:
            found |= dict.fromkeys((name, f"{place}.{name}", f"fastlayers.{name}"), f"{place}.{name}")
    return found


def markdown(text: str, known: dict[str, str]) -> str:
    """A docstring in Markdown.

    >>> markdown("See :func:`mul` and :func:`torch.relu`.", {"mul": "fastlayers.functional.mul"})
    'See [`mul`][fastlayers.functional.mul] and `torch.relu`.'
    """

    def reference(match: re.Match[str]) -> str:
        name = match[1]
        return f"[`{name.rpartition('.')[2]}`][{known[name]}]" if name in known else f"`{name}`"

    def formula(match: re.Match[str]) -> str:
        return f'<div class="math">{mathml(" ".join(match[1].split()))}</div>\n'

    text = ROLE.sub(reference, MATH.sub(formula, text))
    return re.sub(r"^(Keeps|Shape): ", r"**\1:** ", text, flags=re.MULTILINE)


def mathml(latex: str) -> str:
    """A formula as one line of MathML.

    Raises:
        ValueError: a command that the converter does not know, which it would print as it is.
    """
    converted = convert(latex.replace(r"\_", "_"), display="block").replace("\n", "")
    if "\\" in converted or "&#x0005C;" in converted:
        raise ValueError(f"{latex!r} has a command that latex2mathml does not know")
    return converted


def show_functions(functional: griffe.Module) -> None:
    """Show the functions where users find them. To Griffe, and not to Python, ``functional.glu`` is the file glu.py."""
    public = exported(PACKAGE / "functional/__init__.py")
    for family in [member for member in functional.modules.values() if not member.is_alias]:
        functional.del_member(family.name)
        for name in set(public).intersection(family.members):
            functional.set_member(name, family.members[name])


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of the package after they are read."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        known = targets()
        self.rewrite(pkg, known)
        show_functions(pkg["functional"])

    def rewrite(self, parent: griffe.Module | griffe.Class, known: dict[str, str]) -> None:
        for member in parent.members.values():
            if member.is_alias:
                continue
            if member.docstring is not None:
                member.docstring.value = markdown(textwrap.dedent(member.docstring.value), known)
            if member.is_module or member.is_class:
                self.rewrite(member, known)  # type: ignore[arg-type]
