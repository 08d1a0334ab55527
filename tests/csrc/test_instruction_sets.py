"""The CPU kernels and what oneDNN computes, in processes that may use fewer instructions than this CPU has."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests import ROOT

#: What torch and csrc may use, and what oneDNN may; a process for each that this CPU has.
LEVELS = {"DEFAULT": "SSE41", "AVX2": "AVX2", "AVX512": "AVX512_CORE"}
FILES = ("csrc/special_values.py", "csrc/test_cpu_math.py", "test_random_cases.py")
#: Without the fused products of AVX2 some sums err more than torch's in float64: there values are tested alone.
WITH_FUSED_PRODUCTS = ("contract/test_1_answer.py",)


# Not marked slow, of which a draw takes one case: each of its processes draws from its own tests.
@pytest.mark.parametrize("level", LEVELS)
def test_in_a_process(level: str, inner_run: list[str]) -> None:
    has = torch.backends.cpu.get_cpu_capability()
    if has not in LEVELS:
        pytest.skip(f"{has}: no instruction sets to choose from")
    if list(LEVELS).index(level) > list(LEVELS).index(has):
        pytest.skip(f"this CPU has no more than {has}")
    # Other files than the first one run with all that the machine has in the process of the tests.
    files = FILES[:1] if level == has else FILES + WITH_FUSED_PRODUCTS * (level == "AVX2")
    command = [sys.executable, "-m", "pytest", *inner_run, "-k", "cpu-cpu or cpu_math or special_values"]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": level.lower(), "ONEDNN_MAX_CPU_ISA": LEVELS[level]}
    run = subprocess.run(
        [*command, *(str(ROOT / "tests" / name) for name in files)],
        env=environment, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
