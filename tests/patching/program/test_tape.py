"""What a tape notes of the operations that it sees."""

from __future__ import annotations

import pytest
import torch

from fastlayers.patching.program.tape import Tape

pytestmark = pytest.mark.cpu_kernels


def test_the_version_of_statistics_stays():
    """As torch has it: a batch norm whose backward is still to come refers to them."""
    x, mean, var, count = torch.randn(4, 6), torch.zeros(6), torch.ones(6), torch.tensor(0)
    tape = Tape([x, mean, var, count], [mean, var, count])
    with tape:
        torch.ops.fastlayers.batch_norm_train(x, mean, var, None, None, 0.1, 1e-5, None, 0, False, count)
    assert [t is count for t in tape.written] == [True]
    (operation,) = tape.operations
    assert operation.effect
