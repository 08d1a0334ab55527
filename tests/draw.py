"""Which parametrised cases a run takes: with ``pytest --draw`` a share that the seed of the run draws, else all.

Every test function runs. Of its cases the draw takes a random set that covers its parameters: each value of each
parameter occurs, such as every op, dtype, backend and layout, but not every combination of them. A parameter with many
values, such as the samples of all ops, lends some to each run. Of a function's cases that are marked ``slow`` one runs.
Each case has a chance in every draw, so over the runs every value occurs.

The seed is that of pytest-randomly, which also orders the tests: ``--randomly-seed=N`` repeats both.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any

import pytest

#: Of a parameter with more values a run need not take each. FEW is for runs in which a case takes half a second.
MANY, FEW = 50, 1


#: How many cases a collection found that this machine can run.
COUNTED = pytest.StashKey[int]()


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--draw",
        type=int,
        nargs="?",
        const=MANY,
        metavar="MANY",
        help="of a test's parametrised cases take a share that the seed draws; each value of a parameter occurs, of a "
        f"parameter with more than MANY ({MANY}) some",
    )


def options(config: pytest.Config, many: int | None = None) -> list[str]:
    """Options with which another run of pytest draws if this one does."""
    drawing = config.getoption("draw")
    return [] if drawing is None else [f"--draw={many or drawing}"]


def seed_of(config: pytest.Config) -> int:
    """The seed of pytest-randomly, without which there is nothing to draw by."""
    seed = config.getoption("randomly_seed", None)
    if not isinstance(seed, int):
        raise pytest.UsageError("--draw needs pytest-randomly, whose seed decides which cases run")
    return seed


def function_of(item: pytest.Item) -> str:
    """The test function of a case."""
    return item.nodeid.partition("[")[0]


def drawn(items: list[pytest.Item], seed: int, many: int = MANY) -> list[pytest.Item]:
    """A share of the cases of each function, in the order that they have. Equal seeds draw equal shares."""
    groups: dict[tuple[str, bool], list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[function_of(item), item.get_closest_marker("slow") is not None].append(item)
    kept: set[pytest.Item] = set()
    for (name, slow), cases in groups.items():
        # Sorted first: the order of a collection is random, and not the same in all processes.
        order = sorted(cases, key=lambda item: item.nodeid)
        random.Random(f"{seed} {name}").shuffle(order)
        kept.update(order[:1] if slow else _cover(order, many))
    return [item for item in items if item in kept]


def _cover(cases: list[pytest.Item], many: int) -> list[pytest.Item]:
    """The cases, in their order, that have a value of a parameter which those before them lack; at least the first."""
    values_of: dict[str, set[Hashable]] = defaultdict(set)
    for case in cases:
        for parameter, value in _values(case):
            values_of[parameter].add(value)
    wanted = {parameter for parameter, values in values_of.items() if len(values) <= many}
    found, seen = cases[:1], set(_values(cases[0]))
    for case in cases[1:]:
        new = {pair for pair in _values(case) if pair[0] in wanted} - seen
        if new:
            found.append(case)
            seen |= new
    return found


def _values(item: pytest.Item) -> Iterator[tuple[str, Hashable]]:
    """The values of a case's parameters. An object is told by its identity: not every one can be hashed."""
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    for parameter, value in parameters.items():
        yield parameter, value if isinstance(value, (str, int, float)) else id(value)
