"""The debugging mode of graphs: memory that no live value owns is spoilt, and replays are compared with calls op by op.

``FASTLAYERS_CHECK_GRAPHS=1`` turns it on. What it finds is an error of fastlayers, or a forward whose results depend on
something that neither its arguments nor its module show.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from fastlayers.graphs.pool import Pool, in_memory
from fastlayers.ops.dtensor import memory_of
from fastlayers.patching.regions.entries import Autocast

__all__ = ["ENABLED", "compare", "spoil"]

ENABLED = os.environ.get("FASTLAYERS_CHECK_GRAPHS") == "1"

#: Bytes that are NaN as floats and -1 as integers.
POISON = 0xFF
#: How far two runs may be apart, relative to the largest element: products may be summed in another order.
APART = {torch.bfloat16: 2**-4, torch.float16: 2**-7, torch.float32: 1e-3, torch.float64: 1e-9}


def spoil(pool: Pool, device: torch.device) -> None:
    """Fill with :data:`POISON` what neither a tensor nor a call that waits for its backward has."""
    waiting = pool.pending()
    for call in waiting:
        call.save()
    for block in pool.blocks(used=False):
        in_memory(block, device).fill_(POISON)
    for call in waiting:
        call.restore()
        call.copies = None


def compare(found: Sequence[Tensor | None], expected: Sequence[Tensor | None], what: str, autocast: Autocast) -> None:
    """Compare what a replay gives with what a call op by op does, which computes in the dtypes of ``autocast``.

    Raises:
        AssertionError: they are further apart than two runs of the same operations may be.
    """
    enabled, low = autocast["cuda"]
    of_casts = APART[low] if enabled and low is not None else 0.0
    for i, (ours, other) in enumerate(zip(found, expected, strict=True)):
        if ours is None or other is None:
            if (ours if other is None else other) is not None:
                raise AssertionError(f"{what}: only one of the replay and the call op by op has number {i}")
            continue
        ours, other = memory_of(ours).detach(), memory_of(other).detach()
        greatest = other.double().abs().nan_to_num(0, 0, 0).amax().item() if other.numel() else 0.0
        try:
            allowed = max(APART[other.dtype], of_casts) * greatest if other.dtype in APART else 0.0
            torch.testing.assert_close(ours, other, rtol=0, atol=allowed, equal_nan=True)
        except AssertionError as error:
            nans = f"{ours.isnan().sum()} and {other.isnan().sum()} NaN"
            raise AssertionError(f"{what}, number {i}, of a replay and of the call op by op: {nans}; {error}") from None
