"""What the CPU kernels and oneDNN make of special values, in processes with fewer instructions than the machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent / "instruction_sets"
#: What the kernels of torch and of csrc may use, and what oneDNN may.
LEVELS = {"DEFAULT": "SSE41", "AVX2": "AVX2", "AVX512": "AVX512_CORE"}


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_special_values(level: str, inner_run: list[str]) -> None:
    has = torch.backends.cpu.get_cpu_capability()
    if has not in LEVELS:
        pytest.skip(f"{has}: no instruction sets to choose from")
    if list(LEVELS).index(level) > list(LEVELS).index(has):
        pytest.skip(f"this CPU has no more than {has}")
    environment = os.environ | {"ATEN_CPU_CAPABILITY": level.lower(), "ONEDNN_MAX_CPU_ISA": LEVELS[level]}
    command = [sys.executable, "-m", "pytest", *inner_run, str(FOLDER / "special_values.py")]
    run = subprocess.run(command, env=environment, cwd=FOLDER.parents[1], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
