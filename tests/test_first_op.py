"""The tutorial: its blocks run in order as one program, and print what the page says they print."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "first-op.md").read_text()


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """What the program prints, in a process of its own: Triton's interpreter is chosen when Triton is imported."""
    pytest.importorskip("triton")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        str(ROOT / "examples" / "first_op.py"),
        "--out",
        str(tmp_path_factory.mktemp("first_op")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_program_runs_and_prints_what_the_page_says(output):
    printed = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(printed) == 2
    for text in printed:
        assert text in output


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_cuda_source_compiles_and_registers_its_ops(output):
    assert "first_op.forward.default" in output


def test_the_numbers_of_the_page_are_those_that_it_counts(output):
    forward, kept, backward = re.search(r"(\d+) tensors forward, (\d+) kept, (\d+) backward", output).groups()
    assert f"| forward | {forward} | 3 | at most {int(forward) / 3:.1f}x |" in PAGE
    assert f"| backward | {backward} | 5 | at most {int(backward) / 5:.1f}x |" in PAGE
    assert f"| kept in between | {kept} | 2 | |" in PAGE
