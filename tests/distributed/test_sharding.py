"""DTensors: results, gradients and second derivatives of four processes are those of one."""

from __future__ import annotations

import pytest
from processes import run_in_processes
from sharding_checks import RANKS, check_all


@pytest.mark.slow
def test_rules_on_four_processes(tmp_path):
    run_in_processes(check_all, RANKS, tmp_path)
