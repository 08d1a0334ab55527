"""Segments of forwards that cannot be recorded as a whole, and the functions that these call.

A layer of a language model takes ``**kwargs``, passes a cache on and branches on its arguments, yet most of its
statements are ordinary. Its forward is compiled again from its own source, with the globals of its own module and three
kinds of changes:

* Consecutive statements that can be recorded are a segment. It is rewritten like a forward: its parameters are the
  variables that it reads, and its results those that are read later. If its guards do not hold, the original statements
  run, which follow in an ``else``.
* The name of a global function with such segments, or of a known rotary function, is bound to a fused one. If the
  global is replaced later, the new function is called.
* The adapter of a library may change more, such as the attention masks of transformers.

The rest of the source stays as it is.
"""

from __future__ import annotations

import ast
import copy
import inspect
import sys
import textwrap
import types
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fastlayers.patching.capture.rebuild import arguments_source, execute_shown, rebuild, refuse_private_names
from fastlayers.patching.capture.recording import Segment, binder
from fastlayers.patching.capture.syntax import Instrument, local_names, names_in, parse, tested_by_identity
from fastlayers.patching.capture.trace import record_segment
from fastlayers.patching.ir.known_functions import fused_rotary, is_rotary
from fastlayers.patching.libraries.adapters import adapters, decorated, plain_forward
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.rewrite.classes import check_subclassing, generated_class, steps_aside
from fastlayers.patching.rewrite.engine import Fused, apply_rules
from fastlayers.patching.rewrite.generate import GUARD_BUILTINS, body_source, guards_source
from fastlayers.patching.rules import graph_rules, idle_tests
from fastlayers.patching.runtime.checks import check_defaults, original_class

__all__ = ["fuse_segments"]

#: The variable for the value that a function returns.
RESULT = "_fastlayers_result"
#: The variables for the original class, for the forward that it had, and for what compares that with another one.
ORIGINAL, STOCK, CHECK = "_fastlayers_original", "_fastlayers_stock", "_fastlayers_check_defaults"
#: The variable for one side of a sum.
PART = "_fastlayers_part"
#: What a statement that is recorded must not have in it.
UNFIT = (
    ast.Return, ast.Break, ast.Continue, ast.NamedExpr, ast.Delete, ast.FunctionDef, ast.Import, ast.ImportFrom,
)  # fmt: skip
#: Functions that call functions are followed this deep.
MAX_DEPTH = 3


@dataclass
class Piece:
    """One rewritten segment: the statements from ``first`` to before ``last``, as the source of two functions."""

    first: int
    last: int
    reads: tuple[str, ...]
    written: tuple[str, ...]
    guards: str
    body: str
    namespace: dict[str, Any]
    outcome: Fused


@dataclass
class Rewritten:
    """A rewritten function.

    Attributes:
        tree: its syntax.
        bound: the objects that its source names in addition to the globals of its module.
        helpers: the source of the functions that were generated for its segments.
        objects: all other objects that its source and the helpers name.
        rules: the number of fused places by rule.
        left: refusals of what looked fusable.
        absorbed: paths of children whose work its segments do without calling them.
    """

    tree: ast.FunctionDef
    bound: dict[str, Any] = field(default_factory=dict)
    helpers: list[str] = field(default_factory=list)
    objects: list[tuple[str, Any]] = field(default_factory=list)
    rules: Counter[str] = field(default_factory=Counter)
    left: list[Refusal] = field(default_factory=list)
    absorbed: frozenset[str] = frozenset()


def fuse_segments(
    module: nn.Module, excluded: frozenset[str], known: dict[Any, Any], *, recorded: bool = False
) -> Fused | None:
    """The class for a module whose forward cannot be recorded; None if nothing in it can be fused.

    Args:
        module: it is not changed.
        excluded: paths of children that no fusion may absorb.
        known: the classes and functions generated so far.
        recorded: whether the forward was recorded and has nothing to fuse itself: only the functions that it calls are
            rewritten then.
    """
    original = original_class(module)
    forward = plain_forward(original)
    if type(module) is not original or not rebuildable(forward):
        return None
    try:
        check_subclassing(original)
        unwrapped = forward is not original.forward
        rewritten = rewrite(forward, module, excluded, known, cut=not recorded, unwrapped=unwrapped)
        if rewritten is None:
            return None
        defer_to_stock(rewritten, forward, original)
        source = "\n".join([*rewritten.helpers, ast.unparse(rewritten.tree)])
        key = ("segments", original, source, *((name, id(value)) for name, value in rewritten.objects))
        if key not in known:
            made, _ = rebuild(forward, rewritten.tree, rewritten.bound)
            members = {"forward": decorated(original, made), "__fastlayers_source__": source}
            known[key] = generated_class(f"Fused{original.__name__}", original, members)
    except Refusal:
        return None
    return Fused(known[key], rewritten.rules, left=rewritten.left, absorbed=rewritten.absorbed)


def defer_to_stock(rewritten: Rewritten, forward: types.FunctionType, original: type[nn.Module]) -> None:
    """Let a rewritten forward begin with a call of the forward of the original class: if that is replaced, in a trace
    or a mode, and where the rewritten one gains nothing."""
    arguments = ", ".join(arguments_source(inspect.signature(forward).parameters.values()))
    aside = steps_aside(forward, idle_tests(rewritten.rules), binder(rewritten.bound))
    itself = next(iter(inspect.signature(forward).parameters))
    source = (
        f"if not hasattr({itself}, '__fastlayers_original__')"  # It is not patched any more, and a wrapper calls this.
        f" or {aside} or {ORIGINAL}.forward is not {STOCK}:\n"
        f"    {CHECK}({STOCK}, {ORIGINAL}.forward)\n"
        f"    return {ORIGINAL}.forward({arguments})"
    )
    rewritten.tree.body[:0] = ast.parse(source).body
    rewritten.bound |= {ORIGINAL: original, STOCK: original.forward, CHECK: check_defaults}


def rebuildable(function: Any) -> bool:
    """Whether compiling a function again from its source gives the same function."""
    if not isinstance(function, types.FunctionType) or function.__closure__ or hasattr(function, "__wrapped__"):
        return False
    package = (function.__module__ or "").split(".")[0]
    return package not in ("torch", "fastlayers") and package not in sys.stdlib_module_names


def rewrite(
    function: types.FunctionType,
    module: nn.Module | None,
    excluded: frozenset[str],
    known: dict[Any, Any],
    depth: int = 0,
    cut: bool = True,
    unwrapped: bool = False,
) -> Rewritten | None:
    """Rewrite a forward, or a function without a module; None if nothing was fused. ``unwrapped``: it is what a
    library's decorators were taken from."""
    tree = parse(function, decorated=unwrapped)
    tree.decorator_list = []
    refuse_private_names(tree)
    rewritten = Rewritten(tree)
    names = replaced_names(function, tree, module, known, depth)
    if cut:
        Cutter(function, tree, module, excluded, frozenset(names)).replace(rewritten)
    if module is not None:
        for adapter in adapters():
            rules, bound = adapter.rewrite_method(module, tree, function)
            rewritten.bound |= bound
            rewritten.rules += rules
    for name, (stand_in, rules) in names.items():
        rewritten.bound[name] = stand_in
        rewritten.objects.append((name, stand_in))
        rewritten.rules += rules
    return rewritten if rewritten.rules else None


# -- names ------------------------------------------------------------------------------------------------------------


def replaced_names(
    function: types.FunctionType, tree: ast.FunctionDef, module: nn.Module | None, known: dict[Any, Any], depth: int
) -> dict[str, tuple[Any, Counter[str]]]:
    """The fused functions for the global functions that a function calls, by name."""
    scope, inner = function.__globals__, local_names(tree)
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    if module is not None:
        handed = frozenset[str]().union(*(adapter.called_functions(module) for adapter in adapters()))
        called |= names_in(tree) & handed
    found: dict[str, tuple[Any, Counter[str]]] = {}
    for name in sorted(called - inner):
        original: Any = scope.get(name)
        if not rebuildable(original) or depth >= MAX_DEPTH:
            continue
        key = ("function", name, id(scope), original, original.__code__)
        if key not in known:
            known[key] = None  # for a function that calls itself
            known[key] = fused_function(scope, name, original, known, depth)
        if known[key] is not None:
            found[name] = known[key]
    return found


def fused_function(
    scope: dict[str, Any], name: str, original: types.FunctionType, known: dict[Any, Any], depth: int
) -> tuple[Any, Counter[str]] | None:
    if is_rotary(original):
        return fused_rotary(scope, name, original), Counter({"rotary": 1})
    try:
        rewritten = rewrite(original, None, frozenset(), known, depth + 1)
        if rewritten is None:
            return None
        fused, _ = rebuild(original, rewritten.tree, rewritten.bound)
    except Refusal:
        return None

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        present = scope[name]
        return (fused if present is original else present)(*args, **kwargs)

    return stand_in, rewritten.rules


# -- segments --------------------------------------------------------------------------------------------------------


@dataclass
class Cutter:
    """Finds the segments of a function with something to fuse, and replaces them."""

    function: types.FunctionType
    tree: ast.FunctionDef
    module: nn.Module | None
    excluded: frozenset[str]
    closed: frozenset[str]

    def __post_init__(self) -> None:
        self.root = self.module if self.module is not None else nn.Module()
        *_, last = self.tree.body
        if isinstance(last, ast.Return) and last.value is not None:  # A segment can end with the assignment.
            self.tree.body[-1:] = [
                ast.copy_location(ast.Assign([ast.Name(RESULT, ast.Store())], last.value), last),
                ast.copy_location(ast.Return(ast.Name(RESULT, ast.Load())), last),
            ]
        self.tree.body[:] = [part for statement in self.tree.body for part in split_off_call(statement)]
        self.body = self.tree.body
        arguments = self.tree.args
        everything = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
        self.parameters = [arg.arg for arg in everything if arg is not None]
        self.itself = self.parameters[0] if self.module is not None else None
        self.locals = local_names(self.tree)
        self.reads, self.stores, self.sets = zip(*map(self.variables, self.body), strict=True)
        self.defined: list[frozenset[str]] = [frozenset(self.parameters)]  # before each statement, on every path
        for statement, sets in zip(self.body, self.sets, strict=True):
            self.defined.append((self.defined[-1] | sets) - names_in(statement, ast.Del))
        self.instrumented = list(map(self.instrument, range(len(self.body))))

    def variables(self, node: ast.AST) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
        """The variables that code reads before it sets them, those that it may set, and those that it always sets."""
        if isinstance(node, ast.If | ast.For | ast.With):
            return self.variables_of_block(node)
        own: list[ast.AST] = [inner.target for inner in ast.walk(node) if isinstance(inner, ast.comprehension)]
        own += [inner.args for inner in ast.walk(node) if isinstance(inner, ast.Lambda)]
        variables = self.locals.difference(*map(local_names, own))
        reads, stores = names_in(node, ast.Load) & variables, names_in(node, ast.Store) & variables
        if isinstance(node, ast.AugAssign):
            reads |= stores
        simple = isinstance(node, ast.Assign | ast.AugAssign) or (isinstance(node, ast.AnnAssign) and node.value)
        return frozenset(reads), frozenset(stores), frozenset(stores if simple else ())

    def variables_of_block(
        self, node: ast.If | ast.For | ast.With
    ) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
        if isinstance(node, ast.If):
            heads: list[ast.AST] = [node.test]
            branches = [node.body, node.orelse]
        elif isinstance(node, ast.For):
            heads, branches = [node.iter, node.target], [node.body, node.orelse]
        else:
            heads, branches = [*node.items], [node.body]
        reads, stores, certain = frozenset[str](), frozenset[str](), []
        for head in heads:
            read, stored, _ = self.variables(head)
            reads, stores = reads | read, stores | stored
        given = stores  # the target of a loop, or of a context manager
        for branch in branches:
            done = given
            for statement in branch:
                read, stored, sets = self.variables(statement)
                reads, stores, done = reads | (read - done), stores | stored, done | sets
            certain.append(done)
        return reads, stores, frozenset() if isinstance(node, ast.For) else frozenset.intersection(*certain)

    def instrument(self, i: int) -> ast.stmt | None:
        """A statement, instrumented; None if it cannot be recorded."""
        statement = self.body[i]
        if any(isinstance(node, UNFIT) for node in ast.walk(statement)) or not self.reads[i] <= self.defined[i]:
            return None
        if names_in(statement) & {"super", "locals"} or self.itself in self.stores[i]:
            return None
        try:
            return ast.fix_missing_locations(Instrument(self.locals).visit(copy.deepcopy(statement)))
        except Refusal:
            return None

    def replace(self, rewritten: Rewritten) -> None:
        """Replace statements by fused segments, in the cut with the most fused places."""
        # Parameters that are compared with None and never set.
        tested = frozenset(self.parameters).intersection(tested_by_identity(self.tree)).difference(*self.stores)
        options = [(frozenset[str](), frozenset[str]())]
        if tested:
            options += [(tested, frozenset[str]()), (frozenset[str](), tested)]
        cuts = [self.cut(*option) for option in options]
        best = max(range(len(cuts)), key=lambda i: (size(cuts[i]), -i))
        variants = [[piece] for piece in cuts[best]]
        if best:  # These segments have a second variant, for the other values of the parameters.
            for pieces in variants:
                other = self.piece(pieces[0].first, pieces[0].last, *options[3 - best])
                if isinstance(other, Piece) and (other.guards, other.body) != (pieces[0].guards, pieces[0].body):
                    pieces.append(other)
        for pieces in reversed(variants):
            self.emit(pieces, rewritten)
        for i in reversed(range(len(self.body))):  # Free the memory of a part after its use.
            if PART in names_in(self.body[i], ast.Load):
                self.body.insert(i + 1, ast.Assign([ast.Name(PART, ast.Store())], ast.Constant(None)))
        ast.fix_missing_locations(self.tree)

    def cut(self, absent: frozenset[str], tensors: frozenset[str]) -> list[Piece]:
        pieces = []
        first = 0
        while first < len(self.body):
            last = first
            while last < len(self.body) and self.instrumented[last] is not None:
                last += 1
            piece = self.piece(first, last, absent, tensors) if last > first else 0
            if isinstance(piece, int) and 0 < piece < last - first:
                last = first + piece
                piece = self.piece(first, last, absent, tensors)
            if isinstance(piece, Piece):
                pieces.append(piece)
            first = last if not isinstance(piece, int) else max(first + 1, last if piece else first)
        return pieces

    def piece(self, first: int, last: int, absent: frozenset[str], tensors: frozenset[str]) -> Piece | int | None:
        """A segment with something fused; None if nothing is; or the number of the statement at fault."""
        reads: dict[str, None] = {}
        inside: set[str] = set()
        for i in range(first, last):
            reads.update(dict.fromkeys(sorted(self.reads[i] - inside)))
            inside |= self.sets[i]
        after = frozenset[str]().union(*self.reads[last:])
        writes = sorted(frozenset[str]().union(*self.stores[first:last]) & after)
        scope = self.function.__globals__
        segment = Segment(
            self.function,
            [statement for statement in self.instrumented[first:last] if statement is not None],
            tuple(reads),
            tuple(writes),
            self.itself,
            absent & frozenset(reads),
            tensors & frozenset(reads),
            frozenset(scope[name] for name in self.closed),
        )
        found = record_segment(self.root, segment)
        if isinstance(found, int):
            return found
        recording, written = found
        try:
            outcome = apply_rules(recording, self.root, self.excluded, graph_rules())
            if not outcome.rules:
                return None
            body, guards = body_source(recording, self.root), guards_source(recording, "return")
        except Refusal:
            return None
        taken = set(recording.namespace) | GUARD_BUILTINS | ({"self"} if self.itself != "self" else set())
        if reads.keys() & taken:
            return None
        return Piece(first, last, tuple(reads), written, guards, body, recording.namespace, outcome)

    def emit(self, pieces: list[Piece], rewritten: Rewritten) -> None:
        """``if HOLDS(...): a, b = FUSED(...)`` for each variant of a segment, and ``else:`` its statements."""
        first, last = pieces[0].first, pieces[0].last
        statements = self.body[first:last]
        for piece in reversed(pieces):
            given = ["self" if name == self.itself else name for name in piece.reads]
            holds, fused = (f"_fastlayers_{kind}_{len(rewritten.helpers)}" for kind in ("holds", "fused"))
            source = (
                f"def {holds}({', '.join(given)}):\n{textwrap.indent(piece.guards, ' ' * 4)}\n\n"
                f"def {fused}({', '.join(given)}):\n{textwrap.indent(piece.body, ' ' * 4)}\n"
            )
            made = dict(piece.namespace)
            execute_shown(self.function.__qualname__, source, made)
            if set(made[fused].__code__.co_varnames) & (set(piece.namespace) | GUARD_BUILTINS):
                continue
            call = f"{fused}({', '.join(piece.reads)})"
            target = f"({', '.join(piece.written)},) = " if piece.written else ""
            branch = ast.parse(f"if {holds}({', '.join(piece.reads)}):\n    {target}{call}").body[0]
            assert isinstance(branch, ast.If)
            branch.orelse = statements
            statements = [branch]
            rewritten.helpers.append(source)
            rewritten.objects += sorted(piece.namespace.items(), key=lambda item: item[0])
            rewritten.bound |= {holds: made[holds], fused: made[fused]}
        if statements[0] is self.body[first]:
            return
        rewritten.rules += pieces[0].outcome.rules
        rewritten.left += pieces[0].outcome.left
        others = ast.Module([*self.body[:first], *self.body[last:]], [])
        outside = {node.attr for node in ast.walk(others) if isinstance(node, ast.Attribute)}
        absorbed = frozenset.intersection(*(piece.outcome.absorbed for piece in pieces))
        rewritten.absorbed |= {path for path in absorbed if path.partition(".")[0] not in outside}
        self.body[first:last] = statements


def split_off_call(statement: ast.stmt) -> list[ast.stmt]:
    """``x = x + f(x, **kwargs)`` as two statements: such a call cannot be recorded, but the sum can."""
    value = getattr(statement, "value", None)
    if not isinstance(statement, ast.Assign) or not isinstance(value, ast.BinOp):
        return [statement]
    for side, other in (("left", value.right), ("right", value.left)):
        call = getattr(value, side)
        starred = isinstance(call, ast.Call) and any(keyword.arg is None for keyword in call.keywords)
        if starred and isinstance(other, ast.Name):  # The call cannot change its value.
            setattr(value, side, ast.copy_location(ast.Name(PART, ast.Load()), call))
            return [ast.copy_location(ast.Assign([ast.Name(PART, ast.Store())], call), statement), statement]
    return [statement]


def size(pieces: list[Piece]) -> tuple[int, int]:
    """The number of fused places, and of the operations that they replace."""
    return sum(piece.outcome.rules.total() for piece in pieces), sum(piece.outcome.size for piece in pieces)
