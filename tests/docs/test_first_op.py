"""The tutorial: its blocks run in order as one program, and print what the page says they print."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests import ROOT

PAGE = (ROOT / "docs" / "first-op.md").read_text()


def test_the_program_runs_and_prints_what_the_page_says(tmp_path):
    """One test and one process: Triton chooses its interpreter when it is imported, and the program takes a while."""
    pytest.importorskip("triton")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / "first_op.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(printed) == 2
    for text in printed:
        assert text in done.stdout
    # The tables of the page repeat what the program counts.
    forward, kept, backward = re.search(r"(\d+) tensors forward, (\d+) kept, (\d+) backward", done.stdout).groups()
    assert f"| forward | {forward} | 3 | at most {int(forward) / 3:.1f}x |" in PAGE
    assert f"| backward | {backward} | 5 | at most {int(backward) / 5:.1f}x |" in PAGE
    assert f"| kept in between | {kept} | 2 | |" in PAGE
    if shutil.which("nvcc"):  # the CUDA source was compiled, and has registered its ops
        assert "first_op.forward.default" in done.stdout
