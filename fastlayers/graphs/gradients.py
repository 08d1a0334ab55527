"""The gradients of a captured backward, which are handed out in the memory of its graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

__all__ = ["Gradients"]

_uses = torch._C._storage_Use_Count  # type: ignore[attr-defined]


class Gradients:
    """Tensors that the replays of a graph write into.

    To copy them would take as much memory again as the parameters have. But the next forward writes into that of its
    graph, so somebody who still has a gradient then needs one with memory of its own.

    Args:
        grads: the tensors of the graph.
        lend: hand out tensors of the same memory, where no other tensor shares it; copies otherwise.
    """

    def __init__(self, grads: Sequence[Tensor], lend: bool) -> None:
        self._grads = grads
        (alone,) = uses([torch.empty(1)])
        often = Counter(map(id, grads))
        self._lent = [
            lend and n == alone and often[id(t)] == 1 and whole(t) for n, t in zip(uses(grads), grads, strict=True)
        ]
        self._copied = [t for t, lent in zip(grads, self._lent, strict=True) if not lent]
        self._storages = [t.untyped_storage() for t in compress(grads, self._lent)]
        self._addresses = [storage._cdata for storage in self._storages]
        self._idle = [*map(_uses, self._addresses)]

    def hand_out(self) -> list[Tensor]:
        """The gradients of the last replay."""
        copies = [torch.empty_like(t) for t in self._copied]
        if copies:
            torch._foreach_copy_(copies, self._copied)
        copy = iter(copies)
        return [t.detach() if lent else next(copy) for t, lent in zip(self._grads, self._lent, strict=True)]

    def in_use(self) -> bool:
        """Whether somebody has a gradient that was handed out, or a view of one."""
        return [*map(_uses, self._addresses)] != self._idle

    def move(self) -> None:
        """Give those that are in use memory of their own. What the graph writes afterwards is lost."""
        for storage, address, idle in zip(self._storages, self._addresses, self._idle, strict=True):
            if _uses(address) != idle:
                storage.resize_(storage.nbytes())  # new memory, with what was in the old one


def uses(tensors: Sequence[Tensor]) -> list[int]:
    """How many tensors, and objects of Python, share the storage of each."""
    return [*map(_uses, [t.untyped_storage()._cdata for t in tensors])]


def whole(t: Tensor) -> bool:
    """Whether a tensor fills its storage, each element once."""
    return t.untyped_storage().nbytes() == t.nbytes
