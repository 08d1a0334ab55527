"""Check a release and build it: ``make release``. Nothing is uploaded: the commands that do are printed at the end.

1. The tree is clean and on main, and the version has no tag yet.
2. fastlayers/version.py, the top section of CHANGELOG.md and CITATION.cff have one version and today's date.
3. The wheels are built and checked: the pure-Python one, and where there is an nvcc that of ``make wheel``.
4. The docs are built, with warnings as errors.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from datetime import date, datetime, timezone
from email import message_from_bytes
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = (".so", ".dll", ".dylib", ".pyd")


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def version_of(root: Path) -> str:
    found = re.search(r'^__version__ = "(\d+\.\d+\.\d+)"$', (root / "fastlayers/version.py").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit('fastlayers/version.py has no line such as __version__ = "1.2.3"')
    return found[1]


def top_section(root: Path) -> tuple[str, str]:
    """Title and text of the first section of CHANGELOG.md."""
    sections = re.split(r"^## (.+)$", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    return (sections[1], sections[2]) if len(sections) > 1 else ("", "")


# What is wrong -------------------------------------------------------------------------------------------------------


def tree_problems(root: Path, version: str) -> Iterator[str]:
    branch = git(root, "rev-parse", "--abbrev-ref", "HEAD")
    if branch != "main":
        yield f"the branch is {branch}; a release is made on main"
    changed = git(root, "status", "--porcelain")
    if changed:
        yield f"the tree is not clean; commit or remove what git status lists:\n{changed}"
    if git(root, "tag", "--list", f"v{version}"):
        yield f"the tag v{version} exists; a release has a version of its own: change fastlayers/version.py"


def version_problems(root: Path, version: str, today: date) -> Iterator[str]:
    title, text = top_section(root)
    if title != f"{version} - {today}":
        yield f"CHANGELOG.md: the top section is {title!r}; expected '{version} - {today}'"
    if "\n- " not in text:
        yield f"CHANGELOG.md: the section {title!r} lists nothing"
    citation = (root / "CITATION.cff").read_text()
    for key, expected in (("version", version), ("date-released", str(today))):
        found = re.search(rf"^{key}: *(.*)$", citation, re.MULTILINE)
        if found is None or found[1].strip("\"'") != expected:
            yield f"CITATION.cff: {found[0] if found else f'there is no {key}'!r}; expected '{key}: {expected}'"


def wheel_problems(path: Path, root: Path, version: str) -> Iterator[str]:
    """What a wheel lacks, has too much, or says wrongly. The files are compared with those that git tracks."""
    match = re.fullmatch(r"fastlayers-([^-]+)-py3-none-([^-]+)\.whl", path.name)
    if match is None or match[1] != version:
        yield f"its name is not fastlayers-{version}-py3-none-PLATFORM.whl"
        return
    is_pure = match[2] == "any"
    info = f"fastlayers-{version}.dist-info"
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    package = {name for name in contents if not name.startswith(f"{info}/")}
    tracked = set(git(root, "ls-files", "fastlayers").splitlines())
    tracked |= {f"fastlayers/{name}" for name in git(root, "ls-files", "csrc").splitlines()}
    made = set() if is_pure else {"fastlayers/_C.so", "fastlayers/_C.json"}
    for what, names in (("lacks", (tracked | made) - package), ("has what git does not", package - tracked - made)):
        if names:
            yield f"it {what}: {', '.join(sorted(names))}"
    if is_pure and any(name.endswith(LIBRARIES) for name in contents):
        yield "it is tagged for any platform, and contains a library"
    if contents.get(f"{info}/licenses/LICENSE") != (root / "LICENSE").read_bytes():
        yield "it does not contain LICENSE"
    is_purelib = message_from_bytes(contents.get(f"{info}/WHEEL", b""))["Root-Is-Purelib"]
    if is_purelib != str(is_pure).lower():
        yield f"Root-Is-Purelib is {is_purelib}"
    yield from metadata_problems(contents.get(f"{info}/METADATA", b""), version)
    yield from record_problems(contents, f"{info}/RECORD")


def metadata_problems(text: bytes, version: str) -> Iterator[str]:
    try:
        metadata = Metadata.from_email(text, validate=True)
    except Exception as error:  # InvalidMetadata, or a group of them
        yield from (f"METADATA: {problem}" for problem in getattr(error, "exceptions", [error]))
        return
    if (metadata.name, str(metadata.version)) != ("fastlayers", version):
        yield f"METADATA is that of {metadata.name} {metadata.version}"
    if metadata.description_content_type != "text/markdown" or not metadata.description:
        yield "METADATA: the README is not its description"


def record_problems(contents: dict[str, bytes], record: str) -> Iterator[str]:
    """RECORD lists every file with its hash, which an installer checks."""
    listed = {row[0]: row[1] for row in csv.reader(contents.get(record, b"").decode().splitlines())}
    for name, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        if name != record and listed.get(name) != f"sha256={digest}":
            yield f"RECORD has no or another hash of {name}"


# What is built -------------------------------------------------------------------------------------------------------


def stop(what: str, problems: list[str]) -> None:
    if problems:
        sys.exit("\n".join([f"{what}:", *(f"- {problem}" for problem in problems)]))


def run(*command: str, **variables: str) -> None:
    print(f"$ {' '.join(command)}", flush=True)
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}).returncode
    if status != 0:
        sys.exit(f"exit status {status} from {' '.join(command)}")


def build_wheels() -> list[Path]:
    """Those that this machine can build, in dist."""
    for folder in (ROOT / "dist", *(ROOT / "build").glob("lib*")):
        shutil.rmtree(folder, ignore_errors=True)
    builder = runpy.run_path(str(ROOT / "fastlayers" / "build.py"))
    try:
        builder["find_nvcc"]()
    except builder["CudaBuildError"] as error:
        print(f"No wheel with kernels from this machine: {error}")
    else:
        run("make", "wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", ".")
    run(*pip, FASTLAYERS_BUILD_EXT="0")
    return sorted((ROOT / "dist").glob("*.whl"))


def check_wheel(wheel: Path, version: str) -> None:
    stop(wheel.name, list(wheel_problems(wheel, ROOT, version)))
    if not wheel.name.endswith("-any.whl"):
        run(sys.executable, "tests/check_wheel.py", str(wheel), sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        environment = {**os.environ, "PYTHONPATH": folder}
        command = [sys.executable, "-m", "fastlayers", "info"]
        said = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if said.returncode != 0 or version not in said.stdout:
        sys.exit(
            f"{wheel.name}: `python -m fastlayers info` fails or does not say {version}:\n{said.stdout}{said.stderr}"
        )
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, checked")


def commands(version: str, wheels: list[Path]) -> list[str]:
    """What a person runs to publish. PyPI takes wheels for Linux only with a manylinux tag."""
    pure = [f"dist/{wheel.name}" for wheel in wheels if wheel.name.endswith("-any.whl")]
    return [
        f"git tag -a v{version} -m 'fastlayers {version}'",
        f"git push origin main v{version}",
        f"python -m twine upload {' '.join(pure)}",
        f"gh release create v{version} --verify-tag --title 'fastlayers {version}' --notes-file build/notes.md "
        + " ".join(f"dist/{wheel.name}" for wheel in wheels),
    ]


def main() -> None:
    version = version_of(ROOT)
    today = datetime.now(timezone.utc).date()
    problems = [*tree_problems(ROOT, version), *version_problems(ROOT, version, today)]
    stop(f"fastlayers {version} cannot be released", problems)
    wheels = build_wheels()
    for wheel in wheels:
        check_wheel(wheel, version)
    run(sys.executable, "-m", "mkdocs", "build", "--strict", NO_MKDOCS_2_WARNING="1")
    (ROOT / "build" / "notes.md").write_text(top_section(ROOT)[1].strip() + "\n")
    print(
        f"\nfastlayers {version} is ready, and nothing was uploaded. If `make test-all` passed at this commit, run:\n"
    )
    print("\n".join(f"    {command}" for command in commands(version, wheels)))


if __name__ == "__main__":
    main()
