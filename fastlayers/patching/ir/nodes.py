"""The nodes of a graph: what each computes, however it is spelled, and what is known of its value.

A rule sees operations by their names (``add``, ``relu``, ``softmax``, ...) with named operands.
:mod:`fastlayers.patching.ir.spellings` has the names.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from fastlayers.patching.capture.recording import Recording
from fastlayers.patching.capture.trace import record_child
from fastlayers.patching.ir.fingerprints import fingerprint
from fastlayers.patching.ir.known_functions import SPELLED, known_function
from fastlayers.patching.ir.operations import Attribute, Leading, Op
from fastlayers.patching.ir.spellings import LAYERS, NUMBER_ATTRIBUTES, NUMBER_FUNCTIONS, NUMBER_METHODS, SPELLINGS
from fastlayers.patching.runtime import python
from fastlayers.patching.runtime.checks import is_plain_layer, is_sequential, original_class

__all__ = ["Nodes"]


class Nodes:
    """The nodes of a recorded graph, and the operations that they compute, each in one step."""

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self.graph = graph
        self.root = root
        self.wrapped: dict[str, Op | None] = {}
        self.recordings: dict[tuple[str, int, bool | None], Recording | None] = {}
        self.refresh()

    def refresh(self) -> None:
        """Call after an edit."""
        self.position = {node: i for i, node in enumerate(self.graph.nodes)}
        self._ops: dict[tuple[Node, str | None], Op | None] = {}

    def between(self, first: Node, last: Node) -> list[Node]:
        return list(self.position)[self.position[first] + 1 : self.position[last]]

    def op(self, node: Any, name: str | None = None) -> Op | None:
        """The operation of a node, if it is known and has the given name."""
        if not isinstance(node, Node):
            return None
        if (node, name) not in self._ops:  # Each rule asks for each node.
            self._ops[node, name] = self.find(node, name)
        return self._ops[node, name]

    def find(self, node: Node, name: str | None) -> Op | None:
        found = self._layer(node) if node.op == "call_module" else self._function(node)
        return found if found is not None and name in (None, found.name) else None

    def _function(self, node: Node) -> Op | None:
        if node.op not in ("call_function", "call_method"):
            return None
        spelling = SPELLINGS.get(node.target) or SPELLED.get(known_function(node.target))
        if spelling is None:
            return None
        args, count = node.args, len(spelling.operands)
        if spelling.gathers and len(args) > count:
            args = (*args[: count - 1], args[count - 1 :])
        if len(args) > count:
            return None
        operands = dict(zip(spelling.operands, args, strict=False))
        if not set(node.kwargs) <= set(spelling.operands) - set(operands):
            return None
        operands.update(node.kwargs)
        if operands.get("rounding_mode") is not None:
            return None
        inplace = operands.get("inplace", False)
        if not isinstance(inplace, bool):
            return None
        return Op(spelling.name, node, operands, spelling.inplace or inplace)

    def _layer(self, node: Node) -> Op | None:
        child = self.child(node)
        original = original_class(child)
        if len(node.args) != 1 or node.kwargs or not is_plain_layer(child):
            return None
        if original not in LAYERS:
            return self._handwritten_norm(node, child) or self._wrapped(node, child)
        name, attributes = LAYERS[original]
        operands = {"input": node.args[0], **{attribute: getattr(child, attribute) for attribute in attributes}}
        return Op(name, node, operands, bool(getattr(child, "inplace", False)), str(node.target))

    def _handwritten_norm(self, node: Node, child: nn.Module) -> Op | None:
        """A child as a handwritten norm with a known fingerprint."""
        found = fingerprint(original_class(child))
        if found is None or (found.scaled is not None and not getattr(child, found.scaled)):
            return None
        return Op(found.body.op, node, {"input": node.args[0], "fingerprint": found}, child=str(node.target))

    def _wrapped(self, node: Node, child: nn.Module) -> Op | None:
        """A child of an unknown class whose forward is one known operation, such as timm's LayerNorm and GELU."""
        path = str(node.target)
        if child._modules or original_class(child).__module__.startswith("torch."):
            return None
        if path not in self.wrapped:
            self.wrapped[path] = self._unwrap(path)
        op = self.wrapped[path]
        return replace(op, node=node, operands={**op.operands, "input": node.args[0]}) if op is not None else None

    def record(self, path: str, arguments: int, training: bool | None = None) -> Recording | None:
        """The recording of a child of an unknown class."""
        key = (path, arguments, training)
        if key not in self.recordings:
            self.recordings[key] = record_child(self.root, self.root.get_submodule(path), arguments, training)
        return self.recordings[key]

    def _unwrap(self, path: str) -> Op | None:
        recording = self.record(path, 1)
        if recording is None:
            return None
        argument, *nodes, output = recording.graph.nodes
        inner, result = type(self)(recording.graph, self.root), output.args[0]
        for name in ("channel_layer_norm", None, "gelu", "quick_gelu"):  # plain, or decomposed
            op = inner.op(result, name)
            known = {part.node for part in (*op.parts, op)} if op is not None else set()
            if known and all(node in known or node.op == "get_attr" for node in nodes):
                break
        else:
            return None
        if op is None or op["input"] is not argument:
            return None
        operands = {
            name: Attribute(str(value.target)) if isinstance(value, Node) else value
            for name, value in op.operands.items()
        }
        return Op(op.name, op.node, operands, op.inplace, path, recording)

    def last_op(self, node: Any, name: str) -> Op | None:
        """The operation of the last layer in a call of a Sequential, if it has the given name."""
        if not isinstance(node, Node) or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            return None
        path, child = str(node.target), self.child(node)
        sequentials: list[str] = []
        leading: list[str] = []
        while is_sequential(child) and child._modules:
            sequentials.append(path)
            *before, last = (f"{path}.{key}" for key in child._modules)
            leading += before
            path, child = last, self.root.get_submodule(last)
        layer = original_class(child)
        if not leading or not is_plain_layer(child) or layer not in LAYERS or LAYERS[layer] != (name, ()):
            return None
        operands = {"input": Leading(node, tuple(leading))}
        return Op(name, node, operands, child=path, sequentials=tuple(sequentials))

    def child(self, node: Node) -> nn.Module:
        return self.root.get_submodule(str(node.target))

    def is_number(self, value: Any) -> bool:
        """Whether a value is a Python number (a literal, or computed from sizes)."""
        if isinstance(value, int | float):
            return not isinstance(value, bool)
        if not isinstance(value, Node):
            return False
        if "example_value" in value.meta:
            return isinstance(value.meta["example_value"], int | float | torch.SymInt | torch.SymFloat)
        if value.op == "call_method":
            return value.target in NUMBER_METHODS
        if value.op != "call_function":
            return False
        target = value.target
        if target is getattr:
            return value.args[1] in NUMBER_ATTRIBUTES
        if getattr(math, getattr(target, "__name__", ""), None) is target or target in NUMBER_FUNCTIONS:
            return True
        if target in (operator.getitem, python.unpack):
            return self.is_number(value.args[0])
        if getattr(target, "__module__", None) == "_operator":
            return bool(value.args) and all(self.is_number(arg) for arg in value.args)
        return False

    def is_tensor(self, value: Any) -> bool:
        """Whether a value is assumed to be a tensor. For a placeholder the engine adds a guard."""
        if self.example(value) is not None:
            return True
        is_flag = isinstance(value, Node) and value.op == "get_attr" and value.target == "training"
        return isinstance(value, Node) and not is_flag and not self.is_number(value)

    def is_parameter(self, value: Any) -> bool:
        """Whether a value is a parameter (or, in a recorded forward, a buffer) of the module."""
        if isinstance(value, Attribute):
            return True
        if not isinstance(value, Node):
            return False
        if value.op == "placeholder":
            return isinstance(self.example(value), nn.Parameter)
        return value.op == "get_attr" and value.target != "training"

    @staticmethod
    def example(value: Any) -> torch.Tensor | None:
        """The fake tensor of a value in a graph that Dynamo captured; None in other graphs."""
        found = value.meta.get("example_value") if isinstance(value, Node) else None
        return found if isinstance(found, torch.Tensor) else None

    def size(self, value: Any, dim: int) -> int | None:
        """The static size of a dimension in a captured graph; None if it is dynamic or unknown."""
        example = self.example(value)
        if example is None or not -example.dim() <= dim < example.dim():
            return None
        size: Any = example.shape[dim]
        return size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size
