"""Source code as a syntax tree, its instrumentation, and a run of the instrumented source."""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import importlib.util
import inspect
import itertools
import keyword
import linecache
import operator
import os
import re
import sys
import textwrap
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from fastlayers.patching.capture.lookups import PARTS, member, parts_of, same
from fastlayers.patching.capture.recording import binder
from fastlayers.patching.reasons import Reason, Refusal

__all__ = [
    "CALL_BACK",
    "INPLACE",
    "OPERATORS",
    "TRUSTED",
    "Instrument",
    "Run",
    "containers_in",
    "contents",
    "functions_in",
    "hook",
    "is_ours",
    "lines_of",
    "local_names",
    "names_in",
    "optional_parameters",
    "outside",
    "parse",
    "present_statement",
    "require_a_name",
    "same_items",
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


#: Packages whose functions are called as they are: what they do follows from their arguments and torch's global state.
TRUSTED = frozenset({"torch", "fastlayers", "einops", "math", "_operator"})
#: The folders of the code that patches and captures models.
ROOMS = tuple(os.path.join(__file__.rpartition("patching")[0], room, "") for room in ("patching", "graphs"))
#: Built-in functions that call their first argument.
CALL_BACK = frozenset({map, filter, functools.reduce})


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


def unchanged(value: Any) -> Any:
    return value


_instrumented: WeakKeyDictionary[
    types.FunctionType, dict[tuple[type[Instrument], types.CodeType], tuple[types.CodeType, str]]
] = WeakKeyDictionary()


def containers_in(value: Any) -> Iterator[Any]:
    """The lists and dicts of a nested value."""
    if isinstance(value, list | dict):
        yield value
    if isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from containers_in(item)


def contents(container: Any) -> list[Any]:
    """What a list or a dict holds, for a comparison by identity."""
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def same_items(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))


def outside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what a forward calls, or look up what it looks up: an error in here is one of the forward."""
    return function(*args, **kwargs)


def is_ours(error: Exception) -> bool:
    """Whether code of ours raised an error in a run, which is no refusal, and not the forward and what it calls."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    ours = frame.f_code.co_filename.startswith(ROOMS) and frame.f_code is not outside.__code__
    return ours and not isinstance(error, Refusal | NotImplementedError)  # torch.fx asks a tracer for the latter.


R = TypeVar("R", bound="Run")


class Run:
    """One run of instrumented source, which calls the ``hook_`` methods. Subclasses define what each step means.

    Args:
        module: the module whose forward runs.
        tests: gets the tests under which the run would be the same.
        namespace: gets the objects that these name.
        max_depth: functions that call functions are followed this deep.
    """

    #: How the source is instrumented.
    instrument: type[Instrument] = Instrument

    def __init__(self, module: nn.Module, tests: dict[str, None], namespace: dict[str, Any], max_depth: int) -> None:
        self.root = module
        self.tests = tests
        self.bind = binder(namespace, reuse=True)
        self.max_depth = max_depth
        self.depth = 0
        self.frames: list[tuple[types.FunctionType, Any]] = []
        #: The lambdas and nested functions of the source, which are instrumented with it and are called as they are.
        self.lambdas: list[Callable[..., Any]] = []
        #: Objects that the source has made, such as ``nn.ReLU()``.
        self.made: list[Any] = []
        #: What was read and could be changed: how to call it, the value, and the copy that the source got.
        self.lent: list[tuple[str, Any, Any]] = []
        hooks = [name for name in dir(self) if name.startswith("hook_")]
        self.scope: dict[str, Any] = {f"__trace_{name.removeprefix('hook_')}": getattr(self, name) for name in hooks}

    def __enter__(self: R) -> R:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of everything. The run and its hooks refer to each other: its modules and tensors would live on."""
        vars(self).clear()

    def is_made(self, value: Any) -> bool:
        return any(value is made for made in self.made)

    def test(self, *tests: str) -> None:
        self.tests.update(dict.fromkeys(tests))

    def default(self, value: Any, what: str) -> Any:
        """What a function gets for a default."""
        raise NotImplementedError

    def global_variable(self, function: types.FunctionType, name: str) -> Any:
        raise NotImplementedError

    def closure_variable(self, cell: types.CellType, name: str) -> Any:
        raise NotImplementedError

    def parsed(self, function: types.FunctionType) -> ast.FunctionDef:
        return parse(function)

    def code(self, function: types.FunctionType) -> tuple[types.CodeType, str]:
        """The instrumented code of a function, and its name there."""
        known = _instrumented.setdefault(function, {})
        key = self.instrument, function.__code__
        if key not in known:
            known[key] = compiled_with_hooks(self.parsed(function), self.instrument, function.__code__)
        return known[key]

    def follow(self, function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the instrumented source of a Python function."""
        if self.depth >= self.max_depth:
            raise Refusal(Reason.UNKNOWN_CALL, f"{function.__qualname__}: calls are nested too deeply")
        for part, held in zip(PARTS, parts_of(function), strict=True):
            if held is not None:
                self.test(same(f"{self.named(function)}.{part}", held, self.bind))
        bound = inspect.signature(function, follow_wrapped=False).bind(*args, **kwargs)
        given = set(bound.arguments)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if name not in given:
                bound.arguments[name] = self.default(value, f"the default {name} of {function.__qualname__}")
        code, name = self.code(function)
        scope = dict(self.scope)
        exec(code, scope)
        self.depth += 1
        self.frames.append((function, args[0] if args else None))
        try:
            return scope[name](*bound.args, **bound.kwargs)
        finally:
            self.frames.pop()
            self.depth -= 1

    def read(self, expression: str, value: Any) -> Any:
        """Write a read down, and return what the source gets."""
        raise NotImplementedError

    def class_attribute(self, owner: type, name: str) -> Any:
        value = outside(getattr, owner, name)
        if getattr(value, "__self__", None) is owner:  # A function is made a method each time.
            self.test(f"{member(owner, name, self.bind)} == {self.bind(value, name)}")
            return value
        if isinstance(value, types.FunctionType) or owner.__module__.split(".")[0] not in ("builtins", *TRUSTED):
            return self.read(member(owner, name, self.bind), value)
        return value

    def function_attribute(self, function: types.FunctionType, name: str) -> Any:
        if name not in function.__dict__:
            return outside(getattr, function, name)
        return self.read(f"{self.named(function)}.{name}", function.__dict__[name])

    def named(self, function: types.FunctionType) -> str:
        return self.bind(function, re.sub(r"\W+", "_", function.__qualname__))

    def read_property(self, static: property, origin: str, owner: Any, name: str) -> Any:
        self.test(same(f"type({origin}).{name}", static, self.bind))
        return self.follow(static.fget, (owner,), {})  # type: ignore[arg-type]

    def check_lent(self) -> None:
        for what, before, lent in self.lent:
            if before != lent:
                raise Refusal(Reason.CHANGES_STATE, f"changes {what}")

    def check_result(self, result: Any) -> None:
        """A list that was read or given would be another one in each call."""
        if any(value is lent for value in containers_in(result) for _, _, lent in self.lent):
            raise Refusal(Reason.READS_STATE, "it returns a list or a dict that it has not made")

    def hook_name(self, name: str) -> Any:
        function, _ = self.frames[-1]
        if name in function.__code__.co_freevars:
            cells = function.__closure__ or ()
            return self.closure_variable(cells[function.__code__.co_freevars.index(name)], name)
        if name in function.__globals__:
            return self.global_variable(function, name)
        if hasattr(builtins, name):
            self.test(f"{name!r} not in {self.bind(function.__globals__, 'globals')}")
            return getattr(builtins, name)
        raise Refusal(Reason.TRACE_FAILED, f"the name {name} is not defined")

    def hook_module(self, name: str) -> types.ModuleType:
        """A module that the source imports, which must have been imported before."""
        scope = self.frames[-1][0].__globals__
        module = sys.modules.get(importlib.util.resolve_name(name, scope.get("__package__")))
        if module is None:
            raise Refusal(Reason.SYNTAX, f"imports {name}, which is not loaded")
        return module

    def hook_lambda(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A lambda or a nested function. Whoever calls it, its globals are those of the function that it is in."""
        frame = self.frames[-1]

        def inside(*args: Any, **kwargs: Any) -> Any:
            self.frames.append(frame)
            try:
                return outside(function, *args, **kwargs)
            finally:
                self.frames.pop()

        self.lambdas.append(inside)
        return inside

    def hook_call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A call. Subclasses say what other calls do."""
        if function is functools.partial:
            return functools.partial(self.hook_call, *args, **kwargs)
        if function is functools.wraps:  # what it adds to a function changes no call
            return functools.partial(self.hook_call, unchanged)
        if function is unchanged:
            return args[0]
        partial = type(function) is functools.partial and function.func == self.hook_call
        if partial or any(function is known for known in self.lambdas):
            return outside(function, *args, **kwargs)
        return self.call(function, *args, **kwargs)

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def called_back(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a built-in function. A function that it calls is followed as if the source called it."""

        def instead(place: int | str, value: Any) -> Any:
            is_called = place == "key" or (place == 0 and function in CALL_BACK)
            if is_called and isinstance(value, types.FunctionType | types.MethodType | nn.Module):
                return functools.partial(self.hook_call, value)
            if isinstance(value, types.FunctionType | types.MethodType):
                raise Refusal(Reason.UNKNOWN_CALL, f"{function.__name__} with a function")
            return value

        return tuple(map(instead, itertools.count(), args)), {key: instead(key, value) for key, value in kwargs.items()}

    def hook_parent(self) -> Any:
        """What ``super()`` gives in a method."""
        function, owner = self.frames[-1]
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if "__class__" not in cells:
            raise Refusal(Reason.SYNTAX, "super() outside of a method")
        return super(cells["__class__"].cell_contents, owner)

    def hook_inplace(self, op: str, target: Any, value: Any) -> Any:
        return outside(INPLACE[op], target, value)


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
