"""Contract, point 1: the same answer as torch. Point 2, the whole domain, is in which calls the table of ops has."""

from __future__ import annotations

from harness import cases, check_answer


@cases()
def test_answer(op, sample, place, dtype):
    """Shape, dtype, memory format, and an error no greater than torch's own, forward and in every gradient."""
    check_answer(op, sample, place, dtype)
