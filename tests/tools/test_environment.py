"""tools/environment.py: what it prints while pip installs, on a terminal and in a pipe, and where pip fails."""

from __future__ import annotations

import io
import os
import runpy
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests import ROOT

TOOL = ROOT / "tools" / "environment.py"


@pytest.fixture
def tool(tmp_path):
    """The tool, and an environment whose Python is a script that stands for pip's."""
    folder = tmp_path / "env"
    (folder / "bin").mkdir(parents=True)
    names = runpy.run_path(str(TOOL))

    def make(script: str, out: io.StringIO) -> int:
        python = folder / "bin" / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        return names["make"](folder, ["torch>=2.11"], out)

    return SimpleNamespace(make=make, folder=folder, names=names)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_lines_and_the_log_what_pip_says(tool):
    out = io.StringIO()
    assert tool.make("echo Collecting torch; sleep 2.5", out) == 0
    first, last = out.getvalue().splitlines()
    assert first == f"Installing 'torch>=2.11' in {tool.folder}"
    assert last.startswith(f"{first}: done in 0:0")
    assert "Collecting" not in out.getvalue()
    assert (tool.folder / "pip.log").read_text() == "Collecting torch\n"


def test_a_pipe_gets_a_line_now_and_then(tool, monkeypatch):
    monkeypatch.setitem(tool.names["Progress"].update.__globals__, "PATIENCE", 0.5)
    out = io.StringIO()
    tool.make("sleep 2.5", out)
    assert len(out.getvalue().splitlines()) == 4


def test_a_terminal_has_one_line_that_fits(tool, monkeypatch):
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_: os.terminal_size((60, 24)))
    out = Terminal()
    tool.make("sleep 1.5", out)
    assert out.getvalue().count("\n") == 1
    assert all(len(line.rstrip("\n")) < 60 for line in out.getvalue().split("\r"))


def test_where_pip_fails_its_last_lines_follow(tool):
    out = io.StringIO()
    assert tool.make("seq 100; echo no such version >&2; exit 3", out) == 3
    lines = out.getvalue().splitlines()
    assert ": failed in " in lines[1]
    assert lines[-2:] == ["no such version", f"All that pip said is in {tool.folder / 'pip.log'}"]
    assert "70" not in lines


def test_it_makes_the_environment(tmp_path):
    folder = tmp_path / "env"
    done = subprocess.run([sys.executable, TOOL, folder, "--version"], capture_output=True, text=True)
    assert (folder / "bin" / "python").exists(), done.stderr
    assert done.stdout.startswith("Installing --version in ")


def test_usage(tmp_path):
    done = subprocess.run([sys.executable, TOOL, tmp_path], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("usage: ")
