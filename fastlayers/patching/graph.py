"""Reading a small graph: what a node computes however it is spelled, and which tensors share memory.

A rule sees operations by their names (``add``, ``relu``, ``softmax``, ...) with named operands. :data:`SPELLINGS` is
the one place that knows that ``x + y``, ``x += y``, ``torch.add(x, y)``, ``x.add(y)`` and ``x.add_(y)`` are all
``add``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx import Node

from fastlayers import functional
from fastlayers.modules import DROP_IN
from fastlayers.patching import calls
from fastlayers.patching.trace import Recording, record_child

__all__ = ["Op", "View"]


@dataclass(frozen=True)
class Op:
    """One operation: its name, its operands by name, whether it writes the first of them, the child that does it."""

    name: str
    node: Node
    operands: dict[str, Any]
    inplace: bool = False
    child: str | None = None

    def __getitem__(self, operand: str) -> Any:
        return self.operands.get(operand)


@dataclass(frozen=True)
class Spelling:
    name: str
    operands: tuple[str, ...]
    inplace: bool = False


#: Functions by themselves, tensor methods by their names.
SPELLINGS: dict[Any, Spelling] = {}


def spell(name: str, operands: str, *callables: Any, inplace: bool = False) -> None:
    for function in callables:
        SPELLINGS[function] = Spelling(name, tuple(operands.split()), inplace)


spell("relu", "input inplace", F.relu)
spell("relu", "input", torch.relu, "relu")
spell("relu", "input", torch.relu_, F.relu_, "relu_", inplace=True)
spell("add", "input other", operator.add)
spell("add", "input other", operator.iadd, inplace=True)
spell("add", "input other alpha", torch.add, "add")
spell("add", "input other alpha", "add_", inplace=True)
spell("mul", "input other", operator.mul, torch.mul, torch.multiply, "mul", "multiply")
spell("mul", "input other", operator.imul, "mul_", "multiply_", inplace=True)
spell("div", "input other", operator.truediv, torch.true_divide, "true_divide")
spell("div", "input other rounding_mode", torch.div, torch.divide, "div", "divide")
spell("div", "input other", operator.itruediv, "div_", "divide_", inplace=True)
spell("softmax", "input dim _stacklevel dtype", F.softmax)
spell("softmax", "input dim dtype", torch.softmax, torch.special.softmax, "softmax")
spell("log_softmax", "input dim _stacklevel dtype", F.log_softmax)
spell("log_softmax", "input dim dtype", torch.log_softmax, torch.special.log_softmax, "log_softmax")
spell("masked_fill", "input mask value", torch.masked_fill, "masked_fill")
spell("masked_fill", "input mask value", "masked_fill_", inplace=True)
spell("where", "condition input other", torch.where)
spell("not", "input", operator.invert, torch.bitwise_not, "bitwise_not")
spell("eq", "input other", operator.eq, torch.eq, "eq")

#: Layers without parameters that stand for one operation, and what of their attributes is its operands.
LAYERS: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.ReLU: ("relu", ()),
    nn.Softmax: ("softmax", ("dim",)),
    nn.LogSoftmax: ("log_softmax", ("dim",)),
}

NUMBER_METHODS = frozenset(
    {"size", "dim", "numel", "ndimension", "item", "stride", "element_size", "tolist", "nelement"}
)
NUMBER_ATTRIBUTES = frozenset({"shape", "ndim"})
NUMBER_FUNCTIONS = frozenset({int, float, bool, len, round, max, min, abs, pow, divmod})

INPLACE_OPERATORS = frozenset(
    {
        operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
        operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift,
        operator.iconcat, operator.setitem, operator.delitem,
    }
)  # fmt: skip
FUSED_FUNCTIONS = frozenset(getattr(functional, name) for name in functional.__all__)

#: Functions whose result never shares memory with an argument.
FRESH_FUNCTIONS = frozenset(
    {
        operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.matmul, operator.pow,
        operator.invert,
        operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
        torch.add, torch.sub, torch.mul, torch.div, torch.matmul, torch.bmm, torch.mm, torch.baddbmm, torch.addmm,
        torch.cat,
        torch.stack, torch.relu, torch.sigmoid, torch.tanh, torch.exp, torch.softmax, torch.log_softmax, torch.rsqrt,
        torch.sqrt,
        torch.masked_fill, torch.where, torch.mean, torch.sum, torch.zeros_like, torch.ones_like, torch.empty_like,
        torch.full_like, torch.rand_like, torch.randn_like,
        F.relu, F.linear, F.conv1d, F.conv2d, F.conv3d, F.batch_norm, F.layer_norm, F.group_norm, F.softmax,
        F.log_softmax,
        F.gelu, F.silu, F.sigmoid, F.tanh, F.avg_pool2d, F.max_pool2d, F.embedding, F.scaled_dot_product_attention,
        calls.add_relu_, calls.relu_add_, calls.add_relu_to_, calls.softmax_added, calls.softmax_masked,
        *FUSED_FUNCTIONS,
    }
)  # fmt: skip
FRESH_METHODS = frozenset(
    {
        "add", "sub", "mul", "div", "matmul", "bmm", "mm", "relu", "sigmoid", "tanh", "exp", "softmax", "log_softmax",
        "masked_fill",
        "clone", "mean", "sum", "pow", "rsqrt", "sqrt", "neg", "baddbmm", "new_empty", "new_zeros", "new_ones",
        "new_full",
    }
)  # fmt: skip
#: Layers that return a tensor of their own, keep no reference to it, and write none of their arguments.
FRESH_LAYERS: frozenset[type[nn.Module]] = frozenset(
    {
        nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
        nn.ConvTranspose3d,
        nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm,
        nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.Embedding, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Softmax,
        nn.LogSoftmax, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.PReLU,
        nn.Softplus,
        nn.Upsample,
    }
)  # fmt: skip
#: Layers with an ``inplace`` option: a tensor of their own, or the argument, overwritten.
OPTIONAL_INPLACE: frozenset[type[nn.Module]] = frozenset(
    {
        nn.ReLU,
        nn.ReLU6,
        nn.SiLU,
        nn.Hardswish,
        nn.Hardsigmoid,
        nn.LeakyReLU,
        nn.ELU,
        nn.CELU,
        nn.SELU,
        nn.Mish,
        nn.Hardtanh,
    }
)

#: Layers that may return their argument itself.
PASSING_LAYERS: frozenset[type[nn.Module]] = frozenset(
    {nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Flatten, nn.Unflatten}
)

#: Memory that the caller, the module or a stranger's layer may hold on to.
OUTSIDE = "outside"


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module without what fastlayers put in its place."""
    return getattr(type(module), "__dict__", {}).get("__fastlayers_original__", type(module))  # type: ignore[no-any-return]


def is_plain_layer(module: nn.Module) -> bool:
    return "forward" not in module.__dict__


def hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class View:
    """A recorded graph with the questions that rules and their safety checks ask about it."""

    def __init__(self, graph: fx.Graph, root: nn.Module, *, deep: bool = False) -> None:
        self.graph = graph
        self.root = root
        self.deep = deep
        #: Children of unknown classes whose own forward was looked at, by path, with what was recorded of it.
        self.children: dict[str, tuple[Recording, tuple[str, ...]] | None] = {}
        self.refresh()

    def thread_inplace(self) -> None:
        """Let later uses of a tensor that ``x.add_(y)`` wrote use its result, which is the same tensor."""
        for node in list(self.graph.nodes):
            op = self.op(node) if node.op in ("call_function", "call_method") else None
            if op is None or not op.inplace or not isinstance(op["input"], Node):
                continue
            later = {user for user in op["input"].users if self.position[user] > self.position[node]}
            op["input"].replace_all_uses_with(node, lambda user, later=later: user in later)  # type: ignore[misc]

    def refresh(self) -> None:
        """Call after an edit."""
        self.position = {node: i for i, node in enumerate(self.graph.nodes)}
        self._memory: dict[Node, frozenset[object]] = {}

    # -- what a node computes -----------------------------------------------------------------------------------

    def op(self, node: Any, name: str | None = None) -> Op | None:
        """The operation of a node, if it is a known one (and the one asked for)."""
        if not isinstance(node, Node):
            return None
        found = self._layer(node) if node.op == "call_module" else self._function(node)
        return found if found is not None and name in (None, found.name) else None

    def _function(self, node: Node) -> Op | None:
        if node.op not in ("call_function", "call_method") or (node.op == "call_method") != isinstance(
            node.target, str
        ):
            return None
        spelling = SPELLINGS.get(node.target)
        if spelling is None or len(node.args) > len(spelling.operands):
            return None
        operands = dict(zip(spelling.operands, node.args, strict=False))
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
        if original not in LAYERS or len(node.args) != 1 or node.kwargs or not is_plain_layer(child):
            return None
        name, attributes = LAYERS[original]
        operands = {"input": node.args[0], **{attribute: getattr(child, attribute) for attribute in attributes}}
        return Op(name, node, operands, bool(getattr(child, "inplace", False)), str(node.target))

    def child(self, node: Node) -> nn.Module:
        return self.root.get_submodule(str(node.target))

    def is_number(self, value: Any) -> bool:
        """Whether a value is a Python number (a literal, or computed from sizes)."""
        if isinstance(value, int | float):
            return not isinstance(value, bool)
        if not isinstance(value, Node):
            return False
        if value.op == "call_method":
            return value.target in NUMBER_METHODS
        if value.op != "call_function":
            return False
        target = value.target
        if target is getattr:
            return value.args[1] in NUMBER_ATTRIBUTES
        if getattr(math, getattr(target, "__name__", ""), None) is target or target in NUMBER_FUNCTIONS:
            return True
        if target in (operator.getitem, calls.unpack):
            return self.is_number(value.args[0])
        if getattr(target, "__module__", None) == "_operator":
            return bool(value.args) and all(self.is_number(arg) for arg in value.args)
        return False

    def is_tensor(self, value: Any) -> bool:
        """Whether a value is taken for a tensor. A placeholder is one only under a guard, which the rewriting adds."""
        is_flag = isinstance(value, Node) and value.op == "get_attr" and value.target == "training"
        return isinstance(value, Node) and not is_flag and not self.is_number(value)

    # -- which memory a node shares ---------------------------------------------------------------------------

    def memory(self, node: Node) -> frozenset[object]:
        """The allocations that a node's result may live in: nodes that made them, or :data:`OUTSIDE`."""
        for known in self.position if node not in self._memory else ():
            if known not in self._memory:  # in order: what a node shares was computed before it
                self._memory[known] = frozenset(self._allocations(known))
        return self._memory[node]

    def _allocations(self, node: Node) -> Iterator[object]:
        if node.op in ("placeholder", "get_attr", "output"):
            yield OUTSIDE
            return
        op = self.op(node)
        if op is not None and op.inplace:
            yield from self.memory(op["input"]) if isinstance(op["input"], Node) else (OUTSIDE,)
            return
        if self.is_number(node):
            return
        if node.op == "call_module":
            yield from self._layer_allocations(node)
            return
        fresh = FRESH_METHODS if node.op == "call_method" else FRESH_FUNCTIONS
        yield node
        if is_opaque(node):
            yield OUTSIDE
        if node.target not in fresh:
            for operand in node.all_input_nodes:
                yield from self.memory(operand)

    def _layer_allocations(self, node: Node) -> Iterator[object]:
        child = self.child(node)
        makers = self.makers(node)
        if makers is not None:
            yield node
            return
        if original_class(child) in PASSING_LAYERS and is_plain_layer(child):
            yield node
        else:
            yield OUTSIDE
        for operand in node.all_input_nodes:
            yield from self.memory(operand)

    def makers(self, node: Node) -> tuple[str, ...] | None:
        """The children that hand on the fresh tensor which this call returns; None if it may not be fresh.

        For a Sequential they are the Sequential and its last layer. A hook on any of them could keep the tensor.
        """
        path = str(node.target)
        child = self.child(node)
        chain = [path]
        while original_class(child) is nn.Sequential and is_plain_layer(child) and child._modules:
            name = next(reversed(child._modules))
            path = f"{path}.{name}"
            child = self.root.get_submodule(path)
            chain.append(path)
        original = original_class(child)
        if original in FRESH_LAYERS or (original in OPTIONAL_INPLACE and not child.inplace):
            return tuple(chain) if is_plain_layer(child) else None
        if not self.deep or original.__module__.startswith("torch.") or node.kwargs:
            return None
        if path not in self.children:
            self.children[path] = self._inspect(path, len(node.args) if len(chain) == 1 else 1)
        inspected = self.children[path]
        return (*chain, *inspected[1]) if inspected is not None else None

    def _inspect(self, path: str, arguments: int) -> tuple[Recording, tuple[str, ...]] | None:
        """Whether a child of an unknown class returns a tensor of its own and keeps none, by what its forward does."""
        recording = record_child(self.root, self.root.get_submodule(path), arguments)
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
        """The children that see the arguments of a call and could keep them; None if the call itself could."""
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
            if original is nn.Sequential:
                pending += [f"{path}.{name}" for name in child._modules]
            elif original not in FRESH_LAYERS | OPTIONAL_INPLACE | PASSING_LAYERS:
                return None
        return tuple(seen)

    def written(self, node: Node) -> frozenset[object]:
        """The allocations that a node may write."""
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
        touched: set[object] = set()
        for operand in node.all_input_nodes:
            touched |= self.memory(operand)
        return frozenset(touched)

    def _layer_only_reads(self, node: Node) -> bool:
        child = self.child(node)
        original = original_class(child)
        if not is_plain_layer(child) or hooked(child):
            return False
        if original in FRESH_LAYERS or original in DROP_IN or original is nn.Identity:
            return True
        return getattr(child, "inplace", None) is False and original.__module__.startswith("torch.nn.")


def is_opaque(node: Node) -> bool:
    """Whether a node calls a function of somebody's, which could return or keep any tensor."""
    if node.op != "call_function":
        return False
    package = (getattr(node.target, "__module__", None) or "torch").split(".")[0]
    return package not in ("torch", "_operator", "math", "builtins", "fastlayers")


def is_barrier(node: Node) -> bool:
    """Whether a recorded function may do anything, such as switch autograd off: nothing is moved past it."""
    if node.op != "call_function" or node.target in SPELLINGS or node.target in INPLACE_OPERATORS:
        return False
    known = getattr(torch, getattr(node.target, "__name__", ""), None) is node.target
    return not (known and node.all_input_nodes) and not function_only_reads(node)


def function_only_reads(node: Node) -> bool:
    """Whether a recorded function is known to write none of its arguments, by torch's naming and its options."""
    target = node.target
    name = getattr(target, "__name__", "")
    if (
        target in (getattr, calls.unpack, calls.format_string)
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
