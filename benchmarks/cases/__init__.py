"""All cases, by family. A new family adds a file here and its name to the list below."""

from __future__ import annotations

from benchmarks.case import Case
from benchmarks.cases import (
    batch_norm,
    bias_act,
    cpu,
    cross_entropy,
    elementwise,
    glu,
    group_norm,
    heads,
    kl_div,
    layer_norm,
    max_pool2d,
    residual,
    response_norm,
    rotary,
    softmax,
    squeeze_excite,
)

FAMILIES = (
    softmax,
    elementwise,
    layer_norm,
    batch_norm,
    group_norm,
    response_norm,
    bias_act,
    glu,
    squeeze_excite,
    max_pool2d,
    residual,
    rotary,
    cross_entropy,
    heads,
    kl_div,
    cpu,
)


def all_cases() -> list[Case]:
    """All cases in the order of a run: those with bars first, so that an interrupted run has them."""
    cases = [case for family in FAMILIES for case in family.CASES]
    return sorted(cases, key=lambda case: ("cpu", "bars", "sweep").index(case.suite))
