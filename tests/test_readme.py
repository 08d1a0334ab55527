"""The README and the pages are true: the Python of each runs as one program, and prints what they say was printed."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from fastlayers.patching import Reason

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
TEXT = PAGES["README.md"]


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and code."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if "```python" in text])
def test_python_blocks_run_and_print_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "readme"}
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


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(links) > 2
    for link in links:
        if not link.startswith(("http", "benchmarks/results/")):  # a GPU run makes those
            assert (ROOT / link).exists(), link


def test_reasons_exist():
    table = PAGES["models.md"].partition("| reason |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([A-Z_]+)`", table))
    assert len(named) > 5
    assert named <= set(Reason.__members__)


def test_functions_and_results_have_their_place():
    from fastlayers import functional

    assert all(f"| `{name}" in TEXT for name in functional.__all__)
    pytest.importorskip("matplotlib")
    from benchmarks import losses, model_report, report

    measured = (ROOT / "benchmarks/results/README.md").read_text()
    places = ((TEXT, report, "overview"), (measured, report, "results"), (TEXT, model_report, "models"))
    for text, kind, name in (*places, (TEXT, losses, "losses")):
        assert name in kind.PAGES
        assert report.put_into(text, {}, {name: lambda results: "(the table)\n"}).count("(the table)\n") == 1
