"""The contract on the Triton backend without a GPU: these tests again, in processes where Triton interprets.

Triton decides whether it interprets when it is first imported. To run one by hand::

    TRITON_INTERPRET=1 pytest tests/contract -k cpu-triton
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]
#: What runs in one process each, and what is chosen of it. Compilers and CUDA graphs are left out: they take kernels
#: for what they are, not for what the interpreter makes of them.
CHOSEN = {
    # In every layout that an incoming gradient may have, they run on a GPU. There, too, equal bits are looked for: the
    # interpreter runs programs one after another, so that none race.
    ("contract/test_1_answer.py", "contract/test_3_side_effects.py"): (
        "cpu-triton-float32 and not incoming and not run_to_run and not (long and side_effects)"
    ),
    # Point 1 compares every gradient with torch's and has those of every layout, and a second derivative is plain
    # PyTorch on every backend.
    (
        "contract/test_4_derivatives.py", "test_cross_entropy.py", "test_norms.py", "test_residual.py", "test_glu.py",
        "test_linear.py",
    ): "cpu-triton and not laid_out and not gradcheck and not gradgradcheck and not incoming",
}  # fmt: skip


# Not marked slow, of which a draw takes one case: each of its processes draws from its own tests.
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets here already")
@pytest.mark.parametrize("names", CHOSEN, ids=lambda names: names[0])
def test_in_the_interpreter(names, inner_run):
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *inner_run, "-k", CHOSEN[names], *(str(TESTS / name) for name in names)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout.splitlines()[-1]
