"""The contract on the Triton backend without a GPU: these tests once more, in a process where Triton interprets.

Whether it does is settled when Triton is first imported. To run one by hand::

    TRITON_INTERPRET=1 pytest tests/contract -k cpu-triton
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FOLDER = Path(__file__).parent
#: Compilers and CUDA graphs take the kernels for what they are, not for what the interpreter makes of them.
FILES = {
    "test_1_answer.py": "cpu-triton-float32",
    "test_3_side_effects.py": "cpu-triton-float32 and not long",
    "test_4_derivatives.py": "cpu-triton",
    "../test_cross_entropy.py": "cpu-triton",
    "../test_norms.py": "cpu-triton",
    "../test_residual.py": "cpu-triton",
    "../test_glu.py": "cpu-triton",
    "../test_linear.py": "cpu-triton",
}


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets here already")
@pytest.mark.parametrize("name", FILES)
def test_in_the_interpreter(name):
    # numpy warns of every NaN that the interpreter meets on purpose.
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::RuntimeWarning", "-k", FILES[name]]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(FOLDER / name)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout.splitlines()[-1]
