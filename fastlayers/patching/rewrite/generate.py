"""Generated code: the statements of a rewritten graph, the tests of its guards, and the forward around them.

A generated class subclasses the module's class and has one method, ``forward``: for each recording the test of its
guards and the rewritten body, and at the end the original forward, for every call that no recording covers.
"""

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

from fastlayers.patching.capture.lookups import member, same
from fastlayers.patching.capture.rebuild import arguments_source, execute_shown
from fastlayers.patching.capture.recording import Name, Recording, add_names, binder
from fastlayers.patching.libraries.adapters import decorated
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.rewrite.classes import generated_class, steps_aside
from fastlayers.patching.runtime.checks import IdleTest, check_defaults, original_of

__all__ = [
    "CHILD",
    "GUARD_BUILTINS",
    "body_source",
    "forward_source",
    "generate_class",
    "guards_source",
    "written_class",
]

#: The variable of a generated forward for the result of its guards.
HOLDS = "_fastlayers_holds"
#: A child of ``self``, as :func:`module_expression` writes it.
CHILD = re.compile(r"self(\._modules\['[^'\\]*'\])+")
#: Built-ins that guards call. A parameter of that name would hide one.
GUARD_BUILTINS = frozenset(
    {"type", "isinstance", "len", "tuple", "list", "dict", "int", "float", "str", "super", "getattr", "hasattr"}
)


class ByRegistry(ast.NodeTransformer):
    """Looks children up in ``_modules``, since ``nn.Module.__getattr__`` is slow."""

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
        """The module of an expression such as ``self.attn.qkv``, if no class has an attribute of that name."""
        if isinstance(node, ast.Name):
            return self.module if node.id == "self" else None
        owner = self.child(node.value) if isinstance(node, ast.Attribute) else None
        if owner is None or hasattr(type(owner), node.attr):  # type: ignore[attr-defined]
            return None
        return owner._modules.get(node.attr)  # type: ignore[attr-defined]


class SharedLookups(ast.NodeTransformer):
    """Looks children of ``self`` up once: the first of several tests assigns a variable."""

    def __init__(self, tests: list[ast.expr]) -> None:
        found = (node for test in tests for node in ast.walk(test))
        self.counts = Counter(ast.unparse(node) for node in found if isinstance(node, ast.Subscript))
        self.names: dict[str, str] = {}
        self.always = True  # whether the visited expression is always evaluated

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
    """The guards as tests in a row, each evaluated if the ones before it hold."""
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
    """The source of one test. A call with many arguments has one per line."""
    if isinstance(test, ast.Call) and len(test.args) > 2 and not test.keywords:
        arguments = ",\n    ".join(map(ast.unparse, test.args))
        return f"{ast.unparse(test.func)}(\n    {arguments}\n)"
    return f"({ast.unparse(test)})" if isinstance(test, ast.BoolOp | ast.IfExp) else ast.unparse(test)


def body_source(recording: Recording, module: nn.Module) -> str:
    """The statements of a recorded graph. The objects that they name go to the namespace of the recording."""
    code = recording.graph.python_code("self")
    function = next(node for node in ast.parse(code.src).body if isinstance(node, ast.FunctionDef))
    add_names(recording.namespace, code.globals)
    by_registry = ByRegistry(module)
    return "\n".join(ast.unparse(by_registry.visit(statement)) for statement in function.body)


def signature_source(forward: types.FunctionType, namespace: dict[str, Any]) -> tuple[str, str]:
    """The parameters of a forward as its declaration has them, and as the arguments of a call of it."""
    itself, *parameters = inspect.signature(forward).parameters.values()
    if itself.kind not in (itself.POSITIONAL_ONLY, itself.POSITIONAL_OR_KEYWORD):
        raise Refusal(Reason.SIGNATURE, str(itself))
    if any(parameter.name == "self" for parameter in parameters):
        raise Refusal(Reason.SIGNATURE, "a parameter called self that is not the first")
    declared = [itself.replace(name="self", annotation=itself.empty)]  # It may have another name.
    for parameter in parameters:
        default = parameter.default
        if default is not parameter.empty and not isinstance(default, bool | int | str | None):
            name = f"_default_{parameter.name}"
            namespace[name] = default
            default = Name(name)
        declared.append(parameter.replace(annotation=parameter.empty, default=default))
    return str(inspect.Signature(declared)), ", ".join(arguments_source(declared))


def guards_source(recording: Recording, keyword: str) -> str:
    """Source that assigns or returns (``keyword``) whether the guards of a recording hold.

    A guard that raises does not hold: its child may be gone, or be a function now.
    """
    guards = "\nand ".join(share_lookups(recording.guards)) or "True"
    return (
        f"try:\n    {keyword} (\n{textwrap.indent(guards, ' ' * 8)}\n    )\n"
        f"except (AttributeError, KeyError):\n    {keyword} False"
    )


def forward_source(present: type[nn.Module], aside: str, body: str, namespace: dict[str, Any]) -> str:
    """The source of a forward for a subclass.

    Args:
        present: the class that it subclasses, whose forward runs for a module that is not patched any more, if some
            wrapper still calls this, and for calls that go ``aside`` or for which the ``body`` returns nothing.
        aside: a test of a call.
        body: statements.
        namespace: the objects that these name.
    """
    base = binder(namespace)(present, present.__name__)
    declared, handed = signature_source(present.forward, namespace)  # type: ignore[arg-type]
    lines = [
        f"def forward{declared}:",
        "    if not isinstance(self, __class__):",
        f"        return type(self).forward({handed})",
        f"    if not ({aside}):",
        textwrap.indent(body, " " * 8),
        f"    return {base}.forward({handed})",
    ]
    if "=" in declared and "__fastlayers_original__" not in vars(present):  # A generated forward makes the test itself.
        namespace |= {"_fastlayers_stock": present.forward, "_fastlayers_check_defaults": check_defaults}
        check = f"    if {base}.forward is not _fastlayers_stock:"
        lines[3:3] = check, f"        _fastlayers_check_defaults(_fastlayers_stock, {base}.forward)"
    return "\n".join(lines) + "\n"


def written_class(
    present: type[nn.Module], name: str, shown: str, source: str, namespace: dict[str, Any], members: dict[str, Any]
) -> type[nn.Module]:
    """The subclass with the forward of a :func:`forward_source`; ``shown`` names it in tracebacks.

    Raises:
        Refusal: a variable hides what the forward names.
    """
    original, scope, made = original_of(present), dict(namespace), dict[str, Any]()
    execute_shown(shown, source, scope, made)
    forward = made["forward"]
    if clash := set(forward.__code__.co_varnames) & (set(namespace) | GUARD_BUILTINS):
        raise Refusal(Reason.SIGNATURE, f"a variable called {', '.join(sorted(clash))} hides what the guards use")
    forward.__doc__ = original.forward.__doc__
    scope["__class__"] = generated_class(name, present, {"forward": decorated(original, forward), **members})
    return scope["__class__"]  # type: ignore[no-any-return]


def generate_class(
    present: type[nn.Module],
    name: str,
    variants: list[tuple[Recording, str]],
    known: dict[Any, Any],
    idle: tuple[IdleTest, ...],
) -> type[nn.Module]:
    """Generate a subclass of the present class of a module, which may be a generated class itself.

    Args:
        idle: tests of a call's first argument. If one holds, the present forward runs, since nothing is gained.
    """
    original = original_of(present)
    namespace: dict[str, Any] = {}
    body = []
    for recording, statements in variants:
        bind = binder(recording.namespace)
        recording.guards[same(member(original, "forward", bind), original.forward, bind)] = None
        add_names(namespace, recording.namespace)
        body += [guards_source(recording, f"{HOLDS} ="), f"if {HOLDS}:", textwrap.indent(statements, " " * 4)]
    aside = steps_aside(present.forward, idle, binder(namespace))
    source = forward_source(present, aside, "\n".join(body), namespace)
    key = (present, source, *sorted((name, id(value)) for name, value in namespace.items()))
    if key not in known:
        members = {"__fastlayers_source__": source}
        known[key] = written_class(present, name, original.__qualname__, source, namespace, members)
    return known[key]  # type: ignore[no-any-return]
