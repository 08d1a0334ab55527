"""DTensors: results, gradients and second derivatives of four processes are those of one."""

from __future__ import annotations

from functools import partial

import pytest

from tests.distributed.processes import run_in_processes
from tests.distributed.sharding_checks import PARTS, RANKS, check_all, check_cases


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_rules_on_four_processes(part, tmp_path):
    run_in_processes(partial(check_cases, part), RANKS, tmp_path)


@pytest.mark.slow
def test_more_on_four_processes(tmp_path):
    """Random numbers, replicas, ranks without rows, statistics, compiling, a language model."""
    run_in_processes(check_all, RANKS, tmp_path)
