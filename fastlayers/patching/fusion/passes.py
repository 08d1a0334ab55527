"""The passes over a recorded program, in their order, and what runs them.

A pass takes a program and returns one that computes the same; it adds to the values of both what it makes.
``FASTLAYERS_PASSES`` in the environment switches some off: ``-thin_products,-absorbed``.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache

from torch._subclasses.fake_tensor import FakeTensorMode

from fastlayers.patching.fusion.absorption import absorbed, with_copies
from fastlayers.patching.fusion.attention import with_given_layouts, with_scales
from fastlayers.patching.fusion.cleaning import with_numbers, without_repetitions
from fastlayers.patching.fusion.kernels import with_kernels
from fastlayers.patching.fusion.residual_products import with_residual_products
from fastlayers.patching.fusion.specialised import specialised, with_masks_alone
from fastlayers.patching.fusion.sums_after_norms import with_residuals
from fastlayers.patching.fusion.sums_of_products import with_sums_of_products
from fastlayers.patching.fusion.thin_products import with_launches, with_thin_products
from fastlayers.patching.fusion.values_again import with_values_again
from fastlayers.patching.program import lint
from fastlayers.patching.program.program import Program

__all__ = ["PASSES", "Pass", "enabled", "fused", "prepared", "watched"]

logger = logging.getLogger("fastlayers")


@dataclass(frozen=True)
class Pass:
    """One pass.

    Attributes:
        name: by which it is switched off, timed and blamed.
        run: gives the program that it makes of another one.
        place: why it stands where it does.
        after: the passes that must come before it.
        one_size: whether it serves programs alone whose values have one size.
        cost: per cent of the time of all passes, on the programs in tests/recorded.
    """

    name: str
    run: Callable[[Program], Program]
    place: str
    after: tuple[str, ...] = ()
    one_size: bool = False
    cost: int = 0


PASSES = (
    Pass("numbers", with_numbers, "a constant is a number before operations are compared"),
    Pass("repetitions", without_repetitions, "what is computed twice would have two readers", ("numbers",), cost=1),
    Pass("attention_layouts", with_given_layouts, "copies before attention would hide the factors"),
    Pass("attention_scales", with_scales, "before products take the factors", ("attention_layouts",)),
    Pass("specialised", specialised, "before sums hide the products of casts", ("attention_scales",), cost=3),
    Pass("masks_alone", with_masks_alone, "of dropouts that products no longer read", ("specialised",)),
    Pass("sums_of_products", with_sums_of_products, "of the products that are left", ("specialised",), cost=1),
    Pass("values_again", with_values_again, "knows thin products by their function", ("specialised",)),
    Pass("thin_products", with_thin_products, "of those that are left", ("sums_of_products",), one_size=True, cost=1),
    Pass(
        "launches",
        with_launches,
        "of thin products, by which others know them",
        ("thin_products", "values_again"),
        one_size=True,
    ),
    Pass("sums_after_norms", with_residuals, "before kernels absorb the casts around a norm"),
    Pass("absorbed", absorbed, "what it leaves is for generated kernels", ("sums_after_norms", "specialised"), cost=2),
    Pass("copies", with_copies, "of what kernels absorbed nothing of", ("absorbed",)),
    Pass("kernels", with_kernels, "of all that has no kernel yet", ("copies", "launches"), cost=90),
    Pass("residual_products", with_residual_products, "the last: a product writes over a value", ("kernels",)),
)


_watcher: ContextVar[Callable[[Program], object] | None] = ContextVar("_watcher", default=None)


@contextmanager
def watched(see: Callable[[Program], object]) -> Iterator[None]:
    """Show each program that is to be rewritten, with the values of its recording."""
    token = _watcher.set(see)
    try:
        yield
    finally:
        _watcher.reset(token)


def prepared(program: Program) -> Program:
    """The program with what passes need to make values."""
    return program if program.symbols else replace(program, fake=FakeTensorMode())


def enabled() -> list[Pass]:
    """The passes that are not switched off."""
    return [each for each in PASSES if each.name not in switched_off()]


def fused(program: Program, failed: Callable[[str, Exception], object] | None = None) -> Program:
    """A program that computes the same with fewer passes over memory.

    Args:
        program: as it was recorded.
        failed: called with what failed and its error; the program of the last pass that did not is returned then.
    """
    see = _watcher.get()
    if see is not None:
        see(program)
    program = prepared(program)
    for each in enabled():
        if each.one_size and program.symbols:
            continue
        begin = time.perf_counter()
        try:
            found = each.run(program)
            if lint.ENABLED:
                lint.lint(found)
        except Exception as error:
            if failed is None:
                raise
            failed(f"the pass {each.name}", error)
            return program
        logger.debug("the pass %s took %.1f ms", each.name, 1e3 * (time.perf_counter() - begin))
        program = found
    return program


@cache
def switched_off() -> frozenset[str]:
    """The passes that the environment switches off.

    Raises:
        ValueError: there is no pass of such a name.
    """
    given = [name.strip() for name in os.environ.get("FASTLAYERS_PASSES", "").split(",") if name.strip()]
    names = [each.name for each in PASSES]
    for name in given:
        if name[1:] not in names or name[0] != "-":
            expected = ", ".join(f"-{known}" for known in names)
            raise ValueError(f"FASTLAYERS_PASSES has {name!r}; expected some of {expected}")
    return frozenset(name[1:] for name in given)
