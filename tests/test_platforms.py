"""Windows and macOS: `pip install` gives the pure-Python package, which works there and says what it is.

The tests run on Linux. A process takes another system's name after it has imported what belongs to this machine, loses
what that system's Python does not have, and may start no program. So the package's own code sees the other system.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SOURCES = [*sorted((ROOT / "fastlayers").rglob("*.py")), ROOT / "setup.py"]
SYSTEMS = {"darwin": "macOS", "win32": "Windows"}
REASON = "the C++ and CUDA kernels are built on Linux only, and this is {}"

#: Modules and functions of os that Windows does not have; macOS has all but the last line of each.
POSIX_MODULES = {"grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
POSIX_MODULES |= {"fcntl", "spwd"}
POSIX_OF_OS = {"chroot", "fchmod", "fork", "forkpty", "getgid", "getuid", "killpg", "mkfifo", "setsid", "uname", "wait"}
POSIX_OF_OS |= {"sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open", "posix_fadvise"}

BECOME = f"""
import os, sys

def become(platform):
    for name in {sorted(POSIX_MODULES)}:
        sys.modules[name] = None
    for name in {sorted(POSIX_OF_OS)}:
        vars(os).pop(name, None)
    sys.platform = platform

    def refuse(event, arguments):
        if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
            raise AssertionError(f"a program was started: {{arguments}}")

    sys.addaudithook(refuse)
"""

# What pip calls, with the wheel's folder, after it has chosen the build's environment.
BUILD = f"""{BECOME}
import sysconfig
from setuptools import build_meta

sysconfig.get_config_vars()  # read from a file that bears the name of the system
become(sys.argv[1])
build_meta.build_wheel("dist")
"""

USE = f"""{BECOME}
import subprocess
import click, rich.console, rich.progress, rich.table, safetensors.torch, torch, torch._dynamo

sys.modules["triton"] = None  # PyPI has it for Linux
become(sys.argv[1])
import fastlayers
from fastlayers import backends, build

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(torch.nn.functional.gelu(self.norm(x))) + x

model, x = torch.nn.Sequential(Block(), Block()), torch.randn(3, 8)
expected = model(x)
fastlayers.patch_model(model)
for _ in range(3):
    torch.testing.assert_close(model(x), expected)
    model(x).sum().backward()
assert fastlayers.verify_patch(model, x)
fastlayers.save_model(model, "model.safetensors")
fastlayers.load_model(model, "model.safetensors")
assert backends.choose(torch.device("cpu")) == "eager"
assert build.jobs() == os.cpu_count()

from fastlayers.cli import main

for arguments in (["build"], ["build", "--regions"]):
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 1, end
main(["info"])
"""


def run(code: str, platform: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, platform]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment(folder))
    assert done.returncode == 0, done.stderr
    return done


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FASTLAYERS_", "CUDA_", "CXX"))}
    return {**kept, "PYTHONPATH": str(folder / "installed"), "COLUMNS": "200"}


@pytest.mark.slow
@pytest.mark.parametrize("platform", SYSTEMS)
def test_pip_gives_the_pure_python_package_which_says_so(platform, tmp_path):
    reason = REASON.format(SYSTEMS[platform])
    ignored = shutil.ignore_patterns("*.so", "_C.json", "__pycache__")
    for name in ("fastlayers", "csrc"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)

    said = run(BUILD, platform, tmp_path).stderr
    assert f"fastlayers: no C++ or CUDA kernels in this build: {reason}" in said
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (about,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        assert message_from_bytes(archive.read(about))["Root-Is-Purelib"] == "true"
        assert json.loads(archive.read("fastlayers/_C.json"))["problem"] == reason
        assert not [name for name in names if name.endswith((".so", ".dll", ".dylib", ".pyd"))]
        archive.extractall(tmp_path / "installed")
    # The wheel of a release, made elsewhere, brings no record.
    (tmp_path / "installed/fastlayers/_C.json").unlink()

    for name in ("fastlayers", "csrc"):  # what is imported is the wheel's
        shutil.rmtree(tmp_path / name)
    done = run(USE, platform, tmp_path)
    assert done.stderr.count(f"Error: {reason}") == 2, done.stderr
    rows = dict(
        cells for line in done.stdout.splitlines() if len(cells := re.split("  +", line.rstrip(), maxsplit=1)) == 2
    )
    assert rows["package"] == "pure Python"
    assert reason in rows["kernels of csrc"]
    assert f"Python: {reason}" in rows["regions are run by"]
    assert "python -m fastlayers build" not in done.stdout, "what cannot be done here is recommended"


def test_what_is_required_exists_on_every_system():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in project["dependencies"]]
    wanted += [Requirement(text) for texts in project["optional-dependencies"].values() for text in texts]
    for platform in SYSTEMS:
        here = {item.name for item in wanted if item.marker is None or item.marker.evaluate({"sys_platform": platform})}
        assert {"torch", "safetensors", "click", "rich"} <= here
        assert "triton" not in here, "PyPI has Triton for Linux alone"
    assert any(item.name == "triton" and item.marker.evaluate({"sys_platform": "linux"}) for item in wanted)


def needs(path: Path) -> set[str]:
    """What a file uses of Linux and macOS alone, and does not ask for first."""
    text = path.read_text()
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= POSIX_MODULES & {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= POSIX_MODULES & {node.module}
            found |= POSIX_OF_OS & {alias.name for alias in node.names if node.module == "os"}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os" and node.attr in POSIX_OF_OS:
            found |= {node.attr} if f'hasattr(os, "{node.attr}")' not in text else set()
    return found


def test_nothing_needs_what_another_system_does_not_have(tmp_path):
    assert {str(path): found for path in SOURCES if (found := needs(path))} == {}
    (tmp_path / "file.py").write_text("import fcntl, os\nfrom os import fork\nos.sched_getaffinity(0)\nos.getpid()\n")
    assert needs(tmp_path / "file.py") == {"fcntl", "fork", "sched_getaffinity"}
