"""What autocast casts: whether the only use of a tensor is one operation that autocast runs in low precision.

Under autocast a norm returns float32, and a linear layer, a convolution, a matrix product or an attention casts its
inputs. If one such operation is the only use of a norm's result, perhaps through views and inside of a child, the norm
may return autocast's dtype at once, which gives the same values. This is read from recorded forwards. Every call under
autocast tests that the children are still the same and that no hook sees their inputs
(:func:`fastlayers.patching.runtime.checks.cast_dtype`).

It must be one operation: torch adds the gradients of several in float32, and would add them in 16 bits.
"""

from __future__ import annotations

import functools
import operator
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node
from torch.fx.node import map_arg

from fastlayers.ops.guard import is_plain
from fastlayers.patching.capture.lookups import inside_layer
from fastlayers.patching.capture.recording import Name, Recording, add_names, bind, binder, module_expression
from fastlayers.patching.capture.trace import record_child
from fastlayers.patching.ir.view import View, is_barrier
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.runtime import checks
from fastlayers.patching.runtime.checks import hooked, is_plain_layer, is_sequential, original_class

__all__ = ["Casts", "cast_by"]

#: Autocast runs these in low precision on CUDA and on the CPU, and casts all their tensor arguments.
FUNCTIONS = frozenset(
    {
        F.linear, F.conv1d, F.conv2d, F.conv3d, torch.matmul, operator.matmul, torch.bmm, torch.mm,
        F.scaled_dot_product_attention,
    }
)  # fmt: skip
METHODS = frozenset({"matmul", "bmm", "mm"})
LAYERS = frozenset({nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d})

#: Views with every element once. Others, such as expand, repeat elements, whose gradients are then added.
VIEWS = frozenset(
    {
        "view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim", "contiguous", "squeeze",
        "unsqueeze",
    }
)  # fmt: skip
VIEW_FUNCTIONS = frozenset(getattr(torch, name) for name in VIEWS if hasattr(torch, name))
#: Properties of a tensor that do not depend on its dtype.
SIZES = frozenset({"size", "dim", "numel", "ndimension", "nelement", "stride", "is_contiguous"})
SIZE_ATTRIBUTES = frozenset({"shape", "ndim", "device"})


@dataclass(frozen=True)
class Casts:
    """The test that every call makes of the children, and whether it needs the module."""

    name: str
    test: Callable[[nn.Module], bool]
    itself: bool

    def argument(self, recording: Recording) -> Any:
        """The test and its module, as an argument of a call in generated code."""
        add_names(recording.namespace, {self.name: self.test})
        return Name(f"({self.name}, {'self' if self.itself else None})")


def cast_by(view: View, node: Node) -> Casts | None:
    """The test under which the only use of a node's result is a cast by autocast; None if it has other uses."""
    if view.example(node) is not None:  # The dtypes in a captured graph are fixed.
        return None
    found = Found(view)
    try:
        if not found.follow(view, node) or found.operations != 1:
            return None
    except Refusal:  # two objects of one name
        return None
    if any(hooked(view.root.get_submodule(path)) for path in found.unseen):
        return None
    tests = list(found.tests.guards)
    if found.unseen:
        tests.insert(0, f"{bind(found.tests, checks.no_hooks)}({', '.join(map(module_expression, found.unseen))})")
    source = "\n    and ".join(tests) or "True"
    try:
        test = compiled(source, tuple(sorted(found.tests.namespace.items())))
    except TypeError:  # an object that cannot be hashed
        return None
    return Casts(test.__name__, test, "self" in source)


@functools.lru_cache(1024)
def compiled(source: str, names: tuple[tuple[str, Any], ...]) -> Callable[[nn.Module], bool]:
    """One function for equal tests, so that modules of one kind share their generated class.

    A test that raises does not hold: its child may be gone.
    """
    name = f"_casts_{zlib.crc32(source.encode()):08x}"
    scope = dict(names)
    answer = (
        f"try:\n        return (\n    {source}\n    )\n    except (AttributeError, KeyError):\n        return False"
    )
    exec(f"def {name}(self):\n    {answer}\n", scope)
    return scope[name]  # type: ignore[no-any-return]


class Found:
    """The operations that cast a tensor, and the tests under which it has no other uses."""

    def __init__(self, view: View) -> None:
        self.operations = 0
        self.tests = Recording(view.graph)
        #: Children that are given the tensor: a hook would see its dtype.
        self.unseen: dict[str, None] = {}

    def follow(self, view: View, node: Node) -> bool:
        """Whether every use of a node casts it, directly or after views."""
        return all(self.use(view, node, user) for user in node.users)

    def use(self, view: View, node: Node, user: Node) -> bool:
        if user.op == "call_module":
            return self.given(view, node, user)
        if user.op == "call_function" and user.target is getattr:
            return user.args[1] in SIZE_ATTRIBUTES
        if user.op == "call_method" and user.target in SIZES:
            return True
        method = user.op == "call_method"
        if user.target in (METHODS if method else FUNCTIONS) and "out" not in user.kwargs:
            for operand in user.all_input_nodes:
                if operand.op == "get_attr":  # a weight of a tensor subclass would take the call
                    owner, _, name = str(operand.target).rpartition(".")
                    self.require(f"{bind(self.tests, is_plain)}({module_expression(owner)}.{name})")
            self.operations += times(node, user)
            return reaches(view, node, user)
        passes = user.args[:1] == (node,) and (
            user.target in (VIEWS if method else VIEW_FUNCTIONS)
            or (user.target is operator.getitem and is_basic(user.args[1]))
        )
        return passes and self.follow(view, user)

    def given(self, view: View, node: Node, user: Node) -> bool:
        """Whether a child that is called with the tensor only casts it, by its class or by its recorded forward."""
        path, child = str(user.target), view.child(user)
        if times(node, user) != 1 or not reaches(view, node, user):
            return False
        self.unseen[path] = None
        while is_sequential(child) and child._modules and len(user.args) == 1 and not user.kwargs:
            self.require(f"tuple({module_expression(path)}._modules) == {tuple(child._modules)}")
            path = f"{path}.{next(iter(child._modules))}"
            child = view.root.get_submodule(path)
            self.unseen[path] = None
        kind, expression = original_class(child), module_expression(path)
        if not is_plain_layer(child):
            return False
        for test in inside_layer(kind, expression, binder(self.tests.namespace)):
            self.require(test)
        if kind in LAYERS:
            self.require(f"{bind(self.tests, checks.casts_input)}({expression}, {bind(self.tests, kind)})")
            self.operations += 1
            return checks.casts_input(child, kind)
        self.require(f"{bind(self.tests, checks.plain)}({expression}, {bind(self.tests, kind)})")
        if kind is nn.Identity:
            return user.target == path and self.follow(view, user)
        recording = record_child(view.root, child, user)
        position = operands(user).index(node)
        if recording is not None:
            return self.inside(view, recording, position)
        return self.inside_modes(view, user, child, position, expression)

    def inside(self, view: View, recording: Recording, position: int) -> bool:
        """Whether the forward of a child only casts the argument at a position."""
        placeholders = [node for node in recording.graph.nodes if node.op == "placeholder"]
        add_names(self.tests.namespace, recording.namespace)
        self.tests.guards.update(recording.guards)
        return self.follow(View(recording.graph, view.root), placeholders[position])

    def inside_modes(self, view: View, call: Node, child: nn.Module, position: int, expression: str) -> bool:
        """:meth:`inside` for a forward that branches on ``self.training``."""
        modes = []
        for training in (True, False):
            recording = record_child(view.root, child, call, training)
            modes.append(mode := Found(view))
            mode.tests.namespace = self.tests.namespace
            if recording is None or not mode.inside(view, recording, position):
                return False
            self.unseen.update(mode.unseen)
        if modes[0].operations != modes[1].operations:
            return False
        self.operations += modes[0].operations
        trains, evaluates = (" and ".join(mode.tests.guards) or "True" for mode in modes)
        self.require(f"(({trains}) if {expression}.training else ({evaluates}))")
        return True

    def require(self, test: str) -> None:
        self.tests.guards[test] = None


def is_basic(index: Any) -> bool:
    """Whether an index takes each element at most once: known numbers, slices, None and Ellipsis."""
    return all(
        item is None or item is Ellipsis or type(item) in (int, slice)
        for item in (index if isinstance(index, tuple) else (index,))
    )


def operands(call: Node) -> list[Node]:
    """The nodes among the arguments of a call, with repetitions."""
    found: list[Node] = []
    map_arg((call.args, call.kwargs), found.append)
    return found


def times(node: Node, user: Node) -> int:
    return operands(user).count(node)


def reaches(view: View, node: Node, user: Node) -> bool:
    """Whether autocast cannot change between the node, or the start of its graph, and a use."""
    since = -1 if node.op == "placeholder" else view.position[node]
    return not any(is_barrier(n) for n in view.position if since < view.position[n] < view.position[user])
