"""tools/release.py (`make release`): what it refuses, and what it prints in the end."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from datetime import date
from pathlib import Path

import pytest

import fastlayers
from tests import ROOT

TODAY = date(2026, 5, 17)
PACKAGE = {
    "fastlayers/__init__.py": "",
    "fastlayers/py.typed": "",
    "fastlayers/version.py": '__version__ = "1.2.3"\n',
    "csrc/answer.cpp": '#include "common/answer.h"\nint answer() { return ANSWER; }\n',
    "csrc/common/answer.h": "#define ANSWER 42\n",
    "CHANGELOG.md": f"# Changelog\n\n## 1.2.3 - {TODAY}\n\n### Added\n\n- Answers.\n\n## 1.2.2\n\n- Questions.\n",
    "CITATION.cff": f"cff-version: 1.2.0\nversion: 1.2.3\ndate-released: {TODAY}\n",
    ".gitignore": "build/\ndist/\n*.egg-info/\n",
}

spec = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
release = importlib.util.module_from_spec(spec)
spec.loader.exec_module(release)

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def git(folder: Path, *arguments: str) -> None:
    command = ["git", "-c", "user.name=Somebody", "-c", "user.email=somebody@localhost", *arguments]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def make_repository(folder: Path) -> Path:
    for name, text in PACKAGE.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "fastlayers/build.py"):
        shutil.copy(ROOT / name, folder / name)
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "Begin")
    return folder


@pytest.fixture
def repository(tmp_path):
    return make_repository(tmp_path)


def edit(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


# Version, changelog, citation ----------------------------------------------------------------------------------------


def test_this_repository_has_one_version():
    version = release.version_of(ROOT)
    assert version == fastlayers.__version__
    # What comes next may stand above it.
    released = re.findall(r"^## (\d.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    day = date.fromisoformat(released.removeprefix(f"{version} - "))
    problems = release.version_problems(ROOT, version, day)
    assert [problem for problem in problems if problem.startswith("CITATION.cff")] == []


def test_nothing_is_wrong(repository):
    assert list(release.tree_problems(repository, "1.2.3")) == []
    assert list(release.version_problems(repository, "1.2.3", TODAY)) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("CHANGELOG.md", f"1.2.3 - {TODAY}", "Unreleased", "CHANGELOG.md: the top section is 'Unreleased'; expected"),
        ("CHANGELOG.md", "2026-05-17", "2026-05-16", "the top section is '1.2.3 - 2026-05-16'; expected '1.2.3 - 2026"),
        ("CHANGELOG.md", "- Answers.\n", "", f"CHANGELOG.md: the section '1.2.3 - {TODAY}' lists nothing"),
        ("CITATION.cff", "1.2.3", "1.2.2", "CITATION.cff: 'version: 1.2.2'; expected 'version: 1.2.3'"),
        (
            "CITATION.cff",
            "date-released: ",
            "year: ",
            "'there is no date-released'; expected 'date-released: 2026-05-17'",
        ),
    ],
)
def test_versions_that_differ(repository, file, old, new, expected):
    edit(repository / file, old, new)
    (problem,) = release.version_problems(repository, "1.2.3", TODAY)
    assert expected in problem


def test_a_version_that_is_none(repository):
    edit(repository / "fastlayers/version.py", "1.2.3", "1.2.3.dev0")
    with pytest.raises(SystemExit, match=r"no line such as __version__ = "):
        release.version_of(repository)


def test_a_tree_that_is_not_released(repository):
    git(repository, "tag", "v1.2.3")
    git(repository, "checkout", "--quiet", "-b", "topic")
    (repository / "fastlayers" / "new.py").touch()
    branch, changed, tag = release.tree_problems(repository, "1.2.3")
    assert branch == "the branch is topic; a release is made on main"
    assert "?? fastlayers/new.py" in changed
    assert tag.startswith("the tag v1.2.3 exists")


# Wheels --------------------------------------------------------------------------------------------------------------


def build(repository: Path, **variables: str) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-build-isolation", "--no-deps", "-w", "dist", "."]
    environment = {**os.environ, "CUDA_HOME": "/nowhere", "FASTLAYERS_CUDA_ARCHS": "", **variables}
    subprocess.run(pip, cwd=repository, check=True, capture_output=True, env=environment)
    (wheel,) = (repository / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def pure(tmp_path_factory):
    """A repository, and the wheel that is made of it."""
    repository = make_repository(tmp_path_factory.mktemp("pure"))
    return repository, build(repository, FASTLAYERS_BUILD_EXT="0")


def test_the_pure_wheel_is_whole(pure):
    repository, wheel = pure
    assert wheel.name == "fastlayers-1.2.3-py3-none-any.whl"
    assert list(release.wheel_problems(wheel, repository, "1.2.3")) == []


@needs_compiler
def test_the_native_wheel_is_whole(repository):
    wheel = build(repository, FASTLAYERS_BUILD_EXT="1")
    assert wheel.name.startswith("fastlayers-1.2.3-py3-none-linux_")
    assert list(release.wheel_problems(wheel, repository, "1.2.3")) == []
    renamed = wheel.with_name("fastlayers-1.2.3-py3-none-any.whl")
    wheel.rename(renamed)
    problems = "\n".join(release.wheel_problems(renamed, repository, "1.2.3"))
    assert "it has what git does not: fastlayers/_C.json, fastlayers/_C.so" in problems
    assert "it is tagged for any platform, and contains a library" in problems
    assert "Root-Is-Purelib is false" in problems


INFO = "fastlayers-1.2.3.dist-info"


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("fastlayers/py.typed", None, "it lacks: fastlayers/py.typed"),
        ("fastlayers/csrc/common/answer.h", None, "it lacks: fastlayers/csrc/common/answer.h"),
        ("fastlayers/old.py", "", "it has what git does not: fastlayers/old.py"),
        ("fastlayers/_C.so", "", "it is tagged for any platform, and contains a library"),
        (f"{INFO}/licenses/LICENSE", None, "it does not contain LICENSE"),
        (f"{INFO}/WHEEL", "Root-Is-Purelib: false\n", "Root-Is-Purelib is false"),
        (f"{INFO}/RECORD", "", "RECORD has no or another hash of fastlayers/__init__.py"),
        ("fastlayers/__init__.py", "tampered = 1\n", "RECORD has no or another hash of fastlayers/__init__.py"),
        (f"{INFO}/METADATA", "Metadata-Version: 2.4\nName: fastlayers\nVersion: 1.2.2\n", "that of fastlayers 1.2.2"),
        (f"{INFO}/METADATA", "Metadata-Version: 2.4\nName: fastlayers\nVersion: 1.2.3\n", "README is not its descri"),
        (f"{INFO}/METADATA", "Name: fastlayers\n", "METADATA: "),
    ],
)
def test_a_wheel_that_is_not_whole(pure, tmp_path, name, change, expected):
    repository, wheel = pure
    other = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(other, "w") as after:
        for item in before.namelist():
            if item != name:
                after.writestr(item, before.read(item))
        if change is not None:
            after.writestr(name, change)
    assert expected in "\n".join(release.wheel_problems(other, repository, "1.2.3"))


def test_a_wheel_of_another_version(pure):
    repository, wheel = pure
    assert list(release.wheel_problems(wheel, repository, "1.2.4")) == [
        "its name is not fastlayers-1.2.4-py3-none-PLATFORM.whl"
    ]


# The whole -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def steps(repository, monkeypatch):
    """The repository is the one that is released; what takes long is listed and not done."""
    done: list[str] = []
    monkeypatch.setattr(release, "ROOT", repository)
    monkeypatch.setattr(release, "run", lambda *command, **variables: done.append(" ".join(command)))
    monkeypatch.setattr(release, "check_wheel", lambda wheel, version: done.append(f"check {wheel.name}"))
    (repository / "build").mkdir()
    return done


def test_a_release_begins_with_what_is_cheap(steps, repository):
    (repository / "new.py").touch()
    with pytest.raises(SystemExit, match=r"(?s)^fastlayers 1.2.3 cannot be released:\n- the tree.*\n- CHANGELOG.md: "):
        release.main()
    assert steps == []


def test_a_release_prints_what_a_person_runs(steps, repository, monkeypatch, capsys):
    wheels = [Path(f"fastlayers-1.2.3-py3-none-{tag}.whl") for tag in ("any", "linux_x86_64")]
    monkeypatch.setattr(release, "build_wheels", lambda: wheels)
    monkeypatch.setattr(release, "version_problems", lambda *_: [])  # of another day
    release.main()
    assert steps[:2] == [f"check {wheel}" for wheel in wheels]
    assert steps[2].endswith("-m mkdocs build --strict")
    assert len(steps) == 3
    said = capsys.readouterr().out
    assert "    git tag -a v1.2.3 -m 'fastlayers 1.2.3'\n    git push origin main v1.2.3\n" in said
    assert "    python -m twine upload dist/fastlayers-1.2.3-py3-none-any.whl\n" in said
    assert f"--notes-file build/notes.md dist/{wheels[0]} dist/{wheels[1]}\n" in said
    assert (repository / "build" / "notes.md").read_text() == "### Added\n\n- Answers.\n"


@pytest.mark.parametrize("nvcc", [True, False])
def test_wheels_of_this_machine(steps, repository, monkeypatch, tmp_path, capsys, nvcc):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    if nvcc:
        (tmp_path / "cuda" / "bin").mkdir(parents=True)
        (tmp_path / "cuda" / "bin" / "nvcc").touch()
    (repository / "build" / "lib").mkdir()
    release.build_wheels()
    assert not (repository / "build" / "lib").exists(), "what an earlier build left gets into a wheel"
    assert [step for step in steps if step == "make wheel"] == ["make wheel"] * nvcc
    assert " -m pip wheel " in steps[-1]
    assert nvcc or "No wheel with kernels from this machine: no nvcc" in capsys.readouterr().out
