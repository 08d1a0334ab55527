"""The raw Triton kernels: right in Triton's interpreter, and compiled for sm_80 without a spill.

Whether Triton interprets is settled when it is first imported, so each set of files runs in a process of its own. None
needs a GPU. To run one file by hand::

    TRITON_INTERPRET=1 pytest tests/kernels/interpret_softmax.py
    pytest tests/kernels/compile_all.py  # for sm_90, too
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import draw

pytest.importorskip("triton")

FOLDER = Path(__file__).parent
INTERPRETED = sorted(FOLDER.glob("interpret_*.py"))
#: A process for each: it takes five seconds to import torch and Triton, and to collect.
OTHERS = {*FOLDER.glob("*.py")} - {*INTERPRETED, FOLDER / "interpreted.py", Path(__file__)}
SETS = {"compiled": sorted(OTHERS), "interpreted": INTERPRETED}


# Not marked slow, of which a draw takes one case: each of its processes draws from its own tests.
@pytest.mark.parametrize("name", SETS)
def test_triton_kernels(name: str, run_tests: Callable[..., None]) -> None:
    interprets = "0" if name == "compiled" else "1"
    # Every specialisation for sm_90 takes four minutes: make test-gpu compiles them.
    run_tests(SETS[name], "-k", "not sm_90", many=draw.FEW, TRITON_INTERPRET=interprets)
