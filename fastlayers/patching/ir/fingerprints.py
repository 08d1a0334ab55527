"""Fingerprints: handwritten norms, recognised by what their forward computes and not by their names.

A hundred model files repeat the same few lines of RMSNorm under different names. A straight-line forward is read into
the expression that it returns: locals and helper methods are substituted, and spellings (``x.to(torch.float32)`` and
``x.float()``, ``x ** 2`` and ``x.pow(2)``) and the order of factors are unified. Two forwards that compute the same in
the same casting order then give equal expressions, up to the names of attributes. :data:`BODIES` has the known
expressions, as code.
"""

from __future__ import annotations

import ast
import inspect
import types
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fastlayers.patching.capture.syntax import parse
from fastlayers.patching.reasons import Refusal

__all__ = [
    "EXPRESSIONS",
    "Body",
    "Expression",
    "Fingerprint",
    "UnreadableError",
    "expression_of",
    "fingerprint",
    "norm_by_hand",
    "operation",
]

#: An expression: its operation first, then its operands, which are expressions or constants.
Expression: TypeAlias = tuple[Any, ...]


class UnreadableError(Exception):
    """Raised for code that is not one expression of one tensor."""


# -- what is known ----------------------------------------------------------------------------------------------------


def normalized(x: str) -> str:
    return f"({x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + self.eps))"


WIDE = normalized("x.float()")
CENTERED = "(x.float() - x.float().mean(-1, keepdim=True))"
HALF_T5 = "x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)"


@dataclass(frozen=True)
class Body:
    """One way to write a norm.

    Attributes:
        name: a library or model that writes it so.
        casting: its casting order, by the names of :func:`fastlayers.functional.rms_norm`; None for a layer_norm.
        code: the forward as one expression. ``self.weight``, ``self.eps`` and ``self.scaled`` match attributes of any
            name.
        same: whether it has this casting order only if x and weight have the same dtype.
    """

    name: str
    casting: str | None
    code: str
    same: bool = False

    @property
    def op(self) -> str:
        return "layer_norm" if self.casting is None else "rms_norm"


BODIES = (
    Body("llama", "llama", f"self.weight * {WIDE}.to(x.dtype)"),
    Body("gemma", "gemma", f"({WIDE} * (1.0 + self.weight.float())).to(x.dtype)"),
    Body(
        "t5",
        "llama",
        f"self.weight * (({HALF_T5}).to(self.weight.dtype) "
        f"if self.weight.dtype in [torch.float16, torch.bfloat16] else {HALF_T5})",
        same=True,
    ),
    Body("olmo", "torch", f"(self.weight * {WIDE}).to(x.dtype)", same=True),
    Body("helium", "torch", f"(self.weight.float() * {WIDE}).to(x.dtype)", same=True),
    Body("gemma3n", "torch", f"({WIDE} * self.weight.float() if self.scaled else {WIDE}).to(x.dtype)", same=True),
    Body("llama4_l2", "torch", f"{WIDE}.to(x.dtype)", same=True),
    Body(
        "cohere",
        None,
        f"(self.weight.float() * ({CENTERED} * torch.rsqrt({CENTERED}.pow(2).mean(-1, keepdim=True) + self.eps)))"
        ".to(x.dtype)",
        same=True,
    ),
)


@dataclass(frozen=True)
class Fingerprint:
    """A forward that computes a known norm: its body, and the names of its parameter and its attributes."""

    body: Body
    parameter: str
    eps: str
    weight: str | None = None
    scaled: str | None = None


#: By class: the methods that were read, by their names, and what they compute.
_known: WeakKeyDictionary[type[nn.Module], tuple[dict[str, Any], Fingerprint | None]] = WeakKeyDictionary()


def fingerprint(cls: type[nn.Module]) -> Fingerprint | None:
    """The norm that the forward of a class computes; None if it is not in :data:`BODIES`."""
    forward = cls.forward
    if not isinstance(forward, types.FunctionType) or (forward.__module__ or "").startswith("torch."):
        return None
    if cls not in _known or any(getattr(cls, name, None) is not f for name, f in _known[cls][0].items()):
        methods = {"forward": forward}
        _known[cls] = (methods, compute(cls, forward, methods))
    return _known[cls][1]


def compute(
    cls: type[nn.Module], forward: types.FunctionType, methods: dict[str, types.FunctionType]
) -> Fingerprint | None:
    parameters = list(inspect.signature(forward).parameters.values())
    if len(parameters) != 2 or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters):
        return None
    try:
        found = Reader(cls, forward, methods).result(("self",), ("input",))
    except (UnreadableError, Refusal, RecursionError):
        return None
    for body, expression in EXPRESSIONS:
        names: dict[str, str] = {}
        if unify(expression, found, names):
            return Fingerprint(body, parameters[1].name, names["eps"], names.get("weight"), names.get("scaled"))
    return None


def norm_by_hand(cls: type[nn.Module]) -> str:
    """The statement in which a forward seems to normalise by hand, for a report of one that is not known; else ""."""
    try:
        trees: list[ast.AST] = [parse(cls.forward)]  # type: ignore[arg-type]
    except (Refusal, AttributeError):
        return ""
    for node in ast.walk(trees[0]):
        method = getattr(cls, node.attr, None) if isinstance(node, ast.Attribute) else None
        if isinstance(method, types.FunctionType) and not (method.__module__ or "").startswith("torch."):
            with suppress(Refusal):
                trees.append(parse(method))
    names = set().union(*map(names_called, trees))
    if "rsqrt" not in names or not {"mean", "var"} & names:
        return ""
    inner = (
        node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.Return | ast.AugAssign)
    )
    return next((ast.unparse(node) for node in inner if "rsqrt" in names_called(node)), "")


def names_called(tree: ast.AST) -> set[str]:
    """The names and attributes in a tree."""
    return {n.attr if isinstance(n, ast.Attribute) else getattr(n, "id", "") for n in ast.walk(tree)}


def unify(known: Any, found: Any, names: dict[str, str]) -> bool:
    """Whether two expressions are equal up to the names of attributes. ``names`` collects those of the second."""
    if not (isinstance(known, tuple) and isinstance(found, tuple)):
        return type(known) is type(found) and bool(known == found)
    if len(known) != len(found):
        return False
    if known[:1] == ("attribute",) == found[:1]:
        return names.setdefault(known[1], found[1]) == found[1] and len(set(names.values())) == len(names)
    return all(unify(a, b, names) for a, b in zip(known, found, strict=True))


# -- from code to an expression ---------------------------------------------------------------------------------------


def shape_of(expression: Any) -> str:
    """An expression without the names of its attributes, a key to sort commuting operands by."""
    if not isinstance(expression, tuple):
        return repr(expression)
    if expression[0] == "attribute":
        return "attribute"
    return f"({' '.join(map(shape_of, expression))})"


@dataclass
class Reader:
    """Reads a method of a class into the expression that it returns. ``methods`` collects those that it calls."""

    cls: type[nn.Module]
    function: types.FunctionType
    methods: dict[str, types.FunctionType] = field(default_factory=dict)
    values: dict[str, Expression] = field(default_factory=dict)
    depth: int = 0

    def result(self, *arguments: Expression) -> Expression:
        tree = parse(self.function)
        names = [arg.arg for arg in tree.args.args]
        if len(names) != len(arguments) or self.depth > 4:
            raise UnreadableError
        self.values = dict(zip(names, arguments, strict=True))
        body = [s for s in tree.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        for statement in body[:-1]:
            self.run(statement)
        if not body or not isinstance(body[-1], ast.Return) or body[-1].value is None:
            raise UnreadableError
        return self.read(body[-1].value)

    def run(self, statement: ast.stmt) -> None:
        match statement:
            case ast.If():
                self.branch(statement)
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), _, ast.expr() as value):
                self.values[name] = self.read(value)
            case _:
                raise UnreadableError

    def branch(self, statement: ast.If) -> None:
        test, before = self.read(statement.test), dict(self.values)
        for inner in statement.body:
            self.run(inner)
        taken, self.values = self.values, dict(before)
        for inner in statement.orelse:
            self.run(inner)
        for name in taken.keys() & self.values.keys():
            if taken[name] != self.values[name]:
                self.values[name] = ("if", test, taken[name], self.values[name])

    def read(self, node: ast.expr) -> Expression:
        if isinstance(node, ast.Constant):
            number = isinstance(node.value, int | float) and not isinstance(node.value, bool)
            return ("constant", float(node.value)) if number else ("constant", node.value)  # type: ignore[arg-type]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.read(node.operand)
            if value[0] == "constant" and isinstance(value[1], float):
                return ("constant", -value[1])
        if isinstance(node, ast.Name):
            return self.name(node.id)
        if isinstance(node, ast.List | ast.Tuple):
            return ("items", *map(self.read, node.elts))
        if isinstance(node, ast.Attribute):
            return self.attribute(self.read(node.value), node.attr)
        if isinstance(node, ast.IfExp):
            return ("if", self.read(node.test), self.read(node.body), self.read(node.orelse))
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.In):
            return ("in", self.read(node.left), self.read(node.comparators[0]))
        if isinstance(node, ast.BinOp):
            return operation(type(node.op).__name__.lower(), [self.read(node.left), self.read(node.right)], {})
        if isinstance(node, ast.Call):
            return self.call(node)
        raise UnreadableError

    def name(self, name: str) -> Expression:
        if name in self.values:
            return self.values[name]
        if self.function.__globals__.get(name) is torch:
            return ("torch",)
        raise UnreadableError

    def attribute(self, owner: Expression, name: str) -> Expression:
        if owner == ("self",):
            return ("attribute", name)
        if owner == ("torch",) and isinstance(getattr(torch, name, None), torch.dtype):
            return ("constant", getattr(torch, name))
        if name == "dtype":
            return ("dtype", owner)
        raise UnreadableError

    def call(self, node: ast.Call) -> Expression:
        if not isinstance(node.func, ast.Attribute) or any(keyword.arg is None for keyword in node.keywords):
            raise UnreadableError
        arguments = [self.read(arg) for arg in node.args]
        options = {str(keyword.arg): self.read(keyword.value) for keyword in node.keywords}
        owner = self.read(node.func.value)
        if owner == ("self",):
            method = inspect.getattr_static(self.cls, node.func.attr, None)
            if not isinstance(method, types.FunctionType) or options:
                raise UnreadableError
            self.methods[node.func.attr] = method
            return Reader(self.cls, method, self.methods, depth=self.depth + 1).result(owner, *arguments)
        return operation(node.func.attr, arguments if owner == ("torch",) else [owner, *arguments], options)


#: Commuting operations by their spellings.
COMMUTING = {"mult": "mul", "mul": "mul", "multiply": "mul", "add": "add"}
LAST = (("constant", -1.0), ("items", ("constant", -1.0)))


def operation(name: str, operands: list[Expression], options: dict[str, Expression]) -> Expression:
    """An operation on tensors, in the spelling of expressions."""
    if not operands or operands[0] == ("torch",):
        raise UnreadableError
    x, *rest = operands
    if name in ("to", "type") and (len(rest), set(options)) in ((1, set()), (0, {"dtype"})):
        (dtype,) = rest or options.values()
        return ("float", x) if dtype == ("constant", torch.float32) else ("cast", x, dtype)
    if name == "float" and not rest:
        return ("float", x)
    if name == "type_as" and len(rest) == 1:
        return ("cast", x, ("dtype", rest[0]))
    if name == "mean" and len(rest) < 2 and options.get("keepdim") == ("constant", True):
        dims = [*rest, *(options[name] for name in options if name == "dim")]
        if len(dims) == 1 and dims[0] in LAST and set(options) <= {"dim", "keepdim"}:
            return ("mean", x)
    elif options:
        raise UnreadableError
    elif name in ("square", "rsqrt", "tanh", "sigmoid") and not rest:
        return (name, x)
    elif len(rest) == 1:
        return binary(name, x, rest[0])
    raise UnreadableError


def binary(name: str, a: Expression, b: Expression) -> Expression:
    if name == "pow" and b in (("constant", 2.0), ("constant", -0.5)):
        return ("square" if b[1] > 0 else "rsqrt", a)
    if name in COMMUTING:
        known = COMMUTING[name]
        return ("square", a) if known == "mul" and a == b else (known, *sorted((a, b), key=shape_of))
    if name in ("sub", "pow"):
        return (name, a, b)
    raise UnreadableError


def expression_of(code: str) -> Expression:
    reader = Reader(nn.Module, expression_of)  # type: ignore[arg-type]
    reader.values = {"self": ("self",), "x": ("input",)}
    return reader.read(ast.parse(code, mode="eval").body)


EXPRESSIONS = tuple((body, expression_of(body.code)) for body in BODIES)
