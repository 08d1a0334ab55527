"""What ``explain`` prints: programs as Python that runs, with the lines that their operations come from."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fastlayers.patching.program.tape import Tape


def computed(x):
    y = torch.tanh(x * 2)
    return torch.nn.functional.linear(y, x)


def test_lines_of_both_directions():
    x = torch.randn(4, 4, requires_grad=True)
    for sources in (True, False):
        tape = Tape([x], (), sources)
        with tape:
            out = computed(x)
            with _disable_current_modes():
                dy = torch.ones_like(out)
            tape.protect(dy, "g0")
            torch.autograd.grad(out, x, dy)
        first = computed.__code__.co_firstlineno
        line = f"test_patching_explain.py:{first + 1}: y = torch.tanh(x * 2)"
        last = f"test_patching_explain.py:{first + 2}: return torch.nn.functional.linear(y, x)"
        found = {str(each.function): each.source for each in tape.operations if not each.view}
        expected = {
            "aten.mul.Tensor": line, "aten.tanh.default": line, "aten.mm.default": last,
            "aten.tanh_backward.default": line,
        }  # fmt: skip
        assert expected.keys() <= found.keys()
        assert all(found[name] == (expected[name] if sources else None) for name in expected)
