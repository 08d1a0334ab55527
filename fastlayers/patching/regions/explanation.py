"""What :func:`fastlayers.explain` prints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fastlayers.patching.program.dump import source_of
from fastlayers.patching.reasons import Reason
from fastlayers.patching.regions.entries import Entry
from fastlayers.patching.regions.recording import place_of
from fastlayers.patching.regions.region import Region
from fastlayers.patching.regions.rows import region_of, rows_of, signature_of
from fastlayers.patching.report import change, readable, with_detail

__all__ = ["explained", "recorded_at_once"]


def regions_in(model: nn.Module) -> set[Region]:
    return {region for module in model.modules() if (region := region_of(module)) is not None}


@contextmanager
def recorded_at_once(model: nn.Module) -> Iterator[None]:
    """Record first calls inside, with the lines of their operations."""
    before = {region: region.explained for region in regions_in(model)}
    for region in before:
        region.explained = True
    try:
        yield
    finally:
        for region, explained in before.items():
            region.explained = explained


@contextmanager
def explained(model: nn.Module) -> Iterator[None]:
    """Print what the calls of a model run. Inside, first calls are recorded, with the lines of their operations."""
    calls = {id(entry): entry.calls for region in regions_in(model) for entry in region.made()}
    with recorded_at_once(model):
        yield
    print("\n".join(text_of(model, calls)) or "# no call of a module that runs as a region")


def text_of(model: nn.Module, calls: dict[int, int]) -> Iterator[str]:
    """A text for each program that ran, or was recorded, since its calls were counted, and for each reason why not."""
    for region, row in rows_of(model).items():
        assert region is not None
        for entry in region.made():
            known = None if entry.fits is None else 0  # One for many sizes was made of others, and may not have run.
            if entry.calls != calls.get(id(entry), known):
                yield text_of_program(region, entry, entry.calls - calls.get(id(entry), 0))
        for reason, detail in row.op_by_op:
            if reason is not Reason.SEEN_ONCE:
                yield f"{title_of(region)}\n# op by op: {with_detail(reason, detail)}\n"


def title_of(region: Region) -> str:
    place = place_of(region.original)
    return f"# {region.original.__qualname__}.forward{f', {place}' if place else ''}"


def text_of_program(region: Region, entry: Entry, calls: int) -> str:
    program, row = entry.fused or entry.program, signature_of(entry)
    assert program is not None
    costs = f"launches {change(*row.launches)}, moved {change(*row.moved, readable)}"
    given = [f"tensor {i} of the call" for i in range(entry.count)]
    inputs = entry.order([*given, *entry.reader.tensors, *("a constant" for _ in entry.constants)])
    ran = f"# {calls} calls ran as a region; of each: {costs}"
    lines = title_of(region), f"# {entry.what}", ran, ""
    return "\n".join([*lines, source_of(program, inputs), ""])
