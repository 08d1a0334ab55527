from __future__ import annotations

import pytest


@pytest.fixture
def chunked(monkeypatch):
    """Losses of any size chunk by chunk; and a count of them."""
    from fastlayers.ops import head
    from fastlayers.ops import linear_cross_entropy as ops

    calls = []

    def sweep(leaves, *args):
        calls.append(leaves.input.shape)
        return swept(leaves, *args)

    swept = ops.sweep
    monkeypatch.setattr(head, "CPU_LEAST", 1)
    monkeypatch.setattr(ops, "sweep", sweep)
    return calls
