"""The CPU kernels and what oneDNN computes, in processes that may use fewer instructions than this CPU has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

#: What torch and csrc may use, and what oneDNN may; a process for each that this CPU has.
LEVELS = {"DEFAULT": "SSE41", "AVX2": "AVX2", "AVX512": "AVX512_CORE"}
FILES = ("csrc/special_values.py", "csrc/test_cpu_math.py", "test_random_cases.py")
#: Without the fused products of AVX2 some sums err more than torch's in float64: there values are tested alone.
WITH_FUSED_PRODUCTS = ("contract/test_1_answer.py",)


# Not marked slow, of which a draw takes one case: each of its processes draws from its own tests.
@pytest.mark.parametrize("level", LEVELS)
def test_in_a_process(level: str, run_tests: Callable[..., None]) -> None:
    has = torch.backends.cpu.get_cpu_capability()
    if has not in LEVELS:
        pytest.skip(f"{has}: no instruction sets to choose from")
    if list(LEVELS).index(level) > list(LEVELS).index(has):
        pytest.skip(f"this CPU has no more than {has}")
    # Other files than the first one run with all that the machine has in the process of the tests.
    files = FILES[:1] if level == has else FILES + WITH_FUSED_PRODUCTS * (level == "AVX2")
    chosen = "cpu-cpu or cpu_math or special_values"
    run_tests(files, "-k", chosen, ATEN_CPU_CAPABILITY=level.lower(), ONEDNN_MAX_CPU_ISA=LEVELS[level])
