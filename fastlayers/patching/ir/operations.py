"""Operations and their operands, as rules see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fastlayers.patching.capture.recording import Recording

__all__ = ["Attribute", "Leading", "Op"]


@dataclass(frozen=True)
class Op:
    """One operation: its name, its operands by name, whether it writes the first of them, the child that does it."""

    name: str
    node: Node
    operands: dict[str, Any]
    inplace: bool = False
    child: str | None = None
    #: Of a child of some class of its own: the recording that shows it to be this operation, for its guards.
    recording: Recording | None = None
    #: The Sequentials that end with the child, the outermost first, where the node calls that one.
    sequentials: tuple[str, ...] = ()
    #: Of an operation that is written out in smaller ones, of which ``node`` is the last: the others, in order.
    parts: tuple[Op, ...] = ()

    def __getitem__(self, operand: str) -> Any:
        return self.operands.get(operand)


@dataclass(frozen=True)
class Attribute:
    """An operand that is an attribute of the module or of something inside it, read on every call."""

    path: str


@dataclass(frozen=True)
class Leading:
    """An operand that the layers of a Sequential before its last one compute: the call, and their paths in order."""

    node: Node
    paths: tuple[str, ...]
