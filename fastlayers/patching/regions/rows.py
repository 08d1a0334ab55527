"""What runs as regions, for reports."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fastlayers.patching.reasons import Reason
from fastlayers.patching.regions.entries import Entry
from fastlayers.patching.regions.region import Region
from fastlayers.patching.report import RegionRow, SignatureRow

__all__ = ["region_of", "rows_of", "signature_of"]


def region_of(module: nn.Module) -> Region | None:
    return getattr(type(module), "__fastlayers_region__", None)


def rows_of(model: nn.Module) -> dict[Region | None, RegionRow]:
    """What a report says of the regions of a model's classes, without those of which no module was called."""
    found: dict[Region | None, RegionRow] = {}
    inside: set[Region | None] = set()  # of a region that runs: they are not called any more
    for module in model.modules():
        region = region_of(module)
        if region is not None and region not in found:
            signatures = tuple(signature_of(entry) for entry in region.made())
            reasons = dict.fromkeys(reasons_of(region))
            if region in inside:
                reasons = {each: None for each in reasons if each[0] is not Reason.SEEN_ONCE}
            if signatures:
                inside.update(map(region_of, [*module.modules()][1:]))
            if signatures or reasons:
                found[region] = RegionRow(region.original.__name__, signatures, tuple(reasons))
    return found


def signature_of(entry: Entry) -> SignatureRow:
    before, after = entry.costs[0], entry.costs[-1]
    launches, moved = zip(before, after, strict=True)
    functions = () if entry.fused is None else (operation.function for operation in entry.fused.operations)
    kernels = dict.fromkeys(function.__name__ for function in functions if hasattr(function, "source"))
    return SignatureRow(entry.what, entry.calls, launches, moved, tuple(kernels))


def reasons_of(region: Region) -> Iterator[tuple[Reason, str]]:
    """Why calls of a region's modules ran op by op, with details."""
    entries = [
        entry for several in [*region.entries.values(), *region.many_sizes.entries.values()] for entry in several
    ]
    refusals = *region.refused.values(), *(entry.refusal for entry in entries if entry.refusal is not None)
    yield from ((refusal.reason, refusal.detail) for refusal in refusals)
    if region.many_sizes.reason is not None and not any(region.many_sizes.entries.values()):
        yield region.many_sizes.reason.reason, region.many_sizes.reason.detail
    yield from ((Reason.UNKNOWN_ARGUMENT, kind.__name__) for kind in region.strange)
    yield from ((Reason.DIFFERENTIATED, entry.what) for entry in entries if entry.differentiated)
    yield from ((Reason.SOME_GRADIENTS, entry.what) for entry in entries if entry.apart)
    most = region.demand.most_unpaid()
    if most:
        yield Reason.MANY_SIGNATURES, f"{most} recordings"
    once = region.demand.seen_once() - {key[2:] for key in [*region.entries]}
    if once:
        yield Reason.SEEN_ONCE, f"{len(once)} signatures"
