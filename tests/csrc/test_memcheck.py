"""The CUDA kernels stay within their tensors: compute-sanitizer watches every access, without torch's cache between."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.harness import Place, needs_gpu

SANITIZER = shutil.which("compute-sanitizer", path=os.environ.get("PATH", "") + ":/usr/local/cuda/bin")


@needs_gpu
@pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer")
@pytest.mark.skipif(Place("cuda", "cuda").missing() is not None, reason="no CUDA backend")
def test_memcheck():
    calls = Path(__file__).with_name("memcheck_calls.py")
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT)}
    command = [str(SANITIZER), "--tool", "memcheck", "--print-limit", "5", "--error-exitcode", "9"]
    run = subprocess.run(
        [*command, sys.executable, str(calls)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stdout[:6000] + run.stderr[-2000:]
