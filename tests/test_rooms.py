"""The house: what may be imported from where, beyond the contracts of import-linter (pyproject.toml, `make lint`).

And where tests are: in the rooms of what they test.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

FILES = sorted((ROOT / "fastlayers").rglob("*.py"))
#: Model libraries. Those of training, of quantisation and of checkpoints are known elsewhere too.
LIBRARIES = re.compile(r"\b(transformers|timm|torchvision|diffusers|huggingface_hub)\b")
ADAPTERS = ROOT / "fastlayers" / "patching" / "libraries"
TESTS = ROOT / "tests"
LONGEST = 800  # lines of a file of tests


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {name_of(path): ast.parse(path.read_text()) for path in FILES}


def used_elsewhere(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What a file takes from other files of fastlayers: their names, and the names in them."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in TREES:
            for item in node.names:
                if f"{node.module}.{item.name}" in TREES:
                    aliases[item.asname or item.name] = f"{node.module}.{item.name}"
                elif item.name != "*":
                    yield str(node.module), item.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield aliases[node.value.id], node.attr


def exported(tree: ast.Module) -> set[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return None


@pytest.mark.parametrize("name", [name for name in TREES if name != "fastlayers"])
def test_files_take_from_others_what_these_export(name):
    for module, wanted in used_elsewhere(TREES[name]):
        names = exported(TREES[module])
        is_special = wanted.startswith("__")
        assert is_special or not wanted.startswith("_"), f"{name} takes {wanted} from {module}, where it is private"
        is_exported = names is None or wanted in names or is_special
        assert is_exported, f"{wanted}, which {name} takes, is not in __all__ of {module}"


@pytest.mark.parametrize("path", [path for path in FILES if ADAPTERS not in path.parents], ids=name_of)
def test_only_adapters_know_a_model_library(path):
    """In code; a docstring or a comment may say which library's layer something stands for."""
    tree = ast.parse(path.read_text())
    docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            assert not LIBRARIES.search(node.value), f"{path}:{node.lineno} names a model library: {node.value!r}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [item.name for item in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not any(LIBRARIES.match(module) for module in modules), f"{path}:{node.lineno}"


def room_of(path: Path) -> Path:
    """The room of fastlayers that a folder of tests is named after."""
    return ROOT / "fastlayers" / path.relative_to(TESTS)


#: Other folders of tests are of what is no room, such as the contract of all ops, several processes, or csrc. In that
#: of patching are tests of whole models, which take what users take.
WIDE = {TESTS, TESTS / "patching"}
IN_ROOMS = sorted(f for f in TESTS.rglob("test_*.py") if f.parent not in WIDE and room_of(f.parent).is_dir())


@pytest.mark.parametrize("file", IN_ROOMS, ids=name_of)
def test_a_file_of_tests_is_in_the_room_of_what_it_tests(file):
    """It bears the name of a file there, or of the room, with more words or none; or takes something from there."""
    room, subject = room_of(file.parent), file.stem.removeprefix("test_")
    names = {path.stem for path in room.iterdir() if path.suffix == ".py" or path.is_dir()}
    is_named = subject.startswith(room.name.removesuffix("s")) or any(f"{subject}_".startswith(f"{n}_") for n in names)
    taken = {module for module, _ in used_elsewhere(ast.parse(file.read_text()))}
    assert is_named or any(f"{module}.".startswith(f"{name_of(room)}.") for module in taken)


def test_folders_of_tests_of_patching_are_its_rooms():
    folders = {file.parent for file in (TESTS / "patching").rglob("*.py")}
    assert not [str(folder) for folder in folders if not room_of(folder).is_dir()]


def test_no_file_of_tests_is_long():
    lines = {name_of(file): len(file.read_text().splitlines()) for file in TESTS.rglob("*.py")}
    assert not {name: count for name, count in lines.items() if count > LONGEST}
