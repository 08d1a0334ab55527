"""Generated code: the statements of a rewritten graph, the tests of its guards, and the class around them."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from fastlayers.patching.capture.rebuild import show_source
from fastlayers.patching.capture.recording import Name, Recording, add_names
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.rewrite.classes import seal

__all__ = ["GUARD_BUILTINS", "body_source", "generate_class", "guards_source"]

#: What a generated forward calls the answer of its guards.
HOLDS = "_fastlayers_holds"


#: A child of ``self``, as :func:`module_expression` writes it.
CHILD = re.compile(r"self(\._modules\['[^'\\]*'\])+")


#: What guards call; a parameter of that name would hide it.
GUARD_BUILTINS = frozenset(
    {"type", "isinstance", "len", "tuple", "list", "dict", "int", "float", "str", "super", "getattr", "hasattr"}
)


class ByRegistry(ast.NodeTransformer):
    """Children looked up where they are, past ``nn.Module.__getattr__``, which is Python."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        is_child = self.child(node) is not None
        self.generic_visit(node)
        if is_child:
            registry = ast.Attribute(node.value, "_modules", ast.Load())
            return ast.Subscript(registry, ast.Constant(node.attr), node.ctx)
        return node

    def child(self, node: ast.expr) -> nn.Module | None:
        """The module that an expression like ``self.attn.qkv`` gives, where its class has no such attribute."""
        if isinstance(node, ast.Name):
            return self.module if node.id == "self" else None
        owner = self.child(node.value) if isinstance(node, ast.Attribute) else None
        if owner is None or hasattr(type(owner), node.attr):  # type: ignore[attr-defined]
            return None
        return owner._modules.get(node.attr)  # type: ignore[attr-defined]


class SharedLookups(ast.NodeTransformer):
    """Children of ``self`` that several tests look up, looked up by the first of them."""

    def __init__(self, tests: list[ast.expr]) -> None:
        found = (node for test in tests for node in ast.walk(test))
        self.counts = Counter(ast.unparse(node) for node in found if isinstance(node, ast.Subscript))
        self.names: dict[str, str] = {}
        self.always = True  # whether what is visited is evaluated in any case

    def visit(self, node: ast.AST) -> Any:
        before = self.always
        self.always = before and not isinstance(node, ast.BoolOp | ast.IfExp | ast.Lambda | ast.GeneratorExp)
        found = super().visit(node)
        self.always = before
        return found

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        code = ast.unparse(node)
        if CHILD.fullmatch(code) is None:
            return self.generic_visit(node)
        if code in self.names:
            return ast.Name(self.names[code], ast.Load())
        self.generic_visit(node)
        if not self.always or self.counts[code] == 1:
            return node
        name = "_fastlayers_" + "_".join(re.findall(r"'(\w+)'", code))
        while name in self.names.values():
            name += "_"
        self.names[code] = name
        return ast.NamedExpr(ast.Name(name, ast.Store()), node)


def share_lookups(guards: Iterable[str]) -> list[str]:
    """The tests in a row, each of which is asked where those before it hold."""
    both = " and ".join(f"({guard})" for guard in guards)
    if not both:
        return []
    tests = list(conjuncts(ast.parse(both, mode="eval").body))
    shared = SharedLookups(tests)
    return [source_of_test(shared.visit(test)) for test in tests]


def conjuncts(test: ast.expr) -> Iterator[ast.expr]:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        for value in test.values:
            yield from conjuncts(value)
    else:
        yield test


def source_of_test(test: ast.expr) -> str:
    """One test in a row, a call with its arguments one below the other where they are many."""
    if isinstance(test, ast.Call) and len(test.args) > 2 and not test.keywords:
        arguments = ",\n    ".join(map(ast.unparse, test.args))
        return f"{ast.unparse(test.func)}(\n    {arguments}\n)"
    return f"({ast.unparse(test)})" if isinstance(test, ast.BoolOp | ast.IfExp) else ast.unparse(test)


def body_source(recording: Recording, module: nn.Module) -> str:
    """The statements of a recorded graph; the objects they name go to the namespace of the recording."""
    code = recording.graph.python_code("self")
    function = next(node for node in ast.parse(code.src).body if isinstance(node, ast.FunctionDef))
    add_names(recording.namespace, code.globals)
    by_registry = ByRegistry(module)
    return "\n".join(ast.unparse(by_registry.visit(statement)) for statement in function.body)


def signature_source(forward: types.FunctionType, namespace: dict[str, Any]) -> tuple[str, str]:
    """The parameters of a forward as they are declared, and as they are handed on."""
    itself, *parameters = inspect.signature(forward).parameters.values()
    declared = [itself.replace(name="self", annotation=itself.empty)]  # some call it something else
    handed: list[str] = []
    for parameter in parameters:
        default = parameter.default
        if default is not parameter.empty and not isinstance(default, bool | int | str | None):
            name = f"_default_{parameter.name}"
            namespace[name] = default
            default = Name(name)
        declared.append(parameter.replace(annotation=parameter.empty, default=default))
        handed.append(
            f"{parameter.name}={parameter.name}" if parameter.kind is parameter.KEYWORD_ONLY else parameter.name
        )
    text = str(inspect.Signature(declared))
    return text, ", ".join(handed)


def guards_source(recording: Recording, keyword: str) -> str:
    """``keyword`` (an assignment, a return) and whether the guards of a recording hold.

    Those that cannot be asked do not hold: a child that they look at may be gone, or be a function now.
    """
    guards = "\nand ".join(share_lookups(recording.guards)) or "True"
    return "\n".join(
        [
            "try:",
            f"    {keyword} (",
            textwrap.indent(guards, " " * 8),
            "    )",
            "except (AttributeError, KeyError):",
            f"    {keyword} False",
        ]
    )


def class_source(
    name: str, present: type[nn.Module], variants: list[tuple[Recording, str]], namespace: dict[str, Any]
) -> str:
    base = present.__name__ if present.__name__.isidentifier() else "Original"
    while namespace.setdefault(base, present) is not present:
        base += "_"
    declared, handed = signature_source(present.forward, namespace)  # type: ignore[arg-type]
    lines = [f"class {name}({base}):", f"    def forward{declared}:"]
    for recording, body in variants:
        lines.append(textwrap.indent(guards_source(recording, f"{HOLDS} ="), " " * 8))
        lines.append(f"        if {HOLDS}:")
        lines.append(textwrap.indent(body, " " * 12))
    lines.append(f"        return super().forward({handed})")
    return "\n".join(lines) + "\n"


def generate_class(
    present: type[nn.Module], name: str, variants: list[tuple[Recording, str]], known: dict[Any, Any]
) -> type[nn.Module]:
    """A subclass of the class that a module has now, which may be a generated one, standing for its own class."""
    original = present.__dict__.get("__fastlayers_original__", present)
    namespace: dict[str, Any] = {}
    for recording, _ in variants:
        add_names(namespace, recording.namespace)
    name = name if name.isidentifier() else "Fused"
    while name in namespace:
        name += "_"
    source = class_source(name, present, variants, namespace)
    key = (present, source, *sorted((name, id(value)) for name, value in namespace.items()))
    if key in known:
        return known[key]  # type: ignore[no-any-return]
    scope = dict(namespace)
    exec(compile(source, show_source(original.__qualname__, source), "exec"), scope)
    generated = scope[name]
    names = inspect.unwrap(generated.__dict__["forward"]).__code__.co_varnames
    if clash := set(names) & (set(namespace) | GUARD_BUILTINS):
        raise Refusal(Reason.SIGNATURE, f"a variable called {', '.join(sorted(clash))} hides what the guards use")
    generated.forward.__doc__ = original.forward.__doc__
    known[key] = seal(generated, original, source)
    return generated
