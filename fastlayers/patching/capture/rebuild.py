"""Functions compiled again from their own source, with a few names bound to other objects.

This serves forwards that cannot be recorded, such as those of attentions and of whole models, which take ``**kwargs``
and caches. A rebuilt function has the globals of its own module, and differs only where its syntax was changed.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import linecache
import textwrap
import types
import weakref
from collections.abc import Iterable
from typing import Any

from fastlayers.patching.capture.syntax import functions_in, strip_signature
from fastlayers.patching.reasons import Reason, Refusal

__all__ = ["arguments_source", "execute_shown", "innermost", "rebuild", "refuse_private_names", "rewrap"]

FACTORY = "_fastlayers_bind"

_serial = itertools.count(1)

#: How a call passes parameters, by their kind.
SPELLED: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*{}",
    inspect.Parameter.KEYWORD_ONLY: "{0}={0}",
    inspect.Parameter.VAR_KEYWORD: "**{}",
}


def arguments_source(parameters: Iterable[inspect.Parameter]) -> list[str]:
    """The arguments of a call that passes parameters on."""
    return [SPELLED.get(parameter.kind, "{}").format(parameter.name) for parameter in parameters]


def innermost(function: types.FunctionType) -> types.FunctionType:
    """The function inside of all decorators that set ``__wrapped__``."""
    while isinstance(wrapped := getattr(function, "__wrapped__", None), types.FunctionType):
        function = wrapped
    return function


def rebuild(function: types.FunctionType, tree: ast.FunctionDef, bound: dict[str, Any]) -> tuple[Any, str]:
    """Compile a function from its changed syntax tree, with names bound to values. Returns it and its source.

    Raises:
        Refusal: the function has a closure, or uses names that are private to its class.
    """
    if function.__closure__:
        raise Refusal(Reason.SYNTAX, f"{function.__qualname__} has a closure")
    refuse_private_names(tree)
    strip_signature(tree)
    ast.fix_missing_locations(tree)
    lines = [f"def {FACTORY}({', '.join(bound)}):", textwrap.indent(ast.unparse(tree), "    ")]
    source, made = "\n".join([*lines, f"    return {tree.name}"]), dict[str, Any]()
    execute_shown(function.__qualname__, source, function.__globals__, made)
    rebuilt: types.FunctionType = made[FACTORY](*bound.values())
    rebuilt.__defaults__, rebuilt.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    rebuilt.__annotations__ = dict(inspect.get_annotations(function))
    rebuilt.__doc__, rebuilt.__module__ = function.__doc__, function.__module__
    rebuilt.__qualname__ = function.__qualname__
    return rebuilt, source


def refuse_private_names(tree: ast.FunctionDef) -> None:
    """Raise for names such as ``__x``, which mean another name outside of their class."""
    words = (getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree))
    for word in words:
        if word.startswith("__") and not word.endswith("__"):
            raise Refusal(Reason.SYNTAX, f"{word}, which means another name outside of its class")


def rewrap(function: types.FunctionType, rebuilt: types.FunctionType) -> types.FunctionType:
    """Put the decorators of a function around a rebuilt one: each wrapper gets another function in its closure.

    Raises:
        Refusal: the closure of a decorator does not contain the function that it wraps.
    """
    wrapped = getattr(function, "__wrapped__", None)
    if not isinstance(wrapped, types.FunctionType):
        return rebuilt
    cells = function.__closure__ or ()
    held = [cell.cell_contents is wrapped for cell in cells]
    if sum(held) != 1:
        raise Refusal(Reason.DECORATED, function.__qualname__)
    inner = rewrap(wrapped, rebuilt)
    closure = tuple(types.CellType(inner) if its else cell for cell, its in zip(cells, held, strict=True))
    copied = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copied, function)
    copied.__wrapped__ = inner  # type: ignore[attr-defined]
    return copied


def execute_shown(name: str, source: str, scope: dict[str, Any], made: dict[str, Any] | None = None) -> None:
    """Execute generated source under a file name by which tracebacks, inspect.getsource and torch.compile find it.

    Its lines go with the last function that it has made.

    Args:
        name: what it is the source of.
        source: Python code.
        scope: its globals.
        made: where its names go, if not into ``scope``.
    """
    filename = f"<fastlayers {name} {next(_serial)}>"
    code = compile(source, filename, "exec")
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    functions = [*functions_in(code)]
    left = len(functions)

    def forget() -> None:
        nonlocal left
        left -= 1
        if not left:
            linecache.cache.pop(filename, None)

    for function in functions:
        weakref.finalize(function, forget).atexit = False
    exec(code, scope, scope if made is None else made)
