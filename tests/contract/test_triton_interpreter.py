"""The contract on the Triton backend without a GPU: these tests again, in processes where Triton interprets.

Triton decides whether it interprets when it is first imported. To run one by hand::

    TRITON_INTERPRET=1 pytest tests/contract -k cpu-triton
"""

from __future__ import annotations

import os

import pytest

from tests import draw

pytest.importorskip("triton")

FAMILIES = [f"ops/test_{name}.py" for name in ("cross_entropy", "norms", "residual", "glu", "linear", "rotary")]
#: What runs in one process each: files, what is chosen of them, and how many values of a parameter a draw takes. Left
#: out are compilers and CUDA graphs, which take kernels for what they are, not for what the interpreter makes of them;
#: long rows, which run on a GPU; equal bits from run to run, since the interpreter runs programs one after another; and
#: derivatives that point 1 compares, or that are plain PyTorch on every backend.
CHOSEN = {
    "every op": (("contract/test_1_answer.py",), "test_answer and cpu-triton", draw.MANY),
    "every test": (
        ("contract/test_1_answer.py", "contract/test_3_side_effects.py", "contract/test_4_derivatives.py", *FAMILIES),
        "cpu-triton and not test_answer and not run_to_run and not (long and side_effects)"
        " and not laid_out and not gradcheck and not gradgradcheck"
        " and not (float64 and (side_effects or autocast or no_gradient))",
        draw.FEW,
    ),
}


# Not marked slow, of which a draw takes one case: each of its processes draws from its own tests.
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets here already")
@pytest.mark.parametrize("name", CHOSEN)
def test_in_the_interpreter(name, run_tests):
    files, chosen, many = CHOSEN[name]
    run_tests(files, "-k", chosen, many=many, TRITON_INTERPRET="1")
