"""A pair of raw ops as an autograd Function, whatever its kernels are."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from fastlayers.ops.glu import Gated

PRODUCT = SimpleNamespace(
    gated_forward=lambda gate, up, act: gate * up,
    gated_backward=lambda dy, gate, up, act: (dy * up, dy * gate),  # both, whether they are needed or not
)


def test_a_debugger_steps_through_a_call():
    """Each frame of forward and backward stands in a file."""
    called = set()
    sys.setprofile(lambda frame, event, arg: called.add(frame.f_code) if event == "call" else None)
    try:
        out = Gated.run(PRODUCT, torch.ones(3, requires_grad=True), torch.ones(3), 0)
        out.sum().backward()
    finally:
        sys.setprofile(None)
    assert [code for code in called if not os.path.exists(code.co_filename)] == []
    assert {"run", "forward", "raw_forward", "backward", "raw_backward"} <= {code.co_name for code in called}
    assert type(out.grad_fn).__name__ == "GatedBackward"


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_autograd_gets_the_gradients_that_are_needed(needs):
    out = Gated.run(PRODUCT, *(torch.ones(3, requires_grad=needed) for needed in needs), 0)
    out.grad_fn.register_hook(lambda found, _: given.extend(t is not None for t in found))
    given = []
    out.sum().backward()
    assert given == [*needs]
