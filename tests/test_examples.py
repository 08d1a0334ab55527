"""The examples as a user runs them, for one epoch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


def example(name: str, out: Path, *arguments: str) -> str:
    """What the example prints; fails with it where the example does."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    command = [sys.executable, str(ROOT / "examples" / name), "--device", "cpu", "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_digits_resnet(tmp_path):
    printed = example("digits_resnet.py", tmp_path, "--epochs", "1")
    stock, patched = re.search(r"test accuracy: stock ([\d.]+)%, patched ([\d.]+)%", printed).groups()
    assert stock == patched
    assert "blocks.0" in printed  # the report names what was patched
    assert "training step" in printed
    assert (tmp_path / "digits_resnet.safetensors").stat().st_size > 100_000
    assert (tmp_path / "digits_resnet.png").stat().st_size > 10_000


def test_fused_definition(tmp_path):
    pytest.importorskip("einops")
    printed = example("fused_definition.py", tmp_path, "--epochs", "1")
    assert "FusedSoftmax(dim=-1)" in printed
    assert float(re.search(r"test accuracy ([\d.]+)%", printed)[1]) > 20  # ten classes: guessing gets 10
    assert (tmp_path / "fused_definition.png").stat().st_size > 10_000


def test_unknown_device_is_refused():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "fused_definition.py"), "--device", "abacus"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 2
    assert "--device abacus" in done.stderr
