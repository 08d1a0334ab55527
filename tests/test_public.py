"""What GitHub and pre-commit read agrees with the Makefile, pyproject.toml and CONTRIBUTING.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

yaml = pytest.importorskip("yaml")

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def load(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


def requirement(name: str, texts: list[str]) -> Requirement:
    (found,) = (item for item in map(Requirement, texts) if item.name == name)
    return found


def test_there_are_workflows_and_forms():
    assert [path.stem for path in WORKFLOWS] == ["docs", "test", "wheel"]
    assert [path.stem for path in FORMS] == ["bug", "fusion"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_may_little_and_end(path):
    workflow, text = load(path), path.read_text()
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is True
    assert all(job["timeout-minutes"] <= 180 for job in workflow["jobs"].values())
    for job in workflow["jobs"].values():
        uses = [step["uses"] for step in job["steps"] if "uses" in step]
        assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", name) for name in uses), uses
        (python,) = (step["with"] for step in job["steps"] if step.get("uses", "").startswith("actions/setup-python@"))
        assert python["cache"] == "pip"
        assert (ROOT / python["cache-dependency-path"]).exists()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = set(re.findall(r"\bmake ([a-z-]+)", text))
    assert used
    assert used <= targets


def test_the_oldest_and_the_newest_are_tested():
    matrix = load(GITHUB / "workflows" / "test.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"][0] == PROJECT["requires-python"].removeprefix(">=")
    torch = requirement("torch", PROJECT["dependencies"])
    oldest, newest = map(Requirement, matrix["torch"])
    assert newest == torch
    (least,) = torch.specifier
    assert str(oldest.specifier) == f"=={least.version}.*"


def test_pre_commit_runs_the_ruff_of_make_lint():
    (hooks,) = load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert hooks["repo"].endswith("/ruff-pre-commit")
    assert [hook["id"] for hook in hooks["hooks"]] == ["ruff-check", "ruff-format"]
    wanted = requirement("ruff", PROJECT["optional-dependencies"]["test"]).specifier
    assert hooks["rev"].removeprefix("v") in wanted


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_ask_for_what_is_needed(path):
    form = load(path)
    assert {"name", "description", "body"} <= form.keys()
    fields = {field["id"]: field for field in form["body"]}
    assert len(fields) == len(form["body"])
    assert "`python -m fastlayers info`" in fields["info"]["attributes"]["label"]
    assert "patch_report(model, details=True)" in path.read_text()
    needed = {name for name, field in fields.items() if field.get("validations", {}).get("required")}
    assert {"bug": {"what", "program", "info"}, "fusion": {"code", "today", "info"}}[path.stem] == needed


def test_issues_use_a_form():
    assert load(GITHUB / "ISSUE_TEMPLATE" / "config.yml") == {"blank_issues_enabled": False}


def test_a_pull_request_is_asked_for_the_contract():
    contract = (ROOT / "CONTRIBUTING.md").read_text().partition("## The contract of an op")[2].partition("\n## ")[0]
    points = re.findall(r"^\| ([A-Z][a-z ]+) \|", contract, re.MULTILINE)
    assert len(points) >= 9
    template = (GITHUB / "pull_request_template.md").read_text()
    assert re.findall(r"^- \[ \] \*\*(.+?)\*\*", template, re.MULTILINE) == points
