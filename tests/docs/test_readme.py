"""The README and the pages are true: the Python of each runs as one program, and prints what they say was printed."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import types

import pytest

from fastlayers.patching import Reason
from tests import ROOT

FILES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY", "examples/README")]
#: By their path.
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (*FILES, *sorted((ROOT / "docs").rglob("*.md")))}
TEXT = PAGES["README.md"]
#: Runs in a process of its own: tests/docs/test_first_op.py.
TUTORIAL = "docs/first-op.md"


def links(page: str) -> list[str]:
    """The targets in the prose of a page that are files of the repository."""
    prose = re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", prose) if not link.startswith("http")]


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and code."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if "```python" in text and name != TUTORIAL])
def test_python_blocks_run_and_print_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    module = types.ModuleType("readme")  # Dynamo imports the module of a function that it inlines.
    monkeypatch.setitem(sys.modules, "readme", module)
    namespace = vars(module)
    printed = io.StringIO()
    for number, (language, code) in enumerate(blocks(PAGES[page])):
        if language == "python":
            path = tmp_path / f"block_{number}.py"  # a file: patching reads the source of a forward
            path.write_text(code)
            with contextlib.redirect_stdout(printed):
                exec(compile(code, str(path), "exec"), namespace)
    everything = printed.getvalue()
    for said in (code for language, code in blocks(PAGES[page]) if language == "text"):
        assert said in everything


def test_shell_blocks_name_targets_and_commands_that_exist():
    from fastlayers.cli import main

    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for text in PAGES.values():
        shell = "".join(code for language, code in blocks(text) if language == "sh")
        assert set(re.findall(r"\bmake ([a-z-]+)", shell)) <= targets
        assert set(re.findall(r"python -m fastlayers (\w+)", text)) <= set(main.commands)


def test_the_readme_is_short():
    assert len(TEXT.splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in links(page):
        assert (ROOT / page).parent.joinpath(target).exists(), target


def test_files_that_pages_and_drawings_name_exist():
    drawings = {path.name: re.sub(r"<[^>]+>", " ", path.read_text()) for path in (ROOT / "docs/images").glob("*.svg")}
    prose = {page: " ".join(re.findall(r"`([^`\n]+)`", text)) for page, text in PAGES.items()}
    folders = (ROOT, ROOT / "fastlayers", ROOT / "fastlayers/patching")
    for page, text in (drawings | prose).items():
        for name in re.findall(r"(?<![\w/.<>])(?:\w+/)+(?:\w+\.(?:py|cu|json))?(?![\w<])", text):
            assert any((folder / name).exists() for folder in folders), f"{page}: {name}"


def test_every_page_is_linked_to():
    found = {(ROOT / page).parent.joinpath(target).resolve() for page in PAGES for target in links(page)}
    assert {ROOT / page for page in PAGES} - found == {ROOT / "README.md"}


def test_every_reason_is_in_the_table():
    table = PAGES["docs/patching.md"].partition("| reason |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([A-Z_]+)` \|", table, re.MULTILINE)) == set(Reason.__members__)


def test_every_function_and_module_is_in_the_table_of_operations():
    from fastlayers import functional, modules

    table = PAGES["docs/ops.md"]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(functional.__all__)
    assert set(re.findall(r"`(Fused\w+)`", table)) == set(modules.__all__) - {"DROP_IN"}


def test_results_have_their_place():
    pytest.importorskip("matplotlib")
    from benchmarks import losses, model_report, report

    measured, benchmarks = (
        (ROOT / path).read_text() for path in ("benchmarks/results/README.md", "docs/benchmarks.md")
    )
    places = (
        (TEXT, model_report, "steps"),
        (benchmarks, model_report, "models"),
        (benchmarks, losses, "losses"),
        (benchmarks, report, "overview"),
        (measured, report, "results"),
    )
    for text, kind, name in places:
        assert name in kind.PAGES
        assert report.put_into(text, {}, {name: lambda results: "(the table)\n"}).count("(the table)\n") == 1


def test_the_tables_are_those_of_the_committed_results():
    """CONTRIBUTING.md has the commands that write them."""
    pytest.importorskip("matplotlib")
    from benchmarks.__main__ import load, renderer
    from benchmarks.report import put_into

    commands = re.findall(r"benchmarks table (\S+)((?: --into \S+)+)", PAGES["CONTRIBUTING.md"])
    assert len(commands) == 4
    for file, pages in commands:
        results = load(ROOT / file)
        for page in pages.split(" --into ")[1:]:
            text = (ROOT / page).read_text()
            assert put_into(text, results, renderer(results).PAGES) == text, page


def test_versions_are_those_that_the_makefile_and_the_metadata_name():
    text = PAGES["docs/compatibility.md"]
    libraries, packages, metadata = (
        (ROOT / name).read_text()
        for name in ("tests/corpus/requirements.txt", "tests/corpus/packages.txt", "pyproject.toml")
    )
    versions = dict(re.findall(r"^([\w-]+)==([\d.]+)", libraries + packages, re.MULTILINE))
    for name in ("torch", "torchvision", "timm", "transformers", "diffusers", "monai"):
        version = versions[name]
        assert re.search(rf"\b{name}\b.*\b{re.escape(version)}\b|test-corpus.*\b{re.escape(version)}\b", text), name
    python, torch = (
        re.search(r'requires-python = ">=([\d.]+)"', metadata)[1],
        re.search(r'"torch>=([\d.]+)"', metadata)[1],
    )
    for page in (text, TEXT):
        assert f"Python {python}" in page
        assert f"torch {torch}" in page
