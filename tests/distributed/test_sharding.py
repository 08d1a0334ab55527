"""DTensors: results, gradients and second derivatives of four processes are those of one."""

from __future__ import annotations

import pytest
import torch

from .workers import RANKS, work


@pytest.mark.slow
def test_rules_on_four_processes(tmp_path):
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=RANKS)
