"""Source code as a syntax tree, its instrumentation, and a run of the instrumented source."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import itertools
import keyword
import linecache
import operator
import os
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fastlayers.patching.reasons import Reason, Refusal

__all__ = [
    "INPLACE",
    "OPERATORS",
    "Concrete",
    "Instrument",
    "compiled_with_hooks",
    "functions_in",
    "lines_of",
    "local_names",
    "names_in",
    "optional_parameters",
    "parse",
    "present_statement",
    "require_a_name",
    "shown_statement",
    "statement_at_fault",
    "strip_signature",
    "tested_by_identity",
]


def parse(function: types.FunctionType, *, decorated: bool = False) -> ast.FunctionDef:
    """The syntax tree of a function that can be followed.

    Args:
        decorated: whether to accept any decorator, since the function is the one inside of them, or what they returned.

    Raises:
        Refusal: the source is not available, has changed, or the function has an unknown decorator.
    """
    if hasattr(function, "__wrapped__") and not decorated:
        raise Refusal(Reason.DECORATED, function.__qualname__)
    if function.__code__.co_name == "<lambda>":
        return parse_lambda(function)
    try:  # Of the code, since the source of a wrapper would be that of what it wraps.
        tree = ast.parse(textwrap.dedent(lines_of(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        raise Refusal(Reason.NO_SOURCE, function.__qualname__) from None
    if not isinstance(tree, ast.FunctionDef) or tree.name != function.__code__.co_name:
        raise Refusal(Reason.NO_SOURCE, function.__qualname__)
    written = tuple(arg.arg for arg in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs))
    if written != function.__code__.co_varnames[: len(written)]:
        raise Refusal(Reason.NO_SOURCE, f"the source of {function.__qualname__} changed since it was loaded")
    for decorator in () if decorated else tree.decorator_list:
        known = ast.unparse(decorator).startswith(("torch.jit.", "staticmethod", "classmethod", "property"))
        if not known and not is_compiled_from_file(function):
            raise Refusal(Reason.DECORATED, f"@{ast.unparse(decorator)}")
    return tree


def parse_lambda(function: types.FunctionType) -> ast.FunctionDef:
    """The syntax tree of a function with the arguments and the result of a lambda.

    Its lines are part of a statement, which may have several lambdas. It is found by its line in the whole file.

    Raises:
        Refusal: the source is not available or has changed, or another lambda begins in its line.
    """
    found = [node for node in lambdas(file_of(function)) if node.lineno == function.__code__.co_firstlineno]
    if len(found) != 1 or not is_compiled_from_file(function):
        raise Refusal(Reason.NO_SOURCE, function.__qualname__)
    node = copy.deepcopy(found[0])
    return ast.FunctionDef("lambda_", node.args, [ast.copy_location(ast.Return(node.body), node)], [])


@functools.lru_cache(maxsize=16)
def lambdas(source: str) -> tuple[ast.Lambda, ...]:
    try:
        return tuple(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Lambda))
    except SyntaxError:
        return ()


def file_of(function: types.FunctionType) -> str:
    return "".join(linecache.getlines(function.__code__.co_filename, function.__globals__))


def lines_of(function: types.FunctionType) -> str:
    """The lines of a function.

    As ``inspect.getsource`` finds them, but for its search of all modules for the one of this file: 4 ms a function
    where thousands are imported.

    Raises:
        OSError: they are not available.
    """
    code = function.__code__
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not 0 < code.co_firstlineno <= len(lines):
        raise OSError(f"no source of {function.__qualname__}")
    return "".join(inspect.getblock(lines[code.co_firstlineno - 1 :]))


def strip_signature(tree: ast.FunctionDef) -> None:
    """Remove decorators and annotations from a function, and replace the default of each parameter by None."""
    tree.decorator_list = []
    tree.args.defaults = [ast.Constant(None) for _ in tree.args.defaults]
    tree.args.kw_defaults = [ast.Constant(None) if d is not None else None for d in tree.args.kw_defaults]
    strip_annotations(tree)


def strip_annotations(tree: ast.FunctionDef) -> None:
    tree.returns = None
    for arg in ast.walk(tree.args):
        if isinstance(arg, ast.arg):
            arg.annotation = None


def is_compiled_from_file(function: types.FunctionType) -> bool:
    """Whether a function has the code that its source compiles to, so its decorators returned it unchanged."""
    return function.__code__ in compiled(file_of(function))


@functools.lru_cache(maxsize=16)
def compiled(source: str) -> frozenset[types.CodeType]:
    """The code of every function in a file."""
    return frozenset(functions_in(compile(source, "", "exec", dont_inherit=True)))


def functions_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of the functions and classes inside of code, at any depth."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from functions_in(constant)


REFUSED_SYNTAX: dict[type[ast.AST], tuple[Reason, str]] = {
    ast.With: (Reason.CONTEXT_MANAGER, "with"),
    ast.AsyncWith: (Reason.CONTEXT_MANAGER, "async with"),
    ast.Global: (Reason.CHANGES_STATE, "global"),
    ast.Nonlocal: (Reason.CHANGES_STATE, "nonlocal"),
    ast.Try: (Reason.SYNTAX, "try"),
    ast.While: (Reason.SYNTAX, "while"),
    ast.AsyncFunctionDef: (Reason.SYNTAX, "a nested function"),
    ast.ClassDef: (Reason.SYNTAX, "a nested class"),
    ast.Yield: (Reason.SYNTAX, "yield"),
    ast.YieldFrom: (Reason.SYNTAX, "yield"),
    ast.Await: (Reason.SYNTAX, "await"),
    ast.Match: (Reason.SYNTAX, "match"),
    ast.Delete: (Reason.SYNTAX, "del"),
}
#: The functions of augmented assignments, by the names that :mod:`ast` gives their operators.
INPLACE: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.iadd, "Sub": operator.isub, "Mult": operator.imul, "Div": operator.itruediv,
    "FloorDiv": operator.ifloordiv, "Mod": operator.imod, "Pow": operator.ipow, "MatMult": operator.imatmul,
    "BitAnd": operator.iand, "BitOr": operator.ior, "BitXor": operator.ixor, "LShift": operator.ilshift,
    "RShift": operator.irshift,
}  # fmt: skip
#: What the methods of the other operators are called, by the names that :mod:`ast` gives these.
OPERATORS: dict[str, str] = {
    **{name: function.__name__.removeprefix("i") for name, function in INPLACE.items()},
    **{"Eq": "eq", "NotEq": "ne", "Lt": "lt", "LtE": "le", "Gt": "gt", "GtE": "ge"},
    **{"USub": "neg", "UAdd": "pos", "Invert": "invert"},
}


def hook(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(f"__trace_{name}", ast.Load()), list(args), [])


def assign(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], value)


#: The parts of syntax that go through a hook: what is iterated, what is tested, and contexts.
THROUGH_HOOKS: dict[type[ast.AST], dict[str, str]] = {
    ast.For: {"iter": "container"},
    ast.comprehension: {"iter": "container", "ifs": "test"},
    ast.If: {"test": "test"},
    ast.IfExp: {"test": "test"},
    ast.Assert: {"test": "test"},
    ast.BoolOp: {"values": "test"},
    ast.While: {"test": "test"},
    ast.withitem: {"context_expr": "context"},
}


class Instrument(ast.NodeTransformer):
    """Rewrites a function so that every step that matters calls a hook of a :class:`Run`."""

    def __init__(self, local_names: set[str]) -> None:
        self.local_names = local_names

    def visit(self, node: ast.AST) -> Any:
        refused = REFUSED_SYNTAX.get(type(node))
        if refused is not None and not (
            isinstance(node, ast.Delete) and all(isinstance(t, ast.Name) for t in node.targets)
        ):
            reason, what = refused
            raise Refusal(reason, f"{what} in line {getattr(node, 'lineno', '?')} of the forward")
        return super().visit(node)

    def visit_body(self, tree: ast.FunctionDef) -> None:
        found = [self.visit(statement) for statement in tree.body]
        tree.body = [*itertools.chain.from_iterable(part if isinstance(part, list) else [part] for part in found)]

    def generic_visit(self, node: ast.AST) -> Any:
        super().generic_visit(node)
        for field, name in THROUGH_HOOKS.get(type(node), {}).items():
            part = getattr(node, field)
            setattr(node, field, [hook(name, item) for item in part] if isinstance(part, list) else hook(name, part))
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if not isinstance(node.ctx, ast.Load) or node.id in self.local_names:
            return node
        return hook("name", ast.Constant(node.id))

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if not isinstance(node.ctx, ast.Load):
            raise Refusal(Reason.CHANGES_STATE, f"assigns {ast.unparse(node)}")
        if node.attr.startswith("__") and not node.attr.endswith("__"):
            raise Refusal(Reason.SYNTAX, f"the private name {node.attr}")
        return hook("attribute", self.visit(node.value), ast.Constant(node.attr))

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        if not isinstance(node.ctx, ast.Load):
            raise Refusal(Reason.CHANGES_STATE, f"assigns {ast.unparse(node)}")
        node.value = hook("container", self.visit(node.value))
        node.slice = self.visit(node.slice)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and "super" not in self.local_names:
            if node.args:
                raise Refusal(Reason.SYNTAX, "super() with arguments")
            return hook("parent")
        node.args = [self.visit(arg) for arg in node.args]
        node.keywords = [self.visit(keyword) for keyword in node.keywords]
        node.args.insert(0, self.visit(node.func))
        node.func = ast.Name("__trace_call", ast.Load())
        return node

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        modules = [(a.asname, a.name) if a.asname else (a.name.partition(".")[0],) * 2 for a in node.names]
        return [assign(name, hook("module", ast.Constant(module))) for name, module in modules]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt]:
        module = hook("module", ast.Constant("." * node.level + (node.module or "")))
        return [assign(a.asname or a.name, hook("attribute", module, ast.Constant(a.name))) for a in node.names]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> list[ast.stmt]:
        decorators, node.decorator_list = node.decorator_list, []
        self.generic_visit(node)
        strip_annotations(node)
        value = hook("lambda", ast.Name(node.name, ast.Load()))
        for decorator in reversed(decorators):
            value = hook("call", self.visit(decorator), value)
        return [node, assign(node.name, value)]

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        self.generic_visit(node)
        return hook("lambda", node)

    def visit_Starred(self, node: ast.Starred) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load):
            node.value = hook("container", node.value)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        self.generic_visit(node)
        if node.arg is None:
            node.value = hook("container", node.value)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        special = (ast.Is, ast.IsNot, ast.In, ast.NotIn)
        if not any(isinstance(op, special) for op in node.ops):
            return self.generic_visit(node)  # type: ignore[no-any-return]
        if len(node.ops) > 1:
            raise Refusal(Reason.SYNTAX, ast.unparse(node))
        left, right, op = self.visit(node.left), self.visit(node.comparators[0]), node.ops[0]
        result: ast.expr = hook("same" if isinstance(op, ast.Is | ast.IsNot) else "contains", left, right)
        return ast.UnaryOp(ast.Not(), result) if isinstance(op, ast.IsNot | ast.NotIn) else result

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        if not isinstance(node.target, ast.Name):
            raise Refusal(Reason.CHANGES_STATE, f"assigns {ast.unparse(node.target)}")
        value = hook(
            "inplace",
            ast.Constant(type(node.op).__name__),
            ast.Name(node.target.id, ast.Load()),
            self.visit(node.value),
        )
        return ast.copy_location(ast.Assign([node.target], value), node)

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        self.generic_visit(node)
        unpacked = [target for target in node.targets if isinstance(target, ast.Tuple | ast.List)]
        if unpacked and len(node.targets) > 1:
            raise Refusal(Reason.SYNTAX, "a chained assignment to a tuple")
        for target in unpacked:
            if not any(isinstance(item, ast.Starred) for item in target.elts):
                node.value = hook("unpack", node.value, ast.Constant(len(target.elts)))
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            node.operand = hook("test", node.operand)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        parts: list[ast.expr] = []
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                convert = ast.Constant(chr(value.conversion) if value.conversion > 0 else "")
                spec = self.visit(value.format_spec) if value.format_spec is not None else ast.Constant("")
                parts.append(ast.Tuple([self.visit(value.value), convert, spec], ast.Load()))
            else:
                parts.append(value)
        return hook("string", *parts)


def compiled_with_hooks(
    tree: ast.FunctionDef, kind: type[Instrument], original: types.CodeType
) -> tuple[types.CodeType, str]:
    """The code that defines the instrumented function, and its name there."""
    instrument = kind(local_names(tree))
    strip_signature(tree)
    instrument.visit_body(tree)
    code = ast.fix_missing_locations(ast.Module([tree], []))
    filename = f"<traced {original.co_firstlineno} {original.co_filename}>"
    return compile(code, filename, "exec"), tree.name


def require_a_name(owner: Any, name: str) -> None:
    """Refuse an attribute that source cannot spell, but for what a module has registered, which is looked up by key.

    ``getattr(self, config.name)`` may ask for anything, and generated source must not have it as code.
    """
    if name.isidentifier() and not keyword.iskeyword(name):
        return
    registries = ("_parameters", "_buffers", "_modules") if isinstance(owner, nn.Module) else ()
    if all(vars(owner)[registry].get(name) is None for registry in registries):
        raise Refusal(Reason.READS_STATE, f"an attribute called {name!r}")


def present_statement() -> tuple[str, int] | None:
    """The statement of instrumented code that runs, for :func:`shown_statement`."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<traced "):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def shown_statement(statement: tuple[str, int] | None) -> str:
    """The file, the line and the source of a statement, after " at "; nothing if they are not known."""
    match = re.fullmatch(r"<traced (\d+) (.*)>", statement[0]) if statement is not None else None
    if statement is None or match is None:
        return ""
    line, file = int(match.group(1)) + statement[1] - 1, match.group(2)
    source = linecache.getline(file, line).strip()
    return f" at {os.path.basename(file)}:{line}{source and f': {source}'}"


def statement_at_fault() -> str:
    """The file, the line and the source of the statement of instrumented code that runs, after " at "; else nothing."""
    return shown_statement(present_statement())


def local_names(tree: ast.AST) -> set[str]:
    """The variables of a function, its parameters, nested functions and imports among them."""
    found = names_in(tree, ast.Store, ast.Del)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.FunctionDef) and node is not tree:
            found.add(node.name)
    return found


def names_in(tree: ast.AST, *contexts: type[ast.expr_context]) -> set[str]:
    """The variables that code names: to load, to store or to delete them, or in any way."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return {node.id for node in found if not contexts or isinstance(node.ctx, contexts)}


def tested_by_identity(tree: ast.AST) -> list[str]:
    """The variables that are compared with ``is``, such as with None."""
    compared = (node for node in ast.walk(tree) if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name))
    names = (node.left.id for node in compared if isinstance(node.ops[0], ast.Is | ast.IsNot))  # type: ignore[attr-defined]
    return list(dict.fromkeys(names))


def optional_parameters(forward: types.FunctionType) -> list[str]:
    """Parameters that default to None and are compared with None, so that a tensor needs a recording of its own."""
    defaults = {p.name for p in inspect.signature(forward).parameters.values() if p.default is None}
    return [name for name in tested_by_identity(parse(forward)) if name in defaults]


class Concrete(Instrument):
    """The instrumentation for a run on fake tensors: what only a proxy cannot do is allowed, and so is everything in a
    branch that is not taken."""

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.While | ast.With):
            return ast.NodeTransformer.visit(self, node)
        if isinstance(node, ast.Try) and not node.finalbody:  # An error ends the run: what a handler does is not seen.
            body = ast.Module([*node.body, *node.orelse], [])
            ast.NodeTransformer.generic_visit(self, body)
            return body.body
        try:
            return super().visit(node)
        except Refusal as refusal:
            if not isinstance(node, ast.stmt):
                raise
            return ast.Expr(hook("refuse", ast.Constant(refusal.reason.name), ast.Constant(refusal.detail)))

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        node.left, node.right = (hook("operand", part, operator_of(node)) for part in (node.left, node.right))
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        super().visit_UnaryOp(node)
        if not isinstance(node.op, ast.Not):
            node.operand = hook("operand", node.operand, operator_of(node))
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        found = super().visit_Compare(node)
        if found is node:
            node.left = hook("operand", node.left, operator_of(node))
            node.comparators = [hook("operand", part, operator_of(node)) for part in node.comparators]
        return found

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        if isinstance(node.ctx, ast.Load):
            return super().visit_Subscript(node)
        node.value, node.slice = hook("local", self.visit(node.value)), self.visit(node.slice)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.ctx, ast.Load):
            return super().visit_Attribute(node)
        node.value = hook("made", self.visit(node.value))
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        if isinstance(node.target, ast.Name):
            return super().visit_AugAssign(node)
        node.target, node.value = self.visit(node.target), self.visit(node.value)
        return node


def operator_of(node: ast.BinOp | ast.UnaryOp | ast.Compare) -> ast.expr:
    return ast.Constant(type(node.ops[0] if isinstance(node, ast.Compare) else node.op).__name__)
