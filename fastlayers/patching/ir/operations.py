"""Operations and their operands, as rules see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fastlayers.patching.capture.recording import Recording


@dataclass(frozen=True)
class Op:
    """One operation: its name and operands, whether it overwrites the first of them, the child that computes it."""

    name: str
    node: Node
    operands: dict[str, Any]
    inplace: bool = False
    child: str | None = None
    #: For a child of a class that is not torch's, the recording that shows what it computes. It has the guards.
    recording: Recording | None = None
    #: The Sequentials that end with the child, outermost first, if the node calls a Sequential.
    sequentials: tuple[str, ...] = ()
    #: For a decomposed operation, which ends with ``node``, the operations before it, in order.
    parts: tuple[Op, ...] = ()

    def __getitem__(self, operand: str) -> Any:
        return self.operands.get(operand)


@dataclass(frozen=True)
class Attribute:
    """An operand that is an attribute of the module or of a submodule, read on every call."""

    path: str


@dataclass(frozen=True)
class Leading:
    """An operand that all layers of a Sequential but the last compute: the call, and their paths in order."""

    node: Node
    paths: tuple[str, ...]
