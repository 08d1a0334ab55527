"""Which parametrised cases a run takes: with ``pytest --draw`` a share that the seed of the run draws, else all.

Every test function runs. Of its cases the draw takes a random set that covers its parameters: each value of each
parameter occurs, such as every op, dtype, backend and layout, but not every combination of them. A parameter with more
than ``MANY`` values, such as the samples of all ops, lends some of them to each run. Each case has a chance in every
draw, so over the runs every value occurs.

The seed is that of pytest-randomly, which also orders the tests: ``--randomly-seed=N`` repeats both.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import pytest

#: A parameter with more values than this one need not show each of them in every run.
MANY = 100


class Counted(NamedTuple):
    """How many test functions a collection found, and how many cases that this machine can run."""

    functions: int
    cases: int


COUNTED = pytest.StashKey[Counted]()


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--draw", action="store_true", help="of a test's parametrised cases take a share that the seed draws"
    )


def asked(config: pytest.Config) -> bool:
    return bool(config.getoption("draw"))


def seed_of(config: pytest.Config) -> int:
    """The seed of pytest-randomly, without which there is nothing to draw by."""
    seed = config.getoption("randomly_seed", None)
    if not isinstance(seed, int):
        raise pytest.UsageError("--draw needs pytest-randomly, whose seed decides which cases run")
    return seed


def function_of(item: pytest.Item) -> str:
    """The test function of a case."""
    return item.nodeid.partition("[")[0]


def drawn(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """A share of the cases of each function, in the order that they have. Equal seeds draw equal shares."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[function_of(item)].append(item)
    kept = {item for name, cases in functions.items() for item in _cover(name, cases, seed)}
    return [item for item in items if item in kept]


def _cover(name: str, cases: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Random cases of a function, each of which has a value of a parameter that those before it lack."""
    # Sorted first: the order of a collection is random, and not the same in all processes.
    order = sorted(cases, key=lambda item: item.nodeid)
    random.Random(f"{seed} {name}").shuffle(order)
    number: dict[str, set[Hashable]] = defaultdict(set)
    for case in order:
        for parameter, value in _values(case):
            number[parameter].add(value)
    wanted = {parameter for parameter, values in number.items() if len(values) <= MANY}
    found: list[pytest.Item] = []
    seen: set[tuple[str, Hashable]] = set()
    for case in order:
        new = {pair for pair in _values(case) if pair[0] in wanted} - seen
        if new or not found:
            found.append(case)
            seen |= new
    return found


def _values(item: pytest.Item) -> Iterator[tuple[str, Hashable]]:
    """The values of a case's parameters. An object is told by its identity: not every one can be hashed."""
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    for parameter, value in parameters.items():
        yield parameter, value if isinstance(value, (str, int, float)) else id(value)
