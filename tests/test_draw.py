"""The share of the cases that ``pytest --draw`` takes, and the floor below which the suite may not shrink."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch

from tests import ROOT, draw

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Case:
    """What the draw reads of a pytest item."""

    def __init__(self, function, *, marks=(), **parameters):
        values = f"[{'-'.join(map(str, parameters.values()))}]" if parameters else ""
        self.nodeid, self.marks = f"test.py::{function}{values}", marks
        if parameters:
            self.callspec = SimpleNamespace(params=parameters)

    def get_closest_marker(self, name):
        return name if name in self.marks else None


def cases(function, *, marks=(), **parameters):
    """Every combination of the values of a function's parameters."""
    for values in itertools.product(*parameters.values()):
        yield Case(function, marks=marks, **dict(zip(parameters, values, strict=True)))


SUITE = [
    *cases("test_pairs", op=range(7), dtype=(torch.half, torch.float, torch.double), layout=("rows", "columns")),
    *cases("test_samples", sample=range(400)),
    *cases("test_two", on=(True, False)),
    *cases("test_minutes", kind=range(5), marks=("slow",)),
    Case("test_alone"),
]


def values(drawn, function, parameter):
    return [case.callspec.params[parameter] for case in drawn if f"::{function}[" in case.nodeid]


@pytest.mark.parametrize("seed", range(5))
def test_every_function_and_every_value_occurs(seed):
    found = draw.drawn(SUITE, seed)
    for parameter in ("op", "dtype", "layout"):
        assert set(values(found, "test_pairs", parameter)) == set(values(SUITE, "test_pairs", parameter))
    assert len(values(found, "test_pairs", "op")) <= 7 + 3 + 2 - 2  # a case more only where it shows something
    assert len(values(found, "test_samples", "sample")) == 1  # it has more than draw.MANY values
    assert len(values(found, "test_two", "on")) == 2
    assert len(values(found, "test_minutes", "kind")) == 1
    assert SUITE[-1] in found
    assert found == [case for case in SUITE if case in found]


def test_a_seed_draws_the_same_from_a_collection_in_any_order():
    """Each worker of xdist collects by itself, and in a random order."""
    first, again = (draw.drawn(suite, 5) for suite in (SUITE, SUITE[::-1]))
    assert first == again[::-1]
    assert first != draw.drawn(SUITE, 6)


def test_over_the_runs_every_case_occurs():
    runs = [draw.drawn(SUITE, seed) for seed in range(40)]
    assert {case.nodeid for found in runs for case in found if "pairs" in case.nodeid} == {
        case.nodeid for case in SUITE if "pairs" in case.nodeid
    }
    assert len({case.nodeid for found in runs for case in found if "samples" in case.nodeid}) > 30


def test_fewer_where_a_parameter_with_many_values_lends_some():
    found = draw.drawn(SUITE, 0, many=3)
    assert len(set(values(found, "test_pairs", "op"))) < 7
    assert len(set(values(found, "test_pairs", "dtype"))) == 3


def test_the_seed_is_that_of_pytest_randomly():
    without = SimpleNamespace(getoption=lambda name, default=None: default)
    with pytest.raises(pytest.UsageError, match="--draw needs pytest-randomly"):
        draw.seed_of(without)


def test_the_suite_has_not_shrunk(pytestconfig):
    """Cases are neither removed nor folded into loops. tools/budgets.py counts the functions."""
    chosen = any(map(pytestconfig.getoption, ("keyword", "markexpr", "deselect", "ignore", "ignore_glob")))
    if chosen or pytestconfig.args != pytestconfig.getini("testpaths"):
        pytest.skip("a part of the suite runs")
    assert (
        pytestconfig.stash[draw.COUNTED] >= tomllib.loads((ROOT / "budgets.toml").read_text())["floors"]["test_cases"]
    )
