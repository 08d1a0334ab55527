"""Which calls are recorded: those that come again, as far as recordings have paid for themselves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from fastlayers.patching.regions.entries import Entry
from fastlayers.patching.regions.readers import Reader

__all__ = ["CALLS", "FREE", "PAYING", "SERVED", "Demand"]

#: Calls of one module with the same signature, of which the last is recorded: what is seen once may not come again, and
#: a recording takes the time of some 100 calls.
CALLS = 2
#: The same where an entry for many sizes serves it: on an H200 a Llama of 2 layers gains a tenth of a step by kernels
#: of its own size.
SERVED = 256
#: Recordings for alike modules, after which each further one has to be asked for twice as often as the one before: what
#: keeps changing rarely comes again. 240 steps of a Llama with 3 layers and batches of 104 lengths took 1.6x of stock's
#: time on a CPU when each length was recorded at its second call, and 1.13x like this.
FREE = 8
#: Recordings for alike modules inside of a checkpoint, where the first call is recorded.
MAX_RECORDINGS = 32
#: Calls that are remembered as seen.
MAX_SEEN = 4096
#: Calls that pay for a recording, so that it does not count any more.
PAYING = 20


@dataclass
class Recordings:
    """The recordings that were made for a module, or for alike ones.

    Attributes:
        count: of all, those that were refused early among them.
        entries: that came of them.
    """

    count: int = 0
    entries: list[Entry] = field(default_factory=list)

    def unpaid(self) -> int:
        """How many of them have not gained so far what they took."""
        return self.count - sum(entry.calls for entry in self.entries) // PAYING


class Demand:
    """The calls of a region without an entry of their own."""

    def __init__(self) -> None:
        #: How often each module was called with a signature, and with one but for the sizes.
        self._seen: Counter[Any] = Counter()
        self._called: Counter[Any] = Counter()
        #: The recordings that each module asked for, and those of alike modules: with equal values and shapes.
        self._asked: WeakKeyDictionary[nn.Module, Recordings] = WeakKeyDictionary()
        self._alike: dict[Any, Recordings] = defaultdict(Recordings)

    def count(self, module: nn.Module, pattern: Any, given: Sequence[Tensor]) -> None:
        """Note a call."""
        if len(self._seen) >= MAX_SEEN:
            self._seen.clear()
            self._called.clear()
        self._seen[signature(module, pattern, given)] += 1
        self._called[id(module), pattern] += 1

    def is_new(self, module: nn.Module, pattern: Any, given: Sequence[Tensor]) -> bool:
        """Whether a call has sizes that have not come again so far."""
        return self._seen[signature(module, pattern, given)] < CALLS

    def may_be_one_of_many(
        self, module: nn.Module, pattern: Any, given: Sequence[Tensor], reads: Sequence[Any], grows: bool
    ) -> bool:
        """Whether there were calls before that differ in sizes, and recordings pay. ``grows`` says that each call
        differs."""
        called = self._called[id(module), pattern]
        differ = called >= CALLS and called > self._seen[signature(module, pattern, given)]
        return (grows or differ) and self._unpaid(module, reads) <= FREE

    def is_due(
        self, module: nn.Module, pattern: Any, given: Sequence[Tensor], reads: Sequence[Any], served: bool
    ) -> bool:
        """Whether a call has come often enough. ``reads`` are readers, and what each has read; ``served`` says that an
        entry for many sizes serves it."""
        least = SERVED if served else CALLS
        return self._seen[signature(module, pattern, given)] >= least << max(0, self._unpaid(module, reads) - FREE)

    def _unpaid(self, module: nn.Module, reads: Sequence[Any]) -> int:
        unpaid = self.of(module).unpaid()
        kind = kind_of(*reads[-1]) if reads else None
        return max(unpaid, self._alike[kind].unpaid()) if kind in self._alike else unpaid

    def has_room(self, module: nn.Module) -> bool:
        """Whether the first call inside of a checkpoint is to be recorded: that compares what a forward keeps with what
        the same forward keeps when it is computed again."""
        return self.of(module).count < MAX_RECORDINGS

    def most_unpaid(self) -> int:
        """The largest number of recordings of which more than are free have not paid for themselves."""
        every = *self._asked.values(), *self._alike.values()
        return max((each.count for each in every if each.unpaid() > FREE), default=0)

    def seen_once(self) -> set[Any]:
        """The patterns, with the shape of the first tensor, of calls that no module was given often enough."""
        return {(pattern, shape) for (_, pattern, shape), count in [*self._seen.items()] if count < CALLS}

    def of(self, module: nn.Module) -> Recordings:
        return self._asked.setdefault(module, Recordings())

    def add(self, module: nn.Module, entry: Entry | None, tensors: Sequence[Tensor]) -> None:
        """Note an entry, if one was made, of which ``tensors`` are read."""
        if entry is None:
            return
        alike = self._alike[kind_of(entry.reader, entry.values, tensors)]
        alike.count += 1
        for recordings in (self.of(module), alike):
            recordings.entries.append(entry)


def signature(module: nn.Module, pattern: Any, given: Sequence[Tensor]) -> Any:
    return id(module), pattern, given[0].shape


def kind_of(reader: Reader, values: tuple[Any, ...], tensors: Sequence[Tensor]) -> Any:
    """What alike modules have in common, of which one's recording may serve the others."""
    return reader, values, tuple(getattr(t, "shape", None) for t in tensors)  # None is read where others have a tensor.
