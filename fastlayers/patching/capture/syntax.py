"""Source code as a syntax tree, and its instrumentation for the trace."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import operator
import textwrap
import types
from collections.abc import Callable
from typing import Any

from fastlayers.patching.reasons import Reason, Refusal

__all__ = [
    "HOOKS",
    "INPLACE",
    "Instrument",
    "hook",
    "local_names",
    "optional_parameters",
    "parent",
    "parse",
    "strip_signature",
]


def parse(function: types.FunctionType, *, decorated: bool = False) -> ast.FunctionDef:
    """The syntax tree of a function that can be followed.

    Args:
        decorated: whether to accept any decorator, since the function is the one inside of them.

    Raises:
        Refusal: the source is not available, has changed, or the function has an unknown decorator.
    """
    if hasattr(function, "__wrapped__"):
        raise Refusal(Reason.DECORATED, function.__qualname__)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
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


def strip_signature(tree: ast.FunctionDef) -> None:
    """Remove decorators and annotations from a function, and replace the default of each parameter by None."""
    tree.decorator_list, tree.returns = [], None
    tree.args.defaults = [ast.Constant(None) for _ in tree.args.defaults]
    tree.args.kw_defaults = [ast.Constant(None) if d is not None else None for d in tree.args.kw_defaults]
    for arg in ast.walk(tree.args):
        if isinstance(arg, ast.arg):
            arg.annotation = None


def is_compiled_from_file(function: types.FunctionType) -> bool:
    """Whether a function has the code that its source compiles to, so its decorators returned it unchanged."""
    source = "".join(linecache.getlines(function.__code__.co_filename, function.__globals__))
    return function.__code__ in compiled(source)


@functools.lru_cache(maxsize=16)
def compiled(source: str) -> frozenset[types.CodeType]:
    """The code of every function in a file."""
    pending, found = [compile(source, "", "exec", dont_inherit=True)], set[types.CodeType]()
    while pending:
        inner = [const for const in pending.pop().co_consts if isinstance(const, types.CodeType)]
        found.update(inner)
        pending += inner
    return frozenset(found)


REFUSED_SYNTAX: dict[type[ast.AST], tuple[Reason, str]] = {
    ast.With: (Reason.CONTEXT_MANAGER, "with"),
    ast.AsyncWith: (Reason.CONTEXT_MANAGER, "async with"),
    ast.Global: (Reason.CHANGES_STATE, "global"),
    ast.Nonlocal: (Reason.CHANGES_STATE, "nonlocal"),
    ast.Try: (Reason.SYNTAX, "try"),
    ast.While: (Reason.SYNTAX, "while"),
    ast.Lambda: (Reason.SYNTAX, "lambda"),
    ast.FunctionDef: (Reason.SYNTAX, "a nested function"),
    ast.AsyncFunctionDef: (Reason.SYNTAX, "a nested function"),
    ast.ClassDef: (Reason.SYNTAX, "a nested class"),
    ast.Import: (Reason.SYNTAX, "import"),
    ast.ImportFrom: (Reason.SYNTAX, "import"),
    ast.Yield: (Reason.SYNTAX, "yield"),
    ast.YieldFrom: (Reason.SYNTAX, "yield"),
    ast.Await: (Reason.SYNTAX, "await"),
    ast.Match: (Reason.SYNTAX, "match"),
    ast.Delete: (Reason.SYNTAX, "del"),
}


HOOKS = (
    "attribute",
    "call",
    "same",
    "contains",
    "inplace",
    "unpack",
    "container",
    "test",
    "string",
    "name",
    "parent",
    "mark",
)


#: The functions of augmented assignments, by the names that :mod:`ast` gives their operators.
INPLACE: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.iadd, "Sub": operator.isub, "Mult": operator.imul, "Div": operator.itruediv,
    "FloorDiv": operator.ifloordiv, "Mod": operator.imod, "Pow": operator.ipow, "MatMult": operator.imatmul,
    "BitAnd": operator.iand, "BitOr": operator.ior, "BitXor": operator.ixor, "LShift": operator.ilshift,
    "RShift": operator.irshift,
}  # fmt: skip


def parent(function: types.FunctionType, owner: Any) -> Any:
    """What ``super()`` gives in a method."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if "__class__" not in cells:
        raise Refusal(Reason.SYNTAX, "super() outside of a method")
    return super(cells["__class__"].cell_contents, owner)


def hook(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(f"__trace_{name}", ast.Load()), list(args), [])


class Instrument(ast.NodeTransformer):
    """Rewrites a function so that every step that matters calls a hook of the trace."""

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
            return self.generic_visit(node)  # type: ignore[return-value]
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

    def visit_For(self, node: ast.For) -> ast.stmt:
        self.generic_visit(node)
        node.iter = hook("container", node.iter)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        self.generic_visit(node)
        node.iter = hook("container", node.iter)
        node.ifs = [hook("test", test) for test in node.ifs]
        return node

    def visit_If(self, node: ast.If | ast.IfExp | ast.Assert) -> ast.AST:
        self.generic_visit(node)
        node.test = hook("test", node.test)
        return node

    visit_IfExp = visit_If  # noqa: N815
    visit_Assert = visit_If  # noqa: N815

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        node.values = [hook("test", value) for value in node.values]
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


def local_names(tree: ast.FunctionDef) -> set[str]:
    """The variables of a function, its parameters among them."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    return names | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}


def optional_parameters(forward: types.FunctionType) -> list[str]:
    """Parameters that default to None and are compared with None, so that a tensor needs a recording of its own."""
    defaults = {p.name for p in inspect.signature(forward).parameters.values() if p.default is None}
    tested: dict[str, None] = {}
    for node in ast.walk(parse(forward)):
        if (
            isinstance(node, ast.Compare)
            and isinstance(node.left, ast.Name)
            and isinstance(node.ops[0], ast.Is | ast.IsNot)
        ):
            tested[node.left.id] = None
    return [name for name in tested if name in defaults]
