"""The view of a graph: what its nodes compute, which tensors share memory, and what a node may draw or overwrite."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx import Node

from fastlayers.modules import DROP_IN
from fastlayers.patching.capture.recording import Recording
from fastlayers.patching.ir.decompositions import DECOMPOSITIONS
from fastlayers.patching.ir.fingerprints import fingerprint
from fastlayers.patching.ir.nodes import Nodes
from fastlayers.patching.ir.operations import Leading, Op
from fastlayers.patching.ir.spellings import (
    FRESH_FUNCTIONS,
    FRESH_LAYERS,
    FRESH_LAYERS_OF_LIBRARIES,
    FRESH_METHODS,
    FUSED_FUNCTIONS,
    INPLACE_OPERATORS,
    MAY_DRAW,
    NOT_RANDOM,
    NUMBER_FUNCTIONS,
    OPTIONAL_INPLACE,
    OUTSIDE,
    PASSING_LAYERS,
    RANDOM,
    SPELLINGS,
)
from fastlayers.patching.runtime import norm_calls, python, traits
from fastlayers.patching.runtime.checks import hooked, is_plain_layer, is_sequential, original_class

__all__ = ["JOINED_NORMS", "View", "counts_batch", "forked", "is_about_rank", "is_barrier", "is_fresh"]


def is_fresh(layer: type[nn.Module]) -> bool:
    """Whether a layer returns a new tensor, keeps no reference to it, and overwrites none of its arguments."""
    return layer in FRESH_LAYERS or layer in FRESH_LAYERS_OF_LIBRARIES or fingerprint(layer) is not None


def is_fresh_call(node: Node) -> bool:
    """Whether a call of a function or method is known to return a new tensor."""
    if node.op == "call_method":
        return node.target in FRESH_METHODS
    return node.target in FRESH_FUNCTIONS or node.target in traits.FRESH


class View(Nodes):
    """A recorded graph, with the questions about it that rules and safety checks need."""

    def __init__(self, graph: fx.Graph, root: nn.Module, *, deep: bool = False) -> None:
        self.deep = deep
        #: The recordings of children of unknown classes, by path.
        self.children: dict[str, tuple[Recording, tuple[str, ...]] | None] = {}
        super().__init__(graph, root)

    def thread_inplace(self) -> None:
        """After ``r = x.add_(y)``, let later uses of x use r, which is the same tensor."""
        for node in list(self.graph.nodes):
            op = self.op(node) if node.op in ("call_function", "call_method") else None
            if op is None or not op.inplace or not isinstance(op["input"], Node):
                continue
            later = {user for user in op["input"].users if self.position[user] > self.position[node]}
            op["input"].replace_all_uses_with(node, lambda user, later=later: user in later)  # type: ignore[misc]
            self.refresh()

    def refresh(self) -> None:
        super().refresh()
        self._memory: dict[Node, frozenset[object]] = {}

    def find(self, node: Node, name: str | None) -> Op | None:
        """Given a name, this finds decomposed operations too."""
        found = super().find(node, name)
        return DECOMPOSITIONS[name](self, node) if found is None and name in DECOMPOSITIONS else found

    # -- which memory a node shares ---------------------------------------------------------------------------

    def memory(self, node: Node) -> frozenset[object]:
        """The allocations that may contain a node's result: the nodes that made them, or :data:`OUTSIDE`."""
        for known in self.position if node not in self._memory else ():
            if known not in self._memory:  # In order: a node shares memory with earlier nodes only.
                self._memory[known] = frozenset(self._allocations(known))
        return self._memory[node]

    def memory_between(self, leading: Leading) -> frozenset[object]:
        """:meth:`memory` of the input to the last layer of a Sequential."""
        before = self.root.get_submodule(leading.paths[-1])
        if is_fresh(original_class(before)) and is_plain_layer(before):
            return frozenset()  # Nothing else has a reference to it.
        return frozenset({OUTSIDE}).union(*map(self.memory, leading.node.all_input_nodes))

    def _allocations(self, node: Node) -> Iterator[object]:
        if node.op in ("placeholder", "get_attr", "output"):
            if node.op != "get_attr" or not isinstance(operator.attrgetter(str(node.target))(self.root), nn.Module):
                yield OUTSIDE
            return
        op = self.op(node)
        if op is not None and op.inplace:
            yield from self.memory(op["input"]) if isinstance(op["input"], Node) else (OUTSIDE,)
            return
        if op is not None and op.name == "drop_path":  # a new tensor, or the argument itself
            yield node
            yield from self.memory(op["input"])
            return
        if self.is_number(node):
            return
        if node.target is operator.getitem and (x := forked(node.args[0])) is not None:
            yield from self.memory(x) if node.args[1] == 1 else (node,)
            return
        if node.op == "call_module":
            yield from self._layer_allocations(node)
            return
        yield node
        if is_opaque(node):
            yield OUTSIDE
        if not is_fresh_call(node) or (op is None and node.target in SPELLINGS):  # whether in place is not known
            for operand in node.all_input_nodes:
                yield from self.memory(operand)

    def _layer_allocations(self, node: Node) -> Iterator[object]:
        child = self.child(node)
        if self.makers(node) is not None:
            yield node
            return
        yield node if original_class(child) in PASSING_LAYERS and is_plain_layer(child) else OUTSIDE
        for operand in node.all_input_nodes:
            yield from self.memory(operand)

    def makers(self, node: Node) -> tuple[str, ...] | None:
        """The children that return the fresh result of a call; None if the result may not be fresh.

        For a Sequential these are the Sequential, its last layer and, if that works in place, the layer before it. A
        hook on any of them could keep the tensor.
        """
        chain = self._makers(str(node.target))
        path = chain[-1]
        child = self.root.get_submodule(path)
        original = original_class(child)
        if is_fresh(original) or (original in OPTIONAL_INPLACE and not child.inplace):
            return tuple(chain) if is_plain_layer(child) else None
        if original.__module__.startswith("torch.") or node.kwargs or (child._modules and not self.deep):
            return None
        if path not in self.children:
            self.children[path] = self._inspect(path, len(node.args) if len(chain) == 1 else 1)
        inspected = self.children[path]
        return (*chain, *inspected[1]) if inspected is not None else None

    def _makers(self, path: str) -> list[str]:
        """A child and the descendants that return its result, ending with the one that may have made it."""
        chain = [path]
        while True:
            child = self.root.get_submodule(path)
            outer, _, name = path.rpartition(".")
            if is_sequential(child) and child._modules:
                path = f"{path}.{next(reversed(child._modules))}"
            elif len(chain) > 1 and original_class(child) in OPTIONAL_INPLACE and child.inplace:
                names = list(self.root.get_submodule(outer)._modules)
                if names[0] == name or not is_plain_layer(child):
                    return chain
                path = f"{outer}.{names[names.index(name) - 1]}"
            else:
                return chain
            chain.append(path)

    def _inspect(self, path: str, arguments: int) -> tuple[Recording, tuple[str, ...]] | None:
        """Whether a child of an unknown class returns a new tensor and keeps none, by its recorded forward."""
        recording = self.record(path, arguments)
        if recording is None:
            return None
        inner = View(recording.graph, self.root, deep=True)
        inner.thread_inplace()
        result = next(iter(reversed(recording.graph.nodes))).args[0]
        allocations = inner.memory(result) if isinstance(result, Node) else frozenset()
        if OUTSIDE in allocations or not allocations:
            return None
        seen: list[str] = []
        for node in inner.position:
            if any(inner.memory(operand) & allocations for operand in node.all_input_nodes):
                keepers = inner.keepers(node)
                if keepers is None:
                    return None
                seen += keepers
            if node in allocations and node.op == "call_module":
                seen += inner.makers(node) or ()
        self.children.update(inner.children)
        return recording, tuple(seen)

    def keepers(self, node: Node) -> tuple[str, ...] | None:
        """The children that see the arguments of a call, whose hooks could keep them; None if the call could."""
        if node.op != "call_module":
            return None if is_opaque(node) else ()
        pending, seen = [str(node.target)], []
        while pending:
            path = pending.pop()
            seen.append(path)
            child = self.root.get_submodule(path)
            original = original_class(child)
            if not is_plain_layer(child):
                return None
            if is_sequential(child):
                pending += [f"{path}.{name}" for name in child._modules]
            elif original not in OPTIONAL_INPLACE | PASSING_LAYERS and not is_fresh(original):
                return None
        return tuple(seen)

    def may_draw(self, node: Node) -> bool:
        """Whether a node may draw random numbers; True if it is unknown."""
        op = self.op(node)
        if op is not None:
            return op.name in RANDOM
        if node.op == "call_module":
            original = original_class(self.child(node))
            return not is_fresh(original) and original not in OPTIONAL_INPLACE
        if node.op not in ("call_function", "call_method") or self.is_number(node) or node.target in NOT_RANDOM:
            return False
        return not is_fresh_call(node) or node.target in MAY_DRAW or node.target in traits.DRAWING

    def written(self, node: Node) -> frozenset[object]:
        """The allocations that a node may overwrite."""
        if node.op in ("placeholder", "get_attr", "output") or (
            node.op == "call_module" and self._layer_only_reads(node)
        ):
            return frozenset()
        op = self.op(node)
        if op is not None and node.op != "call_module":
            return self.memory(op["input"]) if op.inplace and isinstance(op["input"], Node) else frozenset()
        if node.op == "call_function" and function_only_reads(node):
            return frozenset()
        if node.op == "call_method" and not str(node.target).endswith("_"):
            return frozenset()
        return frozenset[object]().union(*map(self.memory, node.all_input_nodes))

    def _layer_only_reads(self, node: Node) -> bool:
        child = self.child(node)
        original = original_class(child)
        if not is_plain_layer(child) or hooked(child):
            return False
        op = self.op(node)
        if op is not None and op.recording is not None and not op.inplace:
            return True
        if is_fresh(original) or original in DROP_IN or original is nn.Identity:
            return True
        return getattr(child, "inplace", None) is False and original.__module__.startswith("torch.nn.")


#: The calls that return the norm of x + residual and the sum, and the position of x; the residual follows it.
JOINED_NORMS: dict[Any, int] = {
    norm_calls.add_layer_norm: 0,
    norm_calls.add_rms_norm: 0,
    norm_calls.add_handwritten_norm: 1,
}


def forked(node: Any) -> Node | None:
    """The x of such a call without a residual, which returns x itself; None for any other node."""
    position = JOINED_NORMS.get(node.target) if isinstance(node, Node) else None
    if position is None or node.args[position + 1] is not None:
        return None
    return node.args[position]  # type: ignore[no-any-return]


def is_opaque(node: Node) -> bool:
    """Whether a node calls an unknown function, which could return or keep any tensor."""
    if node.op != "call_function":
        return False
    package = (getattr(node.target, "__module__", None) or "torch").split(".")[0]
    return package not in ("torch", "_operator", "math", "builtins", "fastlayers")


def is_about_rank(node: Node) -> bool:
    """Whether a node belongs to an assertion about the number of dimensions."""
    if node.target is getattr or (node.op == "call_method" and node.target == "dim"):
        return node.args[1:] in ((), ("ndim",))
    if node.target is operator.eq:
        return all(is_about_rank(operand) for operand in node.all_input_nodes)
    return node.target in (python.format_string, torch._assert)


def counts_batch(node: Node, count: str) -> bool:
    """Whether a node adds 1 to that attribute, the batch count of a BatchNorm, and its result is unused."""
    if node.target != "add_" or node.args[1:] != (1,) or node.kwargs or node.users:
        return False
    return isinstance(node.args[0], Node) and node.args[0].target == count


def is_barrier(node: Node) -> bool:
    """Whether a recorded function may have any effect, such as switching autograd off. Nothing moves past it."""
    if node.op != "call_function" or node.target in SPELLINGS or node.target in INPLACE_OPERATORS:
        return False
    known = getattr(torch, getattr(node.target, "__name__", ""), None) is node.target
    return not (known and node.all_input_nodes) and not function_only_reads(node)


def function_only_reads(node: Node) -> bool:
    """Whether a recorded function overwrites none of its arguments, by torch's naming and its options."""
    target = node.target
    name = getattr(target, "__name__", "")
    if (
        target in (getattr, python.unpack, python.format_string, torch._C._log_api_usage_once)
        or target in NUMBER_FUNCTIONS
        or getattr(math, name, None) is target
    ):
        return True
    if getattr(operator, name, None) is target:
        return target not in INPLACE_OPERATORS
    if any(arg is True for arg in node.args) or any(
        node.kwargs.get(option) not in (None, False) for option in ("out", "inplace")
    ):
        return False
    known = getattr(torch, name, None) is target or getattr(F, name, None) is target or target in FUSED_FUNCTIONS
    return known and not name.endswith("_") and not name.startswith(("set_", "_"))
