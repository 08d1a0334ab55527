"""The nearest miss of a forward in which no rule fuses anything, in words.

Most rules fuse an operation with one beside it, and name the two kinds (:attr:`GraphRule.pair`). A miss is one of them
without the other. A report says where it is, and what is before and after it instead of what a rule looks for there.
That is all it says: which of them the author of the forward had in mind is not known.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import Node
from torch.nn.modules.conv import _ConvNd

from fastlayers.patching.capture.proxies import STATEMENT
from fastlayers.patching.capture.recording import Recording
from fastlayers.patching.capture.syntax import shown_statement
from fastlayers.patching.ir.operations import Op
from fastlayers.patching.ir.view import View
from fastlayers.patching.rules.base import GraphRule, Kind
from fastlayers.patching.rules.matchers import skip_identities
from fastlayers.patching.runtime import python
from fastlayers.patching.runtime.checks import original_class

__all__ = ["nearest_miss"]

#: Where torch's own forwards are, such as that of Sequential. Their lines say nothing to a reader.
TORCH = os.path.join(os.path.dirname(torch.__file__), "")
#: Methods of tensors that take sizes.
SHAPING = frozenset({"view", "reshape", "expand", "repeat", "unflatten"})


def nearest_miss(recording: Recording, module: nn.Module, rules: Iterable[GraphRule]) -> str:
    """The nearest miss of a forward, in words; empty if no operation of it makes a reader expect a fusion."""
    view = View(recording.graph, module)
    pairs = list(dict.fromkeys(rule.pair for rule in rules if rule.pair is not None))
    kinds = list(dict.fromkeys(kind for pair in pairs for kind in pair if kind.weight))
    found = [miss for node in view.position if (miss := miss_at(view, node, kinds, pairs)) is not None]
    return max(found, key=lambda miss: (miss.close, miss.weight)).words() if found else ""  # the first of equal ones


@dataclass(frozen=True)
class Miss:
    """An operation, with what is before and after it, and what a rule would fuse it with there."""

    view: View
    op: Op
    weight: int
    before: Side
    after: Side

    @property
    def close(self) -> bool:
        """Whether both operations that a rule fuses are there."""
        return self.before.close or self.after.close

    def words(self) -> str:
        sides = [side.words(self.view) for side in (self.before, self.after) if side.wanted]
        return f"nearest: {self.named()}; {'; '.join(sides)}"

    def named(self) -> str:
        """The operation and its statement, which says nothing where torch has written it."""
        statement = self.op.node.meta.get(STATEMENT)
        if statement is None or TORCH in statement[0]:
            return described(self.view, self.op.node)
        return f"{self.op.name}{shown_statement(statement)}"


@dataclass(frozen=True)
class Side:
    """What is before or after an operation, and the kinds that a rule would fuse it with there."""

    name: str
    nodes: tuple[Node, ...]
    wanted: tuple[Kind, ...]
    close: bool

    def words(self, view: View) -> str:
        there = list(dict.fromkeys(described(view, node) for node in self.nodes)) or ["nothing"]
        begin = f"{self.name} it {'are' if len(there) > 1 else 'is'} {listed(there, 'and')}"
        if self.close:
            return f"{begin}, but not in a form that a rule fuses"
        kinds = list(dict.fromkeys(word for kind in self.wanted for word in kind.words))
        return f"{begin}, not {'an' if kinds[0][0] in 'aeiou' else 'a'} {listed(kinds, 'or')}"


def miss_at(view: View, node: Node, kinds: list[Kind], pairs: list[tuple[Kind, Kind]]) -> Miss | None:
    """The operation of a node as a miss; None if it is of none of these kinds."""
    op = view.op(node)
    fitting = [kind for kind in kinds if kind.fits(view, node)] if op is not None and not is_size(node) else []
    if op is None or not fitting:
        return None
    before = side(view, "before", operands(view, node), (first for first, second in pairs if second in fitting))
    after = side(view, "after", users(view, node), (second for first, second in pairs if first in fitting))
    return Miss(view, op, max(kind.weight for kind in fitting), before, after)


def side(view: View, name: str, nodes: list[Node], wanted: Iterable[Kind]) -> Side:
    kinds = tuple(wanted)
    return Side(name, tuple(nodes), kinds, any(kind.fits(view, node) for kind in kinds for node in nodes))


def is_size(node: Node) -> bool:
    """Whether a node, which may be assumed to be a tensor, is a number of elements."""
    return any(user.op == "call_method" and user.target in SHAPING and user.args[0] is not node for user in node.users)


def operands(view: View, node: Node) -> list[Node]:
    return [skip_identities(view, operand)[0] for operand in node.all_input_nodes]


def users(view: View, node: Node) -> list[Node]:
    """The nodes that take the result of one, but for those that ask for its shape, dtype or device."""
    found: list[Node] = []
    for user in node.users:
        if view.op(user, "identity") is not None:
            found += users(view, user)
        elif not view.is_number(user) and not (user.target is getattr and user.args[1] in ("dtype", "device")):
            found.append(user)
    return found


def listed(words: Sequence[str], conjunction: str) -> str:
    *others, last = words
    return f"{', '.join(others)} {conjunction} {last}" if others else last


def described(view: View, node: Node) -> str:
    """A node as a reader finds it in the source."""
    if node.op == "placeholder":
        return f"the argument {node.target}"
    if node.op == "output":
        return "the return"
    if node.op == "get_attr":
        return spelled(str(node.target))
    if node.op == "call_module":
        child = view.child(node)
        cls = original_class(child)
        kind = cls.__name__
        if getattr(nn, kind, cls) is not cls:  # A layer of another library with the name of torch's.
            kind = f"{cls.__module__}.{kind}"
        if isinstance(child, nn.Linear | _ConvNd):  # Rules ask for it.
            kind += " without a bias" if child.bias is None else " with a bias"
        return f"{spelled(str(node.target))} ({kind})"
    if node.target is getattr and isinstance(node.args[0], Node):
        return f"{described(view, node.args[0])}.{node.args[1]}"
    if node.target in (operator.getitem, python.unpack) and isinstance(node.args[0], Node):
        return f"a part of {described(view, node.args[0]).removeprefix('a part of ')}"
    return str(getattr(node.target, "__name__", node.target))


def spelled(path: str) -> str:
    """A path of a child or a tensor as source spells it."""
    return "self" + "".join(f"[{atom}]" if atom.isdigit() else f".{atom}" for atom in path.split("."))
