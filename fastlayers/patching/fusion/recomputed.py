"""What a backward computes again of the forward, instead of keeping it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fastlayers.patching.fusion.fusable import WHOLE, is_fusable
from fastlayers.patching.program.operators import spelled
from fastlayers.patching.program.program import Operation, Program, base_of, is_followed, storage
from fastlayers.patching.program.shapes import Shaped

__all__ = ["Recomputed", "reads_less"]

#: A tensor so many times smaller than another one is read from caches.
BROADCAST = 8


class Recomputed:
    """What a backward computes again of the forward, instead of keeping it.

    That is a value of which only fusable operations of the backward make use, if what it is computed of is not larger,
    and is kept anyway or replaces what would be kept. Inputs and results do not: others may write to them, which is an
    error only for what autograd keeps. Those in ``read`` are kept.
    """

    def __init__(self, program: Program, values: Mapping[str, Shaped], read: set[str]) -> None:
        self.values = values
        self.outer = {name: operation for operation in program.forward for name in operation.makes if name}
        self.written = program.writers
        outside = {
            name for operation in program.backward
            if not is_followed(operation, values) and not is_fusable(operation, values) for name in operation.uses
        } | set(program.wanted) | read  # fmt: skip
        own = {name: operation for operation in program.backward for name in operation.makes if name}
        outside = {base_of(name, own, values) for name in outside if name is not None}
        self.given = {storage(values[name]) for name in (*program.inputs, *program.results)}
        self.known: dict[str, frozenset[str] | None] = {}
        #: The values that are there in the backward,
        self.available = {*program.grads, *program.kept}
        #: those that are not read but computed,
        self.computed: set[str] = set()
        #: and those that are kept, whatever may be computed of them.
        self.stays = outside.union(program.inputs).intersection(program.kept)
        for name in self.outer:  # What is computed of another value comes after it.
            if name in program.kept and name not in self.stays and not self.takes(name):
                self.stays.add(name)

    def takes(self, name: str) -> bool:
        """Note that a value is computed again, if that pays."""
        leaves = self.leaves(name)
        if leaves is None or not reads_less(leaves, name, self.values):
            return False
        more = leaves - self.available
        own = self.given.isdisjoint(storage(self.values[leaf]) for leaf in more)
        if not own or sum(self.values[leaf].nbytes for leaf in more) > self.values[name].nbytes:
            return False
        self.available |= more
        self.computed.add(name)
        return True

    def operation(self, name: str, own: Mapping[str, Operation]) -> Operation | None:
        """The operation that makes a value of the forward, if it is computed again."""
        if name in own or (name in self.available and name not in self.computed):
            return None
        return self.outer[name]

    def leaves(self, name: str) -> frozenset[str] | None:
        """The stored values of which this one is computed; None if it has to be stored itself."""
        if name not in self.known:
            self.known[name] = None
            operation = self.outer.get(name)
            if operation is None or spelled(operation) in WHOLE or not is_fusable(operation, self.values):
                return None
            if storage(self.values[name]) in self.written:  # It is not only what this operation made.
                return None
            found: frozenset[str] = frozenset()
            for operand in operation.operands:
                base = base_of(operand, self.outer, self.values)
                if storage(self.values[base]) in self.written:
                    return None
                more = self.leaves(base)
                if more is not None and base in self.stays:
                    there = more <= self.available and reads_less(more, base, self.values)
                    more = more if there else None
                found |= {base} if more is None else more
            self.known[name] = found
        return self.known[name]


def reads_less(leaves: Iterable[str], name: str, values: Mapping[str, Shaped]) -> bool:
    """Whether to compute a value again takes no more reads than to read it. What is broadcast stays in caches."""
    size = values[name].nbytes
    return sum(min(values[leaf].nbytes, size) for leaf in leaves if values[leaf].nbytes > size / BROADCAST) <= size
