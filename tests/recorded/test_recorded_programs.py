"""What the passes make of the programs of whole networks, which were recorded on an H100, is what it was."""

from __future__ import annotations

import difflib
import itertools

import pytest

pytest.importorskip("triton")

from tests.recorded.programs import NETWORKS, expected_texts, fused_texts


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_passes(network):
    """A change that is meant: look at it, and accept it with ``python3 -m tests.recorded.programs``."""
    found, expected = fused_texts(network), expected_texts(network)
    assert len(found) == len(expected)
    for i, (now, before) in enumerate(zip(found, expected, strict=True)):
        difference = difflib.unified_diff(before.splitlines(), now.splitlines(), lineterm="", n=1)
        assert now == before, f"program {i} of {network}:\n" + "\n".join(itertools.islice(difference, 60))
