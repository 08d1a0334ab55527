"""The gradients of a captured backward, which are handed out in the memory of its graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from fastlayers.graphs.pool import in_memory

__all__ = ["Gradients"]

_uses = torch._C._storage_Use_Count  # type: ignore[attr-defined]


class Gradients:
    """Tensors that the replays of a graph write into.

    To copy them would take as much memory again as the parameters have. But the next forward writes into that of its
    graph, so somebody who still has a gradient then needs one with memory of its own. It is copied from then on.

    Args:
        grads: the tensors of the graph.
        lend: hand out tensors of the same memory, where no other tensor shares it; copies otherwise.
    """

    def __init__(self, grads: Sequence[Tensor], lend: bool) -> None:
        self._grads = [*grads]
        (alone,) = uses([torch.empty(1)])
        often = Counter(map(id, grads))
        #: The storages that are lent, by the places of their gradients,
        self._lent = {
            i: t.untyped_storage()._cdata
            for i, (t, n) in enumerate(zip(grads, uses(grads), strict=True))
            if lend and n == alone and often[id(t)] == 1 and whole(t)
        }
        #: and how often each is used if nobody has one.
        self._idle = self._present_uses()

    def hand_out(self) -> list[Tensor]:
        """The gradients of the last replay."""
        copied = [t for i, t in enumerate(self._grads) if i not in self._lent]
        copies = [torch.empty_like(t) for t in copied]
        if copies:
            torch._foreach_copy_(copies, copied)
        copy = iter(copies)
        return [t.detach() if i in self._lent else next(copy) for i, t in enumerate(self._grads)]

    def in_use(self) -> bool:
        """Whether somebody has a gradient that was lent, or a view of one."""
        return self._present_uses() != self._idle

    def move(self) -> None:
        """Give those that are in use memory of their own. The graph writes where it did."""
        now = self._present_uses()
        for i in [i for i, idle in self._idle.items() if now[i] != idle]:
            del self._lent[i], self._idle[i]
            storage = self._grads[i].untyped_storage()
            # Its memory stays part of the graph's, as that of what a graph has freed does.
            self._grads[i] = same_memory(self._grads[i])
            storage.resize_(storage.nbytes())  # new memory, with what was in the old one

    def _present_uses(self) -> dict[int, int]:
        return {i: _uses(address) for i, address in self._lent.items()}


def same_memory(t: Tensor) -> Tensor:
    """A tensor in the memory of one that fills its storage, which does not keep it."""
    return in_memory((t.data_ptr(), t.nbytes), t.device, t.dtype).as_strided(t.size(), t.stride())


def uses(tensors: Sequence[Tensor]) -> list[int]:
    """How many tensors, and objects of Python, share the storage of each."""
    return [*map(_uses, [t.untyped_storage()._cdata for t in tensors])]


def whole(t: Tensor) -> bool:
    """Whether a tensor fills its storage, each element once."""
    return t.untyped_storage().nbytes() == t.nbytes
