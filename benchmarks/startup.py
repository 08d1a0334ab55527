"""The cost of a process: the import of fastlayers, and the first call of a kernel."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from fastlayers.backends import problem

PROCESSES = 3

IMPORT = """
import time, torch
start = time.perf_counter()
import fastlayers
print(time.perf_counter() - start)
"""

#: CUDA is initialised before, and torch's softmax has run.
FIRST_CALL = """
import time, torch, fastlayers
from fastlayers.backends import backend
x = torch.randn(64, 64, device="cuda")
torch.softmax(x, -1)
torch.cuda.synchronize()
start = time.perf_counter()
with backend("{name}"):
    fastlayers.functional.softmax(x, -1)
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def startup() -> list[dict[str, Any]]:
    """Seconds of each in a new process, and its bar in seconds; None without a bar."""
    wanted: list[tuple[str, str, float | None]] = [("import fastlayers, after torch", IMPORT, 0.2)]
    for name, bar in (("cuda", 0.05), ("triton", None)):
        if problem(name) is None:
            wanted.append((f"first softmax, {name} backend", FIRST_CALL.format(name=name), bar))
    return [{"what": what, "bar": bar} | median_seconds(program) for what, program, bar in wanted]


def median_seconds(program: str) -> dict[str, Any]:
    """The median of the seconds that a few processes print, or the last line of an error."""
    root = Path(__file__).parents[1]
    printed = []
    for _ in range(PROCESSES):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=False)
        if done.returncode:
            return {"seconds": None, "reason": done.stderr.strip().rpartition("\n")[2]}
        printed.append(float(done.stdout))
    return {"seconds": round(statistics.median(printed), 4), "reason": None}
