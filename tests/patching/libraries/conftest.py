from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def few_logits_are_deferred(monkeypatch):
    """Those of the little models here would be computed with their loss."""
    from fastlayers.patching.libraries.transformers import deferred_logits

    monkeypatch.setattr(deferred_logits, "is_large", lambda input, linear_weight: True)


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
