"""The raw Triton kernels: right in Triton's interpreter, and compiled for sm_80 and sm_90 without a spill.

Whether Triton interprets is settled when it is first imported, so each set runs in a process of its own, whatever the
process of this test has imported. Neither needs a GPU. To run one by hand::

    TRITON_INTERPRET=1 pytest tests/triton_kernels/interpret_softmax.py
    pytest tests/triton_kernels/compile_all.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FOLDER = Path(__file__).parent / "triton_kernels"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_triton_kernels(name: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1" if name.startswith("interpret") else "0"}
    # numpy warns of every NaN that the interpreter meets on purpose.
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    command = [sys.executable, "-m", "pytest", *options, str(FOLDER / f"{name}.py")]
    run = subprocess.run(command, env=environment, cwd=FOLDER.parents[1], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
